"""The checksum of a body: by hand, and what it sees."""

from __future__ import annotations

import gc
import random
import weakref
import zlib

import pytest
import torch

from fsdp_demo.peers import header
from fsdp_demo.peers.header import ROW, checksum, memory

SIZES = [0, 1, 8 * ROW - 1, 8 * ROW, 8 * ROW + 3, 5 * 8 * ROW + 8 * 7 + 1, (1 << 20) + 16391]


def body(n: int, seed: int = 0) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n,), dtype=torch.uint8, generator=made)


def by_hand(data: bytes) -> int:
    """The documented sums, without the library."""
    rows = len(data) // (8 * ROW)
    words = [int.from_bytes(data[8 * i : 8 * i + 8], "little") for i in range(rows * ROW)]
    sums = [sum(words[c::ROW]) for c in range(ROW)] if rows else []
    sums += [sum(words[r * ROW : (r + 1) * ROW]) for r in range(rows)]
    coded = b"".join((s % 2**64).to_bytes(8, "little") for s in sums)
    return zlib.crc32(coded + data[8 * ROW * rows :])


@pytest.mark.parametrize("by", ["C", "torch"])
@pytest.mark.parametrize("n", SIZES)
def test_checksum_by_hand(n: int, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checksum is that of the documented sums, also where the build had no C compiler."""
    if by == "torch":
        monkeypatch.setattr(header, "add_up", None)
    elif header.add_up is None:
        pytest.skip("the build had no C compiler")
    data = body(n)
    assert checksum(data) == by_hand(bytes(data.tolist()))
    if n < 8 * ROW:
        assert checksum(data) == zlib.crc32(bytes(data.tolist()))


@pytest.mark.parametrize("shift", range(1, 8))
def test_checksum_at_any_alignment(shift: int) -> None:
    """The checksum of a body is the same wherever it lies in memory."""
    data = body(40_000)
    room = torch.empty(data.numel() + shift, dtype=torch.uint8)
    room[shift:] = data
    assert checksum(room[shift:]) == checksum(data)


def changes(n: int, rng: random.Random) -> dict[str, torch.Tensor]:
    """Bodies that are not `body(n)`, a kind of damage each."""
    data = body(n)
    out = {name: data.clone() for name in ("bit", "byte", "words", "rows", "pages", "zeros")}
    at = rng.randrange(n)
    out["bit"][at] ^= 1 << rng.randrange(8)
    out["byte"][at] = (int(data[at]) + rng.randrange(1, 256)) % 256
    out["cut"] = data[: rng.randrange(n)].clone()
    out["longer"] = torch.cat([data, data.new_zeros(rng.randrange(1, 5000))])
    for name, size in (("words", 8), ("rows", 8 * ROW), ("pages", 4096)):
        a, b = rng.sample(range(n // size), 2)
        out[name][a * size : (a + 1) * size] = data[b * size : (b + 1) * size]
        out[name][b * size : (b + 1) * size] = data[a * size : (a + 1) * size]
    begin = rng.randrange(n - 5000)
    out["zeros"][begin : begin + rng.randrange(100, 5000)] = 0
    begin = rng.randrange(n - 100)
    out["burst"] = data.clone()
    out["burst"][begin : begin + 100] = body(100, seed=rng.randrange(2**32))
    out["late"] = torch.cat([data[1:], data[:1]])
    return out


def test_checksum_sees_damage() -> None:
    """Each kind of damage changes the checksum."""
    rng, n = random.Random(0), 9 * 8 * ROW + 5003
    right = checksum(body(n))
    for _ in range(40):
        for name, damaged in changes(n, rng).items():
            assert checksum(damaged) != right, name


def test_checksum_sees_two_swapped_words() -> None:
    """Two words that have changed places change the checksum, wherever they lie."""
    rng, data = random.Random(1), body(6 * 8 * ROW)
    right, words = checksum(data), data.view(torch.int64)
    for a, b in [(0, 1), (0, ROW), (5, 5 + 3 * ROW), (7, 6 * ROW - 1)] + [
        tuple(rng.sample(range(6 * ROW), 2)) for _ in range(60)
    ]:
        words[a], words[b] = words[b].clone(), words[a].clone()
        assert checksum(data) != right
        words[a], words[b] = words[b].clone(), words[a].clone()
    assert checksum(data) == right


def test_memory_buffer_keeps_its_tensor_alive() -> None:
    """A buffer keeps its tensor alive: nobody else holds a copy from a GPU, whose memory would be
    another's before it is read.
    """
    held = weakref.ref(data := body(100))
    buffer, expected = memory(data), bytes(data.tolist())
    del data
    gc.collect()
    assert held() is not None and bytes(memoryview(buffer)) == expected
    del buffer
    gc.collect()
    assert held() is None
