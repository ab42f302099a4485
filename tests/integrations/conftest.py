"""What Accelerate and the Trainer keep in a process ends with each test."""

from ..launch.conftest import run_id  # noqa: F401
from ..support.accelerate_anew import accelerate_anew  # noqa: F401
