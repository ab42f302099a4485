"""The layout of a message: where the presence bits, the sections and the vectors of its channels
lie.

    gathered:  header | presence bits | section of each gathered channel, one after the other
    reduced:   vectors of the reduced channels, one after the other

Vectors go in the two legs of a reduce (`peers/collectives.py`).

Channels come in the order of the configuration. Presence is one bit per tensor of each gradient
channel: whether this replica has a gradient for it. The queue writes and reads messages by this
layout, the planner and the memory model count what it says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from ..channels.channel import ChannelPayload, Received
from ..channels.codec import ChannelCodec
from ..compression import dense
from ..config.channel import Channel
from ..peers.collectives import ReceivedMessage, legs
from ..peers.header import COUNTED, EARLY, FAR, HEADER, NOT_FINITE, SKIPPED, Header
from ..peers.meter import Meter


class MessageLayout:
    """What lies where in a message of some channels, of one active copy.

    Args:
        sections: of the channels, in the order of the configuration.

    Attributes:
        sections: by the name of the channel.
        body_bytes: presence bits and sections; num_bytes: with the header.
        vectors: length and code of each vector that is reduced.

    Example:
        >>> from fsdp_demo.channels.codec import ChannelCodec
        >>> from fsdp_demo.compression.blocks import Layout
        >>> from fsdp_demo.config.channel import Channel
        >>> from fsdp_demo.exchange.message import MessageLayout
        >>> layout = Layout([(3,), (5,)], ["dense", "dense"])
        >>> section = ChannelCodec(layout, Channel("gradient", "gradient"), size=2)
        >>> message = MessageLayout([section])
        >>> message.num_bytes, message.body_bytes, message.vectors
        (57, 1, [(8, 'fp32')])
    """

    def __init__(self, sections: Sequence[ChannelCodec]):
        self.sections = {s.channel.name: s for s in sections}
        self._bits = _spans(
            [s.layout.num_tensors if s.channel.before_step else 0 for s in sections]
        )
        self._presence_bytes = (self._bits[-1].stop + 7) // 8 if sections else 0
        self._bytes = _spans([s.num_bytes for s in sections], self._presence_bytes)
        self._vectors = _spans([0 if s.gathered else len(s.spans) for s in sections])
        self.body_bytes = self._bytes[-1].stop if sections else 0
        self.num_bytes = HEADER.size + self.body_bytes
        self._reduced = [(s.channel, *span) for s in sections if not s.gathered for span in s.spans]
        self.vectors = [(n, code) for _, n, code in self._reduced]

    @property
    def before_step(self) -> bool:
        """Whether it is a message of gradients: those share none with other channels."""
        return any(s.channel.before_step for s in self.sections.values())

    # ---- what is sent --------------------------------------------------------------------------

    def pack(
        self, parts: Mapping[str, ChannelPayload]
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """What the channels send, by name, in its order: presence bits (uint8, on the CPU),
        sections of the body, vectors to be reduced.
        """
        mine = [parts[name] for name in self.sections]
        bits = pack_bits([p for part in mine for p in part.present or []])
        return (
            bits,
            [p.body for p in mine if p.body is not None],
            [v for p in mine for v in p.vectors],
        )

    def blank(self, bodies: Sequence[Tensor]) -> bool:
        """Whether the sections, as `pack` gives them, hold nothing but zeros."""
        sections = [s for s in self.sections.values() if s.gathered]
        return all(s.blank(body) for s, body in zip(sections, bodies, strict=True))

    def weights(self, headers: Sequence[Header]) -> list[list[float]]:
        """Each replica's share in the mean of each of `vectors`. Raises as `replica_weights`."""
        return [replica_weights(channel, headers) for channel, _, _ in self._reduced]

    def legs(self, size: int) -> tuple[list[int], list[int]]:
        """Bytes, with the header, of what each of `size` ranks is sent in a reduce of `vectors`,
        and of what it sends back.
        """
        there, back = (
            [HEADER.size + dense.total_bytes(part) for part in leg]
            for leg in legs(self.vectors, size)
        )
        return there, back

    # ---- what comes back -----------------------------------------------------------------------

    def split(self, name: str, arrived: ReceivedMessage) -> Received:
        """What has arrived for one channel. Raises as `replica_weights`."""
        i, section = list(self.sections).index(name), self.sections[name]
        bodies = [body[self._bytes[i]] for body in arrived.bodies] if section.gathered else []
        weights = replica_weights(section.channel, arrived.headers)
        return Received(
            bodies,
            arrived.means[self._vectors[i]],
            weights,
            self._present(i, section.channel, arrived.bodies),
        )

    def _present(self, i: int, channel: Channel, bodies: Sequence[Tensor]) -> list[bool] | None:
        """The union over the replicas of the bits of channel number `i`."""
        if not channel.before_step:
            return None
        sets = [
            unpack_bits(body[: self._presence_bytes], self._bits[-1].stop)[self._bits[i]]
            for body in bodies
        ]
        return [any(bits) for bits in zip(*sets, strict=True)]


def _spans(lengths: Sequence[int], start: int = 0) -> list[slice]:
    """Stretches of these lengths, one after the other."""
    ends = list(accumulate(lengths, initial=start))
    return [slice(a, b) for a, b in zip(ends, ends[1:], strict=False)]


def replica_weights(channel: Channel, headers: Sequence[Header]) -> list[float]:
    """Each replica's share in a channel's mean: its header's weight, or 1; 0 for the plain gradient
    of a skipped step, for what is not finite, for a norm that is far from the others', and for a
    newcomer's part of a round, unless all are newcomers. Of one that has left it is the weight
    in any case: it has sent a part of a round.

    Raises:
        RuntimeError: weights are tokens and no island has counted any.
    """
    tokens = channel.reducer.weight == "tokens"
    if tokens and not any(h.weight for h in headers):
        # an exchange right after another one, at the end: nobody has seen a token since
        if any(h.flags & COUNTED for h in headers):
            return [1.0] * len(headers)
        raise RuntimeError(
            f"channel {channel.name!r} weighs islands by tokens, but none called "
            "report(tokens=...) since the last one"
        )
    # with an accumulator what was not finite has not come into it
    plain = channel.before_step and channel.accumulator is None
    out = FAR | NOT_FINITE * (plain or not channel.before_step) | SKIPPED * plain
    alone = all(h.weight < 0 for h in headers)
    return [
        0.0
        if h.flags & out
        else h.weight
        if tokens or h.flags & EARLY
        else float(alone or h.weight >= 0)
        for h in headers
    ]


def pack_bits(bits: Sequence[bool]) -> Tensor:
    """uint8 [ceil(n / 8)], bit i of the little-endian number is bits[i]."""
    n = (len(bits) + 7) // 8
    number = sum(int(b) << i for i, b in enumerate(bits))
    return (
        torch.frombuffer(bytearray(number.to_bytes(n, "little")), dtype=torch.uint8)
        if n
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )


def unpack_bits(data: Tensor, n: int) -> list[bool]:
    """The inverse of `pack_bits`."""
    number = int.from_bytes(bytes(data.tolist()), "little")
    return [bool(number >> i & 1) for i in range(n)]


# ---- whose bytes those of the meter are: of which channel, of headers, of neither ----------------


@dataclass(frozen=True)
class Moved:
    """Bytes to and from the other islands.

    Example:
        >>> from fsdp_demo.exchange.message import Moved
        >>> Moved(3, 2) + Moved(1, 1)
        Moved(sent=4, received=3)
    """

    sent: int = 0
    received: int = 0

    def __add__(self, other: Moved) -> Moved:
        return Moved(self.sent + other.sent, self.received + other.received)

    def __sub__(self, other: Moved) -> Moved:
        return Moved(self.sent - other.sent, self.received - other.received)

    def __mul__(self, count: int) -> Moved:
        return Moved(self.sent * count, self.received * count)


@dataclass(frozen=True)
class LedgerPage:
    """What a ledger says at one moment. `total` is what the meter has, to the byte.

    Attributes:
        channels: payload of each channel, by name (with fragments: of each fragment).
        headers: of the messages of channels.
        other: what is in no channel: bits that say which gradients there were, norms and questions
            between islands, pieces that were sent again after a loss.
    """

    channels: Mapping[str, Moved]
    headers: Moved
    other: Moved

    @property
    def total(self) -> Moved:
        """The sum of all rows: `bytes_sent` and `bytes_received` of `Exchange.metrics()`."""
        return sum(self.channels.values(), self.headers + self.other)

    @property
    def header_share(self) -> float:
        """Headers as a share of the bytes sent; 0 where nothing was sent."""
        return self.headers.sent / self.total.sent if self.total.sent else 0.0


@dataclass
class Ledger:
    """Bytes of one rank, by channel. A step only counts messages (in the thread that sends); whose
    bytes they had is calculated when somebody asks.

    Attributes:
        messages: how many there were, by the sections in them, the islands that shared them, this
            one's place among these, and the bytes that were moved.
    """

    messages: Counter[tuple[tuple[ChannelCodec, ...], int, int, Moved]] = field(
        default_factory=Counter
    )

    def message(self, layout: MessageLayout, size: int, rank: int, moved: Moved) -> None:
        """A message has been exchanged, for which the meter has counted `moved`."""
        self.messages[tuple(layout.sections.values()), size, rank, moved] += 1

    def page(self, meter: Meter) -> LedgerPage:
        """All rows; what no channel and no header accounts for is `other`.

        A message of which less was moved than it holds (an island that follows another sends
        nothing) is in no channel.
        """
        found: dict[str, Moved] = {}
        headers = Moved()
        for (sections, size, rank, moved), count in list(self.messages.items()):
            layout = MessageLayout(sections)
            parts, heads = content(layout, size, rank), head_bytes(layout, size)
            left = moved - sum(parts.values(), heads)
            if left.sent < 0 or left.received < 0:
                continue
            headers += heads * count
            for name, part in parts.items():
                found[name] = found.get(name, Moved()) + part * count
        whole = Moved(meter.bytes_sent, meter.bytes_received)
        return LedgerPage(found, headers, whole - sum(found.values(), headers))


def content(layout: MessageLayout, size: int, rank: int) -> dict[str, Moved]:
    """Payload bytes of each channel in one message among `size` islands, for the island at `rank`.

    What is gathered goes whole to each other island. What is reduced goes in two legs: to each
    other island the part that it owns, and the mean of one's own part to all of them.
    """
    others = [j for j in range(size) if j != rank]
    found = {}
    for name, section in layout.sections.items():
        if section.gathered:
            whole = section.num_bytes * len(others)
            found[name] = Moved(whole, whole)
            continue
        there, back = MessageLayout([section]).legs(size)
        there, back = ([n - HEADER.size for n in leg] for leg in (there, back))
        found[name] = Moved(
            sum(there[j] for j in others) + back[rank] * len(others),
            there[rank] * len(others) + sum(back[j] for j in others),
        )
    return found


def head_bytes(layout: MessageLayout, size: int) -> Moved:
    """Bytes of the headers of one message: of its body, and of both legs of a reduce."""
    count = HEADER.size * (size - 1) * (3 if layout.vectors else 1)
    return Moved(count, count)
