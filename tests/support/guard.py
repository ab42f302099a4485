"""What no process of the tests may do unseen: fork with several threads, or start a process in a
test of the fast tier.

An audit hook sees both wherever they happen. It stays for the life of the process.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest

from . import threads

FORKS = {"os.fork", "os.forkpty"}
STARTS = FORKS | {"subprocess.Popen", "os.posix_spawn", "os.exec", "os.system"}


class _State:
    watches = False
    alone: str | None = None  # the id of the running test, if it says that it starts no process


def watch() -> None:
    """From now on, here and in what is forked from here."""
    if not _State.watches:
        sys.addaudithook(_hook)
    _State.watches = True


def leave() -> None:
    """A rank may do what the code under test does."""
    _State.watches = False


def alone(test: str | None) -> None:
    """This test may start no process until the next call; None: the test that runs may."""
    _State.alone = test


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if event not in STARTS or not _State.watches:
        return
    # matplotlib lists the fonts of a machine once for each home folder, with the first picture
    if event == "subprocess.Popen" and args[0] == "fc-list":
        return
    # pytest's failure is no Exception: the code under test does not swallow it
    if _State.alone is not None:
        what = f"{event} {args[1] if event == 'subprocess.Popen' else ''}".strip()
        pytest.fail(
            f"{_State.alone} starts a process ({what}) but has no marker for it: name what starts "
            "it in tests/support/kinds.py"
        )
    if event in FORKS:
        threads.assert_one("this process")
