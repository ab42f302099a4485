"""The start of an exchange: islands agree on the run, and make parameters, frozen parameters,
buffers and channel state equal.

The donor is the island that is furthest; of several, the first that resumes from a state. All
islands at an earlier step, and fresh ones, take over its parameters and its consensus state. Where
digests agree already nothing is sent.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from ..elastic import agreement
from ..errors import counted, first_few, see
from ..hosts.base import foreign_tensors
from ..peers.header import SETUP
from ..rendezvous.island import IslandGroup
from . import fused_path, resume, run_specification
from .first_step import bytes_of, shared_tensors, write_bytes
from .runtime import StepRuntime

log = logging.getLogger("fsdp_demo")


class StateSource(Protocol):
    """A saved state from which each rank gets its own: `checkpoint.SavedExchange`.

    Attributes:
        step: optimizer steps done when it was saved; left_out: those that an island left out.
        applied: for each channel the step of the last message that was applied.
    """

    @property
    def step(self) -> int: ...

    @property
    def applied(self) -> dict[str, int]: ...

    def left_out(self, topology: Any) -> int: ...

    def state_for(self, exchange: Any) -> dict[str, Any]:
        """The argument of this `Exchange`'s `load_state_dict` on this rank."""


@dataclass(frozen=True)
class Start:
    """The start of one rank, as `attach` was given it.

    Attributes:
        step: of the job, where there is no state.
        state: of this rank to resume from, or a source of it.
        facts: of the run that all replicas must share, beside those that are found here.
        batch: rows of a micro-batch per rank and micro-batches per step, for the log.
        catch_up: make up for an exchange that a loss had cut off (`Exchange.catch_up`).
        fresh: there is no state because the caller wants none.
    """

    step: int = 0
    state: dict[str, Any] | StateSource | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    batch: Sequence[int] = ()
    catch_up: bool = True
    fresh: bool = False

    def point(self, ranks: int) -> StartPoint:
        """The start point of an island of so many ranks."""
        rows = math.prod(self.batch) * ranks if self.batch else 0
        if self.state is None:
            return StartPoint(self.step, None, rows)
        if isinstance(self.state, dict):
            return StartPoint(int(self.state["step"]), self.state.get("applied", {}), rows)
        return StartPoint(self.state.step, self.state.applied, rows)


class StartPoint(NamedTuple):
    """The position of an island before the first step, as it tells the others.

    Attributes:
        step: of the job.
        applied: of its saved state, the step of the last message that each channel has applied
            (`StepRuntime.applied`); None without a state.
        rows: that it trains in a step; 0 where no batch was told.
        fused: the mark of its fused kernels; empty: it has none.
    """

    step: int
    applied: dict[str, int] | None
    rows: int
    fused: str = ""


def come_together(
    runtime: StepRuntime, start: Start, model: torch.nn.Module | None
) -> tuple[int, bool]:
    """Agree on the run and its step, make parameters, frozen parameters and buffers equal, make the
    channels' state.

    Replicas that all resume between the same exchanges keep their own steps: each goes on to the
    next exchange from where it was stopped.

    Returns:
        The donor's index, and whether any replica resumes, from a step or with messages under way.
    """
    kernels = fused_path.offer(runtime)
    own = start.point(runtime.topology.world)._replace(fused=kernels.mark)
    found = agree_on_run(runtime, start.facts, own)
    if runtime.peers is not None:
        runtime.peers.agree_on(runtime.config.digest())
    donor, furthest, apart, unlike, goes_on, rows, rows_differ, by_torch = (
        int(v) for v in runtime.island.max(*map(float, found))
    )
    fused_path.settle(runtime, kernels, not by_torch)
    runtime.note_rows(rows, bool(rows_differ))
    runtime.queue.watch.unlike = bool(unlike)
    runtime.go_to(own.step if apart else furthest)
    if apart:
        text = "%s goes on from step %d, the furthest island from %d: no exchange lies between"
        log.info(text, runtime.topology.name, own.step, furthest)
    # a replica that resumes keeps its own tensors where no island is further
    keep = own.applied is not None and own.step == runtime.step
    position, peers = runtime.parameters.position, runtime.peers
    changed = _sync(runtime, "parameter", donor, keep and not runtime.gradients_only)
    if changed and peers is not None and position.shard == position.copy == 0:
        log.info("parameters taken over from %s", peers.label(donor))
    _sync_rest(runtime, model, donor, keep)
    runtime.host.commit(model)
    for c in runtime.channels:
        c.start(runtime.step)
    runtime.queue.begin(runtime.step)
    if start.step and not (start.fresh or goes_on) and runtime.topology.rank == 0:
        _warn_of_no_state(runtime, donor)
    return donor, bool(furthest or goes_on)


def _warn_of_no_state(runtime: StepRuntime, donor: int) -> None:
    """Log what begins anew, where a run goes on and no island has a saved state of the exchange."""
    kept = {
        "anchors": [c.anchor for c in runtime.channels],
        "outer momenta": [c.momentum for c in runtime.channels],
        "accumulators": [c.accumulator for c in runtime.channels],
    }
    lost = [name for name, works in kept.items() if any(w is not None for w in works)]
    peers, moves = runtime.peers, not runtime.gradients_only
    if peers is not None and peers.size > 1 and moves:
        lost.append(f"parameters of all islands but {peers.label(donor)}")
    if lost:
        log.warning(
            "%s: attach at step %d without a saved state of the exchange: what it held is lost "
            "(%s). To go on exactly, call save_exchange(FOLDER, exchange) beside each checkpoint, "
            "and attach(..., state=load_exchange(FOLDER)). Where that is meant, "
            "attach(..., fresh=True)%s",
            runtime.topology.name,
            runtime.step,
            ", ".join(lost),
            see("no-exchange-state"),
        )


def take_over(runtime: StepRuntime, donor: int, goes_on: bool) -> None:
    """Where an island resumes (`goes_on`): make shared state and messages under way equal."""
    if not goes_on:
        return
    _sync_state(runtime, donor)
    if runtime.before_step:
        _sync_optimizers(runtime, donor)
    if runtime.config.averages_moments:
        _sync_bytes(runtime, bases := [t.clone() for t in runtime.projections.tensors()], donor)
        runtime.projections.turn(bases)  # moments are averaged in one basis
    resume.agree_on_norms(runtime.queue, donor)
    resume.agree(runtime, donor)


class Agreed(NamedTuple):
    """The agreement of all replicas.

    Attributes:
        donor: index of the replica that gives what others lack. furthest: its step.
        apart: all resume at unlike steps between the same exchanges.
        unlike: another island's machine or torch is unlike this one's.
        goes_on: the furthest resumes from a state.
        rows: of all islands in a step; 0 where one did not say. rows_differ: an island trains more
            than another.
        by_torch: not every island has the same fused kernels.
    """

    donor: int
    furthest: int
    apart: bool
    unlike: bool
    goes_on: bool
    rows: int
    rows_differ: bool
    by_torch: bool


def agree_on_run(runtime: StepRuntime, told: Mapping[str, Any], own: StartPoint) -> Agreed:
    """Compare the run specification, parameters and optimizers of all replicas; their agreement.

    Args:
        told: further facts of the run.

    Raises:
        ValueError: they differ; on every replica, with the values of both sides.
    """
    peers, host = runtime.peers, runtime.host
    if peers is None or peers.size == 1:
        resumes, lacks = own.applied is not None, not own.fused
        return Agreed(0, own.step, False, False, resumes, own.rows, False, lacks)
    unlike = agreement.agree(peers, run_specification.specification(runtime.config, host, told))
    if unlike and runtime.config.averages_moments:
        raise ValueError(
            "moments of low rank are averaged: islands of unlike hardware or libraries would make "
            "unlike bases for them. Take equal ones, or diloco with inner_optimizer='lowrankadamw'"
        )
    run_specification.agree_on_tensors(peers, host.params)
    everyone = [StartPoint(*theirs) for theirs in agreement.gather_json(peers, own)]
    steps, rows = [e.step for e in everyone], [e.rows for e in everyone]
    if len(set(steps)) == 1:  # a schedule has moved the rates of those that are further
        agreement.agree(peers, run_specification.rates(host))
    alike = all(e.applied is not None and e.applied == everyone[0].applied for e in everyone)
    # of a step the one that has a state, if any has
    resume = [(e.step, e.applied is not None) for e in everyone]
    return Agreed(
        donor=resume.index(max(resume)),
        furthest=max(steps),
        apart=alike and len(set(steps)) > 1,
        unlike=unlike,
        goes_on=max(resume)[1],
        rows=sum(rows) if all(rows) else 0,
        rows_differ=all(rows) and len(set(rows)) > 1,
        by_torch=not own.fused or len({e.fused for e in everyone}) > 1,
    )


def _sync(runtime: StepRuntime, source: str, donor: int, keep: bool = False) -> bool:
    """Broadcast the donor's tensors of a source where they differ, each active copy its share, and
    complete them in the island; whether they have changed here. keep: this replica keeps its own.
    """
    peers, parameters = runtime.peers, runtime.parameters
    work, changed = parameters.pack(source), False
    if peers is not None and peers.size > 1:
        assert work is not None
        changed = agreement.sync_from(peers, work, donor, keep)
    if changed := runtime.island.any(changed):
        parameters.write(work, parameters.tensors(source))
    return changed


def _sync_rest(runtime: StepRuntime, model: torch.nn.Module | None, donor: int, keep: bool) -> None:
    """Broadcast the donor's frozen parameters and buffers (those of `model`), but those that are
    each island's own; without a model compare frozen parameters by their digest.

    Args:
        keep: this replica keeps its own: running statistics differ between two averages.

    Raises:
        ValueError: without a model, if frozen parameters of the optimizer differ between replicas.
    """
    peers, island, host = runtime.peers, runtime.island, runtime.host
    if model is None:
        both = zip(host.tensors("parameter"), host.params, strict=True)
        frozen = [t for t, s in both if s.frozen]
        differ = (
            peers is not None
            and peers.size > 1
            and not agreement.all_equal(peers, agreement.digest(frozen), SETUP)
        )
        if island.any(differ):
            raise ValueError(
                "frozen parameters differ between islands: pass model= to attach, or load the same "
                "weights"
            )
        return
    _log_quantized(foreign_tensors(model), island)
    local = list(shared_tensors(host, model, runtime.config.own_tensors).values())
    if island.any(bool(local)):  # a rank may have empty shards of all of them
        _sync_bytes(runtime, local, donor, keep)


def _sync_bytes(
    runtime: StepRuntime, tensors: list[torch.Tensor], donor: int, keep: bool = False
) -> None:
    """Write what the donor's rank holds into these tensors. keep: as for `_sync`."""
    work, peers = bytes_of(tensors), runtime.peers
    if peers is not None and peers.size > 1:
        agreement.sync_from(peers, work, donor, keep)
    runtime.island.broadcast(work)  # copies that are not active have no peers: they hear of it
    write_bytes(work, tensors)


def _log_quantized(foreign: Mapping[str, torch.Tensor], island: IslandGroup) -> None:
    """Log the tensors that are neither sent nor compared, since their scales are not in them."""
    named = [f"{name} ({type(t).__name__})" for name, t in foreign.items() if not t.requires_grad]
    if named and island.rank == 0:
        log.info(
            "quantized weights are left alone, neither sent nor compared (%s): %s. Load the same "
            "on all islands",
            counted(len(named), "tensor"),
            first_few(named, 3),
        )


def _sync_state(runtime: StepRuntime, donor: int) -> None:
    """Broadcast the donor's anchors and outer momenta where all replicas share them."""
    if (peers := runtime.peers) is None or peers.size == 1:
        return
    for c in [c for c in runtime.channels if c.channel.equal_at_end]:
        works = [work for work in (c.anchor, c.momentum) if work is not None]
        changed = [agreement.sync_from(peers, work, donor) for work in works]
        if any(changed) and c.written is not None:
            c.written = c.pack("parameter")


def _sync_optimizers(runtime: StepRuntime, donor: int) -> None:
    """Broadcast the donor's inner optimizer states, for a preset whose replicas are equal because
    they take equal inner steps. Where the islands' optimizers hold different states, or states
    that do not have the shape of their parameter, only a warning is logged.
    """
    peers, island, pairs = runtime.peers, runtime.island, runtime.host.optimizer_states()
    if runtime.topology.islands == 1:
        return
    states = [s for _, s in pairs]
    shapes = {
        (k, v.shape == p.shape)
        for p, s in pairs
        for k, v in s.items()
        if isinstance(v, torch.Tensor) and k != "step"
    }
    names = sorted({k for k, _ in shapes})
    counts = [float(s["step"]) for s in states if "step" in s]
    everyone = agreement.gather_json(peers, [names, counts]) if peers is not None else []
    lacking = not all(fits for _, fits in shapes) or any(
        theirs[0] != names or len(theirs[1]) != len(counts) for theirs in everyone
    )
    if island.any(lacking):
        log.warning(
            "the inner optimizers hold different states on the islands: parameters may drift apart"
        )
        return
    for name in names:
        _sync(runtime, f"state:{name}", donor)
    furthest = island.max(*(everyone[donor][1] if everyone else counts)) if counts else []
    for s, n in zip([s for s in states if "step" in s], furthest, strict=True):
        s["step"] = torch.full_like(s["step"], n) if isinstance(s["step"], torch.Tensor) else int(n)
