"""Joining a run under way: a newcomer starts from a donor's snapshot, and repeats the donor's steps
since then until it has caught up.

A step is repeated as `Exchange.skip` takes one: without a gradient of this replica, with the
donor's learning rates, and with the messages that the others have agreed on; payloads of this
replica go nowhere (`Following`). So parameters and optimizer states of gradient presets, anchors
and outer momenta become those of the others, bit by bit, while these train on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from ..elastic.newcomer import Following
from ..errors import PeerLost, Stopped, StoreSilent, WireError, counted
from ..peers.join_messages import LONGEST, Tick, filled, sizes
from . import resume, run_specification, snapshot, snapshot_head
from .runtime import StepRuntime
from .snapshot_head import DonorPosition

log = logging.getLogger("fsdp_demo")

T = TypeVar("T")

NEVER = 1 << 62
"""`StepRuntime.since` of an island that still repeats the steps of others."""

SLICE = 5.0
"""Seconds after which the ranks of an island tell each other that they still wait."""


def newcomer(runtime: StepRuntime) -> bool:
    """Whether this island joins a run under way. All of its ranks call it together."""
    mine = runtime.peers is not None and runtime.peers.following is not None
    active_copies = runtime.parameters.active_copies
    # copies that are not active have no peers
    return runtime.island.any(mine) if runtime.island.position.num_copies > active_copies else mine


def join(
    runtime: StepRuntime, model: torch.nn.Module | None, told: Mapping[str, Any]
) -> dict[str, Any]:
    """Start from a donor's snapshot and repeat its steps since; what the donor's host tells. All
    ranks of the island call it together, with the engine's step hooks paused.

    Args:
        model: as for `attach`.
        told: further facts of the run (`Start.facts`).

    Raises:
        ValueError: the others run something else.
        PeerLost: the donor is lost and there is no other, or the run has ended.
        Stopped: the others stopped meanwhile.
    """
    if runtime.peers is not None:
        runtime.peers.agree_on(runtime.config.digest())
    log.info(
        "%s: the run is under way: this island joins it, with the state that the others have now",
        runtime.topology.name,
    )
    following, stand, taken = _follow(runtime, model, told)
    runtime.trains_from(runtime.step)
    if runtime.topology.rank == 0:  # steps that were made up for count as those before
        runtime.status.settled = stand.tokens * runtime.step // max(stand.step, 1)
    if following is not None:
        following.caught_up(runtime.step)
        log.info(
            "%s goes on from step %d, and takes part from message %d on: step %d from a snapshot, "
            "%s made up for, %.1f MiB fetched",
            runtime.topology.name,
            runtime.step,
            following.base,
            stand.step,
            counted(taken, "step"),
            following.fetched / 2**20,
        )
    return stand.host


def _follow(
    runtime: StepRuntime, model: torch.nn.Module | None, told: Mapping[str, Any]
) -> tuple[Following | None, DonorPosition, int]:
    """Take a donor's snapshot and repeat its steps, from another donor where one is lost: the last
    donor, where its snapshot was taken, and how many steps were repeated.
    """
    while True:
        following = None if runtime.peers is None else runtime.peers.following
        try:
            stand = _take_snapshot(runtime, model, told, following)
            runtime.trains_from(NEVER)
            return following, stand, _take_ticks(runtime, following)
        except StoreSilent:
            raise
        except PeerLost as error:  # on all ranks of the island: no step of its own was taken
            _follow_another(runtime, following, error)


def _follow_another(runtime: StepRuntime, following: Following | None, error: PeerLost) -> None:
    """Ask for the state of another island, since the donor is lost; or the donor's new one."""
    name = runtime.topology.name
    again = runtime.island.any(following is not None and following.outdated)
    what = "a new snapshot is asked for" if again else "another island is asked for its state"
    log.warning("%s: %s: %s", name, error, what)
    runtime.island.together(
        lambda: None if following is None else following.another(again), f"{name}: another donor"
    )
    resume.forget(runtime)


def _take_snapshot(
    runtime: StepRuntime,
    model: torch.nn.Module | None,
    told: Mapping[str, Any],
    following: Following | None,
) -> DonorPosition:
    """Fetch a snapshot and set this island to its donor's state; the donor's position."""
    island, what = runtime.island, f"{runtime.topology.name}: the snapshot of another island"
    _materialise(runtime)
    brings = snapshot.brings(runtime, model)
    data = _poll(
        runtime, what, None if following is None else lambda: following.head(LONGEST, SLICE, brings)
    )
    stand, listed = island.together(
        lambda: (None, ()) if data is None else snapshot.expected(runtime, model, told, data), what
    )
    # copies that are not active get the position from the first rank
    if island.position.num_copies > runtime.parameters.active_copies:
        said = island.from_first(lambda: stand and msgspec.to_builtins(stand))
        stand = stand or msgspec.convert(said, DonorPosition)
    assert stand is not None, "read here, or sent by the first rank"
    if not island.same(stand.step):
        raise RuntimeError(
            f"{what}: the ranks of this island got snapshots of different steps: start it again"
        )
    parts = _poll(
        runtime,
        what,
        None if following is None else _fetching(following, sizes(listed), runtime.topology.name),
    )
    tensors = island.together(lambda: filled(parts or [], listed), what)
    snapshot.give(runtime, model, stand, tensors, following)
    return stand


def _fetching(
    following: Following, wanted: Sequence[int], name: str
) -> Callable[[], list[Tensor] | None]:
    """A function that asks for a snapshot's bodies, and logs now and then how long that takes."""
    began, before, whole = time.monotonic(), following.fetched, sum(wanted)
    says_at = SLICE / 2  # then twice as late each time

    def ask() -> list[Tensor] | None:
        nonlocal says_at
        found = following.bodies(wanted, SLICE)
        took = time.monotonic() - began
        come = following.fetched - before
        if found is None and took >= says_at:
            says_at, left = 2 * took, "nothing comes"
            if come:
                left = f"about {(whole - come) * took / come / 60:.1f} minutes are left"
            text = "%s: %.0f of %.0f MiB of the snapshot after %.0f s: %s"
            log.info(text, name, come / 2**20, whole / 2**20, took, left)
        return found

    return ask


def _materialise(runtime: StepRuntime) -> None:
    """Take a step on zero gradients with optimizers that make their state in it, to be replaced."""
    if not runtime.before_step or snapshot_head.kept(runtime):
        return
    trained = [None if s.frozen else True for s in runtime.host.params]
    runtime.host.prepare_gradients(trained)
    runtime.base_step()
    runtime.host.prepare_gradients([want and False for want in trained])


def _poll(runtime: StepRuntime, what: str, ask: Callable[[], T | None] | None) -> T | None:
    """Call `ask` until it has given a value on all ranks of the island that have one; the value."""
    come: list[T] = []

    def once() -> None:
        if ask is not None and not come and (found := ask()) is not None:
            come.append(found)

    while True:
        runtime.island.together(once, what)
        if not runtime.island.any(ask is not None and not come):
            return come[0] if come else None


def _take_ticks(runtime: StepRuntime, following: Following | None) -> int:
    """Repeat the donor's steps, heard by the first rank; their number. Rates are put back then."""
    before, taken = run_specification.read_rates(runtime.host), 0
    try:
        with runtime.queue.replaying():
            while (tick := _next(runtime, following)) is not None:
                _take(runtime, tick)
                taken += 1
    except Stopped:
        raise Stopped(
            f"the other islands stopped after step {runtime.step}, when this one was about to join "
            "them: nothing to join"
        ) from None
    finally:
        run_specification.write_rates(runtime.host, before)
    return taken


def _next(runtime: StepRuntime, following: Following | None) -> Tick | None:
    """The donor's next step to repeat; None when this island has caught up."""

    def ask() -> list[Any]:
        assert following is not None, "the first rank of an island has a peer group"
        planned = following.planned  # before the tick: one that comes between the two is taken
        tick = following.tick(0.0 if planned else SLICE)
        return [planned, None if tick is None else [tick.step, tick.rates, tick.limit]]

    while True:
        planned, found = runtime.island.from_first(ask)
        if found is not None:
            return Tick(*found)
        if planned:
            return None


def _take(runtime: StepRuntime, tick: Tick) -> None:
    """Repeat a step of the donor, without a gradient of this replica."""
    if tick.step != runtime.step:
        raise WireError(
            f"step {tick.step + 1} came to be made up for, here comes {runtime.step + 1}: start "
            "this island again"
        )
    run_specification.write_rates(runtime.host, tick.rates)
    runtime.drop.know(tick.limit)
    runtime.status.skipping = True
    try:
        if runtime.before_step:
            runtime.host.prepare_gradients([False] * len(runtime.host.params))
        runtime.before()
        if runtime.before_step:
            # an engine that keeps buffers for its gradients has them back after it
            runtime.base_step()
        runtime.after()
        snapshot.count_step(runtime)
    finally:
        runtime.status.skipping = False
