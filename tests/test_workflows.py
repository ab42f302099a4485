"""The GitHub workflows, read by their schema: nobody has seen them run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TOP = {"name", "on", "permissions", "concurrency", "jobs", "env", "defaults"}
JOB = {
    "name", "needs", "runs-on", "timeout-minutes", "environment", "permissions", "steps",
    "strategy", "env", "if",
}  # fmt: skip
STEP = {"name", "id", "uses", "with", "run", "env", "if", "shell", "working-directory"}
EVENTS = {"push", "pull_request", "release", "workflow_dispatch", "schedule"}


def read(file: Path) -> dict[str, Any]:
    """A workflow. YAML 1.1 reads the key `on` as true."""
    found = yaml.safe_load(file.read_text(encoding="utf-8"))
    return {"on" if key is True else key: value for key, value in found.items()}


@pytest.fixture(params=FILES, ids=lambda file: file.name)
def file(request: pytest.FixtureRequest) -> Path:
    return request.param


def test_workflows_are_both_there() -> None:
    """Both workflows are there."""
    assert [file.name for file in FILES] == ["release.yml", "tests.yml"]


def test_workflow_says_that_it_was_never_run(file: Path) -> None:
    """A workflow says that it was never run."""
    assert file.read_text(encoding="utf-8").startswith("# Never run: ")


def test_workflow_schema(file: Path) -> None:
    """A workflow follows the schema of GitHub."""
    flow = read(file)
    assert set(flow) <= TOP and {"name", "on", "jobs"} <= set(flow) and set(flow["on"]) <= EVENTS
    assert flow["permissions"] == {"contents": "read"}
    for job in flow["jobs"].values():
        assert set(job) <= JOB and {"runs-on", "timeout-minutes", "steps"} <= set(job)
        needs = job.get("needs", [])
        assert set([needs] if isinstance(needs, str) else needs) <= set(flow["jobs"])
        for step in job["steps"]:
            assert set(step) <= STEP and ("uses" in step) != ("run" in step)
            assert "uses" not in step or re.fullmatch(r"[\w-]+/[\w./-]+@[\w./-]+", step["uses"])
            assert "with" not in step or "uses" in step
            assert isinstance(step.get("run", ""), str)


def test_workflow_takes_the_python_that_is_tested(file: Path) -> None:
    """A workflow takes the Python of the constraints."""
    versions = re.findall(r'python-version: "([\d.]+)"', file.read_text(encoding="utf-8"))
    constraints = (ROOT / "recipes" / "constraints-cpu.txt").read_text()
    assert versions and all(f"with Python {version}" in constraints for version in versions)


def test_workflow_commands_name_files_that_exist(file: Path) -> None:
    """Commands of a workflow name files that exist."""
    steps = [step for job in read(file)["jobs"].values() for step in job["steps"]]
    runs = [step["run"] for step in steps if "run" in step]
    paths = re.findall(r"\b(?:tests|recipes|fsdp_demo)/[\w./-]*\w", "\n".join(runs))
    assert all((ROOT / path).is_file() for path in paths)
    assert file.name != "tests.yml" or runs == ["bash tests/run.sh"]


def test_workflow_release_is_checked_before_publishing() -> None:
    """A release is built and checked before it is published."""
    jobs = read(ROOT / ".github" / "workflows" / "release.yml")["jobs"]
    runs = [step["run"] for step in jobs["build"]["steps"] if "run" in step]
    (check,) = (i for i, run in enumerate(runs) if "twine check" in run)
    assert runs.index("python -m build") < check
    assert jobs["publish"]["needs"] == "build"
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    # the right to publish is not with what runs the build
    assert "permissions" not in jobs["build"]
    assert jobs["publish"]["steps"][-1]["uses"].startswith("pypa/gh-action-pypi-publish@")
    version = (ROOT / "fsdp_demo" / "version.py").read_text(encoding="utf-8")
    # what the release compares with its tag
    assert re.search(r'^__version__ = "[^"]+"$', version, re.MULTILINE)
