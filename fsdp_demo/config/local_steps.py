"""Unlike local steps: in a round each island takes as many inner steps as its speed allows, so that
none waits for the slowest. Pure functions; `exchange/pace.py` measures the speeds.

A round is a period of the method, counted in ticks of the run's clock (`Exchange.step`). An island
takes a step of its own in some ticks of the round, and leaves the others out.
"""

from __future__ import annotations

from collections.abc import Sequence

from .channel import Channel

EQUAL, BY_SPEED = "equal", "by_speed"
LOCAL_STEPS = (EQUAL, BY_SPEED)

SLACK = 0.03
"""How much longer than that of the fastest island a round of another one may take, as a share: what
two equal machines seem to differ by must not cost one of them a step."""


def local_steps(period: int, seconds: Sequence[float]) -> list[int]:
    """The own steps of each island in a round: floor(`period` x speed / speed of the fastest), with
    `SLACK`, from 1 to `period`.

    Args:
        period: ticks of a round.
        seconds: of an own step, by island; 0: not known, and then as slow as the slowest known. If
            none is known all take all steps.

    >>> local_steps(20, [1.0, 2.0, 4.0]), local_steps(20, [0.5, 0.0, 2.0])
    ([20, 10, 5], [20, 5, 5])
    """
    known = [s for s in seconds if s > 0]
    if not known:
        return [period] * len(seconds)
    least, most = min(known), max(known)
    shares = [least / (s if s > 0 else most) for s in seconds]
    return [min(max(int(period * share * (1 + SLACK)), 1), period) for share in shares]


def takes_step(tick: int, steps: int, period: int) -> bool:
    """Whether an island that takes so many `steps` in a round takes one in this `tick` of it, from
    0. They are spread over the round, and its first tick is one of them.

    >>> [tick for tick in range(10) if takes_step(tick, 3, 10)]
    [0, 4, 7]
    """
    return tick == 0 or tick * steps // period != (tick - 1) * steps // period


def round_of(channels: Sequence[Channel]) -> int:
    """Ticks of a round: the shortest period of the channels."""
    return min(c.schedule.sync_every for c in channels)
