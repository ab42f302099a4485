"""Construction of the parts of an exchange on one rank: channels bound to the host's parameters,
the queue of messages, the step that works with both, and the work around a step that is not the
channels' (`Phases`). The method may change as long as nothing is exchanged (`auto`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from ..channels.bind import Bound, bind
from ..channels.state import Placement
from ..compression.windows import pinned_vector
from ..config.fragments import expand
from ..config.schema import ExchangeConfig
from ..errors import Stopped
from ..hosts.base import TrainingHost
from ..hosts.optimizers import check_inner
from ..peers.collectives import VectorPool, new_vector
from ..rendezvous.topology import Topology
from . import leaving, snapshot
from .first_step import FirstStep
from .in_flight import InFlightQueue
from .leaving import Departures
from .message import LocalStatus, kept_vector
from .refusals import refuse, refuse_sparse
from .runtime import StepPhases, StepRuntime
from .sending import ExchangeConnections


def check(config: ExchangeConfig, host: TrainingHost) -> None:
    """Raise ValueError where the method is not defined for these optimizers or parameters."""
    refuse(host, config)
    check_inner(config, host.optimizer_names, host.optimizers)


def assemble(
    config: ExchangeConfig,
    topology: Topology,
    host: TrainingHost,
    model: torch.nn.Module | None,
    connections: ExchangeConnections,
    status: LocalStatus,
    phases: StepPhases,
    step: int,
) -> StepRuntime:
    """The parts for the method of `config`, from step `step` of the job. No communication.

    Args:
        model: gives parameters their names, as for `attach`.
        status, phases: as for `StepRuntime`.
    """
    bound = _bound(config, host, model, connections, topology.islands)
    queue = InFlightQueue(
        connections, host.device, topology.islands, topology.rank == 0, status.took_part
    )
    runtime = StepRuntime(config, topology, host, bound, queue, status, phases, step)
    _prepare_peers(runtime)
    return runtime


def change_method(
    runtime: StepRuntime, config: ExchangeConfig, model: torch.nn.Module | None
) -> None:
    """Replace the method, which has exchanged nothing, by that of `config` (`Exchange.choose`)."""
    check(config, runtime.host)
    islands = runtime.topology.islands
    bound = _bound(config, runtime.host, model, runtime.connections, islands)
    watched = any(c.watches_energy for c in runtime.channels)
    runtime.work_with(config, bound)
    if (peers := runtime.peers) is not None:
        peers.agree_on(config.digest())
    for c in bound.channels:
        c.watches_energy = watched
        c.start(runtime.step)
    runtime.queue.begin(runtime.step)
    _prepare_peers(runtime)
    if config.needs_gradients:
        refuse_sparse(runtime.host)


def _bound(
    config: ExchangeConfig,
    host: TrainingHost,
    model: torch.nn.Module | None,
    connections: ExchangeConnections,
    islands: int,
) -> Bound:
    island = connections.island
    placement = Placement(
        host,
        island.position,
        connections.active_copies,
        island.copies,
        islands,
        home="cpu" if config.offload_outer_state else None,
    )
    names = [s.name for s in host.params if not s.frozen]
    return bind(expand(config, names), config, placement, model)


def _prepare_peers(runtime: StepRuntime) -> None:
    """Tell the peer group what belongs to the method. On a CPU a vector and its mean that every
    step needs use their memory again (`kept_vector`). An accelerator fetches a mean from where it
    was received and made: torch keeps pinned memory.
    """
    if (peers := runtime.peers) is None:
        return
    room, device = new_vector, runtime.host.device
    active = {c.section: c for c in runtime.channels if c.section is not None}
    if device.type != "cpu":
        room = partial(pinned_vector, device)
    elif (section := kept_vector(list(active))) is not None:
        room = active[section].new_vector = VectorPool(section.layout.numel).new_vector
    peers.work_with(leaving.longest_part(runtime), room)


class Phases:
    """The `StepPhases` of an exchange.

    Args:
        owner: the `Exchange`, which lives as long as the engine's hooks lead here.
        departures: of this rank.
        model, told: with which a snapshot of this island is made (`snapshot.hand`).

    Attributes:
        at_end: called at the end of each step, unless None.
        tells: gives what a trainer tells the islands that join (`Exchange.tell_newcomers`).
        raises_stopped: a stop is raised as `Stopped`.
    """

    def __init__(
        self,
        owner: object,
        departures: Departures,
        model: torch.nn.Module | None,
        told: Mapping[str, Any],
    ):
        self._owner, self._departures, self._model, self._told = owner, departures, model, told
        self.at_end: Callable[[], None] | None = None
        self.tells: Callable[[], dict[str, Any]] = dict
        self.raises_stopped = True

    def begin(self, runtime: StepRuntime, first: FirstStep) -> None:
        """Set the step that this is about, and the work ahead of its first one."""
        self._runtime, self._first = runtime, first

    def before_step(self) -> None:
        """As `StepPhases.before_step`."""
        if (work := self._first.next) is not None:
            work()

    def goes_on(self) -> bool:
        """As `StepPhases.goes_on`."""
        return self._departures.goes_on(self._runtime)

    def hand_snapshot(self) -> None:
        """As `StepPhases.hand_snapshot`."""
        snapshot.hand(self._runtime, self._model, self._told, self.tells)

    def end_of_step(self) -> None:
        """As `StepPhases.end_of_step`."""
        stopped, backup = self._runtime.stopped, self._runtime.backup
        if backup is not None and not stopped:
            backup.open(lambda: leaving.coming(self._runtime))
        if self.at_end is not None and not stopped:
            self.at_end()
        if stopped and self.raises_stopped:
            raise Stopped(f"stopped after step {self._runtime.step} on request")
