"""What the runs of the study have given: a json each where they were trained, a line each in the
file that the repository keeps.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from study.cells import Run, code_version

FIGURES = Path(__file__).parents[1] / "figures"
KEPT = FIGURES / "study-runs.jsonl"
"""A line is a result: its cell, setting, seed, code, losses, bytes and loss curve."""

ALIKE = FIGURES / "study-codes.json"
"""Groups of code versions whose runs end alike, each with the reason. Runs of one count for all."""

LEFT_OUT = ("does", "processor_seconds", "seconds_waiting")
"""Of what is kept: said by the cell, or true of one machine only."""


class Results:
    """Results by run.

    Args:
        folder: of the json files. version: of the code that trains now; with the ending "-eager"
            nothing is read from the repository.
        kept, alike: files of the repository.
    """

    def __init__(self, folder: Path, version: str = "", kept: Path = KEPT, alike: Path = ALIKE):
        self.folder, self.version, self._kept_at = folder, version or code_version(), kept
        self.versions = [self.version, *same_as(self.version, alike)]
        self._kept = self._read()

    def _read(self) -> dict[str, dict[str, Any]]:
        if not self._kept_at.exists():
            return {}
        lines = self._kept_at.read_text(encoding="utf-8").splitlines()
        return {found["key"]: found for found in map(json.loads, lines)}

    def get(self, run: Run) -> dict[str, Any] | None:
        """The result of a run, by this code or one that ends alike; None if there is none."""
        for version in self.versions:
            key = run.key(version)
            path = self.folder / f"{key}.json"
            if path.exists():
                found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
                return found
            if key in self._kept:
                return self._kept[key]
        return None

    def put(self, run: Run, result: dict[str, Any]) -> None:
        """Store a result, written whole or not at all. An error is one, too."""
        facts = {
            "cell": dataclasses.asdict(run.cell),
            "setting": dataclasses.asdict(run.setting),
            "seed": run.seed,
            "key": run.key(self.version),
            "code": self.version,
            "does": run.cell.config().describe(),
        }
        text = json.dumps({**facts, **result}, indent=1) + "\n"
        write(self.folder / f"{facts['key']}.json", text)

    def states(self, run: Run) -> Path:
        """The folder of a run that is under way (states.py), also where code that ends alike
        has begun it.
        """
        at = [self.folder.parent / "states" / run.key(version) for version in self.versions]
        return next((folder for folder in at if folder.is_dir()), at[0])

    def keep(self, runs: Iterable[Run]) -> int:
        """Add the results of `runs` to the file of the repository; how many are new. Errors stay
        out.
        """
        found = [self.get(run) for run in runs]
        self._kept = self._read()  # another process may have added some
        before = len(self._kept)
        self._kept |= {r["key"]: shortened(r) for r in found if r and "error" not in r}
        lines = [json.dumps(self._kept[key], separators=(",", ":")) for key in sorted(self._kept)]
        write(self._kept_at, "\n".join([*lines, ""]))
        return len(self._kept) - before


def same_as(version: str, alike: Path) -> list[str]:
    """The other code versions of the group that has `version`."""
    groups = json.loads(alike.read_text(encoding="utf-8")) if alike.exists() else []
    return [
        v for group in groups if version in group["codes"] for v in group["codes"] if v != version
    ]


def shortened(result: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a result: losses to 1e-5, the curve without its seconds."""
    out = {k: v for k, v in result.items() if k not in LEFT_OUT}
    out["loss"] = {k: v and round(v, 5) for k, v in result["loss"].items()}
    if curve := result.get("curve"):
        out["curve"] = {
            "tokens": [int(v) for v in curve["tokens"]],
            "bytes": [int(v) for v in curve["bytes"]],
            "loss": [v and round(v, 4) for v in curve["loss"]],
        }
    if rounds := result.get("rounds"):
        out["rounds"] = {k: [round(v, 3) for v in values] for k, values in rounds.items()}
    for name in ("seconds", "drift"):
        if name in out:
            out[name] = float(f"{out[name]:.3g}")
    return _finite(out)


def _finite(value: Any) -> Any:
    """Plain data with None for what is no number: json knows none."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write(path: Path, text: str) -> None:
    """Through a temporary name, so that an interrupt leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
