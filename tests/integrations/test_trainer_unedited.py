"""Trainers whose scripts know nothing of the exchange: `--exchange` of `launch` and `rehearse`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDataset
from transformers import Trainer, TrainerCallback

from fsdp_demo import Topology
from fsdp_demo.integrations.trainer import ExchangeCallback, unedited

from ..launch.rehearsals import (
    ON_LINUX,
    command,
    killed_back_and_stopped,
)
from ..support import trainer_script as script
from ..support import unedited_script

# ---- without processes ------------------------------------------------------------------------


def numbers(count: int) -> Dataset:
    return Dataset.from_dict({"row": list(range(count))})


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(7))


def streamed() -> IterableDataset:
    return numbers(6).to_iterable_dataset(num_shards=2)


@pytest.mark.parametrize(
    ("whole", "rows", "said"),
    [
        (numbers(7), [1, 3, 5], "3 of its 7 rows"),
        ([0, 1, 2, 3], [1, 3], "2 of its 4 rows"),
        (Stream(), [1, 3, 5], "one in 2 of the rows"),
        (streamed(), [3, 4, 5], "or files, of its stream"),
        ({"a": numbers(4), "b": numbers(3)}, {"a": [1, 3], "b": [1]}, "3 of its 7 rows"),
        (DatasetDict({"a": numbers(4)}), {"a": [1, 3]}, "2 of its 4 rows"),
        (None, None, "NOT split"),
    ],
    ids=["datasets", "sequence", "stream", "datasets-stream", "dict", "DatasetDict", "none"],
)  # fmt: skip
def test_trainer_unedited_rows(whole: Any, rows: Any, said: str) -> None:
    """The training set of a Trainer is split by island, of whatever kind it is."""

    def listed(part: Any) -> Any:
        if isinstance(part, dict):
            return {name: listed(one) for name, one in part.items()}
        return part and [row["row"] if isinstance(row, dict) else row for row in part]

    trainer: Any = SimpleNamespace(train_dataset=whole, args=SimpleNamespace(max_steps=4))
    words = unedited._split(trainer, Topology("islands", island=1, islands=2))
    assert listed(trainer.train_dataset) == rows and said in words
    assert type(trainer.train_dataset).__name__ in (type(whole).__name__, "Subset", "_Dealt")


@pytest.mark.parametrize(
    ("variables", "settings", "text"),
    [
        ({"ISLAND_EXCHANGE_SET": "period='2"}, {}, "ISLAND_EXCHANGE_SET=\"period='2\": No closing"),
        ({"ISLAND_EXCHANGE_SET": "periods=2"}, {}, "preset 'diloco' has no setting 'periods'"),
        ({"ISLAND_EXCHANGE": "dilco"}, {}, "dilco"),
        ({"ISLAND_RESUME": "newest"}, {}, "ISLAND_RESUME='newest': allowed is auto"),
        ({}, {"data": Stream(), "max_steps": -1}, "(Stream) has no length"),
        ({}, {"data": {"a": [1, 2], "b": Stream()}, "max_steps": -1}, "set max_steps"),
        ({"ISLAND_COUNT": "2"}, {"data": [1]}, "1 row for 2 islands, which is too few"),
        ({"ISLAND_COUNT": "2"}, {"auto_find_batch_size": True}, "auto_find_batch_size=True"),
        ({"ISLAND_EXCHANGE": "demo"}, {"own": (torch.optim.AdamW, {"lr": 1e-3})},
         "preset 'demo' is defined for sgd, found AdamW (the script's own)"),
    ],
)  # fmt: skip
def test_trainer_unedited_refusals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables, settings, text: str
) -> None:
    """What cannot work is refused before a step, in a sentence."""
    monkeypatch.setenv("ISLAND_ENDPOINT", "127.0.0.1:1")
    monkeypatch.setenv("ISLAND_TIMEOUT", "1")
    for name, value in {"ISLAND_EXCHANGE": "diloco", **variables}.items():
        monkeypatch.setenv(name, value)
    settings = {"max_steps": 2, **settings}
    data = settings.pop("data", None)
    own = {"optimizer_cls_and_kwargs": settings.pop("own")} if "own" in settings else {}
    trainer = script.trainer(tmp_path, own, split=False, **settings)
    if data is not None:
        trainer.train_dataset = data
    with pytest.raises(ValueError) as refused:
        unedited.train(Trainer.train, trainer)
    assert text in str(refused.value)


def test_trainer_unedited_says_how_to_resume() -> None:
    """The way to resume that a user finds in the log is that of the launcher: there is no script
    to edit.
    """
    words = [kind._resume for kind in (ExchangeCallback, unedited.AddedCallback)]
    assert words == ["resume_from_checkpoint=True (auto)", "--resume auto beside --exchange"]


# ---- two islands --------------------------------------------------------------------------------


def made(folder: Path, extra: dict[str, Any] | None = None, **changes: Any) -> Trainer:
    return script.trainer(folder / "out", extra or {}, split=False, **changes)


def callbacks(trainer: Trainer) -> list[Any]:
    return [c for c in trainer.callback_handler.callbacks if isinstance(c, ExchangeCallback)]


def test_trainer_unedited_in_turn(run_ranks, tmp_path: Path) -> None:
    """A Trainer that only scores is left alone; each that trains has an exchange of its own, the
    optimizer of its preset and a part of the rows; one that has a callback keeps it. Started again
    the first training goes on by itself; a second one in the same folder does not.
    """

    def run(rank):
        out = []
        scores = made(tmp_path)
        scores.evaluate()
        assert not callbacks(scores) and scores.args.output_dir == str(tmp_path / "out")
        first = made(tmp_path)
        second = made(tmp_path)
        second.args = first.args
        own = made(tmp_path / "own", {"callbacks": [ExchangeCallback("diloco", period=4)]})
        for trainer in (first, second, own):
            began = []
            trainer.add_callback(Began(began))
            unedited.train(Trainer.train, trainer) if trainer is not own else trainer.train()
            exchange = script.exchange_of(trainer)
            same = exchange.digests_equal()
            name = exchange.config.preset
            rows = len(trainer.train_dataset)
            out.append((began[0], exchange.step, same, name, rows, trainer.args.output_dir))
        assert type(first.optimizer.optimizer).__name__ == "SGD"
        return out

    env = {"ISLAND_EXCHANGE": "demo", "ISLAND_EXCHANGE_SET": "codec.topk=4"}
    for values, at in ((env, 0), ({**env, "ISLAND_ATTEMPT": "1"}, 8)):
        values["ISLAND_RUN"] = f"turns-{at}"
        for island, found in enumerate(run_ranks(run, 2, 1, env=values)):
            folder = f"{tmp_path}/out/island{island}"
            assert found == [
                (at, 8, True, "demo", 32, folder),
                (0, 8, True, "demo", 32, folder),
                (0, 8, True, "diloco", 64, f"{tmp_path}/own/out/island{island}"),
            ]


class Began(TrainerCallback):
    """Notes the step at which a training begins."""

    def __init__(self, steps: list[int]):
        self.steps = steps

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append(state.global_step)  # where there was no step


# ---- real processes ------------------------------------------------------------------------------


def rehearse(folder: Path, run_id: str, *words: str) -> subprocess.Popen[str]:
    """A rehearsal of `unedited_script`; `words`: its flags, --, and what starts the script."""
    split = words.index("--")
    flags = ["--output_dir", str(folder / "out"), "--use_cpu", "--report_to", "none"]
    flags += ["--disable_tqdm", "True", "--per_device_train_batch_size", "2"]
    full = command("rehearse", "--islands", "2", "--run", run_id, *words[: split + 1])
    full += [*words[split + 1 :], *flags]
    env = {**os.environ, "ISLAND_RUN": run_id, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        full, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
    )


AGREE = "islands agree, bit for bit"
SCRIPT = str(unedited_script.__file__)


@pytest.mark.timeout(300)
def test_trainer_unedited_below_torchrun(run_id: str, tmp_path: Path) -> None:
    """A script that knows nothing of the exchange trains one model on two islands."""
    words = ["--procs", "1", "--launcher", "torchrun", "--exchange", "diloco", "--set", "period=2"]
    process = rehearse(tmp_path, run_id, *words, "--", SCRIPT, "--max_steps", "4")
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0 and output.count(AGREE) == 2, output
    assert output.count("exchange diloco period=2 added to Trainer; 32 of its 65 rows") == 2
    weights = [tmp_path / "out" / f"island{i}" / "final" / "model.safetensors" for i in (0, 1)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@ON_LINUX
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_trainer_unedited_killed_stopped_resumed(run_id: str, tmp_path: Path) -> None:
    """Below a command that is no launcher an island that is killed comes back by itself. Told to
    end all save, and with `--resume auto` they go on.
    """
    until = tmp_path / "until"
    words = ["--procs", "1", "--launcher", "command", "--exchange", "diloco", "--set", "period=2"]
    of_script = ["--", sys.executable, SCRIPT, "--until", str(until), "--save_steps", "5"]
    of_script += ["--max_steps", "100000"]
    process = rehearse(tmp_path, run_id, *words, "--restarts", "1", *of_script)
    killed_back_and_stopped(process, run_id, SCRIPT)
    until.touch()
    process = rehearse(tmp_path, run_id, *words, "--resume", "auto", *of_script)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0 and output.count(AGREE) == 2, output
    assert "from step 0" not in output and "resumes from the newest checkpoint" in output
