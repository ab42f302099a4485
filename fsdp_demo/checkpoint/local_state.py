"""One rank's shards of a replica, for a mesh in which the host saves one model for all replicas
(`integrations/trainer`): local parameters and the states of the inner optimizers. No collectives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..hosts.base import local_part, plain_parts
from ..hosts.optimizers import holders, materialise, room, take_empty_step


def _parameters(
    optimizers: Sequence[torch.optim.Optimizer],
) -> list[tuple[torch.optim.Optimizer, torch.Tensor]]:
    """From the optimizers, not from the model: under FSDP2 the model shows unsharded parameters
    between forward and backward.
    """
    return [(o, p) for o in optimizers for group in o.param_groups for p in group["params"]]


def replica_tree(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """References to the live local tensors: `parameters`, and for each of them its states by name
    in `optimizer`; of one that is of another package's class its parts by name, in a dict.
    """
    pairs = _parameters(optimizers)
    states = [{k: _plain(v) for k, v in o.state.get(p, {}).items()} for o, p in pairs]
    return {"parameters": [local_part(p) for _, p in pairs], "optimizer": states}


def _plain(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    parts = plain_parts(local_part(value))
    return parts.get("", parts)


@torch.no_grad()
def fill_replica(
    optimizers: Sequence[torch.optim.Optimizer], tree: dict[str, Any], where: str
) -> None:
    """Put the values of a `replica_tree` into the live tensors.

    Args:
        where: the file it came from, for the error.

    Raises:
        ValueError: it belongs to another model or number of ranks.
    """
    pairs = _parameters(optimizers)
    if [local_part(p).shape for _, p in pairs] != [saved.shape for saved in tree["parameters"]]:
        raise ValueError(
            f"{where} was saved by another model or number of ranks: give the same, or resume from "
            "a checkpoint that fits any"
        )
    for optimizer in optimizers:
        materialise(optimizer)
    _make_foreign(pairs, tree["optimizer"])
    by_id = holders(optimizers)
    for (optimizer, p), saved, kept in zip(
        pairs, tree["parameters"], tree["optimizer"], strict=True
    ):
        local_part(p).copy_(saved)
        for key, value in kept.items():
            live, group = optimizer.state[p].get(key), by_id[id(p)][1]
            if isinstance(value, torch.Tensor):
                if not isinstance(live, torch.Tensor):  # made at the first step only: by RMSprop
                    shape = value.shape, value.dtype, local_part(p).shape
                    live = optimizer.state[p][key] = room(group, p, key, *shape)
                local_part(live).copy_(value)
            elif isinstance(value, Mapping):
                for part, t in plain_parts(local_part(live)).items():
                    t.copy_(value[part])
            else:
                optimizer.state[p][key] = value


def _make_foreign(
    pairs: Sequence[tuple[torch.optim.Optimizer, torch.Tensor]],
    kept: Sequence[Mapping[str, Any]],
) -> None:
    """States of other packages' classes are made by their optimizers, which know the class."""
    for optimizer in dict.fromkeys(o for o, _ in pairs):
        mine = [(p, states) for (o, p), states in zip(pairs, kept, strict=True) if o is optimizer]
        lacking = any(
            isinstance(value, Mapping) and key not in optimizer.state[p]
            for p, states in mine
            for key, value in states.items()
        )
        if lacking:
            take_empty_step(optimizer, [p for p, states in mine if states])
