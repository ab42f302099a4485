"""Imports go one way: no module imports from a package above its own, and none imports itself by a
detour.

Read from the sources (`ast`), so imports inside functions and under TYPE_CHECKING count as well.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

ORDER: tuple[tuple[str, ...], ...] = (
    ("fsdp_demo.errors", "fsdp_demo.files", "fsdp_demo.version", "fsdp_demo.tools"),
    ("fsdp_demo.status", "fsdp_demo.runlog", "fsdp_demo.net"),
    ("fsdp_demo.config",),
    ("fsdp_demo.store", "fsdp_demo.membership", "fsdp_demo.compression"),
    ("fsdp_demo.peers",),
    ("fsdp_demo.elastic",),
    ("fsdp_demo.rendezvous",),
    ("fsdp_demo.tools.doctor",),
    ("fsdp_demo.hosts",),
    ("fsdp_demo.channels",),
    ("fsdp_demo.exchange",),
    ("fsdp_demo.checkpoint", "fsdp_demo.tools.planner"),
    ("fsdp_demo.automatic",),
    ("fsdp_demo.attaching",),
    ("fsdp_demo",),
    ("fsdp_demo.tools.report", "fsdp_demo.tools.inspect", "fsdp_demo.tools.inspect_words"),
    ("fsdp_demo.integrations", "fsdp_demo.launch", "deepspeed_ext"),
    ("fsdp_demo.commands", "fsdp_demo.launch.site"),
    ("fsdp_demo.cli",),
)
"""Packages and single modules, lowest first. One imports from its own package and from rows below,
not from its neighbours in a row.
"""


def modules(root: Path) -> dict[str, Path]:
    """Dotted name -> file, of both packages; a package is its `__init__.py`."""
    return {
        ".".join(f.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): f
        for top in ("fsdp_demo", "deepspeed_ext")
        for f in sorted((root / top).rglob("*.py"))
    }


@functools.cache
def arrows(root: Path) -> list[tuple[str, str, int]]:
    """(module, what it imports, line). The packages above what is imported count as well, but for
    one's own and `fsdp_demo` itself.
    """
    known, found = modules(root), list[tuple[str, str, int]]()
    for name, file in known.items():
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        for line, target in imported(file, package):
            there = target if target in known else target.rpartition(".")[0]
            if there in known and there != name:
                found.append((name, there, line))
            parts = there.split(".")
            for above in (".".join(parts[:n]) for n in range(2, len(parts))):
                if above in known and not f"{name}.".startswith(f"{above}."):
                    found.append((name, above, line))
    return found


def imported(file: Path, package: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of all that a file imports, modules and names in them."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            above = parts[: len(parts) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def row(module: str) -> tuple[int, str]:
    """The row of a module and its entry there, the longest that fits."""
    rows = [(n, entry) for n, entries in enumerate(ORDER) for entry in entries]
    fits = [at for at in rows if f"{module}.".startswith(f"{at[1]}.")]
    return max(fits, key=lambda at: len(at[1]))


def upwards(root: Path) -> list[str]:
    """A sentence for each import that goes up, or sideways."""
    return [
        f"{name}:{line} imports {target}: {other} is not below {own}"
        for name, target, line in arrows(root)
        for (here, own), (there, other) in [(row(name), row(target))]
        if own != other and here <= there
    ]


def circles(root: Path) -> list[list[str]]:
    """Modules that import each other, by any number of steps."""
    known = modules(root)
    direct: dict[str, set[str]] = {name: set() for name in known}
    for name, target, _ in arrows(root):
        direct[name].add(target)
    reach: dict[str, set[str]] = {}
    for start in known:
        seen: set[str] = set()
        left = list(direct[start])
        while left:
            if (module := left.pop()) not in seen:
                seen.add(module)
                left += direct[module]
        reach[start] = seen
    groups = {
        tuple(sorted(m for m in reach[name] if name in reach[m]))
        for name in known
        if name in reach[name]
    }
    return [list(group) for group in sorted(groups)]


def test_packages_no_import_goes_upwards() -> None:
    """No module imports from a package above its own."""
    assert upwards(ROOT) == []


def test_packages_no_circles() -> None:
    """No module imports itself by a detour."""
    assert circles(ROOT) == []


@pytest.mark.parametrize("top", ["fsdp_demo", "deepspeed_ext", "recipes"])
def test_packages_nothing_imports_benchmarks(top: str) -> None:
    """What users run or copy imports nothing of benchmarks/, also not by the plain name of a file
    there; the library imports no recipe.
    """
    above = {"benchmarks", "study", *(p.stem for p in (ROOT / "benchmarks").glob("*.py"))}
    if top != "recipes":
        above |= {"recipes", *(p.stem for p in (ROOT / "recipes").glob("*.py"))}
    found = [
        f"{file.relative_to(ROOT)}:{line} imports {name}"
        for file in sorted((ROOT / top).rglob("*.py"))
        for line, name in imported(file, "own.package.of.a.file")
        if name.partition(".")[0] in above
    ]
    assert found == []


def test_packages_every_module_has_its_place() -> None:
    """A new module at the top of `fsdp_demo` is a decision: it belongs into a package, or into
    ORDER.
    """
    beside = [
        name
        for name in modules(ROOT)
        if name.startswith("fsdp_demo.") and row(name)[1] == "fsdp_demo"
    ]
    assert beside == []


def test_packages_have_docstrings() -> None:
    """Each package says what it is for."""
    for name, file in modules(ROOT).items():
        if file.name == "__init__.py":
            assert ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))), name


@pytest.mark.parametrize("text", [
    "from ..hosts.muon import Muon",
    "from fsdp_demo.hosts import muon",
    "import fsdp_demo.hosts.muon",
    "def late():\n    from ..hosts import muon",
    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..hosts.muon import Muon",
    "from .. import Exchange",
])  # fmt: skip
def test_packages_upward_import_is_found(tmp_path: Path, text: str) -> None:
    """An import upwards is found, whatever its form."""
    written(tmp_path, {"config/rules.py": text, "hosts/muon.py": ""})
    (found,) = {
        sentence.partition(" imports ")[0].partition(":")[0] for sentence in upwards(tmp_path)
    }
    assert found == "fsdp_demo.config.rules" and circles(tmp_path) == []


def test_packages_import_by_a_neighbour_is_found(tmp_path: Path) -> None:
    """An import of a neighbour of the same height is found."""
    mesh = {"integrations/mesh.py": "from ..net import link"}
    written(tmp_path, {"launch/processes.py": "from ..integrations import mesh", **mesh})
    why = "fsdp_demo.integrations is not below fsdp_demo.launch"
    assert [s.split(" imports ")[1] for s in upwards(tmp_path)] == [
        f"{name}: {why}" for name in ("fsdp_demo.integrations.mesh", "fsdp_demo.integrations")
    ]


def test_packages_circle_is_found(tmp_path: Path) -> None:
    """A circle is found, also by an import inside a function."""
    written(tmp_path, {
        "peers/link.py": "from . import meter",
        "peers/meter.py": "def f():\n    from .peers import Line",
        "peers/peers.py": "from .link import Link",
        "peers/header.py": "from .link import Link",
    })  # fmt: skip
    assert circles(tmp_path) == [[f"fsdp_demo.peers.{n}" for n in ("link", "meter", "peers")]]


def written(root: Path, files: dict[str, str]) -> None:
    """A small fsdp_demo with these files."""
    for name, text in {"__init__.py": "", **files}.items():
        file = root / "fsdp_demo" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        (file.parent / "__init__.py").touch()
        file.write_text(text + "\n")


SET_BY_THEMSELVES = {
    "connections": "exchange.sending.ExchangeConnections",
    "driver": "elastic.driver.Driver",
    "exchange": "exchange.exchange.Exchange",
    "manager": "checkpoint.manager.CheckpointManager",
    "peers": "elastic.peer_group.PeerGroup",
    "queue": "exchange.in_flight.InFlightQueue",
    "runtime": "exchange.runtime.StepRuntime",
    "session": "integrations.trainer.session.Session",
}
"""What variables and attributes are called that hold an object of these classes."""


def assigned(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Each attribute of another object that is assigned or deleted there, and its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            yield ast.unparse(node.value), node.lineno
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
            yield ast.unparse(node.args[0]), node.lineno


def test_packages_attributes_are_set_by_their_class() -> None:
    """Nobody else assigns the attributes of eight classes: what their parts need is a constructor's
    argument, and what changes later goes by a method.
    """
    found = []
    for name, file in modules(ROOT).items():
        for owner, line in assigned(ast.parse(file.read_text())):
            if owner.rpartition(".")[2].lstrip("_") in SET_BY_THEMSELVES:
                found.append(f"{name}:{line}: {owner}")
    assert not found, found
    seen = assigned(ast.parse("self._peers.a = 1\nsetattr(runtime, 'b', 2)"))
    assert [owner for owner, _ in seen] == ["self._peers", "runtime"]


def test_packages_classes_that_set_their_attributes_are_there() -> None:
    """The classes of that rule are where it says."""
    for place in SET_BY_THEMSELVES.values():
        module, _, name = place.rpartition(".")
        text = (ROOT / "fsdp_demo" / f"{module.replace('.', '/')}.py").read_text()
        assert f"class {name}" in text, place
