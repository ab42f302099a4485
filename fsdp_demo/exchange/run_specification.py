"""The facts that islands compare before the first step, beside the configuration: tensors,
optimizers, machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from ..compression.transform import cpu_name, kernels
from ..config.schema import ExchangeConfig
from ..elastic import agreement
from ..elastic.peer_group import PeerGroup
from ..hosts.base import LocalParam, TrainingHost

NUMBERS = (
    "initial_lr weight_decay decoupled_weight_decay betas momentum dampening nesterov eps amsgrad "
    "maximize alpha centered rho lambd t0 etas step_sizes lr_decay momentum_decay beta2_decay d "
    "ns_steps ns_coefficients adjust_lr_fn use_muon nu rank error_feedback"
).split()
"""Settings of a parameter group that say what a step does; how it is computed (foreach, fused ...)
may differ.
"""

MOVED = ("betas", "momentum")
"""Those that torch's cyclic schedules move with the step, as they do the learning rate."""

SCHEDULED = ("lr", *MOVED)
"""What schedules move: read on one island, set on another that makes up for its steps."""


def specification(
    config: ExchangeConfig, host: TrainingHost, told: Mapping[str, Any]
) -> dict[str, Any]:
    """The facts that all islands compare before the first step, flat. told: further ones."""
    return {**told, **machine(host.device), **optimizers(host), **_flat(config.to_dict())}


def _flat(node: Any, prefix: str = "config") -> dict[str, Any]:
    """Nested dicts and lists as one flat dict with dotted keys."""
    if isinstance(node, list):
        node = dict(enumerate(node))
    if not isinstance(node, dict):
        return {prefix: node}
    return {k: v for key, value in node.items() for k, v in _flat(value, f"{prefix}.{key}").items()}


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
    """Learning rates, and what cyclic schedules move: equal at equal steps only."""
    return {
        f"optimizer{i}.group{g}.{k}": _plain(group[k])
        for i, optimizer in enumerate(host.optimizers)
        for g, group in enumerate(optimizer.param_groups)
        for k in SCHEDULED
        if k in group
    }


def _plain(value: Any) -> Any:
    """A setting as JSON: numbers to 7 digits, since fp32 tensors hold no more."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float):
        return float(f"{value:.7g}")
    return value if isinstance(value, (bool, int, str)) or value is None else str(value)


Described = tuple[str, list[int], list[int], str, str]
"""Name, shape, local shape and dtype of a parameter, and whether it is trained."""


def described(param: LocalParam) -> Described:
    """What must be equal of a parameter on all islands, as JSON."""
    dtype = str(param.dtype).removeprefix("torch.")
    state = "frozen" if param.frozen else "trained"
    return param.name, list(param.global_shape), list(param.shape), dtype, state


def agree_on_tensors(peers: PeerGroup, params: Sequence[LocalParam]) -> None:
    """Compare the parameters as `described`, in their order, with those of all replicas. Raises
    ValueError: on every replica, naming the first one that differs.
    """
    mine = [described(p) for p in params]
    if agreement.all_equal(peers, hashlib.sha256(json.dumps(mine).encode()).digest()):
        return
    for j, theirs in enumerate(agreement.gather_json(peers, mine)):
        if what := tensors_apart(params, theirs):
            here = peers.names[peers.rank]
            raise ValueError(agreement.unlike_runs(peers.label(j), here, what))


def tensors_apart(params: Sequence[LocalParam], theirs: Sequence[Sequence[Any]]) -> str:
    """How parameters here differ from those that an island has `described`; empty: not."""
    mine, others = ([json.dumps(d) for d in side] for side in (map(described, params), theirs))
    if mine == others:
        return ""
    both = enumerate(zip_longest(mine, others, fillvalue="null"))
    at, (here, there) = next((i, pair) for i, pair in both if pair[0] != pair[1])
    text = f"parameter {at} is {_sentence(here)} here, {_sentence(there)} there"
    if len(mine) != len(others):
        return f"{len(mine)} parameters here, {len(others)} there; {text}"
    if sorted(mine) == sorted(others):
        return (
            f"the same parameters in another order: {text}; give the optimizer its parameters in "
            "one order on all islands"
        )
    return text


def _sentence(description: str) -> str:
    """`described` as JSON, or null where an island has no such parameter, in words."""
    if (found := json.loads(description)) is None:
        return "none"
    name, shape, local, dtype, state = found
    here = "" if shape == local else f" (here in shards of {local})"
    return f"{name} {shape} {dtype}{here}, {state}"


def machine(device: torch.device) -> dict[str, str]:
    """Facts that may differ between islands, and explain differences in the last bit."""
    if device.type == "cpu":
        return {
            "torch": torch.__version__,
            "device": "cpu",
            "processor": f"{cpu_name()}, {kernels()}",
        }
    module = torch.get_device_module(device)
    name = module.get_device_name(device) if hasattr(module, "get_device_name") else device.type
    return {"torch": torch.__version__, "device": device.type, "processor": name}


def read_rates(host: TrainingHost) -> list[list[dict[str, Any]]]:
    """For each optimizer and each of its groups, name -> number or list of numbers (JSON)."""
    return [
        [{k: _plain_rate(g[k]) for k in SCHEDULED if k in g} for g in o.param_groups]
        for o in host.optimizers
    ]


def write_rates(host: TrainingHost, rates: list[list[dict[str, Any]]]) -> None:
    """The inverse of `read_rates`, in place. Raises ValueError: other numbers of optimizers, groups
    or values.
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
    if isinstance(value, Tensor):
        return value.tolist()
    return [_plain_rate(v) for v in value] if isinstance(value, (list, tuple)) else value


def _like(now: Any, value: Any, name: str) -> Any:
    """`value` in the form of `now`, the setting that it replaces; a tensor is filled in place."""
    several, number = isinstance(now, (list, tuple)), type(value) in (int, float)
    if several and isinstance(value, list) and len(value) == len(now):
        return type(now)(_like(a, b, name) for a, b in zip(now, value, strict=True))
    if several or not number:
        raise ValueError(f"{name} of another form came: {value!r:.40}, here it is {now!r:.40}")
    return now.fill_(value) if isinstance(now, Tensor) else value
