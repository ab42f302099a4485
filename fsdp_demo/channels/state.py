"""A channel on one rank: which tensors it covers, how they lie in workspaces, and what it keeps
between exchanges. It sends nothing.

Everything a channel keeps lives in workspaces of its active copy (see `compression/blocks.py`): the
accumulator in the transform domain, where a = beta a + gain T(source) and "subtract what was sent"
are exact because the DCT is orthonormal and linear; anchor and outer momentum in the element
domain, on the device or in host memory.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..compression.blocks import Layout
from ..compression.selection import say_what_selects
from ..compression.windows import Window, synchronize
from ..config.channel import Channel, covers, tensor_layout_kind
from ..hosts.base import TrainingHost
from ..rendezvous.position import ShardPosition


@dataclass(frozen=True)
class Placement:
    """The shards of one rank, its place in the island, and who shares the work on them.

    Attributes:
        host: what the engine offers: all local tensors.
        position: of the rank in its island.
        active_copies: how many of the copies of a shard send; a copy beyond them keeps no state and
            only receives.
        copies: process group of the ranks of this island that hold the same shard (None: the
            default group).
        islands: number of replicas.
        home: device on which anchor and outer momentum are kept; None: with the shards.
    """

    host: TrainingHost
    position: ShardPosition = ShardPosition()
    active_copies: int = 1
    copies: Any = None
    islands: int = 1
    home: str | None = None

    @property
    def active_copy(self) -> int | None:
        """Which of the active copies this rank is; None beyond them."""
        return self.position.copy if self.position.copy < self.active_copies else None


@dataclass
class ChannelState:
    """The state that a channel keeps between exchanges: workspaces of its active copy, None where
    it keeps none, and which of its tensors have a gradient. Fields as in `LocalChannel`; `levels`:
    of its `ChannelCodec`."""

    present: list[bool]
    accumulator: Tensor | None = None
    anchor: Tensor | None = None
    momentum: Tensor | None = None
    written: Tensor | None = None
    own_momentum: Tensor | None = None
    levels: list[int] = field(default_factory=list)

    @property
    def workspaces(self) -> dict[str, Tensor]:
        """The workspaces that are kept, by name."""
        rest = ("present", "levels")
        return {k: work for k, work in vars(self).items() if k not in rest and work is not None}

    def to_tree(self) -> dict[str, Any]:
        """The state as a checkpoint holds it; tensors are references."""
        levels = {"levels": list(self.levels)} if self.levels else {}
        return {**self.workspaces, "present": list(self.present), **levels}

    @classmethod
    def from_tree(cls, channel: str, tree: Mapping[str, Any]) -> ChannelState:
        """The inverse of `to_tree`. Raises ValueError if the channel had kept something else."""
        unknown = sorted(set(tree) - {f.name for f in fields(cls)})
        if unknown or "present" not in tree:
            raise ValueError(
                f"channel {channel!r}: saved state has {sorted(tree)}, no channel keeps that: "
                "resume with its own release"
            )
        return cls(**tree)


class LocalChannel:
    """A `Channel` bound to the shards of one rank.

    Args:
        channel: its settings.
        placement: the shards of this rank. The channel covers those that its patterns name and that
            are not frozen.

    Attributes:
        host, position, active_copies, copies, size: of the placement (`size`: its islands).
        covered: indices of its tensors in the host's `params`; present: which of them have a
            gradient (`ChannelRunner.accumulate`).
        layouts: of all active copies; layout, windows: of this copy (None and none on a copy that
            is not active).
        accumulator, anchor, momentum: workspaces of this copy, None where the channel keeps none.
        own_momentum: outer momentum of this replica's own deltas (`applier.own_step`), else None.
        written: the anchor and what rounding has added to the parameters; None where they are fp32.
        stages: of the channel (`Channel.stages`); channel: the stage of what is sent now.
    """

    def __init__(self, channel: Channel, placement: Placement):
        self.stages = channel.stages()
        self._sends = self._lands = 0  # stages of what is sent now, and of what lands
        self.channel, self.host = channel, placement.host
        self._home = torch.device(placement.home or self.host.device)
        self.position, self.active_copies = placement.position, placement.active_copies
        self.copies, self.size = placement.copies, placement.islands
        self.active_copy, params = placement.active_copy, self.host.params
        self.covered = [i for i, s in enumerate(params) if not s.frozen and covers(channel, s.name)]
        self._state = channel.source if channel.state_name else ""
        if channel.state_name:
            self._with_state()
        self._lay_out()
        if self.host.device.type == "cpu" and channel.codec.sparse:
            say_what_selects()
        self.accumulator: Tensor | None = None
        self.anchor: Tensor | None = None
        self.written: Tensor | None = None
        self.momentum: Tensor | None = None
        self.own_momentum: Tensor | None = None
        self.present = [False] * len(self.covered)
        self._low_precision = any(params[i].dtype != torch.float32 for i in self.covered)
        if self._low_precision and channel.queues:
            raise ValueError(
                f"channel {channel.name!r}: schedule.delay={channel.schedule.delay}, not below "
                f"schedule.sync_every={channel.schedule.sync_every}, needs fp32 parameters: load "
                "the model with dtype=torch.float32, or shorten the delay"
            )

    def _lay_out(self) -> None:
        chosen = [self.host.params[i] for i in self.covered]
        kinds = [tensor_layout_kind(self.channel, s.name) for s in chosen]
        kept = self.tensors(self._state) if self._state else [None] * len(chosen)
        shapes = [s.shape if t is None else t.shape for s, t in zip(chosen, kept, strict=True)]
        copies = range(self.active_copies)
        self.layouts = [Layout(shapes, kinds, copy, self.active_copies) for copy in copies]
        self.layout = self.layouts[self.active_copy] if self.active_copy is not None else None
        self.windows = self.layout.windows(self.host.device) if self.layout is not None else []

    def narrowed(self, indices: Collection[int]) -> LocalChannel:
        """A channel over those of its tensors with these indices, to pack and write them."""
        only = copy.copy(self)
        only.covered = [i for i in self.covered if i in indices]
        only._lay_out()
        return only

    def of_state(self, source: str) -> LocalChannel:
        """A channel to pack and write a state ("state:NAME") of its tensors, of whatever shape."""
        only = copy.copy(self)
        only._state = source
        only._lay_out()
        return only

    def _with_state(self) -> None:
        """Cover only the parameters whose optimizer keeps the state (beside Muon: AdamW's)."""
        found = self.host.tensors(self.channel.source)
        self.covered = [i for i in self.covered if found[i] is not None]
        if not self.covered:
            name, kept = self.channel.state_name, ", ".join(self.host.states()) or "none yet"
            raise ValueError(
                f"channel {self.channel.name!r} exchanges the optimizer state {name!r}, but no "
                f"covered parameter has it (found: {kept}): name a state of this optimizer, or, "
                "if it makes its state at its first step, take one before attach"
            )

    def start(self, step: int = 0) -> None:
        """Make the state of a run that goes on from `step`: zeros, and the anchor as it is now."""
        if self.layout is not None and self.channel.source == "delta":
            self.anchor = self._keep(self.pack("parameter"))
            self.written = self.pack("parameter") if self._low_precision else None
        self.begin(step)

    def begin(self, step: int) -> None:
        """Take the settings of `step`; accumulator and momentum, where there are any, are zero."""
        self.accumulator = self.momentum = self.own_momentum = None
        self._sends = self._lands = -1
        self.enter(step)

    def restart(self, indices: Collection[int]) -> None:
        """Begin anew, as `start`, for the tensors with these indices (in the host's `params`)."""
        mine = [k for k, i in enumerate(self.covered) if i in indices]
        self.present = [there and k not in mine for k, there in enumerate(self.present)]
        now = self.pack("parameter") if self.anchor is not None else None
        for name, work in self.state().workspaces.items():
            new = now if name in ("anchor", "written") else None
            for place in self.layout.places(mine) if self.layout is not None else ():
                work[place] = 0.0 if new is None else new[place]

    def stage(self, step: int) -> int:
        """The number of the stage in which `step` lies."""
        return max(sum(begin <= step for begin, _ in self.stages) - 1, 0)

    def has_momentum(self, step: int) -> bool:
        """Whether the channel keeps an outer momentum after `step` steps; known before `start`."""
        landing = self.stages[self.stage(step - self.channel.schedule.delay)][1]
        return landing.source == "delta" and bool(landing.applier.momentum)

    def keeps(self, step: int) -> set[str]:
        """Names of the workspaces that an active copy keeps after `step` steps."""
        stage, delta = self.stages[self.stage(step)][1], self.channel.source == "delta"
        found = {"anchor": delta, "written": delta and self._low_precision}
        found |= {"accumulator": stage.accumulator is not None, "momentum": self.has_momentum(step)}
        found["own_momentum"] = found["momentum"] and stage.applier.own_step
        return {name for name, kept in found.items() if kept}

    def refuse_unlike(self, saved: Collection[str], step: int) -> None:
        """Raise ValueError if these workspaces, of `step` or of the one before (a loss had cut off
        the last exchange), belong to another preset.
        """
        known = self.keeps(step), self.keeps(step - 1)
        if self.layout is not None and set(saved) not in known:
            raise ValueError(
                f"channel {self.channel.name!r}: saved state has {sorted(saved)}, this "
                f"configuration keeps {sorted(known[0])}: resume with the preset it was "
                "saved with, and with its phases (later, switch)"
            )

    def enter(self, step: int) -> None:
        """Take the settings of the stage in which `step` lies. Its first accumulator begins at
        zero; so does outer momentum, when the first message of this stage may land.
        """
        sends, lands = self.stage(step), self.stage(step - self.channel.schedule.delay)
        if sends != self._sends:
            self._sends, self.channel = sends, self.stages[sends][1]
            keeps = self.channel.accumulator is not None and self.accumulator is None
            if keeps and self.layout is not None:
                self.accumulator = self.layout.new(self.host.device)
        if lands != self._lands:
            self._lands = lands
            self._make_momentum()

    def _make_momentum(self) -> None:
        landing = self.stages[self._lands][1]
        self.momentum = self.own_momentum = None
        if self.layout is not None and landing.source == "delta" and landing.applier.momentum:
            self.momentum = self._keep(self.layout.new(self.host.device))
            if landing.applier.own_step:
                self.own_momentum = self._keep(self.layout.new(self.host.device))

    def _keep(self, work: Tensor | None) -> Tensor | None:
        """Move a workspace to where anchors and outer momentum live."""
        if work is None or work.device == self._home:
            return work
        host = torch.empty(work.shape, dtype=work.dtype, device=self._home, pin_memory=True)
        return host.copy_(work)

    def fetch(self, kept: Tensor | None, window: Window) -> Tensor | None:
        """A window of anchor or momentum on the device: a view, or a copy for `store`."""
        return None if kept is None else window.of(kept).to(self.host.device, non_blocking=True)

    def store(self, kept: Tensor | None, window: Window, work: Tensor | None) -> None:
        """Bring what `fetch` gave, changed since, to where it is kept."""
        if kept is not None and work is not None and self._home != self.host.device:
            window.of(kept).copy_(work, non_blocking=True)

    def tensors(self, source: str) -> list[Tensor | None]:
        """The covered local tensors of a source, as `TrainingHost.tensors` gives them."""
        every = self.host.tensors(source)
        return [every[i] for i in self.covered]

    def pack(self, source: str) -> Tensor | None:
        """A new workspace of this copy, fp32, with a source in it; None on an inactive copy."""
        if self.layout is None:
            return None
        return self.layout.pack(self.tensors(source), self.layout.new(self.host.device))

    def write(self, work: Tensor | None, tensors: Sequence[Tensor | None]) -> None:
        """Write a workspace of this copy into `tensors`; where copies share the work, one
        all-gather inside the island completes it.
        """
        if self.position.num_copies == 1:
            assert self.layout is not None and work is not None
            self.layout.unpack(work, tensors)
            return
        size = max(layout.numel for layout in self.layouts)
        part = torch.zeros(size, device=self.host.device, dtype=torch.float32)
        if work is not None:
            part[: work.numel()] = work
        whole = part.new_empty(self.position.num_copies * size)
        # not into a list of tensors: NCCL would gather into one of its own, and copy it to them
        dist.all_gather_into_tensor(whole, part, group=self.copies)
        for layout, received in zip(self.layouts, whole.split(size), strict=False):
            layout.unpack(received[: layout.numel], tensors)

    def set_gradients(self, wanted: Sequence[bool]) -> list[Tensor | None]:
        """Gradients of covered tensors: made where wanted, else removed; no others touched."""
        wants = dict(zip(self.covered, wanted, strict=True))
        grads = self.host.prepare_gradients([wants.get(i) for i in range(len(self.host.params))])
        return [grads[i] for i in self.covered]

    def show_anchor(self) -> None:
        """Write the anchor into the parameters."""
        anchor = None if self.anchor is None else self.anchor.to(self.host.device)
        self.write(anchor, self.tensors("parameter"))

    def anchor_here(self) -> None:
        """Let the parameters as they are now be the anchor."""
        if self.anchor is not None:
            now = self.pack("parameter")
            assert now is not None
            self.anchor.copy_(now, non_blocking=True)
        self.written = self.pack("parameter") if self.written is not None else None

    def state(self) -> ChannelState:
        """What is kept between exchanges: workspaces (no copies) and the gradients ever seen."""
        if self._home != self.host.device:  # copies to the host may still be under way
            synchronize(self.host.device)
        works = self.accumulator, self.anchor, self.momentum, self.written, self.own_momentum
        return ChannelState(list(self.present), *works)

    def load(self, state: ChannelState, step: int) -> None:
        """Restore the state of `step`. Raises ValueError if it is of another layout or preset."""
        saved = state.workspaces
        self.refuse_unlike(saved, step)
        self.begin(step)
        if "momentum" in saved and self.momentum is None:
            # a loss has cut off the last message of a stage that has one: it is still to land
            self._lands = self.stage(step - 1 - self.channel.schedule.delay)
            self._make_momentum()
        mine = self.state().workspaces
        for key, value in saved.items():
            if value.shape != mine[key].shape:
                raise ValueError(
                    f"channel {self.channel.name!r}: saved {key} has {value.numel()} elements, "
                    f"here it has {mine[key].numel()}: resume "
                    "with the same number of islands and ranks"
                )
            mine[key].copy_(value)
        self.present = list(state.present)


def less(work: Tensor, window: Window, flying: Sequence[Tensor]) -> Tensor:
    """A window minus the own deltas in flight (workspaces), in place."""
    for own in flying:
        work.sub_(window.of(own))
    return work
