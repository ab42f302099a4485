"""One rank's part of a replica: local parameters, states of the inner optimizers, the rest of the
model, the exchange. No collectives: peers may be gone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..exchange.exchange import Exchange
from ..hosts.base import local_part, plain_parts
from ..hosts.optimizers import holders, materialise, misfit, room, take_empty_step
from .exchange_state import Snapshot, describe_part
from .files import OPTIMIZER, OTHER, read_part, write_part
from .finite import refuse_not_finite
from .reshard import average_states
from .sharded_state import model_tensors, outside

log = logging.getLogger("fsdp_demo")


def save_local(
    folder: Path,
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    exchange: Exchange,
    loop: Any = None,
    before_last: Callable[[], Any] = lambda: None,
) -> None:
    """Write this rank's shards, optimizer states, the rest of its model, exchange and what its loop
    keeps; `FOLDER/rank<rank>.json` comes last.

    The rest: persistent buffers, and parameters that no optimizer holds (frozen ones, a teacher
    that is an average).

    Args:
        loop: a tree of tensors and JSON values.
        before_last: called before that json, with which the part counts; what it raises leaves the
            part unfinished.

    Raises:
        NotFinite: a tensor of optimizers or exchange holds NaN or Inf; nothing is written.
    """
    kept, state = replica_tree(optimizers), exchange.state_dict()
    # not the rest: a mask of -inf is as it should be, and the step's work is in the others
    refuse_not_finite(("replica", kept), ("exchange", state))
    kept |= {"names": _names(model, optimizers), "rest": _rest(model, optimizers)}
    Snapshot(describe_part(exchange), state).write(folder / "exchange")
    rank, world = exchange.topology.rank, exchange.topology.world
    head = {"step": exchange.step, "rank": rank, "world": world, "exchange": True}
    write_part(folder, f"rank{rank}", head, {**kept, "loop": loop}, before_last)


def load_local(
    shares: Mapping[Path, float],
    rank: int,
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    kinds: Sequence[str] | None = None,
    weights_suffice: bool = False,
) -> tuple[list[Any], bool]:
    """Put the shards, optimizer states and the rest of the model that `save_local` wrote back, by
    their names, before `attach`.

    Args:
        shares: folders of islands and their weights. Several, where the number of islands has
            changed: the weighted mean; of counters and flags among the buffers the first.
        kinds, weights_suffice: as for `sharded_state.load_tensors`.

    Returns:
        What the loop of each folder kept, in their order; whether the optimizers' states were
        loaded.

    Raises:
        ValueError: another model, optimizer or number of ranks; a part that is missing or damaged.
    """
    contents = [read_part(folder / f"rank{rank}.json")[1] for folder in shares]
    names, weights = _names(model, optimizers), list(shares.values())
    where = ", ".join(map(str, shares))
    kept = [_in_order(content, names, where) for content in contents]
    params = [p for _, p in _parameters(optimizers)]
    keys = [{k for k, v in states.items() if v is not None} for states in kept[0]["optimizer"]]
    why = misfit(optimizers, kinds, zip(names, params, keys, strict=False))
    if why and not weights_suffice:
        raise ValueError(f"{where} does not fit this optimizer ({why}): {OPTIMIZER}")
    if why:
        log.warning(
            "%s: only the model is taken, the optimizer's state begins anew (%s)", where, why
        )
        kept = [{**tree, "optimizer": [{} for _ in names]} for tree in kept]
    fill_replica(optimizers, average_states(kept, weights), where)
    _fill_rest(_rest(model, optimizers), [c["rest"] for c in contents], weights, where)
    return [content["loop"] for content in contents], not why


def _names(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> list[str]:
    """Of the parameters in a `replica_tree`."""
    held = model_tensors(model)
    names = {id(p): name for name, p in (held | outside(held, optimizers)).items()}
    return [names[id(p)] for _, p in _parameters(optimizers)]


def _rest(
    model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, torch.Tensor]:
    """Local parts of what the model has beside the parameters of the optimizers. Without what the
    file cannot hold, since this save must not fail: tensors of other packages' classes (quantized
    weights, which may not be made of one tensor), sparse ones, and complex ones of other sizes.
    """
    held = {id(p) for _, p in _parameters(optimizers)}
    rest = {n: local_part(t) for n, t in model_tensors(model).items() if id(t) not in held}
    return {
        name: t
        for name, t in rest.items()
        if type(t) is torch.Tensor
        and t.layout == torch.strided
        and t.dtype not in (torch.complex32, torch.complex128)
    }


def _in_order(content: Mapping[str, Any], names: Sequence[str], where: str) -> dict[str, Any]:
    """A saved `replica_tree` in the order of the optimizers here."""
    tree = {key: content[key] for key in ("parameters", "optimizer")}
    saved = content["names"]
    if sorted(saved) != sorted(names):
        there, here = sorted({*saved} - {*names}), sorted({*names} - {*saved})
        raise ValueError(
            f"{where} was saved with optimizers over other parameters: {_some(there)} only there, "
            f"{_some(here)} only here. Give them the same parameters (those that are not in the "
            f"model: in the same groups, or with names), or {OTHER}"
        )
    at = {name: i for i, name in enumerate(saved)}
    return {key: [values[at[name]] for name in names] for key, values in tree.items()}


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (" ..." if len(names) > 3 else "") or "none"


@torch.no_grad()
def _fill_rest(
    live: Mapping[str, torch.Tensor],
    saved: Sequence[Mapping[str, torch.Tensor]],
    weights: Sequence[float],
    where: str,
) -> None:
    """Put the rest of the model back."""
    for name, tensor in live.items():
        if any(name not in rest or rest[name].shape != tensor.shape for rest in saved):
            raise ValueError(
                f"{where} was saved by another model: {name} of shape {tuple(tensor.shape)} here "
                f"is not in it. Give the model it was saved with, or {OTHER}"
            )
        values = [rest[name] for rest in saved]
        tensor.copy_(average_states(values, weights) if tensor.is_floating_point() else values[0])


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
