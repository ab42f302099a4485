"""What a snapshot says of itself, and what the rank that takes it compares with its own before it
believes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..channels.channel import ChannelRunner
from ..comm import agreement
from ..errors import UNREADABLE
from ..version import __version__
from . import facts
from .runtime import StepRuntime
from .startup import specification
from .watch import read_norms

FORMAT = 2

AT_START = ("must_match.at",)
"""Facts that islands compare when they start together, and that say nothing to one that joins
later: the step from which they go on.
"""

MOST = 1 << 16
"""Messages that norms are remembered of, and islands in one, at most."""


@dataclass(frozen=True)
class Open:
    """A message under way: when it was sent, by which channels, and for each that has not applied
    it the gradients that the donor has ("010", a character for each of its tensors; empty for
    channels of something else)."""

    step: int
    members: list[str]
    parts: dict[str, str]


@dataclass(frozen=True)
class Stand:
    """Where the donor stands.

    Attributes:
        step: optimizer steps done.
        applied, last: see `InFlightQueue`. loss: see `Watch`; None where unknown.
        flights: what is under way, oldest first.
        counts: of each optimizer state the numbers in it (`snapshot.counts`); None where states are
            not handed on.
        same_rest: frozen parameters and buffers do not come: the newcomer has the same.
        norms: of the last messages that have come (`watch.Norms`).
        own: the mark of the checkpoint from which the newcomer takes all tensors (`returning.py`);
            empty: they come.
        host: what the donor's host tells that of the newcomer (`Exchange.tells`), not compared.
        history: see `History.note`.
    """

    step: int
    applied: dict[str, int]
    last: dict[str, int]
    loss: float | None
    flights: list[Open]
    counts: list[dict[str, float]] | None
    same_rest: bool = False
    host: dict[str, Any] = field(default_factory=dict)
    norms: dict[str, Any] = field(default_factory=dict)
    own: str = ""
    history: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls, runtime: StepRuntime, counts: list[dict[str, float]] | None, same_rest: bool
    ) -> Stand:
        """Of this rank."""
        queue, loss = runtime.queue, runtime.queue.watch.loss
        flights = [
            Open(
                f.step,
                list(f.members),
                {
                    name: "".join("01"[p] for p in out.present or [])
                    for name, out in f.parts.items()
                },
            )
            for f in queue.flights
        ]
        known = None if math.isnan(loss) else loss
        applied = dict(queue.applied)
        history = queue.history.note()
        heard = queue.norms.state([(f.members, f.step) for f in queue.flights])
        return cls(
            runtime.step,
            applied,
            dict(queue.last),
            known,
            flights,
            counts,
            same_rest,
            runtime.tells(),
            norms=heard,
            history=history,
        )

    def to_json(self) -> dict[str, Any]:
        """The inverse of `from_json`."""
        return {**vars(self), "flights": [vars(f) for f in self.flights]}

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> Stand:
        """Raises ValueError for another form."""
        try:
            flights = [
                Open(whole(f["step"]), [str(m) for m in f["members"]], dict(f["parts"]))
                for f in tree["flights"]
            ]
            applied, last = (
                {k: whole(v) for k, v in tree[name].items()} for name in ("applied", "last")
            )
            loss = None if tree["loss"] is None else float(tree["loss"])
            counts = tree["counts"]
            if counts is not None:
                counts = [{k: number(v) for k, v in entry.items()} for entry in counts]
            step, host, own = whole(tree["step"]), dict(tree["host"]), str(tree.get("own", ""))
            heard, told = read_norms(tree["norms"], set(last), MOST), tree["history"]
            history = {
                "digest": str(told["digest"]),
                "slots": [whole(s) for s in told["slots"]],
                "at": whole(told["at"]),
            }
            return cls(
                step,
                applied,
                last,
                loss,
                flights,
                counts,
                tree["same_rest"] is True,
                host,
                heard,
                own,
                history,
            )
        except UNREADABLE as error:
            raise ValueError(
                f"the snapshot is of another form ({error!r:.80}): use one release everywhere"
            ) from None


def whole(value: Any) -> int:
    """An int. Raises ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 2**53:
        raise ValueError(f"{value!r:.40} is no whole number")
    return value


def number(value: Any) -> float:
    """An int or float as it is. Raises ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{value!r:.40} is no number")
    return value


def write(
    runtime: StepRuntime, told: Mapping[str, Any], stand: Stand, states: Sequence[str]
) -> dict[str, Any]:
    """The head of this rank's snapshot.

    Args:
        told: further facts of the run (`Start.facts`).
        states: names of the optimizer states that come with it.
    """
    return {
        "format": FORMAT,
        "package": __version__,
        "island": runtime.topology.island,
        "name": runtime.topology.name,
        "place": place(runtime),
        "facts": _run(runtime, told),
        "parameters": [facts.described(s) for s in runtime.host.params],
        "states": list(states),
        "stand": stand.to_json(),
    }


def _run(runtime: StepRuntime, told: Mapping[str, Any]) -> dict[str, Any]:
    return specification(
        runtime.config, runtime.host, {k: v for k, v in told.items() if k not in AT_START}
    )


def place(runtime: StepRuntime) -> dict[str, int]:
    """What decides how workspaces and messages of this rank are laid out."""
    position, active_copies = runtime.parameters.position, runtime.parameters.active_copies
    return {
        "islands": runtime.topology.islands,
        "shards": position.num_shards,
        "shard": position.shard,
        "active_copies": active_copies,
        "active_copy": position.copy,
    }


def read(
    runtime: StepRuntime,
    told: Mapping[str, Any],
    head: Mapping[str, Any],
    states: Sequence[str],
    counts: Sequence[Mapping[str, float]] | None,
) -> Stand:
    """Compare a head with what this rank runs; where its donor stands.

    Args:
        states: names of the optimizer states that are kept here. counts: the numbers in each.

    Raises:
        ValueError: it is of another run, model, preset, place or release, with the values of both
            sides; or no head at all.
    """
    if head.get("format") != FORMAT:
        raise ValueError(
            f"the snapshot has format {head.get('format')!r:.20}, written by fsdp_demo "
            f"{head.get('package')!r:.40}; this is {__version__}, "
            f"which reads format {FORMAT}: use one release everywhere"
        )
    try:
        island, name, found = whole(head["island"]), str(head["name"])[:80], dict(head["facts"])
        theirs = [
            [str(t[0]), list(t[1]), list(t[2]), str(t[3]), str(t[4])] for t in head["parameters"]
        ]
        where = {str(k): whole(v) for k, v in head["place"].items()}
        kept = [str(s) for s in head["states"]]
        stand = Stand.from_json(head["stand"])
    except UNREADABLE as error:
        raise ValueError(
            f"the snapshot is of another form ({error!r:.80}): use one release everywhere"
        ) from None

    def refuse(what: str) -> ValueError:
        return ValueError(
            agreement.unlike_runs(f"island {island} ({name})", runtime.topology.name, what)
        )

    may, must = agreement.apart(_run(runtime, told), found, name)
    must += [
        f"{k}: {v} here, {where.get(k)} there"
        for k, v in place(runtime).items()
        if where.get(k) != v
    ]
    if must:
        raise refuse("; ".join(must[:6]))
    if what := facts.tensors_apart(runtime.host.params, theirs):
        raise refuse(what)
    if (found_states := (kept, _names(stand.counts))) != (mine := (list(states), _names(counts))):
        raise refuse(
            f"the inner optimizers keep states {_sentence(*mine)} here, {_sentence(*found_states)} "
            "there; one that makes them at its first "
            "step cannot join a run"
        )
    for what in _odd(runtime.queue.channels, stand):
        raise refuse(what)
    runtime.unlike = runtime.queue.watch.unlike = agreement.warned(may)
    return stand


def _names(counts: Sequence[Mapping[str, float]] | None) -> list[list[str]] | None:
    return None if counts is None else [sorted(entry) for entry in counts]


def _sentence(states: Sequence[str], names: list[list[str]] | None) -> str:
    """What inner optimizers keep, in words."""
    if names is None:
        return "that cannot be handed on" if states else "none"
    numbers = sorted({name for entry in names for name in entry})
    return f"{', '.join([*states, *numbers]) or 'none'} of {len(names)} tensors"


def _odd(channels: Sequence[ChannelRunner], stand: Stand) -> list[str]:
    """What cannot be: marks of channels that are not here, messages that are not under way at that
    step.
    """
    known, found = {c.channel.name: c for c in channels}, []
    if stand.step < 0:
        found.append(f"it stands at step {stand.step}")
    if other := sorted({*stand.applied, *stand.last} - set(known)):
        found.append(f"channels {other[:4]} there, {sorted(known)[:4]} here")
    limit = sum(c.channel.schedule.in_flight for c in channels)
    if len(stand.flights) > limit:
        found.append(f"{len(stand.flights)} messages are under way there, at most {limit} can be")
    before = -1
    for f in stand.flights:
        fits = (
            0 < len(f.parts)
            and set(f.parts) <= set(f.members) <= set(known)
            and len(set(f.members)) == len(f.members)
        )
        fits = (
            fits
            and before <= f.step < stand.step
            and all(_under_way(known[name], f, stand.step) for name in f.parts)
        )
        if not fits:
            found.append(
                f"a message of step {f.step} of channels {f.members[:4]} is under way at step "
                f"{stand.step}"
            )
            break
        before = f.step
    return found


def _under_way(c: ChannelRunner, f: Open, step: int) -> bool:
    """Whether channel `c` may have sent `f` and not applied it after `step` steps."""
    schedule, marks = c.channel.schedule, f.parts[c.channel.name]
    length = len(c.covered) if c.channel.before_step else 0
    shaped = isinstance(marks, str) and len(marks) == length and set(marks) <= {"0", "1"}
    return shaped and schedule.due(f.step) and f.step + schedule.delay >= step
