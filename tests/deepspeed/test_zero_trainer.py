"""`ExchangeCallback` finds the ZeRO engine by itself: a Trainer script with `deepspeed=`, islands
of 2 x 2 at every stage.
"""

import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")
deepspeed = pytest.importorskip("deepspeed")

import transformers.integrations.deepspeed  # noqa: E402, F401
from transformers import LlamaForCausalLM, TrainerCallback  # noqa: E402

from fsdp_demo.integrations.trainer import ExchangeCallback, exchange_optimizer  # noqa: E402

from ..integrations.test_trainer import history  # noqa: E402
from ..support import trainer_script as script  # noqa: E402
from ..support import zero  # noqa: E402
from ..support.accelerate_anew import accelerate_anew  # noqa: E402, F401

AUTO = {
    name: "auto"
    for name in (
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "train_batch_size",
        "gradient_clipping",
    )
}


def settings(stage, **more):
    """What users write: "auto" wherever the Trainer knows better."""
    return {
        **AUTO,
        "zero_optimization": zero.BUCKETS | zero.STAGES[stage],
        "bf16": {"enabled": "auto"},
        "steps_per_print": 10**9,
        **more,
    }


def extra(preset, **changes):
    out = {"callbacks": [ExchangeCallback(preset, **changes)]}
    if preset == "demo":
        out["optimizer_cls_and_kwargs"] = exchange_optimizer("demo", lr=4e-3)
    return out


def whole(trained):
    """The fp32 masters of the whole model as one vector, gathered in the island."""
    return torch.cat([p.flatten() for p in zero.whole(trained.deepspeed).values()])


def shown(trained):
    """The model's own parameters, as a forward sees them."""
    params = list(trained.model.parameters())
    with deepspeed.zero.GatheredParameters(params):
        return torch.cat([p.detach().float().flatten() for p in params])


def run(rank, stage, preset, changes, options, resume=None, **trainer):
    trained = script.trainer(
        rank.folder / "out",
        extra(preset, **changes),
        deepspeed=settings(stage, **options),
        **trainer,
    )
    trained.train(resume_from_checkpoint=resume)
    return trained


CASES = [
    ("zero1", "diloco", {"period": 4}),
    ("zero2", "demo", {}),
    ("zero3", "diloco", {"period": 4}),
    ("zero3-parts", "demo", {}),
]


@pytest.mark.parametrize("stage, preset, changes", CASES)
def test_zero_trainer_islands_train_one_model(run_ranks, stage, preset, changes):
    """Islands of 2 x 2 ranks under the Trainer train one model at every stage."""

    def work(rank):
        trained = run(
            rank, stage, preset, changes, {}, gradient_accumulation_steps=2, logging_steps=1
        )
        exchange = script.exchange_of(trained)
        return {
            "whole": whole(trained),
            "shown": shown(trained),
            "steps": (exchange.step, trained.state.global_step, trained.deepspeed.global_steps),
            "exchanges": exchange.metrics()["exchanges"],
            "equal": exchange.digests_equal(),
            "eval": history(trained, "eval_loss"),
            "heard": history(trained, "exchange/loss"),
            "loss": history(trained, "loss"),
            "again": trained.evaluate()["eval_loss"],
            "saved": sorted(p.name for p in Path(trained.args.output_dir).glob("checkpoint-8/*")),
            "parts": len(list(Path(trained.args.output_dir).glob("checkpoint-8/exchange/*"))),
            "held": script.whole_steps(Path(trained.args.output_dir)),
        }

    out = run_ranks(work, islands=2, procs=2, timeout=120)
    for o in out:
        assert (
            torch.equal(o["whole"], out[0]["whole"])
            and torch.equal(o["shown"], o["whole"])
            and o["equal"] is True
        )
        assert o["steps"] == (8, 8, 8) and o["exchanges"] == (8 if preset == "demo" else 2)
        assert (
            o["eval"] == out[0]["eval"]
            and len(o["eval"]) == 2
            and o["eval"][-1] < o["eval"][0] < 3.3
        )
        assert o["again"] == o["eval"][-1] and o["heard"] == out[0]["heard"]
        assert (
            {"global_step8", "exchange", "trainer_state.json", "latest"} <= set(o["saved"])
            and o["parts"] == 4
            and o["held"] == [4, 8]
        )
    assert out[0]["loss"] != out[2]["loss"] and len(out[0]["loss"]) == 8
    # the header of a step's payload has the loss of that very step, all micro-batches of it
    if preset == "demo":
        assert out[0]["heard"] == pytest.approx(
            [(a + b) / 2 for a, b in zip(out[0]["loss"], out[2]["loss"], strict=True)], rel=1e-4
        )


class Poison(TrainerCallback):
    """Makes the gradient of one rank NaN in one step."""

    def __init__(self, step, wanted):
        self.step, self.wanted, self.done = step, wanted, False

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if self.wanted and state.global_step == self.step and not self.done:
            self.done = True
            hook = next(p for p in model.parameters()).register_hook(
                lambda g: (hook.remove(), g * float("nan"))[1]
            )


@pytest.mark.parametrize(
    "stage, preset, changes", [("zero1", "demo", {}), ("zero3", "diloco", {"period": 2})]
)
def test_zero_trainer_nan_step_skipped(run_ranks, stage, preset, changes):
    """An island skips a step alone. NaN on one rank of island 1: that island sits the step out,
    joins the exchange, and keeps its schedule.
    """

    def work(rank):
        trained = script.trainer(
            rank.folder / "out",
            extra(preset, **changes),
            deepspeed=settings(stage),
            callbacks=[Poison(3, rank.rank == 3)],
            logging_steps=1,
        )
        trained.train()
        exchange, engine = script.exchange_of(trained), trained.deepspeed
        steps = (
            exchange.step,
            trained.state.global_step,
            engine.global_steps,
            engine.skipped_steps,
        )
        return whole(trained), steps, history(trained, "learning_rate"), exchange.digests_equal()

    out = run_ranks(work, islands=2, procs=2, timeout=120)
    assert [o[1] for o in out] == [(8, 8, 8, 0)] * 2 + [(8, 8, 8, 1)] * 2
    assert (
        all(torch.equal(o[0], out[0][0]) and o[2] == out[0][2] and o[3] for o in out)
        and torch.isfinite(out[0][0]).all()
    )
    assert len(set(out[0][2])) == 8  # the rate falls with every step


def test_zero_trainer_alone_is_plain_training(run_ranks):
    """One island alone trains as without the callback."""

    def work(rank):
        out = []
        for where, line in (("plain", {}), ("line", extra("diloco", period=2))):
            trained = script.trainer(rank.folder / where, line, deepspeed=settings("zero1"))
            trained.train()
            out.append((whole(trained), history(trained, "loss"), trained.args.output_dir))
        return out

    for plain, line in run_ranks(work, islands=1, procs=2, env={"ISLAND_COUNT": ""}):
        assert torch.equal(plain[0], line[0]) and plain[1] == line[1] and line[2].endswith("/line")


def test_zero_trainer_refusals(run_ranks):
    """Settings that cannot work are refused when the Trainer begins."""

    def work(rank):
        said = []
        cases = {
            "clip": ("diloco", {}, {"max_grad_norm": 0.5}, lambda s: s.pop("gradient_clipping")),
            "muon": ("muloco", {}, {}, None),
            "matrices": (
                "muloco",
                {"optimizer_cls_and_kwargs": exchange_optimizer("muloco", lr=0.01)},
                {},
                None,
            ),
            "own": ("demo", {}, {}, None),
        }
        for preset, more, args, edit in cases.values():
            config = settings("zero1")
            if edit:
                edit(config)
            with pytest.raises(ValueError) as error:
                script.trainer(
                    rank.folder / "out",
                    {"callbacks": [ExchangeCallback(preset)], **more},
                    deepspeed=config,
                    **args,
                )
            said.append(str(error.value))
        trained = script.trainer(
            rank.folder / "out",
            extra("diloco"),
            deepspeed=settings("zero1", zero_optimization={"stage": 0}),
        )
        with pytest.raises(ValueError) as error:
            trained.train()
        return [*said, str(error.value)]

    for clip, muon, matrices, own, none in run_ranks(work, islands=2, procs=2, timeout=60):
        assert (
            "max_grad_norm=0.5 and no gradient_clipping in DeepSpeed's configuration" in clip
            and '"gradient_clipping": "auto"' in clip
        )
        assert (
            '{"type": "Muon", "params": {"muon_lr": 0.005, "adam_lr": 8.93e-05}}' in muon
            and "max_grad_norm=0" in muon
            and "has an optimizer of its own" in muon
        )
        assert "needs matrices where ZeRO has flat partitions" in matrices
        assert (
            'optimizer_cls_and_kwargs=exchange_optimizer("demo", lr=0.005)' in own
            and "ZeRO stage 0" in none
        )


def test_zero_trainer_unset_variables_refused(run_ranks):
    """Ranks without the variables of an island stop the Trainer on all ranks."""

    def work(rank):
        if rank.proc == 1:
            for name in [n for n in os.environ if n.startswith("ISLAND_")]:
                del os.environ[name]
        with pytest.raises(
            ValueError,
            match=r"different ISLAND_COUNT: 2 on rank 0; nothing on rank 1.*\.deepspeed_env",
        ):
            script.trainer(rank.folder / "out", extra("diloco"), deepspeed=settings("zero1"))

    run_ranks(work, islands=2, procs=2, timeout=60)


def test_zero_trainer_zero3_from_pretrained(run_ranks, tmp_path):
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

    def work(rank):
        out = []
        for script.model in (made, load):
            line = {"callbacks": [ExchangeCallback("demo")]}
            line["optimizer_cls_and_kwargs"] = exchange_optimizer("demo", lr=4e-3, weight_decay=0.5)
            plan = {"max_steps": 4, "eval_strategy": "no", "save_strategy": "no"}
            trained = script.trainer(
                rank.folder / script.model.__name__, line, deepspeed=settings("zero3"), **plan
            )
            cut = any(p.numel() == 0 for p in trained.model.parameters())
            trained.train()
            groups = [g["weight_decay"] for g in trained.deepspeed.optimizer.optimizer.param_groups]
            out.append((cut, groups, whole(trained)))
            transformers.integrations.deepspeed.unset_hf_deepspeed_config()
        return out

    for plain, loaded in run_ranks(work, islands=2, procs=2, timeout=120):
        assert (plain[0], loaded[0]) == (False, True) and plain[1] == loaded[1] == [0.5, 0.0]
        assert torch.allclose(plain[2], loaded[2], atol=1e-6)
