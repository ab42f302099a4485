"""Under the Trainer, over ZeroMQ: an island is killed and comes back by itself. What islands share
it fetches; moments that are its own come from its checkpoint.
"""

import logging
import os
import time

import pytest
import torch
from transformers import TrainerCallback

from fsdp_demo.exchange.pace import Pace

from ..exchange.test_survivors import ENV
from ..support import trainer_script as script
from ..support.forked import returns
from ..support.heard import heard
from ..support.trainer_script import one_line

PLAN = {
    "save_steps": 4, "logging_steps": 1000, "max_steps": 140, "lr_scheduler_type": "cosine",
    "eval_strategy": "no",
}  # fmt: skip


class Life(TrainerCallback):
    """Ends at a step as SIGKILL would; waits for who comes back, for some steps; notes the
    rates.
    """

    def __init__(self, come, back, dies=0):
        self.come, self.back, self.dies, self.rates = come, back, dies, {}
        self.clocks = set()

    def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
        if not self.rates:
            self.clocks = {int(s["step"]) for s in optimizer.state.values()}
        if self.back or state.global_step > 110:
            self.come.touch()

    def on_step_end(self, args, state, control, optimizer=None, **kwargs):
        self.rates[state.global_step] = optimizer.param_groups[0]["lr"]
        if state.global_step == self.dies:
            os._exit(9)
        end = time.monotonic() + 100.0
        while (
            state.global_step == 8
            and not self.come.with_name("coming").exists()
            and time.monotonic() < end
        ):
            time.sleep(0.05)  # for the start of a process
        if state.global_step > 8 and not self.come.exists():
            time.sleep(0.1)  # it joins at the ends of steps
        if state.global_step > 8:
            control.should_save = False


def life(me, dies=0):
    lines, folder = heard(logging.INFO), me.folder.parent
    watch = Life(folder / "come", me.island == 1 and not dies, dies)
    pytest.MonkeyPatch().setattr(Pace, "seconds", lambda self, device: 1.0)  # equally fast
    changes = {"period": 2, "local_steps": "by_speed"}
    line, plan = one_line("diloco", **changes), {"callbacks": [watch], **PLAN}
    trainer = script.trainer(folder / f"disk{me.island}", line, **plan)
    step, drawn = trainer.training_step, list[torch.Tensor]()
    trainer.training_step = lambda model, inputs, *args: (
        drawn.append(inputs["input_ids"].clone()),
        torch.save(drawn, folder / "drawn.pt") if dies else None,
        step(model, inputs, *args),
    )[2]
    if watch.back:
        (folder / "coming").touch()
    trainer.train(resume_from_checkpoint="auto")
    if watch.back:
        assert script.exchange_of(trainer).steps_taken == 4 + len(drawn) < trainer.state.global_step
        again = torch.load(folder / "drawn.pt")[4:]  # drawn and lost with the steps behind the save
        assert len(again) == 2 and all(map(torch.equal, again, drawn))
    said = [t for t in lines if "MiB fetched" in t or "begin anew" in t or "go on from" in t]
    return script.parameters(trainer), (watch.rates, watch.clocks), said


def test_trainer_returning_keeps_own_moments(run_ranks):
    """An island that comes back goes on with moments of its own: those of `diloco`, with AdamW
    inside. The Trainer's own methods load them. Where islands may take unlike steps it goes on
    behind the rows of its checkpoint.
    """

    def run(me):
        return returns(me, life, fork=os.fork)

    ranks = run_ranks(run, islands=2, procs=1, timeout=200, env=ENV)
    (kept, (rates, _), _), (came, (again, clocks), said) = ranks
    own, fetched, whole = said
    assert "go on from checkpoint-4" in own and "from a snapshot" in fetched, said
    assert "random states begin anew" in whole and "moments" not in whole
    assert torch.equal(kept, came) and clocks == {4}
    assert again and all(rates[step] == rate for step, rate in again.items())
