"""Ranks without processes, for tests of `resharding.convert`: channels with a state that is known
as whole tensors.
"""

from __future__ import annotations

import math
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
from fsdp_demo.comm.position import ShardPosition
from fsdp_demo.config.fragments import expand
from fsdp_demo.exchange.message import pack_bits
from fsdp_demo.hosts.base import LocalParam

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
    """Local parts of given tensors."""

    optimizer_names = ["AdamW"]

    def __init__(self, place: ShardPosition, dtype: torch.dtype = torch.float32):
        self.device = torch.device("cpu")
        self._tensors = [
            shard_rows(theta(n), place.num_shards)[place.shard].to(dtype) for n in SHAPES
        ]
        self.params = [
            LocalParam(n, s, tuple(t.shape), dtype, False)
            for (n, s), t in zip(SHAPES.items(), self._tensors, strict=True)
        ]

    def tensors(self, source: str) -> list[torch.Tensor]:
        return self._tensors

    def states(self) -> list[str]:
        return ["exp_avg", "exp_avg_sq"]


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
) -> Any:
    """What `convert` and `save_exchange` see of an exchange; `fill` gives it the state of
    `value`.
    """
    host = GivenShards(place, dtype)
    here = Placement(host, place, form.copies, None, form.islands)  # type: ignore[arg-type]
    bound = [ChannelRunner(c, here, config.seed) for c in expand(config, list(SHAPES))]
    for c in bound:
        c.start()
        if fill:
            _fill(c, island, place)
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
    facts = {
        "kind": "islands",
        "island": island,
        "islands": form.islands,
        "name": f"island{island}",
        "run": "run",
    }
    topology = SimpleNamespace(**facts, rank=place.copy * form.shards + place.shard, world=world)
    at = {"step": STEP, "state": state, "applied": {}, "history": "", "applied_by": []}
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
    parts = [
        shard_rows(tensors[c.host.params[i].name], place.num_shards)[place.shard].contiguous()
        for i in c.covered
    ]
    return c.layout.pack(parts, c.layout.new("cpu"))


def _fill(c: ChannelRunner, island: int, place: ShardPosition) -> None:
    names = [c.host.params[i].name for i in c.covered]
    for key, work in c.state().workspaces.items():
        work.copy_(local(c, place, {n: value(island, c.channel.name, key, n) for n in names}))
        if key == "accumulator":
            transform(c.layout, work)  # type: ignore[arg-type]
    c.present = [n != "one" and (n != "tied.weight" or island == 0) for n in names]


def all_ranks(config: ExchangeConfig, form: Form, fill: bool = True) -> list[list[Any]]:
    return [
        [make(config, form, i, place, fill) for place in form.places(i)]
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
            arrived = {"headers": headers, "bodies": bodies, "means": means, "decoded": {}}
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


def tensors(ranks: list[Any], channel: str, work: Any) -> list[dict[str, torch.Tensor]]:
    """Per shard of one island the local tensors of a workspace, coefficients as they are;
    `work(rank)` gives the workspace.
    """
    out: list[dict[str, torch.Tensor]] = []
    for rank in ranks:
        c = next(c for c in rank.channels if c.channel.name == channel)
        place = c.position
        if place.copy == 0:
            out.append(
                {c.host.params[i].name: torch.zeros(c.host.params[i].shape) for i in c.covered}
            )
        c.layout.unpack(work(rank), list(out[place.shard].values()))
    return out
