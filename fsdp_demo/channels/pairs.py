"""How the mean of two islands acts (`ExchangeConfig.pairs`): a step of an anchor that each island
has for itself, and the average of the parameters that were sent.

Each returns the squared norms of mean - own and of own, of what was sent, on this copy: the drift
of the pair.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..compression.windows import ContiguousViews, Window
from .apply import Arrival, deliver, step_anchor
from .decode import DecodedMean, SeededMean
from .state import LocalChannel


def pair_step(
    c: LocalChannel, mean: DecodedMean | None, arrival: Arrival
) -> tuple[float, float] | None:
    """NoLoCo's outer step (arXiv 2506.10911), from the mean of s = anchor - own_part * delta:
    m = momentum m + anchor - mean s; anchor -= pull m. The parameters become the anchor.
    """
    tensors, share = c.tensors("parameter"), c.channel.applier.own_part
    moved = torch.zeros(2, device=c.host.device, dtype=torch.float32)

    def change(window: Window, x: Tensor) -> Tensor:
        anchor = c.fetch(c.anchor, window)
        before = anchor if c.written is None else c.fetch(c.written, window)
        assert anchor is not None and before is not None
        own = window.pack(ContiguousViews(tensors), torch.empty_like(x))
        own.sub_(before).mul_(share).add_(anchor)
        moved.add_(torch.stack([(x - own).square().sum(), own.square().sum()]))
        return step_anchor(c, window, x.neg_().add_(anchor), None, arrival.number, None)

    deliver(c, mean, tensors, change, wrote=True)
    return (float(moved[0]), float(moved[1])) if mean is not None else None


def replace_sent(
    c: LocalChannel, mean: DecodedMean | None, arrival: Arrival
) -> tuple[float, float] | None:
    """Set the parameters that were sent to their mean; the others stay (arXiv 2002.09692)."""
    tensors = c.tensors("parameter")
    moved = torch.zeros(2, device=c.host.device, dtype=torch.float32)
    assert mean is None or isinstance(mean, SeededMean)
    sent = None if mean is None else mean.marks()

    def change(window: Window, x: Tensor) -> Tensor:
        assert sent is not None
        own = window.pack(ContiguousViews(tensors), torch.empty_like(x))
        here = sent.fill(window, torch.empty_like(x)) > 0
        moved.add_(torch.stack([((x - own) * here).square().sum(), (own * here).square().sum()]))
        return torch.where(here, x, own)

    deliver(c, mean, tensors, change)
    return (float(moved[0]), float(moved[1])) if mean is not None else None
