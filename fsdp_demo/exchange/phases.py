"""The work around a step that is not the channels': what is done once ahead of the first step, the
snapshot for a joining island, the end of an island that was told to end, and what `auto` and a
trainer want at the end of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..errors import Stopped
from . import snapshot
from .first_step import FirstStep
from .leaving import Departures
from .runtime import StepRuntime


class Phases:
    """The `StepPhases` of an exchange.

    Args:
        owner: the `Exchange`, which lives as long as the engine's hooks lead here.
        departures: of this rank.
        model, told: with which a snapshot of this island is made (`snapshot.hand`).

    Attributes:
        at_end: called at the end of each step, unless None.
        tells: gives what a trainer tells the islands that join (`Exchange.serve_trainer`).
        raises_stopped: a stop is raised as `Stopped`.
    """

    def __init__(
        self,
        owner: object,
        departures: Departures,
        model: torch.nn.Module | None,
        told: Mapping[str, Any],
    ):
        self._owner, self._departures, self._model, self._told = owner, departures, model, told
        self.at_end: Callable[[], None] | None = None
        self.tells: Callable[[], dict[str, Any]] = dict
        self.raises_stopped = True

    def begin(self, runtime: StepRuntime, first: FirstStep) -> None:
        """Set the step that this is about, and the work ahead of its first one."""
        self._runtime, self._first = runtime, first

    def before_step(self) -> None:
        """As `StepPhases.before_step`."""
        if (work := self._first.next) is not None:
            work()

    def goes_on(self) -> bool:
        """As `StepPhases.goes_on`."""
        return self._departures.goes_on(self._runtime)

    def hand_snapshot(self) -> None:
        """As `StepPhases.hand_snapshot`."""
        snapshot.hand(self._runtime, self._model, self._told, self.tells)

    def end_of_step(self) -> None:
        """As `StepPhases.end_of_step`."""
        stopped = self._runtime.stopped
        if self.at_end is not None and not stopped:
            self.at_end()
        if stopped and self.raises_stopped:
            raise Stopped(f"stopped after step {self._runtime.step} on request")
