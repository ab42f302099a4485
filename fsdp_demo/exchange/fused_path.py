"""Whether a run takes fused kernels (`compression/fused.py`): every rank of every island, or none,
since means differ in the last bit. ISLAND_FUSED asks for them.
"""

from __future__ import annotations

import logging
import os
from typing import NamedTuple

import torch

from ..channels.codec import ChannelCodec
from ..compression.fused import FusedBlocks, takes
from ..rendezvous import environment
from .runtime import StepRuntime

log = logging.getLogger("fsdp_demo")


class Offer(NamedTuple):
    """The fused kernels of a rank.

    Attributes:
        mark: the release of Triton, the same on all; empty: the rank has none. why: it has none.
        made: kernels that are compiled, and what uses them.
    """

    mark: str = ""
    why: str = ""
    made: tuple[tuple[ChannelCodec, FusedBlocks], ...] = ()


def _sections(runtime: StepRuntime) -> list[ChannelCodec]:
    return [s for c in runtime.channels for s in c.sections if s is not None]


def offer(runtime: StepRuntime) -> Offer:
    """Compile the kernels of this rank's channels, where ISLAND_FUSED asks for them. No
    communication."""
    if not environment.fused(os.environ):
        return Offer()
    device = runtime.host.device
    try:
        import triton

        cuda = device.type == "cuda" and torch.version.cuda is not None
        if not (cuda or (device.type == "cpu" and triton.knobs.runtime.interpret)):
            return Offer(why=f"they need an NVIDIA GPU, the shards lie on {device.type}")
        if not any(takes(stage.codec) for c in runtime.channels for _, stage in c.stages):
            return Offer(why=f"{runtime.config.preset!r} sends nothing that they know")
        fit = [s for s in _sections(runtime) if takes(s.codec)]
        made = tuple((s, FusedBlocks(s.layout, s.channel, device)) for s in fit)
        for _, kernels in made:
            kernels.compile()
    # of many kinds: Triton's own, the C compiler's, the driver's
    except Exception as error:
        return Offer(why=f"{type(error).__name__}: {str(error).strip():.200}")
    return Offer(triton.__version__, made=made)


def settle(runtime: StepRuntime, found: Offer, on: bool) -> None:
    """Take what was offered, or torch's operations, and say so where ISLAND_FUSED asked."""
    for section in _sections(runtime):
        section.fused = None
    for section, kernels in found.made if on else ():
        section.fused = kernels
    if not environment.fused(os.environ) or runtime.topology.rank:
        return
    name = runtime.topology.name
    if on:
        log.info("%s: compression by fused kernels (Triton %s)", name, found.mark)
    else:
        why = found.why or "not every rank of all islands has the same kernels"
        log.warning("%s: ISLAND_FUSED is set, compression by torch all the same: %s", name, why)


def mark(runtime: StepRuntime) -> str:
    """The mark of the kernels that this rank uses; empty: none."""
    return next((s.fused.mark for s in _sections(runtime) if s.fused is not None), "")


def follow(runtime: StepRuntime, theirs: str) -> None:
    """On an island that joins a run: take the kernels of this mark, or none, as the others do."""
    found = offer(runtime) if theirs else Offer(why="the run does not take them")
    settle(runtime, found, bool(theirs) and found.mark == theirs)
