"""Codes of values against per-value oracles and by hand: bytes, errors, and what happens to zeros,
signs and what is not finite.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_demo.compression import formats
from fsdp_demo.compression.formats import CODERS, E2M1, E3M0
from fsdp_demo.config.names import FORMATS
from fsdp_demo.config.parts import CODES

from ..oracles import quantise

quick = settings(deadline=None, max_examples=30, derandomize=True)
GROUPED = tuple(CODERS)
LEVELS = ("2bit", "1bit")
LARGEST = {
    code: float(form.magnitudes[-1]) for code, form in quantise.FORMATS.items() if form.magnitudes
}
SIZES = (0, 1, 2, 3, 5, 7, 31, 32, 33, 64, 97, 256, 257, 300, 521)
shapes = st.tuples(st.integers(0, 5), st.sampled_from(SIZES))
FLOATS = st.floats(-(2.0**119), 2.0**119, width=32)
codes = pytest.mark.parametrize("code", CODES)
grouped = pytest.mark.parametrize("code", GROUPED)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Rows of values whose scales are normal numbers: from even to heavy-tailed, zeros among them,
    of any order of magnitude.
    """
    rows, cols = draw(shapes)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    v = torch.randn(rows, cols, generator=generator)
    power = draw(st.sampled_from((0.0, 0.5, 1.0, 4.0, 12.0)))
    v = v.sign() * v.abs() ** power * 10.0 ** draw(st.integers(-20, 20))
    zeros = draw(st.sampled_from((0.0, 0.5, 0.99)))
    v *= (torch.rand(rows, cols, generator=generator) >= zeros).float()
    return v * torch.where(torch.rand(rows, 1, generator=generator) < 0.2, 2.0**-20, 1.0)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = a.contiguous(), b.contiguous()
    return a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))


def back(code: str, v: torch.Tensor) -> torch.Tensor:
    return formats.decode(code, formats.encode(code, v), *v.shape)


def in_groups(code: str, v: torch.Tensor) -> list[torch.Tensor]:
    """The groups of all rows; of a code without groups, the rows."""
    return [g for row in v for g in (quantise.cut(row, code) if code in GROUPED else [row])]


def check_against_oracle(code: str, v: torch.Tensor) -> None:
    data = formats.encode(code, v)
    assert data.dtype == torch.uint8 and data.numel() == formats.num_bytes(code, *v.shape)
    same = "the bytes of compression/formats.py are those of tests/oracles/quantise.py"
    assert bytes(data.tolist()).hex() == quantise.encoded(v, code).hex(), same
    expected = torch.stack([quantise.dequantised(row, code) for row in v]) if len(v) else v
    assert same_bits(formats.decode(code, data, *v.shape), expected)


# ---- against the oracle ------------------------------------------------------------------------


@codes
@quick
@given(tensors())
def test_values_follow_oracle(code, v):
    """The bytes and values of every code are those of the oracle."""
    check_against_oracle(code, v)


@codes
@quick
@given(st.lists(st.lists(FLOATS, min_size=6, max_size=6), min_size=1, max_size=3))
def test_values_of_any_floats(code, rows):
    """Any floats follow the oracle. Subnormal numbers, signed zeros and scales that underflow among
    them.
    """
    check_against_oracle(code, torch.tensor(rows, dtype=torch.float32))


@codes
@quick
@given(st.lists(st.integers(-32, 32), min_size=1, max_size=80), st.integers(-6, 2))
def test_values_ties(code, numbers, exponent):
    """Ties are rounded as by the oracle. Multiples of a power of two: often just between
    two codes.
    """
    check_against_oracle(code, torch.tensor([numbers], dtype=torch.float32) * 2.0**exponent)


@codes
def test_values_neighbours_of_thresholds(code):
    """The neighbours of every threshold are rounded as by the oracle. fp32's next numbers below and
    above half-way, where a sum with one half would be rounded to the wrong side.
    """
    powers = 2.0 ** torch.arange(-9.0, 3.0)
    half_way = torch.cat([torch.arange(0.0, 8.0, 0.125), 1.5 * powers, powers])
    beside = [half_way.nextafter(torch.tensor(x)) for x in (math.inf, -math.inf)]
    near = torch.cat([half_way, *beside])
    for top in sorted(set(LARGEST.values())):  # scale 1 in one of the codes
        rows = near[near.abs() <= top]
        rows = torch.cat([rows, torch.zeros(-rows.numel() % 31)]).view(-1, 31)
        check_against_oracle(code, torch.cat([torch.full((len(rows), 1), top), rows], 1))


@codes
@pytest.mark.parametrize("shape", [(2, 1, 3), (1, 2, 0)])
def test_values_rows_of_several_groups(code, shape):
    """Rows of several groups follow the oracle. Rows, whole groups in each, and values in the
    shorter last one.
    """
    rows, whole, rest = shape
    cols = whole * (FORMATS[code].group or 256) + rest
    generator = torch.Generator().manual_seed(3)
    check_against_oracle(code, torch.randn(rows, cols, generator=generator) ** 3)


@codes
@pytest.mark.parametrize(
    "shape", [(40, 1), (37, 3), (19, 64), (50, 300), (3, 1000), (33, 256), (2, 4096)]
)
def test_values_chunks_change_no_bit(code, shape, monkeypatch):
    """The size of chunks changes no bit."""
    v = torch.randn(shape, generator=torch.Generator().manual_seed(4))
    data = formats.encode(code, v)
    monkeypatch.setattr(formats, "CHUNK", 128)
    assert torch.equal(formats.encode(code, v), data)
    assert same_bits(formats.decode(code, data, *shape), back(code, v))
    monkeypatch.undo()
    assert same_bits(formats.decode(code, data, *shape), back(code, v))


@codes
@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (3, 0)])
def test_values_empty(code, shape):
    """A tensor without values has no bytes."""
    data = formats.encode(code, torch.zeros(shape))
    assert data.numel() == formats.num_bytes(code, *shape) == 0
    assert formats.decode(code, data, *shape).shape == shape


@codes
def test_values_any_offset_and_stride(code):
    """The slice may start at any byte, and the memory may have any order."""
    v = torch.randn(70, 9, generator=torch.Generator().manual_seed(5)).t()
    data = formats.encode(code, v)
    assert torch.equal(data, formats.encode(code, v.contiguous()))
    for start in (1, 2, 3):
        at = torch.cat([torch.zeros(start, dtype=torch.uint8), data])[start:]
        assert same_bits(formats.decode(code, at, 9, 70), back(code, v))


# ---- by hand: a change here is a new wire version ----------------------------------------------

GOLDEN = {
    # 127, 0 (tie), 2 (tie), 2 (tie), -127: two's complement
    "int8": ([[127, -0.5, 1.5, 2.5, -127]], "803f" + "7f00020281"),
    # 1.0 in bf16 is 0x3f80; 7, -4 (tie), 0 (tie), 2 (tie), 0 and the padding: nibbles 7 c 0 2 0 0
    "int4": ([[7, -3.5, 0.5, 1.5, -0.25]], "803f" + "c72000"),
    # 1, -1 (tie), 0.5, 0 (tie), 2^-6, -0, 2^-4 (tie), -2^-6: 7 f 6 0 1 8 3 9
    "fp4_e3m0": ([[1, -0.75, 0.74, 2**-7, 0.0079, -0.0, 1.5 * 2**-5, -(2**-6)]],
        "803f" + "f7068193"),
    # 6, -4 (tie), 4 (tie), 2 (tie), 2 (tie), -1 (tie), 1 (tie), 0 (tie), 0.5, 4, 3, -1.5: 7 e 6 4 4
    # a 2 0 1 6 5 b
    "fp4_e2m1": ([[6, -5, 3.5, 2.5, 1.75, -1.25, 0.75, 0.25, 0.26, 4.9, 2.9, -1.6]],
        "803f" + "e746a40261b5"),
    # threshold 8 / 5; low 1/3 is 0x3eab, high 3.5 is 0x4060; +low, -high, +low, -low, +high: 0 3 0
    # 2 1
    "2bit": ([[1, -3, 0, -0.0, 4]], "ab3e6040" + "8c01"),
    # the mean of 1, 3, 0, 0, 6 is 2, 0x4000; signs 0 1 0 1 0
    "1bit": ([[1, -3, 0, -0.0, 6]], "0040" + "0a"),
}  # fmt: skip


@grouped
def test_values_golden_bytes(code):
    """The bytes of every code are those written down by hand."""
    rows, expected = GOLDEN[code]
    data = formats.encode(code, torch.tensor(rows, dtype=torch.float32))
    assert bytes(data.tolist()).hex() == expected


def test_values_scales_first_rows_packed():
    """The scales come first, and the rows follow without gaps."""
    rows = torch.tensor([[7.0, 1.0, -1.0], [14.0, 2.0, 0.0], [0.0, 0.0, 0.0]])
    assert bytes(formats.encode("int4", rows).tolist()).hex() == "803f00400000" + "177f010000"
    # 2bit: no value below the mean, so a lower level of 0
    rows = torch.tensor([[1.0] * 256 + [-2.0], [4.0] * 257])
    scales = "0000803f" + "00000040" + "00008040" + "00008040"
    expected = scales + "55" * 64 + "57" + "55" * 63 + "05"
    assert bytes(formats.encode("2bit", rows).tolist()).hex() == expected


def test_values_every_int4_code():
    """Every code of four bits is decoded, also -8, which no encoder writes."""
    numbers = [0x80, 0x3F, 0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    data = torch.tensor(numbers, dtype=torch.uint8)
    assert formats.decode("int4", data, 1, 16).tolist() == [[*range(8), *range(-8, 0)]]
    for code, form in (("fp4_e3m0", E3M0), ("fp4_e2m1", E2M1)):
        every = [*form.magnitudes, *(-m for m in form.magnitudes)]
        assert formats.decode(code, data, 1, 16).tolist() == [every]


@codes
def test_values_number_of_bytes(code):
    """The number of bytes of every code is that counted by hand."""
    size, scale = quantise.FORMATS[code].bits / 8, quantise.FORMATS[code].group
    per_group = {"2bit": 4}.get(code, 2)
    for rows, cols in ((1, 1), (3, 5), (2, 4096), (2, 4097), (7, 33)):
        scales = per_group * rows * math.ceil(cols / scale) if scale else 0
        assert formats.num_bytes(code, rows, cols) == scales + math.ceil(rows * cols * size)


# ---- errors ------------------------------------------------------------------------------------


@grouped
def test_values_error_bound_is_tight(code):
    """The bound of no code is a loose one: some value comes to within a tenth of it."""
    v = torch.linspace(-1, 1, 4096).view(1, -1)
    if code in LEVELS:  # a zero among values that are all about as large
        v = torch.tensor([[0.0] + 100 * [0.49] + 100 * [0.51]])
    worst = max(
        float(((y.double() - x.double()).abs() / quantise.bound(x, code)).max())
        for x, y in zip(in_groups(code, v), in_groups(code, back(code, v)), strict=True)
    )
    assert worst > 0.9


# ---- what is kept ------------------------------------------------------------------------------


@codes
@quick
@given(tensors())
def test_values_coding_again_same_bytes(code, v):
    """Coding the decoded values again changes nothing. The same bytes again, since the largest
    value of a group comes back as the largest code. Not so where a scale is not a normal number;
    and of 2bit only the values: where all are one level, it may be called the lower one or the
    higher. Sums of levels are rounded.
    """
    v = torch.where(v.abs() < 1e-30, 0.0, v)
    once = back(code, v)
    again = formats.encode(code, once)
    assert same_bits(formats.decode(code, again, *v.shape), once)
    if code != "2bit":
        assert torch.equal(again, formats.encode(code, v))


@codes
@quick
@given(tensors())
def test_values_zeros_stay_zero(code, v):
    """Zeros stay zero. In 2bit and 1bit only where the whole group is zero: they have no code for
    zero.
    """
    for x, y in zip(in_groups(code, v), in_groups(code, back(code, v)), strict=True):
        if code not in LEVELS:
            assert int((y[x == 0] != 0).sum()) == 0
        if not x.any():
            assert not y.any()


@codes
@quick
@given(tensors())
def test_values_signs_symmetric(code, v):
    """The codes are symmetric in the sign."""
    assert torch.equal(back(code, -v), -back(code, v))
    if code != "2bit":
        assert bool((back(code, v) * v >= 0).all())


@codes
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_not_finite_stays_visible(code, bad):
    """Values that are not finite stay visible in their whole group, and in no other."""
    v = torch.randn(3, 4200, generator=torch.Generator().manual_seed(6))
    expected = back(code, v)
    v[1, 4150] = bad
    got, size = back(code, v), FORMATS[code].group or 1
    start = 4150 // size * size
    assert not got[1, start : start + size].isfinite().any()
    got[1, start : start + size] = expected[1, start : start + size]
    assert same_bits(got, expected)


def test_values_input_unchanged():
    """The input is not changed."""
    v = torch.randn(5, 300, generator=torch.Generator().manual_seed(7))
    before = v.clone()
    for code in CODES:
        data = formats.encode(code, v)
        kept = data.clone()
        formats.decode(code, data, 5, 300).zero_()
        assert torch.equal(data, kept) and same_bits(v, before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@codes
@pytest.mark.parametrize("shape", [(0, 5), (3, 1), (1000, 7), (300, 300), (64, 4096), (2, 4099)])
def test_values_same_bytes_on_gpu(code, shape):
    """A GPU makes the same bytes as the CPU."""
    v = torch.randn(shape, generator=torch.Generator().manual_seed(8)) ** 3
    data = formats.encode(code, v.cuda())
    assert torch.equal(data.cpu(), formats.encode(code, v))
    assert same_bits(formats.decode(code, data, *shape).cpu(), back(code, v))
