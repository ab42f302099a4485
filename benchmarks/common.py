"""What several benchmarks share: their command lines, the machine, numbers of runs. No program."""

from __future__ import annotations

import argparse
import os
import platform
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def at_least_one(text: str) -> int:
    """The type of an option: a whole number, 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: a whole number, 1 or more")
    return int(text)


def wrapped(text: str) -> str:
    """A note under a table in lines of 140 columns; one that begins with [1] has its lines behind
    the first set in.
    """
    return textwrap.fill(
        text,
        140,
        subsequent_indent="    " if text.startswith("[") else "",
        break_long_words=False,
        break_on_hyphens=False,
    )


def run_id() -> str:
    """A number that no other run on this machine has."""
    return f"{os.getpid()}-{time.monotonic_ns()}"


def processor() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def facts(args: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """What the rows of a file have in common: these options, and the machine. Another setting is
    another file.
    """
    import torch

    congestion = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    return {
        **{name: getattr(args, name) for name in names},
        "machine": processor(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "kernel": platform.release(),
        "congestion_control": congestion.read_text().strip() if congestion.is_file() else "",
    }
