"""Under the Trainer an island without a checkpoint takes over from the others, each on a disk of
its own (output roots that see nothing of each other)."""

import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerCallback

import fsdp_demo
from fsdp_demo.checkpoint import taking_over
from fsdp_demo.checkpoint.choice import HeldCheckpoint
from fsdp_demo.checkpoint.manager import ResumePoint
from fsdp_demo.errors import NeedsDecision
from fsdp_demo.integrations.trainer.beginning import (
    _with_others,
    find_checkpoint,
    refuse_sharded,
    told,
)
from fsdp_demo.integrations.trainer.joining import TakeOver, sentence
from fsdp_demo.peers.votes import Ranks

from ..support import trainer_script as script
from ..support.inside import in_ranks
from ..support.trainer_script import history, one_line

PLAN = {"save_steps": 4, "eval_strategy": "no", "logging_steps": 1}


class Rates(TrainerCallback):
    """The learning rate of each step, and the epoch."""

    def __init__(self):
        self.seen = []

    def on_step_end(self, args, state, control, optimizer=None, lr_scheduler=None, **kwargs):
        self.seen.append((state.global_step, optimizer.param_groups[0]["lr"], state.epoch))


def train(rank, preset, changes=None, *, resume=None, where="disk", callbacks=(), **plan):
    """One life on a disk of the island's own; what it ends with."""
    rates, own = Rates(), rank.folder / f"{where}{rank.island}" / "out"
    plan = {"max_steps": 10, **PLAN, **plan, "callbacks": [rates, *callbacks]}
    trained = script.trained(own, one_line(preset, **changes or {}), resume=resume, **plan)
    return trained, rates.seen


def lose(rank, islands, where="disk"):
    """The folders of some islands are gone."""
    if rank.island in islands and rank.proc == 0:
        shutil.rmtree(rank.folder / f"{where}{rank.island}")
    if rank.procs > 1:
        torch.distributed.barrier()


def kept(rank, where="disk"):
    return script.whole_steps(
        rank.folder / f"{where}{rank.island}" / "out" / f"island{rank.island}"
    )


@pytest.mark.parametrize("resume", [True, "auto", "out/checkpoint-4"])
@in_ranks(2, 1, timeout=120)
def test_trainer_take_over_gradient_preset(me, resume):
    """A gradient preset goes on as if no folder had been lost. `full` has no accumulators, and its
    optimizer's moments are the donor's: equal to the uninterrupted run in every bit.
    """
    whole, rates = train(me, "full", where="whole", max_steps=20)
    # all are told to end after a step that is saved nowhere
    ends = [script.At("on_step_end", script.stop, 5), script.At("on_save", forgets, 6)]
    train(me, "full", max_steps=20, callbacks=ends)
    lose(me, [0])
    resumed, again = train(me, "full", resume=resume, max_steps=20)
    assert torch.equal(script.shards(whole), script.shards(resumed))
    # 4 steps an epoch: the rows of the right epoch, too
    assert rates[4:] == again and history(whole, "loss")[4:] == history(resumed, "loss")[-16:]
    assert kept(me) == ([4] if me.island else []) + [8, 12, 16, 20]


def forgets(args, state, control, **kwargs):
    """What is saved of a step is lost."""
    if args.process_index == 0:
        shutil.rmtree(Path(args.output_dir) / f"checkpoint-{state.global_step}")


SHARDED = dict(
    diloco={"period": 3}, demo={}, desloc={"period": 2}, streaming_diloco={"period": 4, "delay": 2}
)


@pytest.mark.parametrize("preset", SHARDED)
@pytest.mark.parametrize("fsdp", [False, True], ids=["single", "fsdp2"])
def test_trainer_take_over_ends_equal(run_ranks, preset, fsdp):
    """An island that lost its folder takes over, and both islands end equal."""

    def run(rank):
        logging.basicConfig(level=logging.WARNING, force=True)
        plan = {"max_steps": 10, "fsdp": fsdp, "save_steps": 5}
        train(rank, preset, SHARDED[preset], **plan)
        last = rank.folder / f"disk{rank.island}/out/island{rank.island}/checkpoint-10"
        shutil.rmtree(last, ignore_errors=True)
        lose(rank, [1])
        resumed, rates = train(rank, preset, SHARDED[preset], resume="auto", **plan)
        assert kept(rank) == ([10] if rank.island else [5, 10])
        assert rank.island == 0 or max(history(resumed, "loss")) < 3.3  # a fresh model: 3.5
        return script.parameters(resumed), rates, rank.log.read_text()

    out = run_ranks(run, islands=2, procs=1 + fsdp, timeout=120)
    whole, rates, _ = out[0]
    assert [r[0] for r in rates] == [6, 7, 8, 9, 10]
    assert all(torch.equal(o[0], whole) and o[1] == rates for o in out)
    log = out[1 + fsdp][2]
    assert "island1: nothing of step 5 here: took over from island0" in log
    assert "begin anew here" in log


@in_ranks(2, 1, timeout=120)
def test_trainer_take_over_no_checkpoint(me):
    """Without any checkpoint `True` and a path are refused and `auto` begins."""
    there = r"island0: checkpoint-7 \(not there\), island1: checkpoint-7 \(not there\)"
    for resume, said in ((True, "no island holds a checkpoint"), ("out/checkpoint-7", there)):
        with pytest.raises(NeedsDecision, match=said):
            train(me, "diloco", {"period": 3}, resume=resume)
    begun, rates = train(me, "diloco", {"period": 3}, resume="auto", max_steps=4)
    assert rates[0][0] == 1
    return script.parameters(begun)


class Manager(SimpleNamespace):
    """What `find_checkpoint` sees of a rank's `CheckpointManager`: one of two islands, whose notes
    are alike; another island, "b", tells nothing.
    """

    def __init__(self, root, held=(), rank=0):
        topology = SimpleNamespace(rank=rank, name="island0", islands=2, elastic=True)
        super().__init__(root=root, found=list(held), topology=topology, ranks=Ranks(None, 0, 1))
        tells = {"name": "b", "state": {}}
        self.registry = SimpleNamespace(meet=lambda note: [note, note], tell=lambda note: tells)
        self.adopt, self.verify = lambda: None, lambda folder: None
        self.fetch_newest = lambda name: None

    def held(self, name=""):
        return self.found

    def agree(self, held, how, name=""):
        return ResumePoint(4, None, True) if held and how == "take_over" else None


def test_trainer_resume_auto_says_once_that_training_begins(tmp_path, caplog):
    """Where no island holds a checkpoint, one rank of an island says so."""
    for rank in (0, 1):
        assert find_checkpoint("auto", Manager(tmp_path / "island0", rank=rank), False) is None
    assert caplog.text.count("island0: no island holds a checkpoint") == 1


def test_trainer_named_unlike_history_takes_over(tmp_path):
    """Of checkpoints that were named one history goes on, and other islands take over."""
    (tmp_path / "checkpoint-4").mkdir()
    manager = Manager(tmp_path, [HeldCheckpoint(4)])
    assert find_checkpoint("out/checkpoint-4", manager, fresh=False) == TakeOver(4, "b", {})
    assert find_checkpoint("out/checkpoint-4", manager, True) == str(tmp_path / "checkpoint-4")


@in_ranks(2, 1, timeout=120)
def test_trainer_take_over_fresh(me):
    """`fresh=True`: the channels start anew, from the parameters of the island that holds the
    checkpoint; a torn folder holds nothing.
    """
    train(me, "diloco", {"period": 3}, max_steps=8)
    own = me.folder / "disk0" / "out" / "island0"
    for step in (4, 8) if me.island == 0 else ():
        (own / f"checkpoint-{step}" / "trainer_state.json").unlink()
    line = {"period": 3, "fresh": True}
    resumed, rates = train(me, "diloco", line, resume=True, max_steps=12)
    assert [r[0] for r in rates] == [9, 10, 11, 12]
    return script.parameters(resumed)


@in_ranks(3, 1, timeout=120)
def test_trainer_take_over_from_furthest(me):
    """Islands 0 and 1 hold states between the same exchanges; one that holds none takes the
    furthest, and so does the one behind it.
    """
    train(me, "diloco", {"period": 6}, max_steps=6, save_steps=4 + me.island)
    shutil.rmtree(me.folder / f"disk{me.island}/out/island{me.island}/checkpoint-6")
    resumed, rates = train(me, "diloco", {"period": 6}, resume=True, max_steps=8)
    assert rates[0][0] == 6
    assert kept(me) == [[4, 8], [5, 8], [8]][me.island]
    return script.parameters(resumed), rates


# ---- its parts ---------------------------------------------------------------------------------


class Told:
    """A saver whose donor, "b", tells `state`."""

    def __init__(self, state):
        self.state = state

    def tell(self, note):
        return {"name": "b", "state": self.state}


def test_take_over_facts_of_donor(tmp_path):
    """The donor hands over the facts of its Trainer state that are small enough."""
    assert told(tmp_path) == {}
    state = {"global_step": 4, "best_metric": 0.5, "best_model_checkpoint": "/there", "epoch": 1.5}
    state |= {"log_history": [{"loss": 1.0}]}
    state |= {"stateful_callbacks": {"A": "x" * taking_over.LARGEST}}
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    assert told(tmp_path) == {"best_metric": 0.5, "epoch": 1.5}
    for state in ({"epoch": 1.5}, {}):
        taken = _with_others(None, 4, Told(state))
        assert (taken.step, taken.donor, taken.state) == (4, "b", state)
    for wrong in ([1], {"global_step": 5}, {"epoch": "1"}):
        with pytest.raises(ValueError, match="b has left a note of another form"):
            _with_others(None, 4, Told(wrong))
    (tmp_path / "trainer_state.json").write_text("[")
    assert told(tmp_path) == {}


def test_trainer_resume_of_sharded_files_without_fsdp_is_refused(tmp_path):
    alone = SimpleNamespace(one_world=False, world=1)
    (tmp_path / "model.safetensors").touch()
    refuse_sharded(tmp_path, alone)
    (tmp_path / "pytorch_model_fsdp_0").mkdir()
    with pytest.raises(NeedsDecision, match="start two ranks per island or more"):
        refuse_sharded(tmp_path, alone)


def test_trainer_resume_of_zero_by_other_ranks_is_refused(tmp_path):
    """DeepSpeed under the Trainer loads what as many ranks have saved."""
    (tmp_path / "global_step4").mkdir()
    for rank in range(2):
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        (tmp_path / "global_step4" / name).touch()
    for world, mesh in ((2, False), (4, True)):
        refuse_sharded(tmp_path, SimpleNamespace(one_world=mesh, world=world))
    with pytest.raises(NeedsDecision, match="saved by 2 ranks with ZeRO, and 1 load it"):
        refuse_sharded(tmp_path, SimpleNamespace(one_world=False, world=1))


@pytest.mark.parametrize("make", [
    lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 9),
    lambda o: torch.optim.lr_scheduler.SequentialLR(o,
        [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
        [3]),
])  # fmt: skip
def test_take_over_scheduler_forwarded(make, recwarn):
    """A scheduler is forwarded to the step of the donor."""
    rates = []
    for steps in (7, 0):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
        scheduler = make(optimizer)
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
        taking_over.forward(scheduler, 7 - steps)
        rates.append(scheduler.get_last_lr())
    assert rates[0] == rates[1] and not recwarn


def test_take_over_metric_scheduler_warned(caplog):
    """A warning says which scheduler cannot be forwarded."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    taking_over.forward(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), 3)
    taking_over.forward(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), -2)
    assert "ReduceLROnPlateau goes by a metric" in caplog.text and "is 2 steps ahead" in caplog.text


def test_take_over_log_names_losses():
    """The log says what is not exact after a take-over."""
    args = SimpleNamespace(ignore_data_skip=False, load_best_model_at_end=True)
    trainer = SimpleNamespace(args=args, state=SimpleNamespace(best_metric=1.0))
    exchange = SimpleNamespace(config=fsdp_demo.preset("diloco"), step=4, steps_taken=4)
    text = sentence(trainer, exchange, TakeOver(4, "a"), moments=False)
    assert text.startswith("nothing of step 4 here: took over from a, rows are skipped")
    assert "best model so far is on the other" in text
    said = {name: taking_over.begins_anew(fsdp_demo.preset(name)) for name in fsdp_demo.presets()}
    assert said["full"] == "random states begin anew here"
    assert "moments" in said["diloco"]
    assert "accumulators" in said["sparse_loco"]
