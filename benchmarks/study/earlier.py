"""Tables of the first study: one seed, 0.92 M parameters. results/study.md shows them."""

from __future__ import annotations

from typing import Any

from fsdp_demo.config.channel import EMBEDDINGS
from study.cells import Cell, Setting
from study.methods import demo
from study.tables import Table

EMBEDDING, ATTENTION, MLP = ["*embed*", "*lm_head*"], ["*self_attn*"], ["*mlp*"]
"""Shell patterns over parameter names of a Llama, by kind of matrix."""

H, ROUNDS = 20, 24
"""Period of the methods with rounds, and how many of them 480 steps hold."""


def diloco(name: str, **changes: Any) -> Cell:
    return Cell(f"diloco {name}", "diloco", {"period": H, **changes})


def sparse(
    method: str, period: int, topk: int, form: str = "", end: str = "", **changes: Any
) -> Cell:
    """A cell of a sparse method on pseudo-gradients, named by what decides its bytes."""
    return Cell(
        f"{method}{form} H={period} k={topk}{end}",
        method,
        {"period": period, "topk": topk, **changes},
    )


ALONE = Cell("one replica alone", "full", replicas=1)
FULL = Cell("full bf16", "full", {"value_dtype": "bf16"})
LOCAL = Cell(f"local_sgd H={H}", "local_sgd", {"period": H})
DILOCO = diloco("0.7 / 0.9 (published)", momentum_warmup=0)
DILOCO_HALF = diloco("0.7 / 0.9 warm-up over half the rounds", momentum_warmup=ROUNDS // 2)
DILOCO_FITTED = diloco("0.7 / 0.5", momentum=0.5, momentum_warmup=0)
DEMO_LR = 2e-3
"""Of 1e-3, 2e-3 and 4e-3 the best: table "first"."""

APART = {"momentum.no_transform": list(EMBEDDINGS)}
"""Embedding and head without the transform."""

FIRST = [
    FULL,
    ALONE,
    LOCAL,
    DILOCO,
    DILOCO_HALF,
    DILOCO_FITTED,
    Cell(
        "streaming_diloco 0.4 / 0.9 (published)",
        "streaming_diloco",
        {"period": H, "layers": 1, "momentum_warmup": 0},
    ),
    Cell(
        "streaming_diloco 0.4 / 0.9 warm-up over half the rounds",
        "streaming_diloco",
        {"period": H, "layers": 1, "momentum_warmup": ROUNDS // 2},
    ),
    Cell(f"desloc H={H} : {3 * H} : {6 * H}", "desloc", {"period": H, "embeddings": True}),
    demo(f" k=32 lr {DEMO_LR:g} DCT on all", DEMO_LR),
    *(demo(f" k=32 lr {lr:g} plain embeddings", lr, **APART) for lr in (1e-3, DEMO_LR, 4e-3)),
    *(
        demo(
            f" in AdamW's form k=32 plain embeddings{end}",
            2e-3,
            inner_optimizer="adamw",
            sign=sign,
            **APART,
        )
        for end, sign in (("", False), (" with sign", True))
    ),
    sparse("decoupled_momentum", 5, 32, " consensus"),
    sparse("decoupled_momentum", 5, 32, " consensus", " with DCT", transform=True),
    sparse("decoupled_momentum", H, 128, " consensus", " with DCT", transform=True),
    sparse(
        "decoupled_momentum",
        H,
        128,
        " released replicas",
        " with DCT",
        rule="released",
        transform=True,
    ),
    sparse(
        "decoupled_momentum",
        H,
        128,
        " released senders",
        " with DCT",
        rule="released",
        reducer="senders",
        transform=True,
    ),
    sparse(
        "decoupled_momentum",
        H,
        128,
        " released replicas",
        " with DCT beta 0.5",
        rule="released",
        beta=0.5,
        transform=True,
    ),
    sparse("sparse_loco", H, 128),
    sparse("sparse_loco", 5, 32),
]

WHERE = {
    "nothing": None,
    "attention": [*EMBEDDING, *MLP],
    "MLP": [*EMBEDDING, *ATTENTION],
    "embedding and head": [*ATTENTION, *MLP],
    "all": [],
}
"""Where the transform acts -> the patterns of what it leaves alone (None: no transform)."""


def transformed(where: str, source: str) -> Cell:
    plain = WHERE[where]
    channel = {"delta": "delta", "gradient": "momentum"}[source]
    only: dict[str, Any] = (
        {"transform": False}
        if plain is None
        else {"transform": True, f"{channel}.no_transform": plain}
    )
    if source == "gradient":
        return demo(f" k=32 lr {DEMO_LR:g} DCT on {where}", DEMO_LR, **only)
    return sparse("decoupled_momentum", 5, 32, " consensus", f" DCT on {where}", **only)


TRANSFORM = {
    source: [transformed(where, source) for where in WHERE] for source in ("delta", "gradient")
}

NESTEROV = {"lr": 0.7, "applier.momentum": 0.9, "applier.nesterov": True, "applier.dense_lr": 0.7}
"""Outer momentum on top of error feedback."""

ROUNDS_TABLE = [
    LOCAL,
    Cell("local_sgd H=5", "local_sgd", {"period": 5}),
    diloco("0.7 / 0", momentum=0.0, momentum_warmup=0),
    DILOCO_FITTED,
    DILOCO,
    diloco("0.7 / 0.9 warm-up over a quarter of the rounds", momentum_warmup=ROUNDS // 4),
    DILOCO_HALF,
    diloco("0.7 / 0.9 warm-up over all rounds", momentum_warmup=ROUNDS),
    diloco("H=5 0.7 / 0.9 warm-up over 20 of 96 rounds", period=5, momentum_warmup=20),
    *(
        sparse(
            "sparse_loco",
            5,
            32,
            "",
            f" outer 0.7 / 0.9 warm-up over {share} rounds",
            **{**NESTEROV, "applier.momentum_warmup": rounds},
        )
        for share, rounds in (("half the", 48), ("all", 96))
    ),
]

BYTES = [
    FULL,
    LOCAL,
    Cell("local_sgd H=5", "local_sgd", {"period": 5}),
    *(
        sparse("sparse_loco", period, topk)
        for period, topk in ((20, 128), (10, 64), (5, 32), (2, 13), (1, 6))
    ),
]

TABLES: dict[str, Table] = {
    name: Table(question, groups, seeds=1, setting=Setting(model="study"))
    for name, question, groups in (
        ("first", "what is wrong", {"": FIRST}),
        ("transform", "where the DCT pays", TRANSFORM),
        ("rounds", "outer momentum", {"": ROUNDS_TABLE}),
        ("bytes", "one ratio, many periods", {"": BYTES}),
    )
}
