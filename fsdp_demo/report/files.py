"""The files of a run: their names, their format, and lines of JSON that a killed run has left.

| file, in the folder of an island | a line or object |
|---|---|
| `run.json` | what runs: see `HEAD` |
| `metrics.jsonl` | every so many steps: see `STEP` |
| `exchanges.jsonl` | an exchange that has ended: see `EXCHANGE` |
| `events.jsonl` | something that happened: see `EVENT` |
| `summary.json` | written at the end |
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .. import files

FORMAT = 1
"""Of all files of a run. Another number is refused; a key that is not known is ignored."""

HEAD_FILE, STEPS_FILE = "run.json", "metrics.jsonl"
EXCHANGES_FILE, EVENTS_FILE, SUMMARY_FILE = "exchanges.jsonl", "events.jsonl", "summary.json"

HEAD = {
    "format": "1",
    "name": "of the island",
    "island": "its number",
    "islands": "expected at the start",
    "procs": "ranks of the island",
    "preset": "name",
    "config": "the whole configuration as yaml",
    "chosen_because": "of `auto`: what was measured, and why this method; else empty",
    "steps": "optimizer steps of the job; null where nobody knows",
    "parameters": "numbers of the whole model",
    "began": "when, seconds since 1970",
    "facts": "what else the script says of the run",
}
STEP = {
    "step": "optimizer steps of the job so far",
    "seconds": "since the start of the job, evaluations counted, pauses between starts not",
    "loss": "mean over this island's ranks and the steps since the line before",
    "global_loss": "mean over all islands at the last exchange, or null",
    "tokens": "of all islands so far",
    "tokens_per_second": "of all islands, since the start, evaluations not counted",
    "bytes_sent": "by this island to the others so far",
    "bytes_full": "what a bf16 ring all-reduce at every step would have sent by now",
    "seconds_waiting": "for which training stood still so far, mean over the ranks",
}
EXCHANGE = {
    "step": "in which the message left, counted from 0",
    "applied": "in which its mean was applied",
    "channels": "names",
    "start": "seconds since the start of the job, or null",
    "end": "the same",
    "waiting": "seconds for which training stood still for it",
    "bytes": "sent by the first rank of the island",
    "received": "by that rank",
    "islands": "numbers of those that took part; empty where that is not known",
}
EVENT = {
    "kind": "begin, resume, evaluation, checkpoint, lost, joined, skipped round, chosen, finish",
    "step": "optimizer steps so far",
    "seconds": "since the start of the job",
    "islands": "numbers, of lost and joined",
    "loss": "of an evaluation, with tokens and bytes_sent at that time",
    "reason": "of a skipped round, and of a method that `auto` has chosen",
}


def write_json(path: Path, value: Any) -> None:
    """In one piece: who reads sees the whole file or none."""
    text = json.dumps(value, indent=2) + "\n"
    files.in_one_piece(path, lambda part: part.write_text(text, encoding="utf-8"))


def read_json(path: Path) -> dict[str, Any] | None:
    """An object, None where there is no such file.

    Raises:
        ValueError: the file holds something else.
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
    """The objects of a file of lines, and how many lines were left out: half a line that a killed
    run has left, or what is no object. No file: no lines.
    """
    if not path.exists():
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


def keep_until(path: Path, step: int, key: str = "step") -> list[dict[str, Any]]:
    """Drop the lines whose `key` is later than `step`, and half lines; returns what is left."""
    lines = [line for line in read_lines(path)[0] if line.get(key, 0) <= step]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return lines
