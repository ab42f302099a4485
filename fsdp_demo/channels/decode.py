"""The replicas' mean of what they sent for one channel, decoded window by window in the transform
domain, without a workspace of its own.

Each class is a form in which payloads arrive. It fills the windows of a layout in order
(`windows.Window`). Replicas are added in rank order in fp32, so the bits are the same everywhere,
whatever the size of a window.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import torch
from torch import Tensor

from ..compression import dense as vectors
from ..compression import formats, sparse
from ..compression.blocks import Layout
from ..compression.fused import FusedBlocks
from ..compression.windows import Group, Window, stretches, upload
from ..config.parts import BLOCK, Codec, Reducer

# coefficients of a block, counted in cells of their own, for which that is done in parts
FEW, CACHED = 64, 64


class DecodedMean:
    """A mean over the replicas as a function of the window.

    Attributes:
        layout: of the workspace in whose place the mean stands.
        device: where windows are made.
    """

    layout: Layout
    device: torch.device

    def fill(self, window: Window, out: Tensor) -> Tensor:
        """Write the window's elements of the mean into `out`, fp32 [numel]."""
        raise NotImplementedError

    def view(self, window: Window) -> Tensor | None:
        """The window's elements of the mean where they lie (fp32 [numel]); None: to be decoded."""
        return None

    def terms(self, window: Window) -> tuple[Tensor, Tensor] | None:
        """The elements of a window of n blocks that are not zero, where these are few: places in
        the block (int64 [n, m]) and values (fp32 [n, m]), which add up where a place comes again.
        None where most elements are not zero."""
        return None

    def scatter(self, terms: tuple[Tensor, Tensor], out: Tensor) -> Tensor:
        """`fill`, of some blocks of a window, given their `terms`: fp32 [n * 4096]."""
        raise NotImplementedError

    def add_to(self, work: Tensor, alpha: float) -> None:
        """work += alpha times the mean, on a whole workspace."""
        windows = self.layout.windows(self.device)
        most = max((w.numel for w in windows), default=0)
        room = torch.empty(most, device=self.device, dtype=torch.float32)
        for w in windows:
            w.of(work).add_(self.fill(w, room[: w.numel]), alpha=alpha)


class DenseMean(DecodedMean):
    """A mean that is there already as a whole workspace `work`, perhaps on another device."""

    def __init__(self, layout: Layout, work: Tensor):
        self.layout, self.work, self.device = layout, work, work.device

    def fill(self, window: Window, out: Tensor) -> Tensor:
        return out.copy_(window.of(self.work), non_blocking=True)

    def view(self, window: Window) -> Tensor | None:
        # what has to come to the device first does not lie there
        return window.of(self.work) if self.work.device == self.device else None


class SparseMean(DecodedMean):
    """The mean of sections of values and positions (`compression/sparse.py`).

    Args:
        bodies, weights: sections and weights of the replicas that count, in rank order.
        known: of an only section the positions of each stretch, as `encode_sparse` gives them.
    """

    def __init__(
        self,
        layout: Layout,
        codec: Codec,
        reducer: Reducer,
        bodies: Sequence[Tensor],
        weights: Sequence[float],
        known: Sequence[Tensor] = (),
    ):
        self.layout = layout
        self.codec = codec
        self.reducer = reducer
        self.bodies = bodies
        self.weights = weights
        self._known = known
        self.device = bodies[0].device if bodies else torch.device("cpu")
        self._coded = sparse.split(layout, codec, bodies)
        self._shared = upload(
            torch.tensor(self.weights, dtype=torch.float32, device="cpu"), self.device
        )
        self._stretches: list[Window] = []
        self._latest: tuple[Window, Tensor, Tensor] | None = None  # what was decoded last
        self._dense: Tensor | None = None
        # replicas, or their weights, that sent a place of the window: bytes save much of the time
        self._counts: Tensor | None = None

    def fill(self, window: Window, out: Tensor) -> Tensor:
        if not self.weights:
            return out.zero_()
        if window.group is None:
            start = self.layout.num_blocks * BLOCK
            return out.copy_(self._whole()[window.begin - start : window.end - start])
        terms = self.terms(window)
        assert terms is not None
        return self.scatter(terms, out)

    def terms(self, window: Window) -> tuple[Tensor, Tensor] | None:
        if window.group is None or not self.weights:
            return None
        places, values = self._decoded(window)
        cpu = values.device.type == "cpu"
        step = CACHED if cpu and places.shape[1] > FEW else window.count
        # many are jumped to in what the cache of a core holds
        shares = [
            self._shares(p, v) for p, v in zip(places.split(step), values.split(step), strict=True)
        ]
        return places, shares[0] if len(shares) == 1 else torch.cat(shares)

    def scatter(self, terms: tuple[Tensor, Tensor], out: Tensor) -> Tensor:
        self._add(out.zero_().view(-1, BLOCK), *terms)
        return out

    def _decoded(self, window: Window) -> tuple[Tensor, Tensor]:
        """Places (int64) and values (fp32) of all replicas, [n, R k], by rank within a block."""
        place, found = self._decode(window)
        return place.transpose(0, 1).flatten(1), found.transpose(0, 1).flatten(1)

    def _shares(self, places: Tensor, values: Tensor) -> Tensor:
        """What values [n, R k] add to the mean: the weights of their replicas, over their sum."""
        size, equal = len(self.weights), all(w == 1.0 for w in self.weights)
        if size == 1:
            return values
        weights = self._shared.repeat_interleave(values.shape[1] // size)
        if self.reducer.mean_over != "senders":
            return values * (weights / sum(self.weights))
        few = equal and size < 256  # then bytes do: a quarter of the memory to jump about in
        if self._counts is None or len(self._counts) < len(values):
            dtype = torch.uint8 if few else torch.float32
            self._counts = torch.empty(len(values), BLOCK, dtype=dtype, device=values.device)
        counts, sent = self._counts[: len(values)].zero_(), values != 0
        self._add(counts, places, sent.view(torch.uint8) if few else sent * weights)
        count = counts.gather(1, places)
        if few:
            return values / count.clamp_min_(1)
        return (values * weights).div_(count.masked_fill_(count == 0, 1.0))

    def _add(self, blocks: Tensor, places: Tensor, values: Tensor) -> None:
        """blocks [n, 4096] += values [n, R k] at their places, in rank order.

        A CPU adds what is in a row one after the other. Elsewhere what is added at once has no
        order, so replicas are added one at a time.
        """
        if blocks.device.type == "cpu":
            blocks.scatter_add_(1, places, values)
            return
        k = places.shape[1] // len(self.weights)
        for p, v in zip(places.split(k, 1), values.split(k, 1), strict=True):
            blocks.scatter_add_(1, p, v)

    def add_to(self, work: Tensor, alpha: float) -> None:
        # only what was sent is touched; the norm of one replica is its own median
        if len(self.bodies) != 1 or self.weights != [1.0]:
            super().add_to(work, alpha)
            return
        windows = self.layout.windows(self.device)
        for s in stretches(windows, self.device, self.codec.topk):
            place, found = self._decode(s)
            s.of(work).view(-1, BLOCK).scatter_add_(1, place[0], found[0] * alpha)
        self.layout.dense_part(work).add_(
            sparse.decode_dense(self.layout, self.codec, self.bodies[0]), alpha=alpha
        )

    def _decode(self, window: Window) -> tuple[Tensor, Tensor]:
        """Places and values [R, n, k] of a window, from the stretch that it lies in."""
        if self._latest is None or not self._latest[0].begin <= window.begin < self._latest[0].end:
            self._latest = None  # its memory is that of the next
            self._stretches = self._stretches or stretches(
                self.layout.windows(self.device), self.device, self.codec.topk, len(self.bodies)
            )
            number = bisect_right(self._stretches, window.begin, key=lambda s: s.begin) - 1
            stretch = self._stretches[number]
            assert stretch.group is not None
            known = self._known[number] if self._known else None
            coded = self._coded[stretch.group]
            place, found = sparse.decode_window(stretch, coded, self.codec, known)
            if self.reducer.clip == "median_norm":
                found = found * _factors(found)[:, :, None]
            self._latest = stretch, place, found
        stretch, place, found = self._latest
        first = window.first - stretch.first
        return place[:, first : first + window.count], found[:, first : first + window.count]

    def _whole(self) -> Tensor:
        """The mean of what is sent whole, over all replicas."""
        if self._dense is None:
            number = self.layout.num_dense
            self._dense = torch.zeros(number, device=self.device, dtype=torch.float32)
            for body, w in zip(self.bodies, self.weights, strict=True):
                self._dense.add_(sparse.decode_dense(self.layout, self.codec, body), alpha=w)
            self._dense.div_(sum(self.weights))
        return self._dense


class FusedMean(SparseMean):
    """The same mean of sections of equal weight, with blocks decoded by `fused`."""

    def __init__(self, fused: FusedBlocks, bodies: Sequence[Tensor]):
        codec, reducer = fused.codec, fused.channel.reducer
        super().__init__(fused.layout, codec, reducer, bodies, [1.0] * len(bodies))
        self._fused, self._factors = fused, dict[Group, Tensor]()
        for g, coded in self._coded.items() if reducer.clip == "median_norm" else ():
            found = formats.decode_rows(
                codec.value_dtype, coded.values, g.count, g.k(codec.topk), 0, g.count
            )
            self._factors[g] = _factors(found)

    def terms(self, window: Window) -> None:
        return None

    def fill(self, window: Window, out: Tensor, inverse: bool = False) -> Tensor:
        if window.group is None:
            return super().fill(window, out)
        self._fused.mean(self.bodies, window, out, inverse, self._factors.get(window.group))
        return out

    def write(self, tensors: Sequence[Tensor | None], sign: bool) -> None:
        """Write all blocks in the element domain, or their signs, into tensors (`fused.fits`)."""
        for g in self.layout.groups:
            window, factors = self.layout.whole(g), self._factors.get(g)
            self._fused.mean(self.bodies, window, None, True, factors, tensors, sign)


class QuantizedMean(DecodedMean):
    """The mean of whole vectors that were gathered in a code (`compression/dense.py`)."""

    def __init__(
        self, layout: Layout, code: str, bodies: Sequence[Tensor], weights: Sequence[float]
    ):
        self.layout, self.code, self.bodies, self.weights = layout, code, bodies, weights
        self.device = bodies[0].device if bodies else torch.device("cpu")

    def fill(self, window: Window, out: Tensor) -> Tensor:
        out.zero_()
        for body, w in zip(self.bodies, self.weights, strict=True):
            vectors.add_part(self.code, body, self.layout.numel, window.begin, out, w)
        return out.div_(sum(self.weights)) if self.weights else out

    def add_to(self, work: Tensor, alpha: float) -> None:
        if len(self.bodies) == 1 and self.weights == [1.0]:
            vectors.decode_into(self.code, self.bodies[0], work, alpha)
        else:
            super().add_to(work, alpha)


class SeededMean(DecodedMean):
    """The mean of values at positions that all replicas know, and of the dense elements.

    Args:
        positions: of each group, places in the slots, int64 [count, k], on the device of the
            workspaces.
        topk: of the codec.
        chosen, dense: fp32; they may lie on the host instead.
    """

    def __init__(
        self,
        layout: Layout,
        positions: dict[Group, Tensor],
        topk: int,
        chosen: Tensor,
        dense: Tensor,
    ):
        self.layout = layout
        self._positions = positions
        self._chosen = chosen
        self._dense, self._topk = dense, topk
        self.device = chosen.device
        self._starts, at = {}, 0
        for g in layout.groups:
            self._starts[g] = at
            at += g.count * g.k(topk)

    def fill(self, window: Window, out: Tensor) -> Tensor:
        if window.group is None:
            start = self.layout.num_blocks * BLOCK
            part = self._dense[window.begin - start : window.end - start]
            return out.copy_(part, non_blocking=True)
        place, values = self._of(window)
        out.zero_().view(-1, BLOCK).scatter_(1, place, values)
        return out

    def marks(self) -> SeededMean:
        """Ones where something was sent, zeros elsewhere."""
        ones = map(torch.ones_like, (self._chosen, self._dense))
        return SeededMean(self.layout, self._positions, self._topk, *ones)

    def add_to(self, work: Tensor, alpha: float) -> None:
        # only what was sent is touched
        for w in self.layout.windows(work.device):
            if w.group is not None:
                place, values = self._of(w)
                w.of(work).view(-1, BLOCK).scatter_add_(1, place, values * alpha)
        self.layout.dense_part(work).add_(self._dense, alpha=alpha)

    def _of(self, window: Window) -> tuple[Tensor, Tensor]:
        """Places and values [count, k] of a window's blocks."""
        assert window.group is not None
        place = self._positions[window.group][window.first : window.first + window.count]
        start = self._starts[window.group] + window.first * place.shape[1]
        found = self._chosen[start : start + place.numel()].view(place.shape)
        return place, found.to(place.device, non_blocking=True)


def _factors(found: Tensor) -> Tensor:
    """min(1, median / norm) of each replica's values of a block, by which they have the median norm
    at most: fp32 [R, n] from values [R, n, k]. The median is that of the replicas' norms of that
    block (the mean of the middle two of an even number)."""
    norms = found.norm(dim=2)
    ordered = norms.sort(0).values
    median = (ordered[(len(found) - 1) // 2] + ordered[len(found) // 2]) / 2
    return torch.where(norms > median, median / norms, 1.0)
