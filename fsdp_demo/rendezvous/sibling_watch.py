"""A watch on the ranks of one island: when one rank has been in a call of the exchange for long, it
logs in which call each of them is.

A collective that one rank calls alone (`if rank == 0: exchange.totals()`) waits for ever, often
in a collective of another kind, so no error comes. Each rank notes its call in the store of
torch.distributed, from a thread of its own. That store is the island's, so the watch works in a
mesh and for one replica, too.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any, NamedTuple, TypeVar, cast

import torch.distributed as dist

from ..errors import see
from ..status import DECIDE, leave, tell_launcher
from .topology import Topology

log = logging.getLogger("fsdp_demo")

PATIENCE = 60.0
"""Seconds in one call after which it is told. A rank may compile or save meanwhile."""

BEAT = 5.0
"""Seconds between two looks."""

OUTSIDE = "no call of the exchange"
CURE = (
    "move a call out of `if rank == 0:`; give all ranks as many batches (drop_last=True), or call "
    "exchange.skip() where one has none"
)
STEPS = ("optimizer.step()", "skip()")
# of these none returns without the others
VOTES = ("finish()", "reset()", "totals()", "load_state_dict()", "stop_here()")
TORN = re.compile("gloo|nccl|connection (closed|reset)", re.IGNORECASE)
F = TypeVar("F", bound=Callable[..., Any])
_numbers = itertools.count()


class RankCall(NamedTuple):
    """Where one rank of an island is: its present call, the steps it has taken, the seconds that it
    has waited; how many steps, `VOTES` and collectives of torch's default group it has begun; and
    the last two steps that it has begun, each with the collectives before it.
    """

    call: str
    step: int
    waited: float
    begun: list[int]
    marks: list[list[int]]

    def parted(self, other: RankCall) -> bool:
        """Whether the two ranks can never meet again. All ranks of an island begin the same steps,
        votes and collectives in one order, so one of them is behind the other in each of the three
        counts, or equal. Where it is behind in one and ahead in another, they have parted for good:
        a rank in `finish()`, say, and one that has begun a further step, or its backward pass.

        A rank that compiles, evaluates or saves alone begins nothing meanwhile: it is behind, and
        may come. Collectives count only where both had begun as many before the same step: stages
        of a pipeline differ in them.
        """
        counts = 3 if any(mark in other.marks for mark in self.marks) else 2
        signs = {(a > b) - (a < b) for a, b in zip(self.begun[:counts], other.begun, strict=False)}
        return {1, -1} <= signs


class SiblingWatch:
    """Notes the call that each rank of an island is in, and warns where one waits for the others.
    After ISLAND_TIMEOUT ranks that can never meet (`RankCall.parted`) end with status 78.

    Args:
        topology: of this rank. step: the steps that it has taken.
    """

    def __init__(self, topology: Topology, step: Callable[[], int]):
        self._name, self._rank, self._world = topology.name, topology.rank, topology.world
        self._timeout, self._step, self._call = topology.timeout, step, (OUTSIDE, 0.0)
        self._steps = self._votes = 0
        self._marks: list[list[int]] = []
        self._stood: list[list[int]] = []  # `begun` of all ranks at the last look
        self._told: set[str] = set()
        self._over = threading.Event()
        # all ranks of an island attach equally often
        self._key = f"fsdp_demo/calls/{topology.island}/{next(_numbers)}"
        if self._world > 1:
            self._store = dist.distributed_c10d._get_default_store()
            threading.Thread(target=self._run, name="siblings", daemon=True).start()

    @contextmanager
    def within(self, call: str) -> Iterator[None]:
        """This rank is in a call that all ranks of the island make together."""
        before = self._call
        if before[0] == OUTSIDE:
            self._call, step = (call, time.monotonic()), self._step()
            self._votes += call in VOTES
            if call in STEPS and self._world > 1 and [step] != [m[0] for m in self._marks[-1:]]:
                self._steps += 1
                self._marks = [*self._marks[-1:], [step, _collectives()]]
        try:
            yield
        except RuntimeError as error:
            if self._world > 1 and TORN.search(str(error)):
                error.add_note(
                    f"rank {self._rank} of {self._name} was in {call}. All ranks of an island make "
                    f"this call, and none ends before{see('one-rank-calls')}"
                )
            raise
        finally:
            self._call = before

    def close(self) -> None:
        """Stop watching."""
        self._over.set()

    def _run(self) -> None:
        try:
            while not self._over.wait(BEAT):
                self._look()
        except Exception:  # the store ends with the process that holds it
            log.debug("%s: the calls of its ranks are watched no more", self._name, exc_info=True)

    def _look(self) -> None:
        call, since = self._call
        waited = 0.0 if call == OUTSIDE else time.monotonic() - since
        begun = [self._steps, self._votes, _collectives()]
        place = RankCall(call, self._step(), waited, begun, self._marks)
        self._store.set(f"{self._key}/{self._rank}", json.dumps(place))
        keys = [f"{self._key}/{rank}" for rank in range(self._world)]
        if not self._store.check(keys):
            return  # one of them has not looked yet
        # no file store has multi_get
        found = [RankCall(*json.loads(self._store.get(key))) for key in keys]
        places = [f"in {place.call}, after step {place.step}" for place in found]
        late = max(range(self._world), key=lambda rank: found[rank].waited)
        told, waited = f"{late} {places[late]}", found[late].waited
        stood, self._stood = self._stood, [place.begun for place in found]
        parted = waited >= self._timeout and stood == self._stood
        parted = parted and any(a.parted(b) for a in found for b in found)
        unlike = len(set(places)) > 1 and told not in self._told
        if not parted and (waited < PATIENCE or not unlike):
            return
        self._told.add(told)
        log.log(
            logging.ERROR if parted else logging.WARNING,
            "rank %d of %s is %s. Rank %d has waited %.0f s %s; %s. All ranks of an island make "
            "such calls together%s: %s%s",
            self._rank,
            self._name,
            places[self._rank],
            late,
            waited,
            places[late],
            _grouped(places, late),
            ", and these never will: status 78" if parted else "",
            CURE,
            see("one-rank-calls"),
        )
        if parted:
            self._end_together()

    def _end_together(self) -> None:
        """End this process with status 78, at the same moment as the other ranks, when all have
        seen why: to their main threads the end of one is an error, and the store may end with it.
        """
        tell_launcher(self._rank, DECIDE)
        at = self._store.compare_set(f"{self._key}/end", "", str(time.time() + 3 * BEAT))
        self._over.wait(float(at) - time.time())
        leave(DECIDE)


def _collectives() -> int:
    """Collectives begun on torch's default group; 0 where its backend does not count them."""
    with suppress(RuntimeError):
        group: Any = dist.distributed_c10d._get_default_group()
        return int(group._get_sequence_number_for_group())
    return 0


def _grouped(places: list[str], late: int) -> str:
    """The ranks that are in another call than `late`, by their calls, as text."""
    ranks: dict[str, list[str]] = {}
    for rank, place in enumerate(places):
        if place != places[late]:
            ranks.setdefault(place, []).append(str(rank))
    return "; ".join(f"rank {', '.join(who)} is {place}" for place, who in ranks.items())


def collective(call: str) -> Callable[[F], F]:
    """Decorator of a method that all ranks call together; `_calls` has the `SiblingWatch`."""

    def marked(method: F) -> F:
        @wraps(method)
        def called(self: Any, *args: Any, **kwargs: Any) -> Any:
            with self._calls.within(call):
                return method(self, *args, **kwargs)

        return cast(F, called)

    return marked
