"""A saved exchange taken over by another number of islands, shards or copies, or with parameters in
another order: `convert` makes one rank's state from the parts of all.

Islands. `shares` says how much of each saved island goes into a new one; the mean over the islands
stays. Whoever loads the model mixes parameters and inner optimizer states by the same shares
(`average`), else a delta channel sees a jump.

* Accumulators are mixed, which keeps their mean over the replicas. Where the mean is over senders,
  an island that is added starts with zeros instead (dense tensors excepted, whose mean is over
  all): what the saved islands hold is divided by its senders as before, and nothing is sent twice,
  which copies of a mean would be (on a small model losses stayed nearer to the uninterrupted ones
  than from the mean). Of fewer islands they stay mixed: a sum would apply what they have in common
  as often as there were islands. The jump is reported: with senders only one of mean and sum can
  stay.
* Anchors and outer momenta that all replicas share are copied, those of their own (`local_delta`)
  mixed.
* Messages in flight are decoded with the layout that they were saved with. Their mean is
  resharded like any tensor, and applied at its scheduled step. A delta that was dropped would be
  counted again beside what the accumulator kept of it; one applied early wants the parameters
  rewound, which are not here. Only what has not arrived in every part is dropped: the accumulator
  takes back what it had sent; a delta without one is still in the parameters, behind their
  anchor, and goes out with the next exchange; a plain gradient is lost.
* `present` flags are or-ed, tokens (counted on the island's first rank) mixed; `last` is the
  earliest. The loss of the last exchange stays, and those noted since go on.

Shards: see `relayout.py`. What ZeRO has cut (`LocalParam.offset`) is taken as it lies: the saved
ranks must hold the same stretches. Saved parts are opened one after the other: in memory are one of
them, the new part and one tensor.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..channels.channel import ChannelPayload
from ..channels.state import ChannelState
from ..comm.collectives import ReceivedMessage
from ..comm.header import Header
from ..comm.position import ShardPosition
from ..config.patterns import tensor_layout_kind
from ..errors import counted
from ..exchange.saved_state import ExchangeState, InFlightState
from ..hosts.base import LocalParam
from .reader import CheckpointReader, Flying, flying, length
from .relayout import LayoutConverter, Rows, TensorLayout
from .saved import PartSet

if TYPE_CHECKING:
    from ..channels.channel import ChannelRunner
    from ..exchange.exchange import Exchange

log = logging.getLogger("fsdp_demo")


# -- islands -------------------------------------------------------------------------------------


def shares(saved: Sequence[int], islands: int) -> list[dict[int, float]]:
    """What each of `islands` new islands takes of the saved ones (their numbers): weights whose sum
    is 1, and whose mean over the new islands is equal for all saved ones.

    Where islands are added, the saved ones keep their own and those get the mean of all; of fewer
    islands each gets an equal stretch of the saved ones.

    Example:
        >>> from fsdp_demo.checkpoint.reshard import shares
        >>> shares([0, 1], 3)
        [{0: 1.0}, {1: 1.0}, {0: 0.5, 1: 0.5}]
        >>> shares([0, 1], 1)
        [{0: 0.5, 1: 0.5}]
    """
    n = len(saved)
    if islands >= n:
        own = _own(saved, islands)
        return [{own[i]: 1.0} if i in own else dict.fromkeys(saved, 1 / n) for i in range(islands)]
    # new island i covers [i n, (i + 1) n) of a line on which the saved island in place k has [k
    # islands, (k + 1) islands)
    common = [
        [min((i + 1) * n, (k + 1) * islands) - max(i * n, k * islands) for k in range(n)]
        for i in range(islands)
    ]
    return [{j: c / n for j, c in zip(saved, row, strict=True) if c > 0} for row in common]


def _own(saved: Sequence[int], islands: int) -> dict[int, int]:
    """New island -> the saved one it continues: its own number if that is there, else one whose
    number is gone.
    """
    if islands < len(saved):
        return {}
    own = {i: i for i in saved if i < islands}
    free = (i for i in range(islands) if i not in own)
    return own | {next(free): j for j in saved if j not in own}


# -- what is made of it --------------------------------------------------------------------------


class ChannelConversion:
    """One channel's state on the new rank, gathered from saved parts.

    Args:
        active: the channel there.
        weights: share of each saved island; the first of them gives what all have in common.
        fresh: this island was not there when the state was saved.
    """

    def __init__(
        self,
        active: ChannelRunner,
        reader: CheckpointReader,
        weights: dict[int, float],
        fresh: bool,
    ):
        self.active = active
        self.reader = reader
        self.weights = weights
        self.channel = active.channel
        self.name, self._first = active.channel.name, next(iter(weights))
        self._empty = fresh and self.channel.reducer.mean_over == "senders"
        self._keys = set(active.state().workspaces)
        self.target = _target(active) if active.active_copy is not None else None
        self._kept: dict[str, LayoutConverter] = {}
        self._means: dict[Flying, LayoutConverter] = {}
        self._own: dict[Flying, LayoutConverter] = {}
        self._present: set[str] = set()
        self._arrived_present: dict[Flying, list[str] | None] = {}

    def add(self, state: ExchangeState, island: int, shard: int, active_copy: int) -> None:
        """Take what this rank needs from one saved part.

        Raises:
            ValueError: the part keeps other workspaces than this configuration.
        """
        kept = state.channels[self.name]
        source = self.reader.side(self.name, shard, active_copy)
        weight = self.weights[island]
        self._present |= {n for n, p in zip(source.names, kept.present, strict=True) if p}
        saved = kept.workspaces
        if self.target is not None and set(saved) != self._keys:
            raise ValueError(
                f"channel {self.name!r}: saved state has {sorted(saved)}, this configuration keeps "
                f"{sorted(self._keys)}: "
                "resume with the preset it was saved with"
            )
        for key in self._keys if self.target is not None else ():
            common = key in ("anchor", "momentum") and self.channel.equal_at_end
            self._take(
                self._kept,
                key,
                key == "accumulator",
                source,
                saved[key],
                float(island == self._first) if common else weight,
            )
        for f in state.in_flight:
            if flying(f) in self.reader.flights and self.name in f.parts:
                self._add_flight(f, source, island, shard, active_copy)

    def _add_flight(
        self, f: InFlightState, source: TensorLayout, island: int, shard: int, active_copy: int
    ) -> None:
        key, own = flying(f), f.parts[self.name].own
        if own is not None:
            self._take(self._own, key, False, source, own, self.weights[island])
        if island == self._first:
            mean, present = self.reader.decode(f, self.name, shard, active_copy)
            self._take(self._means, key, True, source, mean, 1.0)
            self._arrived_present[key] = (
                None
                if present is None
                else [n for n, p in zip(source.names, present, strict=True) if p]
            )

    def _take(
        self,
        into: dict[Any, LayoutConverter],
        key: Any,
        coefficients: bool,
        source: TensorLayout,
        work: Tensor,
        weight: float,
    ) -> None:
        if self.target is not None and weight:
            into.setdefault(
                key, LayoutConverter(self.target, self.channel.codec if coefficients else None)
            ).add(source, work, weight)

    def state(self) -> ChannelState:
        """As `ChannelRunner.state` gives it."""
        kept = {key: made.result() for key, made in self._kept.items()}
        out = ChannelState([n in self._present for n in self.reader.covered[self.name]], **kept)
        if self._empty and out.accumulator is not None and self.target is not None:
            self.target.layout.blocks(out.accumulator).zero_()
        return out

    def flight(self, key: Flying) -> tuple[ChannelPayload, Tensor | None]:
        """Its part of a message under way, and the mean that has arrived for it (None on a copy
        that is not active).
        """
        held = self._arrived_present[key]
        present = None if held is None else [n in held for n in self.reader.covered[self.name]]
        own, mean = self._own.get(key), self._means.get(key)
        part = ChannelPayload(
            key[0], own=own.result() if own is not None else None, present=present
        )
        return part, mean.result() if mean is not None else None


def _target(active: ChannelRunner) -> TensorLayout:
    """A channel's tensors on this rank."""
    chosen = [active.host.params[i] for i in active.covered]
    assert active.active_copy is not None
    names = [s.name for s in chosen]
    kinds = [tensor_layout_kind(active.channel, s.name) for s in chosen]
    return TensorLayout(
        names,
        [s.shape for s in chosen],
        kinds,
        [_rows(s, active.position) for s in chosen],
        active.active_copy,
        active.active_copies,
    )


def _rows(shard: LocalParam, place: ShardPosition) -> Rows:
    """Which rows of the whole tensor this rank holds: torch.chunk's, or all. Of a stretch that ZeRO
    has cut, which elements.
    """
    whole, local = shard.global_shape, shard.shape
    if shard.offset is not None:
        return shard.offset, shard.offset + prod(local)
    if local == whole:
        return 0, length(whole)
    each = -(-whole[0] // place.num_shards)
    lo = min(place.shard * each, whole[0])
    hi = min(lo + each, whole[0])
    if len(local) != len(whole) or local[0] != hi - lo or (hi > lo and local[1:] != whole[1:]):
        raise ValueError(
            f"{shard.name} of shape {whole} lies here as {local}, shard {place.shard} of "
            f"{place.num_shards}: a saved state can be cut along "
            "dim 0 only, in FSDP2's equal parts"
        )
    return lo, hi


def convert(saved: PartSet, exchange: Exchange) -> dict[str, Any]:
    """What `exchange.load_state_dict` takes on this rank, from a state saved with other islands,
    shards or copies, or another order of parameters. No collectives.

    Args:
        saved: heads of the parts of all islands (of the one or few that are left, where others are
            lost); `SavedExchange.check` lets them pass.
        exchange: freshly attached to the model as it was at `saved.step`, its channels started.

    Raises:
        ValueError: parts are missing, or the state belongs to another model or preset.
    """
    active, islands = exchange.channels, exchange.topology.islands
    covered = {c.channel.name: [c.host.params[i].name for i in c.covered] for c in active}
    reader, place = CheckpointReader(saved, covered), active[0].position
    weights = shares(reader.islands, islands)[exchange.topology.island]
    own = _own(reader.islands, islands)
    fresh = islands > len(reader.islands) and exchange.topology.island not in own
    parts = [ChannelConversion(c, reader, weights, fresh) for c in active]
    headers: dict[Flying, list[Header]] = {}
    for shard, active_copy in _sources(reader, parts, place):
        for island in weights:
            state = reader.open(island, shard, active_copy)
            headers |= {
                flying(f): f.arrived.headers
                for f in state.in_flight
                if flying(f) in reader.flights and f.arrived is not None
            }
            for p in parts:
                p.add(state, island, shard, active_copy)
            del state
    if place.shard == place.copy == 0:
        _report(reader, exchange)
    first = next(iter(reader.states.values()))
    tokens, weighed = _tokens(reader, weights, first=place.shard == place.copy == 0)
    return ExchangeState(
        step=saved.step,
        digest=reader.config.digest(),
        channels={p.name: p.state() for p in parts},
        in_flight=[_message(key, headers[key], parts) for key in reader.flights],
        last=_last(reader),
        applied=first.applied,
        begun=first.begun,
        tokens=tokens,
        weighed=weighed,
        norms=first.norms,
        loss=first.loss,
        losses=_losses(reader, weights),
    ).to_tree()


def _sources(
    reader: CheckpointReader, parts: Sequence[ChannelConversion], place: ShardPosition
) -> list[tuple[int, int]]:
    """(shard, active copy) of the saved parts that hold elements of this rank: its own where they
    lie as they lay.
    """
    targets = [(p.name, p.target) for p in parts if p.target is not None]
    if not targets:
        return [(0, 0)]
    mine = (place.shard, place.copy)
    if (
        place.num_shards == reader.shards
        and place.copy < reader.active_copies
        and all(t == reader.side(name, *mine) for name, t in targets)
    ):
        return [mine]
    out = []
    for s in range(reader.shards):
        wanted = [
            (r, reader.rows(n, s)) for _, t in targets for n, r in zip(t.names, t.rows, strict=True)
        ]
        if any(max(a, c) < min(b, d) for (a, b), (c, d) in wanted):
            out += [(s, active_copy) for active_copy in range(reader.active_copies)]
    return out or [(0, 0)]


def _message(
    key: Flying, headers: list[Header], parts: Sequence[ChannelConversion]
) -> InFlightState:
    """One message under way, decoded."""
    made = {p.name: p.flight(key) for p in parts if p.name in key[2]}
    decoded = {name: mean for name, (_, mean) in made.items() if mean is not None}
    arrived = ReceivedMessage(headers, [], [], decoded) if decoded else None
    return InFlightState(key[0], list(key[1]), {n: part for n, (part, _) in made.items()}, arrived)


def _last(reader: CheckpointReader) -> dict[str, int]:
    """When each channel last sent what was not lost."""
    states = reader.states.values()
    gone = {
        n
        for state in states
        for f in state.in_flight
        if flying(f) not in reader.flights
        for n in f.parts
    }
    return {n: -1 if n in gone else min(state.last[n] for state in states) for n in reader.channels}


def _tokens(
    reader: CheckpointReader, weights: Mapping[int, float], first: bool
) -> tuple[int, dict[str, float]]:
    """Tokens of this rank, and of the island up to the last exchange of each channel."""
    total = 0.0
    weighed = dict.fromkeys((n for state in reader.states.values() for n in state.weighed), 0.0)
    for island, w in weights.items():
        states = [state for (i, _, _), state in reader.states.items() if i == island]
        total += w * sum(state.tokens for state in states)
        for name in weighed:
            weighed[name] += w * states[0].weighed.get(name, 0.0)
    return round(total) if first else 0, weighed


def _losses(reader: CheckpointReader, weights: Mapping[int, float]) -> list[float]:
    """Those that one rank of each saved island had noted since the last exchange."""
    firsts = {island: state for (island, *_), state in reversed(reader.states.items())}
    return [loss for island in weights for loss in firsts[island].losses]


def _report(reader: CheckpointReader, exchange: Exchange) -> None:
    """What was taken over, and what could not stay as it was."""
    place = exchange.channels[0].position
    islands = exchange.topology.islands
    saved = len(reader.islands)
    form = f"{islands} x {place.form}"
    log.info(
        "state of %d x %s (islands x shards x active copies) taken over by %s",
        reader.size,
        ShardPosition(reader.shards, num_copies=reader.active_copies).form,
        form,
    )
    # parameters in another order, or other shards: the others bring what is theirs
    own = islands == reader.size and exchange.topology.island in reader.islands
    if saved < reader.size and not own:
        log.warning(
            "the state was saved by %s, whole and in sight here are those of %s: nothing of the "
            "others' own state is taken here. Islands with disks of their own bring it themselves; "
            "it is lost where no island sees it",
            counted(reader.size, "island"),
            reader.islands,
        )
    lost = sorted(
        {
            f.step
            for state in reader.states.values()
            for f in state.in_flight
            if flying(f) not in reader.flights
        }
    )
    if lost:
        log.warning(
            "payloads of steps %s had not arrived in every part when the state was saved: dropped",
            lost,
        )
    if saved < reader.size:
        return  # what the others bring is not known here
    for c in (c.channel for c in exchange.channels):
        if c.accumulator is not None and c.reducer.mean_over == "senders" and saved != islands:
            share = 1 - min(saved, islands) / max(saved, islands)
            what = (
                "their mean over the islands falls by %.0f %%, their sum stays (islands that are "
                "added start with zeros)"
            )
            what = (
                what
                if islands > saved
                else "their sum over the islands falls by %.0f %%, their mean stays"
            )
            log.warning(
                "channel %r divides by senders: accumulators of %s go to %d, " + what,
                c.name,
                counted(saved, "island"),
                islands,
                100 * share,
            )
