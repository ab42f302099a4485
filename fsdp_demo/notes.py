"""What a replica says of itself in the header of its messages: the tokens it has seen, its loss, and its wish to stop."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .codecs.wire import STOP
from .island import Island
from .mailbox import COUNTED, SKIPPED


class Stopped(RuntimeError):
    """An island asked to stop (`request_stop`, SIGTERM); all ranks of this island stand after the same step.

    Example:
        >>> from fsdp_demo import Stopped
        >>> issubclass(Stopped, RuntimeError)
        True
    """


class Notes:
    """The notes of one rank, from `Exchange.note` and `Exchange.request_stop` to the next message.

    Attributes:
        tokens: that this rank has counted since the start of the job.
        skipping: this replica does not take the step under way.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.skipping = False
        self._weighed: dict[str, float] = {}  # tokens of this island up to the last exchange of each channel
        self._losses: list[Tensor] = []  # noted since the last message
        self._wanted = self._sent = self._together = False

    def add(self, tokens: int, loss: float | Tensor | None) -> None:
        """Count tokens; keep a loss for the next header, unread."""
        self.tokens += tokens
        if loss is not None:
            self._losses.append((loss.detach() if isinstance(loss, Tensor) else torch.tensor(loss)).reshape(()))

    def request_stop(self, together: bool) -> None:
        """Wish to stop: with the other islands however long it takes (`together`), else as soon as nothing is under way."""
        self._together = together and (self._together or not self._wanted)
        self._wanted = True

    def begin(self) -> None:
        """A tick begins: a wish that comes during it travels in the next one."""
        self._sent = self._wanted

    def leaves(self, islands: int) -> bool:
        """Whether this island stops, though the others may not, if nothing is under way after this tick."""
        return self._sent and (not self._together or islands == 1)

    def header(self, names: Collection[str], by_tokens: bool, island: Island, device: torch.device) -> tuple[float, Tensor | None, int]:
        """Weight, loss (a scalar on `device`) and flags of a message of the channels `names`. Losses are used up; their mean leaves out
        NaN. With weights `by_tokens`, which are those since the channels' last exchange, a collective inside the island."""
        weight, flags = 1.0, STOP * self._sent | SKIPPED * self.skipping
        if by_tokens:
            tokens = island.total(self.tokens)[0]
            weight = tokens - min(self._weighed.get(name, 0.0) for name in names)
            self._weighed.update(dict.fromkeys(names, tokens))
            flags |= COUNTED * (tokens > 0)
        there = device.type != "cpu"  # to the host a copy that nobody waits for would be read too early
        loss = torch.stack([v.float().to(device, non_blocking=there) for v in self._losses]).nanmean() if self._losses else None
        self._losses.clear()
        return weight, loss, flags

    def clear(self) -> None:
        """Forget tokens and losses, not the wish to stop."""
        self.tokens, self._weighed = 0, {}
        self._losses.clear()

    def state(self) -> tuple[list[Any], list[float]]:
        """Tokens, and those up to the last exchange of each channel; losses noted since the last message."""
        return [self.tokens, dict(self._weighed)], [float(v) for v in self._losses]

    def load(self, tokens: Sequence[Any], losses: Iterable[float], device: torch.device) -> None:
        """Restore `state()`."""
        self.tokens, self._weighed = tokens[0], dict(tokens[1])
        self._losses = [torch.tensor(v, device=device) for v in losses]
