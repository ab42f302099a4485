"""The first steps of a run: the link and the steps are measured, then the planner chooses. Later
exchanges are compared with the plan.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..comm.link import Link
from ..compression.staging import synchronize
from ..config.auto import AutoChoice, AutoConfig
from ..config.load import preset
from ..config.schema import ExchangeConfig
from ..doctor.quick import quick_probe
from ..errors import counted, see
from ..exchange.exchange import Exchange
from ..exchange.sending import ExchangeRecord
from ..planner import Situation
from ..planner.rows import plan_row
from .earlier_choice import known_choice, read, tell
from .situation import SLOWEST_LAST, chosen, coarse, device_name, free_bytes, rounded, situation_of

log = logging.getLogger("fsdp_demo")

LATE, ROUNDS = 2.0, 5
"""An exchange is late if it takes so many times what was planned; so many of them in a row are
said.
"""


def begin(exchange: Exchange, model: torch.nn.Module | None, steps: int | None = None) -> None:
    """Measure the link, and choose the method after the first steps of a run that has just begun.

    All ranks of all islands call it behind `attach`.

    Args:
        steps: of the job, if they are known.
    """
    config = exchange.config
    if not isinstance(config, AutoConfig):
        return
    if exchange.topology.islands == 1:
        log.info("auto: one island exchanges nothing; the method is full")
        exchange.choose(config.taken_over(_full()), model)
        return
    if steps is not None and steps <= config.measured and exchange.topology.rank == 0:
        log.warning(
            "auto: the run has %s, and the method is chosen after %d: nothing will be trained; "
            "take more steps, or name a method",
            counted(steps, "step"),
            config.measured,
        )
    first = _FirstSteps(exchange, config, model, steps)
    exchange._runtime.at_end = first
    first.chosen_meanwhile()


def _full() -> ExchangeConfig:
    return preset("full", value_dtype="bf16")


def go_on(exchange: Exchange, told: Mapping[str, Any], model: torch.nn.Module | None) -> None:
    """Take what the run has chosen before, for an engine that loads its checkpoint behind `attach`;
    nothing where it had not chosen yet.

    All ranks of all islands call it together, before the exchange goes on (`Exchange.rejoin`).

    Args:
        told: the head of a checkpoint, or `exchange_state.method_of`.
    """
    if (known := read(told)) is not None:
        if exchange.topology.rank == 0:
            log.info("auto: the run has chosen before: %s", known[0].describe())
        _take(exchange, *known, model)


def _take(
    exchange: Exchange,
    method: ExchangeConfig,
    choice: AutoChoice | None,
    model: torch.nn.Module | None,
) -> None:
    exchange.choose(method, model)
    exchange.auto_choice = choice
    exchange._runtime.at_end = None
    if choice is not None:
        watch(exchange, choice)


def watch(exchange: Exchange, choice: AutoChoice) -> None:
    """Compare exchanges with the plan in a run that goes on, or that this island has joined."""
    if exchange.topology.islands > 1:
        exchange._runtime.at_end = LinkHealth(exchange, situation_of(exchange, choice))


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
        peers = exchange._peers
        # an island that joins others finds them training
        reading = None if exchange.newcomer else quick_probe(peers, island=exchange._island)
        seen = exchange._island.sum(0.0 if reading is None else reading.bits_per_second)[0]
        rtt = exchange._island.max(0.0 if reading is None else reading.rtt)[0]
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
        step, slowest, rtt, most, device = exchange.across_islands.largest(
            [
                here,
                -math.inf if link is None else -(link.bits_per_second or 0.0),
                0.0 if link is None else link.rtt,
                -free_bytes(exchange.host.device),
                float(place),
            ]
        )
        if not step or slowest < -1e300:
            return  # nobody has measured enough yet: at the next such step
        self._choose(Link(-slowest, rtt), step, -most, SLOWEST_LAST[int(device)])

    def chosen_meanwhile(self) -> bool:
        """Whether this island has joined while the others were choosing, and has their choice now.

        It holds what they held then: had they exchanged anything since, it would have failed to
        follow.
        """
        exchange = self._exchange
        if not exchange.newcomer:
            return False
        known = known_choice(exchange.topology, None, exchange._island)
        if known is None:
            return False
        method, choice = known
        if exchange.topology.rank == 0:
            log.info("auto: the run has chosen meanwhile: %s", method.describe())
        _take(exchange, method, choice, self._model)
        return True

    def _choose(self, link: Link, step: float, memory: float, device: str) -> None:
        exchange, config = self._exchange, self._config
        seen = Link(coarse(link.bits_per_second or 0.0), coarse(link.rtt))
        planned = AutoChoice("", str(seen), coarse(step), self._steps)
        situation = replace(
            situation_of(exchange, planned),
            memory_bytes=memory or None,
            device=device,
            target=config.target,
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
            f"measured {measured} and {step:.3g} s per step; "
            f"planned with {seen} and {planned.step_seconds:g} s{length}: {choice.reason}"
        )
        planned, topology = replace(planned, reason=reason), exchange.topology
        if topology.rank == 0:
            log.info("auto: %s", reason)
        tell(topology, method, planned)  # before the first message of the method
        exchange.choose(method, self._model)
        exchange.auto_choice = planned
        exchange._runtime.at_end = LinkHealth(exchange, situation)


class LinkHealth:
    """Says when exchanges take longer than was planned, with the settings that would fit.

    Called at the end of every step; no communication. It never changes the method.
    """

    def __init__(self, exchange: Exchange, situation: Situation):
        self._exchange, self._situation = exchange, situation
        self._seen: ExchangeRecord | None = None  # the newest that was looked at
        self._late, self._said = list[float](), False
        link = situation.link
        self._bits = 8 * plan_row(situation, exchange.config).bytes_per_exchange
        self.planned = self._bits / (link.bits_per_second or math.inf) + 2 * link.rtt

    def __call__(self) -> None:
        for record in self._exchange.ended_since(self._seen):
            self._seen = record
            if record.began is None or record.ended is None:
                continue
            took = record.ended - record.began
            self._late = [*self._late, took] if took > LATE * self.planned + 0.05 else []
            if len(self._late) == ROUNDS and not self._said and self._exchange.topology.rank == 0:
                self._said = True
                log.warning("auto: %s", self.advice(self._late))

    def advice(self, late: Sequence[float]) -> str:
        """What to say of exchanges that took so many seconds."""
        s, took = self._situation, statistics.median(late)
        text = (
            f"the last {len(late)} exchanges took {took:.3g} s, where {self.planned:.2g} s "
            f"were planned for {s.link}: the link has become slower, or an island comes late"
        )
        # what the rate must be if the round trip is as it was
        rate = self._bits / (took - 2 * s.link.rtt)
        there = replace(s, link=Link(coarse(rate), s.link.rtt))
        now = plan_row(there, self._exchange.config)
        text += f". On {there.link} the method keeps {now.compute_utilisation:.1%} of the time"
        try:
            fits = chosen(there, self._exchange.host)
        except ValueError:
            return text
        if fits.row.compute_utilisation <= now.compute_utilisation:
            return f"{text} for compute, and no other setting keeps more"
        return (
            f"{text} for compute; {fits.row.name} ({fits.row.settings}) would keep "
            f"{fits.row.compute_utilisation:.1%}. The method stays as it is; to change it, resume "
            "with that one by name and a fresh exchange"
        )
