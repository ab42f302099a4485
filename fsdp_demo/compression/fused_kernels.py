"""The kernels of `fused.py`, which launches them; to be imported where there is `triton`.

Each program works on one block, `pack` on eight, which fill whole bytes of every plane. Only
operations that IEEE 754 defines make bytes: divisions are `div_rn`, sums are folded in halves.
Names in capitals are compiled in: K values of a block, PK the power of two from K on, ROWS and COLS
of the block, BITS of its number format, FLAGS and LOW of `sparse.Form`, PF the power of two from
FLAGS on. A group's scales begin at byte `begin` of a section, `codes_at` and `positions_at` are
counted from there; `n` is its number of blocks. A table (`pointers`, `tensor`, `offset`, `stride`)
has of each block its tensor, the first element in it, and the elements from row to row; the pointer
0 is a tensor that is not there.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

ROUND = tl.constexpr(12582912.0)  # x + ROUND - ROUND is x rounded to even, |x| < 2^22
SHIFT = tl.constexpr(512)  # added to the codes in a tile, where 0 is a cell that was not sent
# numbers for which nothing is compiled anew
ANY = ["begin", "codes_at", "positions_at", "n", "first", "size", "share", "beta", "gain"]


@triton.jit
def _bf16(x):
    """The bits of the nearest bf16, ties to even, of x >= 0 or NaN."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == x, (bits + 0x7FFF + (bits >> 16 & 1)) >> 16, 0x7FC0)


@triton.jit
def _cells(ROWS: tl.constexpr, COLS: tl.constexpr):
    """The numbers of a tile's cells, and which of them the block fills."""
    y, x = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    return y * 64 + x, (y < ROWS) & (x < COLS)


@triton.jit
def _place(pointers, tensor, offset, stride, b):
    """The addresses of a block's cells in its tensor, and whether that is there."""
    y, x = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    address = tl.load(pointers + tl.load(tensor + b))
    at = tl.load(offset + b) + y * tl.load(stride + b) + x
    return address.to(tl.pointer_type(tl.float32)) + at, address != 0


@triton.jit(do_not_specialize=ANY)
def accumulate(
    pointers, tensor, offset, stride, before, bad, left, right, work, beta, gain,
    ROWS: tl.constexpr, COLS: tl.constexpr, DELTA: tl.constexpr, DCT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """work = beta work + gain T(x), x being tensors or `before` minus them; `bad`: x is 0."""
    b = tl.program_id(0).to(tl.int64)
    cell, inside = _cells(ROWS, COLS)
    source, there = _place(pointers, tensor, offset, stride, b)
    x = tl.load(source, mask=inside & there, other=0.0)
    if DELTA:
        x = tl.load(before + b * 4096 + cell, mask=inside, other=0.0) - x
    x = tl.where(tl.load(bad) != 0, 0.0, x)
    if DCT:
        half = tl.dot(tl.load(left + cell), x, input_precision=PRECISION)
        x = tl.dot(half, tl.load(right + cell), input_precision=PRECISION)
    kept = work + b * 4096 + cell
    tl.store(kept, beta * tl.load(kept) + gain * x, mask=inside)


@triton.jit
def select(work, index, values, K: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Positions (int16 [n, K]) and values (fp32) of the largest magnitudes, as `top_k` has them."""
    b = tl.program_id(0).to(tl.int64)
    cell, inside = _cells(ROWS, COLS)
    found = tl.load(work + b * 4096 + cell)
    key = tl.where(inside, found.to(tl.int32, bitcast=True) & 0x7FFFFFFF, -1)
    last = 0  # the K-th largest magnitude, bit by bit
    for i in range(31):
        more = last | (1 << (30 - i))
        last = tl.where(tl.sum(tl.sum((key >= more).to(tl.int32), 1), 0) >= K, more, last)
    above = tl.sum(tl.sum((key > last).to(tl.int32), 1), 0)
    flat, key = tl.arange(0, 4096), tl.reshape(key, (4096,))
    tied = (key == last).to(tl.int32)
    chosen = (key > last) | ((tied > 0) & (tl.cumsum(tied, 0) <= K - above))
    at = b * K + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(index + at, (flat // 64 * COLS + flat % 64).to(tl.int16), mask=chosen)
    tl.store(values + at, tl.reshape(found, (4096,)), mask=chosen)


@triton.jit
def _folded(x, PK: tl.constexpr):
    """The sum of x [PK], folded in halves as `formats._sum` does."""
    for j in tl.static_range(7):
        if PK >> j > 1:
            x = tl.sum(tl.reshape(x, (2, PK >> j + 1)), 0)  # two terms: one order
    return tl.sum(x, 0)


@triton.jit
def _store_scale(at, bits):
    tl.store(at, (bits & 255).to(tl.uint8))  # in bytes: a section may begin at an odd one
    tl.store(at + 1, (bits >> 8 & 255).to(tl.uint8))


@triton.jit(do_not_specialize=ANY)
def code(values, codes, data, begin, BITS: tl.constexpr, K: tl.constexpr, PK: tl.constexpr):
    """Codes (uint8 [n, K], not packed) of values, and their scales in the section `data`."""
    b, i = tl.program_id(0).to(tl.int64), tl.arange(0, PK)
    v = tl.load(values + b * K + i, mask=i < K, other=0.0)
    raw = v.to(tl.int32, bitcast=True)
    size = (raw & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    if BITS == 8:
        # of bits: NaN is the largest
        bits = _bf16(tl.div_rn(tl.max(raw & 0x7FFFFFFF, 0).to(tl.float32, bitcast=True), 127.0))
        step = tl.where(bits == 0, float("inf"), (bits << 16).to(tl.float32, bitcast=True))
        q = (tl.div_rn(v, tl.zeros_like(v) + step) + ROUND) - ROUND
        q = tl.where(q == q, tl.minimum(tl.maximum(q, -127.0), 127.0), 0.0)
        number = q.to(tl.int32) & 255
        _store_scale(data + begin + 2 * b, bits)
    else:
        mean = tl.div_rn(_folded(size, PK), K * 1.0)
        number = raw >> 31 & 1
        if BITS == 1:
            _store_scale(data + begin + 2 * b, _bf16(mean))
        else:
            high = (size >= mean) & (i < K)
            number = 2 * number + high.to(tl.int32)
            upper, many = tl.where(high, size, 0.0), tl.sum(high.to(tl.int32), 0)
            low = tl.div_rn(_folded(size - upper, PK), tl.maximum(K - many, 1).to(tl.float32))
            top = tl.div_rn(_folded(upper, PK), tl.maximum(many, 1).to(tl.float32))
            finite = mean < float("inf")
            _store_scale(data + begin + 4 * b, tl.where(finite, _bf16(low), 0x7FC0))
            _store_scale(data + begin + 4 * b + 2, tl.where(finite, _bf16(top), 0x7FC0))
    tl.store(codes + b * K + i, number.to(tl.uint8), mask=i < K)


@triton.jit
def _bit(index, i, block, n, K: tl.constexpr, LOW: tl.constexpr):
    """The bit of the bitmap that position i of a block sets; far below 0 where there is none."""
    there = (i >= 0) & (i < K) & (block < n)
    p = tl.load(index + block * K + i, mask=there, other=0).to(tl.int32)
    return tl.where(there, (p >> LOW) + i, -9)


@triton.jit
def _write_low(numbers, base, n, g, LOW: tl.constexpr, K: tl.constexpr, PS: tl.constexpr):
    """Write the LOW lowest bits of the numbers of 8 blocks in their planes, from `base` on."""
    for j in tl.static_range(4):  # parts of 8, 4, 2 and 1 bit, as `formats.cut` has them
        if LOW & (8 >> j):
            line, part = tl.arange(0, PS * 4), tl.arange(0, 1 << j)[None, :]
            at = line[:, None] * (1 << j) + part
            here, room = K * (8 >> j), (n * K * (8 >> j) + 7) // 8
            there = (g * 8 + at // K < n) & (line[:, None] < here)
            p = tl.load(numbers + g * 8 * K + at, mask=there, other=0).to(tl.int32)
            p = p >> (LOW & (15 ^ (16 >> j) - 1)) & ((1 << (8 >> j)) - 1)
            whole = tl.sum(p << part * (8 >> j), 1).to(tl.uint8)
            tl.store(base + g * here + line, whole, mask=(line < here) & (g * here + line < room))
            base += room


@triton.jit(do_not_specialize=ANY)
def pack(
    index, codes, data, begin, codes_at, positions_at, n, BITS: tl.constexpr, FLAGS: tl.constexpr,
    LOW: tl.constexpr, K: tl.constexpr, PK: tl.constexpr, PF: tl.constexpr, PS: tl.constexpr,
):  # fmt: skip
    """Write the codes and the planes of the positions of 8 blocks into a section."""
    g = tl.program_id(0).to(tl.int64)
    _write_low(codes, data + begin + codes_at, n, g, BITS, K, PS)
    base = data + begin + positions_at
    if FLAGS > 0:
        line, part, room = tl.arange(0, PF), tl.arange(0, 8)[None, :], (n * FLAGS + 7) // 8
        at = line[:, None] * 8 + part
        block, flag = g * 8 + at // FLAGS, at % FLAGS
        below = tl.zeros((PF, 8), tl.int32)  # how many of the block's ones lie in earlier thirds
        for j in tl.static_range(7):
            if PK >> j > 1:
                i = below + (PK >> j + 1) - 1
                earlier = (i < K) & (_bit(index, i, block, n, K, LOW) // 3 < flag)
                below += tl.where(earlier, PK >> j + 1, 0)
        one = _bit(index, below, block, n, K, LOW)
        whole = tl.sum(((one >= 0) & (one // 3 == flag)).to(tl.int32) << part, 1).to(tl.uint8)
        at = g * FLAGS + line
        tl.store(base + at, whole, mask=(line < FLAGS) & (at < room))
        base += room
        line, part, room = tl.arange(0, PS), tl.arange(0, 4)[None, :], (n * 2 * K + 7) // 8
        at = line[:, None] * 4 + part
        block, i = g * 8 + at // K, at % K
        this = _bit(index, i, block, n, K, LOW)
        before = _bit(index, i - 1, block, n, K, LOW)
        after = _bit(index, i + 1, block, n, K, LOW)
        again = (this // 3 == before // 3) & (before >= 0)
        more = (this // 3 == after // 3) & (after >= 0)
        symbol = tl.where(more, 3, tl.where(again, 3 - this % 3 - before % 3, this % 3))
        whole = tl.sum(tl.where(this >= 0, symbol, 0) << part * 2, 1).to(tl.uint8)
        at = g * 2 * K + line
        tl.store(base + at, whole, mask=(line < 2 * K) & (at < room))
        base += room
    _write_low(index, base, n, g, LOW, K, PS)


@triton.jit
def _bits(base, at, there, W: tl.constexpr):
    """The number of W bits at place `at` of a plane."""
    byte = tl.load(base + (at * W >> 3), mask=there, other=0).to(tl.int32)
    return byte >> (at * W & 7).to(tl.int32) & ((1 << W) - 1)


@triton.jit
def _read_low(base, n, b, i, LOW: tl.constexpr, K: tl.constexpr):
    """The inverse of `_write_low`, of one block."""
    found = tl.zeros_like(i)
    for j in tl.static_range(4):
        if LOW & (8 >> j):
            part = _bits(base, b * K + i, i < K, 8 >> j)
            found += part << (LOW & (15 ^ (16 >> j) - 1))
            base += (n * K * (8 >> j) + 7) // 8
    return found


@triton.jit
def _positions(
    base, n, b, i, FLAGS: tl.constexpr, LOW: tl.constexpr, K: tl.constexpr, PF: tl.constexpr,
    MOST: tl.constexpr,
):  # fmt: skip
    """Positions in a block, those that `sparse.decode_positions` finds in honest bytes."""
    high = tl.zeros_like(i)
    if FLAGS > 0:
        f = tl.arange(0, PF)
        ones = tl.cumsum(tl.where(f < FLAGS, _bits(base, b * FLAGS + f, f < FLAGS, 1), 0), 0)
        base += (n * FLAGS + 7) // 8
        this, after = _bits(base, b * K + i, i < K, 2), _bits(base, b * K + i + 1, i + 1 < K, 2)
        one = _bits(base, b * K + i - 1, (i > 0) & (i <= K), 2)
        two = _bits(base, b * K + i - 2, (i > 1) & (i < K), 2)
        first = one != 3
        lowest = tl.where(this < 3, this, (after == 0).to(tl.int32))
        second = tl.where(this < 3, 2 - (this == 2).to(tl.int32), 1)
        inside = tl.where(first, lowest, tl.where(two == 3, 2, second))
        number = tl.cumsum((first & (i < K)).to(tl.int32), 0)
        three = tl.zeros_like(i)  # the flag before which less than `number` are set
        for j in tl.static_range(8):
            if PF >> j > 1:
                probed = tl.gather(ones, three + (PF >> j + 1) - 1, 0)
                three += tl.where(probed < number, PF >> j + 1, 0)
        high = 3 * three + inside - i
        base += (n * 2 * K + 7) // 8
    found = (high << LOW) + _read_low(base, n, b, i, LOW, K)
    return tl.minimum(tl.maximum(found, 0), MOST)


@triton.jit
def _load_scale(at):
    bits = tl.load(at).to(tl.int32) | tl.load(at + 1).to(tl.int32) << 8
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=ANY)
def mean(
    bodies, factors, pointers, tensor, offset, stride, out, left, right,
    begin, codes_at, positions_at, n, first, size, share,
    BITS: tl.constexpr, FLAGS: tl.constexpr, LOW: tl.constexpr,
    K: tl.constexpr, PK: tl.constexpr, PF: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    INVERSE: tl.constexpr, SIGN: tl.constexpr, TABLE: tl.constexpr, SENDERS: tl.constexpr,
    CLIP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The mean of blocks from `first` on in `size` sections, added in rank order: into tensors, or
    into slots from `out` on. It goes over SENDERS, or each replica counts with `share`."""
    b, i = tl.program_id(0).to(tl.int64) + first, tl.arange(0, PK)
    cell, inside = _cells(ROWS, COLS)
    count = tl.zeros((64, 64), tl.float32)
    total = tl.zeros((64, 64), tl.float32)
    for turn in range(0 if SENDERS else size, 2 * size):  # who has sent a cell, and then what
        data = tl.load(bodies + turn % size).to(tl.pointer_type(tl.uint8)) + begin
        number = _read_low(data + codes_at, n, b, i, BITS, K)
        place = _positions(data + positions_at, n, b, i, FLAGS, LOW, K, PF, ROWS * COLS - 1)
        row = tl.where(i < K, place // COLS, 64)
        one = (tl.arange(0, 64)[:, None] == row[None, :]).to(tl.float16)
        mine = (place % COLS)[:, None] == tl.arange(0, 64)[None, :]
        # exact: small whole numbers, of which each sum has one
        held = tl.dot(one, tl.where(mine, (number + SHIFT)[:, None], 0).to(tl.float16))
        number = held.to(tl.int32) - SHIFT
        STEP: tl.constexpr = 4 if BITS == 2 else 2
        scale = _load_scale(data + STEP * b)
        if BITS == 8:
            value = ((number ^ 128) - 128).to(tl.float32) * scale
        elif BITS == 1:
            value = (1 - 2 * number).to(tl.float32) * scale
        else:
            scale = tl.where((number & 1) != 0, _load_scale(data + 4 * b + 2), scale)
            value = (1 - (number & 2)).to(tl.float32) * scale
        sent = tl.where(held != 0, value, 0.0)
        if CLIP:
            sent = sent * tl.load(factors + turn % size * n + b)
        if not SENDERS:
            total += sent * share
        elif turn < size:
            count += (sent != 0).to(tl.float32)
        else:
            total += tl.div_rn(sent, tl.maximum(count, 1.0))
    if INVERSE:
        half = tl.dot(total, tl.load(right + cell), input_precision=PRECISION)
        total = tl.dot(tl.load(left + cell), half, input_precision=PRECISION)
    if SIGN:
        sign = (total > 0).to(tl.float32) - (total < 0).to(tl.float32)
        total = tl.where(total == total, sign, total)
    if TABLE:
        target, there = _place(pointers, tensor, offset, stride, b)
        tl.store(target, total, mask=inside & there)
    else:
        tl.store(out + (b - first) * 4096 + cell, total)
