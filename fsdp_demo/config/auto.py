"""`auto`: the configuration of a run whose method is chosen in its first steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .channel import Channel
from .parsing import nearest
from .parts import NEVER, SyncSchedule
from .schema import ExchangeConfig

AUTO = "auto"
MEASURED = 8
"""Steps that are measured. The first two of them are left out: they compile and warm up."""

KEPT = ("clip", "clip_scope", "norm_limit", "offload_outer_state", "own_tensors", "seed")
"""Settings that the chosen method takes over, where they were given: it has its own otherwise."""


@dataclass(frozen=True)
class AutoConfig(ExchangeConfig):
    """The configuration of a run until its method is chosen: one gradient channel that is never
    due.

    So the base optimizer takes no step meanwhile, and all replicas keep equal parameters and fresh
    optimizer states: the chosen method begins as it would have at the start. The gradients of
    these steps are lost.

    Attributes:
        target: share of the time that a run shall spend in training, not waiting.
        measured: steps until the choice, 3 or more.
        given: the settings of `KEPT` that were set; `changed` adds to them.

    >>> from fsdp_demo import preset
    >>> preset("auto", target=0.9).target
    0.9
    """

    target: float = 0.95
    measured: int = MEASURED
    given: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.target < 1:
            raise ValueError(f"target={self.target} is out of range: allowed is 0 < target < 1")
        if self.measured < 3:
            raise ValueError(f"measured={self.measured} is out of range: allowed is 3 or more")

    def changed(self, changes: Mapping[str, Any]) -> ExchangeConfig:
        """A copy with other values of `target`, `measured`, and of the settings that the chosen
        method takes over. Raises ValueError: a setting of a method, which is not chosen yet; a
        value that is not allowed.
        """
        options = (*KEPT, "target", "measured")
        for key in changes:
            if key not in options:
                raise ValueError(
                    f"auto has no setting {key!r}: it chooses the method and its settings; allowed "
                    f"are {', '.join(options)}{nearest(key, options, 0.5)}"
                )
        given = [name for name in KEPT if name in self.given or name in changes]
        return ExchangeConfig.from_dict({**self.to_dict(), **changes, "given": given})

    def taken_over(self, chosen: ExchangeConfig) -> ExchangeConfig:
        """`chosen` with the settings that were given here."""
        return dataclasses.replace(chosen, **{name: getattr(self, name) for name in self.given})

    def describe(self) -> str:
        """One line for a table."""
        return (
            f"auto: the method is chosen after {self.measured} steps, for {self.target:.0%} of the "
            "time in training"
        )


@dataclass(frozen=True)
class AutoChoice:
    """The method that `auto` took: figures it planned with, and why. Saved with the run.

    Attributes:
        reason: a sentence: what was measured, what was planned with, and why this method.
        link: the link, rounded, as `Link.parse` reads it.
        step_seconds: seconds of a step without an exchange, rounded.
        steps: steps of the run, or None where that was not known.
    """

    reason: str
    link: str
    step_seconds: float
    steps: int | None = None


def method_note(config: ExchangeConfig, choice: AutoChoice | None) -> dict[str, Any]:
    """The method of a run, and how `auto` chose it, as JSON: for saved states and other islands."""
    chosen = {} if choice is None else {"auto_choice": dataclasses.asdict(choice)}
    return {"config": config.to_dict(), **chosen}


def auto(**changes: Any) -> AutoConfig:
    """The configuration that `preset("auto")` gives."""
    channel = Channel("gradient", "gradient", SyncSchedule(NEVER))
    made = AutoConfig(AUTO, (channel,)).changed(changes)
    assert isinstance(made, AutoConfig)
    return made


def undecided(config: ExchangeConfig) -> bool:
    """Whether the method of a configuration is still to be chosen."""
    return config.preset == AUTO
