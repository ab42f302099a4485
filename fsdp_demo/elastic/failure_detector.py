"""Failure detection between the ranks of a run: heartbeats, and which peers are lost, with the
reason.

Each rank sends its peers a note twice a second, from a thread of the process that trains. A
peer is lost when its connections are gone, when it was silent for too long, or when one of its
connections stands still while others move. A peer that sends heartbeats but makes no progress is
waited for (`ProgressWatch`). The store has no part in failure detection.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from ..errors import see
from ..membership.machine import Rank
from ..membership.protocol_types import Member, Record
from ..peers.connection import PeerConnection
from ..peers.poller import Poller
from .notes import Note, Sign, Stands, send_note

log = logging.getLogger("fsdp_demo")

BEAT = 0.5  # seconds
PATIENCE = 30.0
"""Seconds after which a wait is logged first, if it is not usual; then after twice as many."""
SOON = 0.03
"""Seconds by which a freeze that another rank tells is delayed: by then this rank has seen the end
of the same connection, too.
"""


class FailureDetector:
    """The connections of one rank to its peers, and which peers are lost.

    Args:
        notes: the connection for notes to each other member; connections: those for
            messages. siblings: the connections to the other ranks of this island, by peer group.
        dead: seconds of silence after which a peer is lost; meeting: the same before the first
            note.
        patience: seconds that a peer may stand, given how long the last messages took; given none
            for a peer that has not moved since it came, since its first step may compile.

    Attributes:
        began: the time at which this rank launched each undelivered message, by number. rounds:
            seconds that the last messages of steps took.
        among: the members of a message by its number; a message without an entry has all.
        next_of: the next message of each peer, by its last beat. leaving: peers that have
            announced their end.
    """

    def __init__(
        self,
        poller: Poller,
        notes: Mapping[Member, PeerConnection],
        connections: Mapping[Member, Sequence[PeerConnection]],
        siblings: Mapping[int, PeerConnection],
        dead: float,
        meeting: float,
        patience: Callable[[Sequence[float]], float],
    ):
        self._poller, self.dead, self.meeting, self._patience = poller, dead, meeting, patience
        self.notes = dict(notes)
        self.connections = {m: list(w) for m, w in connections.items()}
        self.siblings = dict(siblings)
        self.began: dict[int, float] = {}
        self.among: dict[int, Collection[Member]] = {}
        self.rounds: deque[float] = deque(maxlen=50)
        self.next_of: dict[Member, int] = {}
        self.leaving: set[Member] = set()
        self._came_with: dict[Member, int] = {}
        self._ended: dict[Member, float] = {}
        self._signed, self._standing = 0.0, dict[PeerConnection, float]()

    @property
    def wires(self) -> list[PeerConnection]:
        """All connections."""
        return [
            *self.notes.values(),
            *self.siblings.values(),
            *(w for wires in self.connections.values() for w in wires),
        ]

    def of(self, member: Member) -> list[PeerConnection]:
        """All connections to a peer."""
        return [self.notes[member], *self.connections.get(member, [])]

    def send(self, note: Note, wires: Iterable[PeerConnection]) -> None:
        """Send a note over some of the connections."""
        send_note(self._poller, note, wires)

    def watch(self, now: float) -> None:
        """With every beat, find the connections that stand, and now and then send a sign on each
        idle connection for messages.

        A connection stands when nothing has come on it for half of `dead` (2 s at least) while
        something came on another of the same peer. A slow link does not: bytes that the kernel has
        received count.
        """
        if now - self._signed > self.dead / 5:
            self._signed = now
            idle = [w for wires in self.connections.values() for w in wires if not w.waiting]
            self.send(Sign(), idle)
        half, standing = max(self.dead / 2, 4 * BEAT), dict[PeerConnection, float]()
        for member in self.notes:
            stood = {w: seconds for w in self.of(member) if (seconds := w.stood) is not None}
            if min(stood.values(), default=half) < half:
                standing |= {
                    w: self._standing.get(w, now) for w, seconds in stood.items() if seconds > half
                }
        self._standing = standing

    def admit(
        self, member: Member, notes: PeerConnection, connections: list[PeerConnection], now: float
    ) -> None:
        """Add a peer."""
        self.notes[member], self.connections[member] = notes, connections
        for wire in [notes, *connections]:
            wire.heard_at = now

    def drop(self, member: Member) -> None:
        """Remove a peer, and close its connections."""
        self._ended.pop(member, None)
        self._came_with.pop(member, None)
        for wire in [self.notes.pop(member), *self.connections.pop(member, [])]:
            wire.close(0)

    def restart_clocks(self, now: float) -> None:
        """Restart all clocks, after a pause of this process: no peer counts as silent."""
        for wire in self.wires:
            if wire.doubted and wire.heard_at <= wire.doubted:
                wire.doubted = now  # still nothing has come behind it
            wire.heard_at = now
        self.began, self._standing = dict.fromkeys(self.began, now), {}

    def note_next(self, member: Member, next: int) -> None:
        """Note the next message of a peer, as its heartbeat says."""
        self.next_of[member] = next
        self._came_with.setdefault(member, next)

    def quiet(self, now: float, unheard: bool = False) -> list[Member]:
        """Peers that have missed several beats; `unheard`: and those never heard so far."""
        limit = min(4 * BEAT, self.dead / 2)
        return [
            m
            for m in self.notes
            if (unheard or m in self.next_of) and now - self._heard_at(self.of(m)) > limit
        ]

    def lost(self, now: float) -> dict[Member, str]:
        """The peers that are lost, with the reason."""
        found: dict[Member, str] = {}
        silent = False
        for member in self.notes:
            wires = self.of(member)
            if gone := [w.gone for w in wires if w.gone]:
                if self._counts_as_gone(member, now):
                    found[member] = gone[0]
            elif now - self._heard_at(wires) > (limit := self._silence(member)):
                found[member], silent = f"silent for {limit:g} s", True
            elif any([w.heard_at <= w.doubted < now - self.dead for w in wires]):
                found[member] = (
                    "what came from it could not be decrypted, and nothing came behind it for "
                    f"{self.dead:g} s: damaged on the way"
                )
            elif any([now - self._standing.get(w, now) > self.dead for w in wires]):
                found[member] = (
                    f"one of its connections has stood for {self.dead:g} s while others move"
                )
        if silent:  # else the report would name a peer that fell silent with it as heard
            found = {**{m: "silent, too" for m in self.quiet(now)}, **found}
        return found

    def behind(self, now: float) -> tuple[int, float, list[Member]]:
        """The oldest undelivered message, seconds since its launch, and the live peers that have
        not reached it; -1 and no peer where all is delivered.
        """
        n = min(self.began, default=-1)
        among = self.among.get(n, self.notes)
        asked = [m for m in among if m in self.notes and m not in self.leaving]
        late = [m for m in asked if self.next_of.get(m, n + 1) <= n]
        return n, now - self.began.get(n, now), late

    @property
    def awaits_end(self) -> bool:
        """Whether connections of a peer have ended, and it is not dropped yet."""
        return bool(self._ended)

    def _counts_as_gone(self, member: Member, now: float) -> bool:
        """Whether a peer with an ended connection is lost: `SOON` seconds later, since its last
        note may come on another; not where it has announced its end and no message waits.
        """
        if member in self.leaving and not self.began:
            return False
        return now >= self._ended.setdefault(member, now + SOON)

    @staticmethod
    def _heard_at(wires: Sequence[PeerConnection]) -> float:
        return max([w.heard_at for w in wires])

    def patience_with(self, member: Member) -> float:
        """Seconds for which a peer may stand before it is told to end."""
        moved = self.next_of.get(member, 0) > self._came_with.get(member, 0)
        return self._patience(self.rounds if moved else ())

    def _silence(self, member: Member) -> float:
        """Seconds for which a peer may be silent; more before its first note."""
        if member in self.next_of:
            return self.dead
        return self.meeting if member.incarnation == 0 else 3 * self.dead


class ProgressWatch:
    """Logs for which islands this rank waits, and tells an island that stands for too long to end.

    A peer that beats and does not come to the next message evaluates, saves, compiles, or hangs:
    beats come from a thread of their own. Such a peer is not lost at first. When patience is over
    it is told to end; it does so unless it has moved meanwhile. So the island that stands goes,
    never one that waits, whichever has the lower slot.
    """

    def __init__(self, detector: FailureDetector, label: Callable[[int], str]):
        self._detector, self._label = detector, label
        self._waits, self._next = -1, PATIENCE

    def check(self, rank: Rank, now: float) -> None:
        """With every beat while no island is lost: log the peers that this rank waits for, and tell
        those to end whose time (`patience_with`) is over.
        """
        n, seconds, behind = self._detector.behind(now)
        behind = [m for m in behind if m in rank.record.contributors(n)]  # the others are not asked
        if n != self._waits:
            usual = max(self._detector.rounds, default=0.0)
            self._waits, self._next = n, max(PATIENCE, 2 * usual)
        for member in behind:
            if seconds > self._detector.patience_with(member):
                self._detector.send(Stands(n, seconds), [self._detector.notes[member]])
        if not behind or seconds < self._next:
            return
        self._next *= 2
        if rank.rank == 0:
            limit = min(map(self._detector.patience_with, behind))
            log.warning(
                "waiting for %s for %.0f s: it is alive, but has not come to the next exchange "
                "(message %d). It may take %.0f s (ISLAND_STALL, else ISLAND_TIMEOUT), then it "
                "ends, and the others go on" + see("island-stands"),
                ", ".join(self._label(m.slot) for m in behind),
                seconds,
                n,
                limit,
            )

    def members_without(self, rank: Rank, n: int, seconds: float, by: Member) -> Record | None:
        """Answer a peer that has waited `seconds` for message n of this rank. This rank ends where
        it has not come to n: the answer is then the record of the members that go on without this
        island, else None.
        """
        if rank.state != "running" or rank.next > n:
            return None
        text = (
            "%s has waited %.0f s for message %d of this island, which stands: it evaluates, saves "
            "or hangs alone for longer than ISLAND_STALL, else ISLAND_TIMEOUT%s"
        )
        log.error(text, self._label(by.slot), seconds, n, see("island-stands"))
        record = rank.record
        return replace(record, members=tuple(m for m in record.members if m != rank.me))
