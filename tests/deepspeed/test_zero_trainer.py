"""`ExchangeCallback` finds the ZeRO engine by itself: a Trainer script with `deepspeed=`, islands
of 2 x 2 at every stage.
"""

import os
from pathlib import Path

import deepspeed
import pytest
import torch
import transformers.integrations.deepspeed  # noqa: F401
from transformers import LlamaForCausalLM

from fsdp_demo.integrations.trainer import ExchangeCallback, exchange_optimizer

from ..support import trainer_script as script
from ..support import zero
from ..support.inside import in_ranks
from ..support.trainer_script import history, one_line


def run(rank, stage, preset, changes, **plan):
    line, config = one_line(preset, **changes), zero.for_trainer(stage)
    return script.trained(rank.folder / "out", line, deepspeed=config, **plan)


CASES = [
    ("zero1", "diloco", {"period": 4}), ("zero2", "demo", {}), ("zero3", "diloco", {"period": 4}),
    ("zero3-parts", "demo", {}),
]  # fmt: skip


@pytest.mark.parametrize("stage, preset, changes", CASES)
def test_zero_trainer_islands_train_one_model(run_ranks, stage, preset, changes):
    """Islands of 2 x 2 ranks under the Trainer train one model at every stage."""

    def work(rank):
        plan = {"gradient_accumulation_steps": 2, "logging_steps": 1}
        trained = run(rank, stage, preset, changes, **plan)
        exchange, folder = script.exchange_of(trained), Path(trained.args.output_dir)
        masters, losses = script.parameters(trained), history(trained, "eval_loss")
        assert torch.equal(zero.shown(trained), masters) and exchange.digests_equal() is True
        assert exchange.step == trained.state.global_step == trained.deepspeed.global_steps == 8
        assert exchange.metrics()["exchanges"] == (8 if preset == "demo" else 2)
        assert len(losses) == 2 and losses[-1] < losses[0] < 3.3
        assert trained.evaluate()["eval_loss"] == losses[-1]
        saved = {p.name for p in folder.glob("checkpoint-8/*")}
        assert {"global_step8", "exchange", "trainer_state.json", "latest"} <= saved
        assert len(list(folder.glob("checkpoint-8/exchange/*"))) == 4
        assert script.whole_steps(folder) == [4, 8]
        heard, mine = (history(trained, key) for key in ("exchange/loss", "loss"))
        return masters, losses, heard, mine

    out = run_ranks(work, islands=2, procs=2, timeout=120)
    _, losses, heard, mine = out[0]
    for o in out:
        assert torch.equal(o[0], out[0][0]) and o[1] == losses and o[2] == heard
    theirs = out[2][3]
    assert mine != theirs and len(mine) == 8
    # the header of a step's payload has the loss of that very step, all micro-batches of it
    if preset == "demo":
        means = [(a + b) / 2 for a, b in zip(mine, theirs, strict=True)]
        assert heard == pytest.approx(means, rel=1e-4)


def poison(args, state, control, model=None, **kwargs):
    """The gradient of the step is NaN."""
    hook = next(p for p in model.parameters()).register_hook(
        lambda g: (hook.remove(), g * float("nan"))[1]
    )


@pytest.mark.parametrize(
    "stage, preset, changes", [("zero1", "demo", {}), ("zero3", "diloco", {"period": 2})]
)
@in_ranks(timeout=120)
def test_zero_trainer_nan_step_skipped(me, stage, preset, changes):
    """An island skips a step alone. NaN on one rank of island 1: that island sits the step out,
    joins the exchange, and keeps its schedule.
    """
    nan = script.At("on_step_begin", poison, 3)
    plan = {"callbacks": [nan] * (me.rank == 3), "logging_steps": 1}
    trained = run(me, stage, preset, changes, **plan)
    exchange, engine = script.exchange_of(trained), trained.deepspeed
    assert exchange.step == trained.state.global_step == engine.global_steps == 8
    assert engine.skipped_steps == me.island and exchange.digests_equal()
    masters, rates = script.parameters(trained), history(trained, "learning_rate")
    assert torch.isfinite(masters).all()
    assert len(set(rates)) == 8  # the rate falls with every step
    return masters, rates


REFUSED = [
    ("diloco", {"max_grad_norm": 0.5}, {},
        ("max_grad_norm=0.5 and no gradient_clipping in DeepSpeed's configuration",
        '"gradient_clipping": "auto"')),
    ("muloco", {}, {},
        ('{"type": "Muon", "params": {"lr": 0.005}}', "max_grad_norm=0",
        "has an optimizer of its own")),
    ("muloco", {}, {"optimizer_cls_and_kwargs": exchange_optimizer("muloco", lr=0.01)},
        ("needs matrices where ZeRO has flat partitions",)),
    ("demo", {}, {}, ('optimizer_cls_and_kwargs=exchange_optimizer("demo", lr=0.005)',)),
]  # fmt: skip


@in_ranks()
def test_zero_trainer_refusals(me):
    """Settings that cannot work are refused when the Trainer begins."""
    for preset, args, more, said in REFUSED:
        config = zero.for_trainer("zero1")
        if "max_grad_norm" in args:
            del config["gradient_clipping"]
        line = {"callbacks": [ExchangeCallback(preset)], **more}
        with pytest.raises(ValueError) as error:
            script.trainer(me.folder / "out", line, deepspeed=config, **args)
        assert all(part in str(error.value) for part in said), str(error.value)
    none = zero.for_trainer("zero1", zero_optimization={"stage": 0})
    with pytest.raises(ValueError, match="ZeRO stage 0"):
        script.trained(me.folder / "out", one_line("diloco"), deepspeed=none)


@in_ranks()
def test_zero_trainer_unset_variables_refused(me):
    """Ranks without the variables of an island stop the Trainer on all ranks."""
    if me.proc == 1:
        for name in [n for n in os.environ if n.startswith("ISLAND_")]:
            del os.environ[name]
    with pytest.raises(
        ValueError, match=r"different ISLAND_COUNT: 2 on rank 0; nothing on rank 1.*\.deepspeed_env"
    ):
        script.trainer(me.folder / "out", one_line("diloco"), deepspeed=zero.for_trainer("zero1"))


@in_ranks(timeout=120)
def test_zero_trainer_zero3_from_pretrained(me, tmp_path):
    """A model whose weights ZeRO-3 cuts while they load trains as one that is cut later.
    `from_pretrained` cuts parameters before there is an optimizer, whose groups go by the whole
    tensors' dims: the same numbers.
    """
    made = script.model
    made().save_pretrained(tmp_path / "weights")

    def load():
        # on CPU ranks Accelerate has started torch's group alone
        deepspeed.init_distributed(dist_init_required=False, verbose=False)
        return LlamaForCausalLM.from_pretrained(tmp_path / "weights")

    out = []
    for script.model in (made, load):
        line = {"callbacks": [ExchangeCallback("demo")]}
        line["optimizer_cls_and_kwargs"] = exchange_optimizer("demo", lr=4e-3, weight_decay=0.5)
        plan = {"max_steps": 4, "eval_strategy": "no", "save_strategy": "no"}
        trained = script.trainer(
            me.folder / script.model.__name__, line, deepspeed=zero.for_trainer("zero3"), **plan
        )
        cut = any(p.numel() == 0 for p in trained.model.parameters())
        trained.train()
        groups = [g["weight_decay"] for g in trained.deepspeed.optimizer.optimizer.param_groups]
        out.append((cut, groups, script.parameters(trained)))
        transformers.integrations.deepspeed.unset_hf_deepspeed_config()
    plain, loaded = out
    assert (plain[0], loaded[0]) == (False, True) and plain[1] == loaded[1] == [0.5, 0.0]
    assert torch.allclose(plain[2], loaded[2], atol=1e-6)
