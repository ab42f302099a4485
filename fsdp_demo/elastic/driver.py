"""The membership of one rank at work: messages between islands are moved, and settled when an
island is lost.

It stands between the membership machine (`membership/machine.py`), which knows no bytes, and
connections, store and clock, which know no rules: whatever happens becomes an event, `Rank.step`
answers with actions, and the actions are done here. It runs in the network thread
(`peers/poller.py`), so it beats also while the training thread is busy. Nothing here waits:
questions to the store have a thread of their own (`store_session.py`), calculations run in the
thread that waits for the message (`message_state.py`).
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ..errors import PeerLost, WireError, see
from ..membership import protocol_events
from ..membership.machine import Rank
from ..membership.protocol_events import Event
from ..membership.protocol_types import Ballot, Member, Record
from ..peers.connection import PeerConnection
from ..peers.header import WITHIN
from ..peers.poller import Poller
from .failure_detector import BEAT, SOON, FailureDetector, ProgressWatch
from .join_server import JoinServer
from .leaving import EarlyPieces, Stopping
from .message_io import Traffic
from .message_state import EarlyMessage, RoundMessage
from .store_session import StoreSession

log = logging.getLogger("fsdp_demo")

CLOSED = "the connections were closed"
"""The regular end: what this rank has is what all have. After a failure nobody knows that
(seal-stable)."""

ABANDONED = "all islands are told to end, and not all send this message: it is saved as unsent"
"""Of a message whose answer does not come."""

LAST_WORD = 1.0
"""Seconds that the last message of this rank has to arrive, and its last word to be handed over."""

STOPPED = 2.0
"""Seconds between two turns of this thread after which the process itself must have been stopped:
the others are not to blame then.
"""


class Driver:
    """Runs the membership of one rank.

    Args:
        hub: of all connections. machine: as `membership.entered` makes it.
        signs: the connections, and who is heard on them.
        feed: the store in a change, made from what it is to call.
        labels: how errors and logs name an island, by slot.
        joining islands: newcomers, if they can come in here.
        expelled: called in this thread when the others went on without this island; must not return
            to training.

    Attributes:
        machine: as it is now; read by others, changed in this thread only.
        stable: all members have delivered every message below it (seal-stable). changes: how many
            views this rank has adopted.
        stopping: who is told to end. abandoned: a message of this rank comes to nothing, since all
            islands are.
    """

    def __init__(
        self,
        poller: Poller,
        machine: Rank,
        signs: FailureDetector,
        store_session: Callable[[Callable[[Event], None], Callable[[str], None]], StoreSession],
        labels: Callable[[int], str],
        expelled: Callable[[Record], None],
        join_server: JoinServer | None = None,
    ):
        self._poller, self.machine, self._labels, self.signs = poller, machine, labels, signs
        self.notes, self.connections, self.siblings = signs.notes, signs.connections, signs.siblings
        self._expelled, self.join_server = expelled, join_server
        self.stable, self.changes = 0, 0
        self.changed = threading.Condition()
        self._last: RoundMessage | None = None
        self._traffic = Traffic(
            poller, signs, lambda: self.machine, labels, self._post, self._take_later, self._refused
        )
        self._work: deque[Callable[[], None]] = deque()
        self._early: list[tuple[int, Event]] = []
        self._asked = machine.record.epoch
        self._soon: deque[tuple[float, Callable[[], None]]] = deque()
        self._beat_at = self._turned = time.monotonic()
        self._closed = self._left = False
        self._frozen_at = 0.0
        self._early_pieces = EarlyPieces(
            self._traffic,
            signs,
            lambda: self.machine,
            self._later,
            self.changed,
            lambda: self._closed,
        )
        self._standing = ProgressWatch(signs, labels)
        self.stopping, self.abandoned = Stopping(signs, lambda: self.machine, self.changed), False
        self._failed = ""
        self._store_session = store_session(
            lambda event: self._post(lambda: self._take(event)),
            lambda why: self._post(lambda: self._fail(why)),
        )
        self._store_session.epoch = machine.record.epoch
        if machine.record.epoch == 0 and machine.rank == 0:
            self._store_session.begin(machine.record)
        self._traffic.adopt(machine.record)
        signs.forgive(time.monotonic())
        self._ended = threading.Event()
        poller.post(self._run)

    # ---- asked by other threads ----------------------------------------------------------------

    def launch(self, message: RoundMessage) -> None:
        """Send a message, the next number; what is to be done for it comes in its `tasks`."""
        self._last = message
        self._post(lambda: self._launch(message))
        if self._failed:  # before it was posted: nobody does it any more
            message.tasks.put(PeerLost(self._failed))

    def busy(self, who: Member) -> str:
        """Why a newcomer cannot come in now; empty if it can. In the network thread."""
        if self.machine.state != "running":
            return "the members change at the moment"
        if who.slot in [m.slot for m in self.machine.record.members]:
            return f"island {who.slot} is a member: its end was not noticed yet"
        return ""

    def status(self) -> dict[str, Any]:
        """How this rank stands, for `rendezvous/run_status.py`. In the network thread."""
        now, joining_island = (
            time.monotonic(),
            self.join_server.joining_island if self.join_server is not None else None,
        )
        heard = {str(m.slot): round(now - wire.heard_at, 2) for m, wire in self.notes.items()}
        joining = (
            joining_island.name if joining_island is not None and not joining_island.moved else ""
        )
        rank = self.machine
        return {
            "launched": rank.next,
            "delivered": rank.landed,
            "state": rank.state,
            "heard": heard,
            "joining": joining,
        }

    def do(self, job: Callable[[], None]) -> None:
        """Run `job` in the network thread."""
        self._post(job)

    def allow_early(self, longest: int) -> None:
        """Bytes that an island which leaves may send ahead of a message."""
        self._traffic.longest = longest

    def send_early(self, early: EarlyMessage, seconds: float) -> bool:
        """Send what this island contributes to its next message ahead of its time, before it leaves
        (early-part). Whether others have it within so many seconds."""
        self._post(lambda: self._early_pieces.begin(early))
        return self._early_pieces.wait(seconds)

    def stop_with_all(self, applied_at: int, seconds: float) -> int | None:
        """All islands are told to end, and this rank launches nothing more: wait until all have
        what all have sent.

        Args:
            applied_at: how many steps this rank had taken when it last applied a message.
            seconds: to wait at most.

        Returns:
            The most that any of them says for `applied_at`; None where not all have come so far.
        """
        self._post(lambda: self.stopping.end(applied_at))
        return self.stopping.applied_at if self._wait(self.stopping.settled, seconds) else None

    def leave(self) -> None:
        """Tell the others that this island goes on no more; they settle what is open without
        waiting for a timer.
        """
        self._let_land()

        def job() -> None:
            self.signs.say(["leave"], self.notes.values())
            self._step(protocol_events.Leave())
            with self.changed:
                self._left = True
                self.changed.notify_all()

        self._post(job)

    def expel(self, why: str) -> None:
        """End this island: what it holds is not what the others hold."""
        log.error("this island cannot go on, and ends: %s", why)
        self._expelled(self.machine.record)

    def joined(self, then: Callable[[], None]) -> None:
        """Tell the others that this rank follows nobody any more, and run `then` in the driver's
        thread.
        """
        self._post(lambda: self.signs.say(["joined"], self.notes.values()))
        self._post(then)

    def widen(self, connections: Mapping[Member, PeerConnection]) -> None:
        """One more connection to each peer, for messages from now on."""
        self._post(lambda: self._traffic.widen(connections))

    def wait_stable(self, below: int, seconds: float) -> bool:
        """Wait until all members have delivered the messages below that number."""
        reached = self._wait(lambda: self.stable >= below, seconds)
        return reached or self._left or self._failed == CLOSED

    def wait_read(self, below: int, seconds: float) -> bool:
        """Wait until all members have delivered the messages below that number, or are gone: who is
        gone reads no more. For the end of a run. Other ranks of this island may have ended then, so
        the change of members that a loss begins would never come to its end. Who has joined and not
        begun reads what its donor sends.
        """
        return self._wait(lambda: not (self.machine.unread(below) or self._is_followed()), seconds)

    def _is_followed(self) -> bool:
        joining_island = self.join_server.joining_island if self.join_server is not None else None
        return joining_island is not None and joining_island.moved

    def _wait(self, reached: Callable[[], bool], seconds: float) -> bool:
        """Ask the members how far they are, and wait until that is far enough; whether it is."""
        end = time.monotonic() + seconds
        self._post(lambda: self.signs.say(["landed?"], self.notes.values()))
        with self.changed:
            while (
                not reached()
                and not (self._closed or self._left)
                and (left := end - time.monotonic()) > 0
            ):
                self.changed.wait(min(left, 0.5))
            return reached()

    def close(self, word: str, linger: float) -> None:
        """End, with a word to the others: "bye" at the end of a run, "leave" before it. The
        connections close.
        """
        if not self._closed:
            if word == "leave":
                self._let_land()
            self._post(lambda: self._end(word))
            self._ended.wait(5.0)
        self._store_session.close()
        self._poller.close(linger)

    def _let_land(self) -> None:
        """Wait a moment until the others have what was delivered here. "leave" takes a connection
        of its own: those who hear it before a message settle without this rank, which has it.
        """
        had = self.machine.landed
        self._wait(lambda: not self.machine.unread(had), LAST_WORD)

    def _post(self, job: Callable[[], None]) -> None:
        self._work.append(job)
        self._poller.tell()

    def _later(self, seconds: float, job: Callable[[], None]) -> None:
        self._soon.append((time.monotonic() + seconds, job))

    # ---- in the network thread -----------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closed:
                if not self._work:
                    self._poller.move(SOON / 2 if self._soon or self.signs.soon else BEAT / 2)
                self._turn()
            self._hand_over()
        except BaseException as error:
            why, regular = f"the network thread has failed: {error!r:.200}", self._closed
            if not regular:
                log.exception("membership: the thread has failed")
            self._fail(why)
            self._poller.close(0)  # so that the others hear of it at once
            if not regular:  # training may be far from its next message, or stand in another wait
                self.expel(why)
        finally:
            self._ended.set()

    def _hand_over(self) -> None:
        """Let what was said last leave: whoever closes the connections drops what waits here."""

        def given() -> bool:
            return not any(wire.waiting and not wire.gone for wire in self.signs.wires)

        end = time.monotonic() + LAST_WORD
        while not given() and (left := end - time.monotonic()) > 0:
            self._poller.move(left)

    def _turn(self) -> None:
        now = time.monotonic()
        stopped, self._turned = now - self._turned > STOPPED, now
        # pieces before notes: an island's last message and its "leave" may come in one turn
        self._traffic.look()
        while self._work and not self._closed:
            self._work.popleft()()
        for member, wire in list(self.notes.items()):
            self._read_notes(wire, member)
        for wire in list(self.siblings.values()):
            self._read_notes(wire, None)
        for member, wires in list(self.connections.items()):
            for wire in wires:
                self._read_notes(wire, member)
                wire.keep_pace(now)
        self._traffic.look()
        if self.join_server is not None:
            self._serve_guest(self.join_server)
        self.stopping.look()
        self._abandon()
        if stopped:
            self.signs.forgive(now)
        self._lose(self.signs.lost(now))
        longest = self.signs.dead + self.signs.meeting
        if self.machine.state == "frozen" and now - self._frozen_at > longest:
            self._fail(f"a change of members has not come to an end within {longest:g} s")
        while self._soon and self._soon[0][0] <= now:
            self._soon.popleft()[1]()
        if now - self._beat_at >= BEAT:
            self._beat_at = now
            self._beat()
            self.signs.watch(now)
            if self.machine.state == "running":
                self._watch(now)

    def _watch(self, now: float) -> None:
        """With every beat, while no island is lost."""
        self._standing.look(self.machine, now)

    def _step(self, event: Event) -> None:
        self.machine, actions = self.machine.step(event)
        said = (self.machine.record.epoch, self.machine.landed)
        self._store_session.epoch = said[0]
        for wire in self.signs.wires:
            wire.said = said
        for action in actions:
            _ACTIONS[type(action)](self, action)
        if any(type(a) is protocol_events.Adopted for a in actions):
            self._traffic.expect_all()

    def _take(self, event: Event) -> None:
        """An event from the store."""
        if isinstance(event, protocol_events.RecordSeen):
            epoch, now = event.record.epoch, self.machine.record.epoch
            if epoch > now + 1:
                self._fetch(now + 1)
                return
            if epoch == now + 1:
                self._step(event)
                self._let_move_in()
                if self.machine.state == "frozen":
                    self._store_session.again(epoch)
                self._release_early()
            return
        if self.machine.state == "frozen":
            self._step(event)

    def _take_later(self, epoch: int, event: Event) -> None:
        """An event of an epoch whose record is not here yet is kept until it is."""
        if epoch <= self.machine.record.epoch:
            self._step(event)
            return
        self._early.append((epoch, event))
        self._fetch(self.machine.record.epoch + 1)

    def _fetch(self, epoch: int) -> None:
        if self.machine.state == "running" and epoch > self._asked:
            self._asked = epoch
            self._store_session.fetch(epoch)

    def _release_early(self) -> None:
        early, self._early = self._early, []
        for epoch, event in early:
            self._take_later(epoch, event)

    def _end(self, word: str) -> None:
        # on each connection: it comes before the end of that one, however late the others are
        self.signs.say([word], [w for member in self.notes for w in self.signs.of(member)])
        if self.join_server is not None:
            self.join_server.close()
        self._closed = True
        self._fail(CLOSED)

    def _fail(self, reason: str) -> None:
        self._failed, self._closed = self._failed or reason, True
        # the last may wait in `_work`
        self._traffic.fail(reason, [self._last] if self._last else [])
        with self.changed:
            self.changed.notify_all()

    # ---- messages ------------------------------------------------------------------------------

    def _launch(self, message: RoundMessage) -> None:
        if self._failed:
            message.tasks.put(PeerLost(self._failed))
            return
        if self.abandoned or self.stopping.abandoned(message.n):
            self.abandoned = True
            self.stopping.end()
            message.tasks.put(PeerLost(ABANDONED))
            return
        self._traffic.open(message)
        self._step(
            protocol_events.Launched(message.n, message.kind, message.header.kind not in WITHIN)
        )
        self._traffic.expect(message)

    def _abandon(self) -> None:
        """What some island never sends is waited for no longer: all are told to end."""
        message = self._last
        if message is None or self.abandoned or not self.stopping.abandoned(message.n):
            return
        if any(e.n == message.n and not e.delivered for e in self.machine.open):
            self.abandoned = True
            self.stopping.end()
            message.tasks.put(PeerLost(ABANDONED))

    def _send(self, action: protocol_events.Send) -> None:
        self._traffic.send(action)

    def _cast(self, action: protocol_events.CastVote) -> None:
        n, rank, view = action.ballot
        self.signs.say(["vote", n, rank, view, action.epoch], self.siblings.values())

    def _deliver(self, action: protocol_events.Deliver) -> None:
        self._traffic.deliver(action)

    def _free(self, action: protocol_events.Free) -> None:
        self._traffic.free(action)

    def _seal(self, action: protocol_events.SealAllowed) -> None:
        with self.changed:
            self.stable = action.below
            self.changed.notify_all()

    # ---- a change of members -------------------------------------------------------------------

    def _serve_guest(self, join_server: JoinServer) -> None:
        """Listen to who wants to join. The first peer group of the donor plans it when the newcomer
        is near.
        """
        for word in join_server.look():
            joining_island = join_server.joining_island
            if word[:1] == ["follow"] and joining_island is not None:
                joining_island.brings = word[1]
                joining_island.asked = True
            elif (
                word[:1] == ["ready"]
                and joining_island is not None
                and joining_island.following
                and self.machine.rank == 0
            ):
                members = self.machine.record.members
                if members[0] == self.machine.me and joining_island.member.slot not in [
                    m.slot for m in members
                ]:
                    self._step(protocol_events.JoinPlanned(joining_island.member))
        newest = max((w.record for w in self.signs.wires), default=0)
        if newest > self.machine.record.epoch:
            self._fetch(self.machine.record.epoch + 1)

    def _let_move_in(self) -> None:
        """Who is a member now and has no connection here yet: the joining island, or somebody who
        has not reached this rank and is lost.
        """
        record = self.machine.record
        for member in record.members:
            if (
                member == self.machine.me
                or member in self.notes
                or self.machine.state not in ("running", "frozen")
            ):
                continue
            moved = self.join_server.move_in(member) if self.join_server is not None else None
            if moved is None:
                self._lost(member, "it is a member, but has not reached this rank")
                continue
            self.signs.admit(member, *moved, time.monotonic())
            for wire in [self.notes[member], *self.connections[member]]:
                wire.said = (record.epoch, self.machine.landed)
                wire.renew(record.view)
            self.signs.say(["planned", record.epoch], [self.notes[member]])
            if self.machine.rank == 0:
                base = record.base[record.members.index(member)]
                log.info(
                    "epoch %d: %s joins, from message %d on",
                    record.epoch,
                    self._labels(member.slot),
                    base,
                )

    def _freeze(self, action: protocol_events.Freeze) -> None:
        self._frozen_at = time.monotonic()
        self._traffic.freeze()
        lost = [m.slot for m in self.machine.lost]
        self.signs.say(
            ["frozen", action.view, lost], [*self.notes.values(), *self.siblings.values()]
        )

    def _report(self, action: protocol_events.PostReport) -> None:
        record = self.machine.record
        self._store_session.post(action.report, record.members, record.epoch)

    def _propose(self, action: protocol_events.ProposeRecord) -> None:
        self._store_session.propose(action.record)

    def _too_few(self, action: protocol_events.TooFew) -> None:
        if not action.members:
            if action.waited:
                self._fail(
                    "only islands that had not taken part yet are left: the others were silent for "
                    f"{self.signs.dead:g} s (ISLAND_DEAD). The run goes on from a checkpoint"
                )
            return
        who = ", ".join(self._labels(m.slot) for m in action.members)
        log.warning(
            "only %s could go on, which is less than ISLAND_MIN: waiting for the others", who
        )

    def _adopted(self, action: protocol_events.Adopted) -> None:
        record = action.record
        gone = [m for m in self.notes if m not in record.members]
        for member in gone:
            self.signs.drop(member)
        self._traffic.adopt(record)
        self.changes += 1
        self.signs.forgive(time.monotonic())
        self._soon.append((time.monotonic(), self._early_pieces.offer))
        if self.machine.rank == 0:
            left = ", ".join(self._labels(m.slot) for m in record.members)
            lost = ", ".join(self._labels(m.slot) for m in gone)
            log.warning(
                "epoch %d: %s lost, training goes on with %s" + see("island-lost"),
                record.epoch,
                lost or "nobody",
                left,
            )

    def _gone(self, action: protocol_events.Expelled) -> None:
        self._closed = True
        self._expelled(action.record)
        self._fail("this island was expelled: the others went on without it")

    # ---- words and signs of life ---------------------------------------------------------------

    def _beat(self) -> None:
        self.signs.say(["beat", self.machine.next], self.notes.values())
        self.stopping.look(again=True)
        for member, wire in self.notes.items():
            self._step(protocol_events.LandedHeard(self.machine.record.view, member, wire.landed))

    def _read_notes(self, wire: PeerConnection, member: Member | None) -> None:
        while wire.notes:
            try:
                word = json.loads(wire.notes.popleft())
                self._hear(word, member)
            except (
                ValueError,
                KeyError,
                TypeError,
                IndexError,
                OverflowError,
                RecursionError,
            ) as error:
                if member is not None:
                    self._lost(member, f"a note that cannot be read ({error!r:.80})")

    def _hear(self, word: list[Any], member: Member | None) -> None:
        what = word[0]
        if what == "vote" and member is None:
            n, rank, view, epoch = word[1:]
            self._take_later(epoch, protocol_events.Voted(Ballot(n, rank, view), epoch))
        elif what == "stops":
            self.stopping.hear(word, member)
        elif what == "frozen":
            view, lost = int(word[1]), set(word[2])
            self._soon.append((time.monotonic() + SOON, lambda: self._freeze_too(view, lost)))
        elif member is not None and what == "beat":
            self.signs.heard(member, int(word[1]))
        elif member is not None and what == "landed?":
            self.signs.say(["beat", self.machine.next], [self.notes[member]])
        elif member is not None and what == "joined" and self.join_server is not None:
            self.join_server.over(member)
        elif member is not None and what == "early":
            self._early_pieces.hear(word, member)
        elif member is not None and what == "kept":
            self._early_pieces.hear_kept(int(word[1]), member)
        elif member is not None and what == "bye":
            self.signs.leaving.add(member)
        elif member is not None and what == "leave":
            self._lost(member, "has left")
        elif member is not None and what == "stands":
            others = self._standing.told(self.machine, int(word[1]), float(word[2]), member)
            if others is not None:
                self._gone(protocol_events.Expelled(others))
        if member is not None and member in self.notes:
            self._step(
                protocol_events.LandedHeard(
                    self.machine.record.view, member, self.notes[member].landed
                )
            )

    def _freeze_too(self, view: int, lost: set[int]) -> None:
        """Another rank has frozen this view and does not hear `lost`: who is half silent here, too,
        is lost at once. So nobody waits for a report that will not come."""
        quiet = self.signs.quiet(time.monotonic(), unheard=True)
        if view == self.machine.record.view:
            self._lose({member: "silent here, too" for member in quiet if member.slot in lost})
        self._take_later(view, protocol_events.FrozenHeard(view))

    def _refused(self, member: Member, error: WireError) -> None:
        self._lost(member, str(error))

    def _lost(self, member: Member, why: str) -> None:
        self._lose({member: why})

    def _lose(self, found: Mapping[Member, str]) -> None:
        """These peers are lost. One report names them all: it is written once in a view."""
        if self.machine.state in ("left", "expelled"):
            return  # it is nobody's peer any more
        lost = [
            m
            for m in found
            if m not in self.machine.lost
            and m in self.machine.record.members
            and not self.stopping.departed(m)
        ]
        for member in lost:
            log.warning("%s is lost: %s", self._labels(member.slot), found[member])
        if lost:
            self.machine = replace(self.machine, lost=self.machine.lost | set(lost[:-1]))
            if self.machine.state == "frozen":
                self._store_session.lost(lost)
            self._step(protocol_events.ConnectionLost(lost[-1]))


_ACTIONS: dict[type, Callable[[Driver, Any], None]] = {
    protocol_events.Send: Driver._send,
    protocol_events.CastVote: Driver._cast,
    protocol_events.Deliver: Driver._deliver,
    protocol_events.Free: Driver._free,
    protocol_events.SealAllowed: Driver._seal,
    protocol_events.Freeze: Driver._freeze,
    protocol_events.PostReport: Driver._report,
    protocol_events.ProposeRecord: Driver._propose,
    protocol_events.TooFew: Driver._too_few,
    protocol_events.Adopted: Driver._adopted,
    protocol_events.Expelled: Driver._gone,
}
