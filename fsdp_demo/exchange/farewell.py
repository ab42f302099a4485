"""What an island that leaves sends ahead: its part of the coming payload, with the share of the steps that it has taken.

The others' next exchange may be hundreds of steps away, and the scheduler kills this island before. So it sends now what it has done since
its last exchange. The others keep it, and count it in the message for which it is, if they hold it on every line when this island is gone.
Nothing changes here: what is saved afterwards is what there was before, to go on from where the others have never used it.

Payloads of gradients are not sent early: the gradients of the coming step are not there, and those before have left in their own step.
"""

from __future__ import annotations

import logging
import math
import time
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass

import torch
from torch import Tensor

from ..channels.channel import ActiveChannel
from ..comm.header import COUNTED, PAYLOAD, Header
from ..comm.peers import Vectors
from ..compression.dense import total_bytes
from .runtime import Flow

log = logging.getLogger("fsdp_demo")


def allow(flow: Flow) -> None:
    """Say how long what another island sends early can be: nobody makes room for more."""
    if flow.line is not None:
        layout = flow.mailbox.layout([c.channel.name for c in flow.after_step])
        flow.line.allow_early(layout.num_bytes + total_bytes(layout.vectors))


def say(flow: Flow, seconds: float) -> bool:
    """Send the coming payload early, and wait until the others have it, and all that was sent before, for at most so many seconds.

    All ranks of the island call it together, at the end of a step; none goes on before all have done. Returns whether it is held on all
    lines; False, too, where there is nothing to send.
    """
    end = time.monotonic() + seconds
    step, due = coming(flow)
    weight, flags = _share(flow, due) if due else (0.0, 0)
    if due and flow.island.not_finite([t for c in due for t in c.tensors(c.channel.target) if t is not None]):
        weight = 0.0
    held = False
    try:
        held = _send(flow, due if weight > 0 else [], step, weight, flags, end)
    except Exception as error:  # the other ranks wait for this one below, and the island ends in any case
        log.warning("%s: its part of the coming exchange could not be sent early: %r", flow.topology.name, error)
    held = not flow.island.any(not held) and weight > 0
    if flow.topology.rank == 0 and weight > 0:
        what = "counts there if they settle it so" if held else "was not with them in time, and is lost"
        log.info("%s: what it has done since its last exchange, for that of step %d of the others, %s", flow.topology.name, step + 1, what)
    return held


def coming(flow: Flow) -> tuple[int, list[ActiveChannel]]:
    """The step in which the next payload leaves, from 0, and the channels in it that can be sent early: none beside gradients."""
    channels = [*flow.channels, *flow.buffers]
    cycle = math.lcm(*(c.channel.clock.period for c in channels))
    step = next(s for s in range(flow.step, flow.step + cycle + 1) if any(c.channel.clock.due(s) for c in channels))
    due = [c for c in channels if c.channel.clock.due(step)]
    if any(c.channel.before_step for c in due):
        return step, []
    return step, [c for c in due if not c.channel.after] or due


def _share(flow: Flow, due: list[ActiveChannel]) -> tuple[float, int]:
    """The weight of what is sent early, and flags: tokens where islands are weighed by them, else the part of a period that was taken."""
    names = [c.channel.name for c in due]
    if any(c.channel.reducer.weight == "tokens" for c in flow.channels):
        weight, tokens = flow.notes.weight(names, flow.island)
        return weight, COUNTED * (tokens > 0)
    last = flow.mailbox.last
    return min(min((flow.step - last.get(c.channel.name, 0)) / c.channel.clock.period, 1.0) for c in due), 0


@dataclass(frozen=True)
class Payload:
    """What is sent early: header, body (uint8) and vectors (fp32 on the CPU, code)."""

    header: Header
    body: Tensor
    vectors: Vectors


def _send(flow: Flow, due: list[ActiveChannel], step: int, weight: float, flags: int, end: float) -> bool:
    """On a rank with a line; whether its peers have it."""
    line, courier = flow.line, flow.connections.courier
    if line is None or courier is None:
        return True
    payload = _payload(flow, due, line.header(PAYLOAD, step, weight=weight, flags=flags)) if due else None

    def job() -> bool:
        """In the courier's thread, after what is under way."""
        left = end - time.monotonic()
        sent = payload is not None and left > 0 and line.send_early(payload.header, payload.body, payload.vectors, left)
        return line.wait_stable(max(end - time.monotonic(), 0.0)) and sent

    try:
        return courier.submit(job).result(max(end - time.monotonic(), 0.0) + 1.0)
    except Late:
        return False


@torch.no_grad()
def _payload(flow: Flow, due: list[ActiveChannel], header: Header) -> Payload:
    """As the step would send it, but accumulators stay what they are."""
    kept = [(c.accumulator, c.accumulator.clone()) for c in due if c.accumulator is not None]
    try:
        parts = {}
        for c in due:
            c.left_out = 0.0
            parts[c.channel.name] = c.encode(header.step, c.accumulate(flow.mailbox.under_way(c)))
        presence, body, vectors = flow.mailbox.packed(parts)
    finally:
        for accumulator, before in kept:
            accumulator.copy_(before)
    return Payload(header, torch.cat([presence, *body]), vectors)
