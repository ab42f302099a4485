"""What islands compare of themselves before the first step, beside the configuration: tensors,
optimizers, and the machine they run on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..compression.transform import cpu_name, kernels
from ..elastic import agreement
from ..elastic.peer_group import PeerGroup
from ..hosts.base import LocalParam, TrainingHost

NUMBERS = (
    "initial_lr weight_decay decoupled_weight_decay betas momentum dampening nesterov eps amsgrad "
    "maximize alpha centered rho lambd t0 "
    "etas step_sizes lr_decay momentum_decay beta2_decay d ns_steps ns_coefficients adjust_lr_fn "
    "use_muon"
).split()
"""Settings of a parameter group that say what a step does; how it is computed (foreach, fused ...)
may differ.
"""

MOVED = ("betas", "momentum")
"""Those that torch's cyclic schedules move with the step, as they do the learning rate."""


def optimizers(host: TrainingHost) -> dict[str, Any]:
    """Kind, number of groups and numbers of each group, whatever the step."""
    out: dict[str, Any] = {}
    for i, (name, optimizer) in enumerate(zip(host.optimizer_names, host.optimizers, strict=True)):
        out |= {f"optimizer{i}": name, f"optimizer{i}.groups": len(optimizer.param_groups)}
        for g, group in enumerate(optimizer.param_groups):
            fixed = [
                k for k in NUMBERS if k in group and not (k in MOVED and "max_momentum" in group)
            ]
            out |= {f"optimizer{i}.group{g}.{k}": _plain(group[k]) for k in fixed}
    return out


def rates(host: TrainingHost) -> dict[str, Any]:
    """What is equal at equal steps only: learning rates, and what cyclic schedules move."""
    return {
        f"optimizer{i}.group{g}.{k}": _plain(group[k])
        for i, optimizer in enumerate(host.optimizers)
        for g, group in enumerate(optimizer.param_groups)
        for k in ("lr", *MOVED)
        if k in group
    }


def _plain(value: Any) -> Any:
    """A setting as JSON: tensors as numbers, numbers to 7 digits, since fp32 tensors hold no
    more.
    """
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float):
        return float(f"{value:.7g}")
    return value if isinstance(value, (bool, int, str)) or value is None else str(value)


def marks(shards: Sequence[LocalParam]) -> list[str]:
    """8 hexadecimal digits of each tensor's name, shape, local shape, dtype, and whether it is
    frozen.
    """
    return [hashlib.sha256(json.dumps(described(s)).encode()).hexdigest()[:8] for s in shards]


Described = tuple[str, list[int], list[int], str, str]
"""Name, shape, local shape and dtype of a parameter, and whether it is trained."""


def described(shard: LocalParam) -> Described:
    """What must be equal of a tensor, as JSON."""
    dtype = str(shard.dtype).removeprefix("torch.")
    state = "frozen" if shard.frozen else "trained"
    return shard.name, list(shard.global_shape), list(shard.shape), dtype, state


def sentence(described: Sequence[Any] | None) -> str:
    """`described` in words."""
    if described is None:
        return "none"
    name, shape, local, dtype, state = described
    return (
        f"{name} {shape} {dtype}{'' if shape == local else f' (here in shards of {local})'}, "
        f"{state}"
    )


def agree_on_tensors(peers: PeerGroup, shards: Sequence[LocalParam]) -> None:
    """Compare names, shapes, local shapes and dtypes of the parameters, in their order, with those
    of all replicas.

    Raises:
        ValueError: on every replica, naming the first one that differs.
    """
    mine = marks(shards)
    if agreement.all_equal(peers, hashlib.sha256(json.dumps(mine).encode()).digest()):
        return
    everyone = agreement.gather_json(peers, mine)
    # The first place where each island parts from island 0; two that part at one place from it may
    # part from each other there as well.
    places = sorted({_parting(everyone[0], theirs) for theirs in everyone if theirs != everyone[0]})
    tensors = agreement.gather_json(
        peers, [described(shards[i]) if i < len(shards) else None for i in places]
    )
    j = next(j for j, theirs in enumerate(everyone) if theirs != mine)
    at = next((n for n in range(len(places)) if tensors[j][n] != tensors[peers.rank][n]), 0)
    what = _apart(mine, everyone[j], places[at], tensors[peers.rank][at], tensors[j][at])
    raise ValueError(agreement.unlike_runs(peers.label(j), peers.names[peers.rank], what))


def tensors_apart(shards: Sequence[LocalParam], theirs: Sequence[Described]) -> str:
    """How the parameters here differ from those that are `described` by another island; empty where
    they do not.
    """
    mine = [described(s) for s in shards]
    if mine == theirs:
        return ""
    at = _parting(mine, theirs)
    a, b = (every[at] if at < len(every) else None for every in (mine, theirs))
    return _apart(list(map(json.dumps, mine)), list(map(json.dumps, theirs)), at, a, b)


def _apart(
    mine: Sequence[str],
    theirs: Sequence[str],
    at: int,
    here: Sequence[Any] | None,
    there: Sequence[Any] | None,
) -> str:
    """The sentence for parameters that first differ at place `at`. mine, theirs: a mark of each."""
    text = f"parameter {at} is {sentence(here)} here, {sentence(there)} there"
    if len(mine) != len(theirs):
        return f"{len(mine)} parameters here, {len(theirs)} there; {text}"
    if sorted(mine) == sorted(theirs):
        return (
            f"the same parameters in another order: {text}; give the optimizer its parameters in "
            "one order on all islands"
        )
    return text


def _parting(a: Sequence[Any], b: Sequence[Any]) -> int:
    """The first index where two lists differ."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def machine(device: torch.device) -> dict[str, str]:
    """What may differ between islands, and explains differences in the last bit."""
    if device.type == "cpu":
        return {
            "torch": torch.__version__,
            "device": "cpu",
            "processor": f"{cpu_name()}, {kernels()}",
        }
    module = torch.get_device_module(device)
    name = module.get_device_name(device) if hasattr(module, "get_device_name") else device.type
    return {"torch": torch.__version__, "device": device.type, "processor": name}


# What schedules move in the groups of the optimizers: learning rates, and the momenta of cyclic
# schedules. Read on one island, set on another that makes up for its steps.

SCHEDULED = ("lr", "betas", "momentum")


def read_rates(host: TrainingHost) -> list[list[dict[str, Any]]]:
    """For each optimizer and each of its groups, name -> number or list of numbers (JSON)."""
    return [
        [{k: _plain_rate(g[k]) for k in SCHEDULED if k in g} for g in o.param_groups]
        for o in host.optimizers
    ]


def write_rates(host: TrainingHost, rates: list[list[dict[str, Any]]]) -> None:
    """Set what `read_rates` has given, in place.

    Raises:
        ValueError: other numbers of optimizers, groups or values.
    """
    mine = [len(o.param_groups) for o in host.optimizers]
    if [len(groups) for groups in rates] != mine:
        raise ValueError(
            f"rates of {[len(groups) for groups in rates]} groups came, the optimizers here have "
            f"{mine}"
        )
    for optimizer, groups in zip(host.optimizers, rates, strict=True):
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            for name, value in values.items():
                if name in SCHEDULED and name in group:
                    group[name] = _like(group[name], value, name)


def _plain_rate(value: Any) -> Any:
    """As JSON: the same number, to the last bit, when it is read back."""
    if isinstance(value, Tensor):
        return value.tolist()
    return [_plain_rate(v) for v in value] if isinstance(value, (list, tuple)) else value


def _like(now: Any, value: Any, name: str) -> Any:
    """`value` in the form of what stands there; a tensor is filled where it is."""
    if isinstance(now, (list, tuple)):
        if not isinstance(value, list) or len(value) != len(now):
            raise ValueError(f"{name} of another form came: {value!r:.40}, here it is {now!r:.40}")
        return type(now)(_like(a, b, name) for a, b in zip(now, value, strict=True))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} of another form came: {value!r:.40}, here it is {now!r:.40}")
    return now.fill_(value) if isinstance(now, Tensor) else value
