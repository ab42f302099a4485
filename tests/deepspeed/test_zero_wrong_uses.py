"""Wrong uses under ZeRO that would go on in silence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import deepspeed_ext
from fsdp_demo.integrations.data import split_dataset_by_island

from ..support import zero
from ..support.inside import in_ranks


@pytest.mark.parametrize("stage", ["zero2", "zero3-parts", "wrapper"])
@in_ranks(timeout=120)
def test_zero_lost_steps_and_switched_parameters(me: Any, stage: str) -> None:
    """Steps inside `outer_parameters` and a switched `requires_grad` are refused."""
    for preset, changes in (("diloco", {"period": 2}), ("demo", {"inner_optimizers": "as_is"})):
        made, exchange = zero.attached(stage, preset, zero.adamw, **changes)
        zero.train(made, range(1), me.rank)
        before = zero.whole(made)
        with (
            exchange.outer_parameters(made.module),
            pytest.raises(RuntimeError, match=r"inside outer_parameters\(\) would be lost"),
        ):
            made.step()
        after = zero.whole(made)
        assert exchange.step == 1 and all(torch.equal(before[n], after[n]) for n in before)
        zero.train(made, range(1, 2), me.rank)
        made.module.head.bias.requires_grad_(False)
        with pytest.raises(
            RuntimeError, match="requires_grad of head.bias was switched off after attach"
        ):
            exchange.skip()
        made.module.head.bias.requires_grad_(True)
        zero.train(made, range(2, 3), me.rank)
        assert exchange.step == 3
        exchange.finish()


@pytest.mark.parametrize("stage", ["zero2", "zero3-parts"])
@in_ranks(timeout=120)
def test_zero_masters_changed_since_attach_refused(me: Any, stage: str) -> None:
    """Masters that were changed since attach on one rank of an island are refused by all ranks."""
    made, exchange = zero.attached(stage, "diloco", period=2)
    if me.proc:
        with torch.no_grad():
            exchange.host.partitions.masters()[0].add_(1.0)
    with pytest.raises(ValueError, match="parameters were changed since attach"):
        zero.train(made, range(1), me.rank)
    exchange.detach()


@pytest.mark.parametrize("stage", ["zero1", "zero2-offload", "zero3-parts", "wrapper"])
@in_ranks(timeout=120)
def test_zero_write_behind_an_exchange_is_named(me: Any, stage: str) -> None:
    """A row that is written behind an exchange is named, though it lies on one rank alone; a load
    into the module, which does not reach the masters, is refused.
    """
    from deepspeed.utils import safe_set_full_fp32_param

    said = zero.warnings()
    made, exchange = zero.attached(stage, "diloco", period=2)
    zero.train(made, range(4), me.rank)
    value = zero.whole(made)["head.weight"]
    value[0] = 0.0
    safe_set_full_fp32_param(made.module.head.weight, value)
    zero.train(made, range(4, 6), me.rank)
    found = [m for m in said if "parameters were written between" in m]
    assert len(found) == (me.proc == 0) and all("optimizer: head.weight." in m for m in found)
    if stage != "zero3-parts":  # which keeps no whole parameters to load into
        state = {n: t + 1.0 for n, t in made.module.state_dict().items()}
        made.module.load_state_dict(state)
        with pytest.raises(RuntimeError, match="is not what the model computes with"):
            zero.train(made, range(6, 7), me.rank)
    exchange.detach()


@in_ranks(2, 1, group=True, timeout=120)
def test_zero_unlike_engines_and_unstepped_parameters(me: Any) -> None:
    """Engines that differ are refused, and the log names parameters that no optimizer steps."""
    said = zero.warnings()
    torch.manual_seed(7)
    model = zero.Model()
    made = zero.engine(
        zero.settings("zero1"),
        model=model,
        groups=[p for n, p in model.named_parameters() if "head" not in n],
    )
    exchange = deepspeed_ext.attach(made, "diloco", period=2)
    assert any(
        "2 trainable parameters of the model are in no attached optimizer" in line
        and "head.weight" in line
        for line in said
    )
    exchange.detach()
    other = zero.engine(
        zero.settings("zero1"), lambda p: torch.optim.AdamW(p, lr=1e-2 * (1 + me.island))
    )
    with (
        zero.another_run(),
        pytest.raises(ValueError, match="optimizer0.group0.lr: 0.0. here, 0.0. there"),
    ):
        deepspeed_ext.attach(other, "diloco", period=2)


@in_ranks(2, 1, group=True, timeout=120)
def test_zero_load_before_attach_warned(me: Any, tmp_path: Any) -> None:
    """A warning says that a checkpoint was loaded before attach. Its anchors and momenta are lost:
    said where it is no plain start.
    """
    said = zero.warnings()
    first, exchange = zero.attached("zero2", "diloco", period=2)
    zero.train(first, range(3), me.rank)
    first.save_checkpoint(str(tmp_path))
    exchange.detach()
    heard = []
    for early in (True, False):
        made = zero.engine(zero.settings("zero2"))
        del said[:]
        if early:
            made.load_checkpoint(str(tmp_path / f"island{me.island}"))
        with zero.another_run():
            exchange = deepspeed_ext.attach(made, "diloco", period=2)
        if not early:
            made.load_checkpoint(str(tmp_path))
        assert made.global_steps == 3
        heard.append([line for line in said if "without a saved state of" in line])
        exchange.detach()
    early, late = heard
    assert len(early) == 1 and "attach at step 3 without" in early[0] and late == []


@in_ranks(2, 1, group=True, timeout=120)
def test_zero_same_training_data_warned(me: Any) -> None:
    """A warning says that islands train on the same rows: DeepSpeed deals `training_data` inside
    one island only.
    """
    said, heard = zero.warnings(), []
    rows = [zero.batch(0, row) for row in range(16)]
    for given in (rows, split_dataset_by_island(rows)):
        made = zero.engine(zero.settings("zero1"), training_data=given)
        del said[:]
        with zero.another_run():
            exchange = deepspeed_ext.attach(made, "diloco", period=1)
        for ids, targets in made.training_dataloader:
            logits = made(ids.flatten(0, 1)).float()
            made.backward(torch.nn.functional.cross_entropy(logits, targets.flatten()))
            made.step()
        exchange.finish()
        heard.append([line for line in said if "do they train on the same rows?" in line])
    whole, split = heard
    assert len(whole) == 1 and split == []


@pytest.mark.parametrize("stage", ["zero2", "zero3"])
@in_ranks(2, 1, group=True, timeout=120)
def test_zero_save_16bit_model_per_island(me: Any, tmp_path: Any, stage: str) -> None:
    """Islands may save their models into one directory. Each island has its own file, with what it
    trained, or with what is shown.
    """
    settings, saved = zero.settings(stage), []
    settings["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    made, exchange = zero.attached(settings, "diloco", period=10)
    zero.train(made, range(2), me.rank)
    assert made.save_16bit_model(str(tmp_path / "own"))
    own = zero.whole(made)["head.weight"]
    with exchange.outer_parameters(made.module):
        assert made.save_16bit_model(str(tmp_path / "outer"), "model.bin")
    exchange.detach()
    me.meet("saved")
    for island in (0, 1):
        place = tmp_path / "own" / f"island{island}" / "pytorch_model.bin"
        saved.append(torch.load(place)["head.weight"])
        outer = torch.load(tmp_path / "outer" / f"island{island}" / "model.bin")
        torch.manual_seed(7)
        assert torch.equal(outer["head.weight"], zero.Model().head.weight)
    assert torch.equal(saved[me.island], own) and not torch.equal(*saved)


@in_ranks(1, 1, group=True, timeout=120)
def test_zero_load_keeps_clipping(me: Any, tmp_path: Any) -> None:
    """A loaded checkpoint does not change how gradients are clipped. `full` clips the mean
    gradient, so the engine does not; DeepSpeed's load says it should.
    """
    made = zero.engine(zero.settings("zero2", clip=0.5))
    made.save_checkpoint(str(tmp_path))
    exchange = deepspeed_ext.attach(made, "full", checkpoints=False)
    made.load_checkpoint(str(tmp_path))
    norms = [made.optimizer.clip_grad]
    zero.train(made, range(1), me.rank)
    norms.append(made.optimizer.clip_grad)
    exchange.detach()
    assert [*norms, made.optimizer.clip_grad] == [0.5, 0.0, 0.5]


@in_ranks(1, 1, group=True, timeout=120)
def test_zero_refused_step_not_counted(me: Any) -> None:
    """A step that DeepSpeed refuses counts as no micro-batch."""
    made, exchange = zero.attached(zero.settings("zero1", accumulate=2), "diloco", period=2)
    zero.train(made, range(1), me.rank, accumulate=2)
    with made.no_sync(), pytest.raises(AssertionError, match="illegal to call Engine.step"):
        made.step()
    assert made.micro_steps == 2
    zero.train(made, range(1, 3), me.rank, accumulate=2)
    assert (exchange.step, made.micro_steps) == (3, 6)
    exchange.finish()
