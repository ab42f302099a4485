"""The orthonormal transform of the blocks of a workspace, and its inverse, by the name that the
codec gives.

coefficients = D_r X D_s^T for a block X of r x s elements, where D_n is the matrix [n, n] of a
transform of n points (`MATRICES`). Edge blocks use their own r and s, so the padding of their slot
stays exactly zero. Orthonormal: the inverse is the transpose, norms are kept. A new transform is a
function that gives its matrices, in a file of its own, a line in `config/names.py` and a line here.

Two products per block, of each block and then of all rows of all blocks at once; the second adds to
the accumulator as it goes. With `transform_precision="bf16"` (of the codec) their factors are
rounded to bf16 and added in fp32 where a CPU has instructions that make this faster (`fast_bf16`);
on CUDA they are TF32. What is sent is then selected among coefficients that are
off by about 0.3 % of their root mean square; it is still subtracted exactly.
"""

from __future__ import annotations

import math
import platform
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config.parts import BLOCK, Codec
from .blocks import Layout
from .windows import EDGE, ContiguousViews, Group, Window

# ---- the processor at hand, as far as compression on a CPU depends on it -------------------------


@lru_cache(maxsize=1)
def cpu_name() -> str:
    """The model of the processor, as it calls itself."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        text = ""
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if "model name" in line]
    return names[0] if names else platform.processor() or platform.machine()


def kernels() -> str:
    """The widest instructions that torch uses here, and the unit for products of matrices."""
    return torch.backends.cpu.get_cpu_capability() + (", AMX" if _supports("amx_tile") else "")


def intel() -> bool:
    """Whether the processor is Intel's: MKL multiplies fp32 faster than oneDNN there only."""
    return "intel" in cpu_name().lower()


@lru_cache(maxsize=1)
def fast_bf16() -> bool:
    """Whether products in bf16 take less time than in fp32 on this processor. On Intel's without
    AMX they take as long, and conversions come on top.
    """
    return _supports("amx_tile") or (_supports("avx512_bf16") and not intel())


def _supports(name: str) -> bool:
    found = getattr(torch.cpu, f"_is_{name}_supported", None)
    return bool(found()) if found is not None else False


def dct_matrix(n: int) -> Tensor:
    """The n-point orthonormal DCT-II as a matrix fp64 [n, n].

    D[k, i] = sqrt(2 / n) cos(pi (i + 1/2) k / n), the first row divided by sqrt(2) (Ahmed,
    Natarajan, Rao 1974).
    """
    k = torch.arange(n, dtype=torch.float64, device="cpu")[:, None]
    i = torch.arange(n, dtype=torch.float64, device="cpu")[None]
    d = torch.cos(math.pi * (i + 0.5) * k / n) * math.sqrt(2.0 / n)
    d[0] /= math.sqrt(2.0)
    return d


# coefficients of a block for which outer products are less work than two products of matrices
FEW = 64
# blocks in a row of them, on average, below which copies cost less than a product for each row
NARROW = 8

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


def whole(group: Group | None) -> bool:
    """Whether the blocks of a group are transformed and fill their slots of 64 x 64."""
    return group is not None and group.transform and group.r * group.s == BLOCK


class Transform:
    """A transform of windows of workspaces on one device, with the memory it needs in between (two
    inner windows, or three).

    To be used as a context, which sets the precision of products.

    Args:
        name: name of the transform, one of `MATRICES`; "none" where no block is transformed.
        device: device of the workspaces.
        products: "fp32" or "bf16".
    """

    def __init__(self, name: str, device: torch.device | str, products: str = "fp32"):
        self.name, self.device = name, torch.device(device)
        self._cpu, low = self.device.type == "cpu", products == "bf16"
        self._tf32 = low and self.device.type == "cuda"
        dtype = torch.bfloat16 if low and not self._tf32 else torch.float32
        # what this rank selects is its own affair, but all that decode make the same bits of it
        self._inverse = torch.float32 if self._cpu and not fast_bf16() else dtype
        # on Intel's the conversion of gradients costs more than products with AMX save
        self._forward = torch.float32 if self._cpu and intel() else self._inverse
        self._short = low and self._cpu
        self._memory: dict[int, Tensor] = {}
        self._views: dict[tuple[int, int, torch.dtype], tuple[Tensor, ...]] = {}
        self._factors: dict[torch.dtype, tuple[Tensor, Tensor]] = {}
        self._precision = ExitStack()

    def room(self, window: Window, exact: bool = False) -> Tensor:
        """Memory [numel] for a window that is to be transformed; the next call hands it out again.

        Its dtype is that of the factors of the first product, so that a gradient is copied into it
        once, or fp32 where `exact`.
        """
        low = whole(window.group) and not exact
        return self._buffer(0, window.numel, self._forward if low else torch.float32)[0]

    def shortens(self, group: Group | None, terms: int) -> bool:
        """Whether `sparse_inverse` may stand in for `inverse_` where `terms` coefficients of a
        block are not zero. Not in fp32: there the update is the same function of the mean for any
        number of replicas.
        """
        return self._short and whole(group) and terms <= FEW

    def reads(self, window: Window, tensors: ContiguousViews) -> bool:
        """Whether `add_from` can read a window in place: fp32, a CPU, not many small tensors."""
        group = window.group
        if group is None or not self._cpu:
            return False
        if group.transform:
            rows = sum(box.shape[0] for box in window.boxes)
            if not whole(group) or self._forward != torch.float32 or NARROW * rows > window.count:
                return False
        found = (tensors[box.tensor] for box in window.boxes)
        return all(t is None or t.dtype == torch.float32 for t in found)

    def add_from(
        self, window: Window, tensors: ContiguousViews, work: Tensor, beta: float, gain: float
    ) -> None:
        """`add` with the window's elements of `tensors` as the source (None counts as zeros): they
        are read where they lie. The bits are those of `add`.
        """
        if not whole(window.group):
            for box in window.boxes:
                source = tensors[box.tensor]
                zero = torch.zeros((), dtype=torch.float32, device="cpu")
                _add(zero if source is None else box.view(source), box.slots(work), beta, gain)
            return
        _, _, half = self._buffer(1, window.numel, torch.float32)
        for box in window.boxes:
            source, out = tensors[box.tensor], half[box.lo : box.hi]
            if source is None:
                out.zero_()
            else:
                for row, into in zip(box.view(source), out.view(box.shape), strict=True):
                    self._from_left(0, row, into)
        self._add_second(half, work, beta, gain)

    def add(
        self, group: Group | None, source: Tensor, work: Tensor, beta: float, gain: float
    ) -> None:
        """work = beta work + gain T(source), both stretches [numel] of blocks (or of dense
        elements, which are not transformed); `source` is used up, `work` is fp32."""
        if not whole(group):
            transformed = group is not None and group.transform
            x = self._edges(group, source, inverse=False) if group and transformed else source
            _add(x, work, beta, gain)
            return
        source = self._cast(source, self._forward)
        half = self._buffer(1, source.numel(), source.dtype)[2]
        self._add_second(self._from_left(0, source.view_as(half), half), work, beta, gain)

    def forward_(self, group: Group | None, work: Tensor) -> Tensor:
        """The transform of a stretch of blocks, in place."""
        if group is None or not group.transform:
            return work
        if not whole(group):
            return self._edges(group, work, inverse=False)
        source = self._cast(work, self._forward)
        half = self._buffer(1, source.numel(), source.dtype)[2]
        self._from_left(0, source.view_as(half), half)
        return self._put(self._from_right(1, half, source), work)

    def inverse_(self, group: Group | None, work: Tensor) -> Tensor:
        """The inverse transform of a stretch of blocks, in place."""
        if group is None or not group.transform:
            return work
        if not whole(group):
            return self._edges(group, work, inverse=True)
        source = self._cast(work, self._inverse)
        half = self._buffer(1, source.numel(), source.dtype)[2]
        self._from_right(0, source.view_as(half), half)
        return self._put(self._from_left(1, half, source.view_as(half)), work)

    def sparse_inverse(self, place: Tensor, values: Tensor, out: Tensor) -> Tensor:
        """The inverse transform of n whole blocks of which few coefficients are not zero, as sums
        of m outer products of rows of D, into `out` (fp32 [n * 4096]).

        Args:
            place: place of each coefficient in its block, int64 [n, m].
            values: the coefficients, fp32 [n, m]; those of one place are added.
        """
        n, d = len(place), self._matrices(self._inverse)[0]
        left = d.index_select(0, (place >> 6).view(-1)).view(n, -1, EDGE).transpose(1, 2)
        right = d.index_select(0, (place & 63).view(-1)).view(n, -1, EDGE)
        right.mul_(values.to(d.dtype)[:, :, None])
        if d.dtype == torch.float32:
            torch.bmm(left, right, out=out.view(n, EDGE, EDGE))
            return out
        return self._put(torch.bmm(left, right, out=self._buffer(1, n * BLOCK, d.dtype)[2]), out)

    def _matrices(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """D and its transpose [64, 64]; from the first time on the precision of products is set."""
        if not self._factors:
            self._precision.enter_context(products_on(self.device, self._tf32))
        if dtype not in self._factors:
            d = matrix(self.name, EDGE, self.device, dtype)
            self._factors[dtype] = d, d.t().contiguous()
        return self._factors[dtype]

    def _from_left(self, number: int, blocks: Tensor, out: Tensor) -> Tensor:
        """D X (0) or D^T X (1) of blocks [n, 64, 64], which may lie apart; into `out`."""
        factor = self._matrices(out.dtype)[number]
        return torch.bmm(factor.expand(len(blocks), EDGE, EDGE), blocks, out=out)

    def _from_right(self, number: int, blocks: Tensor, out: Tensor) -> Tensor:
        """X D (0) or X D^T (1) of all rows of blocks at once, into `out`, which has their size."""
        factor = self._matrices(out.dtype)[number]
        return torch.mm(blocks.view(-1, EDGE), factor, out=out.view(-1, EDGE))

    def _add_second(self, half: Tensor, work: Tensor, beta: float, gain: float) -> None:
        """work = beta work + gain half D^T."""
        if half.dtype == torch.float32:
            factor = self._matrices(half.dtype)[1]
            work.view(-1, EDGE).addmm_(half.view(-1, EDGE), factor, beta=beta, alpha=gain)
            return
        made = self._buffer(2, half.numel(), half.dtype)[0]
        self._from_right(1, half, made)
        # one pass over the accumulator
        torch.add(made if gain == 1.0 else made.mul_(gain), work, alpha=beta, out=work)

    def _cast(self, work: Tensor, dtype: torch.dtype) -> Tensor:
        """A stretch in the precision of a product: itself, or a copy."""
        if work.dtype == dtype:
            return work
        return self._buffer(2, work.numel(), dtype)[0].copy_(work)

    def _put(self, made: Tensor, work: Tensor) -> Tensor:
        """Bring a product to the stretch `work`, which may be its own memory."""
        if made.dtype != work.dtype:
            work.copy_(made.view(-1))
        return work

    def _edges(self, group: Group, work: Tensor, inverse: bool) -> Tensor:
        """Blocks that do not fill their slots, in place: few, and always in fp32."""
        left = matrix(self.name, group.r, work.device)
        right = matrix(self.name, group.s, work.device).t()
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
                (flat,) if numel % BLOCK else (flat, flat.view(-1, EDGE), flat.view(-1, EDGE, EDGE))
            )
        return self._views[key]

    def __enter__(self) -> Transform:
        """Begin, with the precision set from the first product on."""
        return self

    def __exit__(self, *_: object) -> None:
        self._precision.close()


def _add(source: Tensor, work: Tensor, beta: float, gain: float) -> None:
    """work = beta work + gain source, in one pass where that can be."""
    if gain == 1.0:
        torch.add(source, work, alpha=beta, out=work)
    else:
        work.mul_(beta).add_(source, alpha=gain)


def make_transform(codec: Codec, device: torch.device | str) -> Transform:
    """The transform of a codec on a device; with "none" no group is transformed."""
    return Transform(codec.transform, device, codec.transform_precision)


def transform(codec: Codec, layout: Layout, work: Tensor, inverse: bool = False) -> Tensor:
    """Transform every block of the groups that are transformed, in place (`work`: flat fp32)."""
    with make_transform(codec, work.device) as made:
        for w in layout.windows(work.device):
            for part in w.inner:
                (made.inverse_ if inverse else made.forward_)(part.group, part.of(work))
    return work


# ---- the precision of torch's products, which is a setting of the process ----------------------

_LOCK = threading.Lock()
# by backend: the setting as it was, then one entry for each that wants another
_HELD: dict[int, list[Any]] = {}


@contextmanager
def set_precision(backend: Any, precision: str) -> Iterator[None]:
    """A context in which torch multiplies fp32 matrices in `precision` on a backend."""
    # the setting is the process's: it stays until the last thread that wants it has ended
    with _LOCK:
        held = _HELD.setdefault(id(backend), [])
        if not held:
            held.append(backend.fp32_precision)
            backend.fp32_precision = precision
        held.append(None)
    try:
        yield
    finally:
        with _LOCK:
            held.pop()
            if len(held) == 1:
                backend.fp32_precision = held.pop()


_MKLDNN: Any = torch.backends.mkldnn


@lru_cache(maxsize=1)
def onednn() -> bool:
    """Whether torch makes fp32 products on this CPU in oneDNN, and still in fp32, when oneDNN is
    allowed bf16.

    So one chooses oneDNN over MKL, whose kernels are half as fast on AMD. It works on CPUs without
    AMX. The function tries it, since torch does not say.
    """
    x = torch.linspace(-9.0, 9.0, 4 * BLOCK, dtype=torch.float32, device="cpu").sin_()
    x = x.view(4, EDGE, EDGE)
    d = dct_matrix(EDGE).float()
    exact = torch.matmul(d.double(), x.double())
    try:
        with set_precision(_MKLDNN.matmul, "bf16"):
            found = torch.bmm(d.expand(4, EDGE, EDGE), x)
            rows = torch.mm(x.view(-1, EDGE), d)
    except (AttributeError, RuntimeError):  # a torch without it
        return False
    errors = (
        (found - exact).abs().max(),
        (rows - x.view(-1, EDGE).double() @ d.double()).abs().max(),
    )
    return bool(max(errors) < 1e-5)


def products_on(device: torch.device, tf32: bool) -> AbstractContextManager[None]:
    """A context in which products on `device` have the precision of the transform."""
    if device.type == "cuda":
        return set_precision(torch.backends.cuda.matmul, "tf32" if tf32 else "ieee")
    return set_precision(_MKLDNN.matmul, "bf16") if not intel() and onednn() else nullcontext()
