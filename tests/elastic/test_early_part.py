"""An island that leaves sends its part of the coming message early: it counts there if the others
hold it on every line (early-part).

Threads as islands, real connections (tests/support/elastic.py). Vectors hold whole numbers, so that
sums are exact.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fsdp_demo.elastic import message_io
from fsdp_demo.peers.collectives import ReceivedMessage
from fsdp_demo.peers.header import PAYLOAD, QUESTION

from ..support.elastic import Islands, agree, body, vectors, weight
from ..support.heard import heard
from ..support.inside import in_a_process
from ..support.threaded import alone

AT = 3
"""The message that the leaver sends early; it has taken part in those before."""


def sent(
    line: Any, n: int, gathered: bool
) -> tuple[Any, torch.Tensor, list[tuple[torch.Tensor, str]]]:
    """What an island says in message n."""
    slot = line.slot
    head = replace(line.header(PAYLOAD, n), weight=weight(slot))
    return head, body(slot, n, 40), [] if gathered else vectors(slot, n)


def message(line: Any, n: int, gathered: bool) -> ReceivedMessage:
    head, data, own = sent(line, n, gathered)
    return line.exchange(head, data, own, lambda headers: [[h.weight for h in headers]] * len(own))


def check(
    line: Any, n: int, arrived: ReceivedMessage, gathered: bool
) -> tuple[tuple[int, ...], list[torch.Tensor]]:
    """Sums over exactly the islands that it names, with their weights."""
    slots = arrived.slots
    assert [h.weight for h in arrived.headers] == [weight(s) for s in slots]
    assert all(torch.equal(b, body(s, n, 40)) for s, b in zip(slots, arrived.bodies, strict=True))
    if not gathered:
        # fp32 and bf16 hold them: the sum is exact, and so is its quotient once rounded
        for i in (0, 1):
            total = sum(weight(s) * vectors(s, n)[i][0] for s in slots)
            mean = total / sum(weight(s) for s in slots)
            assert torch.equal(arrived.means[i], mean if i == 0 else mean.bfloat16().float()), (
                f"message {n}, vector {i}"
            )
    return slots, arrived.bodies + arrived.means


def leaves(
    gathered: bool,
    before: Callable[[Any], None] = lambda line: None,
    seconds: float = 5.0,
    together: threading.Barrier | None = None,
) -> Callable[[Any], Any]:
    """Six messages; island 1 leaves after `AT` of them. together: no rank of it before the
    other.
    """

    def fn(line: Any) -> Any:
        out = []
        line.work_with(1 << 20)
        for n in range(6):
            if n == AT and line.slot == 1:
                before(line)
                held = line.send_early(*sent(line, n, gathered), seconds)
                if together is not None:
                    together.wait(20)
                line.leave()
                return held
            out.append(check(line, n, message(line, n, gathered), gathered))
        return out

    return fn


@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize("islands", [2, 3, 4])
@in_a_process
def test_early_part_of_a_leaver_counts(islands: int, gathered: bool) -> None:
    """The part that a leaver sends early counts in the message of all others."""
    of = Islands(islands)
    of.run(leaves(gathered))
    assert of.results[1, 0] is True
    everyone, left = tuple(range(islands)), tuple(s for s in range(islands) if s != 1)
    assert agree(of.survivors(1)) == [everyone] * (AT + 1) + [left] * (5 - AT)


@in_a_process
def test_early_part_long_goes_to_one_which_forwards_it() -> None:
    """A long early part goes to one island, which forwards it."""
    message_io.SHORT = 100
    of = Islands(4, ranks=2)
    of.run(leaves(False, together=threading.Barrier(2)))
    assert of.results[1, 0] is of.results[1, 1] is True
    found = of.survivors(1)
    assert agree(found[0::2]) == agree(found[1::2]) == [(0, 1, 2, 3)] * (AT + 1) + [(0, 2, 3)] * 2


@pytest.mark.parametrize("gathered", [True, False])
@in_a_process
def test_early_part_while_the_others_wait(gathered: bool) -> None:
    """An early part counts if the others wait in that message already."""
    of = Islands(3)

    def late(line: Any) -> None:
        while any(of.lines[s, 0]._driver.machine.next <= AT for s in (0, 2)):
            time.sleep(0.01)

    of.run(leaves(gathered, late))
    assert agree(of.survivors(1)) == [(0, 1, 2)] * (AT + 1) + [(0, 2)] * 2


@pytest.mark.parametrize("gathered", [True, False])
@in_a_process
def test_early_part_behind_a_question_does_not_count(gathered: bool) -> None:
    """An early part that was meant for another message than the one that comes under its number is
    left out by all.
    """
    of = Islands(3)

    def fn(line: Any) -> Any:
        line.work_with(1 << 20)
        out = [check(line, n, message(line, n, gathered), gathered) for n in range(2)]
        if line.slot == 1:
            line.send_early(*sent(line, 2, gathered), 5.0)
            line.leave()
            return None
        came = line.gather_any(line.header(QUESTION, 2), body(line.slot, 2, 5 + line.slot), 100)
        out.append((line.slots, came))
        return out + [check(line, n, message(line, n, gathered), gathered) for n in range(2, 4)]

    of.run(fn)
    assert agree(of.survivors(1)) == [(0, 1, 2)] * 2 + [(0, 2)] * 3


@pytest.mark.parametrize("gathered", [True, False])
@in_a_process
def test_early_part_stays_when_another_is_lost(gathered: bool) -> None:
    """Another island is lost before the early part was counted: the settlement is settled again,
    and what is held stays in it.
    """
    of = Islands(4)

    def fn(line: Any) -> Any:
        line.work_with(1 << 20)
        out = [check(line, n, message(line, n, gathered), gathered) for n in range(AT)]
        if line.slot == 1:
            assert line.send_early(*sent(line, AT, gathered), 5.0)
            line.leave()
            return None
        while 1 in line.alive:
            time.sleep(0.01)
        if line.slot == 2:
            line.leave()
            return None
        while 2 in line.alive:
            time.sleep(0.01)
        return out + [check(line, n, message(line, n, gathered), gathered) for n in range(AT, 5)]

    of.run(fn)
    assert agree(of.survivors(1, 2)) == [(0, 1, 2, 3)] * AT + [(0, 1, 3), (0, 3)]


@in_a_process
def test_early_part_of_two_leavers_counts() -> None:
    """Two islands leave one after the other, and the early parts of both count."""
    of = Islands(4)

    def fn(line: Any) -> Any:
        line.work_with(1 << 20)
        out = [check(line, n, message(line, n, False), False) for n in range(AT)]
        if line.slot in (1, 2):
            while line.slot == 2 and 1 in line.alive:
                time.sleep(0.01)
            assert line.send_early(*sent(line, AT, False), 5.0)
            line.leave()
            return None
        while 2 in line.alive:
            time.sleep(0.01)
        return out + [check(line, n, message(line, n, False), False) for n in range(AT, 5)]

    of.run(fn)
    assert agree(of.survivors(1, 2)) == [(0, 1, 2, 3)] * (AT + 1) + [(0, 3)]


@in_a_process
def test_early_part_alone_waits_for_nobody() -> None:
    """An island that is alone sends nothing early and waits for nobody."""
    of = Islands(2)

    def fn(line: Any) -> Any:
        line.work_with(1 << 20)
        message(line, 0, True)
        if line.slot == 0:
            line.leave()
            return None
        while 0 in line.alive:  # before that there is somebody to send to
            time.sleep(0.01)
        return line.send_early(*sent(line, 1, True), 1000.0)

    of.run(fn)
    assert of.results[1, 0] is False


@in_a_process
def test_early_part_beyond_its_size_is_refused() -> None:
    """An early part larger than `longest_early` says gets no room."""
    of = Islands(3)

    def fn(line: Any) -> Any:
        line.work_with(1000)
        message(line, 0, True)
        if line.slot == 1:
            return line.send_early(*sent(line, 1, False), 1.0)
        return [check(line, 1, message(line, 1, False), False)]

    of.run(fn)
    assert agree(of.survivors(1)) == [(0, 2)]


def log_of_two(fn: Callable[[Any, Islands, list[str]], None]) -> list[str]:
    """What is logged while each of two islands runs `fn(line, islands, log so far)`."""
    said, of = heard(), Islands(2)
    of.run(lambda line: fn(line, of, said))
    return said


@pytest.mark.parametrize("stopped", [True, False])
def test_leave_is_no_loss_in_the_log_of_the_others(run_ranks, stopped: bool) -> None:
    """The others log of an island that was stopped in order that it has left, and of one that
    could not go on that it is lost.
    """

    def fn(line: Any, of: Islands, said: list[str]) -> None:
        message(line, 0, True)
        if line.slot == 1:
            line.leave(stopped)
            return
        while 1 in line.alive:
            time.sleep(0.01)
        while not any("training goes on" in text for text in said):
            time.sleep(0.01)

    how, why = ("has left", "it was stopped") if stopped else ("is lost", "it has ended")
    lines = alone(run_ranks, lambda: log_of_two(fn))
    told, record = (t for t in lines if t.startswith(("island 1", "epoch 1")))
    assert told == f"island 1 (island1) {how}: {why}"
    assert record.startswith(f"epoch 1: island 1 (island1) {how}, training goes on with island 0")


def test_leave_logs_no_loss_of_the_others(run_ranks) -> None:
    """An island that has left logs no loss of the others: they close their connections while it
    still saves.
    """

    def fn(line: Any, of: Islands, said: list[str]) -> None:
        line.work_with(1 << 20)
        message(line, 0, True)
        if line.slot == 0:
            line.leave()
            while (1, 0) not in of.results:
                time.sleep(0.01)
            time.sleep(0.3)
            return
        while 0 in line.alive:
            time.sleep(0.01)
        line.release()

    lines = alone(run_ranks, lambda: log_of_two(fn))
    assert not [text for text in lines if text.startswith("island 1 (island1) is lost")]
