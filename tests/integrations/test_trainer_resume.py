"""Stop and resume under the Trainer: bit for bit with the same numbers, without a jump with others,
from a step that all islands hold.
"""

import json
import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")

from transformers import TrainerCallback  # noqa: E402

import fsdp_demo  # noqa: E402
from fsdp_demo.integrations.trainer import ExchangeCallback, exchange_optimizer  # noqa: E402
from fsdp_demo.integrations.trainer.setup import has_own_optimizer  # noqa: E402

from ..support import trainer_script as script  # noqa: E402
from ..support.inside import in_ranks
from .test_trainer import history  # noqa: E402

PERIODS = {
    name: {"period": 3}
    for name in (
        "local_sgd",
        "local_adam",
        "desloc",
        "diloco",
        "decoupled_momentum",
        "sparse_loco",
        "sign_loco",
        "muloco",
    )
}
CASES = {name: (name, PERIODS.get(name, {}), False) for name in fsdp_demo.presets()}
CASES |= {
    "streaming_diloco": ("streaming_diloco", {"period": 4, "delay": 2}, False),
    "demo, in flight": ("demo", {"schedule.delay": 2}, False),
    "diloco, in flight": ("diloco", {"period": 3, "schedule.delay": 2}, True),
    "released": ("decoupled_momentum", {"period": 3, "rule": "released"}, True),
    "demo, fsdp2": ("demo", {}, True),
    "desloc, fsdp2": ("desloc", {"period": 3}, True),
}


def extra(preset, changes, **own):
    out = {"callbacks": [ExchangeCallback(preset, **changes, **own)]}
    if has_own_optimizer(fsdp_demo.preset(preset)):
        out["optimizer_cls_and_kwargs"] = exchange_optimizer(preset, lr=5e-3)
    return out


def tokens(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["tokens"] for line in lines]


@pytest.mark.parametrize("name", CASES)
def test_trainer_resume_bit_for_bit(run_ranks, name):
    """Every preset resumes bit for bit. From checkpoint-5, between two exchanges and, where there
    is a delay, with payloads under way.
    """
    preset, changes, fsdp = CASES[name]

    def run(rank):
        settings = {"max_steps": 10, "save_steps": 5, "eval_strategy": "no", "logging_steps": 1}
        out = []
        for resume in (None, str(rank.folder / "out" / "checkpoint-5")):
            trained = script.trained(
                rank.folder / "out", extra(preset, changes), resume=resume, fsdp=fsdp, **settings
            )
            states = [
                v
                for s in trained.optimizer.state.values()
                for v in s.values()
                if isinstance(v, torch.Tensor)
            ]
            kept = (
                torch.cat(
                    [
                        (v.to_local() if hasattr(v, "to_local") else v).flatten().float()
                        for v in states
                    ]
                )
                if states
                else torch.empty(0)
            )
            out.append(
                (
                    script.shards(trained),
                    kept,
                    history(trained, "loss"),
                    history(trained, "exchange/loss"),
                    tokens(rank.folder / "out" / f"island{rank.island}"),
                )
            )
        return out

    for whole, resumed in run_ranks(run, islands=2, procs=2 if fsdp else 1, timeout=120):
        assert whole[4] == resumed[4] and len(whole[4]) == 10  # the resume counts nothing twice
        assert torch.equal(whole[0], resumed[0]) and torch.equal(whole[1], resumed[1])
        assert whole[2] == resumed[2] and len(whole[2]) == 10 and whole[3][-5:] == resumed[3][-5:]


class Dies(TrainerCallback):
    """Ends its island before the save of a step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise ZeroDivisionError("before the save")


@pytest.mark.parametrize("fsdp", [False, True], ids=["single", "fsdp2"])
@pytest.mark.slow
def test_trainer_resume_after_lost_island(run_ranks, fsdp):
    """An island that is lost between two saves costs no common checkpoint. Island 1 ends before it
    saves step 8, and island 0 trains on to the end: its step 4 must still be there, with
    save_total_limit=1, and both go on from it.
    """

    def run(rank):
        settings = dict(
            max_steps=12, save_steps=4, save_total_limit=1, eval_strategy="no", logging_steps=1
        )
        line = {"period": 3}

        def train(where, callbacks=(), resume=None):
            trained = script.trained(
                rank.folder / where,
                extra("diloco", line),
                resume=resume,
                fsdp=fsdp,
                callbacks=callbacks,
                **settings,
            )
            return history(trained, "loss"), sorted(
                p.name for p in Path(trained.args.output_dir).glob("checkpoint-*")
            )

        whole = train("whole")
        if rank.island:
            with pytest.raises(ZeroDivisionError):
                train("cut", [Dies(8)])
        else:
            train("cut")  # the survivor trains on to the end
        left = sorted(
            int(p.name.split("-")[1])
            for p in (rank.folder / "cut" / f"island{rank.island}").glob("checkpoint-*")
        )
        os.environ["ISLAND_RUN"] += "-again"
        resumed = train("cut", resume=True)
        return whole, left, resumed

    out = run_ranks(run, islands=2, procs=1 + fsdp, timeout=120)
    assert out[0][1] == [4, 8, 12] and out[-1][1] == [4]
    for whole, _, resumed in out:
        # the other may not have said yet
        assert whole[0] == resumed[0] and whole[1][0] == "checkpoint-12" and len(whole[1]) <= 2


@in_ranks(2, 1)
def test_trainer_resume_none_in_common_refused(me):
    """A resume without a common checkpoint is refused, and the error lists what each
    island holds.
    """
    settings = {"max_steps": 8, "save_steps": 4 + me.island * 2, "eval_strategy": "no"}
    script.trained(me.folder / "out", extra("diloco", {"period": 3}), **settings)
    torch_final = me.folder / "out" / f"island{me.island}" / "checkpoint-8"
    for file in torch_final.glob("exchange/*.json"):
        file.write_text("{")  # a torn part is no checkpoint
    with pytest.raises(
        ValueError, match=r"\(island0: 4; island1: 6\).*Trainer: name it by its path"
    ):
        script.trained(me.folder / "out", extra("diloco", {"period": 3}), resume=True, **settings)


@pytest.mark.parametrize(
    "preset, changes", [("diloco", {"period": 3}), ("demo", {}), ("sparse_loco", {"period": 2})]
)
@pytest.mark.parametrize("islands", [1, 3])
def test_trainer_resume_other_number_of_islands(run_ranks, tmp_path, preset, changes, islands):
    """The loss goes on with an island more or fewer: it is near that of the run that was not
    stopped, far below that of a fresh model.
    """
    settings = {
        "max_steps": 12,
        "save_steps": 6,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "logging_steps": 1,
        "lr_scheduler_type": "constant",
    }

    at = tmp_path / "out" / ("checkpoint-6" if islands > 1 else "island0/checkpoint-6")

    def run(rank, resume):
        # alone such a preset exchanges nothing
        fresh = resume and islands == 1 and preset != "demo"
        if fresh:
            with pytest.raises(
                ValueError,
                match=r"was saved by several islands; alone preset .* exchanges "
                r"nothing.*fresh=True",
            ):
                script.trained(tmp_path / "out", extra(preset, changes), resume=str(at), **settings)
        trained = script.trained(
            tmp_path / "out",
            extra(preset, changes, fresh=fresh),
            resume=str(at) if resume else None,
            **settings,
        )
        return history(trained, "eval_loss"), script.parameters(trained), history(trained, "loss")

    before = run_ranks(run, islands=2, procs=1, args=(False,))
    after = run_ranks(run, islands=islands, procs=1, args=(True,))
    whole, resumed = before[0][0], after[0][0]
    assert len(whole) == 6 and resumed[-3] < whole[3] + 0.05 and resumed[-1] < whole[2] + 0.02
    assert all(torch.equal(o[1], after[0][1]) for o in after)


@in_ranks(2, 1)
def test_trainer_resume_drops_newer_checkpoints(me):
    """A resume from an older path abandons the newer checkpoints. They must neither be resumed
    later nor make rotation delete the new ones.
    """
    settings = {"eval_strategy": "no", "save_total_limit": 2}

    def train(at=None, **changes):
        trained = script.trained(
            me.folder / "out", extra("diloco", {"period": 3}), resume=at, **settings, **changes
        )
        return sorted(p.name for p in Path(trained.args.output_dir).glob("checkpoint-*"))

    train(max_steps=12, save_steps=4)
    kept = train(max_steps=10, save_steps=2, at=str(me.folder / "out" / "checkpoint-8"))
    mine = me.folder / "out" / f"island{me.island}"
    whole = json.loads((mine / "checkpoint-10" / "manifest.json").read_text())
    with open(mine / "checkpoint-10" / "model.safetensors", "r+b") as file:
        file.truncate(100)  # a torn model file
    aside = sorted(f"{p.parent.name}/{p.name}" for p in mine.glob("*/manifest.[ag]*"))
    files = sorted(whole["files"])[:2]
    steps = script.whole_steps(mine)
    sums = all(f["crc32"] for f in whole["files"].values())
    assert "checkpoint-10" in kept
    assert aside in ([], ["checkpoint-12/manifest.given-up.json"])
    assert 12 not in steps
    assert sums
    assert files == ["config.json", "exchange/rank0.json"] and 10 not in steps and 8 in steps
