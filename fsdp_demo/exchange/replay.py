"""A newcomer joins a run under way: it takes a donor's snapshot, and the steps that the donor has taken since, until it has caught up.

A step is made up for as `Exchange.skip` takes one: without a gradient of its own, with the learning rates that the donor had in it, and
with the messages that the others have agreed on; what this replica would send goes nowhere (`joining.Following`). So parameters and
optimizer states of gradient presets, anchors and outer momenta become those of the others, bit by bit, while these train on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..comm.joining import LONGEST, OWN, Following, Listed, Tick, filled, opened, sizes
from ..errors import Stopped, WireError
from . import rates, returning, snapshot
from .runtime import Flow
from .snapshot_head import Stand

log = logging.getLogger("fsdp_demo")

T = TypeVar("T")

Own = tuple[str, Callable[[], dict[str, Any]]]
"""The mark of a checkpoint, and what loads it (`returning.OwnCheckpoint`)."""

NEVER = 1 << 62
"""The step from which an island trains by itself that still makes up for those of others."""

SLICE = 5.0
"""Seconds after which the ranks of an island say to each other that they still wait: their snapshots do not come at the same time."""


def newcomer(flow: Flow) -> bool:
    """Whether this island joins a run under way. All of its ranks call it together."""
    mine = _following(flow) is not None
    lanes = flow.parameters.lanes
    return flow.island.any(mine) if flow.island.position.copies > lanes else mine  # copies beyond the lanes have no line


def join(flow: Flow, model: torch.nn.Module | None, told: Mapping[str, Any], own: Own | None = None) -> None:
    """Take a snapshot and make up for the steps since. All ranks of the island call it together, with the engine's clock paused.

    Args:
        model: as for `attach`. told: further facts of the run (`Start.facts`).
        own: the mark of a checkpoint on the disk of this island, and what loads it: instead of a snapshot, if the donor keeps what came
            since. All ranks have one, or it counts for none.

    Raises:
        ValueError: the others run something else.
        PeerLost: the donor is lost, or the run has ended: start this island again.
        Stopped: the others stopped meanwhile.
    """
    flow.ahead, following = None, _following(flow)
    if flow.line is not None:
        flow.line.digest = flow.config.digest()
    log.info("%s: the run is under way: what this island brings is replaced by the state of another", flow.topology.name)
    own = None if flow.island.any(own is None) else own
    stand = _take_snapshot(flow, model, told, following, own)
    flow.since = NEVER
    taken = _take_ticks(flow, following)
    flow.since = flow.step
    if following is not None:
        following.caught_up(flow.step)
        mib, source = following.fetched / 2**20, "its own checkpoint" if stand.own else "a snapshot"
        log.info("%s: step %d from %s, %d steps made up for, %.1f MiB fetched", flow.topology.name, stand.step, source, taken, mib)
    log.info("%s goes on from step %d", flow.topology.name, flow.step)


def _following(flow: Flow) -> Following | None:
    return None if flow.line is None else flow.line.following


def _take_snapshot(
    flow: Flow, model: torch.nn.Module | None, told: Mapping[str, Any], following: Following | None, own: Own | None
) -> Stand:
    """Where the donor stood."""
    island, what = flow.island, f"{flow.topology.name}: the snapshot of another island"
    _materialise(flow)
    brings = snapshot.brings(flow, model) | ({} if own is None else {OWN: own[0]})
    data = _poll(flow, what, None if following is None else lambda: following.head(LONGEST, SLICE, brings))
    stand, listed = island.together(lambda: _compared(flow, model, told, data, brings.get(OWN, "")), what)
    if island.position.copies > flow.parameters.lanes:  # copies beyond the lanes hear where it stands from the first rank
        said = island.from_first(lambda: stand and stand.to_json())
        stand = stand or Stand.from_json(said)
    assert stand is not None, "a rank with a line has a snapshot, the others have heard of one"
    if not island.same(stand.step) or not island.same(bool(stand.own)):
        raise RuntimeError(f"{what}: the ranks of this island got snapshots of different steps: start it again")
    parts = _poll(flow, what, None if following is None else _fetching(following, sizes(listed), flow.topology.name))
    tensors = island.together(lambda: filled(parts or [], listed), what)
    if own is not None and stand.own:
        _stand_on(flow, model, stand, own)
    else:
        if own is not None:
            log.info("%s: a snapshot is fetched: what came since the checkpoint here is not kept, or it is another's", flow.topology.name)
        snapshot.give(flow, model, stand, tensors, following)
    return stand


def _fetching(following: Following, wanted: Sequence[int], name: str) -> Callable[[], list[Tensor] | None]:
    """Asks for the bodies of a snapshot, and says now and then how long that will take."""
    began, before, whole = time.monotonic(), following.fetched, sum(wanted)
    says_at = SLICE / 2  # then twice as late each time

    def ask() -> list[Tensor] | None:
        nonlocal says_at
        found, took, come = following.bodies(wanted, SLICE), time.monotonic() - began, following.fetched - before
        if found is None and took >= says_at:
            says_at = 2 * took
            left = f"about {(whole - come) * took / come / 60:.1f} minutes are left" if come else "nothing comes"
            log.info("%s: %.0f of %.0f MiB of the snapshot after %.0f s: %s", name, come / 2**20, whole / 2**20, took, left)
        return found

    return ask


def _stand_on(flow: Flow, model: torch.nn.Module | None, stand: Stand, own: Own) -> None:
    """Stand where the checkpoint of this island was saved.

    Raises:
        ValueError: what was loaded is not what was saved.
    """
    log.info("%s: the others keep what came since the checkpoint of step %d here: it is loaded", flow.topology.name, stand.step)
    tensors, arrived = returning.taken(flow, own[1])
    snapshot.give(flow, model, stand, tensors, None)
    returning.arrive(flow, arrived)
    copy = flow.line is None
    if flow.island.any(not copy and returning.mark(flow, model) != stand.own):
        raise ValueError(
            f"the checkpoint of step {stand.step} was loaded, and is not what was saved: remove its folder, and start this island again"
        )


def _compared(
    flow: Flow, model: torch.nn.Module | None, told: Mapping[str, Any], data: Tensor | None, own: str
) -> tuple[Stand | None, Listed]:
    """Where the donor stands, and what is to come; nothing on a rank without a line."""
    if data is None:
        return None, ()
    stand, listed = snapshot.expected(flow, model, told, opened(data))
    if stand.own not in ("", own):
        raise ValueError(f"the donor goes by a checkpoint with mark {stand.own!r:.40}, here is {own or 'none'}: start this island again")
    return stand, listed


def _materialise(flow: Flow) -> None:
    """Optimizers that make their state at their first step take one on gradients of zero: parameters and state are replaced after it."""
    if not flow.before_step or snapshot.kept(flow):
        return
    trained = [None if s.frozen else True for s in flow.shards.shards]
    flow.shards.gradients(trained)
    flow.base_step()
    flow.shards.gradients([want and False for want in trained])


def _poll(flow: Flow, what: str, ask: Callable[[], T | None] | None) -> T | None:
    """What `ask` gives, asked until it has come on all ranks; None on ranks that ask nothing."""
    come: list[T] = []

    def once() -> None:
        if ask is not None and not come and (found := ask()) is not None:
            come.append(found)

    while True:
        flow.island.together(once, what)
        if not flow.island.any(ask is not None and not come):
            return come[0] if come else None


def _take_ticks(flow: Flow, following: Following | None) -> int:
    """How many steps were made up for. The first rank's line says which come; rates are those of before in the end."""
    before, taken = rates.read(flow.shards), 0
    flow.mailbox.replays = True
    try:
        while (tick := _next(flow, following)) is not None:
            _take(flow, tick)
            taken += 1
    except Stopped:
        raise Stopped(f"the other islands stopped after step {flow.step}, when this one was about to join them: nothing to join") from None
    finally:
        flow.mailbox.replays = False
        rates.write(flow.shards, before)
    return taken


def _next(flow: Flow, following: Following | None) -> Tick | None:
    """The donor's next step; None when there is none and this island goes on by itself."""

    def ask() -> list[Any]:
        assert following is not None, "the first rank of an island has a line"
        planned = following.planned  # before the tick: one that comes between the two is taken
        tick = following.tick(0.0 if planned else SLICE)
        return [planned, None if tick is None else [tick.step, tick.rates]]

    while True:
        planned, found = flow.island.from_first(ask)
        if found is not None:
            return Tick(*found)
        if planned:
            return None


def _take(flow: Flow, tick: Tick) -> None:
    """One step without a gradient of this replica."""
    if tick.step != flow.step:
        raise WireError(f"step {tick.step} came to be made up for, here comes {flow.step}: start this island again")
    rates.write(flow.shards, tick.rates)
    flow.notes.skipping = True
    try:
        if flow.before_step:
            flow.shards.gradients([False] * len(flow.shards.shards))
        flow.before()
        if flow.before_step:
            flow.base_step()  # an engine that keeps buffers for its gradients has them back after it
        flow.after()
        snapshot.count_step(flow)
    finally:
        flow.notes.skipping = False
