"""What befalls the islands of `chaos.py`: a plan that follows from the seed, and how each kind of
event is carried out.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.chaos_lab import Lab

KINDS = {
    "kill_rank": "SIGKILL of one rank",
    "kill_island": "SIGKILL of all processes of an island",
    "stop": "SIGSTOP for longer than ISLAND_DEAD, then SIGCONT",
    "cut": "all links of an island carry nothing for a while, less than ISLAND_DEAD",
    "cut_off": "a link or all links of an island end for good: reset, or silent until the others "
    "have "
    "gone on",
    "one_way": "an island hears the others and is not heard",
    "store": "SIGKILL of the store, and its start some seconds later",
    "slow_store": "SIGSTOP of the store for 0.5 to 5 s, three times, with SIGCONT between",
    "damage": "a bit of what one island sends another is flipped",
    "poison": "an island's gradients are NaN, Inf or huge at one step",
    "disk_full": "an island's next checkpoint finds no room",
}
TAKES = ("kill_rank", "kill_island", "stop", "cut_off", "one_way", "damage")
"""Kinds after which an island is out, until it is started again."""

STORES = ("store", "slow_store")
"""Kinds that hit the store, and no island."""

HOLDS = ("cut",)  # kinds in which an island and the others hear nothing of each other for a while
MOMENTS = ("any", "any", "any", "any", "any", "change", "join", "save")
PATIENCE = 20.0
"""Seconds that an event waits for its moment, and after that comes at any."""

SOON = (0.1, 1.0)  # seconds after the event before, for one that hits the change


@dataclass
class Event:
    """One event of the plan, and what became of it.

    Attributes:
        gap: seconds after the event before. luck: 0..1, which of the possible victims. how: a
            second draw, for what a kind leaves open.
        victims: islands that were hit; others: those that were training then and were not.
        struck, over: when it came, and when its cause was gone. lives: number of each island's life
            when it came.
        skipped: why it did not come.
    """

    kind: str
    gap: float
    moment: str
    luck: float
    how: float
    victims: list[int] = field(default_factory=list)
    others: list[int] = field(default_factory=list)
    struck: float = 0.0
    over: float = 0.0
    lives: dict[int, int] = field(default_factory=dict)
    during: str = ""
    skipped: str = ""


def plan(
    count: int, kinds: Sequence[str], gap: float, seed: int, saves: bool = True
) -> list[Event]:
    """The events of a seed: every kind as often as any other, in random order; gaps around their
    mean, none of less than a fifth of it.

    Args:
        saves: islands write checkpoints, so that some events may come in one.
    """
    moments = [m for m in MOMENTS if saves or m != "save"]
    rng, deck, events = random.Random(seed), list[str](), list[Event]()
    for _ in range(count):
        if not deck:
            deck = rng.sample(list(kinds), len(kinds))
        wait = gap * min(0.2 + 0.8 * rng.expovariate(1.0), 3.0)
        events.append(Event(deck.pop(), wait, rng.choice(moments), rng.random(), rng.random()))
    return events


class Storm:
    """Carries out a plan.

    Attributes:
        later: what is still to be done: (when, what).
    """

    def __init__(self, lab: Lab, events: Sequence[Event], say: Callable[[str], None]):
        self.lab, self.events, self._say = lab, events, say
        self.later: list[tuple[float, Callable[[], None]]] = []

    def run(self, patience: float) -> None:
        """Let all events come. Raises RuntimeError when nobody is left who trains."""
        last = time.monotonic()
        for event in self.events:
            soon = SOON[0] + event.how * (SOON[1] - SOON[0])
            self.wait(last + (soon if event.moment == "change" else event.gap))
            victims = self._choose(event, patience)
            if victims:
                self._strike(event, victims)
                last = event.struck
            else:
                event.skipped = f"within {patience:g} s there was no island that it might hit"
                self._say(f"{event.kind}: {event.skipped}")
                if not any(self.lab.training(slot) for slot in range(self.lab.islands)):
                    raise RuntimeError("nobody trains any more")

    def wait(self, until: float) -> None:
        """Look on, and do what is due."""
        while True:
            self.tick()
            if time.monotonic() >= until:
                return

    def tick(self) -> None:
        """One look, of some milliseconds."""
        now = time.monotonic()
        for entry in [e for e in self.later if e[0] <= now]:
            self.later.remove(entry)
            entry[1]()
        self.lab.poll()
        time.sleep(0.02)

    # ---- whom ----------------------------------------------------------------------------------

    def _choose(self, event: Event, patience: float) -> list[int]:
        """The victim, when the event may come; one that takes an island out leaves another that
        trains.
        """
        start, fewest = time.monotonic(), 1 if event.kind in (*STORES, "disk_full") else 2
        while (waited := time.monotonic() - start) < patience:
            training = [slot for slot in range(self.lab.islands) if self.lab.training(slot)]
            joining = [slot for slot in range(self.lab.islands) if self.lab.joining(slot)]
            picks, during = training, event.moment
            if event.moment == "join" and waited < PATIENCE:
                kill = event.kind.startswith("kill")
                picks = [*training, *(joining if kill and training else [])] if joining else []
            elif event.moment == "save" and waited < PATIENCE:
                picks = [slot for slot in training if self.lab.seen[slot].saving]
            elif event.moment != "change":
                during = "any"
            if picks and (
                len(training) >= fewest or (picks[-1] in joining and event.moment == "join")
            ):
                event.during, event.others = during, training
                candidates = picks if len(training) >= fewest else joining
                return [candidates[int(event.luck * len(candidates))]]
            self.tick()
        return []

    # ---- what ----------------------------------------------------------------------------------

    def _strike(self, event: Event, victims: list[int]) -> None:
        victim = victims[0]
        event.victims = [] if event.kind in STORES else victims
        event.others = [slot for slot in event.others if slot not in event.victims]
        event.lives = {slot: life.number for slot, life in self.lab.now.items()}
        event.struck = event.over = time.monotonic()
        text = getattr(self, f"_{event.kind}")(event, victim)
        said = (
            f"{event.kind} {text}, during {event.during}"
            if event.during != "any"
            else f"{event.kind} {text}"
        )
        self.lab.note(f"event: {said}; training: {sorted({*event.others, *event.victims})}")
        self._say(said)

    def _after(self, seconds: float, job: Callable[[], None]) -> None:
        self.later.append((time.monotonic() + seconds, job))

    def _kill_rank(self, event: Event, victim: int) -> str:
        rank = int(event.how * self.lab.ranks)
        self.lab.signal(
            self.lab.rank_of(victim, rank) or self.lab.processes(victim)[-1:], signal.SIGKILL
        )
        return f"rank {rank} of island {victim}"

    def _kill_island(self, event: Event, victim: int) -> str:
        self.lab.signal(self.lab.processes(victim), signal.SIGKILL)
        return f"island {victim}"

    def _stop(self, event: Event, victim: int) -> str:
        seconds, pids = self.lab.dead + 2 + 3 * event.how, self.lab.processes(victim)
        self.lab.stopped.add(victim)
        self.lab.signal(pids, signal.SIGSTOP)

        def wake() -> None:
            self.lab.signal(pids, signal.SIGCONT)
            self._free(event, victim, f"island {victim} wakes")

        self._after(seconds, wake)
        return f"island {victim} for {seconds:.1f} s"

    def _cut(self, event: Event, victim: int) -> str:
        seconds = self.lab.dead * (0.15 + 0.45 * event.how)
        ways = self._ways(victim, both=True)
        self._hold(
            event, victim, ways, seconds, lambda: [self.lab.links.let_go(way) for way in ways]
        )
        return f"island {victim} for {seconds:.1f} s"

    def _cut_off(self, event: Event, victim: int) -> str:
        ways, far = (
            self._ways(victim, both=True),
            event.others or [s for s in range(self.lab.islands) if s != victim],
        )
        if event.how < 0.5:
            other = far[int(event.how * 2 * len(far))]
            self.lab.links.end((victim, other))
            self.lab.doubt([victim, other])
            event.victims = [victim, other]  # either of them may be left out
            event.others = [slot for slot in event.others if slot != other]
            return f"the link of islands {victim} and {other}, reset"
        seconds = self.lab.dead + 3 + 2 * event.how
        self._hold(
            event, victim, ways, seconds, lambda: [self.lab.links.end(way) for way in ways[::2]]
        )
        return f"island {victim}, silent for {seconds:.1f} s, then reset"

    def _one_way(self, event: Event, victim: int) -> str:
        seconds, ways = self.lab.dead + 3 + 2 * event.how, self._ways(victim, both=False)
        self._hold(event, victim, ways, seconds, lambda: [self.lab.links.end(way) for way in ways])
        return f"island {victim} is not heard for {seconds:.1f} s"

    def _store(self, event: Event, _: int) -> str:
        seconds = 0.5 + 2.5 * event.how
        self.lab.kill_store()
        event.over = float("inf")

        def start() -> None:
            self.lab.start_store()
            event.over = time.monotonic()
            self.lab.note("the store starts again")

        self._after(seconds, start)
        return f"is away for {seconds:.1f} s"

    def _slow_store(self, event: Event, _: int) -> str:
        """It answers late: questions of a join, say, come between two of its messages."""
        store, seconds, event.over = self.lab.store, 0.5 + 4.5 * event.how, float("inf")
        pause = 0.3  # in which some questions are answered, and others not

        def go_on(last: bool) -> None:
            self.lab.signal_store(store, signal.SIGCONT)
            if last:
                event.over = time.monotonic()
                self.lab.note("the store is no longer stopped")

        for turn in range(3):
            begin = turn * (seconds + pause)
            self._after(begin, lambda: self.lab.signal_store(store, signal.SIGSTOP))
            self._after(begin + seconds, partial(go_on, turn == 2))
        return f"stands for {seconds:.1f} s, three times"

    def _damage(self, event: Event, victim: int) -> str:
        far = event.others or [s for s in range(self.lab.islands) if s != victim]
        other = far[int(event.how * len(far))]
        self.lab.links.flip((victim, other))
        self.lab.doubt([victim, other])
        # the one that finds it takes the other for lost; the smaller slots go on
        event.victims = [victim, other]
        event.others = [slot for slot in event.others if slot != other]
        return f"from island {victim} to {other}"

    def _poison(self, event: Event, victim: int) -> str:
        value = ("nan", "inf", "-inf", "1e6")[int(event.how * 4)]
        self.lab.order(f"poison-{victim}.{int(event.luck * 97) % self.lab.ranks}", value)
        return f"island {victim} with {value}"

    def _disk_full(self, event: Event, victim: int) -> str:
        self.lab.order(f"full-{victim}.{int(event.luck * 97) % self.lab.ranks}")
        return f"at island {victim}"

    # ---- links ---------------------------------------------------------------------------------

    def _ways(self, victim: int, both: bool) -> list[tuple[int, int]]:
        """From a victim to all others, and back if `both`, in turns."""
        out: list[tuple[int, int]] = []
        for other in range(self.lab.islands):
            if other != victim:
                out += [(victim, other), (other, victim)] if both else [(victim, other)]
        return out

    def _hold(
        self,
        event: Event,
        victim: int,
        ways: Sequence[tuple[int, int]],
        seconds: float,
        end: Callable[[], Any],
    ) -> None:
        self.lab.stopped.add(victim)
        event.over = float("inf")
        for way in ways:
            self.lab.links.hold(way)

        def over() -> None:
            end()
            self._free(event, victim, f"the links of island {victim} are free")

        self._after(seconds, over)

    def _free(self, event: Event, victim: int, text: str) -> None:
        self.lab.stopped.discard(victim)
        self.lab.doubt([victim])
        event.over = time.monotonic()
        self.lab.note(text)
