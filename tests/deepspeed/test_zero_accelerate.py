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
from ..support.inside import in_ranks


def prepared(me, stage, mesh=False):
    """(accelerator, engine, optimizer, loader, scheduler) of a loop as in Accelerate's examples."""
    script.fresh_state()
    # on CPU ranks Accelerate would take each for a world of its own
    PartialState(cpu=True, backend="gloo")
    settings = zero.settings(stage, clip=1.0)
    settings |= dict(gradient_accumulation_steps="auto", train_batch_size="auto")
    plugin = DeepSpeedPlugin(hf_ds_config=settings)
    acc = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=2)
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
@in_ranks(timeout=90)
def test_zero_accelerate_islands(me, door, stage):
    """Islands under Accelerate with a DeepSpeedPlugin train one model."""
    acc, model, optimizer, *rest = prepared(me, stage)
    said = "found DeepSpeedOptimizerWrapper: pass the engine.*under Accelerate the prepared model"
    with pytest.raises(ValueError, match=said):
        door(optimizer, "demo")
    exchange = door(model, "demo")
    # that island sits a step out
    loop(acc, model, optimizer, *rest, steps=4, poison=2 if me.rank == 3 else -1)
    assert exchange.step == model.global_steps == exchange.metrics()["exchanges"] == 4
    assert (model.skipped_steps, acc.num_processes) == (me.island, 2)
    exchange.finish()
    weights, rate = zero.whole(model), optimizer.param_groups[0]["lr"]
    assert exchange.digests_equal() is True and rate < 1e-2
    torch.manual_seed(7)
    assert not torch.equal(weights["head.weight"], zero.Model().head.weight)
    return weights, rate
