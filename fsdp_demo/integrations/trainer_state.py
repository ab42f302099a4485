"""The exchange's part of a Trainer checkpoint: one file per rank, `checkpoint-N/exchange/rank<r>.pt`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from ..exchange import Exchange
from ..topology import Topology


def save_state(checkpoint: str, rank: int, exchange: Exchange) -> None:
    """Write this rank's `state_dict()` in one piece: a reader sees all of it or nothing. No collectives."""
    topology = exchange.topology
    path = _path(checkpoint, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".pt.part")
    torch.save({"island": topology.island, "islands": topology.islands, "state": exchange.state_dict()}, part)
    os.replace(part, path)


def find_checkpoint(wanted: Any, output_dir: str, own_folder: bool) -> Any:
    """What `resume_from_checkpoint` means on this island, so that one command line serves all.

    "True", "true" and "auto" are True: the last checkpoint of this island. A path `.../checkpoint-N` is that checkpoint in this island's
    own folder, if it is there.
    """
    if not isinstance(wanted, (str, os.PathLike)):
        return wanted
    path = Path(wanted)
    if str(wanted).lower() in ("true", "auto"):
        return True
    mine = Path(output_dir) / path.name
    return str(mine) if own_folder and path.name.startswith("checkpoint-") and mine.is_dir() else str(wanted)


def load_state(checkpoint: str, rank: int, topology: Topology, fresh: bool) -> dict[str, Any] | None:
    """Read it back; None where there is none and `fresh` allows that.

    Raises:
        ValueError: the checkpoint was saved without an exchange, by fewer ranks, or by another island.
    """
    path = _path(checkpoint, rank)
    if path.exists() and not fresh:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        if topology.kind == "islands" and saved["island"] != topology.island:
            raise ValueError(
                f"{checkpoint} was saved by island {saved['island']}, this is island {topology.island}: its optimizer and exchange states "
                "are another replica's. Resume from this island's own checkpoint, or start with ExchangeCallback(..., fresh=True)"
            )
        return dict(saved["state"])
    if fresh:
        return None
    raise ValueError(
        f"the Trainer resumes from {checkpoint}, which lacks {path.parent.name}/{path.name}: it was saved without the exchange or by fewer "
        "ranks. Resume from another checkpoint, or start the exchange's state anew with ExchangeCallback(..., fresh=True)"
    )


def _path(checkpoint: str, rank: int) -> Path:
    return Path(checkpoint) / "exchange" / f"rank{rank}.pt"
