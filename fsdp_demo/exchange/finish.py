"""How an exchange ends: what is in flight is applied, and one last exchange leaves all replicas with one model."""

from __future__ import annotations

import logging
import math

from . import result
from .runtime import Flow

log = logging.getLogger("fsdp_demo")


def flush(flow: Flow) -> None:
    """Wait for what is in flight and apply it, in order of its steps. Late gradients get a step of their own, which does not count."""
    while (oldest := flow.mailbox.oldest()) is not None:
        late, due = oldest
        gradients = [c for c in late if c.channel.before_step]
        if gradients:  # what another channel left there has had its step
            flow.shards.gradients([False] * len(flow.shards.shards))
        flow.land(late, due, now=flow.step - 1)
        if gradients:
            flow.clip(mean=True)
            with flow.ticks.paused():
                flow.base_step()


def conclude(flow: Flow) -> bool | None:
    """The last exchange; returns whether parameters are bit-equal now, None where the preset promises no such thing.

    There the parameters become their mean over the replicas, and `Flow.drift` says how far this one was.

    What has changed since the last exchange is a part of a round. An outer step on it would repeat nearly all of the momentum of the round
    before, so the anchor takes the plain mean: outer rate 1, no momentum. Whatever the accumulators keep from it is lost, as ever.
    """
    if flow.line is not None:
        flow.line.ending = True
    if not flow.config.shared:
        flush(flow)
        flow.exchange(flow.buffers, flow.buffers, math.inf, now=flow.step - 1, last=True)
        flow.drift = result.set_mean(flow)
        flow.shards.commit()
        return None
    mailbox, moving = flow.mailbox, [*flow.moving, *flow.buffers]
    # A queue is lengthened first: landing what is in flight takes the parameters to the anchor less what is under way.
    flow.send([c for c in moving if c.channel.queues and mailbox.last[c.channel.name] < flow.step], partial=True)
    flush(flow)
    # Parameters that were mixed, or corrected after a delay, are sent once more even if they went out in the last step.
    late = [c for c in moving if mailbox.last[c.channel.name] < flow.step or (c.channel.source == "parameter" and not c.channel.consensus)]
    flow.exchange(moving, late, math.inf, now=flow.step - 1, last=True)
    for c in moving:
        if c.channel.source == "delta" and not c.channel.consensus:
            c.show_anchor()
    flow.shards.commit()
    equal = result.equal(flow)
    if not equal and flow.topology.rank == 0:
        log.warning("%s: parameters differ between islands at the end: unlike hardware, or unlike training", flow.topology.name)
    return equal
