"""The first steps of a run: the link and the steps are measured, then the planner chooses. Later
exchanges are compared with the plan.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ..compression.windows import synchronize
from ..config.auto import AutoChoice, AutoConfig, undecided
from ..config.load import preset
from ..config.schema import ExchangeConfig
from ..errors import counted, see
from ..exchange.exchange import Exchange
from ..exchange.ledger import ExchangeRecord
from ..net.link import Link
from ..tools.planner import Situation
from ..tools.planner.rows import plan_row
from .earlier_choice import known_choice, read, tell
from .measuring import (
    SLOWEST_LAST,
    chosen,
    coarse,
    device_name,
    free_bytes,
    quick_probe,
    rounded,
    situation_of,
    unlike,
)

log = logging.getLogger("fsdp_demo")

LATE, ROUNDS = 2.0, 5
"""An exchange is late if it takes so many times what was planned; so many of them in a row are
said.
"""


def begin(exchange: Exchange, model: torch.nn.Module | None, steps: int | None = None) -> None:
    """Measure the link, and choose the method after the first steps of a run that has just begun.

    All ranks of all islands call it behind `attach`.

    Args:
        steps: steps of the job, or None.
    """
    config = exchange.config
    if not isinstance(config, AutoConfig):
        return
    if exchange.topology.islands == 1:
        log.info("auto: one island exchanges nothing; the method is full")
        exchange.choose(config.taken_over(preset("full", value_dtype="bf16")), model)
        return
    if steps is not None and steps <= config.measured and exchange.topology.rank == 0:
        log.warning(
            "auto: the run has %s, and the method is chosen after %d: nothing will be trained; "
            "take more steps, or name a method",
            counted(steps, "step"),
            config.measured,
        )
    first = _FirstSteps(exchange, config, model, steps)
    exchange.on_step_end(first)
    first.chosen_meanwhile()


def go_on(exchange: Exchange, told: Mapping[str, Any], model: torch.nn.Module | None) -> None:
    """Take what was settled when this run began, for an engine that loads its checkpoint behind
    `attach`: the method that `auto` has chosen, or the steps at which phases begin that were given
    as shares of the run. Nothing where it was not settled yet.

    All ranks of all islands call it together, before the exchange goes on (`Exchange.rejoin`).

    Args:
        told: the head of a checkpoint, or a `method_note`.
    """
    if (known := read(told)) is None:
        return
    if exchange.topology.rank == 0:
        log.info("this run began with %s", known[0].describe())
    if undecided(exchange.config):
        _take(exchange, *known, model)
    elif (method := exchange.opened.begun_as(known[0])) != exchange.config:
        exchange.choose(method, model)


def _take(
    exchange: Exchange,
    method: ExchangeConfig,
    choice: AutoChoice | None,
    model: torch.nn.Module | None,
) -> None:
    exchange.choose(method, model, choice)
    exchange.on_step_end(None)
    if choice is not None:
        watch(exchange, choice)


def watch(exchange: Exchange, choice: AutoChoice) -> None:
    """Compare exchanges with the plan in a run that goes on, or that this island has joined."""
    if exchange.topology.islands > 1:
        exchange.on_step_end(LinkHealth(exchange, situation_of(exchange, choice)))


class _FirstSteps:
    """Called at the end of every step until the method is chosen."""

    def __init__(
        self,
        exchange: Exchange,
        config: AutoConfig,
        model: torch.nn.Module | None,
        steps: int | None,
    ):
        self._exchange, self._config, self._model = exchange, config, model
        self._steps = steps
        self._ends: list[float] = []
        peers = exchange.peers
        # an island that joins others finds them training
        reading = None if exchange.newcomer else quick_probe(peers, island=exchange.island)
        seen = exchange.island.sum((reading and reading.bits_per_second) or 0.0)[0]
        rtt = exchange.island.max(0.0 if reading is None else reading.rtt)[0]
        shaped = peers.link.bits_per_second if peers is not None and peers.link else None
        rate = min(seen, shaped or math.inf)  # a rehearsed link is one for all ranks
        self._link = Link(rate, rtt) if rate else None

    def __call__(self) -> None:
        exchange = self._exchange
        synchronize(exchange.host.device)  # what a GPU still has to do is part of the step
        self._ends.append(time.monotonic())
        if self.chosen_meanwhile() or exchange.step % self._config.measured:
            return
        spans = [b - a for a, b in zip(self._ends, self._ends[1:], strict=False)]
        here = statistics.median(spans[1:]) if len(spans) > 1 else 0.0  # the first one warms up
        link = self._link
        place = SLOWEST_LAST.index(device_name(exchange.host.device))
        rate, rtt = (0.0, 0.0) if link is None else (link.bits_per_second or 0.0, link.rtt)
        mine = [here, -math.inf if link is None else -rate, rtt, -free_bytes(exchange.host.device)]
        mine += [float(place), -here if exchange.can_leave_out else 0.0]
        step, slowest, rtt, most, device, fastest = exchange.across_islands.largest(mine)
        if not step or slowest < -1e300:
            return  # nobody has measured enough yet: at the next such step
        self._choose(Link(-slowest, rtt), step, -fastest, -most, SLOWEST_LAST[int(device)])

    def chosen_meanwhile(self) -> bool:
        """Whether this island has joined while the others were choosing, and has their choice now.

        It holds what they held then: had they exchanged anything since, it would have failed to
        follow.
        """
        exchange = self._exchange
        if not exchange.newcomer:
            return False
        known = known_choice(exchange.topology, None, exchange.island)
        if known is None:
            return False
        method, choice = known
        if exchange.topology.rank == 0:
            log.info("auto: the run has chosen meanwhile: %s", method.describe())
        _take(exchange, method, choice, self._model)
        return True

    def _choose(self, link: Link, step: float, fastest: float, memory: float, device: str) -> None:
        # step: seconds of it on the slowest island
        exchange, config = self._exchange, self._config
        seen = Link(coarse(link.bits_per_second or 0.0), coarse(link.rtt))
        planned = AutoChoice("", str(seen), coarse(step), self._steps)
        situation = replace(
            situation_of(exchange, planned),
            memory_bytes=memory or None,
            device=device,
            target=config.target,
            machines=unlike(exchange.topology.islands, seen, device, fastest, step),
        )
        choice = chosen(situation, exchange.host)
        method = config.taken_over(choice.config).fixed(self._steps)
        if not exchange.across_islands.all_equal(method.to_dict()):
            raise ValueError(
                "auto: the islands do not choose the same method; they run unlike releases, or "
                f"measure unlike models: name the method instead{see('unlike-runs')}"
            )
        measured = Link(rounded(link.bits_per_second or 0.0), rounded(1e3 * link.rtt) / 1e3)
        length = f" for {counted(self._steps, 'step')}" if self._steps else ""
        reason = (
            f"measured {measured} and {_span(fastest, step)} per step; "
            f"planned with {seen} and {planned.step_seconds:g} s{length}: {choice.reason}"
        )
        planned, topology = replace(planned, reason=reason), exchange.topology
        if topology.rank == 0:
            log.info("auto: %s", reason)
        tell(topology, method, planned)  # before the first message of the method
        exchange.choose(method, self._model, planned)
        exchange.on_step_end(LinkHealth(exchange, situation))


def _span(fastest: float, slowest: float) -> str:
    """The seconds of a step on the islands in words."""
    low, high = f"{fastest:.3g}", f"{slowest:.3g}"
    return f"{high} s" if low in ("0", high) else f"{low} to {high} s"


class LinkHealth:
    """The comparison of a run's exchanges with the plan: a warning, once, where they take longer.

    Called at the end of every step; no communication. It never changes the method.

    Args:
        situation: situation that the method was chosen for.

    Attributes:
        planned: seconds of an exchange by that plan.
    """

    def __init__(self, exchange: Exchange, situation: Situation):
        self._exchange, self._link = exchange, situation.link
        self._seen: ExchangeRecord | None = None  # the newest that was looked at
        self._late, self._said = list[float](), False
        self._bits = 8 * plan_row(situation, exchange.config).bytes_per_exchange
        self.planned = self._bits / (self._link.bits_per_second or math.inf) + 2 * self._link.rtt

    def __call__(self) -> None:
        for record in self._exchange.timeline(self._seen):
            self._seen = record
            if record.began is None or record.ended is None:
                continue
            took = record.ended - record.began
            self._late = [*self._late, took] if took > LATE * self.planned + 0.05 else []
            if len(self._late) == ROUNDS and not self._said and self._exchange.topology.rank == 0:
                self._said = True
                self._warn(statistics.median(self._late))

    def _warn(self, took: float) -> None:
        """Say how long exchanges take, in seconds, and which rate would explain it."""
        rate = self._bits / (took - 2 * self._link.rtt)
        log.warning(
            "auto: the last %d exchanges took %.3g s, where %.2g s were planned for %s: the link "
            "has become slower, or an island comes late. The method stays as it is. To see which "
            "would fit: fsdp-demo plan --link %s",
            *(ROUNDS, took, self.planned, self._link, Link(coarse(rate), self._link.rtt)),
        )
