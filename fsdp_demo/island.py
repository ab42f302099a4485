"""The few words the ranks of one island say to each other about the exchange: votes, sums, and the gradient norm."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .topology import Position, Topology


class Island:
    """A control group over the ranks of this island, on the fast network; one rank alone needs none.

    In the islands topology it is a gloo group of its own, whose timeout outlasts that of the exchange, since the ranks of an
    island learn of a lost peer at different times.
    """

    def __init__(self, topology: Topology, position: Position):
        self.position = position
        self.group: Any = None
        self.copies: Any = None
        if topology.world == 1:
            return
        if topology.kind == "mesh":
            self.group = self.copies = topology.group
            return
        timeout = timedelta(seconds=topology.timeout + 60)
        self.group = dist.new_group(backend="gloo", timeout=timeout)
        if position.copies > 1 and position.shards > 1:
            for shard in range(position.shards):  # every rank makes every group, in one order
                group = dist.new_group([copy * position.shards + shard for copy in range(position.copies)])
                self.copies = group if shard == position.shard else self.copies

    def _reduce(self, values: list[float], op: Any) -> list[float]:
        if self.group is None:
            return values
        device = "cpu" if dist.get_backend(self.group) == "gloo" else "cuda"
        t = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(t, op=op, group=self.group)
        return list(t.tolist())

    def largest(self, *values: float) -> list[float]:
        """Element-wise maximum over the island's ranks."""
        return self._reduce(list(values), dist.ReduceOp.MAX)

    def total(self, *values: float) -> list[float]:
        """Element-wise sum over the island's ranks."""
        return self._reduce(list(values), dist.ReduceOp.SUM)

    def broadcast(self, work: Tensor) -> None:
        """Give the ranks with the same shard the bytes of the first of them, in place (uint8 on the CPU)."""
        if self.copies is None and self.group is None:
            return
        group = self.copies or self.group
        on_device = work if dist.get_backend(group) == "gloo" else work.cuda()
        dist.broadcast(on_device, group_src=0, group=group)
        work.copy_(on_device)

    def clip(self, gradients: list[Tensor | None], limit: float, across: Callable[[float], float] | None = None) -> float:
        """Scale local gradients in place so that their norm over all shards is at most `limit`; returns the norm before.

        `across` makes a mean over the islands of the squared norm. The same formula as `torch.nn.utils.clip_grad_norm_`: factor
        limit / (norm + 1e-6), at most 1.
        """
        present = [g for g in gradients if g is not None]
        norms = torch._foreach_norm(present, dtype=torch.float32) if present else ()
        square = float(torch.stack(norms).square().sum()) if norms else 0.0  # one operation: per tensor each costs a microsecond
        if self.position.shards > 1:
            square = self.total(square)[0] / self.position.copies
        norm = (across(square) if across is not None else square) ** 0.5
        factor = limit / (norm + 1e-6)
        if factor < 1.0 and present:
            torch._foreach_mul_(present, factor)
        return norm

    def release(self) -> None:
        """Forget the groups (they belong to torch.distributed and end with it)."""
        self.group = self.copies = None
