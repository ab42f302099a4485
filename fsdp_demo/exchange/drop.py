"""DropCompute (arXiv 2306.10598): a time limit for the micro-batches of a step.

    elapsed = seconds since the step's first micro-batch began, on the island's slowest rank
    elapsed >= limit, ahead of a micro-batch: it and all others but the last are dropped

The last one is always taken, since DDP, FSDP2 and ZeRO reduce in it. The limit is given, or chosen
once from recorded times of all islands by the rule of the authors' code (`best_limit`; source:
github.com/paper-submissions/dropcompute at d26cc08, `deepspeed-bert/run_pretraining.py`).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from itertools import accumulate

import torch

from ..compression.windows import synchronize
from ..config.parts import Drop
from ..elastic.agreement import gather_json
from ..hosts.base import TrainingHost
from ..peers.header import QUESTION
from ..rendezvous.topology import Topology
from .in_flight import InFlightQueue

log = logging.getLogger("fsdp_demo")

RECORDED = 16
"""Islands compare their recorded times at steps that are a multiple of this."""

WARM = 2
"""Steps that are not recorded: they compile and warm up."""

IN_A_ROW = 5
"""So many steps in a row with the same trouble are said."""

_SHORT = (
    "one micro-batch: every step takes its first and its last one only; give more, or leave it out"
)
_IDLE = (
    "drop is set, and nothing can be dropped: ask exchange.time_is_up(i, n) ahead of each of the n "
    "micro-batches of a step, 3 or more"
)

clock = time.monotonic


class DropCompute:
    """The micro-batches of one rank and their limit.

    Args:
        settings: of the configuration; None: nothing is dropped, and nothing here costs anything.
        topology, host, queue: of this rank.

    Attributes:
        limit: seconds; infinite where it is still to be chosen.
        dropped: micro-batches that this island has dropped since it started.
        ratio: by how much the loss of the step under way is too small: all of its micro-batches
            over those taken. Who divides by tokens sets it ahead of the last one's backward.
    """

    def __init__(
        self, settings: Drop | None, topology: Topology, host: TrainingHost, queue: InFlightQueue
    ):
        self.settings, self._topology, self._host, self._queue = settings, topology, host, queue
        self._auto = settings is not None and settings.limit == "auto"
        self.limit = math.inf if settings is None or self._auto else float(settings.limit)
        self._records, self._times = self._auto, list[list[float]]()  # whole step, micro-batches
        self.dropped, self.ratio = 0, 1.0
        self._began, self._marks = 0.0, list[float]()
        self._asked = self._of = self._taken = self._short = 0
        self._idle = 0.0

    # ---- in a step -----------------------------------------------------------------------------

    def time_is_up(self, micro: int, of: int) -> bool:
        """As `Exchange.time_is_up`."""
        if self.settings is None:
            return False
        if not 0 <= micro < of or (micro and (micro, of) != (self._asked, self._of)):
            raise ValueError(
                f"time_is_up({micro}, {of}), when {self._asked} of {self._of} micro-batches were "
                "asked for: ask ahead of each micro-batch of a step, from 0 on"
            )
        if micro == 0:
            synchronize(self._host.device)
            self._began, self._marks, self._taken = clock(), [], 0
        up = bool(self._marks) and self._marks[-1] >= self.limit
        if micro and not up and (micro < of - 1 or self._records):
            self._mark()
            up = self._marks[-1] >= self.limit
            self._short = (self._short + 1) * (up and micro == 1)
            self._say(self._short, f"drop.limit={self.limit:.3g} s is shorter than {_SHORT}")
        drops = up and micro < of - 1
        self._asked, self._of, self._taken = micro + 1, of, self._taken + (not drops)
        self.dropped, self.ratio = self.dropped + drops, of / self._taken
        return drops

    def _mark(self) -> None:
        """Note the time since the step's begin: one vote of the island."""
        synchronize(self._host.device)  # a GPU has still to do what was asked of it
        self._marks += self._queue.connections.island.max(clock() - self._began)

    def _say(self, times: float, text: str) -> None:
        if times == IN_A_ROW and self._topology.rank == 0:
            log.warning("%s: %s", self._topology.name, text)

    @property
    def factor(self) -> float:
        """The factor by which gradients are still to be scaled; 1 under the published divisor."""
        return self.ratio if self.settings and self.settings.divisor == "exact" else 1.0

    @torch.no_grad()
    def scale(self) -> None:
        """Under `exact` scale the gradients now, not in the optimizer's step: for a loop that clips
        them itself. A second call in one step does nothing."""
        if (factor := self.factor) != 1.0:
            for g in self._host.tensors("gradient"):
                if g is not None:
                    g.mul_(factor)
        self.ratio = 1.0

    def close(self, skipping: bool) -> None:
        """Ahead of the optimizer's step, taken or not: end the step's micro-batches."""
        if self._records and 0 < self._asked == self._of:
            self._mark()
        self.scale()
        if not skipping:
            self._idle += 1 if self._of < 3 else math.inf
            self._say(self._idle, _IDLE)
        self._asked = 0

    # ---- the choice ----------------------------------------------------------------------------

    @property
    def chosen(self) -> float:
        """The limit that was chosen, for saved states and newcomers; 0 for none."""
        return self.limit if self._auto and not self._records else 0.0

    def know(self, limit: float) -> None:
        """Take a limit that was chosen before; 0: none was."""
        if self._records and limit > 0:
            self.limit, self._records = limit, False

    def choose(self, step: int) -> None:
        """Behind step `step` of the job (from 1): record its times; where it is the turn, ask all
        islands for theirs, and take the limit that follows from them."""
        if not self._records:
            return
        if 3 <= len(self._marks) == self._of:
            times = [b - a for a, b in zip([0.0, *self._marks], self._marks, strict=False)]
            self._times.append([clock() - self._began, *times])
            self._marks = []
        if step % RECORDED:
            return
        own = self._times[WARM:]
        found = self._queue.ask(lambda peers: gather_json(peers, own, QUESTION, step))
        alone = [own] if self._topology.islands == 1 else []
        known = [times for times in found or alone if len(times) >= RECORDED // 2]
        last = min(map(len, known), default=0)
        steps = [times[-last:] for times in known]
        limit, share, gain = 0.0, 0.0, 0.0
        if last:
            walls = [whole for times in steps for whole, *_ in times]
            micro = [[each for _, *each in times] for times in steps]
            limit, share, gain = best_limit(micro, sum(walls) / len(walls))
        self.know(self._queue.connections.island.max(limit)[0])
        if limit and self._topology.rank == 0:
            log.info(
                "%s: drop.limit is %.3g s, from %d steps of %d islands: it would drop %.1f %% of "
                "the micro-batches, for %.1f %% more of them per second",
                *(self._topology.name, limit, last, len(steps), 100 * share, 100 * gain),
            )


def best_limit(
    times: Sequence[Sequence[Sequence[float]]], wall: float, last: bool = True
) -> tuple[float, float, float]:
    """The limit, of 200 between the earliest end of a sixth micro-batch and the latest of all, with
    the largest mean over the steps of (1 - dropped) / (1 - saved) - 1. `saved` is the share of the
    step's time.

    Args:
        times: seconds of each micro-batch, [islands][steps][micro-batches], 3 or more of them.
        wall: mean seconds of a step, with waiting and the optimizer's step.
        last: the last micro-batch is always taken, and each that has begun in time, as
            `DropCompute` does; False: those that end in time, as in the released code.

    Returns:
        The limit in seconds, the share of micro-batches that it drops, and that mean.

    Example:
        >>> limit, share, gain = best_limit([[[1.0] * 8], [[1.0] * 6 + [9.0] * 2]], 25.0)
        >>> 6 <= limit < 25, share, round(gain, 2)
        (True, 0.125, 0.37)
    """
    steps = list(zip(*times, strict=True))
    slowest = [max(map(sum, step)) for step in steps]
    overhead = wall - sum(slowest) / len(slowest)
    ends = [[*accumulate(island)] for step in steps for island in step]
    low, high = min(e[min(5, len(e) - 1 - 2 * last)] for e in ends), max(e[-1] for e in ends)
    best = (high, 0.0, -math.inf)
    for i in range(200):
        limit, shares, gains = low + (high - low) * i / 199, [], []
        for step, longest in zip(steps, slowest, strict=True):
            taken, seconds = zip(*(_taken(island, limit, last) for island in step), strict=True)
            shares.append(1 - sum(taken) / sum(map(len, step)))
            saved = (longest - max(seconds)) / (longest + overhead)
            gains.append((1 - shares[-1]) / (1 - saved) - 1 if any(taken) else -1.0)
        if (gain := sum(gains) / len(gains)) > best[2]:
            best = (limit, sum(shares) / len(shares), gain)
    return best


def _taken(times: Sequence[float], limit: float, last: bool) -> tuple[int, float]:
    """How many micro-batches of a step are taken, and their seconds."""
    ends = [*accumulate(times)]
    n = sum(end < limit for end in ends)
    if not last:
        return n, ends[n - 1] if n else 0.0
    n = min(n, len(ends) - 2)  # behind the first one; the last one follows
    return n + 2, ends[n] + times[-1]
