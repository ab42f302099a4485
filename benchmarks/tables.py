"""Tables of benchmarks/results from the json files in benchmarks/figures and docs/figures; and what
the docs and the planner take from the study.

    python benchmarks/tables.py             # print them
    python benchmarks/tables.py --write     # put them between their marks in benchmarks/results

A page holds a table between the lines `<!-- table: NAME -->` and `<!-- end -->`. A test compares
the two (benchmarks/tests/test_figures.py). `about.json` says date, machine and command of each
file. `--write` also writes docs/figures/study-short.json and the study's rows of the planner's
gaps.json, and both ways say whether gaps.json was stale: a plan that users are shown changes then.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "benchmarks"
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "figures"), str(HERE)]

from figure_cells import Rows, printed, write  # noqa: E402

from benchmarks import tables_costs as costs  # noqa: E402
from benchmarks import tables_links as links  # noqa: E402
from benchmarks import tables_study as the_study  # noqa: E402

TABLES: dict[str, Callable[[], Rows]] = {
    **{name: partial(the_study.study, *of) for name, of in the_study.STUDY.items()},
    **{name: partial(the_study.study_muon, *of) for name, of in the_study.MUON.items()},
    **{f"study-length-{n}": partial(the_study.study_length, n) for n in the_study.LENGTHS},
    "study-muon-tuned": the_study.study_muon_tuned,
    "study-choice": the_study.study_choice,
    "study-front": the_study.study_front,
    "study-claims": the_study.study_claims,
    "study-evidence": the_study.study_evidence,
    "study-rounds": the_study.study_rounds,
    "published": costs.published,
    "memory": costs.memory,
    "positions": costs.positions,
    "formats": costs.formats,
    "step": costs.step,
    "zero-times": costs.zero_times,
    "zero-memory": costs.zero_memory,
    "storm": links.storm,
    "storm-kinds": links.storm_kinds,
    "codec": costs.codec,
    "codec-stages": costs.codec_stages,
    "scale": costs.scale,
    "drop": costs.drop,
    "idle": costs.idle,
    "doctor": links.doctor,
    "peers": links.peers,
    "slow-link": links.slow_link,
    "slow-predict": links.slow_predict,
    "uplinks": links.uplinks,
    "slow-delay": links.slow_delay,
}


def pages() -> list[Path]:
    """The files that may hold tables."""
    return sorted((HERE / "results").glob("*.md"))


def main() -> None:
    if sys.argv[1:] not in ([], ["--write"]):
        sys.exit(f"usage: {sys.argv[0]} [--write]")
    if the_study.gaps_are_stale():
        print(f"{the_study.GAPS.relative_to(ROOT)} is stale: the study says something else")
    if sys.argv[1:]:
        the_study.write_gaps()
        the_study.write_short()
        write(TABLES, pages())
    else:
        print(printed(TABLES))


if __name__ == "__main__":
    main()
