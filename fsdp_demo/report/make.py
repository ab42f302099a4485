"""Makes the report of runs: html, and on request png and markdown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from . import picture
from .figures import byte_rows, comparison, figures
from .load import Run, load, load_all
from .page import page
from .words import table


def make(
    folders: Sequence[str | Path],
    out: str | Path | None = None,
    png: str | Path | None = None,
    md: str | Path | None = None,
) -> list[Path]:
    """Write the report of the runs in these folders; returns what was written.

    Args:
        out: the html; None: report.html in the folder of the one run, or here for several.
        png: a picture, by matplotlib. md: the comparison as a table.

    Raises:
        ValueError: a folder holds no run, or matplotlib is not there. OSError: a file cannot be
            written.
    """
    runs = load_all(folders)
    out = Path(out) if out else (runs[0].folder if len(runs) == 1 else Path()) / "report.html"
    out.write_text(page(runs), encoding="utf-8")
    written = [out]
    if png is not None:
        picture.draw(runs, png)
        written.append(Path(png))
    if md is not None:
        Path(md).write_text(markdown(runs), encoding="utf-8")
        written.append(Path(md))
    return written


def markdown(runs: Sequence[Run]) -> str:
    """The comparison and what must be known of the runs, markdown."""
    parts = [table(comparison([figures(run) for run in runs]), markdown=True)]
    for run in runs:
        if len(rows := byte_rows(run)) > 1:
            parts.append(f"Bytes of {run.name}:\n\n{table(rows, markdown=True)}")
        parts += [f"* {run.name}: {note}" for note in run.notes]
    return "\n\n".join(parts) + "\n"


def leave(folder: str | Path) -> list[Path]:
    """The report of a run that has just ended, in its own folder: html, and png where matplotlib is
    installed.
    """
    folder = Path(folder)
    load(folder)
    return make([folder], png=folder / "report.png" if picture.available() else None)
