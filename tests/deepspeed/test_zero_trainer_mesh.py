"""One world on a mesh under the Trainer with DeepSpeed: `TrainingArguments`,
`shard_within_node(2)`, model, `Trainer` and one more line.
"""

import pytest
import torch
import transformers.integrations.deepspeed  # noqa: F401
from transformers import TrainerCallback

import deepspeed_ext
from deepspeed_ext.node_mesh import installed

from ..support import trainer_script as script
from ..support import zero
from ..support.collectives import Recorder
from ..support.inside import in_ranks
from ..support.trainer_script import history, one_line

WORLD = {"ISLAND_COUNT": ""}  # no ISLAND_* variables: four ranks, two nodes of two


class Watch(TrainerCallback):
    """Counts what crosses nodes from the start of the first epoch, when the replicas have met, to
    the end of the second step.
    """

    def __init__(self):
        self.recorder, self.sent = Recorder(), 0

    def _bytes(self):
        return script.exchange_of(self.trained).metrics()["bytes_sent"]

    def on_epoch_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            self.sent = -self._bytes()
            self.recorder.__enter__()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            self.recorder.__exit__()
            self.sent += self._bytes()


def in_mesh(rank, stage, preset, changes, callbacks=(), **more):
    """A Trainer as a user's script makes it."""
    made = script.model
    # after TrainingArguments, before the model
    script.model = lambda: (deepspeed_ext.shard_within_node(2), made())[1]
    more |= {"deepspeed": zero.for_trainer(stage), "callbacks": callbacks}
    try:
        return script.trainer(rank.folder / "out", one_line(preset, **changes), **more)
    finally:
        script.model = made


@pytest.mark.parametrize(
    "stage, preset, changes",
    [("zero1", "diloco", {"period": 2}), ("zero2", "demo", {}), ("zero3", "demo", {})],
)
@in_ranks(1, 4, env=WORLD, timeout=120)
def test_zero_trainer_mesh_sends_payloads_only(me, stage, preset, changes):
    """Two steps send nothing but payloads between nodes."""
    watch, plan = Watch(), dict(max_steps=4, logging_steps=4, save_strategy="no")
    plan |= {"gradient_accumulation_steps": 2, "bf16": stage == "zero1"}
    watch.trained = trained = in_mesh(me, stage, preset, changes, [watch], **plan)
    trained.train()
    exchange, engine = script.exchange_of(trained), trained.deepspeed
    assert engine.mpu is installed() and engine.train_batch_size() == 4 * 2 * 2
    assert (exchange.topology.kind, exchange.topology.islands) == ("mesh", 2)
    assert exchange.step == trained.state.global_step == engine.global_steps == 4
    # payloads have connections of their own
    assert watch.recorder.crossing(2) == [] and watch.sent > 0
    inside, node = {e.ranks for e in watch.recorder.events}, me.proc // 2 * 2
    assert inside - {(me.proc,)} == {(node, node + 1)}
    masters = script.parameters(trained)
    shown = masters.bfloat16().float() if stage == "zero1" else masters
    assert torch.equal(zero.shown(trained), shown)
    return masters, history(trained, "eval_loss")


@pytest.mark.parametrize(
    "stage, preset, changes", [("zero3", "demo", {}), ("zero1", "desloc", {"period": 3})]
)
@in_ranks(1, 4, env=WORLD, timeout=180)
def test_zero_trainer_mesh_resume_bit_for_bit(me, stage, preset, changes):
    """A mesh resumes bit for bit. Each replica saves its own: replica 0 where the Trainer looks,
    replica 1 below replica1.
    """
    out, saved = [], me.folder / "out" / "checkpoint-4"
    for resume in (None, str(saved)):
        plan = {"eval_strategy": "no", "save_steps": 4, "max_steps": 8, "logging_steps": 1}
        trained = in_mesh(me, stage, preset, changes, **plan)
        trained.train(resume_from_checkpoint=resume)
        out.append((script.parameters(trained), history(trained, "loss")))
    first, again = out
    assert torch.equal(first[0], again[0]) and first[1] == again[1] and len(first[1]) == 8
    files = sorted(str(p.relative_to(saved)) for p in saved.glob("**/global_step4"))
    assert files == ["global_step4", "replica1/global_step4"]
