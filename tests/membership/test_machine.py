"""Histories that break simpler protocols of membership, each by the name of its rule in
docs/membership.md, played on the state machine.

Left for the parts that they concern: one-answer and one-judgement (questions and the guard),
beats-of-training and slow-waits (beats, patience), delivered-stays (sums of tensors), the coding in
reduce-again and coded-for-fewer (transports, connections), the durable store in record-chain.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from fsdp_demo.membership import protocol_events, settlement
from fsdp_demo.membership.machine import entered
from fsdp_demo.membership.protocol_types import (
    Ballot,
    Forward,
    Member,
    Piece,
    Record,
    Report,
    Settlement,
    extended,
    first_record,
)

from ..support.bench import A, B, Bench, C, D


def deliveries(bench: Bench, member: Member) -> list[protocol_events.Deliver]:
    """What rank 0 of this island has delivered."""
    return [x for x in bench.did[member, 0] if isinstance(x, protocol_events.Deliver)]


def too_few(bench: Bench, member: Member) -> list[protocol_events.Action]:
    """What rank 0 of this island does when it waits for no more reports."""
    return bench.tell((member, 0), protocol_events.ReportsSeen(tuple(bench.reports), waited=True))


def comes_to_its_end(bench: Bench, islands: str) -> None:
    """All comes through, and A and B have delivered message 0 with exactly these islands."""
    bench.let()
    bench.vote()
    assert bench.delivered(A) == bench.delivered(B) == [islands] * bench.peer_groups


def test_machine_healthy_delivers_frees_and_seals() -> None:
    """Without a fault all members deliver, free and seal every message."""
    bench = Bench()
    for n, kind in enumerate(("gather", "mixed", "gather")):
        bench.launch(n, kind)
        bench.let()
        bench.vote()
        assert [bench.delivered(m, n) for m in (A, B, C)] == [["ABC"] * 2] * 3
    bench.beats()
    assert all(not rank.open and rank.freed == 3 for rank in bench.ranks.values())
    assert bench.sealed(A) == bench.sealed(C, 1) == 3


def test_freeze_first_frozen_rank_receives_nothing() -> None:
    """A frozen rank receives nothing. C is slow, not dead: its bytes come to A after A has reported
    that it lacks them.
    """
    bench = Bench()
    bench.launch(0)
    bench.let(sender=(A, B))
    bench.freeze(A, B)
    before = {at: bench.ranks[at] for at in bench.ranks if at[0] == A}
    bench.let(sender=C, to=A)
    bench.vote()
    assert {at: bench.ranks[at] for at in before} == before and bench.delivered(A) == [None, None]
    bench.change(A, B)
    comes_to_its_end(bench, "AB")


def test_one_record_is_the_same_whoever_proposes_it() -> None:
    """Every rank proposes the same record from the same reports."""
    bench = Bench()
    bench.launch(0)
    bench.let(to=A)
    bench.freeze(A, B, C)
    proposed = [bench.propose((m, r)) for m in (A, B, C) for r in (0, 1)]
    assert len(set(proposed)) == 1 and proposed[0] is not None and proposed[0].members == (A, B, C)


def test_all_groups_no_peer_group_acts_alone() -> None:
    """No peer group acts alone: peer group 0 of B holds C's body, peer group 1 does not."""
    bench = Bench("ABC")
    bench.launch(0)
    bench.let(sender=(A, B))
    bench.let(sender=C, to=B, peer_group=0)
    assert bench.ranks[B, 0].ballots and bench.delivered(B) == [None, None]
    bench.change(A, B)
    comes_to_its_end(bench, "AB")


def applied_by_d() -> Bench:
    """D alone has delivered message 0, with C's body, and C died."""
    bench = Bench("ABCD")
    bench.launch(0)
    bench.let(to=D)
    bench.let(sender=(A, B, D), to=(A, B))
    bench.vote()
    assert bench.delivered(D) == ["ABCD", "ABCD"] and bench.delivered(A) == [None, None]
    return bench


def test_any_holder_forwards_what_one_member_has() -> None:
    """A body that one member holds is forwarded to the others, and the message counts."""
    bench = applied_by_d()
    record = bench.change(A, B, D)
    assert record.settlements == (Settlement(0, (A, B, C, D), 1),)
    assert [f for f in record.forwards if f.piece.of == C] == [
        Forward(peer_group, 0, Piece("body", C), D, (A, B)) for peer_group in (0, 1)
    ]
    comes_to_its_end(bench, "ABCD")


def test_any_holder_forwards_and_dies_meanwhile() -> None:
    """The only holder dies while it forwards: the unfinished settlement is settled again, from what
    the members of the next record hold.
    """
    bench = applied_by_d()
    bench.change(A, B, D)
    bench.let(sender=D, to=A, peer_group=0)
    record = bench.change(A, B)
    assert record.settlements == (Settlement(0, (A, B, D), 2),)
    comes_to_its_end(bench, "ABD")


def test_expelled_ends_and_does_nothing_more() -> None:
    """An expelled island does nothing more. A hears all and delivers; nobody hears A."""
    bench = Bench("ABC")
    bench.launch(0)
    bench.let(sender=(B, C))
    bench.let(sender=A, to=A)
    bench.vote()
    assert bench.delivered(A) == ["ABC"] * 2
    bench.change(B, C)
    bench.adopt(A)
    assert bench.ranks[A, 0].state == "expelled"
    assert bench.did[A, 0][-1] == protocol_events.Expelled(bench.record)
    bench.beats()
    told = protocol_events.LandedHeard(0, B, 5), protocol_events.Launched(1, "gather")
    assert [bench.tell((A, 0), word) for word in told] == [[], []]
    assert bench.sealed(A) == 0
    bench.let()
    bench.vote()
    assert bench.delivered(B) == bench.delivered(C) == ["BC"] * 2


def test_reduce_again_without_all_parts() -> None:
    """A reduce that lacks a part is repeated. C dies in leg 1: part C of C's vector never left
    it.
    """
    bench = Bench()
    bench.launch(0, "mixed")
    bench.let(sender=(A, B), to=(A, B))
    bench.let(sender=C, to=A)
    record = bench.change(A, B)
    assert record.settlement(0) == Settlement(0, (A, B), 1) and record.forwards == ()
    assert {f.piece.attempt for _, to, f in bench.frames if f.view == 1} == {1}
    bench.let()
    bench.vote()
    parts = {Piece("part", m, 1) for m in (A, B)} | {Piece("body", m) for m in (A, B)}
    assert [deliveries(bench, m)[0].pieces for m in (A, B)] == [parts] * 2


@pytest.mark.parametrize("peer_groups", [(0,), (0, 1)])
def test_no_mixed_attempts_whole_mean_kept_torn_one_repeated(peer_groups: tuple[int, ...]) -> None:
    """A mean that one member has whole is kept; a torn one is repeated. A has the mean; B lacks the
    part of C, which died in leg 2. In one peer group only, nobody has that part.
    """
    bench = Bench()
    bench.launch(0, "mixed")
    bench.let(to=(A, B, C), sender=(A, B))
    # shares of C come to all, its part only in these peer groups, and only to A
    for peer_group in (0, 1):
        shares = [f for f in bench.frames if f[0] == (C, peer_group)]
        for item in (f for f in shares if f[2].piece.what == "share"):
            bench.frames.remove(item)
            bench.tell(item[1], item[2])
        bench.let(sender=(A, B), peer_group=peer_group)
        if peer_group in peer_groups:
            bench.let(sender=C, to=A, peer_group=peer_group)
    bench.vote()
    record = bench.change(A, B)
    bench.let()
    bench.vote()
    whole = peer_groups == (0, 1)
    kept = Settlement(0, (A, B, C), 0) if whole else Settlement(0, (A, B), 1)
    assert record.settlement(0) == kept
    assert bench.delivered(A) == bench.delivered(B) == ["ABC" if whole else "AB"] * 2


def test_no_mixed_attempts_old_parts_do_not_count() -> None:
    """Parts and shares of another attempt are not taken."""
    rank, _ = entered(A, 0, 1, first_record([A, B]), 1).step(protocol_events.Launched(0, "mixed"))
    for old in (Piece("part", B, 7), Piece("share", B, 7)):
        assert rank.step(protocol_events.PieceReceived(0, 0, B, 0, "mixed", old)) == (rank, ())


def test_one_set_for_body_and_vector() -> None:
    """A mixed message has one set of contributors. C's body is everywhere, its vector is not: the
    message is repeated without C.
    """
    bench = Bench()
    bench.launch(0, "mixed")
    for item in [f for f in bench.frames if f[2].piece.what == "body"]:
        bench.frames.remove(item)
        bench.tell(item[1], item[2])
    bench.change(A, B)
    bench.let()
    bench.vote()
    (a,) = deliveries(bench, A)
    assert a.contributors == (A, B) and {p.of for p in a.pieces} == {A, B}
    assert bench.delivered(B) == ["AB"] * 2


def test_seal_stable_only_what_all_have() -> None:
    """Only what all members have may be sealed. A delivers with C; before the others have it, A may
    seal nothing.
    """
    bench = Bench()
    bench.launch(0)
    bench.let(to=A)
    bench.vote()
    bench.beats()
    assert bench.delivered(A) == ["ABC"] * 2 and bench.sealed(A) == 0
    bench.let()
    bench.vote()
    bench.beats()
    assert bench.sealed(A) == bench.sealed(B) == 1


def test_seal_stable_history_tells_checkpoints_apart() -> None:
    """Histories with other contributors have other digests, whatever the order of their names."""
    with_c = extended(extended("", 0, (A, B, C)), 1, (A, B))
    without = extended(extended("", 0, (A, B)), 1, (A, B))
    assert with_c != without and extended("", 0, (B, A)) == extended("", 0, (A, B))
    assert len(with_c) == 16
    assert extended("", 0, (A,)) != extended("", 0, (Member(0, 1),))


def test_settle_all_open_keeps_a_message_until_all_have_it() -> None:
    """A message is kept until all have it. A is as far ahead as it can be: 2 q messages are
    kept.
    """
    bench = Bench("AB", peer_groups=1, window=2)
    for n in (0, 1):
        bench.launch(n)
    bench.let(to=A)
    for n in (2, 3):
        bench.launch(n, who=[A])
    assert [e.n for e in bench.ranks[A, 0].open] == [0, 1, 2, 3] and bench.ranks[A, 0].landed == 2
    after = "launched message 4: the next is 4, it must be below landed .* 4"
    with pytest.raises(ValueError, match=after):
        bench.launch(4, who=[A])
    bench.let(to=B)
    bench.beats()
    assert [e.n for e in bench.ranks[A, 0].open] == [2, 3]


def test_settle_all_open_in_one_record() -> None:
    """One record settles every open message."""
    bench = Bench()
    for n in (0, 1):
        bench.launch(n)
    bench.let(sender=(A, B), to=(A, B))
    bench.let(sender=C, to=A, n=0)
    record = bench.change(A, B)
    assert record.settlements == (Settlement(0, (A, B, C), 1),)
    assert record.settlement(1).contributors == (A, B)
    bench.let()
    bench.vote()
    assert [bench.delivered(B, n) for n in (0, 1)] == [["ABC"] * 2, ["AB"] * 2]


def test_any_order_by_own_numbers() -> None:
    """Messages have numbers of their own and may be delivered in any order."""
    bench = Bench("AB", peer_groups=1)
    bench.launch(0, "mixed")
    bench.launch(1)
    bench.let(n=1)
    assert bench.delivered(A, 1) == ["AB"] and bench.delivered(A, 0) == [None]
    assert bench.ranks[A, 0].landed == 0
    bench.let()
    assert bench.delivered(A, 0) == ["AB"] and bench.ranks[A, 0].landed == 2
    with pytest.raises(ValueError, match="launched message 5: the next is 2"):
        bench.launch(5)


def test_heard_both_ways_minority_does_not_win() -> None:
    """A minority does not win. A is cut from B and C; all reach the store."""
    bench = Bench()
    bench.freeze(A, lost=(B, C))
    # nobody hears the others: A need not wait for them
    assert bench.propose((A, 0), waited=False) is not None
    bench.reports.clear()
    bench = Bench()
    bench.freeze(A, lost=(B, C))
    bench.freeze(B, C, lost=(A,))
    for at in bench.ranks:
        record = bench.propose(at, waited=False)
        assert record is not None and record.members == (B, C)


def test_heard_both_ways_half_open_link_counts_as_none() -> None:
    """A half-open link counts as none. In peer group 1 C does not hear A; everything else works. A
    and B stay: the lowest slots of two largest sets.
    """
    bench = Bench()
    bench.tell((C, 1), protocol_events.ConnectionLost(A))
    bench.freeze(A, B, C)
    record = bench.propose((C, 0), waited=False)
    assert record is not None and record.members == (A, B)


def test_report_awaited_while_somebody_hears_the_island() -> None:
    """No record is proposed without the report of an island that a member still hears."""
    bench = Bench()
    bench.tell((A, 0), protocol_events.ConnectionLost(C))
    bench.freeze(A, B)
    assert bench.propose((A, 0), waited=False) is None
    record = bench.propose((A, 0), waited=True)
    assert record is not None and record.members == (A, B)


def test_report_of_an_island_needs_all_its_ranks() -> None:
    """An island has reported when all its ranks have."""
    bench = Bench("AB")
    bench.freeze(A)
    bench.tell((B, 0), protocol_events.FrozenHeard(0))
    record = bench.propose((A, 1))
    assert record is not None and record.members == (A,)


@pytest.mark.parametrize("count, broken, stay", [
    (4, [(0, 2), (0, 3), (1, 2), (1, 3)], (0, 1)),
    (3, [(0, 2)], (0, 1)),
    (3, [(0, 1)], (0, 2)),
    (5, [(0, 1), (0, 2), (0, 3), (0, 4)], (1, 2, 3, 4)),
    (5, [(0, 1), (2, 3)], (0, 2, 4)),
    (4, [(a, b) for a in range(4) for b in range(a)], (0,)),
    (64, [(0, 9), (9, 30), (60, 61)], tuple(i for i in range(64) if i not in (9, 61))),
    (64, [(i, i + 1) for i in range(0, 64, 2)], tuple(range(0, 64, 2))),
    (63, [(i + a, i + b) for i in range(0, 63, 3) for a in range(3) for b in range(a)],
        tuple(range(0, 63, 3))),
    (64, [(i, (i + 1) % 64) for i in range(64)], tuple(range(0, 64, 2))),
])  # fmt: skip
def test_largest_set_with_the_lowest_slots(
    count: int, broken: list[tuple[int, int]], stay: tuple[int, ...]
) -> None:
    """The largest set of members that hear each other stays; of two equal ones that with the lowest
    slots.
    """
    members = [Member(i) for i in range(count)]
    bad = {frozenset((Member(a), Member(b))) for a, b in broken}
    pairs = frozenset(frozenset((a, b)) for a in members for b in members if a < b) - bad
    assert settlement.largest(members, pairs) == tuple(Member(i) for i in stay)


def test_largest_set_against_all_subsets() -> None:
    """The largest set is the best of all subsets, for every relation among four islands."""
    members = [Member(i) for i in range(4)]
    every = [frozenset((a, b)) for a in members for b in members if a < b]
    for bits in range(1 << len(every)):
        pairs = frozenset(p for i, p in enumerate(every) if bits >> i & 1)
        subsets = [[m for i, m in enumerate(members) if s >> i & 1] for s in range(1, 16)]
        fit = [s for s in subsets if all(frozenset((a, b)) in pairs for a in s for b in s if a < b)]
        assert settlement.largest(members, pairs) == tuple(min(fit, key=lambda s: (-len(s), s)))


@given(st.data(), st.integers(1, 8))
def test_largest_set_against_all_subsets_with_one_that_began(
    data: st.DataObject, count: int
) -> None:
    """The largest set is the best of all subsets that have an island which has begun."""
    members = [Member(i) for i in range(count)]
    every = [frozenset(p) for p in itertools.combinations(members, 2)]
    pairs = frozenset(p for p in every if data.draw(st.booleans()))
    begun = data.draw(st.frozensets(st.sampled_from(members)))
    subsets = [s for k in range(1, count + 1) for s in itertools.combinations(members, k)]
    among = {s: map(frozenset, itertools.combinations(s, 2)) for s in subsets}
    fit = [s for s in subsets if begun & {*s} and pairs.issuperset(among[s])]
    best = min(fit, key=lambda s: (-len(s), s), default=())
    assert settlement.largest(members, pairs, begun) == best


def test_store_unasked_in_health() -> None:
    """The store is not asked in health: no action but those of a change speaks to it, and nothing
    but the peer group or a peer's word begins a change.
    """
    bench = Bench("AB")
    bench.launch(0)
    bench.let()
    bench.vote()
    bench.beats()
    asked = {type(a) for actions in bench.did.values() for a in actions}
    assert asked == {protocol_events.Deliver, protocol_events.Free, protocol_events.SealAllowed}
    assert bench.reports == []
    assert bench.tell((A, 0), protocol_events.ReportsSeen((), waited=True)) == []


def test_record_chain_refuses_gaps_and_forks() -> None:
    """Records form a chain: another record 2 after another record 1 has another digest, and a gap
    is refused.
    """
    bench = Bench()
    first = bench.change(A, B)
    second = first.following(view=2)
    other = replace(first, members=(A,), base=(0,)).following(view=2, members=(A, B), base=(0, 0))
    assert second.history == first.digest() != other.history and second.digest() != other.digest()
    with pytest.raises(ValueError, match="record 3 follows 1: hand records in in order"):
        bench.tell((A, 0), protocol_events.RecordSeen(second.following()))
    assert bench.tell((A, 0), protocol_events.RecordSeen(first)) == []


def test_early_part_of_a_leaver_counts() -> None:
    """A message that only the leaver has launched counts, with what it sent."""
    bench = Bench()
    bench.launch(0, who=[C])
    bench.let()
    for peer_group in (0, 1):
        assert bench.tell((C, peer_group), protocol_events.Leave()) == [protocol_events.Freeze(0)]
        for m in (A, B):
            bench.tell((m, peer_group), protocol_events.ConnectionLost(C))
    record = bench.propose((A, 0), waited=False)
    assert record is not None and record.settlements == (Settlement(0, (A, B, C), 1),)
    bench.record = record
    bench.adopt(A, B)
    bench.launch(0, who=[A, B])
    comes_to_its_end(bench, "ABC")
    # it has left, it is not expelled
    assert bench.tell((C, 0), protocol_events.RecordSeen(record)) == []


def test_delivered_stays_and_repeats_have_another_attempt() -> None:
    """A message that was delivered stays; one that is repeated has another attempt."""
    bench = Bench(peer_groups=1)
    bench.launch(0, "mixed")
    bench.launch(1, "mixed")
    bench.let(n=0)
    bench.let(n=1, sender=(A, B), to=(A, B))
    bench.change(A, B)
    bench.let()
    assert bench.delivered(A, 0) == bench.delivered(B, 0) == ["ABC"]
    assert bench.delivered(A, 1) == ["AB"]
    assert {a.piece.attempt for _, _, a in bench.frames if a.view == 1} <= {1}


def test_vote_with_view_of_the_settlement() -> None:
    """A vote carries the view of its settlement. Rank 0 of A held message 0 with C in the old view;
    rank 1 lacked C, and settles without it.
    """
    bench = Bench()
    bench.launch(0)
    bench.let(sender=(A, B), to=(A, B))
    bench.let(sender=C, to=A, peer_group=0)
    assert Ballot(0, 0, 0) in bench.ranks[A, 0].ballots
    bench.freeze(A, B)
    bench.votes.clear()
    record = bench.propose((A, 0))
    assert record is not None
    bench.record = record
    bench.adopt(A, rank=1)
    bench.adopt(B)
    bench.let(peer_group=1)
    bench.vote()
    assert Ballot(0, 1, 1) in bench.ranks[A, 0].ballots and bench.delivered(A) == [None, None]
    bench.adopt(A, rank=0)
    comes_to_its_end(bench, "AB")


def test_vote_is_repeated_by_a_rank_that_freed() -> None:
    """A rank that freed a message votes again for one that waits. Rank 0 of A heard that all have
    message 0 and freed it; rank 1 has not heard the vote of rank 0 when a change comes.
    """
    bench = Bench("AB")
    bench.launch(0)
    bench.let()
    bench.vote(A, 0)
    bench.vote(B)
    bench.beats()
    assert bench.ranks[A, 0].freed == 1 and bench.delivered(A) == ["AB", None]
    bench.votes.clear()
    bench.change(A, B)
    bench.vote()
    assert bench.delivered(A) == ["AB", "AB"]


def test_launch_after_the_report_is_sent_in_the_next_view() -> None:
    """A message that is launched after the report is sent in the next view."""
    for late in (True, False):
        bench = Bench("AB", peer_groups=1)
        bench.launch(0, "mixed", who=[B])
        bench.freeze(A, B)
        if late:
            bench.launch(0, "mixed", who=[A])
        bench.change(A, B)
        if not late:
            bench.launch(0, "mixed", who=[A])
        bench.let()
        assert bench.delivered(A) == bench.delivered(B) == ["AB"]


def test_too_few_members_to_go_on() -> None:
    """Fewer reports than `min_continue` make no record: they are too few."""
    bench = Bench(min_continue=2)
    bench.freeze(A)
    assert too_few(bench, A) == [protocol_events.TooFew((A,), waited=True)]
    bench.freeze(B)
    assert bench.propose((A, 0)) is not None


def test_loss_while_others_adopt_settles_again() -> None:
    """A loss while others adopt a record settles again: members that read a record late adopt it,
    freeze and report.
    """
    bench = Bench("ABC", peer_groups=1)
    bench.launch(0)
    bench.change(A, B, C, adopt=False)
    bench.adopt(A)
    bench.tell((A, 0), protocol_events.ConnectionLost(C))
    bench.adopt(B)
    bench.tell((B, 0), protocol_events.FrozenHeard(1))
    record = bench.propose((B, 0))
    assert record is not None and record.epoch == 2 and record.members == (A, B)


# ---- joins -------------------------------------------------------------------------------------


def planned(bench: Bench, newcomer: Member = D) -> Record:
    (action,) = bench.tell((A, 0), protocol_events.JoinPlanned(newcomer))
    return action.record


def test_join_stops_nobody_and_begins_at_its_base() -> None:
    """Members go on while an island joins; its first message is that of its base."""
    bench = Bench("AB", peer_groups=1, window=1)
    bench.launch(0)
    record = planned(bench)
    assert (record.epoch, record.view, record.members, record.base) == (1, 0, (A, B, D), (0, 0, 2))
    for m in (A, B):
        assert bench.tell((m, 0), protocol_events.RecordSeen(record)) == []
        assert bench.ranks[m, 0].state == "running"
    bench.enter(D, record)
    for n in range(2):
        bench.let()
        assert bench.delivered(A, n) == bench.delivered(B, n) == ["AB"]
        bench.launch(n + 1, who=[A, B])
    bench.launch(2, who=[D])
    bench.let()
    assert bench.delivered(A, 2) == bench.delivered(D, 2) == ["ABD"]


def test_newcomer_is_asked_nothing_before_it_begins() -> None:
    """A newcomer is asked nothing before it begins. Messages 1 to 3 are questions, 1 is its base. A
    change comes when A has launched 3, and B has not; B launches it while it is frozen.
    """
    bench = Bench("AB", peer_groups=1, window=1)
    record = planned(bench)
    assert record.base == (0, 0, 1)
    bench.enter(D, record)
    for m in (A, B):
        bench.tell((m, 0), protocol_events.RecordSeen(record))
    for n in range(3):
        for m in (A, B):
            bench.tell((m, 0), protocol_events.Launched(n, "gather", question=n >= 1))
        bench.let()
        bench.beats()
        assert bench.delivered(A, n) == bench.delivered(B, n) == ["AB"]
        assert bench.sealed(A) == n + 1, "nobody waits for who has not begun"
    bench.tell((A, 0), protocol_events.Launched(3, "gather", question=True))
    bench.freeze(A, B, D)
    bench.tell((B, 0), protocol_events.Launched(3, "gather", question=True))
    after = bench.propose((D, 0))
    assert after is not None and (after.base, after.stable) == ((0, 0, 4), 3)
    bench.record = after
    bench.adopt(A, B, D)
    bench.let()
    assert bench.delivered(A, 3) == bench.delivered(B, 3) == ["AB"]
    for m in (A, B, D):
        bench.tell((m, 0), protocol_events.Launched(4, "gather"))
    bench.let()
    assert bench.delivered(A, 4) == bench.delivered(D, 4) == ["ABD"]


def test_newcomer_lost_before_it_begins() -> None:
    """A newcomer that is lost before it begins is left out by the next record."""
    bench = Bench("AB", peer_groups=1, window=1)
    record = planned(bench)
    bench.tell((A, 0), protocol_events.RecordSeen(record))
    bench.tell((A, 0), protocol_events.ConnectionLost(D))
    bench.tell((B, 0), protocol_events.FrozenHeard(0))
    bench.tell((B, 0), protocol_events.RecordSeen(record))
    after = bench.propose((B, 0), waited=False)
    assert after is not None and (after.epoch, after.view, after.members) == (2, 2, (A, B))


def test_join_is_learned_in_the_change() -> None:
    """A member that does not know of a join learns it in the change. B froze before it knew of
    record 1; its report, and a proposal for record 1, do not hurt.
    """
    bench = Bench("AB", peer_groups=1)
    record = planned(bench)
    bench.tell((A, 0), protocol_events.RecordSeen(record))
    bench.freeze(A, B)
    stale = bench.propose((B, 0))
    assert stale is not None and stale.epoch == record.epoch, "compare_set refuses it"
    bench.tell((B, 0), protocol_events.RecordSeen(record))
    after = bench.propose((B, 0))
    assert after is not None and (after.epoch, after.members) == (2, (A, B))


def test_join_refuses_what_does_not_fit() -> None:
    """A slot that is taken, pieces ahead of their record and members that are in no record are
    refused.
    """
    bench = Bench("AB", peer_groups=1)
    with pytest.raises(ValueError, match="slot 1 is taken"):
        bench.tell((A, 0), protocol_events.JoinPlanned(Member(1, 1)))
    record = planned(bench)
    with pytest.raises(ValueError, match="epoch 1 came before its record"):
        bench.tell((B, 0), protocol_events.PieceReceived(0, 1, A, 0, "gather", Piece("body", A)))
    with pytest.raises(ValueError, match="is not in record 1"):
        entered(C, 0, 1, record)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        entered(A, 2, 2, record)
    with pytest.raises(ValueError, match="slot of its own"):
        first_record([A, Member(0, 1)])
    with pytest.raises(ValueError, match="which has not reported"):
        bench.tell((B, 0), protocol_events.RecordSeen(bench.record.following(view=1)))


def test_report_of_another_view_or_stranger_does_not_count() -> None:
    """Reports of other views, and of islands that are no members, do not count."""
    record = first_record([A, B])
    report = Report(0, A, 0, frozenset((A, B)), 0, ())
    others = structs.replace(report, view=1, rank=1), structs.replace(report, member=D)
    found = settlement.complete(record, [report, *others, structs.replace(report, rank=1)], 2)
    assert list(found) == [A] and [r.rank for r in found[A]] == [0, 1]


def test_too_few_after_a_loss_is_known_without_a_report() -> None:
    """A loss after which too few are left is the end at once: no rank of the island freezes or
    reports. A loss that leaves enough is a change.
    """
    bench = Bench(peer_groups=2, min_continue=3)
    few = [protocol_events.TooFew((A, B), lost=frozenset({C}))]
    assert bench.tell((A, 0), protocol_events.ConnectionLost(C)) == few
    assert bench.tell((A, 1), protocol_events.FrozenHeard(0, frozenset({C}))) == few
    assert bench.reports == []
    bench = Bench(peer_groups=2, min_continue=2)
    bench.tell((A, 0), protocol_events.ConnectionLost(C))
    bench.tell((A, 1), protocol_events.FrozenHeard(0, frozenset({C})))
    assert len(bench.reports) == 2 and bench.did[A, 0] == [protocol_events.Freeze(0)]


def test_newcomers_that_have_not_begun_are_too_few() -> None:
    """Newcomers that have not begun do not go on alone: they may lack messages below their base,
    which only a member can give them.
    """
    bench = Bench("AB", peer_groups=1)
    record = planned(bench)
    bench.enter(D, record)
    bench.freeze(D)
    assert too_few(bench, D) == [protocol_events.TooFew((), waited=True)]
    bench.tell((A, 0), protocol_events.RecordSeen(record))
    bench.freeze(A)
    after = bench.propose((D, 0))
    assert after is not None and after.members == (A, D) and after.base == (0, record.base[2])


def test_join_one_at_a_time() -> None:
    """One island joins at a time: a newcomer that has not begun delivers nothing, so it would not
    hear of the next one before it launches.
    """
    bench = Bench("AB", peer_groups=1, window=1)
    record = planned(bench)
    bench.tell((A, 0), protocol_events.RecordSeen(record))
    assert bench.tell((A, 0), protocol_events.JoinPlanned(C)) == []
    bench.ranks[A, 0] = replace(bench.ranks[A, 0], landed=record.base[2] + 1)
    assert bench.tell((A, 0), protocol_events.JoinPlanned(C)) != []


def test_machine_messages_of_pairs() -> None:
    """Messages of two members each: a pair delivers and frees its own without the others, however
    far these are behind, in order; one of all comes behind them; a loss ends all.
    """
    bench = Bench("ABCD", min_continue=4)
    pairs = {0: ((A, B), (C, D)), 1: ((A, B), (C, D)), 2: ((A, C), (B, D))}

    def launch(n: int, *members: Member) -> None:
        among = next(pair for pair in pairs[n] if members[0] in pair)
        for at in [at for at in bench.ranks if at[0] in members]:
            bench.tell(at, protocol_events.Launched(n, "mixed", among=among))
        bench.let()
        bench.vote()

    for n in (0, 1):
        launch(n, A, B)
    assert [bench.delivered(m, 1) for m in (A, B)] == [["AB"] * 2] * 2
    bench.beats()
    assert all(not bench.ranks[m, 0].open and bench.ranks[m, 0].freed == 2 for m in (A, B))
    launch(2, A)  # C has not launched its message 0
    assert bench.ranks[C, 0].landed == 0 and bench.delivered(A, 2) == [None, None]
    for n in (0, 1):
        launch(n, C, D)
    for m in (C, B, D):
        launch(2, m)
    assert [bench.delivered(m, 2) for m in (A, B, C, D)] == [["AC"] * 2, ["BD"] * 2] * 2
    bench.launch(3, "mixed")
    bench.let()
    bench.vote()
    bench.beats()
    assert bench.delivered(D, 3) == ["ABCD"] * 2
    assert all(not rank.open and rank.freed == 4 for rank in bench.ranks.values())
    lost = bench.tell((A, 0), protocol_events.ConnectionLost(D))
    assert [type(action) for action in lost] == [protocol_events.TooFew]


def test_machine_alone_in_a_pair() -> None:
    """A message among this member alone is delivered and freed at once, and sends nothing."""
    bench = Bench("ABC", peer_groups=1, min_continue=3)
    did = bench.tell((A, 0), protocol_events.Launched(0, "mixed", among=(A,)))
    sends = [action.to for action in did if isinstance(action, protocol_events.Send)]
    assert set(sends) == {()} and bench.delivered(A) == ["A"]
    assert bench.ranks[A, 0].freed == 1 and not bench.ranks[A, 0].open
