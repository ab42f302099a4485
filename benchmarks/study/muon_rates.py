"""The cells of the table `muon`: rates of what is no matrix beside Muon, longer rounds in 1 bit,
values at places that all know.

The reference of each group is the all-reduce of AdamW as tuned in `length.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from study.cells import Cell, Setting
from study.length import LARGE, LONG, at, phase, tuned
from study.methods import FEEDBACK, MUON, STEPS, Method, full, muloco, sign_loco

AT = 4e-3
"""The rate of AdamW alone that is best for the same tensors."""


def beside(cell: Cell, adamw_lr: float) -> Cell:
    """A cell with Muon inside, and this rate of embeddings, head and norms."""
    return dataclasses.replace(
        cell, name=f"{cell.name} adamw {adamw_lr:g}", inner={"adamw_lr": adamw_lr}
    )


def reduced(adamw_lr: float | None = None, lr: float = 4.5e-2) -> Cell:
    """The all-reduce of Muon."""
    cell = full(f" muon lr {lr:g}", lr, **MUON)
    return cell if adamw_lr is None else beside(cell, adamw_lr)


def one_bit(
    period: int, adamw_lr: float | None = None, lr: float = 3.2e-2, beta: float = 0.9
) -> Cell:
    """`muloco` in 1 bit, with outer momentum 0.5 from the start."""
    end = f" 1 bit beta {beta:g} lr {lr:g}"
    cell = muloco(end, lr, period=period, value_dtype="1bit", beta=beta)
    return cell if adamw_lr is None else beside(cell, adamw_lr)


def places(period: int, adamw_lr: float, lr: float = 3.2e-2, **changes: Any) -> Cell:
    """`muloco` in 1 bit of 683 of 4096 values, at positions that a seed chooses; what was not sent
    stays, whole, and the outer step is SGD's. One value in six lands in a round.
    """
    rule: dict[str, Any] = {
        "codec.select": "random",
        "codec.topk": 683,
        "value_dtype": "1bit",
        "beta": 1.0,
    }
    rule |= {"applier.lr": 1.5, "momentum": 0.0, **changes}
    told = "".join(f" {k} {v:g}" for k, v in changes.items())
    return beside(muloco(f" seeded k=683{told} lr {lr:g}", lr, period=period, **rule), adamw_lr)


def signs(adamw_lr: float, lr: float = 4.5e-2) -> Cell:
    """`sign_loco` with Muon inside: the signs of the largest 90 of 4096 values."""
    return beside(sign_loco(f" muon lr {lr:g}", lr, **FEEDBACK, **MUON), adamw_lr)


def changed(cell: Cell, end: str, **changes: Any) -> Cell:
    """A cell with other settings; the end of its name says which."""
    return dataclasses.replace(cell, name=f"{cell.name} {end}", changes={**cell.changes, **changes})


def second(period: int, adamw_lr: float, steps: int = STEPS, lr: float = 3.2e-2) -> Cell:
    """`one_bit` that forgets nothing and has no outer momentum after a quarter of the run."""
    late = phase(steps // 4, value_dtype="1bit")
    return changed(one_bit(period, adamw_lr, lr), "switch 0.25", **{"delta.later": [late]})


def then_places(period: int, rate: float, steps: int = STEPS) -> Cell:
    """`one_bit`, and known places after a quarter of the run. A selection must stay what it is, so
    all places are known ones before, too.
    """
    late = phase(steps // 4, select="random", topk=683, value_dtype="1bit")
    rule = {"codec.select": "random", "codec.topk": 4096, "delta.later": [late]}
    return changed(one_bit(period, rate, rate, 0.6), "then seeded k=683", **rule)


def rounds(period: int, rate: float) -> Cell:
    """`muloco` in 2 bits at its best outer step, AdamW beside it at Muon's rate."""
    return beside(muloco(f" lr {rate:g}", rate, period=period), rate)


def in_turn(period: int, rate: float) -> Cell:
    """`one_bit` by fragments of a layer each, one after the other within a round."""
    layers = {"delta.fragments": {"layers": 1}}
    return changed(one_bit(period, rate, rate), "layers in turn", **layers)


def with_replicas(cells: list[Cell], replicas: int) -> list[Cell]:
    """Cells of so many replicas."""
    return [dataclasses.replace(c, name=f"{c.name} R={replicas}", replicas=replicas) for c in cells]


def length(cells: list[Cell], steps: int, warmup: int, model: str = "") -> list[Cell]:
    """Cells with the schedule of a run of so many steps."""
    setting = Setting(steps=steps, warmup=warmup)
    setting = dataclasses.replace(setting, model=model) if model else setting
    end = "" if steps == STEPS else f" {steps} steps"
    return [dataclasses.replace(c, name=c.name + end, setting=setting) for c in cells]


def short() -> tuple[Method, ...]:
    """480 steps: rates, warm-ups and outer steps of each form, AdamW at Muon's rate."""

    def grid(make: Any, rates: tuple[float, ...], *outer: dict[str, float]) -> list[Cell]:
        middle = make(rates[1])
        cells = [
            *(make(lr) for lr in rates),
            *(changed(middle, " ".join(f"{k} {v:g}" for k, v in c.items()), **c) for c in outer),
        ]
        return [*(at(c, STEPS, 24) for c in cells), at(middle, STEPS, 48)]

    outer = ({"applier.lr": 1.0}, {"applier.lr": 0.6}, {"momentum": 0.7})
    low, high = (2.26e-2, 3.2e-2, 4.5e-2), (3.2e-2, 4.5e-2, 6.4e-2)
    return (
        tuned("full muon", grid(lambda lr: reduced(lr, lr), (*high, 9e-2, 2.26e-2))),
        tuned("muloco H=5 1 bit", grid(lambda lr: one_bit(5, lr, lr, 0.6), high, *outer)),
        tuned("muloco H=20 1 bit", grid(lambda lr: one_bit(20, lr, lr), (*low, 6.4e-2), *outer)),
        tuned("muloco H=20", grid(lambda lr: rounds(20, lr), (*low, 6.4e-2), outer[0])),
    )


BELOW: dict[str, list[Cell]] = {
    "480 steps": [
        at(full("", 2.8e-3), STEPS, 48),
        *length(
            [
                *(reduced(rate) for rate in (None, 2e-3, AT, 8e-3, 1.6e-2, 4.5e-2, 9e-2)),
                reduced(AT, 3.2e-2),
                *(one_bit(5, rate, 4.5e-2, 0.6) for rate in (None, AT, 8e-3, 1.6e-2, 4.5e-2, 9e-2)),
                *(one_bit(20, rate) for rate in (None, AT, 8e-3, 1.6e-2, 3.2e-2)),
                *(one_bit(20, AT, lr) for lr in (2.24e-2, 4.5e-2)),
                second(20, 8e-3),
                in_turn(20, 3.2e-2),
                *(one_bit(h, AT) for h in (12, 24, 48, 96)),
                one_bit(24, 8e-3),
                *(one_bit(48, rate) for rate in (8e-3, 3.2e-2)),
                *(one_bit(h, 3.2e-2) for h in (12, 24, 96)),
                *(rounds(h, 3.2e-2) for h in (5, 24, 96)),
            ],
            STEPS,
            24,
        ),
    ],
    "known places, 480 steps": [
        at(full("", 2.8e-3), STEPS, 48),
        *length(
            [
                reduced(4.5e-2, 4.5e-2),
                one_bit(20, 8e-3),
                places(5, 8e-3),
                places(5, 8e-3, **{"applier.lr": 0.8, "momentum": 0.5}),
                places(20, 8e-3),
                *(signs(rate) for rate in (8e-3, 4.5e-2)),
                one_bit(12, 3.2e-2),
                then_places(5, 3.2e-2),
            ],
            STEPS,
            24,
        ),
    ],
    "1,920 steps": [
        at(full("", AT), LONG, 96),
        *length(
            [
                *(reduced(rate, 3.2e-2) for rate in (None, 8e-3, 3.2e-2)),
                *(one_bit(5, rate, 3.2e-2, 0.6) for rate in (None, 3.2e-2)),
                *(one_bit(24, rate) for rate in (None, AT, 8e-3, 1.6e-2, 3.2e-2)),
                *(one_bit(48, rate) for rate in (8e-3, 3.2e-2)),
                *(one_bit(h, 3.2e-2) for h in (96, 120)),
                reduced(4.5e-2, 4.5e-2),
                one_bit(24, 4.5e-2, 4.5e-2),
                one_bit(120, 3.2e-2, beta=1.0),
                one_bit(120, 8e-3),
                rounds(24, 3.2e-2),
            ],
            LONG,
            96,
        ),
    ],
    **{
        f"R = {r}, 480 steps": with_replicas(
            [
                at(full("", 2.8e-3), STEPS, 48),
                *length([reduced(4.5e-2), one_bit(5, 4.5e-2, 4.5e-2, 0.6)], STEPS, 24),
                *length([one_bit(20, 3.2e-2)], STEPS, 24),
            ],
            r,
        )
        for r in (2, 8, 16)
    },
    **{
        f"3.3 M, {steps:,} steps": [
            at(full("", 1.4e-3), steps, steps // 20, model="small"),
            *length(
                [reduced(2.26e-2, 2.26e-2), one_bit(24, 2.26e-2, 2.26e-2)],
                steps,
                steps // 20,
                "small",
            ),
        ]
        for steps in (LARGE // 4, LARGE)
    },
}
