"""Seconds per step for which training stands still, by playing the steps of a cycle: one exchange on
the line at a time, in order, and a training that waits where a message is due and not there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

BACKWARD = 2 / 3
"""Share of a step's compute that is backward (two products for each of forward)."""


@dataclass(frozen=True)
class Timed:
    """A message with its times.

    Attributes:
        seconds: on the line.
        delay: steps after which training waits for it.
        before, after: seconds of work of the training thread when it leaves and when it is
            applied.
        releases: (share of the seconds on the line, seconds before the end of the step at which
            these may begin), in order; empty: all may, when the message leaves.
    """

    seconds: float
    delay: int = 0
    before: float = 0.0
    after: float = 0.0
    releases: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Played:
    """Per step, in the steady state: seconds that training waited, that it worked for the exchange,
    and that the line was busy.
    """

    waiting: float
    working: float
    line: float


def play(steps: int, due: Mapping[int, Sequence[Timed]], step_seconds: float) -> Played:
    """What a cycle of steps costs.

    Args:
        steps: of the cycle. due: step of the cycle -> messages, in the order in which they leave;
            each is sent and, without a delay, applied before the next one leaves.
        step_seconds: compute of one step.
    """
    if not due:
        return Played(0.0, 0.0, 0.0)
    delay = max(m.delay for messages in due.values() for m in messages)
    rounds = 4 + -(-delay // steps)  # of which the last is counted
    state = _State(step_seconds)
    if sum(m.seconds for messages in due.values() for m in messages) > steps * step_seconds:
        # a line that carries less than it is given falls behind, by what the delay allows in the
        # end; begin there
        state.free = delay * step_seconds
    at = sorted(due)
    before = state
    for number in range(rounds):
        if number == rounds - 1:
            before = state.copy()
        for step in at:
            state.go(number * steps + step)
            for message in due[step]:
                state.launch(message)
        state.go((number + 1) * steps)
    n = steps
    return Played(
        (state.waited - before.waited) / n,
        (state.worked - before.worked) / n,
        (state.line - before.line) / n,
    )


class _State:
    """The clock, the line, and what is under way."""

    def __init__(self, step_seconds: float):
        self.step_seconds, self.step, self.clock = step_seconds, 0, 0.0
        self.free = self.waited = self.worked = self.line = 0.0
        self.flights: list[tuple[int, float, float]] = []  # step of effect, arrival, work

    def copy(self) -> _State:
        """As it is now."""
        out = _State(self.step_seconds)
        out.waited, out.worked, out.line = self.waited, self.worked, self.line
        return out

    def go(self, step: int) -> None:
        """To the end of the compute of `step`, with all that falls due before it."""
        while self.flights:
            soonest = min(flight[0] for flight in self.flights)
            if soonest >= step:
                break
            self._move(soonest)
            self._land(soonest)
        self._move(step)

    def launch(self, message: Timed) -> None:
        """A message leaves at this step; what is due at this step is applied."""
        ended = self.clock
        self._work(message.before)
        arrival = self._carry(message, ended)
        self.flights.append((self.step + message.delay, arrival, message.after))
        self._land(self.step)

    def _carry(self, message: Timed, ended: float) -> float:
        """On the line, in its turn; when it arrives."""
        self.line += message.seconds
        if not message.releases:
            self.free = max(self.clock, self.free) + message.seconds
        for share, early in message.releases:
            self.free = max(ended - early, self.free) + share * message.seconds
        return self.free

    def _move(self, step: int) -> None:
        self.clock += (step - self.step) * self.step_seconds
        self.step = step

    def _land(self, step: int) -> None:
        for flight in [f for f in self.flights if f[0] <= step]:
            self.flights.remove(flight)
            wait = max(flight[1] - self.clock, 0.0)
            self.waited, self.clock = self.waited + wait, self.clock + wait
            self._work(flight[2])

    def _work(self, seconds: float) -> None:
        self.worked, self.clock = self.worked + seconds, self.clock + seconds
