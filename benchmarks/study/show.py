"""What the study shows of a table: text, json and pictures."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

from report import table

from study.cells import Run, parameters
from study.chosen import Study
from study.methods import TUNING_SEEDS
from study.results import FIGURES, write
from study.stats import HEAD, Row, loss_of

FEW = 8
"""Rows of one group from which on a table has pictures in the documents."""


def caption(study: Study) -> str:
    setting = dataclasses.replace(study.table.setting, **study.changes)
    size = parameters(setting.model) / 1e6
    trials = sorted({len(method.grid) for method in study.methods})
    tuned = (
        f" Tuned: the best of {' to '.join(map(str, dict.fromkeys((trials[0], trials[-1]))))} "
        f"trials of each method on the seeds {', '.join(map(str, TUNING_SEEDS))}."
        if trials
        else ""
    )
    return (
        f"Table {study.name}: {study.table.question}. Byte-level Llama of {size:.2f} M parameters, "
        f"{setting.data}, {setting.steps} steps of {setting.batch} x {setting.length} bytes, "
        f"{setting.tokens:,} tokens per replica, unless a row says otherwise. Seeds "
        f"{study.seeds[0]} to {study.seeds[-1]}, paired; the first row of a group is its "
        f"reference.{tuned} Cosine with warm-up, norm clipped at 1. Validation loss in nats per "
        f"byte, {setting.held_out} rows, of what all replicas hold at the end. Bytes against a "
        f"ring all-reduce of bf16 gradients at every step. Code {study.results.version}, "
        f"{time.strftime('%Y-%m-%d')}."
    )


def show(study: Study, output: Path, pictures: bool) -> None:
    """Print a table of what is there and write it as markdown, json and pictures."""
    rows = study.rows()
    if not rows:
        return
    lines = [["group", *HEAD], *([r.group, *r.cells()] for r in rows)]
    text = caption(study)
    print(f"\n{text}\n\n{table(lines)}\n", flush=True)
    write(output / f"{study.name}.md", f"{text}\n\n{table(lines, markdown=True)}\n")
    write(output / f"{study.name}.json", as_json(study, rows))
    if pictures:
        draw(study, rows, output)


def publish(study: Study) -> None:
    """Write a table into the folder of figures, and its pictures beside the pages of results; the
    one that docs/study.md shows goes there.

    Raises:
        ValueError: fewer results than are published.
    """
    path = FIGURES / f"study-{study.name}.json"
    if rows := study.rows():
        before = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
        had, has = sum(row["seeds"] for row in before), sum(row.seeds for row in rows)
        if has < had:
            raise ValueError(
                f"{path.name} has {had} results of rows, and only {has} are there now: give as "
                "many --seeds as it has, and train what --list says is missing"
            )
        write(path, as_json(study, rows))
        if len(rows) >= FEW and len({row.group for row in rows}) == 1:
            results = FIGURES.parent / "results"
            draw(study, rows, results, "study-")
            if (of_docs := results / "study-main-bytes.svg").exists():
                of_docs.replace(FIGURES.parents[1] / "docs" / "pictures" / of_docs.name)


def as_json(study: Study, rows: list[Row]) -> str:
    """A table with what each row and each choice of the grids was made from."""
    whole = {
        "table": study.name,
        "code": study.results.version,
        "caption": caption(study),
        "rows": [_plain(dataclasses.asdict(row)) for row in rows],
        "tuned": study.chosen(),
        "runs": keys(study, study.reported()),
        "tuning": keys(study, study.tuning()),
    }
    return json.dumps(whole, indent=1) + "\n"


def _plain(value: Any) -> Any:
    """Plain data with None for what is not a number."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    return None if value != value else value


def keys(study: Study, runs: list[Run]) -> dict[str, float | None]:
    """Key -> final loss of each run that is there; None: it diverged or failed."""
    found = [known for run in runs if (known := study.result(run))]
    return {known["key"]: None if (v := loss_of(known)) != v else v for known in found}


def draw(study: Study, rows: list[Row], output: Path, prefix: str = "") -> None:
    """Three pictures of a table; none without matplotlib."""
    try:
        from study import plot
    except ImportError:
        return
    plot.over_bytes(rows, output / f"{prefix}{study.name}-bytes.svg")
    plot.intervals(rows, output / f"{prefix}{study.name}-intervals.svg")
    first = study.seeds[0]
    cells = [cell for part in study.cells().values() for cell in part]
    published = [] if not study.methods else [m.published for m in study.methods]
    curves = {
        cell.name: known["curve"]
        for cell in cells
        if cell not in published
        if (known := study.result(study.run(cell, first))) and "curve" in known
    }
    plot.over_tokens(curves, output / f"{prefix}{study.name}-tokens.svg")
