"""The positions of a section on the wire, block by block and bit by bit, through strings of '0' and
'1', low bits first, byte 0 first.
"""

from __future__ import annotations

from itertools import product


def _bytes(bits: str) -> bytes:
    bits += "0" * (-len(bits) % 8)
    return bytes(int(bits[i : i + 8][::-1], 2) for i in range(0, len(bits), 8))


def low_and_flags(n: int, k: int) -> tuple[int, int]:
    """How many low bits of a position are sent as they are, and the flags of a block (0: no bitmap,
    all bits are low, and 3, 7 and 11 are filled up by one): whatever gives the fewest bits, the
    fewest flags of equal ones, where one block and two have no more bytes than with 12 bits each.
    """
    width = max(1, (n - 1).bit_length())
    whole = {3: 4, 7: 8, 11: 12}.get(width, width)
    found = [(k * whole, 0, whole)]
    for low in range(width):
        flags = (k + ((n - 1) >> low) + 2) // 3
        parts = [flags, 2 * k] + [k * part for part in (8, 4, 2, 1) if low & part]
        if all(sum((m * p + 7) // 8 for p in parts) <= (12 * m * k + 7) // 8 for m in (1, 2)):
            found.append((sum(parts), flags, low))
    _, flags, low = min(found)
    return low, flags


def block_bytes(k: int, values: float | None = None) -> float:
    """Of a whole block of 4096: k values of 8 bits and a scale, or other `values`, and the
    positions.
    """
    low, flags = low_and_flags(4096, k)
    return (2 + k if values is None else values) + (flags + (2 * k if flags else 0) + low * k) / 8


SYMBOLS = {
    (0,): [0], (1,): [1], (2,): [2], (1, 2): [3, 0], (0, 2): [3, 1], (0, 1): [3, 2],
    (0, 1, 2): [3, 3, 0],
}  # fmt: skip
"""By where the ones of three bits are."""


def positions(rows: list[list[int]], n: int) -> bytes:
    """The bytes of the positions of blocks of n elements, each ascending, equally many in each."""
    k = len(rows[0])
    low, flags = low_and_flags(n, k)
    planes = ["", ""]
    for row in rows if flags else []:
        bitmap = ["0"] * (3 * flags)
        for i, p in enumerate(row):
            bitmap[(p >> low) + i] = "1"
        for at in range(0, 3 * flags, 3):
            ones = tuple(j for j in range(3) if bitmap[at + j] == "1")
            planes[0] += "1" if ones else "0"
            planes[1] += "".join(format(s, "02b")[::-1] for s in SYMBOLS.get(ones, []))
    at = 0
    for part in (8, 4, 2, 1):
        if low & part:
            numbers = [p >> at & (1 << part) - 1 for row in rows for p in row]
            planes.append("".join(format(x, f"0{part}b")[::-1] for x in numbers))
            at += part
    return b"".join(map(_bytes, planes))


def all_sets(n: int, k: int) -> list[list[int]]:
    """Every ascending choice of k of n numbers, for small n."""
    return [list(c) for c in product(range(n), repeat=k) if list(c) == sorted(set(c))]
