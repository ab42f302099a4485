"""What Accelerate and the Trainer keep in a process ends with each test."""

from ..support.accelerate_anew import accelerate_anew  # noqa: F401
