"""The ways in which a mean acts, by `applier.acts_as`; here those of the mean of two islands. Each
takes the mean in the transform domain (None on a copy that only receives), and returns None or two
squared norms: of the change and the mean; of pairs of mean - own and own, of what was sent.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..compression.windows import ContiguousViews, Window
from . import apply
from .decode import DecodedMean, SeededMean
from .state import LocalChannel

Moved = tuple[float, float] | None


def pair_step(c: LocalChannel, mean: DecodedMean | None, arrival: apply.Arrival) -> Moved:
    """NoLoCo's outer step (arXiv 2506.10911): m = momentum m + anchor - mean of the parameters;
    anchor -= lr m. The parameters become the anchor, which each island has for itself.
    """
    tensors, moved = (
        c.tensors("parameter"),
        torch.zeros(2, dtype=torch.float32, device=c.host.device),
    )

    def change(window: Window, x: Tensor) -> Tensor:
        anchor, written = c.fetch(c.anchor, window), c.fetch(c.written, window)
        assert anchor is not None
        own = window.pack(ContiguousViews(tensors), torch.empty_like(x))
        own.sub_(anchor if written is None else written).add_(anchor)
        moved.add_(torch.stack([(x - own).square().sum(), own.square().sum()]))
        return apply.step_anchor(c, window, x.neg_().add_(anchor), None, arrival.number, None)

    apply.deliver(c, mean, tensors, change, wrote=True)
    return None if mean is None else (float(moved[0]), float(moved[1]))


def replace_sent(c: LocalChannel, mean: DecodedMean | None, arrival: apply.Arrival) -> Moved:
    """Set the parameters that were sent to their mean; the others stay (arXiv 2002.09692)."""
    tensors, moved = (
        c.tensors("parameter"),
        torch.zeros(2, dtype=torch.float32, device=c.host.device),
    )
    sent = mean.marks() if isinstance(mean, SeededMean) else None

    def change(window: Window, x: Tensor) -> Tensor:
        assert sent is not None
        own = window.pack(ContiguousViews(tensors), torch.empty_like(x))
        here = sent.fill(window, torch.empty_like(x)) > 0
        moved.add_(torch.stack([((x - own) * here).square().sum(), (own * here).square().sum()]))
        return torch.where(here, x, own)

    apply.deliver(c, mean, tensors, change)
    return None if mean is None else (float(moved[0]), float(moved[1]))


APPLIERS: dict[str, Callable[[LocalChannel, DecodedMean | None, apply.Arrival], Moved]] = {
    "gradient": apply.as_gradient,
    "outer_step": apply.outer,
    "replace": apply.replace,
    "pair_step": pair_step,
    "replace_sent": replace_sent,
}
