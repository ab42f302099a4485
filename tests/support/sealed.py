"""A whole message in one piece, as it goes over a connection: made, and checked as a receiver does
it piece by piece.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fsdp_demo import WireError
from fsdp_demo.peers.header import HEADER, Header, Sealed, check_body, claimed_length, open_head


def seal(header: Header, body: Tensor) -> Tensor:
    """Header and body, uint8 [56 + n]."""
    return torch.cat(Sealed.of(header, body))


def unseal(message: Tensor, expected: Header, sender: str) -> tuple[Header, Tensor]:
    """Its header and body, checked against what should come."""
    size = message.numel() - HEADER.size
    if size < 0 or (length := claimed_length(message)) > size:
        raise WireError(f"message from {sender} is truncated: {message.numel()} bytes")
    theirs, crc = open_head(message, expected, length, sender)
    return theirs, check_body(message[HEADER.size :], crc, theirs, sender)
