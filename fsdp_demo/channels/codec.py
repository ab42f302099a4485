"""The part of one channel in a message, made and read: selection, code, bytes, and the mean of the
parts of R replicas. No communication, no state.

Three forms, by codec and number of replicas:

* indexed (top-k): a section of the message's body with values and positions
  (`compression/sparse.py`).
* vectors: all values, or those at positions known to all (`selection.seeded`), reduced on the way.
* gathered vectors: codes under 8 bits between few replicas, in the body (`dense.gathers`).

The mean is decoded window by window (`decode.py`), so that no workspace is made for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..compression import dense as vectors
from ..compression import sparse
from ..compression.blocks import Layout
from ..compression.fused import FusedBlocks
from ..compression.selection import seeded
from ..compression.windows import EDGE, Group
from ..config.channel import Channel
from ..config.names import FORMATS
from ..config.parts import BLOCK
from .decode import DecodedMean, DenseMean, FusedMean, QuantizedMean, SeededMean, SparseMean


@dataclass
class ChannelPayload:
    """The payload of one channel at one step, on the shards' device.

    Attributes:
        step: in which it is sent.
        body: the channel's section of the body (uint8); None where there are vectors.
        vectors: fp32, to be reduced.
        own: the replica's own source where it is needed later (a delta that stays in flight or is
            applied locally; delayed parameters).
        present: which tensors had a gradient; of gradient channels.
        partial: it is sent inside a round, by `finish()`: its mean is applied plainly.
    """

    step: int
    body: Tensor | None = None
    vectors: list[Tensor] = field(default_factory=list)
    own: Tensor | None = None
    present: list[bool] | None = None
    partial: bool = False

    def to(self, device: torch.device) -> ChannelPayload:
        """A copy of this payload with its tensors on `device`."""
        body, own = (t if t is None else t.to(device) for t in (self.body, self.own))
        return replace(self, body=body, own=own, vectors=[v.to(device) for v in self.vectors])


@dataclass(frozen=True)
class Received:
    """The payloads of all replicas for one channel, cut out of a message and not decoded.

    Attributes:
        bodies: its section from every replica, uint8 [num_bytes], in rank order; empty where it is
            reduced.
        means: its reduced vectors, fp32; empty where it is gathered.
        weights: each replica's share in its mean.
        present: of a gradient channel, which of its tensors any replica had a gradient for; else
            None.
    """

    bodies: Sequence[Tensor]
    means: Sequence[Tensor]
    weights: Sequence[float]
    present: list[bool] | None = None


class ChannelCodec:
    """The part of one channel in the messages of one active copy.

    Args:
        layout: of the channel's workspace.
        channel: its codec, schedule and reducer.
        size: number of replicas.
        seed: of seeded selections.
        device: of the workspaces.

    Attributes:
        spans: length and code of each of its vectors; empty if indexed.
        gathered: whether it travels in the body.
        taken: the share of the values sent that leaves the accumulator (`Channel.taken`).
        levels: thresholds of a selection over whole tensors (`threshold.encode`), once there are.
        fused: what codes and decodes blocks in place of torch's operations, if anything does.
    """

    def __init__(
        self,
        layout: Layout,
        channel: Channel,
        size: int,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ):
        self.layout = layout
        self.channel = channel
        self.codec, self.taken = channel.codec, channel.taken
        self.size = size
        self.seed = seed
        self.device = torch.device(device)
        self.spans: list[tuple[int, str]] = []
        if self.codec.seeded:
            chosen = sum(g.count * g.k(self.codec.topk) for g in layout.groups)
            self.spans = [
                (chosen, self.codec.value_dtype),
                (layout.num_dense, sparse.dense_code(self.codec)),
            ]
        elif not self.codec.indexed:
            self.spans = [(layout.numel, self.codec.value_dtype)]
        # number of an exchange and its positions
        self._known: tuple[int, dict[Group, Tensor]] | None = None
        # the section that was made last and its positions, until it is subtracted
        self._made: tuple[Tensor, list[Tensor]] | None = None
        self.fused: FusedBlocks | None = None
        self.levels: Tensor | None = None
        self.gathered = self.codec.indexed or vectors.gathers(self.codec.value_dtype, size)

    @property
    def known_bytes(self) -> int:
        """Bytes in memory, kept between exchanges, of positions that all replicas know, or of
        thresholds."""
        if self.codec.by_tensor:
            return 4 * len(self.layout.pieces)
        if not self.codec.seeded:
            return 0
        return sum(
            8 * g.k(self.codec.topk) * (1 if self.codec.selection.alike else g.count)
            for g in self.layout.groups
        )

    @property
    def num_bytes(self) -> int:
        """Bytes in the message's body; 0 for vectors that are reduced."""
        if self.codec.indexed:
            return sparse.sparse_bytes(self.layout, self.codec)
        return vectors.total_bytes(self.spans) if self.gathered else 0

    def encode(self, work: Tensor, step: int) -> tuple[Tensor | None, list[Tensor]]:
        """Select and code a workspace (not changed): the section of the body uint8 [num_bytes], or
        None and the vectors fp32, which may be the workspace itself."""
        if self.codec.indexed:
            chosen: list[Tensor] = []
            if self.fused is not None:
                body, chosen = self.fused.encode(work)
            else:
                levels = self._levels(step) if self.codec.by_tensor else None
                body = sparse.encode_sparse(self.layout, self.codec, work, chosen, levels)
            self._made = (body, chosen) if self.taken else None
            return body, []
        parts = self._vectors(work, step)
        if not self.gathered:
            return None, parts
        return vectors.encode_all(self.spans, parts), []

    def _levels(self, step: int) -> Tensor:
        """The thresholds for an exchange; below 0 where they are to be estimated."""
        number = max(self.channel.schedule.round(step) - 1, 0)
        if self.levels is None or number % self.codec.threshold_every == 0:
            count = len(self.layout.pieces)
            self.levels = torch.full((count,), -1, dtype=torch.int32, device=self.device)
        return self.levels

    def blank(self, body: Tensor) -> bool:
        """Whether a section of the body (on the host) holds zeros only; positions do not count."""
        if not self.codec.indexed:
            return not bool(body.any())
        spans = sparse.spans(self.layout, self.codec)
        coded = [body[begin:middle] for begin, middle, _ in spans]
        return not any(bool(t.any()) for t in (*coded, body[spans[-1][2] if spans else 0 :]))

    def taken_at_once(self, present: Sequence[bool] | None) -> Sequence[bool] | None:
        """The tensors whose values leave the accumulator when they are sent; None: all.

        A code without a zero gives a level to those that have no gradient here, too. It acts only
        if another replica has one, so it leaves the accumulator then, if at all.
        """
        if present is None or all(present) or FORMATS[self.codec.value_dtype].has_zero:
            return None
        return present

    def subtract(
        self,
        work: Tensor,
        body: Tensor | None,
        parts: Sequence[Tensor],
        step: int,
        alpha: float,
        only: Sequence[bool] | None = None,
    ) -> None:
        """work -= alpha times what the others receive of an own section: the dequantised values, so
        that rounding stays in `work`. only: of these tensors; None: of all.
        """
        if only is not None:
            taken, factors = torch.zeros_like(work), [float(o) for o in only]
            self.subtract(taken, body, parts, step, alpha)
            for w in (part for whole in self.layout.windows(work.device) for part in whole.inner):
                w.of(work).add_(w.scale(w.of(taken), factors))
        elif body is not None:
            made, self._made = self._made, None
            known = made[1] if made is not None and made[0] is body else ()
            self._received([body], [1.0], step, known).add_to(work, -alpha)
        elif self.codec.seeded:
            arrived = [
                vectors.round_trip(code, v, self.size)
                for v, (_, code) in zip(parts, self.spans, strict=True)
            ]
            self._scattered(arrived, step).add_to(work, -alpha)
        else:
            vectors.add_round_trip(self.spans[0][1], parts[0], self.size, work, -alpha)

    def received(
        self, bodies: Sequence[Tensor], weights: Sequence[float], step: int
    ) -> DecodedMean:
        """Weighted mean of the replicas' sections of the body, added in rank order. Replicas of
        weight 0 are left out.

        Over "senders": sum of w v over those whose value there is not zero, divided by the sum of
        their w; dense elements always over all replicas.
        """
        kept = [(b, w) for b, w in zip(bodies, weights, strict=True) if w]
        return self._received([b for b, _ in kept], [w for _, w in kept], step)

    def reduced(self, means: Sequence[Tensor], step: int) -> DecodedMean:
        """Reduced means of the vectors, zero where nothing was sent."""
        return (
            self._scattered(means, step) if self.codec.seeded else DenseMean(self.layout, means[0])
        )

    def _received(
        self,
        bodies: Sequence[Tensor],
        weights: Sequence[float],
        step: int,
        known: Sequence[Tensor] = (),
    ) -> DecodedMean:
        if self.codec.indexed:
            reducer = self.channel.reducer
            if self.fused is not None and bodies and all(w == 1.0 for w in weights) and not known:
                return FusedMean(self.fused, bodies)
            return SparseMean(self.layout, self.codec, reducer, bodies, weights, known)
        if not self.codec.seeded:
            return QuantizedMean(self.layout, self.codec.value_dtype, bodies, weights)
        total = [
            torch.zeros(n, device=bodies[0].device if bodies else "cpu", dtype=torch.float32)
            for n, _ in self.spans
        ]
        for body, w in zip(bodies, weights, strict=True):
            at = 0
            for out, (n, code) in zip(total, self.spans, strict=True):
                size = vectors.num_bytes(code, n)
                vectors.decode_into(code, body[at : at + size], out, w)
                at += size
        return self._scattered([t.div_(sum(weights)) if weights else t for t in total], step)

    def _scattered(self, parts: Sequence[Tensor], step: int) -> DecodedMean:
        return SeededMean(self.layout, self._positions(step), self.codec.topk, *parts)

    def _positions(self, step: int) -> dict[Group, Tensor]:
        """For each group of blocks the places that `step` sends, int64 [count, k]."""
        number = max(self.channel.schedule.round(step) - 1, 0)
        if self._known is None or self._known[0] != number:
            found, select = {}, self.codec.select
            for g in self.layout.groups:
                count, k = 1 if self.codec.selection.alike else g.count, g.k(self.codec.topk)
                inside = seeded(select, g.r * g.s, k, count, number, self.seed, self.device)
                place = inside if g.s == EDGE else inside // g.s * EDGE + inside % g.s
                found[g] = place.expand(g.count, -1)
            self._known = (number, found)
        return self._known[1]

    def _vectors(self, work: Tensor, step: int) -> list[Tensor]:
        if not self.codec.seeded:
            return [work]
        positions, at = self._positions(step), 0
        chosen = torch.empty(self.spans[0][0], device=work.device, dtype=torch.float32)
        for w in self.layout.windows(work.device):
            if w.group is not None:
                place = positions[w.group][w.first : w.first + w.count]
                part = chosen[at : at + place.numel()].view(place.shape)
                torch.gather(w.of(work).view(-1, BLOCK), 1, place, out=part)
                at += place.numel()
        return [chosen, self.layout.dense_part(work).clone()]
