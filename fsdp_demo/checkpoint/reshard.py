"""The exchange's state on other shards or copies than those that saved it, or with parameters in
another order.

A rank holds a stretch of each flattened tensor: rows of dim 0 under FSDP2, any elements under ZeRO
or beside tensor parallelism. A new rank copies what overlaps with its own stretches. Anchors and
outer momenta are kept element by element; accumulators, whose blocks follow the shards, are
transformed back before and again after. Messages in flight are dropped: a delta that is dropped is
still in the parameters, behind their anchor, and goes out with the next exchange.

Saved parts are opened one after the other, those alone that hold something of this rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..channels.state import ChannelState
from ..compression.blocks import Layout
from ..compression.transform import transform
from ..config.channel import Channel, covers, tensor_layout_kind
from ..config.fragments import expand
from ..config.schema import ExchangeConfig
from ..exchange.saved_state import ExchangeState
from ..version import __version__
from .files import FRESH, OTHER, read_head, read_part

if TYPE_CHECKING:
    from ..channels.channel import ChannelRunner
    from ..exchange.exchange import Exchange


@dataclass(frozen=True)
class PartSet:
    """Parts of an exchange's state on disk: of one replica or of several; only the heads have been
    read.

    Attributes:
        folder: where they lie.
        heads: of all parts, ordered by island and rank.
        paths: the json of each part by (island, rank).
    """

    folder: Path
    heads: list[dict[str, Any]]
    paths: dict[tuple[int, int], Path] = field(repr=False)

    @property
    def step(self) -> int:
        """Optimizer steps done when it was saved."""
        return int(self.heads[0]["step"])

    @property
    def applied(self) -> dict[str, int]:
        """For each channel the step of the last message that was applied; empty: not saved."""
        return dict(self.heads[0].get("applied", {}))

    @property
    def islands(self) -> list[int]:
        """The replicas of which parts are here."""
        return sorted({h["island"] for h in self.heads})

    @property
    def missing(self) -> list[tuple[int, int]]:
        """(island, rank) of the parts that replicas found here also wrote, or should have."""
        sizes = {h["island"]: h["world"] for h in self.heads}
        return [
            (i, r) for i, world in sizes.items() for r in range(world) if (i, r) not in self.paths
        ]

    def head(self, rank: int, island: int) -> dict[str, Any]:
        """The head of one part. Raises ValueError where that part is not here."""
        have = {h["rank"]: h for h in self.heads if h["island"] == island}
        if rank not in have:
            raise ValueError(
                f"{self.folder} lacks the part of island {island}, rank {rank} (has ranks "
                f"{list(have)}): it was saved by fewer ranks, or a file is lost; {OTHER}, {FRESH}"
            )
        return have[rank]

    def of_island(self, island: int) -> list[dict[str, Any]]:
        """The heads of all ranks of an island. Raises ValueError where one is not here."""
        world = next(int(h["world"]) for h in self.heads if h["island"] == island)
        return [self.head(rank, island) for rank in range(world)]

    def state(self, rank: int, island: int) -> dict[str, Any]:
        """The `Exchange.state_dict()` that one rank saved, with its tensors (CPU). Raises
        ValueError: see `outline`; or the part is damaged.
        """
        self.head(rank, island)
        state: dict[str, Any] = read_part(self.paths[island, rank])[1]
        self._as_state(rank, island, state)
        return state

    def outline(self, rank: int, island: int) -> ExchangeState:
        """What one rank saved, with the key of each tensor, {"tensor": KEY}, in its place: only the
        json is read. Raises ValueError: the part is missing or torn, or holds what this release
        does not know.
        """
        self.head(rank, island)
        return self._as_state(rank, island, read_head(self.paths[island, rank])[1])

    def _as_state(self, rank: int, island: int, tree: dict[str, Any]) -> ExchangeState:
        try:
            return ExchangeState.from_tree(tree)
        except (KeyError, TypeError, AttributeError) as error:
            # the checksum fits: it was written so
            package, path = self.head(rank, island).get("package"), self.paths[island, rank]
            raise ValueError(
                f"{path} holds what this fsdp_demo, {__version__}, does not know ({error!r:.80}): "
                f"it was written by {package}; install that one, {FRESH}"
            ) from None


@dataclass(frozen=True)
class Stretch:
    """Elements begin..end of a flattened tensor, which one rank holds as a tensor of `shape`."""

    name: str
    shape: tuple[int, ...]
    begin: int
    end: int


def stretches(head: Mapping[str, Any]) -> list[Stretch]:
    """Those of the rank that a head describes, in the order of its parameters; without the frozen
    ones. Raises ValueError: a tensor that is cut otherwise than along dim 0 in FSDP2's parts.
    """
    return [
        _stretch(p, int(head["shard"]), int(head["shards"]))
        for p in head["parameters"]
        if not p["frozen"]
    ]


def _stretch(p: Mapping[str, Any], shard: int, shards: int) -> Stretch:
    shape, whole = tuple(p["shape"]), tuple(p["global_shape"])
    if p.get("offset") is not None:
        return Stretch(p["name"], shape, p["offset"], p["offset"] + prod(shape))
    if shape == whole:
        return Stretch(p["name"], shape, 0, prod(shape))
    each = -(-whole[0] // shards)  # torch.chunk's
    first, last = (min(s * each, whole[0]) for s in (shard, shard + 1))
    if (
        len(shape) != len(whole)
        or shape[0] != last - first
        or (shape[0] and shape[1:] != whole[1:])
    ):
        raise ValueError(
            f"{p['name']} of shape {whole} lies as {shape} on shard {shard} of {shards}: a saved "
            "state can be cut along dim 0 only, in FSDP2's equal parts"
        )
    row = prod(whole[1:])
    return Stretch(p["name"], shape, first * row, last * row)


def gather(
    saved: PartSet, island: int, wanted: Mapping[str, Sequence[Stretch]], keys: Sequence[str]
) -> dict[str, dict[str, list[Tensor]]]:
    """Stretches of saved workspaces in the element domain: fp32 tensors in their shapes, by channel
    and workspace.

    Args:
        wanted: by channel, of all that it covers.
        keys: of the workspaces, such as "anchor"; those that a channel has not kept are left out.

    Raises:
        ValueError: parts of the island are missing or damaged, or of other channels.
    """
    heads = saved.of_island(island)
    channels = channels_of(heads[0])
    if set(wanted) - set(channels):
        raise ValueError(
            f"saved channels are {sorted(channels)}, this configuration has {sorted(wanted)}"
        )
    out: dict[str, dict[str, list[Tensor]]] = {name: {} for name in wanted}
    for shard in range(int(heads[0]["shards"])):
        copies = [h for h in heads if h["shard"] == shard and h["copy"] < h["active_copies"]]
        here = stretches(copies[0])
        mine = {name: _covered(channels[name], here, there) for name, there in wanted.items()}
        both = {name: _overlaps(mine[name], there) for name, there in wanted.items()}
        if not any(both.values()):
            continue
        for (name, key), parts in _of_shard(saved, copies, channels, mine, keys).items():
            new = [torch.zeros(s.shape, device="cpu", dtype=torch.float32) for s in wanted[name]]
            into = out[name].setdefault(key, new)
            for i, j, lo, hi in both[name]:
                a, b = mine[name][i].begin, wanted[name][j].begin
                into[j].view(-1)[lo - b : hi - b] = parts[i].view(-1)[lo - a : hi - a]
    return out


def _of_shard(
    saved: PartSet,
    copies: Sequence[Mapping[str, Any]],
    channels: Mapping[str, Channel],
    mine: Mapping[str, Sequence[Stretch]],
    keys: Sequence[str],
) -> dict[tuple[str, str], list[Tensor]]:
    """What a saved shard holds, by channel and workspace, from the shares of its active copies."""
    out: dict[tuple[str, str], list[Tensor]] = {}
    for head in copies:
        state = ExchangeState.from_tree(saved.state(head["rank"], head["island"]))
        for name, here in mine.items():
            kinds = [tensor_layout_kind(channels[name], s.name) for s in here]
            share = int(head["copy"]), int(head["active_copies"])
            layout = Layout([s.shape for s in here], kinds, *share)
            works = state.channels[name].workspaces
            for key in (key for key in keys if key in works):
                work = works[key]
                if work.numel() != layout.numel:
                    raise ValueError(
                        f"{saved.folder}: {key} of channel {name!r} has {work.numel()} elements, "
                        f"its layout {layout.numel}: the checkpoint is damaged"
                    )
                if key == "accumulator":
                    work = _transform(channels[name], layout, work, inverse=True)
                new = [torch.zeros(s.shape, device="cpu", dtype=torch.float32) for s in here]
                layout.unpack(work, out.setdefault((name, key), new))
    return out


def _transform(channel: Channel, layout: Layout, work: Tensor, inverse: bool = False) -> Tensor:
    """In fp32, whatever the channel multiplies in: what comes back is what was saved."""
    return transform(replace(channel.codec, transform_precision="fp32"), layout, work, inverse)


def channels_of(head: Mapping[str, Any]) -> dict[str, Channel]:
    """The channels of the run that saved a part, by name."""
    names = dict.fromkeys(p["name"] for p in head["parameters"] if not p["frozen"])
    return {c.name: c for c in expand(ExchangeConfig.from_dict(head["config"]), list(names))}


def _covered(channel: Channel, here: Sequence[Stretch], wanted: Sequence[Stretch]) -> list[Stretch]:
    """What a channel covers; of an optimizer's state that of some parameters only."""
    names = {s.name for s in wanted} if channel.state_name else None
    return [s for s in here if covers(channel, s.name) and (names is None or s.name in names)]


def _overlaps(here: Sequence[Stretch], there: Sequence[Stretch]) -> list[tuple[int, int, int, int]]:
    """Which elements both sides hold: index here, index there, from, to."""
    places: dict[str, list[int]] = {}
    for i, s in enumerate(here):
        places.setdefault(s.name, []).append(i)
    found = [
        (i, j, max(here[i].begin, t.begin), min(here[i].end, t.end))
        for j, t in enumerate(there)
        for i in places.get(t.name, ())
    ]
    return [one for one in found if one[2] < one[3]]


def reshard(
    saved: PartSet, island: int, exchange: Exchange, own: Mapping[str, Any], shared: bool
) -> ExchangeState:
    """The state that this rank goes on with, made of all parts of one island.

    Args:
        own: the head that this rank would write now.
        shared: only what all replicas share is taken, the rest begins anew.

    Raises:
        ValueError: see `gather`; or a channel keeps something else than it did.
    """
    place = int(own["shard"]), int(own["shards"])
    wanted = {
        c.channel.name: [_stretch(own["parameters"][i], *place) for i in c.covered]
        for c in exchange.channels
    }
    keys = ("anchor", "momentum", *(() if shared else ("accumulator", "written", "own_momentum")))
    found = gather(saved, island, wanted, keys)
    heads = saved.of_island(island)
    outlines = [saved.outline(head["rank"], island) for head in heads]
    here, channels = stretches(heads[0]), dict[str, ChannelState]()
    for c in exchange.channels:
        kept = outlines[0].channels[c.channel.name]
        c.refuse_unlike(kept.workspaces, outlines[0].step)
        private = shared and not c.channel.equal_at_end
        works = {} if private else found[c.channel.name]
        there = wanted[c.channel.name]
        names = [s.name for s in _covered(c.channel, here, there)]
        seen = {n for n, p in zip(names, kept.present, strict=True) if p and not shared}
        present = [s.name in seen for s in there]
        channels[c.channel.name] = ChannelState(present, **_packed(c, works, kept.workspaces))
    first = own["shard"] == own["copy"] == 0  # it counts the tokens of the island
    mine = not shared or own["island"] == island
    all_counts = zip(*([o.tokens, *o.counts] for o in outlines), strict=True)
    tokens, counted, everywhere = (sum(column) * first for column in all_counts)
    counts = {"tokens": tokens * mine, "counts": [counted * mine, everywhere]}
    counts["weighed"] = outlines[0].weighed if mine else {}
    return replace(without_messages(outlines[0]), channels=channels, **counts)


def _packed(
    c: ChannelRunner, works: Mapping[str, Sequence[Tensor]], names: Iterable[str]
) -> dict[str, Any]:
    """The workspaces of a channel here, of these names; those not in `works` as at its start."""
    begun = c.pack("parameter")
    if c.layout is None or begun is None:  # a copy that is not active keeps none
        return {}
    out = {}
    for key in names:
        if key in works:
            out[key] = c.layout.pack(works[key], c.layout.new("cpu"))
            if key == "accumulator":
                _transform(c.channel, c.layout, out[key])
        else:
            out[key] = begun if key in ("anchor", "written") else c.layout.new("cpu")
    return out


def without_messages(state: ExchangeState) -> ExchangeState:
    """The state with nothing in flight; which islands took part so far is not known any more."""
    lost = {name for flight in state.in_flight for name in flight.parts}
    last = state.last | dict.fromkeys(lost, -1)
    return replace(state, in_flight=[], last=last, history={})
