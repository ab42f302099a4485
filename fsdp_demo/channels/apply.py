"""How a mean acts on the tensors of one channel: as the gradient, as an outer step on the anchor,
as replacement of parameters or state.

Each is an entry of `APPLIERS` (`appliers.py`); a new one is a function in a file of its own, a line
in `config/names.py` and a line there.

A mean (`decode.py`) is decoded, brought to the element domain, changed and written one window at a
time, so that no workspace is made for it; only where ranks of the island share the work it is
collected for the one all-gather that completes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.profiler import record_function

from ..compression.fused import fits
from ..compression.transform import Transform, make_transform
from ..compression.windows import ContiguousViews, Window
from ..config.parts import Applier
from .decode import DecodedMean, FusedMean
from .state import LocalChannel, less


@dataclass(frozen=True)
class Arrival:
    """The circumstances of a mean that has arrived.

    Attributes:
        own: this replica's contribution to the mean, where the channel needs it
            (`Channel.needs_own`). flying: its contributions to messages still under way.
        present: for each covered tensor whether any replica had a gradient; gradient channels only.
        mix: share of the local parameters that stays.
        number: of this round of the channel's schedule; None: a part of a round, at the end, which
            has neither rate nor momentum.
        last: whether this is the channel's last message of the run.
        late: whether this replica has contributed nothing to it.
    """

    own: Tensor | None = None
    flying: Sequence[Tensor] = ()
    present: Sequence[bool] | None = None
    mix: float = 0.0
    number: int | None = None
    last: bool = False
    late: bool = False


def as_gradient(c: LocalChannel, mean: DecodedMean | None, arrival: Arrival) -> None:
    """Make the mean, or its signs, the gradient of covered tensors that have one anywhere."""
    assert arrival.present is not None
    sign, targets = c.channel.applier.sign, c.set_gradients(arrival.present)
    windows = c.windows
    if isinstance(mean, FusedMean) and c.position.num_copies == 1 and fits(targets):
        mean.write(targets, sign)
        windows = [w for w in windows if w.group is None]
    with make_transform(c.channel.codec, c.host.device) as made:
        deliver(c, mean, targets, made=made, sign=sign, windows=windows)


def replace(
    c: LocalChannel, mean: DecodedMean | None, arrival: Arrival
) -> tuple[float, float] | None:
    """Set parameters theta, or an optimizer state, to the mean, mixed with `mix` of the local
    values.

    After a delay theta += mean - own instead, unless the message is the last one; the contributions
    in flight are corrected alike, in place.

    Returns:
        Squared norms of the change and of the mean, on this copy, for parameters that are averaged
        after a delta channel; else None.
    """
    own = None if arrival.last else arrival.own
    mix = arrival.mix
    tensors = c.tensors(c.channel.target)
    moved = torch.zeros(2, device=c.host.device, dtype=torch.float32)
    after = c.channel.writes_parameters and bool(c.channel.after)

    def change(window: Window, x: Tensor) -> Tensor:
        if own is None and not mix and not after:
            return x
        now = window.pack(ContiguousViews(tensors), torch.empty_like(x))
        if own is not None:
            correction = x.sub_(window.of(own))
            for other in arrival.flying:
                window.of(other).add_(correction, alpha=1.0 - mix)
            x = correction.add_(now)
        if after:
            moved.add_(torch.stack([(x - now).square().sum(), x.square().sum()]))
        return torch.lerp(x, now, mix, out=x) if mix else x

    deliver(c, mean, tensors, change, only_reads=own is None and not mix)
    return (float(moved[0]), float(moved[1])) if mean is not None and after else None


def outer(c: LocalChannel, mean: DecodedMean | None, arrival: Arrival) -> None:
    """Step the anchor, then set the parameters to anchor - P, mixed with `mix` of the local ones; P
    is the sum of the deltas in flight, of which `own_share` stays, or the part that it will have in
    the next outer step (`own_step`). A channel that keeps steps, and a late replica, set the
    parameters to anchor - P - W, where W is their change since this replica has sent last.
    """
    tensors, flying, mix = c.tensors("parameter"), arrival.flying, arrival.mix
    keeps = (c.channel.keeps_steps or arrival.late) and not arrival.last
    share, sent = c.channel.applier.own_share, [] if arrival.own is None else [arrival.own]
    # nobody needs the coefficients
    plain = c.channel.feedback != "put_back" and not c.channel.applier.local_delta

    def change(window: Window, x: Tensor) -> Tensor:
        since = None
        if keeps:
            since = _since_sent(c, window, tensors, [*sent, *flying])
        anchor = step_anchor(c, window, x, arrival.own, arrival.number, None if plain else made)
        if not mix and not flying and since is None:
            return anchor
        for own in flying if share != 1.0 else ():  # it is what the parameters hold of it
            window.of(own).mul_(share)
            if c.channel.applier.own_step and arrival.number is not None:
                _step_own(c, window, own, arrival.own, arrival.number)
        target = less(x.copy_(anchor), window, flying)
        if since is not None:
            return target.sub_(since)
        if not mix:
            return target
        now = window.pack(ContiguousViews(tensors), torch.empty_like(x))
        return torch.lerp(target, now, mix, out=target)

    with make_transform(c.channel.codec, c.host.device) as made:
        deliver(c, mean, tensors, change, made if plain else None, wrote=True)


def _since_sent(
    c: LocalChannel, window: Window, tensors: Sequence[Tensor | None], flying: Sequence[Tensor]
) -> Tensor:
    """A window of anchor - P - parameters, before the anchor steps; `flying` includes the delta
    whose mean arrives.
    """
    before = c.fetch(c.anchor if c.written is None else c.written, window)
    assert before is not None
    now = window.pack(ContiguousViews(tensors), torch.empty_like(before))
    return less(torch.sub(before, now, out=now), window, flying)


def step_anchor(
    c: LocalChannel,
    window: Window,
    x: Tensor,
    own: Tensor | None,
    number: int | None,
    made: Transform | None,
) -> Tensor:
    """One window of the outer step, the mean in `x`, which is used up; returns the anchor's window.
    `made`: transforms the mean; None: it is in the element domain. Without a `number` the anchor
    becomes anchor - mean, and the momentum stays what it was."""
    applier, settings = c.channel.applier, c.channel.accumulator
    lr = rate(window, applier, c.channel.codec.sparse)
    anchor = c.fetch(c.anchor, window)
    assert anchor is not None
    if c.channel.feedback == "put_back":
        assert c.accumulator is not None
        window.of(c.accumulator).add_(x)
        if applier.local_delta:
            x.copy_(window.of(c.accumulator))
    mean = x if made is None else made.inverse_(window.group, x)
    if applier.local_delta:
        # the released rule of 2510.03371: anchor -= lr (own delta + beta accumulator)
        assert own is not None and settings is not None
        anchor.sub_(window.of(own).add_(mean, alpha=settings.beta), alpha=lr)
    elif number is None:
        gain = settings.gain if settings is not None else 1.0
        outer_step(anchor, None, mean, 0.0, False, 1.0 / gain)
    else:
        held, mu = c.fetch(c.momentum, window), applier.momentum_in(number)
        outer_step(anchor, held, mean, mu, applier.nesterov, lr, applier.dampening)
        c.store(c.momentum, window, held)
    c.store(c.anchor, window, anchor)
    return anchor


def _step_own(
    c: LocalChannel, window: Window, own: Tensor, before: Tensor | None, number: int
) -> None:
    """Replace a window of the own share in flight by its part of the outer step that follows that
    of round `number`. Outer steps are linear, so that part has a momentum of its own. Nothing
    landed while the delta of round 1 (`before`) flew, so it joins here."""
    applier, held = c.channel.applier, c.fetch(c.own_momentum, window)
    fresh = 1.0 - applier.dampening
    if held is not None and number == 1 and before is not None:
        held.add_(window.of(before), alpha=fresh * applier.own_share)
    part, lr = torch.zeros_like(window.of(own)), rate(window, applier, c.channel.codec.sparse)
    mu = applier.momentum_in(number + 1)
    outer_step(part, held, window.of(own), mu, applier.nesterov, -lr, applier.dampening)
    window.of(own).copy_(part)
    c.store(c.own_momentum, window, held)


def rate(window: Window, applier: Applier, sparse: bool) -> float:
    """The outer rate of a window: `lr`, and for whole tensors of a sparse channel `dense_lr`."""
    return applier.dense_lr if sparse and window.group is None else applier.lr


def outer_step(
    anchor: Tensor,
    momentum: Tensor | None,
    mean: Tensor,
    mu: float,
    nesterov: bool,
    lr: float,
    dampening: float = 0.0,
) -> None:
    """One step of SGD on the anchor, in place; `mean` (fp32, element domain, same shape) is used
    up.

    m = mu m + (1 - dampening) mean; anchor -= lr (mean + mu m) with nesterov, lr m without, lr mean
    where there is no momentum: torch.optim.SGD's form, as in DiLoCo (2311.08105). `mu` is the
    momentum of this round.
    """
    if momentum is not None:
        momentum.mul_(mu).add_(mean, alpha=1.0 - dampening)
        if nesterov:
            mean.add_(momentum, alpha=mu)
        else:
            mean = momentum
    anchor.sub_(mean, alpha=lr)


def deliver(
    c: LocalChannel,
    mean: DecodedMean | None,
    tensors: Sequence[Tensor | None],
    change: Callable[[Window, Tensor], Tensor] | None = None,
    made: Transform | None = None,
    wrote: bool = False,
    sign: bool = False,
    only_reads: bool = False,
    windows: Sequence[Window] | None = None,
) -> None:
    """Write the changed mean part by part into `tensors`. Without a mean (a copy that is not
    active) the island's other copies complete the tensors.

    Args:
        change: makes the values to write from a part of the mean, whose memory it may use up; None:
            the mean is written as it is. only_reads: it leaves that memory as it is, so a mean that
            lies in memory is not copied first.
        made: brings the mean to the element domain; None: it stays as it is.
        wrote: note what rounding has added, where the channel keeps `written`.
        sign: write the sign of the values.
        windows: of these only; None: of all.
    """
    if mean is None:
        c.write(None, tensors)
        return
    assert c.layout is not None
    alone = c.position.num_copies == 1
    reads = alone and (change is None or only_reads)
    windows = c.windows if windows is None else windows
    parts = [part for w in windows for part in w.inner]
    room = torch.empty(
        max((part.numel for part in parts), default=0) if alone else c.layout.numel,
        device=c.host.device,
        dtype=torch.float32,
    )
    with ContiguousViews(tensors, back=True) as memory:
        for w in windows:
            inverted = made is not None and w.group is not None and w.group.transform
            there = mean.view(w) if reads and not inverted else None
            found = _decoded(mean, w, room, alone, made) if there is None else _cut(w, there)
            for part, place in found:
                x = place if change is None else change(part, place)
                if alone:
                    part.unpack(x, memory, sign)
                    _note(c, part, x, memory, wrote)
                elif x is not place:
                    place.copy_(x)
                elif sign:
                    place.sign_()
    if alone:
        return
    c.write(room, tensors)
    with ContiguousViews(tensors) as memory:
        for part in parts:
            _note(c, part, part.of(room), memory, wrote)


def _cut(window: Window, elements: Tensor) -> Iterator[tuple[Window, Tensor]]:
    """The parts of a window, each with its share of its `elements`."""
    for part in window.inner:
        yield part, elements[part.begin - window.begin : part.end - window.begin]


def _decoded(
    mean: DecodedMean, window: Window, room: Tensor, alone: bool, made: Transform | None
) -> Iterator[tuple[Window, Tensor]]:
    """The parts of a window, each with its elements of the mean, in the element domain if it is
    `made` so: in its place of the workspace `room`, or, `alone`, at the beginning of it, until the
    next one."""
    with record_function("fsdp_demo::decode"):
        terms = mean.terms(window)
    for part in window.inner:
        place = room[: part.numel] if alone else part.of(room)
        if isinstance(mean, FusedMean) and made is not None and part.group is not None:
            yield part, mean.fill(part, place, inverse=True)
            continue
        if terms is None:
            mean.fill(part, place)
        else:
            first = part.first - window.first
            places, values = (t[first : first + part.count] for t in terms)
            if made is not None and made.shortens(part.group, places.shape[1]):
                made.sparse_inverse(places, values, place)
                yield part, place
                continue
            mean.scatter((places, values), place)
        if made is not None:
            made.inverse_(part.group, place)
        yield part, place


def _note(
    c: LocalChannel, window: Window, x: Tensor, tensors: ContiguousViews, wrote: bool
) -> None:
    """Remember in `written` the anchor, and what rounding has added to parameters (from `x`)."""
    if not wrote or c.written is None:
        return
    anchor = c.fetch(c.anchor, window)
    assert anchor is not None
    window.pack(tensors, window.of(c.written)).sub_(x).add_(anchor)
