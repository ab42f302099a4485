"""The reduce of dense vectors over a peer group.

Each rank owns 1 / R of them, receives the others' codes, adds them in rank order in fp32, divides
by the sum of the weights and sends the coded mean to all: the bytes of a ring all-reduce, 2 (R - 1)
/ R of the vector, and the same bits everywhere.

`shares`, `part_of_mean` and `whole` are its three calculations, pure functions of what was sent;
`reduce` runs them over a peer group of fixed members.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..compression import dense as coding
from .header import HEADER, MEANS, PARTS, PAYLOAD, Header


@dataclass
class ReceivedMessage:
    """What came back: headers and bodies of all replicas, and for dense vectors their mean, all on
    the CPU.

    `decoded`: means of channels by name, as workspaces, where the message was decoded under another
    layout (`checkpoint/reshard.py`). `slots`: the islands whose headers and bodies these are, in
    order; empty where that is not known any more."""

    headers: list[Header]
    bodies: list[Tensor]
    means: list[Tensor]
    decoded: dict[str, Tensor] = field(default_factory=dict)
    slots: tuple[int, ...] = ()


Spans = Sequence[tuple[int, str]]
"""Length and code of each vector."""


def reduce(
    peers: Any,
    header: Header,
    vectors: Sequence[tuple[Tensor, str]],
    weights: Sequence[Sequence[float]],
    compare: bool = False,
) -> list[Tensor]:
    """Weighted mean over the replicas of each (vector fp32 [n] on the CPU, code), fp32, bit-equal
    on all ranks. Two messages.

    `header` says step and configuration. With weights w = weights[i] vector i becomes sum_r w_r v_r
    / sum_r w_r, zeros if all its weights are zero. It is cut into R parts; the means of codes under
    8 bits come back in int8. `compare`: note in `peers.alike` whether all sent the same of this
    rank's part, and in `peers.something` whether that is more than zeros.
    """
    mine, spans = peers.rank, [(v.numel(), code) for v, code in vectors]
    kinds = (PARTS, MEANS) if header.kind == PAYLOAD else (header.kind, header.kind)
    outgoing = shares(vectors, peers.size)
    arrived = peers.swap(
        replace(header, kind=kinds[0]),
        outgoing,
        [outgoing[mine].numel() - HEADER.size] * peers.size,
    )[1]
    del outgoing  # what is as large as the vectors goes as soon as it has served
    if compare:
        peers.alike, peers.something = (
            all(torch.equal(a, arrived[0]) for a in arrived),
            bool(arrived[0].any()),
        )
    coded = part_of_mean(arrived, spans, weights, mine)
    back = legs(spans, peers.size)[1]
    arrived = peers.swap(
        replace(header, kind=kinds[1]), [coded] * peers.size, [coding.total_bytes(s) for s in back]
    )[1]
    return whole(arrived, spans)


def shares(vectors: Sequence[tuple[Tensor, str]], size: int) -> list[Tensor]:
    """For each of `size` ranks the coded part of the vectors that it owns, with room for a
    header.
    """
    cuts = [coding.cuts(v.numel(), code, size) for v, code in vectors]
    return [
        _pack(
            [
                coding.encode(code, v[c[j] : c[j + 1]])
                for (v, code), c in zip(vectors, cuts, strict=True)
            ]
        )
        for j in range(size)
    ]


def part_of_mean(
    bodies: list[Any], spans: Spans, weights: Sequence[Sequence[float]], mine: int, size: int = 0
) -> Tensor:
    """The coded mean of the part that rank `mine` of `size` owns (0: as many as bodies), with room
    for a header, from everybody's shares in rank order (used up): coded, or the values of each
    vector as `stretch` gives them."""
    there, back = legs(spans, size or len(bodies))
    means = _means(bodies, there[mine], weights)
    return _pack([coding.encode(code, m) for m, (_, code) in zip(means, back[mine], strict=True)])


def stretch(coded: Tensor, spans: Spans, mine: int, size: int) -> list[Tensor]:
    """The values of the part that rank `mine` of `size` owns, fp32, from vectors that were coded
    uncut (`shares` for one rank).
    """
    out = []
    for (n, code), v in zip(spans, _unpack(coded, spans), strict=True):
        at = coding.cuts(n, code, size)
        out.append(v[at[mine] : at[mine + 1]].clone())
    return out


def whole(bodies: list[Tensor], spans: Spans) -> list[Tensor]:
    """The means, fp32, from everybody's coded parts in rank order (used up)."""
    size, back = len(bodies), legs(spans, len(bodies))[1]
    cuts, out = (
        [coding.cuts(n, code, size) for n, code in spans],
        [torch.empty(n) for n, _ in spans],
    )
    for j in range(size):
        parts = _unpack(bodies.pop(0), back[j])
        for mean, c in zip(out, cuts, strict=True):
            mean[c[j] : c[j + 1]] = next(parts)
        del parts
    return out


def _means(arrived: list[Any], spans: Spans, weights: Sequence[Sequence[float]]) -> list[Tensor]:
    """Weighted means of one's own part of the vectors from everybody's messages, which are used up,
    in rank order.
    """
    sums = [torch.zeros(n) for n, _ in spans]
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
