"""One channel at work on one rank: its payloads, and the means that come back. The only
communication is the completion inside the island.

`state.py` has the tensors and the state of a channel, `apply.py` the ways in which a mean acts.
This file reads the source, keeps the accumulator and makes the payload.

With a delay several payloads may be under way. A delta is counted from anchor - P, where P is the
sum of this replica's deltas that are still in flight, and an arriving mean sets the parameters to
anchor - P (mixed with the local ones): what was sent once is neither sent nor applied again. A
delayed mean of parameters corrects what was sent and keeps the steps taken since.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..compression import fused
from ..compression.transform import make_transform, transform
from ..compression.windows import ContiguousViews, Window
from ..config.channel import Channel
from . import apply
from .appliers import APPLIERS
from .codec import ChannelCodec, ChannelPayload, Received
from .decode import DecodedMean
from .state import ChannelState, LocalChannel, Placement, less


@dataclass(frozen=True)
class Incoming:
    """The answer to the payload of one channel at one step.

    Attributes:
        sent: this replica's own payload.
        received: those of all replicas; None on a copy that is not active, which has no peers.
        present: the tensors of a gradient channel for which any replica has a gradient.
        flying: the payloads that the channel still has under way, oldest first.
        last: nothing local is mixed in, since nothing comes after this answer, or this replica's
            payload was not finite.
        late: this replica has contributed nothing, and keeps what it has trained.
    """

    sent: ChannelPayload
    received: Received | None
    present: Sequence[bool] | None = None
    flying: Sequence[ChannelPayload] = ()
    last: bool = False
    late: bool = False


class ChannelRunner(LocalChannel):
    """A bound channel that sends and receives.

    Args:
        channel, placement: as for `LocalChannel`.
        seed: of seeded selections.

    Attributes:
        moved: after parameters were replaced by their mean: squared norms of the change and of the
            mean, of this copy.
        left_out: 1 where the source is not finite on some rank of this island, and counts as zeros;
            a number, or a scalar on the device.
        measures: whether `encode` notes the norm of what it encodes, unless that is `plain`.
            square: the last squared norm, of this copy, until it is taken.
        sections: the form of payloads in each stage; None on a copy that is not active.
        new_vector: makes room for a source that is not accumulated, fp32 [n].
        watches_energy: whether `encode` notes the share of what it encodes that leaves. energy:
            squared norms (fp32 [2], on the device) of the last workspace that was encoded and of
            what stayed; None before the first.
    """

    def __init__(self, channel: Channel, placement: Placement, seed: int = 0):
        super().__init__(channel, placement)
        layout, device = self.layout, self.host.device
        self.sections = [
            None if layout is None else ChannelCodec(layout, c, self.size, seed, device)
            for _, c in self.stages
        ]
        self.moved = (0.0, 0.0)
        self.left_out: float | Tensor = 0.0
        self.measures = self.watches_energy = False
        self.square: Tensor | None = None
        self.energy: Tensor | None = None
        self.new_vector: Callable[[int], Tensor] = partial(
            torch.empty, device=device, dtype=torch.float32
        )

    @property
    def section(self) -> ChannelCodec | None:
        """The form of the payloads that are sent now; None on a copy that is not active."""
        return self.sections[self._sends]

    @property
    def plain(self) -> bool:
        """Whether all gradients of a step, on the host, are sent as they are: who clips them knows
        the norm. The same on all ranks: copies that are not active have no accumulator either."""
        c, params = self.channel, self.host.params
        whole = len(self.covered) == sum(not p.frozen for p in params)
        alone = self.position.num_copies == 1 and self.host.device.type == "cpu"
        return c.before_step and c.accumulator is None and whole and alone

    def state(self) -> ChannelState:
        kept, section = super().state(), self.section
        if section is not None and section.levels is not None:
            kept.levels = section.levels.tolist()
        return kept

    def load(self, state: ChannelState, step: int) -> None:
        super().load(state, step)
        section = self.section
        if section is not None and len(state.levels) == len(section.layout.pieces):
            section.levels = torch.tensor(state.levels, dtype=torch.int32, device=section.device)

    def of(self, step: int) -> ChannelRunner:
        """This channel with the settings of the stage in which a message of `step` was sent."""
        stage = self.stage(step)
        if stage == self._sends:
            return self
        then = copy.copy(self)
        then._sends, then.channel = stage, self.stages[stage][1]
        return then

    # ---- what is sent --------------------------------------------------------------------------

    def accumulate(self, flying: Sequence[ChannelPayload] = ()) -> Tensor | None:
        """Read the source, once, into the accumulator if there is one; returns it (element domain).
        `flying`: what this channel has under way. A gradient channel remembers which tensors
        have a gradient; with an accumulator, which ever had one."""
        tensors, settings = self.tensors(self.channel.target), self.channel.accumulator
        if self.channel.before_step:
            self.present = [
                t is not None or (settings is not None and p)
                for t, p in zip(tensors, self.present, strict=True)
            ]
        if self.layout is None:
            return None
        if self.accumulator is not None and settings is not None:
            keep = torch.empty_like(self.accumulator) if self.channel.needs_own else None
            self._into_accumulator(tensors, flying, settings.beta, settings.gain, keep)
            return keep
        x = self.new_vector(self.layout.numel)
        with ContiguousViews(tensors) as memory:
            for part in (part for w in self.windows for part in w.inner):
                self._source(part, memory, flying, part.of(x))
        return x

    def _into_accumulator(
        self,
        tensors: Sequence[Tensor | None],
        flying: Sequence[ChannelPayload],
        beta: float,
        gain: float,
        keep: Tensor | None = None,
    ) -> None:
        """accumulator = beta accumulator + gain T(source in `tensors`); `keep` gets the source."""
        assert self.accumulator is not None
        delta = self.channel.source == "delta"
        common, rates = self._rates()
        # nothing is done to the source before it is transformed
        plain = not (delta or rates or keep is not None or isinstance(self.left_out, Tensor))
        windows = self.windows
        if (kernels := self._fused(tensors)) and not (rates or flying or keep is not None):
            before = (self.anchor if self.written is None else self.written) if delta else None
            kernels.accumulate(
                tensors, before, self.accumulator, beta, gain * common, self.left_out
            )
            windows = [w for w in windows if w.group is None]
        with (
            ContiguousViews(tensors) as memory,
            make_transform(self.channel.codec, self.host.device) as made,
        ):
            for part in (part for w in windows for part in w.inner):
                if plain and not self.left_out and made.reads(part, memory):
                    work = part.of(self.accumulator)
                    made.add_from(part, memory, work, beta, gain * common)
                    continue
                room = made.room(part, exact=delta or keep is not None or bool(rates))
                x = self._source(part, memory, flying, room)
                if keep is not None:
                    part.of(keep).copy_(x)
                x = part.scale(x, rates) if rates else x
                made.add(part.group, x, part.of(self.accumulator), beta, gain * common)

    def _fused(self, tensors: Sequence[Tensor | None]) -> fused.FusedBlocks | None:
        """The kernels that read the source where it lies; None: torch's operations do."""
        here = self.anchor is None or self.anchor.device == self.host.device
        known = None if self.section is None else self.section.fused
        return known if here and fused.fits(tensors) else None

    def _rates(self) -> tuple[float, list[float]]:
        """With `rate`: the learning rate of all tensors, or 1 and the rate of each."""
        if self.channel.accumulator is None or not self.channel.accumulator.rate:
            return 1.0, []
        every = self.host.rates()
        rates = [every[i] for i in self.covered]
        return (rates[0], []) if len(set(rates)) == 1 else (1.0, rates)

    def _source(
        self,
        window: Window,
        tensors: ContiguousViews,
        flying: Sequence[ChannelPayload],
        out: Tensor,
    ) -> Tensor:
        """A window of the source in the element domain, into `out` [numel]. A delta is anchor minus
        parameter, less what is in flight, and less what rounding to a low-precision parameter
        took away when the anchor was last written."""
        window.pack(tensors, out)
        if self.channel.source == "delta":
            before = self.fetch(self.anchor if self.written is None else self.written, window)
            assert before is not None
            torch.sub(before, out, out=out)
            less(out, window, _own(flying))
            anchor = self.fetch(self.anchor, window) if self.channel.applier.acts.pairs else None
            if anchor is not None:  # the parameters, without what rounding has added
                torch.sub(anchor, out, out=out)
        if isinstance(self.left_out, Tensor):
            return out.masked_fill_(self.left_out.bool(), 0.0)
        return out.zero_() if self.left_out else out

    def encode(self, step: int, source: Tensor | None) -> ChannelPayload:
        """Select and code the accumulator, or `source` (`accumulate`'s); `subtract` follows."""
        out = ChannelPayload(step, present=list(self.present) if self.channel.before_step else None)
        if self.layout is None or self.section is None:
            return out
        if self.accumulator is not None:
            whole = not self.channel.codec.sparse and not self.section.gathered
            # it goes on while the vector is under way
            work = self.accumulator.clone() if whole else self.accumulator
        else:
            assert source is not None
            work = source.clone() if self.channel.needs_own else source
            work = transform(self.channel.codec, self.layout, work)
        out.own = source if self.channel.needs_own else None
        if self.measures and not self.plain:  # in the transform domain, where a norm is the same
            self.square = torch.linalg.vector_norm(work).square()
        out.body, out.vectors = self.section.encode(work, step)
        if self.watches_energy:
            left = work.clone()
            self.section.subtract(left, out.body, out.vectors, step, 1.0)
            norms = [torch.linalg.vector_norm(t) for t in (work, left)]
            self.energy = torch.stack(norms).square()
        return out

    def subtract(self, out: ChannelPayload, sign: float = 1.0) -> None:
        """Take what is sent, as the others decode it, out of the accumulator (`feedback`: subtract,
        put_back): rounding stays in it. sign: -1 puts it back.
        """
        if self.accumulator is not None and self.section is not None and self._sent_here(out):
            alpha, only = sign * self.section.taken, self.section.taken_at_once(out.present)
            self.section.subtract(self.accumulator, out.body, out.vectors, out.step, alpha, only)

    def _sent_here(self, out: ChannelPayload) -> bool:
        """Whether a payload holds a code that is to leave the accumulator."""
        sent = out.body is not None or bool(out.vectors)
        return sent and self.section is not None and self.section.taken > 0

    def release(self, out: ChannelPayload) -> None:
        """Free the code of a payload whose mean has come, as large as the model where everything is
        sent. A code that is still to be taken out of the accumulator stays.
        """
        section = self.of(out.step).section
        if section is None or section.taken_at_once(out.present) is None:
            out.body, out.vectors = None, []

    def _take_late(self, out: ChannelPayload, present: Sequence[bool] | None) -> None:
        """Take the code of tensors that had no gradient here out of the accumulator, where it acts
        since another replica had one (`present`). Their rounding is to be sent from now on.
        """
        then = self.of(out.step)
        here = None if then.section is None else then.section.taken_at_once(out.present)
        if here is None or present is None or self.accumulator is None or not then._sent_here(out):
            return
        assert then.section is not None
        late = [there and not own for there, own in zip(present, here, strict=True)]
        then.section.subtract(
            self.accumulator, out.body, out.vectors, out.step, then.section.taken, late
        )
        self.present = [a or b for a, b in zip(self.present, late, strict=True)]
        out.body, out.vectors = None, []

    def undo(self, out: ChannelPayload) -> None:
        """Return the accumulator to what it was before `out` was accumulated and encoded (to
        rounding): it will not be sent any more.

        Only the sent part can come back where the source has moved on (a delay), or is not here
        (gradients; see `StepRuntime.begun`)."""
        then = self.of(out.step)
        then.subtract(out, -1.0)
        settings, moved_on = then.channel.accumulator, then.channel.schedule.delay > 0
        if settings is None or then.accumulator is None or not settings.beta:
            return
        if not (moved_on or then.channel.before_step):
            tensors = then.tensors(then.channel.target)
            then._into_accumulator(tensors, (), 1.0 / settings.beta, -settings.gain / settings.beta)

    def drop(self, out: ChannelPayload) -> None:
        """Zero the accumulator and this replica's part in a payload that the others left out."""
        if self.accumulator is not None:
            self.accumulator.zero_()
        out.body, out.vectors = None, []
        if self.channel.source == "delta" and out.own is not None:
            out.own.zero_()

    # ---- what comes back -----------------------------------------------------------------------

    def mean(self, received: Received, step: int) -> DecodedMean:
        """The replicas' mean of what was sent at `step`, decoded window by window."""
        assert self.section is not None
        if self.section.gathered:
            bodies = [b.to(self.host.device, non_blocking=True) for b in received.bodies]
            found: DecodedMean = self.section.received(bodies, received.weights, step)
        else:
            found = self.section.reduced(received.means, step)
        found.device = self.host.device
        return found

    def apply(self, arrived: Incoming) -> None:
        """Let the mean act on its target; where nothing was received, other copies bring it."""
        sent, mix = arrived.sent, 0.0 if arrived.last else self.channel.applier.mix
        self._take_late(sent, arrived.present)
        then = self.of(sent.step)
        mean = then.mean(arrived.received, sent.step) if arrived.received is not None else None
        number = None if sent.partial else then.round(sent.step)
        last, late, flying = arrived.last, arrived.late, _own(arrived.flying)
        arrival = apply.Arrival(sent.own, flying, arrived.present, mix, number, last, late)
        self.moved = APPLIERS[then.channel.applier.acts_as](then, mean, arrival) or self.moved

    def round(self, step: int) -> int:
        """Number, from 1, of an exchange within its stage."""
        begin = self.stages[self.stage(step)][0]
        return self.channel.schedule.round(step) - self.channel.schedule.round(begin - 1)


def _own(flying: Sequence[ChannelPayload]) -> list[Tensor]:
    """The replica's own part of what is under way."""
    return [out.own for out in flying if out.own is not None]
