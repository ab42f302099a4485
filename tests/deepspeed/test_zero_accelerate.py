"""Plain Accelerate with a DeepSpeedPlugin: the prepared model is the engine,
`fsdp_demo.attach(model, ...)` is the one line.
"""

import pytest
import torch
import transformers.integrations.deepspeed  # noqa: F401
from accelerate import Accelerator, PartialState
from accelerate.utils import DeepSpeedPlugin
from torch.utils.data import DataLoader

import deepspeed_ext
import fsdp_demo

from ..support import trainer_script as script
from ..support import zero
from ..support.collectives import Recorder


def prepared(me, stage, mesh=False, **changes):
    """(accelerator, engine, optimizer, loader, scheduler) of a loop as in Accelerate's examples."""
    script.fresh_state()
    # on CPU ranks Accelerate would take each for a world of its own
    PartialState(cpu=True, backend="gloo")
    settings = zero.settings(stage, clip=1.0)
    settings |= dict(gradient_accumulation_steps="auto", train_batch_size="auto") | changes
    acc = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings), gradient_accumulation_steps=2
    )
    if mesh:
        deepspeed_ext.shard_within_node(2)
    torch.manual_seed(7)
    model = zero.Model()
    optimizer = zero.sgd(model.parameters())
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 40)
    rows = [zero.batch(i, me.rank if mesh else me.island) for i in range(64)]
    loader = DataLoader([(a[0], b[0]) for a, b in rows], batch_size=4)
    return acc, *acc.prepare(model, optimizer, loader, scheduler)


def loop(acc, model, optimizer, loader, scheduler, steps, poison=-1):
    for rows, targets in loader:
        with acc.accumulate(model):
            nan = float("nan") if model.global_steps == poison else 1.0
            acc.backward(torch.nn.functional.cross_entropy(model(rows), targets) * nan)
            acc.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if model.global_steps == steps:
            break


@pytest.mark.parametrize("door", [fsdp_demo.attach, deepspeed_ext.attach])
@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_zero_accelerate_islands(run_ranks, door, stage):
    """Islands under Accelerate with a DeepSpeedPlugin train one model."""

    def work(me):
        acc, model, optimizer, *rest = prepared(me, stage)
        with pytest.raises(
            ValueError,
            match="found DeepSpeedOptimizerWrapper: pass the engine.*under Accelerate the "
            "prepared model",
        ):
            door(optimizer, "demo")
        exchange = door(model, "demo")
        # that island sits a step out
        loop(acc, model, optimizer, *rest, steps=4, poison=2 if me.rank == 3 else -1)
        steps = (
            exchange.step,
            model.global_steps,
            model.skipped_steps,
            exchange.metrics()["exchanges"],
            acc.num_processes,
        )
        exchange.finish()
        return steps, exchange.digests_equal(), zero.whole(model), optimizer.param_groups[0]["lr"]

    out = run_ranks(work, timeout=90)
    for r, o in enumerate(out):
        assert o[0] == (4, 4, r // 2, 4, 2) and o[1] is True and o[3] == out[0][3] < 1e-2
        assert all(torch.equal(o[2][n], out[0][2][n]) for n in out[0][2])
    torch.manual_seed(7)
    assert not torch.equal(out[0][2]["head.weight"], zero.Model().head.weight)


def test_zero_accelerate_mesh(run_ranks):
    """A mesh under Accelerate with a DeepSpeedPlugin sends nothing but payloads between nodes."""

    def work(me):
        acc, model, *rest = prepared(me, "zero2", mesh=True)
        exchange = fsdp_demo.attach(model, "demo")
        sent = exchange.metrics()["bytes_sent"]
        with Recorder() as seen:
            loop(acc, model, *rest, steps=2)
        crossing, sent = seen.crossing(2), exchange.metrics()["bytes_sent"] - sent
        exchange.finish()
        return crossing, sent, exchange.topology.kind, zero.whole(model)

    for r, (crossing, sent, kind, weights) in enumerate(
        out := run_ranks(work, islands=1, procs=4, env={"ISLAND_COUNT": ""}, timeout=90)
    ):
        # payloads have connections of their own
        assert crossing == [] and sent > 0 and kind == "mesh", r
        assert all(torch.equal(weights[n], out[0][3][n]) for n in weights)
