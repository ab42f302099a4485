"""An island comes back with a checkpoint of its own: it fetches what came since, and no snapshot.

A checkpoint may stand for a snapshot if it is the very state that its donor would have handed over
at that step. The *mark* says whether it is: a digest of all that a snapshot brings, of what the
messages under way have brought, and of which messages these are. Each island works it out when it
saves, from what it has in memory, and writes it into its checkpoint. From there on it keeps steps
and messages (`comm/backlog.py`). A newcomer names the mark of its newest checkpoint; a donor that
has worked out the same one hands over what came since. Equal states with equal messages stay equal:
of which run, life or history they are need not be known.

So what is not equal on all islands gets no use of it: presets whose replicas share nothing at the
step of a save, and models with running statistics. They get a snapshot, as does whoever was away
for longer than what is kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..comm.collectives import ReceivedMessage
from ..comm.digests import total
from . import snapshot
from .runtime import StepRuntime
from .saved_state import ExchangeState

# ---- a save ------------------------------------------------------------------------------------


@torch.no_grad()
def keep(runtime: StepRuntime, model: torch.nn.Module | None, told: Any, folder: Path) -> str:
    """See `Exchange.keep_since`. `told`: further facts of the run (`Start.facts`)."""
    peers = runtime.peers
    if (
        not runtime.topology.elastic
        or (peers is not None and (peers.desk is None or peers.following is not None))
        or not _whole(runtime)
    ):
        return ""
    found = mark(runtime, model)
    if peers is not None and peers.desk is not None:
        peers.desk.mark(
            found,
            snapshot.without_tensors(runtime, told, found),
            folder,
            snapshot.size(runtime, model),
        )
    return found


def mark(runtime: StepRuntime, model: torch.nn.Module | None) -> str:
    """The digest of this rank, in hexadecimal digits; see above. No collective."""
    queue = runtime.queue
    arrived = [f.future.result() for f in queue.flights if f.future is not None]
    groups = [*snapshot.shared(runtime, model), *([*a.bodies, *a.means] for a in arrived)]
    sums = [
        int(total([t.detach() for t in tensors], torch.device("cpu")).item()) for tensors in groups
    ]
    said = {
        "step": runtime.step,
        "applied": dict(sorted(queue.applied.items())),
        "last": dict(sorted(queue.last.items())),
        "flights": [[f.step, f.members, sorted(f.parts)] for f in queue.flights],
        "weights": [[h.weight for h in a.headers] for a in arrived],
        "counts": snapshot.counts(runtime),
        "sums": sums,
    }
    return hashlib.blake2b(json.dumps(said).encode(), digest_size=16).hexdigest()


def _whole(runtime: StepRuntime) -> bool:
    """Whether all that is under way has come, as it was sent."""
    futures = [f.future for f in runtime.queue.flights]
    here = (
        all(f is None or (f.done() and f.exception() is None) for f in futures)
        and not runtime.queue.broken
    )
    return here and not runtime.queue.unsent


# ---- coming back -------------------------------------------------------------------------------


def taken(
    runtime: StepRuntime, load: Callable[[], dict[str, Any]]
) -> tuple[dict[str, Tensor], list[ReceivedMessage | None]]:
    """Load the checkpoint: what of it a snapshot would have brought by name, and what the messages
    under way have brought.
    """
    state = ExchangeState.from_tree(load())
    tensors = {
        f"{name}.{key}": t
        for name, kept in state.channels.items()
        for key, t in kept.workspaces.items()
        if key in KEPT
    }
    # a delta that has not come back is not its own any more
    corrects = {c.channel.name for c in runtime.channels if c.channel.corrects}
    for i, f in enumerate(state.in_flight):
        tensors |= {
            snapshot.own_name(i, name): out.own
            for name, out in f.parts.items()
            if out.own is not None and name in corrects
        }
    return tensors, [f.arrived for f in state.in_flight]


KEPT = ("anchor", "momentum")
"""Of what a channel keeps. Its accumulator is zero: what it had not sent is what is lost with an
island.
"""


def arrive(runtime: StepRuntime, arrived: Sequence[ReceivedMessage | None]) -> None:
    """What has come back to the messages under way is what the checkpoint holds."""
    for flight, found in zip(runtime.queue.flights, arrived, strict=True):
        if found is not None:
            flight.set_arrived(found, runtime.peers)
