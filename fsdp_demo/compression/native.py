"""C files of this package, compiled on the machine where they run when they are first wanted, and
kept in the user's cache. So one wheel is for all machines, and the code is made for the processor
at hand. What uses one does without it where there is no compiler.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from .machine import cache_folder, cpu_facts

log = logging.getLogger("fsdp_demo")

FLAGS = ("-std=c99", "-O2", "-ftree-vectorize", "-fPIC", "-shared")
NATIVE = ("-march=native",)
PATIENCE = 60.0
"""Seconds for the compiler."""


def compiler() -> list[str]:
    """The C compiler, as words of a command: what CC says, or the first of cc, gcc and clang that
    is there; [] where none is.
    """
    said = os.environ.get("CC", "")
    commands = [shlex.split(said)] if said else [["cc"], ["gcc"], ["clang"]]
    return next(([path, *more] for name, *more in commands if (path := shutil.which(name))), [])


def library(source: Path) -> ctypes.CDLL | None:
    """The functions of a C file, compiled for this processor: in about a fifth of a second, unless
    the cache has them. None where there is no compiler (said at level DEBUG) or it failed.
    """
    found = compiler()
    if not found:
        log.debug("%s: there is no C compiler (CC, cc, gcc, clang)", source.name)
        return None
    try:
        return _library(source, found)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        log.warning(
            "%s: %s failed; torch does its work: %s", source.name, shlex.join(found), said[-500:]
        )
        return None


def _library(source: Path, found: list[str]) -> ctypes.CDLL:
    """From the cache, or compiled into it; a folder that cannot be written is done without."""
    text = source.read_bytes() + "\n".join([*found, *FLAGS, cpu_facts()]).encode()
    name = f"{source.stem}-{hashlib.sha256(text).hexdigest()[:16]}.so"
    kept = cache_folder() / name
    if kept.is_file():
        with contextlib.suppress(OSError):  # not whole, or of another machine: made anew
            return ctypes.CDLL(str(kept))
    where = kept.parent if _writable(kept.parent) else None
    # ranks may do so at once: a file is whole or not there
    with tempfile.TemporaryDirectory(dir=where, prefix=source.stem) as folder:
        made = Path(folder) / name
        _compile(found, source, made)
        if where is None:
            return ctypes.CDLL(str(made))
        os.replace(made, kept)
    return ctypes.CDLL(str(kept))


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _compile(found: list[str], source: Path, made: Path) -> None:
    """For this processor, or, where the compiler knows no such flag, for any of its kind."""
    for flags in (FLAGS + NATIVE, FLAGS):
        command = [*found, *flags, str(source), "-o", str(made)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        if ran.returncode == 0:
            return
    ran.check_returncode()
