"""Those histories of docs/membership.md, where they are more than the
state machine: questions, headers, beats, sums, codes.

Islands are threads with real drivers and connections (tests/support/elastic.py), or one rank's
`FailureDetector` with a clock of the test.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp_demo import PeerLost
from fsdp_demo.compression import dense
from fsdp_demo.compression.dense import FORMATS
from fsdp_demo.elastic import connect
from fsdp_demo.elastic.failure_detector import FailureDetector
from fsdp_demo.membership.protocol_types import Member
from fsdp_demo.peers import collectives
from fsdp_demo.peers.header import NORM, NOT_FINITE, PAYLOAD, QUESTION

from ..support.cases import named
from ..support.elastic import Islands, exchanged
from ..support.inside import in_a_process
from ..support.sealed import shares

B, C = Member(1), Member(2)
DEAD, MEETING = 10.0, 600.0


# ---- questions and decisions -------------------------------------------------------------------


def questions(line: Any) -> list[tuple[tuple[int, ...], list[float]]]:
    """What an exchange asks beside its payloads: the mean of a norm, a mean of numbers (best
    model), digests. Of whom, and the answers.
    """
    out = []
    for n in range(4):
        one = torch.tensor([0.1 * (line.slot + 1) + n], dtype=torch.float64).view(torch.uint8)
        _, norms = line.gather(line.header(NORM, n), one)
        out.append((line.slots, [float(t.clone().view(torch.float64)) for t in norms]))
        (mean,) = line.mean(
            line.header(QUESTION, n), [(torch.full((5,), float(line.slot + n)), "fp32")]
        )
        assert torch.equal(mean, torch.full((5,), sum(line.slots) / line.size + n))
        out.append((line.slots, mean.tolist()))
        digests = line.gather_any(line.header(QUESTION, n), one, 100)
        out.append((line.slots, [float(t.clone().view(torch.float64)) for t in digests]))
    return out


@in_a_process
def test_one_answer_is_of_the_same_islands_everywhere() -> None:
    """The answer to a question is of the same islands everywhere. One of three is killed at a piece
    of a question; nobody has the mean of three where another has that of two.
    """
    for k in (0, 5, 9):
        with named(f"piece {k}"):
            three = Islands(3)
            three.kill_at_frame(k, (2, 0))
            three.run(questions)
            one, two = three.survivors(2)
            assert one == two and one[-1][0] == (0, 1)


@in_a_process
def test_one_judgement_follows_from_the_headers_as_sent() -> None:
    """Contributions are left out by the headers as they were sent. Island 2 says that it is not
    finite, and dies at a piece of the message; whoever takes part, all decide from the same
    headers.
    """

    def told(line: Any) -> Any:
        seen: list[Any] = []

        def weigh(headers: Any) -> list[list[float]]:
            seen[:] = [(h.flags, h.weight) for h in headers]
            return [[0.0 if h.flags & NOT_FINITE else 1.0 for h in headers]]

        out = []
        for n in range(3):
            own = torch.full((9000,), float("nan") if line.slot == 2 else float(line.slot + n))
            head = replace(
                line.header(PAYLOAD, n), weight=1.0 + line.slot, flags=NOT_FINITE * (line.slot == 2)
            )
            arrived = line.exchange(head, torch.zeros(4, dtype=torch.uint8), [(own, "fp32")], weigh)
            assert torch.equal(arrived.means[0], torch.full((9000,), 0.5 + n)), (
                "the mean of islands 0 and 1"
            )
            out.append((line.slots, list(seen), [(h.flags, h.weight) for h in arrived.headers]))
        return out

    for k in (0, 3, 6):
        with named(f"piece {k}"):
            three = Islands(3)
            three.kill_at_frame(k, (2, 0))
            three.run(told)
            one, two = three.survivors(2)
            assert one == two and all(
                seen == heads and len(heads) == len(slots) for slots, seen, heads in one
            )


# ---- beats and progress ------------------------------------------------------------------------


def signs(*members: Member) -> FailureDetector:
    """What one rank hears of these; all were heard at 0."""

    class Wire(SimpleNamespace):
        __hash__ = object.__hash__

    wires: dict[Member, Any] = {m: Wire(gone="", heard_at=0.0, doubted=0.0) for m in members}
    found = FailureDetector(
        SimpleNamespace(),
        wires,
        {},
        {},
        DEAD,
        MEETING,
        lambda rounds: connect.patience(rounds, MEETING, 60.0),
    )  # type: ignore[arg-type]
    found.next_of = dict.fromkeys(members, 1)
    return found


def beat(of: FailureDetector, member: Member, now: float, launched: int) -> None:
    of.notes[member].heard_at = now
    of.note_next(member, launched)


def test_beats_of_training_silence_is_a_loss() -> None:
    """A peer that is silent is lost though its connection stands: the kernel keeps those of a
    stopped process.
    """
    here = signs(B, C)
    for tenth in range(1, 100):
        beat(here, B, tenth / 10, 1)
    assert here.lost(9.9) == {}
    beat(here, B, 10.1, 1)
    assert here.lost(10.1) == {C: "silent for 10 s"}


def test_beats_of_training_quiet_by_another_ranks_word() -> None:
    """A peer that stops at the moment in which this island joins is quiet by another's word: it has
    not been heard, and is not known to live.
    """
    here = signs(B, C)
    del here.next_of[C]
    beat(here, B, 5.0, 1)
    assert here.quiet(5.0) == [] and here.quiet(5.0, unheard=True) == [C]


@pytest.mark.slow
@in_a_process
def test_beats_of_training_come_from_a_thread_of_every_rank() -> None:
    """Beats come from a thread of the training process, and of every rank. Training threads may be
    busy for longer than ISLAND_DEAD; one rank whose own thread stands still is lost, with its
    island.
    """
    here = Islands(3, 2, dead=3.0)
    names = {t.name for t in threading.enumerate()}

    def fn(line: Any) -> Any:
        rank = line._driver.machine.rank
        assert line._driver._poller.thread in threading.enumerate() and "network" not in names
        out = []
        for n in range(4):
            if n == 1:
                time.sleep(5.0)  # nobody trains
                assert line.alive == (0, 1, 2)
            if n == 2 and (line.slot, rank) == (1, 1):
                line._driver.do(lambda: time.sleep(8.0))
            out.append(exchanged(line, n)[0])
        return out

    here.run(fn, 60.0)
    found = here.survivors(1)
    assert len(found) == 4 and all(slots == found[0] for slots in found)
    assert found[0][1] == (0, 1, 2) and found[0][3] == (0, 2)
    assert isinstance(here.results[1, 0], PeerLost) and isinstance(here.results[1, 1], PeerLost)


def test_slow_waits_until_the_stall_limit() -> None:
    """A slow island that beats is waited for: ten times the slowest of the last messages, at least
    ISLAND_STALL (60 s here); before three messages ISLAND_TIMEOUT. Nobody is lost by it.
    """
    here = signs(B)
    here.began = {5: 0.0}
    beat(here, B, 599.0, 5)
    assert here.behind(599.0) == (5, 599.0, [B])
    assert here.patience_with(B) == 600.0, "the first message may take as long as the start"
    here.rounds.extend([1.0, 9.0, 2.0])
    beat(here, B, 700.0, 6)
    assert here.behind(700.0)[2] == [], "it has launched the message"
    here.began = {6: 700.0}
    beat(here, B, 1400.0, 6)
    assert here.patience_with(B) == 90.0
    assert here.behind(1400.0) == (6, 700.0, [B]) and here.lost(1400.0) == {}
    here.restart_clocks(1400.0)
    assert here.behind(1401.0)[1] == 1.0, "who was stopped judges nobody by the time that it slept"


def test_slow_of_a_pair_is_looked_for_in_the_pair() -> None:
    """With two messages under way those behind are of the pair of the oldest, not of the newest."""
    here = signs(B, C)
    here.began, here.among = {5: 0.0, 6: 1.0}, {5: (B,), 6: (C,)}
    for member in (B, C):
        beat(here, member, 2.0, 5)
    assert here.behind(2.0) == (5, 2.0, [B])
    here.began, here.among = {6: 1.0}, {6: (C,)}
    assert here.behind(2.0) == (6, 1.0, [C])


@in_a_process
def test_slow_waits_and_no_round_is_missed() -> None:
    """An island that is behind the others by longer than ISLAND_DEAD is in every message."""
    here = Islands(3, dead=1.5)

    def fn(line: Any) -> Any:
        out = []
        for n in range(4):
            if line.slot == 1 and n == 1:
                time.sleep(2.0)
            out.append(exchanged(line, n)[0])
        return out

    here.run(fn)
    assert here.survivors() == [[(0, 1, 2)] * 4] * 3


# ---- sums --------------------------------------------------------------------------------------


def steps_of(slot: int, n: int) -> Tensor:
    """What an island adds to its accumulator before message n: whole numbers."""
    return torch.randint(
        -64, 65, (9000,), generator=torch.Generator().manual_seed(100 * slot + n)
    ).float()


def accumulates(line: Any) -> Any:
    """Error feedback: a quarter of the elements goes into each message, the rest stays."""
    accumulator, applied, counted = torch.zeros(9000), torch.zeros(9000), []
    for n in range(8):
        accumulator += steps_of(line.slot, n)
        sent = torch.zeros(9000)
        sent[n % 4 :: 4] = accumulator[n % 4 :: 4]
        accumulator -= sent
        (mean,) = line.exchange(
            line.header(PAYLOAD, n), sent.to(torch.int16).view(torch.uint8), [(sent, "fp32")], equal
        ).means
        applied += mean * line.size
        counted.append((line.slots, sent))
    return accumulator, applied, counted


def equal(headers: Any) -> list[list[float]]:
    return [[1.0] * len(headers)]


@in_a_process
def test_delivered_stays_sums_over_replicas_are_exact() -> None:
    """Sums over the replicas are exact when two of four islands die at once: means of 4 and of 2
    whole numbers are exact. Accumulators + what counted = what was added; what was applied =
    what counted, over all that took part; nothing is undone.
    """
    for k in (4, 9, 17, 26):
        with named(f"piece {k}"):
            four = Islands(4)
            four.kill_at_frame(k, (1, 0), (3, 0))
            four.run(accumulates)
            one, two = four.survivors(1, 3)
            slots = [of for of, _ in one[2]]
            assert slots == [of for of, _ in two[2]] and slots[-1] == (0, 2)
            assert torch.equal(one[1], two[1])
            if any(len(of) == 3 for of in slots):
                # the other one was lost a message later: a third of a whole number is not exact
                continue
            for slot, (accumulator, _, counted) in zip((0, 2), (one, two), strict=True):
                added = sum((steps_of(slot, n) for n in range(8)), torch.zeros(9000))
                assert torch.equal(accumulator + sum(sent for _, sent in counted), added)
            assert torch.equal(
                one[1],
                sum((sent_by(s, n) for n, of in enumerate(slots) for s in of), torch.zeros(9000)),
            )


def sent_by(slot: int, n: int) -> Tensor:
    """What `accumulates` sends in message n, calculated apart."""
    accumulator, sent = torch.zeros(9000), torch.zeros(9000)
    for k in range(n + 1):
        accumulator += steps_of(slot, k)
        sent = torch.zeros(9000)
        sent[k % 4 :: 4] = accumulator[k % 4 :: 4]
        accumulator -= sent
    return sent


# ---- another number of islands -----------------------------------------------------------------


@pytest.mark.parametrize("code", sorted(FORMATS))
def test_coded_for_fewer_islands_to_the_same_values(code: str) -> None:
    """A vector is coded to the same values among fewer islands. A message that is repeated is cut
    into other parts: what was subtracted from the accumulator stays what the others receive.
    """
    for n in (1, 4097, 13000):
        v = torch.randn(n, generator=torch.Generator().manual_seed(n))
        for size in range(2, 9):
            assert torch.equal(
                dense.round_trip(code, v, size), dense.round_trip(code, v, size - 1)
            ), (n, size)
            assert torch.equal(received(code, v, size), dense.round_trip(code, v, size)), (n, size)


def received(code: str, v: Tensor, size: int) -> Tensor:
    """What `size` islands decode of the shares of one vector, put together."""
    parts = zip(
        shares([(v, code)], size), collectives.legs([(v.numel(), code)], size)[0], strict=True
    )
    return torch.cat([dense.decode(code, share, span[0][0]) for share, span in parts])
