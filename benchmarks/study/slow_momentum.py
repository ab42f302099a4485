"""The cells of the table `momentum`: a slow momentum inside, and a damped one outside, at the bytes
of the method without.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from study.cells import Cell
from study.length import LARGE, at, switched
from study.methods import H, diloco, sign_loco

SLOW = ((0.97, 0.9), (0.99, 0.7), (0.99, 0.9))
"""b1 and nu of QHAdamW that are tried (`fsdp_demo/hosts/qhadamw.py`)."""


def slow(cell: Cell, b1: float, nu: float, scale: float = 1.0) -> Cell:
    """A cell with QHAdamW inside, at `scale` times its rate."""
    return dataclasses.replace(
        cell,
        name=f"{cell.name} qh {b1:g} {nu:g}" + (f" rate x {scale:g}" if scale != 1.0 else ""),
        changes={**cell.changes, "inner_optimizer": "qhadamw"},
        lr=cell.lr * scale,
        inner={"betas": [b1, 0.95], "nu": nu},
    )


def desloc() -> Cell:
    return Cell(f"desloc H={H}", "desloc", {"period": H}, 2e-3)


def tried(make: Callable[[], Cell]) -> list[Cell]:
    """A method with AdamW, then with each of `SLOW`."""
    return [make(), *(slow(make(), b1, nu) for b1, nu in SLOW)]


def damped(c: float, a: float) -> Cell:
    """DiLoCo with GPA's outer step: its x is averaged by `a` per round, its y has `c` of x."""
    rule: dict[str, Any] = {"lr": 1 - c, "momentum": a, "momentum_warmup": 0}
    return diloco(
        f" damped {c:g} {a:g}", **rule, **{"applier.dampening": 1 - c * (1 - a) / ((1 - c) * a)}
    )


def large(steps: int = LARGE // 4) -> list[Cell]:
    """3.3 M, ours with its second phase."""
    cell = at(switched(0.25, steps, 4e-3), steps, steps // 20, model="small")
    return [cell, *(slow(cell, b1, nu) for b1, nu in SLOW)]


MOMENTUM: dict[str, list[Cell]] = {
    "diloco": tried(diloco),
    "desloc": tried(desloc),
    "sign_loco": tried(sign_loco),
    "damped outer step": [diloco(), *(damped(c, a) for c, a in ((0.7, 0.936), (0.5, 0.8)))],
    "3.3 M, 640 steps": large(),
}
