"""What a plan is made for: a model, islands, a link, a step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ..comm.link import Link
from ..config.fragments import layer_of
from .devices import Device, device
from .line import System
from .shapes import Tensors, numel


@dataclass(frozen=True)
class Situation:
    """What a plan is made for.

    Attributes:
        tensors: names and whole shapes of the trained parameters, ties once (`models.load`,
            `shapes.equal_layers`, or [(n, tuple(p.shape)) for n, p in model.named_parameters()]).
        islands: replicas. shards: FSDP2 shards (ranks) of each.
        link: of one island, shared by its ranks; of a site where several islands share an uplink.
        islands_per_uplink: islands of a site that share its link. What they send each other does
            not cross it, and is taken to need no time.
        step_seconds: of a step without any exchange between islands.
        device: name in `devices.DEVICES`; its times of compression count.
        compression: seconds per value that take the place of the device's, or None.
        memory_bytes: of one rank's device for state (parameters, gradients, inner optimizer,
            exchange, workspace), or None for no limit.
        tokens: of the run, all islands together, or None. tokens_per_step: of one island.
        steps: of the run, or None: then they follow from the tokens, if those are known.
        target: compute utilisation that is wanted.
        system: how line and machines behave.

    Raises:
        ValueError: one island, a step of no time, a target that cannot be.
    """

    tensors: Tensors = field(repr=False)
    islands: int
    link: Link = field(default_factory=Link)
    step_seconds: float = 1.0
    shards: int = 1
    device: str = "h100"
    compression: float | None = None
    memory_bytes: float | None = None
    tokens: float | None = None
    tokens_per_step: float | None = None
    target: float = 0.95
    system: System = field(default_factory=System)
    islands_per_uplink: int = 1
    steps: int | None = None

    def __post_init__(self) -> None:
        if not self.tensors:
            raise ValueError("a plan needs a model: give --model NAME or --params N")
        if self.islands < 2:
            raise ValueError(
                f"--islands {self.islands}: one island exchanges nothing, so there is nothing to "
                "plan: give 2 or more"
            )
        if not 1 <= self.islands_per_uplink < self.islands:
            raise ValueError(
                f"--islands-per-uplink {self.islands_per_uplink}: {self.islands} islands behind "
                f"uplinks need 1 to {self.islands - 1} behind each: with all behind one, no "
                "exchange crosses it"
            )
        if self.shards < 1:
            raise ValueError(f"--shards {self.shards}: an island has 1 shard or more")
        if not (math.isfinite(self.step_seconds) and self.step_seconds > 0):
            raise ValueError(
                f"--step-time {self.step_seconds}: a step takes more than 0 seconds, as in 0.8s"
            )
        if not 0 < self.target < 1:
            raise ValueError(
                f"--target-utilisation {self.target}: a share of the time between 0 and 1, as in "
                "0.9"
            )
        device(self.device)

    @property
    def parameters(self) -> int:
        """Of the model."""
        return numel(self.tensors)

    @property
    def length(self) -> float | None:
        """Optimizer steps of the run, where that is known."""
        if self.steps is None and self.tokens and self.tokens_per_step:
            return self.tokens / (self.tokens_per_step * self.islands)
        return self.steps

    @property
    def crossing(self) -> float:
        """Bytes that cross a link in an exchange, over those that one island sends.

        Of n islands of a site each sends (R - n) / (R - 1) of its bytes out of it: an exchange goes
        to all others alike. Of two unlike sites the fuller ones count.
        """
        n, others = self.islands_per_uplink, self.islands - 1
        return n * (self.islands - n) / others

    @property
    def line(self) -> Link:
        """One island's share of the link in an exchange of all islands at once."""
        rate = self.link.bits_per_second
        return self.link if rate is None else Link(rate / self.crossing, self.link.rtt)

    @property
    def processor(self) -> Device:
        """The device's times."""
        return device(self.device)


def check_shards(tensors: Tensors, shards: int) -> None:
    """Refuse a number of shards that does not divide the rows of the layers' matrices.

    FSDP2 would pad them, so that ranks hold unlike shares. Embeddings are left out: few
    vocabularies divide.

    Raises:
        ValueError: names the tensor, and the numbers that divide all.
    """
    rows = {n: s[0] for n, s in tensors if len(s) > 1 and layer_of(n) is not None}
    wrong = next((n for n, r in rows.items() if r % shards), None)
    if wrong is not None:
        common = math.gcd(*rows.values())
        fits = [str(n) for n in range(1, min(common, 64) + 1) if common % n == 0]
        raise ValueError(
            f"--shards {shards} does not divide the {rows[wrong]} rows of {wrong}: take one of "
            f"{', '.join(fits)}"
        )
