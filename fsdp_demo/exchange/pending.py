"""One message under way, and what is noted of it when it has ended."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ..channels.channel import ChannelPayload
from ..comm.collectives import ReceivedMessage
from ..comm.header import Header
from ..comm.peers import PeerGroup
from ..comm.worker import Exchanging
from .ledger import Moved
from .message import MessageLayout
from .saved_state import InFlightState


@dataclass(frozen=True)
class ExchangeRecord:
    """One exchange that has ended: launched in step `step` and applied in step `applied`, the
    channels in it, and the seconds (`time.perf_counter`) between which it was on the wire; None
    for a copy without peers, and for what a resumed run had in flight. `waited`: seconds for which
    training stood still for it; `sent`, `received`: its bytes on this rank; `islands`: those that
    took part, empty where that is not known."""

    step: int
    applied: int
    channels: tuple[str, ...]
    began: float | None
    ended: float | None
    waited: float = 0.0
    sent: int = 0
    received: int = 0
    islands: tuple[int, ...] = ()


@dataclass
class PendingExchange:
    """One message under way: the channels that share it, what each sent that is not applied yet,
    and the future of what comes back (None on a copy without peers).

    `layout` says what lies where in it; `header` is what was said with it, once that is known on
    the host: a message whose answer was lost is sent again as it was. `rewritten`: see `Said`."""

    step: int
    members: list[str]
    parts: dict[str, ChannelPayload]
    future: Exchanging | None
    seconds: list[float] = field(default_factory=list)  # when it began and ended on the wire
    header: Header | None = None
    counted: bool = False
    layout: MessageLayout = field(default_factory=lambda: MessageLayout([]))
    moved: Moved = field(default_factory=Moved)  # bytes of its last exchange
    waited: float = 0.0  # seconds for which training stood still for it and the link
    rewritten: float = 0.0

    @property
    def arrived(self) -> ReceivedMessage | None:
        """What came back, if it is here; None while it is under way, and where it was lost."""
        done = self.future is not None and self.future.done() and self.future.exception() is None
        return self.future.result() if done and self.future is not None else None

    def set_arrived(self, message: ReceivedMessage, peers: PeerGroup | None) -> None:
        """It has come back before this replica was started: `message` is what a state or a
        checkpoint holds of it. Whose headers these are is known where as many islands go on."""
        same = peers is not None and peers.size == len(message.headers)
        slots = tuple(range(len(message.headers))) if same else ()
        self.future = Exchanging()
        self.future.set_result(replace(message, slots=slots))

    def record(self, applied: int, islands: tuple[int, ...]) -> ExchangeRecord:
        """When all channels have applied it, in step `applied`."""
        began, ended = self.seconds if len(self.seconds) == 2 else (None, None)
        return ExchangeRecord(
            self.step,
            applied,
            tuple(self.members),
            began,
            ended,
            self.waited,
            self.moved.sent,
            self.moved.received,
            islands,
        )

    def state(self) -> InFlightState:
        """As it is saved: bodies are views of larger buffers, and the peer group whose messages
        were numbered will not be there any more.
        """
        got = self.arrived
        said = None if self.header is None else replace(self.header, number=0)
        if got is not None:
            headers = [replace(h, number=0) for h in got.headers]
            bodies = [b.clone() for b in got.bodies]
            got = ReceivedMessage(headers, bodies, got.means, dict(got.decoded))
        return InFlightState(self.step, self.members, self.parts, got, said)
