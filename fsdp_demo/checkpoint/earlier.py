"""Parts of an exchange's state of earlier formats in that of today.

Format 1 (before 0.2): the settings have other names, the tensors are the same. Up to format 2:
messages under way have 12 bits for each position, as the wire had them up to its version 3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..channels.codec import ChannelCodec
from ..compression import positions, sparse
from ..compression import quantize as values
from ..compression.blocks import Layout
from ..compression.windows import EDGE, Group
from ..config.fragments import expand
from ..config.patterns import covers, tensor_layout_kind
from ..config.renamed import translated
from ..config.schema import ExchangeConfig

Cut = list[tuple[ChannelCodec, int]]
"""The gathered sections of a message, and the bytes that each had."""


def in_names_of_today(head: Mapping[str, Any], state: Any) -> tuple[dict[str, Any], Any]:
    """Head and tree of a part of format 1. Parts without a configuration (a model's, a loop's) are
    the same in both formats.

    Raises:
        KeyError, TypeError, ValueError: no release has written it so.
    """
    if "config" not in head:
        return dict(head), state
    config = translated(head["config"])
    digest = ExchangeConfig.from_dict(config).digest()
    new = {("active_copies" if key == "lanes" else key): value for key, value in head.items()} | {
        "config": config,
        "digest": digest,
    }
    same = isinstance(state, Mapping) and state.get("digest") == head["digest"]
    return new, {**state, "digest": digest} if same else state


def with_positions_of_today(head: Mapping[str, Any], state: Any) -> Any:
    """The tree of a part of format 1 or 2, in today's names, with the positions of its messages
    under way as they are sent today.

    Raises:
        KeyError, TypeError, ValueError: a message is not as long as it must be.
    """
    if "config" not in head or not isinstance(state, Mapping) or not state.get("in_flight"):
        return state
    config = ExchangeConfig.from_dict(head["config"])
    known = [p for p in head["parameters"] if not p["frozen"]]
    channels = {c.name: c for c in expand(config, [p["name"] for p in known])}

    def section(name: str) -> ChannelCodec:
        channel = channels[name]
        here = [p for p in known if covers(channel, p["name"])]
        shapes, kinds = (
            [p["shape"] for p in here],
            [tensor_layout_kind(channel, p["name"]) for p in here],
        )
        layout = Layout(shapes, kinds, head["copy"], head["active_copies"])
        return ChannelCodec(layout, channel, head["islands"], config.seed)

    return {**state, "in_flight": [_message(f, section) for f in state["in_flight"]]}


def _message(flight: Mapping[str, Any], section: Callable[[str], ChannelCodec]) -> Any:
    """A message under way."""
    sections = {name: section(name) for name in flight["members"]}
    if not any(s.codec.indexed for s in sections.values()):
        return flight
    cut = [(s, _length(s)) for s in sections.values() if s.gathered]
    parts = {
        name: {**out, "body": _body(out["body"], [(sections[name], _length(sections[name]))])}
        if sections[name].codec.indexed and out["body"] is not None
        else out
        for name, out in flight["parts"].items()
    }
    arrived = flight["arrived"]
    if arrived is not None:
        bits = sum(s.layout.num_tensors for s in sections.values() if s.channel.before_step)
        first = (bits + 7) // 8
        bodies = [torch.cat([b[:first], _body(b[first:], cut)]) for b in arrived["bodies"]]
        arrived = {**arrived, "bodies": bodies}
    return {**flight, "parts": parts, "arrived": arrived}


def _length(section: ChannelCodec) -> int:
    """Bytes that a section had."""
    layout, codec = section.layout, section.codec
    if not codec.indexed:
        return section.num_bytes
    dense = values.num_bytes(sparse.dense_code(codec), 1, layout.num_dense)
    return dense + sum(sum(_group(g, section)) for g in layout.groups)


def _group(g: Group, section: ChannelCodec) -> tuple[int, int]:
    """Bytes of the values of a group, and those that its positions had."""
    k = g.k(section.codec.topk)
    return values.num_bytes(section.codec.value_dtype, g.count, k), (3 * g.count * k + 1) // 2


def _body(body: Tensor, cut: Cut) -> Tensor:
    """Sections one after the other."""
    if len(body) != sum(size for _, size in cut):
        raise ValueError(f"it has {len(body)} bytes, expected {sum(size for _, size in cut)}")
    out = []
    for part, (section, _) in zip(body.split([size for _, size in cut]), cut, strict=True):
        for g in section.layout.groups if section.codec.indexed else ():
            size, packed = _group(g, section)
            out += [part[:size], *_planes(part[size : size + packed], g, section.codec.topk)]
            part = part[size + packed :]
        out.append(part)  # what is sent whole, or all of it
    return torch.cat(out)


def _planes(data: Tensor, g: Group, topk: int) -> list[Tensor]:
    """Positions of 12 bits, 64 row + column, as planes."""
    count = g.count * g.k(topk)
    x, y, z = torch.cat([data, data.new_zeros(-len(data) % 3)]).long().view(-1, 3).unbind(1)
    slot = torch.stack([x | (y & 15) << 8, y >> 4 | z << 4], 1).view(-1)[:count]
    index = slot // EDGE * g.s + slot % EDGE
    return positions.encode(sparse.position_form(g, topk), index.view(g.count, -1))
