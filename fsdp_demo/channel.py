"""One channel at work on one rank: accumulate, encode, decode, apply. No communication but the completion inside the island.

Everything a channel keeps lives in workspaces of its lane (see `blocks.py`): the accumulator in the transform domain, where
a = beta a + gain T(source) and "subtract what was sent" are exact because the DCT is orthonormal and linear; anchor and outer
momentum in the element domain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .blocks import Layout
from .codecs import wire
from .codecs.dct import transform
from .config import Channel
from .outer import local_step, outer_step
from .shards import Shard, Shards
from .topology import Position
from .transport import round_trip


@dataclass
class Outgoing:
    """What one channel sends at one step: the bytes of a sparse section, or a dense fp32 vector, on the shards' device.

    `delta` is the replica's own source where the applier needs it later; `present` says which tensors had a gradient.
    """

    step: int
    body: Tensor | None = None
    vector: Tensor | None = None
    delta: Tensor | None = None
    present: list[bool] | None = None


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a parameter name fits one of the shell patterns."""
    return any(fnmatch(name, p) for p in patterns)


class ActiveChannel:
    """A `Channel` bound to the shards of one rank.

    Args:
        channel: what to do.
        shards: all local tensors; the channel covers those that its patterns name and that are not frozen.
        position, lanes: this rank's place; a copy beyond the lanes keeps no state and only receives.
        copies: process group of the ranks of this island that hold the same shard (None: the default group).
        size: number of replicas.
    """

    def __init__(self, channel: Channel, shards: Shards, position: Position, lanes: int, copies: Any, size: int):
        self.channel, self.shards, self.position, self.lanes, self.copies, self.size = channel, shards, position, lanes, copies, size
        self.covered = [
            i
            for i, s in enumerate(shards.shards)
            if not s.frozen and matches(s.name, channel.include) and not matches(s.name, channel.exclude)
        ]
        chosen = [shards.shards[i] for i in self.covered]
        kinds = [self._kind(s) for s in chosen]
        self.layouts = [Layout([s.shape for s in chosen], kinds, lane, lanes) for lane in range(lanes)]
        self.lane = position.copy if position.copy < lanes else None
        self.layout = self.layouts[self.lane] if self.lane is not None else None
        self.accumulator: Tensor | None = None
        self.anchor: Tensor | None = None
        self.written: Tensor | None = None
        self.momentum: Tensor | None = None
        self.present = [False] * len(self.covered)
        self._low_precision = any(s.dtype != torch.float32 for s in chosen)

    def _kind(self, shard: Shard) -> str:
        if not self.channel.codec.sparse or matches(shard.name, self.channel.dense):
            return "dense"
        return "plain" if self.channel.codec.transform == "none" or matches(shard.name, self.channel.plain) else "transform"

    def start(self) -> None:
        """Make the state: zero accumulator and momentum, anchor at the parameters as they are now."""
        if self.layout is None:
            return
        if self.channel.accumulator is not None:
            self.accumulator = self.layout.new(self.shards.device)
        if self.channel.source == "delta":
            self.anchor = self.pack("parameter")
            self.written = self.pack("parameter") if self._low_precision else None
            if self.channel.applier.momentum:
                self.momentum = self.layout.new(self.shards.device)

    def tensors(self, source: str) -> list[Tensor | None]:
        """The covered local tensors of a source, as `Shards.read` gives them."""
        every = self.shards.read(source)
        return [every[i] for i in self.covered]

    def pack(self, source: str) -> Tensor | None:
        """A new workspace of this lane with a source in it, fp32, element domain; None on a copy beyond the lanes."""
        if self.layout is None:
            return None
        return self.layout.pack(self.tensors(source), torch.empty(self.layout.numel, device=self.shards.device))

    def _source(self) -> Tensor:
        """The source in the element domain, a fresh workspace. A delta is anchor minus parameter, less what rounding to a
        low-precision parameter took away when the anchor was last written."""
        now = self.pack("parameter" if self.channel.source == "delta" else self.channel.source)
        assert now is not None
        if self.channel.source != "delta":
            return now
        before = self.written if self.written is not None else self.anchor
        assert before is not None
        return torch.sub(before, now, out=now)

    def note_gradients(self) -> None:
        """Remember which tensors have a gradient; with an accumulator, which ever had one."""
        sticky = self.channel.accumulator is not None
        self.present = [g is not None or (sticky and p) for g, p in zip(self.tensors("gradient"), self.present, strict=True)]

    def accumulate(self) -> Tensor | None:
        """Read the source into the accumulator. Returns the source (element domain) if the applier needs it later, else None;
        without an accumulator the returned workspace is what will be sent."""
        if self.layout is None:
            return None
        x = self._source()
        a, settings = self.accumulator, self.channel.accumulator
        if a is None or settings is None:
            return transform(self.layout, x)
        keep = x.clone() if self.channel.applier.local_delta else None
        a.mul_(settings.beta).add_(transform(self.layout, x), alpha=settings.gain)
        return keep

    def encode(self, step: int, source: Tensor | None) -> Outgoing:
        """Select, code and take what is sent out of the accumulator (`subtract`, `put_back`). `source` is `accumulate`'s."""
        out = Outgoing(step, present=list(self.present) if self.channel.before_step else None)
        if self.layout is None:
            return out
        work = self.accumulator if self.accumulator is not None else source
        assert work is not None
        out.delta = source if self.channel.applier.local_delta else None
        if self.channel.codec.sparse:
            out.body = wire.encode_sparse(self.layout, self.channel.codec, work)
        else:
            out.vector = work.clone() if work is self.accumulator else work
        self._take(out, -1.0)
        return out

    def _take(self, out: Outgoing, sign: float) -> None:
        """Add `sign` times alpha times what was sent to the accumulator: -1 when sending, +1 to undo it."""
        if self.accumulator is None or self.channel.residual == "keep" or self.layout is None:
            return
        assert self.channel.accumulator is not None
        alpha = sign * (1.0 if self.channel.residual == "put_back" else self.channel.accumulator.alpha)
        if out.vector is not None:
            self.accumulator.add_(round_trip(self.channel.codec.code, out.vector, self.size), alpha=alpha)
            return
        assert out.body is not None
        positions, values, dense = wire.decode_sparse(self.layout, self.channel.codec, out.body)
        self.accumulator.index_add_(0, positions, values, alpha=alpha)
        self.layout.dense_part(self.accumulator).add_(dense, alpha=alpha)

    def undo(self, out: Outgoing) -> None:
        """Return the accumulator to what it was before `out` was accumulated and encoded (to rounding): the exchange failed.

        Only the sent part can come back where the source has moved on (a delay)."""
        self._take(out, 1.0)
        settings = self.channel.accumulator
        if self.accumulator is None or settings is None or self.layout is None or self.channel.clock.delay or settings.beta == 0:
            return
        x = transform(self.layout, self._source())
        self.accumulator.sub_(x, alpha=settings.gain).div_(settings.beta)

    def decode(self, bodies: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """Mean of the replicas' sparse sections in the transform domain: fp32 workspace, added in rank order.

        Over "senders": sum of w v over those whose value there is not zero, divided by the sum of their w; dense elements always
        over all replicas. Replicas of weight 0 are left out.
        """
        assert self.layout is not None
        total = self.layout.new(self.shards.device)
        count = torch.zeros_like(total) if self.channel.reducer.kind == "senders" else None
        dense = self.layout.dense_part(total)
        for body, w in zip(bodies, weights, strict=True):
            if not w:
                continue
            positions, values, whole = wire.decode_sparse(self.layout, self.channel.codec, body.to(self.shards.device))
            total.index_add_(0, positions, values, alpha=w)
            if count is not None:
                count.index_add_(0, positions, (values != 0).float(), alpha=w)
            dense.add_(whole, alpha=w)
        share = sum(weights)
        if count is None:
            return total.div_(share) if share else total
        if share:
            dense.div_(share)
        blocks, counts = self.layout.blocks(total), self.layout.blocks(count)
        blocks.div_(torch.where(counts == 0, 1.0, counts))
        return total

    def apply(self, mean: Tensor | None, out: Outgoing, present: Sequence[bool] | None) -> None:
        """Let the decoded mean (transform domain; None on a copy that only receives) act on gradients, anchor or parameters."""
        kind = self.channel.applier.kind
        if kind == "gradient":
            assert present is not None
            self._apply_gradient(mean, present)
        elif kind == "outer":
            self._apply_outer(mean, out)
        else:
            self.write(mean, self.tensors(self.channel.source))

    def _apply_gradient(self, mean: Tensor | None, present: Sequence[bool]) -> None:
        if mean is not None:
            assert self.layout is not None
            transform(self.layout, mean, inverse=True)
            if self.channel.applier.phi == "sign":
                mean.sign_()
        self.write(mean, self.set_gradients(present))

    def set_gradients(self, wanted: Sequence[bool]) -> list[Tensor | None]:
        """Local gradients of the covered tensors: created where wanted, removed elsewhere; other tensors are not touched."""
        every: list[bool | None] = [None] * len(self.shards.shards)
        for i, want in zip(self.covered, wanted, strict=True):
            every[i] = want
        grads = self.shards.gradients(every)
        return [grads[i] for i in self.covered]

    def _apply_outer(self, mean: Tensor | None, out: Outgoing) -> None:
        applier, layout = self.channel.applier, self.layout
        if mean is not None:
            assert layout is not None and self.anchor is not None
            if self.channel.residual == "put_back":
                assert self.accumulator is not None
                self.accumulator.add_(mean)
            if applier.local_delta:
                assert self.accumulator is not None and self.channel.accumulator is not None and out.delta is not None
                momentum = transform(layout, self.accumulator.clone(), inverse=True)
                local_step(self.anchor, out.delta, momentum, self.channel.accumulator.beta, layout, applier, self.channel.codec.sparse)
            else:
                outer_step(self.anchor, self.momentum, transform(layout, mean, inverse=True), layout, applier, self.channel.codec.sparse)
        self.rewind()

    def rewind(self) -> None:
        """Set the parameters to the anchor (mixed with `mix` of the local ones)."""
        target, now = self.anchor, self.pack("parameter") if self.channel.applier.mix else None
        if target is not None and now is not None:
            target = torch.lerp(target, now, self.channel.applier.mix)
        self.write(target, self.tensors("parameter"))
        if self.written is not None and self.channel.applier.mix == 0:
            self.written = self.pack("parameter")

    def write(self, work: Tensor | None, tensors: Sequence[Tensor | None]) -> None:
        """Write a workspace of this lane into `tensors`; where copies share the work, one all-gather inside the island completes it."""
        if self.position.copies == 1:
            assert self.layout is not None and work is not None
            self.layout.unpack(work, tensors)
            return
        size = max(layout.numel for layout in self.layouts)
        part = torch.zeros(size, device=self.shards.device)
        if work is not None:
            part[: work.numel()] = work
        parts = [torch.empty_like(part) for _ in range(self.position.copies)]
        dist.all_gather(parts, part, group=self.copies)
        for layout, received in zip(self.layouts, parts, strict=False):
            layout.unpack(received[: layout.numel], tensors)

    def state(self) -> dict[str, Any]:
        """What is kept between exchanges: workspaces by name (references, not copies) and the gradients ever seen."""
        kept = {"accumulator": self.accumulator, "anchor": self.anchor, "momentum": self.momentum, "written": self.written}
        return {**{k: v for k, v in kept.items() if v is not None}, "present": list(self.present)}

    def load(self, state: dict[str, Any]) -> None:
        """Restore `state` in place. Raises ValueError if it belongs to another layout or preset."""
        mine = self.state()
        if set(mine) != set(state):
            raise ValueError(
                f"channel {self.channel.name!r}: saved state has {sorted(state)}, this configuration keeps {sorted(mine)}: resume with the "
                "preset it was saved with"
            )
        for key, value in state.items():
            if key == "present":
                self.present = list(value)
            elif value.shape != mine[key].shape:
                raise ValueError(
                    f"channel {self.channel.name!r}: saved {key} has {value.numel()} elements, here it has {mine[key].numel()}: resume "
                    "with the same number of islands and ranks"
                )
            else:
                mine[key].copy_(value)
