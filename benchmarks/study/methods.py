"""The methods of the study: how a cell of each is made, and what is tried to better it.

Methods with a grid are tuned: every grid has `TRIALS` cells or more, which run on `TUNING_SEEDS`,
and the best of them runs on the seeds that are reported.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from fsdp_demo.config.channel import EMBEDDINGS
from study.cells import Cell, Setting

TRIALS = 8
TUNING_SEEDS = (100,)
H, STEPS = 20, Setting.steps
"""Period of the methods with dense rounds. The published ones, 30 to 500, are longer than a run."""

FEEDBACK = {"beta": 0.6, "momentum": 0.5}


@dataclass(frozen=True)
class Method:
    """A method at its published settings (the period scaled to the run), and what is tried to
    better them; `name`: of the best, where it is a preset of its own; `alone`: only the best is
    reported.
    """

    published: Cell
    grid: tuple[Cell, ...] = ()
    name: str = ""
    alone: bool = False

    def tuned(self, best: Cell) -> Cell:
        """The best of the grid under the method's name."""
        return dataclasses.replace(best, name=f"{self.name or self.published.name} tuned")


def sign_loco(
    end: str = "",
    lr: float = 8e-3,
    period: int = 5,
    topk: int = 90,
    steps: int = STEPS,
    beta: float = 0.0,
    momentum: float = 0.6,
    **changes: Any,
) -> Cell:
    """The preset of ours, without its second phase. Its momentum rises over half the rounds."""
    rise = max(1, steps // (2 * period)) if momentum else 0
    rule = {"period": period, "topk": topk, "beta": beta, "switch": 0.0}
    rule |= {"momentum": momentum, "momentum_warmup": rise}
    return Cell(f"sign_loco H={period} k={topk}{end}", "sign_loco", {**rule, **changes}, lr)


def with_feedback(end: str = "", lr: float = 4e-3, **changes: Any) -> Cell:
    """The preset of ours with error feedback, less momentum and a lower rate."""
    return sign_loco(f" feedback{end}", lr, **{**FEEDBACK, **changes})


def full(end: str = "", lr: float = 2e-3, **changes: Any) -> Cell:
    return Cell(f"full{end}", "full", {"value_dtype": "bf16", **changes}, lr)


def diloco(end: str = "", lr: float = 2e-3, period: int = H, steps: int = STEPS, **c: Any) -> Cell:
    """Outer momentum 0.9 rising over half the rounds, unless told otherwise."""
    warmup = max(1, steps // (2 * period))
    return Cell(
        f"diloco H={period}{end}", "diloco", {"period": period, "momentum_warmup": warmup, **c}, lr
    )


def demo(end: str = "", lr: float = 1e-3, **changes: Any) -> Cell:
    """DeMo with the memory of its paper, and its transform on all tensors."""
    rule = {"beta": 0.999, "momentum.no_transform": []}
    return Cell(f"demo{end}", "demo", {**rule, **changes}, lr)


def sparse_loco(end: str = "", lr: float = 6e-3, period: int = 5, topk: int = 32, **c: Any) -> Cell:
    """Feedback that decays by 0.6, as the grid chose."""
    rule = {"period": period, "topk": topk, "beta": 0.6}
    return Cell(f"sparse_loco H={period} k={topk}{end}", "sparse_loco", {**rule, **c}, lr)


def muloco(end: str = "", lr: float = 3.2e-2, period: int = H, **c: Any) -> Cell:
    """Muon inside; outer momentum 0.5 from the start, as the grid chose."""
    rule = {"period": period, "momentum": 0.5, "momentum_warmup": 0}
    return Cell(f"muloco H={period}{end}", "muloco", {**rule, **c}, lr)


def sign_muloco(end: str = "", lr: float = 4.5e-2, **c: Any) -> Cell:
    """`muloco` in 1 bit every 5 steps, with feedback that decays by 0.6, as the grid chose. It ran
    before the preset had its name; its settings are the same.
    """
    cell = muloco("", lr, period=5, value_dtype="1bit", **{"beta": 0.6, **c})
    return dataclasses.replace(cell, name=f"sign_muloco{end}")


def tried(
    base: Cell, *variants: tuple[str, dict[str, Any], tuple[float, ...]], name: str = ""
) -> Method:
    """A method and its grid: variants (label, changes, learning rates), by default all of `RATES`.

    At least `TRIALS` cells. Where the best stood at the end of a row of rates, the row was made
    longer, and `demo` has one between its best two. So some methods have more.
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
    return Method(base, grid, name)


RATES = (1e-3, 1.4e-3, 1.7e-3, 2e-3, 2.4e-3, 2.8e-3, 4e-3, 5.6e-3)
LOWER = (5e-4, 7e-4, *RATES[:2], *RATES[3:4], *RATES[5:])
LOW, MIDDLE, HIGH = (1e-3, 1.4e-3, 2e-3, 3e-3, 4e-3), (2e-3, 3e-3, 4e-3), (4e-3, 8e-3, 1.6e-2)
RISING = {"momentum_warmup": STEPS // (2 * H)}
HALVED = {"momentum": 0.5, "momentum_warmup": 0}
OUTER = (("momentum 0.9 rising", RISING, LOW), ("momentum 0.5", HALVED, MIDDLE))
SHORT: dict[str, Any] = {"beta": 0.95}
SHORT_RATES = (1e-3, 2e-3, 4e-3, 5.6e-3, 8e-3, 1.1e-2, 1.6e-2, 2.24e-2, 3.2e-2)
SEEDED = (("", {}, (1e-3, 2e-3, 4e-3)), ("beta 0.95", SHORT, SHORT_RATES))

ADAMW = {"inner_optimizer": "adamw"}
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
        demo(),
        ("DCT on all", {}, (5e-4, 7e-4, 1e-3, 1.4e-3, 2e-3, 4e-3)),
        ("plain embeddings", {"momentum.no_transform": list(EMBEDDINGS)}, (1e-3, 2e-3, 4e-3, 8e-3)),
        ("DCT on all beta 0.95", SHORT, (1e-3, 1.4e-3, 2e-3, 2.8e-3, *HIGH)),
        ("DCT on all beta 0.9", {"beta": 0.9}, (1.4e-3,)),
    ),
    tried(
        demo(" adamw", **ADAMW),
        ("", {}, (5e-4, 7e-4, 1e-3, 1.4e-3, 2e-3, 2.8e-3, 4e-3)),
        ("beta 0.95", SHORT, (1e-3, 1.4e-3, 2e-3, 4e-3)),
    ),
    tried(Cell("random", "random", {"beta": 0.999}, 1e-3), *SEEDED),
    tried(Cell("stride", "stride", {"beta": 0.999}, 1e-3), *SEEDED),
    tried(
        Cell("decoupled_momentum", "decoupled_momentum", {"period": 5, "transform": True}),
        ("no DCT", {"transform": False}, (*MIDDLE, 6e-3)),
        ("no DCT beta 0.6", {"transform": False, "beta": 0.6}, (*MIDDLE, 6e-3, 8e-3, 1.1e-2)),
    ),
    tried(
        sparse_loco(lr=2e-3, beta=0.95),
        ("", {}, (*MIDDLE, 6e-3)),
        ("beta 0.6", {"beta": 0.6}, (*MIDDLE, 6e-3, 8e-3)),
    ),
    tried(
        Cell("muloco", "muloco", {"period": H, "momentum_warmup": 0}, 2.24e-2),
        ("momentum 0.9 rising", RISING, (5e-3, 1e-2, 2.24e-2)),
        ("momentum 0.5", HALVED, (5e-3, 1e-2, 2.24e-2, 3.2e-2, 4.5e-2)),
        ("momentum 0.5 beta 0.6", {**HALVED, "beta": 0.6}, (2.24e-2, 3.2e-2, 4.5e-2)),
    ),
    tried(
        muloco(" 1 bit momentum 0.9", 2.24e-2, period=5, value_dtype="1bit", momentum=0.9),
        ("momentum 0.9 rising", {"momentum_warmup": STEPS // 10}, (1e-2, 2.24e-2)),
        ("momentum 0.5", HALVED, (*MUON_RATES[1:], 9e-2)),
        ("momentum 0.5 beta 0.6", {**HALVED, "beta": 0.6}, (3.2e-2, 4.5e-2, 6.3e-2, 9e-2)),
        name="sign_muloco",
    ),
    tried(full(" muon", 2.24e-2, **MUON), ("", {}, (2.5e-3, *MUON_RATES, 9e-2))),
    tried(
        sign_loco(),
        ("", {}, (3e-3, 4e-3, 6e-3, 8e-3, 1.1e-2)),
        ("feedback", FEEDBACK, (3e-3, 4e-3, 6e-3)),
    ),
    tried(
        sign_loco(" muon", 4.5e-2, **FEEDBACK, **MUON),
        ("", {}, (*MUON_RATES[1:], 9e-2)),
        ("no feedback", {"beta": 0.0, "momentum": 0.6}, (*MUON_RATES[1:], 9e-2)),
    ),
)
