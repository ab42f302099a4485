"""The store in a change of members: reports are written and watched for, records are proposed and
read, in a thread of its own.

In health it asks nothing, and its thread begins with the first question. A store that does not
answer is said once and asked again: training waits for the change meanwhile.

Keys below those of the meeting:

    report/<view>/<slot>.<incarnation>.<rank>   what one frozen rank holds (`epochs.Report`)
    record/<epoch>                              who is a member, and how open messages are settled (compare_set: the first stays)
"""  # noqa: E501

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from ..errors import PeerLost, StoreSilent
from ..files import from_json, to_json
from ..membership import protocol_events
from ..membership.protocol_events import Event
from ..membership.protocol_types import Member, Record, Report, read_record, record_text
from ..store.client import Store

log = logging.getLogger("fsdp_demo")

LOOK = 0.05
"""Seconds between two looks into the store while a change is on."""

AGAIN = 0.3
"""Seconds between two tries to reach a store that does not answer."""

MINORITY = 1.5
"""Seconds for which reports of less than half of the islands, or of a half without the lowest slot,
are held back: who is cut off from most of the others sees it a moment before or after them, and
must not be the first to write a record. For as long, too, nobody goes on without the report of a
peer that it has lost by then, or of which one rank is heard by nobody: it may still report."""


class StoreSession:
    """Serves one rank's driver.

    Args:
        open_store: a connection of its own to the store, below the keys of the meeting.
        ranks: of each island.
        dead: seconds after which missing reports are waited for no more. patience: seconds for
            which a change waits for the store.
        tell: takes events, in this thread. failed: called, with a reason, when a change has waited
            for too long.

    Attributes:
        epoch: of the newest record that this rank knows: a store that lacks it has forgotten, or is
            another one, and decides nothing (record-chain).
    """

    def __init__(
        self,
        open_store: Callable[[], Store],
        ranks: int,
        dead: float,
        patience: float,
        tell: Callable[[Event], None],
        failed: Callable[[str], None],
    ):
        self._open, self._ranks, self._dead, self._tell = open_store, ranks, dead, tell
        self._patience, self._failed = patience, failed
        self.epoch = 0
        self._at: Store | None = None
        self._met, self._own = False, ""  # this rank has written here; the key of its report
        self._jobs: queue.SimpleQueue[Callable[[Store], None] | None] = queue.SimpleQueue()
        self._watched: Watched | None = None
        self._thread: threading.Thread | None = None

    def begin(self, record: Record) -> None:
        """Write the first record, unless it stands there."""

        def job(at: Store) -> None:
            self._hand_in(at, record)
            self._met = True

        self._do(job)

    def post(self, report: Report, record: Record) -> None:
        """Write a report; watch for the others' on its view, and for the record that follows."""

        def job(at: Store) -> None:
            self._met, self._own = True, _report_key(report.view, report.member, report.rank)
            self._write(lambda: at.set(self._own, to_json(report)))
            until = time.monotonic() + self._dead
            self._watched = Watched(report.view, record.members, record.epoch + 1, until)

        self._do(job)

    def lost(self, members: Iterable[Member]) -> None:
        """Note that these were lost while the change is on: their reports are not waited for until
        `dead` seconds after its beginning.
        """

        def job(at: Store) -> None:
            if self._watched is not None:
                self._watched.lost |= set(members)

        self._do(job)

    def propose(self, record: Record) -> None:
        """Offer a record to the store (compare_set), and tell which one it has then."""
        self._do(lambda at: self._hand_in(at, record))

    def again(self, epoch: int) -> None:
        """Watch for the next record, since the one that came (a planned join) leaves this rank
        frozen; and report to the driver once more which reports there are.
        """

        def job(at: Store) -> None:
            if self._watched is not None:
                self._watched.epoch = epoch + 1
                self._tell(
                    protocol_events.ReportsSeen(
                        tuple(self._watched.found.values()), self._watched.waited
                    )
                )

        self._do(job)

    def fetch(self, epoch: int) -> None:
        """Read a record that somebody has announced."""
        self._do(lambda at: self._seen(at, self._known(at, epoch)))

    def close(self) -> None:
        """End the thread, unless a silent store holds it."""
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join(1.0)

    def _do(self, job: Callable[[Store], None]) -> None:
        """Run `job` in the thread, behind those before it."""
        self._jobs.put(job)
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="membership store", daemon=True)
            thread.start()
            self._thread = thread  # not before: `close` joins it, in another thread

    # ---- in the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        silent, job, said = 0.0, None, ""
        while True:
            try:
                if job is None:
                    try:
                        job = self._jobs.get(timeout=LOOK if self._watched else None)
                    except queue.Empty:
                        job = self._look
                    if job is None:
                        return
                self._at = self._at or self._opened()
                job(self._at)
                job, silent = None, 0.0
            except PeerLost as error:  # once more, until it answers
                reason, now = str(error).partition(": start there")[0], time.monotonic()
                if not silent:
                    log.warning("%s: the change of members waits for it", reason)
                self._at, silent = None, silent or now
                if now - silent > self._patience:
                    self._failed(
                        f"{reason}: a change of members has waited {self._patience:g} s for the "
                        "store"
                    )
                    return
                time.sleep(AGAIN)
            except ValueError as error:
                if str(error) != said:  # it is looked at again and again
                    log.error("membership: %s", error)
                job, said = None, str(error)

    def _opened(self) -> Store:
        """A connection to a store that knows what this rank knows."""
        at = self._open()
        if self._met:
            self._known(at, self.epoch)
        return at

    def _known(self, at: Store, epoch: int) -> str:
        """The text of the record of `epoch`. Raises StoreSilent where the store lacks it."""
        if not (text := at.get(record_key(epoch))):
            raise StoreSilent(
                f"the store does not know record {epoch} of this run: it was started anew "
                "without its file, or from an older copy of it"
            )
        return text

    def _hand_in(self, at: Store, record: Record) -> None:
        key, text = record_key(record.epoch), record_text(record)
        if stands := self._write(lambda: at.compare_set(key, "", text)):
            self._seen(at, stands)

    def _write(self, ask: Callable[[], Any]) -> Any:
        """The store's answer to `ask`, a write. Where it refuses (it is full, say) no change of
        members can end, so this rank fails at once.
        """
        try:
            return ask()
        except ValueError as error:
            self._failed(str(error))
            return None

    def _seen(self, at: Store, text: str) -> None:
        record = read_record(text)
        over = self._watched is not None and record.view == record.epoch > self._watched.view
        if over:
            self._watched = None
        self._tell(protocol_events.RecordSeen(record))
        if over:  # nobody acts on reports once the record stands, and a run of weeks makes many
            at.set(self._own, "")

    def _look(self, at: Store) -> None:
        watched = self._watched
        if watched is None:
            return
        if text := at.get(record_key(watched.epoch)):
            watched.epoch += 1
            self._seen(at, text)
            return
        # a report that came before the limit counts, however long the questions take
        late = time.monotonic() > watched.until
        for member in watched.members:
            keys = [_report_key(watched.view, member, rank) for rank in range(self._ranks)]
            keys = [k for k in keys if k not in watched.found and k not in watched.damaged]
            for key, text in zip(keys, at.get_all(keys), strict=True):
                if text:
                    watched.take(key, text)
        now, awaited = time.monotonic(), watched.awaited(self._ranks)
        vain = bool(awaited) and awaited <= watched.lost | watched.unheard()
        given_up = vain and now > watched.since + MINORITY
        if (given_up or late) and not watched.waited:
            watched.waited = watched.new = True
        have, of = {r.member for r in watched.found.values()}, len(watched.members)
        few = 2 * len(have) < of or (2 * len(have) == of and watched.members[0] not in have)
        if watched.new and not (few and now < watched.since + MINORITY):
            watched.new = False
            self._tell(protocol_events.ReportsSeen(tuple(watched.found.values()), watched.waited))


class Watched:
    """A view whose reports and record are looked for. lost: the members that this rank has lost
    since its report.
    """

    def __init__(self, view: int, members: tuple[Member, ...], epoch: int, until: float):
        self.view, self.members, self.epoch, self.until = view, members, epoch, until
        self.lost: set[Member] = set()
        self.found: dict[str, Report] = {}
        self.since = time.monotonic()
        self.waited = self.new = False
        self.damaged: set[str] = set()

    def awaited(self, ranks: int) -> set[Member]:
        """Members that somebody heard when he reported, and of which not all `ranks` ranks have
        reported.
        """
        count = Counter(r.member for r in self.found.values())
        return {m for r in self.found.values() for m in r.heard if count[m] < ranks}

    def unheard(self) -> set[Member]:
        """Members of which one rank has not reported, and nobody in its peer group hears it."""
        found = self.found.values()
        known = {(r.rank, m) for r in found for m in (r.member, *r.heard)}
        return {m for m in self.members for r in found if (r.rank, m) not in known}

    def take(self, key: str, text: str) -> None:
        """Keep a member's report. A damaged report counts as missing."""
        try:
            report = from_json(text, Report, "a report in the store")
            self.found[key], self.new = report, True
        except ValueError as error:
            log.error("membership: %s", error)
            self.damaged.add(key)


def newest(at: Store, known: Record | None = None) -> Record | None:
    """The newest record of a run; None where there is none.

    Epochs have no gaps, so few questions find the last one: steps that double, then halves. A run
    of weeks has hundreds of records, and the store may be far away.

    Args:
        known: a record of the run, from which the search goes on.
    """
    found, there, step = known, -1 if known is None else known.epoch, 1
    missing = None
    while missing is None or missing - there > 1:
        epoch = there + step if missing is None else (there + missing) // 2
        if text := at.get(record_key(epoch)):
            found, there, step = read_record(text), epoch, 2 * step
        else:
            missing = epoch
    return found


def _report_key(view: int, member: Member, rank: int) -> str:
    return f"report/{view}/{member.slot}.{member.incarnation}.{rank}"


def record_key(epoch: int) -> str:
    """The key of the record of an epoch."""
    return f"record/{epoch}"
