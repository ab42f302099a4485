"""What the study compares: cells (one training run each) and the tables they stand in, as data."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from fsdp_demo import ExchangeConfig, preset
from fsdp_demo.config.patterns import EMBEDDINGS

EMBEDDING, ATTENTION, MLP = ["*embed*", "*lm_head*"], ["*self_attn*"], ["*mlp*"]
"""Shell patterns over parameter names of a Llama, by kind of matrix."""


@dataclass(frozen=True)
class Setting:
    """What all cells of a table share; every field is part of a cell's key.

    Attributes:
        model: a json of recipes/models by name.
        steps: optimizer steps. batch: rows per replica and step. length: bytes per row.
        seed: of the weights and of each replica's order of the data.
        warmup: steps of linear warm-up, then cosine down to a tenth.
        held_out: rows of validation text.
    """

    model: str = "study"
    steps: int = 480
    batch: int = 8
    length: int = 128
    seed: int = 0
    warmup: int = 24
    held_out: int = 512

    @property
    def tokens(self) -> int:
        """Tokens one replica trains on."""
        return self.steps * self.batch * self.length


@dataclass(frozen=True)
class Cell:
    """One training run: a preset with changes, a learning rate of the inner optimizer, a number of
    replicas.
    """

    name: str
    preset: str
    changes: dict[str, Any] = field(default_factory=dict)
    lr: float = 2e-3
    replicas: int = 4

    def config(self) -> ExchangeConfig:
        """Gradients are clipped at norm 1.0 under every method, unless the cell says otherwise.

        Raises:
            ValueError: the library has no such preset or setting.
        """
        return preset(self.preset, **{"clip": 1.0, **self.changes})

    def key(self, setting: Setting, texts: str) -> str:
        """Digest of everything that decides the result: the setting, the model, the data, the whole
        configuration (not the cell's name).
        """
        whole = {
            "setting": dataclasses.asdict(setting),
            "texts": texts,
            "lr": self.lr,
            "replicas": self.replicas,
        }
        text = json.dumps({**whole, "config": said(self.config())}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def said(node: Any) -> Any:
    """A configuration as plain data without what stands at its default: a setting that is added
    later changes no key.
    """
    if isinstance(node, (list, tuple)):
        return [said(part) for part in node]
    if not dataclasses.is_dataclass(node):
        return node
    return {
        f.name: said(getattr(node, f.name))
        for f in dataclasses.fields(node)
        if not _stands_at_default(f, getattr(node, f.name))
    }


def _stands_at_default(f: dataclasses.Field[Any], value: Any) -> bool:
    if f.default_factory is not dataclasses.MISSING:
        return bool(value == f.default_factory())
    return f.default is not dataclasses.MISSING and bool(value == f.default)


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
    ALONE,
    FULL,
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
    Cell(f"demo k=32 lr {DEMO_LR:g} DCT on all", "demo", {"momentum.no_transform": []}, lr=DEMO_LR),
    *(
        Cell(f"demo k=32 lr {lr:g} plain embeddings", "demo", APART, lr=lr)
        for lr in (1e-3, DEMO_LR, 4e-3)
    ),
    Cell(
        "demo in AdamW's form k=32 plain embeddings",
        "demo",
        {"inner_optimizer": "adamw", "sign": False, **APART},
    ),
    Cell(
        "demo in AdamW's form k=32 plain embeddings with sign",
        "demo",
        {"inner_optimizer": "adamw", "sign": True, **APART},
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
        return Cell(f"demo k=32 lr {DEMO_LR:g} DCT on {where}", "demo", only, lr=DEMO_LR)
    return sparse("decoupled_momentum", 5, 32, " consensus", f" DCT on {where}", **only)


TRANSFORM = [transformed(where, source) for source in ("delta", "gradient") for where in WHERE]

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

TABLES: dict[str, list[Cell]] = {
    "first": FIRST,
    "transform": TRANSFORM,
    "rounds": ROUNDS_TABLE,
    "bytes": BYTES,
}
