"""What one channel puts into a message, and how R such parts become one mean: selection, code, bytes. No communication, no state.

Three forms, by codec and number of replicas:

* indexed (top-k): a section of the message's body with values and positions (`codecs/wire.py`).
* vectors: everything, or the values at positions known to all (`select.seeded`); reduced by the transport.
* gathered vectors: codes under 8 bits between few replicas, in the body (`vectors.gathers`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .blocks import EDGE, Layout
from .codecs import vectors, wire
from .codecs.select import seeded
from .config import BLOCK, Channel


class Section:
    """The part of one channel in the messages of one lane.

    Args:
        layout: of the channel's workspace.
        channel: its codec, clock and reducer.
        size: number of replicas.
        seed: of seeded selections.

    Attributes:
        spans: length and code of each of its vectors; empty if indexed.
        gathered: whether it travels in the body.
    """

    def __init__(self, layout: Layout, channel: Channel, size: int, seed: int = 0):
        self.layout, self.channel, self.codec, self.size, self.seed = layout, channel, channel.codec, size, seed
        self.spans: list[tuple[int, str]] = []
        if self.codec.seeded:
            chosen = sum(g.count * g.k(self.codec.topk) for g in layout.groups)
            self.spans = [(chosen, self.codec.code), (layout.num_dense, wire.dense_code(self.codec))]
        elif not self.codec.indexed:
            self.spans = [(layout.numel, self.codec.code)]
        self._known: tuple[int, list[Tensor]] | None = None  # number of an exchange and its positions
        self.gathered = self.codec.indexed or vectors.gathers(self.codec.code, size)

    @property
    def num_bytes(self) -> int:
        """Bytes in the message's body; 0 for vectors that are reduced."""
        if self.codec.indexed:
            return wire.sparse_bytes(self.layout, self.codec)
        return vectors.total_bytes(self.spans) if self.gathered else 0

    def encode(self, work: Tensor, step: int) -> tuple[Tensor | None, list[Tensor]]:
        """Select and code a workspace (not changed): the section of the body uint8 [num_bytes], or None and the vectors fp32, which may be
        the workspace itself."""
        if self.codec.indexed:
            return wire.encode_sparse(self.layout, self.codec, work), []
        parts = self._vectors(work, step)
        if not self.gathered:
            return None, parts
        return torch.cat([vectors.encode(code, v) for v, (_, code) in zip(parts, self.spans, strict=True)]), []

    def subtract(self, work: Tensor, body: Tensor | None, parts: Sequence[Tensor], step: int, alpha: float) -> None:
        """work -= alpha times what the others receive of an own section: the dequantised values, so that rounding stays in `work`."""
        if body is not None and self.codec.indexed:
            positions, found, dense = wire.decode_sparse(self.layout, self.codec, body)
            work.index_add_(0, positions, found, alpha=-alpha)
            self.layout.dense_part(work).sub_(dense, alpha=alpha)
            return
        if body is not None:
            self._add_coded(work, body, step, -alpha)
            return
        arrived = [vectors.round_trip(code, v, self.size) for v, (_, code) in zip(parts, self.spans, strict=True)]
        self._add(work, arrived, step, -alpha)

    def mean(self, bodies: Sequence[Tensor], weights: Sequence[float], step: int) -> Tensor:
        """Weighted mean of the replicas' sections of the body, added in rank order: an fp32 workspace. Replicas of weight 0 are left out.

        Over "senders": sum of w v over those whose value there is not zero, divided by the sum of their w; dense elements always
        over all replicas.
        """
        bodies = [b for b, w in zip(bodies, weights, strict=True) if w]
        weights = [w for w in weights if w]
        return self._mean_indexed(bodies, weights) if self.codec.indexed else self._mean_vectors(bodies, weights, step)

    def workspace(self, means: Sequence[Tensor], step: int) -> Tensor:
        """Reduced means of the vectors as a workspace, zero where nothing was sent."""
        if not self.codec.seeded:
            return means[0]
        work = self.layout.new(means[0].device)
        self._add(work, means, step, 1.0)
        return work

    def _mean_vectors(self, bodies: Sequence[Tensor], weights: Sequence[float], step: int) -> Tensor:
        total = self.layout.new(bodies[0].device if bodies else "cpu")
        for body, w in zip(bodies, weights, strict=True):
            self._add_coded(total, body, step, w)
        return total.div_(sum(weights)) if weights else total

    def _mean_indexed(self, bodies: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        total = self.layout.new(bodies[0].device if bodies else "cpu")
        dense, parts = self.layout.dense_part(total), [wire.decode_sparse(self.layout, self.codec, b) for b in bodies]
        found = [values for _, values, _ in parts]
        if self.channel.reducer.clip == "median_norm" and found:
            found = self._clip(found)
        for (positions, _, whole), values, w in zip(parts, found, weights, strict=True):
            total.index_add_(0, positions, values, alpha=w)
            dense.add_(whole, alpha=w)
        if not weights:
            return total
        if self.channel.reducer.kind != "senders":
            return total.div_(sum(weights))
        dense.div_(sum(weights))
        self._per_sender(self.layout.blocks(total), [positions for positions, _, _ in parts], found, weights)
        return total

    def _per_sender(self, total: Tensor, positions: Sequence[Tensor], found: Sequence[Tensor], weights: Sequence[float]) -> None:
        """Divide sums [num_blocks, 4096] by the weights of those whose value there is not zero, some blocks at a time."""
        at = 0
        for g in self.layout.groups:
            k = g.k(self.codec.topk)
            for lo in range(g.start, g.stop, wire.CHUNK):
                window = total[lo : min(lo + wire.CHUNK, g.stop)].view(-1)
                count, end = torch.zeros_like(window), at + k * (window.numel() // BLOCK)
                for p, values, w in zip(positions, found, weights, strict=True):
                    count.index_add_(0, p[at:end] - lo * BLOCK, (values[at:end] != 0).float(), alpha=w)
                window.div_(count.masked_fill_(count == 0, 1.0))
                at = end

    def _clip(self, found: Sequence[Tensor]) -> list[Tensor]:
        """Scale each replica's values of a block by min(1, median / norm), the median being that of the replicas' norms of that block (the
        mean of the middle two of an even number)."""
        out: list[list[Tensor]] = [[] for _ in found]
        at = 0
        for g in self.layout.groups:
            k = g.k(self.codec.topk)
            rows = [v[at : at + g.count * k].view(g.count, k) for v in found]
            norms = torch.stack([r.norm(dim=1) for r in rows])
            ordered = norms.sort(0).values
            median = (ordered[(len(rows) - 1) // 2] + ordered[len(rows) // 2]) / 2
            for parts, r, norm in zip(out, rows, norms, strict=True):
                parts.append((r * torch.where(norm > median, median / norm, 1.0)[:, None]).view(-1))
            at += g.count * k
        return [torch.cat(parts) if parts else v for parts, v in zip(out, found, strict=True)]

    def _add_coded(self, work: Tensor, body: Tensor, step: int, alpha: float) -> None:
        """work += alpha times a gathered section."""
        if not self.codec.seeded:
            vectors.add(self.codec.code, body, work, alpha)
            return
        out, at = [], 0
        for n, code in self.spans:
            size = vectors.num_bytes(code, n)
            out.append(vectors.decode(code, body[at : at + size], n))
            at += size
        self._add(work, out, step, alpha)

    def _positions(self, step: int) -> list[Tensor]:
        """For each group of blocks the workspace positions that the exchange of `step` sends, int64 [count * k]."""
        number = max(self.channel.clock.round(step) - 1, 0)
        if self._known is not None and self._known[0] == number:
            return self._known[1]
        out = []
        for g in self.layout.groups:
            inside = seeded(self.codec.select, g.r * g.s, g.k(self.codec.topk), g.count, number, self.seed)
            slots = inside // g.s * EDGE + inside % g.s
            out.append((slots + torch.arange(g.start, g.stop)[:, None] * BLOCK).view(-1))
        self._known = (number, out)
        return out

    def _vectors(self, work: Tensor, step: int) -> list[Tensor]:
        if not self.codec.seeded:
            return [work]
        positions = [p.to(work.device) for p in self._positions(step)]
        chosen = torch.cat([work[p] for p in positions]) if positions else work.new_empty(0)
        return [chosen, self.layout.dense_part(work).clone()]

    def _add(self, work: Tensor, parts: Sequence[Tensor], step: int, alpha: float) -> None:
        """work += alpha times vectors, at their places."""
        if not self.codec.seeded:
            work.add_(parts[0], alpha=alpha)
            return
        positions = self._positions(step)
        if positions:
            work.index_add_(0, torch.cat(positions).to(work.device), parts[0], alpha=alpha)
        self.layout.dense_part(work).add_(parts[1], alpha=alpha)
