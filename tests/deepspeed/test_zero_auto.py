"""Under ZeRO, too, an `auto` run is the one that begins at the choice with the chosen method."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed_ext
from deepspeed_ext.wrappers import adapter
from fsdp_demo import Link
from fsdp_demo.config.auto import MEASURED, undecided

from ..support import zero
from ..support.inside import in_ranks
from ..support.small import same

ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.0)


def gradients_at_once(made: Any) -> list[int]:
    """Filled in the steps to come: how many masters have a gradient when one of them steps."""
    partitions, found = adapter(made), []  # type: ignore[var-annotated]

    def look(*_: Any) -> None:
        found.append(sum(master.grad is not None for master in partitions.masters()))

    partitions.inner.register_step_pre_hook(look)
    return found


def reading(peers: Any, island: Any) -> Link | None:
    """What is measured of the link."""
    return None if peers is None else Link(1e5, 0.02)


@pytest.mark.parametrize("stage", ["zero1", "zero3-parts"])
def test_zero_auto_equals_chosen_method(run_ranks: Any, everywhere: Any, stage: str) -> None:
    """An `auto` run equals the run that begins with the chosen method at the choice."""
    everywhere.setattr("fsdp_demo.automatic.first_steps", "quick_probe", reading)

    def run(me: Any) -> None:
        made, exchange = zero.attached(stage, "auto", ADAMW)
        fresh = zero.whole(made)
        zero.train(made, range(MEASURED - 1), me.rank)
        assert undecided(exchange.config) and same(zero.whole(made), fresh)
        zero.train(made, range(MEASURED - 1, MEASURED), me.rank)
        at_once = gradients_at_once(made)
        zero.train(made, range(MEASURED, 20), me.rank)
        chosen = exchange.config
        # ahead of the choice all are held; a method that needs none lets each go
        assert max(at_once) == 1 and not chosen.needs_gradients
        exchange.finish()
        twin = zero.engine(zero.settings(stage), ADAMW)
        with zero.another_run():
            plain = deepspeed_ext.attach(twin, chosen, step=MEASURED)
        zero.train(twin, range(MEASURED, 20), me.rank)
        plain.finish()
        assert same(zero.whole(made), zero.whole(twin))

    run_ranks(run, 2, 1, group=True, timeout=240)


@pytest.mark.parametrize("lost", [False, True])
def test_zero_auto_resume(run_ranks: Any, everywhere: Any, tmp_path: Path, lost: bool) -> None:
    """An `auto` run resumes with the method of its checkpoint, which the engine loads after
    `attach`. An island whose folder is lost gets the method from the others.
    """
    everywhere.setattr("fsdp_demo.automatic.first_steps", "quick_probe", reading)
    saved_at, end = MEASURED + 6, 24

    def life(me: Any, again: bool) -> Any:
        torch.manual_seed(5 if again else 7)
        made, exchange = zero.attached("zero2", "auto", ADAMW, zero.Model())
        if again:
            made.load_checkpoint(str(tmp_path))
            assert exchange.step == saved_at and not undecided(exchange.config)
        else:
            zero.train(made, range(saved_at), me.rank)
            made.save_checkpoint(str(tmp_path))
        zero.train(made, range(saved_at, end), me.rank)
        exchange.finish()
        return zero.whole(made), exchange.config.to_dict(), exchange.chosen_because

    whole = run_ranks(life, 2, 1, group=True, timeout=120, args=(False,))
    if lost:
        shutil.rmtree(tmp_path / "island1")
    resumed = run_ranks(life, 2, 1, group=True, timeout=120, args=(True,))
    assert len({json.dumps(config) for _, config, _ in whole + resumed}) == 1
    assert len({because for *_, because in whole + resumed}) == 1
    held = [weights for weights, *_ in (resumed if lost else whole + resumed)]
    assert all(same(w, held[0]) for w in held)


@in_ranks(1, 1, group=True, timeout=120)
def test_zero_phases_resume(me: Any, tmp_path: Path) -> None:
    """A phase that began at a share of the run begins there again, also where the steps of the run
    are not told any more. One that is given as a number of steps begins as it is given.
    """

    def begun(switch: float, facts: dict[str, int]) -> tuple[Any, Any]:
        return zero.attached("zero2", "sign_loco", period=2, switch=switch, must_match=facts)

    made, exchange = begun(0.5, {"steps": 8})
    zero.train(made, range(5), me.rank)
    made.save_checkpoint(str(tmp_path))
    exchange.finish()
    steps, more = {"steps": 8}, {"steps": 80}
    for switch, facts, begin in ((0.5, steps, 4), (0.5, {}, 4), (0.5, more, 4), (5, {}, 5)):
        made, exchange = begun(switch, facts)
        made.load_checkpoint(str(tmp_path))
        assert (exchange.step, exchange.config.begins) == (5, [0, begin])
        exchange.finish()
