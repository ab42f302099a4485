"""What arrived for a channel, decoded window by window: the replicas' mean in the transform domain, without a workspace of its own.

Every form fills windows of a layout in order (`blocks.Window`). Replicas are added in rank order in fp32, so the same bits come out
everywhere, whatever the size of a window.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .blocks import CACHED, Group, Layout, Window
from .codecs import vectors, wire
from .config import BLOCK, Codec, Reducer

FEW = 64  # coefficients of a block for which outer products are less work than two products of matrices


class Mean:
    """A mean over the replicas as a function of the window.

    Attributes:
        layout: of the workspace that it stands for.
        device: where its windows are made.
    """

    layout: Layout
    device: torch.device

    def fill(self, window: Window, out: Tensor) -> Tensor:
        """Write the window's elements of the mean into `out`, fp32 [numel]."""
        raise NotImplementedError

    def terms(self, window: Window, room: Tensor) -> tuple[Tensor, Tensor] | None:
        """Where few elements of a window of blocks are not zero: places in the block (int64 [n, m]) and values (fp32 [n, m], 0 where a
        place comes again). `room` [numel] is used in between."""
        return None

    def add_to(self, work: Tensor, alpha: float) -> None:
        """work += alpha times the mean, on a whole workspace."""
        windows = self.layout.windows(self.device)
        room = torch.empty(max((w.numel for w in windows), default=0), device=self.device)
        for w in windows:
            w.of(work).add_(self.fill(w, room[: w.numel]), alpha=alpha)

    def clone(self) -> Tensor:
        """The whole workspace, a new fp32 tensor."""
        work = torch.empty(self.layout.numel, device=self.device)
        for w in self.layout.windows(self.device):
            self.fill(w, w.of(work))
        return work


class Whole(Mean):
    """A workspace that is there already, or the mean of a vector that is the whole workspace; it may lie on another device."""

    def __init__(self, layout: Layout, work: Tensor):
        self.layout, self.work, self.device = layout, work, work.device

    def fill(self, window: Window, out: Tensor) -> Tensor:
        """See `Mean.fill`."""
        return out.copy_(window.of(self.work))


class Indexed(Mean):
    """Sections of values and positions (`codecs/wire.py`).

    Args:
        bodies, weights: sections of the replicas that count, in rank order.
    """

    def __init__(self, layout: Layout, codec: Codec, reducer: Reducer, bodies: Sequence[Tensor], weights: Sequence[float]):
        self.layout, self.codec, self.reducer, self.bodies, self.weights = layout, codec, reducer, bodies, weights
        self.device = bodies[0].device if bodies else torch.device("cpu")
        self._coded = wire.split(layout, codec, bodies)
        self._dense: Tensor | None = None
        self._counts: Tensor | None = None  # replicas, or their weights, that sent a place of the window: bytes save much of the time

    def fill(self, window: Window, out: Tensor) -> Tensor:
        """See `Mean.fill`."""
        if not self.weights:
            return out.zero_()
        if window.group is None:
            start = self.layout.num_blocks * BLOCK
            return out.copy_(self._whole()[window.begin - start : window.end - start])
        place, found = self._decode(window)
        blocks, step = out.view(-1, BLOCK), CACHED if out.device.type == "cpu" and place.shape[0] * place.shape[2] > FEW else window.count
        for lo in range(0, window.count, step):  # many are jumped to in what the cache of a core holds
            self._sum(blocks[lo : lo + step].zero_(), place[:, lo : lo + step], found[:, lo : lo + step])
        return out

    def terms(self, window: Window, room: Tensor) -> tuple[Tensor, Tensor] | None:
        """See `Mean.terms`."""
        g, size = window.group, len(self.bodies)
        if g is None or not size or g.r * g.s < BLOCK or size * g.k(self.codec.topk) > FEW:
            return None
        place, found = self._decode(window)
        places, values = place.transpose(0, 1).flatten(1), torch.empty(window.count, size * place.shape[2], device=room.device)
        step = CACHED if values.shape[1] > FEW // 2 else window.count
        for lo in range(0, window.count, step):
            part, chosen = place[:, lo : lo + step], places[lo : lo + step]
            blocks = room[: len(chosen) * BLOCK].view(-1, BLOCK)
            self._sum(blocks.scatter_(1, chosen, 0.0), part, found[:, lo : lo + step])
            for p, out in zip(part, values[lo : lo + step].view(len(chosen), size, -1).unbind(1), strict=True):
                out.copy_(blocks.gather(1, p))
                blocks.scatter_(1, p, 0.0)  # a place that another replica has sent, too, counts once
        return places, values

    def _sum(self, blocks: Tensor, place: Tensor, found: Tensor) -> None:
        """The mean of what is decoded [R, n, k], into `blocks` [n, 4096], which are zero there."""
        weights = None if all(w == 1.0 for w in self.weights) else torch.tensor(self.weights, device=blocks.device)[:, None, None]
        places = place.transpose(0, 1).flatten(1)
        _add(blocks, place, places, found if weights is None else found * weights)
        if self.reducer.kind != "senders":
            blocks.scatter_(1, places, blocks.gather(1, places).div_(sum(self.weights)))
        elif self.weights != [1.0]:
            few = weights is None and len(self.weights) < 256  # then bytes do: a quarter of the memory to jump about in
            if self._counts is None or len(self._counts) < len(blocks):
                self._counts = torch.empty(blocks.shape, dtype=torch.uint8 if few else torch.float32, device=blocks.device)
            counts = self._counts[: len(blocks)].scatter_(1, places, 0)
            sent = (found != 0).to(counts.dtype)
            _add(counts, place, places, sent if weights is None else sent * weights)
            count = counts.gather(1, places).float()
            blocks.scatter_(1, places, blocks.gather(1, places).div_(count.masked_fill_(count == 0, 1.0)))

    def add_to(self, work: Tensor, alpha: float) -> None:
        """See `Mean.add_to`; only what was sent is touched."""
        if len(self.bodies) != 1 or self.weights != [1.0] or self.reducer.clip != "none":
            super().add_to(work, alpha)
            return
        for w in self.layout.windows(self.device):
            if w.group is not None:
                place, found = self._decode(w)
                w.of(work).view(-1, BLOCK).scatter_add_(1, place[0], found[0] * alpha)
        self.layout.dense_part(work).add_(wire.decode_dense(self.layout, self.codec, self.bodies[0]), alpha=alpha)

    def _decode(self, window: Window) -> tuple[Tensor, Tensor]:
        assert window.group is not None
        place, found = wire.decode_window(window, self._coded[window.group], self.codec)
        return place, _clipped(found) if self.reducer.clip == "median_norm" else found

    def _whole(self) -> Tensor:
        """The mean of what is sent whole, over all replicas."""
        if self._dense is None:
            self._dense = torch.zeros(self.layout.num_dense, device=self.device)
            for body, w in zip(self.bodies, self.weights, strict=True):
                self._dense.add_(wire.decode_dense(self.layout, self.codec, body), alpha=w)
            self._dense.div_(sum(self.weights))
        return self._dense


class Coded(Mean):
    """Whole vectors in a code, gathered (`codecs/vectors.py`)."""

    def __init__(self, layout: Layout, code: str, bodies: Sequence[Tensor], weights: Sequence[float]):
        self.layout, self.code, self.bodies, self.weights = layout, code, bodies, weights
        self.device = bodies[0].device if bodies else torch.device("cpu")

    def fill(self, window: Window, out: Tensor) -> Tensor:
        """See `Mean.fill`."""
        out.zero_()
        for body, w in zip(self.bodies, self.weights, strict=True):
            vectors.add_part(self.code, body, self.layout.numel, window.begin, out, w)
        return out.div_(sum(self.weights)) if self.weights else out

    def add_to(self, work: Tensor, alpha: float) -> None:
        """See `Mean.add_to`."""
        if len(self.bodies) == 1 and self.weights == [1.0]:
            vectors.add(self.code, self.bodies[0], work, alpha)
        else:
            super().add_to(work, alpha)


class Scattered(Mean):
    """Values at positions that are known, and the dense elements.

    Args:
        positions: of each group, places in the slots, int64 [count, k].
        topk: of the codec.
        chosen, dense: fp32; they may lie on another device than the positions.
    """

    def __init__(self, layout: Layout, positions: dict[Group, Tensor], topk: int, chosen: Tensor, dense: Tensor):
        self.layout, self._positions, self._chosen, self._dense, self.device = layout, positions, chosen, dense, chosen.device
        self._starts, at = {}, 0
        for g in layout.groups:
            self._starts[g] = at
            at += g.count * g.k(topk)

    def fill(self, window: Window, out: Tensor) -> Tensor:
        """See `Mean.fill`."""
        if window.group is None:
            start = self.layout.num_blocks * BLOCK
            return out.copy_(self._dense[window.begin - start : window.end - start])
        place, values = self._of(window, out.device)
        out.zero_().view(-1, BLOCK).scatter_(1, place, values)
        return out

    def add_to(self, work: Tensor, alpha: float) -> None:
        """See `Mean.add_to`; only what was sent is touched."""
        for w in self.layout.windows(work.device):
            if w.group is not None:
                place, values = self._of(w, work.device)
                w.of(work).view(-1, BLOCK).scatter_add_(1, place, values * alpha)
        self.layout.dense_part(work).add_(self._dense, alpha=alpha)

    def _of(self, window: Window, device: torch.device) -> tuple[Tensor, Tensor]:
        """Places and values [count, k] of a window's blocks."""
        assert window.group is not None
        place = self._positions[window.group][window.first : window.first + window.count]
        start = self._starts[window.group] + window.first * place.shape[1]
        return place.to(device), self._chosen[start : start + place.numel()].view(place.shape).to(device)


def _add(blocks: Tensor, place: Tensor, places: Tensor, values: Tensor) -> None:
    """blocks [n, 4096] += values [R, n, k] at `place` (the same as [n, R k]: `places`), in rank order.

    A CPU adds what is in a row one after the other. Elsewhere what is added at once has no order, so replicas are added one at a time."""
    if blocks.device.type == "cpu":
        blocks.scatter_add_(1, places, values.transpose(0, 1).flatten(1))
        return
    for p, v in zip(place, values, strict=True):
        blocks.scatter_add_(1, p, v)


def _clipped(found: Tensor) -> Tensor:
    """Scale each replica's values of a block [R, n, k] by min(1, median / norm), the median being that of the replicas' norms of that block
    (the mean of the middle two of an even number)."""
    norms = found.norm(dim=2)
    ordered = norms.sort(0).values
    median = (ordered[(len(found) - 1) // 2] + ordered[len(found) // 2]) / 2
    return found * torch.where(norms > median, median / norms, 1.0)[:, :, None]
