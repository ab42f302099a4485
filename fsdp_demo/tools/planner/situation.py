"""The situation that a plan is made for: model, islands, link, step, and devices of the ranks.

The times of a CPU are measured (`benchmarks/planner_times.py`; of a message:
`slow_link.py`, demo without a limit); those of GPUs are arithmetic, from bytes that are read and
written over the memory's rate, and say so, and how far they were off on an H100. A user's own come
with `--compression-time`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from ...config.fragments import layer_of
from ...config.parsing import nearest
from ...config.schema import ExchangeConfig
from ...net.link import Link
from . import mix
from .line import System
from .mix import Machine
from .models import Tensors, numel


@dataclass(frozen=True)
class Device:
    """The processor of one rank, with its times of compression.

    Attributes:
        dense, sparse, transformed: seconds per value of the rank's shards in an exchange: of what
            is sent whole, of what is selected from, and of what is selected from behind a
            transform; reading, coding, decoding and applying together.
        message: seconds of a message, whatever its size.
        per_byte: seconds of the host per byte that a rank sends and receives at once: copies,
            checksums, sums, the kernel.
        flops: dense bf16, per second; 0 if unknown. mfu: share of them that training reaches, a
            guess.
        memory: bytes; 0 if unknown.
        source: where the times are from.
    """

    dense: float
    sparse: float
    transformed: float
    message: float
    per_byte: float
    flops: float
    mfu: float
    memory: float
    source: str


PEAK = {
    "B200": 2250,
    "GH200": 989,
    "H200": 989,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "A100": 312,
    "L40S": 362,
    "L40": 181,
    "L4": 121,
    "A10G": 70,
    "A10": 125,
    "RTX 6000 Ada": 364,
    "RTX 4090": 165,
    "RTX 3090": 71,
}
"""Dense bf16 with fp32 sums, 1e12 per second; the first name found in the GPU's name counts.
Source: NVIDIA's data sheets of each, and for Ada and Ampere GeForce the architecture white papers'
appendices.
"""

PER_BYTE = 2.5e-9
"""Seconds of a host's core per byte that is sent, and received at once: copies, checksums, sums in
fp32, the kernel (planner_times.py, as for the CPU below)."""

_ARITHMETIC = (
    "arithmetic: bytes moved over the memory's rate; sparse presets took 3 to 7 times as long on "
    "an H100 (benchmarks/results/compute.md)"
)


def _gpu(name: str, terabytes: float, gigabytes: float) -> Device:
    """A GPU of so many TB/s and GB (the makers' data sheets).

    At 0.8 of the memory's rate, in plain torch, by our count: 28 B per value sent whole, 40 B where
    something is selected, 68 B behind a transform. A message takes 1500 launches of 4 microseconds.
    """
    rate = 0.8e12 * terabytes
    return Device(
        28 / rate, 40 / rate, 68 / rate, 6e-3, PER_BYTE, 1e12 * PEAK[name], 0.4, 1e9 * gigabytes,
        _ARITHMETIC,
    )  # fmt: skip


DEVICES: dict[str, Device] = {
    "cpu": Device(
        5.4e-9, 7.4e-9, 13.4e-9, 5e-3, PER_BYTE, 90e9, 0.5, 0.0,
        "processor time of one of two shared cores of an AMD EPYC, 2026-11-23 (planner_times.py)",
    ),
    "b200": _gpu("B200", 8.0, 180),
    "gh200": _gpu("GH200", 4.0, 96),
    "h200": _gpu("H200", 4.8, 141),
    "h100": _gpu("H100", 3.35, 80),
    "a100": _gpu("A100", 2.0, 80),
    "l40s": _gpu("L40S", 0.86, 48),
    "l4": _gpu("L4", 0.3, 24),
    "a10g": _gpu("A10G", 0.6, 24),
    "rtx-4090": _gpu("RTX 4090", 1.0, 24),
    "rtx-3090": _gpu("RTX 3090", 0.94, 24),
}  # fmt: skip
"""Name -> device."""


def device(name: str) -> Device:
    """The device of that name. Raises ValueError: it is not in the table; offers the nearest."""
    found = DEVICES.get(name.lower())
    if found is None:
        raise ValueError(
            f"--device {name!r} is not known: allowed are {', '.join(DEVICES)}"
            f"{nearest(name.lower(), list(DEVICES))}"
        )
    return found


def guessed_step(parameters: int, tokens: float, ranks: int, of: Device) -> float:
    """Seconds of a step: 6 FLOPs per parameter and token at a guessed MFU, no attention."""
    return 6.0 * parameters * tokens / (ranks * of.flops * of.mfu)


# ---- the situation -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Situation:
    """Model, islands, link, step and devices that a plan is made for.

    Attributes:
        tensors: names and whole shapes of the trained parameters, ties once (`models.load`,
            `models.equal_layers`, or [(n, tuple(p.shape)) for n, p in model.named_parameters()]).
        islands: number of islands. shards: FSDP2 shards (ranks) of each.
        link: link of one island, shared by its ranks; or of a site, where several islands share an
            uplink.
        step_seconds: seconds of a step without any exchange between islands.
        device: name in `DEVICES`; its times of compression count.
        compression: seconds of compression per value, in place of the device's; None: those.
        memory_bytes: bytes of one rank's device for state (parameters, gradients, inner optimizer,
            exchange, workspace), or None for no limit.
        tokens: tokens of the run, all islands together, or None.
        tokens_per_step: tokens of one island's step, or None.
        target: compute utilisation that is wanted.
        system: how line and machines behave.
        islands_per_uplink: number of islands of a site that share its link. What they send each
            other does not cross it, and is taken to need no time.
        steps: steps of the run; None: they follow from the tokens, if those are known.
        machines: unlike islands, one for each; `link` is that of the slowest line then, and
            `step_seconds` that of the fastest machine. Empty: all islands are alike.
        model, step_source: name of the model, and source of `step_seconds` in words.

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
    machines: tuple[Machine, ...] = ()
    model: str = ""
    step_source: str = ""

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
        if self.machines and len(self.machines) != self.islands:
            raise ValueError(f"{len(self.machines)} machines for {self.islands} islands")

    def tick_seconds(self, config: ExchangeConfig | None) -> float:
        """Seconds of one tick of the run's clock without an exchange; None is HSDP."""
        return mix.tick_seconds(self.machines, config) if self.machines else self.step_seconds

    def each(self, config: ExchangeConfig | None) -> list[Situation]:
        """The situation as each machine of a mix has it, with a tick as its step."""
        tick, alike = self.tick_seconds(config), replace(self, machines=())
        unlike = [
            replace(alike, link=m.link, device=m.device, step_seconds=tick) for m in self.machines
        ]
        return unlike or [self]

    @property
    def parameters(self) -> int:
        """The number of parameters of the model."""
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
        """The device with its times."""
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
