"""`ExchangeCallback` in a Trainer script as users write them: with and without the one line, alone, two islands, 2 x 2 with FSDP2."""

import json
import logging
import os
import signal
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")

from transformers import EarlyStoppingCallback, TrainerCallback  # noqa: E402

from fsdp_demo.integrations.trainer import ExchangeCallback, exchange_optimizer  # noqa: E402

from . import trainer_script as script  # noqa: E402


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """Nothing a Trainer writes into the environment may reach the next test."""
    for name in [n for n in os.environ if n.startswith(("ACCELERATE_", "FSDP_", "WANDB_", "PARALLELISM_"))]:
        monkeypatch.delenv(name)
    for name in ("ACCELERATE_USE_FSDP", "FSDP_VERSION", "WANDB_RUN_GROUP", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    script.fresh_state()
    yield
    script.fresh_state()


def one_line(preset, **changes):
    return {"callbacks": [ExchangeCallback(preset, **changes)]}


def history(trained, key):
    return [row[key] for row in trained.state.log_history if key in row]


def test_alone_it_is_as_if_the_line_were_not_there(tmp_path, run_ranks):
    def run(rank, where, extra):
        trained = script.trainer(rank.folder / where, extra)
        trained.train()
        files = sorted(str(p.relative_to(rank.folder / where)) for p in (rank.folder / where).rglob("*") if p.is_file())
        return script.parameters(trained), trained.state.log_history, files, trained.args.output_dir

    def both(rank):
        return run(rank, "plain", {}), run(rank, "line", one_line("diloco", period=2))

    ((plain, line),) = run_ranks(both, islands=1, procs=1, env={"ISLAND_COUNT": ""})
    assert torch.equal(plain[0], line[0]) and plain[2] == line[2]
    timed = ("runtime", "per_second", "train_loss")
    for a, b in zip(plain[1], line[1], strict=True):
        assert {k: v for k, v in a.items() if not k.endswith(timed)} == {k: v for k, v in b.items() if not k.endswith(timed)}
    assert line[3].endswith("/line")


def two_islands(rank, preset, fsdp=False, **changes):
    settings = changes.pop("settings", {})
    trained = script.trainer(rank.folder / "out", one_line(preset, **changes), fsdp=fsdp, **settings)
    trained.train()
    exchange = trained.callback_handler.callbacks[-1].exchange
    return {
        "whole": script.parameters(trained),
        "eval": history(trained, "eval_loss"),
        "loss": history(trained, "loss"),
        "logs": {k for row in trained.state.log_history for k in row},
        "step": exchange.step,
        "exchanges": exchange.metrics()["exchanges"],
        "equal": exchange.digests_equal(),
        "folder": trained.args.output_dir,
        "saved": sorted(p.name for p in Path(trained.args.output_dir).glob("checkpoint-*/exchange/*")),
        "run_name": trained.args.run_name,
        "sharded": any(hasattr(p, "to_local") for g in trained.optimizer.param_groups for p in g["params"]),
    }


@pytest.mark.parametrize("procs, fsdp", [(1, False), (2, False), (2, True)], ids=["single", "ddp", "fsdp2"])
def test_islands_train_one_model(run_ranks, procs, fsdp):
    out = run_ranks(lambda rank: two_islands(rank, "diloco", fsdp, period=4), islands=2, procs=procs, timeout=120)
    for o in out:
        assert torch.equal(o["whole"], out[0]["whole"]) and o["equal"] is True
        assert (o["step"], o["sharded"]) == (8, fsdp) and o["exchanges"] == 2
        assert o["eval"] == out[0]["eval"] and len(o["eval"]) == 2  # steps 4 and 8: the same outer parameters, the same rows
        assert o["eval"][-1] < o["eval"][0] < 3.3
        assert {"exchange/bytes_sent", "exchange/loss", "exchange/seconds_waiting", "eval_outer_parameters"} <= o["logs"]
    assert [Path(o["folder"]).name for o in out] == ["island0"] * procs + ["island1"] * procs
    assert out[0]["saved"] == sorted(f"rank{r}.pt" for r in range(procs) for _ in (4, 8))
    assert out[0]["run_name"].endswith("-island0") and out[0]["loss"] != out[-1]["loss"]  # rows of their own


@pytest.mark.parametrize("preset", ["demo", "stride"])
def test_presets_with_an_optimizer_of_their_own(run_ranks, preset):
    def run(rank):
        with pytest.raises(ValueError, match=rf'pass Trainer\(..., optimizer_cls_and_kwargs=exchange_optimizer\("{preset}", lr=0.005\)\)'):
            script.trainer(rank.folder / "refused", one_line(preset))
        extra = one_line(preset) | {"optimizer_cls_and_kwargs": exchange_optimizer(preset, lr=4e-3)}
        trained = script.trainer(rank.folder / "out", extra, fsdp=True)
        trained.train()
        exchange = trained.callback_handler.callbacks[-1].exchange
        return script.shards(trained), type(exchange.optimizers[0]).__name__, exchange.metrics()["exchanges"], history(trained, "eval_loss")

    out = run_ranks(run, islands=2, procs=2, timeout=120)
    assert torch.equal(out[0][0], out[2][0]) and torch.equal(out[1][0], out[3][0]) and out[0][1:3] == ("SGD", 8)
    assert out[0][3][-1] < out[0][3][0]
