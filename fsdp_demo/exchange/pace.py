"""The pace of one island where islands take unlike steps (`ExchangeConfig.local_steps`): which
ticks it takes a step of its own in, and how long such a step takes.

All headers of a message say the seconds of a step of their island. So all islands that have taken
part know the same shares of a round (`config/local_steps.py`), which hold from the next end of a
round on. Only its own share changes what an island does: the clock, and with it all exchanges, is
that of the run, and a mean weighs islands by what they have trained.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..config.local_steps import local_steps, round_of, takes_step
from ..config.schema import ExchangeConfig
from ..peers.header import rate_of
from ..rendezvous.topology import Topology

log = logging.getLogger("fsdp_demo")

LEAST = 5
"""Own steps that are measured at least, though some of them lie before the last exchange."""


class Pace:
    """The shares of a round, and the measured steps of this rank.

    Args:
        slot: of this island among all.

    Attributes:
        period: ticks of a round; 0: all islands take a step in every tick.
        last: ticks of the whole run, where they are known: a run may end within a round.
        shares: own steps in a round, by slot; empty: all ticks. coming: those from the next end of
            a round on.
        left_out: ticks that this island has left out so far.
        at_left_out: called in each of them.
    """

    def __init__(self, slot: int):
        self._slot, self.period, self.last = slot, 0, 0
        self.at_left_out: list[Callable[[], Any]] = []
        self.clear()

    def work_with(self, config: ExchangeConfig) -> None:
        """Set the method: at the start, and where it is chosen later."""
        self.period = round_of(config.channels) if config.by_speed else 0
        self.clear()

    def clear(self) -> None:
        """Begin anew: nothing is known of any island."""
        self.shares: dict[int, int] = {}
        self.coming: dict[int, int] = {}
        self.left_out, self._seconds, self._begun = 0, list[float](), (0.0, 0.0)

    @property
    def steps(self) -> int:
        """Own steps of this island in a round; one that is not known is as slow as the slowest."""
        return self.shares.get(self._slot, min(self.shares.values(), default=self.period))

    def leaves_out(self, step: int) -> bool:
        """Whether this island leaves out the tick of `step`."""
        if not self.period or step == self.last:
            return False
        return not takes_step(step % self.period, self.steps, self.period)

    # ---- measured ------------------------------------------------------------------------------

    def begin(self, waited: float) -> None:
        """Begin an own step. waited: seconds for which training has stood still for the link."""
        self._begun = time.perf_counter(), waited

    def end(self, waited: float, counts: bool = True) -> None:
        """End the step that was begun; none is, where something else fell into it (`disturbed`).
        counts: it was taken.
        """
        began, before = self._begun
        if began and counts:
            self._seconds.append(time.perf_counter() - began - (waited - before))
        self.disturbed()

    def disturbed(self) -> None:
        """Do not count the step under way: a save or an evaluation belongs to it."""
        self._begun = 0.0, 0.0

    def seconds(self, device: torch.device) -> float:
        """Seconds of an own step since the last exchange, the median; 0 where none was measured."""
        found = self._seconds
        if not found:
            return 0.0
        self._seconds = found[-LEAST + 1 :]  # the next ones belong to the next exchange
        began = ended = time.perf_counter()
        if device.type not in ("cpu", "meta"):  # the host has run ahead of it
            torch.get_device_module(device).synchronize()
            ended = time.perf_counter()
        return statistics.median(found) + (ended - began) / len(found)

    # ---- agreed --------------------------------------------------------------------------------

    def hear(self, said: Sequence[int]) -> None:
        """Take the headers of a message: by slot 1 + `Header.seconds`, 0 for who took no part."""
        slots = {slot: rate_of(int(v) - 1) for slot, v in enumerate(said) if v}
        if self.period and slots:
            self.coming = dict(zip(slots, local_steps(self.period, [*slots.values()]), strict=True))

    def at_end(self, step: int, speaks: bool) -> None:
        """After a tick, when `step` of them are done: at the end of a round take the shares that
        were heard. speaks: log a change.
        """
        if not self.coming or step % self.period:
            return
        if self.coming != self.shares and speaks:
            text = ", ".join(str(n) for _, n in sorted(self.coming.items()))
            log.info("steps of each island in a round of %d: %s", self.period, text)
        self.shares, self.coming = self.coming, {}

    def go_on(self, state: Any, taken: int, topology: Topology, step: int) -> None:
        """Stand at tick `step` with the own steps that a state tells (`Start.state`), or `taken`
        without one: others took the rest.
        """
        if isinstance(state, dict):
            taken = int(state["step"]) - int(state.get("pace", {}).get("left_out", 0))
        elif state is not None:
            taken = state.step - state.left_out(topology)
        if self.period:
            self.left_out = max(step - taken, 0)

    def leave_out(self) -> None:
        """Count a tick that is left out."""
        self.left_out += 1
        for call in self.at_left_out:
            call()

    # ---- kept ----------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What is saved, as JSON; empty where all islands have taken all steps."""
        if not self.period and not self.left_out:
            return {}
        shares, coming = (sorted(map(list, v.items())) for v in (self.shares, self.coming))
        own = {"left_out": self.left_out, "seconds": self._seconds[-1:]}
        return own | {"shares": shares, "coming": coming}

    def load(self, kept: Mapping[str, Any]) -> None:
        """The inverse of `state`; without its numbers this island has left out no tick."""
        self.clear()
        self.left_out = int(kept.get("left_out", 0))
        if self.period:
            self._seconds = [float(v) for v in kept.get("seconds", ())]
            pairs = ([(int(s), int(n)) for s, n in kept.get(k, ())] for k in ("shares", "coming"))
            self.shares, self.coming = map(dict, pairs)
