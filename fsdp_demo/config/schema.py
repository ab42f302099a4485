"""The configuration of a method: what is exchanged, when, how compressed and how applied; its
checks and its yaml form.

Every published method is a list of `Channel`s (`methods`); nothing here touches tensors. Settings
that contradict each other are refused when the configuration is made (`rules.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import yaml

from ..errors import counted
from . import rules, together
from .channel import Channel, Phase
from .local_steps import BY_SPEED, EQUAL, LOCAL_STEPS
from .parsing import build, in_range, one_of, read_yaml, set_path, typed
from .parts import BLOCK, Drop, Pairs

CLIP_SCOPES = ("replica", "islands")

NORM_LIMIT = 100.0
"""By default. In healthy training no island is so far from the others; a wrong gradient or a
flipped bit is.
"""


@dataclass(frozen=True)
class ExchangeConfig:
    """A method: its channels, the inner optimizers it is defined for and its published learning
    rate.

    Attributes:
        preset: name of the preset this came from, for logs.
        channels: what is exchanged.
        inner_optimizers: names of the inner optimizers the preset is defined for (lower-case class
            names such as "adamw"); "any" allows all, "as_is" switches the check off.
        lr: published learning rate of the inner optimizer; null: there is none.
        clip: largest gradient norm; null: nothing is clipped. Where all that trains goes by
            gradient channels that apply the plain mean, the mean is clipped; otherwise each replica
            clips its own gradient before the step.
        max_in_flight: most payloads of one channel that may be under way at once.
        clip_scope: "replica": each replica's own norm is clipped; "islands": one norm, the root
            mean square of the replicas' norms, at the cost of a message of 8 bytes and a round trip
            at every step, behind what is in flight.
        offload_outer_state: keep anchors and outer momentum in (pinned) host memory, from which the
            channel that is due fetches its own.
        seed: number from which `random` draws its positions, and `pairs` theirs.
        norm_limit: how many times the norm of the others the norm of a contribution may be, to
            about a fifth; beyond that it is left out of its message (`exchange/watch.py` says which
            norms). null: none is.
        own_tensors: shell patterns over names of buffers and frozen parameters that are each
            island's own: neither made equal at the start nor averaged (a queue of features, a
            teacher that is moved by hand).
        local_steps: "equal": all islands take the same steps; "by_speed": in a round each takes as
            many as its speed allows (docs/unlike-machines.md). It sets `reducer.weight` to tokens,
            and `reducer.clip`, which compares norms of equally many steps, to none.
        drop: a time limit for the micro-batches of a step; null: none.
        backup_islands: most islands that an exchange goes on without (arXiv 2102.06280): what a
            late one has trained counts in its next exchange.
        late_rounds: exchanges in a row that one island may be late for.
        inner_rank: columns of the moments of an inner `lowrankadamw`; 0: another optimizer.
        pairs: islands exchange in pairs, chosen so; null: all with all.

    Example:
        >>> from fsdp_demo import ExchangeConfig, preset
        >>> config = preset("diloco", period=50)
        >>> ExchangeConfig.from_yaml(config.to_yaml()) == config
        True
    """

    preset: str
    channels: tuple[Channel, ...]
    inner_optimizers: tuple[str, ...] = ("any",)
    lr: float | None = None
    clip: float | None = None
    max_in_flight: int = 16
    clip_scope: str = "replica"
    offload_outer_state: bool = False
    seed: int = 0
    norm_limit: float | None = NORM_LIMIT
    own_tensors: tuple[str, ...] = ()
    local_steps: str = EQUAL
    drop: Drop | None = None
    backup_islands: int = 0
    late_rounds: int = 1
    inner_rank: int = 0
    pairs: Pairs | None = None

    def __post_init__(self) -> None:
        for c in self.channels:
            for problem in (*rules.problems(c), *rules.phase_problems(c)):
                raise ValueError(f"channel {c.name!r}: {problem}")
        in_range("max_in_flight", self.max_in_flight, 1)
        in_range("seed", self.seed, 0)
        in_range("backup_islands", self.backup_islands, 0)
        in_range("late_rounds", self.late_rounds, 1)
        in_range("inner_rank", self.inner_rank, 0)
        one_of("clip_scope", self.clip_scope, CLIP_SCOPES)
        one_of("local_steps", self.local_steps, LOCAL_STEPS)
        if self.clip is not None and not self.clip > 0:
            raise ValueError(
                f"clip={self.clip} is out of range: allowed is clip > 0, or null for no clipping"
            )
        if self.norm_limit is not None and not self.norm_limit >= 2:
            raise ValueError(
                f"norm_limit={self.norm_limit} is out of range: allowed is norm_limit >= 2, or "
                "null for no limit"
            )
        if not self.inner_optimizers:
            raise ValueError(
                "inner_optimizers=() names no optimizer: name those the method is defined for, or "
                "'any'"
            )
        for problem in together.problems(self):
            raise ValueError(problem)

    def fixed(self, steps: int | None) -> ExchangeConfig:
        """A copy whose phases begin at steps.

        Args:
            steps: steps of the run, of which a phase that begins at a share of the run takes its
                share; None: they are not known, and such phases are left out.
        """

        def begins(p: Phase) -> list[Phase]:
            if p.begin >= 1:
                return [p]
            return [] if steps is None else [replace(p, begin=max(1.0, round(p.begin * steps, 0)))]

        channels = (
            replace(c, later=tuple(q for p in c.later for q in begins(p))) for c in self.channels
        )
        return replace(self, channels=tuple(channels)) if self.waits_for_steps else self

    def begun_as(self, earlier: ExchangeConfig) -> ExchangeConfig:
        """A copy whose phases with a share of the run begin where they began in `earlier`, the
        configuration with which this run was started first. Where they were left out then, since
        the steps of the run were not known, they are left out here.

        Raises:
            ValueError: a channel had another number of phases then.
        """
        begins = {c.name: [p.begin for p in c.later] for c in earlier.channels}
        channels = []
        for c in self.channels:
            found, later = begins.get(c.name, []), [p for p in c.later if p.begin >= 1]
            if len(found) == len(c.later):
                pairs = zip(c.later, found, strict=True)
                later = [p if p.begin >= 1 else replace(p, begin=b) for p, b in pairs]
            elif len(found) != len(later):
                raise ValueError(
                    f"channel {c.name!r} began this run with {counted(len(found), 'phase')}, here "
                    f"it has {len(c.later)}: give the configuration that the run began with, or "
                    "phases that begin after a number of steps, not a share of the run"
                )
            channels.append(replace(c, later=tuple(later)))
        return replace(self, channels=tuple(channels))

    @property
    def waits_for_steps(self) -> bool:
        """Whether a phase begins at a share of the run: see `fixed`."""
        return any(p.begin < 1 for c in self.channels for p in c.later)

    def at(self, step: int) -> ExchangeConfig:
        """The configuration of messages that are sent at `step`, without phases."""
        return replace(self, channels=tuple(c.at(step) for c in self.channels))

    @property
    def begins(self) -> list[int]:
        """The steps at which any channel changes, with 0, in order."""
        return sorted({begin for c in self.channels for begin, _ in c.stages()})

    @property
    def equal_after_exchange(self) -> bool:
        """Whether all replicas hold equal parameters right after an exchange of the slowest
        parameter channel.
        """
        return bool(self._training) and all(c.equal_after_exchange for c in self._training)

    @property
    def equal_at_end(self) -> bool:
        """Whether a last exchange leaves all replicas with equal parameters."""
        return bool(self._training) and all(c.equal_at_end for c in self._training)

    @property
    def _training(self) -> list[Channel]:
        """The channels that carry what training changes: all but those of optimizer states."""
        return [c for c in self.channels if not c.state_name]

    def result(self, islands: int) -> str:
        """The tensors that are the trained model in the middle of a run of so many islands.

        "parameters": those of any replica, since gradient channels keep them equal; "anchor": the
        one that all replicas share; "mean": the mean of the replicas' parameters.
        """
        moving = [c for c in self.channels if c.writes_parameters]
        if not moving or (islands == 1 and not any(c.source == "delta" for c in moving)):
            return "parameters"
        return "anchor" if all(c.source == "delta" and c.equal_at_end for c in moving) else "mean"

    @property
    def by_speed(self) -> bool:
        """Whether islands take as many steps in a round as their speed allows."""
        return self.local_steps == BY_SPEED

    @property
    def clips_together(self) -> bool:
        """Whether each replica's own gradients are clipped by their norm over all islands."""
        return self.clip_scope == "islands" and self.clip is not None and not self.clips_mean

    @property
    def clips_mean(self) -> bool:
        """Whether `clip` acts on the mean gradient over the islands; else on each replica's own.

        It cannot act on the mean where other channels carry a part of the training: the norm would
        contain each replica's own gradients, so islands would scale one mean by unlike factors.
        """
        return bool(self._training) and all(
            c.before_step and p.accumulator is None and not p.applier.sign
            for c in self._training
            for p in c.phases
        )

    def clipped_once(self, norm: float) -> tuple[ExchangeConfig, float]:
        """The configuration, and the norm left to a host (Trainer, DeepSpeed) that clips by `norm`;
        0: none. Where the method clips the mean gradient, or by one norm over the islands, or
        watches norms, the exchange clips; else the host clips each replica's own gradient.
        """
        if self.clips_mean or self.clip_scope == "islands" or self.checks:
            return self.changed({"clip": norm or None}), 0.0
        return self.changed({"clip": None}), norm

    @property
    def needs_gradients(self) -> bool:
        """Whether the exchange reads or changes gradients: it exchanges, clips or watches them."""
        return self.clip is not None or any(
            c.before_step or not c.schedule.pure for c in self.channels
        )

    @property
    def checks(self) -> bool:
        """Whether channels exchange where the islands decide so, by the norms of gradients."""
        return any(not c.schedule.pure for c in self.channels)

    @property
    def averages_moments(self) -> bool:
        """Whether moments of low rank are averaged, so that islands need one basis for them."""
        return self.inner_rank > 0 and any(c.state_name for c in self.channels)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and scalars; the inverse of `from_dict`."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def to_yaml(self) -> str:
        """The whole configuration as yaml, to start from."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ExchangeConfig:
        """The configuration that `to_dict` gave, or that was written by hand, checked.

        Raises:
            ValueError: unknown keys, wrong values or contradictions; offers the nearest right name.
        """
        # one that was saved before its method was chosen (`auto.py`) has fields of its own
        own = {f.name for f in fields(cls)}
        there = {*data} if isinstance(data, Mapping) else set()
        kinds = [k for k in cls.__subclasses__() if ({f.name for f in fields(k)} - own) & there]
        return build(kinds[0] if kinds else cls, data, "")

    @classmethod
    def from_yaml(cls, text: str) -> ExchangeConfig:
        """The configuration that `to_yaml` gave; `load_config` reads the short form, too."""
        return cls.from_dict(read_yaml(text, "the configuration"))

    @functools.lru_cache(maxsize=16)  # noqa: B019 - configurations are small; saves ask each time
    def digest(self) -> int:
        """The first 48 bits of SHA-256 over the canonical form, the same for equal configurations.
        They are in the header of every message, so that peers on another configuration are refused.
        """
        # 250 and 250.0 are equal: each number as its field declares it
        text = json.dumps(ExchangeConfig.from_dict(self.to_dict()).to_dict(), sort_keys=True)
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "little")

    def parts(self) -> list[str]:
        """A phrase for each channel, and for each of its phases."""
        parts, stages = [], list[tuple[float, Channel]]()
        for c in self.channels:
            stages += [(0.0, c), *((p.begin, c.under(p)) for p in c.later)]
        for begin, c in stages:
            after = f"{begin:.3g} of the run" if begin < 1 else counted(int(begin), "step")
            when = f"after {after} " if begin else ""
            select = (
                f"top-{c.codec.topk}"
                if c.codec.selection.by == "data"
                else f"{c.codec.select} {c.codec.topk}"
            )
            sparse = f"{c.codec.transform}+{select}/{BLOCK} " if c.codec.sparse else ""
            late = (
                f", applied {counted(c.schedule.delay, 'step')} later" if c.schedule.delay else ""
            )
            cut = f", in fragments of {counted(c.fragments.layers, 'layer')}" if c.fragments else ""
            parts.append(
                f"{when}{c.source} every {c.schedule.words}{cut} "
                f"({sparse}{c.codec.value_dtype}, mean over {c.reducer.mean_over}{late})"
            )
        return parts

    def describe(self) -> str:
        """One line for a table."""
        return f"preset {self.preset}: " + "; ".join(self.parts())

    def changed(self, changes: Mapping[str, Any]) -> ExchangeConfig:
        """A copy with dotted paths set: `clip`, `codec.topk` (all channels) or `NAME.codec.topk`
        (one channel).

        Raises:
            ValueError: an unknown path or value, or one that has no effect in this method
                (`rules.py`).

        Example:
            >>> from fsdp_demo import preset
            >>> preset("demo").changed({"codec.topk": 8}).channels[0].codec.topk
            8
        """
        data, top = self.to_dict(), [f.name for f in fields(ExchangeConfig) if f.name != "channels"]
        if changes.get("local_steps") == BY_SPEED:
            changes = {"reducer.weight": "tokens", "reducer.clip": "none", **changes}
        # phases first, with all their keys: they follow what else is changed
        for path in sorted(changes, key=lambda path: path.rpartition(".")[2] != "later"):
            value = changes[path]
            if path.rpartition(".")[2] == "later":
                value = [dataclasses.asdict(p) for p in typed(tuple[Phase, ...], value, path)]
            set_path(data, top, path, value)
        made = ExchangeConfig.from_dict(data)
        rules.refuse_unused(made.channels, made.clips_mean, changes)
        return made
