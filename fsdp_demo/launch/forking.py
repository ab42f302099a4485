"""Processes that are forked from one that has imported all, in place of fresh interpreters (Linux).

A rank spends most of its start in imports, and all ranks of a machine make the same ones. A
`Template` is this process after `preload.py`. What it forks differs from a fresh process only in
what is in memory already: it has its own variables, arguments, `sys.path`, `__main__`, streams,
signals, session and seeds, no descriptor of its parent, and it ends as an interpreter ends.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import gc
import io
import os
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import IO, Any

from .launchers import FORKED
from .preload import CannotFork, Imported, threads
from .processes import end_with_parent


class Forked:
    """A forked child, with what launchers use of `subprocess.Popen`."""

    def __init__(self, pid: int, args: Sequence[str], streams: Sequence[int] = ()):
        self.pid, self.args = pid, list(args)
        self.returncode: int | None = None
        files = [os.fdopen(fd, "rb", 0) for fd in streams]
        self.stdin = None
        self.stdout: IO[bytes] | None = files[0] if files else None
        self.stderr: IO[bytes] | None = files[1] if files else None

    def poll(self) -> int | None:
        """The return code, negative for a signal; None while it runs."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # somebody else has waited for it
                pid, status = self.pid, 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The return code when it has ended. Raises subprocess.TimeoutExpired."""
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() >= end:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Template:
    """This process, that has imported what ranks need: it is forked in place of a fresh one.

    Args:
        imported: by `preload`.
        procs: ranks of an island.
        launch: what a forked launcher runs, with its words and this template (`run.main`).
    """

    def __init__(
        self, imported: Imported, procs: int, launch: Callable[[list[str], Template], int]
    ):
        self.imported, self.procs, self.launch = imported, procs, launch
        self._files = _descriptors()  # what imports have opened stays open

    def fork(
        self,
        main: Callable[[], int],
        env: Mapping[str, str],
        words: Sequence[str],
        *,
        pipes: bool = False,
        session: bool = False,
        with_parent: bool = False,
        keep: Sequence[int] = (),
    ) -> Forked:
        """A child that runs `main` and ends with its status.

        Args:
            env: its variables.
            words: its command line, which ps shows.
            pipes: its standard output and error are pipes to this process, and its input is empty;
                otherwise all three are those of this process.
            session: it leads a session of its own.
            with_parent: it gets SIGTERM when this process ends.
            keep: descriptors that stay open there.

        Raises:
            CannotFork: this process has other threads by now.
        """
        if threads() > 1:
            raise CannotFork(f"this process has {threads()} threads")
        ends = [os.pipe(), os.pipe()] if pipes else []
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        gc.freeze()  # a collection in a child would touch, and so copy, every page
        parent, pid = os.getpid(), os.fork()
        if pid:
            for _, write in ends:
                os.close(write)
            return Forked(pid, words, [read for read, _ in ends])
        try:
            if with_parent:
                end_with_parent()
                if os.getppid() != parent:
                    os._exit(128 + signal.SIGTERM)
            _begin([write for _, write in ends], session, self._files | set(keep))
            dress(env, words)
            status = main()
        except BaseException as error:
            status = status_of(error)
        end(status)
        raise AssertionError("unreachable")

    def run_script(
        self,
        env: Mapping[str, str],
        words: Sequence[str],
        session: bool,
        signals: Sequence[int] = (),
    ) -> int:
        """Be `python [-u] SCRIPT ARGS` from here on; in a child. Returns the status of its end.

        signals: `handled` by who starts it.
        """
        _reset(signals)
        unbuffered = words[1] == "-u"
        argv = list(words[2 if unbuffered else 1 :])
        if session:
            os.setsid()
        dress(self.imported.environ(env), words)
        os.environ[FORKED] = f"{time.time()} {os.environ.get(FORKED, '0').split()[-1]}"
        sys.path[:] = self.imported.path
        _streams(unbuffered or bool(os.environ.get("PYTHONUNBUFFERED")))
        try:
            _run_main(argv)
        except BaseException as error:
            return status_of(error)
        return 0


def _descriptors() -> frozenset[int]:
    return frozenset(int(name) for name in os.listdir("/proc/self/fd"))


def _begin(streams: Sequence[int], session: bool, keep: frozenset[int] | set[int]) -> None:
    """Leave the parent's session, streams, descriptors and handlers of signals."""
    if session:
        os.setsid()
    if streams:
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in zip((null, *streams), range(3), strict=True):
            os.dup2(source, target)
    for fd in _descriptors() - keep - {0, 1, 2}:
        with contextlib.suppress(OSError):  # the one of the listing
            os.close(fd)
    signal.set_wakeup_fd(-1)
    _reset(handled())


def handled() -> list[int]:
    """Signals that this process has handlers for. In a fresh process they have none; those that are
    ignored here are ignored there, too.
    """
    return [int(n) for n in signal.valid_signals() if callable(signal.getsignal(n))]


def _reset(signals: Sequence[int]) -> None:
    for number in signals:
        signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # so Python begins
        signal.signal(signal.SIGINT, signal.default_int_handler)


def dress(env: Mapping[str, str], words: Sequence[str]) -> None:
    """Take variables and command line, and seeds that no other process has."""
    os.environ.clear()
    os.environ.update(env)
    sys.argv = list(words[1:])
    sys.orig_argv = list(words)
    with contextlib.suppress(OSError, ValueError):  # it is for people only
        _retitle(words)
    # the module `random` does it by itself
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()


def _retitle(words: Sequence[str]) -> None:
    """Let ps show these words, as far as there is room: the kernel reads them from this process."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, stop = int(fields[45]), int(fields[46])
    if room := max(stop - start - 1, 0):
        text = b"\0".join(word.encode() for word in words)[:room]
        ctypes.memmove(start, text.ljust(room + 1, b"\0"), room + 1)


def _streams(unbuffered: bool) -> None:
    """Standard input, output and error as a fresh interpreter makes them. The old objects stay
    where handlers of the log hold them.
    """
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        old: Any = getattr(sys, name)
        if old is None:
            continue
        raw = io.FileIO(fd, "wb" if fd else "rb", closefd=False)
        raw.name = f"<{name}>"
        buffer: Any = raw
        if fd == 0 or not unbuffered:
            buffer = io.BufferedWriter(raw) if fd else io.BufferedReader(raw)
        new = io.TextIOWrapper(
            buffer,
            old.encoding,
            old.errors,
            line_buffering=not unbuffered and (fd == 2 or os.isatty(fd)),
            write_through=unbuffered,
        )
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)


def _run_main(argv: Sequence[str]) -> None:
    """Run a script as `__main__`."""
    path = os.path.abspath(argv[0])
    module = types.ModuleType("__main__")
    vars(module).update(
        __annotations__={},
        __file__=path,
        __loader__=SourceFileLoader("__main__", path),
        __builtins__=builtins,
        __cached__=None,
    )
    sys.modules["__main__"] = module
    sys.argv = list(argv)
    with io.open_code(path) as file:
        code = compile(file.read(), argv[0], "exec", dont_inherit=True)
    exec(code, vars(module))  # noqa: S102


def status_of(error: BaseException) -> int:
    """The status of an interpreter that this error ends; it prints what is to be printed.

    >>> [status_of(SystemExit(code)) for code in (None, 3, 256 + 75)]
    [0, 3, 75]
    """
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.last_value = error
    try:
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    except SystemExit as end:  # as the interpreter takes it
        return status_of(end)
    if isinstance(error, KeyboardInterrupt):
        return -signal.SIGINT
    return 1


def end(status: int) -> None:
    """End as an interpreter ends, but for objects that are still there. A negative status is a
    signal.
    """
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)
