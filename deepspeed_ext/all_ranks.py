"""A roll call: what every rank of the world says, and how that reads where it should be one thing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator


def everyone(said: str) -> list[str]:
    """What every rank of the world says, in the order of the ranks. A collective, without pickles."""
    device = "cpu" if dist.get_backend() == "gloo" else get_accelerator().current_device_name()
    own = said.encode()
    length = torch.tensor([len(own)], device=device)
    lengths = [torch.empty_like(length) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, length)
    mine = torch.tensor(list(own.ljust(max(int(n) for n in lengths))), dtype=torch.uint8, device=device)
    parts = [torch.empty_like(mine) for _ in lengths]
    dist.all_gather(parts, mine)
    return [bytes(part.tolist())[: int(n)].decode() for part, n in zip(parts, lengths, strict=True)]


def told(values: Sequence[str]) -> str:
    """Who says what.

    Example:
        >>> from deepspeed_ext.all_ranks import told
        >>> told(["8", "8", "8", "4"])
        '8 on ranks 0-2; 4 on rank 3'
    """
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return "; ".join(f"{value or 'nothing'} on rank{'s' * (len(at) > 1)} {_spans(at)}" for value, at in ranks.items())


def _spans(ranks: list[int]) -> str:
    """Example: [0, 1, 2, 5] -> '0-2, 5'."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(f"{a}-{b}" if a < b else str(a) for a, b in spans)
