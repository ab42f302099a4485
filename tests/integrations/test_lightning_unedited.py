"""Scripts of Lightning that know nothing of the exchange, by `--exchange` of `rehearse`, in real
processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning.pytorch", reason="pip install -e '.[lightning]'")

from ..launch.rehearsals import ON_LINUX, command, killed_back_and_stopped  # noqa: E402

SCRIPT = str(Path(__file__).parents[1] / "support" / "lightning_script.py")
AGREE = "islands agree, bit for bit"
EXCHANGE = ["--exchange", "diloco", "--set", "period=2"]


def rehearse(folder: Path, run_id: str, *words: str, **variables: str) -> subprocess.Popen[str]:
    """A rehearsal of the script; `words`: its flags, --, and what starts the script."""
    full = command("rehearse", "--islands", "2", "--run", run_id, *words, "--out", str(folder))
    env = {**os.environ, "ISLAND_RUN": run_id, "OMP_NUM_THREADS": "1", **variables}
    pipe = subprocess.PIPE
    return subprocess.Popen(full, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=env)


def finals(folder: Path) -> list[dict[str, torch.Tensor]]:
    files = [folder / f"island{i}" / "final.ckpt" for i in (0, 1)]
    return [torch.load(file, weights_only=True)["state_dict"] for file in files]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("package", "launcher", "procs"),
    [
        pytest.param("lightning.pytorch", "torchrun", 2, marks=pytest.mark.slow),
        ("pytorch_lightning", "command", 1),
    ],
)
def test_lightning_unedited(run_id: str, tmp_path: Path, package, launcher, procs) -> None:
    """A script that knows nothing of the exchange trains one model on two islands, also by the
    other package.
    """
    if package == "pytorch_lightning":
        pytest.importorskip(package)
    words = ["--procs", str(procs), "--launcher", launcher, *EXCHANGE, "--"]
    words += [SCRIPT] if launcher == "torchrun" else [sys.executable, SCRIPT]
    process = rehearse(tmp_path, run_id, *words, "--devices", str(procs), LIGHTNING=package)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0 and output.count(AGREE) == 2, output
    assert output.count("exchange diloco period=2 added to this Trainer") == 2
    first, second = finals(tmp_path)
    assert all(torch.equal(first[name], second[name]) for name in first)


@ON_LINUX
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_lightning_unedited_killed_stopped_resumed(run_id: str, tmp_path: Path) -> None:
    """An island that is killed comes back by itself and joins the run. Told to end all save, and
    with `--resume auto` they go on.
    """
    until = tmp_path / "until"
    words = ["--procs", "1", "--launcher", "command", *EXCHANGE]
    of_script = ["--", sys.executable, SCRIPT, "--until", str(until), "--max_steps", "100000"]
    process = rehearse(tmp_path, run_id, *words, "--restarts", "1", *of_script)
    killed_back_and_stopped(process, run_id, SCRIPT)
    until.touch()
    process = rehearse(tmp_path, run_id, *words, "--resume", "auto", *of_script)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0 and output.count(AGREE) == 2, output
    assert "from step 0" not in output
    first, second = finals(tmp_path)
    assert all(torch.equal(first[name], second[name]) for name in first)
