"""12-bit packing through strings of '0' and '1': number i takes bits 12 i .. 12 i + 11, low bits
first, byte 0 first.
"""

from __future__ import annotations


def pack12(numbers: list[int]) -> bytes:
    """The bit string of all numbers, filled with zeros to whole bytes."""
    bits = "".join(format(n, "012b")[::-1] for n in numbers)
    bits += "0" * (-len(bits) % 8)
    return bytes(int(bits[i : i + 8][::-1], 2) for i in range(0, len(bits), 8))


def unpack12(data: bytes, count: int) -> list[int]:
    """The first `count` numbers of a buffer that `pack12` made."""
    bits = "".join(format(byte, "08b")[::-1] for byte in data)
    return [int(bits[12 * i : 12 * i + 12][::-1], 2) for i in range(count)]
