"""What all that starts an island knows: the launchers by name, and how the end of their ranks is
read.
"""

from __future__ import annotations

from pathlib import Path

from ..status import SAVED

ATTEMPT = "ISLAND_ATTEMPT"
"""Variable with the number of an island's start, counted from 0, where it is restarted by
`--restarts`.
"""

LAUNCHED = "ISLAND_LAUNCHED"
"""Variable with the moment at which the launch began, in seconds since the epoch."""

LAUNCHERS = {
    "accelerate": "accelerate.commands.accelerate_cli",
    "torchrun": "torch.distributed.run",
    "deepspeed": "deepspeed.launcher.runner",
}


def saved_before(folder: str | None, moment: float) -> bool:
    """Did a rank write status 75 into `folder` before `moment` (seconds since the epoch)?"""
    files = sorted(Path(folder).glob("rank*")) if folder else []
    return any(
        file.stat().st_mtime < moment and file.read_text().strip() == str(SAVED) for file in files
    )


def shell_status(code: int) -> int:
    """A process's return code as a shell shows it.

    >>> shell_status(-9)
    137
    """
    return 128 - code if code < 0 else code
