"""A run that is recorded at one of its islands, and newcomers that are fed from the record: what
joining does, without a transport.

`Record` is the desk of a donor's line and notes what comes back on it. `Fed` is what a newcomer's
line follows: the snapshot of one step, and the ticks and messages since. Everything goes through
its form on a wire.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from fsdp_demo import Topology
from fsdp_demo.elastic.peer_group import PeerGroup
from fsdp_demo.errors import PeerLost
from fsdp_demo.exchange import replay
from fsdp_demo.membership.protocol_types import Member
from fsdp_demo.peers.collectives import ReceivedMessage
from fsdp_demo.peers.header import NORM, PAYLOAD
from fsdp_demo.peers.join_messages import (
    DonorSnapshot,
    Expected,
    Tick,
    from_bytes,
    packed,
    to_bytes,
    unpacked,
)

from .small import same as same


class Record:
    """A donor feed of a peer group: a snapshot is asked for at every step. It notes the messages
    of the group, too.

    Attributes:
        snapshots: by step, as bytes, with the futures of what is under way. ticks: as bytes, by
            step.
        messages: what came back within steps, in order.
    """

    wanted = follows = True
    feeding = False  # it notes messages by itself

    def __init__(self, exchange: Any, brings: dict[str, str] | None = None):
        self.brings = brings or {}
        self.snapshots: dict[int, tuple[list[torch.Tensor], list[Future[ReceivedMessage]]]] = {}
        self.hooks: dict[int, torch.Tensor] = {}
        self.messages: list[ReceivedMessage] = []
        # ranks of one island look at the desk when they vote: here they do after every step
        exchange._runtime._pace.agreed = lambda slowest: None
        line = exchange._connections.peers
        if line is None:
            return
        line.donor_feed, swap, gather = self, line.exchange, line.all_gather

        def exchanged(*args: Any, **kwargs: Any) -> ReceivedMessage:
            self.messages.append(kept(arrived := swap(*args, **kwargs)))
            return arrived

        def gathered(
            data: torch.Tensor, kind: int = 0, step: int = 0, setup: bool = True
        ) -> list[torch.Tensor]:
            bodies = gather(data, kind, step, setup)
            if kind == NORM:
                self.messages.append(
                    ReceivedMessage(
                        [line.header(NORM, step)] * len(bodies), [b.clone() for b in bodies], []
                    )
                )
            return bodies

        line.exchange, line.all_gather = exchanged, gathered

    def hand(self, snapshot: DonorSnapshot, under_way: list[Future[ReceivedMessage]]) -> None:
        self.snapshots[snapshot.head.stand.step] = (
            [part.clone() for part in snapshot.pack()],
            list(under_way),
        )

    def tick(self, tick: Tick) -> None:
        self.hooks[tick.step] = to_bytes(tick)


def kept(arrived: ReceivedMessage) -> ReceivedMessage:
    """With memory of its own."""
    return ReceivedMessage(
        list(arrived.headers),
        [b.clone() for b in arrived.bodies],
        [m.clone() for m in arrived.means],
        slots=arrived.slots,
    )


class Fed:
    """What a newcomer's line follows: the record from the snapshot of `step` on, up to step
    `until`.

    Attributes:
        taken: how many messages were taken. asked: the sizes for which room was made. goes_on: the
            step from which it goes on by itself.
    brought: what it has.
    """

    fetched, base, outdated = 0, 0, False

    def __init__(self, record: Record, step: int, until: int | None = None):
        self.record, self.until, self.at = record, until, step
        self.parts, under_way = record.snapshots[step]
        later = [m for m in record.messages if m.headers[0].step >= step]
        self.queue = [*(packed(f.result()) for f in under_way), *map(packed, later)]
        self.planned, self.waits, self.taken, self.goes_on = True, 1, 0, -1
        self.asked: list[int] = []

    def head(self, longest: int, seconds: float, brings: dict[str, str]) -> torch.Tensor | None:
        self.brought = brings
        self.waits -= 1
        return None if self.waits >= 0 else self.parts[0]

    def bodies(self, sizes: list[int], seconds: float) -> list[torch.Tensor] | None:
        self.asked = list(sizes)
        return self.parts[1:]

    def tick(self, seconds: float) -> Tick | None:
        if self.at == self.until or self.at not in self.record.hooks:
            return None
        self.at += 1
        return from_bytes(self.record.hooks[self.at - 1], Tick, "a tick")

    def arrived(self, expected: Expected) -> ReceivedMessage:
        if self.taken >= len(self.queue):
            raise PeerLost("the record has no more messages")
        self.taken += 1
        return unpacked(self.queue[self.taken - 1], expected)

    def caught_up(self, step: int) -> None:
        self.goes_on = step

    def close(self) -> None:
        """There is no connection."""

    def another(self, again: bool) -> None:
        raise PeerLost("the record has no more messages, and is the only one")


class Follower(PeerGroup):
    """A newcomer's line, which sends nothing. said: step and weight of each payload that it would
    send.
    """

    def __init__(self, fed: Fed, islands: int, user: Any):
        names = {i: f"island{i}" for i in range(islands)}
        super().__init__(Member(islands - 1), names, range(islands), 5.0, user=user)
        self.following, self.said = fed, []

    def _followed(self, *message: Any) -> None:
        """Only what is asked within steps is followed, by the methods below."""

    def exchange(
        self, header: Any, body: Any, vectors: Any, weigh: Callable[..., Any], **how: Any
    ) -> ReceivedMessage:
        assert self.following is not None and header.kind == PAYLOAD
        self.said.append((header.step, header.weight))
        wanted = Expected(
            header.kind,
            header.step,
            body.numel(),
            [(v.numel(), code) for v, code in vectors],
            self.size,
        )
        arrived = self.following.arrived(wanted)
        weigh(arrived.headers)
        return arrived

    def all_gather(
        self, data: torch.Tensor, kind: int = 0, step: int = 0, setup: bool = True
    ) -> list[torch.Tensor]:
        assert self.following is not None and kind == NORM, "asked outside of a step"
        return self.following.arrived(Expected(kind, step, data.numel(), (), self.size)).bodies


class Joining(Topology):
    """Of a newcomer: this rank's line is a `Follower`; copies that are not active have none."""

    def follow(self, fed: Fed | None, active_copies: int = 1) -> Joining:
        self.fed, self.active_copies = fed, active_copies
        return self

    def under_way(self) -> bool:
        return True

    def join(self, position: Any, user: Any = None) -> tuple[PeerGroup | None, int]:
        assert (self.fed is not None) == (position.copy < self.active_copies)
        follower = None if self.fed is None else Follower(self.fed, self.islands, user)
        return follower, self.active_copies


def topology(
    fed: Fed | None, islands: int = 2, active_copies: int = 1, kind: str = "mesh", **fields: Any
) -> Joining:
    """Of the last of `islands` islands, as a newcomer."""
    return Joining(kind, islands - 1, islands, "newcomer", **fields).follow(fed, active_copies)


def island(record: Record, at: int, until: int, **fields: Any) -> Joining:
    """`topology` in a rank, of an island that is fed from a record, in a run of its own."""
    own = {"run": f"joins{at}-{until}", "endpoint": os.environ["ISLAND_ENDPOINT"], **fields}
    return topology(Fed(record, at, until), kind="islands", **own)


def stand(runtime: Any) -> dict[str, Any]:
    """Copies of all that joining is about, on this rank."""
    states = [
        {k: torch.as_tensor(v).clone() for k, v in s.items()}
        for _, s in runtime.host.optimizer_states()
    ]
    delta = [c for c in runtime.channels if c.channel.source == "delta" and c.anchor is not None]
    return {
        "step": runtime.step,
        "parameters": [None if t is None else t.clone() for t in runtime.host.tensors("parameter")],
        "states": states,
        "anchors": {c.channel.name: c.anchor.clone() for c in delta},
        "momenta": {c.channel.name: c.momentum.clone() for c in delta if c.momentum is not None},
        "away": [(c.anchor - c.pack("parameter")).abs().sum() for c in delta],
        "clocks": (
            dict(runtime.applied),
            dict(runtime.queue.last),
            [(f.step, f.members, list(f.parts)) for f in runtime.queue.flights],
        ),
        "history": runtime.queue.history.digest,
        "accumulators": [
            c.accumulator.clone() for c in runtime.channels if c.accumulator is not None
        ],
        "loss": runtime.queue.watch.loss,
        "norms": runtime.queue.norms.state([(f.members, f.step) for f in runtime.queue.flights]),
    }


def watched(each: Callable[[Any], None]) -> pytest.MonkeyPatch:
    """From now on `each(runtime)` is called behind every step that a newcomer of this process makes
    up for; undo the patch.
    """
    patch, take = pytest.MonkeyPatch(), replay._take

    def taken(runtime: Any, tick: Tick) -> None:
        take(runtime, tick)
        each(runtime)

    patch.setattr(replay, "_take", taken)
    return patch
