"""Under the Trainer an island joins a run under way: rate, scheduler, rows and counters are those
of an island that walked there.
"""

import os
import zlib

import pytest
import torch
from transformers import TrainerCallback

from fsdp_demo.integrations.trainer import callback as module

from ..support import joining
from ..support import trainer_script as script
from ..support.trainer_script import one_line

PLAN = {
    "save_strategy": "no", "logging_steps": 1, "max_steps": 12, "lr_scheduler_type": "cosine",
    "warmup_steps": 3,
}  # fmt: skip


class Watch(TrainerCallback):
    """What an island does in each step; records it for newcomers, or ends a newcomer ahead of the
    last step.
    """

    def __init__(self, records=False, end=None):
        self.steps, self.parameters, self.rows, self.records, self.end = [], [], [], records, end
        self.record = None

    def on_step_begin(self, args, state, control, **kwargs):
        trainer = module.find_trainer(self)
        if not self.rows:
            self.original = trainer.training_step
            trainer.training_step = self._stepped
        callback = next(
            c for c in trainer.callback_handler.callbacks if isinstance(c, module.ExchangeCallback)
        )
        if self.records and self.record is None:
            self.record = joining.Record(callback.exchange)
        self.exchange = callback.exchange
        self.rows.append([])

    def _stepped(self, model, inputs, *args, **kwargs):
        self.rows[-1].append(zlib.crc32(inputs["input_ids"].numpy().tobytes()))
        return self.original(model, inputs, *args, **kwargs)

    def on_step_end(self, args, state, control, optimizer=None, lr_scheduler=None, **kwargs):
        rates = [g["lr"] for g in optimizer.param_groups]
        self.steps.append(
            (state.global_step, state.epoch, rates, lr_scheduler.last_epoch, self.exchange.step)
        )
        self.parameters.append(
            torch.cat(
                [p.detach().flatten().clone() for g in optimizer.param_groups for p in g["params"]]
            )
        )
        if state.global_step == self.end:
            raise Over


class Over(Exception):
    """A newcomer is not with the others at the end: nobody would answer."""


def trained(rank, preset, watch, changes=None, **plan):
    return script.trainer(
        rank.folder / f"out{watch.records}{rank.island}",
        one_line(preset, **changes or {}),
        callbacks=[watch],
        **PLAN | plan,
    )


@pytest.mark.parametrize("accumulate", [1, 2])
def test_trainer_newcomer_equals_other_islands(run_ranks, accumulate):
    """A newcomer goes on as an island that has taken all steps. `full` has equal replicas:
    parameters are compared, too. Joining inside epochs (4 or 8 steps long), at their ends, and
    late.
    """

    def run(rank):
        plan = {"gradient_accumulation_steps": accumulate, "eval_strategy": "no"}
        watch = Watch(records=rank.island == 0)
        trained(rank, "full", watch, **plan).train()
        if rank.island == 1:
            return watch.rows, watch.steps, watch.parameters, []
        os.environ["ISLAND_RANK"] = "1"
        out = []
        for at, until in ((2, 3), (3, 8), (5, 5), (6, 10)):
            fed, patch = joining.Fed(watch.record, at, until), pytest.MonkeyPatch()
            where = joining.topology(
                fed, kind="islands", run=f"joins{at}", endpoint=os.environ["ISLAND_ENDPOINT"]
            )
            patch.setattr(module, "topology_of", lambda trainer, where=where: where)
            newcomer = Watch(end=11)
            trainer = trained(rank, "full", newcomer, **plan)
            with pytest.raises(Over):
                # as a supervisor starts it: there is nothing to resume from
                trainer.train(resume_from_checkpoint=True)
            patch.undo()
            out.append(
                (
                    until,
                    newcomer.rows,
                    newcomer.steps,
                    newcomer.parameters,
                    "_run_epoch" in vars(trainer),
                )
            )
        return None, watch.steps, watch.parameters, out

    first, second = run_ranks(run, islands=2, procs=1, timeout=120)
    rows, steps, parameters, _ = second
    for until, theirs, did, held, left in first[3]:
        assert theirs == rows[until:11] and did == steps[until:11] and did[0][0] == until + 1
        assert all(torch.equal(a, b) for a, b in zip(held, parameters[until:11], strict=True))
        assert not left


def test_trainer_newcomer_asks_no_start_questions(run_ranks):
    """A newcomer does not ask the questions of the start. Whether all islands evaluate a mean
    together comes from the donor.
    """

    def run(rank):
        watch = Watch(records=rank.island == 0)
        trained(rank, "local_sgd", watch, {"period": 2}, eval_steps=4).train()
        if rank.island == 1:
            return None
        out = []
        for plan in ({"eval_steps": 4}, {"eval_steps": 5}):
            fed, patch = joining.Fed(watch.record, 2, 4), pytest.MonkeyPatch()
            where = joining.topology(
                fed,
                kind="islands",
                run=f"joins{plan['eval_steps']}",
                endpoint=os.environ["ISLAND_ENDPOINT"],
            )
            patch.setattr(module, "topology_of", lambda trainer, where=where: where)
            os.environ["ISLAND_RANK"] = "1"
            trainer = trained(rank, "local_sgd", newcomer := Watch(end=7), {"period": 2}, **plan)
            with pytest.raises(Over if plan["eval_steps"] == 4 else ValueError) as caught:
                trainer.train()
            patch.undo()
            out.append((str(caught.value), [s[0] for s in newcomer.steps]))
        return out

    (went, refused), _ = run_ranks(run, islands=2, procs=1, timeout=120)
    assert went[1] == [5, 6, 7]
    assert "the other islands evaluate together by " in refused[0]
    assert "give it their arguments" in refused[0]
