"""Blocks on a GPU in kernels of Triton, with the bytes that `sparse.py` makes of them (to be
imported where `triton` is there; `fused.py` launches them).

A program works on one block, `pack` on eight, which fill whole bytes of every plane. Only
operations that IEEE 754 defines make bytes: division is `div_rn`, sums are folded in halves, and
nothing is contracted to a multiply-add (`enable_fp_fusion=False`). Names in capitals are compiled
in; all other numbers are arguments that Triton must not specialise, so that nothing is compiled in
a step.

Arguments of several kernels: K values of a block, PK the power of two from it on; ROWS, COLS
extent of a block; CODE its number format; FLAGS, LOW of `sparse.Form`, PF the power of two from
FLAGS on; `begin` the first byte of a group in a section, `codes_at` and `positions_at` those of its
codes and positions, `n` its blocks. A table (`pointers`, `tensor`, `offset`, `stride`) has for each
block the number of its tensor, the first element in it and the elements from row to row; 0 in
`pointers` stands for a tensor that is not there.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROUND = tl.constexpr(12582912.0)  # x + ROUND - ROUND is x rounded to even, |x| < 2^22
SHIFT = tl.constexpr(512)  # added to codes in a tile, where 0 says that nothing was sent
PLAIN = [
    *("begin", "codes_at", "positions_at", "n", "first", "size"),
    *("share", "beta", "gain"),
]


@triton.jit
def _bf16(x):
    """The bits of the nearest bf16, ties to even, of x >= 0 or NaN."""
    bits = x.to(tl.int32, bitcast=True)
    near = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return tl.where(x == x, near, 0x7FC0)


@triton.jit
def _cells(ROWS: tl.constexpr, COLS: tl.constexpr):
    """The numbers of a tile's cells, and which of them the block fills."""
    edge = tl.arange(0, 64)
    inside = (edge[:, None] < ROWS) & (edge[None, :] < COLS)
    return edge[:, None] * 64 + edge[None, :], inside


@triton.jit
def _place(pointers, tensor, offset, stride, b):
    """The addresses of a block's cells in its tensor, and whether that is there."""
    edge = tl.arange(0, 64)
    address = tl.load(pointers + tl.load(tensor + b))
    at = tl.load(offset + b) + edge[:, None] * tl.load(stride + b) + edge[None, :]
    return address.to(tl.pointer_type(tl.float32)) + at, address != 0


@triton.jit(do_not_specialize=PLAIN)
def accumulate(
    pointers, tensor, offset, stride, before, bad, left, right, work, beta, gain,
    ROWS: tl.constexpr, COLS: tl.constexpr, DELTA: tl.constexpr, DCT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """work = beta work + gain T(source), the source being tensors, or `before` minus them; zeros
    where `bad` is not zero."""
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
    place = flat if COLS == 64 else flat // 64 * COLS + flat % 64
    tl.store(index + at, place.to(tl.int16), mask=chosen)
    tl.store(values + at, tl.reshape(found, (4096,)), mask=chosen)


@triton.jit
def _folded(x, PK: tl.constexpr):
    """The sum of x [PK], folded in halves as `formats._sum` does."""
    for j in tl.static_range(7):
        if PK >> j > 1:
            x = tl.sum(tl.reshape(x, (2, PK >> j + 1)), 0)  # two terms: one order
    return tl.sum(x, 0)


@triton.jit(do_not_specialize=PLAIN)
def code(values, codes, data, begin, CODE: tl.constexpr, K: tl.constexpr, PK: tl.constexpr):
    """Codes (uint8 [n, K], not packed) of values, and their scales in the section `data`."""
    b, i = tl.program_id(0).to(tl.int64), tl.arange(0, PK)
    v = tl.load(values + b * K + i, mask=i < K, other=0.0)
    raw = v.to(tl.int32, bitcast=True)
    size = (raw & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    if CODE == "int8" or CODE == "int4":
        largest: tl.constexpr = 127.0 if CODE == "int8" else 7.0
        # of bits: NaN is the largest
        top = tl.max(raw & 0x7FFFFFFF, 0).to(tl.float32, bitcast=True)
        bits = _bf16(tl.div_rn(top, largest))
        scale = (bits << 16).to(tl.float32, bitcast=True)
        step = tl.where(bits == 0, float("inf"), scale)
        q = (tl.div_rn(v, tl.zeros_like(v) + step) + ROUND) - ROUND
        q = tl.where(q == q, tl.minimum(tl.maximum(q, -largest), largest), 0.0).to(tl.int32)
        number = q & (255 if CODE == "int8" else 15)
        _store_scale(data + begin + 2 * b, bits)
    else:
        mean = tl.div_rn(_folded(size, PK), K * 1.0)
        if CODE == "1bit":
            number = raw >> 31 & 1
            _store_scale(data + begin + 2 * b, _bf16(mean))
        else:
            high = (size >= mean) & (i < K)
            upper, many = tl.where(high, size, 0.0), tl.sum(high.to(tl.int32), 0)
            number = (raw >> 30 & 2) + high.to(tl.int32)
            low, top = _folded(size - upper, PK), _folded(upper, PK)
            low = tl.div_rn(low, tl.maximum(K - many, 1).to(tl.float32))
            top = tl.div_rn(top, tl.maximum(many, 1).to(tl.float32))
            known = mean < float("inf")
            _store_scale(data + begin + 4 * b, tl.where(known, _bf16(low), 0x7FC0))
            _store_scale(data + begin + 4 * b + 2, tl.where(known, _bf16(top), 0x7FC0))
    tl.store(codes + b * K + i, number.to(tl.uint8), mask=i < K)


@triton.jit
def _store_scale(at, bits):
    """Store bf16 bits as bytes: a section may begin at an odd one."""
    tl.store(at, (bits & 255).to(tl.uint8))
    tl.store(at + 1, (bits >> 8 & 255).to(tl.uint8))


@triton.jit
def _load_scale(at):
    bits = tl.load(at).to(tl.int32) | tl.load(at + 1).to(tl.int32) << 8
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def _bit(index, i, block, n, K: tl.constexpr, LOW: tl.constexpr):
    """The bit of the bitmap that position i of a block sets; far below 0 where there is none."""
    there = (i >= 0) & (i < K) & (block < n)
    p = tl.load(index + block * K + i, mask=there, other=0).to(tl.int32)
    return tl.where(there, (p >> LOW) + i, -9)


@triton.jit
def _write(
    numbers, base, n, g, LOW: tl.constexpr, K: tl.constexpr, PS: tl.constexpr, W: tl.constexpr
):
    """Write the part of W low bits of the numbers of 8 blocks, if LOW has one, as `formats.pack`
    does; the address behind its plane."""
    if LOW & W:
        byte, part = tl.arange(0, PS * 4)[:, None], tl.arange(0, 8 // W)[None, :]
        at = byte * (8 // W) + part
        block, i = g * 8 + at // K, at % K
        there = (block < n) & (byte < K * W)
        p = tl.load(numbers + block * K + i, mask=there, other=0).to(tl.int32)
        found = p >> (LOW & (15 ^ (2 * W - 1))) & ((1 << W) - 1)
        line = tl.arange(0, PS * 4)
        tl.store(
            base + g * K * W + line, tl.sum(found << part * W, 1).to(tl.uint8),
            mask=(line < K * W) & (g * K * W + line < (n * K * W + 7) // 8),
        )  # fmt: skip
        base += (n * K * W + 7) // 8
    return base


@triton.jit
def _write_low(numbers, base, n, g, LOW: tl.constexpr, K: tl.constexpr, PS: tl.constexpr):
    base = _write(numbers, base, n, g, LOW, K, PS, 8)
    base = _write(numbers, base, n, g, LOW, K, PS, 4)
    base = _write(numbers, base, n, g, LOW, K, PS, 2)
    return _write(numbers, base, n, g, LOW, K, PS, 1)


@triton.jit(do_not_specialize=PLAIN)
def pack(
    index, codes, data, begin, codes_at, positions_at, n, BITS: tl.constexpr, FLAGS: tl.constexpr,
    LOW: tl.constexpr, K: tl.constexpr, PK: tl.constexpr, PF: tl.constexpr, PS: tl.constexpr,
):  # fmt: skip
    """Write the codes and the planes of the positions of 8 blocks into a section."""
    g = tl.program_id(0).to(tl.int64)
    _write_low(codes, data + begin + codes_at, n, g, BITS, K, PS)
    base = data + begin + positions_at
    if FLAGS > 0:
        at = tl.arange(0, PF)[:, None] * 8 + tl.arange(0, 8)[None, :]
        block, flag = g * 8 + at // FLAGS, at % FLAGS
        below = tl.zeros((PF, 8), tl.int32)  # how many of the block's ones lie in earlier thirds
        for j in tl.static_range(7):
            if PK >> j > 1:
                i = below + (PK >> j + 1) - 1
                earlier = (i < K) & (_bit(index, i, block, n, K, LOW) // 3 < flag)
                below += tl.where(earlier, PK >> j + 1, 0)
        one = _bit(index, below, block, n, K, LOW)
        found = ((one >= 0) & (one // 3 == flag)).to(tl.int32) << tl.arange(0, 8)[None, :]
        line, room = tl.arange(0, PF), (n * FLAGS + 7) // 8
        tl.store(
            base + g * FLAGS + line, tl.sum(found, 1).to(tl.uint8),
            mask=(line < FLAGS) & (g * FLAGS + line < room),
        )  # fmt: skip
        base += room
        part = tl.arange(0, 4)[None, :]
        at = tl.arange(0, PS)[:, None] * 4 + part
        block, i = g * 8 + at // K, at % K
        this = _bit(index, i, block, n, K, LOW)
        before = _bit(index, i - 1, block, n, K, LOW)
        after = _bit(index, i + 1, block, n, K, LOW)
        again = (this // 3 == before // 3) & (before >= 0)
        more = (this // 3 == after // 3) & (after >= 0)
        symbol = tl.where(more, 3, tl.where(again, 3 - this % 3 - before % 3, this % 3))
        symbol = tl.where(this >= 0, symbol, 0)
        line, room = tl.arange(0, PS), (n * 2 * K + 7) // 8
        tl.store(
            base + g * 2 * K + line, tl.sum(symbol << part * 2, 1).to(tl.uint8),
            mask=(line < 2 * K) & (g * 2 * K + line < room),
        )  # fmt: skip
        base += room
    _write_low(index, base, n, g, LOW, K, PS)


@triton.jit
def _read(base, n, b, i, LOW: tl.constexpr, K: tl.constexpr, W: tl.constexpr):
    """What the part of W low bits adds to a number, and the address behind its plane."""
    found = tl.zeros_like(i)
    if LOW & W:
        at = (b * K + i) * W
        byte = tl.load(base + (at >> 3), mask=i < K, other=0).to(tl.int32)
        found = (byte >> (at & 7).to(tl.int32) & ((1 << W) - 1)) << (LOW & (15 ^ (2 * W - 1)))
        base += (n * K * W + 7) // 8
    return found, base


@triton.jit
def _read_low(base, n, b, i, LOW: tl.constexpr, K: tl.constexpr):
    eight, base = _read(base, n, b, i, LOW, K, 8)
    four, base = _read(base, n, b, i, LOW, K, 4)
    two, base = _read(base, n, b, i, LOW, K, 2)
    one, base = _read(base, n, b, i, LOW, K, 1)
    return eight + four + two + one


@triton.jit
def _symbol(data, b, i, K: tl.constexpr):
    there = (i >= 0) & (i < K)
    at = 2 * (b * K + i)
    byte = tl.load(data + (at >> 3), mask=there, other=0).to(tl.int32)
    return byte >> (at & 7).to(tl.int32) & 3


@triton.jit
def _positions(
    base, n, b, i, FLAGS: tl.constexpr, LOW: tl.constexpr, K: tl.constexpr, PF: tl.constexpr,
    MOST: tl.constexpr,
):  # fmt: skip
    """Positions in a block, those that `sparse.decode_positions` finds in honest bytes."""
    high = tl.zeros_like(i)
    if FLAGS > 0:
        f = tl.arange(0, PF)
        at = b * FLAGS + f
        byte = tl.load(base + (at >> 3), mask=f < FLAGS, other=0).to(tl.int32)
        ones = tl.cumsum(tl.where(f < FLAGS, byte >> (at & 7).to(tl.int32) & 1, 0), 0)
        base += (n * FLAGS + 7) // 8
        this, after = _symbol(base, b, i, K), _symbol(base, b, i + 1, K)
        one, two = _symbol(base, b, i - 1, K), _symbol(base, b, i - 2, K)
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
def _scales(at, b, CODE: tl.constexpr):
    """The lower and the upper scale of a block; the same where it has one."""
    STEP: tl.constexpr = 4 if CODE == "2bit" else 2
    return _load_scale(at + STEP * b), _load_scale(at + STEP * b + STEP - 2)


@triton.jit
def _level(number, lower, upper, CODE: tl.constexpr):
    """Values of codes."""
    if CODE == "int8":
        value = ((number ^ 128) - 128).to(tl.float32) * lower
    elif CODE == "int4":
        value = ((number ^ 8) - 8).to(tl.float32) * lower
    elif CODE == "2bit":
        value = tl.where(number & 1 != 0, upper, lower) * (1 - (number & 2)).to(tl.float32)
    else:
        value = lower * (1 - 2 * number).to(tl.float32)
    return value


@triton.jit(do_not_specialize=PLAIN)
def norms(
    bodies, out, begin, codes_at, n, CODE: tl.constexpr, BITS: tl.constexpr, K: tl.constexpr,
    PK: tl.constexpr,
):  # fmt: skip
    """The norms fp32 [R, n] of what each replica has sent for a block."""
    b, r, i = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, PK)
    data = tl.load(bodies + r).to(tl.pointer_type(tl.uint8)) + begin
    lower, upper = _scales(data, b, CODE)
    value = _level(_read_low(data + codes_at, n, b, i, BITS, K), lower, upper, CODE)
    value = tl.where(i < K, value, 0.0)
    tl.store(out + r * n + b, tl.sqrt_rn(tl.sum(value * value, 0)))


@triton.jit(do_not_specialize=PLAIN)
def mean(
    bodies, factors, pointers, tensor, offset, stride, out, left, right,
    begin, codes_at, positions_at, n, first, size, share,
    CODE: tl.constexpr, BITS: tl.constexpr, FLAGS: tl.constexpr, LOW: tl.constexpr,
    K: tl.constexpr, PK: tl.constexpr, PF: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    INVERSE: tl.constexpr, SIGN: tl.constexpr, TABLE: tl.constexpr, SENDERS: tl.constexpr,
    CLIP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The mean of blocks from `first` on in `size` sections, added in rank order: into tensors, or
    into slots from `out` on. It goes over SENDERS, or each replica counts with `share`."""
    b = tl.program_id(0).to(tl.int64) + first
    edge, i = tl.arange(0, 64), tl.arange(0, PK)
    cell, inside = _cells(ROWS, COLS)
    count = tl.zeros((64, 64), tl.float32)
    total = tl.zeros((64, 64), tl.float32)
    for turn in range(0 if SENDERS else size, 2 * size):  # who has sent a cell, and then what
        r = turn % size
        data = tl.load(bodies + r).to(tl.pointer_type(tl.uint8)) + begin
        number = _read_low(data + codes_at, n, b, i, BITS, K)
        place = _positions(data + positions_at, n, b, i, FLAGS, LOW, K, PF, ROWS * COLS - 1)
        row = tl.where(i < K, place // COLS, 64)
        one = (edge[:, None] == row[None, :]).to(tl.float16)
        mine = (place % COLS)[:, None] == edge[None, :]
        # exact: small whole numbers, of which each sum has one
        held = tl.dot(one, tl.where(mine, (number + SHIFT)[:, None], 0).to(tl.float16))
        lower, upper = _scales(data, b, CODE)
        sent = tl.where(held != 0, _level(held.to(tl.int32) - SHIFT, lower, upper, CODE), 0.0)
        if CLIP:
            sent = sent * tl.load(factors + r * n + b)
        if SENDERS:
            if turn < size:
                count += (sent != 0).to(tl.float32)
            else:
                total += tl.div_rn(sent, tl.maximum(count, 1.0))
        else:
            total += sent * share
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
