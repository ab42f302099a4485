"""The messages of one rank that are kept, and their pieces on the connections to the other islands;
what an island that leaves sends ahead of its time.

All of it runs in the network thread, but the calculations (`message_state.py`), which run in the
thread that waits for the message.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from ..errors import PeerLost, WireError
from ..membership import protocol_events
from ..membership.protocol_types import Kind, Member, Piece, Record, Settlement, needed
from ..peers.connection import PeerConnection
from ..peers.header import WITHIN, Sealed
from ..peers.poller import Poller
from .chunks import Stream, Streams
from .failure_detector import SOON
from .message_state import EarlyMessage, RoundMessage
from .network_loop import NetworkLoop
from .notes import EarlyKept, EarlyOffered

SHORT = 4 << 20
"""Bytes of a piece whose checksum is compared at once; that of a longer one in the thread that
waits for it.
"""


class Traffic:
    """Moves pieces as the membership of this rank asks for it.

    Args:
        received: called with an epoch and the event that a piece is here. refused: called with a
            peer whose piece is damaged, and how.
        longest_early: gives the bytes that an island which leaves may send ahead of a message.

    Attributes:
        refused: as given.
    """

    def __init__(
        self,
        poller: Poller,
        loop: NetworkLoop,
        received: Callable[[int, protocol_events.Event], None],
        refused: Callable[[Member, WireError], None],
        longest_early: Callable[[], int],
    ):
        self._poller, self._loop, self._detector = poller, loop, loop.detector
        self._received, self.refused, self._longest_early = received, refused, longest_early
        self._messages: dict[int, RoundMessage] = {}
        self._early: dict[tuple[int, Member], EarlyMessage] = {}
        self._streams = Streams(poller, self._detector.connections, refused, loop.labels)
        self._forwards: dict[tuple[int, Piece], Member] = {}

    # ---- messages ------------------------------------------------------------------------------

    def open(self, message: RoundMessage) -> None:
        """Keep a message that this rank launches."""
        self._messages[message.n] = message
        self._detector.began[message.n] = time.monotonic()
        if message.among:
            self._detector.among[message.n] = message.among
        message.early.update({m: early for (n, m), early in self._early.items() if n == message.n})

    def deliver(self, action: protocol_events.Deliver) -> None:
        """Hand over a complete message to the thread that waits for it."""
        took = time.monotonic() - self._detector.began.pop(action.n, time.monotonic())
        self._detector.among.pop(action.n, None)
        # those between steps (the start, a question) say nothing of how unlike islands are
        if self._messages[action.n].header.kind in WITHIN:
            self._detector.rounds.append(took)
        message = self._messages[action.n]
        message.tasks.put(self._loop.machine.record.settlement(action.n).of(message.among))

    def free(self, action: protocol_events.Free) -> None:
        """Forget a message, since all members have delivered it."""
        self._messages.pop(action.n, None)
        self._early = {(n, m): early for (n, m), early in self._early.items() if n != action.n}
        self._streams.forget(action.n)

    def fail(self, reason: str, more: Iterable[RoundMessage]) -> None:
        """Tell whoever waits for a message that nothing more comes."""
        for message in [*self._messages.values(), *more]:
            message.tasks.put(PeerLost(reason))

    # ---- what comes ----------------------------------------------------------------------------

    def expect(self, message: RoundMessage) -> None:
        """Make room for what this rank lacks of a message, as it is settled."""
        rank, n = self._loop.machine, message.n
        entry = next((e for e in rank.open if e.n == n), None)
        if entry is None or entry.delivered or rank.state != "running":
            return
        settled = rank.record.settlement(n).of(message.among)
        wanted = [
            p
            for p in needed(entry.kind, settled) - entry.pieces
            if p.of != rank.me and p.what != "early"
        ]
        if (
            entry.kind != "gather"
            and settled.attempt == rank.record.view
            and Piece("part", rank.me, settled.attempt) not in entry.pieces
        ):
            wanted += [
                Piece("share", m, settled.attempt)
                for m in settled.owners
                if m != rank.me and m not in entry.shares
            ]
        for piece in wanted:
            self._streams.expect(
                message, piece, self._forwards.get((n, piece), piece.of), settled.owners
            )

    def expect_all(self) -> None:
        """Make room for what is lacking of all messages, oldest first, and for what others forward
        of those that came early.
        """
        for (n, piece), sender in self._forwards.items():
            if piece.what == "early":
                # what came in a view that had frozen does not count
                self._early.pop((n, piece.of), None)
                self.expect_early(sender, n, "mixed", piece)
        for n in sorted(self._messages):
            self.expect(self._messages[n])

    def expect_early(self, sender: Member, n: int, kind: Kind, piece: Piece) -> None:
        """Make room for what an island that leaves has sent ahead of message n."""
        if (
            self._loop.machine.state == "running"
            and n >= self._loop.machine.freed
            and (n, piece.of) not in self._early
        ):
            self._streams.expect(EarlyMessage(n, kind, self._longest_early()), piece, sender)

    def look(self) -> None:
        """Take the pieces that have become complete."""
        for stream in self._streams.done():
            self._arrived(stream)

    def _arrived(self, stream: Stream) -> None:
        """Check a piece that has come: here or, if it is long, in the thread that waits."""
        view, label = self._loop.machine.record.view, self._loop.labels(stream.piece.of.slot)

        def check() -> None:
            try:
                stream.check(label)
            except WireError as error:
                if isinstance(stream.message, RoundMessage):
                    stream.message.damage = error
                self._loop.do(partial(self.refused, stream.sender, error))
            else:
                self._loop.do(lambda: self._kept(stream, view))

        if stream.sealed.size <= SHORT:
            check()
        elif isinstance(stream.message, RoundMessage):
            stream.message.tasks.put(check)
        else:
            threading.Thread(target=check, name="checksum", daemon=True).start()

    def _kept(self, stream: Stream, view: int) -> None:
        message, piece, rank = stream.message, stream.piece, self._loop.machine
        if rank.state != "running" or view != rank.record.view or stream.header is None:
            return
        if isinstance(message, EarlyMessage):
            message.data, message.header = stream.sealed, stream.header
            self._early[message.n, piece.of] = message
            if message.n in self._messages:
                self._messages[message.n].early[piece.of] = message
        elif message.n not in self._messages:
            return
        else:
            message.keep(piece, stream.sealed, stream.header)
            message.received += stream.sealed.size
        sender, notes = stream.sender, self._detector.notes
        self._detector.next_of.setdefault(sender, 0)  # heard: silent for `dead` from now on
        epoch = max([w.record for w in self._detector.connections[sender]], default=0)
        landed = notes[sender].landed if sender in notes else 0
        n, kind = message.n, message.kind
        self._received(
            epoch, protocol_events.PieceReceived(view, epoch, sender, n, kind, piece, landed)
        )
        if piece.what == "early" and sender in notes:
            self._detector.send(EarlyKept(n), [notes[sender]])

    # ---- what goes -----------------------------------------------------------------------------

    def send(self, action: protocol_events.Send) -> None:
        """Send a piece, once it has been calculated."""
        piece, view = action.piece, action.view
        if piece.what == "early":
            for member in action.to:
                self.send_early(self._early[action.n, piece.of], piece, member)
            return
        message = self._messages[action.n]
        settled = self._loop.machine.record.settlement(action.n).of(message.among)
        if piece.what == "share":
            message.tasks.put(lambda: self._cut(message, settled.owners, piece, view))
        elif (data := message.held(piece)) is not None:
            self._hand_over(message, piece, data, action.to)
        else:
            begun = piece in message.making
            message.making[piece] = (view, action.to)  # first: the thread that calculates reads it
            # else a change has come meanwhile: once is enough, and goes to whom this view names
            if not begun:
                message.tasks.put(lambda: self._average(message, settled, piece))

    def send_early(self, early: EarlyMessage, piece: Piece, to: Member) -> None:
        """Send one other island what one that leaves contributes to a coming message."""
        if to in self._detector.connections and early.data is not None:
            self._streams.send(early, piece, early.data, to)

    def _cut(
        self, message: RoundMessage, owners: tuple[Member, ...], piece: Piece, view: int
    ) -> None:
        made = message.cut(owners)

        def send() -> None:
            rank = self._loop.machine
            for m in owners if view == rank.record.view else ():
                if m != rank.me:
                    self._hand_over(message, piece, made[m], (m,))

        self._loop.do(send)

    def _average(self, message: RoundMessage, settled: Settlement, piece: Piece) -> None:
        made = message.average(settled)
        # now: the message may be complete before this has left
        message.sent += made.size * len(message.making[piece][1])

        def send() -> None:
            view, to = message.making.pop(piece)
            if view == self._loop.machine.record.view:
                self._hand_over(message, piece, made, to, counted=True)

        self._loop.do(send)

    def _hand_over(
        self,
        message: RoundMessage,
        piece: Piece,
        data: Sealed,
        to: Sequence[Member],
        counted: bool = False,
    ) -> None:
        for member in to:
            if member in self._detector.connections:
                self._streams.send(message, piece, data, member)
                message.sent += 0 if counted else data.size

    # ---- the connections -----------------------------------------------------------------------

    def widen(self, connections: Mapping[Member, PeerConnection]) -> None:
        """Add a connection to each peer."""
        for m, wire in connections.items():
            if m not in self._detector.connections:  # lost meanwhile
                wire.close(0)
                continue
            with self._poller.lock:
                wire.renew(self._loop.machine.record.view)
            self._detector.connections[m].append(wire)

    def freeze(self) -> None:
        """Stop waiting for pieces: the view is frozen."""
        self._streams.clear()

    def adopt(self, record: Record) -> None:
        """Let the frames of a new view pass, and wait for what its members forward."""
        with self._poller.lock:
            for wires in self._detector.connections.values():
                for wire in wires:
                    wire.renew(record.view)
        self._streams.clear()
        rank = self._loop.machine
        self._forwards = {
            (f.n, f.piece): f.sender
            for f in record.forwards
            if f.peer_group == rank.rank and rank.me in f.to
        }


class EarlyPieces:
    """The contribution to the coming message that an island sends before it leaves (early-part):
    its offer, and the answers of the peers that keep it. Runs in the network thread, but for
    `send`.
    """

    def __init__(self, loop: NetworkLoop, traffic: Traffic):
        self._loop, self._traffic = loop, traffic
        self._going: EarlyMessage | None = None
        self._offered, self._kept_by, self._nobody = set[Member](), set[Member](), False

    def send(self, early: EarlyMessage, seconds: float) -> bool:
        """Offer an early message, and wait; whether the peers keep it within so many seconds. In
        the thread that exchanges.
        """
        self._loop.do(lambda: self.begin(early))
        self._loop.wait(lambda: self._is_kept() or self._nobody, seconds)
        return self._is_kept()

    def begin(self, early: EarlyMessage) -> None:
        """Offer an early message from now on."""
        self._going = early
        self.offer()

    def offer(self) -> None:
        """Send the early message in this view, since nothing of the view before arrives any more. A
        long one goes to one island only, which forwards it in the change of members.
        """
        early, rank, notes = self._going, self._loop.machine, self._loop.detector.notes
        if early is None or rank.state != "running":
            return
        to = [m for m in rank.record.contributors(early.n) if m != rank.me]
        assert early.data is not None
        to = to if early.data.size <= SHORT else to[:1]
        self._offered, self._nobody = set(to), not to
        offer = EarlyOffered(early.n, early.kind)
        self._loop.detector.send(offer, [notes[m] for m in to if m in notes])
        for m in to:
            self._traffic.send_early(early, Piece("early", rank.me), m)

    def _is_kept(self) -> bool:
        return bool(self._offered) and self._offered <= self._kept_by

    def hear(self, n: int, kind: Kind, member: Member) -> None:
        """Make room for what a peer offers; a peer whose offer cannot be is lost."""
        rank = self._loop.machine
        if rank.state == "frozen":  # the sender may have adopted the next view already
            self._loop.later(SOON, lambda: self.hear(n, kind, member))
        elif n > rank.landed + 2 * rank.window:
            self._traffic.refused(member, WireError(f"it offers a part of message {n}, far ahead"))
        else:
            self._traffic.expect_early(member, n, kind, Piece("early", member))

    def hear_kept(self, n: int, member: Member) -> None:
        """Note that a peer keeps this island's early message."""
        if self._going is not None and n == self._going.n:
            self._kept_by.add(member)
