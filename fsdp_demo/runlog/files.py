"""The files of a run: their names, their format, and what islands have written in them, whole or
not: a killed run leaves half a line.

docs/report.md lists the files and their keys ("What a run leaves").
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .. import files
from ..errors import counted

log = logging.getLogger("fsdp_demo")

FORMAT = 1
"""Of all files of a run. Another number is refused; a key that is not known is ignored."""

HEAD_FILE, STEPS_FILE = "run.json", "metrics.jsonl"
EXCHANGES_FILE, EVENTS_FILE, SUMMARY_FILE = "exchanges.jsonl", "events.jsonl", "summary.json"

NUMBERS = frozenset(
    (
        *("step", "seconds", "loss", "global_loss", "lr", "tokens", "tokens_per_second"),
        *("bytes_sent", "bytes_full", "seconds_waiting", "missing"),
        *("applied", "start", "end", "waiting", "bytes", "received"),
    )
)
"""The keys of a line whose values are numbers."""


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON; a reader sees the whole file or none."""
    text = json.dumps(value, indent=2) + "\n"
    files.in_one_piece(path, lambda part: part.write_text(text, encoding="utf-8"))


def read_json(path: Path) -> dict[str, Any] | None:
    """An object, None where there is no such file. Raises ValueError: the file holds something
    else.
    """
    try:
        found = files.read_json(path)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}): is it of a run?") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}, expected an object")
    return found


def read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The objects of a file of lines (none: empty), and how many damaged ones were left out."""
    if not path.is_file():
        return [], 0
    found, out = [], 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            value = files.parse_json(line)
        except ValueError:
            value = None
        if isinstance(value, dict):
            found.append(value)
        else:
            out += 1
    return found, out


_refused = set[Path]()


@contextmanager
def spared(path: Path) -> Iterator[None]:
    """Let an OSError of what writes `path` be a warning, once for each path: no log ends a run."""
    try:
        yield
    except OSError as error:
        if path not in _refused:
            _refused.add(path)
            text = "%s cannot be written (%s): training goes on, lines are counted"
            log.warning(text, path, error.strerror or error)


def append(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Append lines, all or none. Raises OSError where the disk takes them not."""
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    with open(path, "ab", buffering=0) as file:
        end = file.tell()
        if file.write(data) < len(data):
            file.truncate(end)
            raise OSError("no space is left")


def keep_until(path: Path, step: int, key: str = "step") -> list[dict[str, Any]]:
    """Drop the lines whose `key` is later than `step`, and half lines; returns what is left."""
    found, half = read_lines(path)
    lines = [line for line in found if line.get(key, 0) <= step]
    if half or len(lines) < len(found):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        with spared(path):
            files.in_one_piece(path, lambda part: part.write_text(text, encoding="utf-8"))
    return lines


def set_aside(folder: Path) -> None:
    """Move files of an earlier training into `earlier-1` (-2, ...), which `load` reads, too."""
    if not read_lines(folder / STEPS_FILE)[0]:
        return
    (place := folder / f"earlier-{len([*folder.glob('earlier-*')]) + 1}").mkdir()
    for name in (HEAD_FILE, STEPS_FILE, EXCHANGES_FILE, EVENTS_FILE, SUMMARY_FILE):
        if (folder / name).exists():
            (folder / name).rename(place / name)
    log.info("the log of an earlier training in this folder is now in %s", place)


# ---- a whole run -------------------------------------------------------------------------------

Lines = list[dict[str, Any]]


@dataclass(frozen=True)
class IslandFiles:
    """The files of one island.

    Attributes:
        head: `run.json`. lines, exchanges, events: see above.
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
        """`run.json` of the first island whose folder is here."""
        return self.islands[0].head

    @property
    def notes(self) -> list[str]:
        """Sentences about what is missing or damaged in the files of this run."""
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
            parts = (*island.lines, *island.exchanges, *island.events)
            if missing := sum(int(p.get("missing", 0)) for p in parts):
                found.append(f"{island.name}: {counted(missing, 'line')} could not be written.")
            if island.half:
                half = counted(island.half, "line")
                found.append(f"{island.name}: {half} left out, cut off or damaged.")
        return found


def load(folder: str | Path) -> Run:
    """The run whose output folder this is, or one island of it. Raises ValueError: there is no run
    in it, or one of another format.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: give the output folder of a run")
    places = sorted({path.parent for path in folder.glob(f"*/{HEAD_FILE}")})
    if (folder / HEAD_FILE).is_file():
        places = [folder]
    if not places:
        raise ValueError(
            f"{folder} holds no run: neither it nor a folder in it has a {HEAD_FILE}, which "
            f"the recipes and the callbacks write{_below(folder)}"
        )
    islands = sorted((_island(place) for place in places), key=lambda i: i.head.get("island", 0))
    return Run(folder.resolve().name, folder, tuple(islands))


def _below(folder: Path) -> str:
    runs = sorted({str(path.parent.parent) for path in folder.glob(f"*/*/{HEAD_FILE}")})
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
    head = read_json(folder / HEAD_FILE) or {}
    if head.get("format") != FORMAT:
        raise ValueError(
            f"{folder / HEAD_FILE} has format {head.get('format')!r}, this release reads "
            f"{FORMAT}: make the report with the release that trained"
        )
    names = (STEPS_FILE, EXCHANGES_FILE, EVENTS_FILE)
    (lines, a), (exchanges, b), (events, c) = (read_lines(folder / name) for name in names)
    return IslandFiles(
        str(head.get("name", folder.name)),
        head,
        _sound(lines, ("step", "seconds")),
        _sound(exchanges, ("step", "channels")),
        _sound(events, ("step", "seconds", "kind")),
        read_json(folder / SUMMARY_FILE),
        a + b + c,
        sum(isinstance(x := line.get("loss"), float) and not math.isfinite(x) for line in lines),
    )


def _sound(lines: Lines, needed: Iterable[str]) -> Lines:
    """The lines without `NUMBERS` that are no finite number: a loss can be NaN, a file can be
    damaged. A line that lacks one of `needed` is left out.
    """
    sound = [{k: v for k, v in one.items() if k not in NUMBERS or _finite(v)} for one in lines]
    return [one for one in sound if all(one.get(key) not in (None, "", []) for key in needed)]


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
