"""Whose bytes the meter of one rank has counted: those of which channel, those of headers, and the
rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..channels.codec import ChannelCodec
from ..peers.header import HEADER, Meter
from .message import MessageLayout


@dataclass(frozen=True)
class Moved:
    """Bytes to and from the other islands.

    Example:
        >>> from fsdp_demo.exchange.ledger import Moved
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
    """The rows of a ledger at one moment. Their `total` is that of the meter, to the byte.

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
    """Bytes of one rank, by channel. A step only counts messages (in the thread that sends); their
    bytes are shared out when somebody asks.

    Attributes:
        messages: number of messages by their sections, the number of islands that shared them, this
            island's place among these, and the bytes that were moved.
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
