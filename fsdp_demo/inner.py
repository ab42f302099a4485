"""Inner (base) optimizers: the one a preset is defined for, the check that it got one, and its state made eagerly."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .config import ExchangeConfig
from .muon import MuonAdamW

log = logging.getLogger("fsdp_demo")

_SAME = {"FusedAdam": "Adam", "DeepSpeedCPUAdam": "Adam", "MuonWithAuxAdam": "MuonAdamW"}
"""Optimizers of other packages by the name of what does the same; Adam with decoupled decay is AdamW."""

_KNOWN = ("SGD", "Adam", "AdamW", "Muon")  # optimizers whose state after a step with zero gradients is a fresh state with step 1


def base_optimizer(config: ExchangeConfig, params: Iterable[Any], lr: float | None = None, **options: Any) -> torch.optim.Optimizer:
    """The inner optimizer that `config` is defined for.

    "sgd" gives SGD, "muonadamw" `MuonAdamW` (needs named parameters), everything else AdamW.

    Args:
        config: an `ExchangeConfig`.
        params: parameters, named parameters or parameter groups.
        lr: learning rate; default the preset's published one.
        options: passed on to the optimizer's class. AdamW defaults here to betas (0.9, 0.95) and weight decay 0.1, as in the
            published DiLoCo family.

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
        raise ValueError(f"preset {config.preset!r} has no published learning rate: pass lr= (the recipes: --lr)")
    if config.inner[0] == "sgd":
        return torch.optim.SGD(params, lr=rate, **options)
    if config.inner[0] == "muonadamw":
        return MuonAdamW(params, lr=rate, **options)
    return torch.optim.AdamW(params, lr=rate, **{"betas": (0.9, 0.95), "weight_decay": 0.1, **options})


def kind(optimizer: torch.optim.Optimizer) -> str:
    """The name of torch's class that does what `optimizer` does, else that of its own."""
    name = _SAME.get(type(optimizer).__name__, type(optimizer).__name__)
    return "AdamW" if name == "Adam" and getattr(optimizer, "adam_w_mode", False) else name


def check_inner(config: ExchangeConfig, names: Sequence[str], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise ValueError if the preset is not defined for one of the optimizers (of kinds `names`); the message says the cure."""
    if {"any", "as_is"} & set(config.inner):
        return
    for name, optimizer in zip(names, optimizers, strict=True):
        momentum = [g.get("momentum", 0) for g in optimizer.param_groups] if config.inner == ("sgd",) else []
        if name.lower() not in config.inner or any(momentum):
            found = name + (f" with momentum {max(momentum)}" if any(momentum) else "")
            wanted = "sgd without momentum" if config.inner == ("sgd",) else " or ".join(config.inner)
            form = ", ask for FlexDeMo's AdamW form by inner='adamw'" if config.inner == ("sgd",) and name == "AdamW" else ""
            raise ValueError(
                f"preset {config.preset!r} is defined for {wanted}, found {found}: build it by fsdp_demo.base_optimizer(config, params, lr)"
                f"{form}, or insist with inner='as_is'"
            )


def materialise(optimizer: torch.optim.Optimizer) -> None:
    """Make the state of a fresh optimizer now, as its first step would, with all step counters at zero.

    Checkpoint libraries make it by a step of their own otherwise, in the middle of a job. Parameters do not change: the step runs
    with zero gradients and learning rate zero. Optimizers of unknown kind are left alone.
    """
    if isinstance(optimizer, MuonAdamW):
        for part in optimizer.parts:
            materialise(part)
        return
    params = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
    if any(p in optimizer.state for p in params) or type(optimizer).__name__ not in _KNOWN:
        return
    if any(g.get("dampening") for g in optimizer.param_groups):
        return
    grads, rates = [p.grad for p in params], [g["lr"] for g in optimizer.param_groups]
    for p in params:
        p.grad = torch.zeros_like(p)
    for g in optimizer.param_groups:
        g["lr"] = torch.zeros_like(g["lr"]) if isinstance(g["lr"], torch.Tensor) else 0.0
    optimizer.step()
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad
    for g, rate in zip(optimizer.param_groups, rates, strict=True):
        g["lr"] = rate
    for state in [optimizer.state[p] for p in params if p in optimizer.state]:
        step = state.get("step")
        if isinstance(step, torch.Tensor):
            step.zero_()
        elif step is not None:
            state["step"] = 0
