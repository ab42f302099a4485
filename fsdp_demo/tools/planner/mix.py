"""Islands of unlike machines: what each is, how many steps it takes in a round, and how much of the
speed of all is used. `--mix 8xA100@1Gbit,4x4090@200Mbit` of `fsdp-demo plan` describes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...config.local_steps import BY_SPEED, local_steps, round_of
from ...config.schema import ExchangeConfig
from ...net.link import Link
from ..doctor.findings import STEPS


@dataclass(frozen=True)
class Machine:
    """One island of a mix.

    Attributes:
        step_seconds: seconds of a step without any exchange. tokens: of such a step; only their
            ratios count.
        link: of this island. device: name in `situation.DEVICES`. ranks: of the island.
    """

    step_seconds: float
    tokens: float = 1.0
    link: Link = Link()
    device: str = "h100"
    ranks: int = 1


def own_steps(machines: Sequence[Machine], config: ExchangeConfig | None) -> tuple[list[int], int]:
    """The steps of each machine in a round, and the ticks of that round."""
    if config is None or not config.by_speed:
        return [1] * len(machines), 1
    ticks = round_of(config.channels)
    return local_steps(ticks, [m.step_seconds for m in machines]), ticks


def tick_seconds(machines: Sequence[Machine], config: ExchangeConfig | None) -> float:
    """Seconds of the run's clock for one tick, without an exchange: the slowest round sets them."""
    steps, ticks = own_steps(machines, config)
    return max(n * m.step_seconds for n, m in zip(steps, machines, strict=True)) / ticks


def tokens_taken(machines: Sequence[Machine], config: ExchangeConfig | None) -> float:
    """Tokens of a tick, over those of a tick in which all machines take a step."""
    steps, ticks = own_steps(machines, config)
    taken = sum(n * m.tokens for n, m in zip(steps, machines, strict=True)) / ticks
    return taken / sum(m.tokens for m in machines)


def speed_used(machines: Sequence[Machine], config: ExchangeConfig | None) -> float:
    """Tokens per second without an exchange, over those of all machines each for itself."""
    whole = sum(m.tokens for m in machines)
    taken = tokens_taken(machines, config) * whole / tick_seconds(machines, config)
    return taken / sum(m.tokens / m.step_seconds for m in machines)


def with_own_steps(machines: Sequence[Machine], config: ExchangeConfig) -> ExchangeConfig:
    """The configuration with steps by speed, where it has a period and a machine is so much slower
    that doctor finds it, too.
    """
    took = [m.step_seconds for m in machines]
    often = any(c.before_step or c.schedule.sync_every < 2 for c in config.channels)
    if often or max(took, default=1.0) < STEPS * min(took, default=1.0):
        return config
    return config.changed({"local_steps": BY_SPEED})
