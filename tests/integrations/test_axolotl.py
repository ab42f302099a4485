"""The plug-in for axolotl, by axolotl's own PluginManager, on a Trainer as axolotl builds one."""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")
pytest.importorskip("addict", reason="axolotl needs addict and peft")
pytest.importorskip("peft", reason="axolotl needs addict and peft")
pytest.importorskip("axolotl", reason="pip install --no-deps axolotl==0.19.0")

import pydantic  # noqa: E402
from axolotl.integrations.base import PluginManager  # noqa: E402
from axolotl.utils.dict import DictDefault  # noqa: E402
from transformers import Trainer  # noqa: E402

from fsdp_demo.integrations import axolotl  # noqa: E402
from fsdp_demo.integrations.trainer import ExchangeCallback, unedited  # noqa: E402

from ..support import trainer_script as script  # noqa: E402

NAME = "fsdp_demo.integrations.axolotl.ExchangePlugin"
DILOCO = {"exchange": "diloco", "exchange_set": {"period": 2}}


def prepared(folder: Path, cfg: dict[str, Any], **changes: Any) -> tuple[Any, DictDefault]:
    """A Trainer behind all that axolotl does with its plug-ins before it trains."""
    manager, cfg = PluginManager.get_instance(), DictDefault(cfg)
    manager.register(NAME)
    trainer = script.trainer(folder / "out", {}, split=False, **changes)
    for callback in manager.add_callbacks_post_trainer(cfg, trainer):
        trainer.add_callback(callback)
    manager.post_trainer_create(cfg, trainer)
    return trainer, cfg


# ---- without processes ------------------------------------------------------------------------


def test_axolotl_reads_its_keys() -> None:
    """The keys of the YAML are merged with axolotl's, as axolotl does it."""
    manager = PluginManager.get_instance()
    manager.register(NAME)
    (name,) = manager.get_input_args()
    module, kind = name.rsplit(".", 1)
    names: dict[str, Any] = {"Base": type("Base", (pydantic.BaseModel,), {"__module__": __name__})}
    exec(f"from {module} import {kind}\nclass Merged(Base, {kind}): pass\n", names)
    merged = names["Merged"](**DILOCO, plugins=[NAME])
    assert merged.model_dump(exclude_none=True) == DILOCO
    with pytest.raises(ValueError, match="exchange\n  Field required"):
        names["Merged"](exchange_set={"period": 2})


@pytest.mark.parametrize(
    ("cfg", "settings", "text"),
    [
        ({"exchange": "dilco"}, {}, "dilco"),
        ({"exchange": "diloco", "exchange_set": {"periods": 2}}, {}, "has no setting 'periods'"),
        ({"exchange": "diloco", "exchange_set": {"clip": 0.5}}, {},
         "clip=0.5 beside max_grad_norm=1.0: set max_grad_norm alone"),
        (DILOCO, {"auto_find_batch_size": True}, "auto_find_batch_size=True"),
    ],
)  # fmt: skip
def test_axolotl_refusals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cfg, settings, text: str
) -> None:
    """What cannot work is refused before axolotl trains, in a sentence."""
    monkeypatch.setenv("ISLAND_COUNT", "2")
    monkeypatch.setenv("ISLAND_ENDPOINT", "127.0.0.1:1")
    with pytest.raises((ValueError, FileNotFoundError)) as refused:
        prepared(tmp_path, cfg, **settings)
    assert text in str(refused.value)


@pytest.mark.parametrize(
    ("cfg", "settings", "steps", "warmup"),
    [
        ({}, {"max_steps": 9, "warmup_steps": 3}, 5, 2),
        ({"warmup_steps": 3}, {"max_steps": 9, "warmup_steps": 3}, 5, 3),
        ({"max_steps": 9}, {"max_steps": 9, "warmup_steps": 3}, 9, 3),
        ({}, {"max_steps": -1, "warmup_steps": 0.25}, -1, 0.25),
    ],
    ids=["counted", "warmup", "max_steps", "epochs"],
)  # fmt: skip
def test_axolotl_shares_the_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cfg, settings, steps: int, warmup: float
) -> None:
    """Steps that axolotl has counted for all rows are shared by the islands; those of the YAML
    stay.
    """
    monkeypatch.setenv("ISLAND_COUNT", "2")
    monkeypatch.setenv("ISLAND_ENDPOINT", "127.0.0.1:1")
    trainer, _ = prepared(tmp_path, {**DILOCO, **cfg}, **settings)
    assert (trainer.args.max_steps, trainer.args.warmup_steps) == (steps, warmup)
    assert len(trainer.train_dataset) == script.ROWS // 2


def test_axolotl_trains_without_a_missing_plugin() -> None:
    """axolotl goes on without a plug-in that cannot be imported: what docs/yaml.md warns of."""
    manager = PluginManager.get_instance()
    manager.register("fsdp_demo.integrations.axolotel.ExchangePlugin")
    assert "fsdp_demo.integrations.axolotel.ExchangePlugin" not in manager.plugins


# ---- two islands --------------------------------------------------------------------------------


def trained(folder: Path, cfg: dict[str, Any], kind: type | None = None, **changes: Any) -> Any:
    """The Trainer after axolotl's `execute_training`."""
    trainer, cfg = prepared(folder, cfg, **changes)
    if kind is not None:
        trainer.__class__ = kind
    begun: list[int] = []
    step = trainer.training_step
    trainer.training_step = lambda *a, **k: begun.append(trainer.state.global_step) or step(*a, **k)
    trainer.train(resume_from_checkpoint=cfg.resume_from_checkpoint)
    exchange = script.exchange_of(trainer)
    return SimpleNamespace(
        begun=begun[0],
        steps=exchange.step,
        agree=exchange.digests_equal(),
        rows=len(trainer.train_dataset),
        folder=cfg.output_dir,
        optimizer=type(getattr(trainer.optimizer, "optimizer", trainer.optimizer)).__name__,
        parameters=script.parameters(trainer),
    )


def test_axolotl_stops_and_resumes(run_ranks, tmp_path: Path) -> None:
    """Two islands train one model. With `auto_resume_from_checkpoints`, and after a restart by the
    launcher, they go on from the newest checkpoint.
    """

    def run(rank, cfg, steps):
        return trained(tmp_path, {**DILOCO, "max_steps": steps, **cfg}, max_steps=steps)

    def ranks(cfg, steps, **env):
        found = run_ranks(run, 2, 1, env=env, args=(cfg, steps))
        for island, one in enumerate(found):
            assert one.agree and one.steps == steps and one.rows == script.ROWS // 2
            assert one.folder == f"{tmp_path}/out/island{island}"
            assert torch.equal(one.parameters, found[0].parameters)
        return [one.begun for one in found]

    assert ranks({}, 4) == [0, 0]
    assert ranks({"auto_resume_from_checkpoints": True}, 8) == [4, 4]
    assert ranks({}, 12, ISLAND_ATTEMPT="1") == [8, 8]


def test_axolotl_brings_the_optimizer(run_ranks, tmp_path: Path) -> None:
    """A preset with an optimizer of its own brings it, through axolotl's own OptimizerMixin, and
    nothing is added twice below `launch --exchange`.
    """

    def run(rank):
        (package,) = importlib.util.find_spec("axolotl").submodule_search_locations
        # its packages import what a GPU needs
        mixin = runpy.run_path(f"{package}/core/trainers/mixins/optimizer.py")["OptimizerMixin"]
        patch = pytest.MonkeyPatch()
        given = Trainer.train
        patch.setattr(Trainer, "train", lambda self, *a, **k: unedited.train(given, self, *a, **k))
        kind = type("Mixed", (mixin, Trainer), {})
        for name in ("loraplus_lr_ratio", "embedding_lr_scale", "embedding_lr", "lr_groups"):
            patch.setattr(script.TrainingArguments, name, None, raising=False)
        cfg = {"exchange": "demo", "exchange_set": {"codec.topk": 4}, "max_steps": 4}
        return trained(tmp_path, cfg, kind, max_steps=4)

    one, other = run_ranks(run, 2, 1, env={"ISLAND_EXCHANGE": "diloco"})
    assert one.optimizer == other.optimizer == "SGD" and one.agree and other.agree
    assert torch.equal(one.parameters, other.parameters)


def test_axolotl_callback_is_plain() -> None:
    """The plug-in adds the callback that scripts add, which `launch --exchange` leaves alone."""
    assert unedited.added.__defaults__ == (ExchangeCallback,)
    assert axolotl.ExchangePlugin().get_input_args() == f"{axolotl.__name__}.ExchangeArgs"
