"""The overrides for torchtitan, named on its own command line, under its own Trainer on a CPU
(tests/support/titan.py).
"""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("torchtitan", reason="pip install --no-deps torchtitan==0.3.0")
pytest.importorskip("torchdata", reason="torchtitan needs torchdata, tyro, spmd_types, tensorboard")

from ..support import titan  # noqa: E402, I001 (it prepares torchtitan)

from fsdp_demo.exchange import guard  # noqa: E402
from fsdp_demo.integrations import torchtitan  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402
from torchtitan.components.optimizer import OptimizersContainer, default_adamw  # noqa: E402
from torchtitan.config.override import (  # noqa: E402
    OverrideConfig,
    apply_overrides,
    parse_cli_imports,
)

OPTIMIZER = "fsdp_demo.integrations.torchtitan.optimizer="
DATA = "fsdp_demo.integrations.torchtitan.dataloader"


def line(**keywords: object) -> list[str]:
    return ["--override.imports", OPTIMIZER + json.dumps(keywords), DATA]


DILOCO = line(preset="diloco", period=3)
MODEL_ONLY = ["--checkpoint.last_save_model_only"]  # at the end of the job

# ---- without processes ------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class Other(OptimizersContainer.Config):
    pass


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"preset": "dilco"}, None, "dilco"),
        ({"preset": "diloco", "periods": 2}, None, "preset 'diloco' has no setting 'periods'"),
        ({"preset": "diloco", "clip": 1.0}, None, "the norm that clips is --training.max_norm"),
        ({"preset": "diloco", "local_steps": "by_speed"}, None, "leave it 'equal'"),
        ({"preset": "diloco"}, Other, "the optimizers must be an OptimizersContainer"),
    ],
)  # fmt: skip
def test_torchtitan_refusals(changes, kind, text: str) -> None:
    """What cannot work is refused when the overrides are applied, in a sentence."""
    config = titan.small()
    config.optimizer = kind() if kind else config.optimizer
    with pytest.raises((ValueError, FileNotFoundError), match=text):
        apply_overrides(OverrideConfig(imports=parse_cli_imports(line(**changes)[1:])), config)


def test_torchtitan_needs_its_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a loop of somebody's own the optimizers say what to call."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    config = torchtitan.optimizer(default_adamw(), "diloco")
    with pytest.raises(RuntimeError, match="else call fsdp_demo.attach"):
        config.build(model_parts=[torch.nn.Linear(2, 2)]).zero_grad()


def test_torchtitan_pipeline_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of an island that hold unlike stages of a pipeline are refused when they attach."""

    class Staged:
        parallel_dims, step, config = SimpleNamespace(pp_enabled=True), 1, titan.small()

        def train_step(self) -> None:
            self.optimizers.zero_grad()

    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    staged = Staged()
    config = torchtitan.optimizer(default_adamw(), "diloco")
    staged.optimizers = config.build(model_parts=[torch.nn.Linear(2, 2)])
    with pytest.raises(ValueError, match="pipeline_parallel_degree above 1"):
        staged.train_step()


def test_torchtitan_overrides_claim_their_nodes() -> None:
    """The loader of the training data is changed, that of the evaluation is not; the configuration
    can be printed.
    """
    config = titan.small()
    apply_overrides(OverrideConfig(imports=parse_cli_imports(DILOCO[1:])), config)
    changed = {name for name in ("dataloader", "optimizer") if "fsdp_demo" in type(
        getattr(config, name)).__module__}  # fmt: skip
    assert changed == {"dataloader", "optimizer"}
    assert "fsdp_demo" not in type(config.validator.dataloader).__module__
    assert '"preset": "diloco"' in json.dumps(config.to_dict())


# ---- two islands --------------------------------------------------------------------------------


def facts(made):
    exchange, loader = made.optimizers._exchange, made.dataloader
    return {
        "steps": (made.step, exchange.step, made.lr_schedulers.state_dict()["last_epoch"]),
        "rows": (loader.dp_rank, loader.dp_world_size),
        "agree": exchange.finished and exchange.digests_equal(),
        "clips": (exchange.config.clip, made.config.training.max_norm),
        "parameters": titan.parameters(made),
    }


@pytest.mark.parametrize("procs", [1, 2])
def test_torchtitan_islands_agree(run_ranks, procs: int) -> None:
    """Two islands train one model, each its part of the data, and say so; torchtitan clips."""

    def run(rank):
        return facts(titan.trained(rank.folder / f"island{rank.island}", *DILOCO))

    ranks = run_ranks(run, 2, procs, group=True, timeout=120)
    assert [found["rows"] for found in ranks] == [(n, 2 * procs) for n in range(2 * procs)]
    for found in ranks:
        assert found["steps"] == (8, 8, 8) and found["agree"] and found["clips"] == (None, 1.0)
        assert torch.equal(found["parameters"], ranks[0]["parameters"])


def test_torchtitan_full_clips_the_mean(run_ranks) -> None:
    """Where the method clips the mean gradient, torchtitan does not clip before."""

    def run(rank):
        words = line(preset="full")
        return facts(titan.trained(rank.folder / f"island{rank.island}", *words))

    one, other = run_ranks(run, 2, 1, group=True, timeout=120)
    assert one["clips"] == other["clips"] == (1.0, float("inf"))
    assert torch.equal(one["parameters"], other["parameters"])


def test_torchtitan_resumes_bit_for_bit(run_ranks, tmp_path) -> None:
    """Islands that were cut off behind a checkpoint between two exchanges end as those that were
    not. One that has lost its folder goes on from the other's step.
    """

    def run(rank, folder, stop):
        made = titan.trained(folder / f"island{rank.island}", *DILOCO, stop=stop)
        if stop:
            made.optimizers._exchange.detach()
        return None if stop else facts(made)

    def ranks(name, stop=0):
        return run_ranks(run, 2, 1, group=True, timeout=120, args=(tmp_path / name, stop))

    whole = ranks("whole")
    ranks("cut", 5)
    again = ranks("cut")
    for found, before in zip(again, whole, strict=True):
        assert found["steps"] == (8, 8, 8)
        assert torch.equal(found["parameters"], before["parameters"])
    ranks("lost", 5)
    (tmp_path / "lost" / "island1").rename(tmp_path / "away")
    one, other = ranks("lost")
    assert one["steps"] == other["steps"] == (8, 8, 8)
    assert torch.equal(one["parameters"], other["parameters"])


def left(status: int) -> None:
    raise SystemExit(status)


@pytest.mark.parametrize("procs", [1, 2])
def test_torchtitan_sigterm_saves(run_ranks, everywhere, tmp_path, procs: int) -> None:
    """Told to end between two of torchtitan's saves, islands save the step that is under way and
    end with 75. They go on from there, and end as those that were not told.
    """
    everywhere.setattr(guard, "leave", left)

    def run(rank, name, told):
        made = titan.trainer(tmp_path / name / f"island{rank.island}", *DILOCO, *MODEL_ONLY)
        go_on = made.should_continue_training

        def tell() -> bool:
            if rank.proc == 0 and made.step == told:
                os.kill(os.getpid(), signal.SIGTERM)
            if told > 0 and procs > 1:  # ranks of an island vote once a second
                time.sleep(0.4)
            return go_on()

        made.should_continue_training = tell
        try:
            made.train()
        except SystemExit as end:
            return end.code, made.step
        return facts(made)

    def ranks(*args):
        return run_ranks(run, 2, procs, group=True, timeout=120, args=args)

    whole, cut, again = ranks("whole", -1), ranks("cut", 4), ranks("cut", -1)
    assert {status for status, _ in cut} == {75} and {step for _, step in cut} <= {5, 6, 7}
    for found, before in zip(again, whole, strict=True):
        assert found["steps"] == (8, 8, 8) and found["agree"]
        assert torch.equal(found["parameters"], before["parameters"])


def test_torchtitan_begins_on_a_foreign_checkpoint(run_ranks, tmp_path) -> None:
    """A checkpoint of a run without an exchange is refused by torchtitan, unless `fresh` says that
    the exchange has no state in it.
    """

    def run(rank):
        titan.trained(tmp_path, stop=4)
        with pytest.raises(CheckpointException, match="Missing key .* optimizer.exchange.rank0"):
            titan.trained(tmp_path, *DILOCO)
        return facts(titan.trained(tmp_path, *line(preset="diloco", period=3, fresh=True)))

    (found,) = run_ranks(run, 1, 1, group=True, timeout=120)
    assert found["steps"] == (8, 8, 8)
