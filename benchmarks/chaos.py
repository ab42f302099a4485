"""A storm over islands that train: what fails, who goes on, who comes back, and what it costs.
Linux, no root, some minutes.

    python benchmarks/chaos.py --islands 3 --events 12 --seed 1 --json chaos.json
    python benchmarks/chaos.py --preset diloco --gap 15
    python benchmarks/chaos.py --kinds kill_island,stop --events 4 --islands 3

Islands are processes that train a small model on the Python library's sources (`chaos_island.py`),
joined over TCP relays of this process. Events come at random moments,
and some on purpose in a change of members, in a join or in a save (`chaos_events.py` has the
kinds). An island that ends by a signal or with status 75 is started again. Then the same steps are
run once more without events.

Printed are, by kind: how many events, after how many those that were not hit went on, the longest
time between two of their steps, the seconds from the end of the cause until a lost victim counts in
a round again. And of the whole run: payloads that were made again with other members, tokens of
completed rounds over those of the undisturbed run at the same step, islands that took part in a
round over those whose process was there, digests of parameters (or anchors) that differ between
islands at one step, and the loss on held-out text beside that of the undisturbed run at as many
tokens. Status 1: an event was not survived, a digest differs, or an island ended by an error.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]

from report import table  # noqa: E402

from benchmarks.chaos_events import KINDS, Event, Storm, plan  # noqa: E402
from benchmarks.chaos_facts import (  # noqa: E402
    Tape,
    at_tokens,
    draw_storm,
    middle,
    of_kind,
    returned,
    stalls,
    survived,
    unexpected,
)
from benchmarks.chaos_lab import FRESH, Lab  # noqa: E402
from benchmarks.common import Parser, processor  # noqa: E402
from fsdp_demo import preset  # noqa: E402

SETTINGS: dict[str, dict[str, Any]] = {"streaming_diloco": {"period": 20, "layers": 2, "delay": 3}}
PERIOD = 10  # of other presets that have one: their published ones are longer than a storm
MARGIN = 3.0
"""Seconds ahead of which all are told the step after which they finish."""

Report = dict[str, Any]


def settings(name: str) -> dict[str, Any]:
    """Changes of a preset, so that a storm has many rounds."""
    if name in SETTINGS:
        return SETTINGS[name]
    periods = [c.schedule.sync_every for c in preset(name).channels]
    return {"period": PERIOD} if min(periods) > 1 else {}


# ---- running -----------------------------------------------------------------------------------


def storm(args: argparse.Namespace, folder: Path, events: Sequence[Event]) -> Report:
    """All events, then an end of all islands at one step; what was seen."""
    lab = _lab(args, folder, args.pad, 0)
    weather, trouble = Storm(lab, events, _say), ""
    try:
        lab.start()
        begun = "the first steps of all islands"
        _until(weather, lambda: all(s.step >= 5 for s in lab.seen.values()), args.start, begun)
        weather.run(args.patience)
        _until(weather, lambda: not weather.later, args.patience, "the last event to be over")
        weather.wait(time.monotonic() + FRESH)  # until who was hit last is known to be
        _settle(weather, args)
        steps = [seen.step for seen in lab.seen.values()]
        lab.order("finish", str(max(steps) + max(20, round(MARGIN / max(args.pad, 0.02)))))
        _until(weather, lambda: _ended(lab), args.patience, "the islands to finish")
    except RuntimeError as error:
        trouble = str(error)
        _say(f"the storm ends early: {trouble}")
        weather.tick()
    except BaseException:  # Ctrl-C
        lab.close()
        raise
    return _closed(lab, events, trouble)


def undisturbed(args: argparse.Namespace, folder: Path, steps: int) -> Report:
    """As many steps without events."""
    lab, trouble = _lab(args, folder, 0.0, steps), ""
    try:
        lab.start()
        _until(
            Storm(lab, [], _say),
            lambda: _ended(lab),
            args.start + 10 * args.patience,
            "the undisturbed run",
        )
    except RuntimeError as error:
        trouble = str(error)
        _say(f"the undisturbed run: {trouble}")
    except BaseException:
        lab.close()
        raise
    return _closed(lab, [], trouble)


def _lab(args: argparse.Namespace, folder: Path, pad: float, steps: int) -> Lab:
    changes = settings(args.preset) | ({"backup_islands": args.backup} if args.backup else {})
    words = ["--preset", args.preset, "--settings", json.dumps(changes)]
    words += ["--pad", str(pad), "--slow", str(args.slow), *["--turns"] * args.turns]
    words += ["--seed", str(args.seed)]
    words += ["--steps", str(steps), "--save-every", str(args.save_every), "--lr", str(args.lr)]
    return Lab(
        folder,
        args.islands,
        args.ranks,
        words,
        args.dead,
        not args.no_restart,
        not args.no_relays,
        args.store_delay / 1000,
    )


def _closed(lab: Lab, events: Sequence[Event], trouble: str) -> Report:
    """End all; the facts as JSON values. What still ran was not told to end: it has no status."""
    ends, lives = time.monotonic(), [life.facts() for life in lab.lives]
    if trouble:
        lab.ask_where()
    lab.close()
    said = [{**asdict(e), "lives": {str(s): n for s, n in e.lives.items()}} for e in events]
    return {"facts": lab.facts, "lives": lives, "ends": ends, "events": said, "trouble": trouble}


def _until(weather: Storm, done: Any, seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not done():
        weather.tick()
        if time.monotonic() > end:
            raise RuntimeError(f"waited {seconds:g} s for {what}")


def _settle(weather: Storm, args: argparse.Namespace) -> None:
    """Give victims the time to come back."""
    lab = weather.lab
    try:
        _until(
            weather,
            lambda: all(lab.training(s) or _gone(lab, s) for s in range(args.islands)),
            args.patience,
            "victims to come back",
        )
    except RuntimeError as error:
        _say(str(error))


def _gone(lab: Lab, slot: int) -> bool:
    return lab.now[slot].status is not None


def _ended(lab: Lab) -> bool:
    return all(_gone(lab, slot) for slot in lab.now)


def _say(text: str) -> None:
    print(f"  {time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


# ---- numbers -----------------------------------------------------------------------------------


def evaluate(told: Report, calm: Report | None) -> Report:
    """The numbers of a storm, and of an undisturbed run beside it."""
    tape = Tape(told["facts"], told["lives"], told["ends"])
    struck = [e for e in told["events"] if not e["skipped"]]
    for event, stall in zip(struck, stalls(tape, struck), strict=True):
        event |= {
            "stall_s": stall,
            "rejoin_s": returned(tape, event, struck),
            "failed": survived(tape, event, struck),
        }
    rejoins = [t for e in struck for t in e["rejoin_s"]]
    mismatches, losses, tokens = tape.mismatches(), tape.losses(), tape.committed()
    out: Report = {
        "events": len(struck),
        "by_kind": {
            kind: of_kind([e for e in struck if e["kind"] == kind])
            for kind in dict.fromkeys(e["kind"] for e in struck)
        },
        "survived": sum(not e["failed"] for e in struck),
        "skipped": len(told["events"]) - len(struck),
        "longest_stall_s": max((e["stall_s"] for e in struck), default=0.0),
        "rejoin_s": middle(rejoins),
        "rejoin_s_longest": max(filter(math.isfinite, rejoins), default=None),
        "not_back": sum(math.isinf(t) for t in rejoins),
        "rounds": len(tape.rounds),
        "late": sum(len(r.late) for r in tape.rounds),
        "seconds": round(tape.ends - min(f["time"] for f in told["facts"]), 1),
        "rounds_repeated": sum(r.again for r in tape.rounds),
        "tokens": tokens,
        "committed_share": None,
        "participating_share": tape.participating(),
        "digests_equal": not mismatches,
        "digests_compared": tape.compared(),
        "begun_anew": max(len(tape.begun) - 1, 0),
        "mismatches": mismatches[:20],
        "unexpected": unexpected(told["lives"]),
        "failures": [f"{e['kind']}: {e['failed']}" for e in struck if e["failed"]],
        "trouble": told["trouble"],
        "steps": max((f["step"] for f in told["facts"] if f["what"] == "step"), default=0),
        "failed_saves": sum(
            f["failed"] for f in told["facts"] if f["what"] == "saved" and f["rank"] == 0
        ),
        "loss": losses[-1][1] if losses else None,
        "loss_undisturbed": None,
    }
    if calm is not None:
        quiet = Tape(calm["facts"], calm["lives"], calm["ends"])
        by_step = [(float(step), float(count)) for step, count in quiet.tokens_by_step()]
        whole = at_tokens(by_step, min(out["steps"], by_step[-1][0]))
        out["committed_share"] = tokens / whole if whole else None
        out["loss_undisturbed"] = at_tokens(quiet.loss_by_tokens(), min(tokens, quiet.committed()))
    return out


def good(found: Report, restarts: bool) -> bool:
    """Whether everything was survived, in step, and without an error."""
    back = not restarts or not found["not_back"]
    return (
        found["survived"] == found["events"]
        and found["digests_equal"]
        and back
        and not (found["unexpected"] or found["trouble"])
    )


# ---- printing ----------------------------------------------------------------------------------


def show(found: Report, args: argparse.Namespace) -> str:
    import torch

    def number(value: float | None, form: str = ".1f") -> str:
        return "-" if value is None else format(value, form)

    head = ["kind", "events", "survived", "longest stall s", "lost", "back after s", "not back"]
    rows = [head]
    lost = sum(k["lost"] for k in found["by_kind"].values())
    for kind, k in [*found["by_kind"].items(), ("all", {**found, "lost": lost})]:
        cells = [
            k["events"],
            k["survived"],
            number(k["longest_stall_s"]),
            k["lost"],
            number(k["rejoin_s"]),
            k["not_back"],
        ]
        rows.append([kind, *map(str, cells)])
    share = number(found["committed_share"], ".1%")
    lines = [
        f"{args.islands} islands x {args.ranks} ranks, {args.preset}, seed {args.seed}, dead "
        f"{args.dead:g} s, mean gap {args.gap:g} s, "
        f"steps of {args.pad:g} s and more, store {args.store_delay:g} ms away; {processor()}, "
        f"{len(os.sched_getaffinity(0))} cores, torch {torch.__version__}",
        table(rows),
        f"rounds {found['rounds']}, made again {found['rounds_repeated']}, late in "
        f"{found['late']}; steps {found['steps']} in {found['seconds']:g} s, "
        "tokens of completed rounds "
        f"{found['tokens']} ({share} of undisturbed)",
        f"participating / alive {found['participating_share']:.1%}; digests compared at "
        f"{found['digests_compared']} steps, "
        f"{len(found['mismatches'])} differ; saves that failed {found['failed_saves']}; begun anew "
        f"{found['begun_anew']} times",
        f"loss {number(found['loss'], '.4f')}, undisturbed at as many tokens "
        f"{number(found['loss_undisturbed'], '.4f')}",
    ]
    return "\n".join(lines + [f"! {text}" for text in _complaints(found)])


def _complaints(found: Report) -> list[str]:
    skipped = [f"{found['skipped']} events did not come"] if found["skipped"] else []
    return [
        *found["failures"],
        *found["mismatches"],
        *found["unexpected"],
        *skipped,
        *([found["trouble"]] if found["trouble"] else []),
    ]


# ---- the command -------------------------------------------------------------------------------


def _parser() -> Parser:
    parser = Parser(description=__doc__.splitlines()[0], epilog="\n".join(__doc__.splitlines()[2:]))
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--islands", type=int, default=3)
    parser.add_argument(
        "--ranks", type=int, default=1, help="of each island; more than one: torchrun and FSDP2"
    )
    parser.add_argument("--events", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0, help="of the events and of the data")
    parser.add_argument("--preset", default="demo", help=f"with shorter periods: {PERIOD} steps")
    parser.add_argument(
        "--kinds",
        default=",".join(KINDS),
        metavar="A,B",
        help=f"out of {', '.join(KINDS)} (default: all)",
    )
    parser.add_argument(
        "--gap",
        type=float,
        default=15.0,
        help="mean seconds between events; one that would hit the last island waits",
    )
    parser.add_argument("--dead", type=float, default=10.0, help="ISLAND_DEAD, seconds")
    parser.add_argument(
        "--pad", type=float, default=0.05, help="seconds that a step takes at least"
    )
    parser.add_argument("--slow", type=float, default=1.0, help="speed of one island: the last")
    parser.add_argument("--turns", action="store_true", help="the slow one changes in each round")
    parser.add_argument("--backup", type=int, default=0, help="backup_islands")
    parser.add_argument("--lr", type=float, default=0.0, help="default: the preset's published one")
    parser.add_argument(
        "--save-every", type=int, default=50, help="steps between checkpoints; 0: none"
    )
    parser.add_argument("--no-restart", action="store_true", help="victims stay away")
    parser.add_argument(
        "--no-relays",
        action="store_true",
        help="connect directly: no kinds that need a link to be hurt",
    )
    parser.add_argument(
        "--store-delay",
        type=float,
        default=0.0,
        metavar="MS",
        help="milliseconds of a round trip to the store: it is far away",
    )
    parser.add_argument(
        "--start", type=float, default=120.0, help="seconds for the start of all islands"
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=90.0,
        help="seconds for a victim's return, and for the end",
    )
    parser.add_argument(
        "--undisturbed",
        type=Path,
        metavar="FILE",
        help="facts of the undisturbed run; written if it does not exist",
    )
    parser.add_argument("--no-undisturbed", action="store_true", help="leave that run out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the numbers")
    parser.add_argument(
        "--picture",
        type=Path,
        metavar="FILE",
        help="islands over time as svg; needs matplotlib",
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep logs and facts there")
    return parser


def _checked(parser: Parser) -> argparse.Namespace:
    args = parser.parse_args()
    unknown = sorted(set(args.kinds.split(",")) - set(KINDS))
    if unknown:
        parser.error(f"--kinds {','.join(unknown)}: allowed are {', '.join(KINDS)}")
    if (
        args.islands < 2
        or args.ranks < 1
        or args.events < 0
        or args.dead < 2
        or args.gap < 0
        or args.pad < 0
        or not 0 < args.slow <= 1
        or args.store_delay < 0
    ):
        parser.error(
            "--islands from 2, --ranks from 1, --dead from 2; --events, --gap, --pad and "
            "--store-delay from 0; --slow above 0 and up to 1"
        )
    if not sys.platform.startswith("linux"):
        parser.error(
            "needs Linux: islands have addresses of their own in 127.0.0.0/8, and are found "
            "through /proc"
        )
    try:
        preset(args.preset, backup_islands=args.backup)
    except ValueError as error:
        parser.error(f"--preset: {error}")
    return args


def main() -> int:
    args = _checked(_parser())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = args.keep or Path(tempfile.mkdtemp(prefix="chaos-"))
    shutil.rmtree(folder, ignore_errors=True)
    try:
        told = storm(
            args,
            folder / "storm",
            plan(args.events, args.kinds.split(","), args.gap, args.seed, bool(args.save_every)),
        )
        (folder / "storm" / "told.json").write_text(json.dumps(told), encoding="utf-8")
        found = evaluate(told, _calm(args, folder, told))
    finally:
        if args.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    print(show(found, args))
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if args.picture is not None:
        title = (
            f"{args.preset}: {found['events']} events on {args.islands} islands, one each "
            f"{args.gap:g} s"
        )
        tape = Tape(told["facts"], told["lives"], told["ends"])
        draw_storm(tape, told["events"], args.islands, title, args.picture)
    return 0 if good(found, not args.no_restart) else 1


def _calm(args: argparse.Namespace, folder: Path, told: Report) -> Report | None:
    """The undisturbed run's facts, from a file if there is one."""
    if args.undisturbed is not None and args.undisturbed.is_file():
        saved: Report = json.loads(args.undisturbed.read_text(encoding="utf-8"))
        return saved
    if args.no_undisturbed:
        return None
    steps = max((f["step"] for f in told["facts"] if f["what"] == "step"), default=0)
    _say(f"now {steps} steps without events")
    calm = undisturbed(args, folder / "undisturbed", steps)
    if args.undisturbed is not None:
        args.undisturbed.write_text(json.dumps(calm), encoding="utf-8")
    return calm


if __name__ == "__main__":
    sys.exit(main())
