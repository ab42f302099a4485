"""Every public name says what it is and shows it, in code that runs."""

from __future__ import annotations

import ast
import doctest
import functools
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fsdp_demo

from .support.programs import fresh_python

ROOT = Path(__file__).parents[1]
NAMES = [n for n in fsdp_demo.__all__ if n != "__version__"]


def methods(cls: type) -> list[tuple[str, Any]]:
    """What a class and those of this package below it define and show: methods, properties, class
    methods.
    """
    own = [base for base in reversed(cls.__mro__) if base.__module__.startswith("fsdp_demo.")]
    found = []
    for name, value in {n: v for base in own for n, v in vars(base).items()}.items():
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if not name.startswith("_") and inspect.isfunction(function):
            found.append((name, function))
    return found


@pytest.fixture(autouse=True)
def one_replica(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in "RANK COUNT ENDPOINT RUN NAME ADDRESS TIMEOUT LINK STATUS".split():
        monkeypatch.delenv(f"ISLAND_{name}", raising=False)
    yield


def test_public_all_is_sorted_and_complete() -> None:
    """`__all__` is sorted and complete."""
    assert sorted(fsdp_demo.__all__) == fsdp_demo.__all__
    assert len(set(fsdp_demo.__all__)) == len(fsdp_demo.__all__)
    modules = {n for n, v in vars(fsdp_demo).items() if inspect.ismodule(v)}
    shown = {n for n in vars(fsdp_demo) if not n.startswith("_")} - modules
    of_python = {"Any", "TYPE_CHECKING", "import_module"}
    assert shown <= {*fsdp_demo.__all__, "guard"} | of_python


@pytest.mark.parametrize("name", NAMES)
def test_public_name_and_its_methods_have_docstrings(name: str) -> None:
    """A public name has a docstring, and so have the public methods of a class."""
    thing = getattr(fsdp_demo, name)
    # A dataclass without one gets its signature.
    assert thing.__doc__ and not thing.__doc__.startswith(f"{name}("), f"{name} has no docstring"
    for method, function in methods(thing) if inspect.isclass(thing) else ():
        assert (function.__doc__ or "").strip(), f"{name}.{method} has no docstring"


@pytest.mark.parametrize("name", NAMES)
def test_public_name_has_an_example_that_runs(name: str) -> None:
    """A public name has an example that runs."""
    thing = getattr(fsdp_demo, name)
    namespace = dict(vars(sys.modules[thing.__module__]))
    tests = [t for t in doctest.DocTestFinder().find(thing, name, globs=namespace) if t.examples]
    assert tests, f"{name} shows no example"
    for test in tests:
        output: list[str] = []
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
        runner.run(test, out=output.append)
        assert not runner.failures, "".join(output)


def test_public_exchange_and_topology_have_the_promised_names() -> None:
    """Exchange and Topology have the names that the documents promise."""
    promised = "flush finish skip paused outer_parameters state_dict load_state_dict detach "
    promised += "metrics report digests_equal"
    assert set(promised.split()) <= {n for n, _ in methods(fsdp_demo.Exchange)}
    assert {"from_env", "from_mesh", "from_store"} <= {n for n, _ in methods(fsdp_demo.Topology)}
    parameters = inspect.signature(fsdp_demo.attach).parameters
    for name in ("model", "topology", "must_match", "step", "state"):
        assert parameters[name].kind == inspect.Parameter.KEYWORD_ONLY, name


def test_public_import_brings_torch_and_yaml_only() -> None:
    """No other package comes with `import fsdp_demo` than torch brings along, and yaml. (From
    elsewhere: the installed package.)
    """
    program = (
        "import sys, torch, torch.distributed.fsdp, yaml\n"
        "before = {n.partition('.')[0] for n in sys.modules}\n"
        "import fsdp_demo\n"
        "new = {n.partition('.')[0] for n in sys.modules} - before - set(sys.stdlib_module_names)\n"
        "assert new == {'fsdp_demo'}, new\n"
    )
    fresh_python(program, "/")


def test_public_import_without_distributed_checkpoint() -> None:
    """The package is imported without `torch.distributed.checkpoint`, which takes a second to
    import.
    """
    late = "torch.distributed.checkpoint"
    fresh_python(f"import sys, fsdp_demo.checkpoint\nassert '{late}' not in sys.modules")


def test_public_import_without_fsdp2() -> None:
    """The package is imported without `torch.distributed.tensor`, which takes a second to import:
    it brings sympy and torch.fx's tracer. Whoever holds a DTensor has it already.
    """
    program = (
        "import sys, torch, torch.distributed\n"
        "before = set(sys.modules)\n"
        "import fsdp_demo\n"
        "from fsdp_demo.checkpoint import CheckpointManager, RunState\n"
        "fsdp_demo.preset('demo'), fsdp_demo.Topology.from_env({})\n"
        "model = torch.nn.Linear(2, 2)\n"
        "fsdp_demo.attach, fsdp_demo.guard, fsdp_demo.Exchange, fsdp_demo.base_optimizer\n"
        "from fsdp_demo.hosts.torch_params import local_part, reshard\n"
        "reshard(model), local_part(model.weight)\n"
        "new = {n.partition('.')[0] for n in set(sys.modules) - before}\n"
        "assert not {'sympy', 'torch'} & new, sorted(set(sys.modules) - before)\n"
    )
    fresh_python(program)


@functools.cache
def docstrings() -> list[tuple[Path, str]]:
    """All docstrings of the package, the recipes and the benchmarks, with their files."""
    tops = ("fsdp_demo", "deepspeed_ext", "recipes", "benchmarks")
    return [
        (path, ast.get_docstring(node) or "")
        for path in sorted(path for top in tops for path in (ROOT / top).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
    ]


REFERENCE = re.compile(r"See [`\w][^.]*(?:\.\w+[^.]*)*\.?")


def test_public_docstrings_are_not_only_references() -> None:
    """No docstring only sends the reader on."""
    for path, text in docstrings():
        assert "benchmarks" in path.parts or not REFERENCE.fullmatch(" ".join(text.split())), path
    for text in ("See `Coder.encode`.", "See `Host.load` of hosts/base.py"):
        assert REFERENCE.fullmatch(text)
    for text in ("See `Coder.encode`. The scales are bf16.", "The inverse of `encode`."):
        assert not REFERENCE.fullmatch(text)


def test_public_examples_are_code() -> None:
    """Each example is code, of private names, too: a formatter has once run two lines of one
    together.
    """
    examples = [
        (path, example.source)
        for path, text in docstrings()
        for example in doctest.DocTestParser().get_examples(text, str(path))
    ]
    assert len(examples) > 150
    for path, source in examples:
        compile(source, str(path), "exec")
        assert ">>>" not in source, f"{path}: {source}"


COMMANDS = ("python ", "fsdp-demo ", "torchrun ", "bash ", "accelerate ", "deepspeed ")


def test_public_docstring_commands_are_whole() -> None:
    """A line of a command is followed by another command or by nothing, or ends in a backslash."""
    seen = 0
    for path, text in docstrings():
        lines = [*text.splitlines(), ""]
        for line, following in zip(lines, lines[1:], strict=False):
            if line.startswith("    ") and line.strip().startswith(COMMANDS):
                seen += 1
                ends = not following.strip() or following.strip().startswith(COMMANDS)
                assert ends or line.endswith("\\"), f"{path}: {line}"
                assert " fsdp-demo " not in line.strip(), f"{path}: {line}"
    assert seen > 40
