"""A fork inside a rank, for a life that ends and is followed by another."""

from __future__ import annotations

import os


def forked() -> int:
    """`os.fork()`, of a process that has no other threads: a child of one that has may hang."""
    threads = len(os.listdir("/proc/self/task"))  # also those that Python does not know
    assert threads == 1, f"this rank has {threads} threads"
    return os.fork()
