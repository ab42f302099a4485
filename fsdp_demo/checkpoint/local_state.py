"""One rank's part of a replica: local parameters, states of the inner optimizers, the exchange. No
collectives: peers may be gone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..exchange.exchange import Exchange
from ..hosts.base import local_part
from ..hosts.optimizers import materialise
from .exchange_state import Snapshot, describe_part
from .files import read_part, write_part
from .finite import refuse_not_finite
from .reshard import average_states


def save_local(
    folder: Path,
    optimizers: Sequence[torch.optim.Optimizer],
    exchange: Exchange,
    loop: Any = None,
    before_last: Callable[[], Any] = lambda: None,
) -> None:
    """Write this rank's shards, optimizer states, exchange and what its loop keeps;
    `FOLDER/rank<rank>.json` comes last.

    Args:
        loop: a tree of tensors and JSON values.
        before_last: called before that json, with which the part counts; what it raises leaves the
            part unfinished.

    Raises:
        NotFinite: a tensor holds NaN or Inf; nothing is written.
    """
    kept, state = replica_tree(optimizers), exchange.state_dict()
    refuse_not_finite(("replica", kept), ("exchange", state))
    Snapshot(describe_part(exchange), state).write(folder / "exchange")
    rank, world = exchange.topology.rank, exchange.topology.world
    head = {"step": exchange.step, "rank": rank, "world": world, "exchange": True}
    write_part(folder, f"rank{rank}", head, {**kept, "loop": loop}, before_last)


def load_local(
    shares: Mapping[Path, float], rank: int, optimizers: Sequence[torch.optim.Optimizer]
) -> list[Any]:
    """Put the shards and optimizer states that `save_local` wrote back, before `attach`.

    Args:
        shares: folders of islands and their weights. Several, where the number of islands has
            changed: the weighted mean.

    Returns:
        What the loop of each folder kept, in their order.

    Raises:
        ValueError: another model or number of ranks; a part that is missing or damaged.
    """
    contents = [read_part(folder / f"rank{rank}.json")[1] for folder in shares]
    kept = [{key: content[key] for key in ("parameters", "optimizer")} for content in contents]
    fill_replica(
        optimizers, average_states(kept, list(shares.values())), ", ".join(map(str, shares))
    )
    return [content["loop"] for content in contents]


def _parameters(
    optimizers: Sequence[torch.optim.Optimizer],
) -> list[tuple[torch.optim.Optimizer, torch.Tensor]]:
    """From the optimizers, not from the model: under FSDP2 the model shows unsharded parameters
    between forward and backward.
    """
    return [(o, p) for o in optimizers for group in o.param_groups for p in group["params"]]


def replica_tree(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """References to the live local tensors: `parameters`, and for each of them its states by name
    in `optimizer`.
    """
    pairs = _parameters(optimizers)
    states = [
        {
            k: local_part(v) if isinstance(v, torch.Tensor) else v
            for k, v in o.state.get(p, {}).items()
        }
        for o, p in pairs
    ]
    return {"parameters": [local_part(p) for _, p in pairs], "optimizer": states}


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
    for (optimizer, p), saved, kept in zip(
        pairs, tree["parameters"], tree["optimizer"], strict=True
    ):
        local_part(p).copy_(saved)
        for key, value in kept.items():
            live = optimizer.state[p].get(key)
            # made at the first step only: by SGD with dampening, RMSprop ...
            if not isinstance(live, torch.Tensor):
                live = optimizer.state[p][key] = _room(optimizer, p, key, value)
            if isinstance(live, torch.Tensor):
                local_part(live).copy_(value)


def _room(optimizer: torch.optim.Optimizer, p: torch.Tensor, key: str, value: Any) -> Any:
    """Where a saved state of `p` that is not there yet goes: laid out and sharded as its parameter,
    a step counter where torch keeps it.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape == local_part(p).shape and key != "step":
        return torch.zeros_like(p, dtype=value.dtype, requires_grad=False)
    group = next(g for g in optimizer.param_groups if any(p is q for q in g["params"]))
    there = key != "step" or group.get("capturable") or group.get("fused")
    return torch.empty_like(value, device=p.device if there else "cpu")
