"""The Trainer's checkpoints in a store of objects."""

from __future__ import annotations

import shutil

import pytest
import torch

from fsdp_demo.integrations.trainer import ExchangeCallback

from ..support.trainer_script import At, before_ranks, sigterm, trained  # noqa: F401


@pytest.mark.parametrize("named", [False, True])
def test_trainer_remote_without_its_disk(run_ranks, tmp_path, named):
    """Islands that were told to stop go on bit for bit after one has lost its disk, by the newest
    checkpoint or by its name.
    """

    def run(me, name, stop=(), resume=None):
        line = {"callbacks": [ExchangeCallback("diloco", period=4, remote=f"file://{tmp_path}/s")]}
        callbacks = [At("on_step_end", sigterm, *stop)]
        options = {"save_steps": 2, "eval_strategy": "no", "callbacks": callbacks}
        made = trained(tmp_path / f"{name}{me.island}", line, resume=resume, **options)
        return [p.detach().clone() for p in made.model.parameters()]

    def ranks(*args, check=True):
        return run_ranks(run, 2, 1, args=args, check=check, timeout=120)

    whole = ranks("whole")
    shutil.rmtree(tmp_path / "s")
    assert [o.status for o in ranks("part", (6,), check=False)] == [75, 75]
    shutil.rmtree(tmp_path / "part1")
    found = ranks("part", (), "checkpoint-6" if named else True)
    assert all(map(torch.equal, found[1], whole[1])), "other weights"
    assert (tmp_path / "part1/island1/checkpoint-6/exchange").is_dir()
