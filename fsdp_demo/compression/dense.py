"""Whole vectors as bytes: rows of 4096 values and a shorter last one, each coded by `formats.py`;
and the parts into which a reduce cuts them.

Codes under 8 bits are never summed in their own code: either all codes reach everybody (`gathers`),
or the parts travel in the code, are added in fp32, and the mean comes back in int8 (`mean_code`),
so that the coarse rounding happens once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..config.names import FORMATS
from ..config.parts import BLOCK
from . import formats
from .formats import EXACT

# rows of 4096 that are coded at once where a whole vector would be a second one; many where every
# kernel has to be launched
STEP, STEP_GPU = 256, 2048


def mean_code(code: str) -> str:
    """The code in which the mean of vectors coded by `code` comes back."""
    return "int8" if FORMATS[code].low else code


def gathers(code: str, size: int) -> bool:
    """Whether sending all codes to everybody costs no more bytes than a reduce: b (R - 1) <= (b +
    1) (R - 1) / R, so R <= (b + 1) / b for b bytes per value; only for codes under 8 bits, where
    a reduce would round twice."""
    return FORMATS[code].low and size * FORMATS[code].bits <= FORMATS[code].bits + 8


def num_bytes(code: str, n: int) -> int:
    """Bytes of a coded vector of n values."""
    rows, rest = divmod(n, BLOCK)
    return formats.num_bytes(code, rows, BLOCK) + (formats.num_bytes(code, 1, rest) if rest else 0)


def encode(code: str, v: Tensor) -> Tensor:
    """The bytes of a vector fp32 [n]: uint8 [num_bytes]."""
    rows, rest = divmod(v.numel(), BLOCK)
    parts = [formats.encode(code, v[: rows * BLOCK].view(rows, BLOCK))]
    if rest:
        parts.append(formats.encode(code, v[rows * BLOCK :].view(1, rest)))
    return torch.cat(parts) if rest else parts[0]


def decode(code: str, data: Tensor, n: int) -> Tensor:
    """The inverse of `encode`: fp32 [n]."""
    out = torch.empty(n, device=data.device, dtype=torch.float32)
    decode_into(code, data, out)
    return out


def encode_into(code: str, v: Tensor, data: Tensor) -> None:
    """Write the bytes of a vector fp32 [n] into `data`, uint8 [num_bytes]; the same as of
    `encode`, without a copy of them where the code is a number format of torch.
    """
    values = as_values(code, data)
    if values is None:
        data.copy_(encode(code, v))
    else:
        values.copy_(v)


def decode_into(code: str, data: Tensor, out: Tensor, alpha: float | None = None) -> None:
    """Write the decoded vector into `out` (fp32 [n]), or add `alpha` times it, in stretches."""
    rows, rest = divmod(out.numel(), BLOCK)
    size = formats.num_bytes(code, rows, BLOCK)
    formats.decode(code, data[:size], rows, BLOCK, out[: rows * BLOCK].view(rows, BLOCK), alpha)
    if rest:
        formats.decode(code, data[size:], 1, rest, out[rows * BLOCK :].view(1, rest), alpha)


def rounded(code: str, v: Tensor) -> Tensor:
    """The values of a vector fp32 [n] after it was coded and decoded: [n], in the dtype of the code
    where that is a number format of torch, else fp32. In code "fp32" it is the vector itself.
    """
    return v.to(EXACT[code]) if code in EXACT else decode(code, encode(code, v), v.numel())


def as_values(code: str, data: Tensor) -> Tensor | None:
    """A coded vector as a view of its bytes; None if no number format of torch, or not aligned."""
    form = EXACT.get(code)
    return None if form is None or data.storage_offset() % form.itemsize else data.view(form)


def add_part(code: str, data: Tensor, n: int, begin: int, target: Tensor, alpha: float) -> None:
    """Add `alpha` times a part of a coded vector of n values, from element `begin` on, to `target`
    (fp32). `begin` is a multiple of 4096, and so is the end, or it is that of the vector.
    """
    rows, size = target.numel() // BLOCK, formats.num_bytes(code, n // BLOCK, BLOCK)
    if rows:
        split = [formats.split_bytes(code, data[:size], n // BLOCK, BLOCK)]
        found = formats.decode_rows(code, split, n // BLOCK, BLOCK, begin // BLOCK, rows)
        target[: rows * BLOCK].add_(found.view(-1), alpha=alpha)
    rest = target.numel() - rows * BLOCK
    if rest:
        target[rows * BLOCK :].add_(
            formats.decode(code, data[size:], 1, rest).view(-1), alpha=alpha
        )


def encode_all(spans: Sequence[tuple[int, str]], parts: Sequence[Tensor]) -> Tensor:
    """The bytes of several vectors, one after the other: uint8 [total_bytes]. They are coded a
    stretch at a time, so that no second copy of them is in memory.

    Args:
        spans: number of values and code of each vector.
        parts: the vectors, fp32.
    """
    data, at = torch.empty(total_bytes(spans), dtype=torch.uint8, device=parts[0].device), 0
    for (n, code), v in zip(spans, parts, strict=True):
        rows, size = n // BLOCK, formats.num_bytes(code, n // BLOCK, BLOCK)
        step = _step(v)
        for lo in range(0, rows, step):
            some = v[lo * BLOCK : min(lo + step, rows) * BLOCK].view(-1, BLOCK)
            formats.encode_rows(code, some, data[at : at + size], rows, lo)
        if n % BLOCK:
            rest = formats.encode(code, v[rows * BLOCK :].view(1, -1))
            data[at + size : at + size + len(rest)] = rest
        at += num_bytes(code, n)
    return data


def add_round_trip(code: str, v: Tensor, size: int, target: Tensor, alpha: float) -> None:
    """Add `alpha` times `round_trip` of a vector fp32 [n] to `target` (fp32 [n]), by stretches."""
    at, step = cuts(v.numel(), code, size), _step(v) * BLOCK
    for a, b in zip(at, at[1:], strict=False):
        for lo in range(a, b, step):
            hi = min(lo + step, b)
            decode_into(code, encode(code, v[lo:hi]), target[lo:hi], alpha)


def _step(v: Tensor) -> int:
    """Rows of 4096 that are coded at once where `v` lies."""
    return STEP if v.device.type == "cpu" else STEP_GPU


def cuts(n: int, code: str, size: int) -> list[int]:
    """The `size` + 1 bounds at which a reduce cuts a vector of n values into `size` parts; where
    values share scales, at multiples of 4096.
    """
    unit = 1 if FORMATS[code].exact else BLOCK
    units = -(-n // unit)
    return [min(units * j // size * unit, n) for j in range(size + 1)]


def round_trip(code: str, v: Tensor, size: int) -> Tensor:
    """The values, fp32 [n], that other replicas receive of a vector fp32 [n]: coded and decoded in
    the parts that a reduce among `size` replicas sends.
    """
    at, out = cuts(v.numel(), code, size), torch.empty_like(v)
    for a, b in zip(at, at[1:], strict=False):
        decode_into(code, encode(code, v[a:b]), out[a:b])
    return out


def total_bytes(spans: Sequence[tuple[int, str]]) -> int:
    """Bytes of several coded vectors, each (number of values, code)."""
    return sum(num_bytes(code, n) for n, code in spans)
