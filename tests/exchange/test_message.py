"""Where the channels of one message lie in it: against a message put together by hand."""

from __future__ import annotations

import torch

from fsdp_demo.channels.channel import ChannelPayload
from fsdp_demo.channels.codec import ChannelCodec
from fsdp_demo.compression import dense
from fsdp_demo.compression.blocks import Layout
from fsdp_demo.config.channel import Channel
from fsdp_demo.config.parts import Accumulator, Codec
from fsdp_demo.exchange.message import MessageLayout
from fsdp_demo.peers.collectives import ReceivedMessage, legs
from fsdp_demo.peers.header import HEADER, Header

INDEXED = Codec("none", "topk", 4, value_dtype="int8")
SEEDED = Codec("none", "random", 4, value_dtype="bf16")


def section(name, tensors: int, codec: Codec, source="gradient", size=3) -> ChannelCodec:
    """Of a channel over a matrix of two blocks and small tensors."""
    layout = Layout([(64, 128), *[(3,)] * (tensors - 1)], ["plain", *["dense"] * (tensors - 1)])
    accumulator = None if codec.select == "dense" else Accumulator()
    return ChannelCodec(layout, Channel(name, source, accumulator=accumulator, codec=codec), size)


def test_message_channels_in_order() -> None:
    """The channels lie in the message in their order. Bits of all gradient channels, then gathered
    sections, then the vectors of the others: whoever reads finds what was written.
    """
    made = [
        section("a", 3, INDEXED), section("b", 2, SEEDED), section("c", 7, Codec()),
        section("d", 1, INDEXED),
    ]  # fmt: skip
    message = MessageLayout(made)
    present = {"a": [True, False, True], "b": [False, False], "c": [True] * 7, "d": [False]}
    bodies = {
        s.channel.name: [
            torch.full((s.num_bytes,), 10 * i + r, dtype=torch.uint8) for r in range(3)
        ]
        for i, s in enumerate(made)
    }
    means = [
        torch.full((n,), float(i)) for i, (n, _) in enumerate([*made[1].spans, *made[2].spans])
    ]
    assert message.vectors == [*made[1].spans, *made[2].spans] and len(message.vectors) == 3
    assert message.body_bytes == 2 + made[0].num_bytes + made[3].num_bytes
    assert message.num_bytes == HEADER.size + message.body_bytes

    def part(s: ChannelCodec, r: int) -> ChannelPayload:
        flags = present[s.channel.name] if r == 1 else [False] * s.layout.num_tensors
        body = bodies[s.channel.name][r] if s.gathered else None
        return ChannelPayload(0, body, [torch.zeros(n) for n, _ in s.spans], present=flags)

    packed = [message.pack({s.channel.name: part(s, r) for s in reversed(made)}) for r in range(3)]
    assert packed[1][0].tolist() == [0b11100101, 0b00001111]  # 3 + 2 + 7 + 1 bits, the lowest first
    assert [v.numel() for v in packed[0][2]] == [n for n, _ in message.vectors]
    arrived = ReceivedMessage(
        [Header(0, 0, weight=2.0)] * 3,
        [torch.cat([bits, *sections]) for bits, sections, _ in packed],
        means,
    )
    assert {len(b) for b in arrived.bodies} == {message.body_bytes}
    for s in made:
        name, found = s.channel.name, message.split(s.channel.name, arrived)
        assert found.present == present[name] and found.weights == [1.0] * 3, name
        gathered = [b.tolist() for b in bodies[name]] if s.gathered else []
        assert [b.tolist() for b in found.bodies] == gathered, name
    found = [[int(m[0]) for m in message.split(n, arrived).means] for n in "abcd"]
    assert found == [[], [0, 1], [2], []]


def test_message_after_step_no_presence_bits() -> None:
    """A message after the step has no presence bits."""
    sections = [section("a", 9, INDEXED, "delta"), section("b", 2, Codec(), "parameter")]
    message = MessageLayout(sections)
    assert not message.before_step and message.body_bytes == message.sections["a"].num_bytes
    bodies = [torch.zeros(message.body_bytes, dtype=torch.uint8)] * 3
    found = message.split("b", ReceivedMessage([Header(0, 0)] * 3, bodies, [torch.ones(8198)]))
    assert found.present is None and found.bodies == [] and found.means[0].numel() == 8198
    nothing = MessageLayout([])
    assert (nothing.body_bytes, nothing.num_bytes, nothing.vectors) == (0, HEADER.size, [])


def test_message_leg_headers() -> None:
    """Each leg of a message has a header of its own."""
    message = MessageLayout([section("a", 2, INDEXED), section("b", 2, SEEDED)])
    there, back = legs(message.vectors, 3)
    expected = [[HEADER.size + dense.total_bytes(part) for part in leg] for leg in (there, back)]
    assert message.legs(3) == tuple(expected)


def test_message_zeros_blank() -> None:
    """A message of zeros is blank."""
    kinds = {"a": (1, INDEXED), "b": (2, Codec()), "c": (2, INDEXED)}
    message = MessageLayout([section(n, *kind, "delta") for n, kind in kinds.items()])
    gathered = [s for s in message.sections.values() if s.gathered]
    empty = [torch.zeros(s.num_bytes, dtype=torch.uint8) for s in gathered]
    assert len(empty) == 2 and message.blank(empty)
    empty[1][0] = 1  # a scale
    assert not message.blank(empty)
