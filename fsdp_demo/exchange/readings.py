"""The readable state of an exchange: step, progress and numbers. Nothing here communicates, but for
methods that all ranks of the island call together.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal

import torch

from ..channels.channel import ChannelRunner
from ..config.auto import AutoChoice
from ..config.schema import ExchangeConfig
from ..elastic.peer_group import PeerGroup
from ..hosts.base import TrainingHost
from ..rendezvous.island import IslandGroup
from ..rendezvous.sibling_watch import collective
from ..rendezvous.topology import Topology
from . import summary
from .drop import DropCompute
from .leaving import next_due
from .ledger import ExchangeRecord, LedgerPage
from .runtime import StepRuntime
from .sending import ExchangeConnections


@dataclass(frozen=True)
class Activity:
    """The activity of one rank at this moment, for a line of progress.

    Attributes:
        kind: "training"; "sending": the rank trains while a message is under way; "waiting":
            training stands still for a message; "finished".
        islands: with which the message is not done yet; empty where that is not known.
        seconds: of standing still so far.

    Example:
        >>> Activity("sending", (1, 2)).text, Activity("waiting", (2,)).text, Activity().text
        ('sending to 1, 2', 'waiting for 2', 'training')
    """

    kind: Literal["training", "sending", "waiting", "finished"] = "training"
    islands: tuple[int, ...] = ()
    seconds: float = 0.0

    @property
    def text(self) -> str:
        """The activity in words."""
        who = ", ".join(map(str, self.islands))
        if self.kind == "sending":
            return f"sending to {who}" if who else "sending"
        return f"waiting for {who or 'the others'}" if self.kind == "waiting" else self.kind


class Readings:
    """What can be read of an exchange: no method here changes it.

    Args:
        topology, host, connections, runtime: of this rank.

    Attributes:
        topology: the place of this rank among islands and ranks.
        host: the engine's parameters and optimizers.
        auto_choice: the chosen method of an "auto" run with its measurements; else None.
    """

    auto_choice: AutoChoice | None = None

    def __init__(
        self,
        topology: Topology,
        host: TrainingHost,
        connections: ExchangeConnections,
        runtime: StepRuntime,
    ):
        self.topology, self.host = topology, host
        self._connections, self._meter = connections, connections.meter
        self._runtime, self._queue, self._calls = runtime, runtime.queue, runtime.calls

    def __repr__(self) -> str:
        t = self.topology
        state = "running" if self.running else "finished" if self.finished else "broken"
        where = f"island {t.island} of {t.islands}" if t.islands > 1 else "one replica"
        return (
            f"<Exchange {self.config.preset!r}, {where}, step {self.step}, "
            f"{self._meter.bytes_sent} B sent by this rank, {state}>"
        )

    @property
    def config(self) -> ExchangeConfig:
        """The method and its settings, as agreed."""
        return self._runtime.config

    @property
    def channels(self) -> list[ChannelRunner]:
        """The channels at work (`channel.ChannelRunner`)."""
        return self._runtime.channels

    @property
    def drop(self) -> DropCompute:
        """The micro-batches of a step, their limit, and how many were dropped."""
        return self._runtime.drop

    @property
    def step(self) -> int:
        """Optimizer steps of the job done so far (ticks)."""
        return self._runtime.step

    @property
    def steps_taken(self) -> int:
        """Of these the steps that this island has taken itself, which is its place in its data.

        Where islands take unlike steps (`local_steps`) this number is less than `step`: an island
        that joins a run, or takes over from others, counts on from the `state` that `attach` is
        given, and without a state from the argument `step` of `attach`. Elsewhere it is `step`.
        """
        return self._runtime.step - self._runtime.pace.left_out

    @property
    def local_steps(self) -> dict[int, int]:
        """By the number of each island its own steps in a round, where islands take unlike steps;
        empty where all take all, and before the first round has told the speeds."""
        return dict(self._runtime.pace.shares)

    @property
    def stopped(self) -> bool:
        """Whether all ranks of this island stop after this step; the step raises `Stopped` then,
        unless `raise_stopped(False)` was called."""
        return self._runtime.stopped

    @property
    def stop_requested(self) -> bool:
        """Whether this rank was told to end soon (SIGTERM under `guard`, `request_stop()`): a long
        evaluation should be left, by all ranks after the same batch. The next step stops."""
        return self._runtime.status.told

    @property
    def has_stepped(self) -> bool:
        """Whether this rank has begun a step since it joined the others."""
        return self._runtime.stepped

    @property
    def stopped_alone(self) -> bool:
        """Whether this island stops and the others do not."""
        return self._runtime.stopped_alone

    @property
    def leaving(self) -> bool:
        """Whether an island that was told to end (SIGTERM) is the reason of the stop, not
        `request_stop(together=True)`."""
        return self._runtime.leaving

    @property
    def applied(self) -> dict[str, int]:
        """For each channel the step of the last message that was applied here, -1 for none."""
        return self._runtime.applied

    @property
    def history(self) -> str:
        """A digest of the islands that took part in each exchange that was applied here
        (`saved_state.History`); empty where they are not known, as on a copy that is not active."""
        return self._queue.history.digest if self._connections.active else ""

    @property
    def participants(self) -> list[int]:
        """The islands in the last exchange that was applied here; empty where they are not known,
        as on a copy that is not active."""
        return list(self._queue.history.slots) if self._connections.active else []

    @property
    def applied_by(self) -> list[int]:
        """The `participants` that have applied that exchange, as far as this rank knows: without
        islands that had left after an early part, or were lost since. After `finish()` all count:
        the last exchange has ended on all of them."""
        peers, early = self.peers, self._queue.history.early
        here = self.participants if peers is None else peers.alive
        return [slot for slot in self.participants if slot not in early and slot in here]

    @property
    def drift(self) -> float | None:
        """|theta_r - mean| / |mean| of this replica when the mean was last taken; None where
        replicas are equal by construction."""
        return self._runtime.drift

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The innermost optimizers that are attached."""
        return list(self.host.optimizers)

    @property
    def finished(self) -> bool:
        """Whether the exchange has ended (`finish`, `detach`): optimizer steps count no more."""
        return self._runtime.finished

    @property
    def running(self) -> bool:
        """Whether the optimizers' steps still go through this exchange."""
        return not (self.finished or self._queue.broken)

    @property
    def activity(self) -> Activity:
        """The present activity of this rank; any thread may read it."""
        if self.finished or self.closed:
            return Activity("finished")
        peers, since = self.peers, self._queue.waits_since
        if peers is None:
            return Activity()
        if since:
            return Activity("waiting", peers.awaited, time.monotonic() - since)
        flying = any(
            f.future is not None and not f.future.done() for f in list(self._queue.flights)
        )
        return Activity("sending", peers.awaited) if flying else Activity()

    @property
    def tokens(self) -> int:
        """Tokens that this rank has counted (`Exchange.report`) since the start of the job."""
        return self._runtime.status.tokens

    @property
    def chosen_because(self) -> str:
        """The reason for the method of an "auto" run, with what was measured; else empty."""
        return "" if self.auto_choice is None else self.auto_choice.reason

    def timeline(self, after: ExchangeRecord | None = None) -> list[ExchangeRecord]:
        """The exchanges that have ended, oldest first; at most the last 10 000, and only those
        after the record `after`: cheap enough for every step."""
        new = list(takewhile(lambda record: record is not after, reversed(self._queue.flown)))
        return new[::-1]

    def metrics(self) -> dict[str, Any]:
        """Numbers of this rank: the counts of `Meter`, `step`, `loss` (the mean over the islands at
        the last exchange), `drift`, contributions that were left out (`not_finite`, `far`) or
        `late`, and where islands come and go their numbers (docs/metrics.md)."""
        seen = self._queue.watch
        return {
            "step": self.step,
            **vars(self._meter),
            "loss": None if math.isnan(seen.loss) else seen.loss,
            "drift": self.drift,
            "not_finite": seen.left_out,
            "far": seen.far,
            **({"steps_taken": self.steps_taken} if self.config.by_speed else {}),
            "late": seen.late,
            **self._members(),
        }

    @collective("totals()")
    def totals(self) -> dict[str, float]:
        """The `metrics` of the whole island for a log: bytes and tokens summed over its ranks, the
        longest wait, the mean loss and `global_tokens` over all ranks of all islands. All ranks of
        the island call it together."""
        meter, seen, island = self._meter, self._queue.watch, self.island
        known, mine = not math.isnan(seen.loss), self._runtime.status.everywhere
        sent, received, tokens, everywhere, losses, ranks = island.sum(
            *(meter.bytes_sent, meter.bytes_received, self.tokens, mine),
            *(seen.loss if known else 0.0, known),
        )
        waited, count, *counts = island.max(
            meter.seconds_waiting, meter.exchanges, seen.left_out, seen.far, seen.late
        )
        out: dict[str, float] = {
            "bytes_sent": int(sent),
            "bytes_received": int(received),
            "exchanges": int(count),
            "seconds_waiting": waited,
            "tokens": int(tokens),
            "global_tokens": int(everywhere),
        }
        out |= {"loss": losses / ranks} if ranks else {}
        out |= {} if self.drift is None else {"drift": self.drift}
        names = zip(("not_finite", "far", "late"), counts, strict=True)
        out |= {name: int(n) for name, n in names if n}
        return out | self._members()

    def _members(self) -> dict[str, int]:
        """Micro-batches dropped; where islands come and go: numbers of members, and of changes."""
        peers, drop = self.peers, self.drop
        dropped = {} if drop.settings is None else {"dropped": drop.dropped}
        if peers is None or peers.fixed:
            return dropped
        there = {"alive": len(peers.alive), "participating": peers.size, "epoch": peers.epoch}
        return dropped | there

    def watch_energy(self, on: bool = True) -> None:
        """From the next exchange on, measure `kept_energy`. It costs a copy of the values that a
        channel encodes, and one more decoding of its payload; training is not changed."""
        for c in self.channels:
            c.watches_energy, c.energy = on, None

    @collective("kept_energy()")
    def kept_energy(self) -> dict[str, float]:
        """For each channel the share of the energy (squared norm) that its last payload kept, over
        all shards of the island: 1 - |m - q|^2 / |m|^2, and 1 where m is zero.

        m are the encoded values (the accumulator; without one the delta, gradient or parameters),
        in the transform domain, and q their decoded payload. With exact values this is |q|^2 /
        |m|^2. Rounding makes it smaller, and a coarse code can make it negative.

        All ranks of the island call it together. Channels that have not sent since `watch_energy()`
        are left out."""
        found: dict[str, float] = {}
        for c in [c for c in self.channels if c.watches_energy]:  # on all ranks or on none
            mine = (0.0, 0.0) if c.energy is None else tuple(c.energy.tolist())
            whole, left, known = self.island.sum(*mine, float(c.energy is not None))
            if known:
                found[c.channel.name] = 1.0 - left / whole if whole else 1.0
        return found

    def ledger(self) -> LedgerPage:
        """The bytes of this rank by channel, of headers, and the rest: together `bytes_sent` and
        `bytes_received` of `metrics()`, to the byte."""
        return self._queue.ledger.page(self._meter)

    @property
    def closed(self) -> bool:
        """Whether the connections to the other replicas are gone."""
        return self._connections.closed

    @property
    def clips(self) -> str:
        """Which gradient clipping is in force, as a sentence."""
        return summary.clips(self.config, self.host)

    def next_exchange(self) -> int:
        """The step (from 0, this one included) in which the next payload leaves."""
        return next_due(self.channels, self.step)

    @property
    def result_kind(self) -> str:
        """The parameters that `outer_parameters` shows: "parameters" (the replica's own), "anchor"
        (the outer parameters, known to every replica) or "mean" (over the replicas, by a round of
        communication)."""
        return self.config.result(self.topology.islands)

    @property
    def peers(self) -> PeerGroup | None:
        """The ranks with the same shard on other islands; None without any, or when closed."""
        return self._connections.peers

    @property
    def island(self) -> IslandGroup:
        """The other ranks of this island, and what they vote on."""
        return self._connections.island
