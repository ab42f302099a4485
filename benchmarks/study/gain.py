"""A cap on the outer gain instead of a rise over a number of rounds.

Where each mean delta points along the one before by the cosine rho, the steady step of a round is
rate (1 + momentum / (1 - momentum rho)). The largest momentum that keeps it at a gain g is
c / (1 + c rho) with c = g / rate - 1. It needs no length of the run.

This is a trial of the study: `Rounds` measures rho between replicas that share a process, on the
dense mean delta. The library has no such rule.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from fsdp_demo import Applier, ExchangeConfig

KEEP = 0.8
"""Weight of the past in the running mean of rho."""


@dataclass(frozen=True)
class Capped(Applier):
    """An outer step whose momentum is `momentum` or what the cap allows.

    Attributes:
        gain: the largest steady step of a round, in mean deltas.
        measured: rho of each round from the second one on, written before the round's exchange.
    """

    gain: float = 1.0
    measured: list[float] = field(default_factory=list, compare=False)

    def momentum_in(self, round: int) -> float:
        """The momentum of round 1, 2, ...; the first has no momentum, since nothing is measured."""
        if not self.measured:
            return 0.0
        rho = self.measured[0]
        for seen in self.measured[1:]:
            rho = KEEP * rho + (1 - KEEP) * seen
        return allowed(self.momentum, self.lr, self.gain, rho)


class TrialConfig(ExchangeConfig):
    """A configuration whose applier is a trial of the study. The library builds none from plain
    data, which it does for a digest: that without the trial is as good among replicas of one run.
    """

    def digest(self) -> int:
        (channel,) = self.channels
        shared = {f.name: getattr(channel.applier, f.name) for f in dataclasses.fields(Applier)}
        plain = dataclasses.replace(channel, applier=Applier(**shared))
        return ExchangeConfig(**{**vars(self), "channels": (plain,)}).digest()


def allowed(momentum: float, lr: float, gain: float, rho: float) -> float:
    """`momentum`, or the largest one below it that keeps the steady step at `gain`."""
    c = max(gain / lr - 1.0, 0.0)
    # a negative rho leaves more room than any momentum below 1 takes
    return min(momentum, c / (1.0 + c * rho)) if 1.0 + c * rho > 0 else momentum


def capped(config: ExchangeConfig, gain: float) -> ExchangeConfig:
    """A configuration of one channel with an outer step, under a cap."""
    (channel,) = config.channels
    plain = {f.name: getattr(channel.applier, f.name) for f in dataclasses.fields(channel.applier)}
    applier = Capped(**{**plain, "momentum_warmup": 0}, gain=gain)
    channels = (dataclasses.replace(channel, applier=applier),)
    return TrialConfig(**{**vars(config), "channels": channels})
