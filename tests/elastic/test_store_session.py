"""The store in a change of members: whose report is waited for, and for how long; and how the
newest record is found.
"""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch.distributed as dist

from fsdp_demo.elastic import store_session
from fsdp_demo.elastic.store_session import StoreSession, newest
from fsdp_demo.files import to_json
from fsdp_demo.membership import protocol_events
from fsdp_demo.membership.protocol_types import Member, Record, Report, first_record, record_text
from fsdp_demo.store.client import WorldStore

A, B, C = MEMBERS = (Member(0), Member(1), Member(2))


def report(member: Member, *heard: Member, rank: int = 0) -> Report:
    return Report(0, member, rank, frozenset(heard), 0, (), begun=True)


class Told:
    """A feed with a store in memory, and what it has told."""

    def __init__(self, dead: float, ranks: int = 1):
        self.store, self._events = (
            WorldStore(dist.HashStore(), "the test", 5.0),
            queue.SimpleQueue[protocol_events.ReportsSeen](),
        )
        self.failed = queue.SimpleQueue[str]()
        self.session = StoreSession(
            lambda: self.store, ranks, dead, 60.0, self._events.put, self.failed.put
        )  # type: ignore[arg-type]

    def reports(self, *members: Member) -> None:
        for member in members:
            self.store.set(f"report/0/{member.slot}.0.0", to_json(report(member, *MEMBERS)))

    def next(self, seconds: float = 20.0) -> tuple[list[Member], bool]:
        """Who has reported, and whether the others are waited for no more."""
        event = self._events.get(timeout=seconds)
        return sorted(r.member for r in event.reports), event.waited


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    """Missing reports are waited for nearly for ever."""
    monkeypatch.setattr(store_session, "MINORITY", 0.3)
    made = Told(dead=3600.0)
    yield made
    made.session.close()


def test_store_session_waits_for_an_island_that_is_heard(told: Told) -> None:
    """The report of an island that is heard is waited for."""
    told.reports(B)
    told.session.post(report(A, *MEMBERS), first_record(MEMBERS))
    assert told.next() == ([A, B], False)
    with pytest.raises(queue.Empty):
        told.next(1.0)
    told.reports(C)
    assert told.next() == ([A, B, C], False)


def test_store_session_island_lost_in_the_change(told: Told) -> None:
    """The report of an island that is lost during the change is not waited for."""
    told.reports(B)
    told.session.post(report(A, *MEMBERS), first_record(MEMBERS))
    assert told.next() == ([A, B], False)
    told.session.lost([B])  # it has reported
    told.session.lost([C])
    assert told.next() == ([A, B], True)


def test_store_session_island_heard_by_nobody(told: Told) -> None:
    """The report of an island that was lost before, and is heard by nobody, is not waited for: one
    is killed, and one that was stopped before is noticed while the change is on.
    """
    told.session.post(report(A, A, B), first_record(MEMBERS))
    assert told.next() == ([A], False)
    told.session.lost([B])
    assert told.next() == ([A], True)


def test_store_session_lost_island_has_a_moment(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report of a lost island has a moment to come all the same: another one may hear it."""
    monkeypatch.setattr(store_session, "MINORITY", 3600.0)
    told.reports(B)
    told.session.post(report(A, *MEMBERS), first_record(MEMBERS))
    told.session.lost([C])
    assert told.next() == ([A, B], False)
    told.reports(C)
    assert told.next() == ([A, B, C], False)


def test_store_session_island_heard_by_another(told: Told) -> None:
    """The report of an island that another one hears is waited for."""
    told.reports(B)
    told.session.post(report(A, A, B), first_record(MEMBERS))
    assert told.next() == ([A, B], False)
    with pytest.raises(queue.Empty):
        told.next(1.0)


def test_store_session_silent_rank_beside_one_that_lives(told: Told) -> None:
    """An island of two ranks, of which one is silent and the other is heard, is not waited for: the
    silent one will not report. One that somebody in its peer group hears is.
    """
    for heard, waits in ((MEMBERS, True), ((A, B), False)):
        two = Told(3600.0, ranks=2)
        try:
            for r in (report(B, *MEMBERS), report(C, *MEMBERS), report(B, *heard, rank=1)):
                two.store.set(f"report/0/{r.member.slot}.0.{r.rank}", to_json(r))
            two.store.set("report/0/0.0.0", to_json(report(A, *MEMBERS)))
            two.session.post(report(A, A, B, rank=1), first_record(MEMBERS))
            assert two.next() == ([A, A, B, B, C], False)
            if waits:
                with pytest.raises(queue.Empty):
                    two.next(1.0)
            else:
                assert two.next() == ([A, A, B, B, C], True)
        finally:
            two.session.close()


def test_store_session_report_in_time_counts_for_a_slow_store() -> None:
    """A report counts though one look at the store takes longer than a peer may be silent: it comes
    after its place was read, and before the limit.
    """
    told = Told(dead=0.5)
    reads = told.store.get_all

    def slow(keys: Sequence[str]) -> list[str]:
        found = reads(keys)
        if "report/0/1.0.0" in keys and not any(found):
            told.reports(B)
            time.sleep(1.0)
        return found

    told.store.get_all = slow  # type: ignore[method-assign]
    try:
        told.reports(C)
        told.session.post(report(A, *MEMBERS), first_record(MEMBERS))
        assert told.next() == ([A, C], False)
        assert told.next() == ([A, B, C], True)
    finally:
        told.session.close()


def test_store_session_deletes_its_report_after_the_change(told: Told) -> None:
    """A report is deleted when the change is over: a run of weeks makes many, and the store has an
    end.
    """
    told.reports(B, C)
    told.session.post(report(A, *MEMBERS), first_record(MEMBERS))
    assert told.next() == ([A, B, C], False)
    told.session.propose(Record(1, 1, MEMBERS, (0, 0, 0)))
    end = time.monotonic() + 20.0
    while told.store.get("report/0/0.0.0"):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert all(told.store.get_all(["report/0/1.0.0", "record/1"]))  # B deletes its own


def test_store_session_refusal_ends_the_wait(told: Told) -> None:
    """A store that refuses (a full one, say) ends the wait at once: nobody can finish a change
    there.
    """

    def full(key: str, value: str) -> None:
        raise ValueError("the store refuses: it holds 100000 keys")

    told.store.set = full  # type: ignore[method-assign]
    told.session.post(report(A, *MEMBERS), first_record(MEMBERS))
    assert told.failed.get(timeout=20.0) == "the store refuses: it holds 100000 keys"


@pytest.mark.parametrize("records", [0, 1, 2, 3, 4, 7, 8, 9, 100, 171])
def test_newest_record_takes_few_questions(records: int) -> None:
    """The newest record is found by few questions to the store: a run of weeks has hundreds, and a
    newcomer looks again and again.
    """
    at = WorldStore(dist.HashStore(), "here", 5.0)
    made = [Record(n, n, (Member(0),), (0,)) for n in range(records)]
    for record in made:
        at.set(f"record/{record.epoch}", record_text(record))
    asked = itertools.count()
    gets = at.get_all

    def count(keys: Any) -> list[str]:
        next(asked)
        return gets(keys)

    at.get_all = count  # type: ignore[method-assign]
    found = newest(at)
    assert found == (made[-1] if made else None)
    assert next(asked) <= 2 * max(records, 1).bit_length() + 1
    for known in made[:: max(records // 10, 1)]:
        assert newest(at, known) == made[-1]
    asked = itertools.count()
    assert newest(at, found) == found
    assert next(asked) == 1
