"""A newcomer: its base, what it is asked and what it receives, and what it brings."""

from __future__ import annotations

import threading
import time
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdp_demo import PeerLost
from fsdp_demo.elastic import agreement, newcomer, peer_group
from fsdp_demo.elastic.join_server import JoinServer
from fsdp_demo.elastic.notes import ToldToEnd
from fsdp_demo.elastic.peer_group import PeerGroup
from fsdp_demo.elastic.stopping import Stopping
from fsdp_demo.errors import WireError
from fsdp_demo.exchange.sending import CommWorker
from fsdp_demo.membership import protocol_events
from fsdp_demo.membership.machine import entered
from fsdp_demo.membership.protocol_types import Member, first_record
from fsdp_demo.peers.collectives import ReceivedMessage, whole
from fsdp_demo.peers.header import DIGESTS, PARAMETERS, PAYLOAD, QUESTION, Header
from fsdp_demo.peers.join_messages import LONGEST, DonorSnapshot, Expected, Tick, packed, unpacked

from ..support.elastic import Islands
from ..support.inside import in_a_process
from ..support.sealed import part_of_mean, shares

LAST = 8
WAIT = 15.0


MEANS: dict[tuple[int, str], torch.Tensor] = {}
"""What came back first, of each step and code."""


def payload(line: PeerGroup, step: int) -> tuple[int, ...]:
    """The message of a step, and the norm in it; of whom it was."""
    agreement.mean_of(line, step, 1.0)
    noise = torch.randn(20_000, generator=torch.Generator().manual_seed(10 * step + line.slot))
    vectors = [
        (torch.full((5000,), float(line.slot)), "fp32"),
        (noise, "int8"),
        (noise, "int4"),
        (noise, "bf16"),
    ]
    body = torch.full((7,), line.slot, dtype=torch.uint8)
    arrived = line.exchange(
        line.header(PAYLOAD, step), body, vectors, lambda headers: [[1.0] * len(headers)] * 4
    )
    assert [int(b[0]) for b in arrived.bodies] == list(arrived.slots) == list(line.slots)
    assert torch.equal(
        arrived.means[0], torch.full((5000,), sum(arrived.slots)) / len(arrived.slots)
    )
    for (_, code), mean in zip(vectors[1:], arrived.means[1:], strict=True):
        assert torch.equal(mean, MEANS.setdefault((step, code), mean.clone())), (
            "a newcomer has the bits of the others"
        )
    return arrived.slots


def common(line: PeerGroup, step: int) -> None:
    """A question that the newcomer asks too, once it trains; what it says is longer."""
    said = agreement.gather_json(line, [line.slot, "x" * line.slot], QUESTION, step)
    assert said == [[s, "x" * s] for s in line.slots]


def questions(line: PeerGroup, step: int, count: int) -> list[tuple[int, ...]]:
    """Questions of all kinds between two steps; who has answered each."""
    found = []
    for k in range(count):
        kind = k % 3
        if kind == 0:
            assert agreement.gather_json(line, [line.slot, "x" * line.slot], DIGESTS, step) == [
                [s, "x" * s] for s in line.slots
            ]
        elif kind == 1:
            assert agreement.all_equal(line, b"0123456789abcdef", DIGESTS, step)
        else:
            mean = line.mean(
                line.header(PARAMETERS, step),
                [(torch.full((9000,), 1.0 + line.slot), "fp32"), (torch.ones(1), "fp32")],
            )
            assert torch.equal(
                mean[0], torch.full((9000,), 1.0 + sum(line.slots) / len(line.slots))
            )
            assert float(mean[1]) == 1.0
        found.append(line.slots)
    return found


class Run:
    """Two islands that train, and one that joins them when `at` steps are done; then they ask
    `count` questions.
    """

    def __init__(self, run: Islands, at: int, count: int):
        self.run, self.at, self.count = run, at, count
        self.planned, self.asked = threading.Event(), threading.Event()
        self.results: dict[int, Any] = {}
        self.thread = threading.Thread(target=self.joins)

    def trains(self, line: PeerGroup) -> Any:
        """A member."""
        found, asked, step = [], [], 0
        while step < self.at + LAST:
            donor_feed = line.donor_feed
            assert donor_feed is not None
            follows = donor_feed.follows
            found.append(payload(line, step))
            step += 1
            if follows:
                donor_feed.tick(Tick(step - 1, []))
            if step == self.at:
                self.meet(line)
                asked = questions(line, step, self.count)
                self.asked.set()
            else:
                common(line, step)
            time.sleep(0.01)
        self.thread.join(WAIT) if line.slot == 0 else None
        return found, asked

    def meet(self, line: PeerGroup) -> None:
        """The base is known, and lies among the next messages: nothing is launched before."""
        if line.slot == 0:
            self.thread.start()
        end = time.monotonic() + WAIT
        while not self.planned.is_set() and time.monotonic() < end:
            time.sleep(0.01)
            if line.slot == 0 and line.donor_feed is not None and line.donor_feed.wanted:
                line.donor_feed.hand(
                    DonorSnapshot({"step": self.at}, {"parameters": torch.zeros(9000)}), []
                )
            if line.slot == 0 and len(line.alive) == 3:
                self.planned.set()

    def joins(self) -> None:
        """The newcomer."""
        line = None
        try:
            line = self.run.newcomer(2, WAIT)
            self.results[2] = self.follows(line)
            line.wait_stable(WAIT)
        except BaseException as error:
            self.results[2] = error
        finally:
            if line is not None:
                line.end()
                line.release()

    def follows(self, line: PeerGroup) -> Any:
        follow = line.following
        assert follow is not None
        worker = CommWorker(line.meter)
        while follow.head(LONGEST, 0.5, {}) is None:
            pass
        while follow.bodies([36000], 0.5) is None:
            pass
        step, ended = self.at, False
        while not ended:
            planned = follow.planned
            tick = follow.tick(0.0 if planned else 0.5)
            if tick is not None:
                assert tick.step == step
                worker.submit(lambda at=step: payload(line, at)).result()
                step += 1
            ended = planned and tick is None
        follow.caught_up(step)
        assert self.asked.wait(WAIT), "the others wait for this island's first step"
        found = []
        while step < self.at + LAST:
            found.append((step, worker.submit(lambda at=step: payload(line, at)).result()))
            step += 1
            worker.submit(lambda at=step: common(line, at)).result()
        return found


@pytest.mark.parametrize("count", [24, 1])
@in_a_process
def test_newcomer_base_among_questions(count: int) -> None:
    """A newcomer whose base lies among questions between two steps is not asked: all answers are
    those of the two that ask, and nobody ends.
    """
    run = Islands(2)
    made = Run(run, 5, count)
    run.run(made.trains, 2 * WAIT)
    if isinstance(made.results.get(2), BaseException):
        raise made.results[2]
    one, two = run.survivors()
    assert one == two and one[1] == [(0, 1)] * count
    slots, begun = one[0], [s for s, of in enumerate(one[0]) if 2 in of]
    assert begun and slots == [(0, 1)] * begun[0] + [(0, 1, 2)] * (5 + LAST - begun[0])
    assert made.results[2] == [(s, slots[s]) for s in range(made.results[2][0][0], 5 + LAST)]
    assert begun[0] == 5


@in_a_process
def test_newcomer_that_stands_does_not_keep_others_out() -> None:
    """A newcomer that stands does not keep others out. Island 2 is let in and stands. Island 3
    comes in after ISLAND_DEAD; it says nothing for longer than that but that it lives, and it is
    not dropped.
    """
    run, came, end = Islands(2, dead=1.5), list[PeerGroup](), threading.Event()

    def joins() -> None:
        try:
            alive, newcomer.MemberSearch._say = (newcomer.MemberSearch._say, lambda self: None)
            came.append(run.newcomer(2, WAIT))
            newcomer.MemberSearch._say = alive
            came.append(run.newcomer(3, WAIT))
            time.sleep(2 * run.dead)
        finally:
            end.set()

    def trains(line: PeerGroup) -> Any:
        step = 0
        while not end.is_set() or step < 3:
            common(line, step)
            time.sleep(0.02)
            step += 1
            if line.slot == 0 and step == 2:
                threading.Thread(target=joins).start()
            stop = agreement.mean_of(line, step, float(end.is_set()))
            if stop > 0 and step >= 3:
                break
        joining_island = line._driver.join_server.joining_island
        return joining_island.name if joining_island is not None else None

    run.run(trains, 2 * WAIT)
    names = run.survivors()
    for line in came:
        line.following.close()
    assert len(came) == 2 and names == ["island3", "island3"], (came, names)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_newcomer_receives_means_in_their_code(count: int) -> None:
    """Means travel to a newcomer in as many bytes as among the members, and to the same bits."""
    spans = [(9000, "int8"), (4097, "int4"), (5000, "bf16"), (10, "fp32")]
    sent = [shares([(torch.randn(n), code) for n, code in spans], count) for _ in range(count)]
    weights = [[1.0] * count] * len(spans)
    parts = [part_of_mean([s[j] for s in sent], spans, weights, j, count) for j in range(count)]
    means = whole(list(parts), spans)
    bodies = [torch.zeros(2, dtype=torch.uint8)] * count
    arrived = ReceivedMessage([Header(0, 3)] * count, bodies, means, slots=tuple(range(count)))
    expected = Expected(PAYLOAD, 3, 2, spans)
    plain, coded = packed(arrived), packed(arrived, parts)
    assert [p.numel() for p in coded[1:]] == expected.sizes(coded[0])
    assert [p.numel() for p in plain[1:]] == expected.sizes(plain[0])
    assert sum(p.numel() for p in coded[1:]) < 0.5 * sum(p.numel() for p in plain[1:])
    for some in (plain, coded):
        assert all(map(torch.equal, unpacked(some, expected).means, means))
    with pytest.raises(WireError, match="cut off: parts of"):
        unpacked([*coded[:-1], coded[-1][:-1]], expected)


def test_newcomer_receives_texts_of_any_length() -> None:
    """Answers of unlike lengths reach a newcomer; those beyond the bound are refused."""
    bodies = [torch.zeros(n, dtype=torch.uint8) for n in (2, 5)]
    sent = packed(ReceivedMessage([Header(0, 3, kind=QUESTION)] * 2, bodies, [], slots=(0, 1)))
    found = unpacked(sent, Expected(QUESTION, 3, 9, longest=5)).bodies
    assert [b.numel() for b in found] == [2, 5]
    with pytest.raises(WireError, match=r"bodies of \[2, 5\] bytes .* expected are 1 to 4 each"):
        unpacked(sent, Expected(QUESTION, 3, 9, longest=4))
    with pytest.raises(WireError, match=r"expected are \[9, 9\]"):
        unpacked(sent, Expected(QUESTION, 3, 9))


def test_newcomer_answer_may_be_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer that says something longer than the others still receives what they said."""
    said = [torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in (b"[0]", b"[1, 2]")]
    sent = packed(ReceivedMessage([Header(0, 3, kind=QUESTION)] * 2, said, [], slots=(0, 1)))
    line = object.__new__(PeerGroup)
    follow = SimpleNamespace(followed=lambda wanted: unpacked(sent, wanted))
    monkeypatch.setattr(line, "following", follow, raising=False)
    monkeypatch.setattr(line, "_set", lambda slots: None, raising=False)
    monkeypatch.setattr(line, "meter", SimpleNamespace(count=lambda *sizes: None), raising=False)
    line.header = lambda kind, step, flags=0: Header(0, step, kind=kind)  # type: ignore[method-assign]
    mine = ["a newcomer", -1.0]
    assert agreement.gather_json(line, mine, QUESTION, 3) == [[0], [1, 2]]


def told(*notes: bytes) -> JoinServer:
    """A join server to which a newcomer has said this."""
    now, server = time.monotonic(), JoinServer.__new__(JoinServer)
    wires = {"notes": SimpleNamespace(notes=deque(notes), heard_at=now)}
    server.joining_island = SimpleNamespace(
        name="island2", every=[], gone="", met=True, wires=wires
    )
    vars(server.joining_island).update(since=now, following=False, moved=False)
    server._looked, server._dead = now, 10.0
    return server


@pytest.mark.parametrize(
    "note", [b"{", b"[" * 100_000, b"[]", b"7", b'["follow"]', b'["follow", 1]', b"\xff"]
)
def test_join_server_drops_an_unreadable_newcomer(note: bytes) -> None:
    """A newcomer whose notes cannot be read is dropped, and nobody else."""
    join_server = told(b'["ready"]', note)
    assert join_server.look() is None and join_server.joining_island is None


def test_stop_keeps_a_question_that_the_newcomer_is_not_asked() -> None:
    """A question is not abandoned for an island that is not asked: all are told to end while 0 and
    1 ask something at the base of 2, which has not begun.
    """
    members = [Member(i) for i in range(3)]
    planned = first_record(members[:2]).following(members=tuple(members), base=(0, 0, 5))
    rank = entered(members[0], 0, 1, planned, window=9)
    for n in range(6):
        rank, _ = rank.step(protocol_events.Launched(n, "gather", question=n == 5))
    detector = SimpleNamespace(notes={}, siblings={}, send=lambda note, wires: None)
    stopping = Stopping(SimpleNamespace(machine=rank, detector=detector), lambda: False)
    stopping.end()
    stopping.take(ToldToEnd(5, True, -1), members[2])
    assert not stopping.abandoned(5) and stopping.abandoned(6)


def test_join_server_reads_the_notes_of_a_newcomer() -> None:
    """The join server reads the notes that a newcomer brings, in their order."""
    join_server = told(b'["follow", {"weight": "ab"}]', b'["ready"]')
    assert join_server.look() is None  # it is not near before it has its snapshot
    joining_island = join_server.joining_island
    assert joining_island.asked and joining_island.brings == {"weight": "ab"}


def test_newcomer_that_loses_its_donor_ends() -> None:
    """A newcomer that loses its donor between `attach` and its base ends: it trains already, and
    cannot go on without what its donor sends.
    """
    line, ended = (peer_group.PeerGroup(Member(1, 1), {0: "a", 1: "b"}, [0], 60.0), list[str]())

    def gone(wanted: Any) -> Any:
        raise PeerLost("island 0 (a) is gone")

    line.follow(SimpleNamespace(begun=False, followed=gone), [0])  # type: ignore[arg-type]
    header, nothing = line.header(PAYLOAD, 3), torch.empty(0, dtype=torch.uint8)
    with pytest.raises(PeerLost, match="is gone"):
        line.gather(header, nothing)
    line._driver = SimpleNamespace(expel=ended.append)  # type: ignore[assignment]
    with pytest.raises(PeerLost, match="is gone"):
        line.gather(header, nothing)
    assert ended == ["island 0 (a) is gone, before this island took part"]
