"""How the deltas of a run's rounds point: along those of the round before, and of one another.

With outer momentum mu, an outer rate and deltas of which each points along the one before by the
cosine rho, the steady gain of a round is rate (1 + mu / (1 - mu rho)).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity
from torch.nn.utils import parameters_to_vector

from fsdp_demo import ExchangeConfig
from study.gain import Capped
from study.together import Together

STATE = ("count", "successive", "islands", "_anchor", "_last")


def period_of(config: ExchangeConfig) -> int:
    """Steps of a round, where the parameters are the anchor right after each; else 0."""
    first = config.channels[0]
    whole = first.source == "delta" and first.fragments is None and len(config.channels) == 1
    return first.schedule.sync_every if whole and not first.schedule.delay else 0


class Rounds:
    """Cosines of the rounds of one run; each replica has one, that of replica 0 keeps the numbers.
    Under a cap on the gain each tells its own outer step, all alike.

    Attributes:
        successive: of the mean delta and the one of the round before; from the second round on.
        islands: of the deltas of two replicas, the mean over all pairs.
    """

    def __init__(
        self,
        i: int,
        together: Together,
        model: torch.nn.Module,
        config: ExchangeConfig,
        step: int = 0,
    ):
        self.i, self.together, self.model = i, together, model
        self.period, self.count = period_of(config), step
        self.successive: list[float] = []
        self.islands: list[float] = []
        applier = config.channels[0].applier
        self._cap = applier if isinstance(applier, Capped) else None
        self._anchor, self._last = self._flat(), torch.empty(0)

    def state_dict(self) -> dict[str, Any]:
        """What it goes on from after an interrupt."""
        return {name: getattr(self, name) for name in STATE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in STATE:
            setattr(self, name, state[name])

    def _flat(self) -> Tensor:
        return parameters_to_vector(self.model.parameters()).detach().clone()

    def stepped(self) -> None:
        """The inner optimizer has made a step, and nothing was exchanged yet."""
        self.count += 1
        if not self.period or self.count % self.period:
            return
        self.together.vectors[self.i] = self._anchor - self._flat()
        self.together.meet()
        if self.i == 0 or self._cap:
            self._note(self.together.vectors)
        self.together.meet()

    def exchanged(self) -> None:
        """The step is over, its exchange too."""
        if self.period and self.count % self.period == 0:
            self._anchor = self._flat()

    def _note(self, deltas: Tensor) -> None:
        mean, count = deltas.mean(0), len(deltas)
        if self._last.numel():
            self.successive.append(float(cosine_similarity(mean, self._last, dim=0)))
            if self._cap:
                self._cap.measured.append(self.successive[-1])
        if count > 1:
            unit = deltas / deltas.norm(dim=1, keepdim=True)
            pairs = float(unit.sum(0).square().sum()) - count
            self.islands.append(pairs / (count * (count - 1)))
        self._last = mean
