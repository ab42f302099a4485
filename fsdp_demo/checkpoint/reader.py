"""The saved parts of an exchange, as one: which island, shard and active copy holds what, and how
its messages read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from torch import Tensor

from ..channels.codec import ChannelCodec
from ..comm.position import form
from ..config.fragments import expand
from ..config.patterns import covers, tensor_layout_kind
from ..config.schema import ExchangeConfig
from ..errors import counted
from ..exchange.message import MessageLayout
from ..exchange.saved_state import ExchangeState, InFlightState
from .relayout import Rows, TensorLayout
from .saved import PartSet

# a message under way: step, members, those that have not applied it
Flying = tuple[int, tuple[str, ...], tuple[str, ...]]


class CheckpointReader:
    """The saved parts by island, shard and copy.

    Args:
        covered: channel -> names of the tensors it covers; by default as its patterns say (an
            optimizer state has fewer where the optimizer keeps it for some parameters only).

    Attributes:
        islands: those of which every part is here; others are left out, with a warning.
        size, shards, active_copies: how many islands saved it, and the shards and active copies of
            each.
        states: of the parts, without their tensors.
        flights: what was under way and has arrived in every part.

    Raises:
        ValueError: no complete island, parts that are not of one run, or a channel or tensor that
            was not there.
    """

    def __init__(self, saved: PartSet, covered: dict[str, list[str]] | None = None):
        self.saved, first = saved, saved.heads[0]
        for key in ("islands", "shards", "active_copies", "digest", "step"):
            found = sorted({h[key] for h in saved.heads})
            if len(found) > 1:
                raise ValueError(
                    f"parts with {key} = {found} are not of one run: name the folders of one "
                    "checkpoint, one per island"
                )
        self.size = int(first["islands"])
        self.shards = int(first["shards"])
        self.active_copies = int(first["active_copies"])
        self.heads = {(h["island"], h["shard"], h["copy"]): h for h in saved.heads}
        wanted = [(s, c) for s in range(self.shards) for c in range(self.active_copies)]
        self.islands = [i for i in saved.islands if all((i, s, c) in self.heads for s, c in wanted)]
        if not self.islands:
            here = ", ".join(map(str, sorted(self.heads)))
            raise ValueError(
                f"no island is complete: one has {form(self.shards, self.active_copies)}, "
                f"(island, shard, copy) found are {here}"
            )
        self.states = {
            k: saved.outline(h["rank"], h["island"])
            for k, h in self.heads.items()
            if k[0] in self.islands
        }
        self.config = ExchangeConfig.from_dict(first["config"])
        self.parameters = [
            self.heads[self.islands[0], s, 0]["parameters"] for s in range(self.shards)
        ]
        names = list(dict.fromkeys(p["name"] for p in self.parameters[0] if not p["frozen"]))
        self.channels = {c.name: c for c in expand(self.config, names)}
        self.covered = covered or {
            c.name: [n for n in names if covers(c, n)] for c in self.channels.values()
        }
        if set(self.channels) != set(self.covered):
            raise ValueError(
                f"saved channels are {sorted(self.channels)}, this configuration has "
                f"{sorted(self.covered)}"
            )
        absent = sorted({n for mine in self.covered.values() for n in mine} - set(names))
        if absent:
            some = ", ".join(absent[:4])
            raise ValueError(
                f"{counted(len(absent), 'tensor')} ({some}) not trained when this was saved: "
                "resume with the same model"
            )
        every = [
            [flying(f) for f in self.states[i, s, c].in_flight if f.arrived is not None]
            for i in self.islands
            for s, c in wanted
        ]
        self.flights = [f for f in every[0] if all(f in other for other in every)]
        self._sides: dict[tuple[str, int, int], TensorLayout] = {}

    def rows(self, name: str, shard: int) -> Rows:
        """Which rows of the whole tensor a saved shard holds; of a tensor that all shards hold, the
        first one has them.
        """
        lying = [next(p for p in here if p["name"] == name) for here in self.parameters]
        parts, whole = [tuple(p["shape"]) for p in lying], tuple(lying[0]["global_shape"])
        if all(p == whole for p in parts):
            return (0, length(whole)) if shard == 0 else (0, 0)
        ends = [sum(p[0] for p in parts[:s]) for s in range(self.shards + 1)]
        if ends[-1] != whole[0] or any(p[1:] != whole[1:] for p in parts if p[0]):
            raise ValueError(
                f"{name} of shape {whole} was saved in parts {parts}: only shards along dim 0 can "
                "be joined"
            )
        return ends[shard], ends[shard + 1]

    def side(self, channel: str, shard: int, active_copy: int) -> TensorLayout:
        """A channel's tensors as one saved rank holds them."""
        if (channel, shard, active_copy) not in self._sides:
            covered = set(self.covered[channel])
            here = [p for p in self.parameters[shard] if p["name"] in covered]
            names, shapes = [p["name"] for p in here], [tuple(p["shape"]) for p in here]
            kinds = [tensor_layout_kind(self.channels[channel], n) for n in names]
            rows = [self._rows(p, shard) for p in here]
            self._sides[channel, shard, active_copy] = TensorLayout(
                names, shapes, kinds, rows, active_copy, self.active_copies
            )
        return self._sides[channel, shard, active_copy]

    def _rows(self, p: Mapping[str, Any], shard: int) -> Rows:
        """Of one tensor as a saved shard lists it: its rows, or the elements of a stretch that ZeRO
        has cut.
        """
        if p.get("offset") is None:
            return self.rows(p["name"], shard)
        return p["offset"], p["offset"] + prod(p["shape"])

    def section(self, channel: str, shard: int, active_copy: int) -> ChannelCodec:
        """What the channel had put into that rank's messages."""
        return ChannelCodec(
            self.side(channel, shard, active_copy).layout,
            self.channels[channel],
            self.size,
            self.config.seed,
        )

    def open(self, island: int, shard: int, active_copy: int) -> ExchangeState:
        """One part with its tensors, what had not arrived everywhere taken back into its
        accumulators.
        """
        state = ExchangeState.from_tree(
            self.saved.state(self.heads[island, shard, active_copy]["rank"], island)
        )
        for f in state.in_flight:
            for name, out in f.parts.items() if flying(f) not in self.flights else ():
                c, work = self.channels[name], state.channels[name].accumulator
                if work is not None and c.taken and (out.body is not None or out.vectors):
                    section = self.section(name, shard, active_copy)
                    only = section.taken_at_once(out.present)
                    section.subtract(work, out.body, out.vectors, out.step, -c.taken, only)
        return state

    def decode(
        self, flight: InFlightState, name: str, shard: int, active_copy: int
    ) -> tuple[Tensor, list[bool] | None]:
        """A channel's mean in a message that arrived on this rank, and which tensors any replica
        had a gradient for.
        """
        got, step = flight.arrived, flight.step
        assert got is not None
        if name in got.decoded:
            return got.decoded[name], flight.parts[name].present
        message = MessageLayout(
            [self.section(m, shard, active_copy) for m in self.channels if m in flight.members]
        )
        found, mine = message.split(name, got), message.sections[name]
        mean = (
            mine.mean(found.bodies, found.weights, step)
            if mine.gathered
            else mine.workspace(found.means, step)
        )
        return mean, found.present


def flying(f: InFlightState) -> Flying:
    """What a message under way is known by."""
    return f.step, tuple(f.members), tuple(sorted(f.parts))


def length(shape: Sequence[int]) -> int:
    """Rows of a tensor; a scalar is one."""
    return shape[0] if shape else 1
