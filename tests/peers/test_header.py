"""The bytes of header and sections: frozen vectors, sizes, and the refusal of what is damaged or
does not belong here.
"""

from __future__ import annotations

import struct
import time
import zlib
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fsdp_demo
from fsdp_demo import WireError, preset
from fsdp_demo.compression import sparse
from fsdp_demo.compression.blocks import Layout
from fsdp_demo.config.parts import BLOCK, Codec
from fsdp_demo.elastic import chunks, message_io
from fsdp_demo.exchange.message import pack_bits, unpack_bits
from fsdp_demo.peers import header as frame

from ..support import threaded
from ..support.inside import in_ranks
from ..support.sealed import seal, unseal
from ..support.sections import decode_sparse
from ..support.threaded import Tap, values

quick = settings(max_examples=60, deadline=None)
DIGEST, STEP = 0x0123456789AB, 70000
HERE = frame.Header(DIGEST, STEP)


def uint8(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


# ---- golden vectors: a change here is a new wire version ---------------------------------------

HEADER = (
    "4644583207010100ab8967452301009c70110100090000000400000000003071feffffffffffffff0000c03f0000104059d0539ca8aa567d"
    "010203ff"
)
EMPTY = "4644583207010000547698badcfe00000000000000000000000000000000000000000000000000000000803f0000c07f00000000ba7b4380"  # noqa: E501
SECTIONS = {
    "fp32": "3040ffc33040ffc33040ff43009c5630093040ffc33040ff433040ff4345754a83093040ffc33040ff433040ff4396503d930a3040ffc3c080fec33040ff"  # noqa: E501
    "433fd06f73080000000000000000000020c00001640000caa846422f55cf436c33b7c2",
    "bf16": "ffc3ffc3ff43009c563009ffc3ff43ff4345754a8309ffc3ff43ff4396503d930affc3ffc3ff433fd06f73080000000020c000016400004742cf43b7c2",  # noqa: E501
    "int8": "814081817f009c5630098140817f7f45754a83098140817f7f96503d930a814081827f3fd06f7308a13c00008100016400004742cf43b7c2",  # noqa: E501
}
LAYOUT = Layout([(124, 122), (4096,), (3,)], ["transform", "plain", "transform"])
"""Blocks of 64 x 64, 64 x 58, 60 x 64, 60 x 58, one flat block, three dense elements."""


def fixed() -> torch.Tensor:
    """A workspace of whole-number formulas, without a transform (its rounding is the machine's),
    zeros in the padding.
    """
    work = torch.zeros(LAYOUT.numel)
    g = torch.arange(LAYOUT.numel, dtype=torch.int64)
    v = (((g * g * 31 + g * 7) % 4093 - 2046) ** 3).float() / 2**24
    slots, numbers = (LAYOUT.blocks(t).view(-1, 64, 64) for t in (work, v))
    for group in LAYOUT.groups:
        at = slice(group.start, group.stop), slice(group.r), slice(group.s)
        slots[at] = numbers[at]
    LAYOUT.dense_part(work).copy_(LAYOUT.dense_part(v))
    flat = LAYOUT.blocks(work)[4].zero_()
    flat[100] = -2.5  # one value and ties of zeros: the lowest positions fill up
    return work


def test_header_golden_bytes() -> None:
    """The bytes of a header are frozen."""
    head = frame.Header(
        DIGEST, STEP, 1.5, 2.25, frame.STOP, total=2**64 - 2, number=9, rate=28976, seconds=39936
    )
    message = seal(head, uint8(b"\x01\x02\x03\xff"))
    assert bytes(message.tolist()).hex() == HEADER
    header, body = unseal(message, frame.Header(DIGEST, STEP, number=9), "a")
    assert (header.flags, header.weight, header.loss, header.rate) == (1, 1.5, 2.25, 28976)
    assert header.seconds == 39936
    assert body.tolist() == [1, 2, 3, 255]
    assert bytes(seal(frame.Header(0xFEDCBA987654, 0), uint8(b"")).tolist()).hex() == EMPTY


def test_header_golden_bytes_by_hand() -> None:
    """The frozen header has the documented layout, read without the library."""
    raw = bytes.fromhex(HEADER)
    fields = struct.unpack("<4sBBHQIIQQffII", raw[:56])
    length = 4 | 28976 << 48  # 3e-4: 1/1024 of an octave a step, 40960 for 1
    digest = DIGEST | 39936 << 48  # half a second, in the same code
    assert fields[:7] == (b"FDX2", 7, frame.PAYLOAD, 1, digest, STEP, 9)
    assert fields[7:11] == (length, 2**64 - 2, 1.5, 2.25)
    assert fields[11:] == (zlib.crc32(raw[56:]), zlib.crc32(raw[:52]))


@pytest.mark.parametrize("code", SECTIONS)
def test_section_golden_bytes(code: str) -> None:
    """The bytes of a sparse section are frozen for each number format."""
    codec = Codec("dct", "topk", 3, code)
    data = sparse.encode_sparse(LAYOUT, codec, fixed())
    assert bytes(data.tolist()).hex() == SECTIONS[code]
    assert data.numel() == sparse.sparse_bytes(LAYOUT, codec)
    positions, found, dense = decode_sparse(LAYOUT, codec, uint8(bytes.fromhex(SECTIONS[code])))
    block = BLOCK * torch.arange(5).repeat_interleave(3)
    within = [0, 924, 2390, 921, 2387, 2624, 918, 2384, 2621, 915, 2204, 2381, 0, 1, 100]
    assert (positions - block).tolist() == within
    exact = torch.cat([fixed()[positions], LAYOUT.dense_part(fixed())])
    error = (torch.cat([found, dense]) - exact).abs() / exact.abs().clamp_min(1e-30)
    assert float(error.max()) <= {"fp32": 0.0, "bf16": 2**-8, "int8": 2**-7}[code]


def test_section_golden_bytes_by_hand() -> None:
    """The first block in int8, read without the library: scale, three values, three positions of 12
    bits (low bytes, then nibbles).
    """
    raw = bytes.fromhex(SECTIONS["int8"])
    (scale,) = struct.unpack("<f", b"\0\0" + raw[:2])  # bf16: the upper half of an fp32
    q = struct.unpack("<3b", raw[2:5])
    low, (ab, c) = raw[5:8], raw[8:10]
    high = (ab & 15, ab >> 4, c)
    assert [a | b << 8 for a, b in zip(low, high, strict=True)] == [0, 924, 2390]
    work = LAYOUT.blocks(fixed())[0]
    for n, at in zip(q, (0, 924, 2390), strict=True):
        assert abs(n * scale - float(work[at])) <= scale / 2 + 2**-8 * 127 * scale


# ---- sizes and packing -------------------------------------------------------------------------


@quick
@given(st.lists(st.booleans(), max_size=40))
def test_pack_bits_reads_back(bits: list[bool]) -> None:
    """Packed bits read back, eight to a byte."""
    packed = pack_bits(bits)
    assert packed.numel() == (len(bits) + 7) // 8 and unpack_bits(packed, len(bits)) == bits


SHAPES = [
    *((), (0,), (0, 70), (1,), (5, 3), (64, 64), (65, 63), (124, 122), (4097,), (4096,)),
    *((131, 70), (3, 5, 300), (2, 64, 64)),
]


@quick
@given(st.lists(st.sampled_from(SHAPES)), st.data())
def test_sparse_bytes_is_the_real_length(
    tensors: list[tuple[int, ...]], data: st.DataObject
) -> None:
    """`sparse_bytes` is the length of what `encode_sparse` makes, for any shapes and kinds of
    tensors.
    """
    kinds = [data.draw(st.sampled_from(["transform", "plain", "dense"])) for _ in tensors]
    k = data.draw(st.sampled_from([1, 2, 3, 32, 33, 4095, 4096]))
    codec = Codec("none", "topk", k, data.draw(st.sampled_from(["fp32", "bf16", "int8"])))
    active_copies = data.draw(st.integers(1, 3))
    for active_copy in range(active_copies):
        layout = Layout(tensors, kinds, active_copy, active_copies)
        work = layout.pack([torch.randn(s) for s in tensors], layout.new("cpu"))
        coded = sparse.encode_sparse(layout, codec, work)
        assert coded.dtype == torch.uint8 and coded.numel() == sparse.sparse_bytes(layout, codec)
        positions, found, dense = decode_sparse(layout, codec, coded)
        assert positions.numel() == found.numel() == positions.unique().numel()
        assert dense.numel() == layout.num_dense
        assert bool((work[positions] != 0).logical_or(found == 0).all())


def test_header_at_step_counts_from_one() -> None:
    """A header within a step says in words the step that is under way, another the steps done."""
    kinds = ((frame.PAYLOAD, 0), (frame.PARAMETERS, 0), (frame.PAYLOAD, frame.ENDING))
    headers = [frame.Header(0, 4, kind=kind, flags=flags) for kind, flags in kinds]
    inside, between, end = headers
    assert [h.at_step for h in headers] == [5, 4, 4]
    assert (inside.when, end.when) == ("is at step 5", "finished at step 4")


# ---- what is refused ---------------------------------------------------------------------------


def sealed(digest: int = DIGEST, step: int = STEP) -> torch.Tensor:
    return seal(frame.Header(digest, step, 1.0, 0.5), uint8(bytes(range(24))))


def test_header_refuses_every_bit_flip() -> None:
    """A message with one flipped bit is refused, wherever the bit lies."""
    message = sealed()
    unseal(message, HERE, "a")
    for at in range(message.numel()):
        for bit in range(8):
            torn = message.clone()
            torn[at] ^= 1 << bit
            with pytest.raises(WireError, match="island 3"):
                unseal(torn, HERE, "island 3")


def test_header_refuses_every_truncation() -> None:
    """A message that was cut off, or has a byte too many, is refused."""
    message = sealed()
    for n in range(message.numel()):
        with pytest.raises(WireError, match="truncated"):
            unseal(message[:n], HERE, "a")
    with pytest.raises(WireError):
        unseal(torch.cat([message, uint8(b"\0")]), HERE, "a")


def other_version(message: torch.Tensor, version: int) -> torch.Tensor:
    """`message` as another release would have sent it: its checksum fits."""
    raw = bytearray(message.tolist())
    raw[4] = version
    raw[52:56] = struct.pack("<I", zlib.crc32(raw[:52]))
    return uint8(bytes(raw))


def test_header_refuses_what_differs_with_both_values() -> None:
    """Another step, digest or version is refused by an error that has both values."""
    with pytest.raises(WireError, match=f"step {STEP + 2}.* step {STEP + 1}"):
        unseal(sealed(step=STEP + 1), HERE, "a")
    with pytest.raises(WireError, match="0123456789aa.*0123456789ab"):
        unseal(sealed(digest=DIGEST - 1), HERE, "a")
    with pytest.raises(WireError, match="version 6.*version 7"):
        unseal(other_version(sealed(), 6), HERE, "a")
    assert unseal(other_version(sealed(), 7), HERE, "a")[0].step == STEP


# ---- the same through a real exchange of two islands -------------------------------------------

SMALL = {"topk": 2, "clip": None, "transform": True, "period": 2, "inner_optimizers": "as_is"}
CONFIGS = {
    "demo": preset("demo", topk=2, clip=None),
    "consensus": preset("decoupled_momentum", **SMALL),
    "released": preset("decoupled_momentum", rule="released", **SMALL),
    "diloco": preset("diloco", period=2, inner_optimizers="as_is", clip=None),
    "full": preset("full"),
}


def refused(config: Any, change: Any, sends: int = 0, steps: int = 2, kind: Any = WireError) -> str:
    """Train `steps` steps, then one exchange in which island 1's message number `sends` is changed
    on its way.

    Returns the text of island 0's WireError, after checking that the exchange changed nothing
    there, and that island 1 hears of it.
    """

    def island(i: int, topology: fsdp_demo.Topology) -> Any:
        w = torch.nn.Parameter(torch.randn(64, 64, generator=torch.Generator().manual_seed(7)))
        b = torch.nn.Parameter(torch.zeros(3))
        optimizer = torch.optim.SGD([w, b], lr=0.25)
        exchange = fsdp_demo.attach(optimizer, config, topology=topology)

        def step(t: int) -> None:
            for k, p in enumerate((w, b)):
                generator = torch.Generator().manual_seed(100 * t + 10 * i + k)
                p.grad = torch.randn(p.shape, generator=generator)
            optimizer.step()

        for t in range(steps):
            step(t)
        while not config.channels[0].schedule.due(exchange.step):
            step(exchange.step)
        now, (channel,) = exchange.step, exchange.channels
        kept = {k: v.clone() for k, v in channel.state().workspaces.items()}
        params = [p.detach().clone() for p in (w, b)]
        if i == 1:
            Tap(exchange, lambda data, n: change(data, now) if n == sends else data)
        try:
            step(now)
        except RuntimeError as error:
            if i == 1:
                return str(error)
            assert type(error) is kind, error
            # the inner step is the island's own, and was taken
            taken = 0.0 if config.channels[0].before_step else 0.25
            for p, old in zip((w, b), params, strict=True):
                assert torch.equal(p.detach(), old - taken * p.grad)
            state = exchange.state_dict()
            # what was sent stays, to be sent once more; nothing of what came was applied
            (flight,) = state["in_flight"]
            assert flight["step"] == now and flight["arrived"] is None
            assert set(flight["parts"]) == {channel.channel.name}
            for k, old in kept.items():
                assert k == "accumulator" or torch.equal(channel.state().workspaces[k], old)
            with pytest.raises(fsdp_demo.PeerLost, match="failed before"):
                optimizer.step()
            exchange.detach()
            return str(error)
        finally:
            exchange.detach()
        return None

    first, second = values(threaded.islands(island, timeout=5))
    assert first is not None, "island 0 did not notice"
    if kind is WireError and second is not None:  # it still waited for island 0
        assert "it has refused what this island sent: " in second, second
    return first


def flip(at: int, bit: int = 0) -> Any:
    def change(data: torch.Tensor, step: int) -> torch.Tensor:
        torn = data.clone()
        torn[at] ^= 1 << bit
        return torn

    return change


def reheaded(digest: int = 0, step: int = 0) -> Any:
    """The same body under a header that differs from the right one by these numbers."""

    def change(data: torch.Tensor, now: int) -> torch.Tensor:
        fields = frame.HEADER.unpack(bytes(data[:56].tolist()))
        _, _, kind, flags, its, at, number, _, total, weight, loss, *_ = fields
        assert at == now
        like = (weight, loss, flags, kind, total, number)
        return seal(frame.Header(its ^ digest, at + step, *like), data[56:])

    return change


@pytest.mark.parametrize("late", [False, True])
@in_ranks(1, 1)
def test_exchange_refuses_tampering_in_every_transport(late: bool) -> None:
    """Damage, truncation, another step, digest or version are refused in gathers and in both legs
    of a reduce; `late`: also where the sender has gone before its piece is checked.
    """
    at_once = chunks.Stream.check

    def check_late(stream: chunks.Stream, label: str) -> None:
        try:
            at_once(stream, label)
        except WireError:
            time.sleep(0.1)  # the end of the connection is a loss after `failure_detector.SOON`
            raise

    if late:
        message_io.SHORT = 0  # each piece is checked as a long one
        chunks.Stream.check = check_late
    for name in ("demo", "consensus", "released"):
        config = CONFIGS[name]
        assert "damaged" in refused(config, flip(59))
        for cut in (3, 5, 20):
            assert "damaged" in refused(config, lambda data, _, cut=cut: data[:-cut])
        assert "is at step" in refused(config, reheaded(step=1), kind=frame.Mismatch)
        assert "configuration digest" in refused(config, reheaded(digest=1), kind=frame.Mismatch)
        assert "version 2" in refused(config, lambda data, _: other_version(data, 2))
    for name in ("full", "diloco"):  # header, then the two legs of the reduce
        assert "at step" in refused(CONFIGS[name], reheaded(step=-1), kind=frame.Mismatch)
        for leg in (1, 2):
            for at in (20, 100, -1):
                text = refused(CONFIGS[name], flip(at), leg)
                assert ("header" if at == 20 else "reduce") in text and "island1" in text
                assert "damaged" in text
            assert "damaged" in refused(CONFIGS[name], lambda data, _: data[:-3], leg)
