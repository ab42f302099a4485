"""Stop and resume under the Trainer with DeepSpeed: bit for bit, after a signal, with the best
model, and the recipe.
"""

from pathlib import Path

import pytest
import torch
import transformers.integrations.deepspeed

from ..support import trainer_script as script
from ..support import zero
from ..support.inside import in_ranks
from ..support.trainer_runs import resume_is_bit_for_bit, sigterm_saves_and_resumes
from .test_zero_trainer import run

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
    stage, preset, changes, more = RESUMED[name]
    resume_is_bit_for_bit(me, preset, changes, deepspeed=zero.for_trainer(stage), **more)


@pytest.mark.parametrize(
    "stage, preset, changes", [("zero2", "demo", {}), ("zero3", "diloco", {"period": 3})]
)
@pytest.mark.slow
@in_ranks(timeout=120)
def test_zero_trainer_sigterm_saves_and_resumes(me, stage, preset, changes):
    """All islands are told to end: they stop after their steps, and what not all have sent is sent
    at the resume.
    """
    saved = sigterm_saves_and_resumes(me, preset, changes, deepspeed=zero.for_trainer(stage))
    assert preset != "demo" or saved == 5


@in_ranks(timeout=120)
def test_zero_trainer_best_model(me):
    """The best model is chosen and loaded."""
    best = dict(load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=False)
    plan = dict(max_steps=8, eval_steps=2, save_steps=2, learning_rate=0.02) | best
    trained = run(me, "zero1", "diloco", {"period": 2}, **plan)
    masters, state = script.parameters(trained), trained.state
    assert torch.equal(masters, zero.shown(trained))
    return masters, (state.best_global_step, state.best_metric)


@pytest.mark.parametrize("stage, preset", [("zero2", "demo"), ("zero3", "diloco")])
@in_ranks(timeout=180)
def test_zero_trainer_recipe_saves_and_resumes(me, stage, preset):
    """recipes/pretrain_trainer.py --deepspeed recipes/deepspeed/zero<n>.json, as it is launched."""
    import pretrain_trainer
    from transformers import AutoModelForCausalLM

    file = str(Path(pretrain_trainer.__file__).with_name("deepspeed") / f"{stage}.json")
    folder = script.recipe_resumed(pretrain_trainer.main, me, preset, "--deepspeed", file)
    transformers.integrations.deepspeed.unset_hf_deepspeed_config()
    saved = AutoModelForCausalLM.from_pretrained(folder)
    weights = torch.cat([p.detach().flatten() for p in saved.parameters()])
    assert script.whole_steps(folder) == [4, 6, 8] and weights.norm() > 1
    return weights
