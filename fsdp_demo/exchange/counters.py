"""Numbers of a run for a log: bytes, waits, losses, contributions that were left out, and who is
there. Of one rank, and of its whole island.
"""

from __future__ import annotations

import math
from typing import Any

from .runtime import StepRuntime


def of_rank(runtime: StepRuntime) -> dict[str, Any]:
    """See `Exchange.metrics`. No communication."""
    seen = runtime.queue.watch
    return {
        "step": runtime.step,
        **vars(runtime.connections.meter),
        "loss": None if math.isnan(seen.loss) else seen.loss,
        "drift": runtime.drift,
        "not_finite": seen.left_out,
        "far": seen.far,
        **_members(runtime),
    }


def of_island(runtime: StepRuntime) -> dict[str, float]:
    """See `Exchange.totals`. A collective inside the island."""
    meter, seen, island = runtime.connections.meter, runtime.queue.watch, runtime.island
    known = not math.isnan(seen.loss)
    sent, received, tokens, losses, ranks = island.sum(
        meter.bytes_sent,
        meter.bytes_received,
        runtime.status.tokens,
        seen.loss if known else 0.0,
        known,
    )
    waited, count, left_out, far = island.max(
        meter.seconds_waiting, meter.exchanges, seen.left_out, seen.far
    )
    out: dict[str, float] = {
        "bytes_sent": int(sent),
        "bytes_received": int(received),
        "exchanges": int(count),
        "seconds_waiting": waited,
        "tokens": int(tokens),
    }
    out |= {"loss": losses / ranks} if ranks else {}
    out |= {} if runtime.drift is None else {"drift": runtime.drift}
    out |= {name: int(n) for name, n in (("not_finite", left_out), ("far", far)) if n}
    return out | _members(runtime)


def _members(runtime: StepRuntime) -> dict[str, int]:
    """Where islands come and go: how many are members, how many took part in the last message, how
    often members have changed.
    """
    peers = runtime.peers
    if peers is None or not peers.elastic:
        return {}
    return {"alive": len(peers.alive), "participating": peers.size, "epoch": peers.epoch}
