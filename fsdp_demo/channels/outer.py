"""How a decoded mean acts on the anchor: the outer step of every delta channel, on stretches of workspaces of one rank."""

from __future__ import annotations

from torch import Tensor

from ..compression.windows import Window
from ..config.channel import Applier


def rate(window: Window, applier: Applier, sparse: bool) -> float:
    """The outer rate of a window: `lr`, and for the whole tensors of a sparse channel `dense_lr`."""
    return applier.dense_lr if sparse and window.group is None else applier.lr


def outer_step(anchor: Tensor, momentum: Tensor | None, mean: Tensor, mu: float, nesterov: bool, lr: float) -> None:
    """One step of SGD on the anchor, in place; `mean` (fp32, element domain, same shape) is used up.

    m = mu m + mean; anchor -= lr (mean + mu m) with nesterov, lr m without, lr mean where there is no momentum: torch.optim.SGD's form,
    as in DiLoCo (2311.08105). `mu` is the momentum of this round.
    """
    if momentum is not None:
        momentum.mul_(mu).add_(mean)
        if nesterov:
            mean.add_(momentum, alpha=mu)
        else:
            mean = momentum
    anchor.sub_(mean, alpha=lr)


def local_step(anchor: Tensor, delta: Tensor, momentum: Tensor, beta: float, lr: float) -> None:
    """The released rule of 2510.03371: anchor -= lr (delta + beta momentum), with the replica's own delta, in place.

    `delta` is used up, `momentum` is the accumulator in the element domain, the mean put back.
    """
    anchor.sub_(delta.add_(momentum, alpha=beta), alpha=lr)
