"""What one rank has exchanged: a record of each exchange, and the ledger, which has the bytes that
its meter has counted, by channel, with a row for headers and one for the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..channels.codec import ChannelCodec
from ..peers.header import HEADER, Meter
from .message import MessageLayout


@dataclass(frozen=True)
class ExchangeRecord:
    """One exchange that has ended.

    Attributes:
        step, applied: the steps in which it was launched and applied.
        channels: in its message.
        began, ended: when it was on the wire (`time.perf_counter`); None for a copy without peers,
            and for what a resumed run had in flight.
        waited: seconds for which training stood still for it.
        sent, received: its bytes on this rank.
        islands: those that took part, empty where that is not known.
    """

    step: int
    applied: int
    channels: tuple[str, ...]
    began: float | None
    ended: float | None
    waited: float = 0.0
    sent: int = 0
    received: int = 0
    islands: tuple[int, ...] = ()


@dataclass(frozen=True)
class Moved:
    """Bytes to and from the other islands.

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
    """The rows of a ledger at one moment.

    Attributes:
        channels: payload of each channel, by name (with fragments: of each fragment).
        headers: of the messages of channels.
        other: bits that say which gradients there were, norms and questions between islands, pieces
            that were sent again after a loss.
    """

    channels: Mapping[str, Moved]
    headers: Moved
    other: Moved

    @property
    def total(self) -> Moved:
        """The sum of all rows: `bytes_sent` and `bytes_received` of `Exchange.metrics()`."""
        return sum(self.channels.values(), self.headers + self.other)


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
        """Count a message that has been exchanged; `moved`: its bytes by the meter."""
        self.messages[tuple(layout.sections.values()), size, rank, moved] += 1

    def page(self, meter: Meter) -> LedgerPage:
        """All rows. A message of which less was moved than it holds (an island that follows another
        sends nothing) is in no channel, so its bytes are `other`.
        """
        found: dict[str, Moved] = {}
        headers = Moved()
        for (sections, size, rank, moved), count in list(self.messages.items()):
            parts = {s.channel.name: _payload(s, size, rank) for s in sections}
            num_headers = (size - 1) * (3 if MessageLayout(sections).vectors else 1)
            heads = Moved(HEADER.size, HEADER.size) * num_headers
            left = moved - sum(parts.values(), heads)
            if left.sent < 0 or left.received < 0:
                continue
            headers += heads * count
            for name, part in parts.items():
                found[name] = found.get(name, Moved()) + part * count
        whole = Moved(meter.bytes_sent, meter.bytes_received)
        return LedgerPage(found, headers, whole - sum(found.values(), headers))


def _payload(section: ChannelCodec, size: int, rank: int) -> Moved:
    """Payload bytes of a channel in one message among `size` islands, for the island at `rank`."""
    others = size - 1
    if section.gathered:  # it goes whole to each other island
        return Moved(section.num_bytes, section.num_bytes) * others
    # a reduce: to each island the part that it owns, then the mean of one's own part to all
    there, back = MessageLayout([section]).legs(size)
    there, back = ([n - HEADER.size for n in leg] for leg in (there, back))
    sent = sum(there) - there[rank] + back[rank] * others
    return Moved(sent, there[rank] * others + sum(back) - back[rank])
