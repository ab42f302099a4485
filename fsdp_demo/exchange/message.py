"""The layout of a message, and the contents of its header.

    gathered:  header | presence bits | section of each gathered channel, one after the other
    reduced:   vectors of the reduced channels, one after the other

Vectors go in the two legs of a reduce (`peers/collectives.py`).

Channels come in the order of the configuration. Presence is one bit per tensor of each gradient
channel: whether this replica has a gradient for it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..channels.channel import ChannelPayload, Received
from ..channels.codec import ChannelCodec
from ..compression import dense
from ..compression.formats import EXACT
from ..config.channel import Channel
from ..elastic.peer_group import PeerGroup
from ..hosts.base import TrainingHost
from ..peers.collectives import ReceivedMessage, legs
from ..peers.header import COUNTED, EARLY, FAR, HEADER, LEAVING, NOT_FINITE, SKIPPED, STOP, Header
from ..rendezvous.island import IslandGroup
from .saved_state import ExchangeState
from .watch import give_up


def kept_vector(sections: Sequence[ChannelCodec]) -> ChannelCodec | None:
    """The section whose vector and mean keep their memory from step to step where islands train on
    a CPU: the only one with vectors, if every step sends all its values; else None.
    """
    reduced = [s for s in sections if not s.gathered]
    return reduced[0] if len(reduced) == 1 and reduced[0].channel.whole_every_step else None


class MessageLayout:
    """The layout of a message of some channels, of one active copy.

    Args:
        sections: of the channels, in the order of the configuration.

    Attributes:
        sections: by the name of the channel.
        body_bytes: presence bits and sections; num_bytes: with the header.
        vectors: length and code of each vector that is reduced.
    """

    def __init__(self, sections: Sequence[ChannelCodec]):
        self.sections = {s.channel.name: s for s in sections}
        self._bits = _spans(
            [s.layout.num_tensors if s.channel.before_step else 0 for s in sections]
        )
        self._presence_bytes = (self._bits[-1].stop + 7) // 8 if sections else 0
        self._bytes = _spans([s.num_bytes for s in sections], self._presence_bytes)
        self._vectors = _spans([0 if s.gathered else len(s.spans) for s in sections])
        self.body_bytes = self._bytes[-1].stop if sections else 0
        self.num_bytes = HEADER.size + self.body_bytes
        self._reduced = [(s.channel, *span) for s in sections if not s.gathered for span in s.spans]
        self.vectors = [(n, code) for _, n, code in self._reduced]

    @property
    def before_step(self) -> bool:
        """Whether this is a message of gradients; no other channels share it then."""
        return any(s.channel.before_step for s in self.sections.values())

    # ---- what is sent --------------------------------------------------------------------------

    def pack(
        self, parts: Mapping[str, ChannelPayload]
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """The payloads of the channels, given by name, in the order of the message: presence bits
        (uint8, on the CPU), sections of the body, vectors to be reduced. An accelerator rounds
        these to the number format in which they are sent: fewer bytes are copied to the host.
        """
        mine = [parts[name] for name in self.sections]
        bits = pack_bits([p for part in mine for p in part.present or []])
        bodies = [p.body for p in mine if p.body is not None]
        vectors = [v for p in mine for v in p.vectors]
        return (
            bits,
            bodies,
            [
                v if v.device.type == "cpu" else v.to(EXACT.get(code, v.dtype))
                for v, (_, code) in zip(vectors, self.vectors, strict=True)
            ],
        )

    def blank(self, bodies: Sequence[Tensor]) -> bool:
        """Whether the sections, as `pack` gives them, hold nothing but zeros."""
        sections = [s for s in self.sections.values() if s.gathered]
        return all(s.blank(body) for s, body in zip(sections, bodies, strict=True))

    def weights(self, headers: Sequence[Header]) -> list[list[float]]:
        """Each replica's share in the mean of each of `vectors`. Raises as `replica_weights`."""
        return [replica_weights(channel, headers) for channel, _, _ in self._reduced]

    def legs(self, size: int) -> tuple[list[int], list[int]]:
        """Bytes, with headers, that each of `size` ranks is sent in a reduce, and that it sends."""
        there, back = (
            [HEADER.size + dense.total_bytes(part) for part in leg]
            for leg in legs(self.vectors, size)
        )
        return there, back

    # ---- what comes back -----------------------------------------------------------------------

    def split(self, name: str, arrived: ReceivedMessage) -> Received:
        """The part of an answer for one channel. Raises as `replica_weights`."""
        i, section = list(self.sections).index(name), self.sections[name]
        bodies = [body[self._bytes[i]] for body in arrived.bodies] if section.gathered else []
        weights = replica_weights(section.channel, arrived.headers)
        return Received(
            bodies,
            arrived.means[self._vectors[i]],
            weights,
            self._present(i, section.channel, arrived.bodies),
        )

    def _present(self, i: int, channel: Channel, bodies: Sequence[Tensor]) -> list[bool] | None:
        """The union over the replicas of the bits of channel number `i`."""
        if not channel.before_step:
            return None
        sets = [
            unpack_bits(body[: self._presence_bytes], self._bits[-1].stop)[self._bits[i]]
            for body in bodies
        ]
        return [any(bits) for bits in zip(*sets, strict=True)]


def _spans(lengths: Sequence[int], start: int = 0) -> list[slice]:
    """Stretches of these lengths, one after the other."""
    ends = list(accumulate(lengths, initial=start))
    return [slice(a, b) for a, b in zip(ends, ends[1:], strict=False)]


def replica_weights(channel: Channel, headers: Sequence[Header]) -> list[float]:
    """The share of each replica in a channel's mean: 1, or the weight in its header where islands
    are weighed by tokens, and for the early part of a replica that has left. It is 0 for the plain
    gradient of a skipped step, for values that are not finite, for a norm that is far from the
    others', for a late replica, and for a newcomer's part of a round, unless all are newcomers.

    Raises:
        RuntimeError: weights are tokens and no island has counted any.
    """
    tokens = channel.reducer.weight == "tokens"
    if tokens and not any(h.weight for h in headers if not h.late):
        # an exchange right after another one, at the end: nobody has seen a token since
        if any(h.flags & COUNTED for h in headers):
            return [float(not h.late) for h in headers]
        raise RuntimeError(
            f"channel {channel.name!r} weighs islands by tokens, but none called "
            "report(tokens=...) since the last one"
        )
    # with an accumulator what was not finite has not come into it
    plain = channel.before_step and channel.accumulator is None
    out = FAR | NOT_FINITE * (plain or not channel.before_step) | SKIPPED * plain
    alone = all(h.weight < 0 for h in headers if not h.late)
    return [
        0.0
        if h.flags & out or h.late
        else h.weight
        if tokens or h.flags & EARLY
        else float(alone or h.weight >= 0)
        for h in headers
    ]


def pack_bits(bits: Sequence[bool]) -> Tensor:
    """uint8 [ceil(n / 8)], bit i of the little-endian number is bits[i]."""
    n = (len(bits) + 7) // 8
    number = sum(int(b) << i for i, b in enumerate(bits))
    return torch.tensor([*number.to_bytes(n, "little")], dtype=torch.uint8, device="cpu")


def unpack_bits(data: Tensor, n: int) -> list[bool]:
    """The inverse of `pack_bits`."""
    number = int.from_bytes(bytes(data.tolist()), "little")
    return [bool(number >> i & 1) for i in range(n)]


# ---- what the header says of this island --------------------------------------------------------


@dataclass(frozen=True)
class HeaderFields:
    """The fields of one header that training fills. Numbers on a device are read in the thread
    that sends.

    Attributes:
        weight, flags: as in `header.Header`.
        loss: a scalar, None where unknown.
        bad: 1 where the contribution is not finite, else 0. run: steps in a row whose gradients
            were not finite.
        norm: of the contribution of the whole island; 0 where it is not checked.
        total: int64 scalar, the 64-bit sum of tensors that must be equal; None where they are not
            compared.
        rate: the mean learning rate of the parameter groups; 0 for none.
        seconds: of an own step (`Pace.seconds`); 0 where it is not said.
    """

    weight: float = 1.0
    flags: int = 0
    loss: Tensor | None = None
    bad: float | Tensor = 0.0
    run: float | Tensor = 0.0
    total: Tensor | None = None
    norm: float | Tensor = 0.0
    rate: float | Tensor = 0.0
    seconds: float = 0.0

    def numbers(self, device: torch.device) -> list[Tensor]:
        """(loss, bad, run, norm, rate) as fp32 [5] on `device`, and the total if there is one."""
        loss = self.loss if self.loss is not None else float("nan")
        parts = [
            v if isinstance(v, Tensor) else torch.full((), v, device=device, dtype=torch.float32)
            for v in (loss, self.bad, self.run, self.norm, self.rate)
        ]
        numbers = torch.stack([p.float() for p in parts])
        return [numbers] if self.total is None else [numbers, self.total.view(1)]


class LocalStatus:
    """The tokens, losses and wishes of one rank, from `Exchange.report` and `Exchange.request_stop`
    to the next message.

    Args:
        islands: of the run. alone: an island that is told to end leaves the others, who train on.

    Attributes:
        tokens: that this rank has counted since the start of the job.
        counted: the same of what weighs; a tensor that nobody has read, where one was reported.
        settled: tokens of all islands up to the last exchange, the share of this rank, as if each
            that took part took as many as this island. islands: that took part in it.
        skipping: this replica does not take the step under way.
        reported: tokens or a weight were, since the last step (`weigh_step`).
        bad: 1 if the gradients of the step under way are not finite, else 0: a number, or a scalar
            on the device that nobody has read. run: such steps in a row.
    """

    def __init__(self, islands: int = 1, alone: bool = False) -> None:
        self._alone = alone
        self.tokens = self.settled = self._open = 0
        self.islands, self.counted = islands, 0
        self.skipping = self.reported = False
        self.bad: float | Tensor = 0.0
        self.run: float | Tensor = 0.0
        # tokens of this island up to the last exchange of each channel
        self._weighed: dict[str, float] = {}
        self._losses: list[Tensor] = []  # noted since the last message
        self._wanted = self._sent = self._together = False
        self._wanted_at = math.inf
        self._step_open = False
        # as of the end of the last step: tokens, counted, everywhere, number of losses
        self._at_step_end: tuple[int, Any, int, int] = (0, 0, 0, 0)

    def add(self, tokens: int, loss: float | Tensor | None, weight: Any) -> None:
        """Count tokens, and what weighs (None: them); keep a loss for the next header, unread."""
        self.tokens, self._open = self.tokens + tokens, self._open + tokens
        self.reported |= bool(tokens) or weight is not None
        self.counted = self.counted + (tokens if weight is None else weight)  # it may be a tensor
        if loss is not None:
            if not isinstance(loss, Tensor):
                loss = torch.tensor(loss, dtype=torch.float32, device="cpu")
            self._losses.append(loss.detach().reshape(()))

    @property
    def everywhere(self) -> int:
        """The share of this rank in the tokens of all islands, since the last exchange, too."""
        return self.settled + self._open * self.islands

    def took_part(self, islands: int) -> None:
        """Note that an exchange with so many islands has come."""
        self.islands = islands
        self.settled, self._open = self.everywhere, 0

    def request_stop(self, together: bool) -> None:
        """As `Exchange.request_stop`."""
        self._together = together and (self._together or not self._wanted)
        self._wanted, self._wanted_at = True, min(self._wanted_at, time.monotonic())

    def stopping_for(self) -> float:
        """Seconds since a stop was first asked for; 0 where none was."""
        return max(time.monotonic() - self._wanted_at, 0.0)

    def open_step(self) -> None:
        """Until the end of this step `state` leaves out what was counted since the last one."""
        self._step_open = True

    def end_step(self) -> None:
        """Note that the step under way was taken."""
        self._step_open = False
        self._at_step_end = (self.tokens, self.counted, self.everywhere, len(self._losses))

    def weigh_step(self) -> None:
        """Let the step that was taken weigh 1, where the script reports nothing that weighs."""
        if not (self.reported or self.skipping):
            self.counted = self.counted + 1
        self.reported = False

    def begin(self) -> None:
        """Begin a step: only stops requested before it are sent with its message."""
        self._sent = self._wanted

    def gradients(self, bad: float | Tensor, peers: PeerGroup | None = None) -> None:
        """Note whether the gradients of this step are not finite (`bad`, 1 or 0) on any rank of the
        island. Raises NotFinite on all of them after LIMIT such steps in a row; on a device the
        thread that sends does so.
        """
        self.bad, self.run = bad, (self.run + 1.0) * bad
        if not isinstance(self.run, Tensor):
            give_up(self.run, peers)

    def leaves(self, islands: int) -> bool:
        """Whether this island stops after this tick if no message is under way, even alone."""
        return self._sent and (not self._together or islands == 1)

    @property
    def goes(self) -> bool:
        """Whether this island leaves the others, who train on, even with a message under way."""
        return self._alone and self._sent and not self._together

    @property
    def asks_to_stop(self) -> bool:
        """Whether the messages of this step ask all islands to stop."""
        return self._sent and not self.goes

    @property
    def told(self) -> bool:
        """Whether this rank was asked to stop soon, not with the others however long that takes."""
        return self._wanted and not self._together

    def header(
        self, names: Collection[str], by_tokens: bool, island: IslandGroup, device: torch.device
    ) -> HeaderFields:
        """The header contents of a message of the channels `names`. Losses are used up; their mean
        leaves out NaN.

        Args:
            by_tokens: the weight is the island's tokens since the last exchange of these channels.
                A collective inside the island then.
        """
        stop = STOP | LEAVING * self.told if self.asks_to_stop else 0
        weight, flags = 1.0, stop | SKIPPED * self.skipping
        if by_tokens:
            weight, tokens = self.weight(names, island)
            self._weighed.update(dict.fromkeys(names, tokens))
            flags |= COUNTED * (tokens > 0)
        # to the host a copy that nobody waits for would be read too early
        there = device.type != "cpu"
        loss = (
            torch.stack([v.float().to(device, non_blocking=there) for v in self._losses]).nanmean()
            if self._losses
            else None
        )
        self._losses.clear()
        return HeaderFields(weight, flags, loss, self.bad, self.run)

    def weight(self, names: Collection[str], island: IslandGroup) -> tuple[float, float]:
        """Tokens of the island since these channels' last exchange, and in all. A collective."""
        tokens = island.sum(float(self.counted))[0]
        return tokens - min(self._weighed.get(name, 0.0) for name in names), tokens

    def clear(self) -> None:
        """Forget tokens, losses and what was not finite, not the wish to stop."""
        self.tokens = self.settled = self._open = self.counted = 0
        self._weighed = {}
        self.bad = self.run = 0.0
        self._losses.clear()
        self.end_step()

    def state(self) -> dict[str, Any]:
        """The fields of an `ExchangeState` that come from here, for `load`. Of a step that was cut
        off none is counted: a resume takes it again, with its batches, and counts them then.
        """
        if not self._step_open:
            self.end_step()
        tokens, counted, everywhere, losses = self._at_step_end
        return {
            "tokens": tokens,
            "weighed": dict(self._weighed),
            "counts": [int(counted), everywhere],
            "losses": [float(v) for v in self._losses[:losses]],
        }

    def load(self, saved: ExchangeState, device: torch.device) -> None:
        """Restore `state()`."""
        self.tokens, self._weighed, self._open = saved.tokens, dict(saved.weighed), 0
        self.counted, self.settled = saved.counts
        self._losses = [torch.tensor(v, device=device, dtype=torch.float32) for v in saved.losses]
        self.end_step()


def mean_rate(host: TrainingHost) -> float | Tensor:
    """The mean learning rate of the parameter groups; a tensor, unread, if one is on a device."""
    found = [g["lr"] for o in host.optimizers for g in o.param_groups if "lr" in g]
    read = [
        r.detach().float().reshape(())
        if isinstance(r, Tensor) and r.device.type != "cpu"
        else float(r)
        for r in found
    ]
    return sum(read) / max(len(read), 1)
