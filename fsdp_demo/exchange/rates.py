"""What schedules move in the groups of the optimizers: learning rates, and the momenta of cyclic
schedules. Read on one island, set on another that makes up for its steps."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..hosts.base import TrainingHost

MOVED = ("lr", "betas", "momentum")


def read(host: TrainingHost) -> list[list[dict[str, Any]]]:
    """For each optimizer and each of its groups, name -> number or list of numbers (JSON)."""
    return [
        [{k: _plain(g[k]) for k in MOVED if k in g} for g in o.param_groups]
        for o in host.optimizers
    ]


def write(host: TrainingHost, rates: list[list[dict[str, Any]]]) -> None:
    """Set what `read` has given, in place.

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
                if name in MOVED and name in group:
                    group[name] = _like(group[name], value, name)


def _plain(value: Any) -> Any:
    """As JSON: the same number, to the last bit, when it is read back."""
    if isinstance(value, Tensor):
        return value.tolist()
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def _like(now: Any, value: Any, name: str) -> Any:
    """`value` in the form of what stands there; a tensor is filled where it is."""
    if isinstance(now, (list, tuple)):
        if not isinstance(value, list) or len(value) != len(now):
            raise ValueError(f"{name} of another form came: {value!r:.40}, here it is {now!r:.40}")
        return type(now)(_like(a, b, name) for a, b in zip(now, value, strict=True))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} of another form came: {value!r:.40}, here it is {now!r:.40}")
    return now.fill_(value) if isinstance(now, Tensor) else value
