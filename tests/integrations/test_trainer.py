"""`ExchangeCallback` in a Trainer script as users write them: with and without the one line, alone,
two islands, 2 x 2 with FSDP2.
"""

import copy
import logging
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import EarlyStoppingCallback, Trainer, TrainingArguments

import fsdp_demo
from fsdp_demo.integrations.data import split_dataset_by_island
from fsdp_demo.integrations.trainer import ExchangeCallback
from fsdp_demo.integrations.trainer.session import Session
from fsdp_demo.runlog.files import load

from ..support import trainer_script as script
from ..support.heard import heard
from ..support.inside import in_ranks
from ..support.pages import metric, metrics_table
from ..support.trainer_runs import moments, sigterm_saves_and_resumes
from ..support.trainer_script import history, one_line


@in_ranks(1, 1, env={"ISLAND_COUNT": ""})
def test_trainer_alone_is_plain_training(me):
    """Alone the Trainer trains as if the callback were not there."""

    def run(where, extra):
        trained, files = script.trained(me.folder / where, extra), (me.folder / where).rglob("*")
        names = sorted(str(p.relative_to(me.folder / where)) for p in files if p.is_file())
        return script.parameters(trained), trained.state.log_history, names, trained.args.output_dir

    plain, line = run("plain", {}), run("line", one_line("diloco", period=2))
    assert torch.equal(plain[0], line[0]) and plain[2] == line[2]
    timed = ("runtime", "per_second", "train_loss")
    for a, b in zip(plain[1], line[1], strict=True):
        a, b = ({k: v for k, v in row.items() if not k.endswith(timed)} for row in (a, b))
        assert a == b
    assert line[3].endswith("/line")


def poison(args, state, control, model=None, **kwargs):
    """One element of a gradient is NaN, behind the Trainer's own clipping."""
    gradient = next(model.parameters()).grad
    getattr(gradient, "to_local", lambda: gradient)().view(-1)[0] = torch.nan


@pytest.mark.parametrize("procs, fsdp", [(1, False), (2, True)], ids=["single", "fsdp2"])
@in_ranks(2, timeout=120)
def test_trainer_nan_step_skipped(me, procs, fsdp):
    """An island takes no step on NaN. The Trainer clips, so the exchange does not: it looks all the
    same. Moments stay finite.
    """
    line = one_line("diloco", period=4)
    line["callbacks"] += [script.At("on_pre_optimizer_step", poison, 2)] * (me.rank == procs)
    trained = script.trained(me.folder / "out", line, fsdp=fsdp)
    kept, whole = moments(trained), script.parameters(trained)
    assert kept.numel() > 4 and bool(kept.isfinite().all()) and bool(whole.isfinite().all())
    assert script.exchange_of(trained).step == 8
    return whole


@pytest.mark.parametrize(
    "procs, fsdp", [(1, False), (2, False), (2, True)], ids=["single", "ddp", "fsdp2"]
)
def test_trainer_islands_train_one_model(run_ranks, procs, fsdp):
    """Two islands under the Trainer end with one model."""

    def work(rank):
        trained = script.trained(rank.folder / "out", one_line("diloco", period=4), fsdp=fsdp)
        exchange, folder = script.exchange_of(trained), Path(trained.args.output_dir)
        assert (exchange.step, exchange.metrics()["exchanges"]) == (8, 2)
        assert exchange.digests_equal() is True
        params = [p for g in trained.optimizer.param_groups for p in g["params"]]
        assert any(hasattr(p, "to_local") for p in params) == fsdp
        losses = history(trained, "eval_loss")
        assert len(losses) == 2 and losses[-1] < losses[0] < 3.3
        logs = {k for row in trained.state.log_history for k in row}
        wanted = ("bytes_sent", "loss", "seconds_waiting")
        assert {"eval_outer_parameters", *(f"exchange/{name}" for name in wanted)} <= logs
        exchanged = {metric(name) for name in logs if name.startswith("exchange/")}
        assert exchanged <= metrics_table().keys()
        assert folder.name == f"island{rank.island}"
        assert rank.island or trained.args.run_name.endswith("-island0")
        return script.parameters(trained), losses, history(trained, "loss"), folder

    out = run_ranks(work, islands=2, procs=procs, timeout=120)
    for whole, losses, _, folder in out:
        # the same outer parameters, the same rows
        assert torch.equal(whole, out[0][0]) and losses == out[0][1]
        (left,) = load(folder).islands  # what `fsdp-demo report` reads
        assert [e["step"] for e in left.exchanges] == [3, 7] and left.half == 0
        kinds = [e["kind"] for e in left.events]
        assert kinds[0] == "begin" and kinds[-1] == "finish" and kinds.count("evaluation") == 2
        assert left.lines and left.lines[-1]["loss"] > 0 and left.lines[-1]["tokens"] > 0
        assert left.summary is not None and left.summary["digests_equal"] is True
        assert left.summary["bytes_sent_per_island"] == left.lines[-1]["bytes_sent"] > 0
        parts = sorted(p.name for p in folder.glob("checkpoint-*/exchange/*"))
        wanted = [f"rank{r}.{end}" for r in range(procs) for end in ("json", "safetensors")]
        assert parts == sorted(2 * wanted)  # steps 4 and 8
    assert out[0][2] != out[-1][2]  # rows of their own


@pytest.mark.parametrize("preset", ["demo", "stride", "muloco", "diloco"])
@in_ranks(timeout=120)
def test_trainer_presets_with_own_optimizer(me, preset):
    """Presets that bring an optimizer of their own, or are given one, train under the Trainer."""
    given = {"inner_optimizer": "qhadamw"} if preset == "diloco" else {}
    changes = {"period": 4, **given} if preset.endswith("loco") else {}
    more = 'inner_optimizer="qhadamw", ' * bool(given)
    cure = rf'optimizer_cls_and_kwargs=exchange_optimizer\("{preset}", {more}lr=0.005\)\)'
    with pytest.raises(ValueError, match=rf"pass Trainer\(..., {cure}"):
        script.trainer(me.folder / "refused", {"callbacks": [ExchangeCallback(preset, **given)]})
    line = one_line(preset, **changes)
    trained = script.trained(me.folder / "out", line, fsdp=True)
    exchange, losses = script.exchange_of(trained), history(trained, "eval_loss")
    made = type(exchange.optimizers[0]).__name__, exchange.metrics()["exchanges"]
    kinds = {"muloco": ("MuonAdamW", 2), "diloco": ("QHAdamW", 2)}
    assert made == kinds.get(preset, ("SGD", 8))
    assert losses[-1] < losses[0]
    return script.parameters(trained)


@pytest.mark.parametrize("event, preset, stops", [
    ("on_step_end", "demo", 5), ("on_evaluate", "demo", 5), ("on_log", "diloco", 6),
])  # fmt: skip
@in_ranks(2, 1)
def test_trainer_stop_of_one_island_stops_all(me, event, preset, stops):
    """A callback that asks one island to stop stops all at one step."""
    line = one_line(preset, **({"period": 3} if preset == "diloco" else {}))
    wish = [script.At(event, script.stop, 4)] * me.island
    trained = script.trained(me.folder / "out", line, callbacks=wish, max_steps=20)
    assert script.checkpoints(trained) == sorted(["checkpoint-4", f"checkpoint-{stops}"])
    assert trained.state.global_step == stops
    assert script.exchange_of(trained).digests_equal()
    return script.parameters(trained)


@pytest.mark.parametrize("preset, changes, fsdp, slow, at", [
    ("diloco", {"period": 4}, False, False, (4, 4)),
    ("diloco", {"period": 50}, False, True, (4, 4)),  # no exchange near
    ("demo", {}, True, False, (4, 4)),
    ("decoupled_momentum", {"period": 4}, True, False, (4, 4)),
    # island 1 stops in an exchange that island 0 does not come to any more
    ("decoupled_momentum", {"period": 4}, False, False, (4, 7)),
    # stops with fragments under way
    ("streaming_diloco", {"period": 4, "delay": 2}, False, False, (4, 4)),
])  # fmt: skip
def test_trainer_sigterm_saves_and_resumes(run_ranks, preset, changes, fsdp, slow, at):
    """All islands are told to end: each saves after its own step and ends with status 75, and what
    was cut off in between is made up for.
    """

    script.need_moments(fsdp and preset != "demo")

    def run(me):
        sigterm_saves_and_resumes(me, preset, changes, slow, at, fsdp=fsdp)

    run_ranks(run, islands=2, procs=1 + fsdp, timeout=120)


@in_ranks(2, 1)
def test_trainer_resume_needs_exchange_state(me):
    """A resume without the state of the exchange is refused."""

    def train(resume=None, **more):
        line = one_line("diloco", period=4, **more)
        return script.trained(me.folder / "out", line, resume=resume)

    train()
    checkpoint = me.folder / "out" / f"island{me.island}" / "checkpoint-4"
    shutil.rmtree(checkpoint / "exchange")
    with pytest.raises(ValueError, match=r"was saved without the exchange.*fresh=True"):
        train(str(checkpoint))
    trained = train(str(checkpoint), fresh=True)
    assert trained.state.global_step == 8
    return script.parameters(trained)


@pytest.mark.parametrize("preset, shown", [("local_sgd", 0.0), ("diloco", 1.0)])
@in_ranks(2, 1)
def test_trainer_events_at_unlike_times(me, preset, shown):
    """Islands may evaluate, log and save at unlike times. Where the evaluated mean costs a round of
    communication, too.
    """
    i, line = me.island, one_line(preset, period=4)
    times = dict(eval_steps=3 + i, logging_steps=1 + i, save_steps=2 + 3 * i, max_steps=9)
    trained = script.trained(me.folder / preset, line, **times)
    outer = history(trained, "eval_outer_parameters")
    assert shown in outer if i else outer == [shown, shown, 1.0]
    return script.parameters(trained)


@in_ranks(2, 1)
def test_trainer_evaluates_mean_together(me):
    """A mean is evaluated where all islands evaluate."""
    trained = script.trained(me.folder / "out", one_line("local_sgd", period=3))
    losses = history(trained, "eval_loss")
    assert history(trained, "eval_outer_parameters") == [1.0, 1.0]
    assert trained.evaluate()["eval_loss"] == losses[-1]
    return losses


@pytest.mark.parametrize("procs, fsdp", [(1, False), (2, True)], ids=["single", "fsdp2"])
def test_trainer_best_model_common(run_ranks, procs, fsdp):
    """The islands choose the best model together."""
    best = dict(load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=False)
    best |= {"fsdp": fsdp}

    def run(rank):
        line = one_line("diloco", period=3)
        said = "after step 4 a checkpoint holds this island's own.*multiples of its period [(]3[)]"
        with pytest.raises(ValueError, match=said):
            script.trainer(rank.folder / "refused", line, **best).train()
        # No improvement is large enough after step 4: asked for at 8, heard at 10. Islands evaluate
        # different rows.
        stop = EarlyStoppingCallback(1, early_stopping_threshold=9.0)
        plan = {"callbacks": [stop], "max_steps": 16, **best}
        trained = script.trainer(rank.folder / "out", one_line("diloco", period=2), **plan)
        rows = range(rank.island * 8, rank.island * 8 + 8)
        trained.eval_dataset = trained.eval_dataset.select(rows)
        trained.train()
        state = trained.state
        chosen = state.best_global_step, state.best_metric, state.global_step
        return chosen, script.parameters(trained), trained.evaluate()["eval_loss"]

    out = run_ranks(run, islands=2, procs=procs, timeout=120)
    for o in out:
        assert o[0] == out[0][0] and torch.equal(o[1], out[0][1])
    chosen, _, loss = out[0]
    assert (chosen[0], chosen[2]) == (8, 10)
    # that of step 8 was loaded, on all ranks
    assert (loss + out[-1][2]) / 2 == pytest.approx(chosen[1], abs=1e-6)


@in_ranks()
def test_trainer_best_model_last_sharded(me):
    """The last of sharded checkpoints may be the best."""
    line, more = one_line("diloco", period=2), {"fsdp": True, "load_best_model_at_end": True}
    trained = script.trained(me.folder / "out", line, **more)
    best = trained.state.best_model_checkpoint
    assert best and Path(best).name == "checkpoint-8"
    return script.parameters(trained)


@pytest.mark.parametrize("split, seed", [(False, True), (False, False), (True, False)])
@in_ranks(2, 1)
def test_trainer_forgotten_split_warned(me, split, seed):
    """A warning says that the rows were not split between the islands."""
    records = heard(logging.INFO)
    order = {"train_sampling_strategy": "sequential" if seed else "random"}
    more = {"max_steps": 1, "eval_strategy": "no", "split": split, **order}
    trained = script.trained(me.folder / "out", one_line("diloco"), **more)
    found = [text for text in records if "split_dataset_by_island" in text]
    assert found == [] if split else "same rows" in found[0]
    assert not seed or trained.args.data_seed == 42 + me.island


REFUSED = [
    ("runs something else", "diloco", lambda i: {"learning_rate": 1e-3} if i else {}),
    ("runs something else", "diloco", lambda i: {"adam_beta1": 0.5} if i else {}),
    ("runs something else", "diloco",
        lambda i: {"lr_scheduler_kwargs": {"num_cycles": 0.25}} if i else {}),
    ("auto_find_batch_size=True: islands would take different steps", "diloco",
        lambda i: {"auto_find_batch_size": True}),
    ("exchanges the optimizer state .exp_avg., but no covered parameter has it", "desloc",
        lambda i: {"optim": "adafactor"}),
    (r"max_steps: \d+ here, \d+ there", "diloco", lambda i: {"max_steps": 4 + i}),
]  # fmt: skip


@in_ranks(2, 1)
def test_trainer_refusals_in_one_sentence(me):
    """Settings that cannot work are refused in one sentence."""

    def build(line, **settings):
        return script.trainer(me.folder / f"island{me.island}", line, **settings)

    for said, preset, settings in REFUSED:
        with pytest.raises(ValueError, match=said):
            line = one_line(preset)
            build(line, lr_scheduler_type="cosine", **settings(me.island)).train()
    with pytest.raises(ValueError, match="clip=0.1 beside max_grad_norm=1.0: set max_grad_norm a"):
        build({"callbacks": [ExchangeCallback(fsdp_demo.preset("diloco", clip=0.1))]})
    with pytest.raises(ValueError, match="the norm that clips is TrainingArguments"):
        ExchangeCallback("diloco", clip=0.5)
    trained, late = build({}), ExchangeCallback("diloco")
    loads_by_shards = {"is_distributed_loading_by_transformers": True}
    trained.model = type("Native", (torch.nn.Module,), loads_by_shards)()
    trained.add_callback(late)
    with pytest.raises(ValueError, match="sharded at load time"):
        late.set_trainer(trained)


@in_ranks(2, 1, env={"ISLAND_NAME": "here"})
def test_trainer_islands_of_one_name_refused(me):
    """Islands of one name are refused."""
    with pytest.raises(ValueError, match=r"islands \[0, 1\] all have ISLAND_NAME='here'"):
        script.trained(me.folder / "out", one_line("diloco"))


@in_ranks(2, 1, timeout=120)
def test_trainer_stop_inside_epoch(me):
    """The checkpoint of the stop holds the state before the last exchange, with fragments under
    way, and is not written over.
    """
    plan = dict(max_steps=-1, num_train_epochs=3, save_strategy="epoch", eval_strategy="epoch")
    wish, out = [script.At("on_step_end", script.stop, 4)] * me.island, []
    for where, callbacks, resume in (("whole", [], None), ("cut", wish, None), ("cut", [], True)):
        line, more = one_line("streaming_diloco", period=4, delay=2), {"callbacks": callbacks}
        trained = script.trained(me.folder / where, line, resume=resume, **more, **plan)
        out.append((trained.state.global_step, script.parameters(trained)))
    whole, cut, resumed = out
    assert 4 < cut[0] < 24 and whole[0] == resumed[0] == 24 and torch.equal(whole[1], resumed[1])


@in_ranks(2, 1)
def test_trainer_data_end_early(me):
    """Islands whose data end early end with one model."""

    def ends(args, state, control, **kwargs):
        control.should_epoch_stop = True

    plan = dict(max_steps=-1, num_train_epochs=2, eval_strategy="no", save_strategy="no")
    plan["callbacks"] = [script.At("on_step_end", ends, 4, 12)]  # before max_steps
    trained = script.trained(me.folder / "out", one_line("diloco", period=5), **plan)
    assert (trained.state.global_step, trained.state.max_steps) == (12, 16)
    return script.parameters(trained)


@in_ranks(2, 1)
def test_trainer_twice_and_shared_arguments(me):
    """One Trainer trains twice, and two Trainers share their arguments."""
    patch = pytest.MonkeyPatch()  # of a rank, which ends with it
    patch.setattr("transformers.Trainer.push_to_hub", lambda self, **keywords: keywords)
    line = one_line("diloco", period=3)
    trained = script.trained(me.folder / "out", line, max_steps=3, push_to_hub=False)
    trained.args.max_steps = 5
    trained.train()
    with pytest.raises(ValueError, match="belongs to another Trainer: make one for each"):
        script.trainer(me.folder / "other", line)
    late = script.trainer(me.folder / "late", {})
    late.add_callback(ExchangeCallback("diloco"))
    with pytest.raises(RuntimeError, match=r"call callback.set_trainer\(trainer\)"):
        late.train()
    rows = {"eval_dataset": late.eval_dataset}
    second = type(late)(late.model, trained.args, **rows, **one_line("diloco"))
    assert second.args.output_dir.endswith(f"out/island{me.island}")
    assert second.push_to_hub() == (None if me.island else {"model_name": "out"})
    assert trained.state.global_step == 5
    return script.parameters(trained)


def test_trainer_sigterm_without_exchange(run_ranks):
    """A process that waits for peers that do not come still ends at SIGTERM."""
    out = run_ranks(_wait_for_nobody, islands=2, procs=1, check=False, timeout=40)
    assert out[0].status == -signal.SIGTERM


def _wait_for_nobody(rank):
    if rank.island == 0:
        trained = script.trainer(rank.folder / "out", one_line("diloco"))
        signal.setitimer(signal.ITIMER_REAL, 2.0)
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        trained.train()


def test_trainer_sigterm_twice(run_ranks):
    """A second SIGTERM is the same wish: the step is saved, and the status is 75."""

    def run(rank):
        told = [("on_step_end", 3), ("on_save", *range(1, 21))] if rank.island else []
        calls = [script.At(event, script.sigterm, *steps) for event, *steps in told]
        more = {"callbacks": calls, "max_steps": 20}
        trained = script.trained(rank.folder / "out", one_line("diloco", period=10), **more)
        return trained.state.global_step

    stays, told = run_ranks(run, islands=2, procs=1, check=False)
    assert told.status == 75 and stays.value == 20


@pytest.mark.parametrize(("procs", "together"), [(1, True), (2, True), (2, False)])
@in_ranks()
def test_trainer_weight_tokens_counts_labels(me, procs, together):
    """With reducer.weight=tokens two islands take the mean over all labels, as one process does,
    where rows have unlike numbers of them, ranks add theirs up or not, and steps accumulate.
    """

    def rows(count):
        found = []
        for i in range(count):
            ids = torch.randint(20, (13,), generator=torch.Generator().manual_seed(i))
            found.append({"input_ids": ids, "labels": ids.clone()})
            found[-1]["labels"][: 11 if i % 2 == 0 else 1] = -100  # 2 or 12 are left
        return found

    made = rows(4 * procs)
    script.fresh_state()
    torch.manual_seed(0)
    model = script.model()
    reference = copy.deepcopy(model)
    args = TrainingArguments(
        str(me.folder / "out"), max_steps=3, per_device_train_batch_size=1, use_cpu=True,
        gradient_accumulation_steps=2, save_strategy="no", report_to=[], max_grad_norm=0.0,
        lr_scheduler_type="constant", optim="sgd", learning_rate=0.5, disable_tqdm=True,
        average_tokens_across_devices=together, logging_steps=1,
    )  # fmt: skip
    line = ExchangeCallback("full", **{"reducer.weight": "tokens"})
    own = split_dataset_by_island(made)
    trained = Trainer(model=model, args=args, train_dataset=own, callbacks=[line])
    trained.train()
    ids, labels = (torch.stack([row[name] for row in made]) for name in made[0])
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
    for _ in range(3):
        reference(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    far = max((p - q).abs().max().item() for p, q in pairs)
    tokens = history(trained, "exchange/global_tokens")
    assert far < 1e-5 and tokens == [52 * procs * n for n in (1, 2, 3)]  # inputs, not labels


def test_trainer_weight_without_a_count():
    """Where the Trainer hands on no count of labels, those of a batch are counted, without the
    first of a row where the loss is shifted; without labels the tokens.
    """
    args = SimpleNamespace(average_tokens_across_devices=False, process_index=1)
    trainer = SimpleNamespace(args=args, state=SimpleNamespace(global_step=3))
    session = SimpleNamespace(_trainer=trainer, _weighed=-1)
    batch = {"input_ids": torch.zeros(2, 3), "labels": torch.tensor([[1, 2, -100], [-100, 5, 6]])}
    assert int(Session._weight(session, batch, None)) == 4
    trainer._loss_shifts_labels = True
    assert int(Session._weight(session, batch, None)) == 3
    assert Session._weight(session, {"input_ids": torch.zeros(2, 3)}, None) == 6
    assert [int(Session._weight(session, batch, n)) for n in (torch.tensor(9.0), 9)] == [9, 0]
    args.average_tokens_across_devices, trainer.state.global_step = True, 4
    assert Session._weight(session, batch, 9) == 0  # the first rank counts for all
