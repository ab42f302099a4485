"""The order of one step: what an exchange does around the step of the base optimizers.

    backward -> [gradient channels] -> base optimizer step -> [delta, parameter and state channels]
    -> next forward

A channel with a source g (a gradient, a delta, parameters) and an accumulator m, where it has one,
does

    m = beta m + g
    q = topk(DCT m)
    m -= q
    exchange q
    g = sign(mean q)    or the mean itself, an outer step on the anchor, or new parameters

The first three and the last are done by the channel (`channels/channel.py`, `apply.py`), the
exchange by the queue (`in_flight.py`). Then the model gets the changed parameters. The engine's
step hooks (`TrainingHost.hooks`) call `before` and `after` here at the begin and end of each tick:
one complete round of the attached optimizers.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.profiler import record_function

from ..channels.bind import Bound
from ..channels.channel import ChannelPayload, ChannelRunner
from ..config.schema import ExchangeConfig
from ..elastic import agreement
from ..elastic.join_server import DonorFeed
from ..elastic.peer_group import PeerGroup
from ..errors import PeerLost, see
from ..hosts.base import TrainingHost
from ..hosts.step_hooks import TickCalls
from ..peers.header import LEAVING
from ..peers.join_messages import Tick
from ..peers.votes import VotePace
from ..rendezvous.sibling_watch import SiblingWatch, collective
from ..rendezvous.topology import Topology
from . import run_specification
from .backup import BackupIslands
from .drop import DropCompute
from .in_flight import InFlightQueue
from .message import LocalStatus, mean_rate
from .on_change import ChangeMeter
from .pace import Pace
from .projections import Projections
from .refusals import Copies
from .rewritten import EVERY, Rewritten, total
from .watch import drift

log = logging.getLogger("fsdp_demo")


class StepPhases(Protocol):
    """The work around a step that is not the channels' (`assembly.Phases` has it). All ranks of an
    island come to each method together.
    """

    def before_step(self) -> None:
        """Ahead of a step, before anything else is done."""

    def goes_on(self) -> bool:
        """At the end of a step after which this island, which is told to end, would stop alone:
        whether it takes further steps (`leaving.py`).
        """
        ...

    def hand_snapshot(self) -> None:
        """At the end of a step in which a joining island asks for the state: hand it over."""

    def end_of_step(self) -> None:
        """At the end of a step, after everything else. Raises Stopped: this island stops here."""


class StepRuntime:
    """The parts of an exchange on one rank, and the order in which they act.

    Args:
        config, topology: the method, and the place of this rank, as agreed.
        host: the engine's parameters and optimizers.
        bound: the channels at work on this rank.
        queue: the messages under way.
        status: tokens, losses and wishes of this replica, for its messages.
        phases: called around each step.
        step: of the job, to start from.

    Attributes:
        channels, buffers, parameters: see `Bound`. before_step, after_step: the channels and
            buffers that act before the base step, and after it. gradients_only: all channels act
            before it.
        island: the other ranks of this replica. calls: the present collective of each of them.
        drop: the micro-batches of a step and their limit.
        hooks: the engine's step hooks, which call `before`, `after` and `skip`.
        rewritten: the check for parameters written since an exchange.
        pace: the ticks that this replica leaves out, where islands take unlike steps.
        backup: the exchanges that this island may be late for; None where it is waited for.
        changes: of the gradients, where channels exchange only after one; else None.
        step: optimizer steps of the job done so far (ticks).
        begun: the step whose gradients are in the accumulators; a step that is cut off and taken
            again does not add them twice.
        acted: the step whose gradients were exchanged, wholly; -1 for none.
        since: the step from which this replica has trained by itself; above 0 where it has joined a
            run under way.
        seconds: of the last step.
        rows: of all islands in a step, 0 where one did not tell. rows_differ: an island trains more
            than another.
        stopped, stopped_alone, leaving, drift: as in `Readings`.
        stepped: this rank has begun a step since it joined the others. ended: the last exchange is
            over.
    """

    def __init__(
        self,
        config: ExchangeConfig,
        topology: Topology,
        host: TrainingHost,
        bound: Bound,
        queue: InFlightQueue,
        status: LocalStatus,
        phases: StepPhases,
        step: int,
    ):
        self.topology, self.host, self.status, self._phases = topology, host, status, phases
        self.step = step
        # `collective` notes there which call each rank of the island is in
        me = weakref.ref(self)  # for a thread, which must not keep the model
        self._calls = self.calls = SiblingWatch(topology, lambda: getattr(me(), "step", step))
        self.connections, self.island = queue.connections, queue.connections.island
        self.queue, self.projections = queue, Projections(host)
        self.pace = Pace(topology.island)
        self.work_with(config, bound)
        drop = self.drop = DropCompute(config.drop, topology, host, queue)
        reads = lambda: self.needs_gradients or drop.factor != 1.0  # noqa: E731
        calls = TickCalls(self.before, self.after, self.skip, reads, lambda: drop.factor)
        self.hooks = host.hooks(calls)
        copies = Copies(host, self.island)
        self._copies = copies if copies.pending else None
        self.rewritten = Rewritten(host, queue.watch.found_written)
        self._pace = VotePace()
        self._exchanged = False  # a message has left or was applied since the last vote
        self.drift: float | None = None
        self.begun = self.acted = -1
        self.since = self.rows = 0
        self.seconds, self._ended_at = 0.0, time.monotonic()
        self.ended = self.stopped = self.stopped_alone = self.leaving = self.rows_differ = False
        self.stepped = self._watches_gradients = False
        self._goes_on = False  # told to end, and takes further steps all the same
        self._rates: list[list[dict[str, Any]]] | None = None  # of this step, for a joining island

    def work_with(self, config: ExchangeConfig, bound: Bound) -> None:
        """Set the method: at the start, and where it is chosen later."""
        self.config, self.parameters = config, bound.parameters
        self.channels, self.buffers = bound.channels, bound.buffers
        self.pace.work_with(config)
        self.changes = ChangeMeter(config.channels) if config.checks else None
        self.queue.work_with([*self.channels, *self.buffers], config, self.pace)
        self.before_step = [c for c in self.channels if c.channel.before_step]
        self.backup = BackupIslands(self.queue, config) if config.backup_islands else None
        self.after_step = [c for c in (*self.channels, *self.buffers) if not c.channel.before_step]
        self.gradients_only = len(self.before_step) == len(self.channels)
        for c in self.channels:
            c.measures = config.norm_limit is not None and self.topology.islands > 1

    def go_to(self, step: int, begun: int | None = None) -> None:
        """Stand at `step` of the job. `begun`: nothing of that step is done, and accumulators hold
        the gradients of this step (-1: of none); None: all that stays as it is.
        """
        self.step = step
        if begun is not None:
            self.begun, self.acted = begun, -1
            self.hooks.begin_anew()

    def trains_from(self, step: int) -> None:
        """Note that this replica has joined a run under way, and trains by itself from `step`."""
        self.since = step

    def note_rows(self, rows: int, differ: bool) -> None:
        """Note the rows of all islands in a step, and whether some islands train more of them."""
        self.rows, self.rows_differ = rows, differ

    def note_drift(self, value: float | None) -> None:
        """Note how far this replica was from the mean when that was last taken."""
        self.drift = value

    def watch_gradients(self) -> None:
        """As `Exchange.watch_gradients`."""
        self._watches_gradients = True

    def end(self) -> None:
        """Count no further steps: the last exchange is over."""
        self.ended = True

    @property
    def needs_gradients(self) -> bool:
        """Whether gradients are read or changed in a step."""
        return self.config.needs_gradients or self._watches_gradients

    @property
    def peers(self) -> PeerGroup | None:
        """The ranks with the same shard on other islands; None without any, or when closed."""
        return self.connections.peers

    @property
    def donor_feed(self) -> DonorFeed | None:
        """The feed of this rank's state and steps to a joining island, where one may join."""
        return None if self.peers is None else self.peers.donor_feed

    @property
    def finished(self) -> bool:
        """Whether the exchange has ended: optimizer steps count no more."""
        return self.ended or self.connections.closed

    @property
    def applied(self) -> dict[str, int]:
        """For each channel the step of the last message that was applied here, -1 for none.
        Replicas with equal ones stand between the same exchanges: anchors and outer momenta of
        consensus presets are equal there."""
        return {c.channel.name: self.queue.applied.get(c.channel.name, -1) for c in self.channels}

    # ---- one tick ------------------------------------------------------------------------------

    @collective("optimizer.step()")
    def before(self) -> bool:
        """Gradient channels of this tick: clip, accumulate, send, apply due messages; without one
        hold the base step back.

        Returns:
            Whether islands have exchanged gradients, or their norm, in this tick.

        Raises:
            RuntimeError: they had done so already.
        """
        self.check_usable()
        if self.acted == self.step:
            raise RuntimeError(
                f"step {self.step + 1} was begun again, after its optimizer had failed: its "
                "gradients were exchanged, and are not sent twice. End this island, and resume "
                f"from a checkpoint{see('step-failed')}"
            )
        self.status.open_step()
        with torch.no_grad():
            self._phases.before_step()
        self.stepped = True
        self.rewritten.compare(self.hooks.aside)
        self.host.assert_unchanged()
        if self.config.drop is not None:
            self.drop.close(self.status.skipping)
        self.status.begin()
        if (feed := self.donor_feed) is not None and feed.follows:
            self._rates = run_specification.read_rates(self.host)
        if self.needs_gradients:
            self._act_on_gradients()
        self.begun = self.step
        if together := bool(self.before_step) or self.config.clips_together:
            self.acted = self.step
        return together

    @torch.no_grad()
    def _act_on_gradients(self) -> None:
        mine = self.before_step
        if self.changes and self.begun != self.step and not self.status.skipping:
            host = self.host
            self.changes.note(self.island, host.params, host.tensors("gradient"))
        self._look_at_gradients(bool(mine) or self._watches_gradients)
        if self._copies is not None:
            self._copies.look(mine)
        outgoing, applied = {}, []
        # else it was, before this step was cut off
        for c in mine if not self.queue.sent(self.step) else []:
            g = None
            if self.begun != self.step or c.accumulator is None:
                with record_function("fsdp_demo::accumulate"):
                    g = c.accumulate()  # m = beta m + DCT g; what is in flight has left m already
            if c.channel.schedule.due(self.step):
                with record_function("fsdp_demo::encode"):
                    q = outgoing[c.channel.name] = c.encode(self.step, g)  # q = topk m
                    c.subtract(q)  # m -= q, as the others will decode it
            del g  # as large as the shards: it must not outlive the message
        self.begun = self.step
        self._launch(outgoing, self.status.bad)  # q goes to the other islands
        # those of the others have come: of this step, or of `delay` steps ago
        for c, arrived in self.queue.receive(mine, self.step):
            with record_function("fsdp_demo::apply"):
                c.apply(arrived)  # g = sign(mean q)
            applied.append(c)
            del arrived
        self._exchanged |= bool(outgoing or applied)
        for c in mine:
            if c not in applied:
                c.set_gradients([False] * len(c.covered))
        if applied:
            self.clip_mean()

    @collective("optimizer.step()")
    def after(self) -> None:
        """After-step channels of this tick; then the step counts, and a wish to stop takes effect
        on the whole island. Then the ticks are counted that this replica leaves out before its next
        step. Raises Stopped: it stops.
        """
        meter, before = self.connections.meter, self._ended_at
        if self.pace.period:
            self.pace.end(meter.seconds_waiting, counts=not self.status.skipping)
            self.status.weigh_step()
        self._end_tick()
        while self._passes and not self.stopped:
            self.status.begin()
            if (feed := self.donor_feed) is not None and feed.follows:
                self._rates = run_specification.read_rates(self.host)
            self.begun = self.step
            self.pace.leave_out()
            self._end_tick()
        self.seconds = self._ended_at - before
        self.pace.begin(meter.seconds_waiting)

    @property
    def _passes(self) -> bool:
        """Whether the tick that comes is left out here; one that is made up for never is."""
        return not self.queue.replays and self.pace.leaves_out(self.step)

    def _end_tick(self) -> None:
        mine, step = self.after_step, self.step
        try:
            due = self._decided([c for c in mine if c.channel.schedule.due(step)])
            if due or self.queue.flights:  # else nothing is to be done, and it costs nothing
                with torch.no_grad():
                    self.exchange(mine, due, step)
        finally:  # the local step was taken, whatever became of the exchange
            self.step += 1
            self.status.end_step()
        for c in self.channels:
            c.enter(self.step)
        if self.config.drop is not None and self.since <= self.step:  # else it repeats others'
            self.drop.choose(self.step)
        now = time.monotonic()
        self.seconds, self._ended_at = now - self._ended_at, now
        self.pace.at_end(self.step, self.topology.rank == 0)
        if not self._passes:  # else nobody can write before the next tick
            self.rewritten.note()
        self.hooks.aside = False
        asked = self.settle_stop()
        if asked or self._rates is not None:
            self._let_follow(asked and not self.stopped)
        self._phases.end_of_step()

    def _decided(self, due: list[ChannelRunner]) -> list[ChannelRunner]:
        """Those of the channels that exchange now: where a schedule is a check, all islands decide
        by one message. Who asks all to stop needs an exchange, which carries that.
        """
        checks = [c for c in due if not c.channel.schedule.pure]
        if not checks or self.changes is None:
            return due
        unsent = self.step + 1 - self.queue.last[checks[0].channel.name]
        wanted = self.changes.wants(unsent) or self.status.asks_to_stop
        if self._mean_over_islands(self.island.max(float(wanted))[0]) > 0:
            return due
        self.queue.note_check(checks, self.step)
        return [c for c in due if c not in checks]

    @torch.no_grad()
    @collective("skip()")
    def skip(self) -> None:
        """Count a step that this replica does not take (`Exchange.skip`). Raises RuntimeError: some
        of the optimizers have stepped already.
        """
        self.check_usable()
        if self.hooks.partial:
            of = len(self.host.optimizers)
            raise RuntimeError(
                f"skip() in step {self.step + 1}, when {self.hooks.partial} of {of} optimizers "
                "have stepped"
            )
        self.status.skipping = True
        try:
            self.host.prepare_gradients([False] * len(self.host.params))
            self.hooks.skip(self.base_step if self.before_step else None)
        finally:
            self.status.skipping = False

    def check_usable(self) -> None:
        """Raise PeerLost if a message was lost, RuntimeError if the exchange has ended."""
        if self.queue.broken:
            raise PeerLost("the exchange has failed before: save, and start all islands again")
        if self.finished:
            raise RuntimeError(
                "the exchange is finished: call detach() to train on without it, or attach again"
            )

    def exchange(
        self,
        channels: Sequence[ChannelRunner],
        due: Sequence[ChannelRunner],
        step: float,
        now: int | None = None,
        last: bool = False,
    ) -> None:
        """Send for the channels that are `due`, and apply what has arrived for all `channels`; then
        the same for those that come `after` another one and see what it has done.

        Args:
            step, now, last: as for `InFlightQueue.receive`. The last exchange sends a part of a
                round.
        """
        if due and self.backup is not None and self.backup.take():
            self._exchanged, due = True, ()
        for first in (True, False):
            stage = [c for c in channels if first != bool(c.channel.after)]
            self.send([c for c in due if c in stage], partial=last)
            self.land(stage, step, now, last)

    def land(
        self,
        channels: Sequence[ChannelRunner],
        step: float,
        now: int | None = None,
        last: bool = False,
    ) -> None:
        """Receive and apply due messages for these channels, and settle them with the model.
        Arguments as for `InFlightQueue.receive`."""
        applied = []
        for c, arrived in self.queue.receive(channels, step, now, last):
            self.projections.note(c)
            with record_function("fsdp_demo::apply"):
                c.apply(arrived)
            applied.append(c)
            del arrived  # as large as the shards: it goes before the next one comes
        self.projections.remake()
        self._exchanged |= bool(applied)
        self.settle(applied, 1 + (self.step if now is None else now))

    # ---- its parts -----------------------------------------------------------------------------

    def clip_mean(self) -> None:
        """Clip the mean gradient over the islands, where the configuration says so."""
        if self.config.clip is not None and self.config.clips_mean:
            repeats = [s.repeats for s in self.host.params]
            self.island.clip(self.host.tensors("gradient"), self.config.clip, repeats=repeats)

    def _look_at_gradients(self, wanted: bool) -> None:
        """Clip this replica's own gradients, where the configuration says so. Gradients that are
        not finite are left out of the exchange and of this replica's own step. wanted: check them
        even if they are not clipped here.
        """
        limit = None if self.config.clips_mean else self.config.clip
        if limit is None and not wanted:
            return
        across = self._mean_over_islands if self.config.clips_together else None
        gradients = self.host.tensors("gradient")
        if not self.config.needs_gradients:  # sparse ones are allowed then
            gradients = [
                g if g is not None and g.layout == torch.strided else None for g in gradients
            ]
        bad = self.island.clip(gradients, limit, across, [s.repeats for s in self.host.params])
        if not isinstance(bad, Tensor) and bad:
            self.host.prepare_gradients([False] * len(self.host.params))
            if self.topology.rank == 0:
                text = "%s: gradients of step %d are not finite (NaN or Inf): left out"
                log.warning(text, self.topology.name, self.step + 1)
        self.status.gradients(bad, self.peers)

    def _mean_over_islands(self, value: float) -> float:
        step = self.step
        mean = self.queue.ask(lambda peers: agreement.mean_of(peers, step, value))
        return self.island.max(mean or 0.0)[0]  # a copy without peers has none

    def send(self, channels: Sequence[ChannelRunner], partial: bool = False) -> None:
        """Check that the sources are finite, accumulate, encode and launch. partial: the message
        belongs to a part of a round (`ChannelPayload`).
        """
        if not channels:
            return
        if self._copies is not None:
            self._copies.look(channels)
        bad = self.island.not_finite(
            [t for c in channels for t in c.tensors(c.channel.target) if t is not None]
        )
        for c in channels:
            c.left_out = bad
        outgoing = {}
        for c in channels:
            with record_function("fsdp_demo::accumulate"):
                delta = c.accumulate(self.queue.under_way(c))  # m = beta m + delta
            with record_function("fsdp_demo::encode"):
                q = outgoing[c.channel.name] = c.encode(self.step, delta)  # q = code(m)
                del delta  # as large as the shards
                c.subtract(q)  # m -= q
            q.partial = partial
        self._exchanged = True
        self._launch(outgoing, bad)

    def _launch(self, outgoing: dict[str, ChannelPayload], bad: float | Tensor) -> None:
        if not outgoing:
            return
        by_tokens = any(c.channel.reducer.weight == "tokens" for c in self.channels)
        fields = self.status.header(outgoing, by_tokens, self.island, self.host.device)
        if not by_tokens and self._joined_within(outgoing):
            fields = replace(fields, weight=-1.0)
        elif by_tokens and all(
            out.partial and self.queue.applied.get(name) == self.step - 1
            for name, out in outgoing.items()
        ):  # the last exchange right behind another: only late islands have counted tokens since
            fields = replace(fields, weight=1.0)
        unlike = bool(self.pace.period)  # the slowest rank's step is the island's
        took = self.island.max(self.pace.seconds(self.host.device))[0] if unlike else 0.0
        self.queue.launch(
            outgoing,
            self.step,
            replace(
                fields,
                bad=bad,
                total=self._total(outgoing),
                norm=self._norm(outgoing),
                rate=mean_rate(self.host),
                seconds=took,
            ),
        )

    def _joined_within(self, outgoing: dict[str, ChannelPayload]) -> bool:
        """Whether this replica joined within the round that is sent: it took fewer steps."""
        own = self.step + 1 - self.since
        within = [c.channel for c in self.channels if own < c.channel.schedule.sync_every]
        rounds = [outgoing[c.name] for c in within if c.sums_steps and c.name in outgoing]
        return self.since > 0 and not all(out.partial for out in rounds)

    def _norm(self, names: Collection[str]) -> float | Tensor:
        """The norm of this island's contribution, alike on its ranks; 0: not checked."""
        sent = [c for c in self.channels if c.channel.name in names and c.measures]
        if any(c.plain for c in sent):  # no other channel shares a message of gradients
            return self.island.norm_left
        squares = [torch.zeros((), device=self.host.device, dtype=torch.float32)]
        squares += [c.square for c in sent if c.square is not None]
        for c in sent:
            c.square = None
        return self.island.norm(torch.stack(squares).sum()) if sent else 0.0

    def _total(self, names: Collection[str]) -> Tensor | None:
        """The 64-bit sum of the tensors that must be equal on all replicas when these channels
        send: anchors, or parameters that only gradient channels change. None where there are none,
        and between the comparisons."""
        mine = [c for c in self.channels if c.channel.name in names]
        if not mine or self.topology.islands == 1 or self.peers is None:
            return None
        schedule = mine[0].channel.schedule
        if schedule.round(self.step) % max(1, -(-EVERY // schedule.sync_every)):
            return None
        if self.gradients_only:
            return total(
                [t for t in self.host.tensors("parameter") if t is not None], self.host.device
            )
        outer = [c for c in mine if c.channel.source == "delta" and c.channel.equal_at_end]
        anchors = (
            part for c in outer for w in c.windows if (part := c.fetch(c.anchor, w)) is not None
        )
        shared = self.projections.tensors() if self.config.averages_moments else ()
        return total(chain(anchors, shared), self.host.device) if outer else None

    def settle(self, applied: Sequence[ChannelRunner], at_step: int) -> None:
        """Commit the parameters that these channels have written to the model. The average after a
        delta channel becomes its anchor; the drift is the way to it. at_step: counted from 1."""
        if wrote := [c for c in applied if c.channel.writes_parameters]:
            self.host.commit()
            self.rewritten.exchanged(i for c in wrote if c not in self.buffers for i in c.covered)
        for c in applied:
            if c.channel.applier.acts.pairs:  # of its pair
                self.drift = drift(self.island, *c.moved)
        deltas = [c for c in self.channels if c.channel.source == "delta"]
        for c in applied:
            if c.channel.after and c.channel.source == "parameter":
                for d in deltas:
                    if d.channel.name.split(".")[0] == c.channel.after:
                        d.anchor_here()
                self.drift = drift(self.island, *c.moved)
                text = "%s: drift %.3g before the average of step %d"
                log.info(text, self.topology.name, self.drift, at_step)

    def base_step(self) -> None:
        """The base optimizers' step on gradients that the exchange has made."""
        self.host.base_step()
        self.host.commit()

    def settle_stop(self, now: bool = False) -> bool:
        """Agree in the island, at the end of a tick, whether all islands stop, whether this one
        stops alone, and whether an island that was told to end is the reason.

        All islands stop when a payload with the request is applied. An island that must stop now
        stops without the others, if no exchange is in flight. Several ranks vote at every exchange,
        and otherwise about once a second (`VotePace`). now: they have come for a vote.

        Returns:
            Whether a joining island asks for this one's state, on all peer groups.
        """
        if now:
            self.status.begin()
        elif self.island.world > 1:
            known = self._exchanged or self.stopped or bool(self.queue.watch.stop)
            known |= self._goes_on
            if not self._pace.due(now=known):
                return False
        self._exchanged = False
        # a resume goes on with a step of its own: not in the midst of what is left out
        ends = self.status.leaves(self.topology.islands) and not self._passes
        alone = ends and (self.status.goes or not self.queue.flights)
        feed = self.donor_feed
        unasked = self.peers is not None and (feed is None or not feed.wanted)
        # behind the question above: a newcomer would lack the message that was passed
        unasked |= self.backup is not None and self.backup.rounds.passed >= 0
        flags, leaves, told, unwanted, slowest = self.island.max(
            float(self.queue.watch.stop),
            float(alone),
            float(alone and self.status.told),
            float(unasked),
            self._pace.seconds(),
        )
        self._pace.agreed(slowest)
        together = bool(flags)
        self._goes_on = bool(told) and not together and self._phases.goes_on()
        if self._goes_on:
            return not unwanted
        self.stopped, self.stopped_alone = together or bool(leaves), bool(leaves) and not together
        self.leaving = bool(int(flags) & LEAVING if together else told)
        return not unwanted

    @torch.no_grad()
    def _let_follow(self, asked: bool) -> None:
        """Send a joining island the rates of the ended step, and, if `asked`, the state."""
        if self._rates is not None and self.donor_feed is not None:
            self.donor_feed.tick(Tick(self.step - 1, self._rates, self.drop.chosen))
        self._rates = None
        if asked:
            self._phases.hand_snapshot()
