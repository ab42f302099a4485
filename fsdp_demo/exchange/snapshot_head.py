"""The head of a snapshot: the donor's position, and the facts that a newcomer compares with its own
before it accepts the snapshot.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NotRequired, TypedDict, cast

from msgspec import Meta, Struct
from torch import Tensor

from ..channels.channel import ChannelRunner
from ..elastic import agreement
from ..hosts.base import exchangeable
from ..peers.join_messages import Listed, from_bytes
from ..version import __version__
from . import fused_path, run_specification
from .run_specification import Described
from .runtime import StepRuntime
from .watch import Kept

FORMAT = 2

AT_START = ("must_match.at",)
"""Facts compared only among islands that start together: the step from which they go on."""

Whole = Annotated[int, Meta(gt=-(2**53), lt=2**53)]


class OpenExchange(Struct, frozen=True):
    """A message under way: when it was sent, by which channels, and for each that has not applied
    it the gradients that the donor has ("010", a character for each of its tensors; empty for
    channels of something else)."""

    step: Whole
    members: list[str]
    parts: dict[str, str]


class HistoryNote(TypedDict):
    """The part of `History.note` that a newcomer goes on from."""

    digest: str
    slots: list[Whole]
    at: Whole
    late: NotRequired[list[Whole]]


class DonorPosition(Struct, frozen=True):
    """The position of the donor in the run.

    Attributes:
        step: optimizer steps done.
        applied, last: as in `InFlightQueue`. loss: as in `Watch`; None where unknown.
        flights: messages under way, oldest first.
        counts: of each optimizer state the numbers in it (`counts`); None where states are
            not handed on.
        same_rest: frozen parameters and buffers do not come: the newcomer has the same.
        norms: of the last messages that have come (`watch.Norms`).
        host: what the donor tells (`Exchange.tell_newcomers`), not compared.
        history: of contributors (`saved_state.History`).
        tokens: of all islands so far, as the donor's island counts them.
        pace: the shares of islands that take unlike steps (`Pace.state`).
        limit: `DropCompute.chosen`.
        changes: of the donor's gradients (`ChangeMeter.state`); empty where no channel checks.
    """

    step: Whole
    applied: dict[str, Whole]
    last: dict[str, Whole]
    loss: float | None
    flights: list[OpenExchange]
    counts: list[dict[str, int | float]] | None
    same_rest: bool
    host: dict[str, Any]
    norms: Kept
    history: HistoryNote
    tokens: Whole = 0
    pace: dict[str, list[tuple[Whole, Whole]]] = {}
    limit: float = 0.0
    changes: dict[str, list[float]] = {}

    @classmethod
    def of(
        cls, runtime: StepRuntime, same_rest: bool, tokens: int, host: dict[str, Any]
    ) -> DonorPosition:
        """The position of this rank; see the attributes."""
        queue, loss = runtime.queue, runtime.queue.watch.loss
        flights = [
            OpenExchange(
                f.step,
                list(f.members),
                {
                    name: "".join("01"[p] for p in out.present or [])
                    for name, out in f.parts.items()
                },
            )
            for f in queue.flights
        ]
        return cls(
            step=runtime.step,
            applied=dict(queue.applied),
            last=dict(queue.last),
            loss=None if math.isnan(loss) else loss,
            flights=flights,
            counts=counts(runtime),
            same_rest=same_rest,
            host=host,
            norms=queue.norms.state([(f.members, f.step) for f in queue.flights]),
            history=cast("HistoryNote", queue.history.note()),
            tokens=tokens,
            pace={k: v for k, v in runtime.pace.state().items() if k in ("shares", "coming")},
            limit=runtime.drop.chosen,
            changes=runtime.changes.state() if runtime.changes else {},
        )


class SnapshotHead(Struct, frozen=True):
    """The head of a snapshot of one rank.

    Attributes:
        format, package: see `read`. island, name: of the donor.
        place: what decides how workspaces and messages of this rank are laid out.
        facts: of the run. parameters: as `run_specification.described`.
        states: names of the optimizer states that come with it.
        tensors: name, dtype and elements of each tensor that comes, in their order.
        fused: mark of the donor's fused kernels; empty: it has none.
    """

    format: int
    package: str
    island: int
    name: str
    place: dict[str, int]
    facts: dict[str, Any]
    parameters: list[Described]
    states: list[str]
    stand: DonorPosition
    tensors: list[tuple[str, str, int]]
    fused: str = ""


class WrittenHead(Struct):
    """The release that has written a head: read before the rest of it."""

    format: Any = None
    package: Any = None


def moves_states(runtime: StepRuntime) -> bool:
    """Whether replicas share inner optimizer states."""
    return bool(runtime.before_step) or any(c.channel.state_name for c in runtime.channels)


def states(runtime: StepRuntime) -> list[str]:
    """Names of the shared inner optimizer states that have the shape of their parameters."""
    return runtime.host.states() if moves_states(runtime) else []


def counts(runtime: StepRuntime) -> list[dict[str, float]] | None:
    """The numbers in each shared inner optimizer state (step counters); None where replicas share
    none, or a state holds a tensor that is neither one number nor of its parameter's shape."""
    if not moves_states(runtime):
        return None
    out: list[dict[str, float]] = []
    for p, state in kept(runtime):
        rest = {k: v for k, v in state.items() if v is not None and k not in exchangeable(p, state)}
        if not all(
            isinstance(v, (int, float)) or (isinstance(v, Tensor) and v.numel() == 1)
            for v in rest.values()
        ):
            return None
        out.append({k: v.item() if isinstance(v, Tensor) else v for k, v in rest.items()})
    return out


def kept(runtime: StepRuntime) -> list[tuple[Tensor, dict[str, Any]]]:
    """The tensors that the inner optimizers step, each with its state where that is not empty."""
    return [
        (p, state)
        for p, state in runtime.host.optimizer_states()
        if any(v is not None for v in state.values())
    ]


def write(
    runtime: StepRuntime, told: Mapping[str, Any], stand: DonorPosition, tensors: Listed
) -> SnapshotHead:
    """The head of this rank's snapshot. told: further facts of the run (`Start.facts`)."""
    return SnapshotHead(
        format=FORMAT,
        package=__version__,
        island=runtime.topology.island,
        name=runtime.topology.name,
        place=place(runtime),
        facts=_run(runtime, told),
        parameters=[run_specification.described(s) for s in runtime.host.params],
        states=states(runtime),
        stand=stand,
        tensors=list(tensors),
        fused=fused_path.mark(runtime),
    )


def _run(runtime: StepRuntime, told: Mapping[str, Any]) -> dict[str, Any]:
    return run_specification.specification(
        runtime.config, runtime.host, {k: v for k, v in told.items() if k not in AT_START}
    )


def place(runtime: StepRuntime) -> dict[str, int]:
    """The numbers that decide how workspaces and messages of this rank are laid out."""
    position, active_copies = runtime.parameters.position, runtime.parameters.active_copies
    return {
        "islands": runtime.topology.islands,
        "shards": position.num_shards,
        "shard": position.shard,
        "active_copies": active_copies,
        "active_copy": position.copy,
    }


def read(runtime: StepRuntime, told: Mapping[str, Any], data: Tensor) -> SnapshotHead:
    """Read a head, uint8 [n], that has arrived, and compare it with the run of this rank. Raises
    ValueError: it is of another run, model, preset, place or release, with the values of both
    sides; or no head at all.
    """
    head = _decoded(data)
    stand, where = head.stand, head.place

    def refuse(what: str) -> ValueError:
        return ValueError(
            agreement.unlike_runs(
                f"island {head.island} ({head.name:.80})", runtime.topology.name, what
            )
        )

    may, must = agreement.apart(_run(runtime, told), head.facts, head.name[:80])
    must += [
        f"{k}: {v} here, {where.get(k)} there"
        for k, v in place(runtime).items()
        if where.get(k) != v
    ]
    if runtime.config.averages_moments:  # unlike hardware would make unlike bases for them
        must += may
    fused_path.follow(runtime, head.fused)
    if (mark := fused_path.mark(runtime)) != head.fused:
        must.append(f"fused: {mark or 'none'} here, {head.fused:.20} there")
    if must:
        raise refuse("; ".join(must[:6]))
    if what := run_specification.tensors_apart(runtime.host.params, head.parameters):
        raise refuse(what)
    mine, theirs = (states(runtime), _names(counts(runtime))), (head.states, _names(stand.counts))
    if theirs != mine:
        raise refuse(
            f"the inner optimizers keep states {_sentence(*mine)} here, {_sentence(*theirs)} "
            "there; one that makes them at its first step cannot join a run"
        )
    if odd := _odd(runtime.queue.channels, stand):
        raise refuse(odd)
    runtime.queue.watch.unlike = agreement.warned(may)
    return head


def _decoded(data: Tensor) -> SnapshotHead:
    what = "the head of a snapshot"
    by = from_bytes(data, WrittenHead, what, ValueError)
    if by.format != FORMAT:
        raise ValueError(
            f"the snapshot has format {by.format!r:.20}, written by fsdp_demo {by.package!r:.40}; "
            f"this is {__version__}, which reads format {FORMAT}: use one release everywhere"
        )
    return from_bytes(data, SnapshotHead, what, ValueError)


def _names(counts: Sequence[Mapping[str, float]] | None) -> list[list[str]] | None:
    return None if counts is None else [sorted(entry) for entry in counts]


def _sentence(states: Sequence[str], names: list[list[str]] | None) -> str:
    """The states that inner optimizers keep, in words."""
    if names is None:
        return "that cannot be handed on" if states else "none"
    numbers = sorted({name for entry in names for name in entry})
    return f"{', '.join([*states, *numbers]) or 'none'} of {len(names)} tensors"


def _odd(channels: Sequence[ChannelRunner], stand: DonorPosition) -> str | None:
    """A sentence on the first impossible value in a position; None where all are possible."""
    known = {c.channel.name: c for c in channels}
    if stand.step < 0:
        return f"it stands at step {stand.step}"
    if other := sorted({*stand.applied, *stand.last} - set(known)):
        return f"channels {other[:4]} there, {sorted(known)[:4]} here"
    if other := [key for key in stand.norms if not set(key.split(",")) <= set(known)]:
        return f"norms of channels {other[0]!r:.80}"
    limit = sum(c.channel.schedule.in_flight for c in channels)
    if len(stand.flights) > limit:
        return f"{len(stand.flights)} messages are under way there, at most {limit} can be"
    before = -1
    for f in stand.flights:
        fits = (
            set() < set(f.parts) <= set(f.members) <= set(known)
            and len(set(f.members)) == len(f.members)
            and before <= f.step < stand.step
            and all(_under_way(known[name], f, stand.step) for name in f.parts)
        )
        if not fits:
            return (
                f"a message of step {f.step + 1} of channels {f.members[:4]} is under way after "
                f"step {stand.step}"
            )
        before = f.step
    return None


def _under_way(c: ChannelRunner, f: OpenExchange, step: int) -> bool:
    """Whether channel `c` may have sent `f` and not applied it after `step` steps."""
    schedule, marks = c.channel.schedule, f.parts[c.channel.name]
    length = len(c.covered) if c.channel.before_step else 0
    shaped = len(marks) == length and set(marks) <= {"0", "1"}
    return shaped and schedule.due(f.step) and f.step + schedule.delay >= step
