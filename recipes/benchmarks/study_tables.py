"""The tables of the study, as data.

A table is groups of cells. The first cell of a group is its reference: differences are paired with
it, seed by seed. Methods with a grid are tuned first: every grid has `TRIALS` cells or more, which
run on `TUNING_SEEDS`, and the best of them runs on the seeds that are reported.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from study_cells import Cell, Setting

from fsdp_demo.config.patterns import EMBEDDINGS

TRIALS = 8
TUNING_SEEDS = (100,)
H, STEPS = 20, Setting.steps
"""Period of the methods with dense rounds. The published ones, 30 to 500, are longer than a run."""


@dataclass(frozen=True)
class Method:
    """A method at its published settings (the period scaled to the run), and what is tried to
    better them.
    """

    published: Cell
    grid: tuple[Cell, ...] = ()

    def tuned(self, best: Cell) -> Cell:
        """The best of the grid under the method's name."""
        return dataclasses.replace(best, name=f"{self.published.name} tuned")


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


def sign_loco(
    end: str = "",
    lr: float = 4e-3,
    period: int = 5,
    topk: int = 90,
    steps: int = STEPS,
    beta: float = 0.6,
    momentum: float | None = None,
    **changes: Any,
) -> Cell:
    """The preset of ours; `beta` 0: without feedback. Its momentum rises over half the rounds."""
    outer = momentum if momentum is not None else 0.5 if beta else 0.6
    rise = max(1, steps // (2 * period)) if outer else 0
    named = f"sign_loco H={period} k={topk}{'' if beta else ' beta 0'}{end}"
    rule = {"period": period, "topk": topk, "beta": beta}
    rule |= {"momentum": outer, "momentum_warmup": rise}
    return Cell(named, "sign_loco", {**rule, **changes}, lr)


def full(end: str = "", lr: float = 2e-3, **changes: Any) -> Cell:
    return Cell(f"full{end}", "full", {"value_dtype": "bf16", **changes}, lr)


def diloco(end: str = "", lr: float = 2e-3, period: int = H, steps: int = STEPS, **c: Any) -> Cell:
    """Outer momentum 0.9 rising over half the rounds, unless told otherwise."""
    warmup = max(1, steps // (2 * period))
    return Cell(
        f"diloco H={period}{end}", "diloco", {"period": period, "momentum_warmup": warmup, **c}, lr
    )


def sparse_loco(end: str = "", lr: float = 2e-3, period: int = 5, topk: int = 32, **c: Any) -> Cell:
    return Cell(
        f"sparse_loco H={period} k={topk}{end}",
        "sparse_loco",
        {"period": period, "topk": topk, **c},
        lr,
    )


def muloco(end: str = "", lr: float = 3.2e-2, period: int = H, **c: Any) -> Cell:
    """Muon inside; outer momentum 0.5 from the start, as the grid chose."""
    rule = {"period": period, "momentum": 0.5, "momentum_warmup": 0}
    return Cell(f"muloco H={period}{end}", "muloco", {**rule, **c}, lr)


# -- main: every preset, published and tuned ------------------------------------------------------


def tried(base: Cell, *variants: tuple[str, dict[str, Any], tuple[float, ...]]) -> Method:
    """A method and its grid: variants (label, changes, learning rates), by default all of `RATES`.

    At least `TRIALS` cells. Where the best stood at the end of a row of rates, the row was made
    longer, so some methods have more.
    """
    grid = tuple(
        dataclasses.replace(
            base,
            name=f"{base.name} lr {lr:g} {label}".strip(),
            changes={**base.changes, **more},
            lr=lr,
        )
        for label, more, rates in (variants or (("", {}, RATES),))
        for lr in rates
    )
    assert len(grid) >= TRIALS, base.name
    return Method(base, grid)


RATES = (1e-3, 1.4e-3, 1.7e-3, 2e-3, 2.4e-3, 2.8e-3, 4e-3, 5.6e-3)
LOWER = (5e-4, 7e-4, *RATES[:2], *RATES[3:4], *RATES[5:])
LOW, MIDDLE, HIGH = (1e-3, 1.4e-3, 2e-3, 3e-3, 4e-3), (2e-3, 3e-3, 4e-3), (4e-3, 8e-3, 1.6e-2)
RISING = {"momentum_warmup": STEPS // (2 * H)}
HALVED = {"momentum": 0.5, "momentum_warmup": 0}
OUTER = (("momentum 0.9 rising", RISING, LOW), ("momentum 0.5", HALVED, MIDDLE))
SHORT = {"beta": 0.95}
SEEDED = (("", {}, (1e-3, 2e-3, 4e-3)), ("beta 0.95", SHORT, (1e-3, 2e-3, *HIGH, 3.2e-2)))

ADAMW = {"inner_optimizer": "adamw", "momentum.no_transform": []}
MUON = {"inner_optimizers": ["muonadamw"]}
MUON_RATES = (5e-3, 1e-2, 2.24e-2, 3.2e-2, 4.5e-2, 6.3e-2)

METHODS = (
    tried(full()),
    tried(Cell("local_sgd", "local_sgd", {"period": H}), ("", {}, LOWER)),
    tried(Cell("local_adam", "local_adam", {"period": H}), ("", {}, LOWER)),
    tried(
        Cell("desloc", "desloc", {"period": H}),
        ("", {}, MIDDLE),
        ("embeddings too", {"embeddings": True}, LOW),
    ),
    tried(Cell("diloco", "diloco", {"period": H, "momentum_warmup": 0}), *OUTER),
    tried(
        Cell(
            "streaming_diloco",
            "streaming_diloco",
            {"period": H, "layers": 1, "momentum_warmup": 0},
        ),
        *OUTER,
    ),
    tried(
        Cell("demo", "demo", {"momentum.no_transform": []}, 1e-3),
        ("DCT on all", {}, (5e-4, 7e-4, 1e-3, 2e-3, 4e-3)),
        ("plain embeddings", {"momentum.no_transform": list(EMBEDDINGS)}, (1e-3, 2e-3, 4e-3, 8e-3)),
        ("DCT on all beta 0.95", SHORT, HIGH),
    ),
    tried(
        Cell("demo adamw", "demo", ADAMW, 1e-3),
        ("", {}, (5e-4, 1e-3, 1.4e-3, 2e-3, 2.8e-3, 4e-3)),
        ("beta 0.95", SHORT, (2e-3, 4e-3)),
    ),
    tried(Cell("random", "random", {}, 1e-3), *SEEDED),
    tried(Cell("stride", "stride", {}, 1e-3), *SEEDED),
    tried(
        Cell("decoupled_momentum", "decoupled_momentum", {"period": 5, "transform": True}),
        ("no DCT", {"transform": False}, (*MIDDLE, 6e-3)),
        ("no DCT beta 0.6", {"transform": False, "beta": 0.6}, (*MIDDLE, 6e-3, 8e-3, 1.1e-2)),
    ),
    tried(
        sparse_loco(),
        ("", {}, (*MIDDLE, 6e-3)),
        ("beta 0.6", {"beta": 0.6}, (*MIDDLE, 6e-3, 8e-3)),
    ),
    tried(
        Cell("muloco", "muloco", {"period": H, "momentum_warmup": 0}, 2.24e-2),
        ("momentum 0.9 rising", RISING, (5e-3, 1e-2, 2.24e-2)),
        ("momentum 0.5", HALVED, (5e-3, 1e-2, 2.24e-2, 3.2e-2, 4.5e-2)),
    ),
    tried(full(" muon", 2.24e-2, **MUON), ("", {}, (2.5e-3, *MUON_RATES, 9e-2))),
    tried(
        sign_loco(),
        ("", {}, (3e-3, 4e-3, 6e-3)),
        ("beta 0", {"beta": 0.0, "momentum": 0.6}, (3e-3, 4e-3, 6e-3, 8e-3, 1.1e-2)),
    ),
    tried(
        sign_loco(" muon", 2.24e-2, **MUON),
        ("", {}, (1e-2, 2.24e-2, 4.5e-2, 6.3e-2, 9e-2)),
        ("beta 0", {"beta": 0.0, "momentum": 0.6}, (*MUON_RATES[1:], 9e-2)),
    ),
)
ALONE = Cell("one replica alone", "full", replicas=1)

# -- front: loss over bytes -----------------------------------------------------------------------

LOCAL_5, LOCAL_20 = (Cell(f"local_sgd H={p}", "local_sgd", {"period": p}) for p in (5, 20))
FRONT = [
    full(),
    LOCAL_5,
    LOCAL_20,
    diloco(period=5),
    diloco(),
    diloco(" 4 bits", value_dtype="int4"),
    diloco(period=40),
    *(sign_loco(period=h, topk=k) for h in (1, 2, 5, 10, 20) for k in (32, 90)),
    *(sign_loco(topk=k) for k in (11, 256, 768)),
    sign_loco(period=40, topk=32),
    *(
        sign_loco(f" {bits}", topk=k, value_dtype=bits)
        for bits, k in (("2bit", 80), ("int4", 64), ("int8", 44), ("bf16", 28))
    ),
    sign_loco(" without momentum", momentum=0.0),
    sign_loco(lr=6e-3, beta=0.0),
    *(sparse_loco(period=h, topk=k) for h, k in ((1, 6), (2, 13), (5, 32), (10, 64), (20, 128))),
    Cell("demo k=32", "demo", {}, 2e-3),
    Cell("demo k=8", "demo", {"topk": 8}, 2e-3),
    *(muloco(period=h) for h in (5, 10, 20, 40)),
    *(muloco(" 1 bit", period=h, value_dtype="1bit") for h in (10, 20)),
]

# -- robust: where the winners hold ---------------------------------------------------------------


def winners(end: str = "", scale: float = 1.0, steps: int = STEPS, **replaced: Any) -> list[Cell]:
    """`full`, the best of the published and ours, under one change."""
    cells = [
        full(end, 2e-3 * scale),
        diloco(end, 2e-3 * scale, steps=steps),
        sparse_loco(end, 4e-3 * scale, beta=0.8),
        sign_loco(end, 4e-3 * scale, steps=steps),
        sign_loco(end, 6e-3 * scale, steps=steps, beta=0.0),
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
    sign_loco(f" delay {d} {form}".rstrip(), **{"schedule.delay": d, **change})
    for d, form, change in (
        (1, "", {}),
        (1, "steps kept", KEPT),
        (3, "", {}),
        (3, "mix 0.5", {"applier.mix": 0.5}),
        (3, "steps kept", KEPT),
        (5, "", {}),
        (5, "eager", EAGER),
    )
]
HALF = STEPS // 2
LATE = [
    dataclasses.replace(cell, name=f"{cell.name} from step {HALF}", attach_at=HALF)
    for cell in (sign_loco(steps=HALF), diloco(steps=HALF))
]
ROBUST = {
    **{f"R = {r}": winners(f" R={r}", replicas=r) for r in (2, 4, 8, 16)},
    "periods": [full(), *(form(period=h) for h in PERIODS for form in (sign_loco, diloco))],
    **{f"rate x {x:g}": winners(f" rate x {x:g}", x) for x in (0.5, 2.0)},
    **{f"{n} x longer": winners(f" {n} x longer", steps=n * STEPS) for n in (2, 4)},
    "delay": [sign_loco(), *DELAYS],
    "attached at half": [full(), *LATE],
    "one slow island": [
        weighted(full()),
        weighted(sign_loco()),
        weighted(diloco()),
        dataclasses.replace(sign_loco(" slow island equal weights"), slow=True),
    ],
}

# -- questions: one number each -------------------------------------------------------------------


def decoupled(replicas: int) -> list[Cell]:
    """Decoupled momentum beside DiLoCo at 1/16 of its bytes or less, both at their better rates."""
    cells = [
        diloco(f" 0.5 R={replicas}", momentum=0.5, momentum_warmup=0),
        diloco(f" R={replicas}"),
        *(
            Cell(
                f"decoupled_momentum H=20 k={k} beta {beta:g} R={replicas}",
                "decoupled_momentum",
                {"period": H, "topk": k, "beta": beta},
                lr=4e-3,
            )
            for k in (32, 90)
            for beta in (0.95, 0.6)
        ),
    ]
    return [dataclasses.replace(cell, replicas=replicas) for cell in cells]


def rising(longer: int) -> list[Cell]:
    """Outer momentum that rises over rounds or shares of runs of unlike length; 0: constant."""
    cells = [
        full(f" {longer} x longer"),
        *(
            sign_loco(f" rises over {n} {longer} x longer", **{"momentum_warmup": n})
            for n in (0, 12, 24, 48, 96)
        ),
    ]
    setting = Setting(steps=longer * STEPS)
    return [dataclasses.replace(cell, setting=setting) for cell in cells]


DIVISORS = {
    f"divisor R = {r}": [
        dataclasses.replace(cell, replicas=r)
        for cell in (
            sign_loco(f" over senders R={r}"),
            sign_loco(f" over replicas R={r}", **{"reducer.mean_over": "replicas"}),
        )
    ]
    for r in (2, 4, 16)
}
USUAL = {"betas": [0.9, 0.95]}
DEMO_ADAMW = [
    Cell("demo by sign", "demo", {"momentum.no_transform": []}, 1e-3),
    Cell("demo adamw", "demo", ADAMW, 1e-3),
    Cell("demo adamw betas 0.9", "demo", ADAMW, 1e-3, inner=USUAL),
    Cell("demo adamw betas 0.9 by sign", "demo", {**ADAMW, "sign": True}, 1e-3, inner=USUAL),
    *(
        Cell(f"demo adamw betas 0.9 k={k}", "demo", {**ADAMW, "topk": k}, 2e-3, inner=USUAL)
        for k in (512, 4096)
    ),
]
QUESTIONS = {
    "demo in AdamW's form": DEMO_ADAMW,
    **{f"decoupled R = {r}": decoupled(r) for r in (2, 4, 8)},
    **DIVISORS,
    "feedback": [
        full(),
        *(
            sign_loco(f" {bits}{'' if beta else ' without feedback'}", value_dtype=bits, beta=beta)
            for bits in ("1bit", "2bit", "int4")
            for beta in (0.6, 0.0)
        ),
    ],
    "periods of states": [
        Cell("local_adam H=20", "local_adam", {"period": H}),
        *(
            Cell(
                f"desloc 1 : {a} : {b}",
                "desloc",
                {"period": H, "embeddings": True, "states": {"exp_avg": a, "exp_avg_sq": b}},
            )
            for a, b in ((1, 3), (3, 6), (6, 12))
        ),
    ],
    **{f"rise in {n} x {STEPS} steps": rising(n) for n in (1, 2)},
}

# -- size: equal tokens per parameter -------------------------------------------------------------

SIZES = {"study-small": 480, "small": 3196, "study-large": 9664}
"""Model -> steps: four tokens per parameter over four replicas."""


def sized(model: str, steps: int) -> list[Cell]:
    """Larger models take lower rates: by the root of the width over 128."""
    scale = {"study-small": 1.0, "small": 2**-0.5, "study-large": 2.5**-0.5}[model]
    return [
        dataclasses.replace(
            cell,
            name=f"{cell.name} {model}",
            setting=Setting(model=model, steps=steps, warmup=steps // 20),
        )
        for cell in winners(scale=scale, steps=steps)
    ]


TABLES: dict[str, Table] = {
    "main": Table(
        "every preset, published and tuned", {"": [METHODS[0].published, ALONE]}, METHODS
    ),
    "front": Table("loss over bytes", {"": FRONT}),
    "robust": Table("where the winners hold", ROBUST, seeds=3),
    "questions": Table("questions with a number each", QUESTIONS),
    "size": Table(
        "does the gap shrink with size", {m: sized(m, s) for m, s in SIZES.items()}, seeds=2
    ),
}
