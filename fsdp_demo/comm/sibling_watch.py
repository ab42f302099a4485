"""Says in which call of the exchange each rank of an island is, when one has been in its for long.

A collective that one rank calls alone (`if rank == 0: exchange.totals()`) waits for ever, often in
a collective of another kind, so no error comes. Each rank notes its call in the store of
torch.distributed, from a thread of its own; the store is the island's, so this works in a mesh and
for one replica, too.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

import torch.distributed as dist

from ..errors import see
from .topology import Topology

log = logging.getLogger("fsdp_demo")

PATIENCE = 60.0
"""Seconds in one call after which it is told. A rank may compile or save meanwhile."""

BEAT = 5.0
"""Seconds between two looks."""

OUTSIDE = "no call of the exchange"
TORN = re.compile("gloo|nccl|connection (closed|reset)", re.IGNORECASE)
F = TypeVar("F", bound=Callable[..., Any])
_numbers = itertools.count()


class SiblingWatch:
    """What the ranks of one island call.

    Args:
        topology: of this rank. step: the steps that it has taken.
    """

    def __init__(self, topology: Topology, step: Callable[[], int]):
        self._name, self._rank, self._world = topology.name, topology.rank, topology.world
        self._step, self._call = step, (OUTSIDE, 0.0)
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
        before, self._call = self._call, (call, time.monotonic())
        if before[0] != OUTSIDE:
            self._call = before
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
        """Look no more."""
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
        self._store.set(f"{self._key}/{self._rank}", json.dumps([call, self._step(), waited]))
        keys = [f"{self._key}/{rank}" for rank in range(self._world)]
        if not self._store.check(keys):
            return  # one of them has not looked yet
        found = [json.loads(self._store.get(key)) for key in keys]  # no file store has multi_get
        places = [f"in {call}, after step {step}" for call, step, _ in found]
        late = max(range(self._world), key=lambda rank: found[rank][2])
        told = f"{late} {places[late]}"
        if found[late][2] < PATIENCE or len(set(places)) == 1 or told in self._told:
            return
        self._told.add(told)
        log.warning(
            "rank %d of %s is %s. Rank %d has waited %.0f s %s; %s. All ranks of an island make "
            "such calls together%s",
            self._rank,
            self._name,
            places[self._rank],
            late,
            found[late][2],
            places[late],
            _grouped(places, late),
            see("one-rank-calls"),
        )


def _grouped(places: list[str], late: int) -> str:
    """Where the ranks are that are elsewhere than `late`."""
    ranks: dict[str, list[str]] = {}
    for rank, place in enumerate(places):
        if place != places[late]:
            ranks.setdefault(place, []).append(str(rank))
    return "; ".join(f"rank {', '.join(who)} is {place}" for place, who in ranks.items())


def collective(call: str) -> Callable[[F], F]:
    """A method that all ranks of an island call together; its object has a watch, `_calls`."""

    def marked(method: F) -> F:
        @wraps(method)
        def called(self: Any, *args: Any, **kwargs: Any) -> Any:
            with self._calls.within(call):
                return method(self, *args, **kwargs)

        return cast(F, called)

    return marked
