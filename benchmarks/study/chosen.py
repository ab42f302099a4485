"""The chosen part of a table of the study: which runs it has, and what is known of them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from study.cells import Cell, Run
from study.earlier import TABLES as EARLIER
from study.methods import TUNING_SEEDS, Method
from study.results import Results
from study.stats import Row, loss_of, summarise
from study.tables import TABLES as NOW
from study.texts import load_texts

TABLES = {**NOW, **EARLIER}


class Study:
    """The chosen part of a table: its runs, what is stored of them, and its rows.

    Args:
        changes: of every setting, from the command line.
        only: parts of cells' names, of which one must match; a group's reference is always in, and
            so is the first method.

    Raises:
        ValueError: no such cell, or data that cannot be read.
    """

    def __init__(
        self,
        name: str,
        seeds: range,
        results: Results,
        changes: dict[str, Any] | None = None,
        only: str = "",
    ):
        self.name, self.table, self.results = name, TABLES[name], results
        self.seeds, self.changes = seeds, changes or {}
        parts = [part for word in only.split(",") if (part := word.strip())]

        def meant(name: str) -> bool:
            return not parts or any(part in name for part in parts)

        self.groups = {
            label: cells[:1] + [cell for cell in cells[1:] if meant(cell.name)]
            for label, cells in self.table.groups.items()
            if any(meant(cell.name) for cell in cells)
        }
        methods = self.table.methods
        self.methods: tuple[Method, ...] = tuple(
            m for m in methods if meant(m.published.name) or meant(m.tuned(m.published).name)
        )
        if only and not self.groups and not self.methods:
            raise ValueError(f"--only {only}: no such cell in table {name}; --list shows them")
        if self.methods and methods[0] not in self.methods:
            self.methods = (methods[0], *self.methods)
        setting = dataclasses.replace(self.table.setting, **self.changes)
        load_texts(setting.data, setting.length, setting.held_out)  # refused here, not in a process

    def run(self, cell: Cell, seed: int) -> Run:
        return Run(cell, self.table.at(cell, self.changes), seed)

    def result(self, run: Run) -> dict[str, Any] | None:
        return self.results.get(run)

    def tuning(self) -> list[Run]:
        """The runs of all grids."""
        cells = [cell for method in self.methods for cell in method.grid]
        return [self.run(cell, seed) for cell in cells for seed in TUNING_SEEDS]

    def best(self, method: Method) -> Cell | None:
        """The cell of a method's grid with the least mean loss on the tuning seeds; None before
        they are all there.
        """
        means = {}
        for n, cell in enumerate(method.grid):
            found = [self.result(self.run(cell, seed)) for seed in TUNING_SEEDS]
            if not all(found):
                return None
            mean = sum(loss_of(r) for r in found if r) / len(found)
            means[n] = math.inf if math.isnan(mean) else mean
        return method.tuned(method.grid[min(means, key=means.__getitem__)]) if means else None

    def chosen(self) -> dict[str, str]:
        """Name of a tuned method -> its best cell, where all of its grid is there."""
        found = {}
        for method in self.methods:
            if best := self.best(method):
                tuned = {
                    k: v for k, v in best.changes.items() if method.published.changes.get(k) != v
                }
                told = [f"lr={best.lr:g}", *(f"{k}={v}" for k, v in tuned.items())]
                if s := best.setting:
                    told.append(f"warmup={s.warmup} floor={s.floor:g}")
                found[best.name] = " ".join(told)
        return found

    def cells(self) -> dict[str, list[Cell]]:
        """Group -> its cells, the reference first; with methods that are tuned it is `full`
        tuned.
        """
        if not self.methods:
            return self.groups
        best = [self.best(method) for method in self.methods]
        # without the reference's grid nothing stands beside it
        tuned = [cell for cell in best if cell] if best[0] else []
        published = [m.published for m in self.methods if not m.alone]
        others = [*published, *next(iter(self.groups.values()), [])]
        there = {self.run(cell, 0).key("") for cell in tuned}
        # a row each: the best of a grid may be what was published
        kept = {key: c for c in others if (key := self.run(c, 0).key("")) not in there}
        return {"": [*tuned, *kept.values()]}

    def reported(self) -> list[Run]:
        """The runs of all cells on the seeds that are reported, those of tuned methods first."""
        cells = [cell for part in self.cells().values() for cell in part]
        tuned = [best for m in self.methods if (best := self.best(m))]
        parts = (tuned, [cell for cell in cells if cell not in tuned])
        return [self.run(cell, seed) for part in parts for seed in self.seeds for cell in part]

    def rows(self) -> list[Row]:
        """One row for each cell of which a result is there."""
        rows = []
        for label, cells in self.cells().items():
            found = [self.by_seed(cell) for cell in cells]
            rows += [
                summarise(cell.name, label, results, found[0])
                for cell, results in zip(cells, found, strict=True)
                if results
            ]
        return rows

    def by_seed(self, cell: Cell) -> dict[int, dict[str, Any]]:
        found = {seed: self.result(self.run(cell, seed)) for seed in self.seeds}
        return {seed: result for seed, result in found.items() if result}
