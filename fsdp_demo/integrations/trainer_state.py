"""The exchange's part of a Trainer checkpoint: one file per rank, `checkpoint-N/exchange/rank<r>.pt`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from ..exchange import Exchange


def save_state(checkpoint: str, rank: int, exchange: Exchange) -> None:
    """Write this rank's `state_dict()` in one piece: a reader sees all of it or nothing. No collectives."""
    path = _path(checkpoint, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".pt.part")
    torch.save(exchange.state_dict(), part)
    os.replace(part, path)


def load_state(checkpoint: str, rank: int, fresh: bool) -> dict[str, Any] | None:
    """Read it back; None where there is none and `fresh` allows that.

    Raises:
        ValueError: the checkpoint was saved without an exchange, or by fewer ranks.
    """
    path = _path(checkpoint, rank)
    if path.exists():
        return torch.load(path, map_location="cpu", weights_only=True)
    if fresh:
        return None
    raise ValueError(
        f"the Trainer resumes from {checkpoint}, which lacks {path.parent.name}/{path.name}: it was saved without the exchange or by fewer "
        "ranks. Resume from another checkpoint, or start the exchange's state anew with ExchangeCallback(..., fresh=True)"
    )


def _path(checkpoint: str, rank: int) -> Path:
    return Path(checkpoint) / "exchange" / f"rank{rank}.pt"
