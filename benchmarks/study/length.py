"""The tables of longer runs: `sign_loco` with and without its second phase beside an all-reduce
that is tuned as carefully, on one machine.

The second phase forgets nothing (feedback of beta 1), takes the mean over all replicas, and steps
without outer momentum. `dense` is the same outer rule over a mean of everything in 16 bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from study.cells import Cell, Setting
from study.methods import STEPS, Method, demo, full, sign_loco, sign_muloco, sparse_loco

LONG = 4 * STEPS
"""Steps of the long run at 0.49 M: 16 tokens per parameter over four replicas."""

LARGE = 2560
"""Steps at 3.3 M: each byte of the text is read 0.96 times."""

RATE = 1.5
"""Outer rate of the second phase."""


def phase(begin: int, lr: float = RATE, **codec: Any) -> dict[str, Any]:
    """The second phase of a channel of deltas as plain data, from the step `begin` on."""
    return {
        "begin": begin,
        "accumulator": {"beta": 1.0},
        "feedback": "subtract",
        "codec": codec,
        "applier": {"acts_as": "outer_step", "lr": lr, "dense_lr": lr},
    }


def switched(share: float, steps: int, lr: float, end: str = "", **changes: Any) -> Cell:
    """`sign_loco` that switches after a share of the run."""
    late = {"switch": round(share * steps), **changes}
    return sign_loco(f" switch {share:g}{end}", lr, steps=steps, **late)


def dense(share: float, steps: int, lr: float) -> Cell:
    """`sign_loco`, and from the switch on the mean of all values in 16 bits, in the same rule."""
    late = phase(round(share * steps), select="topk", topk=4096, value_dtype="bf16")
    return sign_loco(f" dense {share:g}", lr, steps=steps, **{"delta.later": [late]})


def at(cell: Cell, steps: int, warmup: int, floor: float = 0.1, model: str = "") -> Cell:
    """A cell with the schedule of its inner rate; the name says it."""
    setting = Setting(steps=steps, warmup=warmup, floor=floor)
    setting = dataclasses.replace(setting, model=model) if model else setting
    name = f"{cell.name} lr {cell.lr:g} warm-up {warmup}" + ("" if floor else " to 0")
    return dataclasses.replace(cell, name=name, setting=setting)


def tuned(name: str, cells: Iterable[Cell]) -> Method:
    """A method of which only the best of a grid is reported."""
    grid = tuple(cells)
    return Method(dataclasses.replace(grid[0], name=name), grid, alone=True)


def medium(steps: int = LONG) -> tuple[Method, ...]:
    """0.49 M: rates, warm-ups, cosine to a tenth and to 0, shares of the run."""

    def grid(make: Any, rates: Iterable[float], warmups: Iterable[int]) -> list[Cell]:
        return [at(make(lr), steps, w) for lr in rates for w in warmups]

    def to_zero(make: Any, rates: Iterable[float], warmup: int) -> list[Cell]:
        return [at(make(lr), steps, warmup, 0.0) for lr in rates]

    def by(share: float, make: Any = switched) -> Any:
        return lambda lr: make(share, steps, lr)

    def plain(lr: float) -> Cell:
        return sign_loco("", lr, steps=steps)

    def reduced(lr: float) -> Cell:
        return full("", lr)

    return (
        tuned(
            "full",
            [
                *grid(reduced, (1.4e-3, 2e-3, 2.8e-3, 4e-3), (24, 96, 192)),
                *to_zero(reduced, (2e-3, 2.8e-3, 4e-3), 96),
            ],
        ),
        tuned(
            "sign_loco switch",
            [
                *grid(by(0.1), (4e-3, 6e-3, 8e-3), (24, 96)),
                *grid(by(0.25), (4e-3, 6e-3, 8e-3), (24, 96)),
                *grid(by(0.1), (6e-3,), (192,)),
                *to_zero(by(0.1), (6e-3, 8e-3), 96),
                *to_zero(by(0.25), (6e-3,), 96),
            ],
        ),
        tuned(
            "sign_loco",
            [*grid(plain, (4e-3, 6e-3, 8e-3), (24, 96)), *to_zero(plain, (6e-3, 8e-3), 96)],
        ),
        tuned(
            "sign_loco dense",
            [
                *grid(by(0.1, dense), (2e-3, 4e-3, 6e-3, 8e-3), (96,)),
                *grid(by(0.25, dense), (2e-3, 4e-3, 6e-3, 8e-3), (96,)),
            ],
        ),
    )


def short(steps: int = STEPS) -> tuple[Method, ...]:
    """0.49 M, the study's common length: does a second phase hurt where it is not needed?"""

    def by(share: float) -> Any:
        return lambda lr: switched(share, steps, lr)

    def grid(make: Any, rates: Iterable[float]) -> list[Cell]:
        return [at(make(lr), steps, w) for lr in rates for w in (24, 48)]

    rates = (4e-3, 6e-3, 8e-3, 1.1e-2)
    return (
        tuned("full", grid(lambda lr: full("", lr), (1.4e-3, 2e-3, 2.8e-3, 4e-3))),
        tuned("sign_loco switch", grid(by(0.25), rates)),
        tuned("sign_loco", grid(lambda lr: sign_loco("", lr, steps=steps), rates)),
    )


def large() -> dict[str, list[Cell]]:
    """3.3 M at a quarter and at all of its length: rates around those that were tuned at 0.49 M,
    scaled by the root of the width, and a warm-up of a twentieth.
    """

    def cells(steps: int) -> list[Cell]:
        tried = [
            *(full("", lr) for lr in (2e-3, 1e-3, 1.4e-3, 2.8e-3)),
            sign_loco("", 4e-3, steps=steps),
            *(switched(0.25, steps, lr) for lr in (4e-3, 2.8e-3)),
            switched(0.1, steps, 2.8e-3),
        ]
        return [at(cell, steps, steps // 20, model="small") for cell in tried]

    return {f"{steps} steps": cells(steps) for steps in (LARGE // 4, LARGE)}


def others(steps: int = LONG) -> dict[str, list[Cell]]:
    """Each method as it is, and with a second phase after a quarter of the run."""
    begin = steps // 4

    def pair(cell: Cell, channel: str, late: dict[str, Any]) -> list[Cell]:
        changed = dataclasses.replace(
            cell,
            name=f"{cell.name} switch 0.25",
            changes={**cell.changes, f"{channel}.later": [late]},
        )
        return [at(c, steps, 96) for c in (cell, changed)]

    momentum = {
        "begin": begin,
        "accumulator": {"beta": 1.0},
        "feedback": "subtract",
        "codec": {"transform": "dct", "select": "topk", "topk": 32, "value_dtype": "int8"},
        "reducer": {"mean_over": "replicas"},
        "applier": {"acts_as": "gradient", "sign": True},
    }
    rule = {"period": 5, "beta": 0.6}
    sparse = phase(begin, select="topk", topk=32, value_dtype="2bit")
    integers = phase(begin, select="topk", topk=32, value_dtype="int8")
    bits = phase(begin, value_dtype="1bit")
    return {
        "sparse_loco": pair(sparse_loco(), "delta", sparse),
        "decoupled_momentum": pair(
            Cell("decoupled_momentum", "decoupled_momentum", {**rule, "topk": 32}, 6e-3),
            "delta",
            integers,
        ),
        "sign_muloco": pair(sign_muloco(), "delta", bits),
        "demo": pair(demo("", 1.4e-3), "momentum", momentum),
    }


def other_replicas(steps: int = LONG) -> dict[str, list[Cell]]:
    """Two and eight replicas at the rates of four."""
    return {
        f"R = {r}": [
            at(dataclasses.replace(cell, name=f"{cell.name} R={r}", replicas=r), steps, 96)
            for cell in (full("", 4e-3), switched(0.25, steps, 6e-3))
        ]
        for r in (2, 8)
    }


def seeded(steps: int = LONG) -> list[Cell]:
    """From the switch on 1 bit of values at positions that a seed chooses: what the positions of 90
    values took pays for the signs of 700.
    """

    def cell(topk: int, lr: float = RATE) -> Cell:
        late = phase(steps // 4, lr, select="random", topk=topk, value_dtype="1bit")
        name = f" switch 0.25 then seeded k={topk}" + ("" if lr == RATE else f" outer {lr:g}")
        return sign_loco(name, 6e-3, steps=steps, **{"delta.later": [late]})

    return [at(c, steps, 96) for c in (cell(700), cell(700, 1.0), cell(1400))]


def fewer_bytes(steps: int = LONG) -> list[Cell]:
    """Fewer values from the switch on, and longer rounds."""
    cells = [
        switched(0.25, steps, 6e-3),
        *(switched(0.25, steps, 6e-3, f" then k={k}", late_topk=k) for k in (45, 22)),
        *(switched(0.25, steps, 6e-3, period=h) for h in (10, 20)),
    ]
    return [at(cell, steps, 96) for cell in cells]
