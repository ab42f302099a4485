"""The package as it is shipped: one version, typed, complete, and a core that imports torch
only.
"""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

import fsdp_demo
from fsdp_demo.version import __version__

from .support.programs import fresh_python

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_packaging_one_version() -> None:
    """The version is said in one place, and has its section in the changelog."""
    assert fsdp_demo.__version__ == __version__
    assert PROJECT["project"]["dynamic"] == ["version"]
    dynamic = PROJECT["tool"]["setuptools"]["dynamic"]["version"]
    assert dynamic == {"attr": "fsdp_demo.version.__version__"}
    assert f"## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_packaging_installed_version_and_command() -> None:
    """The installed package has this version and the command `fsdp-demo`."""
    assert importlib.metadata.version("fsdp_demo") == __version__
    found = importlib.metadata.entry_points(group="console_scripts", name="fsdp-demo")
    assert [command.value for command in found] == ["fsdp_demo.cli:main"]


def test_packaging_every_package_is_listed_and_typed() -> None:
    """Each package is listed and typed."""
    listed = set(PROJECT["tool"]["setuptools"]["packages"])
    files = [
        file for top in ("fsdp_demo", "deepspeed_ext") for file in (ROOT / top).rglob("__init__.py")
    ]
    present = {".".join(file.parent.relative_to(ROOT).parts) for file in files}
    assert listed == present
    for top in ("fsdp_demo", "deepspeed_ext"):
        assert (ROOT / top / "py.typed").is_file()
        patterns = PROJECT["tool"]["setuptools"]["package-data"][top]
        data = {file for pattern in patterns for file in (ROOT / top).glob(pattern)}
        extra = (
            file
            for ending in ("*.json", "*.html", "site/*.py")
            for file in (ROOT / top).rglob(ending)
        )
        assert data == {ROOT / top / "py.typed", *extra}


def test_packaging_no_upper_bound_on_torch() -> None:
    """torch has no upper bound."""
    (torch,) = (line for line in PROJECT["project"]["dependencies"] if line.startswith("torch"))
    assert torch == "torch>=2.9"


def test_packaging_exact_versions_are_in_one_file() -> None:
    """Exact versions are in the constraints only."""
    optional = PROJECT["project"]["optional-dependencies"].values()
    requirements = sum(optional, PROJECT["project"]["dependencies"])
    assert not [line for line in requirements if "==" in line]
    lines = (ROOT / "recipes/constraints-cpu.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all("==" in line for line in pins)
    assert "torch==2.13.0" in pins and "accelerate==1.15.0" in pins


def imported(program: str, unwanted: set[str]) -> set[str]:
    """Which unwanted modules a program has imported. It runs elsewhere: the package must be found
    where it is installed.
    """
    program += f"\nimport sys; print(*set({sorted(unwanted)}) & set(sys.modules))"
    return set(fresh_python(program, "/").split())


def test_packaging_core_imports_torch_only() -> None:
    """The core imports no package beside torch that is heavy or optional."""
    # tqdm is not looked for: torch itself imports it where it is installed.
    heavy = {"accelerate", "transformers", "datasets", "deepspeed", "matplotlib", "pandas"}
    heavy |= {"lightning", "pytorch_lightning", "ray"}
    late = "import fsdp_demo.cli, fsdp_demo.launch.rehearse, fsdp_demo.store.server"
    assert not imported(f"from fsdp_demo import *\n{late}", heavy)


def test_packaging_commands_start_without_torch() -> None:
    """Commands that need no torch start without it. A durable store is started again while a run
    waits for it; launchers are started once for each island.
    """
    modules = "cli store.server launch.rehearse launch.processes launch.__main__ config.methods "
    modules += "status tools.doctor.reading"
    names = ", ".join(f"fsdp_demo.{name}" for name in modules.split())
    assert not imported(f"import {names}\nfsdp_demo.cli.parser()", {"torch", "numpy"})


def test_packaging_public_names_have_homes() -> None:
    """Each public name has a module that it is loaded from."""
    late = [name for names in fsdp_demo._HOMES.values() for name in names]
    names = sorted(fsdp_demo.__all__)
    assert sorted([*late, "__version__"]) == names == sorted(set(names))
    assert all(getattr(fsdp_demo, name) is not None and name in dir(fsdp_demo) for name in late)
