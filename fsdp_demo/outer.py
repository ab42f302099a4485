"""How a decoded mean acts on the anchor: the outer step of every delta channel, on workspaces of one rank."""

from __future__ import annotations

from torch import Tensor

from .blocks import Layout
from .config import Applier


def scale_(work: Tensor, layout: Layout, applier: Applier, sparse: bool) -> Tensor:
    """Multiply `work` in place by the outer rate: `lr`, and for the whole tensors of a sparse channel `dense_lr`."""
    if not sparse:
        return work.mul_(applier.lr)
    layout.blocks(work).mul_(applier.lr)
    layout.dense_part(work).mul_(applier.dense_lr)
    return work


def outer_step(anchor: Tensor, momentum: Tensor | None, mean: Tensor, mu: float, layout: Layout, applier: Applier, sparse: bool) -> None:
    """One step of SGD on the anchor, in place; `mean` (fp32, element domain, same shape) is used up.

    m = mu m + mean; anchor -= lr (mean + mu m) with nesterov, lr m without, lr mean where there is no momentum: torch.optim.SGD's form,
    as in DiLoCo (2311.08105). `mu` is the momentum of this round.
    """
    if momentum is not None:
        momentum.mul_(mu).add_(mean)
        if applier.nesterov:
            mean.add_(momentum, alpha=mu)
        else:
            mean.copy_(momentum)
    anchor.sub_(scale_(mean, layout, applier, sparse))


def local_step(anchor: Tensor, delta: Tensor, momentum: Tensor, beta: float, layout: Layout, applier: Applier, sparse: bool) -> None:
    """The released rule of 2510.03371: anchor -= lr (delta + beta momentum), with the replica's own delta, in place.

    `delta` and `momentum` (the accumulator in the element domain, mean put back) are used up.
    """
    anchor.sub_(scale_(delta.add_(momentum, alpha=beta), layout, applier, sparse))
