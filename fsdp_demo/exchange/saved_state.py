"""What an exchange saves of itself on one rank, by name, and as the tree of plain values and
tensors that a checkpoint holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..channels.channel import ChannelPayload
from ..channels.state import ChannelState
from ..comm.collectives import ReceivedMessage
from ..comm.header import Header


@dataclass
class InFlightState:
    """A message under way.

    Attributes:
        step, members: when it was sent, and the channels that share it.
        parts: what each of them sent that has not applied it yet.
        arrived: what came back; None where nothing has.
        said: the header it was sent with, if it was.
    """

    step: int
    members: list[str]
    parts: dict[str, ChannelPayload]
    arrived: ReceivedMessage | None = None
    said: Header | None = None

    def to_tree(self) -> dict[str, Any]:
        """Dicts, lists, numbers and tensors (references)."""
        got, arrived = self.arrived, None
        if got is not None:
            arrived = {**vars(got), "headers": [dict(vars(h)) for h in got.headers]}
            del arrived["slots"]  # they are of this run
        parts = {name: vars(out) for name, out in self.parts.items()}
        said = None if self.said is None else dict(vars(self.said))
        return {
            "step": self.step,
            "members": self.members,
            "parts": parts,
            "arrived": arrived,
            "said": said,
        }

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> InFlightState:
        """The inverse of `to_tree`."""
        parts = {name: ChannelPayload(**out) for name, out in tree["parts"].items()}
        got, said, arrived = tree["arrived"], tree["said"], None
        if got is not None:
            headers = [Header(**h) for h in got["headers"]]
            arrived = ReceivedMessage(
                headers, list(got["bodies"]), list(got["means"]), dict(got["decoded"])
            )
        return cls(
            int(tree["step"]),
            list(tree["members"]),
            parts,
            arrived,
            None if said is None else Header(**said),
        )


@dataclass
class ExchangeState:
    """All of one rank.

    Attributes:
        step: optimizer steps done. digest: of the configuration.
        channels: what each keeps; in_flight: messages under way, oldest first.
        last: the step after which each channel has last sent; applied: the step of its last message
            that was applied here.
        begun: the step whose gradients are in the accumulators.
        tokens: of this rank; weighed: of the island up to the last exchange of each channel.
        loss: the mean over the islands at the last exchange; losses: noted here since.
        norms: of the last messages (`norms.Norms.state`).
        history: as `History.note`; empty where it is not known.
    """

    step: int
    digest: int
    channels: dict[str, ChannelState]
    in_flight: list[InFlightState]
    last: dict[str, int]
    applied: dict[str, int] = field(default_factory=dict)
    begun: int = -1
    tokens: int = 0
    weighed: dict[str, float] = field(default_factory=dict)
    loss: float = math.nan
    losses: list[float] = field(default_factory=list)
    norms: dict[str, Any] = field(default_factory=dict)
    history: dict[str, Any] = field(default_factory=dict)

    def to_tree(self) -> dict[str, Any]:
        """Dicts, lists, numbers and tensors (references): what `Exchange.state_dict` gives."""
        return {
            "step": self.step,
            "digest": self.digest,
            "last": self.last,
            "applied": self.applied,
            "begun": self.begun,
            "tokens": [self.tokens, self.weighed],
            "losses": [self.loss, self.losses],
            "channels": {name: kept.to_tree() for name, kept in self.channels.items()},
            "in_flight": [f.to_tree() for f in self.in_flight],
            **({"norms": self.norms} if self.norms else {}),
            **({"history": self.history} if self.history else {}),
        }

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> ExchangeState:
        """The inverse of `to_tree`.

        Raises:
            ValueError: a channel keeps what no channel knows.
        """
        (tokens, weighed), (loss, losses) = tree["tokens"], tree["losses"]
        return cls(
            step=int(tree["step"]),
            digest=int(tree["digest"]),
            channels={
                name: ChannelState.from_tree(name, kept) for name, kept in tree["channels"].items()
            },
            in_flight=[InFlightState.from_tree(f) for f in tree["in_flight"]],
            last=dict(tree["last"]),
            applied=dict(tree["applied"]),
            begun=int(tree["begun"]),
            tokens=tokens,
            weighed=dict(weighed),
            loss=loss,
            losses=list(losses),
            norms=dict(tree.get("norms", {})),
            history=dict(tree.get("history", {})),
        )
