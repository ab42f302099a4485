"""The package as it is released: sdist and wheel are built as a release builds them, checked, and
installed into a clean environment.

Building fetches the build backend. Nothing else needs a network.
"""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from fsdp_demo.version import __version__

from .test_packaging import PROJECT, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NO_BACKEND = (
    "Could not find a version|No matching distribution|Connection|Temporary failure|Max "
    "retries|resolve|timed out|unreachable"
)


def run(*words: str | Path, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """A command without this run's PYTHONPATH."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("ISLAND_")}
    env = {k: v for k, v in clean.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    how = dict(text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    done = subprocess.run([str(w) for w in words], cwd=cwd, env=env, **how)
    assert not check or done.returncode == 0, done.stdout
    return done


def copy_of_the_tree(to: Path) -> None:
    """What git holds or would take up: no build folders, no environment. Without git: the same by
    name.
    """
    try:
        words = "git ls-files -z --cached --others --exclude-standard"
        listed = run(*words.split(), cwd=ROOT, check=False)
    except FileNotFoundError:
        listed = None
    if listed is None or listed.returncode:
        leave = shutil.ignore_patterns(
            ".venv", ".git", "build", "dist", "outputs", "__pycache__", "*.egg-info", ".*_cache"
        )
        shutil.copytree(ROOT, to, ignore=leave, dirs_exist_ok=True)
        return
    for name in listed.stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(sdist, wheel); the wheel is built from the sdist."""
    # the package: a folder build/ of this repository is no such thing
    pytest.importorskip("build.env")
    folder = tmp_path_factory.mktemp("built")
    copy_of_the_tree(folder / "tree")
    words = [sys.executable, "-m", "build", "--outdir", folder / "dist", folder / "tree"]
    done = run(*words, cwd=folder, check=False)
    if done.returncode and re.search(NO_BACKEND, done.stdout):
        pytest.skip(f"the build backend cannot be fetched: {done.stdout[-500:]}")
    assert done.returncode == 0, done.stdout
    (sdist,), (wheel,) = (folder / "dist").glob("*.tar.gz"), (folder / "dist").glob("*.whl")
    return sdist, wheel


def of_packages(names: Sequence[str]) -> set[str]:
    """Packages whose `__init__.py` is among these names."""
    ending = "/__init__.py"
    return {n.removesuffix(ending).replace("/", ".") for n in names if n.endswith(ending)}


def test_package_build_passes_twine(built: tuple[Path, Path]) -> None:
    """twine accepts sdist and wheel."""
    pytest.importorskip("twine")
    done = run(sys.executable, "-m", "twine", "check", "--strict", *built, cwd=built[0].parent)
    assert done.stdout.count("PASSED") == 2, done.stdout


def test_package_build_wheel_holds_the_packages_only(built: tuple[Path, Path]) -> None:
    """The wheel holds the packages and nothing else."""
    meta = f"fsdp_demo-{__version__}.dist-info"
    with zipfile.ZipFile(built[1]) as wheel:
        names = wheel.namelist()
        entries = wheel.read(f"{meta}/entry_points.txt").decode()
        head = email.message_from_bytes(wheel.read(f"{meta}/METADATA"))
    assert of_packages(names) == set(PROJECT["tool"]["setuptools"]["packages"])
    assert {name.partition("/")[0] for name in names} == {"fsdp_demo", "deepspeed_ext", meta}
    typed = {"fsdp_demo/py.typed", "deepspeed_ext/py.typed"}
    assert {*typed, f"{meta}/licenses/LICENSE"} <= set(names)
    modules = {
        p.relative_to(ROOT).as_posix()
        for top in ("fsdp_demo", "deepspeed_ext")
        for p in (ROOT / top).rglob("*.py")
    }
    assert {name for name in names if name.endswith(".py")} == modules
    compiled = {f"fsdp_demo/compression/_kernels.{ending}" for ending in ("c", "abi3.so")}
    assert {name for name in names if name.endswith((".so", ".c"))} <= compiled
    assert "fsdp-demo = fsdp_demo.cli:main" in entries and "deepspeed = deepspeed_ext" in entries
    assert head["Version"] == __version__
    assert head["Requires-Python"] == PROJECT["project"]["requires-python"]
    assert head["Description-Content-Type"] == "text/markdown"
    assert "# fsdp_demo" in head.get_payload()


def test_package_build_sdist_holds_the_whole_tree(built: tuple[Path, Path]) -> None:
    """The sdist holds the whole tree."""
    with tarfile.open(built[0]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    wanted = "pyproject.toml LICENSE README.md CHANGELOG.md CITATION.cff fsdp_demo/py.typed "
    wanted += "fsdp_demo/compression/_kernels.c benchmarks/results/storm.svg tests/run.sh "
    wanted += "conftest.py benchmarks/bytes.py recipes/setup.sh recipes/models/small.json "
    wanted += "docs/figures/tables.py"
    assert set(wanted.split()) <= names
    left = (".venv", "outputs", "build")
    assert not [name for name in names if "__pycache__" in name or name.startswith(left)]


def test_package_build_works_in_a_clean_environment(built: tuple[Path, Path], tmp_path) -> None:
    """The wheel works in a clean environment: torch and the other dependencies are those of this
    environment, by a path; the package is the wheel's.
    """
    run(sys.executable, "-m", "venv", tmp_path / "env", cwd=tmp_path)
    python, command = (tmp_path / "env" / "bin" / name for name in ("python", "fsdp-demo"))
    words = "-m pip install --no-deps --no-index --disable-pip-version-check"
    run(python, *words.split(), built[1], cwd=tmp_path)
    purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
    where = run(python, "-c", purelib, cwd=tmp_path).stdout.strip()
    paths = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (Path(where) / "dependencies.pth").write_text("\n".join(paths) + "\n")
    program = (
        "import fsdp_demo as f, importlib.metadata as m; print(f.__file__); "
        "print(m.version('fsdp_demo'), f.preset('demo').preset)"
    )
    shown = run(python, "-W", "ignore", "-c", program, cwd=tmp_path).stdout
    file, words = shown.splitlines()[-2:]
    assert Path(file).is_relative_to(tmp_path / "env") and words == f"{__version__} demo"
    shown = yaml.safe_load(run(command, "presets", "demo", "--yaml", cwd=tmp_path).stdout)
    assert shown["preset"] == "demo" and shown["channels"]
    said = run(command, "--version", cwd=tmp_path).stdout.strip()
    assert said == f"fsdp-demo {__version__}"
