"""The first minute of an exchange: agree on the run, make parameters, frozen parameters, buffers and channel state equal.

The donor is the island that is furthest (the lowest index where several are): all others at an earlier step, and fresh ones, take its
parameters and its consensus state over; where digests already agree nothing is sent.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from . import agreement
from .channel import ActiveChannel
from .config import ExchangeConfig
from .island import Island
from .shards import Shards, local_part
from .transport import Line

log = logging.getLogger("fsdp_demo")


def agree_on_run(line: Line | None, config: ExchangeConfig, shards: Shards, facts: dict[str, Any], step: int) -> tuple[int, int]:
    """Compare the run specification with all replicas; returns the donor's index and the step to start from.

    Raises:
        ValueError: on every replica, with the values of both sides.
    """
    if line is None or line.size == 1:
        return 0, step
    advisory = {"torch": torch.__version__, "device": shards.device.type}
    shapes = {"tensors": len(shards.shards), "shapes": agreement.shapes_digest(shards.shards)}
    agreement.agree(line, {**facts, **advisory, **shapes, **_flat(config.to_dict())})
    steps = agreement.gather_json(line, step)
    return steps.index(max(steps)), max(steps)


def equalise_parameters(line: Line | None, island: Island, parameters: ActiveChannel, donor: int, keep: bool) -> None:
    """Broadcast the donor's parameters over the replicate axis where they differ, each lane its share, and complete them in the island.

    Args:
        parameters: a channel over all parameters that are not frozen.
        keep: this replica resumes from its own state and keeps its own.
    """
    work, changed = parameters.pack("parameter"), False
    if line is not None and line.size > 1:
        assert work is not None
        changed = agreement.equalise(line, work, donor, keep)
    if island.largest(float(changed))[0]:
        parameters.write(work, parameters.tensors("parameter"))
        if parameters.position.shard == parameters.position.copy == 0:
            log.info("parameters taken over from island %d", donor)


def equalise_rest(line: Line | None, island: Island, shards: Shards, model: torch.nn.Module | None, donor: int) -> None:
    """Frozen parameters and buffers: broadcast with a model, else compared by digest.

    Raises:
        ValueError: without a model, if frozen parameters of the optimizer differ between replicas.
    """
    frozen = [t for t, s in zip(shards.read("parameter"), shards.shards, strict=True) if s.frozen]
    if model is None:
        differ = line is not None and line.size > 1 and not agreement.all_equal(line, frozen)
        if island.largest(float(differ))[0]:
            raise ValueError("frozen parameters differ between islands: pass model= to attach, or load the same weights")
        return
    rest = [p.detach() for p in model.parameters() if not p.requires_grad] + [b.detach() for b in model.buffers()]
    local = [t for t in (local_part(t) for t in rest) if t.numel()]
    if not local:
        return
    parts = [t.contiguous().view(-1).view(torch.uint8).cpu() for t in local]
    work = torch.cat(parts)
    if line is not None and line.size > 1:
        agreement.equalise(line, work, donor)
    if island.position.copies > 1:  # copies beyond the lanes have no line: hand them the result
        island.broadcast(work)
    for t, part in zip(local, work.split([len(p) for p in parts]), strict=True):
        t.copy_(part.clone().view(t.dtype).view(t.shape))


def equalise_state(line: Line | None, channels: Sequence[ActiveChannel], donor: int) -> None:
    """Anchors and outer momenta of consensus channels, on resume."""
    if line is None or line.size == 1:
        return
    for c in channels:
        for work in (c.anchor, c.momentum):
            if work is not None and c.channel.consensus:
                agreement.equalise(line, work, donor)


def _flat(node: Any, prefix: str = "config") -> dict[str, Any]:
    """Nested dicts and lists as one flat dict with dotted keys."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else None
    if items is None:
        return {prefix: node}
    return {k: v for key, value in items for k, v in _flat(value, f"{prefix}.{key}").items()}
