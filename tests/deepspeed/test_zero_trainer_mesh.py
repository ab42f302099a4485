"""One world on a mesh under the Trainer with DeepSpeed: `TrainingArguments`,
`shard_within_node(2)`, model, `Trainer` and one more line.
"""

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")
pytest.importorskip("deepspeed")

import transformers.integrations.deepspeed  # noqa: E402, F401
from transformers import TrainerCallback  # noqa: E402

import deepspeed_ext  # noqa: E402

from ..integrations.test_trainer import history  # noqa: E402
from ..support import trainer_script as script  # noqa: E402
from ..support.accelerate_anew import accelerate_anew  # noqa: E402, F401
from ..support.collectives import Recorder  # noqa: E402
from .test_zero_trainer import extra, settings, shown, whole  # noqa: E402

WORLD = {"ISLAND_COUNT": ""}  # no ISLAND_* variables: four ranks, two nodes of two


class Watch(TrainerCallback):
    """Counts what crosses nodes from the start of the first epoch, when the replicas have met, to
    the end of the second step.
    """

    def __init__(self):
        self.recorder, self.sent = Recorder(), 0

    def _exchange(self, trained):
        return script.exchange_of(trained)

    def on_epoch_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            self.sent = -self._exchange(self.trained).metrics()["bytes_sent"]
            self.recorder.__enter__()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            self.recorder.__exit__()
            self.sent += self._exchange(self.trained).metrics()["bytes_sent"]


def in_mesh(rank, where, stage, preset, changes, callbacks=(), **more):
    """A Trainer as a user's script makes it."""
    made = script.model
    # after TrainingArguments, before the model
    script.model = lambda: (deepspeed_ext.shard_within_node(2), made())[1]
    try:
        return script.trainer(
            rank.folder / where,
            extra(preset, **changes),
            deepspeed=settings(stage),
            callbacks=callbacks,
            **more,
        )
    finally:
        script.model = made


@pytest.mark.parametrize(
    "stage, preset, changes",
    [("zero1", "diloco", {"period": 2}), ("zero2", "demo", {}), ("zero3", "demo", {})],
)
def test_zero_trainer_mesh_sends_payloads_only(run_ranks, stage, preset, changes):
    """Two steps send nothing but payloads between nodes."""

    def run(rank):
        watch = Watch()
        plan = dict(max_steps=4, logging_steps=4, gradient_accumulation_steps=2, save_strategy="no")
        watch.trained = trained = in_mesh(rank, "out", stage, preset, changes, [watch], **plan)
        trained.train()
        exchange, masters = script.exchange_of(trained), whole(trained)
        assert (exchange.topology.kind, exchange.topology.islands) == ("mesh", 2)
        assert exchange.step == trained.state.global_step == 4
        # payloads have connections of their own
        assert watch.recorder.crossing(2) == [] and watch.sent > 0
        inside, node = {e.ranks for e in watch.recorder.events}, rank.proc // 2 * 2
        assert inside - {(rank.proc,)} == {(node, node + 1)}
        assert torch.equal(shown(trained), masters)
        return masters, history(trained, "eval_loss")

    out = run_ranks(run, islands=1, procs=4, env=WORLD, timeout=120)
    assert all(torch.equal(o[0], out[0][0]) and o[1] == out[0][1] for o in out)


@pytest.mark.parametrize(
    "stage, preset, changes", [("zero3", "demo", {}), ("zero1", "desloc", {"period": 3})]
)
def test_zero_trainer_mesh_resume_bit_for_bit(run_ranks, stage, preset, changes):
    """A mesh resumes bit for bit. Each replica saves its own: replica 0 where the Trainer looks,
    replica 1 below replica1.
    """

    def run(rank):
        out = []
        for resume in (None, str(rank.folder / "out" / "checkpoint-4")):
            plan = {"eval_strategy": "no", "save_steps": 4, "max_steps": 8, "logging_steps": 1}
            trained = in_mesh(rank, "out", stage, preset, changes, **plan)
            trained.train(resume_from_checkpoint=resume)
            out.append((whole(trained), history(trained, "loss")))
        files = sorted(
            str(p.relative_to(rank.folder))
            for p in (rank.folder / "out" / "checkpoint-4").glob("**/global_step4")
        )
        return *out, files

    out = run_ranks(run, islands=1, procs=4, env=WORLD, timeout=180)
    for first, again, files in out:
        assert torch.equal(first[0], again[0]) and first[1] == again[1] and len(first[1]) == 8
        assert files == ["out/checkpoint-4/global_step4", "out/checkpoint-4/replica1/global_step4"]
