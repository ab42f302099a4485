"""The saved state of an exchange on one rank, as dataclasses and as the tree of plain values and
tensors that a checkpoint holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..channels.channel import ChannelPayload
from ..channels.state import ChannelState
from ..membership.protocol_types import Member, extended
from ..peers.collectives import ReceivedMessage
from ..peers.header import Header

OPTIONAL = ("norms", "history", "pace", "limit", "changes")
"""Fields of `ExchangeState` that are not saved where they say nothing."""

BEGUN = "0" * 16
"""Of a run in which all islands have taken part in everything."""


@dataclass
class History:
    """The islands that took part in the exchanges so far, as a digest, which goes into every
    checkpoint. Two checkpoints between the same exchanges are of one state only if their digests
    are equal. The digest changes only when the islands change.

    Attributes:
        islands: of the run.
        digest: 16 hexadecimal digits; empty where it is not known, since the state was converted.
        slots: the islands that take part now. at: the step of their first exchange.
        early: those of `slots` whose part in the last exchange came early: they had left, and have
            not applied it. late: those that were late for it, and have more to send.

    >>> one, two = History(3), History(3)
    >>> one.hear(7, (0, 1, 2)); two.hear(7, (0, 2))
    >>> one.digest == BEGUN, two.digest == BEGUN
    (True, False)
    """

    islands: int
    digest: str = BEGUN
    slots: tuple[int, ...] = ()
    at: int = -1
    early: tuple[int, ...] = ()
    late: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.slots = self.slots or tuple(range(self.islands))

    def hear(self, step: int, slots: Sequence[int]) -> None:
        """Note the islands of the exchange of `step`, which is about to be applied (again, after a
        resume); nothing without slots."""
        if slots and step >= self.at and tuple(slots) != self.slots:
            self.digest = extended(self.digest, step, [Member(s) for s in slots])
            self.slots, self.at = tuple(slots), step

    def hear_reset(self, step: int) -> None:
        """Note that all islands have reset parameters after so many steps."""
        self.digest = self.digest and extended(self.digest, step, ())

    def note(self) -> dict[str, Any]:
        """The history as plain values, for `load`."""
        return {
            "digest": self.digest,
            "slots": list(self.slots),
            "at": self.at,
            "early": list(self.early),
            **({"late": list(self.late)} if self.late else {}),
        }

    def load(self, note: Mapping[str, Any]) -> None:
        """The inverse of `note`; the history is unknown where it is empty."""
        self.digest, self.at = str(note.get("digest", "")), int(note.get("at", -1))
        self.slots = tuple(int(s) for s in note.get("slots", ())) or tuple(range(self.islands))
        self.early, self.late = (tuple(map(int, note.get(k, ()))) for k in ("early", "late"))


@dataclass
class InFlightState:
    """A message under way (`sending.PendingExchange`) in a saved state. arrived: the answer; None
    where none has come. said: the header of the message, if it was sent."""

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
        return {**vars(self), "parts": parts, "arrived": arrived, "said": said}

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> InFlightState:
        """The inverse of `to_tree`."""
        parts = {name: ChannelPayload(**out) for name, out in tree["parts"].items()}
        got, said, arrived = tree["arrived"], tree["said"], None
        if got is not None:
            headers = [Header(**h) for h in got["headers"]]
            arrived = ReceivedMessage(headers, list(got["bodies"]), list(got["means"]))
        return cls(
            int(tree["step"]),
            list(tree["members"]),
            parts,
            arrived,
            None if said is None else Header(**said),
        )


@dataclass
class ExchangeState:
    """The whole state of one rank.

    Attributes:
        step: optimizer steps done. digest: of the configuration.
        channels: the state of each. in_flight: messages under way, oldest first.
        last, applied: as in `InFlightQueue`. begun: as in `StepRuntime`.
        tokens: of this rank; weighed: of the island up to the last exchange of each channel.
        counts: [`counted`, `everywhere`] of `LocalStatus`.
        loss: the mean over the islands at the last exchange; losses: noted here since.
        norms: of the last messages (`watch.Norms.state`).
        history: as `History.note`; empty where it is not known.
        pace: as `Pace.state`; empty where all islands take all steps.
        limit: `DropCompute.chosen`.
        changes: as `ChangeMeter.state`; empty where no channel checks.
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
    counts: list[int] = field(default_factory=lambda: [0, 0])
    loss: float = math.nan
    losses: list[float] = field(default_factory=list)
    norms: dict[str, Any] = field(default_factory=dict)
    history: dict[str, Any] = field(default_factory=dict)
    pace: dict[str, Any] = field(default_factory=dict)
    limit: float = 0.0
    changes: dict[str, Any] = field(default_factory=dict)

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
            **({"counts": self.counts} if self.counts != [self.tokens, 0] else {}),
            **{name: kept for name in OPTIONAL if (kept := getattr(self, name))},
        }

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> ExchangeState:
        """The inverse of `to_tree`. Raises ValueError: a channel keeps what no channel knows."""
        (tokens, weighed), (loss, losses) = tree["tokens"], tree["losses"]
        optional: dict[str, Any] = {name: tree[name] for name in OPTIONAL if name in tree}
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
            counts=list(tree.get("counts", [tokens, 0])),
            loss=loss,
            losses=list(losses),
            **optional,
        )
