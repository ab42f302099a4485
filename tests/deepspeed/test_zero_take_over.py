"""ZeRO replicas that see no checkpoint take over from those that have one: plain DeepSpeed, the
recipe, and the Trainer.

Each replica has a directory of its own, as on disks that nobody shares."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers.integrations.deepspeed  # noqa: F401

from deepspeed_ext.checkpoints import OF_DEEPSPEED, advance
from fsdp_demo import Topology
from fsdp_demo.checkpoint.files import copied

from ..support import trainer_script as script
from ..support import zero
from ..support.inside import in_ranks
from ..support.trainer_script import history, one_line
from .test_zero_resume import N, differences, everything, load, make, root_of, save

CASES = [
    # stage, preset, whether each replica has a disk of its own
    ("zero1", "full", True), ("zero2", "demo", True), ("zero3-parts", "diloco", True),
    ("zero2", "streaming_diloco", True), ("zero2", "streaming_diloco", False),
    ("zero2", "demo", False),
]  # fmt: skip


@pytest.mark.parametrize("stage, preset, own", CASES)
@pytest.mark.parametrize("lost", [0, 1])
def test_zero_take_over_ends_equal(run_ranks, tmp_path, stage, preset, own, lost) -> None:
    """A replica that lost its folder takes over, also where it sees that of the other, which goes
    on from its own; both end equal.
    """
    args = (tmp_path, zero.settings(stage), preset, own)
    saved = run_ranks(save, args=args)
    homes = [Path(root_of(SimpleNamespace(island=i), tmp_path, own)) / f"island{i}" for i in (0, 1)]
    shutil.rmtree(homes[lost])
    out = run_ranks(partial(load, saves=True), args=args, check=False)
    assert all(o.error is None for o in out), [o.error for o in out if o.error]
    for island, home in enumerate(homes):
        kept = {f"global_step{n}" for n in ((2 * N,) if island == lost else (N, 2 * N))}
        assert {p.name for p in home.glob("global_step*")} == kept
    for o, before in zip(out, saved, strict=True):
        value, donor, island = o.value, out[2 * (1 - lost) + o.rank % 2].value, o.rank // 2
        assert value["steps"] == donor["steps"] == saved[0]["steps"]
        assert value["steps"][0] == value["steps"][2] == N
        assert value["samples"] == donor["samples"]
        assert differences(value["end"], donor["end"]) == []
        mine = {k: v for k, v in value["client"].items() if k not in OF_DEEPSPEED}
        assert mine.pop("tensor", None) is None or island != lost
        assert mine == {"mine": [3, "x"]}
        assert Path(value["path"]).is_relative_to(homes[island] / f"global_step{N}")
        if island != lost:
            assert differences(value["masters"], before["masters"]) == []
            assert differences(value["inner"], before["inner"]) == []
        if preset == "full":  # nothing is lost: as if the folder were there
            assert value["losses"] == before["losses"]
            assert differences(value["end"], before["end"]) == []
    log = out[2 * lost].log
    said = f"island{lost} holds no whole checkpoint: took over step {N} from island{1 - lost}"
    assert said in log and "begin anew here" in log
    assert "with its client_state; without tensor, which are not plain JSON" in log


def test_zero_take_over_weights_alone_refused(run_ranks, tmp_path) -> None:
    """Weights alone are not taken over."""
    args = (tmp_path, zero.settings("zero1"), "demo", True)
    run_ranks(save, args=args)
    shutil.rmtree(tmp_path / "disk1")
    for tag, options, *said in (
        (None, {"load_module_only": True}, "load_module_only: no replica takes over weights alone"),
        (f"global_step{N}", {},
            "no checkpoint is seen by all replicas (island0: global_step5; island1: none)",
            "without a tag, an island that holds no checkpoint takes over from the others"),
    ):  # fmt: skip
        for o in run_ranks(load, args=(*args, tag, 0, options), check=False):
            assert f"NeedsDecision: {said[0]}" in str(o.error)
            assert all(words in str(o.error) for words in said)


@in_ranks(3, 1, group=True)
def test_zero_take_over_from_furthest(me, tmp_path) -> Any:
    """All replicas take over from the furthest. Island 0 saves after step 4, island 1 after step 5,
    between the same exchanges; island 2 nowhere.
    """
    config, root = zero.settings("zero1"), root_of(me, tmp_path, True)
    made, exchange = make(config, "diloco")
    for step in (4, 5):
        zero.train(made, range(exchange.step, step), me.rank)
        if me.island == step - 4:
            made.save_checkpoint(root)
    exchange.detach()
    where = replace(Topology.from_env(), run="again")
    again, exchange = make(config, "diloco", seed=8 + me.island, topology=where)
    again.load_checkpoint(root)
    steps = everything(again, exchange)["steps"]
    assert steps[0] == 5
    zero.train(again, range(5, 9), me.rank)
    exchange.finish()
    return steps, copied(exchange.host.tensors("parameter"))


def test_zero_take_over_engine_forwarded() -> None:
    """The counters and the scheduler of an engine are forwarded to the step of the donor."""

    class Engine:
        global_steps, global_samples, lr_scheduler = 2, 8, None

        def train_batch_size(self) -> int:
            return 4

    engine = Engine()
    advance(engine, 5)
    assert (engine.global_steps, engine.global_samples) == (5, 20)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
    engine.lr_scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    advance(engine, 5)
    advance(engine, 7)
    assert optimizer.param_groups[0]["lr"] == 0.25


# ---- the recipe and the Trainer ----------------------------------------------------------------


@pytest.mark.parametrize(
    "stage, preset, changes",
    [("zero1", "full", {}), ("zero2", "demo", {}), ("zero3", "diloco", {"period": 3})],
)
@in_ranks(timeout=120)
def test_zero_take_over_trainer(me, stage, preset, changes) -> None:
    """The Trainer takes over from the other replica."""
    plan = {"max_steps": 10, "save_steps": 5, "eval_strategy": "no", "logging_steps": 1}
    plan |= {"deepspeed": zero.for_trainer(stage)}
    where, out = me.folder / f"disk{me.island}" / "out", []
    for resume in (None, True):
        trained = script.trained(where, one_line(preset, **changes), resume=resume, **plan)
        assert (trained.state.global_step, trained.deepspeed.global_steps) == (10, 10)
        masters = script.parameters(trained)
        assert torch.equal(zero.shown(trained), masters)
        out.append((masters, history(trained, "learning_rate")[-5:]))
        torch.distributed.barrier()
        if me.proc == 0 and resume is None:
            home = where / f"island{me.island}"
            shutil.rmtree(home if me.island else home / "checkpoint-10")
        torch.distributed.barrier()
    (first, rates), (again, same) = out
    assert rates == same and (preset != "full" or torch.equal(again, first))
    return again
