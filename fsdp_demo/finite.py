"""Whether the values of a checkpoint are finite: one that holds a NaN must not take the place of the last good one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .shards import local_part


class NotFinite(ValueError):
    """A tensor that was to be saved holds NaN or Inf.

    Example:
        >>> from fsdp_demo.finite import NotFinite
        >>> issubclass(NotFinite, ValueError)
        True
    """


@torch.no_grad()
def first_not_finite(tensors: Mapping[str, torch.Tensor]) -> str:
    """The name of the first tensor that holds NaN or Inf, empty if there is none. Local parts only, no collectives.

    Smallest and largest value of each tensor in one pass where it lies: both are NaN where any value is. One wait per device.
    """
    by_device: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in tensors.items():
        t = local_part(tensor)
        if t.numel() and (t.is_floating_point() or t.is_complex()):
            t = torch.view_as_real(t) if t.is_complex() else t.float() if t.element_size() == 1 else t
            by_device.setdefault(t.device, []).append((name, torch.stack(torch.aminmax(t)).isfinite().all()))
    for found in by_device.values():
        good = torch.stack([verdict for _, verdict in found]).tolist()
        if not all(good):
            return found[good.index(False)][0]
    return ""


def refuse_not_finite(*trees: tuple[str, Any]) -> None:
    """For each (name, tree of tensors): raise if any of the tensors holds NaN or Inf.

    Raises:
        NotFinite: names the first one.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, tree in trees:
        _collect(tree, name, tensors)
    if bad := first_not_finite(tensors):
        raise NotFinite(f"{bad} holds values that are not finite (NaN or Inf): not saved, it would take the place of a good checkpoint")


def _collect(node: Any, name: str, out: dict[str, torch.Tensor]) -> None:
    if isinstance(node, torch.Tensor):
        out[name] = node
    elif isinstance(node, Mapping):
        for key, value in node.items():
            _collect(value, f"{name}.{key}", out)
    elif isinstance(node, list | tuple):
        for i, value in enumerate(node):
            _collect(value, f"{name}.{i}", out)
