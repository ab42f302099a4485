"""The tables of the study, as data.

A table is groups of cells. The first cell of a group is its reference: differences are paired with
it, seed by seed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from study.cells import Cell, Setting
from study.front import FRONT
from study.length import fewer_bytes, large, medium, other_replicas, others, seeded, short
from study.literature import LITERATURE, LOW_RANK
from study.methods import (
    METHODS,
    MUON,
    Method,
    demo,
    diloco,
    full,
    muloco,
    sign_loco,
    sign_muloco,
    with_feedback,
)
from study.muon_rates import BELOW
from study.muon_rates import short as beside_muon
from study.questions import QUESTIONS
from study.robust import ROBUST, winners


@dataclass(frozen=True)
class Table:
    """What it asks, its groups (label -> cells, the reference first), methods of the first group
    that are tuned, the number of seeds, and the setting of cells without their own.
    """

    question: str
    groups: dict[str, list[Cell]] = field(default_factory=dict)
    methods: tuple[Method, ...] = ()
    seeds: int = 8
    setting: Setting = Setting()

    def at(self, cell: Cell, changes: dict[str, Any]) -> Setting:
        """What a cell runs at: its own setting or the table's, with changes of the command."""
        return dataclasses.replace(cell.setting or self.setting, **changes)


ALONE = Cell("one replica alone", "full", replicas=1)

SIZES = {
    "0.49 M": ("study-small", 480),
    "0.92 M": ("study", 898),
    "3.3 M": ("small", 3196),
    "9.9 M": ("study-large", 9664),
}
"""Parameters -> model, steps: four tokens per parameter over four replicas."""


PARTS = {1: "", 2: " half as long", 4: " a quarter as long"}
"""Shorter runs for the larger models: the steps of `SIZES` over this, and what names say of it."""


def at_size(cells: list[Cell], size: str, part: int = 1) -> list[Cell]:
    """Cells as they train a model of that size, for `1 / part` of its steps."""
    model, steps = SIZES[size]
    size, steps = size + PARTS[part], steps // part
    setting = Setting(model=model, steps=steps, warmup=steps // 20)
    return [dataclasses.replace(c, name=f"{c.name} {size}", setting=setting) for c in cells]


SCALES = {"0.49 M": 1.0, "0.92 M": 1.0, "3.3 M": 2**-0.5, "9.9 M": 2.5**-0.5}
"""Larger models take lower rates: by the root of the width over 128."""


def sized(size: str) -> list[Cell]:
    """The winners at that size."""
    steps, scale = SIZES[size][1], SCALES[size]
    # these ran before the grid, which chose a higher rate and a feedback that decays faster
    often = muloco(" 1 bit", 3.2e-2 * scale, period=5, value_dtype="1bit")
    others = [c for c in winners(scale=scale, steps=steps) if c.name != "sign_muloco"]
    return at_size([*others, often], size)


def as_tuned(size: str) -> list[Cell]:
    """Muon's all-reduce and `sign_muloco`, each as its grid chose."""
    scale, lr = SCALES[size], 4.5e-2 * SCALES[size]
    tried = [full(lr=2e-3 * scale), full(" muon", lr, **MUON), sign_muloco(lr=lr)]
    return at_size(tried, size)


def quartered(size: str) -> list[Cell]:
    """The all-reduce, DiLoCo and ours after one token per parameter."""
    steps, scale = SIZES[size][1] // 4, SCALES[size]
    tried = [full(lr=2e-3 * scale), diloco(lr=2e-3 * scale, steps=steps)]
    return at_size([*tried, sign_loco(lr=8e-3 * scale, steps=steps)], size, part=4)


def rates(size: str) -> list[Cell]:
    """As many rates of `full` and of ours, around those of `sized`."""
    steps = SIZES[size][1]
    tried = [full(), *(full(f" lr {lr:g}", lr) for lr in (1.4e-3, 2.8e-3))]
    tried += [sign_loco(steps=steps)]
    tried += [sign_loco(f" lr {lr:g}", lr, steps=steps) for lr in (4e-3, 5.6e-3)]
    return at_size(tried, size)


def nearer(size: str) -> list[Cell]:
    """What may close the gap of ours to `full` where the model is larger: one change each, at the
    better rate of `rates`; feedback at a rate of its own.
    """
    steps, lr = SIZES[size][1], 5.6e-3
    tried = [
        full(),
        sign_loco(f" lr {lr:g}", lr, steps=steps),
        *(sign_loco(f" lr {lr:g}", lr, period=h, steps=steps) for h in (2, 3)),
        sign_loco(f" lr {lr:g}", lr, topk=180, steps=steps),
        sign_loco(f" int4 lr {lr:g}", lr, steps=steps, value_dtype="int4"),
        sign_loco(f" outer rate 1 lr {lr:g}", lr, steps=steps, **{"applier.lr": 1.0}),
        with_feedback(steps=steps),
        # deltas of two islands agree less the longer a run is: rounds that let them agree more
        sign_loco(f" lr {lr:g}", lr, period=10, topk=180, steps=steps),
        with_feedback(period=10, topk=180, steps=steps),
    ]
    return at_size(tried, size)


def transformed(size: str, rates: Sequence[float], plain: Sequence[float]) -> list[Cell]:
    """DeMo with its transform at `rates` and without at those of `plain`: fewer weights move
    without it, so each can move further.
    """
    scale = SCALES[size]
    return [
        demo(f" DCT on {where} lr {lr * scale:.2g}", lr * scale, transform=where == "all")
        for where, lrs in (("all", rates), ("nothing", plain))
        for lr in lrs
    ]


def remembering(size: str) -> list[Cell]:
    """DeMo with the published memory, and with a shorter one."""
    lr = 1.4e-3 * SCALES[size]
    short = demo(f" DCT on all beta 0.95 lr {lr:.2g}", lr, beta=0.95)
    return [*transformed(size, (1.4e-3,), ()), short]


TABLES: dict[str, Table] = {
    "main": Table(
        "every preset, published and tuned", {"": [METHODS[0].published, ALONE]}, METHODS
    ),
    "front": Table("loss over bytes", {"": FRONT}),
    "robust": Table("where the winners hold", ROBUST, seeds=3),
    "text": Table("does the order hold on another text (--data)", {"": winners()}, seeds=1),
    "length": Table("does a second phase close the gap of long runs", methods=medium(), seeds=4),
    "length_short": Table("the same at 480 steps", methods=short(), seeds=4),
    "length_large": Table("the same at 3.3 M", large(), seeds=2),
    "length_others": Table(
        "a second phase for other methods and other numbers of replicas, and for fewer bytes",
        {
            **others(),
            **other_replicas(),
            "fewer bytes": fewer_bytes(),
            "positions by a seed": seeded(),
        },
        seeds=1,
    ),
    "muon": Table("rates beside Muon, and long rounds in 1 bit", BELOW, seeds=2),
    "muon_short": Table("each form tuned at 480 steps", methods=beside_muon(), seeds=4),
    "questions": Table("questions with a number each", QUESTIONS),
    "literature": Table("forms of other papers, at equal bytes", LITERATURE, seeds=2),
    "low_rank": Table("moments of low rank inside", LOW_RANK, seeds=2),
    "precision": Table(
        "does bf16 change the order",
        {p: winners(f" {p}", setting=Setting(precision=p)) for p in ("bf16", "fp32")},
        seeds=1,
    ),
    "size": Table(
        "does the gap shrink with size",
        {
            **{size: sized(size) for size in SIZES},
            **{f"{size}{PARTS[4]}": quartered(size) for size in SIZES},
            "rates at 0.92 M": rates("0.92 M"),
            "changes at 0.92 M": nearer("0.92 M"),
            **{f"sign_muloco at {size}": as_tuned(size) for size in ("0.92 M", "3.3 M")},
            "transform at 0.92 M": at_size(
                [
                    full(),
                    *transformed(
                        "0.92 M", (7e-4, 1e-3, 1.4e-3, 2e-3), (4e-3, 5.6e-3, 8e-3, 1.1e-2)
                    ),
                ],
                "0.92 M",
            ),
            "memory of demo at 0.92 M": at_size([full(), *remembering("0.92 M")], "0.92 M"),
            "memory of demo at 3.3 M, half as long": at_size(remembering("3.3 M"), "3.3 M", part=2),
            "transform at 3.3 M, half as long": at_size(
                transformed("3.3 M", (1.4e-3,), (5.6e-3,)), "3.3 M", part=2
            ),
        },
        seeds=2,
    ),
}
