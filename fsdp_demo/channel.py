"""One channel at work on one rank: accumulate, encode, apply. No communication but the completion inside the island.

Everything a channel keeps lives in workspaces of its lane (see `blocks.py`): the accumulator in the transform domain, where
a = beta a + gain T(source) and "subtract what was sent" are exact because the DCT is orthonormal and linear; anchor and outer
momentum in the element domain, on the device or in host memory.

With a delay several payloads may be under way. A delta is counted from anchor - P, where P is the sum of this replica's deltas that are
still in flight, and an arriving mean sets the parameters to anchor - P (mixed with the local ones): what was sent once is neither sent
nor applied again. A delayed mean of parameters corrects what was sent and keeps the steps taken since.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .blocks import Contiguous, Layout, Window
from .codecs.dct import Transform, transform
from .config import Channel
from .means import Mean, Whole
from .outer import local_step, outer_step, rate
from .patterns import covers, kind
from .payload import Section
from .shards import Shards
from .topology import Position


@dataclass
class Outgoing:
    """What one channel sends at one step, on the shards' device: its section of the body, or fp32 vectors.

    `own` is the replica's own source where it is needed later (a delta that stays in flight or is applied locally; delayed parameters);
    `present` says which tensors had a gradient.
    """

    step: int
    body: Tensor | None = None
    vectors: list[Tensor] = field(default_factory=list)
    own: Tensor | None = None
    present: list[bool] | None = None

    def to(self, device: torch.device) -> Outgoing:
        """The same with its tensors on `device`."""
        body, own = (t if t is None else t.to(device) for t in (self.body, self.own))
        return Outgoing(self.step, body, [v.to(device) for v in self.vectors], own, self.present)


class ActiveChannel:
    """A `Channel` bound to the shards of one rank.

    Args:
        channel: what to do.
        shards: all local tensors; the channel covers those that its patterns name and that are not frozen.
        position, lanes: this rank's place; a copy beyond the lanes keeps no state and only receives.
        copies: process group of the ranks of this island that hold the same shard (None: the default group).
        size: number of replicas.
        seed: of seeded selections.
        home: where anchor and outer momentum are kept; None: with the shards.

    Attributes:
        moved: after parameters were replaced by their mean: squared norms of the change and of the mean, of this lane.
    """

    def __init__(
        self,
        channel: Channel,
        shards: Shards,
        position: Position,
        lanes: int,
        copies: Any,
        size: int,
        seed: int = 0,
        home: str | None = None,
    ):
        self.channel, self.shards, self.position, self.lanes, self.copies, self.size = channel, shards, position, lanes, copies, size
        self._home = torch.device(home) if home is not None else shards.device
        self.covered = [i for i, s in enumerate(shards.shards) if not s.frozen and covers(channel, s.name)]
        if channel.source.startswith("state:"):
            self._with_state()
        chosen = [shards.shards[i] for i in self.covered]
        kinds = [kind(channel, s.name) for s in chosen]
        self.layouts = [Layout([s.shape for s in chosen], kinds, lane, lanes) for lane in range(lanes)]
        self.lane = position.copy if position.copy < lanes else None
        self.layout = self.layouts[self.lane] if self.lane is not None else None
        self.windows = self.layout.windows(shards.device) if self.layout is not None else []
        self.section = Section(self.layout, channel, size, seed) if self.layout is not None else None
        self.moved = (0.0, 0.0)
        self.accumulator: Tensor | None = None
        self.anchor: Tensor | None = None
        self.written: Tensor | None = None
        self.momentum: Tensor | None = None
        self.present = [False] * len(self.covered)
        self._low_precision = any(s.dtype != torch.float32 for s in chosen)
        if self._low_precision and channel.source == "delta" and channel.clock.delay >= channel.clock.period:
            raise ValueError(
                f"channel {channel.name!r}: clock.delay={channel.clock.delay}, not below clock.period={channel.clock.period}, needs fp32 "
                "parameters: load the model with dtype=torch.float32, or shorten the delay"
            )

    def _with_state(self) -> None:
        """Cover only the parameters whose optimizer keeps the state: beside Muon, AdamW's moments exist for the rest."""
        found = self.shards.read(self.channel.source)
        self.covered = [i for i in self.covered if found[i] is not None]
        if not self.covered:
            name, kept = self.channel.source.removeprefix("state:"), ", ".join(self.shards.states()) or "none yet"
            raise ValueError(
                f"channel {self.channel.name!r} exchanges the optimizer state {name!r}, but no covered parameter has it (found: {kept}): "
                "name a state of this optimizer, or, if it makes its state at its first step, take one before attach"
            )

    def start(self) -> None:
        """Make the state: zero accumulator and momentum, anchor at the parameters as they are now."""
        if self.layout is None:
            return
        if self.channel.accumulator is not None:
            self.accumulator = self.layout.new(self.shards.device)
        if self.channel.source == "delta":
            self.anchor = self._keep(self.pack("parameter"))
            self.written = self.pack("parameter") if self._low_precision else None
            if self.channel.applier.momentum:
                self.momentum = self._keep(self.layout.new(self.shards.device))

    def _keep(self, work: Tensor | None) -> Tensor | None:
        """Move a workspace to where anchors and outer momentum live."""
        if work is None or work.device == self._home:
            return work
        host = torch.empty(work.shape, dtype=work.dtype, device=self._home, pin_memory=True)
        return host.copy_(work)

    def _fetch(self, kept: Tensor | None, window: Window) -> Tensor | None:
        """A window of anchor or momentum on the device of the shards: a view, or a copy that `_store` writes back."""
        return None if kept is None else window.of(kept).to(self.shards.device, non_blocking=True)

    def _store(self, kept: Tensor | None, window: Window, work: Tensor | None) -> None:
        if kept is not None and work is not None and self._home != self.shards.device:
            window.of(kept).copy_(work, non_blocking=True)

    def tensors(self, source: str) -> list[Tensor | None]:
        """The covered local tensors of a source, as `Shards.read` gives them."""
        every = self.shards.read(source)
        return [every[i] for i in self.covered]

    def pack(self, source: str) -> Tensor | None:
        """A new workspace of this lane with a source in it, fp32, element domain; None on a copy beyond the lanes."""
        if self.layout is None:
            return None
        return self.layout.pack(self.tensors(source), torch.empty(self.layout.numel, device=self.shards.device))

    def _source(self, window: Window, tensors: Contiguous, flying: Sequence[Outgoing], out: Tensor) -> Tensor:
        """A window of the source in the element domain, into `out` [numel]. A delta is anchor minus parameter, less what is in flight, and
        less what rounding to a low-precision parameter took away when the anchor was last written."""
        window.pack(tensors, out)
        if self.channel.source != "delta":
            return out
        before = window.of(self.written) if self.written is not None else self._fetch(self.anchor, window)
        assert before is not None
        torch.sub(before, out, out=out)
        return self._less(out, window, flying)

    @staticmethod
    def _less(work: Tensor, window: Window, flying: Sequence[Outgoing]) -> Tensor:
        """A window minus the own deltas in flight, in place."""
        for out in flying:
            if out.own is not None:
                work.sub_(window.of(out.own))
        return work

    def _into_accumulator(self, flying: Sequence[Outgoing], beta: float, gain: float, keep: Tensor | None = None) -> None:
        """accumulator = beta accumulator + gain T(source); the source goes to `keep`, too."""
        assert self.accumulator is not None
        delta = self.channel.source == "delta"
        with Contiguous(self.tensors("parameter" if delta else self.channel.source)) as tensors, self._transform() as made:
            for part in (part for w in self.windows for part in w.inner):
                x = self._source(part, tensors, flying, made.room(part, exact=delta or keep is not None))
                if keep is not None:
                    part.of(keep).copy_(x)
                made.add(part.group, x, part.of(self.accumulator), beta, gain)

    @property
    def queues(self) -> bool:
        """Whether a delta is sent while earlier ones are under way."""
        return self.channel.source == "delta" and self.channel.clock.delay >= self.channel.clock.period

    @property
    def _needs_own(self) -> bool:
        """Whether what was sent is needed when its mean arrives."""
        late = self.channel.source == "parameter" and self.channel.clock.delay > 0
        return late or self.queues or self.channel.applier.local_delta

    def note_gradients(self) -> None:
        """Remember which tensors have a gradient; with an accumulator, which ever had one."""
        sticky = self.channel.accumulator is not None
        self.present = [g is not None or (sticky and p) for g, p in zip(self.tensors("gradient"), self.present, strict=True)]

    def accumulate(self, flying: Sequence[Outgoing] = ()) -> Tensor | None:
        """Read the source, into the accumulator if there is one; returns it (element domain). `flying`: what this channel has under way."""
        if self.layout is None:
            return None
        if self.accumulator is not None and self.channel.accumulator is not None:
            keep = torch.empty_like(self.accumulator) if self._needs_own else None
            self._into_accumulator(flying, self.channel.accumulator.beta, self.channel.accumulator.gain, keep)
            return keep
        x = torch.empty(self.layout.numel, device=self.shards.device)
        with Contiguous(self.tensors("parameter" if self.channel.source == "delta" else self.channel.source)) as tensors:
            for part in (part for w in self.windows for part in w.inner):
                self._source(part, tensors, flying, part.of(x))
        return x

    def encode(self, step: int, source: Tensor | None) -> Outgoing:
        """Select, code and take what is sent out of the accumulator (`subtract`, `put_back`). `source` is `accumulate`'s."""
        out = Outgoing(step, present=list(self.present) if self.channel.before_step else None)
        if self.layout is None or self.section is None:
            return out
        if self.accumulator is not None:
            whole = not self.channel.codec.sparse and not self.section.gathered
            work = self.accumulator.clone() if whole else self.accumulator  # it goes on while the vector is under way
        else:
            assert source is not None
            work = transform(self.layout, source.clone() if self._needs_own else source, products=self.channel.codec.products)
        out.own = source if self._needs_own else None
        out.body, out.vectors = self.section.encode(work, step)
        self._take(out, 1.0)
        return out

    def _take(self, out: Outgoing, sign: float) -> None:
        """Subtract `sign` times alpha times what was sent from the accumulator: 1 when sending, -1 to undo it."""
        if self.accumulator is None or self.channel.residual == "keep" or self.section is None:
            return
        if out.body is None and not out.vectors:  # sent under another layout (`resharding.py`): there is no code to take back
            return
        assert self.channel.accumulator is not None
        alpha = sign * (1.0 if self.channel.residual == "put_back" else self.channel.accumulator.alpha)
        self.section.subtract(self.accumulator, out.body, out.vectors, out.step, alpha)

    def undo(self, out: Outgoing) -> None:
        """Return the accumulator to what it was before `out` was accumulated and encoded (to rounding): the exchange failed.

        Only the sent part can come back where the source has moved on (a delay)."""
        self._take(out, -1.0)
        settings = self.channel.accumulator
        if self.accumulator is None or settings is None or self.layout is None or self.channel.clock.delay or settings.beta == 0:
            return
        self._into_accumulator((), 1.0 / settings.beta, -settings.gain / settings.beta)

    def mean(self, bodies: Sequence[Tensor], means: Sequence[Tensor], weights: Sequence[float], step: int) -> Mean:
        """The replicas' mean of what was sent at `step` (transform domain), from sections of bodies or reduced vectors, not decoded yet."""
        assert self.section is not None
        if self.section.gathered:
            found = self.section.received([b.to(self.shards.device) for b in bodies], weights, step)
        else:
            found = self.section.reduced(means, step)
        found.device = self.shards.device
        return found

    def apply(
        self,
        mean: Mean | Tensor | None,
        out: Outgoing,
        present: Sequence[bool] | None,
        flying: Sequence[Outgoing] = (),
        last: bool = False,
    ) -> None:
        """Let the mean (transform domain; None on a copy that only receives) act on gradients, anchor, parameters or state.

        Args:
            out: what this replica sent for it; flying: what the channel still has under way.
            last: nothing comes after it: nothing local is mixed in.
        """
        kind, layout = self.channel.applier.kind, self.layout
        if isinstance(mean, Tensor):
            assert layout is not None
            mean = Whole(layout, mean)
        if kind == "gradient":
            assert present is not None
            self._apply_gradient(mean, present)
        elif kind == "outer":
            self._apply_outer(mean, out, flying, last)
        elif self.channel.source == "parameter":
            self._apply_parameter(mean, out, flying, last)
        else:
            self._deliver(mean, self.tensors(self.channel.source), lambda _, x: x)

    def _deliver(
        self,
        mean: Mean | None,
        tensors: Sequence[Tensor | None],
        change: Callable[[Window, Tensor], Tensor],
        made: Transform | None = None,
        wrote: bool = False,
    ) -> None:
        """Write what `change` makes of the mean, a window at a time, into `tensors`; then, if the channel keeps what was `wrote`, note it.

        `change` gets the mean in the element domain if it is `made` so, else as it is."""
        if mean is None:
            self.write(None, tensors)
            return
        assert self.layout is not None
        alone = self.position.copies == 1
        room = torch.empty(max((w.numel for w in self.windows), default=0) if alone else self.layout.numel, device=self.shards.device)
        with Contiguous(tensors, back=True) as memory:
            for w in self.windows:
                found = room[: w.numel] if alone else w.of(room)
                terms = mean.terms(w, found) if made is not None and made.shortens else None
                if terms is None:
                    mean.fill(w, found)
                for part in w.inner:
                    place = found[part.begin - w.begin : part.end - w.begin]
                    if made is not None and terms is not None:
                        first = part.first - w.first
                        places, values = (t[first : first + part.count] for t in terms)
                        made.sparse_inverse(places, values, place)
                    elif made is not None:
                        made.inverse_(part.group, place)
                    x = change(part, place)
                    if alone:
                        part.unpack(x, memory)
                        self._note(part, x, memory, wrote)
                    elif x is not place:
                        place.copy_(x)
        if alone:
            return
        self.write(room, tensors)
        with Contiguous(tensors) as memory:
            for part in (part for w in self.windows for part in w.inner if wrote):
                self._note(part, part.of(room), memory, wrote)

    def _note(self, window: Window, x: Tensor, tensors: Contiguous, wrote: bool) -> None:
        """Remember in `written` the anchor and what rounding has added to the parameters, into which `x` was written."""
        anchor = self._fetch(self.anchor, window)
        if wrote and self.written is not None and anchor is not None:
            window.pack(tensors, window.of(self.written)).sub_(x).add_(anchor)

    def _apply_gradient(self, mean: Mean | None, present: Sequence[bool]) -> None:
        sign, targets = self.channel.applier.phi == "sign", self.set_gradients(present)
        with self._transform() as made:
            self._deliver(mean, targets, lambda _, x: x.sign_() if sign else x, made)

    def _transform(self) -> Transform:
        return Transform(self.shards.device, self.channel.codec.products)

    def set_gradients(self, wanted: Sequence[bool]) -> list[Tensor | None]:
        """Local gradients of the covered tensors: created where wanted, removed elsewhere; other tensors are not touched."""
        every: list[bool | None] = [None] * len(self.shards.shards)
        for i, want in zip(self.covered, wanted, strict=True):
            every[i] = want
        grads = self.shards.gradients(every)
        return [grads[i] for i in self.covered]

    def _apply_parameter(self, mean: Mean | None, out: Outgoing, flying: Sequence[Outgoing], last: bool) -> None:
        """theta = mean, mixed with the local theta; after a delay theta += mean - what was sent, and what is in flight counts as
        corrected."""
        own, mix, moved = None if last else out.own, self._mix(last), torch.zeros(2, device=self.shards.device)
        tensors = self.tensors("parameter")

        def change(window: Window, x: Tensor) -> Tensor:
            if own is None and not mix and not self.channel.after:
                return x
            now = window.pack(Contiguous(tensors), torch.empty_like(x))
            if own is not None:
                correction = x.sub_(window.of(own))
                for other in flying:
                    if other.own is not None:
                        window.of(other.own).add_(correction, alpha=1.0 - mix)
                x = correction.add_(now)
            if self.channel.after:
                moved.add_(torch.stack([(x - now).square().sum(), x.square().sum()]))
            return torch.lerp(x, now, mix, out=x) if mix else x

        self._deliver(mean, tensors, change)
        if mean is not None and self.channel.after:
            self.moved = float(moved[0]), float(moved[1])

    def _mix(self, last: bool) -> float:
        return 0.0 if last else self.channel.applier.mix

    def _apply_outer(self, mean: Mean | None, out: Outgoing, flying: Sequence[Outgoing], last: bool) -> None:
        """Step the anchor, then set the parameters to anchor - P, mixed with `mix` of the local ones."""
        mix, tensors = self._mix(last), self.tensors("parameter")
        plain = self.channel.residual != "put_back" and not self.channel.applier.local_delta  # nobody needs the coefficients

        def change(window: Window, x: Tensor) -> Tensor:
            anchor = self._step_anchor(window, x, out, None if plain else made)
            if not mix and not any(f.own is not None for f in flying):
                return anchor
            target = self._less(x.copy_(anchor), window, flying)
            return torch.lerp(target, window.pack(Contiguous(tensors), torch.empty_like(x)), mix, out=target) if mix else target

        with self._transform() as made:
            self._deliver(mean, tensors, change, made if plain else None, wrote=True)

    def _step_anchor(self, window: Window, x: Tensor, out: Outgoing, made: Transform | None) -> Tensor:
        """One window of the outer step, the mean in `x`, which is used up; returns the anchor's window. `made`: transforms the mean; None:
        it is in the element domain."""
        applier, lr = self.channel.applier, rate(window, self.channel.applier, self.channel.codec.sparse)
        anchor = self._fetch(self.anchor, window)
        assert anchor is not None
        if self.channel.residual == "put_back":
            assert self.accumulator is not None
            window.of(self.accumulator).add_(x)
        if applier.local_delta:
            assert self.accumulator is not None and self.channel.accumulator is not None and out.own is not None and made is not None
            momentum = made.inverse_(window.group, x.copy_(window.of(self.accumulator)))
            local_step(anchor, window.of(out.own), momentum, self.channel.accumulator.beta, lr)
        else:
            held, mu = self._fetch(self.momentum, window), applier.momentum_in(self.channel.clock.round(out.step))
            outer_step(anchor, held, x if made is None else made.inverse_(window.group, x), mu, applier.nesterov, lr)
            self._store(self.momentum, window, held)
        self._store(self.anchor, window, anchor)
        return anchor

    def show_anchor(self) -> None:
        """Write the anchor into the parameters."""
        anchor = None if self.anchor is None else self.anchor.to(self.shards.device)
        self.write(anchor, self.tensors("parameter"))

    def anchor_here(self) -> None:
        """Let the parameters as they are now be the anchor."""
        if self.anchor is not None:
            now = self.pack("parameter")
            assert now is not None
            self.anchor.copy_(now, non_blocking=True)
        self.written = self.pack("parameter") if self.written is not None else None

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
        if self._home != self.shards.device:
            torch.cuda.synchronize(self.shards.device)  # copies to the host may still be under way
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
