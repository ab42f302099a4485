"""A fork inside a rank, for a life that ends and is followed by another."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


def forked() -> int:
    """`os.fork()`, of a process that has no other threads: a child of one that has may hang."""
    threads = len(os.listdir("/proc/self/task"))  # also those that Python does not know
    assert threads == 1, f"this rank has {threads} threads"
    return os.fork()


def returns(
    me: Any,
    life: Callable[..., Any],
    between: Callable[[], Any] = lambda: None,
    fork: Callable[[], int] = forked,
) -> Any:
    """What life(me) comes to. Island 1 is killed in its first life, life(me, dies=6); `between`
    comes then, and the life that is counted.
    """
    if me.island != 1:
        return life(me)
    if child := fork():
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        between()
        return life(me)
    try:
        life(me, dies=6)
    finally:
        os._exit(1)
