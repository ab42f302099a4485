"""Ranks without processes, for tests of `SavedExchange.state_for`: channels with a state that is
known as whole tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from fsdp_demo import ExchangeConfig
from fsdp_demo.channels.channel import ChannelPayload, ChannelRunner
from fsdp_demo.channels.state import Placement
from fsdp_demo.checkpoint import save_exchange
from fsdp_demo.config.fragments import expand
from fsdp_demo.exchange.message import pack_bits
from fsdp_demo.hosts.base import LocalParam
from fsdp_demo.rendezvous.position import ShardPosition

from ..oracles.blocks import shard_rows
from . import probe
from .transforms import transform

SHAPES = {
    "layers.0.weight": (124, 122),  # 64 x 64 blocks with edges; other blocks when halved
    "layers.1.weight": (128, 128),  # halves fall on block edges
    "odd.weight": (131, 70),
    "embed.weight": (100, 50),  # never transformed
    "tied.weight": (67, 3),
    "layers.1.bias": (5,),
    "one": (1,),  # on the first shard only
    "conv.weight": (6, 9, 70),
}
STEP = 12


@dataclass(frozen=True)
class Form:
    """Islands x shards x copies."""

    islands: int
    shards: int = 1
    copies: int = 1

    def places(self, island: int) -> list[ShardPosition]:
        return [
            ShardPosition(self.shards, s, self.copies, c)
            for c in range(self.copies)
            for s in range(self.shards)
        ]


class GivenShards:
    """Local parts of given tensors: rows of dim 0, or, `flat`, an equal part of all of them
    flattened and one behind the other, a long stretch in two.
    """

    optimizer_names = ["AdamW"]

    def __init__(self, place: ShardPosition, dtype: torch.dtype, flat: bool, names: list[str]):
        self.device = torch.device("cpu")
        if flat:
            cut = list(_flat(place, names))
            self._tensors = [theta(n).flatten()[lo:hi].to(dtype) for n, lo, hi in cut]
            self.params = [
                LocalParam(n, SHAPES[n], (hi - lo,), dtype, False, lo) for n, lo, hi in cut
            ]
            return
        self._tensors = [
            shard_rows(theta(n), place.num_shards)[place.shard].to(dtype) for n in names
        ]
        self.params = [
            LocalParam(n, SHAPES[n], tuple(t.shape), dtype, False)
            for n, t in zip(names, self._tensors, strict=True)
        ]

    def tensors(self, source: str) -> list[torch.Tensor]:
        return self._tensors

    def states(self) -> list[str]:
        return ["exp_avg", "exp_avg_sq"]


def _flat(place: ShardPosition, names: list[str]) -> Iterator[tuple[str, int, int]]:
    """Name, from and to of the stretches of one rank."""
    total, at = sum(math.prod(SHAPES[n]) for n in names), 0
    begin, end = (total * s // place.num_shards for s in (place.shard, place.shard + 1))
    for n in names:
        size = math.prod(SHAPES[n])
        lo, hi = (min(max(edge - at, 0), size) for edge in (begin, end))
        at += size
        half = (lo + hi) // 2 if hi - lo > 5000 else hi
        yield n, lo, half
        if half < hi:
            yield n, half, hi


@cache
def theta(name: str) -> torch.Tensor:
    """A whole parameter, not to be changed."""
    return probe.integers(("theta", name), SHAPES[name])


@cache
def value(island: int, channel: str, key: str, name: str) -> torch.Tensor:
    """The whole tensor of a workspace of a saved island, not to be changed; anchors and momenta are
    those of all.
    """
    return probe.integers(
        (island if key not in ("anchor", "momentum") else "all", channel, key, name), SHAPES[name]
    )


def make(
    config: ExchangeConfig,
    form: Form,
    island: int,
    place: ShardPosition,
    fill: bool = False,
    dtype: torch.dtype = torch.float32,
    flat: bool = False,
    backwards: bool = False,
) -> Any:
    """What `state_for` and `save_exchange` see of an exchange; `fill` gives it the state of
    `value`; `backwards`: its parameters stand in the other order.
    """
    names = list(SHAPES)[::-1] if backwards else list(SHAPES)
    host = GivenShards(place, dtype, flat, names)
    here = Placement(host, place, form.copies, None, form.islands)  # type: ignore[arg-type]
    bound = [ChannelRunner(c, here, config.seed) for c in expand(config, names)]
    for c in bound:
        c.start()
        if fill:
            _fill(c, island)
    state = {
        "step": STEP,
        "digest": config.digest(),
        "last": {c.channel.name: STEP - i for i, c in enumerate(bound)},
        "applied": {},
        "begun": -1,
        "losses": [math.nan, []],
        "tokens": [100 * (island + 1), {c.channel.name: 10.0 * (island + 1) for c in bound}],
        "channels": {c.channel.name: c.state().to_tree() for c in bound},
        "in_flight": [],
    }
    world = form.shards * form.copies
    facts = dict(
        kind="islands", island=island, islands=form.islands, name=f"island{island}", run="run"
    )
    topology = SimpleNamespace(**facts, rank=place.copy * form.shards + place.shard, world=world)
    at = {"step": STEP, "steps_taken": STEP, "state": state}
    at |= {"applied": {}, "history": "", "applied_by": []}
    rank = SimpleNamespace(
        auto_choice=None, channels=bound, host=host, config=config, topology=topology, **at
    )
    rank.state_dict = lambda: rank.state
    return rank


def local(c: ChannelRunner, place: ShardPosition, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """A workspace of the channel's active copy with this rank's parts of whole tensors in it,
    element domain.
    """
    assert c.layout is not None
    mine = [c.host.params[i] for i in c.covered]
    parts = [
        shard_rows(tensors[p.name], place.num_shards)[place.shard].contiguous()
        if p.offset is None
        else tensors[p.name].flatten()[p.offset : p.offset + p.shape[0]]
        for p in mine
    ]
    return c.layout.pack(parts, c.layout.new("cpu"))


def workspace(c: ChannelRunner, key: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """`local`, of an accumulator as the coefficients that it keeps."""
    work = local(c, c.position, tensors)
    if key != "accumulator" or c.channel.codec.transform == "none":
        return work
    return transform(c.layout, work)


def _fill(c: ChannelRunner, island: int) -> None:
    names = [c.host.params[i].name for i in c.covered]
    for key, work in c.state().workspaces.items():
        tensors = {n: value(island, c.channel.name, key, n) for n in names}
        work.copy_(workspace(c, key, tensors))
    c.present = [n != "one" and (n != "tied.weight" or island == 0) for n in names]


def all_ranks(
    config: ExchangeConfig, form: Form, fill: bool = True, **options: Any
) -> list[list[Any]]:
    """All ranks of all islands, as `make` makes them."""
    return [
        [make(config, form, i, place, fill, **options) for place in form.places(i)]
        for i in range(form.islands)
    ]


def launch(ranks: list[list[Any]], step: int) -> None:
    """Put one message of every channel with a delay under way, as the queue saves it."""
    lines = zip(*ranks, strict=True)
    for line in lines:  # ranks of all islands with the same shard and copy
        members = [c.channel.name for c in line[0].channels if c.channel.schedule.delay]
        sent: list[dict[str, ChannelPayload]] = []
        for island, rank in enumerate(line):
            mine = [c for c in rank.channels if c.channel.name in members]
            out = {}
            for c in mine:
                names = [c.host.params[i].name for i in c.covered]
                source = local(
                    c, c.position, {n: value(island, c.channel.name, "sent", n) for n in names}
                )
                if c.accumulator is not None:
                    c.accumulator.add_(transform(c.layout, source.clone()))
                out[c.channel.name] = c.encode(step, source)
                c.subtract(out[c.channel.name])
            sent.append(out)
        bits = [pack_bits([p for o in out.values() for p in o.present or []]) for out in sent]
        bodies = [
            torch.cat([b, *(o.body for o in out.values() if o.body is not None)])
            for b, out in zip(bits, sent, strict=True)
        ]
        vectors = [[v for o in out.values() for v in o.vectors] for out in sent]
        means = [torch.stack(list(vs)).mean(0) for vs in zip(*vectors, strict=True)]
        headers = [
            {"digest": 0, "step": step, "weight": 1.0, "loss": float("nan"), "flags": 0}
            for _ in line
        ]
        for rank, out in zip(line, sent, strict=True):
            arrived = {"headers": headers, "bodies": bodies, "means": means}
            parts = {n: vars(o) for n, o in out.items()}
            rank.state["in_flight"].append(
                {"step": step, "members": members, "parts": parts, "arrived": arrived, "said": None}
            )


def save(ranks: list[list[Any]], folder: Path) -> list[Path]:
    """Write all parts, one folder per island."""
    folders = [folder / f"island{i}" for i in range(len(ranks))]
    for where, island in zip(folders, ranks, strict=True):
        for rank in island:
            save_exchange(where, rank)
    return folders
