"""Playing the steps of a cycle against a clock that ticks: each tick the training thread does one
thing, and the line carries one unit of the oldest message.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from fsdp_demo.tools.planner.line import Played, Timed, play


def ticking(steps: int, due: dict[int, list[Timed]], step: int, cycles: int) -> Played:
    """Means over the last half of so many cycles; all times are whole ticks."""
    line: list[list[int]] = []
    did: list[tuple[int, str]] = []

    def train() -> Iterator[tuple[int, str]]:
        pending: list[tuple[int, list[int], int]] = []

        def land(t: int) -> Iterator[tuple[int, str]]:
            for entry in [p for p in pending if p[0] <= t]:
                pending.remove(entry)
                while entry[1][0] > 0:
                    yield t, "wait"
                for _ in range(entry[2]):
                    yield t, "work"

        for t in range(steps * cycles):
            for _ in range(step):
                yield t, "step"
            for message in due.get(t % steps, []):
                for _ in range(int(message.before)):
                    yield t, "work"
                job = [int(message.seconds)]
                line.append(job)
                pending.append((t + message.delay, job, int(message.after)))
                yield from land(t)
            yield from land(t)

    for action in train():
        did.append(action)
        if line:
            line[0][0] -= 1
            if not line[0][0]:
                line.pop(0)
    first = steps * (cycles // 2)
    last = [what for t, what in did if t >= first]
    n = steps * cycles - first
    busy = sum(m.seconds for messages in due.values() for m in messages) / steps
    return Played(last.count("wait") / n, last.count("work") / n, busy)


def case(seed: int) -> tuple[int, dict[int, list[Timed]], int]:
    """A cycle with a few messages, from a line that is idle to one that is given too much."""
    draw = random.Random(seed)
    steps = draw.randint(1, 8)
    due = {
        t: [
            Timed(
                draw.randint(1, draw.choice((3, 20, 90))),
                draw.choice((0, 0, 1, 2, 5, 9)),
                draw.randint(0, 3),
                draw.randint(0, 3),
            )
            for _ in range(draw.choice((1, 1, 2)))
        ]
        for t in range(steps)
        if draw.random() < 0.5
    }
    return steps, due, draw.randint(3, 20)


@pytest.mark.parametrize("seed", range(60))
def test_planner_play_equals_ticking_clock(seed: int) -> None:
    """The played times are those of a ticking clock."""
    steps, due, step = case(seed)
    slow, fast = ticking(steps, due, step, 120), play(steps, due, step)
    assert fast.waiting == pytest.approx(slow.waiting, rel=0.02, abs=0.02)
    assert fast.working == pytest.approx(slow.working, rel=1e-6, abs=0.1)
    assert fast.line == pytest.approx(slow.line)


def test_planner_play_cases_of_all_kinds() -> None:
    """The random cases hold runs that wait and runs that do not."""
    found = [play(*case(seed)) for seed in range(60)]
    assert sum(p.waiting == 0 for p in found) > 5 and sum(p.waiting > 1 for p in found) > 5


@pytest.mark.parametrize("seconds", [30.0, 50.0, 90.0, 250.0])
def test_planner_play_delay_hides_its_steps(seconds: float) -> None:
    """A delay hides the time of its steps and no more."""
    played = play(10, {9: [Timed(seconds, delay=5)]}, 10.0)
    assert 10 * played.waiting == pytest.approx(max(0.0, seconds - 5 * 10.0))


@pytest.mark.parametrize("layers", [1, 4, 24])
@pytest.mark.parametrize("seconds", [0.5, 3.0, 20.0, 400.0])
def test_planner_play_layers_during_backward(layers: int, seconds: float) -> None:
    """The published closed form for equal layers: one layer's transfer is never hidden, and the
    others only as fast as backward makes them.
    """
    step, backward = 30.0, 20.0
    releases = tuple((1 / layers, (layers - 1 - i) / layers * backward) for i in range(layers))
    played = play(1, {0: [Timed(seconds, releases=releases)]}, step)
    one, per = seconds / layers, backward / layers
    assert played.waiting == pytest.approx(one + (layers - 1) * max(0.0, one - per))


def test_planner_play_nothing_due() -> None:
    """A cycle without a message has no waiting, no work and no line time."""
    assert play(5, {}, 1.0) == Played(0.0, 0.0, 0.0)
