"""The orthonormal transform of the blocks of a workspace, and its inverse: which one is the codec's
affair.

coefficients = D_r X D_s^T for a block X of r x s elements, where D_n is the matrix [n, n] of a
transform of n points (`MATRICES`). Edge blocks use their own r and s, so the padding of their slot
stays exactly zero. Orthonormal: the inverse is the transpose, norms are kept. A new transform is a
function that gives its matrices, in a file of its own, a line in `config/names.py` and a line here.

Two products per block, of all rows of all blocks at once and then of each block; the second adds to
the accumulator as it goes. With `transform_precision="bf16"` (of the codec) their factors are
rounded to bf16 and added in fp32, twice as fast or more where a CPU has instructions for that; on
CUDA they are TF32. What is sent is then selected among coefficients that are off by about 0.3 % of
their root mean square; it is still subtracted exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import lru_cache

import torch
from torch import Tensor

from ..config.channel import BLOCK, Codec
from .blocks import Layout
from .dct import dct_matrix
from .precision import products_on
from .windows import EDGE, Group, Window

MATRICES: dict[str, Callable[[int], Tensor]] = {"dct": dct_matrix}
"""Of each transform its n-point orthonormal matrix, fp64 [n, n], for any n from 1 to 64."""


def matrix(
    name: str, n: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Tensor:
    """The n-point matrix [n, n] of a transform, made once for each device and dtype."""
    return _matrix(name, n, torch.device(device), dtype)


@lru_cache(maxsize=256)
def _matrix(name: str, n: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return MATRICES[name](n).float().to(device, dtype)


class Transform:
    """A transform of windows of workspaces on one device, with the memory it needs in between (two
    inner windows, or three).

    To be used as a context, which sets the precision of products.

    Args:
        name: of the transform, one of `MATRICES`; "none" where no block is one to be transformed.
        device: of the workspaces.
        products: "fp32" or "bf16".

    Attributes:
        shortens: whether `sparse_inverse` may stand in for `inverse_` where few coefficients are
            not zero. Not in fp32, where the update is one function of the mean, whatever the number
            of replicas.
    """

    def __init__(self, name: str, device: torch.device | str, products: str = "fp32"):
        self.name, self.device = name, torch.device(device)
        self._tf32 = products == "bf16" and self.device.type == "cuda"
        self.dtype = torch.bfloat16 if products == "bf16" and not self._tf32 else torch.float32
        self._memory: dict[int, Tensor] = {}
        self._views: dict[tuple[int, int, torch.dtype], tuple[Tensor, ...]] = {}
        self.shortens = products == "bf16" and self.device.type == "cpu"
        self._factors: tuple[Tensor, Tensor] | None = None
        self._precision = ExitStack()

    def room(self, window: Window, exact: bool = False) -> Tensor:
        """Memory [numel] for a window that is to be transformed, until the next one: in the
        precision of the first product, which is what copies of gradients are best made in, or
        fp32 where `exact`."""
        whole = (
            window.group is not None
            and window.group.transform
            and window.group.r * window.group.s == EDGE * EDGE
        )
        return self._buffer(0, window.numel, self.dtype if whole and not exact else torch.float32)[
            0
        ]

    def add(
        self, group: Group | None, source: Tensor, work: Tensor, beta: float, gain: float
    ) -> None:
        """work = beta work + gain T(source), both stretches [numel] of blocks (or of dense
        elements, which are not transformed); `source` is used up, `work` is fp32."""
        if group is None or not group.transform:
            work.mul_(beta).add_(source, alpha=gain)
            return
        if group.r * group.s < EDGE * EDGE:
            work.mul_(beta).add_(self._edges(group, source, inverse=False), alpha=gain)
            return
        if source.dtype != self.dtype:
            source = self._buffer(2, source.numel(), self.dtype)[0].copy_(source)
        half, left = self._rows(source, inverse=False)
        blocks = work.view(-1, EDGE, EDGE)
        if self.dtype == torch.float32:
            blocks.baddbmm_(left, half, beta=beta, alpha=gain)
        else:
            made = torch.bmm(left, half, out=source.view_as(half))
            # one pass over the accumulator
            torch.add(made if gain == 1.0 else made.mul_(gain), blocks, alpha=beta, out=blocks)

    def forward_(self, group: Group | None, work: Tensor) -> Tensor:
        """The transform of a stretch of blocks, in place."""
        if group is None or not group.transform:
            return work
        if group.r * group.s < EDGE * EDGE:
            return self._edges(group, work, inverse=False)
        return self._whole(work, inverse=False)

    def inverse_(self, group: Group | None, work: Tensor) -> Tensor:
        """The inverse transform of a stretch of blocks, in place."""
        if group is None or not group.transform:
            return work
        if group.r * group.s < EDGE * EDGE:
            return self._edges(group, work, inverse=True)
        return self._whole(work, inverse=True)

    def sparse_inverse(self, place: Tensor, values: Tensor, out: Tensor) -> Tensor:
        """The inverse transform of whole blocks of which few coefficients are not zero, into `out`
        (fp32 [n * 4096]): sums of m outer products of rows of D. `values`: fp32 [n, m], at
        places [n, m] in the block, added where a place comes again."""
        n, d = len(place), matrix(self.name, EDGE, self.device, self.dtype)
        if self._factors is None:
            self._rows(torch.zeros(BLOCK, dtype=self.dtype), inverse=True)  # sets the precision
        left = d.index_select(0, (place >> 6).view(-1)).view(n, -1, EDGE).transpose(1, 2)
        right = (
            d.index_select(0, (place & 63).view(-1))
            .view(n, -1, EDGE)
            .mul_(values.to(self.dtype)[:, :, None])
        )
        if self.dtype == torch.float32:
            torch.bmm(left, right, out=out.view(n, EDGE, EDGE))
        else:
            out.view(n, EDGE, EDGE).copy_(
                torch.bmm(left, right, out=self._buffer(1, n * BLOCK, self.dtype)[2])
            )
        return out

    def _whole(self, work: Tensor, inverse: bool) -> Tensor:
        """Whole blocks, in place."""
        source = (
            work
            if self.dtype == torch.float32
            else self._buffer(2, work.numel(), self.dtype)[0].copy_(work)
        )
        half, left = self._rows(source, inverse)
        blocks = torch.bmm(left, half, out=source.view_as(half))
        if self.dtype != torch.float32:
            work.view_as(blocks).copy_(blocks)
        return work

    def _rows(self, source: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
        """The first product, X D^T (inverse: X D), of all blocks [n, 64, 64]; and the left factor
        of the second.
        """
        if self._factors is None:
            d = matrix(self.name, EDGE, self.device, self.dtype)
            self._factors = d, d.t().contiguous()
            self._precision.enter_context(products_on(self.device, self._tf32))
        left, right = reversed(self._factors) if inverse else self._factors
        _, flat, half = self._buffer(1, source.numel(), self.dtype)
        torch.mm(source.view(-1, EDGE), right, out=flat)
        return half, left.expand(len(half), EDGE, EDGE)

    def _edges(self, group: Group, work: Tensor, inverse: bool) -> Tensor:
        """Blocks that do not fill their slots, in place: few, and always in fp32."""
        left, right = (
            matrix(self.name, group.r, work.device),
            matrix(self.name, group.s, work.device).t(),
        )
        if inverse:
            left, right = left.t(), right.t()
        x = work.view(-1, EDGE, EDGE)[:, : group.r, : group.s]
        x.copy_(left @ (x @ right))
        return work

    def _buffer(self, number: int, numel: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Memory that is kept from window to window: 0 for what is packed, 1 for what the first
        product makes, 2 for factors in bf16; as [numel], and for blocks also [., 64] and [., 64,
        64]."""
        key, size = (number, numel, dtype), numel * dtype.itemsize
        if number not in self._memory or self._memory[number].numel() < size:
            self._memory[number] = torch.empty(size, dtype=torch.uint8, device=self.device)
            self._views = {k: v for k, v in self._views.items() if k[0] != number}
        if key not in self._views:
            flat = self._memory[number][:size].view(dtype)
            self._views[key] = (
                (flat,)
                if numel % (EDGE * EDGE)
                else (flat, flat.view(-1, EDGE), flat.view(-1, EDGE, EDGE))
            )
        return self._views[key]

    def __enter__(self) -> Transform:
        """Begin, with the precision set from the first product on."""
        return self

    def __exit__(self, *_: object) -> None:
        self._precision.close()


def make_transform(codec: Codec, device: torch.device | str) -> Transform:
    """The transform of a codec on a device. Under "none" no block is one to be transformed, so
    every method leaves it as it is.
    """
    return Transform(codec.transform, device, codec.transform_precision)


def transform(codec: Codec, layout: Layout, work: Tensor, inverse: bool = False) -> Tensor:
    """The transform (or its inverse) of every block of the groups that are transformed, in place;
    `work` is the flat fp32 workspace.
    """
    with make_transform(codec, work.device) as made:
        for w in layout.windows(work.device):
            for part in w.inner:
                (made.inverse_ if inverse else made.forward_)(part.group, part.of(work))
    return work
