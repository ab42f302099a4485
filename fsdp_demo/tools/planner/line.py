"""Seconds of a message on a link, from what TCP and the transport do; and seconds per step for
which training stands still, by playing the steps of a cycle: one exchange on the line at a time, in
order, and a training that waits where a message is due and not there.

A message is one or two legs, each of which everybody ends before the next begins
(`membership/machine.py`). A leg takes half a round trip, and its bytes over the rate of the
island's line, which all its ranks share and which carries headers besides. Two things make it
longer on a long link. A connection has a window, so that n connections carry at most n windows per
round trip. And TCP begins with ten segments and doubles them once per round trip (RFC 6928, RFC
5681); a connection that was idle for k timeouts begins with its window halved k times (RFC 2861,
Linux). Congestion controls with a rate of their own (BBR) do not begin anew after a pause.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor

from ...elastic.chunks import streams
from ...net.link import TCP_SHARE, Link
from ...peers.pieces import LARGEST
from .counting import Leg

SEGMENT = 1448  # payload bytes
FIRST_WINDOW = 10 * SEGMENT  # RFC 6928
LEAST_TIMEOUT = 0.2  # seconds; Linux adds the round trip


@dataclass(frozen=True)
class System:
    """The behaviour of machines and line, apart from rate and round trip.

    Attributes:
        overlap_backward: the gradients of a layer leave as soon as its backward has ended, as in
            torch's HSDP and in simulations; False: after the step, as all exchanges here do.
        share: share of the rate that carries payload; 1 for a line without packet headers.
        window: bytes that may be under way on one connection; None for no limit.
        slow_start: connections begin slowly, and after a pause again.
        restarts: whether a pause lets them begin again (not under BBR).
        bytes_per_parameter: see `counting.cycle`.
        compression: whether coding and transport take time.
    """

    overlap_backward: bool = False
    share: float = TCP_SHARE
    window: float | None = 4 * 2**20
    slow_start: bool = True
    restarts: bool = True
    bytes_per_parameter: float | None = None
    compression: bool = True


SIMULATED = System(
    overlap_backward=True, share=1.0, window=None, slow_start=False, compression=False
)
"""What papers simulate (Streaming DiLoCo, arXiv 2501.18512, section 4.1): bytes over a rate, which
begin to move layer by layer in the last backward."""


def message_seconds(
    legs: Sequence[Leg],
    link: Link,
    system: System,
    peers: int,
    idle: float = 0.0,
    num_peers: int = 1,
) -> float:
    """Seconds from the hand-over of a message to its end.

    Args:
        legs: bytes out of the island and into it, of each leg.
        peers: pairs of ranks that talk: shards x (islands - 1).
        idle: seconds for which the connections were idle before.
        num_peers: number of peers of one rank.
    """
    if not link:
        return 0.0
    rate = link.bits_per_second * system.share / 8 if link.bits_per_second else float("inf")
    if not link.rtt:
        return sum(max(leg) for leg in legs) / rate
    total, open_window = 0.0, 0.0
    for i, leg in enumerate(legs):
        size = max(leg)
        most = streams(link.rtt, num_peers)
        used = peers * min(most, max(ceil(size / max(peers, 1) / LARGEST), 1))
        pace = min(rate, used * system.window / link.rtt) if system.window else rate
        seconds = size / pace
        if system.slow_start:
            if i == 0:
                open_window = _window(pace * link.rtt, used, idle, link.rtt, system.restarts)
            seconds, open_window = _rounds(size, pace, link.rtt, open_window)
        total += link.rtt / 2 + seconds
    return total


def _window(full: float, connections: int, idle: float, rtt: float, restarts: bool) -> float:
    """Bytes that may leave in the first round trip after a pause of a warm connection."""
    first = float(connections * FIRST_WINDOW)
    halved = floor(idle / (LEAST_TIMEOUT + rtt)) if restarts else 0
    return max(first, full / 2**halved if halved < 60 else 0.0)


def _rounds(size: float, pace: float, rtt: float, window: float) -> tuple[float, float]:
    """(seconds until the last of `size` bytes leaves, the window then): a window per round trip,
    doubled by each, until windows fill the line.
    """
    seconds, full = 0.0, pace * rtt
    while window < full and size > window:
        size, seconds, window = size - window, seconds + rtt, 2 * window
    return seconds + (size / pace), window


# ---- a cycle of steps --------------------------------------------------------------------------

BACKWARD = 2 / 3
"""Share of a step's compute that is backward (two products for each of forward)."""


@dataclass(frozen=True)
class Timed:
    """A message with its times.

    Attributes:
        seconds: seconds that the message takes on the line.
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
    """Per step, in steady state: seconds waited, seconds worked, seconds of a busy line."""

    waiting: float
    working: float
    line: float


def play(steps: int, due: Mapping[int, Sequence[Timed]], step_seconds: float) -> Played:
    """The seconds per step of a cycle of steps.

    Args:
        steps: number of steps in the cycle.
        due: step of the cycle -> its messages, in the order in which they leave; each is sent and,
            without a delay, applied before the next one leaves.
        step_seconds: seconds of compute in one step.
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
    at, before = sorted(due), state.spent
    for number in range(rounds):
        before = state.spent
        for step in at:
            state.go(number * steps + step)
            for message in due[step]:
                state.launch(message)
        state.go((number + 1) * steps)
    return Played(*((b - a) / steps for a, b in zip(before, state.spent, strict=True)))


class _State:
    """The clock, the line, and what is under way."""

    def __init__(self, step_seconds: float):
        self.step_seconds, self.step, self.clock = step_seconds, 0, 0.0
        self.free = self.waited = self.worked = self.line = 0.0
        self.flights: list[tuple[int, float, float]] = []  # step of effect, arrival, work

    @property
    def spent(self) -> tuple[float, float, float]:
        """Seconds so far: waited, worked, and those of the line."""
        return self.waited, self.worked, self.line

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
        self.line += message.seconds
        if not message.releases:
            self.free = max(self.clock, self.free) + message.seconds
        for share, early in message.releases:
            self.free = max(ended - early, self.free) + share * message.seconds
        self.flights.append((self.step + message.delay, self.free, message.after))
        self._land(self.step)

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
