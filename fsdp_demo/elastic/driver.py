"""The driver of one rank's membership: it moves messages between islands, and settles them when an
island is lost.

Whatever connections, store and clock bring becomes an event of the membership machine
(`membership/machine.py`); `Rank.step` answers with actions, and the driver does them. It runs in
the network thread (`peers/poller.py`), so heartbeats go out also while the training thread is busy.
Nothing in that thread waits: questions to the store have a thread of their own
(`store_session.py`), calculations run in the thread that waits for the message
(`message_state.py`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from ..errors import PeerLost, WireError, see
from ..membership import protocol_events
from ..membership.machine import Rank
from ..membership.protocol_events import Event
from ..membership.protocol_types import Ballot, Member, Record
from ..peers.connection import PeerConnection
from ..peers.header import ENDING, PAYLOAD, WITHIN
from ..peers.poller import Poller
from . import notes
from .failure_detector import SOON, FailureDetector, ProgressWatch
from .join_server import JoinServer
from .late_rounds import LateRounds
from .message_io import EarlyPieces, Traffic
from .message_state import RoundMessage
from .network_loop import CLOSED, LAST_NOTE, NetworkLoop
from .stopping import Stopping
from .store_session import StoreSession

log = logging.getLogger("fsdp_demo")


class Driver(NetworkLoop):
    """The membership of one rank at work.

    Args:
        machine: as `membership.entered` makes it.
        store_session: makes the store session, given what takes its events and what is called with
            a reason when a change of members has failed.
        expelled: called in the network thread when the others went on without this island; must not
            return to training.
        told_to_end: asked in the network thread whether this rank was told to end.
        longest_early: gives the bytes that an island which leaves may send ahead of a message.
        opens: makes the join server; None where members are fixed.

    Attributes:
        traffic: the messages that are kept, and their pieces. stopping: which islands are told to
            end. early_pieces: what an island that leaves sends ahead of its time. late_rounds: the
            exchanges that this island passes, where it may be late.
        join_server: where newcomers ask. None where members are fixed: nobody comes, and all must
            stay.
        changes: how many views this rank has adopted.
    """

    def __init__(
        self,
        poller: Poller,
        machine: Rank,
        detector: FailureDetector,
        store_session: Callable[[Callable[[Event], None], Callable[[str], None]], StoreSession],
        labels: Callable[[int], str],
        expelled: Callable[[Record], None],
        told_to_end: Callable[[], bool],
        longest_early: Callable[[], int],
        opens: Callable[[Driver], JoinServer] | None,
    ):
        super().__init__(poller, machine, detector, labels)
        self.notes, self.connections = detector.notes, detector.connections
        self._expelled = expelled
        self.changes = 0
        self._too_new: list[tuple[int, Event]] = []  # of epochs whose record is not here yet
        self._fetched = machine.record.epoch
        self._frozen_at = 0.0
        self._stopped: set[Member] = set()  # have said that they leave in order
        self._reasons: dict[Member, str] = {}  # of the losses so far
        self.traffic = Traffic(poller, self, self._take_later, self.refuse, longest_early)
        self.early_pieces = EarlyPieces(self, self.traffic)
        self.stopping = Stopping(self, told_to_end)
        self.late_rounds: LateRounds | None = None
        self._progress = ProgressWatch(detector, labels)
        self._store_session = store_session(
            lambda event: self.do(lambda: self._take(event)),
            lambda why: self.do(lambda: self.fail(why)),
        )
        self._store_session.epoch = machine.record.epoch
        self.traffic.adopt(machine.record)
        detector.restart_clocks(time.monotonic())
        self.join_server = None if opens is None else opens(self)
        poller.run(self.begin)

    @property
    def fixed(self) -> bool:
        """Whether the members are those of the start: nobody joins, and all must stay (a mesh)."""
        return self.join_server is None

    # ---- asked by other threads ----------------------------------------------------------------

    def launch(self, message: RoundMessage) -> None:
        """Send a message under the next number; its `tasks` get what the caller is to do."""
        self.stopping.launches(message)
        self.do(lambda: self._launch(message))
        if self._failed:  # before it was posted: nobody does it any more
            message.tasks.put(PeerLost(self._failed))

    def pass_by(self, late_rounds: LateRounds) -> None:
        """From now on this island may be late."""
        self.late_rounds, late_rounds.loop = late_rounds, self

    def leave(self, stopped: bool = False) -> None:
        """Tell the peers that this island trains no further, and whether it was `stopped` in order
        on all its ranks: they settle without a timer. The note has left when this returns.
        """
        self._let_land()

        def job() -> None:
            self.detector.send(notes.Ends("stopped" if stopped else "left"), self.notes.values())
            self._step(protocol_events.Leave())
            self._left = True

        self.do(job)
        self._wait(lambda: self._closed or (self._left and self._notes_handed_over()), LAST_NOTE)

    def expel(self, why: str) -> None:
        """End this island as one that the others have expelled; fixed members do not go on without
        it, and the next message of each fails. In the network thread.
        """
        log.error("this island cannot go on, and ends: %s", why)
        if not self.fixed:
            self._expelled(self.machine.record)

    def joined(self, then: Callable[[], None]) -> None:
        """Tell the members that this rank follows no donor any more; then do `then`."""
        self.do(lambda: self.detector.send(notes.Joined(), self.notes.values()))
        self.do(then)

    def wait_read(self, below: int, seconds: float) -> bool:
        """Wait until all members have delivered the messages below that number, or are gone, and
        no newcomer reads what this rank sends as its donor. For the end of a run: a change of
        members would not end then, since other ranks of this island may have ended.
        """

        def reached() -> bool:
            followed = self.join_server is not None and self.join_server.followed
            return not (self.machine.unread(below) or followed)

        return self.wait(reached, seconds)

    def close(self, finished: bool, linger: float) -> None:
        """Tell the peers whether the run is `finished`, and close the connections."""
        if not self._closed:
            if not finished:
                self._let_land()
            self.do(lambda: self._end(notes.Ends("finished" if finished else "left")))
            self._wait(lambda: self._closed, 5.0)
        self._wait(self._notes_handed_over, LAST_NOTE)
        self._store_session.close()
        self._poller.close(linger)

    # ---- in the network thread -----------------------------------------------------------------

    def turn(self, now: float, stopped: bool) -> None:
        """Read pieces, then notes, and find lost peers: an island's last message and the note of
        its end may come in one turn, and both count before it is lost.
        """
        self.traffic.look()
        self._do_jobs()
        self._read_all_notes(now)
        self.traffic.look()
        self._look_for_joins()
        self.stopping.announce()
        if self.stopping.together:
            self.stopping.give_up_last()
        if stopped:
            self.detector.restart_clocks(now)
        self._count_lost(self.detector.lost(now))
        longest = self.detector.dead + self.detector.meeting
        if self.machine.state == "frozen" and now - self._frozen_at > longest:
            self.fail(f"a change of members has not come to an end within {longest:g} s")

    def beat(self, now: float) -> None:
        """Say that this rank lives and how far it is, and look which peers stand."""
        self.detector.send(notes.Beat(self.machine.next), self.notes.values())
        self.stopping.announce(again=True)
        for member in self.notes:
            self._hear_landed(member)
        self.detector.watch(now)
        if self.late_rounds is not None:
            joining = self.join_server and self.join_server.joining_island
            # a donor's snapshot and what it sends behind it must fit
            self.late_rounds.look(self.stopping.together or bool(joining and joining.asked))
        if self.machine.state == "running":
            self._watch(now)

    def _watch(self, now: float) -> None:
        """Look for peers that stand, while no island is lost. Among fixed members such a peer is
        lost after `dead` seconds: nobody could go on without it.
        """
        if not self.fixed:
            self._progress.check(self.machine, now)
            return
        n, seconds, behind = self.detector.behind(now)
        if behind and seconds > self.detector.dead:
            self._count_lost({behind[0]: f"it is alive, but has not come to message {n}"})

    def _step(self, event: Event) -> None:
        """Tell the machine what has happened, and do what it asks for."""
        self.machine, actions = self.machine.step(event)
        said = (self.machine.record.epoch, self.machine.landed)
        self._store_session.epoch = said[0]
        for wire in self.detector.wires:
            wire.said = said
        for action in actions:
            _ACTIONS[type(action)](self, action)
        # not before: rooms follow what is forwarded and repeated in the new view
        if any(type(a) is protocol_events.Adopted for a in actions):
            self.traffic.expect_all()

    def _take(self, event: Event) -> None:
        """Hand the machine an event from the store; records in the order of their epochs."""
        if not isinstance(event, protocol_events.RecordSeen):
            if self.machine.state == "frozen":
                self._step(event)
            return
        epoch, next_epoch = event.record.epoch, self.machine.record.epoch + 1
        if epoch > next_epoch:
            self._fetch(next_epoch)
        elif epoch == next_epoch:
            self._step(event)
            self._let_move_in()
            if self.machine.state == "frozen":  # the record of a planned join: the change goes on
                self._store_session.again(epoch)
            too_new, self._too_new = self._too_new, []
            for its_epoch, kept in too_new:
                self._take_later(its_epoch, kept)

    def _take_later(self, epoch: int, event: Event) -> None:
        """Hand the machine an event of `epoch` when the record of that epoch is here."""
        if epoch <= self.machine.record.epoch:
            self._step(event)
        else:
            self._too_new.append((epoch, event))
            self._fetch(self.machine.record.epoch + 1)

    def _fetch(self, epoch: int) -> None:
        if self.machine.state == "running" and epoch > self._fetched:
            self._fetched = epoch
            self._store_session.fetch(epoch)

    def _end(self, note: notes.Ends) -> None:
        # on each connection: it comes before the end of that one, however late the others are
        self.detector.send(note, [w for member in self.notes for w in self.detector.of(member)])
        if self.join_server is not None:
            self.join_server.close()
        self.fail(CLOSED)

    def fail(self, reason: str) -> None:
        """End all messages with the error `reason`; one that is launched later fails at once."""
        self._failed, self._closed = self._failed or reason, True
        last = self.stopping.last  # it may wait among the jobs
        self.traffic.fail(reason, [last] if last else [])
        self._poller.tell()

    # ---- messages ------------------------------------------------------------------------------

    def _launch(self, message: RoundMessage) -> None:
        if self.stopping.gave_up or self.stopping.abandoned(message.n, message.among):
            self.stopping.give_up(message)
            return
        self.traffic.open(message)
        question = message.header.kind not in WITHIN
        self._step(protocol_events.Launched(message.n, message.kind, question, among=message.among))
        self.traffic.expect(message)
        head = message.header
        counts = head.kind == PAYLOAD and not (head.late or head.flags & ENDING)
        if self.late_rounds is not None and counts:
            self.late_rounds.launched(message.n, head.step)

    def _cast(self, action: protocol_events.CastVote) -> None:
        vote = notes.Vote(*action.ballot, action.epoch)
        self.detector.send(vote, self.detector.siblings.values())

    def _seal(self, action: protocol_events.SealAllowed) -> None:
        self.stable = action.below

    # ---- a change of members -------------------------------------------------------------------

    def _look_for_joins(self) -> None:
        """Hear the joining island, and the records of joins that others announce."""
        server, newcomer = self.join_server, None
        if server is not None and server.joining_island is not None:
            newcomer = server.look()
        members = self.machine.record.members
        donor = self.machine.rank == 0 and members[0] == self.machine.me
        if newcomer is not None and donor and newcomer.slot not in [m.slot for m in members]:
            self._step(protocol_events.JoinPlanned(newcomer))
        newest = max([w.record for w in self.detector.wires], default=0)
        if newest > self.machine.record.epoch:
            self._fetch(self.machine.record.epoch + 1)

    def _let_move_in(self) -> None:
        """Connect new members: the joining island moves in, any other one has not reached this
        rank and is lost.
        """
        known = {self.machine.me, *self.notes}
        for member in self.machine.record.members:
            if member in known or self.machine.state not in ("running", "frozen"):
                continue
            if self.join_server is None or not self.join_server.move_in(member):
                self._count_lost({member: "it is a member, but has not reached this rank"})

    def _freeze(self, action: protocol_events.Freeze) -> None:
        self._frozen_at = time.monotonic()
        self.traffic.freeze()
        lost = tuple(m.slot for m in self.machine.lost)
        everybody = [*self.notes.values(), *self.detector.siblings.values()]
        self.detector.send(notes.Frozen(action.view, lost), everybody)

    def _too_few(self, action: protocol_events.TooFew) -> None:
        if action.lost:
            slots, view = tuple(m.slot for m in action.lost), self.machine.record.view
            self.detector.send(notes.Frozen(view, slots), self.detector.siblings.values())
            unheard = "another rank of this island does not hear it"
            how = [
                f"{self._left_or_lost(m)}: {self._reasons.get(m, unheard)}"
                for m in sorted(action.lost)
            ]
            least, left = self.machine.min_continue, len(action.members)
            few = f"{least} must go on together, and {left} of them can"
            self.fail(f"{'; '.join(how)}; {few}{see('island-lost')}")
        elif action.members:
            who = ", ".join(self.labels(m.slot) for m in action.members)
            what = "only %s could go on, which is less than ISLAND_MIN: waiting for the others"
            log.warning(what, who)
        elif action.waited:
            self.fail(
                "only islands that had not taken part yet are left: the others were silent for "
                f"{self.detector.dead:g} s (ISLAND_DEAD). The run goes on from a checkpoint"
            )

    def _adopted(self, action: protocol_events.Adopted) -> None:
        record = action.record
        gone = [m for m in self.notes if m not in record.members]
        for member in gone:
            self.detector.drop(member)
        self.traffic.adopt(record)
        self.changes += 1
        self.detector.restart_clocks(time.monotonic())
        self.later(0.0, self.early_pieces.offer)
        if self.machine.rank == 0:
            left = ", ".join(self.labels(m.slot) for m in record.members)
            lost = ", ".join(self._left_or_lost(m) for m in gone) or "nobody is lost"
            what = "epoch %d: %s, training goes on with %s" + see("island-lost")
            log.warning(what, record.epoch, lost, left)

    def _gone(self, action: protocol_events.Expelled) -> None:
        self._closed = True
        self._expelled(action.record)
        self.fail("this island was expelled: the others went on without it")

    # ---- notes and signs of life ---------------------------------------------------------------

    def _hear_landed(self, member: Member) -> None:
        """Tell the machine how far a peer has delivered, as its last frame said."""
        view, landed = self.machine.record.view, self.notes[member].landed
        self._step(protocol_events.LandedHeard(view, member, landed))

    def _read_all_notes(self, now: float) -> None:
        for member, wire in list(self.notes.items()):
            self._read_notes(wire, member)
        for wire in list(self.detector.siblings.values()):
            self._read_notes(wire, None)
        for member, wires in list(self.connections.items()):
            for wire in wires:
                self._read_notes(wire, member)
                wire.keep_pace(now)

    def _read_notes(self, wire: PeerConnection, member: Member | None) -> None:
        """Handle the notes of a peer, or, where `member` is None, of another rank of this island. A
        peer is to blame for what cannot be read, not for what fails here afterwards.
        """
        while wire.notes:
            try:
                note = notes.read_note(wire.notes.popleft())
            except WireError as error:
                if member is None:
                    raise
                self._count_lost({member: str(error)})
            else:
                self._handle(note, member)

    def _handle(self, note: notes.Note, member: Member | None) -> None:
        """Do what a note asks for. member: the peer that it is of, None for another rank here."""
        match note, member:
            case notes.Vote(n, rank, view, epoch), None:
                self._take_later(epoch, protocol_events.Voted(Ballot(n, rank, view), epoch))
            case notes.Passes(step), None if self.late_rounds is not None:
                self.late_rounds.take(step)
            case notes.Waits(), Member() if self.late_rounds is not None:
                self.late_rounds.hear(note, member)
            case notes.ToldToEnd(), _:
                self.stopping.take(note, member)
            case notes.Frozen(view, lost), _:
                self.later(SOON, lambda: self._freeze_too(view, lost, member is None))
            case notes.Beat(next), Member():
                self.detector.note_next(member, next)
            case notes.BeatWanted(), Member() if member in self.notes:
                self.detector.send(notes.Beat(self.machine.next), [self.notes[member]])
            case notes.Stands(n, seconds), Member():
                if others := self._progress.members_without(self.machine, n, seconds, member):
                    self._gone(protocol_events.Expelled(others))
            case notes.Refused(why), Member():
                self._count_lost({member: f"it has refused what this island sent: {why:.300}"})
            case notes.EarlyOffered(n, kind), Member():
                self.early_pieces.hear(n, kind, member)
            case notes.EarlyKept(n), Member():
                self.early_pieces.hear_kept(n, member)
            case notes.Joined(), Member() if self.join_server is not None:
                self.join_server.over(member)
            case notes.Ends("finished"), Member():
                self.detector.leaving.add(member)
            case notes.Ends(how), Member():
                if how == "stopped":
                    self._stopped.add(member)
                why = "it was stopped" if member in self._stopped else "it has ended"
                self._count_lost({member: why})
        if member is not None and member in self.notes:
            self._hear_landed(member)

    def _freeze_too(self, view: int, lost: Collection[int], sibling: bool) -> None:
        """Freeze a view that a peer or `sibling` has frozen, which does not hear `lost`. Those of
        them that are half silent here, too, are lost at once: nobody waits for a report that will
        not come.
        """
        quiet = self.detector.quiet(time.monotonic(), unheard=True)
        if view == self.machine.record.view:
            self._count_lost({m: "silent here, too" for m in quiet if m.slot in lost})
        unheard = frozenset(m for m in self.notes if sibling and m.slot in lost)
        self._take_later(view, protocol_events.FrozenHeard(view, unheard))

    def refuse(self, member: Member, error: WireError) -> None:
        """Count a peer that has sent damaged data as lost, and tell it why. Among fixed members the
        damage is the error of the message that is waited for.
        """
        if self.stopping.last is not None:
            self.stopping.last.damage = error
        if member in self.notes:
            # it may name what a peer says
            why = str(error)[:1024].encode(errors="replace").decode()
            self.detector.send(notes.Refused(why), [self.notes[member]])
        self._count_lost({member: str(error)})

    def _left_or_lost(self, member: Member) -> str:
        """Whether a member has left in order or is lost, in words for the log."""
        how = "has left" if member in self._stopped else "is lost"
        return f"{self.labels(member.slot)} {how}"

    def _count_lost(self, found: Mapping[Member, str]) -> None:
        """Count peers as lost, for these reasons. One report a view names them all."""
        if not found or self.machine.state in ("left", "expelled"):
            return  # nobody, or this rank is nobody's peer any more
        here = set(self.machine.record.members) - self.machine.lost
        lost = [m for m in found if m in here and not self.stopping.departed(m)]
        for member in lost:
            self._reasons[member] = found[member]
            log.warning("%s: %s", self._left_or_lost(member), found[member])
        if lost:
            # The machine freezes, and writes its report, at the first loss that it is told: so it
            # must know the others before.
            self.machine = replace(self.machine, lost=self.machine.lost | set(lost[:-1]))
            if self.machine.state == "frozen":
                self._store_session.lost(lost)
            self._step(protocol_events.ConnectionLost(lost[-1]))


_ACTIONS: dict[type, Callable[[Driver, Any], None]] = {
    protocol_events.Send: lambda driver, action: driver.traffic.send(action),
    protocol_events.CastVote: Driver._cast,
    protocol_events.Deliver: lambda driver, action: driver.traffic.deliver(action),
    protocol_events.Free: lambda driver, action: driver.traffic.free(action),
    protocol_events.SealAllowed: Driver._seal,
    protocol_events.Freeze: Driver._freeze,
    protocol_events.PostReport: lambda driver, action: driver._store_session.post(
        action.report, driver.machine.record
    ),
    protocol_events.ProposeRecord: lambda driver, action: driver._store_session.propose(
        action.record
    ),
    protocol_events.TooFew: Driver._too_few,
    protocol_events.Adopted: Driver._adopted,
    protocol_events.Expelled: Driver._gone,
}
