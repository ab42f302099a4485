"""Reads the folder of a run: what its islands have written, whole or not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import counted
from . import files

Lines = list[dict[str, Any]]


@dataclass(frozen=True)
class IslandFiles:
    """What one island has left.

    Attributes:
        head: `run.json`. lines, exchanges, events: see `files.py`.
        summary: None where the run was killed, or goes on.
        half: lines that were left out since they are not whole.
        diverged: lines of metrics whose loss is NaN or infinite.
    """

    name: str
    head: dict[str, Any]
    lines: Lines
    exchanges: Lines
    events: Lines
    summary: dict[str, Any] | None
    half: int
    diverged: int


@dataclass(frozen=True)
class Run:
    """One run, of which some islands' folders may be elsewhere.

    Attributes:
        name: for legends. islands: in the order of their numbers.
    """

    name: str
    folder: Path
    islands: tuple[IslandFiles, ...]

    @property
    def head(self) -> dict[str, Any]:
        """Of the first island that is here."""
        return self.islands[0].head

    @property
    def notes(self) -> list[str]:
        """What a reader must know of this run, as sentences."""
        found, expected = [], int(self.head.get("islands", 1))
        if len(self.islands) < expected and not self.head.get("facts", {}).get("mesh"):
            here = ", ".join(i.name for i in self.islands)
            found.append(f"{len(self.islands)} of {counted(expected, 'island')} here: {here}.")
        steps = self.head.get("steps")
        for island in self.islands:
            if not island.lines:
                found.append(f"{island.name} has no line of metrics yet.")
            elif island.summary is None:
                last, of = island.lines[-1]["step"], f" of {steps}" if steps else ""
                found.append(f"{island.name} has no end: its last line is of step {last}{of}.")
            if island.diverged:
                lines = counted(island.diverged, "line")
                found.append(f"{island.name}: the loss of {lines} is NaN or infinite, not drawn.")
            if island.half:
                half = counted(island.half, "line")
                found.append(f"{island.name}: {half} left out, cut off or damaged.")
        return found


def load(folder: str | Path) -> Run:
    """The run whose output folder this is, or one island of it.

    Raises:
        ValueError: there is no run in it, or one of another format.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: give the output folder of a run")
    places = sorted({path.parent for path in folder.glob(f"*/{files.HEAD_FILE}")})
    if (folder / files.HEAD_FILE).is_file():
        places = [folder]
    if not places:
        raise ValueError(
            f"{folder} holds no run: neither it nor a folder in it has a {files.HEAD_FILE}, which "
            f"the recipes and ExchangeCallback write{_below(folder)}"
        )
    islands = sorted((_island(place) for place in places), key=lambda i: i.head.get("island", 0))
    return Run(folder.resolve().name, folder, tuple(islands))


def _below(folder: Path) -> str:
    runs = sorted({str(path.parent.parent) for path in folder.glob(f"*/*/{files.HEAD_FILE}")})
    return f"; there are runs one folder below, as in: fsdp-demo report {runs[0]}" if runs else ""


def load_all(folders: Sequence[str | Path]) -> list[Run]:
    """Several runs, with names that tell them apart. Raises as `load`."""
    runs = [load(folder) for folder in folders]
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return runs
    found: list[Run] = []
    for number, run in enumerate(runs):
        name = "/".join(run.folder.resolve().parts[-2:])
        taken = {other.name for other in found}
        found.append(replace(run, name=f"{name} ({number + 1})" if name in taken else name))
    return found


def _island(folder: Path) -> IslandFiles:
    head = files.read_json(folder / files.HEAD_FILE) or {}
    if head.get("format") != files.FORMAT:
        raise ValueError(
            f"{folder / files.HEAD_FILE} has format {head.get('format')!r}, this release reads "
            f"{files.FORMAT}: make the report with the release that trained"
        )
    names = (files.STEPS_FILE, files.EXCHANGES_FILE, files.EVENTS_FILE)
    (lines, a), (exchanges, b), (events, c) = (files.read_lines(folder / name) for name in names)
    return IslandFiles(
        str(head.get("name", folder.name)),
        head,
        _sound(lines, files.STEP, ("step", "seconds")),
        [e for e in _sound(exchanges, files.EXCHANGE, ("step",)) if e.get("channels")],
        [e for e in _sound(events, files.EVENT, ("step", "seconds")) if e.get("kind")],
        files.read_json(folder / files.SUMMARY_FILE),
        a + b + c,
        sum(isinstance(x := line.get("loss"), float) and not math.isfinite(x) for line in lines),
    )


_TEXTS = ("channels", "islands", "kind", "reason")


def _sound(lines: Lines, keys: Iterable[str], needed: Iterable[str]) -> Lines:
    """The lines without values of `keys` that are no finite number: a loss can be NaN, a file can
    be damaged. A line that lacks one of `needed` is left out.
    """
    numbers = set(keys).difference(_TEXTS)
    sound = [{k: v for k, v in one.items() if k not in numbers or _finite(v)} for one in lines]
    return [one for one in sound if all(key in one for key in needed)]


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
