"""How an exchange ends: what is in flight is applied, and one last exchange leaves all replicas
with one model.
"""

from __future__ import annotations

import logging
import math

from . import result
from .runtime import StepRuntime

log = logging.getLogger("fsdp_demo")


def flush(runtime: StepRuntime) -> None:
    """Wait for what is in flight and apply it, in order of its steps. Late gradients get a step of
    their own, which does not count.
    """
    while (oldest := runtime.queue.oldest()) is not None:
        late, due = oldest
        gradients = [c for c in late if c.channel.before_step]
        if gradients:  # what another channel left there has had its step
            runtime.host.prepare_gradients([False] * len(runtime.host.params))
        runtime.land(late, due, now=runtime.step - 1)
        if gradients:
            runtime.clip(mean=True)
            with runtime.hooks.paused():
                runtime.base_step()


def conclude(runtime: StepRuntime) -> bool | None:
    """The last exchange; returns whether parameters are bit-equal now, None where the preset
    promises no such thing.

    There the parameters become their mean over the replicas, and `StepRuntime.drift` says how far
    this one was. So they do where bits differ that should be equal: on unlike hardware, say.

    What has changed since the last exchange is a part of a round. An outer step on it would repeat
    nearly all of the momentum of the round before, so the anchor takes the plain mean: outer rate
    1, no momentum. Whatever the accumulators keep from it is lost, as ever.
    """
    if runtime.peers is not None:
        runtime.peers.ending = True
    if not runtime.config.equal_at_end:
        flush(runtime)
        runtime.exchange(
            runtime.buffers, runtime.buffers, math.inf, now=runtime.step - 1, last=True
        )
        runtime.drift = result.set_mean(runtime)
        runtime.host.commit()
        return None
    queue, moving = runtime.queue, [*runtime.moving, *runtime.buffers]
    # A queue is lengthened first: landing what is in flight takes the parameters to the anchor less
    # what is under way.
    runtime.send(
        [c for c in moving if c.channel.queues and queue.last[c.channel.name] < runtime.step],
        partial=True,
    )
    flush(runtime)
    # Parameters that were mixed, or corrected after a delay, are sent once more even if they went
    # out in the last step.
    late = [
        c
        for c in moving
        if queue.last[c.channel.name] < runtime.step
        or (c.channel.source == "parameter" and not c.channel.equal_after_exchange)
    ]
    runtime.exchange(moving, late, math.inf, now=runtime.step - 1, last=True)
    for c in moving:
        if c.channel.source == "delta" and not c.channel.equal_after_exchange:
            c.show_anchor()
    runtime.host.commit()
    if result.equal(runtime):
        return True
    runtime.drift = result.set_mean(runtime)
    runtime.host.commit()
    if runtime.topology.rank == 0:
        log.warning(
            "%s: parameters differed between islands at the end (unlike hardware, or unlike "
            "training): they are the mean over the islands now. Those here were %.2g of their norm "
            "away",
            runtime.topology.name,
            runtime.drift,
        )
    return result.equal(runtime)
