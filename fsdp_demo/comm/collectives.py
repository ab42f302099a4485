"""The reduce of dense vectors over a line.

Each rank owns 1 / R of them, receives the others' codes, adds them in rank order in fp32, divides by the sum of the weights and sends the
coded mean to all: the bytes of a ring all-reduce, 2 (R - 1) / R of the vector, and the same bits everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..compression import dense as coding
from .header import HEADER, MEANS, PARTS, PAYLOAD, Header
from .peers import Line


@dataclass
class Arrived:
    """What came back: headers and bodies of all replicas, and for dense vectors their mean, all on the CPU.

    `decoded`: means of channels by name, as workspaces, where the message was decoded under another layout (`checkpoint/reshard.py`)."""

    headers: list[Header]
    bodies: list[Tensor]
    means: list[Tensor]
    decoded: dict[str, Tensor] = field(default_factory=dict)


def reduce(
    line: Line, header: Header, vectors: Sequence[tuple[Tensor, str]], weights: Sequence[Sequence[float]], compare: bool = False
) -> list[Tensor]:
    """Weighted mean over the replicas of each (vector fp32 [n] on the CPU, code), fp32, bit-equal on all ranks. Two messages.

    `header` says step and configuration. With weights w = weights[i] vector i becomes sum_r w_r v_r / sum_r w_r, zeros if all its weights
    are zero. It is cut into R parts; the means of codes under 8 bits come back in int8. `compare`: note in `line.alike` whether all sent
    the same of this rank's part, and in `line.something` whether that is more than zeros.
    """
    mine, spans = line.rank, [(v.numel(), code) for v, code in vectors]
    kinds = (PARTS, MEANS) if header.kind == PAYLOAD else (header.kind, header.kind)
    cuts = [coding.cuts(n, code, line.size) for n, code in spans]
    outgoing = [
        _pack([coding.encode(code, v[c[j] : c[j + 1]]) for (v, code), c in zip(vectors, cuts, strict=True)]) for j in range(line.size)
    ]
    there, back = legs(spans, line.size)
    arrived = line.swap(replace(header, kind=kinds[0]), outgoing, [outgoing[mine].numel() - HEADER.size] * line.size)[1]
    del outgoing  # what is as large as the vectors goes as soon as it has served
    if compare:
        line.alike, line.something = all(torch.equal(a, arrived[0]) for a in arrived), bool(arrived[0].any())
    means = _means(line, arrived, there[mine], weights)
    coded = _pack([coding.encode(code, m) for m, (_, code) in zip(means, back[mine], strict=True)])
    del means
    arrived = line.swap(replace(header, kind=kinds[1]), [coded] * line.size, [coding.total_bytes(s) for s in back])[1]
    out = [torch.empty(n) for n, _ in spans]
    for j in range(line.size):
        parts = _unpack(arrived.pop(0), back[j])
        for whole, c in zip(out, cuts, strict=True):
            whole[c[j] : c[j + 1]] = next(parts)
        del parts
    return out


def _means(line: Line, arrived: list[Tensor], spans: Sequence[tuple[int, str]], weights: Sequence[Sequence[float]]) -> list[Tensor]:
    """Weighted means of one's own part of the vectors from everybody's messages, which are used up, in rank order."""
    sums = [torch.zeros(n) for n, _ in spans]
    for j in range(line.size):
        parts = _unpack(arrived.pop(0), spans)
        for i, acc in enumerate(sums):
            part = next(parts)
            if weights[i][j]:  # a replica without a share may hold NaN: it must not touch the sum
                acc.add_(part, alpha=weights[i][j])
            del part
        del parts
    return [acc.div_(sum(w)) if sum(w) else acc for acc, w in zip(sums, weights, strict=True)]


def legs(spans: Sequence[tuple[int, str]], size: int) -> tuple[list[list[tuple[int, str]]], list[list[tuple[int, str]]]]:
    """What a reduce of vectors (values, code) moves: for each rank j the parts it is sent, and the parts of the mean it sends back."""
    cuts = [coding.cuts(n, code, size) for n, code in spans]
    there = [[(c[j + 1] - c[j], code) for c, (_, code) in zip(cuts, spans, strict=True)] for j in range(size)]
    return there, [[(n, coding.mean_code(code)) for n, code in part] for part in there]


def _pack(parts: Sequence[Tensor]) -> Tensor:
    """Coded parts as one message, with room for its header."""
    return torch.cat([torch.zeros(HEADER.size, dtype=torch.uint8), *parts])


def _unpack(body: Tensor, spans: Sequence[tuple[int, str]]) -> Iterator[Tensor]:
    """The vectors of a body."""
    at = 0
    for n, code in spans:
        size = coding.num_bytes(code, n)
        yield coding.decode(code, body[at : at + size], n)
        at += size
