"""docs/commands.md names every command with every flag, and none that is not there."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from fsdp_demo import cli
from fsdp_demo.launch import __main__ as launch

TEXT = (Path(__file__).parents[2] / "docs" / "commands.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## .*?\{#([\w-]+)\}\n(.*?)(?=^## |\Z)", TEXT, re.M | re.S))


def commands() -> dict[str, argparse.ArgumentParser]:
    """The parsers of `fsdp-demo` by subcommand."""
    (action,) = (a for a in cli.parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(action.choices)


def launch_flags(capsys: pytest.CaptureFixture[str]) -> set[str]:
    """The flags of `python -m fsdp_demo.launch`, from its help."""
    with pytest.raises(SystemExit):
        launch._parse(["--help"])
    return set(re.findall(r"--[a-z][\w-]*", capsys.readouterr().out.partition("example:")[0])) - {
        "--help"
    }


def in_table(section: str) -> set[str]:
    """The flags that begin a row."""
    return set(re.findall(r"^\| `(--[\w-]+)", section, re.M))


def test_commands_page_has_a_section_for_each() -> None:
    """Each command has a section and a row in the table."""
    assert list(SECTIONS) == [*commands(), "launch"]
    for name in commands():
        assert f"| [`fsdp-demo {name}`](#{name}) |" in TEXT


@pytest.mark.parametrize("name", commands())
def test_commands_page_has_every_flag(name: str) -> None:
    """Each flag of a command is in the table of its section."""
    parser = commands()[name]
    flags = {flag for a in parser._actions for flag in a.option_strings if flag.startswith("--")}
    assert in_table(SECTIONS[name]) == flags - {"--help"}
    for a in parser._actions:
        if not a.option_strings and a.metavar:
            assert f"| `{a.metavar}` |" in SECTIONS[name]
        if a.choices and a.option_strings:
            assert all(f"`{choice}`" in SECTIONS[name] for choice in a.choices)


@pytest.mark.parametrize("name", commands())
def test_commands_page_has_the_defaults(name: str) -> None:
    """Defaults on the page are those of the parser."""
    for a in commands()[name]._actions:
        if isinstance(a.default, str) and a.default and a.default != argparse.SUPPRESS:
            assert f"| `{a.default}` |" in SECTIONS[name], a.dest
        elif isinstance(a.default, (int, float)) and not isinstance(a.default, bool):
            row = re.search(rf"^\| `{a.option_strings[-1]} .*$", SECTIONS[name], re.M)
            assert row is not None and row[0].endswith(f"| {a.default:g} |"), a.dest


def test_commands_page_has_every_flag_of_the_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    """Each flag of `launch` is in the table of its section."""
    assert in_table(SECTIONS["launch"]) == launch_flags(capsys)
