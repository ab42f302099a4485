"""Votes (`peers/votes.py`) among the ranks of a DeepSpeed engine, and the text of a message about
values in which ranks differ.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from deepspeed import comm
from deepspeed.accelerator import get_accelerator

from fsdp_demo.peers.votes import Ranks


def world() -> Ranks:
    """Votes among all ranks of the world that DeepSpeed has initialised."""
    return Ranks.everywhere(_device())


def replica(engine: Any) -> Ranks:
    """Votes among the ranks of one replica: those over which ZeRO partitions."""
    group = engine.seq_data_parallel_group
    return Ranks(group, comm.get_rank(group=group), comm.get_world_size(group=group), _device())


def local_ranks() -> int:
    """Ranks per node as the launcher says (LOCAL_WORLD_SIZE or LOCAL_SIZE); 0 if it does not."""
    text = (os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or "").strip()
    return int(text) if text.isascii() and text.isdigit() else 0


def _device() -> torch.device:
    return torch.device(get_accelerator().current_device_name())


def by_value(values: Sequence[str]) -> str:
    """The distinct values of all ranks as text, each with the ranks that have it.

    >>> by_value(["8", "8", "8", "4"])
    '8 on ranks 0-2; 4 on rank 3'
    """
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return "; ".join(
        f"{value or 'nothing'} on rank{'s' * (len(at) > 1)} {_spans(at)}"
        for value, at in ranks.items()
    )


def _spans(ranks: list[int]) -> str:
    """Example: [0, 1, 2, 5] -> '0-2, 5'."""
    # inside a span a rank and its place in the list differ by one number
    spans = groupby(enumerate(ranks), lambda placed: placed[1] - placed[0])
    each = [[rank for _, rank in span] for _, span in spans]
    return ", ".join(f"{s[0]}-{s[-1]}" if len(s) > 1 else str(s[0]) for s in each)
