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

The first three and the last are the channel's (`channels/channel.py`, `apply.py`), the exchange is
the queue's (`in_flight.py`). Then what has changed is settled with the model. When a tick begins
and ends is said by the engine's step hooks (`TrainingHost.hooks`), which call `before` and `after`
here: nothing stands between it and the step.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from ..channels.bind import Bound
from ..channels.channel import ChannelPayload, ChannelRunner
from ..config.schema import ExchangeConfig
from ..elastic import agreement
from ..elastic.peer_group import PeerGroup
from ..errors import PeerLost, Stopped, see
from ..hosts.base import TrainingHost
from ..peers.digests import EVERY, total
from ..peers.header import LEAVING
from ..peers.join_messages import Tick
from ..rendezvous.island import IslandGroup, SiblingWatch, collective
from ..rendezvous.topology import Topology
from . import run_specification
from .in_flight import InFlightQueue
from .local_status import LocalStatus, Rewritten, VotePace, mean_rate
from .refusals import Copies

log = logging.getLogger("fsdp_demo")


class StepRuntime:
    """The parts of an exchange on one rank, and the order in which they act.

    Args:
        config, topology: what was agreed.
        host: what the engine offers.
        bound: the channels at work on this rank.
        queue: the messages under way.
        step: of the job, to start from.

    Attributes:
        channels, buffers, parameters: see `Bound`. before_step, after_step: those of the channels
            and buffers that act there.
        island: the other ranks of this replica.
        hooks: the engine's step hooks, which call `before`, `after` and `skip`.
        status: what this replica says of itself.
        rewritten: looks for parameters that something else has written since an exchange.
        step: optimizer steps of the job done so far (ticks).
        drift: see `Exchange`.
        begun: the step whose gradients are in the accumulators: one that was cut off in the middle
            does not add them twice when it is taken again.
        acted: the step whose gradients were exchanged, wholly; -1 for none.
        since: the step from which this replica has trained by itself; later than 0 where it has
            joined a run under way.
        seconds: that the last step has taken.
        stops_by: all islands are told to end, and this one sends nothing more: the time at which it
            stops at the latest (`time.monotonic`). ends_at: the number of steps at which it does.
        unlike: another island's torch, device or processor is unlike this one's: replicas may
            differ in the last bit.
        ahead: called ahead of a step until it is None: what is to be done ahead of the first one
            (`first_step.py`).
        tells, told: what the host of a donor tells that of a newcomer (JSON), and what this one was
            told.
        handing: called at the end of a step in which an island that joins asks for this one's state
            (`snapshot.py`).
        at_end: called at the end of a step, behind everything else.
        goes_on: called at the end of a step after which this island is to stop alone: whether it
            trains on for a moment (`leaving.py`).
        ended: the last exchange is over.
        stopped, stopped_alone, leaving, raises_stopped: see `Exchange`.
        watches_gradients: see `Exchange.watch_gradients`.
    """

    def __init__(
        self,
        config: ExchangeConfig,
        topology: Topology,
        host: TrainingHost,
        bound: Bound,
        queue: InFlightQueue,
        step: int,
    ):
        self.topology = topology
        self.host = host
        self.step = step
        self._calls = SiblingWatch(topology, lambda: self.step)
        self.connections, self.island = queue.connections, queue.connections.island
        self.queue = queue
        self.work_with(config, bound)
        self.hooks = host.hooks(
            self.before, self.after, self.skip, gradients=lambda: self.needs_gradients
        )
        self.status = LocalStatus(topology.elastic)
        copies = Copies(host, self.island)
        self._copies = copies if copies.any else None
        self.rewritten = Rewritten(host)
        self._pace = VotePace()
        self._exchanged = False  # a message has left or was applied since the last vote
        self.drift: float | None = None
        self.begun = self.acted = -1
        self.since = self.rows = 0
        self.seconds, self._ended_at = 0.0, time.monotonic()
        self.stops_by: float | None = None
        self.ends_at = -1
        self.unlike = self.ended = self.stopped = self.stopped_alone = self.leaving = False
        self.rows_differ = False
        self.raises_stopped = True
        self.watches_gradients = False
        self.ahead: Callable[[], None] | None = None
        self.tells: Callable[[], dict[str, Any]] = dict
        self.told: dict[str, Any] = {}
        # The exchange: its hooks hold it, so that whoever attaches to the optimizer again finds it.
        self.owner: object = None
        self.handing: Callable[[], None] | None = None
        self.at_end: Callable[[], None] | None = None
        self.goes_on: Callable[[], bool] | None = None
        # of the step under way, where an island follows
        self._rates: list[list[dict[str, Any]]] | None = None

    def work_with(self, config: ExchangeConfig, bound: Bound) -> None:
        """From now on: at the start, and where the method is chosen later. The queue works with the
        same channels.
        """
        self.config = config
        self.channels, self.buffers, self.parameters = (
            bound.channels,
            bound.buffers,
            bound.parameters,
        )
        self.before_step = [c for c in self.channels if c.channel.before_step]
        self.after_step = [c for c in (*self.channels, *self.buffers) if not c.channel.before_step]
        for c in self.channels:
            c.measures = config.norm_limit is not None and self.topology.islands > 1

    @property
    def needs_gradients(self) -> bool:
        """Whether gradients are read or changed in a step."""
        return self.config.needs_gradients or self.watches_gradients

    @property
    def peers(self) -> PeerGroup | None:
        """See `Connections`."""
        return self.connections.peers

    @property
    def calls(self) -> SiblingWatch:
        """What the ranks of this island call."""
        return self._calls

    @property
    def finished(self) -> bool:
        """See `Exchange`."""
        return self.ended or self.connections.closed

    @property
    def applied(self) -> dict[str, int]:
        """For each channel the step of the last message that was applied here, -1 where there was
        none. Replicas for which these are equal stand between the same exchanges: what consensus
        presets share (anchors, outer momenta) is equal there."""
        return {c.channel.name: self.queue.applied.get(c.channel.name, -1) for c in self.channels}

    @property
    def gradients_only(self) -> bool:
        """Whether all channels act before the base step."""
        return len(self.before_step) == len(self.channels)

    @property
    def moving(self) -> list[ChannelRunner]:
        """The channels that set parameters."""
        return [c for c in self.channels if c.channel.writes_parameters]

    # ---- one tick ------------------------------------------------------------------------------

    @collective("optimizer.step()")
    def before(self) -> bool:
        """Gradient channels of this tick: clip, accumulate, send, apply what is due; hold the base
        step back where nothing is.

        Returns:
            Whether islands have exchanged gradients, or their norm: not twice in a tick.

        Raises:
            RuntimeError: they have, in this tick.
        """
        self.check_usable()
        if self.acted == self.step:
            raise RuntimeError(
                f"step {self.step} was begun again, after its optimizer had failed: its gradients "
                "were exchanged, and are not sent twice. End this island, and resume from a "
                f"checkpoint{see('step-failed')}"
            )
        if self.ahead is not None:
            with torch.no_grad():
                self.ahead()
        self.rewritten.compare(self.hooks.aside)
        self.host.assert_unchanged()
        self.status.begin()
        peers = self.peers
        if peers is not None and peers.donor_feed is not None and peers.donor_feed.follows:
            self._rates = run_specification.read_rates(self.host)
        if self.needs_gradients:
            self._act_on_gradients()
        self.begun = self.step
        together = bool(self.before_step) or self._clips_together
        if together:
            self.acted = self.step
        return together

    @torch.no_grad()
    def _act_on_gradients(self) -> None:
        mine = self.before_step
        self._look_at_gradients(bool(mine) or self.watches_gradients)
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
        # theirs are here: those of this step, or of `delay` steps ago
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
            self.clip(mean=True)

    @collective("optimizer.step()")
    def after(self) -> None:
        """After-step channels of this tick; then the step counts, and a wish to stop takes effect
        on the whole island.

        Raises:
            Stopped: it does.
        """
        mine, step = self.after_step, self.step
        try:
            due = [c for c in mine if c.channel.schedule.due(step)]
            if due or self.queue.flights:  # else nothing is to be done, and it costs nothing
                with torch.no_grad():
                    self.exchange(mine, due, step)
        finally:  # the local step was taken, whatever became of the exchange
            self.step += 1
        for c in self.channels:
            c.enter(self.step)
        now = time.monotonic()
        self.seconds, self._ended_at = now - self._ended_at, now
        self.rewritten.note(step)
        self.hooks.aside = False
        asked = self._settle_stop()
        if asked or self._rates is not None:
            self._let_follow(asked and not self.stopped)
        if self.at_end is not None and not self.stopped:
            self.at_end()
        if self.stopped and self.raises_stopped:
            raise Stopped(f"stopped after step {self.step} on request")

    @torch.no_grad()
    @collective("skip()")
    def skip(self) -> None:
        """See `Exchange.skip`."""
        self.check_usable()
        if self.hooks.partial:
            of = len(self.host.optimizers)
            raise RuntimeError(
                f"skip() in step {self.step}, when {self.hooks.partial} of {of} optimizers have "
                "stepped"
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
        """Send those that are due and apply what is: first the others, then those that come `after`
        one and see what it has done.

        step, now, last: as for `InFlightQueue.receive`; what is sent in the last exchange is a part
        of a round."""
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
        """Receive and apply what is due of these channels, and settle it with the model. Arguments
        as for `InFlightQueue.receive`.
        """
        applied = []
        for c, arrived in self.queue.receive(channels, step, now, last):
            with record_function("fsdp_demo::apply"):
                c.apply(arrived)
            applied.append(c)
            del arrived  # as large as the shards: it goes before the next one comes
        self._exchanged |= bool(applied)
        self.settle(applied)

    # ---- its parts -----------------------------------------------------------------------------

    def clip(self, mean: bool) -> None:
        """Clip the mean gradient, as the configuration says."""
        if mean and self.config.clip is not None and self.config.clips_mean:
            gradients = self.host.tensors("gradient")
            self.island.clip(gradients, self.config.clip, repeats=self._repeats)

    def _look_at_gradients(self, wanted: bool) -> None:
        """Clip this replica's own gradients, as the configuration says; leave out those that are
        not finite: nobody takes anything of this step from this replica, and it takes none of
        its own.

        `wanted`: they are looked at even if they are not clipped here."""
        limit = None if self.config.clips_mean else self.config.clip
        if limit is None and not wanted:
            return
        across = self._mean_over_islands if self._clips_together else None
        gradients = self.host.tensors("gradient")
        if not self.config.needs_gradients:  # sparse ones are allowed then
            gradients = [
                g if g is not None and g.layout == torch.strided else None for g in gradients
            ]
        bad = self.island.clip(gradients, limit, across, self._repeats)
        if not isinstance(bad, Tensor) and bad:
            self.host.prepare_gradients([False] * len(self.host.params))
            if self.topology.rank == 0:
                log.warning(
                    "%s: gradients of step %d are not finite (NaN or Inf): left out",
                    self.topology.name,
                    self.step + 1,
                )
        self.status.gradients(bad, self.peers)

    @property
    def _repeats(self) -> list[int]:
        return [s.repeats for s in self.host.params]

    @property
    def _clips_together(self) -> bool:
        """Whether own gradients are clipped by their norm over all islands."""
        config = self.config
        return config.clip_scope == "islands" and config.clip is not None and not config.clips_mean

    def _mean_over_islands(self, value: float) -> float:
        step = self.step
        mean = self.queue.ask(lambda peers: agreement.mean_of(peers, step, value))
        return self.island.max(mean or 0.0)[0]  # a copy without peers has none

    def send(self, channels: Sequence[ChannelRunner], partial: bool = False) -> None:
        """Look whether it is finite, accumulate, encode and launch. partial: what is sent belongs
        to a part of a round (`ChannelPayload`)."""
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
        said = self.status.header(outgoing, by_tokens, self.island, self.host.device)
        if not by_tokens and self._joined_within(outgoing):
            said = replace(said, weight=-1.0)
        self.queue.launch(
            outgoing,
            self.step,
            replace(
                said,
                bad=bad,
                total=self._total(outgoing),
                norm=self._norm(outgoing),
                rate=mean_rate(self.host),
                rewritten=self.rewritten.take(),
            ),
        )

    def _joined_within(self, outgoing: dict[str, ChannelPayload]) -> bool:
        """Whether this replica has joined within the round that these channels send: its steps are
        fewer than the others', and would count as much. Tokens are counted since it joined, so
        weights by tokens need no such rule."""
        own = self.step + 1 - self.since
        schedules = {
            c.channel.name: c.channel.schedule for c in self.channels if c.channel.sums_steps
        }
        sent = [
            schedules[name].sync_every
            for name, out in outgoing.items()
            if name in schedules and not out.partial
        ]
        return self.since > 0 and any(own < period for period in sent)

    def _norm(self, names: Collection[str]) -> float | Tensor:
        """The norm of what this island contributes to a message: one number, the same on all its
        ranks. 0 where nobody looks at it.
        """
        sent = [c for c in self.channels if c.channel.name in names and c.measures]
        squares = [
            torch.zeros((), device=self.host.device, dtype=torch.float32),
            *(c.square for c in sent if c.square is not None),
        ]
        for c in sent:
            c.square = None
        return self.island.norm(torch.stack(squares).sum()) if sent else 0.0

    def _total(self, names: Collection[str]) -> Tensor | None:
        """The sum of what is equal on all replicas when these channels send: anchors, or parameters
        that only gradient channels change. None where nothing is, and between the comparisons."""
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
        return total(anchors, self.host.device) if outer else None

    def settle(self, applied: Sequence[ChannelRunner]) -> None:
        """What was written goes to the model. Parameters that were averaged after a delta channel
        are its anchor from now on; their drift is what the mean has moved them."""
        if any(c.channel.writes_parameters for c in applied):
            self.host.commit()
            self.rewritten.exchanged()
        for c in applied:
            if c.channel.after and c.channel.source == "parameter":
                for d in self.channels:
                    if (
                        d.channel.source == "delta"
                        and d.channel.name.split(".")[0] == c.channel.after
                    ):
                        d.anchor_here()
                self.drift = drift(self.island, *c.moved)
                log.info(
                    "%s: drift %.3g before the average of step %d",
                    self.topology.name,
                    self.drift,
                    self.step,
                )

    def base_step(self) -> None:
        """The base optimizers' step on gradients that the exchange has made."""
        self.host.base_step()
        self.host.commit()

    def _settle_stop(self) -> bool:
        """What the island agrees on when a tick has ended: whether all stop, whether it stops
        alone, and whether it does since some island was told to end. Returns whether an island
        that joins asks for this one's state, on all peer groups.

        The wish travels in the next payload: all islands stop when it lands. An island that must
        stop now stops without the others, if no exchange is in flight. Several ranks ask each other
        at every exchange, and otherwise about once a second (`VotePace`); what makes them ask
        earlier all of them know."""
        if self.island.world > 1:
            known = self._exchanged or self.stopped or bool(self.queue.watch.stop)
            known |= self.stops_by is not None
            if not self._pace.due(now=known):
                return False
        self._exchanged = False
        alone = self.status.leaves(self.topology.islands) and (
            self.status.goes or not self.queue.flights
        )
        peers = self.peers
        unasked = peers is not None and (peers.donor_feed is None or not peers.donor_feed.wanted)
        flags, leaves, told, unwanted = self._voted(
            self.queue.watch.stop, alone, alone and self.status.told, unasked
        )
        together = bool(flags)
        if told and not together and self.goes_on is not None and self.goes_on():
            return not unwanted
        self.stopped, self.stopped_alone = together or bool(leaves), bool(leaves) and not together
        self.leaving = bool(int(flags) & LEAVING if together else told)
        return not unwanted

    def _voted(self, *here: float) -> Sequence[float]:
        """The largest of each number over the ranks of the island, which agree on the next vote,
        too.
        """
        if self.island.world == 1:
            return here
        *found, slowest = self.island.max(*map(float, here), self._pace.seconds())
        self._pace.agreed(slowest)
        return found

    @torch.no_grad()
    def _let_follow(self, asked: bool) -> None:
        """Tell who follows of the step that has ended; hand this island's state to who has asked
        for it.
        """
        if self._rates is not None and self.peers is not None and self.peers.donor_feed is not None:
            self.peers.donor_feed.tick(Tick(self.step - 1, self._rates))
        self._rates = None
        if asked and self.handing is not None:
            self.handing()


def drift(island: IslandGroup, far: float, norm: float) -> float:
    """|theta - mean| / |mean| of this replica from this rank's squared norms."""
    far, norm = island.sum(far, norm)
    return math.sqrt(far / norm) if norm else 0.0
