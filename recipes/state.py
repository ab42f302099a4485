"""What one rank keeps when its run ends early: local shards, optimizer, exchange. No collectives, so it works when peers are gone.

A regular checkpoint (for a finished model, or to change the number of ranks) is another matter: use Accelerate's `save_state`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp_demo.inner import materialise


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; a plain tensor is returned as it is. Both share memory with the argument."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def parameters(optimizer: Any) -> list[torch.Tensor]:
    """From the optimizer, not from the model: under FSDP2 the model shows unsharded parameters between forward and backward."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def save_local(folder: Path, rank: int, optimizer: Any, exchange: Any) -> None:
    """Write `folder/rank<rank>.pt` in one piece: a reader sees the old file or the new one."""
    mine = parameters(optimizer)
    content = {
        "parameters": [local(p) for p in mine],
        "optimizer": [{key: local(value) if torch.is_tensor(value) else value for key, value in optimizer.state[p].items()} for p in mine],
        "exchange": exchange.state_dict(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"rank{rank}.pt.part"
    torch.save(content, part)
    os.replace(part, folder / f"rank{rank}.pt")


def forget_local(folder: Path, rank: int) -> None:
    """After a run that came to its end: a later `--resume` must not find what an earlier part of it saved."""
    (folder / f"rank{rank}.pt").unlink(missing_ok=True)


def load_local(folder: Path, rank: int, optimizer: Any) -> dict[str, Any] | None:
    """Put this rank's shards and optimizer state back, before `attach`; None where nothing was saved (then peers send theirs)."""
    path = folder / f"rank{rank}.pt"
    if not path.exists():
        return None
    content = torch.load(path, map_location="cpu", weights_only=True)
    mine = parameters(optimizer)
    if [local(p).shape for p in mine] != [saved.shape for saved in content["parameters"]]:
        raise ValueError(f"{path} was saved by another model or number of ranks: give the same --model and ranks, or leave --resume out")
    materialise(optimizer.optimizer)
    with torch.no_grad():
        for p, saved, kept in zip(mine, content["parameters"], content["optimizer"], strict=True):
            local(p).copy_(saved)
            for key, value in kept.items():
                live = optimizer.state[p].get(key)
                if torch.is_tensor(live):
                    local(live).copy_(value)
                else:
                    optimizer.state[p][key] = value
    return content
