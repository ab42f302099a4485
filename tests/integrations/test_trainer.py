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
from fsdp_demo.integrations.trainer import stop as trainer_stop  # noqa: E402
from fsdp_demo.integrations.trainer.session import Session  # noqa: E402
from fsdp_demo.runlog.files import load  # noqa: E402

from ..support import trainer_script as script  # noqa: E402
from ..support.pages import metric, metrics_table  # noqa: E402


def one_line(preset, **changes):
    return {"callbacks": [ExchangeCallback(preset, **changes)]}


def history(trained, key):
    return [row[key] for row in trained.state.log_history if key in row]


def test_trainer_alone_is_plain_training(tmp_path, run_ranks):
    """Alone the Trainer trains as if the callback were not there."""

    def run(rank, where, extra):
        trained = script.trainer(rank.folder / where, extra)
        trained.train()
        files = sorted(
            str(p.relative_to(rank.folder / where))
            for p in (rank.folder / where).rglob("*")
            if p.is_file()
        )
        return script.parameters(trained), trained.state.log_history, files, trained.args.output_dir

    def both(rank):
        return run(rank, "plain", {}), run(rank, "line", one_line("diloco", period=2))

    ((plain, line),) = run_ranks(both, islands=1, procs=1, env={"ISLAND_COUNT": ""})
    assert torch.equal(plain[0], line[0]) and plain[2] == line[2]
    timed = ("runtime", "per_second", "train_loss")
    for a, b in zip(plain[1], line[1], strict=True):
        assert {k: v for k, v in a.items() if not k.endswith(timed)} == {
            k: v for k, v in b.items() if not k.endswith(timed)
        }
    assert line[3].endswith("/line")


def two_islands(rank, preset, fsdp=False, **changes):
    settings = changes.pop("settings", {})
    trained = script.trainer(
        rank.folder / "out", one_line(preset, **changes), fsdp=fsdp, **settings
    )
    trained.train()
    exchange = script.exchange_of(trained)
    return {
        "whole": script.parameters(trained),
        "eval": history(trained, "eval_loss"),
        "loss": history(trained, "loss"),
        "logs": {k for row in trained.state.log_history for k in row},
        "step": exchange.step,
        "exchanges": exchange.metrics()["exchanges"],
        "equal": exchange.digests_equal(),
        "folder": trained.args.output_dir,
        "saved": sorted(
            p.name for p in Path(trained.args.output_dir).glob("checkpoint-*/exchange/*")
        ),
        "run_name": trained.args.run_name,
        "sharded": any(
            hasattr(p, "to_local") for g in trained.optimizer.param_groups for p in g["params"]
        ),
    }


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
        trained = script.trainer(rank.folder / "out", lines, fsdp=fsdp)
        trained.train()
        exchange = next(
            c for c in trained.callback_handler.callbacks if isinstance(c, ExchangeCallback)
        ).exchange
        moments = [
            v.to_local() if hasattr(v, "to_local") else v
            for kept in trained.optimizer.state.values()
            for v in kept.values()
            if isinstance(v, torch.Tensor)
        ]
        finite = all(bool(v.isfinite().all()) for v in moments)
        return script.parameters(trained), finite and len(moments) > 4, exchange.step

    out = run_ranks(work, islands=2, procs=procs, timeout=120)
    for whole, finite, step in out:
        assert torch.equal(whole, out[0][0]) and bool(whole.isfinite().all())
        assert finite and step == 8


@pytest.mark.parametrize(
    "procs, fsdp", [(1, False), (2, False), (2, True)], ids=["single", "ddp", "fsdp2"]
)
def test_trainer_islands_train_one_model(run_ranks, procs, fsdp):
    """Two islands under the Trainer end with one model."""
    out = run_ranks(
        lambda rank: two_islands(rank, "diloco", fsdp, period=4),
        islands=2,
        procs=procs,
        timeout=120,
    )
    for o in out:
        assert torch.equal(o["whole"], out[0]["whole"]) and o["equal"] is True
        assert (o["step"], o["sharded"]) == (8, fsdp) and o["exchanges"] == 2
        # steps 4 and 8: the same outer parameters, the same rows
        assert o["eval"] == out[0]["eval"] and len(o["eval"]) == 2
        assert o["eval"][-1] < o["eval"][0] < 3.3
        assert {
            "exchange/bytes_sent",
            "exchange/loss",
            "exchange/seconds_waiting",
            "eval_outer_parameters",
        } <= o["logs"]
        exchanged = {metric(name) for name in o["logs"] if name.startswith("exchange/")}
        assert exchanged <= metrics_table().keys()
        (left,) = load(o["folder"]).islands  # what `fsdp-demo report` reads
        assert [e["step"] for e in left.exchanges] == [3, 7] and left.half == 0
        kinds = [e["kind"] for e in left.events]
        assert kinds[0] == "begin" and kinds[-1] == "finish" and kinds.count("evaluation") == 2
        assert left.lines and left.lines[-1]["loss"] > 0 and left.lines[-1]["tokens"] > 0
        assert left.summary is not None and left.summary["digests_equal"] is True
        assert left.summary["bytes_sent_per_island"] == left.lines[-1]["bytes_sent"] > 0
    assert [Path(o["folder"]).name for o in out] == ["island0"] * procs + ["island1"] * procs
    assert out[0]["saved"] == sorted(
        f"rank{r}.{kind}" for r in range(procs) for _ in (4, 8) for kind in ("json", "safetensors")
    )
    # rows of their own
    assert out[0]["run_name"].endswith("-island0") and out[0]["loss"] != out[-1]["loss"]


@pytest.mark.parametrize("preset", ["demo", "stride", "muloco"])
def test_trainer_presets_with_own_optimizer(run_ranks, preset):
    """Presets that bring an optimizer of their own train under the Trainer."""

    def run(rank):
        changes = {"period": 4} if preset == "muloco" else {}
        with pytest.raises(
            ValueError,
            match=rf'pass Trainer\(..., optimizer_cls_and_kwargs=exchange_optimizer\("{preset}", '
            rf"lr=0.005\)\)",
        ):
            script.trainer(rank.folder / "refused", one_line(preset))
        extra = one_line(preset, **changes) | {
            "optimizer_cls_and_kwargs": exchange_optimizer(preset, lr=4e-3)
        }
        trained = script.trainer(rank.folder / "out", extra, fsdp=True)
        trained.train()
        exchange = script.exchange_of(trained)
        return (
            script.shards(trained),
            type(exchange.optimizers[0]).__name__,
            exchange.metrics()["exchanges"],
            history(trained, "eval_loss"),
        )

    out = run_ranks(run, islands=2, procs=2, timeout=120)
    assert torch.equal(out[0][0], out[2][0]) and torch.equal(out[1][0], out[3][0])
    assert out[0][1:3] == (("MuonAdamW", 2) if preset == "muloco" else ("SGD", 8))
    assert out[0][3][-1] < out[0][3][0]


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
        trained = script.trainer(rank.folder / "out", extra, callbacks=[wish], max_steps=20)
        trained.train()
        checkpoints = sorted(p.name for p in Path(trained.args.output_dir).glob("checkpoint-*"))
        exchange = script.exchange_of(trained)
        return (
            trained.state.global_step,
            script.parameters(trained),
            checkpoints,
            exchange.digests_equal(),
        )

    out = run_ranks(run, islands=2, procs=1)
    assert [o[0] for o in out] == [stops, stops] and torch.equal(out[0][1], out[1][1])
    assert out[0][2] == out[1][2] == sorted(["checkpoint-4", f"checkpoint-{stops}"]) and out[0][3]


@pytest.mark.parametrize(
    "preset, changes, fsdp, slow",
    [
        ("diloco", {"period": 4}, False, False),
        ("diloco", {"period": 50}, False, True),  # no exchange near
        ("demo", {}, True, False),
        ("decoupled_momentum", {"period": 4}, True, False),
        # stops with fragments under way
        ("streaming_diloco", {"period": 4, "delay": 2}, False, False),
    ],
)
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
        script.trainer(rank.folder / "out", one_line("diloco", period=4)).train()
        checkpoint = rank.folder / "out" / f"island{rank.island}" / "checkpoint-4"
        shutil.rmtree(checkpoint / "exchange")
        with pytest.raises(ValueError, match=r"was saved without the exchange.*fresh=True"):
            script.trainer(rank.folder / "out", one_line("diloco", period=4)).train(
                resume_from_checkpoint=str(checkpoint)
            )
        trained = script.trainer(rank.folder / "out", one_line("diloco", period=4, fresh=True))
        trained.train(resume_from_checkpoint=str(checkpoint))
        return trained.state.global_step, script.parameters(trained)

    out = run_ranks(run, islands=2, procs=1)
    assert out[0][0] == 8 and torch.equal(out[0][1], out[1][1])


def test_trainer_events_at_unlike_times(run_ranks):
    """Islands may evaluate, log and save at unlike times. Where the evaluated mean costs a round of
    communication, too.
    """

    def run(rank, preset, changes):
        settings = {
            "eval_steps": 3 + rank.island,
            "logging_steps": 1 + rank.island,
            "save_steps": 2 + 3 * rank.island,
            "max_steps": 9,
        }
        trained = script.trainer(rank.folder / preset, one_line(preset, **changes), **settings)
        trained.train()
        return script.parameters(trained), history(trained, "eval_outer_parameters")

    for preset, changes, shown in (
        ("local_sgd", {"period": 4}, 0.0),
        ("diloco", {"period": 4}, 1.0),
    ):
        out = run_ranks(run, islands=2, procs=1, args=(preset, changes))
        assert torch.equal(out[0][0], out[1][0])
        assert (
            out[0][1] == [shown, shown, 1.0][: len(out[0][1])]
            and len(out[0][1]) == 3
            and shown in out[1][1]
        )


def test_trainer_evaluates_mean_together(run_ranks):
    """A mean is evaluated where all islands evaluate."""

    def run(rank):
        trained = script.trainer(rank.folder / "out", one_line("local_sgd", period=3))
        trained.train()
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
    best = {
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "greater_is_better": False,
    }

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
        trained = script.trainer(
            rank.folder / "out",
            one_line("diloco", period=2),
            fsdp=True,
            load_best_model_at_end=True,
        )
        trained.train()
        best = trained.state.best_model_checkpoint
        return best and Path(best).name, script.parameters(trained)

    out = run_ranks(run, islands=2, procs=2, timeout=60)
    for best, whole in out:
        assert best == "checkpoint-8" and torch.equal(whole, out[0][1])


def test_trainer_forgotten_split_warned(run_ranks):
    """A warning says that the rows were not split between the islands."""

    def run(rank, split, seed):
        records = []
        handler = logging.Handler()
        handler.emit = lambda record: records.append(record.getMessage())
        logging.getLogger("fsdp_demo").addHandler(handler)
        settings = {
            "max_steps": 1,
            "eval_strategy": "no",
            "train_sampling_strategy": "sequential" if seed else "random",
        }
        trained = script.trainer(rank.folder / "out", one_line("diloco"), split=split, **settings)
        trained.train()
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


def test_trainer_islands_of_one_name_refused(run_ranks):
    """Islands of one name are refused."""

    def run(rank):
        with pytest.raises(ValueError, match=r"islands \[0, 1\] all have ISLAND_NAME='here'"):
            script.trainer(rank.folder / "out", one_line("diloco")).train()

    run_ranks(run, islands=2, procs=1, env={"ISLAND_NAME": "here"})


def test_trainer_stop_inside_epoch(run_ranks):
    """The checkpoint of the stop holds the state before the last exchange, with fragments under
    way, and is not written over.
    """

    def run(rank):
        settings = {
            "max_steps": -1,
            "num_train_epochs": 3,
            "save_strategy": "epoch",
            "eval_strategy": "epoch",
        }
        out = []
        for where, wish, resume in (
            ("whole", False, None),
            ("cut", rank.island == 1, None),
            ("cut", False, True),
        ):
            stop = StopAt(4, "step", wish)
            extra = one_line("streaming_diloco", period=4, delay=2)
            trained = script.trainer(rank.folder / where, extra, callbacks=[stop], **settings)
            trained.train(resume_from_checkpoint=resume)
            out.append((trained.state.global_step, script.parameters(trained)))
        return out

    for whole, cut, resumed in run_ranks(run, islands=2, procs=1, timeout=120):
        assert (
            4 < cut[0] < 24 and whole[0] == resumed[0] == 24 and torch.equal(whole[1], resumed[1])
        )


class EpochStop(TrainerCallback):
    """Ends every epoch early: training ends before max_steps."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_epoch_stop = state.global_step % 8 == 4


def test_trainer_data_end_early(run_ranks):
    """Islands whose data end early end with one model."""

    def run(rank):
        settings = {
            "max_steps": -1,
            "num_train_epochs": 2,
            "eval_strategy": "no",
            "save_strategy": "no",
        }
        trained = script.trainer(
            rank.folder / "out", one_line("diloco", period=5), callbacks=[EpochStop()], **settings
        )
        trained.train()
        return trained.state.global_step, trained.state.max_steps, script.parameters(trained)

    first, second = run_ranks(run, islands=2, procs=1)
    assert first[:2] == second[:2] == (12, 16) and torch.equal(first[2], second[2])


def test_trainer_twice_and_shared_arguments(run_ranks):
    """One Trainer trains twice, and two Trainers share their arguments."""

    def run(rank):
        patch = pytest.MonkeyPatch()  # of a rank, which ends with it
        patch.setattr("transformers.Trainer.push_to_hub", lambda self, **keywords: keywords)
        line = one_line("diloco", period=3)
        trained = script.trainer(rank.folder / "out", line, max_steps=3, push_to_hub=False)
        trained.train()
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
    """A second SIGTERM ends the process at once; within seconds of the first it is only the
    launcher's repetition.
    """

    class Term(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGTERM)
                trainer_stop.REPEATED = 0.0
                os.kill(os.getpid(), signal.SIGTERM)

    def run(rank):
        callbacks = [Term()] if rank.island else []
        trained = script.trainer(
            rank.folder / "out", one_line("diloco", period=10), callbacks=callbacks, max_steps=20
        )
        trained.train()
        return trained.state.global_step

    stays, killed = run_ranks(run, islands=2, procs=1, check=False)
    assert killed.status == -signal.SIGTERM and stays.value == 20


@pytest.mark.parametrize(("procs", "together"), [(1, True), (2, True), (2, False)])
def test_trainer_weight_tokens_counts_labels(run_ranks, procs, together):
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

    def run(rank):
        made = rows(4 * procs)
        script.fresh_state()
        torch.manual_seed(0)
        model = script.model()
        reference = copy.deepcopy(model)
        args = TrainingArguments(
            str(rank.folder / "out"), max_steps=3, per_device_train_batch_size=1, use_cpu=True,
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
        return far, history(trained, "exchange/global_tokens")

    for far, tokens in run_ranks(run, islands=2, procs=procs):
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
