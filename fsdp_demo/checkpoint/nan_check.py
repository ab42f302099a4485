"""Whether the values of a checkpoint are finite: one that holds a NaN must not take the place of
the last good one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..errors import NotFinite
from ..hosts.base import local_part, plain_parts

if TYPE_CHECKING:
    from ..exchange.exchange import Exchange


@torch.no_grad()
def first_not_finite(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """The name of the first tensor that holds NaN or Inf, empty if there is none. Local parts only,
    no collectives.

    Of a tensor of another package's class its parts are looked at (scales are not finite where its
    values are not). Smallest and largest value of each tensor in one pass where it lies: both are
    NaN where any value is. One wait per device.
    """
    by_device: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
    local = ((name, t) for name, whole in tensors for t in plain_parts(local_part(whole)).values())
    for name, t in local:
        if t.numel() and (t.is_floating_point() or t.is_complex()):
            t = (
                torch.view_as_real(t)
                if t.is_complex()
                else t.float()
                if t.element_size() == 1
                else t
            )
            by_device.setdefault(t.device, []).append(
                (name, torch.stack(torch.aminmax(t)).isfinite().all())
            )
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
    if bad := first_not_finite(pair for name, tree in trees for pair in _tensors(tree, name)):
        raise NotFinite(
            f"{bad} holds values that are not finite (NaN or Inf): not saved, it would take the "
            "place of a good checkpoint"
        )


def refuse_exchange(exchange: Exchange) -> None:
    """As `refuse_not_finite`, for parameters and inner optimizer states that an exchange sees (of
    ZeRO's partitions without the padding), and its own state.

    Raises:
        PeerLost: what was under way is lost (`Exchange.state_dict`).
    """
    host = exchange.host
    kept = {
        kind: host.tensors(kind)
        for kind in ("parameter", *(f"state:{name}" for name in host.states()))
    }
    named = [
        (kind, [(s.name, t) for s, t in zip(host.params, tensors, strict=True)])
        for kind, tensors in kept.items()
    ]
    refuse_not_finite(
        *((f"{kind} {name}", t) for kind, pairs in named for name, t in pairs),
        ("exchange", exchange.state_dict()),
    )


def _tensors(node: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(node, torch.Tensor):
        yield name, node
    elif isinstance(node, Mapping | list | tuple):
        for key, value in node.items() if isinstance(node, Mapping) else enumerate(node):
            yield from _tensors(value, f"{name}.{key}")
