"""One table of several runs: `python recipes/compare.py OUTPUT full demo diloco` reads
OUTPUT/NAME/summary.json of each.

Writes the table to OUTPUT/compare.md and the summaries to OUTPUT/compare.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from report import size, table

HEAD = [
    "preset",
    "validation loss",
    "sent per island",
    "ratio to bf16 all-reduce",
    "tokens/s",
    "time waiting",
]


def row(name: str, summary: dict) -> list[str]:
    ratio = f"{summary['ratio']:.3g} x less" if summary["ratio"] else "-"
    speed, waiting = f"{summary['tokens_per_second']:.0f}", f"{100 * summary['wait_share']:.0f} %"
    chosen = summary["preset"]
    return [
        f"{name}: {chosen}" if name == "auto" else name,
        f"{summary['loss_end']:.3f}",
        size(summary["bytes_sent_per_island"]),
        ratio,
        speed,
        waiting,
    ]


def main(arguments: list[str]) -> str:
    """The table as text, aligned; `arguments` are the folder and the names of the runs in it."""
    folder, names = Path(arguments[0]), arguments[1:]
    found = {
        name: json.loads((folder / name / "summary.json").read_text(encoding="utf-8"))
        for name in names
    }
    rows = [HEAD, *(row(name, summary) for name, summary in found.items())]
    (folder / "compare.md").write_text(table(rows, markdown=True) + "\n", encoding="utf-8")
    (folder / "compare.json").write_text(
        json.dumps(list(found.values()), indent=2) + "\n", encoding="utf-8"
    )
    return table(rows)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(f"usage: {sys.argv[0]} OUTPUT NAME [NAME...]")
    print(main(sys.argv[1:]))
