"""Whether this code trains the study's cells as the code did whose digest was entered last; then
its digest is entered, too, and what the repository keeps counts for it.

    python benchmarks/study/study.py --enter "what has changed since"

A full run takes minutes, and ends elsewhere on another processor. So both codes train short runs
here: this checkout, and the last commit that changed benchmarks/figures/study-codes.json. Each is a
process of this file, `python alike.py CHECKOUT TABLE ONLY JOBS`, and prints its results as JSON.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SHORT = {"steps": 40, "batch": 2, "warmup": 8, "held_out": 16}
"""Of every setting: two rounds of the longest period in the table of all methods."""

OF_THE_CLOCK = ("seconds", "seconds_waiting", "curve")
"""Figures of a run that no two runs share. Of the curve the losses are compared: a delayed message
may leave before a point of it, or behind.
"""

Found = dict[str, Any]
"""Of a checkout: its `code`, and `runs`: key of a run -> its cell's name and figures."""


def differences(before: Found, now: Found) -> tuple[int, list[str]]:
    """How many runs both have, and a line for each whose figures differ."""
    both, lines = [key for key in before["runs"] if key in now["runs"]], []
    for key in both:
        one, two = before["runs"][key], now["runs"][key]
        apart = [name for name in sorted({*one, *two}) if one.get(name) != two.get(name)]
        if apart or "error" in one:
            said = "; ".join(f"{n} {_brief(one.get(n))}, now {_brief(two.get(n))}" for n in apart)
            lines.append(f"{two['name']}: {said or _brief(one['error'])}")
    return len(both), lines


def _brief(value: Any) -> str:
    text = str(value).strip().splitlines()[-1] if value is not None else "missing"
    return text if len(text) <= 160 else text[:157] + "..."


def compare(table: str, only: str, jobs: int) -> tuple[Found, Found]:
    """What the code that was entered last gives here, and what this code gives."""
    with last_entry() as folder:
        return trained(folder, table, only, jobs), trained(ROOT, table, only, jobs)


@contextlib.contextmanager
def last_entry() -> Iterator[Path]:
    """A checkout of the last commit that changed what the list of codes says."""
    git = ["git", "-C", str(ROOT)]
    # the file has changed its place since some entries: a commit that only moves it enters nothing
    words = [*git, "log", "-1", "--format=%H", "--follow", "--diff-filter=M", "--"]
    words.append("benchmarks/figures/study-codes.json")
    commit = subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()
    with tempfile.TemporaryDirectory() as folder:
        at = str(Path(folder, "entered"))
        subprocess.run([*git, "worktree", "add", "--quiet", "--detach", at, commit], check=True)
        try:
            yield Path(at)
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", at], check=True)


def trained(checkout: Path, table: str, only: str, jobs: int) -> Found:
    """The short runs of a table by the code of a checkout; `only` as of study.py."""
    words = [sys.executable, __file__, str(checkout), table, only, str(jobs)]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, cwd=checkout)
    found: Found = json.loads(done.stdout)
    return found


def newest(alike: Path) -> str:
    """The code that was entered last. Whatever the repository keeps counts for it."""
    code: str = json.loads(alike.read_text(encoding="utf-8"))[-1]["codes"][-1]
    return code


def enter(code: str, why: str, alike: Path) -> None:
    """Add a code to the group of the one that was entered last."""
    groups = json.loads(alike.read_text(encoding="utf-8"))
    groups[-1]["codes"].append(code)
    groups[-1]["why"] += f"; {code}: {why}"
    alike.write_text(json.dumps(groups, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main(checkout: str, table: str, only: str, jobs: str) -> None:
    """Train the short runs by the code of `checkout`, and print what they gave."""
    from study.cells import Run, code_version
    from study.chosen import Study
    from study.jobs import train_all
    from study.results import ALIKE, Results

    # a folder without runs: the repository says which cell of each grid is the best
    study = Study(table, range(1), Results(Path(checkout, "none"), newest(ALIKE)), only=only)
    found: dict[str, dict[str, Any]] = {}
    runs: dict[str, Run] = {}
    for run in study.reported():
        cell = replace(run.cell, attach_at=min(run.cell.attach_at, SHORT["steps"] // 2))
        short = Run(cell, replace(run.setting, **SHORT), run.seed)
        runs.setdefault(short.key(""), short)

    def done(run: Run, result: dict[str, Any]) -> None:
        figures = {k: v for k, v in result.items() if k not in OF_THE_CLOCK}
        figures["losses"] = result.get("curve", {}).get("loss")
        found[run.key("")] = {"name": run.cell.name, **figures}
        print(f"{code_version()} {len(found)}/{len(runs)}: {run.cell.name}", file=sys.stderr)

    train_all(runs.values(), int(jobs), done, compiled=False)
    print(json.dumps({"code": code_version(), "runs": found}))


if __name__ == "__main__":
    sys.path[:0] = [str(Path(sys.argv[1], folder)) for folder in ("", "benchmarks", "recipes")]
    main(*sys.argv[1:])
