"""`LightningExchange` of Lightning in two islands: one model at the end, the bits of a plain loop,
stops, resumes, files.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

pytest.importorskip("lightning.pytorch", reason="pip install -e '.[lightning]'")

from lightning.pytorch import Callback, Trainer, seed_everything  # noqa: E402
from lightning.pytorch.callbacks import (  # noqa: E402
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
)
from lightning.pytorch.loggers import CSVLogger  # noqa: E402
from lightning.pytorch.strategies import ModelParallelStrategy  # noqa: E402

import fsdp_demo  # noqa: E402
from fsdp_demo.checkpoint.folders import found, misfits  # noqa: E402
from fsdp_demo.exchange import guard  # noqa: E402
from fsdp_demo.integrations import lightning_callbacks  # noqa: E402
from fsdp_demo.integrations.data import tokens_in  # noqa: E402
from fsdp_demo.integrations.lightning import LightningExchange  # noqa: E402
from fsdp_demo.runlog.files import load  # noqa: E402

from ..support import lightning_script as script  # noqa: E402
from ..support.inside import in_ranks  # noqa: E402


def fit(folder: Path, exchange: Any, make: Any = None, callbacks: Any = (), **settings: Any) -> Any:
    """A Trainer that has trained what `make` gives, 8 steps, with `exchange` and `callbacks`."""
    seed_everything(1, verbose=False)
    net = (make or script.Net)()
    data, path = script.rows(), settings.pop("ckpt_path", None)
    settings = {
        "accelerator": "cpu",
        "devices": int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "default_root_dir": folder,
        "max_steps": 8,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks),
        **settings,
    }
    trainer = Trainer(callbacks=[exchange, *callbacks], **settings)
    loaders = DataLoader(data, script.BATCH, shuffle=True), DataLoader(data, 32)
    trainer.fit(net, *loaders, ckpt_path=path)
    return trainer


def bits(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


class Own(script.Net):
    """With the optimizer of a preset."""

    def __init__(self, config: Any, dropout: float = 0.0):
        super().__init__(dropout)
        self.config = config

    def configure_optimizers(self) -> Any:
        optimizer = fsdp_demo.base_optimizer(self.config, self.named_parameters(), lr=5e-3)
        plan = {"scheduler": script.schedule_of(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": plan}


def plain(me: Any, config: Any, norm: float | None, group: int) -> torch.Tensor:
    """The parameters of a plain loop over the same rows."""
    seed_everything(1, verbose=False)
    net, data = Own(config), script.rows()
    sampler = DistributedSampler(data, me.islands, me.island, seed=1, drop_last=True)
    loader = DataLoader(data, script.BATCH, sampler=sampler)
    plan = net.configure_optimizers()
    optimizer, schedule = plan["optimizer"], plan["lr_scheduler"]["scheduler"]
    config = config if norm is None else config.clipped_once(norm)[0]
    exchange, epoch = fsdp_demo.attach(optimizer, config, model=net), 0
    while exchange.step < 8:
        sampler.set_epoch(epoch)
        for number, (inputs, wanted) in enumerate(loader):
            loss = torch.nn.functional.mse_loss(net.layers(inputs), wanted)
            (loss / group).backward()
            if (number + 1) % group and number + 1 < len(loader):
                continue
            if norm is not None and not config.clips_mean:
                torch.nn.utils.clip_grad_norm_(net.parameters(), norm)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if exchange.step >= 8:
                break
        epoch += 1
    exchange.finish()
    return bits(net)


CASES = {
    "diloco": ("diloco", {"period": 3}, {}),
    "clipped": ("diloco", {"period": 3}, {"gradient_clip_val": 0.01}),
    "accumulated": ("sparse_loco", {"period": 2}, {"accumulate_grad_batches": 2}),
    "demo": ("demo", {}, {"gradient_clip_val": 0.01}),
    "muloco": ("muloco", {"period": 3}, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_lightning_equals_a_plain_loop(run_ranks: Any, name: str) -> None:
    """Two islands end with one model, the same to the bit as that of a plain loop: gradients are
    clipped once, accumulation and schedule count steps.
    """
    preset, changes, settings = CASES[name]

    def work(me: Any) -> tuple[torch.Tensor, torch.Tensor]:
        config = fsdp_demo.preset(preset, **changes)
        callback = LightningExchange(preset, **changes)
        trainer = fit(me.folder, callback, lambda: Own(config), **settings)
        assert callback.exchange is not None and callback.exchange.step == 8
        assert callback.exchange.digests_equal() in (True, None)
        norm, group = settings.get("gradient_clip_val"), settings.get("accumulate_grad_batches", 1)
        return bits(trainer.model), plain(me, config, norm, group)

    (first, loop), (second, _) = run_ranks(work, 2, 1, timeout=120)
    assert torch.equal(first, second) and torch.equal(first, loop)


class Sharded(script.Net):
    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_lightning_several_ranks(run_ranks: Any, kind: str) -> None:
    """Islands of two ranks, with DDP and FSDP2, end with one model; a rank sees rows of its own."""

    def work(me: Any) -> tuple[torch.Tensor, list[int]]:
        sharded = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
        make, seen = (Sharded if kind == "fsdp2" else script.Net), Seen()
        callback = LightningExchange("diloco", period=2)
        settings = {"strategy": sharded if kind == "fsdp2" else "ddp", "max_epochs": 1}
        trainer = fit(me.folder, callback, make, [seen], max_steps=-1, **settings)
        assert callback.exchange is not None and callback.exchange.digests_equal() is True
        params = [p for group in trainer.optimizers[0].param_groups for p in group["params"]]
        assert all(hasattr(p, "to_local") == (kind == "fsdp2") for p in params)
        whole = [getattr(p, "full_tensor", lambda p=p: p)().detach().flatten() for p in params]
        return torch.cat(whole), seen.rows

    found = run_ranks(work, 2, 2, timeout=120)
    assert all(torch.equal(whole, found[0][0]) for whole, _ in found)
    rows = [row for _, own in found for row in own]
    assert len(rows) == len({*rows}) == script.ROWS // 4 * 4


class Seen(Callback):
    """The rows of a rank, by their first number."""

    def __init__(self) -> None:
        self.rows: list[float] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, number: int) -> None:
        self.rows += batch[0][:, 0].tolist()


class Tell(Callback):
    """Tells this process to end, or asks the Trainer to, after a step."""

    def __init__(self, step: int, asks: bool = False):
        self.step, self.asks = step, asks

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            if self.asks:
                trainer.should_stop = True
            else:
                os.kill(os.getpid(), signal.SIGTERM)


def left(status: int) -> None:
    raise SystemExit(status)


@pytest.mark.parametrize(
    ("preset", "procs"), [("diloco", 1), ("demo", 1), ("sparse_loco", 2)], ids=str
)  # fmt: skip
def test_lightning_stop_and_resume(
    run_ranks: Any, everywhere: Any, preset, procs, tmp_path
) -> None:
    """Told to end, islands save and end with 75; started again they end with the
    bits of a run that was not stopped: rows, schedule, accumulation and dropout go on.
    """
    everywhere.setattr(guard, "leave", left)

    def work(me: Any, told: int, folder: Path) -> tuple[Any, Any, list[float]]:
        config = fsdp_demo.preset(preset)
        # two ranks stop at the end of an epoch, where a new iterator of the loader draws a number
        dropout = 0.2 if procs == 1 else 0.0
        seen, callback = Seen(), LightningExchange(preset, resume="auto")
        settings = {"accumulate_grad_batches": 2, "max_steps": 12}
        settings |= {"strategy": "ddp"} if procs > 1 else {}
        others = [seen, *([Tell(told)] if told else [])]
        try:
            trainer = fit(folder, callback, lambda: Own(config, dropout), others, **settings)
        except SystemExit as end:
            return end.code, None, seen.rows
        assert callback.exchange is not None and callback.exchange.step == 12
        return 0, bits(trainer.lightning_module), seen.rows

    whole = run_ranks(work, 2, procs, timeout=120, args=(0, tmp_path / "whole"))
    half = run_ranks(work, 2, procs, timeout=120, args=(6, tmp_path / "out"))
    again = run_ranks(work, 2, procs, timeout=120, args=(0, tmp_path / "out"))
    for once, cut, rest in zip(whole, half, again, strict=True):
        assert (once[0], cut[0], rest[0]) == (0, 75, 0)
        assert torch.equal(once[1], rest[1]) and once[2] == cut[2] + rest[2]


class InValidation(Callback):
    """Tells this process to end in a validation."""

    def on_validation_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step:
            os.kill(os.getpid(), signal.SIGTERM)


def test_lightning_sigterm_in_validation(run_ranks: Any, everywhere: Any) -> None:
    """An island that is told to end in a validation leaves it, saves its own parameters of that
    step and ends with 75; the other trains on.
    """
    everywhere.setattr(guard, "leave", left)

    def work(me: Any) -> tuple[int, list[int]]:
        callback = LightningExchange("diloco", period=4)
        told, status = [InValidation()] if me.island else [], 0
        try:
            fit(me.folder, callback, None, told, val_check_interval=2)
        except SystemExit as end:
            status = int(str(end.code))
        own = me.folder / f"island{me.island}"
        assert callback.exchange is not None
        return status, [callback.exchange.step, *(step for step, _ in found(own))]

    assert run_ranks(work, 2, 1, timeout=120) == [(0, [8]), (75, [2, 2])]


@in_ranks(2, 1)
def test_lightning_saves_and_ckpt_path(me: Any) -> None:
    """With each file of ModelCheckpoint goes a checkpoint to resume from; `ckpt_path` names its
    step. Files of islands are apart, and the log has the numbers of the exchange.
    """

    def run(where: str, **settings: Any) -> Any:
        saver = ModelCheckpoint(me.folder / "files", every_n_train_steps=3, save_top_k=-1)
        callback = LightningExchange("diloco", period=4)
        make = functools.partial(script.Net, 0.2)
        trainer = fit(me.folder / where, callback, make, [saver], max_steps=9, **settings)
        return bits(trainer.model), trainer

    logger = CSVLogger(me.folder / "csv")
    once, trainer = run("out", logger=logger, log_every_n_steps=2)
    own = me.folder / "out" / f"island{me.island}"
    assert [step for step, at in found(own) if not misfits(at)] == [6, 9]
    files = me.folder / "files" / f"island{me.island}"
    assert len([*files.glob("*.ckpt")]) == 3
    header = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()[0]
    assert "exchange/bytes_sent" in header and f"island{me.island}" in logger.log_dir
    (six,) = files.glob("*step=6*")
    with pytest.raises(fsdp_demo.NeedsDecision, match="of step 6, .* is of step 9"):
        run("out", ckpt_path=six)
    shutil.rmtree(own / "checkpoint-9")
    again, _ = run("out", ckpt_path=six)
    assert torch.equal(once, again)


class Scored(script.Net):
    """Logs `val_loss`, under which the run log looks for an evaluation."""

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("val_loss", torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1]))


@pytest.mark.parametrize("procs", [1, 2])
def test_lightning_run_log(run_ranks: Any, everywhere: Any, tmp_path, procs: int) -> None:
    """What a run leaves for `fsdp-demo report` is there, goes on after a stop, and counts no token
    twice; the loss is the mean over the ranks of the island.
    """
    everywhere.setattr(guard, "leave", left)

    def work(me: Any, told: int) -> list[float]:
        seen, callback = Losses(), LightningExchange("diloco", period=3, resume="auto")
        saver = ModelCheckpoint(every_n_train_steps=4)
        others = [seen, saver, *([Tell(told)] if told else [])]
        settings = {"log_every_n_steps": 2, "val_check_interval": 4, "max_steps": 10}
        settings |= {"strategy": "ddp"} if procs > 1 else {}
        with contextlib.suppress(SystemExit):
            fit(tmp_path, callback, Scored, others, **settings)
        return seen.losses

    found = run_ranks(work, 2, procs, timeout=120, args=(5 if procs == 1 else 0,))
    if procs == 1:
        run_ranks(work, 2, 1, timeout=120, args=(0,))
    for island in (0, 1):
        (run,) = load(tmp_path / f"island{island}").islands
        kinds = [event["kind"] for event in run.events]
        assert kinds[0] == "begin" and kinds[-1] == "finish" and ("resume" in kinds) == (procs == 1)
        assert {"evaluation", "checkpoint"} <= {*kinds} and len(run.exchanges) == 4
        assert [line["step"] for line in run.lines] == [2, 4, 6, 8, 10]
        # of 33 rows the ninth batch has one
        assert run.lines[-1]["tokens"] == (2 * 37 if procs == 1 else 4 * 40)
        own = torch.tensor(found[island * procs : island * procs + procs])[:, :4]
        means = own.mean(0).unflatten(0, (2, 2)).mean(1).tolist()
        assert [line["loss"] for line in run.lines[:2]] == pytest.approx(means)
        assert run.summary is not None and run.summary["digests_equal"] is True
        assert run.head["facts"]["model"] == "Scored" and run.head["steps"] == 10


class Losses(Callback):
    """The loss of each step of a rank."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_before_backward(self, trainer: Any, module: Any, loss: torch.Tensor) -> None:
        self.losses.append(float(loss))


@in_ranks(2, 1)
def test_lightning_wish_to_stop(me: Any) -> None:
    """A callback of one island asks to stop: both do at the step of the next exchange, with one
    model; so they do where both ask at the end of an epoch.
    """
    callback = LightningExchange("diloco", period=4)
    trainer = fit(
        me.folder, callback, None, [Tell(5, asks=True)] if me.island else [], max_steps=30
    )
    assert trainer.global_step == 8 and callback.exchange.digests_equal() is True
    early = EarlyStopping("val", min_delta=9.0, patience=1, check_on_train_epoch_end=True)
    callback = LightningExchange("diloco", period=4)
    trainer = fit(me.folder, callback, None, [early], max_steps=100)
    assert trainer.global_step == 20 and callback.exchange.digests_equal() is True


@in_ranks(1, 1, env={"ISLAND_COUNT": ""})
def test_lightning_alone(me: Any) -> None:
    """Alone the method acts with one replica, and files stay where they are without it."""
    callback = LightningExchange("diloco", period=2)
    trainer = fit(me.folder, callback, None, [ModelCheckpoint(me.folder / "files")])
    assert callback.exchange is not None and callback.exchange.step == 8
    assert trainer.default_root_dir == str(me.folder) and [*(me.folder / "files").glob("*.ckpt")]


class Manual(script.Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


NAMED = {"accelerator": "cpu", "devices": 1}
BY_SPEED = fsdp_demo.preset("diloco", local_steps="by_speed")


@pytest.mark.parametrize(
    ("preset", "settings", "net", "text"),
    [
        ("demo", {}, script.Net, "Let configure_optimizers return fsdp_demo.base_optimizer("),
        (BY_SPEED, {}, script.Net, "local_steps='by_speed': its Trainer counts"),
        ("diloco", {}, Manual, "automatic_optimization=False: call"),
        ("diloco", {"precision": "16-true"}, script.Net, "take 'bf16-mixed'"),
        ("diloco", {"callbacks": [LightningExchange("full")]}, script.Net,
         "two LightningExchanges"),
        ("diloco", {"callbacks": [GradientAccumulationScheduler({0: 2})]}, script.Net,
         "accumulate_grad_batches=N"),
    ],
)  # fmt: skip
def test_lightning_refusals(monkeypatch, tmp_path, preset, settings, net, text) -> None:
    """What cannot work is refused before a step, in a sentence."""
    variables = {"COUNT": "2", "RANK": "0", "ENDPOINT": "127.0.0.1:1", "TIMEOUT": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(f"ISLAND_{name}", value)
    with pytest.raises(ValueError) as refused:
        fit(tmp_path, LightningExchange(preset), net, settings.pop("callbacks", ()), **settings)
    assert text in str(refused.value)


@pytest.mark.parametrize(
    ("kinds", "text"),
    [
        (
            ("FSDPStrategy", "ParallelStrategy"),
            "FSDPStrategy: take DDPStrategy or, which",
        ),
        (("DeepSpeedStrategy", "DDPStrategy"), "DeepSpeedStrategy: take DDPStrategy or"),
        (("XLAStrategy", "Strategy"), "XLAStrategy: take DDPStrategy or, which"),
    ],
)
def test_lightning_strategies_refused(kinds: tuple[str, str], text: str) -> None:
    """Strategies that cannot work are named with the cure; they need a GPU to be made."""
    base = type(kinds[1], (), {})
    trainer = SimpleNamespace(strategy=type(kinds[0], (base,), {})(), callbacks=[])
    trainer.precision, trainer.gradient_clip_val = "32-true", None
    with pytest.raises(ValueError) as refused:
        LightningExchange("diloco")._refuse(trainer, script.Net(), [])
    assert text in str(refused.value)


def test_lightning_refuses_drop() -> None:
    """Its accumulation leaves no micro-batch out."""
    trainer = SimpleNamespace(strategy=type("DDPStrategy", (), {})(), callbacks=[], precision="32")
    with pytest.raises(ValueError, match="drop: Lightning accumulates"):
        LightningExchange("demo", drop={"limit": 1.0})._refuse(trainer, script.Net(), 0)


def test_lightning_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each Trainer gets the exchange of the launch; without one, nothing; wrong words are refused
    in a sentence.
    """
    assert lightning_callbacks() == []
    assert not [c for c in Trainer(**NAMED).callbacks if isinstance(c, LightningExchange)]
    monkeypatch.setenv("ISLAND_EXCHANGE", "diloco")
    monkeypatch.setenv("ISLAND_EXCHANGE_SET", "period=7")
    (made,) = [c for c in Trainer(**NAMED).callbacks if isinstance(c, LightningExchange)]
    assert made.config.channels[0].schedule.sync_every == 7
    monkeypatch.setenv("ISLAND_EXCHANGE", "dilco")
    with pytest.raises(ValueError, match="dilco"):
        Trainer(**NAMED)


def test_lightning_tokens_of_a_batch() -> None:
    """A batch is a dictionary, a tuple or a tensor: its tokens, else its rows."""
    rows = torch.ones(3, 2)
    assert tokens_in((rows, None)) == tokens_in(rows) == tokens_in({"x": rows}) == 3
    assert tokens_in({"input_ids": rows}) == 6 and tokens_in(["words"]) == tokens_in(None) == 0
