"""Stop and resume under the Trainer: bit for bit with the same numbers, without a jump with others,
from a step that all islands hold.
"""

import json
import os

import pytest
import torch

import fsdp_demo

from ..support import trainer_script as script
from ..support.inside import in_ranks
from ..support.trainer_runs import resume_is_bit_for_bit
from ..support.trainer_script import history, one_line

PERIODS = dict.fromkeys(
    "local_sgd local_adam desloc diloco decoupled_momentum sparse_loco sign_loco muloco "
    "noloco".split(),
    {"period": 3},
)
CASES = {name: (name, PERIODS.get(name, {}), False) for name in fsdp_demo.presets()}
CASES |= {
    "streaming_diloco": ("streaming_diloco", {"period": 4, "delay": 2}, False),
    "demo, in flight": ("demo", {"schedule.delay": 2}, False),
    "diloco, in flight": ("diloco", {"period": 3, "schedule.delay": 2}, True),
    "released": ("decoupled_momentum", {"period": 3, "rule": "released"}, True),
    "demo, fsdp2": ("demo", {}, True),
    "desloc, fsdp2": ("desloc", {"period": 3}, True),
}


@pytest.mark.parametrize("name", CASES)
def test_trainer_resume_bit_for_bit(run_ranks, name):
    """Every preset resumes bit for bit. From checkpoint-5, between two exchanges and, where there
    is a delay, with payloads under way.
    """
    preset, changes, fsdp = CASES[name]
    script.need_moments(fsdp and preset != "demo")

    def run(me):
        resume_is_bit_for_bit(me, preset, changes, fsdp=fsdp)

    stay = {"ISLAND_MIN": "2"} if fsdp_demo.preset(preset).pairs else {}
    run_ranks(run, islands=2, procs=1 + fsdp, timeout=120, env=stay)


@pytest.mark.parametrize("procs, fsdp", [(1, False), (2, True)], ids=["single", "fsdp2"])
@pytest.mark.slow
@in_ranks(2, timeout=120)
def test_trainer_resume_after_lost_island(me, procs, fsdp):
    """An island that is lost between two saves costs no common checkpoint. Island 1 ends before it
    saves step 8, and island 0 trains on to the end: its step 4 must still be there, with
    save_total_limit=1, and both go on from it.
    """
    plan = dict(max_steps=12, save_steps=4, save_total_limit=1, eval_strategy="no", logging_steps=1)

    def train(where, callbacks=(), resume=None):
        line, more = one_line("diloco", period=3), {"callbacks": callbacks, "fsdp": fsdp, **plan}
        trained = script.trained(me.folder / where, line, resume=resume, **more)
        return history(trained, "loss"), script.checkpoints(trained)

    whole = train("whole")
    if me.island:
        with pytest.raises(ZeroDivisionError):
            train("cut", [script.At("on_step_end", lambda *_, **__: 1 / 0, 8)])
    else:
        train("cut")  # the survivor trains on to the end
    left = script.whole_steps(me.folder / "cut" / f"island{me.island}")
    assert left == ([4] if me.island else [4, 8, 12])
    os.environ["ISLAND_RUN"] += "-again"
    resumed = train("cut", resume=True)
    # the other may not have said yet
    assert whole[0] == resumed[0] and whole[1][0] == "checkpoint-12" and len(whole[1]) <= 2


@in_ranks(2, 1)
def test_trainer_resume_none_in_common_refused(me):
    """A resume without a common checkpoint is refused, and the error lists what each
    island holds.
    """
    settings = {"max_steps": 8, "save_steps": 4 + me.island * 2, "eval_strategy": "no"}
    script.trained(me.folder / "out", one_line("diloco", period=3), **settings)
    torch_final = me.folder / "out" / f"island{me.island}" / "checkpoint-8"
    for file in torch_final.glob("exchange/*.json"):
        file.write_text("{")  # a torn part is no checkpoint
    with pytest.raises(
        ValueError, match=r"\(island0: 4; island1: 6\).*Trainer: name it by its path"
    ):
        script.trained(me.folder / "out", one_line("diloco", period=3), resume=True, **settings)


@pytest.mark.parametrize(
    "preset, changes", [("diloco", {"period": 3}), ("demo", {}), ("sparse_loco", {"period": 2})]
)
@pytest.mark.parametrize("islands", [1, 3])
def test_trainer_resume_other_number_of_islands(run_ranks, tmp_path, preset, changes, islands):
    """The loss goes on with an island more or fewer: it is near that of the run that was not
    stopped, far below that of a fresh model.
    """
    plan = {"max_steps": 12, "save_steps": 6, "eval_steps": 2, "logging_steps": 1}
    plan |= {"lr_scheduler_type": "constant"}
    at = tmp_path / "out" / ("checkpoint-6" if islands > 1 else "island0/checkpoint-6")

    def run(rank, resume):
        def train(**more):
            line = one_line(preset, **changes, **more)
            return script.trained(tmp_path / "out", line, resume=resume and str(at), **plan)

        # alone such a preset exchanges nothing
        fresh = resume and islands == 1 and preset != "demo"
        said = "was saved by several islands; alone preset .* exchanges nothing.*fresh=True"
        if fresh:
            with pytest.raises(ValueError, match=said):
                train()
        trained = train(fresh=fresh)
        return history(trained, "eval_loss"), script.parameters(trained)

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

    def train(at=None, **plan):
        plan |= {"eval_strategy": "no", "save_total_limit": 2}
        line = one_line("diloco", period=3)
        return script.checkpoints(script.trained(me.folder / "out", line, resume=at, **plan))

    train(max_steps=12, save_steps=4)
    kept = train(str(me.folder / "out" / "checkpoint-8"), max_steps=10, save_steps=2)
    mine = me.folder / "out" / f"island{me.island}"
    files = json.loads((mine / "checkpoint-10" / "manifest.json").read_text())["files"]
    with open(mine / "checkpoint-10" / "model.safetensors", "r+b") as file:
        file.truncate(100)  # a torn model file
    aside = sorted(f"{p.parent.name}/{p.name}" for p in mine.glob("*/manifest.[ag]*"))
    steps = script.whole_steps(mine)
    assert "checkpoint-10" in kept
    assert aside in ([], ["checkpoint-12/manifest.given-up.json"])
    assert all(f["crc32"] for f in files.values())
    assert sorted(files)[:2] == ["config.json", "exchange/rank0.json"]
    assert 12 not in steps and 10 not in steps and 8 in steps
