"""Under the Trainer an island joins a run under way: rate, scheduler, rows and counters are those
of an island that walked there.
"""

import contextlib
import zlib

import pytest
import torch
from transformers import TrainerCallback

from fsdp_demo.integrations.trainer import callback as module

from ..support import joining
from ..support import trainer_script as script
from ..support.inside import in_ranks
from ..support.small import same
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
    where, line = (
        rank.folder / f"out{watch.records}{rank.island}",
        one_line(preset, **changes or {}),
    )
    return script.trainer(where, line, callbacks=[watch], **PLAN | plan)


@contextlib.contextmanager
def joins(record, at, until):
    """Within this context a Trainer is a newcomer that is fed from the record."""
    where = joining.island(record, at, until)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ISLAND_RANK", "1")
        patch.setattr(module, "topology_of", lambda trainer: where)
        yield


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
            return watch.rows, watch.steps, watch.parameters
        out = []
        for at, until in ((2, 3), (3, 8), (5, 5), (6, 10)):
            with joins(watch.record, at, until), pytest.raises(Over):
                trainer = trained(rank, "full", newcomer := Watch(end=11), **plan)
                # as a supervisor starts it: there is nothing to resume from
                trainer.train(resume_from_checkpoint=True)
            assert "_run_epoch" not in vars(trainer)
            out.append((until, newcomer.rows, newcomer.steps, newcomer.parameters))
        return out

    newcomers, (rows, steps, parameters) = run_ranks(run, islands=2, procs=1, timeout=120)
    for until, theirs, did, held in newcomers:
        assert theirs == rows[until:11] and did == steps[until:11] and did[0][0] == until + 1
        assert same(held, parameters[until:11])


@in_ranks(2, 1, timeout=120)
def test_trainer_newcomer_asks_no_start_questions(me):
    """A newcomer does not ask the questions of the start. Whether all islands evaluate a mean
    together comes from the donor.
    """
    watch = Watch(records=me.island == 0)
    trained(me, "local_sgd", watch, {"period": 2}, eval_steps=4).train()
    if me.island == 1:
        return
    for steps, kind in ((4, Over), (5, ValueError)):
        with joins(watch.record, 2, 4), pytest.raises(kind) as caught:
            newcomer = Watch(end=7)
            trained(me, "local_sgd", newcomer, {"period": 2}, eval_steps=steps).train()
        if kind is Over:
            assert [s[0] for s in newcomer.steps] == [5, 6, 7]
    assert "the other islands evaluate together by " in str(caught.value)
    assert "give it their arguments" in str(caught.value)
