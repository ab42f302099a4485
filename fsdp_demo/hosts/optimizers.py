"""Inner (base) optimizers: the one a preset is defined for, the check that it got one, and its
state made eagerly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..config.schema import ExchangeConfig
from ..errors import see
from .lowrank import LowRankAdamW
from .muon import MuonAdamW
from .qhadamw import QHAdamW

log = logging.getLogger("fsdp_demo")

_SAME = {
    "FusedAdam": "Adam",
    "DeepSpeedCPUAdam": "Adam",
    "MuonWithAuxAdam": "MuonAdamW",
    "ShardedMuon": "Muon",
}
"""By the class of another optimizer the name of the class that does the same; Adam with decoupled
decay is AdamW.
"""


def base_optimizer(
    config: ExchangeConfig, params: Iterable[Any], lr: float | None = None, **options: Any
) -> torch.optim.Optimizer:
    """The inner optimizer that `config` is defined for.

    "sgd" gives SGD, "muonadamw" `MuonAdamW`, "lowrankadamw" `LowRankAdamW` (both need named
    parameters), "qhadamw" `QHAdamW`, everything else AdamW.

    Args:
        config: an `ExchangeConfig`.
        params: parameters, named parameters or parameter groups.
        lr: learning rate; default the preset's published one.
        options: passed on to the optimizer's class. AdamW defaults here to betas (0.9, 0.95) and
            weight decay 0.1, as in the published DiLoCo family; to betas (0, 0.95) where the
            exchange keeps a momentum of gradients (`demo` in AdamW's form).

    Raises:
        ValueError: no learning rate is given and the preset has none.

    Example:
        >>> import torch
        >>> from fsdp_demo import base_optimizer, preset
        >>> type(base_optimizer(preset("demo"), torch.nn.Linear(2, 2).parameters())).__name__
        'SGD'
    """
    rate = lr if lr is not None else config.lr
    if rate is None:
        raise ValueError(
            f"preset {config.preset!r} has no published learning rate: pass lr= (the recipes: --lr)"
        )
    made = inner_class(config.inner_optimizers[0])
    if made is torch.optim.AdamW:
        betas = (0.0 if keeps_momentum(config) else 0.9, 0.95)
        options = {"betas": betas, "weight_decay": 0.1, **options}
    if made is LowRankAdamW:
        options = {"rank": config.inner_rank, **options}
    return made(params, lr=rate, **options)


def inner_class(name: str) -> Callable[..., torch.optim.Optimizer]:
    """The class of an inner optimizer by its name in `inner_optimizers`."""
    others = {"sgd": torch.optim.SGD, "muonadamw": MuonAdamW, "qhadamw": QHAdamW}
    others["lowrankadamw"] = LowRankAdamW
    return others.get(name, torch.optim.AdamW)


def keeps_momentum(config: ExchangeConfig) -> bool:
    """Whether gradients reach the inner optimizer through a momentum that the exchange keeps. A
    first moment on top is late: what was sent long ago is sent again before it has acted.
    """
    return any(
        c.before_step and p.accumulator is not None and p.feedback != "none"
        for c in config.channels
        for p in c.phases
    )


def optimizer_kind(optimizer: torch.optim.Optimizer) -> str:
    """The name of torch's class that does what `optimizer` does, else that of its own."""
    name = _SAME.get(type(optimizer).__name__, type(optimizer).__name__)
    return "AdamW" if name == "Adam" and getattr(optimizer, "adam_w_mode", False) else name


def check_inner(
    config: ExchangeConfig, names: Sequence[str], optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """Raise ValueError, with the cure, if the preset is not defined for one of these kinds."""
    _check_ranks(config, optimizers)
    if keeps_momentum(config):
        _warn_of_second_momentum(config.preset, optimizers)
    if {"any", "as_is"} & set(config.inner_optimizers):
        return
    muon = {"muon", "muonadamw"}
    if config.inner_optimizers[0] in muon and not muon & {name.lower() for name in names}:
        raise ValueError(
            f"preset {config.preset!r} is defined for Muon with AdamW as its partner, found "
            f"{' and '.join(names)} alone: build both by "
            "fsdp_demo.base_optimizer(config, model.named_parameters(), lr), or insist with "
            f"inner_optimizers='as_is'{see('wrong-optimizer')}"
        )
    plain_sgd = config.inner_optimizers == ("sgd",)
    wanted = "sgd without momentum" if plain_sgd else " or ".join(config.inner_optimizers)
    for name, optimizer in zip(names, optimizers, strict=True):
        momentum = max(g.get("momentum", 0) for g in optimizer.param_groups) if plain_sgd else 0
        kinds = {name.lower(), *(["adamw"] if name == "QHAdamW" else [])}  # it is AdamW at nu=1
        if not kinds & {*config.inner_optimizers} or momentum:
            found = f"{name} with momentum {momentum}" if momentum else name
            asks = plain_sgd and name == "AdamW"
            form = ", ask for FlexDeMo's AdamW form by inner_optimizer='adamw'" if asks else ""
            raise ValueError(
                f"preset {config.preset!r} is defined for {wanted}, found {found}: build it by "
                "fsdp_demo.base_optimizer(config, params, lr)"
                f"{form}, or insist with inner_optimizers='as_is'{see('wrong-optimizer')}"
            )


def _check_ranks(config: ExchangeConfig, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    low = [o for o in optimizers if isinstance(o, LowRankAdamW)]
    found = sorted({g["rank"] for o in low for g in o.param_groups} - {0, config.inner_rank})
    if found:
        raise ValueError(
            f"LowRankAdamW of rank {found[0]} under preset {config.preset!r} with inner_rank="
            f"{config.inner_rank}, by which projections are remade and bytes counted: build it by "
            "fsdp_demo.base_optimizer(config, model.named_parameters(), lr)"
        )


def _warn_of_second_momentum(preset: str, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        first = max(group.get("betas", (0.0,))[0] for group in optimizer.param_groups)
        if first:
            text = (
                "preset %s keeps a momentum of gradients itself, and %s adds its own: betas[0]=%g. "
                "With both, training learned little: use betas=(0.0, 0.95), or "
                "fsdp_demo.base_optimizer%s"
            )
            log.warning(text, preset, type(optimizer).__name__, first, see("wrong-optimizer"))


def materialise(optimizer: torch.optim.Optimizer) -> None:
    """Make the state of a fresh optimizer now, so that channels can cover it and checkpoint
    libraries need no step of their own for it.

    The next steps give the same bits as without. Optimizers that keep another state than
    `fresh_state` knows, or hold some, are left alone.
    """
    if isinstance(optimizer, MuonAdamW):
        for part in optimizer.parts:
            materialise(part)
        return
    pairs = [(g, p) for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
    if any(p in optimizer.state for _, p in pairs):
        return
    for group, p in pairs:
        if made := fresh_state(optimizer, group, p):
            optimizer.state[p] = made


def fresh_state(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], p: Tensor
) -> dict[str, Tensor] | None:
    """What torch's SGD, Adam, AdamW and Muon, `QHAdamW` and `LowRankAdamW` hold for parameter `p`
    of `group` before their first step; None of others, which make their state at that step.

    SGD's momentum begins as a copy of the first gradient g. A buffer of negative zeros comes to the
    same at the first step, since mu * -0.0 + g is g for every g. With dampening there is no such
    buffer: None.
    """
    kind = type(optimizer)  # the class itself: one that inherits from it may keep something else
    if kind in (QHAdamW, LowRankAdamW):
        return optimizer.fresh(group, p)  # type: ignore[attr-defined]
    is_muon = kind is torch.optim.Muon or kind.__name__ == "ShardedMuon"
    if kind is torch.optim.SGD:
        if group["momentum"] and group["dampening"]:
            return None
        begun = {"momentum_buffer": -0.0} if group["momentum"] else {}
    elif is_muon:
        begun = {"momentum_buffer": 0.0}
    elif kind in (torch.optim.Adam, torch.optim.AdamW):
        begun = dict.fromkeys(
            ("exp_avg", "exp_avg_sq") + ("max_exp_avg_sq",) * bool(group["amsgrad"]), 0.0
        )
    else:
        return None
    buffers = {
        name: torch.full_like(p, value, requires_grad=False) for name, value in begun.items()
    }
    return ({} if kind is torch.optim.SGD or is_muon else {"step": _counter(group, p)}) | buffers


def holders(
    optimizers: Sequence[torch.optim.Optimizer],
) -> dict[int, tuple[torch.optim.Optimizer, dict[str, Any]]]:
    """The optimizer and the group that step each parameter, by its id; of MuonAdamW the part."""
    parts = [q for o in optimizers for q in (o.parts if isinstance(o, MuonAdamW) else [o])]
    return {id(p): (o, g) for o in parts for g in o.param_groups for p in g["params"]}


def misfit(
    optimizers: Sequence[torch.optim.Optimizer],
    kinds: Sequence[str] | None,
    saved: Iterable[tuple[str, Tensor, set[str]]],
) -> str:
    """A sentence on why saved states do not fit the optimizers here; empty where they fit.

    Args:
        kinds: `optimizer_kind` of the optimizers that saved them; None: not known.
        saved: name of a parameter, itself, and the names of its saved states.
    """
    mine, by_id = [optimizer_kind(o) for o in optimizers], holders(optimizers)
    who = f"{' and '.join(kinds or ['another optimizer'])} there, {' and '.join(mine)} here"
    for name, p, there in saved:
        if id(p) not in by_id:
            if there:
                return f"it holds {', '.join(sorted(there))} of {name}, which no optimizer has here"
            continue
        optimizer, group = by_id[id(p)]
        known = fresh_state(optimizer, group, torch.empty(p.shape, dtype=p.dtype, device="meta"))
        if known is None:
            if kinds is not None and sorted(kinds) != sorted(mine):
                return who
            continue
        if extra := there - set(known):
            return f"{who}: {', '.join(sorted(extra))} of {name} has no place here"
        if p.requires_grad and (lacking := set(known) - there):
            return f"{who}: {', '.join(sorted(lacking))} of {name} is not in it"
    return ""


@torch.no_grad()
def take_empty_step(optimizer: torch.optim.Optimizer, params: Iterable[Tensor]) -> None:
    """Let an optimizer make the states of `params` as it does at its first step: by one on
    gradients of zero, at a rate of 0. What it writes is to be overwritten.
    """
    held = [p for g in optimizer.param_groups for p in g["params"]]
    grads, rates = [p.grad for p in held], [g["lr"] for g in optimizer.param_groups]
    wanted = {id(p) for p in params}
    try:
        for p in held:
            p.grad = torch.zeros_like(p) if id(p) in wanted else None
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
        optimizer.step()
    finally:
        for p, grad in zip(held, grads, strict=True):
            p.grad = grad
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def room(
    group: Mapping[str, Any],
    p: Tensor,
    key: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    whole: Sequence[int],
) -> Tensor:
    """A new tensor for a saved state of `p` that the optimizer does not hold yet: laid out and
    sharded as its parameter if it has the shape `whole`; a step counter lies where torch keeps it.
    """
    if tuple(shape) == tuple(whole) and key != "step":
        return torch.zeros_like(p, dtype=dtype, requires_grad=False)
    there = key != "step" or group.get("capturable") or group.get("fused")
    return torch.zeros(tuple(shape), dtype=dtype, device=p.device if there else "cpu")


def _counter(group: dict[str, Any], p: Tensor) -> Tensor:
    """A step counter at zero, as torch makes it: on the host unless the kernels count."""
    wide = torch.get_default_dtype() == torch.float64 and not group["fused"]
    there = p.device if group["capturable"] or group["fused"] else torch.device("cpu")
    return torch.zeros((), dtype=torch.float64 if wide else torch.float32, device=there)
