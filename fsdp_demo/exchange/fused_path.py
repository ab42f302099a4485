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
        mark: what must be equal on all; empty: the rank has none. why: it has none.
        made: kernels that were compiled, of a channel that each belongs to.
    """

    mark: str = ""
    why: str = ""
    made: tuple[tuple[ChannelCodec, FusedBlocks], ...] = ()


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
        stages = [(c.stages[i][1], s) for c in runtime.channels for i, s in enumerate(c._sections)]
        if not any(takes(channel.codec) for channel, _ in stages):
            return Offer(why=f"the method {runtime.config.preset!r} does not use any")
        made = []
        for channel, section in stages:
            if section is not None and takes(channel.codec):
                kernels = FusedBlocks(section.layout, channel, device)
                kernels.compile()
                made.append((section, kernels))
    # Triton raises errors of many kinds: of its own, of the C compiler, of the driver
    except Exception as error:
        return Offer(why=f"{type(error).__name__}: {str(error).strip():.200}")
    return Offer(triton.__version__, made=tuple(made))


def settle(runtime: StepRuntime, found: Offer, on: bool) -> None:
    """Take what was offered, or torch's operations, and say so where ISLAND_FUSED asked."""
    runtime.fused = found.mark if on else ""
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


def follow(runtime: StepRuntime, mark: str) -> None:
    """On an island that joins a run: take the kernels of this mark, or none, as the others do."""
    found = offer(runtime) if mark else Offer(why="the run does not take them")
    settle(runtime, found, bool(mark) and found.mark == mark)
