"""The real thing, small: `recipes/quickstart.sh` on a tiny model."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from data import ByteTokenizer, load_data

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"

UNTRAINED = math.log(258)


def run(*words, folder=ROOT, timeout=280, **variables):
    """A command's status and output; on the CPU, with the Python that runs the tests instead of an
    environment of its own.
    """
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("ISLAND_", "ACCELERATE_"))}
    ours = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "FSDP_DEMO_PYTHON": sys.executable}
    how = dict(cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    words = [str(word) for word in words]
    return subprocess.run(words, env={**clean, **ours, **variables}, timeout=timeout, **how)


def without_context():
    """Loss on the validation rows of the best model that knows no context: the frequencies of the
    bytes, known in advance.
    """
    rows = load_data("stdlib", ByteTokenizer(), 128, validation_rows=32).validation.ids
    counts = np.bincount(rows.flatten())
    return -float(np.sum(counts * np.log(np.maximum(counts, 1) / counts.sum())) / counts.sum())


def quickstart(*options, **how):
    return run("bash", RECIPES / "quickstart.sh", *options, **how)


@pytest.mark.timeout(300)
def test_quickstart_trains_and_reports(tmp_path):
    """recipes/quickstart.sh trains two islands and prints its report."""
    options = "--cpu --model tiny --lr 0.004 --steps 60 --batch-size 4 --sequence-length 128"
    options += " --eval-every 30 --eval-batches 8 --log-every 15"
    done = quickstart(*options.split(), "--output", tmp_path)
    assert done.returncode == 0, done.stdout
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["loss_start"] == pytest.approx(UNTRAINED, abs=0.3)
    assert summary["loss_end"] < without_context() - 0.15, done.stdout
    assert summary["digests_equal"] is True and summary["drift"] is None
    facts = dict(preset="demo", islands=2, procs=2, steps=60)
    assert facts.items() <= summary.items()
    assert summary["tokens"] == 60 * 2 * 2 * 4 * 128 and summary["parameters"] == 459_904
    assert summary["exchanges"] == 60
    assert summary["bytes_full_per_island"] == 2 * 459_904 * 60
    assert 0 < summary["bytes_sent_per_island"] < summary["bytes_full_per_island"] / 40
    ratio = summary["bytes_full_per_island"] / summary["bytes_sent_per_island"]
    assert summary["ratio"] == pytest.approx(ratio)
    assert 0 <= summary["wait_share"] < 1 and summary["tokens_per_second"] > 100
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "island1, momentum" in page and "yes, bit for bit" in page and "has no end" not in page
    for name in ("island0", "island1"):
        text = (tmp_path / name / "metrics.jsonl").read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        assert [line["step"] for line in lines] == [15, 30, 45, 60]
        keys = "loss lr tokens tokens_per_second bytes_sent seconds_waiting"
        assert set(keys.split()) <= set(lines[0])
        assert lines[-1]["tokens"] == summary["tokens"]
        assert lines[-1]["bytes_sent"] == summary["bytes_sent_per_island"]
    assert "bf16 all-reduce would send" in done.stdout and "yes, bit for bit" in done.stdout
    # three evaluations and the table: island 0 only
    assert sum("validation loss" in line for line in done.stdout.splitlines()) == 4


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_pretrain_refuses_islands_with_other_options(tmp_path):
    """Islands that were given other options refuse each other."""
    script = tmp_path / "uneven.py"
    script.write_text(
        "import os, sys\n"
        f"sys.path[:0] = [{str(RECIPES)!r}]\n"
        "sys.argv += ['--steps', '1' + os.environ['ISLAND_RANK'], '--model', 'tiny', '--output', "
        "os.environ['ISLAND_NAME']]\n"
        "import pretrain; pretrain.main()\n"
    )
    words = "-m fsdp_demo.cli rehearse --islands 2 --procs 1 --cpu --launcher torchrun --"
    done = run(sys.executable, *words.split(), script, folder=tmp_path, timeout=180)
    assert done.returncode == 1 and "steps: 10 here, 11 there" in done.stdout, done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_quickstart_compare_prints_one_table(tmp_path):
    """`--compare` runs several presets and prints one table."""
    options = "--compare full,demo,diloco --link 100Mbit --rtt 40ms --procs 1 --launcher torchrun"
    options += " --cpu --model tiny --lr 0.004 --steps 12 --sequence-length 64 --eval-batches 2"
    done = quickstart(*options.split(), "--output", tmp_path, timeout=580)
    assert done.returncode == 0, done.stdout
    runs = json.loads((tmp_path / "compare.json").read_text())
    assert [run["preset"] for run in runs] == ["full", "demo", "diloco"]
    full, demo, diloco = runs
    sent = [run["bytes_sent_per_island"] for run in (demo, diloco, full)]
    assert sent == sorted(set(sent))
    # three messages a step, each a round trip
    assert full["seconds"] * full["wait_share"] > 12 * 3 * 0.04
    assert [run["digests_equal"] for run in runs] == [True, True, True]
    assert "period=" in done.stdout and len((tmp_path / "compare.md").read_text().splitlines()) == 5


@pytest.mark.parametrize(("options", "message"), [
    ("--exchnage demo", "unknown option --exchnage"),
    ("--steps", "--steps needs a value"),
    ("--steps many", "--steps many: must be a number"),
    ("--steps 00", "--steps 0: must be a number"),
    ("--save-every", "--save-every needs a value"),
    ("--resume auto auto", "unknown option auto"),
    ("--set topk", "--set topk: must read path=value"),
])  # fmt: skip
def test_quickstart_refuses_wrong_options(options, message):
    """Wrong options of the quickstart are refused at once."""
    done = quickstart(*options.split(), timeout=20)
    assert done.returncode == 2 and message in done.stdout


def passed(*options):
    """The command that quickstart.sh starts."""
    done = quickstart(*options, timeout=20, FSDP_DEMO_PYTHON="/bin/echo")
    assert done.returncode == 0, done.stdout
    return next(line for line in done.stdout.splitlines() if "pretrain.py" in line).split()


def test_quickstart_passes_on_every_option():
    """The quickstart names every option of the recipe and passes it on."""
    import dataclasses

    from pretrain_parts import Arguments

    text = quickstart("--help", timeout=20).stdout
    own = {"exchange", "config", "set", "islands", "procs", "steps", "output", "mesh"}
    words = []
    for field in dataclasses.fields(Arguments):
        name = field.name.replace("_", "-")
        name = "no-shard" if name == "shard" else name
        assert f"--{name}" in text
        if name not in own:
            words += [f"--{name}", *(["7"] * (field.type not in (bool, "bool")))]
    assert " ".join(words) in " ".join(passed(*words))
    underscores = [word[:2] + word[2:].replace("-", "_") for word in words]
    assert " ".join(words) in " ".join(passed(*underscores))
    for word in ("--resume", "--compile"):
        assert f"{word} --seed 1" in " ".join(passed(word, "--seed=1"))


@pytest.mark.parametrize(("options", "fitted"), [
    ("", "switch=0 period=5 momentum_warmup=8"),
    ("--steps 08", "switch=0 period=2 momentum_warmup=2"),
    ("--steps 3", "switch=0 period=2 momentum_warmup=1"),
    ("--steps 2000", "period=5 momentum_warmup=200"),
    ("--set switch=0.5", "switch=0.5 period=5 momentum_warmup=8"),
    ("--set period=10", "period=10 switch=0 momentum_warmup=4"),
    ("--set momentum_warmup=4", "momentum_warmup=4 switch=0 period=5"),
])  # fmt: skip
def test_quickstart_fits_sign_loco(options, fitted):
    """The momentum of `sign_loco` rises over half of the rounds; a short run has one phase."""
    assert f"--set {fitted}" in " ".join(passed("--exchange", "sign_loco", *options.split()))


# -- interrupted and resumed ---------------------------------------------------------------------


def test_setup_hands_pips_settings_to_uv():
    """What pip is configured with reaches uv: index, further ones, links, constraints, hosts."""
    text = (RECIPES / "setup.sh").read_text()
    function = text[text.index("pip_settings() {") : text.index("\n}\n", text.index("pip_set")) + 3]
    script = f"python={sys.executable}\n{function}pip_settings"
    settings = {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": "https://a.example/simple",
        "PIP_EXTRA_INDEX_URL": "https://b.example file:///c",
        "PIP_FIND_LINKS": "/wheels",
        "PIP_TRUSTED_HOST": "a.example",
        "PIP_CONSTRAINT": "/c.txt",
    }
    words = run("bash", "-c", script, timeout=60, **settings).stdout.split()
    assert {*zip(words[::2], words[1::2], strict=True)} == {
        ("--default-index", "https://a.example/simple"),
        ("--index", "https://b.example"),
        ("--index", "file:///c"),
        ("--find-links", "/wheels"),
        ("--allow-insecure-host", "a.example"),
        ("--constraints", "/c.txt"),
    }
