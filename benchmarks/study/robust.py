"""The cells of the table `robust`: where the winners hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from study.cells import Cell, Setting
from study.methods import (
    MUON,
    STEPS,
    diloco,
    full,
    muloco,
    sign_loco,
    sign_muloco,
    sparse_loco,
    with_feedback,
)


def winners(end: str = "", scale: float = 1.0, steps: int = STEPS, **replaced: Any) -> list[Cell]:
    """`full`, the best of the published and ours at their tuned settings, under one change."""
    cells = [
        full(end, 2e-3 * scale),
        full(f" muon{end}", 4.5e-2 * scale, **MUON),
        diloco(end, 2e-3 * scale, steps=steps),
        sparse_loco(end, 6e-3 * scale),
        muloco(end, 3.2e-2 * scale),
        sign_muloco(end, 4.5e-2 * scale),
        sign_loco(end, 8e-3 * scale, steps=steps),
    ]
    if steps != STEPS:
        replaced["setting"] = Setting(steps=steps)
    return [dataclasses.replace(cell, **replaced) for cell in cells]


def weighted(cell: Cell) -> Cell:
    """With one island of half the speed, islands weighed by their tokens."""
    changes = {**cell.changes, "reducer.weight": "tokens"}
    name = f"{cell.name} slow island by tokens"
    return dataclasses.replace(cell, name=name, changes=changes, slow=True)


PERIODS = (1, 2, 5, 10, 20, 50)
KEPT, EAGER = {"applier.keep_steps": True}, {"applier.own_share": 0.25}
DELAYS = [
    (1, "", {}),
    (1, " steps kept", KEPT),
    (3, "", {}),
    (3, " mix 0.5", {"applier.mix": 0.5}),
    (3, " steps kept", KEPT),
    (5, "", {}),
    (5, " eager", EAGER),
]
"""Steps from the send to the effect of it, and what becomes of the steps between."""


def late(make: Callable[..., Cell]) -> list[Cell]:
    """A method in time, then late in each of the forms."""
    cells = [make(f" delay {d}{form}", **{"schedule.delay": d, **c}) for d, form, c in DELAYS]
    return [make(), *cells]


HALF = STEPS // 2
ATTACHED = [
    dataclasses.replace(cell, name=f"{cell.name} from step {HALF}", attach_at=HALF)
    for cell in (
        sign_loco(steps=HALF),
        *(sign_loco(f" lr {lr:g}", lr, steps=HALF) for lr in (2e-3, 4e-3)),
        diloco(steps=HALF),
    )
]
"""The rate is one for the whole run, so it is that of the all-reduce before, too."""

EIGHT = [
    dataclasses.replace(cell, replicas=8)
    for cell in (with_feedback(" R=8"), sign_loco(" lr 0.0056 R=8", 5.6e-3))
]
"""What may bring ours nearer to `full` where there are more replicas."""

ROBUST = {
    **{
        f"R = {r}": [*winners(f" R={r}", replicas=r), *(EIGHT if r == 8 else [])]
        for r in (2, 4, 8, 16)
    },
    "periods": [full(), *(form(period=h) for h in PERIODS for form in (sign_loco, diloco))],
    **{f"rate x {x:g}": winners(f" rate x {x:g}", x) for x in (0.5, 2.0)},
    **{f"{n} x longer": winners(f" {n} x longer", steps=n * STEPS) for n in (2, 4)},
    "delay": late(sign_loco),
    "delay with feedback": late(with_feedback),
    "delay with Muon": late(sign_muloco),
    "attached at half": [full(), *ATTACHED],
    "one slow island": [
        weighted(full()),
        weighted(sign_loco()),
        weighted(diloco()),
        weighted(sign_muloco()),
        dataclasses.replace(sign_loco(" slow island equal weights"), slow=True),
    ],
}
