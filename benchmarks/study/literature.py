"""The cells of the table `literature`: a slow momentum inside, a damped one outside, an own share
that takes the outer step, a selection over whole tensors; each at the bytes of the method without.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from study.cells import Cell
from study.length import LARGE, at, switched
from study.methods import ADAMW, H, demo, diloco, sign_loco, sparse_loco
from study.transforms import OVER_ALL

SLOW = ((0.95, 0.9), (0.99, 0.7))
"""b1 and nu of QHAdamW that are tried (`fsdp_demo/hosts/qhadamw.py`)."""
LONG = 0.999
"""b2 of all of them: with the usual 0.95 m outlives v, and steps grow where gradients shrink."""


def slow(cell: Cell, b1: float, nu: float) -> Cell:
    """A cell with QHAdamW inside."""
    return dataclasses.replace(
        cell,
        name=f"{cell.name} qh {b1:g} {nu:g}",
        changes={**cell.changes, "inner_optimizer": "qhadamw"},
        inner={"betas": [b1, LONG], "nu": nu},
    )


def tried(cell: Cell) -> list[Cell]:
    """A method with AdamW, with AdamW of the b2 of the others, and with each of `SLOW`."""
    long = dataclasses.replace(cell, name=f"{cell.name} b2 {LONG}", inner={"betas": [0.9, LONG]})
    return [cell, long, *(slow(cell, *numbers) for numbers in SLOW)]


def gpa(c: float, a: float) -> Cell:
    """DiLoCo with GPA's outer step: its x is averaged by `a` in a round, its y has `c` of x."""
    rule: dict[str, Any] = {"lr": 1 - c, "momentum": a, "momentum_warmup": 0}
    rule["applier.dampening"] = 1 - c * (1 - a) / ((1 - c) * a)
    return diloco(f" damped {c:g} {a:g}", **rule)


def late() -> list[Cell]:
    """DiLoCo in time, and one period late in each of the forms."""
    forms: dict[str, dict[str, Any]] = {
        "late": {"schedule.delay": H},
        "late share": {"schedule.delay": H, "applier.own_share": 0.25},
        "eager": {"eager": 4},
    }
    return [diloco(), *(diloco(f" {name}", **changes) for name, changes in forms.items())]


def large(steps: int = LARGE // 4) -> list[Cell]:
    """3.3 M, ours with its second phase."""
    cell = at(switched(0.25, steps, 4e-3), steps, steps // 20, model="small")
    return [cell, slow(cell, *SLOW[0])]


def low(rank: int, end: str = "", **inner: Any) -> Cell:
    """DES-LOC with moments of low rank inside (LoRDO)."""
    rule = {"period": H, "rank": rank}
    return Cell(f"desloc H={H} rank {rank}{end}", "desloc", rule, 1.4e-3, inner=inner)


LOW_RANK: dict[str, list[Cell]] = {
    "desloc": [
        Cell(f"desloc H={H}", "desloc", {"period": H}, 1.4e-3),
        low(32),
        low(32, " nu 1", nu=1.0),
        low(32, " feedback", error_feedback=True),
        low(8),
    ]
}


def pairs() -> list[Cell]:
    """Rounds of all islands and rounds in pairs, at the bytes of a dense round every 20 steps, and
    at those of 1 % of the parameters in every step. The first of each part is of all islands.
    """

    def saps(topk: int, lr: float) -> Cell:
        return Cell(f"saps k={topk} lr {lr:g}", "saps", {"topk": topk}, lr)

    def noloco(end: str = "", lr: float = 2e-3, period: int = 13, **changes: Any) -> Cell:
        rule = {"period": period, **changes}
        return Cell(f"noloco H={period}{end} lr {lr:g}", "noloco", rule, lr)

    return [
        diloco(),
        *(Cell(f"local_sgd H={h}", "local_sgd", {"period": h}, 1.4e-3) for h in (H, 132)),
        *(noloco(lr=lr) for lr in (1e-3, 1.4e-3, 2e-3, 2.8e-3)),
        noloco(" outer 1", **{"applier.lr": 1.0, "momentum": 0.0}),
        noloco(period=H),
        *(saps(topk, lr) for topk in (307, 41) for lr in (1.4e-3, 2.8e-3)),
    ]


def over_tensors(cell: Cell, topk: int, every: int, select: str = "threshold") -> Cell:
    """A sparse method with thresholds; `topk` makes the bytes no more than the cell's."""
    changes = {"topk": topk, "codec.select": select, "codec.threshold_every": every}
    name = f"{cell.name} {select.replace('_', ' ')} {every}"
    return dataclasses.replace(cell, name=name, changes={**cell.changes, **changes})


def asked() -> list[Cell]:
    """Feedback or not; the largest of a block, a tensor or the model; momentum before or after what
    is sent (arXiv 2009.09271). In `demo` with AdamW the accumulator is a momentum before, where it
    decays, and AdamW's b1 one after.
    """

    def gradient(end: str, beta: float, b1: float) -> Cell:
        cell = demo(f" adamw {end}", 1.4e-3, **{**ADAMW, "beta": beta})
        return dataclasses.replace(cell, inner={"betas": [b1, 0.95]})

    return [
        sparse_loco(),
        sparse_loco(" no feedback", beta=0.0),
        sparse_loco(" forgets nothing", beta=1.0),
        over_tensors(sparse_loco(), 29, 1),
        over_tensors(sparse_loco(), 29, 1, OVER_ALL),
        sparse_loco(" momentum", **{"applier.momentum": 0.5, "applier.lr": 0.5}),
        gradient("momentum before and after", 0.95, 0.9),
        gradient("momentum before", 0.95, 0.0),
        gradient("momentum after", 1.0, 0.9),
        gradient("momentum after without feedback", 0.0, 0.9),
    ]


def when_changed() -> list[Cell]:
    """Parameters averaged every 20 steps, and where the gradient of an island has changed."""

    def cell(delta: float) -> Cell:
        rule = {"check_every": 4, "delta": delta, "at_most": 80}
        return Cell(f"sel_sync delta {delta:g}", "sel_sync", rule, 1.4e-3)

    averaged = Cell(f"local_sgd H={H}", "local_sgd", {"period": H}, 1.4e-3)
    return [averaged, cell(0.3), cell(0.1), cell(0.03)]


LITERATURE: dict[str, list[Cell]] = {
    "diloco": tried(diloco()),
    "desloc": tried(Cell(f"desloc H={H}", "desloc", {"period": H}, 1.4e-3)),
    "sign_loco": tried(sign_loco()),
    "damped outer step": [diloco(), *(gpa(c, a) for c, a in ((0.7, 0.936), (0.5, 0.8)))],
    "one period late": late(),
    "whole tensors": [
        sparse_loco(),
        *(over_tensors(sparse_loco(), 29, every) for every in (1, 8)),
        sign_loco(),
        over_tensors(sign_loco(), 85, 1),
    ],
    "three questions": asked(),
    "a change of the gradient": when_changed(),
    "pairs": pairs(),
    "3.3 M, 640 steps": large(),
}
