"""What the facts of a storm say: the numbers of `chaos.py`. No processes here."""

from __future__ import annotations

import bisect
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import IO, Any

Fact = dict[str, Any]

LAST = 8
"""Messages and steps at the end of a life that was lost, which count only where nobody else tells
of them: an island may have acted on a message that the others then settled without it. That
state is thrown away with it."""


APART = 5.0
"""Seconds between two islands that begin, from which on they do not begin together."""


@dataclass
class Round:
    """One payload on which the islands have agreed."""

    number: int
    step: int
    first: float  # when the first island had it
    slots: tuple[int, ...]
    counted: tuple[int, ...]
    late: tuple[int, ...] = ()
    again: bool = False
    changed: bool = False  # settled in a change of members
    told: int = 0
    unlike: bool = False  # islands told different sets


@dataclass
class Tape:
    """The facts of one run, put in order.

    Args:
        facts: lines of all ranks. lives: of all islands, as `chaos_lab.Life.facts` has them.
    """

    facts: Sequence[Fact]
    lives: Sequence[Fact]
    ends: float = 0.0  # when the run was over
    rounds: list[Round] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ends = self.ends or max((f["time"] for f in self.facts), default=0.0)
        # of the first rank, by slot and life
        self.steps: dict[tuple[int, int], list[Fact]] = defaultdict(list)
        tokens: dict[tuple[int, int, int], int] = {}
        self.lost = {(f["slot"], f["life"]) for f in self.lives if f["status"] not in (None, 0)}
        for f in self.facts:
            if f["what"] == "step":
                # once, though two lives may have taken it
                tokens[f["slot"], f["rank"], f["step"]] = f["tokens"]
                if f["rank"] == 0:
                    self.steps[f["slot"], f["life"]].append(f)
        found: dict[tuple[int, int], Round] = {}
        messages = [f for f in self.facts if f["what"] == "message" and f["rank"] == 0]
        for f in [*self._firm(messages, "n"), *self._firm(messages, "n", last=True)]:
            self._add(found, f)
        self.rounds = [found[n] for n in sorted(found)]
        # by slot: (step, tokens of a rank)
        self.tokens: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for (slot, _, step), count in tokens.items():
            self.tokens[slot].append((step, count))

    def _firm(self, facts: Sequence[Fact], key: str, last: bool = False) -> list[Fact]:
        """What lives have told that went on for a while after it; or, `last`, only the others,
        where nobody else tells of it.
        """
        ends: dict[tuple[int, int], int] = {}
        for f in facts:
            ends[f["slot"], f["life"]] = max(ends.get((f["slot"], f["life"]), 0), f[key])
        shaky = [
            (f["slot"], f["life"]) in self.lost and f[key] > ends[f["slot"], f["life"]] - LAST
            for f in facts
        ]
        firm = [f for f, s in zip(facts, shaky, strict=True) if not s]
        known = {f[key] for f in firm}
        return (
            [f for f, s in zip(facts, shaky, strict=True) if s and f[key] not in known]
            if last
            else firm
        )

    def _add(self, found: dict[tuple[int, int], Round], f: Fact) -> None:
        slots, counted = tuple(f["slots"]), tuple(f["counted"])
        at = bisect.bisect(self.begun, f["time"]), f["n"]  # a run that is begun anew counts anew
        late = tuple(f.get("late", ()))
        r = found.setdefault(at, Round(f["n"], f["step"], f["time"], slots, counted, late))
        r.unlike |= (slots, counted, f["step"]) != (r.slots, r.counted, r.step) and (
            f["slot"],
            f["life"],
        ) not in self.lost
        r.first, r.told = min(r.first, f["time"]), r.told + 1
        r.again, r.changed = r.again or f["again"], r.changed or f["changed"]

    # ---- counts --------------------------------------------------------------------------------

    def gaps(self) -> Iterable[tuple[int, int, float, float]]:
        """(slot, life, from, to) of each two steps that follow each other; of a life that still ran
        at the end, its last one, too.
        """
        still = {(f["slot"], f["life"]) for f in self.lives if f["status"] is None}
        still -= {(f["slot"], f["life"]) for f in self.facts if f["what"] in ("end", "finishing")}
        for (slot, life), steps in self.steps.items():
            times = [f["time"] for f in steps]
            if (slot, life) in still:
                times.append(self.ends)
            for a, b in zip(times, times[1:], strict=False):
                yield slot, life, a, b

    def committed(self) -> int:
        """Tokens of completed rounds."""
        return self.tokens_by_step()[-1][1]

    def participating(self) -> float:
        """Islands that count in a payload, over those whose process was there then (and had begun
        its script).
        """
        starts = {
            (f["slot"], f["life"]): f["time"]
            for f in self.facts
            if f["what"] == "start" and f["rank"] == 0
        }
        there = counted = 0
        for r in self.rounds:
            alive = {
                life["slot"]
                for life in self.lives
                if starts.get((life["slot"], life["life"]), float("inf")) <= r.first
                and r.first < (life["ended"] or float("inf"))
            }
            there, counted = there + len(alive | set(r.counted)), counted + len(r.counted)
        return counted / there if there else 0.0

    def mismatches(self) -> list[str]:
        """Steps at which digests differ, and messages of which islands tell different sets."""
        by_step: dict[tuple[int, int, int], dict[int, str]] = defaultdict(dict)
        for f in self._firm([f for f in self.facts if f["what"] == "look" and f["digest"]], "step"):
            begun = bisect.bisect(self.begun, f["time"])
            by_step[begun, f["rank"], f["step"]][f["slot"]] = f["digest"]
        out = [
            f"step {step}, rank {rank}: {seen}"
            for (_, rank, step), seen in sorted(by_step.items())
            if len(set(seen.values())) > 1
        ]
        return out + [
            f"message {r.number}: islands tell different sets" for r in self.rounds if r.unlike
        ]

    @property
    def begun(self) -> list[float]:
        """When the run has begun, from step 0: once, and anew where its last member was hit. The
        islands of this lab load no checkpoint then, so the same steps come again.
        """
        times = sorted(f["time"] for f in self.facts if f["what"] == "attached" and not f["step"])
        return times[:1] + [two for one, two in pairwise(times) if two - one > APART]

    def compared(self) -> int:
        """Steps of which at least two islands have told a digest."""
        seen = Counter(
            (f["rank"], f["step"], f["slot"])
            for f in self.facts
            if f["what"] == "look" and f["digest"]
        )
        return sum(n > 1 for n in Counter((rank, step) for rank, step, _ in seen).values())

    def losses(self) -> list[tuple[int, float]]:
        """(step, loss on held-out text: mean over islands)."""
        by_step: dict[int, list[float]] = defaultdict(list)
        for f in self.facts:
            if f["what"] == "look" and f["rank"] == 0:
                by_step[f["step"]].append(f["loss"])
        return [(step, statistics.fmean(values)) for step, values in sorted(by_step.items())]

    def loss_by_tokens(self) -> list[tuple[int, float]]:
        """(tokens of completed rounds, loss on held-out text then)."""
        counted = self.tokens_by_step()
        return [
            (counted[bisect.bisect_right(counted, (step, float("inf"))) - 1][1], loss)
            for step, loss in self.losses()
        ]

    def tokens_by_step(self) -> list[tuple[int, int]]:
        """(steps done, tokens of completed rounds up to then): those of a step count with the first
        round from that step on for which the island is not late, if it is among those that count
        in it."""
        marks = sorted((r.step, r.number) for r in self.rounds)
        counted = {r.number: r.counted for r in self.rounds}
        late = {r.number: r.late for r in self.rounds}
        sums: dict[int, int] = defaultdict(int)
        for slot, steps in self.tokens.items():
            for step, tokens in steps:
                at = bisect.bisect_left(marks, (step - 1, -1))
                while at < len(marks) and slot in late[marks[at][1]]:
                    at += 1
                if at < len(marks) and slot in counted[marks[at][1]]:
                    sums[marks[at][0] + 1] += tokens
        out, total = [(0, 0)], 0
        for step in sorted(sums):
            total += sums[step]
            out.append((step, total))
        return out


def at_tokens(curve: Sequence[tuple[int, float]], tokens: float) -> float | None:
    """A curve's value at so many tokens, between its points; None beyond its ends."""
    if not curve or not curve[0][0] <= tokens <= curve[-1][0]:
        return None
    at = bisect.bisect_left([x for x, _ in curve], tokens)
    (x0, y0), (x1, y1) = curve[max(at - 1, 0)], curve[at]
    return y1 if x1 == x0 else y0 + (y1 - y0) * (tokens - x0) / (x1 - x0)


# ---- events ------------------------------------------------------------------------------------


STOOD = ("stop", "kill_rank", "kill_island")
"""Kinds whose victim cannot step by our doing: its own time does not count."""

# kinds for which nobody waits, where another event still lasts
QUIET = ("poison", "disk_full", "store", "slow_store")

AFTER = 15.0  # seconds for which a link that was hurt may be why an island that was not named ends

LINKS = ("cut", "cut_off", "one_way", "damage")
"""Kinds that hurt a link: either side of it may be left out, and of two islands the one with the
lower number goes on.
"""


def stalls(tape: Tape, events: Sequence[Fact]) -> list[float]:
    """For each event the longest time between two steps of an island that lived on. It belongs to
    the last event that came before it or right after its beginning."""
    out, struck = [0.0] * len(events), [e["struck"] for e in events]
    for slot, life, a, b in tape.gaps():
        at = bisect.bisect_right(struck, a + max(0.5, 0.1 * (b - a))) - 1
        if at < 0 or b < struck[at]:
            continue
        while at > 0 and events[at]["kind"] in QUIET and events[at - 1]["over"] > struck[at]:
            at -= 1
        if events[at]["lives"][str(slot)] == life and not _stood(events, slot, a, b):
            out[at] = max(out[at], b - a)
    return out


def _stood(events: Sequence[Fact], slot: int, a: float, b: float) -> bool:
    """Whether an island stood still between a and b by our doing, also where another event came
    meanwhile.
    """
    stood = (e for e in events if e["kind"] in STOOD and slot in e["victims"])
    return any(e["struck"] < b and max(e["struck"], e["over"] or 0.0) > a for e in stood)


def survived(tape: Tape, event: Fact, events: Sequence[Fact]) -> str:
    """Empty where those that were not hit went on; else who did not. Where a link was hurt one
    island may be left out, whichever.
    """
    why = []
    went = any(
        f["time"] > event["struck"] + 0.2
        for s, life in event["lives"].items()
        for f in tape.steps[int(s), life]
    )
    went = went or any(life["status"] == 0 for life in tape.lives)
    for slot in sorted({*event["others"], *event["victims"]}):
        over, life = _life(tape, event, slot), event["lives"][str(slot)]
        went_on = any(f["time"] > event["struck"] + 0.2 for f in tape.steps[slot, life]) or (
            over is not None and over["status"] == 0
        )
        if slot in event["victims"] and event["kind"] not in LINKS:
            continue
        if _lost_by(tape, event, events, slot):
            why.append(f"island {slot} ended, too, with status {over['status'] if over else '?'}")
        elif not went_on and (over is None or over["status"] is None):
            why.append(f"island {slot} stands still")
    may = 1 if event["kind"] in LINKS else 0
    return "; ".join(why) if len(why) > may else "" if went else "nobody goes on"


def returned(tape: Tape, event: Fact, events: Sequence[Fact]) -> list[float]:
    """Seconds until an island that was lost counts again in a message, from the end of the cause;
    infinite where it did not come back.
    """
    out = []
    for slot in sorted({*event["others"], *event["victims"]}):
        if not _lost_by(tape, event, events, slot):
            continue
        life = event["lives"][str(slot)]
        told = [
            f["time"]
            for f in tape.facts
            if f["what"] == "message"
            and f["slot"] == slot
            and f["life"] > life
            and slot in f["counted"]
        ]
        cause = min(max(event["struck"], event["over"] or 0.0), tape.ends)
        out.append(max(min(told) - cause, 0.0) if told else float("inf"))
    return out


def _life(tape: Tape, event: Fact, slot: int) -> Fact | None:
    """The life that an island had when an event came."""
    life = event["lives"][str(slot)]
    return next((f for f in tape.lives if (f["slot"], f["life"]) == (slot, life)), None)


def _lost_by(tape: Tape, event: Fact, events: Sequence[Fact], slot: int) -> bool:
    """Whether an island's life ended by this event: the last one that hit it a short time before,
    else that hurt a link, else the last one that ever hit it, else the last of all."""
    over = _life(tape, event, slot)
    if over is None or over["status"] in (None, 0) or over["ended"] < event["struck"]:
        return False
    came = [
        e for e in events if e["lives"][str(slot)] == over["life"] and e["struck"] <= over["ended"]
    ]
    named = [e for e in came if slot in e["victims"]]
    fresh = [e for e in came if over["ended"] < min(e["over"], tape.ends) + AFTER]
    hit, links = [e for e in fresh if e in named], [e for e in fresh if e["kind"] in LINKS]
    blamed = (hit or links or named or came)[-1:]
    return bool(blamed) and blamed[0] is event


def unexpected(lives: Sequence[Fact]) -> list[str]:
    """Lives that ended as no event or expulsion explains: another status than 0, 75, or SIGKILL."""
    return [
        f"island {f['slot']}, life {f['life']}: status {f['status']}"
        for f in lives
        if f["status"] not in (None, 0, 75, 137)
    ]


def of_kind(events: Sequence[Fact]) -> Fact:
    """The numbers of the events of one kind."""
    rejoins = [t for e in events for t in e["rejoin_s"]]
    return {
        "events": len(events),
        "survived": sum(not e["failed"] for e in events),
        "longest_stall_s": max(e["stall_s"] for e in events),
        "lost": len(rejoins),
        "rejoin_s": middle(rejoins),
        "not_back": sum(math.isinf(t) for t in rejoins),
    }


def middle(values: Sequence[float]) -> float | None:
    """The median of those that are finite."""
    known = [v for v in values if math.isfinite(v)]
    return statistics.median(known) if known else None


# ---- the picture -------------------------------------------------------------------------------

COLOURS = {"training": "#4c9f70", "stalled": "#e0a030", "joining": "#5b8bd0", "dead": "#c8c8c8"}
STALL = 1.0
"""Seconds between two steps from which on an island is drawn as stalled."""


def draw_storm(
    tape: Tape, events: Sequence[Fact], islands: int, title: str, file: str | IO[str]
) -> None:
    """Write the islands over time as svg, with the events that struck and the loss below."""
    from matplotlib import pyplot, rc_context

    first = min((steps[0]["time"] for steps in tape.steps.values()), default=0.0)
    size = {"figsize": (11, 2.8 + 0.3 * islands), "height_ratios": [0.5 * islands, 1.5]}
    figure, (lanes, loss) = pyplot.subplots(2, sharex=True, layout="constrained", **size)
    for slot in range(islands):
        for state, begin, end in spans(tape, slot, first):
            lanes.broken_barh([(begin, end - begin)], (slot - 0.4, 0.8), color=COLOURS[state])
    for event in events:
        if event["skipped"]:
            continue
        at = event["struck"] - first
        for slot in event["victims"] or range(islands):
            lanes.vlines(at, slot - 0.5, slot + 0.5, color="#b03030", linewidth=1)
        lanes.text(at, -0.6, event["kind"], rotation=50, fontsize=8, va="bottom")
    lanes.set_yticks(range(islands), [f"island {slot}" for slot in range(islands)])
    lanes.set_ylim(islands - 0.5, -0.5)
    for state, colour in COLOURS.items():
        loss.plot([], [], color=colour, linewidth=6, label=state)
    told: dict[int, list[Fact]] = defaultdict(list)
    for fact in tape.facts:
        if fact["what"] == "look" and fact["rank"] == 0:
            told[fact["step"]].append(fact)
    looks = [told[step] for step in sorted(told)]
    times = [min(fact["time"] for fact in at) - first for at in looks]
    loss.plot(times, [statistics.fmean(fact["loss"] for fact in at) for at in looks], color="#333")
    loss.set(ylabel="loss", xlabel="seconds", xlim=(0, max(tape.ends - first, 1e-9)))
    loss.legend(fontsize=8, ncols=len(COLOURS))
    figure.suptitle(title)
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(file, format="svg")
    pyplot.close(figure)


def spans(tape: Tape, slot: int, first: float) -> list[list[Any]]:
    """[state, from, to] of an island without holes, in seconds after `first`."""
    out: list[list[Any]] = []

    def add(state: str, a: float, b: float) -> None:
        a, b = max(a, first), min(b, tape.ends)
        if b > a and out and out[-1][0] == state and abs(out[-1][2] - (a - first)) < 1e-6:
            out[-1][2] = b - first
        elif b > a:
            out.append([state, a - first, b - first])

    told = {
        (f["life"], f["what"]): f["time"]
        for f in tape.facts
        if f["slot"] == slot and f["what"] in ("start", "finishing")
    }
    last = first
    for life in [f for f in tape.lives if f["slot"] == slot]:
        times = [s["time"] for s in tape.steps[slot, life["life"]]]
        ended = told.get((life["life"], "finishing"), life["ended"] or tape.ends)
        begun = min(told.get((life["life"], "start"), ended), ended)
        add("dead", last, begun)
        add("joining", begun, times[0] if times else ended)
        for a, b in zip(times, [*times[1:], ended], strict=False):
            add("stalled" if b - a > STALL else "training", a, b)
        last = ended if life["status"] != 0 else tape.ends
    add("dead", last, tape.ends)
    return out
