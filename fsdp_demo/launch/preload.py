"""The imports of a script, made once in a process that is forked for every rank (`forking.py`).

What is imported is what the script imports at its top, before any statement that could change what
an import does, and what torch, Accelerate and this package import at their first use. A process
that is to be forked has one thread, and nothing in it may belong to one rank: imports that leave
more behind than modules make it unfit, and so does a variable that they read and a rank has
otherwise.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LATE = {
    "torch": ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor"),
    "accelerate": ("deepspeed", "datasets"),
    "fsdp_demo": (
        "encodings.idna",
        "stringprep",
        "fsdp_demo.attaching",
        "fsdp_demo.comm.meet",
        "fsdp_demo.comm.zeromq",
        "fsdp_demo.exchange.guard",
    ),
}
"""What a package imports when it is first used, where it is installed."""

QUIET = {"JE_ARROW_MALLOC_CONF": "background_thread:false", "OPENBLAS_NUM_THREADS": "1"}
"""Variables under which imports start no thread: pyarrow's allocator starts one otherwise, numpy's
OpenBLAS one for each core that it may use. So numpy's products have one thread in a forked rank;
torch's have as many as `OMP_NUM_THREADS` says.
"""

NATIVE = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "MALLOC_", "LD_", "CUDA_")
"""Beginnings of variables that libraries in C read when they are loaded."""


class CannotFork(Exception):
    """The ranks must be processes of their own; the text says why."""


class _Watched(os._Environ):
    """os.environ that notes what is read, and its value then (None: there was none)."""

    read: dict[str, str | None] = {}  # noqa: RUF012 (one process has one)

    def __getitem__(self, name: str) -> str:
        value = None
        try:
            value = super().__getitem__(name)
            return value
        finally:
            self.read.setdefault(name, value)


@dataclass(frozen=True)
class Imported:
    """What this process has imported for ranks.

    Attributes:
        script: path, as the launcher gets it.
        path: `sys.path` of a rank.
        seconds: that the imports took.
        read: variables that imports have read, and their values.
        changed: variables that imports have set: value before and after.
    """

    script: str
    path: list[str]
    seconds: float = 0.0
    read: dict[str, str | None] = field(default_factory=dict)
    changed: dict[str, tuple[str | None, str | None]] = field(default_factory=dict)

    def other(self, env: Mapping[str, str]) -> list[str]:
        """Names of variables that imports have read and that are otherwise in `env`."""
        names = {*self.read, *(n for n in env if n.startswith(NATIVE))} - set(QUIET)
        return sorted(n for n in names if env.get(n) != self.read.get(n))

    def environ(self, env: Mapping[str, str]) -> dict[str, str]:
        """The variables of a rank that was given `env`, as after its own imports."""
        out: dict[str, str] = dict(env)
        for name, (before, after) in self.changed.items():
            if out.get(name) == before and after is not None:
                out[name] = after
        return out


def script_folder(script: str) -> str:
    """What Python puts first into `sys.path`."""
    return os.path.dirname(os.path.realpath(script))


def imports(source: str) -> Iterator[ast.stmt]:
    """The import statements at the top of a script, up to the first other statement that does
    something.

    >>> text = "import os; x = 1\\ndef f(): pass\\nimport sys\\nos.chdir('/')\\nimport re"
    >>> [ast.unparse(statement) for statement in imports(text)]
    ['import os', 'import sys']
    """
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.ImportFrom) and statement.module == "__future__":
            continue
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            yield statement
        elif not _harmless(statement):
            return


def _harmless(statement: ast.stmt) -> bool:
    """Whether an import after this statement finds what it would find before."""
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return not statement.decorator_list
        case ast.Assign(targets=targets, value=value):
            return all(isinstance(target, ast.Name) for target in targets) and _plain(value)
        case ast.AnnAssign(target=ast.Name(), value=value):
            return value is None or _plain(value)
        case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
            return not statement.orelse
        case ast.If(test=test, body=body, orelse=orelse):
            return _plain(test) and all(map(_harmless, [*body, *orelse]))
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="gc")))):
            return True
        case ast.Expr(value=ast.Constant()) | ast.Pass():
            return True
    return False


def _plain(value: ast.expr) -> bool:
    """Whether nothing is called to compute a value."""
    calls = (ast.Call, ast.Await, ast.Yield, ast.YieldFrom, ast.Subscript, ast.Attribute)
    return not any(isinstance(node, (*calls, ast.NamedExpr)) for node in ast.walk(value))


def preload(
    script: str,
    env: Mapping[str, str],
    stop: Callable[[], bool],
    first: tuple[str, ...] = (),
    last: tuple[str, ...] = (),
) -> Imported:
    """Import what the script imports at its top, and what that imports late.

    Args:
        script: path of a Python file.
        env: variables that all ranks have. They are those of this process while it imports.
        stop: asked between two imports; True breaks off.
        first, last: modules to import besides, before and after those of the script.

    Raises:
        CannotFork: no rank may be forked from this process. Its imports stay.
    """
    _check_options()
    source = _source(script)
    safe = getattr(sys.flags, "safe_path", False)  # from Python 3.11 on
    path = list(sys.path) if safe else [script_folder(script), *sys.path[1:]]
    before, began = _traces(), time.monotonic()
    own, own_path = dict(os.environ), list(sys.path)
    given = {**QUIET, **env}
    gc.disable()  # imports take a fifth less, and what they make stays
    try:
        _replace(given)
        os.environ.__class__ = _Watched
        sys.path[:] = path
        for name in first:
            importlib.import_module(name)
        seeds = _seeds()
        _import_all(script, source, stop)
        for name in last:
            importlib.import_module(name)
    finally:
        os.environ.__class__ = os._Environ
        names = {n for n in {*given, *os.environ} if given.get(n) != os.environ.get(n)}
        changed = {n: (given.get(n), os.environ.get(n)) for n in names}
        path = list(sys.path)
        sys.path[:] = own_path
        _replace(own)
        gc.enable()
    if left := [what for what, value in _traces().items() if value != before[what]]:
        raise CannotFork(f"imports of {script} have changed the {', the '.join(left)}")
    if any(value != _seeds()[what] for what, value in seeds.items()):
        raise CannotFork(f"imports of {script} have seeded or drawn random numbers")
    _check_devices()
    read: dict[str, str | None] = {n: given[n] for n in given if n.startswith(NATIVE)}
    return Imported(script, path, time.monotonic() - began, read | _Watched.read, changed)


def _check_options() -> None:
    """Raises CannotFork where this interpreter was given options that launchers do not give."""
    words = itertools.takewhile(
        lambda word: word.startswith("-") and word not in ("-m", "-c"), sys.orig_argv[1:]
    )
    if other := [word for word in words if word not in ("-u", "-B")]:
        raise CannotFork(f"python was started with {' '.join(other)}")


def _source(script: str) -> str:
    """The text of the script. Raises CannotFork where it is no Python file, or its folder has
    modules that this process knows by the same name.
    """
    if Path(script).suffix != ".py":
        raise CannotFork(f"{script} is not a .py file")
    try:
        source = Path(script).read_text(encoding="utf-8")
        ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise CannotFork(f"{script} cannot be read: {error}") from None
    folder = Path(script_folder(script))
    for entry in folder.iterdir():
        module = sys.modules.get(entry.stem)
        if module is None or not (entry.suffix == ".py" or (entry / "__init__.py").exists()):
            continue
        where = getattr(module, "__file__", None) or ""
        if entry.stem != "__main__" and not where.startswith(str(entry.with_suffix(""))):
            raise CannotFork(f"{entry} has the name of a module that is imported already")
    return source


def _import_all(script: str, source: str, stop: Callable[[], bool]) -> None:
    """Raises CannotFork for an import that fails for another reason than a missing module."""
    here: dict[str, Any] = {"__name__": "__fsdp_demo_preload__", "__file__": script}
    before, named = set(sys.modules), set[str]()
    try:
        for statement in imports(source):
            named |= _modules(statement)
            if stop():
                raise CannotFork("told to stop")
            exec(compile(ast.Module([statement], []), script, "exec"), here)  # noqa: S102
    except ImportError:
        pass  # a rank says so by itself
    except CannotFork:
        raise
    except BaseException as error:
        raise CannotFork(f"imports of {script}: {type(error).__name__}: {error}") from None
    packages = {name.partition(".")[0] for name in (set(sys.modules) - before) | named}
    for package, names in LATE.items():
        for name in names if package in packages else ():
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


def _modules(statement: ast.stmt) -> set[str]:
    """The modules that an import statement names."""
    if isinstance(statement, ast.ImportFrom):
        return {statement.module or ""}
    return {alias.name for alias in statement.names} if isinstance(statement, ast.Import) else set()


def _traces() -> dict[str, Any]:
    """What imports must leave as it is."""
    return {
        "handlers of signals": [(n, signal.getsignal(n)) for n in signal.valid_signals()],
        "working folder": os.getcwd(),
        "standard streams": (sys.stdin, sys.stdout, sys.stderr),
        "hook for errors": sys.excepthook,
        "arguments": list(sys.argv),
        "number of threads": threads(),
        "child processes": Path(f"/proc/self/task/{os.getpid()}/children").read_text(),
    }


def _seeds() -> dict[str, Any]:
    """States of random numbers that imports must leave as they are: each rank draws its own."""
    found: dict[str, Any] = {"random": random.getstate()}
    if numpy := sys.modules.get("numpy"):
        found["numpy"] = repr(numpy.random.get_state())
    if torch := sys.modules.get("torch"):
        found["torch"] = torch.default_generator.get_state().tolist()
    return found


def threads() -> int:
    """Threads of this process, also those that Python does not know."""
    return len(os.listdir("/proc/self/task"))


def _check_devices() -> None:
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise CannotFork("imports have initialized CUDA")


def _replace(env: Mapping[str, str]) -> None:
    """Make these the variables of this process."""
    for name in set(os.environ) - set(env):
        del os.environ[name]
    for name, value in env.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
