"""Muon on FSDP2 shards: each matrix is gathered once, and made orthogonal on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import _muon

from .closures import evaluated

Owners = tuple[Any, int] | None
"""The process group whose ranks hold rows of a matrix, and its size; None: the matrix is whole, or
cut in another way."""


class ShardedMuon(torch.optim.Muon):
    """`torch.optim.Muon`, with its products on whole matrices.

    torch's own run on shards as they are, which gathers and reduces ten to thirty times per matrix.
    Here the ranks gather as many matrices as they are, in bf16; each makes one orthogonal and sends
    it to the others. Where a matrix is whole, or is cut in two ways, it is done as torch does it.

    Parameters are 2-D: fp32 or bf16, whole or DTensors. Source: the products are torch's; whole
    matrices are gathered as in Distributed Muon (arXiv 2502.16982, section 2.3).
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float | Tensor] | None = None) -> Any:
        """One step; returns the closure's loss, if there is one."""
        loss = evaluated(closure)
        for group in self.param_groups:
            lr, rate = float(group["lr"]), group["adjust_lr_fn"]
            for params, owners in _runs([p for p in group["params"] if p.grad is not None]):
                moves = _orthogonal([self._direction(p, group) for p in params], owners, group)
                for p, move in zip(params, moves, strict=True):
                    p.mul_(1 - lr * group["weight_decay"])
                    p.add_(move, alpha=-_muon._adjust_lr(lr, rate, p.shape))
        return loss

    def _direction(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        """The momentum with its gradient in it, as a tensor of its own: torch divides in place."""
        state, momentum, gradient = self.state[p], group["momentum"], p.grad
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        kept: Tensor = state["momentum_buffer"]
        kept.lerp_(gradient, 1 - momentum)
        return gradient.lerp(kept, momentum) if group["nesterov"] else kept.clone()


def _runs(params: list[Tensor]) -> Iterator[tuple[list[Tensor], Owners]]:
    """Runs of parameters that are worked on together: as many as ranks hold their rows."""
    run: list[Tensor] = []
    owners: Owners = None
    for p in params:
        found = _owners(p)
        if run and (found is None or found != owners or len(run) == found[1]):
            yield run, owners
            run = []
        run, owners = [*run, p], found
    if run:
        yield run, owners


def _owners(p: Tensor) -> Owners:
    if not isinstance(p, DTensor):
        return None
    cut = [i for i, placement in enumerate(p.placements) if not placement.is_replicate()]
    if len(cut) != 1 or type(p.placements[cut[0]]) is not Shard:
        return None
    group = p.device_mesh.get_group(cut[0])
    return group, dist.get_world_size(group)


def _orthogonal(found: list[Tensor], owners: Owners, group: dict[str, Any]) -> list[Tensor]:
    """The orthogonal matrices of `found`, in bf16, sharded as these are."""

    def product(whole: Tensor) -> Tensor:
        return _muon._zeropower_via_newtonschulz(
            whole, group["ns_coefficients"], group["ns_steps"], group["eps"]
        )

    if owners is None:
        return [product(t) for t in found]
    ranks, _ = owners
    wholes = [t.bfloat16().full_tensor() for t in found]  # type: ignore[attr-defined]
    if (mine := dist.get_rank(ranks)) < len(wholes):
        wholes[mine].copy_(product(wholes[mine]))
    for i, whole in enumerate(wholes):
        dist.broadcast(whole, group_src=i, group=ranks)
    return [
        # each rank keeps its rows; None: nothing is sent for that
        distribute_tensor(whole, t.device_mesh, t.placements, src_data_rank=None)  # type: ignore[attr-defined]
        for whole, t in zip(wholes, found, strict=True)
    ]
