"""Numbers of 1, 2 or 4 bits joined in bytes, the first in the lowest bits."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from .staging import upload

WORDS = {4: torch.int16, 2: torch.int32, 1: torch.int64}
"""What holds as many bytes as there are numbers of so many bits in one."""
# A product by it brings the bits of each byte of a word next to each other, into its highest byte.
JOINED = {
    bits: sum(1 << 64 // bits - 8 - (8 - bits) * i for i in range(8 // bits)) for bits in WORDS
}


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes uint8 [n] below 2^bits as uint8 [ceil(n * bits / 8)]; unused bits of the last are 0."""
    if bits == 8:
        return codes
    if codes.numel() % (8 // bits):
        codes = F.pad(codes, (0, -codes.numel() % (8 // bits)))
    word = codes.view(WORDS[bits]) * JOINED[bits]
    # the cast drops what the sign has filled
    return word.bitwise_right_shift_(64 // bits - 8).to(torch.uint8)


def unpack(data: Tensor, bits: int) -> Tensor:
    """The inverse of `pack`: uint8 [n * 8 / bits], the last ones may be padding."""
    if bits == 8:
        return data
    if bits == 4:
        pairs = data.to(torch.int16)
        return (pairs | pairs << 4).bitwise_and_(0x0F0F).view(torch.uint8)
    return _codes(bits, data.device).index_select(0, data.to(torch.int32)).view(torch.uint8)


@cache
def _codes(bits: int, device: torch.device) -> Tensor:
    """The codes that each byte holds, as one word [256]."""
    codes = (
        torch.arange(256, device="cpu")[:, None] >> bits * torch.arange(8 // bits, device="cpu")
        & (1 << bits) - 1
    )
    return upload(codes.to(torch.uint8).view(WORDS[bits]).view(-1), device)
