"""A whole message in one piece, as it goes over a connection: made, and checked as a receiver does
it piece by piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fsdp_demo import WireError
from fsdp_demo.peers import collectives
from fsdp_demo.peers.header import HEADER, Header, Sealed, check_body, claimed, open_head


def seal(header: Header, body: Tensor) -> Tensor:
    """Header and body, uint8 [56 + n]."""
    return torch.cat(Sealed.of(header, body))


def unseal(message: Tensor, expected: Header, sender: str) -> tuple[Header, Tensor]:
    """Its header and body, checked against what should come."""
    size, head = message.numel() - HEADER.size, bytes(message[: HEADER.size].tolist())
    if size < 0 or (length := claimed(head)[1]) > size:
        raise WireError(f"message from {sender} is truncated: {message.numel()} bytes")
    theirs, crc = open_head(head, expected, length, sender)
    return theirs, check_body(message[HEADER.size :], crc, theirs, sender)


def shares(vectors: Sequence[tuple[Tensor, str]], size: int) -> list[Tensor]:
    """For each of `size` ranks the coded part of the vectors that it owns."""
    return [collectives.share(vectors, size, j) for j in range(size)]


def part_of_mean(
    bodies: list[Any],
    spans: collectives.Spans,
    weights: Sequence[Sequence[float]],
    mine: int,
    size: int,
) -> Tensor:
    """The coded mean of the part that rank `mine` of `size` owns."""
    back = collectives.legs(spans, size)[1][mine]
    out = torch.empty(collectives.coding.total_bytes(back), dtype=torch.uint8)
    collectives.part_of_mean(bodies, spans, weights, mine, size, out)
    return out
