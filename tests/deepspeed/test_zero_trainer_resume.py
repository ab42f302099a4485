"""Stop and resume under the Trainer with DeepSpeed: bit for bit, after a signal, after a lost
island, and the recipe.
"""

import os
import signal
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")
pytest.importorskip("deepspeed")

import transformers.integrations.deepspeed  # noqa: E402
from transformers import TrainerCallback  # noqa: E402

from ..integrations.test_trainer import history  # noqa: E402
from ..support import trainer_script as script  # noqa: E402
from ..support.accelerate_anew import accelerate_anew  # noqa: E402, F401
from ..support.inside import in_ranks
from .test_zero_trainer import extra, run, settings, shown, whole  # noqa: E402

RESUMED = {
    "zero1, bf16": ("zero1", "desloc", {"period": 3}, {"bf16": True}),
    "zero2, in flight": ("zero2", "demo", {"schedule.delay": 2}, {}),
    "zero3": ("zero3", "decoupled_momentum", {"period": 3, "rule": "released"}, {}),
    "zero3, sub-groups": ("zero3-parts", "streaming_diloco", {"period": 4, "delay": 2}, {}),
}


@pytest.mark.parametrize("name", RESUMED)
@in_ranks(timeout=120)
def test_zero_trainer_resume_bit_for_bit(me, name):
    """Every preset resumes bit for bit."""
    stage, preset, changes, trainer = RESUMED[name]
    plan = dict(max_steps=8, save_steps=5, eval_strategy="no", logging_steps=1) | trainer
    out = []
    for resume in (None, str(me.folder / "out" / "checkpoint-5")):
        trained = run(me, stage, preset, changes, {}, resume=resume, **plan)
        states = trained.deepspeed.optimizer.optimizer.state.values()
        kept = [v for s in states for v in s.values() if isinstance(v, torch.Tensor)]
        moments = torch.cat([torch.empty(0), *(v.flatten().float() for v in kept)])
        losses = history(trained, "loss"), history(trained, "exchange/loss")
        out.append((whole(trained), moments, *losses))
    first, again = out
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    assert first[2] == again[2] and len(first[2]) == 8 and first[3][-3:] == again[3][-3:]
    # the abandoned end was put aside, and is the new life's now
    files = sorted(p.name for p in (me.folder / "out" / f"island{me.island}").glob("checkpoint-*"))
    assert files == ["checkpoint-5", "checkpoint-8"]


class Term(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 4:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    "stage, preset, changes", [("zero2", "demo", {}), ("zero3", "diloco", {"period": 3})]
)
@pytest.mark.slow
def test_zero_trainer_sigterm_saves_and_resumes(run_ranks, stage, preset, changes):
    """All islands are told to end: they stop after their steps, and what not all have sent is sent
    at the resume.
    """

    def work(rank):
        out = []
        for where, callbacks, resume in (
            ("whole", [], None),
            ("cut", [Term()], None),
            ("cut", [], True),
        ):
            plan = dict(max_steps=8, save_steps=100, eval_strategy="no", callbacks=callbacks)
            os.environ["ISLAND_RUN"] += f"-{where}-{resume}"
            trained = script.trainer(
                rank.folder / where, extra(preset, **changes), deepspeed=settings(stage), **plan
            )
            how = None
            try:
                trained.train(resume_from_checkpoint=resume)
            except SystemExit as error:
                how = error.code
            out.append((how, trained.state.global_step, whole(trained)))
        return out

    ends = run_ranks(work, islands=2, procs=2, timeout=120)
    for first, cut, again in ends:
        assert (first[:2], again[:2]) == ((None, 8), (None, 8)) and torch.equal(first[2], again[2])
        assert cut[0] == 75 and (cut[1] == 5 if preset == "demo" else 5 <= cut[1] < 8), cut[:2]


def test_zero_trainer_best_model(run_ranks):
    """The best model is chosen and loaded."""
    best = dict(load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=False)
    plan = dict(max_steps=8, eval_steps=2, save_steps=2, learning_rate=0.02) | best

    def work(rank):
        trained = run(rank, "zero1", "diloco", {"period": 2}, {}, **plan)
        masters, state = whole(trained), trained.state
        assert torch.equal(masters, shown(trained))
        return masters, (state.best_global_step, state.best_metric)

    out = run_ranks(work, islands=2, procs=2, timeout=120)
    assert all(o[1] == out[0][1] and torch.equal(o[0], out[0][0]) for o in out)


@pytest.mark.parametrize("stage, preset", [("zero2", "demo"), ("zero3", "diloco")])
def test_zero_trainer_recipe_saves_and_resumes(run_ranks, monkeypatch, stage, preset):
    """recipes/pretrain_trainer.py --deepspeed recipes/deepspeed/zero<n>.json, as it is launched."""
    recipes = Path(__file__).parents[2] / "recipes"
    monkeypatch.syspath_prepend(str(recipes))
    import pretrain_trainer
    from transformers import AutoModelForCausalLM

    def work(rank):
        file = str(recipes / "deepspeed" / f"{stage}.json")
        folder = script.recipe_resumed(pretrain_trainer.main, rank, preset, "--deepspeed", file)
        transformers.integrations.deepspeed.unset_hf_deepspeed_config()
        saved = AutoModelForCausalLM.from_pretrained(folder)
        weights = torch.cat([p.detach().flatten() for p in saved.parameters()])
        return weights, script.whole_steps(folder)

    out = run_ranks(work, islands=2, procs=2, timeout=180)
    assert all(torch.equal(o[0], out[0][0]) and o[1] == [4, 6, 8] for o in out)
    assert out[0][0].norm() > 1
