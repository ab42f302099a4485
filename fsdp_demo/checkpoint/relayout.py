"""One workspace put together from workspaces of another layout: other shards of dim 0, other active
copies.

A tensor that lies as it lay is taken as it is, coefficients too, bit for bit. Others go through the
element domain: out of the blocks, inverse transform, rows joined and cut, transform, into the new
blocks; one tensor at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ..compression.blocks import Layout
from ..compression.transform import transform
from ..config.channel import Codec

Rows = tuple[int, int]  # of dim 0, or elements of what ZeRO has cut: from, to


@dataclass
class TensorLayout:
    """Where a channel's tensors lie on one rank: for each its name, local shape, kind of blocks and
    rows of the whole; and the active copy.
    """

    names: list[str]
    shapes: list[tuple[int, ...]]
    kinds: list[str]
    rows: list[Rows]
    active_copy: int
    active_copies: int

    @cached_property
    def layout(self) -> Layout:
        """Of the workspace of this copy."""
        return Layout(self.shapes, self.kinds, self.active_copy, self.active_copies)

    @cached_property
    def views(self) -> dict[int, Layout]:
        """For each tensor of which this active copy holds a part: the layout with that tensor alone
        in it, as number 0.
        """
        return {
            t: self.layout.only(t)
            for t in {p.region.tensor for p in self.layout.pieces}
            | {d.tensor for d in self.layout.dense}
        }

    def lies_as(self, t: int, other: TensorLayout, s: int) -> bool:
        """Whether tensor `t` has the blocks of the other side's tensor `s`, over the same
        elements.
        """
        return (self.shapes[t], self.kinds[t], self.rows[t]) == (
            other.shapes[s],
            other.kinds[s],
            other.rows[s],
        )


class LayoutConverter:
    """A workspace of the new layout, the weighted sum of saved ones.

    Args:
        target: the new side.
        codec: it lives in the domain of this codec's transform; None: in that of the elements.
    """

    def __init__(self, target: TensorLayout, codec: Codec | None):
        # In fp32 whatever the channel multiplies in: what comes back from another layout is what
        # was saved.
        self.target = target
        self.codec = replace(codec, transform_precision="fp32") if codec is not None else None
        self._whole: Tensor | None = None
        self._tensors: dict[int, Tensor] = {}
        self._raw: set[int] = set()

    def add(self, source: TensorLayout, work: Tensor, weight: float) -> None:
        """Add `weight` times a saved workspace, as far as it holds elements of the target.

        Raises:
            ValueError: the workspace does not have the length of its layout.
        """
        if work.numel() != source.layout.numel:
            raise ValueError(
                f"a saved workspace has {work.numel()} elements, its layout {source.layout.numel}: "
                "the checkpoint is damaged"
            )
        if source == self.target:
            if self._whole is None:
                self._whole = work.clone() if weight == 1.0 else work * weight
            else:
                self._whole.add_(work, alpha=weight)
            return
        where = {n: s for s, n in enumerate(source.names)}
        assert len(where) == len(source.names), "stretches of one tensor are taken as they lie"
        for t, name in enumerate(self.target.names):
            self._add(t, source, where[name], work, weight)

    def _add(self, t: int, source: TensorLayout, s: int, work: Tensor, weight: float) -> None:
        (begin, end), (first, last) = self.target.rows[t], source.rows[s]
        lo, hi = max(begin, first), min(end, last)
        if lo >= hi or s not in source.views:
            return
        if t not in self._tensors:
            self._tensors[t] = torch.zeros(self.target.shapes[t], dtype=torch.float32, device="cpu")
        raw = self.target.lies_as(t, source, s)
        if raw:
            self._raw.add(t)
        if raw and weight == 1.0:
            source.views[s].unpack(work, [self._tensors[t]])
            return
        x = torch.zeros(source.shapes[s], dtype=torch.float32, device="cpu")
        source.views[s].unpack(work, [x])
        if self.codec is not None and not raw:
            _transform(self.codec, x, source.kinds[s], inverse=True)
        part = x.view(last - first, -1)[lo - first : hi - first]
        self._tensors[t].view(end - begin, -1)[lo - begin : hi - begin].add_(part, alpha=weight)

    def result(self) -> Tensor:
        """The workspace, on the CPU; nothing can be added any more."""
        if self._whole is not None:
            return self._whole
        work = self.target.layout.new("cpu")
        for t in list(self._tensors):
            x = self._tensors.pop(t)
            if self.codec is not None and t not in self._raw:
                _transform(self.codec, x, self.target.kinds[t], inverse=False)
            if t in self.target.views:
                self.target.views[t].pack([x], work)
        return work


def _transform(codec: Codec, x: Tensor, blocks: str, inverse: bool) -> None:
    """The blocks of one local tensor, in place."""
    if blocks == "transform":
        layout = Layout([x.shape], [blocks])
        layout.unpack(
            transform(codec, layout, layout.pack([x], layout.new(x.device)), inverse), [x]
        )
