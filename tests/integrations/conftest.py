"""What Accelerate and the Trainer keep in a process ends with each test. Without the extra `hf`
nothing here is collected.
"""

from importlib.util import find_spec

from ..launch.conftest import run_id  # noqa: F401
from ..support.accelerate_anew import accelerate_anew  # noqa: F401

collect_ignore_glob = [] if find_spec("transformers") and find_spec("datasets") else ["test_*.py"]
