"""The numbers of a run: curves for the pictures, key figures for the comparison, and its exchanges
over time: when messages were under way, how long training stood still for them, and what happened
meanwhile.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

from ...errors import counted, size
from ...runlog.files import IslandFiles, Run
from ...runlog.words import duration, short, times

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Curve:
    """Losses of one run, nats per token, against one measure.

    Attributes:
        training: means over the islands that are here. validation: of the evaluations.
    """

    training: Points
    validation: Points


def curve(run: Run, against: str) -> Curve:
    """Losses against "step", "tokens", "seconds" or "bytes_sent". Of several islands that have a
    line of one step, the loss is the mean, and the measure the largest: an island that came back
    may have begun to count anew.
    """
    at: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for island in run.islands:
        for line in island.lines:
            at[line["step"]].append(line)
    training = [
        (max(float(line[against]) for line in lines), fmean(line["loss"] for line in lines))
        for _, lines in sorted(at.items())
        if all(line.get(against) is not None and line.get("loss") is not None for line in lines)
    ]
    validation = [
        (float(event[against]), float(event["loss"]))
        for event in run.islands[0].events
        if event.get("kind") == "evaluation" and event.get(against) is not None
    ]
    return Curve(training, validation)


def far_apart(runs: Sequence[Run]) -> bool:
    """Whether one of these runs has sent so much more than another that only ratios show both."""
    sent = [f.sent for f in map(figures, runs) if f.sent]
    return bool(sent) and max(sent) > 20 * min(sent)


def still(island: IslandFiles) -> Points:
    """(seconds, share of the time since the line before in which training stood still)."""
    found = []
    for a, b in pairwise([{"seconds": 0.0}, *island.lines]):
        took = b["seconds"] - a["seconds"]
        waited = b.get("seconds_waiting", 0.0) - a.get("seconds_waiting", 0.0)
        if took > 0:
            found.append((float(b["seconds"]), min(max(waited / took, 0.0), 1.0)))
    return found


def speed(island: IslandFiles) -> Points:
    """(seconds, tokens per second since the line before), where tokens were counted."""
    lines = [line for line in island.lines if line.get("tokens") is not None]
    return [
        (float(b["seconds"]), (b["tokens"] - a["tokens"]) / (b["seconds"] - a["seconds"]))
        for a, b in pairwise([{"seconds": 0.0, "tokens": 0.0}, *lines])
        if b["seconds"] > a["seconds"] and b["tokens"] > a["tokens"]
    ]


def rates(island: IslandFiles) -> Points:
    """(step, learning rate) of the lines that have one."""
    return [(float(x["step"]), float(x["lr"])) for x in island.lines if x.get("lr") is not None]


def island_rows(run: Run) -> list[list[str]]:
    """A table of the islands that are here, head first."""
    body = ["island|host|starts|last step|loss|sent|standing still|end".split("|")]
    for island in run.islands:
        last = island.lines[-1] if island.lines else {}
        starts = sum(e["kind"] in ("begin", "resume") for e in island.events)
        starts += sum(e["kind"] == "joined" and _of(e, island) for e in island.events)
        share = last.get("seconds_waiting", 0.0) / last["seconds"] if last.get("seconds") else None
        body.append(
            [
                island.name,
                str(island.head.get("host", "-")),
                str(starts),
                f"{last.get('step', 0):,}",
                _or(last.get("loss"), lambda v: f"{v:.3f}"),
                _or(last.get("bytes_sent"), size),
                _or(share, lambda v: f"{v:.1%}"),
                "no" if island.summary is None else "yes",
            ]
        )
    return body


def _of(event: dict[str, Any], island: IslandFiles) -> bool:
    """Whether an event is about the island that wrote it."""
    return event.get("islands") == [island.head.get("island")]


def still_everywhere(run: Run) -> Points:
    """`still`, as the mean over the islands that are here, at the lines that all of them have."""
    each = [still(island) for island in run.islands]
    return [(fmean(x for x, _ in at), fmean(y for _, y in at)) for at in zip(*each, strict=False)]


@dataclass(frozen=True)
class Figures:
    """Key figures of a run, up to its last line. None where nobody knows.

    Attributes:
        held_out: the step of the evaluation that gave `loss`; None where it is of training.
        best: the lowest loss of an evaluation, and its step; None without one.
    """

    name: str
    preset: str
    islands: int
    procs: int
    step: int
    steps: int | None
    tokens: float | None
    seconds: float | None
    loss: float | None
    held_out: int | None
    best: tuple[float, int] | None
    sent: float | None
    full: float | None
    tokens_per_second: float | None
    still: float | None
    equal: bool | None
    ended: bool

    @property
    def shape(self) -> str:
        """Islands and ranks, in words."""
        return f"{counted(self.islands, 'island')} x {counted(self.procs, 'rank')}"

    @property
    def ratio(self) -> float | None:
        """Bytes of a bf16 all-reduce at every step over those sent."""
        return self.full / self.sent if self.full and self.sent else None


def figures(run: Run) -> Figures:
    """Means over the islands that are here; loss of the last evaluation, else of training. Tokens
    and bytes are those of the island that has counted most, since one that came back may have begun
    anew. Bytes, speed and waiting of islands that have ended are those of their summaries, with
    what `finish()` has sent.
    """
    head, last = run.head, [island.lines[-1] for island in run.islands if island.lines]
    summaries = [island.summary for island in run.islands]
    whole = [summary for summary in summaries if summary is not None]
    held = [e for e in run.islands[0].events if e["kind"] == "evaluation" and "loss" in e]
    done = [s for s in whole if "bytes_sent_per_island" in s]
    counted_all = len(done) == len(summaries)
    most = max(done, key=lambda s: s["bytes_sent_per_island"]) if counted_all else {}
    sent, full = most.get("bytes_sent_per_island"), most.get("bytes_full_per_island")
    line = max(last, key=lambda one: one.get("bytes_sent") or 0, default={})
    waited, took = _mean(last, "seconds_waiting"), _mean(last, "seconds")
    share = waited / took if waited is not None and took else None
    equal = [summary.get("digests_equal") for summary in whole]
    return Figures(
        run.name,
        str(head.get("preset", "?")),
        int(head.get("islands", 1)),
        int(head.get("procs", 1)),
        max((line["step"] for line in last), default=0),
        head.get("steps"),
        max((one["tokens"] for one in last if one.get("tokens") is not None), default=None),
        _mean([i.events[-1] for i in run.islands], "seconds") if counted_all else took,
        held[-1]["loss"] if held else _mean(last, "loss"),
        held[-1]["step"] if held else None,
        min(((e["loss"], e["step"]) for e in held), default=None),
        line.get("bytes_sent") if sent is None else sent,
        line.get("bytes_full") if full is None else full,
        (_mean(done, "tokens_per_second") if counted_all else None)
        or _mean(last, "tokens_per_second"),
        share if (known := _mean(done, "wait_share")) is None or not counted_all else known,
        None if not equal or None in equal or len(run.islands) == 1 else all(equal),
        len(whole) == len(summaries),
    )


def _mean(lines: Sequence[dict[str, Any]], name: str) -> float | None:
    known = [float(line[name]) for line in lines if line.get(name) is not None]
    return fmean(known) if known else None


HEAD = (
    "run|preset|shape|steps|tokens|time|loss|sent per island|against all-reduce|tokens/s|"
    "standing still|islands equal"
).split("|")


def comparison(found: Sequence[Figures]) -> list[list[str]]:
    """A table, head first: one row per run. A loss of training, where nothing was evaluated, is
    marked, and one of an evaluation that came before the last step.
    """
    return [HEAD, *map(_row, found)]


def _row(f: Figures) -> list[str]:
    steps = f"{f.step:,}" + (f" of {f.steps:,}" if f.steps and f.steps != f.step else "")
    return [
        f.name,
        f.preset,
        f.shape,
        steps + ("" if f.ended else ", no end"),
        _or(f.tokens, short),
        _or(f.seconds, duration),
        _or(f.loss, lambda v: f"{v:.3f}{_of_loss(f)}"),
        _or(f.sent, size),
        _or(f.ratio, lambda v: f"{times(v)} less"),
        _or(f.tokens_per_second, lambda v: f"{v:,.0f}"),
        _or(f.still, lambda v: f"{v:.1%}"),
        {True: "yes, bit for bit", False: "NO", None: "-" if f.ended else "- (no end)"}[f.equal],
    ]


def _of_loss(f: Figures) -> str:
    if f.held_out is None or f.best is None:
        return " (training)"
    best = f"; best {f.best[0]:.3f} at {f.best[1]:,}" if f.best[1] != f.held_out else ""
    return f" (evaluation, step {f.held_out:,}{best})"


def _or(value: float | None, words: Any) -> str:
    return "-" if value is None else str(words(value))


def byte_rows(run: Run) -> list[list[str]]:
    """A table of bytes by channel, head first, of the rank that wrote them; only the head where no
    island has ended, or nothing was sent."""
    head = [["channel", "sent", "received", "share"]]
    summary = next((i.summary for i in run.islands if i.summary and i.summary.get("bytes")), None)
    if summary is None:
        return head
    ledger = summary["bytes"]
    rows = [*ledger["channels"].items(), ("headers", ledger["headers"]), ("other", ledger["other"])]
    whole = sum(sent for _, (sent, _) in rows)
    if not whole:
        return head
    return head + [
        [name, f"{sent:,} B", f"{received:,} B", f"{sent / whole:.1%}"]
        for name, (sent, received) in rows
    ]


# ---- exchanges over time -----------------------------------------------------------------------

MOST_CHANNELS = 4


class Mark(NamedTuple):
    """How an event is shown: its sign on the page, marker and colour in the pictures, and its words
    in a legend and in the table of events.
    """

    sign: str
    marker: str
    colour: str
    legend: str
    words: str


COLOURS = ("#0b6e99", "#c2570c", "#2a7d3f", "#a63d97", "#b3261e", "#6b6f00", "#5151cf", "#7a4b2b")
TEXT = "#5a6775"
MARKS = {
    "lost": Mark("▼", "v", COLOURS[4], "an island was lost", "island {who} lost"),
    "joined": Mark("▲", "^", COLOURS[2], "an island joined", "island {who} joined"),
    "skipped round": Mark("◆", "D", COLOURS[1], "a round was skipped", "round skipped: {reason}"),
    "checkpoint": Mark("■", "s", TEXT, "a checkpoint", "checkpoint saved"),
    "resume": Mark("▶", ">", COLOURS[0], "a later start goes on", "a later start goes on here"),
    "chosen": Mark("★", "*", COLOURS[3], "auto has chosen the method", "auto has chosen: {reason}"),
}


@dataclass(frozen=True)
class Bar:
    """One exchange on the wire, in seconds; training stood still for the last `waiting` of them."""

    start: float
    end: float
    waiting: float


def timeline_rows(run: Run) -> list[tuple[str, int, list[Bar]]]:
    """(name, colour, bars) of each island and channel; many channels of one are one row."""
    found = []
    for island in run.islands:
        names = sorted({name for e in island.exchanges for name in e.get("channels", ())})
        groups = [[name] for name in names] if len(names) <= MOST_CHANNELS else [names]
        for number, group in enumerate(groups):
            channel = group[0] if len(group) == 1 else f"{len(group)} channels"
            bars = _bars(island, set(group))
            if bars:
                found.append((f"{island.name}, {channel}", number, bars))
    return found


def _bars(island: IslandFiles, channels: set[str]) -> list[Bar]:
    found = []
    for e in island.exchanges:
        start, end = e.get("start"), e.get("end")
        if start is None or end is None or not channels & set(e.get("channels", ())):
            continue
        found.append(Bar(max(start, 0.0), end, min(e.get("waiting", 0.0), end - start)))
    return found


def marks(run: Run) -> list[dict[str, Any]]:
    """The events that are shown, of all islands, in time; what several islands saw is there once
    for each. An island that joined is marked where the others saw it, if any is here."""
    found = [
        {**event, "of": island.name}
        for island in run.islands
        for event in island.events
        if event.get("kind") in MARKS and event.get("seconds") is not None
        if len(run.islands) == 1 or event["kind"] != "joined" or not _of(event, island)
    ]
    return sorted(found, key=lambda event: event["seconds"])


def said(event: dict[str, Any]) -> str:
    """The text of an event that is shown, for the table below the pictures."""
    who = ", ".join(map(str, event.get("islands", ())))
    return MARKS[event["kind"]].words.format(who=who, reason=event.get("reason", ""))
