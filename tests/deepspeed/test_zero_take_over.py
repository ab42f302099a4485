"""ZeRO replicas that see no checkpoint take over from those that have one: plain DeepSpeed, the
recipe, and the Trainer.

Each replica has a directory of its own, as on disks that nobody shares."""

import json
import logging
import shutil
import time
from dataclasses import replace
from pathlib import Path
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
from .test_zero_resume import N, differences, everything, make


def root_of(me: Any, root: Path) -> str:
    return str(root / f"disk{me.island}")


def save(me: Any, root: Path, config: dict[str, Any], preset: str) -> dict[str, Any]:
    made, exchange = make(config, preset)
    zero.train(made, range(N), me.rank)
    made.save_checkpoint(
        root_of(me, root), client_state={"mine": [3, "x"], "tensor": torch.ones(2)}
    )
    losses = zero.train(made, range(N, 2 * N), me.rank)
    exchange.finish()
    return {"losses": losses, "end": copied(exchange.host.tensors("parameter"))}


def load(me, root, config: dict[str, Any], preset: str, options: dict[str, Any]) -> dict[str, Any]:
    """A fresh engine of other weights; from there to the end, and a save of its own."""
    logging.basicConfig(level=logging.WARNING, force=True)
    made, exchange = make(config, preset, seed=8 + me.island)
    path, client = made.load_checkpoint(root_of(me, root), **options)
    samples, steps = made.global_samples, everything(made, exchange)["steps"]
    losses = zero.train(made, range(N, 2 * N), me.rank)
    made.save_checkpoint(root_of(me, root))
    exchange.finish()
    kept = sorted(p.name for p in Path(root_of(me, root)).glob(f"island{me.island}/global_step*"))
    mine = {k: v for k, v in (client or {}).items() if k not in OF_DEEPSPEED and k != "tensor"}
    return {
        "path": path,
        "client": mine,
        "samples": samples,
        "steps": steps,
        "losses": losses,
        "kept": kept,
        "end": copied(exchange.host.tensors("parameter")),
    }


CASES = [
    ("zero1", "full"), ("zero2", "demo"), ("zero3-parts", "diloco"), ("zero2", "streaming_diloco"),
]  # fmt: skip


@pytest.mark.parametrize("stage, preset", CASES)
@pytest.mark.parametrize("lost", [0, 1])
def test_zero_take_over_ends_equal(run_ranks, tmp_path, stage, preset, lost) -> None:
    """A replica that lost its folder takes over, and both end equal."""
    config = zero.settings(stage)
    saved = run_ranks(save, args=(tmp_path, config, preset))
    shutil.rmtree(tmp_path / f"disk{lost}")
    out = run_ranks(load, args=(tmp_path, config, preset, {}), check=False)
    assert all(o.error is None for o in out), [o.error for o in out if o.error]
    for o in out:
        value, donor = o.value, out[2 * (1 - lost) + o.rank % 2].value
        assert value["steps"] == donor["steps"]
        assert value["steps"][0] == value["steps"][2] == N
        assert value["samples"] == donor["samples"]
        assert differences(value["end"], donor["end"]) == []
        assert value["client"] == {"mine": [3, "x"]}
        assert set(value["kept"]) == {f"global_step{2 * N}"} | (
            set() if o.rank // 2 == lost else {f"global_step{N}"}
        )
        assert f"global_step{N}" in value["path"] and f"disk{o.rank // 2}" in value["path"]
        if preset == "full":  # nothing is lost: as if the folder were there
            assert value["losses"] == saved[o.rank]["losses"]
            assert differences(value["end"], saved[o.rank]["end"]) == []
    log = out[2 * lost].log
    assert (
        f"took over step {N} from island{1 - lost}, with its client_state; without tensor, which "
        "are not plain JSON"
    ) in log
    assert "begin anew here" in log


def test_zero_take_over_weights_alone_refused(run_ranks, tmp_path) -> None:
    """Weights alone are not taken over."""
    config = zero.settings("zero1")
    run_ranks(save, args=(tmp_path, config, "demo"))
    shutil.rmtree(tmp_path / "disk1")
    for o in run_ranks(
        load, args=(tmp_path, config, "demo", {"load_module_only": True}), check=False
    ):
        assert "NeedsDecision: load_module_only: no replica takes over weights alone" in str(
            o.error
        )
    for o in run_ranks(
        load, args=(tmp_path, config, "demo", {"tag": f"global_step{N}"}), check=False
    ):
        assert (
            "NeedsDecision: no checkpoint is seen by all replicas (island0: global_step5; island1: "
            "none)"
        ) in str(o.error)
        assert (
            "without a tag, an island that holds no checkpoint takes over from the others"
            in str(o.error)
        )


def unlike(me: Any, root: Path, config: dict[str, Any]) -> list[Any]:
    """Island 0 saves after step 4, island 1 after step 5, between the same exchanges; island 2
    nowhere.
    """
    made, exchange = make(config, "diloco")
    for step in (4, 5):
        zero.train(made, range(exchange.step, step), me.rank)
        if me.island == step - 4:
            made.save_checkpoint(root_of(me, root))
    exchange.detach()
    again, exchange = make(
        config, "diloco", seed=8 + me.island, topology=replace(Topology.from_env(), run="again")
    )
    again.load_checkpoint(root_of(me, root))
    loaded = everything(again, exchange)["steps"]
    zero.train(again, range(5, 9), me.rank)
    exchange.finish()
    return [loaded, copied(exchange.host.tensors("parameter"))]


def test_zero_take_over_from_furthest(run_ranks, tmp_path) -> None:
    """All replicas take over from the furthest."""
    out = run_ranks(unlike, islands=3, procs=1, group=True, args=(tmp_path, zero.settings("zero1")))
    assert all(
        o[0] == out[1][0] and o[0][0] == 5 and differences(o[1], out[0][1]) == [] for o in out
    )


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


def test_zero_take_over_recipe(run_ranks, monkeypatch) -> None:
    """The recipe goes on after a take-over."""
    recipes = Path(__file__).parents[2] / "recipes"
    monkeypatch.syspath_prepend(str(recipes))
    import pretrain_deepspeed

    def work(me):
        patch = pytest.MonkeyPatch()
        # lives share a process and its group here
        patch.setattr("torch.distributed.destroy_process_group", lambda *a: None)
        text = me.folder / "text.txt"
        if me.rank == 0:
            text.write_text("to be, or not to be, that is the question\n" * 400)
            (me.folder / "written").touch()
        while not (me.folder / "written").exists():
            time.sleep(0.01)
        flags = (
            "--model tiny --sequence_length 32 --exchange demo --lr 3e-3 --eval_batches 2 --steps "
            f"6 --data {text} --log_every 1"
        )
        flags += f" --save_every 3 --output {me.folder / f'disk{me.island}'}"
        out = []
        for more in ("", "--resume"):
            patch.setattr("sys.argv", ["pretrain_deepspeed.py", *flags.split(), *more.split()])
            pretrain_deepspeed.main()
            torch.distributed.barrier()
            home = me.folder / f"disk{me.island}" / f"island{me.island}"
            out.append(
                [
                    json.loads(line)["step"]
                    for line in (home / "metrics.jsonl").read_text().splitlines()
                ]
            )
            torch.distributed.barrier()  # everybody has read before anything is removed
            if me.proc == 0 and not more:
                shutil.rmtree(home if me.island else home / "global_step6")
                (home / "latest").write_text("global_step3") if not me.island else None
            torch.distributed.barrier()
        return out

    for o in run_ranks(work, islands=2, procs=2, timeout=180):
        assert o[0] == [1, 2, 3, 4, 5, 6] and o[1][-3:] == [4, 5, 6]


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
