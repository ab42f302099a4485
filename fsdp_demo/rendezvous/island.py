"""The control group of the ranks of one island (`IslandGroup`): votes and sums (`peers/votes.py`),
and the norm of the island's gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..peers.votes import CPU, Ranks
from .position import ShardPosition
from .topology import Topology


class IslandGroup(Ranks):
    """A control group over the ranks of this island, on the fast network; one rank alone needs
    none.

    It is a gloo group, so that a vote is a matter of the host and no rank waits for its device: one
    of its own, but where the ranks of a mesh are joined by gloo already. Its timeout outlasts that
    of the exchange, since the ranks of an island learn of a lost peer at different times.

    Args:
        device: of the gradients, the same kind on all ranks.

    Attributes:
        group: the control group; None on one rank alone.
        copies: group of the ranks with the same shard, for tensors on the device.
        norm_left: of the gradients on the host that `clip` has left, 0 where they are not finite.
    """

    def __init__(self, topology: Topology, position: ShardPosition, device: torch.device = CPU):
        super().__init__(None, topology.rank, topology.world)
        self.position, self.device = position, device
        self.copies: Any = None
        self.norm_left, self._closes = 0.0, False
        # of the island, on the backend that training uses; None: the default group
        self._ranks: Any = topology.group
        if topology.world == 1:
            return
        mesh = topology.one_world
        # torch names a group of a mesh by how many there are, so a name would come twice
        self._closes = not mesh
        if mesh and dist.get_backend(topology.group) == "gloo":
            self.group = topology.group
        else:
            # In a mesh its members alone make it: the other replicas need not come at the same
            # time, but all ranks of an island must have made as many.
            ranks = dist.get_process_group_ranks(topology.group) if mesh else None
            patience = timedelta(seconds=topology.timeout + 60)
            self.group = dist.new_group(ranks, patience, "gloo", use_local_synchronization=mesh)
        if mesh:
            self.copies = topology.group
        elif position.num_copies > 1 and position.num_shards > 1:
            for shard in range(position.num_shards):  # every rank makes every group, in one order
                group = dist.new_group([*range(shard, topology.world, position.num_shards)])
                self.copies = group if shard == position.shard else self.copies

    def broadcast(self, work: Tensor) -> None:
        """Give ranks with the same shard the bytes of the first, in place (uint8 on the CPU)."""
        if self.position.num_copies == 1:
            return
        group = self.copies if self.position.num_shards > 1 else self.group
        there = work if dist.get_backend(group) == "gloo" else work.to(self.device)
        dist.broadcast(there, group_src=0, group=group)
        work.copy_(there)

    def clip(
        self,
        gradients: list[Tensor | None],
        limit: float | None,
        across: Callable[[float], float] | None = None,
        repeats: Sequence[int] = (),
    ) -> float | Tensor:
        """Scale local gradients in place so that their norm over all shards is at most `limit`
        (None: leave them), as `torch.nn.utils.clip_grad_norm_` does; say if it is finite.

        Args:
            across: makes a mean over the islands of the squared norm, on the host. Without it
                nothing is read from a device.
            repeats: how many of the shards hold the same part of each gradient (`LocalParam`);
                empty: one of each.

        Returns:
            1 if the gradients of any rank of the island hold NaN or Inf (or their norm overflows),
            else 0: a number, and the gradients are as they were; or, where they lie on a device, a
            scalar there, and the gradients are zeros then.
        """
        present = [g for g in gradients if g is not None]
        held = [n for g, n in zip(gradients, repeats, strict=False) if g is not None]
        square = self._square(present, held)
        if across is None and self._on_device():
            return self._clip_there(present, square, limit)
        value = float(square)
        if self.position.num_shards > 1:
            value = self.sum(value)[0] / self.position.num_copies
        bad = float(not math.isfinite(value))
        # equal gradients, unless something is wrong with one of them
        if self.position.num_shards == 1 and self.position.num_copies > 1:
            bad = self.max(bad)[0]
        self.norm_left = 0.0 if bad else value**0.5
        if limit is not None:
            factor = limit / ((across(value) if across is not None else value) ** 0.5 + 1e-6)
            if factor < 1.0 and present and not bad:  # saves a pass over the gradients
                torch._foreach_mul_(present, factor)
                self.norm_left *= factor
        return bad

    def not_finite(self, tensors: list[Tensor]) -> float | Tensor:
        """1 if `tensors` of any rank of the island hold NaN or Inf, else 0: a number, or a scalar
        where they lie on a device.
        """
        square = self._square(tensors)
        if not self._on_device():
            return self.max(float(not math.isfinite(float(square))))[0]
        return self._any_there(square.isfinite().logical_not().float())

    def norm(self, square: Tensor) -> float | Tensor:
        """Root of the sum of a squared norm (fp32 scalar on the device) over all ranks of the
        island: a number, the same on all; or, where it lies on a device that the island's own
        group reaches, a scalar there, which nobody has read."""
        if self.device.type != "cpu" and (self.group is None or self._reaches_device()):
            square = square.double()
            if self.group is not None:
                dist.all_reduce(square, group=self._ranks)
            return square.sqrt()
        return math.sqrt(self.sum(float(square))[0])

    def add_shards(self, values: Tensor) -> Tensor:
        """The sum of a vector (fp64 [n] on the device) over the shards of the island; it is not
        read where the island's own group reaches the device."""
        if self.position.num_shards == 1:
            return values
        if self._on_device():
            dist.all_reduce(values, group=self._ranks)
        else:
            values = torch.tensor(self.sum(*values.tolist()), dtype=torch.float64, device=CPU)
        return values / self.position.num_copies

    def _square(self, tensors: Sequence[Tensor], repeats: Sequence[int] = ()) -> Tensor:
        """Squared norm of local tensors, by their share of `repeats`: fp32 scalar on the device."""
        norms = torch._foreach_norm(list(tensors), dtype=torch.float32) if tensors else ()
        if not norms:
            return torch.zeros((), device=self.device, dtype=torch.float32)
        # buffers may lie on a GPU where masters are offloaded
        here = [n if n.device == self.device else n.to(self.device) for n in norms]
        squares = torch.stack(here).square()  # per tensor each costs a microsecond
        if any(n > 1 for n in repeats):
            # filled there, by kernels: a copy of a list from the host would wait for the backward
            held = torch.ones_like(squares)
            for i, n in enumerate(repeats):
                if n > 1:
                    held[i].fill_(n)
            squares /= held
        return squares.sum()

    def _on_device(self) -> bool:
        """Whether a norm stays on the device until the gradients are scaled: it is not the host,
        and the island's own group reduces there. The same on all ranks, whether or not they hold
        a gradient."""
        if self.device.type == "cpu":
            return False
        return self.position.num_shards == 1 or self._reaches_device()

    def _reaches_device(self) -> bool:
        return f"{self.device.type}:" in dist.get_backend_config(self._ranks)

    def _any_there(self, bad: Tensor) -> Tensor:
        if self.group is not None and self._reaches_device():
            dist.all_reduce(bad, dist.ReduceOp.MAX, group=self._ranks)
        return bad

    def _clip_there(self, present: list[Tensor], square: Tensor, limit: float | None) -> Tensor:
        """Scale by a factor that is not read, to the bits that the host would come to; by 1, which
        changes nothing, where the norm is within the limit; by 0 where it is not finite."""
        square = square.double()
        if self.position.num_shards > 1:
            dist.all_reduce(square, group=self._ranks)
            square.div_(self.position.num_copies)
        bad = square.isfinite().logical_not().float()
        if self.position.num_shards == 1:
            bad = self._any_there(bad)
        factor = torch.ones_like(square)
        if limit is not None:
            factor = (limit / (square.sqrt() + 1e-6)).clamp_(max=1.0)
        if present:
            for g in present:  # zero times NaN is NaN
                g.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            torch._foreach_mul_(present, factor.nan_to_num_(nan=0.0).float() * (1.0 - bad))
        return bad

    def release(self) -> None:
        """Close the groups made here on gloo, and forget the others, which end with torch's."""
        for group in (self.group, self.copies) if self._closes else ():
            with suppress(ValueError, AssertionError):  # torch.distributed has ended before
                if group is not None and dist.get_backend(group) == "gloo":
                    dist.destroy_process_group(group)
        self.group = self.copies = self._ranks = None
