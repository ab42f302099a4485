"""Transforms that the study tries beside the DCT of whole 64 x 64 blocks, and a selection of the
largest values of the whole model beside the one over whole tensors.

The library has none of them. They are registered here under names that a cell's codec can have.
Bytes stay those of blocks of 4096 values, so all compare at equal bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fsdp_demo.compression import threshold
from fsdp_demo.compression import transform as library
from fsdp_demo.compression.transform import dct_matrix
from fsdp_demo.config import names
from fsdp_demo.config import parts as checks

RIGHT, LEFT = "dct_right", "dct_left"
"""The DCT along one axis alone: along the inputs of a weight [outputs, inputs], or its outputs."""


def tiled(tile: int, n: int) -> Tensor:
    """The DCT of consecutive `tile` points and of what is left: fp64 [n, n], orthonormal."""
    sizes = [tile] * (n // tile) + [n % tile] * (n % tile > 0)
    return torch.block_diag(*(dct_matrix(size) for size in sizes))


def plain(n: int) -> Tensor:
    """No transform: fp64 [n, n]. What it changes is the blocks, which are 64 x 64 instead of 4096
    values in a row.
    """
    return torch.eye(n, dtype=torch.float64)


def turned(n: int) -> Tensor:
    """A rotation drawn from a fixed seed: fp64 [n, n]. It spreads values as the DCT does, and knows
    of no frequencies.
    """
    drawn = torch.randn(n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    return torch.linalg.qr(drawn)[0]


TRIALS: dict[str, Callable[[int], Tensor]] = {
    **{f"dct{tile}": partial(tiled, tile) for tile in (8, 16, 32)},
    "rotation": turned,
    "square": plain,
    RIGHT: dct_matrix,
    LEFT: dct_matrix,
}


class OneAxis(library.Transform):
    """A transform along one axis of the blocks: the other product is left out."""

    def _from_left(self, number: int, blocks: Tensor, out: Tensor) -> Tensor:
        if self.name == RIGHT:
            return _copied(blocks, out)
        return super()._from_left(number, blocks, out)

    def _from_right(self, number: int, blocks: Tensor, out: Tensor) -> Tensor:
        if self.name == LEFT:
            return _copied(blocks, out)
        return super()._from_right(number, blocks, out)

    def _add_second(self, half: Tensor, work: Tensor, beta: float, gain: float) -> None:
        if self.name == LEFT:
            work.mul_(beta).add_(half.view(-1), alpha=gain)
        else:
            super()._add_second(half, work, beta, gain)

    def _edges(self, group: Any, work: Tensor, inverse: bool) -> Tensor:
        x = work.view(-1, library.EDGE, library.EDGE)[:, : group.r, : group.s]
        n = group.s if self.name == RIGHT else group.r
        d = library.matrix(self.name, n, work.device)
        d = d if inverse else d.t()
        x.copy_(x @ d if self.name == RIGHT else d.t() @ x)
        return work


def _copied(blocks: Tensor, out: Tensor) -> Tensor:
    out.view_as(blocks).copy_(blocks)
    return out


def _transform(name: str, *rest: Any, **options: Any) -> library.Transform:
    return (OneAxis if name in (RIGHT, LEFT) else _whole)(name, *rest, **options)


_whole, _by_tensor = library.Transform, threshold.encode

OVER_ALL = "threshold_all"
"""As `threshold`, with one tensor of all blocks of a size: of all whole blocks of the model."""


def _over_all(layout: Any, codec: Any, work: Tensor, data: Tensor, spans: Any, *rest: Any) -> None:
    if codec.select != OVER_ALL:
        _by_tensor(layout, codec, work, data, spans, *rest)
        return
    each = [SimpleNamespace(start=g.start, lo=0, hi=g.count) for g in spans]
    one = SimpleNamespace(pieces=each, whole=layout.whole)
    _by_tensor(one, codec, work, data, spans)  # type: ignore[arg-type]


def register() -> None:
    """Let the library's codecs have the trials; once for a process."""
    if RIGHT not in library.MATRICES:
        library.MATRICES.update(TRIALS)
        checks.TRANSFORMS = (*checks.TRANSFORMS, *TRIALS)
        library.Transform = _transform  # type: ignore[misc,assignment]
        names.SELECTIONS[OVER_ALL] = names.SELECTIONS["threshold"]
        threshold.BY_TENSOR[OVER_ALL] = threshold.threshold
        threshold.encode = _over_all
