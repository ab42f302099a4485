"""The departure of an island from a run: its early part of the next exchange, and its messages to
the others.

If one island is told to end, the others train on. Their next exchange may be hundreds of steps
away, and the scheduler kills this island before. So it sends its part of the coming payload now,
weighted by the share of the steps that it has taken. The others count it in that exchange if they
hold it on every peer group when this island is gone. The checkpoint that follows is of the state
without it, since the others may never use that part. Payloads of gradients are not sent early: the
gradients of the coming step do not exist yet.

If all islands are told to end, nobody is left to count an early part: all stop between the same
messages (`stopping.Stopping`), and each saves its own work. In a mesh nobody leaves alone: the
loss of a replica ends the attempt.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Sequence
from concurrent.futures import TimeoutError as Late

import torch
from torch import Tensor

from ..channels.channel import ChannelRunner
from ..compression.dense import total_bytes
from ..elastic.message_state import Vectors
from ..peers.header import COUNTED, END, PAYLOAD
from ..rendezvous.stop_notices import Presence
from ..rendezvous.topology import Topology
from .runtime import StepRuntime
from .sending import ExchangeConnections

log = logging.getLogger("fsdp_demo")

GRACE = 2.0
"""Seconds (or two steps, if longer) in which an island that is told to end waits to hear whether
all others are, too: a signal reaches islands at unlike moments."""


def patience(runtime: StepRuntime) -> float:
    """Seconds that a departing island waits for others: half of its time; a save has the rest."""
    whole = runtime.topology.stop_timeout
    return max(whole - runtime.status.stopping_for(), min(GRACE, whole)) / 2


def longest_part(runtime: StepRuntime) -> int:
    """Bytes of the longest early part that is accepted from another island."""
    names = [c.channel.name for c in runtime.after_step]
    layouts = [runtime.queue.layout(names, step) for step in runtime.config.begins]
    return max(m.num_bytes + total_bytes(m.vectors) for m in layouts)


def _all_stop(runtime: StepRuntime) -> bool:
    """Whether all islands are told to end, after at most half of `patience`. All ranks together."""
    peers, island = runtime.peers, runtime.island
    end = time.monotonic() + min(max(GRACE, 2 * runtime.seconds), patience(runtime) / 2)
    while True:
        told, over = island.max(
            float(peers is not None and peers.all_end), float(time.monotonic() >= end)
        )
        if told or over:
            return bool(told)
        time.sleep(0.02)


def stop_with_all(runtime: StepRuntime) -> int:
    """Send nothing more, and wait, for at most `patience`, until all islands have all messages that
    any has sent. A collective of the island.

    Returns:
        The step count at which the furthest island has applied its last message; -1: not known.
    """
    if runtime.backup is not None:
        runtime.backup.settle()
    peers, worker, seconds = runtime.peers, runtime.connections.worker, patience(runtime)
    ends_at: int | None = -1
    if peers is not None and worker is not None:
        end, queue = time.monotonic() + seconds, runtime.queue
        delays = {c.channel.name: c.channel.schedule.delay for c in queue.channels}
        # the step count at which this island applied its last message; 0 where there was none
        applied_at = max((n + delays[name] + 1 for name, n in queue.applied.items()), default=0)
        paired = runtime.config.pairs is not None
        job = worker.submit(
            lambda: peers.stop_with_all(applied_at, max(end - time.monotonic(), 0.0), paired)
        )
        try:
            ends_at = job.result(seconds + 1.0)
        except Late:
            ends_at = None
        if ends_at is None:
            peers.give_up()
    (most,) = runtime.island.max(float(-1 if ends_at is None else ends_at))
    return int(most)


def say(runtime: StepRuntime, seconds: float) -> bool:
    """Send the coming payload early, and wait at most `seconds` until the others have it and all
    messages before it. All ranks of the island call it together, at the end of a step.

    Returns:
        Whether the payload is held on all peer groups; False where there was none to send.
    """
    end = time.monotonic() + seconds
    if runtime.backup is not None:
        runtime.backup.settle()
    step, due = coming(runtime)
    weight, flags = _share(runtime, due) if due else (0.0, 0)
    if due and runtime.island.not_finite(
        [t for c in due for t in c.tensors(c.channel.target) if t is not None]
    ):
        weight = 0.0
    held = False
    try:
        held = _send(runtime, due if weight > 0 else [], step, weight, flags, end)
    except Exception as error:
        # the other ranks wait for this one below, and the island ends in any case
        text = "%s: its part of the coming exchange could not be sent early: %r"
        log.warning(text, runtime.topology.name, error)
    held = not runtime.island.any(not held) and weight > 0
    if runtime.topology.rank == 0 and weight > 0:
        log.info("%s: %s", runtime.topology.name, _fate(runtime, due, step, held))
    return held


def _fate(runtime: StepRuntime, due: list[ChannelRunner], step: int, held: bool) -> str:
    """A sentence on whether the others hold this island's steps since the last exchange."""
    first = 1 + max(min(runtime.queue.last.get(c.channel.name, 0) for c in due), 0)
    taken = f"steps {first} to {runtime.step}" if first < runtime.step else f"step {runtime.step}"
    if held:
        return (
            f"the others hold {taken} of this island: if they agree on it, it counts in their "
            f"exchange of step {step + 1}"
        )
    return (
        f"{taken} of this island did not reach the others in time: only what this island saves "
        "has it"
    )


def warn_of_no_finish(runtime: StepRuntime) -> None:
    """Warn on the first rank of an island, at the interpreter's regular exit, if `finish()` was not
    called and would have made a difference. After an exception, which the interpreter notes in
    `sys.last_value`, the traceback says enough.
    """
    topology, ended = runtime.topology, runtime.finished or runtime.queue.broken
    if topology.islands < 2 or topology.rank or ended or runtime.stopped or not runtime.step:
        return
    if getattr(sys, "last_value", None) is None:
        log.warning(
            "%s: the script ends at step %d, and finish() was not called: what this island has "
            "trained since its last exchange is in its model alone, islands end with different "
            "models, and the others take this one for lost; call exchange.finish() on every island",
            topology.name,
            runtime.step,
        )


def next_due(channels: Sequence[ChannelRunner], step: int) -> int:
    """The first step from `step` on in which one of the channels sends, or may (`on_change`)."""
    cycle = math.lcm(*(c.channel.schedule.sync_every for c in channels))
    return next(
        s for s in range(step, step + cycle + 1) if any(c.channel.schedule.due(s) for c in channels)
    )


def coming(runtime: StepRuntime) -> tuple[int, list[ChannelRunner]]:
    """The step, from 0, of the next payload, and its channels; none if it holds gradients, or may
    not be sent.
    """
    channels, begin = [*runtime.channels, *runtime.buffers], runtime.step
    if runtime.backup is not None:  # this island is late for the one before
        begin = max(begin, runtime.backup.rounds.passed + 1)
    step = next_due(channels, begin)
    due = [c for c in channels if c.channel.schedule.due(step)]
    if any(c.channel.before_step or not c.channel.schedule.pure for c in due):
        return step, []
    return step, [c for c in due if not c.channel.after] or due


def _share(runtime: StepRuntime, due: list[ChannelRunner]) -> tuple[float, int]:
    """The weight of an early part (tokens where islands are weighed by them, else the share of the
    period that was trained), and header flags.
    """
    names = [c.channel.name for c in due]
    if any(c.channel.reducer.weight == "tokens" for c in runtime.channels):
        weight, tokens = runtime.status.weight(names, runtime.island)
        return weight, COUNTED * (tokens > 0)
    last = runtime.queue.last
    return min(
        min((runtime.step - last.get(c.channel.name, 0)) / c.channel.schedule.sync_every, 1.0)
        for c in due
    ), 0


def _send(
    runtime: StepRuntime, due: list[ChannelRunner], step: int, weight: float, flags: int, end: float
) -> bool:
    """Send the payload of the channels `due` early; whether the peers of this rank have it."""
    peers, worker = runtime.peers, runtime.connections.worker
    if peers is None or worker is None:
        return True
    header = peers.header(PAYLOAD, step, weight=weight, flags=flags)
    payload = _payload(runtime, due, step) if due else None

    def job() -> bool:
        """In the worker's thread, after what is under way."""
        left = end - time.monotonic()
        sent = payload is not None and left > 0 and peers.send_early(header, *payload, left)
        return peers.wait_stable(max(end - time.monotonic(), 0.0)) and sent

    try:
        return worker.submit(job).result(max(end - time.monotonic(), 0.0) + 1.0)
    except Late:
        return False


@torch.no_grad()
def _payload(runtime: StepRuntime, due: list[ChannelRunner], step: int) -> tuple[Tensor, Vectors]:
    """Body and vectors as step `step` would send them; accumulators stay as they are."""
    kept = [(c.accumulator, c.accumulator.clone()) for c in due if c.accumulator is not None]
    try:
        parts = {}
        for c in due:
            then = c.of(step)
            then.left_out = 0.0
            source = then.accumulate(runtime.queue.under_way(c))
            parts[c.channel.name] = then.encode(step, source)
        return runtime.queue.sender.packed(runtime.queue.layout(parts, step), parts)
    finally:
        for accumulator, before in kept:
            accumulator.copy_(before)


class Departures:
    """The notices of one rank that its island stops or ends, and its watch for the others' notices.

    Args:
        topology, connections: of this rank.
    """

    def __init__(self, topology: Topology, connections: ExchangeConnections):
        self._topology, self._connections = topology, connections
        self._presence = Presence(topology)
        # where all islands are told to end: the latest time and the step count at which this stops
        self._stops_by: float | None = None
        self._ends_at = -1

    def listen(self) -> None:
        """Begin to watch for another attempt that the others have begun without this island."""
        topology, peers = self._topology, self._connections.peers
        self._presence.start()
        if topology.rank == 0 and peers is not None:
            self._presence.fence(
                lambda: len(peers.alive) < topology.count,
                lambda: peers.epoch,
                # told to end, too: this one saves what it has, and is no member any more
                lambda why: None if peers.all_end else peers.expel(why),
            )

    def goes_on(self, runtime: StepRuntime) -> bool:
        """Whether this island, which is told to end as all others are, takes further steps, since
        another one has applied a message that this one has not come to. That message is here
        already; at most `delay` steps are taken. All ranks of the island call it together, at the
        end of a step.
        """
        in_pairs = runtime.config.pairs is not None
        if not (self._topology.elastic or in_pairs):
            return False
        if first := self._stops_by is None:
            if not _all_stop(runtime):
                return False
            self._stops_by = time.monotonic() + patience(runtime)
        if first or (in_pairs and runtime.step >= self._ends_at):
            self._ends_at = stop_with_all(runtime)
        late = time.monotonic() >= self._stops_by
        return not runtime.island.any(late or runtime.step >= self._ends_at)

    def leave(self, runtime: StepRuntime, stopped: bool) -> None:
        """Tell the others that this island trains no further (`Exchange.leave`)."""
        topology, peers = self._topology, self._connections.peers
        together, in_pairs = self._stops_by is not None, runtime.config.pairs is not None
        if not stopped and peers is not None and peers.abandoned:
            together = True
            stop_with_all(runtime)
        elif stopped and topology.elastic and runtime.stopped_alone and not (together or in_pairs):
            say(runtime, patience(runtime))
        if together:
            runtime.queue.note_unsent()
        alone = together or peers is None or len(peers.alive) == 1
        if peers is not None:
            peers.leave(stopped)
        if alone and topology.rank == 0:
            self._presence.end("left")

    def finish(self, step: int) -> None:
        """End the run at `step`, when all islands have read the last messages."""
        if (peers := self._connections.peers) is not None:
            peers.all_gather(torch.zeros(1, dtype=torch.uint8, device="cpu"), END, step)
            peers.wait_read(peers.timeout)
        if self._topology.rank == 0:
            self._presence.end("finished")

    def close(self) -> None:
        """End the watch."""
        self._presence.close()
