"""The reduce of dense vectors over a peer group: its calculations, pure functions of what was sent,
and memory for the vectors.

Each rank owns 1 / R of them, receives the others' codes, adds them in rank order in fp32, divides
by the sum of the weights and sends the coded mean to all: the bytes of a ring all-reduce, 2 (R - 1)
/ R of the vector, and the same bits everywhere.
The means of codes under 8 bits come back in int8.
"""

from __future__ import annotations

import os
import sys
import weakref
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..compression import dense as coding
from ..compression.formats import EXACT
from .header import Header, memory

try:
    from ..compression._kernels import mean as mean_in_c  # type: ignore[import-not-found, unused-ignore]
except ImportError:  # built without a C compiler
    mean_in_c = None

STRETCH = 1 << 17
"""Values of a mean that are calculated at once: with room for one share they stay in the cache of
a core.
"""

THREADED = 1 << 20
"""Values of a mean for which another thread is worth its start."""

NOTHING = torch.zeros((), dtype=torch.float32, device="cpu")
"""What a sum begins with: -0 becomes 0 there."""


@dataclass
class ReceivedMessage:
    """What came back: headers and bodies of all replicas, and for dense vectors their mean, all on
    the CPU.

    `slots`: the islands whose headers and bodies these are, in order; empty where that is not known
    any more."""

    headers: list[Header]
    bodies: list[Tensor]
    means: list[Tensor]
    slots: tuple[int, ...] = ()


Spans = Sequence[tuple[int, str]]
"""Length and code of each vector."""


def share(vectors: Sequence[tuple[Tensor, str]], size: int, j: int) -> Tensor:
    """The coded part, uint8 [n], of the vectors (fp32, code) that rank `j` of `size` owns. One
    vector that travels as it is (fp32) is not copied: the share is a view of it.
    """
    parts = _parts(vectors, size, j)
    if [code for _, code in vectors] == ["fp32"]:
        return parts[0].view(torch.uint8)
    spans = [(v.numel(), code) for v, (_, code) in zip(parts, vectors, strict=True)]
    data = torch.empty(coding.total_bytes(spans), dtype=torch.uint8, device="cpu")
    _code(parts, spans, data)
    return data


def own_part(vectors: Sequence[tuple[Tensor, str]], size: int, mine: int) -> list[Tensor]:
    """The part that rank `mine` of `size` keeps, as others would decode it: fp32 as views."""
    parts, codes = _parts(vectors, size, mine), [code for _, code in vectors]
    return [coding.rounded(code, v) for v, code in zip(parts, codes, strict=True)]


def _parts(vectors: Sequence[tuple[Tensor, str]], size: int, j: int) -> list[Tensor]:
    at = [coding.cuts(v.numel(), code, size) for v, code in vectors]
    return [v[c[j] : c[j + 1]] for (v, _), c in zip(vectors, at, strict=True)]


def part_of_mean(
    bodies: list[Any],
    spans: Spans,
    weights: Sequence[Sequence[float]],
    mine: int,
    size: int,
    out: Tensor,
) -> None:
    """Write the coded mean of the part that rank `mine` of `size` owns into `out`, uint8 [n], which
    may be the memory of one share of fp32 values.

    Args:
        bodies: everybody's shares in rank order, which are used up: coded, or the values of each
            vector as `stretch` and `own_part` give them.
        weights: of each vector, one for each body.
    """
    there, back = legs(spans, size)
    if all(code in EXACT for _, code in spans):
        _exact_means(bodies, there[mine], weights, out)
    else:
        _code(_means(bodies, there[mine], weights), back[mine], out)


def stretch(coded: Tensor, spans: Spans, mine: int, size: int) -> list[Tensor]:
    """The values of the part that rank `mine` of `size` owns, fp32, from vectors that were coded
    uncut (the `share` of one rank alone).
    """
    out = []
    for (n, code), v in zip(spans, _unpack(coded, spans), strict=True):
        at = coding.cuts(n, code, size)
        out.append(v[at[mine] : at[mine + 1]].clone())
    return out


def whole(bodies: list[Tensor], spans: Spans) -> list[Tensor]:
    """The means, fp32, from everybody's coded parts in rank order (used up)."""
    size, back = len(bodies), legs(spans, len(bodies))[1]
    cuts = [coding.cuts(n, code, size) for n, code in spans]
    out = [torch.empty(n, dtype=torch.float32, device="cpu") for n, _ in spans]
    for j in range(size):
        parts = _split(bodies.pop(0), back[j])
        for mean, c, data, (_, code) in zip(out, cuts, parts, back[j], strict=True):
            coding.decode_into(code, data, mean[c[j] : c[j + 1]])
        del parts
    return out


def _means(arrived: list[Any], spans: Spans, weights: Sequence[Sequence[float]]) -> list[Tensor]:
    """Weighted means of one's own part of the vectors from everybody's messages, which are used up,
    in rank order.
    """
    sums = [torch.zeros(n, dtype=torch.float32, device="cpu") for n, _ in spans]
    for j in range(len(arrived)):
        share = arrived.pop(0)
        parts = iter(share) if isinstance(share, list) else _unpack(share, spans)
        del share
        for i, acc in enumerate(sums):
            part = next(parts)
            if weights[i][j]:  # a replica without a share may hold NaN: it must not touch the sum
                acc.add_(part, alpha=weights[i][j])
            del part
        del parts
    return [acc.div_(sum(w)) if sum(w) else acc for acc, w in zip(sums, weights, strict=True)]


def legs(
    spans: Sequence[tuple[int, str]], size: int
) -> tuple[list[list[tuple[int, str]]], list[list[tuple[int, str]]]]:
    """What a reduce of vectors (values, code) moves: for each rank j the parts it is sent, and the
    parts of the mean it sends back.
    """
    cuts = [coding.cuts(n, code, size) for n, code in spans]
    there = [
        [(c[j + 1] - c[j], code) for c, (_, code) in zip(cuts, spans, strict=True)]
        for j in range(size)
    ]
    return there, [[(n, coding.mean_code(code)) for n, code in part] for part in there]


def _exact_means(
    bodies: list[Any], spans: Spans, weights: Sequence[Sequence[float]], data: Tensor
) -> None:
    """`_means` of codes that are number formats of torch, in stretches for a core's cache."""
    rooms = _split(data, spans)
    parts = [body if isinstance(body, list) else _split(body, spans) for body in bodies]
    bodies.clear()
    acc, its = torch.empty(2, STRETCH, dtype=torch.float32, device="cpu").unbind()
    for i, (n, code) in enumerate(spans):
        shares = [_values(code, part[i]) for part in parts]
        values = coding.as_values(code, rooms[i])
        direct = values if values is not None and values.dtype == acc.dtype else None
        if direct is not None and mean_in_c is not None and set(weights[i]) == {1.0}:
            _mean_in_threads(shares, direct)
            continue
        for lo in range(0, n, STRETCH):
            hi = min(lo + STRETCH, n)
            out = acc[: hi - lo] if direct is None else direct[lo:hi]
            some = [v[lo:hi] for v in shares]
            mean = _mean(some, weights[i], acc[: hi - lo], its[: hi - lo], out)
            if values is None:
                width = len(rooms[i]) // n
                rooms[i][lo * width : hi * width] = coding.encode(code, mean)
            elif direct is None:
                values[lo:hi] = mean


def _mean_in_threads(shares: list[Tensor], out: Tensor) -> None:
    """The mean of `shares` fp32 [n], added in order, in `out`, by the processors that this rank may
    use, four at most: one alone is slower than the memory.
    """
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
    processors = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    threads = max(1, min(4, processors // ranks, len(out) // THREADED))

    def stretch(i: int) -> None:
        lo, hi = (len(out) * j // threads for j in (i, i + 1))
        where = array("Q", [v[lo:].data_ptr() for v in shares]).tobytes()
        mean_in_c(where, hi - lo, out[lo:].data_ptr())

    if threads == 1:
        stretch(0)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(stretch, range(threads)))


def _mean(
    shares: list[Tensor], weights: Sequence[float], acc: Tensor, its: Tensor, out: Tensor
) -> Tensor:
    """The weighted mean of `shares` [n] in `out` fp32 [n], which may be one of them or `acc`; `acc`
    and `its` [n] are room for the sum and one of them."""
    total: Tensor = NOTHING
    for v, w in zip(shares, weights, strict=True):
        if w:  # a replica without a share may hold NaN: it must not touch the sum
            v = v if v.dtype == acc.dtype else its.copy_(v)
            total = torch.add(total, v, alpha=w, out=acc)
    return out.zero_() if total is NOTHING else torch.div(acc, sum(weights), out=out)


def _values(code: str, part: Tensor) -> Tensor:
    """A part as values: of bytes a view, where there is one."""
    if part.dtype != torch.uint8:
        return part
    values = coding.as_values(code, part)
    return part.clone().view(EXACT[code]) if values is None else values


def _code(parts: Sequence[Tensor], spans: Spans, data: Tensor) -> None:
    """Write the values fp32 of each vector into `data`, coded."""
    for of, v, (_, code) in zip(_split(data, spans), parts, spans, strict=True):
        coding.encode_into(code, v, of)


def _split(body: Tensor, spans: Spans) -> list[Tensor]:
    """The coded vectors of a body, views."""
    return list(body.split([coding.num_bytes(code, n) for n, code in spans]))


def _unpack(body: Tensor, spans: Spans) -> Iterator[Tensor]:
    """The vectors of a body."""
    for data, (n, code) in zip(_split(body, spans), spans, strict=True):
        yield coding.decode(code, data, n)


def new_vector(n: int) -> Tensor:
    """A vector, fp32 [n] on the CPU, not written."""
    return torch.empty(n, dtype=torch.float32, device="cpu")


class VectorPool:
    """Memory on the host for vectors of one length that are exchanged whole in every step. It is
    used again from step to step, as DistributedDataParallel keeps its buckets: the kernel hands out
    new memory page by page, when it is written first, which takes several times as long as the
    writing.

    Args:
        n: number of values; vectors of another length are not kept.
    """

    def __init__(self, n: int):
        self._n = n
        self._free: list[Tensor] = []

    def new_vector(self, n: int) -> Tensor:
        """A vector, fp32 [n] on the CPU, not written. Its memory is given to another vector when no
        tensor and no connection reads it any more. From any thread.
        """
        if n != self._n or not n:
            return new_vector(n)
        try:
            block = self._free.pop()
        except IndexError:
            block = new_vector(n)
        lent = memory(block)
        weakref.finalize(lent, self._free.append, block).atexit = False
        return torch.frombuffer(lent, dtype=torch.float32)
