"""The command `fsdp-demo`: its errors, `presets` and the version. Other commands have files of
their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fsdp_demo import cli
from fsdp_demo.errors import StoreSilent


def test_cli_silent_store_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A silent store ends a command with one line of an error."""
    monkeypatch.setattr(
        "fsdp_demo.rendezvous.topology.Topology.open_store", refuse(StoreSilent("none"))
    )
    monkeypatch.setenv("ISLAND_ENDPOINT", "127.0.0.1:1")
    assert cli.main(["status"]) == 1
    assert capsys.readouterr().err == "fsdp-demo: error: none\n"


def test_cli_unreadable_file_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that cannot be read ends a command with one line of an error."""
    broken = PermissionError(13, "Permission denied", "run")
    monkeypatch.setattr("fsdp_demo.checkpoint.inspect.inspect", refuse(broken))
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
    assert all(len(line.split()) > 1 for line in listed)
    kinds = {line.split()[0]: line.split()[1] for line in listed}
    assert (kinds["full"], kinds["sign_loco"], kinds["desloc"]) == (
        "baseline",
        "recommended",
        "paper",
    )
    assert cli.main(["presets", "demo", "--yaml"]) == 0
    assert fsdp_demo.ExchangeConfig.from_yaml(capsys.readouterr().out) == fsdp_demo.preset("demo")
    assert cli.main(["presets", "diloko"]) == 2
    assert "diloco" in capsys.readouterr().err
