"""Programs that tests run: of recipes/ or benchmarks/ in a rank's own process, or a few lines in a
Python of their own.
"""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any


def fresh_python(code: str, cwd: str | Path | None = None) -> str:
    """What `code` prints in a Python of its own, where it must end well."""
    words, how = [sys.executable, "-c", code], {"capture_output": True, "text": True}
    done = subprocess.run(words, cwd=cwd, timeout=120, **how)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def played(rank: Any, path: Path, words: list[str]) -> tuple[Any, str]:
    """Status and output of a script that is run as a program, in this process. A rank that is alone
    has no variables of a launcher.
    """
    if rank.islands == rank.procs == 1:
        launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        for name in [n for n in os.environ if n.startswith("ISLAND_") or n in launcher]:
            del os.environ[name]
    sys.argv, sys.path[0] = [str(path), *words], str(path.parent)
    out, status = io.StringIO(), 0
    with contextlib.redirect_stdout(out):
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            status = end.code or 0  # type: ignore[assignment]
    return status, out.getvalue()
