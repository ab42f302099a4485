"""Faults that the tests must find: each `*.patch` of this folder breaks one line of the library.

    python tests/mutants/run.py [NAME ...]      # all, or those whose names hold one of the words

Each patch begins with a line that says what it breaks, and a line `# tests:` with the files that
find it. It is applied to a copy of the tracked files; the working tree stays as it is. The script
prints a line for each fault, and ends with 1 if one is not caught or does not apply.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FAILED = 1  # pytest's status where tests ran and one failed; anything else proves nothing


def copied(to: Path) -> None:
    """Copy the tracked files as they are now."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name)
    for built in (ROOT / "fsdp_demo").rglob("*.so"):
        shutil.copy(built, to / built.relative_to(ROOT))


def applied(patch: Path, tree: Path, *options: str) -> bool:
    """Whether a patch could be applied to the copy, or, with "-R", taken back."""
    command = ["git", "apply", "-C1", *options, str(patch)]
    return subprocess.run(command, cwd=tree, env={**os.environ, **OUTSIDE}).returncode == 0


OUTSIDE = {"GIT_CEILING_DIRECTORIES": tempfile.gettempdir()}  # the copy is no repository


def outcome(patch: Path, tree: Path) -> str:
    """What became of one fault: `caught`, `NOT CAUGHT`, `does not apply`, or pytest's status."""
    if not applied(patch, tree):
        return "does not apply"
    tests = patch.read_text().splitlines()[1].removeprefix("# tests:").split()
    # bytecode of a file that was changed twice within a second would be taken for current
    env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    ran = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    assert applied(patch, tree, "-R"), patch.name
    if ran.returncode == FAILED:
        return "caught by " + next(
            line.split()[1] for line in ran.stdout.splitlines() if line.startswith("FAILED")
        )
    return "NOT CAUGHT" if ran.returncode == 0 else f"pytest ended with {ran.returncode}"


def main(words: list[str]) -> int:
    """Try the faults; 0 if all are caught."""
    chosen = [
        p for p in sorted(HERE.glob("*.patch")) if not words or any(w in p.stem for w in words)
    ]
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copied(tree)
        for patch in chosen:
            began = time.monotonic()
            found = outcome(patch, tree)
            missed += not found.startswith("caught")
            print(f"{patch.stem:22} {time.monotonic() - began:5.0f} s  {found}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} faults caught")
    return int(missed > 0 or not chosen)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
