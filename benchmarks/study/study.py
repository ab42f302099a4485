"""The study: methods side by side at equal tokens, with seeds, on models that a CPU core can train.

    python benchmarks/study/study.py --table main --jobs 2

Trains byte-level Llamas on the Python library's sources through the library itself: `attach`, gloo,
the real payloads; the replicas of a run are threads of one process. Every run (a method with its
settings, and a seed) is stored when it is done, under a key of its configuration and the code, so
that an interrupted table goes on where it stood. Runs are shared between tables, and what the
repository keeps (`benchmarks/figures/study-runs.jsonl`) is not trained again. Seeds are paired: one
seed gives all methods the same initial weights and order of the data. Writes OUTPUT/TABLE.md,
TABLE.json and pictures, and prints the table.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "recipes")]

from study import alike  # noqa: E402
from study.cells import Run, Setting, code_version, parameters  # noqa: E402
from study.chosen import TABLES, Study  # noqa: E402
from study.jobs import train_all  # noqa: E402
from study.results import ALIKE, KEPT, Results, same_as  # noqa: E402
from study.show import publish, show  # noqa: E402
from study.stats import MOST, loss_of  # noqa: E402

PACE = 60 / (parameters("study-small") * 4 * Setting().tokens)
"""Seconds of a core per parameter and token, where nothing is measured yet."""


SAME = 1e-2
"""Nats that one run may end apart on another machine, where bf16 products are made another way:
0.006 was seen (benchmarks/results/study.md). On the same machine runs end equal.
"""


class Progress:
    """Trains what is missing of some runs, stores each result, and says how much time is left."""

    def __init__(self, results: Results, jobs: int, compiled: bool = True):
        self.results, self.jobs, self.compiled = results, jobs, compiled
        self.spent, self.done = 0.0, 0.0  # seconds of a core, and size of what they trained

    def missing(self, runs: Iterable[Run], again: bool = False) -> list[Run]:
        """Each run once whose result is not there; `again`: or is an error."""
        found: dict[str, Run] = {}
        for run in runs:
            known = self.results.get(run)
            if known is None or (again and "error" in known):
                found[run.key("")] = run
            elif "seconds" in known:
                self.learn(run, known["seconds"])
        return list(found.values())

    def learn(self, run: Run, seconds: float) -> None:
        self.spent, self.done = self.spent + seconds, self.done + run.size

    def seconds(self, runs: Iterable[Run]) -> float:
        """What `runs` take on this machine, by what others took."""
        pace = self.spent / self.done if self.done else PACE
        return pace * sum(run.size for run in runs) / self.jobs

    def train(self, runs: list[Run], what: str) -> None:
        # large runs last, and those of one compiled program one after the other
        runs = sorted(runs, key=lambda run: (run.size, run.setting.model))
        left = list(runs)

        def done(run: Run, result: dict[str, Any]) -> None:
            left.remove(run)
            self.results.put(run, result)
            if "error" not in result:
                shutil.rmtree(self.results.states(run), ignore_errors=True)
            end = _last_line(result["error"]) if "error" in result else f"{loss_of(result):.4f}"
            if "seconds" in result:
                self.learn(run, result["seconds"])
                end += f", {result['seconds']:.0f} s"
            count = f"{len(runs) - len(left)}/{len(runs)}"
            rest = f"{clock(self.seconds(left))} left" if left else "done"
            print(f"{what} {count}: {run.cell.name} seed {run.seed}: {end}; {rest}", flush=True)

        train_all(runs, self.jobs, done, self.compiled, self.results.states)


def _last_line(text: str) -> str:
    return "failed: " + text.strip().splitlines()[-1][:200]


def clock(seconds: float) -> str:
    """`2 h 05 min`, `3 min`."""
    minutes = math.ceil(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min"


def show_list(study: Study, progress: Progress) -> None:
    """The cells, how many of their runs are there, and the time of the others; trains nothing."""
    # one run may stand in several groups
    tuning, reported = (
        list({run.key(""): run for run in runs}.values())
        for runs in (study.tuning(), study.reported())
    )
    progress.missing([*tuning, *reported])  # learns the pace
    for title, runs in (("tuning", tuning), ("reported", reported)):
        by_name: dict[str, list[Run]] = {}
        for run in runs:
            by_name.setdefault(run.cell.name, []).append(run)
        for name, of in by_name.items():
            left = progress.missing(of)
            state = f"missing ({clock(progress.seconds(left))})" if left else "there"
            print(f"{title:<10}{name:<62}{len(of) - len(left)}/{len(of)} {state}")
    left = progress.missing([*tuning, *reported])
    # what the grids choose runs as often as what was published
    unknown = [
        study.run(m.published, s) for m in study.methods if not study.best(m) for s in study.seeds
    ]
    total = clock(progress.seconds([*left, *unknown]))
    print(
        f"table {study.name}: {len(left) + len(unknown)} runs are missing, some {total} with "
        f"--jobs {progress.jobs}; code {study.results.version}"
    )
    if len(study.results.versions) == 1:
        print(
            f"kept runs do not count: this code is not in {ALIKE.name}; --verify 2 and --enter WHY "
            "say whether they may"
        )


def verify(study: Study, progress: Progress, count: int) -> bool:
    """Train `count` runs again that the repository keeps, spread over the table. False where one
    fails, ends elsewhere by more than `SAME` or sends another number of bytes, or none is kept.
    """
    there = [run for run in study.reported() if study.result(run)]
    apart: list[str] = []
    furthest = 0.0

    def done(run: Run, result: dict[str, Any]) -> None:
        nonlocal furthest
        known, name = study.result(run) or {}, f"{run.cell.name} seed {run.seed}"
        if "error" in result:
            apart.append(name)
            print(f"{name}: {_last_line(result['error'])}", flush=True)
            return
        before, now = loss_of(known), loss_of(result)
        # what is kept is rounded
        off = abs(before - round(now, 5)) if before == before or now == now else 0.0
        sent = known["bytes_sent"] == result["bytes_sent"]
        furthest = max(furthest, off)
        apart.extend([] if off <= SAME and sent else [name])
        print(
            f"{name}: {before:.5f} by {known['code']}, {now:.5f} now; "
            f"bytes {'equal' if sent else 'differ'}",
            flush=True,
        )

    chosen = there[:: max(1, len(there) // count)][:count]
    if not chosen:
        print(f"table {study.name}: none of its runs is kept, so nothing was verified")
        return False
    train_all(chosen, progress.jobs, done, progress.compiled)
    what = f"differ: {', '.join(apart)}" if apart else f"end as kept, at most {furthest:.5f} apart"
    print(f"table {study.name}: {len(apart) or len(chosen)} of {len(chosen)} runs {what}")
    return not apart


def enter(version: str, why: str, table: str, only: str, jobs: int) -> bool:
    """Enter this code among those whose runs count for each other, if short runs of all cells of
    the table are equal to those of the code that was entered last.
    """
    last = alike.newest(ALIKE)
    known = [last, *same_as(last, ALIKE)]
    if version in known:
        print(f"code {version} is in {ALIKE.name} already")
        return True
    before, now = alike.compare(table, only, jobs)
    count, lines = alike.differences(before, now)
    print("".join(f"{line}\n" for line in lines), end="")
    if before["code"] not in known:
        said = f"the commit that changed {ALIKE.name} last has the code {before['code']}, which is "
        said += "not in it: commit an entry alone, upon the code that it names"
    elif not count:
        said = f"table {table}: no cell has the same configuration in {last} and in {version}"
    elif lines:
        said = f"table {table}: {len(lines)} of {count} short runs differ from those of {last}"
    else:
        alike.enter(version, why, ALIKE)
        print(f"table {table}: {count} short runs equal those of {last}; {version} is entered")
        return True
    print(f"{said}; nothing was entered")
    return False


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--table", default="main", help=f"one or more of {', '.join(TABLES)}, comma between")
    add("--only", default="", help="cells whose name contains one of these texts, comma between")
    add("--seeds", type=int, help="number of seeds, 0, 1, ... (default: the table's)")
    add("--jobs", type=int, default=1, help="processes in parallel, each of one thread")
    add("--list", action="store_true", help="show cells and estimated time; train nothing")
    add("--keep", action="store_true", help="add the results to figures/study-runs.jsonl")
    add("--verify", type=int, metavar="N", help="train N kept runs again, and compare")
    add(
        "--enter",
        metavar="WHY",
        help="add this code to figures/study-codes.json, so that kept runs count for it, if "
        "short runs of all cells are equal to those of the code that was added last",
    )
    add("--retry", action="store_true", help="train again what failed")
    add("--data", help="other text, as of pretrain.py (results of their own)")
    add("--steps", type=int, help="for a trial: fewer steps (results of their own)")
    add("--eager", action="store_true", help="for a trial: without torch.compile")
    add("--no-pictures", action="store_true", help="write no svg")
    add("--output", type=Path, default=Path("outputs/study"))
    args = parser.parse_args()
    unknown = [name for name in args.table.split(",") if name not in TABLES]
    if unknown:
        parser.error(f"--table {unknown[0]}: expected {', '.join(TABLES)}")
    for name in ("jobs", "seeds", "steps", "verify"):
        if (value := getattr(args, name)) is not None and value < 1:
            parser.error(f"--{name} {value}: must be 1 or more")
    if args.seeds is not None and args.seeds > MOST:
        parser.error(f"--seeds {args.seeds}: intervals are known for up to {MOST} seeds")
    if args.enter and "," in args.table:
        parser.error("--enter compares the cells of one --table")
    if args.keep and (args.only or args.steps or args.eager):
        parser.error("--keep publishes whole tables: leave out --only, --steps and --eager")
    if args.keep and bool(args.data) != (args.table == "text"):
        parser.error("--keep: the table text has another text (--data), and no other table has")
    return args


def main() -> int:
    args = parse()
    changes = {k: v for k, v in (("data", args.data), ("steps", args.steps)) if v}
    version = code_version() + ("-eager" if args.eager else "")
    if args.enter:
        return 0 if enter(version, args.enter, args.table, args.only, args.jobs) else 1
    results = Results(args.output / "runs", version)
    if args.verify:
        # by any code that was entered, and from a folder without runs of this one
        results = Results(args.output / "kept alone", alike.newest(ALIKE))
    progress = Progress(results, args.jobs, not args.eager)
    failed = 0
    for name in args.table.split(","):
        seeds = range(args.seeds or TABLES[name].seeds)
        try:
            study = Study(name, seeds, results, changes, args.only)
        except ValueError as error:
            sys.exit(f"study.py: {error}")
        if args.list:
            show_list(study, progress)
            continue
        if args.keep:
            new = results.keep([*study.tuning(), *study.reported()])
            print(f"table {name}: {new} results are new in {KEPT.name}")
            try:
                publish(study)
            except ValueError as error:
                sys.exit(f"study.py: {error}")
            continue
        if args.verify:
            failed += not verify(study, progress, args.verify)
            continue
        progress.train(progress.missing(study.tuning(), args.retry), f"{name} tuning")
        progress.train(progress.missing(study.reported(), args.retry), name)
        show(study, args.output, not args.no_pictures)
        failed += sum(row.failed for row in study.rows())
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
