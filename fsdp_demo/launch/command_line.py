"""The argument parser of all commands: help with an example, and errors of one line that offer the
nearest right word.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from ..config.parsing import nearest

USAGE_ERROR = 2
_BELOW_ZERO = re.compile(r"-[0-9.]+[a-zA-Z%/]+[0-9a-zA-Z,]*")
"""`-5Mbit`, which argparse takes for a flag."""


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are one line, and that takes no abbreviated flags.

    Args:
        example: a command, for the end of the help. run: runs it, given the parsed arguments.
    """

    def __init__(self, *args: Any, example: str = "", run: Any = None, **kwargs: Any):
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})
        if example:
            self.formatter_class = argparse.RawDescriptionHelpFormatter
            self.epilog = f"example:\n  {example}"
        if run is not None:
            self.set_defaults(run_command=run)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse as argparse, but name an unknown flag before a missing one."""
        words = list(sys.argv[1:] if args is None else args)
        # another parser, or another program, takes the words after the first one
        handed_on = any(a.nargs in (argparse.PARSER, argparse.REMAINDER) for a in self._actions)
        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        unseen = iter(words)
        for word in unseen:
            flag, equals, _ = word.partition("=")
            if not word.startswith("-"):
                self._check_command(word)
                if handed_on:
                    break
            elif action := self._option_string_actions.get(flag):
                if action.nargs is None and not equals:
                    self._check_sign(next(unseen, ""))  # its value
            elif _BELOW_ZERO.fullmatch(word):  # one of several values
                self._check_sign(word)
            elif flag.startswith("--") and " " not in word:  # with a space it is a value
                self.error(f"unknown flag {flag}{_meant(flag, flags)}")
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        """Say what is wrong in one line, and end with status 2."""
        found, _, words = message.partition("unrecognized arguments: ")
        if script := next((w for w in words.split() if not found and w.endswith(".py")), ""):
            message += f"; a script stands behind --, as in -- {script}"
        self.exit(USAGE_ERROR, f"{self.prog}: error: {message} ({self.prog} --help)\n")

    def commands(self) -> dict[str, CommandParser]:
        """Name -> parser; empty for a command."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                return dict(action.choices)
        return {}

    def _check_sign(self, value: str) -> None:
        if _BELOW_ZERO.fullmatch(value):
            self.error(f"{value} is below 0: a value with a unit must be above it")

    def _check_command(self, word: str) -> None:
        known = list(self.commands())
        if known and word not in known:
            self.error(
                f"unknown command {word!r}"
                + (_meant(word, known) or f"; there are {', '.join(known)}")
            )


def _meant(found: str, known: Sequence[str]) -> str:
    longer = [word for word in known if word.startswith(found)]
    if len(longer) == 1:
        return f"; did you mean {longer[0]}?"
    return nearest(found, known, 0.6).replace("'", "")


SEVERAL: dict[str, Any] = {"nargs": "+", "action": "extend", "default": []}
"""Of an option that takes several words and may be repeated."""


def option(to: argparse._ActionsContainer, flag: str, help: str, **how: Any) -> None:
    """Add an option: `--link RATE` takes a word of its default's type, `--json` is a switch."""
    name, _, word = flag.partition(" ")
    how |= {"metavar": word} if word else {"action": "store_true"}
    if isinstance(default := how.get("default"), int | float):
        how["type"] = type(default)
    to.add_argument(name, help=help, **how)


Commands = argparse._SubParsersAction  # of `CommandParser`
"""Where `add` of a command puts its parser."""
