"""What a user gets wrong ends a recipe with one message and a status, not with a traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from unittest import mock

import model
import pretrain_trainer
import pytest
import torch
import wrong_use
from pretrain_parts import Arguments
from transformers import HfArgumentParser

import fsdp_demo
from fsdp_demo.errors import Mismatch, NeedsDecision, PeerLost

RECIPES = Path(__file__).parents[2] / "recipes"


class Left(BaseException):
    """In the place of the end of the process."""


@pytest.fixture
def ends(monkeypatch):
    """Where `plainly` would end this process it raises `Left(status)`."""

    def leave(status):
        raise Left(status)

    monkeypatch.setattr(wrong_use, "leave", leave)
    monkeypatch.setattr(wrong_use, "AFTER", 0.0)
    monkeypatch.setattr(sys, "argv", ["recipes/train.py"])
    return monkeypatch


def refuse(error):
    raise error


def unsaved(error):
    error.unsaved = True
    return error


@pytest.mark.parametrize(("call", "status", "text"), [
    (lambda: fsdp_demo.preset("demo", topkk=3), 2, "preset 'demo' has no setting 'topkk'"),
    (lambda: fsdp_demo.load_config("none.yaml"), 2, "none.yaml"),
    (lambda: model.load_model("tiny", 10**6), 2, "--model tiny has vocab_size="),
    (lambda: refuse(NeedsDecision("choose")), 78, "choose"),
    (lambda: refuse(Mismatch("other steps")), 78, "other steps"),
    (lambda: refuse(PeerLost("island 1 did not come")), 75, "island 1 did not come"),
    (lambda: refuse(unsaved(PeerLost("island 1"))), 1, "island 1"),
])  # fmt: skip
def test_wrong_use_prints_the_sentence_alone(ends, capsys, tmp_path, call, status, text):
    """A user's error ends a recipe with one line and its status."""
    ends.setenv("ISLAND_STATUS", str(tmp_path))
    with pytest.raises(Left) as left, wrong_use.plainly():
        call()
    (line,) = capsys.readouterr().err.splitlines()
    assert left.value.args == (status,) and line.startswith("train.py: error: ") and text in line
    told = [file.read_text() for file in tmp_path.glob("rank0")]
    assert told == ([str(status)] if status in (75, 78) else [])


@pytest.mark.parametrize(("error", "status"), [
    (SystemExit(75), 75),
    (SystemExit(1), 1),  # the Trainer could not save
    (PeerLost("island 1"), 75),
    (unsaved(PeerLost("island 1")), 1),
])  # fmt: skip
def test_wrong_use_trainer_ends_with_its_status(monkeypatch, error, status):
    """A Trainer that ends early ends the recipe with its status."""
    trained = mock.MagicMock()
    trained.return_value.train.side_effect = error
    exchange = mock.MagicMock()
    exchange.trainer.return_value = {}
    words = (mock.MagicMock(), exchange, mock.MagicMock(process_index=0))
    monkeypatch.setattr(pretrain_trainer, "parse", lambda parser: words)
    monkeypatch.setattr(pretrain_trainer, "Trainer", trained)
    monkeypatch.setattr(pretrain_trainer, "leave", lambda status: refuse(Left(status)))
    for name in ("load_tokenizer", "load_data", "load_model", "set_seed", "allow_fsdp_on_cpu"):
        monkeypatch.setattr(pretrain_trainer, name, mock.MagicMock())
    with pytest.raises(Left) as left:
        pretrain_trainer.main()
    assert left.value.args == (status,)


def test_wrong_use_keeps_the_traceback_of_others(ends):
    """Errors of other packages keep their traceback."""
    with pytest.raises(ValueError), wrong_use.plainly():
        torch.optim.SGD([], lr=0.1)
    with pytest.raises(RuntimeError), wrong_use.plainly():
        torch.ones(2) @ torch.ones(3)


@pytest.mark.parametrize(("words", "text"), [
    ("--period 3", "no option: a setting of the exchange is written --set period=3"),
    ("--codec.topk=16", "--codec.topk is no option: .* is written --set codec.topk=16"),
    ("--momentum-warmup 0", "is written --set momentum_warmup=0"),
    ("--step 3 --sav-every 3", "did you mean --save-every"),
    ("--batchsize 3", "did you mean --batch"),
    ("--zzz", "--help lists them"),
])  # fmt: skip
def test_wrong_use_unknown_option_names_the_nearest(monkeypatch, words, text):
    """An option that is not there is refused with the nearest one."""
    monkeypatch.setattr(sys, "argv", ["pretrain.py", *words.split()])
    with pytest.raises(ValueError, match=text):
        wrong_use.parse(HfArgumentParser(Arguments))


@pytest.mark.parametrize(
    "recipe", ["pretrain", pytest.param("pretrain_trainer", marks=pytest.mark.slow)]
)
def test_wrong_use_ends_a_recipe_with_two(recipe, tmp_path):
    """A wrong key of the configuration ends a recipe with status 2."""
    words = ["--exchange", "demo", "--set", "topkk=3", "--model", "tiny"]
    env = dict(PATH="/usr/bin:/bin", PYTHONPATH=str(RECIPES.parent), HOME=str(tmp_path))
    how = dict(cwd=tmp_path, capture_output=True, text=True, timeout=300)
    command = [sys.executable, str(RECIPES / f"{recipe}.py"), *words]
    done = subprocess.run(command, env={**env, "ACCELERATE_USE_CPU": "true"}, **how)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    (line,) = [one for one in done.stderr.splitlines() if "topkk" in one]
    assert line.startswith(f"{recipe}.py: error: preset 'demo' has no setting 'topkk'")
