"""A plain loop with `RunState`, over ZeroMQ: an island that was killed comes back by itself. What
islands share it fetches; moments that are its own come from its checkpoint.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp_demo
from fsdp_demo import preset
from fsdp_demo.checkpoint import CheckpointManager
from fsdp_demo.exchange.pace import Pace

from ..exchange.test_survivors import ENV, Small, loss
from ..support.damage import changed_head, flip
from ..support.forked import returns
from ..support.heard import heard
from ..support.plain_loop import PlainLoop
from ..support.small import same
from ..support.two_layers import step

CASES = {
    "demo": preset("demo", inner_optimizer="adamw"),
    "diloco": preset("diloco", period=3),
    "by_speed": preset("diloco", period=3, local_steps="by_speed"),
    "late": preset("demo", inner_optimizer="adamw", **{"schedule.delay": 2}),
}


def life(me: Any, case: str, dies: int = 0) -> Any:
    """One life: a checkpoint after every fourth step. Where islands may take unlike steps they are
    equally fast, and who comes back goes on behind the rows of its checkpoint.
    """
    pytest.MonkeyPatch().setattr(Pace, "seconds", lambda self, device: 1.0)
    lines, model, ends = heard(logging.INFO), Small(), me.folder.parent / "ends"
    optimizer = fsdp_demo.base_optimizer(CASES[case], model.named_parameters(), lr=1e-2)
    loop = PlainLoop(me.folder.parent / "disk", model, optimizer, CASES[case], "auto", keep=4)
    exchange, saved = loop.exchange, me.folder.parent / f"moments{me.island}.pt"
    moments = [optimizer.state[p]["exp_avg"].clone() for p in model.parameters()]
    if exchange.newcomer:
        place = 4 if loop.state.saved else 0
        assert exchange.steps_taken == (place if case == "by_speed" else exchange.step)
        ends.with_suffix(".part").write_text(str(exchange.step + 30))
        os.replace(ends.with_suffix(".part"), ends)
    last = None
    while last is None or exchange.step < last:
        if exchange.step == dies > 0:
            os._exit(9)
        step(optimizer, loss(model, me.island, exchange.step))
        if last is None and ends.exists():
            last = int(ends.read_text())
        if exchange.step > 6:
            # the others wait for the start of a process here, and until it takes part
            time.sleep(0.05)
        if exchange.step % 4 == 0 and exchange.step < 9:
            loop.state.save(exchange)
            if exchange.step <= 4:
                torch.save([optimizer.state[p]["exp_avg"] for p in model.parameters()], saved)
    exchange.finish(close=False)
    equal = exchange.digests_equal()
    exchange.finish()
    own = all(map(torch.equal, moments, torch.load(saved)))
    said = [t for t in lines if "MiB fetched" in t or "moments" in t]
    return exchange.step, equal, loop.numbers(), own, said


def comes_back(run_ranks: Any, case: str, spoil: Any = lambda checkpoint: None) -> Any:
    """Island 1 dies after the save of step 4, lacks that of step 8, and lives again."""

    def run(me: Any) -> Any:
        saved = me.folder.parent / "disk" / "island1" / "checkpoint-4"
        return returns(me, partial(life, case=case), lambda: spoil(saved))

    ranks = run_ranks(run, islands=2, procs=1, timeout=150, env=ENV)
    (ended, equal, kept, *_), (again, alike, came, own, said) = ranks
    assert ended == again and equal and alike and same(kept, came)
    return own, said


@pytest.mark.parametrize("case", CASES)
def test_returning_island_keeps_own_moments(run_ranks, case: str) -> None:
    """An island that comes back goes on with moments of its own. Of gradient presets the moments
    are those of all.
    """
    own, said = comes_back(run_ranks, case)
    assert own == (case in ("diloco", "by_speed"))
    assert len(said) == 2 and "go on from checkpoint-4" in said[0], said
    assert "goes on from step" in said[1] and "takes part from message" in said[1]
    assert "from a snapshot" in said[1]


def torn(checkpoint: Path) -> None:
    """A byte of the model has changed."""
    flip(next((checkpoint / "model").glob("*.safetensors")), -1)


def forged(checkpoint: Path) -> None:
    """As another run would have left it: all sums fit."""
    changed_head(checkpoint, run="else")


SPOILT = [(forged, "it is of run 'else'"), (torn, "checksum does not fit")]


@pytest.mark.parametrize("spoil, why", SPOILT)
def test_returning_island_refuses_spoilt_checkpoint(run_ranks, spoil: Any, why: str) -> None:
    """An island that comes back does not use a checkpoint that is not its own or not whole."""
    own, said = comes_back(run_ranks, "by_speed", spoil)
    assert not own and "begin anew, checkpoint-4 cannot be used (" in said[0] and why in said[0]


def test_returning_island_without_its_disk(run_ranks, tmp_path) -> None:
    """An island that comes back without its disk goes on with moments from its store of objects."""

    def run(me: Any) -> Any:
        save = CheckpointManager.save

        def uploaded(manager: CheckpointManager, *given: Any, **named: Any) -> bool:
            done = save(manager, *given, **named)
            manager.copies.uploads.flush()
            return done

        disk = me.folder.parent / "disk" / "island1"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CheckpointManager, "save", uploaded)
            return returns(me, partial(life, case="diloco"), lambda: shutil.rmtree(disk))

    env = ENV | {"ISLAND_REMOTE": f"file://{tmp_path}/store"}
    *_, (_, alike, _, own, said) = run_ranks(run, islands=2, procs=1, timeout=150, env=env)
    assert alike and own and "go on from checkpoint-4" in said[0], said
