"""`--exchange` of the launchers, before any Trainer: flags, the finder, statuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_demo import cli
from fsdp_demo.launch import __main__ as launch
from fsdp_demo.launch.processes import SITE


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--set", "period=2"], "--set is of an exchange: give --exchange PRESET, too"),
        (["--resume", "auto"], "--resume is of an exchange"),
        (["--exchange", "diloko"], "diloko"),
        (["--exchange", "no.yaml"], "'no.yaml' is neither a preset nor a file that is there"),
        (["--exchange", "diloco", "--set", "period"], "override 'period' must read path=value"),
        (["--exchange", "diloco", "--resume", "newest"], "invalid choice: 'newest'"),
    ],
)
def test_unedited_flags_refused(
    capsys: pytest.CaptureFixture[str], flags: list[str], text: str
) -> None:
    """Wrong flags are refused by `launch` and by `rehearse` before anything is started."""
    with pytest.raises(SystemExit) as ended:
        launch.main([*flags, "torchrun", "train.py"])
    assert ended.value.code == 2 and text in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        sys.exit(cli.main(["rehearse", "--islands=2", "--procs=1", *flags, "--", __file__]))
    assert ended.value.code == 2 and text in capsys.readouterr().err


def below(tmp_path: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`python -m fsdp_demo.launch` with these words."""
    names = ("ISLAND_EXCHANGE", "ISLAND_EXCHANGE_SET", "ISLAND_RESUME", "ISLAND_STATUS")
    env = {name: value for name, value in os.environ.items() if name not in names} | variables
    full = [sys.executable, "-m", "fsdp_demo.launch", *words]
    return subprocess.run(
        full, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )


LOOKS = """
import os, sys
from transformers.trainer import Trainer
assert Trainer.train.__wrapped__ and sys.mine
assert not {"fsdp_demo", "torch"} & set(sys.modules), "imported before a Trainer trains"
print([os.environ.get("ISLAND_" + name) for name in ("EXCHANGE", "EXCHANGE_SET", "RESUME")])
"""


def test_unedited_reaches_every_process(tmp_path: Path) -> None:
    """The variables and the change of `Trainer.train` reach every process below; a user's own
    `sitecustomize` runs, too. Where nobody trains the status is 78, and two lines say what to do.
    """
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers/__init__.py").touch()
    (tmp_path / "transformers/trainer.py").write_text("class Trainer:\n    def train(self): pass\n")
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.mine = True")
    (tmp_path / "mine.yaml").write_text("preset: diloco\n")
    (tmp_path / "look.py").write_text(LOOKS)
    flags = ["--exchange", "mine.yaml", "--set", "period=2", "--set", "lr=1e-3", "--resume", "auto"]
    done = below(tmp_path, *flags, "sh", "-c", "python look.py", PYTHONPATH=str(tmp_path))
    assert done.returncode == 78, done.stderr
    assert done.stdout.strip() == f"['{tmp_path}/mine.yaml', 'period=2 lr=1e-3', 'auto']"
    for line in (
        "no Trainer of transformers or Lightning has trained",
        "fsdp_demo.attach(",
        "exchange.finish()",
    ):
        assert line in done.stderr


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("tell_launcher(0, 75); sys.exit(1)", 75),
        ("tell_launcher(0, 75); tell_launcher(1, 78); sys.exit(1)", 78),
        ("tell_launcher(0, 75); os.abort()", 75),
        ("tell_launcher(0, 75); sys.exit(3)", 3),
        ("sys.exit(1)", 1),
        ("os.kill(os.getpid(), 9)", 137),
        ("sys.exit(-9)", 137),
        ("sys.exit(-1)", 255),
        ("tell_launcher(0, 75); sys.exit(-6)", 75),
        ("raise subprocess.CalledProcessError(-9, 'rank')", 137),
        ("raise subprocess.CalledProcessError(3, 'rank')", 1),
        ("from tests.launch.test_rehearse import failed; raise failed(1, -9)", 137),
    ],
)
def test_launch_status_below_any_command(tmp_path: Path, script: str, status: int) -> None:
    """What ranks have written counts where a command turns it into 1, and so does a rank that was
    killed below a launcher which the command has started.
    """
    code = "import os, subprocess, sys\nfrom fsdp_demo.status import tell_launcher\n" + script
    root = str(Path(__file__).parents[2])
    done = below(tmp_path, sys.executable, "-c", code, PYTHONPATH=root)
    assert done.returncode == status, done.stderr


def test_launch_site_is_on_the_path_once(tmp_path: Path) -> None:
    """A launch below a launch does not put the folder on PYTHONPATH again."""
    code = "import os; print(os.environ['PYTHONPATH'].count('site'))"
    words = [sys.executable, "-m", "fsdp_demo.launch", sys.executable, "-c", code]
    done = below(tmp_path, *words, PYTHONPATH=str(SITE))
    assert (done.returncode, done.stdout.strip()) == (0, "1"), done.stderr
