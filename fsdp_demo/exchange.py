"""The object users hold: it hangs on the optimizer's step, runs the channels on their clocks and keeps the job's step.

One tick is one complete round of the attached optimizers:

    backward -> [gradient channels] -> base optimizer step -> [delta, parameter and state channels] -> next forward

Everything that leaves this rank goes through one `Line`, one message per transport and phase; what comes back is applied after all ranks of
the island have voted that it arrived, so that a lost peer leaves an island in one state.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import agreement
from .channel import ActiveChannel, Outgoing
from .codecs.wire import STOP, Header
from .config import Applier, Channel, ExchangeConfig
from .inner import check_inner, materialise
from .island import Island
from .meter import Meter
from .shards import TorchShards, unwrap
from .topology import Topology
from .transport import Arrived, Courier, PeerLost, gather, reduce

log = logging.getLogger("fsdp_demo")

SKIPPED = 2  # header flag: this replica took no step; its plain gradient has no weight


class Stopped(RuntimeError):
    """An island asked to stop (SIGTERM); all ranks of this island stand after the same step.

    Example:
        >>> from fsdp_demo import Stopped
        >>> issubclass(Stopped, RuntimeError)
        True
    """


@dataclass
class _Flight:
    """One message under way: what each channel sent in it, and the future of what comes back (None on a copy without a line)."""

    step: int
    parts: dict[str, Outgoing]
    future: Future[Arrived] | None


class Exchange:
    """Joins one model's replicas; made by `attach`.

    Attributes:
        step: optimizer steps of the job done so far (ticks).
        config, topology: what was agreed.
        drift: |theta_r - mean| / |mean| of this replica's shard at `finish()`, None where replicas are equal by construction.

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
        optimizers: Sequence[torch.optim.Optimizer],
        config: ExchangeConfig,
        model: torch.nn.Module | None,
        topology: Topology,
        facts: dict[str, Any],
        step: int = 0,
        state: dict[str, Any] | None = None,
    ):
        self.config, self.topology, self.step, self.drift = config, topology, step, None
        self._optimizers = list(optimizers)
        self.shards = TorchShards(optimizers, model)
        position = self.shards.position(topology.rank, topology.world)
        self._line, lanes = topology.join(position)
        self._island = Island(topology, position)
        self._courier = Courier(self._line) if self._line is not None else None
        self._meter = self._line.meter if self._line is not None else Meter()

        def bind(channel: Channel) -> ActiveChannel:
            return ActiveChannel(channel, self.shards, position, lanes, self._island.copies, topology.islands)

        self.channels = [bind(c) for c in config.channels]
        self._parameters = bind(Channel("parameters", "parameter", applier=Applier("replace")))
        self._check_excluded()
        self._off = 0
        self._probing = self._skipping = self._finished = self._broken = False
        self._stop_wanted = self._stop_agreed = False
        self._stepped: set[int] = set()
        self._flights: list[_Flight] = []
        self._last: dict[str, int] = {}
        self._tokens, self._loss, self._losses = 0, math.nan, math.nan
        self._equal: bool | None = None
        with self.paused():
            self._start(facts, model, state)
        self._hooks = [h for i, o in enumerate(self._optimizers) for h in self._register(i, o)]
        self._log_start(lanes)

    # ---- start -----------------------------------------------------------------------------------------------------

    def _check_excluded(self) -> None:
        """`exclude` means never exchanged: refused where the preset promises equal replicas, unless the parameter is frozen."""
        if not self.config.consensus or self.topology.islands == 1:
            return
        covered = {i for c in self.channels for i in c.covered if c.channel.consensus}
        left = [s.name for i, s in enumerate(self.shards.shards) if i not in covered and not s.frozen]
        if left:
            raise ValueError(
                f"preset {self.config.preset!r} keeps replicas equal, but no channel covers {', '.join(left[:4])}{' ...' if len(left) > 4 else ''}: "
                "freeze these parameters, or name them in another channel's include"
            )

    def _start(self, facts: dict[str, Any], model: torch.nn.Module | None, state: dict[str, Any] | None) -> None:
        """Agree on the run, bring parameters and state together, make the channels' state."""
        check_inner(self.config, self._optimizers)
        if state is not None:
            self.step = int(state["step"])
        donor, behind = 0, False
        if self._line is not None and self._line.size > 1:
            facts = {**facts, "torch": torch.__version__, "device": self.shards.device.type, "shapes": agreement.shapes_digest(self.shards.shards)}
            agreement.agree(self._line, {**facts, **_flat(self.config.to_dict())})
            steps = agreement.gather_json(self._line, self.step)
            donor = steps.index(max(steps))
            behind = self.step < steps[donor]
            self.step = steps[donor]
        keep_own = state is not None and not behind
        self._equalise_parameters(donor, keep_own and not self._gradients_only)
        if model is not None:
            self._equalise_rest(model, donor)
        for optimizer in self._optimizers:
            materialise(optimizer)
        for c in self.channels:
            c.start()
        if state is not None:
            self.load_state_dict(state)
        if self._line is not None and self.step:
            for c in self.channels:
                for work in (c.anchor, c.momentum):
                    if work is not None and c.channel.consensus:
                        agreement.equalise(self._line, work, donor)
        self._last = {c.channel.name: self.step for c in self.channels}

    @property
    def _gradients_only(self) -> bool:
        return all(c.channel.before_step for c in self.channels)

    def _equalise_parameters(self, donor: int, keep: bool) -> None:
        """Broadcast the donor's parameters over the replicate axis where they differ, shard by shard, checked by digest."""
        work = self._parameters._pack("parameter") if self._line is not None else None
        changed = False
        if self._line is not None and self._line.size > 1:
            assert work is not None
            changed = agreement.equalise(self._line, work, donor, keep)
        if self._island.largest(float(changed))[0]:
            self._parameters.write(work, self._parameters._tensors("parameter"))
            log.info("%s: parameters taken over from island %d", self.topology.name, donor)

    def _equalise_rest(self, model: torch.nn.Module, donor: int) -> None:
        """Frozen parameters and buffers: the same on all replicas, as one byte workspace."""
        if self._line is None or self._line.size == 1:
            return
        frozen = [p for p in model.parameters() if not p.requires_grad]
        rest = [t.to_local() if hasattr(t, "to_local") else t for t in (*(p.detach() for p in frozen), *model.buffers())]
        parts = [t.detach().contiguous().view(-1).view(torch.uint8).cpu() for t in rest if t.numel()]
        if not parts:
            return
        work = torch.cat(parts)
        if agreement.equalise(self._line, work, donor):
            with torch.no_grad():
                for t, part in zip([t for t in rest if t.numel()], work.split([len(p) for p in parts]), strict=True):
                    t.detach().copy_(part.clone().view(t.dtype).view(t.shape))

    def _log_start(self, lanes: int) -> None:
        position = self._parameters.position
        if self.topology.rank == 0:
            log.info(
                "%s: %s; %d islands, %d shards x %d copies (%d lanes); inner %s; %s", self.topology.name, self.config.describe(), self.topology.islands,
                position.shards, position.copies, lanes, ", ".join(type(o).__name__ for o in self._optimizers), self.clips,
            )  # fmt: skip
        low = [s.name for s in self.shards.shards if s.dtype != torch.float32 and not s.frozen]
        if low and self.topology.rank == 0:
            log.warning(
                "%d parameters are not fp32 (%s ...): small updates are lost in rounding. Load the model with dtype=torch.float32 and compute in "
                "bf16 by MixedPrecisionPolicy / mixed_precision='bf16'", len(low), low[0],
            )  # fmt: skip

    @property
    def clips(self) -> str:
        """Which gradient clipping is in force, as a sentence."""
        if self.config.clip is None:
            return "gradients are not clipped by the exchange"
        where = "the mean gradient over the islands" if self.config.clips_mean else "each replica's own gradient before the step"
        return f"norm {self.config.clip:g} clips {where}"

    @property
    def consensus(self) -> bool:
        """Whether all replicas hold equal parameters after every exchange."""
        return self.config.consensus

    # ---- hooks and the tick ----------------------------------------------------------------------------------------

    def _register(self, index: int, optimizer: torch.optim.Optimizer) -> list[Any]:
        def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._probing = _is_probe(optimizer) and not self._skipping
            if self._off or self._probing:
                return
            closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
            if closure is not None and any(c.channel.before_step for c in self.channels):
                raise ValueError("optimizer.step(closure) computes gradients inside the step, where a gradient channel cannot reach them: call backward first")
            self._usable()
            if index in self._stepped:
                raise RuntimeError(f"optimizer {index} stepped twice within step {self.step} while others did not: attached optimizers must step in turns")
            if not self._stepped:
                self._before()
            self._stepped.add(index)

        def after(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self._off and not self._probing and len(self._stepped) == len(self._optimizers):
                self._stepped.clear()
                self._after()

        return [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]

    def _usable(self) -> None:
        if self._broken:
            raise PeerLost("the exchange already failed; save and start again under a new ISLAND_RUN")
        if self._finished:
            raise RuntimeError("the exchange is finished: call detach() before training on alone, or attach again")

    @torch.no_grad()
    def _before(self) -> None:
        """Gradient channels of this tick: clip, accumulate, send, apply what is due; hold the base step back where nothing is."""
        self.shards.check()
        self._stop_sent = self._stop_wanted
        mine = [c for c in self.channels if c.channel.before_step]
        if self.config.clip is not None and not self.config.clips_mean:
            self._island.clip(self.shards.read("gradient"), self.config.clip)
        outgoing = {}
        for c in mine:
            c.note_gradients()
            source = c.accumulate()
            if c.channel.clock.due(self.step):
                outgoing[c.channel.name] = c.encode(self.step, source)
        self._launch(outgoing, self.step)
        applied = self._land(mine, self.step)
        for c in mine:
            if c.channel.name not in applied:
                c.set_gradients([False] * len(c.covered))
        if applied and self.config.clip is not None and self.config.clips_mean:
            self._island.clip(self.shards.read("gradient"), self.config.clip)

    @torch.no_grad()
    def _after(self) -> None:
        """After-step channels of this tick; then the step counts, and a wish to stop takes effect on the whole island."""
        mine = [c for c in self.channels if not c.channel.before_step]
        due = [c for c in mine if c.channel.clock.due(self.step)]
        if not any(c.channel.before_step for c in self.channels):
            self._stop_sent = self._stop_wanted
        self._launch({c.channel.name: c.encode(self.step, c.accumulate()) for c in due}, self.step)
        try:
            self._land(mine, self.step)
        finally:  # the local step was taken, whatever became of the exchange
            self.step += 1
        if self._island.largest(float(self._stop_sent or self._stop_agreed))[0]:
            raise Stopped(f"stopped after step {self.step} on request")

    def _launch(self, outgoing: dict[str, Outgoing], step: int) -> None:
        """Put what the channels send at this step into one message per transport and hand it to the courier."""
        if not outgoing:
            return
        weight = self._weight()
        self._last.update({name: step + 1 for name in outgoing})
        if self._courier is None:
            self._flights.append(_Flight(step, outgoing, None))
            return
        active = [c for c in self.channels if c.channel.name in outgoing]
        flags = STOP * self._stop_sent | SKIPPED * self._skipping
        header = Header(self.config.digest(), step, weight, self._loss, flags)
        bits = [p for c in active for p in outgoing[c.channel.name].present or []]
        body, vectors = self._to_host(bits, [outgoing[c.channel.name] for c in active])
        codes = [c.channel.codec.code for c in active if not c.channel.codec.sparse]
        dense, line = [c for c in active if not c.channel.codec.sparse], self._courier.line

        def job() -> Arrived:
            parcel = body()
            headers, bodies = gather(line, header, parcel)
            if not dense:
                return Arrived(headers, bodies, [])
            weights = [_weights(c.channel, headers) for c in dense]
            return Arrived(headers, bodies, reduce(line, list(zip(vectors(), codes, strict=True)), weights))

        self._flights.append(_Flight(step, outgoing, self._courier.submit(job)))
        self._meter.exchanges += 1
        self._loss = math.nan

    def _weight(self) -> float:
        """This island's tokens since the last exchange if a channel asks for them, else 1."""
        if all(c.channel.reducer.weight == "equal" for c in self.channels):
            return 1.0
        tokens, self._tokens = self._island.total(self._tokens)[0], 0
        return tokens

    def _to_host(self, bits: list[bool], parts: list[Outgoing]) -> tuple[Callable[[], Tensor], Callable[[], list[Tensor]]]:
        """Start copying a message to the host; the returned functions wait for the copy (in the courier's thread)."""
        presence = _pack_bits(bits)
        bodies = [p.body for p in parts if p.body is not None]
        vectors = [p.vector for p in parts if p.vector is not None]
        if self.shards.device.type != "cuda":
            return (lambda: torch.cat([presence, *bodies])), (lambda: vectors)
        hosts = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in (*bodies, *vectors)]
        event = torch.cuda.Event()
        event.record()
        n = len(bodies)

        def wait(chosen: list[Tensor]) -> list[Tensor]:
            event.synchronize()
            return chosen

        return (lambda: torch.cat([presence, *wait(hosts[:n])])), (lambda: wait(hosts[n:]))

    def _land(self, channels: Sequence[ActiveChannel], step: int) -> set[str]:
        """Wait for and apply, in order, what was launched `delay` steps ago; returns the names of the channels applied."""
        applied = set()
        for flight in list(self._flights):
            ready = [c for c in channels if c.channel.name in flight.parts and flight.step + c.channel.clock.delay <= step]
            if ready:
                arrived = self._receive(flight)
                for c in ready:
                    self._apply(c, flight, arrived)
                    applied.add(c.channel.name)
            if not flight.parts:
                self._flights.remove(flight)
        return applied

    def _receive(self, flight: _Flight) -> Arrived | None:
        """The arrived message, after the island's vote; on failure everything under way is undone and PeerLost raised everywhere."""
        error: Exception | None = None
        arrived = None
        if flight.future is not None and self._courier is not None:
            try:
                arrived = self._courier.wait(flight.future)
            except RuntimeError as e:  # gloo has no subclass for a lost peer: what comes from the line is one
                error = e
        stop = arrived is not None and any(h.flags & STOP for h in arrived.headers)
        failed, stopped = self._island.largest(float(error is not None), float(stop))
        if failed:
            self._abort()
            raise error if error is not None else PeerLost(f"another rank of {self.topology.name} lost its peer at step {flight.step}")
        self._stop_agreed |= bool(stopped)
        if arrived is not None:
            losses = [h.loss for h in arrived.headers if not math.isnan(h.loss)]
            self._losses = sum(losses) / len(losses) if losses else self._losses
        return arrived

    def _abort(self) -> None:
        self._broken = True
        for flight in self._flights:
            for c in self.channels:
                if c.channel.name in flight.parts:
                    c.undo(flight.parts[c.channel.name])
        self._flights.clear()

    def _apply(self, c: ActiveChannel, flight: _Flight, arrived: Arrived | None) -> None:
        """Find the channel's part of a message, decode its mean and apply it."""
        out = flight.parts[c.channel.name]
        mean, present = None, out.present
        if arrived is not None:
            members = [a for a in self.channels if a.channel.name in self._members(flight)]
            weights = _weights(c.channel, arrived.headers)
            total = sum(len(a.covered) for a in members if a.channel.before_step)
            prefix = (total + 7) // 8
            if c.channel.before_step:
                at = sum(len(a.covered) for a in members[: members.index(c)] if a.channel.before_step)
                sets = [_unpack_bits(b[:prefix], total)[at : at + len(c.covered)] for b in arrived.bodies]
                present = [any(p) for p in zip(*sets, strict=True)]
            if c.channel.codec.sparse:
                begin = prefix + sum(_size(a) for a in members[: members.index(c)])
                mean = c.decode([b[begin : begin + _size(c)] for b in arrived.bodies], weights)
            else:
                dense = [a for a in members if not a.channel.codec.sparse]
                mean = arrived.means[dense.index(c)].to(self.shards.device)
        if present is not None:
            present = self._share_presence(present)
        c.apply(mean, out, present)
        del flight.parts[c.channel.name]

    def _members(self, flight: _Flight) -> list[str]:
        """Names of all channels that shared a message, also those already applied."""
        return [c.channel.name for c in self.channels if c.channel.clock.due(flight.step) or c.channel.name in flight.parts]

    def _share_presence(self, present: list[bool]) -> list[bool]:
        """A copy beyond the lanes has not heard the others: take the island's union where there are such copies."""
        position = self._parameters.position
        if position.copies == len(self._parameters.layouts):
            return present
        return [bool(v) for v in self._island.largest(*map(float, present))]

    # ---- what users call -------------------------------------------------------------------------------------------

    def note(self, tokens: int = 0, loss: float | None = None) -> None:
        """Tell the exchange this rank's tokens since the last call (the island's weight) and its loss (sent in the next header)."""
        self._tokens += tokens
        if loss is not None:
            self._loss = float(loss)

    def request_stop(self) -> None:
        """Ask all islands to stop after a common step; this island stops after its next step. Safe in a signal handler."""
        self._stop_wanted = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within this context the attached optimizers' steps do not count and nothing is exchanged."""
        self._off += 1
        try:
            yield
        finally:
            self._off -= 1

    @torch.no_grad()
    def skip(self) -> None:
        """Count a step that this replica does not take (its loss was NaN): the tick goes on, a due exchange is joined.

        All ranks of the island call it together instead of `optimizer.step()`. A plain gradient channel leaves this replica out of the
        mean and still applies the mean of the others; with an accumulator nothing is added to it.
        """
        self._usable()
        if self._stepped:
            raise RuntimeError(f"skip() within step {self.step}: {len(self._stepped)} of {len(self._optimizers)} optimizers have already stepped")
        self._skipping = True
        try:
            self.shards.gradients([False] * len(self.shards.shards))
            if any(c.channel.before_step for c in self.channels):
                self.shards.base_step()
            else:
                self._after()
        finally:
            self._skipping = False

    @torch.no_grad()
    def flush(self) -> None:
        """Wait for what is in flight and apply it, in order of its steps."""
        self._usable()
        for flight in list(self._flights):
            arrived = self._receive(flight)
            for c in [c for c in self.channels if c.channel.name in flight.parts]:
                self._apply(c, flight, arrived)
                if c.channel.before_step:
                    with self.paused():
                        self.shards.base_step()
        self._flights.clear()

    @torch.no_grad()
    def finish(self) -> None:
        """End the exchange: apply what is in flight, exchange once more what changed since, leave all replicas with equal parameters.

        Where the preset has no consensus, the parameters become their mean over the replicas and `drift` says how far this one was.
        Afterwards the connections are closed; calling it again does nothing. All replicas call it at the same step.
        """
        if self._finished:
            return
        self.flush()
        late = [c for c in self.channels if c.channel.source in ("delta", "parameter") and self._last[c.channel.name] < self.step]
        if late and self.config.consensus:
            self._stop_sent = False
            self._launch({c.channel.name: c.encode(self.step, c.accumulate()) for c in late}, self.step)
            self._land_all()
        if not self.config.consensus:
            self._average()
        self._equal = self._compare() if self.config.consensus else None
        self._barrier()
        self._close()

    def _land_all(self) -> None:
        for flight in list(self._flights):
            arrived = self._receive(flight)
            names = list(flight.parts)
            for c in [c for c in self.channels if c.channel.name in names]:
                self._apply(c, flight, arrived)
        self._flights.clear()

    def _average(self) -> None:
        """Replace the parameters by their mean over the replicas and measure the drift of this one."""
        own = self._parameters._tensors("parameter")
        before = [t.clone() for t in own if t is not None]
        self._parameters.write(self._mean_parameters(), own)
        after = [t for t in own if t is not None]
        squares = [float(sum((a.float() - b.float()).square().sum() for a, b in zip(after, before, strict=True))), float(sum(a.float().square().sum() for a in after))]
        far, norm = self._island.total(*squares)
        self.drift = math.sqrt(far / norm) if norm else 0.0

    def _mean_parameters(self) -> Tensor | None:
        """Mean of the parameters over the replicas as a workspace of this lane, fp32; all replicas call it at the same step."""
        if self._courier is None:
            self._receive(_Flight(self.step, {}, None))
            return None
        vector, line = self._parameters._pack("parameter").cpu(), self._courier.line
        future = self._courier.submit(lambda: Arrived([], [], reduce(line, [(vector, "fp32")], [[1.0] * line.size])))
        arrived = self._receive(_Flight(self.step, {}, future))
        assert arrived is not None
        return arrived.means[0].to(self.shards.device)

    def _compare(self) -> bool:
        """Digests of this rank's parameters against those of the other replicas; the island agrees on the answer."""
        same = self._courier is None or agreement.all_equal(self._courier.line, self.shards.read("parameter"))
        return not self._island.largest(float(not same))[0]

    def digests_equal(self) -> bool | None:
        """Whether the parameters of all replicas are bit-equal now. All ranks of all islands call it at the same step."""
        return self._equal if self._finished else self._compare()

    @contextmanager
    def outer_parameters(self, model: torch.nn.Module) -> Iterator[None]:
        """Within this context `model` holds the parameters that the method calls its result: the anchor, or the mean over the replicas.

        Use it to evaluate and export. All replicas enter at the same step (presets without consensus communicate here). Gradient
        presets hold them anyway. Local parameters come back at the end.
        """
        anchored = [c for c in self.channels if c.anchor is not None or c.channel.source == "delta"]
        if self._finished or self._broken or self._gradients_only:
            with self.paused():
                yield
            return
        own = self.shards.read("parameter")
        kept = [t.clone() for t in own if t is not None]
        with torch.no_grad():
            if self.config.consensus and anchored:
                for c in anchored:
                    c.write(c.anchor, c._tensors("parameter"))
            else:
                self._parameters.write(self._mean_parameters(), self._parameters._tensors("parameter"))
        _reshard(model)
        try:
            with self.paused():
                yield
        finally:
            _reshard(model)
            with torch.no_grad():
                for t, old in zip([t for t in self.shards.read("parameter") if t is not None], kept, strict=True):
                    t.copy_(old)

    def metrics(self) -> dict[str, Any]:
        """Counts of this rank (see `Meter`), the step, the mean loss over the islands in the last header, the drift at the end."""
        loss = None if math.isnan(self._losses) else self._losses
        return {"step": self.step, **vars(self._meter), "loss": loss, "drift": self.drift}

    def state_dict(self) -> dict[str, Any]:
        """Everything that must survive a restart, as tensors and numbers: step and the channels' state of this rank.

        What is in flight is waited for and saved with it. Belongs to this shard of this replica: save one per rank.
        """
        flying = []
        for flight in self._flights:
            arrived = flight.future.result() if flight.future is not None else None
            got = None if arrived is None else {"headers": [vars(h) for h in arrived.headers], "bodies": arrived.bodies, "means": arrived.means}
            flying.append({"step": flight.step, "parts": {k: vars(v) for k, v in flight.parts.items()}, "arrived": got})
        channels = {c.channel.name: c.state() for c in self.channels}
        return {"step": self.step, "digest": self.config.digest(), "last": dict(self._last), "channels": channels, "in_flight": flying}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()` of the same rank, bit for bit.

        Raises:
            ValueError: it was saved under another configuration, or with another number of islands or ranks.
        """
        if set(state["channels"]) != {c.channel.name for c in self.channels}:
            raise ValueError(f"saved channels are {sorted(state['channels'])}, this configuration has {[c.channel.name for c in self.channels]}")
        if state["digest"] != self.config.digest():
            log.warning("the state was saved under another configuration (digest %016x, now %016x)", state["digest"], self.config.digest())
        for c in self.channels:
            c.load(state["channels"][c.channel.name])
        self.step, self._last = max(self.step, int(state["step"])), dict(state["last"])
        self._flights = []
        for saved in state["in_flight"]:
            future: Future[Arrived] | None = None
            if saved["arrived"] is not None:
                got, future = saved["arrived"], Future()
                future.set_result(Arrived([Header(**h) for h in got["headers"]], got["bodies"], got["means"]))
            self._flights.append(_Flight(saved["step"], {k: Outgoing(**v) for k, v in saved["parts"].items()}, future))

    def detach(self) -> None:
        """Remove the hooks and close the connections at once, without a last exchange. The optimizer goes on alone."""
        for hook in self._hooks:
            hook.remove()
        self._close()

    def _barrier(self) -> None:
        """Wait until all replicas are here, so that none closes while another still reads."""
        if self._courier is not None:
            self._courier.line.all_gather(torch.zeros(1, dtype=torch.uint8), setup=True)

    def _close(self) -> None:
        self._finished = True
        if self._courier is not None:
            self._courier.close()
        self._courier = self._line = None
        self.topology.release()
        self._island.release()


def attach(
    optimizer: Any,
    config: ExchangeConfig | str,
    *,
    model: torch.nn.Module | None = None,
    topology: Topology | None = None,
    agree: dict[str, Any] | None = None,
    step: int = 0,
    state: dict[str, Any] | None = None,
    **changes: Any,
) -> Exchange:
    """Join the replicas of a model: from now on every `optimizer.step()` takes part in the exchange.

    Call it after the model is sharded and the optimizer built (after `accelerator.prepare`), on all ranks of all islands.

    Args:
        optimizer: a torch optimizer, an Accelerate wrapper of one, or a list of them that step in turns.
        config: a preset name, the path of a yaml file, or an `ExchangeConfig`.
        model: gives parameters their names, and its frozen parameters and buffers are made equal on all replicas.
        topology: default `Topology.from_env()`.
        agree: further facts of the run (steps, batch, schedule; JSON values) that all replicas must share.
        step: the job's step to start from (resume).
        state: `Exchange.state_dict()` of this rank to resume from. Replicas without one take over from the one that is furthest.
        changes: changes of the preset, as in `preset(name, **changes)`.

    Raises:
        ValueError: a wrong configuration, a preset not defined for this optimizer, islands that run something else.
        PeerLost: islands that did not come in time.

    Example:
        >>> import torch, fsdp_demo
        >>> model = torch.nn.Linear(4, 4)
        >>> exchange = fsdp_demo.attach(torch.optim.AdamW(model.parameters()), "diloco", model=model)
        >>> exchange.consensus
        True
    """
    from .presets import load_config

    if isinstance(config, str):
        from .presets import preset, presets

        config = preset(config, **changes) if config in presets() or not config.endswith((".yaml", ".yml")) else load_config(config).changed(changes)
    elif changes:
        config = config.changed(changes)
    optimizers = [unwrap(o) for o in (optimizer if isinstance(optimizer, (list, tuple)) else [optimizer])]
    model = getattr(model, "module", model) if type(model).__name__ == "DistributedDataParallel" else model
    facts = {f"agree.{k}": v for k, v in (agree or {}).items()}
    return Exchange(optimizers, config, model, topology or Topology.from_env(), facts, step, state)


def _flat(node: Any, prefix: str = "config") -> dict[str, Any]:
    """Nested dicts and lists as one flat dict with dotted keys."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else None
    if items is None:
        return {prefix: node}
    return {k: v for key, value in items for k, v in _flat(value, f"{prefix}.{key}").items()}


def _weights(channel: Channel, headers: Sequence[Header]) -> list[float]:
    """Each replica's share in a channel's mean: its header's weight, or 1; 0 for a plain gradient of a skipped step."""
    plain = channel.before_step and channel.accumulator is None
    return [0.0 if plain and h.flags & SKIPPED else h.weight if channel.reducer.weight == "tokens" else 1.0 for h in headers]


def _size(c: ActiveChannel) -> int:
    from .codecs.wire import sparse_bytes

    assert c.layout is not None
    return sparse_bytes(c.layout, c.channel.codec) if c.channel.codec.sparse else 0


def _pack_bits(bits: Sequence[bool]) -> Tensor:
    n = (len(bits) + 7) // 8
    return torch.frombuffer(bytearray(sum(b << i for i, b in enumerate(bits)).to_bytes(n, "little")), dtype=torch.uint8) if n else torch.empty(0, dtype=torch.uint8)


def _unpack_bits(data: Tensor, n: int) -> list[bool]:
    value = int.from_bytes(bytes(data.tolist()), "little")
    return [bool(value >> i & 1) for i in range(n)]


def _is_probe(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step is a checkpoint library's way to make optimizer state: learning rate zero and all gradients zero."""
    if any(float(g.get("lr", 1.0)) != 0.0 for g in optimizer.param_groups):
        return False
    grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    return bool(grads) and not any(bool(g.any()) for g in (g.to_local() if hasattr(g, "to_local") else g for g in grads))


def _reshard(model: torch.nn.Module) -> None:
    """Free unsharded FSDP2 parameters, so that the next forward sees what was written into the shards."""
    for module in model.modules():
        if hasattr(module, "reshard") and hasattr(module, "unshard"):
            module.reshard()
