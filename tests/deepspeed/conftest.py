"""What Accelerate and the Trainer keep in a process ends with each test; the modules of recipes/
are found. Without the extras `hf` and `deepspeed` nothing here is collected.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

from ..support.accelerate_anew import accelerate_anew  # noqa: F401

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
NEEDED = ("deepspeed", "transformers", "datasets")
collect_ignore_glob = [] if all(map(find_spec, NEEDED)) else ["test_*.py"]
