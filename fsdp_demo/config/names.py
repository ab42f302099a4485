"""Names that a configuration may have, and facts about them that need no tensor: number formats,
transforms, selections, appliers.

Each table is the one list of its names. The code behind a name is registered under it in a package
further up, and `tests/test_registries.py` keeps both sides equal:

* FORMATS, TRANSFORMS, SELECTIONS: `compression/formats.py`, `compression/transform.py`,
  `compression/selection.py`, `compression/threshold.py`.
* APPLIERS: `channels/apply.py`.
* SCHEDULES: `SyncSchedule` itself; what is not pure is decided by `exchange/on_change.py`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Format:
    """Sizes of a number format (`codec.value_dtype`).

    Attributes:
        bits: bits of one value: 1, 2, 4 or 8, or those of a dtype where there are no scales.
        group: number of consecutive values that share scales; 0: there are none, each value stands
            for itself.
        scales: number of scales of one group, each bf16.
    """

    bits: int
    group: int = 0
    scales: int = 1

    @property
    def exact(self) -> bool:
        """Whether each value is a float of its own: fit for parameters and for channels without
        error feedback. A vector of such values may be cut anywhere.
        """
        return not self.group

    @property
    def low(self) -> bool:
        """Whether a value has fewer than 8 bits; such values are never summed in their own code."""
        return self.bits < 8

    @property
    def has_zero(self) -> bool:
        """Whether a zero is sent as a zero. If not, it gets the level of its group."""
        return self.bits > 2

    def num_scales(self, cols: int) -> int:
        """Number of scales of a row of `cols` values."""
        return -(-cols // self.group) * self.scales if self.group else 0

    def num_bytes(self, rows: int, cols: int) -> int:
        """Bytes of `rows` rows of `cols` values each, with their scales."""
        return 2 * rows * self.num_scales(cols) + (rows * cols * self.bits + 7) // 8


@dataclass(frozen=True)
class Selection:
    """The way in which the elements of a block that are sent are chosen (`codec.select`).

    Attributes:
        by: "nobody": everything is sent; "data": by the values themselves, so that positions travel
            with them and messages cannot be summed on the way; "tensor": the same, over all blocks
            of a tensor; "step": by the number of the exchange, so that all replicas know the
            positions.
        alike: whether the positions are the same in every block.
    """

    by: str
    alike: bool = False


@dataclass(frozen=True)
class Acts:
    """The channels that a way of applying the mean is for (`applier.acts_as`).

    Attributes:
        sources: their sources; "state" is any state of the optimizer.
        whole: whether they must send everything, in an exact format and without an accumulator.
        pairs: whether the mean is that of two islands (`ExchangeConfig.pairs`).
    """

    sources: tuple[str, ...]
    whole: bool = False
    pairs: bool = False


SCHEDULES = {"every": True, "on_change": False}
"""The way in which a schedule finds the steps of its exchanges (`schedule.when`) -> whether they
follow from it alone. If not, a step that is due is a check, in which the islands decide: plans give
a range, and who leaves sends nothing early.
"""

FORMATS = {
    "fp32": Format(32),
    "bf16": Format(16),
    "int8": Format(8, 4096),
    "int4": Format(4, 256),
    "fp4_e3m0": Format(4, 4096),
    "fp4_e2m1": Format(4, 32),
    "2bit": Format(2, 256, scales=2),
    "1bit": Format(1, 4096),
}
TRANSFORMS = ("none", "dct")
SELECTIONS = {
    "dense": Selection("nobody"),
    "topk": Selection("data"),
    "threshold": Selection("tensor"),
    "random": Selection("step"),
    "stride": Selection("step", alike=True),
}
APPLIERS = {
    "gradient": Acts(("gradient",)),
    "outer_step": Acts(("delta",)),
    "replace": Acts(("parameter", "state"), whole=True),
    "pair_step": Acts(("delta",), whole=True, pairs=True),
    "replace_sent": Acts(("parameter",), pairs=True),
}
