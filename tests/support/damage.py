"""What may happen to a checkpoint on its disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fsdp_demo.checkpoint import folders
from fsdp_demo.checkpoint.files import read_part, write_part


def flip(file: Path, at: int | None = None) -> None:
    """Change one bit: of the byte in the middle, or of the one at `at`."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 1
    file.write_bytes(data)


def cut(file: Path, keep: int) -> None:
    """Leave the first bytes."""
    file.write_bytes(file.read_bytes()[:keep])


def sealed_anew(checkpoint: Path, step: int) -> None:
    """Give a checkpoint of one rank sums that fit what is in it now."""
    (checkpoint / folders.MANIFEST).unlink(missing_ok=True)
    folders.sum_up(checkpoint, 0, 1)
    folders.seal(checkpoint, step, 1)


def changed_head(checkpoint: Path, **changes: Any) -> None:
    """Write the exchange's part of a checkpoint of one rank with another head; all sums fit."""
    head, tree = read_part(checkpoint / "exchange" / "rank0.json")
    kept = {k: v for k, v in head.items() if k not in ("format", "package", "file")}
    write_part(checkpoint / "exchange", "rank0", kept | changes, tree)
    sealed_anew(checkpoint, int(head["step"]))
