"""Means over seeds and intervals of paired differences, and the tables that show them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from report import full_bytes, size

# The 95 % point of Student's t with 1, 2, ... degrees of freedom: two-sided, 90 % lie within.
T90 = [6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771]
T90 += [1.761, 1.753, 1.746, 1.740, 1.734, 1.729, 1.725, 1.721, 1.717, 1.714, 1.711, 1.708, 1.706]
T90 += [1.703, 1.701, 1.699, 1.697]

MOST = len(T90) + 1
"""Values of which an interval is known, at most."""

HEAD = ["method", "seeds", "loss", "minus reference", "90 % interval", "sent per island", "fewer"]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """(mean, half the width of the 90 % interval of the mean); of one value the half is NaN.

    Raises:
        ValueError: no values, or more than 31.
    """
    if not 1 <= len(values) <= MOST:
        raise ValueError(f"{len(values)} values: an interval is known for 1 to {MOST} seeds")
    mean = sum(values) / len(values)
    if len(values) == 1:
        return mean, math.nan
    variance = sum((v - mean) ** 2 for v in values) / (len(values) - 1)
    return mean, T90[len(values) - 2] * math.sqrt(variance / len(values))


@dataclass(frozen=True)
class Row:
    """One method over its seeds.

    Attributes:
        loss: mean over the seeds that ended; NaN if one of them diverged or failed.
        difference, half: mean of the paired differences to the reference, and half the width of
            its 90 % interval; NaN of the reference itself and of one seed.
        bytes_sent: per island, mean over seeds. ratio: of a bf16 ring all-reduce at every step to
            that; None where nothing was sent.
        failed: seeds without a loss. losses: by seed; NaN where there is none.
    """

    name: str
    group: str
    seeds: int
    loss: float
    difference: float
    half: float
    bytes_sent: float
    ratio: float | None
    failed: int
    losses: dict[int, float]

    def cells(self) -> list[str]:
        loss = "failed" if self.failed else f"{self.loss:.4f}"
        known = not math.isnan(self.difference)
        return [
            self.name,
            str(self.seeds) + (f", {self.failed} failed" if self.failed else ""),
            loss,
            f"{self.difference:+.4f}" if known else "-",
            f"+- {self.half:.4f}" if known and not math.isnan(self.half) else "-",
            size(self.bytes_sent) if self.bytes_sent else "-",
            f"{self.ratio:.4g} x" if self.ratio else "-",
        ]


def loss_of(result: dict[str, Any]) -> float:
    """The held-out loss of what all replicas hold at the end; NaN where there is none."""
    value = result.get("loss", {}).get("finished")
    return math.nan if value is None else float(value)


def summarise(
    name: str,
    group: str,
    found: dict[int, dict[str, Any]],
    reference: dict[int, dict[str, Any]],
) -> Row:
    """A method's row from its results and those of its group's reference, both by seed."""
    losses = [loss_of(r) for r in found.values()]
    ended = [r for r in found.values() if "error" not in r]
    pairs = [loss_of(found[s]) - loss_of(reference[s]) for s in found if s in reference]
    difference = half = math.nan
    if found is not reference and pairs:
        difference, half = interval(pairs)
    sent = sum(r["bytes_sent"] for r in ended) / len(ended) if ended else 0.0
    ratio = None
    if sent:
        r = ended[0]
        ratio = full_bytes(r["parameters"], r["setting"]["steps"], r["cell"]["replicas"]) / sent
    failed = sum(math.isnan(v) for v in losses)
    loss = sum(losses) / len(losses)
    by_seed = {seed: loss_of(r) for seed, r in found.items()}
    return Row(name, group, len(losses), loss, difference, half, sent, ratio, failed, by_seed)


def pareto(rows: Sequence[Row]) -> list[Row]:
    """The rows that no other beats in both bytes and loss, by bytes."""
    best, front = math.inf, []
    for row in sorted((r for r in rows if r.bytes_sent), key=lambda r: (r.bytes_sent, r.loss)):
        if row.loss < best:
            best = row.loss
            front.append(row)
    return front
