"""`ExchangeCallback` in a Trainer script as users write them: with and without the one line, alone,
two islands, 2 x 2 with FSDP2.
"""

import copy
import logging
import os
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")

from transformers import (  # noqa: E402
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import fsdp_demo  # noqa: E402
from fsdp_demo.integrations.data import split_dataset_by_island  # noqa: E402
from fsdp_demo.integrations.trainer import ExchangeCallback, exchange_optimizer  # noqa: E402
from fsdp_demo.integrations.trainer.session import Session  # noqa: E402
from fsdp_demo.runlog.files import load  # noqa: E402

from ..support import trainer_script as script  # noqa: E402
from ..support.heard import heard  # noqa: E402
from ..support.inside import in_ranks
from ..support.pages import metric, metrics_table  # noqa: E402


def one_line(preset, **changes):
    return {"callbacks": [ExchangeCallback(preset, **changes)]}


def history(trained, key):
    return [row[key] for row in trained.state.log_history if key in row]


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


class Poison(TrainerCallback):
    """Makes one element of a gradient NaN in one step, behind the Trainer's own clipping."""

    def __init__(self, step):
        self.step = step

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if state.global_step == self.step:
            gradient = next(model.parameters()).grad
            getattr(gradient, "to_local", lambda: gradient)().view(-1)[0] = torch.nan


@pytest.mark.parametrize("procs, fsdp", [(1, False), (2, True)], ids=["single", "fsdp2"])
def test_trainer_nan_step_skipped(run_ranks, procs, fsdp):
    """An island takes no step on NaN. The Trainer clips, so the exchange does not: it looks all the
    same. Moments stay finite.
    """

    def work(rank):
        lines = one_line("diloco", period=4)
        lines["callbacks"] += [Poison(2)] if rank.rank == procs else []
        trained = script.trained(rank.folder / "out", lines, fsdp=fsdp)
        kept = [v for state in trained.optimizer.state.values() for v in state.values()]
        moments = [getattr(v, "to_local", lambda v=v: v)() for v in kept if torch.is_tensor(v)]
        assert len(moments) > 4 and all(bool(v.isfinite().all()) for v in moments)
        assert script.exchange_of(trained).step == 8
        return script.parameters(trained)

    out = run_ranks(work, islands=2, procs=procs, timeout=120)
    assert all(torch.equal(whole, out[0]) and bool(whole.isfinite().all()) for whole in out)


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


@pytest.mark.parametrize("preset", ["demo", "stride", "muloco"])
def test_trainer_presets_with_own_optimizer(run_ranks, preset):
    """Presets that bring an optimizer of their own train under the Trainer."""

    def run(rank):
        changes = {"period": 4} if preset == "muloco" else {}
        cure = rf'optimizer_cls_and_kwargs=exchange_optimizer\("{preset}", lr=0.005\)\)'
        with pytest.raises(ValueError, match=rf"pass Trainer\(..., {cure}"):
            script.trainer(rank.folder / "refused", one_line(preset))
        extra = one_line(preset, **changes)
        extra["optimizer_cls_and_kwargs"] = exchange_optimizer(preset, lr=4e-3)
        trained = script.trained(rank.folder / "out", extra, fsdp=True)
        exchange, losses = script.exchange_of(trained), history(trained, "eval_loss")
        made = type(exchange.optimizers[0]).__name__, exchange.metrics()["exchanges"]
        assert made == (("MuonAdamW", 2) if preset == "muloco" else ("SGD", 8))
        assert losses[-1] < losses[0]
        return script.shards(trained)

    out = run_ranks(run, islands=2, procs=2, timeout=120)
    assert torch.equal(out[0], out[2]) and torch.equal(out[1], out[3])


class StopAt(TrainerCallback):
    """A user's callback: asks to stop on one island."""

    def __init__(self, step, event, wanted):
        self.step, self.event, self.wanted = step, event, wanted

    def _ask(self, event, state, control):
        if self.wanted and event == self.event and state.global_step == self.step:
            control.should_training_stop = True

    def on_step_end(self, args, state, control, **kwargs):
        self._ask("step", state, control)

    def on_evaluate(self, args, state, control, **kwargs):
        self._ask("evaluate", state, control)

    def on_log(self, args, state, control, **kwargs):
        self._ask("log", state, control)


@pytest.mark.parametrize(
    "event, preset, stops", [("step", "demo", 5), ("evaluate", "demo", 5), ("log", "diloco", 6)]
)
def test_trainer_stop_of_one_island_stops_all(run_ranks, event, preset, stops):
    """A callback that asks one island to stop stops all at one step."""

    def run(rank):
        extra = one_line(preset, **({"period": 3} if preset == "diloco" else {}))
        if preset == "demo":
            extra["optimizer_cls_and_kwargs"] = exchange_optimizer(preset, lr=4e-3)
        wish = StopAt(4, event, rank.island == 1)
        trained = script.trained(rank.folder / "out", extra, callbacks=[wish], max_steps=20)
        checkpoints = sorted(p.name for p in Path(trained.args.output_dir).glob("checkpoint-*"))
        assert checkpoints == sorted(["checkpoint-4", f"checkpoint-{stops}"])
        assert trained.state.global_step == stops
        assert script.exchange_of(trained).digests_equal()
        return script.parameters(trained)

    assert torch.equal(*run_ranks(run, islands=2, procs=1))


@pytest.mark.parametrize("preset, changes, fsdp, slow", [
    ("diloco", {"period": 4}, False, False),
    ("diloco", {"period": 50}, False, True),  # no exchange near
    ("demo", {}, True, False),
    ("decoupled_momentum", {"period": 4}, True, False),
    # stops with fragments under way
    ("streaming_diloco", {"period": 4, "delay": 2}, False, False),
])  # fmt: skip
def test_trainer_sigterm_saves_and_resumes(run_ranks, preset, changes, fsdp, slow):
    """All islands are told to end: each saves after its own step and ends with status 75, and what
    was cut off in between is made up for.
    """

    class Term(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 4 and self.signals:
                os.kill(os.getpid(), signal.SIGTERM)
            if slow:  # steps that end before both are told would be all
                time.sleep(0.2)

    def run(rank):
        settings = {"max_steps": 12, "eval_strategy": "no", "save_steps": 100, "logging_steps": 1}
        out = {}
        for name, term, resume in (("whole", [], None), ("cut", [Term()], None), ("cut", [], True)):
            where = rank.folder / name
            callbacks = term
            for one in term:
                one.signals = rank.proc == 0
            os.environ["ISLAND_RUN"] += f"-{name}-{resume}"
            extra = one_line(preset, **changes)
            if preset == "demo":
                extra["optimizer_cls_and_kwargs"] = exchange_optimizer(preset, lr=4e-3)
            trained = script.trainer(where, extra, fsdp=fsdp, callbacks=callbacks, **settings)
            how = None
            try:
                trained.train(resume_from_checkpoint=resume)
            except SystemExit as error:
                how = error.code
            losses = {
                row["step"]: row["loss"] for row in trained.state.log_history if "loss" in row
            }
            saved = sorted(p.name for p in Path(trained.args.output_dir).glob("checkpoint-*"))
            out[name, resume] = (
                how,
                trained.state.global_step,
                saved,
                losses,
                script.shards(trained),
            )
        return out

    out = run_ranks(run, islands=2, procs=2 if fsdp else 1, timeout=120)
    for o in out:
        whole, cut, resumed = o["whole", None], o["cut", None], o["cut", True]
        assert (whole[:2], resumed[:2]) == ((None, 12), (None, 12)) and cut[0] == 75
        assert 5 <= cut[1] < 12 and cut[2] == [f"checkpoint-{cut[1]}"]
        assert torch.equal(resumed[4], whole[4])
        # a step whose exchange was cut off is not logged
        assert resumed[3].items() <= whole[3].items() and len(resumed[3]) >= 11


def test_trainer_resume_needs_exchange_state(run_ranks):
    """A resume without the state of the exchange is refused."""

    def run(rank):
        line = {"preset": "diloco", "period": 4}
        script.trained(rank.folder / "out", one_line(**line))
        checkpoint = rank.folder / "out" / f"island{rank.island}" / "checkpoint-4"
        shutil.rmtree(checkpoint / "exchange")
        with pytest.raises(ValueError, match=r"was saved without the exchange.*fresh=True"):
            script.trained(rank.folder / "out", one_line(**line), resume=str(checkpoint))
        again = one_line(**line, fresh=True)
        trained = script.trained(rank.folder / "out", again, resume=str(checkpoint))
        assert trained.state.global_step == 8
        return script.parameters(trained)

    assert torch.equal(*run_ranks(run, islands=2, procs=1))


def test_trainer_events_at_unlike_times(run_ranks):
    """Islands may evaluate, log and save at unlike times. Where the evaluated mean costs a round of
    communication, too.
    """

    def run(rank, preset):
        i, line = rank.island, one_line(preset, period=4)
        times = dict(eval_steps=3 + i, logging_steps=1 + i, save_steps=2 + 3 * i, max_steps=9)
        trained = script.trained(rank.folder / preset, line, **times)
        return script.parameters(trained), history(trained, "eval_outer_parameters")

    for preset, shown in (("local_sgd", 0.0), ("diloco", 1.0)):
        (one, first), (two, second) = run_ranks(run, islands=2, procs=1, args=(preset,))
        assert torch.equal(one, two)
        assert first == [shown, shown, 1.0] and shown in second


def test_trainer_evaluates_mean_together(run_ranks):
    """A mean is evaluated where all islands evaluate."""

    def run(rank):
        trained = script.trained(rank.folder / "out", one_line("local_sgd", period=3))
        return (
            history(trained, "eval_loss"),
            history(trained, "eval_outer_parameters"),
            trained.evaluate()["eval_loss"],
        )

    out = run_ranks(run, islands=2, procs=1)
    assert out[0] == out[1] and out[0][1] == [1.0, 1.0] and out[0][2] == out[0][0][-1]


@pytest.mark.parametrize("procs, fsdp", [(1, False), (2, True)], ids=["single", "fsdp2"])
def test_trainer_best_model_common(run_ranks, procs, fsdp):
    """The islands choose the best model together."""
    best = dict(load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=False)

    def run(rank):
        refused = script.trainer(
            rank.folder / "refused", one_line("diloco", period=3), fsdp=fsdp, **best
        )
        with pytest.raises(
            ValueError,
            match=r"after step 4 a checkpoint holds this island's own.*multiples of its period "
            r"\(3\)",
        ):
            refused.train()
        # No improvement is large enough after step 4: asked for at 8, heard at 10. Islands evaluate
        # different rows.
        stop = EarlyStoppingCallback(1, early_stopping_threshold=9.0)
        trained = script.trainer(
            rank.folder / "out",
            one_line("diloco", period=2),
            callbacks=[stop],
            fsdp=fsdp,
            max_steps=16,
            **best,
        )
        trained.eval_dataset = trained.eval_dataset.select(
            range(rank.island * 8, rank.island * 8 + 8)
        )
        trained.train()
        return (
            trained.state.best_global_step,
            trained.state.best_metric,
            trained.state.global_step,
            script.parameters(trained),
            trained.evaluate()["eval_loss"],
        )

    out = run_ranks(run, islands=2, procs=procs, timeout=120)
    for o in out:
        assert o[:3] == out[0][:3] and torch.equal(o[3], out[0][3])
    assert (out[0][0], out[0][2]) == (8, 10)
    # that of step 8 was loaded, on all ranks
    assert (out[0][4] + out[-1][4]) / 2 == pytest.approx(out[0][1], abs=1e-6)


def test_trainer_best_model_last_sharded(run_ranks):
    """The last of sharded checkpoints may be the best."""

    def run(rank):
        trained = script.trained(
            rank.folder / "out",
            one_line("diloco", period=2),
            fsdp=True,
            load_best_model_at_end=True,
        )
        best = trained.state.best_model_checkpoint
        return best and Path(best).name, script.parameters(trained)

    out = run_ranks(run, islands=2, procs=2, timeout=60)
    for best, whole in out:
        assert best == "checkpoint-8" and torch.equal(whole, out[0][1])


def test_trainer_forgotten_split_warned(run_ranks):
    """A warning says that the rows were not split between the islands."""

    def run(rank, split, seed):
        records = heard(logging.INFO)
        settings = {
            "max_steps": 1,
            "eval_strategy": "no",
            "train_sampling_strategy": "sequential" if seed else "random",
        }
        trained = script.trained(rank.folder / "out", one_line("diloco"), split=split, **settings)
        return [
            text for text in records if "split_dataset_by_island" in text
        ], trained.args.data_seed

    same = run_ranks(run, islands=2, procs=1, args=(False, True))
    assert all("same rows" in o[0][0] for o in same) and [o[1] for o in same] == [42, 43]
    order = run_ranks(run, islands=2, procs=1, args=(False, False))
    assert all("same rows" in o[0][0] for o in order)
    assert [o[0] for o in run_ranks(run, islands=2, procs=1, args=(True, False))] == [[], []]


def test_trainer_refusals_in_one_sentence(run_ranks, tmp_path):
    """Settings that cannot work are refused in one sentence."""

    def run(rank):
        def build(extra, **settings):
            return script.trainer(rank.folder / f"island{rank.island}", extra, **settings)

        with pytest.raises(
            ValueError, match="clip=0.1 beside max_grad_norm=1.0: set max_grad_norm alone"
        ):
            build({"callbacks": [ExchangeCallback(fsdp_demo.preset("diloco", clip=0.1))]})
        for side, wrong in (
            ("learning_rate", 1e-3),
            ("adam_beta1", 0.5),
            ("lr_scheduler_kwargs", {"num_cycles": 0.25}),
        ):
            with pytest.raises(ValueError, match="runs something else"):
                build(
                    one_line("diloco"),
                    lr_scheduler_type="cosine",
                    **({side: wrong} if rank.island else {}),
                ).train()
        with pytest.raises(
            ValueError, match="auto_find_batch_size=True: islands would take different steps"
        ):
            build(one_line("diloco"), auto_find_batch_size=True)
        with pytest.raises(
            ValueError,
            match=r"exchanges the optimizer state .exp_avg., but no covered parameter has it",
        ):
            build(one_line("desloc", period=2), optim="adafactor").train()
        with pytest.raises(ValueError, match=r"max_steps: \d+ here, \d+ there"):
            build(one_line("diloco"), max_steps=4 + rank.island).train()
        trained, late = build({}), ExchangeCallback("diloco")
        trained.model = type(
            "Native", (torch.nn.Module,), {"is_distributed_loading_by_transformers": True}
        )()
        trained.add_callback(late)
        with pytest.raises(ValueError, match="sharded at load time"):
            late.set_trainer(trained)

    run_ranks(run, islands=2, procs=1)
    with pytest.raises(ValueError, match="the norm that clips is TrainingArguments"):
        ExchangeCallback("diloco", clip=0.5)


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
    settings = dict(max_steps=-1, num_train_epochs=3, save_strategy="epoch", eval_strategy="epoch")
    out = []
    for where, wish, resume in (
        ("whole", False, None),
        ("cut", me.island == 1, None),
        ("cut", False, True),
    ):
        stop = StopAt(4, "step", wish)
        extra = one_line("streaming_diloco", period=4, delay=2)
        trained = script.trained(
            me.folder / where, extra, resume=resume, callbacks=[stop], **settings
        )
        out.append((trained.state.global_step, script.parameters(trained)))
    whole, cut, resumed = out
    assert 4 < cut[0] < 24 and whole[0] == resumed[0] == 24 and torch.equal(whole[1], resumed[1])


class EpochStop(TrainerCallback):
    """Ends every epoch early: training ends before max_steps."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_epoch_stop = state.global_step % 8 == 4


def test_trainer_data_end_early(run_ranks):
    """Islands whose data end early end with one model."""

    def run(rank):
        settings = dict(max_steps=-1, num_train_epochs=2, eval_strategy="no", save_strategy="no")
        trained = script.trained(
            rank.folder / "out", one_line("diloco", period=5), callbacks=[EpochStop()], **settings
        )
        return trained.state.global_step, trained.state.max_steps, script.parameters(trained)

    first, second = run_ranks(run, islands=2, procs=1)
    assert first[:2] == second[:2] == (12, 16) and torch.equal(first[2], second[2])


def test_trainer_twice_and_shared_arguments(run_ranks):
    """One Trainer trains twice, and two Trainers share their arguments."""

    def run(rank):
        patch = pytest.MonkeyPatch()  # of a rank, which ends with it
        patch.setattr("transformers.Trainer.push_to_hub", lambda self, **keywords: keywords)
        line = one_line("diloco", period=3)
        trained = script.trained(rank.folder / "out", line, max_steps=3, push_to_hub=False)
        trained.args.max_steps = 5
        trained.train()
        with pytest.raises(ValueError, match="belongs to another Trainer: make one for each"):
            script.trainer(rank.folder / "other", line)
        late = script.trainer(rank.folder / "late", {})
        late.add_callback(ExchangeCallback("diloco"))
        with pytest.raises(RuntimeError, match=r"call callback.set_trainer\(trainer\)"):
            late.train()
        second = type(late)(
            late.model,
            trained.args,
            eval_dataset=late.eval_dataset,
            callbacks=one_line("diloco")["callbacks"],
        )
        return (
            trained.state.global_step,
            script.parameters(trained),
            second.args.output_dir,
            second.push_to_hub(),
        )

    first, second = run_ranks(run, islands=2, procs=1)
    assert first[0] == 5 and torch.equal(first[1], second[1])
    assert first[2].endswith("out/island0") and second[2].endswith("out/island1")
    assert first[3] == {"model_name": "out"} and second[3] is None


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

    class Term(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                os.kill(os.getpid(), signal.SIGTERM)

        def on_save(self, args, state, control, **kwargs):
            os.kill(os.getpid(), signal.SIGTERM)

    def run(rank):
        callbacks = [Term()] if rank.island else []
        trained = script.trained(
            rank.folder / "out", one_line("diloco", period=10), callbacks=callbacks, max_steps=20
        )
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
