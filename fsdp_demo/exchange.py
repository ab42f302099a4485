"""The object users hold: it hangs on the optimizer's step, runs the channels on their clocks and keeps the job's step.

One tick is one complete round of the attached optimizers:

    backward -> [gradient channels] -> base optimizer step -> [delta, parameter and state channels] -> next forward

What leaves this rank goes through `mailbox.py`; what arrives is applied by `channel.py`. This file holds the order of things.
"""

from __future__ import annotations

import atexit
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import agreement, joining, outcome
from .announce import announce
from .channel import ActiveChannel
from .codecs.wire import STOP
from .config import Applier, Channel, ExchangeConfig
from .council import Council
from .fragments import expand
from .inner import check_inner
from .island import Island
from .mailbox import COUNTED, SKIPPED, Flown, Mailbox
from .meter import Meter
from .shards import Shards
from .topology import Topology
from .transport import Courier, PeerLost, leave

if TYPE_CHECKING:
    from .checkpoint import Saved

log = logging.getLogger("fsdp_demo")


class Stopped(RuntimeError):
    """An island asked to stop (`request_stop`, SIGTERM); all ranks of this island stand after the same step.

    Example:
        >>> from fsdp_demo import Stopped
        >>> issubclass(Stopped, RuntimeError)
        True
    """


class Exchange:
    """Joins one model's replicas; made by `attach`.

    Attributes:
        step: optimizer steps of the job done so far (ticks).
        config, topology: what was agreed.
        channels: the channels at work (`channel.ActiveChannel`).
        drift: |theta_r - mean| / |mean| of this replica when the mean was last taken (at `finish()`, or by the full average of the released
            rule); None where replicas are equal by construction.
        stopped: all ranks of this island (and, where they could agree, all islands) stop after this step. Raised as `Stopped` unless
            `raises_stopped` is False, for a host that ends its loop by itself. stopped_alone: the others do not.
        showing: the model holds `outer_parameters` at the moment, not this replica's own.
        told, heard: a number that this rank tells the other ranks of its island with every step, and the largest one after the last step.

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
        shards: Shards,
        config: ExchangeConfig,
        model: torch.nn.Module | None,
        topology: Topology,
        facts: dict[str, Any],
        step: int = 0,
        state: dict[str, Any] | Saved | None = None,
        batch: Sequence[int] = (),
    ):
        self.config, self.topology, self.step = config, topology, step
        self.drift: float | None = None
        self.shards = shards
        check_inner(config, shards.optimizer_names, shards.optimizers)
        shards.materialise()
        channels = expand(config, [s.name for s in self.shards.shards if not s.frozen])
        gradients = any(c.before_step for c in channels)
        self._skipping = self._ended = self._finished = self._stop_wanted = self._stop_sent = False
        self._stop_together = self.stopped = self.stopped_alone = False
        self.raises_stopped, self.told, self.heard, self.showing = True, 0.0, 0.0, False
        self._tokens = 0
        self._weighed: dict[str, float] = {}  # tokens of this island up to the last exchange of each channel
        self._losses: list[Tensor] = []  # noted since the last message
        self._equal: bool | None = None
        position = self.shards.position(topology.rank, topology.world)
        line, lanes = topology.join(position)
        self._line, self._courier = line, Courier(line) if line is not None else None
        self._meter = line.meter if line is not None else Meter()
        self._island = Island(topology, position)
        needed = gradients or (config.clip is not None and config.clip_over == "islands")
        self._ticks = shards.ticks(self._island, self._before, self._after, self.skip, gradients=needed)
        self._mailbox = Mailbox([], self._courier, self._island, config.digest(), self.shards.device)
        try:
            self._bind(channels, lanes)
            self._check_covered()
            with self.paused(), torch.no_grad():
                self._join(facts, model, state)
            announce(self, self._island, lanes, batch)
        except BaseException:  # Ctrl-C while waiting for peers, too
            self._close()
            raise
        atexit.register(self._at_exit)  # a script that forgets finish() must not end with a live process group
        self._ticks.start()

    # ---- start -----------------------------------------------------------------------------------------------------

    def _bind(self, channels: Sequence[Channel], lanes: int) -> None:
        """Bind the channels, and one more over all parameters, to the shards of this rank."""
        home, place, copies = "cpu" if self.config.outer_state == "host" else None, self._island.position, self._island.copies

        def bind(channel: Channel) -> ActiveChannel:
            return ActiveChannel(channel, self.shards, place, lanes, copies, self.topology.islands, self.config.seed, home)

        self.channels = self._mailbox.channels = [bind(c) for c in channels]
        self._parameters = bind(Channel("parameters", "parameter", applier=Applier("replace")))

    def _join(self, facts: dict[str, Any], model: torch.nn.Module | None, state: dict[str, Any] | Saved | None) -> None:
        """Agree on the run, bring parameters and state together, make the channels' state."""
        own = self.step if state is None else int(state["step"]) if isinstance(state, dict) else state.step
        donor, step = joining.agree_on_run(self._line, self.config, self.shards, facts, own)
        donor, self.step = (int(v) for v in self._island.largest(donor, step))
        resumes = state is not None and own == self.step
        joining.equalise_parameters(self._line, self._island, self._parameters, donor, keep=resumes and not self._gradients_only)
        joining.equalise_rest(self._line, self._island, self.shards, model, donor)
        self.shards.commit(model)
        for c in self.channels:
            c.start()
        self._mailbox.last = {c.channel.name: self.step for c in self.channels}
        if state is not None:
            self.load_state_dict(state if isinstance(state, dict) else state.state_for(self))
        if self.step:
            joining.equalise_state(self._line, self.channels, donor)
            if any(c.channel.before_step for c in self.channels):
                joining.equalise_optimizers(self._line, self._island, self._parameters, donor)
            self._mailbox.agree_on_resume()

    @torch.no_grad()
    def rejoin(self, state: dict[str, Any] | Saved | None, step: int, model: torch.nn.Module | None = None) -> None:
        """What `attach` does when it joins, once more: for an engine that loads a checkpoint after it was attached.

        All ranks of all replicas call it together, each with its parameters and inner optimizer states loaded. What is under way is
        forgotten.

        Args:
            state, model: as for `attach`. Without a state channels start anew, and all replicas take over from the one that is furthest.
            step: the job's step, where there is no state.

        Raises:
            ValueError: the state does not belong to this run.
        """
        self._usable()
        self._mailbox.ask(lambda: None)  # what is under way has arrived
        self._mailbox.flights.clear()
        self._tokens, self._weighed, self.drift, self._equal = 0, {}, None, None
        self._losses.clear()
        for c in self.channels:
            c.present = [False] * len(c.covered)
        self.step = step
        with self.paused():
            self._join({}, model, state)

    def _check_covered(self) -> None:
        """`exclude` means never exchanged: refused where the preset promises replicas that end equal, unless the parameter is frozen."""
        covered = {i for c in self.channels for i in c.covered if c.channel.shared}
        left = [s.name for i, s in enumerate(self.shards.shards) if i not in covered and not s.frozen]
        if left and self.config.shared and self.topology.islands > 1:
            names = ", ".join(left[:4]) + (" ..." if len(left) > 4 else "")
            raise ValueError(
                f"preset {self.config.preset!r} keeps replicas equal, but no channel covers {names}: freeze these parameters, or name them "
                "in another channel's include"
            )

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The innermost optimizers that are attached."""
        return list(self.shards.optimizers)

    @property
    def finished(self) -> bool:
        """Whether the exchange has ended (`finish`, `detach`): optimizer steps count no more."""
        return self._ended or self._finished

    @property
    def running(self) -> bool:
        """Whether the optimizers' steps still go through this exchange."""
        return not (self.finished or self._mailbox.broken)

    @property
    def closed(self) -> bool:
        """Whether the connections to the other replicas are gone."""
        return self._finished

    @property
    def clips(self) -> str:
        """Which gradient clipping is in force, as a sentence."""
        if self.config.clip is None:
            return self.shards.clips or "the exchange clips no gradients"
        where = "the mean gradient over the islands" if self.config.clips_mean else "each replica's own gradient before the step"
        if self.config.clip_over == "islands" and not self.config.clips_mean:
            where = "the gradients by one norm over the islands (one round trip per step)"
        return f"norm {self.config.clip:g} clips {where}"

    @property
    def consensus(self) -> bool:
        """Whether all replicas hold equal parameters after every exchange (`config.shared`: after `finish()`)."""
        return self.config.consensus

    @property
    def _gradients_only(self) -> bool:
        return all(c.channel.before_step for c in self.channels)

    # ---- the tick ----------------------------------------------------------------------------------------

    def _usable(self) -> None:
        if self._mailbox.broken:
            raise PeerLost("the exchange has failed before: save, and start again under a new ISLAND_RUN")
        if self.finished:
            raise RuntimeError("the exchange is finished: call detach() to train on without it, or attach again")

    @torch.no_grad()
    def _before(self) -> None:
        """Gradient channels of this tick: clip, accumulate, send, apply what is due; hold the base step back where nothing is."""
        self._usable()
        self.shards.check()
        self._stop_sent = self._stop_wanted
        mine = [c for c in self.channels if c.channel.before_step]
        self._clip(mean=False)
        outgoing = {}
        for c in mine:
            c.note_gradients()
            source = c.accumulate()  # what is in flight has left the accumulator already
            if c.channel.clock.due(self.step):
                outgoing[c.channel.name] = c.encode(self.step, source)
            del source  # as large as the shards: it must not outlive the message
        self._launch(outgoing)
        applied = self._mailbox.land(mine, self.step)
        for c in mine:
            if c not in applied:
                c.set_gradients([False] * len(c.covered))
        if applied:
            self._clip(mean=True)

    def _clip(self, mean: bool) -> None:
        """Clip gradients before (`mean` False) or after the exchange, as the configuration says."""
        if self.config.clip is None or self.config.clips_mean != mean:
            return
        across = self._mean_over_islands if self.config.clip_over == "islands" and not mean else None
        self._island.clip(self.shards.read("gradient"), self.config.clip, across)

    def _mean_over_islands(self, value: float) -> float:
        line, step = self._line, self.step
        mean = self._mailbox.ask(lambda: value if line is None else agreement.mean_of(line, step, value))
        return self._island.largest(0.0 if line is None and self.topology.islands > 1 else mean or 0.0)[0]

    @torch.no_grad()
    def _after(self) -> None:
        """After-step channels of this tick; then the step counts, and a wish to stop takes effect on the whole island."""
        mine = [c for c in self.channels if not c.channel.before_step]
        try:
            self._exchange(mine, [c for c in mine if c.channel.clock.due(self.step)], self.step)
        finally:  # the local step was taken, whatever became of the exchange
            self.step += 1
        # The wish travels in the next payload: all islands stop when it lands. Who cannot wait stops alone when nothing is under way.
        alone = self._stop_sent and not self._mailbox.flights and (not self._stop_together or self.topology.islands == 1)
        together, leaves, self.heard = self._island.largest(float(self._mailbox.stop), float(alone), self.told)
        self.stopped, self.stopped_alone = bool(together or leaves), bool(leaves and not together)
        if self.stopped and self.raises_stopped:
            raise Stopped(f"stopped after step {self.step} on request")

    def _exchange(
        self, channels: Sequence[ActiveChannel], due: Sequence[ActiveChannel], step: float, now: int | None = None, last: bool = False
    ) -> None:
        """Send those that are due and land what is: first the others, then those that come `after` one and see what it has done."""
        for first in (True, False):
            stage = [c for c in channels if first != bool(c.channel.after)]
            self._send([c for c in due if c in stage])
            self._settle(self._mailbox.land(stage, step, now, last))

    def _send(self, channels: Sequence[ActiveChannel]) -> None:
        self._launch({c.channel.name: c.encode(self.step, c.accumulate(self._mailbox.under_way(c))) for c in channels})

    def _settle(self, applied: Sequence[ActiveChannel]) -> None:
        """What was written goes to the model. Parameters that were averaged after a delta channel are its anchor from now on; their drift
        is what the mean has moved them."""
        if any(c.channel.source in ("delta", "parameter") for c in applied):
            self.shards.commit()
        for c in applied:
            if c.channel.after and c.channel.source == "parameter":
                for d in self.channels:
                    if d.channel.source == "delta" and d.channel.name.split(".")[0] == c.channel.after:
                        d.anchor_here()
                self.drift = outcome.drift(self._island, *c.moved)
                log.info("%s: drift %.3g before the average of step %d", self.topology.name, self.drift, self.step)

    def _launch(self, outgoing: dict[str, Any]) -> None:
        if not outgoing:
            return
        weight, flags = 1.0, STOP * self._stop_sent | SKIPPED * self._skipping
        if any(c.channel.reducer.weight == "tokens" for c in self.channels):
            tokens = self._island.total(self._tokens)[0]
            weight = tokens - min(self._weighed.get(name, 0.0) for name in outgoing)
            self._weighed.update(dict.fromkeys(outgoing, tokens))
            flags |= COUNTED * (tokens > 0)
        loss = float(torch.stack([v.float().cpu() for v in self._losses]).nanmean()) if self._losses else math.nan
        self._losses.clear()
        self._mailbox.launch(outgoing, self.step, weight, loss, flags)

    # ---- what users call -------------------------------------------------------------------------------------------

    def note(self, tokens: int = 0, loss: float | Tensor | None = None) -> None:
        """Tell the exchange this rank's tokens since the last call (the island's weight) and its loss: the mean of those since the last
        message travels in the next header (a tensor is read only then), NaN left out."""
        self._tokens += tokens
        if loss is not None:
            self._losses.append((loss.detach() if isinstance(loss, Tensor) else torch.tensor(loss)).reshape(()))

    def request_stop(self, together: bool = False) -> None:
        """Ask to stop. Safe in a signal handler.

        The wish travels in the next payload, and all islands stop after the step in which that is applied.

        Args:
            together: wait for that, however long the period. False: where no payload leaves in the next step, this island stops after
                it, and the others find it gone at their next exchange.
        """
        self._stop_together = together and (self._stop_together or not self._stop_wanted)
        self._stop_wanted = True

    def next_exchange(self) -> int:
        """The step (counted from 0, this one included) in which the next payload leaves: a pure function of the clocks."""
        cycle = math.lcm(*(c.channel.clock.period for c in self.channels))
        return next(s for s in range(self.step, self.step + cycle + 1) if any(c.channel.clock.due(s) for c in self.channels))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within this context the attached optimizers' steps do not count and nothing is exchanged."""
        with self._ticks.paused():
            yield

    @torch.no_grad()
    def skip(self) -> None:
        """Count a step that this replica does not take (its loss was NaN): the tick goes on, a due exchange is joined.

        All ranks of the island call it together instead of `optimizer.step()`. A plain gradient channel leaves this replica out of the
        mean and still applies the mean of the others; with an accumulator nothing is added to it.
        """
        self._usable()
        if self._ticks.partial:
            of = len(self.shards.optimizers)
            raise RuntimeError(f"skip() in step {self.step}, when {self._ticks.partial} of {of} optimizers have stepped")
        self._skipping = True
        try:
            self.shards.gradients([False] * len(self.shards.shards))
            self._ticks.skip(self._base_step if any(c.channel.before_step for c in self.channels) else None)
        finally:
            self._skipping = False

    def _base_step(self) -> None:
        """The base optimizers' step on gradients that the exchange has made."""
        self.shards.base_step()
        self.shards.commit()

    @torch.no_grad()
    def flush(self) -> None:
        """Wait for what is in flight and apply it, in order of its steps."""
        self._usable()
        while self._mailbox.flights:
            first = self._mailbox.flights[0]
            late = [c for c in self.channels if c.channel.name in first.parts]
            gradients = [c for c in late if c.channel.before_step]
            if gradients:  # what another channel left there has had its step
                self.shards.gradients([False] * len(self.shards.shards))
            self._settle(self._mailbox.land(late, first.step + max(c.channel.clock.delay for c in late), now=self.step - 1))
            if gradients:
                self._clip(mean=True)
                with self.paused():
                    self._base_step()

    @torch.no_grad()
    def finish(self, close: bool = True) -> None:
        """End the exchange: apply what is in flight, exchange once more what changed since, leave all replicas with equal parameters.

        Where the preset has no consensus, the parameters become their mean over the replicas and `drift` says how far this one was.
        Afterwards the connections are closed; calling it again does nothing. All replicas call it at the same step.

        Args:
            close: False keeps the connections for questions to the `council`, until `finish()` is called again.
        """
        if self._finished:
            return
        if not self._ended:
            self._conclude()
            self._ended = True
        if not close:
            return
        if self._line is not None:  # none closes while another still reads
            self._line.all_gather(torch.zeros(1, dtype=torch.uint8), setup=True)
        self._close()

    def _conclude(self) -> None:
        """The last exchange."""
        moving = [c for c in self.channels if c.channel.source in ("delta", "parameter")]
        if self.config.shared:
            # A queue is lengthened first: landing what is in flight takes the parameters to the anchor less what is under way.
            self._send([c for c in moving if c.queues and self._mailbox.last[c.channel.name] < self.step])
            self.flush()
            # Parameters that were mixed, or corrected after a delay, are sent once more even if they went out in the last step.
            late = [
                c
                for c in moving
                if self._mailbox.last[c.channel.name] < self.step or (c.channel.source == "parameter" and not c.channel.consensus)
            ]
            self._exchange(moving, late, math.inf, now=self.step - 1, last=True)
            for c in moving:
                if c.channel.source == "delta" and not c.channel.consensus:
                    c.show_anchor()
            self.shards.commit()
            self._equal = self.digests_equal()
            if not self._equal and self.topology.rank == 0:
                log.warning("%s: parameters differ between islands at the end: unlike hardware, or unlike training", self.topology.name)
        else:
            self.flush()
            self.drift = outcome.set_mean(self._parameters, self._mailbox, self._line, self._island)
            self.shards.commit()

    @property
    def council(self) -> Council:
        """Small questions to all islands at one step (`council.Council`), while they are connected."""
        if self._mailbox.broken or self._finished:
            raise RuntimeError("the islands are connected no more: ask before finish()")
        return Council(self._mailbox, self._island)

    def digests_equal(self) -> bool | None:
        """Whether the parameters of all replicas are bit-equal now; None after `finish()` of a preset without consensus.

        All ranks of all islands call it at the same step."""
        if self.finished and self._equal is not None or self._finished:
            return self._equal
        tensors, line = self.shards.read("parameter"), self._line
        same = self._mailbox.ask(lambda: line is None or agreement.all_equal(line, tensors))
        return not self._island.largest(float(same is False))[0]

    @property
    def shows(self) -> str:
        """What `outer_parameters` shows: "parameters" (those of the replica: gradient presets keep them equal), "anchor" (the outer
        parameters, known to every replica) or "mean" (over the replicas: a round of communication)."""
        moving = [c.channel for c in self.channels if c.channel.source in ("delta", "parameter")]
        if not moving or self.topology.islands == 1 and not any(c.source == "delta" for c in moving):
            return "parameters"
        return "anchor" if all(c.source == "delta" and c.shared for c in moving) else "mean"

    @contextmanager
    def outer_parameters(self, model: torch.nn.Module) -> Iterator[None]:
        """Within this context `model` holds the parameters that the method calls its result: the anchor, or the mean over the replicas.

        Use it to evaluate and export. Where `shows` is "mean" all replicas enter at the same step, since they communicate here. Gradient
        presets hold them anyway. Local parameters come back at the end.
        """
        if self.finished or self._mailbox.broken or self.shows == "parameters":
            try:
                with self.paused():
                    yield
            finally:
                self.shards.commit(model)
            return
        anchors = self.shows == "anchor"
        with self.paused(), outcome.shown(model, self.channels, self._parameters, self._mailbox, self._line, anchors):
            self.showing = True
            try:
                yield
            finally:
                self.showing = False

    def timeline(self) -> list[Flown]:
        """The exchanges that have ended (the last 10 000): step of launch, step of application, when they were on the line."""
        return list(self._mailbox.flown)

    def metrics(self) -> dict[str, Any]:
        """Counts of this rank (see `Meter`), the step, the mean over islands of the losses in the last headers, the drift at the end."""
        loss = None if math.isnan(self._mailbox.loss) else self._mailbox.loss
        return {"step": self.step, **vars(self._meter), "loss": loss, "drift": self.drift}

    def totals(self) -> dict[str, float]:
        """Numbers of the whole island for a log: bytes summed over its ranks, the longest wait, the mean loss over all ranks of all islands
        at the last exchange.

        All ranks of the island call it together."""
        m, known = self._meter, not math.isnan(self._mailbox.loss)
        sent, received, losses, ranks = self._island.total(m.bytes_sent, m.bytes_received, self._mailbox.loss if known else 0.0, known)
        waited, count = self._island.largest(m.seconds_waiting, m.exchanges)
        out: dict[str, float] = {
            "bytes_sent": int(sent),
            "bytes_received": int(received),
            "exchanges": int(count),
            "seconds_waiting": waited,
        }
        if ranks:
            out["loss"] = losses / ranks
        return out | ({} if self.drift is None else {"drift": self.drift})

    def state_dict(self) -> dict[str, Any]:
        """Everything that must survive a restart, as tensors and numbers: step and the channels' state of this rank.

        What is in flight is waited for and saved with it. Belongs to this shard of this replica: save one per rank. Tensors are
        references to the live state: save them before the next step.
        """
        in_flight = self._mailbox.state()
        return {
            "step": self.step,
            "digest": self.config.digest(),
            "last": dict(self._mailbox.last),
            "tokens": [self._tokens, dict(self._weighed)],
            "losses": [self._mailbox.loss, [float(v) for v in self._losses]],
            "channels": {c.channel.name: c.state() for c in self.channels},
            "in_flight": in_flight,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()` of the same rank, bit for bit.

        Raises:
            ValueError: it was saved with other channels, or with another number of islands or ranks.
        """
        if set(state["channels"]) != {c.channel.name for c in self.channels}:
            mine = [c.channel.name for c in self.channels]
            saved = sorted(state["channels"])
            raise ValueError(f"saved channels are {saved}, this configuration has {mine}: resume with the preset that saved them")
        if state["digest"] != self.config.digest():
            log.warning("the state was saved under another configuration (digest %016x, now %016x)", state["digest"], self.config.digest())
        for c in self.channels:
            c.load(state["channels"][c.channel.name])
        self.step, self._mailbox.last = max(self.step, int(state["step"])), dict(state["last"])
        self._tokens, self._weighed = state["tokens"][0], dict(state["tokens"][1])
        self._mailbox.load(state["in_flight"])
        self._mailbox.loss, losses = state.get("losses", (math.nan, ()))
        self._losses = [torch.tensor(v, device=self.shards.device) for v in losses]

    def detach(self) -> None:
        """Remove the hooks and close the connections at once, without a last exchange. The optimizer goes on alone."""
        self._ticks.stop()
        self._close()

    def _close(self) -> bool:
        atexit.unregister(self._at_exit)
        self._finished = True
        ended = self._courier is None or self._courier.close()
        self._courier = self._line = self._mailbox.courier = None
        self.topology.release()
        self._island.release()
        return ended

    def _at_exit(self) -> None:
        if not self._close():
            log.error("%s: an exchange was still waiting for a silent peer at exit", self.topology.name)
            leave(1)  # the interpreter would end threads that wait in gloo by aborting the process
