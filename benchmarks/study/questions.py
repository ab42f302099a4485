"""The cells of the table `questions`: one number each."""

from __future__ import annotations

import dataclasses
from typing import Any

from fsdp_demo.config.channel import EMBEDDINGS
from study.cells import Cell, Setting
from study.methods import (
    ADAMW,
    SHORT,
    STEPS,
    H,
    demo,
    diloco,
    full,
    sign_loco,
    sign_muloco,
    sparse_loco,
    with_feedback,
)


def decoupled(replicas: int) -> list[Cell]:
    """Decoupled momentum beside DiLoCo at 1/16 of its bytes or less, both at their better rates."""
    cells = [
        *(diloco(f" lr {lr:g} R={replicas}", lr) for lr in (2e-3, 1.4e-3)),
        *(
            Cell(
                f"decoupled_momentum H={h} k={k} beta {beta:g} lr {lr:g} R={replicas}",
                "decoupled_momentum",
                {"period": h, "topk": k, "beta": beta},
                lr,
            )
            for h, k, beta, lr in ((5, 32, 0.6, 6e-3), (5, 24, 0.6, 6e-3), (20, 128, 0.6, 6e-3))
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


def by_owners(back: int, kept: float, replicas: int) -> Cell:
    """Ours by owners of blocks, who keep `kept` of what they do not send back."""
    rest = f" kept {kept:g}" if kept else ""
    cell = sign_loco(f" owners k={back}{rest} R={replicas}")
    return dataclasses.replace(cell, owners=(back, kept))


def among(replicas: int, *cells: Cell) -> list[Cell]:
    """Cells as so many replicas train them."""
    return [dataclasses.replace(cell, replicas=replicas) for cell in cells]


DIVISORS = {
    f"divisor R = {r}": among(
        r,
        sign_loco(f" over senders R={r}"),
        sign_loco(f" over replicas R={r}", **{"reducer.mean_over": "replicas"}),
    )
    for r in (2, 4, 16)
}
VALUES = {
    f"values R = {r}": among(
        r,
        full(f" R={r}"),
        sign_loco(f" R={r}"),
        *(sign_loco(f" R={r}", topk=k) for k in others),
    )
    for r, others in {2: (180, 45), 4: (256, 32), 8: (45, 32), 16: (32, 22, 16)}.items()
}
"""How many values each of R replicas should send: a value that one replica alone sends counts
whole.
"""

OWNERS = {
    f"owners R = {r}": among(
        r,
        full(f" R={r}"),
        sign_loco(f" R={r}"),
        sign_loco(f" R={r}", topk=fewer),  # as few bytes without owners
        *(by_owners(back, kept, r) for back in (90, 360) for kept in (0.0, 0.6)),
    )
    for r, fewer in ((8, 32), (16, 16))
}
"""What R replicas send of a block has at most 90 R places."""

USUAL = {"betas": [0.9, 0.95]}
DEMO_ADAMW = [
    demo(" by sign", 1.4e-3),
    demo(" adamw", **ADAMW),
    *(
        dataclasses.replace(cell, inner=USUAL)
        for cell in (
            demo(" adamw betas 0.9", **ADAMW),
            demo(" adamw betas 0.9 by sign", **ADAMW, sign=True),
            *(demo(f" adamw betas 0.9 k={k}", 2e-3, **ADAMW, topk=k) for k in (512, 4096)),
        )
    ),
]
CODES = ("1bit", "2bit", "int4")


def form(name: str, method: str, lr: float, **changes: Any) -> Cell:
    return Cell(f"{method} {name}", method, changes, lr)


def one_in_five(name: str, lr: float, **changes: Any) -> Cell:
    rule = {"period": 5, "transform": False, **changes}
    return form(name, "decoupled_momentum", lr, **rule)


ROTATED = {"codec.transform": "rotation"}
INNER = ["*layers*"]
PLAIN = {"momentum.no_transform": list(EMBEDDINGS)}
BEST_DEMO = demo(" DCT on all at 0.0014", 1.4e-3)
FORMS = {
    "demo": [
        BEST_DEMO,
        demo(" plain embeddings", 4e-3, **PLAIN),
    ],
    "random": [
        *(form(f"beta 0.999 at {lr:g}", "random", lr, beta=0.999) for lr in (8e-3, 1.6e-2)),
        form("beta 0.95 at 0.011", "random", 1.1e-2, beta=0.95),
    ],
    "stride": [
        *(form(f"beta 0.999 at {lr:g}", "stride", lr, beta=0.999) for lr in (8e-3, 1.6e-2)),
        form("beta 0.95 at 0.008", "stride", 8e-3, beta=0.95),
    ],
    "decoupled_momentum": [
        one_in_five("DCT", 3e-3, transform=True),
        one_in_five("no DCT", 3e-3),
        one_in_five("no DCT beta 0.6", 6e-3, beta=0.6),
    ],
    "sparse_loco": [sparse_loco(" beta 0.95", 4e-3, beta=0.95), sparse_loco()],
    "diloco": [
        diloco(" momentum 0.9", momentum_warmup=0),
        diloco(" momentum 0.5", momentum=0.5, momentum_warmup=0),
        diloco(),
    ],
}
"""The published form of a method, at the best rate of its own, and what did better."""

SHORT_DEMO = demo(" DCT on all beta 0.95 at 0.0014", 1.4e-3, **SHORT)
MEMORY = {
    "memory of demo": [
        BEST_DEMO,
        *(
            demo(f" DCT on all beta {beta:g} at {lr:g}", lr, beta=beta)
            for beta, lr in ((0.99, 1.4e-3), (0.95, 1.4e-3), (0.95, 1e-3), (0.9, 1.4e-3))
        ),
    ],
    "memory, 4 x longer": [
        dataclasses.replace(cell, name=f"{cell.name} 4 x longer", setting=Setting(steps=4 * STEPS))
        for cell in (
            full(),
            BEST_DEMO,
            SHORT_DEMO,
            form("beta 0.999 at 0.008", "random", 8e-3, beta=0.999),
            form("beta 0.95 at 0.016", "random", 1.6e-2, beta=0.95),
        )
    ],
}
"""The published beta, 0.999, remembers a thousand steps: more than a run here has."""

DELTA = {"codec.transform": "dct"}
TRANSFORM = {
    "transform on gradients": [
        BEST_DEMO,
        demo(" DCT on all at 0.0007", 7e-4),
        demo(" DCT on all", 1e-3),
        demo(" DCT on embeddings", 1e-3, **{"momentum.no_transform": INNER}),
        demo(" DCT on inner matrices", 1e-3, **PLAIN),
        demo(" DCT on nothing", 1e-3, transform=False),
        # fewer weights move at a step, so each can move further
        *(
            demo(f" DCT on nothing at {lr:g}", lr, transform=False)
            for lr in (2e-3, 2.8e-3, 4e-3, 5.6e-3, 8e-3, 1.6e-2)
        ),
    ],
    "transform on gradients, beta 0.95": [
        SHORT_DEMO,
        demo(" rotation beta 0.95 at 0.0014", 1.4e-3, **SHORT, **ROTATED),
        *(
            demo(f" DCT on nothing beta 0.95 at {lr:g}", lr, transform=False, **SHORT)
            for lr in (2.8e-3, 4e-3, 5.6e-3, 8e-3, 1.6e-2)
        ),
        demo(" DCT on nothing at 0.0056", 5.6e-3, transform=False),  # its best memory and rate
    ],
    "transform on deltas": [
        sign_loco(" DCT on nothing"),
        sign_loco(" DCT on embeddings", **DELTA, **{"delta.no_transform": INNER}),
        sign_loco(" DCT on inner matrices", **DELTA, **{"delta.no_transform": list(EMBEDDINGS)}),
        sign_loco(" DCT on all", **DELTA),
    ],
}
"""At equal bytes: the same number of coefficients in the same code."""

WHERE = {"embeddings": {"delta.no_transform": INNER}, "all": {}}
OTHERS = {
    "other transforms on gradients": [
        BEST_DEMO,
        *(
            demo(f" {name} at {lr:g}", lr, **{"codec.transform": name})
            for name, rates in {
                "dct32": (1.4e-3,),
                "dct16": (1e-3, 1.4e-3, 2e-3),
                "dct8": (2e-3,),
                "dct_right": (1e-3, 1.4e-3, 2e-3),
                "dct_left": (1e-3, 1.4e-3, 2e-3),
                "rotation": (1e-3, 1.4e-3, 2e-3),
            }.items()
            for lr in rates
        ),
    ],
    "other transforms on deltas": [
        sign_loco(" DCT on nothing"),
        *(
            sign_loco(f" {name} on {where}", **{"codec.transform": name}, **only)
            for where, only in WHERE.items()
            for name in ("dct16", "dct_right", "dct_left", "rotation")
        ),
        sign_loco(" square blocks", **{"codec.transform": "square"}),
    ],
}
"""Smaller tiles, one axis, a rotation without frequencies, square blocks without any transform
(transforms.py).
"""


def under(cell: Cell, gain: float) -> Cell:
    """An outer momentum as large as the cap allows, up to 0.9, from the second round on."""
    changes = {**cell.changes, "momentum": 0.9, "momentum_warmup": 0}
    return dataclasses.replace(cell, name=f"{cell.name} gain {gain:g}", changes=changes, gain=gain)


LONGER = [
    dataclasses.replace(cell, setting=Setting(steps=4 * STEPS))
    for cell in (
        full(" 4 x longer"),
        *(sign_loco(f" at {lr:g} 4 x longer", lr, steps=4 * STEPS) for lr in (4e-3, 8e-3)),
    )
]

QUESTIONS = {
    **{f"published form of {name}": cells for name, cells in FORMS.items()},
    **MEMORY,
    **TRANSFORM,
    **OTHERS,
    "demo in AdamW's form": DEMO_ADAMW,
    **{f"decoupled R = {r}": decoupled(r) for r in (2, 4, 8)},
    **DIVISORS,
    **VALUES,
    **OWNERS,
    "feedback": [
        full(),
        *(make(f" {b}", value_dtype=b) for b in CODES for make in (sign_loco, with_feedback)),
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
    "cap on the gain": [
        full(),
        diloco(),
        *(under(diloco(), gain) for gain in (0.8, 1.0, 1.3, 2.0)),
        sign_loco(),
        *(under(sign_loco(), gain) for gain in (1.0, 1.3, 1.6)),
    ],
    "a change of the gradient": [
        Cell(f"local_sgd H={H}", "local_sgd", {"period": H}, 1.4e-3),
        *(Cell(f"sel_sync delta {d:g}", "sel_sync", {"delta": d}, 1.4e-3) for d in (0.3, 5e-3)),
    ],
    **{f"rise in {n} x {STEPS} steps": rising(n) for n in (1, 2)},
    "every value in one bit": [
        full(),
        sign_muloco(),
        *(
            sign_muloco(f" with AdamW at {lr:g}", lr, inner_optimizers=["adamw"])
            for lr in (2e-3, 2.8e-3, 4e-3)
        ),
    ],
    "rates of a run of 4 x the length": LONGER,
}
