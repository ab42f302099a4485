"""The command `fsdp-demo`: what it prints alone, examples in every help, errors of one line,
`presets` and the version. Other commands have files of their own.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp_demo import cli
from fsdp_demo.errors import StoreSilent
from fsdp_demo.launch import __main__ as launch
from fsdp_demo.launch.command_line import CommandParser


def test_cli_silent_store_is_one_line(monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A silent store ends a command with one line of an error."""
    monkeypatch.setattr(
        "fsdp_demo.rendezvous.topology.Topology.open_store", refuse(StoreSilent("none"))
    )
    monkeypatch.setenv("ISLAND_ENDPOINT", "127.0.0.1:1")
    assert cli.main(["status"]) == 1
    assert capsys.readouterr().err == "fsdp-demo: error: none\n"


def test_cli_unreadable_file_is_one_line(monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that cannot be read ends a command with one line of an error."""
    broken = PermissionError(13, "Permission denied", "run")
    monkeypatch.setattr("fsdp_demo.tools.inspect.inspect", refuse(broken))
    assert cli.main(["inspect", "run"]) == 1
    assert capsys.readouterr().err == "fsdp-demo: error: run: Permission denied\n"


def refuse(error: Exception) -> Callable[..., Any]:
    """A function that raises it."""

    def act(*_: Any, **__: Any) -> Any:
        raise error

    return act


def test_cli_version(capsys: pytest.CaptureFixture[str]) -> None:
    """`fsdp-demo --version` prints the version."""
    from fsdp_demo.version import __version__

    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"fsdp-demo {__version__}\n"


def test_cli_presets_are_listed_and_printed_as_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    """`fsdp-demo presets` lists all presets with their kinds, and prints one as yaml."""
    import fsdp_demo

    assert cli.main(["presets"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert (
        {line.split()[0] for line in listed}
        == set(fsdp_demo.presets())
        >= {"full", "demo", "diloco", "decoupled_momentum"}
    )
    assert all(line.endswith((".", "...")) for line in listed)
    kinds = {line.split()[0]: line.split()[1] for line in listed}
    assert (kinds["full"], kinds["sign_loco"], kinds["desloc"]) == (
        "baseline",
        "recommended",
        "paper",
    )
    readme = Path(__file__).parents[2].joinpath("README.md").read_text(encoding="utf-8")
    offered = set(re.findall(r"^\| \*\*`(\w+)`", readme, re.M)) - {"full"}
    assert offered == {name for name, kind in kinds.items() if kind == "recommended"}
    assert cli.main(["presets", "demo", "--yaml"]) == 0
    assert fsdp_demo.ExchangeConfig.from_yaml(capsys.readouterr().out) == fsdp_demo.preset("demo")
    assert cli.main(["presets", "diloko"]) == 2
    assert "diloco" in capsys.readouterr().err


COMMANDS = cli.parser().commands()


def test_cli_alone_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """`fsdp-demo` alone lists every command, in the order of their use."""
    assert cli.main([]) == 0
    told = capsys.readouterr().out
    places = [told.index(f"\n    {name} ") for name in COMMANDS]
    assert places == sorted(places) and "python -m fsdp_demo.launch" in " ".join(told.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_cli_help_ends_with_an_example_that_parses(name: str) -> None:
    """Each help ends with an example that the parser takes."""
    _, told, example = COMMANDS[name].format_help().partition("example:\n")
    words = shlex.split(example)
    ours = words[words.index("fsdp-demo") + 1 :]
    assert told and ours[0] == name
    cut = ours.index("--") if "--" in ours else len(ours)
    assert cli.parser().parse_args(ours[:cut]).run_command


@pytest.mark.parametrize("words, said", [
    ("rehears", "unknown command 'rehears'; did you mean rehearse? (fsdp-demo --help)"),
    ("zzzz", f"unknown command 'zzzz'; there are {', '.join(COMMANDS)} (fsdp-demo --help)"),
    ("--versions", "unknown flag --versions; did you mean --version? (fsdp-demo --help)"),
    ("rehearse --island 2", "unknown flag --island; did you mean --islands?"),
    ("plan --target 0.9", "unknown flag --target; did you mean --target-utilisation?"),
    ("plan --link 1Gbit -5Mbit", "-5Mbit is below 0: a value with a unit must be above it"),
    ("plan --rtt -40ms", "-40ms is below 0"),
    ("rehearse --lnk=3", "unknown flag --lnk; did you mean --link?"),
    ("rehearse --islands 2 --procs 1 go.py 3", "a script stands behind --, as in -- go.py"),
    ("rehearse --islands 2", "the following arguments are required: --procs"),
    ("rehearse --islands x --procs 1", "argument --islands: invalid int value: 'x'"),
    ("status -- train.py", "status takes no script behind --, found 'train.py'"),
])  # fmt: skip
def test_cli_wrong_words_are_one_line(words, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong flag or value is refused in one line."""
    with pytest.raises(SystemExit) as ended:
        cli.main(words.split())
    told = capsys.readouterr()
    assert ended.value.code == 2 and not told.out
    assert said in told.err and told.err.count("\n") == 1


def test_cli_value_may_begin_like_a_flag() -> None:
    """A value with a space may begin like a flag."""
    words = ["rehearse", "--islands", "2", "--procs", "1", "--resume-args", "--resume auto"]
    assert cli.parser().parse_args(words).resume_args == "--resume auto"


def test_cli_flag_is_no_abbreviation() -> None:
    """An abbreviated flag is refused."""
    parser = CommandParser(prog="a")
    parser.add_argument("--islands")
    with pytest.raises(SystemExit):
        parser.parse_args(["--isl", "2"])


def test_cli_output_is_plain_and_imports_no_torch() -> None:
    """The output has no colours, and the command imports no torch."""
    script = (
        "import sys; from fsdp_demo import cli; cli.main([]); assert 'torch' not in sys.modules"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, env={**os.environ, "FORCE_COLOR": "1"}
    )
    assert run.returncode == 0 and b"\x1b" not in run.stdout, run.stderr


def test_cli_launch_names_the_nearest_flag(capsys: pytest.CaptureFixture[str]) -> None:
    """`launch` names the nearest flag and leaves those of other launchers alone."""
    with pytest.raises(SystemExit):
        launch._parse(["--restart", "3", "torchrun", "train.py"])
    told = capsys.readouterr().err
    assert "unknown flag --restart; did you mean --restarts?" in told and told.count("\n") == 1
    words = ["torchrun", "--nproc-per-node", "2", "train.py", "--lr", "1"]
    assert launch._parse(["--restarts", "3", *words]) == (3, [], words)
