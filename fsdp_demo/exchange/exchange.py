"""The object users hold: the door to all that an exchange does. No step passes through it.

One tick is one complete round of the attached optimizers. What happens in it is in `runtime.py`,
how a run begins in `startup.py` and `first_step.py`, how it ends in `finish.py`, what it keeps in
`resume.py`, and what a method calls its model in `result.py`. This file checks that what is asked
for can be done.
"""

from __future__ import annotations

import atexit
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..channels.bind import Bound, bind
from ..comm.header import END
from ..comm.presence import Presence
from ..comm.topology import Topology
from ..config.fragments import expand
from ..config.schema import ExchangeConfig
from ..errors import PeerLost
from ..hosts.base import TrainingHost
from ..hosts.optimizers import check_inner
from ..status import leave
from . import (
    energy,
    farewell,
    finish,
    replay,
    result,
    resume,
    returning,
    snapshot,
    startup,
    summary,
)
from .connections import Connections
from .consensus import IslandConsensus
from .first_step import FirstStep
from .in_flight import ExchangeRecord, InFlightQueue
from .readings import Readings
from .refusals import refuse, refuse_sparse, warn_of_outside
from .runtime import StepRuntime
from .saved_state import ExchangeState
from .startup import OwnCheckpoint, Start, StateSource

log = logging.getLogger("fsdp_demo")

_SHOWN = (
    "a step inside outer_parameters() would be lost when the replica's own parameters come back: "
    "leave the context, then train"
)


class Exchange(Readings):
    """Joins one model's replicas; made by `attach`.

    How it stands is in `Readings`, what it does is here.

    Attributes:
        config, topology, host: what was agreed, and what the engine offers.
        step: optimizer steps of the job done so far (ticks).
        channels: the channels at work (`channel.ChannelRunner`).
        drift: |theta_r - mean| / |mean| of this replica when the mean was last taken (at
            `finish()`, or by the full average of the released rule); None where replicas are equal
            by construction.
        stopped: all ranks of this island (and, where they could agree, all islands) stop after this
            step. Raised as `Stopped` unless `raises_stopped` is False, for a host that ends its
            loop by itself. stopped_alone: the others do not. leaving: since an island was told to
            end (SIGTERM), not by a wish that all follow (`request_stop(together=True)`).
        newcomer: this island has joined a run under way: what `attach` was given of parameters,
            state and step was replaced by what the others hold, and `step` is where they were; they
            answer no question that is asked between `attach` and the first step.
        chosen_because: of an "auto" run, on the islands that were there: why this method.
        shows_result: the model holds `outer_parameters` at the moment, not this replica's own.

    Example:
        >>> import torch, fsdp_demo
        >>> model = torch.nn.Linear(4, 4)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> exchange = fsdp_demo.attach(optimizer, "diloco", model=model, period=2)
        >>> for _ in range(4):
        ...     model(torch.ones(1, 4)).sum().backward(); optimizer.step(); optimizer.zero_grad()
        >>> exchange.step
        4
        >>> exchange.finish()
    """

    def __init__(
        self,
        host: TrainingHost,
        config: ExchangeConfig,
        model: torch.nn.Module | None,
        topology: Topology,
        start: Start | None = None,
    ):
        self.config, self.topology, self.host, start = config, topology, host, start or Start()
        refuse(host, config.needs_gradients)
        check_inner(config, host.optimizer_names, host.optimizers)
        host.init_optimizer_state()
        self.shows_result = self.newcomer = False
        self._equal: bool | None = None
        self.chosen_because = ""
        self._presence = Presence(topology, self._follow)
        self._connections = Connections(
            topology, host.shard_position(topology.rank, topology.world), host.device
        )
        self._island, self._meter = self._connections.island, self._connections.meter
        try:
            bound = self._bound(config, model)
            self.channels, self._queue = bound.channels, self._queue_of(config, bound)
            self._runtime = StepRuntime(config, topology, host, bound, self._queue, start.step)
            self._runtime.handing = partial(snapshot.hand, self._runtime, model, start.facts)
            self._keep = partial(returning.keep, self._runtime, model, start.facts)
            self._hooks, self._first = self._runtime.hooks, FirstStep(self._runtime)
            farewell.allow(self._runtime)
            with self.paused(), torch.no_grad():
                self._join(start, model)
                if start.catch_up:
                    self.catch_up()
            self._announce = partial(
                summary.announce, self._runtime, start.batch, summary.total_steps(start.facts)
            )
            self._announce()
            if topology.rank == 0:
                warn_of_outside(host, model, topology.name)
        except BaseException:  # Ctrl-C while waiting for peers, too
            self._close()
            raise
        self._presence.start()
        if topology.elastic and topology.rank == 0 and (peers := self._peers) is not None:
            self._presence.fence(lambda: len(peers.alive) < topology.count, peers.expel)
        # a script that forgets finish() must not end with a live process group
        atexit.register(self._at_exit)
        self._hooks.start()

    def _bound(self, config: ExchangeConfig, model: torch.nn.Module | None) -> Bound:
        home = "cpu" if config.offload_outer_state else None
        names = [s.name for s in self.host.params if not s.frozen]
        placement = self._connections.placement(self.host, home)
        return bind(expand(config, names), config, placement, model)

    def _queue_of(self, config: ExchangeConfig, bound: Bound) -> InFlightQueue:
        # The hooks hold the runtime, the runtime this queue, and that, by `_gone`, the exchange: so
        # `attach` finds it on the optimizer.
        return InFlightQueue(
            [*bound.channels, *bound.buffers],
            self._connections,
            self.host.device,
            self.topology.rank == 0,
            self._gone,
            config.norm_limit,
            self.topology.islands,
        )

    @torch.no_grad()
    def choose(self, config: ExchangeConfig, model: torch.nn.Module | None) -> None:
        """Go on with the method of `config`, which all islands have agreed on, in place of one that
        has exchanged nothing: replicas have equal parameters, and nothing is under way.

        All ranks of all islands call it at the end of the same step.

        Raises:
            ValueError: the method is not defined for these optimizers or parameters.
        """
        refuse(self.host, config.needs_gradients)
        check_inner(config, self.host.optimizer_names, self.host.optimizers)
        bound = self._bound(config, model)
        queue, before = self._queue_of(config, bound), self._queue
        queue.history.load(before.history.note())
        queue.watch.loss = before.watch.loss
        watched = any(c.watches_energy for c in self.channels)
        self.config, self.channels, self._queue = config, bound.channels, queue
        self._runtime.work_with(config, bound, queue)
        if (peers := self._peers) is not None:
            peers.digest = config.digest()
        for c in bound.channels:
            c.watches_energy = watched
            c.start()
        queue.begin(self.step)
        farewell.allow(self._runtime)
        if config.needs_gradients:
            refuse_sparse(self.host)
        self._announce()

    def _join(self, start: Start, model: torch.nn.Module | None) -> None:
        """Agree on the run, bring parameters and state together, make the channels' state. Where
        the run is under way, take it over.
        """
        self.newcomer = replay.newcomer(self._runtime)
        if self.newcomer:
            own = start.state if isinstance(start.state, OwnCheckpoint) else None
            replay.join(
                self._runtime,
                model,
                start.facts,
                None if own is None else (own.mark, partial(own.load, self)),
            )
            self._first.joined(later=True)
            return
        donor, goes_on = startup.come_together(self._runtime, start, model)
        if (saved := start.saved) is not None:
            self.load_state_dict(saved if isinstance(saved, dict) else saved.state_for(self))
        startup.take_over(self._runtime, donor, goes_on)
        if self._peers is not None:
            self._peers.begun = True
        self._first.joined()

    @torch.no_grad()
    def rejoin(
        self,
        state: dict[str, Any] | StateSource | None,
        step: int,
        model: torch.nn.Module | None = None,
    ) -> None:
        """What `attach` does when it joins, once more: for an engine that loads a checkpoint after
        it was attached.

        All ranks of all replicas call it together, each with its parameters and inner optimizer
        states loaded. What is under way is forgotten.

        Args:
            state, model: as for `attach`. Without a state channels start anew, and all replicas
                take over from the one that is furthest.
            step: the job's step, where there is no state.

        Raises:
            ValueError: the state does not belong to this run.
        """
        self._runtime.check_usable()
        resume.forget(self._runtime)
        self._runtime.step, self._equal = step, None
        with self.paused():
            self._join(Start(step, state), model)
            self.catch_up()

    @torch.no_grad()
    def catch_up(self) -> None:
        """Send once more what was under way in the state from which this replica resumes; and where
        a loss has cut off the exchange of its last step, wait for the others to come so far, and
        apply it. Does nothing when called again.

        `attach(..., catch_up=False)` leaves it to its caller, who asks the islands something
        before, and calls this ahead of the first forward pass.
        """
        self._first.catch_up()

    def accept_parameters(self) -> None:
        """The parameters as they are now are right: for a host that has put this replica's own back
        after attach, as its saved state has them. Elsewhere parameters that were changed between
        attach and the first step are refused there."""
        self._first.accept_parameters()

    def report(self, tokens: int = 0, loss: float | Tensor | None = None) -> None:
        """Tell the exchange this rank's tokens since the last call (the island's weight) and its
        loss: the mean of those since the last message travels in the next header (a tensor is
        read only then), NaN left out."""
        self._runtime.status.add(tokens, loss)

    def rows_compared(self) -> None:
        """A host that has compared the islands' rows by itself says so: their first payloads need
        not be compared as well.
        """
        self._queue.watch.compares = False

    def request_stop(self, together: bool = False) -> None:
        """Ask to stop. Safe in a signal handler.

        The wish travels in the next payload, and all islands stop after the step in which that is
        applied.

        Args:
            together: wait for that, however long the period. False: where no payload leaves in the
                next step, this island stops after it (of several ranks: within about a second,
                all after one step), and the others find it gone at their next exchange.
        """
        self._runtime.status.request_stop(together)

    def leave(self, stopped: bool) -> None:
        """Tell the other islands that this one goes on no more, before it saves (`guard` and the
        Trainer call it). Nothing is applied.

        Where islands come and go the others train on, and this one may join them again.

        Args:
            stopped: it was told to stop: wait for the others to say where they stop, for at most
                ISLAND_STOP seconds. Where islands come and go all ranks of the island call it
                together, and for as long try to send ahead what it has done since its last
                exchange.
        """
        peers = self._peers
        if stopped and self.topology.elastic and self.stopped_alone:
            farewell.say(self._runtime, self.topology.stop_timeout)
        if peers is not None and peers.elastic:
            alone = len(peers.alive) == 1
            peers.leave()
            if alone and self.topology.rank == 0:
                self._presence.end("left")
            return
        self._presence.tell_stop(self.step)
        if stopped:
            self._presence.wait_for_stops(self.topology.stop_timeout)
        if self.topology.rank == 0:
            self._presence.end("left")

    def _follow(self) -> None:
        """Another island stops. Where islands come and go the others train on."""
        if self._peers is None or not self._peers.elastic:
            self.request_stop()

    def _gone(self, step: float) -> str:
        """Why the messages of a step will not come, as far as other islands have told; empty if
        they will.
        """
        if self._peers is not None and self._peers.elastic:
            return ""
        told = [(island, at) for island, at in self._presence.stopping.items() if at <= step]
        return f"island {told[0][0]} stops after step {told[0][1]}" if told else ""

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within this context the attached optimizers' steps do not count and nothing is
        exchanged.
        """
        with self._hooks.paused():
            yield

    def skip(self) -> None:
        """Count a step that this replica does not take (its loss was NaN): the tick goes on, a due
        exchange is joined.

        All ranks of the island call it together instead of `optimizer.step()`. A plain gradient
        channel leaves this replica out of the mean and still applies the mean of the others; with
        an accumulator nothing is added to it.
        """
        self._runtime.skip()

    @torch.no_grad()
    def flush(self) -> None:
        """Wait for what is in flight and apply it, in order of its steps."""
        self._runtime.check_usable()
        finish.flush(self._runtime)
        self.accept_parameters()

    @torch.no_grad()
    def finish(self, close: bool = True) -> None:
        """End the exchange: apply what is in flight, exchange once more what changed since, leave
        all replicas with equal parameters.

        Inside a round that is the plain mean of the replicas (of what they send), without an outer
        step: see `finish.conclude`. Where the preset has no consensus, the parameters become their
        mean over the replicas and `drift` says how far this one was. Afterwards the connections are
        closed; calling it again does nothing. All replicas call it at the same step.

        Args:
            close: False keeps the connections for questions to the `across_islands`, until
                `finish()` is called again.
        """
        if self.closed:
            return
        if not self._runtime.ended:
            self._runtime.check_usable()
            self.catch_up()
            self._first.check()
            self._equal = finish.conclude(self._runtime)
            self._runtime.ended = True
            summary.ended(self._runtime, self.totals(), self._equal)
        if close:
            if (peers := self._peers) is not None:  # none closes while another still reads
                peers.all_gather(torch.zeros(1, dtype=torch.uint8), END, self.step)
                peers.wait_stable(peers.timeout)
            if self.topology.rank == 0:
                self._presence.end("finished")
            self._close()

    @property
    def across_islands(self) -> IslandConsensus:
        """Small questions to all islands at one step (`consensus.IslandConsensus`), while they are
        connected.
        """
        if self._queue.broken or self.closed:
            raise RuntimeError("the islands are connected no more: ask before finish()")
        # islands that resume at unlike steps between the same exchanges ask each other before they
        # go on
        return IslandConsensus(
            self._queue,
            self._island,
            lambda: 0 if self.step == self._first.joined_at else self.step,
        )

    def digests_equal(self) -> bool | None:
        """Whether the parameters of all replicas are bit-equal now; None after `finish()` of a
        preset without consensus.

        All ranks of all islands call it at the same step."""
        if self.finished and self._equal is not None or self.closed:
            return self._equal
        return result.equal(self._runtime)

    @contextmanager
    def outer_parameters(self, model: torch.nn.Module) -> Iterator[None]:
        """Within this context `model` holds the parameters that the method calls its result: the
        anchor, or the mean over the replicas.

        Use it to evaluate and export. Where `result_kind` is "mean" all replicas enter at the same
        step, since they communicate here. Gradient presets hold them anyway. Local parameters come
        back at the end; a step taken here is a RuntimeError.
        """
        kind = "parameters" if self.finished or self._queue.broken else self.result_kind
        with self._hooks.paused(_SHOWN), result.shown(self._runtime, model, kind):
            before, self.shows_result = self.shows_result, self.shows_result or kind != "parameters"
            try:
                yield
            finally:
                self.shows_result = before

    def timeline(self) -> list[ExchangeRecord]:
        """The exchanges that have ended (the last 10 000): step of launch, step of application,
        when they were on the wire.
        """
        return list(self._queue.flown)

    def metrics(self) -> dict[str, Any]:
        """Counts of this rank (see `Meter`), the step, the mean over islands of the losses in the
        last headers, the drift at the end.
        """
        seen = self._queue.watch
        loss = None if math.isnan(seen.loss) else seen.loss
        found = {
            "step": self.step,
            **vars(self._meter),
            "loss": loss,
            "drift": self.drift,
            "not_finite": seen.left_out,
        }
        found["far"] = seen.far
        return found | self._members()

    def _members(self) -> dict[str, int]:
        """Where islands come and go: how many are members, how many took part in the last message,
        how often members have changed.
        """
        peers = self._peers
        if peers is None or not peers.elastic:
            return {}
        return {"alive": len(peers.alive), "participating": peers.size, "epoch": peers.epoch}

    def watch_energy(self, on: bool = True) -> None:
        """From the next exchange on, measure what `kept_energy` tells. It costs a copy of what a
        channel encodes, and one more decoding of what it sends; no result of training changes.
        """
        for c in self.channels:
            c.watches_energy, c.energy = on, None

    def kept_energy(self) -> dict[str, float]:
        """The share of the squared norm of what each channel encoded in its last exchange that was
        sent, by channel: 1 - |m - q|^2 / |m|^2, see `energy.kept`.

        All ranks of the island call it together. Empty before `watch_energy()` and the exchange
        after it."""
        return energy.kept(self.channels, self._island)

    def totals(self) -> dict[str, float]:
        """Numbers of the whole island for a log: bytes and tokens summed over its ranks, the
        longest wait, the mean loss over all ranks of all islands at the last exchange,
        contributions of any island that were not finite or far from the others' (where there were
        any), and where islands come and go how many there are.

        All ranks of the island call it together."""
        meter, seen = self._meter, self._queue.watch
        known = not math.isnan(seen.loss)
        sent, received, tokens, losses, ranks = self._island.sum(
            meter.bytes_sent, meter.bytes_received, self.tokens, seen.loss if known else 0.0, known
        )
        waited, count, left_out, far = self._island.max(
            meter.seconds_waiting, meter.exchanges, seen.left_out, seen.far
        )
        out: dict[str, float] = {
            "bytes_sent": int(sent),
            "bytes_received": int(received),
            "exchanges": int(count),
        }
        out |= {"seconds_waiting": waited, "tokens": int(tokens)}
        out |= {"loss": losses / ranks} if ranks else {}
        out |= {} if self.drift is None else {"drift": self.drift}
        out |= {name: int(n) for name, n in (("not_finite", left_out), ("far", far)) if n}
        return out | self._members()

    def state_dict(self) -> dict[str, Any]:
        """Everything that must survive a restart, as tensors and numbers: step and the channels'
        state of this rank.

        What is in flight is waited for and saved with it. Where islands come and go it waits until
        all of them have what this one has: a checkpoint must not hold what the others may settle
        otherwise. Belongs to this shard of this replica: save one per rank. Tensors are references
        to the live state: save them before the next step.

        Raises:
            PeerLost: the others do not get so far within ISLAND_TIMEOUT.
        """
        state = resume.state(self._runtime).to_tree() | {"config": self.config.to_dict()}
        if self.chosen_because:
            state["chosen_because"] = self.chosen_because
        if (peers := self._peers) is not None and not peers.wait_stable(peers.timeout):
            raise PeerLost(
                f"not all islands have what this one would save at step {self.step}, after "
                f"{peers.timeout:g} s: not saved"
            )
        return state

    def keep_since(self, folder: Path) -> str:
        """A checkpoint of this step is being saved: where islands come and go, keep on the disk of
        `folder` what comes from here on.

        At most as many bytes as a snapshot has. An island that comes back with the same checkpoint
        then fetches that and no snapshot. No collective; after `state_dict()`, in the same step.

        Returns:
            The mark that the checkpoint is to hold (`returning.py`); empty where nothing is kept.
        """
        return self._keep(folder)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()` of the same rank, bit for bit.

        Raises:
            ValueError: it was saved with other channels, or with another number of islands or
                ranks.
        """
        resume.load(self._runtime, ExchangeState.from_tree(state))

    def detach(self) -> None:
        """Remove the hooks and close the connections at once, without a last exchange. The
        optimizer goes on alone.
        """
        self._hooks.stop()
        self._close()

    def _close(self) -> bool:
        atexit.unregister(self._at_exit)
        self._presence.close()
        return self._connections.close()

    def _at_exit(self) -> None:
        farewell.warn_of_no_finish(self._runtime)
        if not self._close():
            log.error(
                "%s: an exchange was still waiting for a silent peer at exit", self.topology.name
            )
            leave(1)  # the interpreter would end threads that wait in gloo by aborting the process
