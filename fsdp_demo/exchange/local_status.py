"""What a replica says of itself in the header of its messages: tokens, loss, learning rate, a wish
to stop, and whether its contribution is finite. And what it finds out by the way: whether something
else than the optimizer writes its parameters (`Rewritten`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..elastic.peer_group import PeerGroup
from ..errors import NotFinite, see
from ..hosts.base import TrainingHost
from ..peers.digests import EVERY, total
from ..peers.header import COUNTED, LEAVING, SKIPPED, STOP
from ..rendezvous.island import IslandGroup

LIMIT = 10
"""Steps or contributions in a row that may be left out because they are not finite, or far from the
others'. A replica that has as many does not come back by itself. Where islands come and go it
ends with status 75, and joins again with the others' state; else it stops with an error, while
its last checkpoint is still whole."""


@dataclass(frozen=True)
class Said:
    """What goes into one header. Numbers that lie on a device are read in the thread that sends.

    Attributes:
        weight, flags: as in `header.Header`.
        loss: a scalar, None where unknown.
        bad: 1 where the contribution is not finite, else 0; `run`: steps in a row whose gradients
            were not.
        norm: of the contribution, of the whole island; 0 where it is not looked at.
        total: int64 scalar, the 64-bit sum of what must be equal; None where it is not compared.
        rate: the learning rate, the mean over the parameter groups; 0 where it is not said.
        rewritten: more than 0 where something else has written parameters since an exchange. It is
            not sent: only the thread that sends can read it.
    """

    weight: float = 1.0
    flags: int = 0
    loss: Tensor | None = None
    bad: float | Tensor = 0.0
    run: float | Tensor = 0.0
    total: Tensor | None = None
    norm: float | Tensor = 0.0
    rate: float | Tensor = 0.0
    rewritten: float | Tensor = 0.0

    def numbers(self, device: torch.device) -> list[Tensor]:
        """(loss, bad, run, norm, rate, rewritten) as fp32 [6] on `device`, and the total if there
        is one.
        """
        loss = self.loss if self.loss is not None else float("nan")
        parts = [
            v if isinstance(v, Tensor) else torch.full((), v, device=device, dtype=torch.float32)
            for v in (loss, self.bad, self.run, self.norm, self.rate, self.rewritten)
        ]
        return [
            torch.stack([p.float() for p in parts]),
            *([] if self.total is None else [self.total.view(1)]),
        ]


class LocalStatus:
    """What one rank says of itself, from `Exchange.report` and `Exchange.request_stop` to the next
    message.

    Args:
        alone: an island that is told to end leaves the others, who train on.

    Attributes:
        tokens: that this rank has counted since the start of the job.
        skipping: this replica does not take the step under way.
        bad: 1 if the gradients of the step under way are not finite, else 0: a number, or a scalar
            on the device that nobody has read.
        run: such steps in a row.
    """

    def __init__(self, alone: bool = False) -> None:
        self._alone = alone
        self.tokens = 0
        self.skipping = False
        self.bad: float | Tensor = 0.0
        self.run: float | Tensor = 0.0
        # tokens of this island up to the last exchange of each channel
        self._weighed: dict[str, float] = {}
        self._losses: list[Tensor] = []  # noted since the last message
        self._wanted = self._sent = self._together = False
        self._wanted_at = math.inf

    def add(self, tokens: int, loss: float | Tensor | None) -> None:
        """Count tokens; keep a loss for the next header, unread."""
        self.tokens += tokens
        if loss is not None:
            self._losses.append(
                (
                    loss.detach()
                    if isinstance(loss, Tensor)
                    else torch.tensor(loss, dtype=torch.float32, device="cpu")
                ).reshape(())
            )

    def request_stop(self, together: bool) -> None:
        """Wish to stop: with the other islands however long it takes (`together`), else as soon as
        nothing is under way.
        """
        self._together = together and (self._together or not self._wanted)
        self._wanted, self._wanted_at = True, min(self._wanted_at, time.monotonic())

    def stopping_for(self) -> float:
        """Seconds since a stop was first asked for; 0 where none was."""
        return max(time.monotonic() - self._wanted_at, 0.0)

    def begin(self) -> None:
        """A step begins: a stop requested during it is sent with the next message."""
        self._sent = self._wanted

    def gradients(self, bad: float | Tensor, peers: PeerGroup | None = None) -> None:
        """Whether this step's gradients are not finite on any rank of the island (1 or 0).

        Raises:
            NotFinite: on every rank of the island, after LIMIT such steps in a row (on a device the
                thread that sends finds out).
        """
        self.bad, self.run = bad, (self.run + 1.0) * bad
        if not isinstance(self.run, Tensor):
            give_up(self.run, peers)

    def leaves(self, islands: int) -> bool:
        """Whether this island stops, though the others may not, if nothing is under way after this
        tick.
        """
        return self._sent and (not self._together or islands == 1)

    @property
    def goes(self) -> bool:
        """Whether this island leaves the others, who train on, even if something is under way."""
        return self._alone and self._sent and not self._together

    @property
    def told(self) -> bool:
        """Whether this rank was asked to stop soon, not with the others however long that takes."""
        return self._wanted and not self._together

    def header(
        self, names: Collection[str], by_tokens: bool, island: IslandGroup, device: torch.device
    ) -> Said:
        """What the header of a message of the channels `names` says. Losses are used up; their mean
        leaves out NaN.

        With weights `by_tokens`, which are those since the channels' last exchange, a collective
        inside the island."""
        stop = 0 if self.goes else STOP * self._sent | LEAVING * (self._sent and self.told)
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
        return Said(weight, flags, loss, self.bad, self.run)

    def weight(self, names: Collection[str], island: IslandGroup) -> tuple[float, float]:
        """Tokens of the island since the last exchange of the channels `names`, and in all. A
        collective inside the island.
        """
        tokens = island.sum(self.tokens)[0]
        return tokens - min(self._weighed.get(name, 0.0) for name in names), tokens

    def clear(self) -> None:
        """Forget tokens, losses and what was not finite, not the wish to stop."""
        self.tokens, self._weighed = 0, {}
        self.bad = self.run = 0.0
        self._losses.clear()

    def state(self) -> tuple[tuple[int, dict[str, float]], list[float]]:
        """Tokens, and those up to the last exchange of each channel; losses noted since the last
        message.
        """
        return (self.tokens, dict(self._weighed)), [float(v) for v in self._losses]

    def load(
        self, tokens: int, weighed: dict[str, float], losses: Iterable[float], device: torch.device
    ) -> None:
        """Restore `state()`."""
        self.tokens, self._weighed = tokens, dict(weighed)
        self._losses = [torch.tensor(v, device=device, dtype=torch.float32) for v in losses]


class Rewritten:
    """Parameters that are written between an exchange and the step after it, by something else than
    the base optimizer: a wrapper around it with its own copy, weight clipping, code of the loop.

    The sum of their bits at the end of a step that exchanged is compared with that ahead of the
    next one, every `EVERY` steps. Nothing is read on a device.

    Args:
        host: of the parameters.
    """

    def __init__(self, host: TrainingHost):
        self._host = host
        self._exchanged, self._next = False, 0
        self._left: Tensor | None = None
        self._found: float | Tensor = 0.0

    def exchanged(self) -> None:
        """An exchange writes parameters: those noted before are no longer right."""
        self._exchanged, self._left = True, None

    def note(self, step: int) -> None:
        """Step `step` has ended. Parameters are right now, if it exchanged any."""
        if self._exchanged and step >= self._next:
            self._left, self._next = self._sum(), step + EVERY
        self._exchanged = False

    def compare(self, aside: bool) -> None:
        """Ahead of a step. aside: steps that do not count were taken meanwhile."""
        if self._left is not None and not aside:
            self._found = self._found + (self._sum() != self._left).float()
        self._left = None

    def forget(self) -> None:
        """Whoever has written parameters had the right to, or the run begins anew."""
        self._exchanged, self._left, self._next = False, None, 0

    def take(self) -> float | Tensor:
        """How many comparisons have found other parameters since the last call."""
        found, self._found = self._found, 0.0
        return found

    @torch.no_grad()
    def _sum(self) -> Tensor:
        tensors = zip(self._host.tensors("parameter"), self._host.params, strict=True)
        return total([t for t, p in tensors if t is not None and not p.frozen], self._host.device)


def mean_rate(host: TrainingHost) -> float | Tensor:
    """The mean learning rate of the parameter groups. A tensor where one lies on a device: nobody
    waits for it here.
    """
    found = [g["lr"] for o in host.optimizers for g in o.param_groups if "lr" in g]
    read = [
        r.detach().float().reshape(())
        if isinstance(r, Tensor) and r.device.type != "cpu"
        else float(r)
        for r in found
    ]
    return sum(read) / max(len(read), 1)


def give_up(
    run: float, peers: PeerGroup | None = None, what: str = "were not finite (NaN or Inf)"
) -> None:
    """End this island if `run` contributions in a row were left out, and LIMIT are allowed.

    Args:
        peers: of this rank. Where islands come and go and others train, the process ends with
            status 75 and saves nothing: it comes back with their state.

    Raises:
        NotFinite: on a peer group of fixed members, or with nobody else.
    """
    if run < LIMIT:
        return
    text = f"gradients or parameters of this island {what} {run:.0f} times in a row"
    if peers is not None and peers.elastic and peers.following is None and len(peers.alive) > 1:
        peers.expel(text)
    raise NotFinite(
        f"{text}: look at the loss, the learning rate and the data, and resume from a checkpoint. "
        "The other islands have taken nothing of "
        f"it{see('not-finite')}"
    )


VOTE_EVERY = 1.0
"""Seconds between two votes of an island, about. 0: every step votes."""

VOTE_STEPS = 100
"""Steps between two votes, at most: steps may become much slower from one to the next."""


class VotePace:
    """How often the ranks of one island ask each other whether they stop: counts the steps of one
    rank between the votes. No communication.

    Such a vote takes 0.3 ms, and every rank waits in it. So it is held at every exchange, and
    otherwise every n steps. All ranks must count the same n: it follows from what the vote itself
    has brought them, the seconds per step of the slowest rank. It comes to about one vote a second.

    Every rank of the island makes one at the same step and calls `due` at the end of each step.
    After a vote each calls `agreed` with the largest `seconds` of all. Nothing here depends on the
    number of the step, so a run that resumes elsewhere counts from its first step.

    Attributes:
        steps: between two votes, as agreed.

    Example:
        >>> pace = VotePace()
        >>> pace.due(), pace.steps  # the first step votes
        (True, 1)
        >>> pace.agreed(0.25); pace.agreed(0.25); pace.steps  # it doubles at most
        4
    """

    def __init__(self) -> None:
        self._since, self._taken = math.nan, 0
        self.steps = 1

    def due(self, now: bool = False) -> bool:
        """Count a step; whether the island votes at its end. now: it does in any case, on all
        ranks.
        """
        self._taken += 1
        return now or self._taken >= self.steps

    def seconds(self) -> float:
        """Seconds per step since the last vote, on this rank; inf where there was none yet."""
        passed = (time.monotonic() - self._since) / max(self._taken, 1)
        return math.inf if math.isnan(passed) else passed

    def agreed(self, slowest: float) -> None:
        """The vote is over: `slowest` is the largest `seconds` of all ranks."""
        wanted = int(min(VOTE_EVERY / max(slowest, 1e-9), VOTE_STEPS))
        self.steps = max(1, min(wanted, 2 * self.steps))
        self._since, self._taken = time.monotonic(), 0
