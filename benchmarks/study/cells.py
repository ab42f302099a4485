"""What the study trains: a cell is one method with its settings, a run is a cell and a seed."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import fsdp_demo
from fsdp_demo import ExchangeConfig, preset
from study.gain import capped
from study.owners import owned
from study.texts import digest
from study.transforms import OVER_ALL, TRIALS, register

HERE = Path(__file__).resolve().parent
RECIPES = HERE.parents[1] / "recipes"
MODEL = "study-small"
"""0.49 M parameters, in recipes/models."""


@dataclass(frozen=True)
class Setting:
    """What a run trains on; every field is part of its key.

    Attributes:
        model: a json of recipes/models by name. data: as `--data` of pretrain.py.
        steps: optimizer steps. batch: rows per replica and step. length: bytes per row.
        warmup: steps of linear warm-up, then cosine down to `floor` of the rate.
        held_out: rows of validation text. precision: of forward and backward, "bf16" (autocast) or
            "fp32"; parameters and optimizer are fp32.
    """

    model: str = MODEL
    data: str = "stdlib"
    steps: int = 480
    batch: int = 8
    length: int = 128
    warmup: int = 24
    held_out: int = 512
    precision: str = "bf16"
    floor: float = 0.1

    @property
    def tokens(self) -> int:
        """Tokens one replica trains on."""
        return self.steps * self.batch * self.length


@dataclass(frozen=True)
class Cell:
    """One method: a preset with changes, a learning rate of the inner optimizer, a number of
    replicas.

    Attributes:
        name: what tables call it; cells of one name and setting are the same.
        setting: None, the setting of the command.
        attach_at: steps that are trained by `full` before this method is attached.
        slow: replica 0 takes half the rows of a step, as an island of half the speed would.
        inner: options of the inner optimizer, such as betas.
        gain: 0, or a cap on the steady step of a round (gain.py) in place of a rise.
        owners: None, or what owners of blocks send back of each 4096 values, and the weight of what
            they keep (owners.py).
    """

    name: str
    preset: str
    changes: dict[str, Any] = field(default_factory=dict)
    lr: float = 2e-3
    replicas: int = 4
    setting: Setting | None = None
    attach_at: int = 0
    slow: bool = False
    inner: dict[str, Any] = field(default_factory=dict)
    gain: float = 0.0
    owners: tuple[int, float] | None = None

    def config(self) -> ExchangeConfig:
        """Gradients are clipped at norm 1.0 under every method, unless the cell says otherwise. The
        preset's published rate is left out: `lr` says the rate.

        Raises:
            ValueError: the library has no such preset or setting.
        """
        if {*TRIALS, OVER_ALL} & {v for v in self.changes.values() if isinstance(v, str)}:
            register()
        made = preset(self.preset, **{"clip": 1.0, **self.changes})
        made = dataclasses.replace(made, lr=None)
        made = owned(made, *self.owners) if self.owners else made
        return capped(made, self.gain) if self.gain else made


@dataclass(frozen=True)
class Run:
    """A cell, the setting it runs at, and the seed of weights and order of the data."""

    cell: Cell
    setting: Setting
    seed: int

    def key(self, version: str) -> str:
        """Digest of everything that decides the result: the setting, the seed, the whole
        configuration (not the cell's name), the model's file, the texts, and `version` of the
        code.
        """
        text = json.dumps({**self._facts, "version": version}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @functools.cached_property
    def _facts(self) -> dict[str, Any]:
        cell, setting = self.cell, self.setting
        facts = dataclasses.asdict(setting)
        if setting.floor == Setting.floor:
            del facts["floor"]  # it came later: runs at its default keep their keys
        return {
            "setting": facts,
            "seed": self.seed,
            "texts": digest(setting.data, setting.length, setting.held_out),
            "model": model_file(self.setting.model).read_text("utf-8"),
            "lr": cell.lr,
            "replicas": cell.replicas,
            "attach_at": cell.attach_at,
            "slow": cell.slow,
            "config": said(dataclasses.replace(cell, gain=0.0, owners=None).config()),
            **({"inner": cell.inner} if cell.inner else {}),
            **({"gain": cell.gain} if cell.gain else {}),
            **({"owners": cell.owners} if cell.owners else {}),
        }

    @property
    def size(self) -> float:
        """Parameters times tokens of all replicas: what the time of a run goes by."""
        return parameters(self.setting.model) * self.setting.tokens * self.cell.replicas


def model_file(name: str) -> Path:
    return RECIPES / "models" / f"{name}.json"


@functools.cache
def parameters(name: str) -> int:
    """Parameters of a Llama of recipes/models with untied embeddings, by its file."""
    c = json.loads(model_file(name).read_text("utf-8"))
    wide, inner = c["hidden_size"], c["intermediate_size"]
    kept = c["num_key_value_heads"] / c["num_attention_heads"]
    layer = wide * (2 * wide + 2 * int(kept * wide) + 3 * inner + 2)
    return int(c["num_hidden_layers"] * layer + (2 * c["vocab_size"] + 1) * wide)


CALCULATES = (
    *("channels/", "compression/", "exchange/", "hosts/", "peers/collectives", "peers/header"),
    *("config/channel", "config/fragments", "config/parts", "config/channel", "config/schema"),
)
"""Beginnings of the paths, in the library, of what decides where a cell ends. Presets are not among
them: a key has the whole configuration.
"""

TRAINS = (
    *("run.py", "together.py", "precision.py", "texts.py"),
    *("gain.py", "owners.py", "transforms.py"),
)
"""Files of this folder that do, too."""


@functools.cache
def code_version() -> str:
    """Digest of what calculates: the library's parts that do, what trains a cell, and the versions
    of torch and of transformers, which makes the forward pass. The rest of the library, tables,
    statistics and pictures are no part of it.
    """
    library = Path(fsdp_demo.__file__).parent
    paths = sorted(
        path
        for path in library.rglob("*.[pc]*")
        if path.suffix in (".py", ".c")
        and path.relative_to(library).as_posix().startswith(CALCULATES)
    )
    ours = [
        *(HERE / name for name in TRAINS),
        *(RECIPES / name for name in ("data.py", "model.py", "pretrain_parts.py")),
    ]
    versions = f"{torch.__version__} {metadata.version('transformers')}"
    digest = hashlib.sha256(versions.encode())
    for path in (*paths, *ours):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:12]


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
