"""Votes between the ranks of one replica (or of a whole world): sums, values of the first rank, and
work that succeeds on all ranks or on none. Tensors and JSON, never pickle: no received byte is
executed.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from ..errors import (
    Mismatch,
    NeedsDecision,
    NotFinite,
    NotSaveable,
    PeerLost,
    StoreSilent,
    Superseded,
    WireError,
    as_disk_error,
)

T = TypeVar("T")
CPU = torch.device("cpu")


class Ranks:
    """Votes among the ranks of a process group. All ranks call each method together, in one order;
    each is a barrier, too.

    Args:
        group: their process group; None: a single rank.
        rank, world: this one, and how many there are.
        device: where tensors of the group's backend lie, if it does not reach the CPU.
    """

    def __init__(self, group: Any, rank: int, world: int, device: torch.device = CPU):
        self.group, self.rank, self.world = group if world > 1 else None, rank, world
        self._place = device if self.group is not None and not _reaches_cpu(self.group) else CPU

    @classmethod
    def everywhere(cls, device: torch.device = CPU) -> Ranks:
        """All ranks of torch's default process group; a single one where there is none."""
        if not dist.is_available() or not dist.is_initialized():
            return cls(None, 0, 1)
        return cls(dist.group.WORLD, dist.get_rank(), dist.get_world_size(), device)

    # ---- numbers -------------------------------------------------------------------------------

    def max(self, *values: float) -> list[float]:
        """Element-wise maximum over the ranks. Exact to 2^53, on devices without fp64 to 2^24."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def sum(self, *values: float) -> list[float]:
        """Element-wise sum over the ranks."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def _reduce(self, values: tuple[float, ...], op: Any) -> list[float]:
        if self.group is None:
            return list(values)
        wide = self._place.type in ("cpu", "cuda")
        t = torch.tensor(values, dtype=torch.float64 if wide else torch.float32, device=self._place)
        dist.all_reduce(t, op=op, group=self.group)
        return list(t.tolist())

    def any(self, flag: bool) -> bool:
        """Whether the argument is true on any rank."""
        return bool(self.max(float(flag))[0])

    def same(self, number: int) -> bool:
        """Whether all ranks bring the same whole number, below 2^53."""
        most, least = self.max(number, -number)
        return most == -least

    # ---- values --------------------------------------------------------------------------------

    def everyone(self, value: Any) -> list[Any]:
        """The JSON value of each rank, in the order of the ranks."""
        if self.group is None:
            return [value]
        mine = json.dumps(value).encode()
        size = torch.tensor([len(mine)], dtype=torch.int64, device=self._place)
        sizes = [torch.empty_like(size) for _ in range(self.world)]
        dist.all_gather(sizes, size, group=self.group)
        padded = list(mine.ljust(max(map(int, sizes))))
        text = torch.tensor(padded, dtype=torch.uint8, device=self._place)
        parts = [torch.empty_like(text) for _ in sizes]
        dist.all_gather(parts, text, group=self.group)
        texts = [bytes(part.tolist())[: int(n)] for part, n in zip(parts, sizes, strict=True)]
        return [json.loads(theirs) for theirs in texts]

    def from_first(self, ask: Callable[[], Any]) -> Any:
        """What `ask` gives (JSON) on rank 0, on all ranks; an error there is raised on all, of its
        kind (`TOLD`) or as a RuntimeError.
        """
        if self.group is None:
            return ask()
        failure, answer = None, ""
        if self.rank == 0:
            try:
                answer = json.dumps([ask(), "", ""])
            except Exception as error:  # the other ranks wait for this one's word
                failure = error
                kind = next((e.__name__ for e in TOLD if isinstance(error, e)), "RuntimeError")
                answer = json.dumps([None, kind, str(error)])
        got, kind, text = json.loads(self.everyone(answer)[0])
        if failure is not None:
            raise failure
        if kind:
            raise _BY_NAME.get(kind, RuntimeError)(text)
        return got

    # ---- work ----------------------------------------------------------------------------------

    def together(self, work: Callable[[], T], what: str) -> T:
        """What `work` gives on each rank; an error of one is raised on all, as `settle` says."""
        result, error = None, None
        try:
            result = work()
        except Exception as e:  # the other ranks wait for this one's vote
            error = e
        self.settle(error, what)
        return cast(T, result)

    def settle(self, error: Exception | None, what: str) -> None:
        """Vote on what happened. The worst is raised on all ranks: a lost peer before other errors,
        these before a disk that is full and values that are not finite or cannot be saved.

        Raises:
            PeerLost, OSError, NotFinite, NotSaveable, RuntimeError: or this rank's own error, where
                it is one of the worst.
        """
        error = error and as_disk_error(error)
        mine = 0
        if error is not None:
            kinds = (i for i, (kind, _) in _WORSE.items() if isinstance(error, kind))
            mine = next(kinds, _OTHER)
        worst = int(self.max(mine)[0])
        if not worst:
            return
        if error is not None and mine == worst:
            raise error
        kind, why = _WORSE.get(worst, (RuntimeError, "failed"))
        raise kind(f"{what}: another rank {why}") from error


def _reaches_cpu(group: Any) -> bool:
    """Whether a group's backend takes CPU tensors ("cpu:gloo,cuda:nccl")."""
    return "cpu:" in dist.get_backend_config(group)


TOLD: tuple[type[Exception], ...] = (
    StoreSilent,
    PeerLost,
    Mismatch,
    WireError,
    NotFinite,
    Superseded,
    NeedsDecision,
    ValueError,
    OSError,
)
"""Errors that keep their kind when the first rank tells them, those that are kinds of others
first.
"""

_BY_NAME = {e.__name__: e for e in TOLD}
_OTHER = 4
_WORSE: dict[int, tuple[type[Exception], str]] = {
    5: (PeerLost, "lost its peer"),
    1: (NotFinite, "found values that are not finite"),
    2: (NotSaveable, "found a value that cannot be saved"),
    3: (OSError, "could not write"),
}
"""What a rank votes for an error (`_OTHER` for any other), the largest being the worst."""


VOTE_EVERY = 1.0
"""Seconds between two votes of an island, about. 0: every step votes."""

VOTE_STEPS = 100
"""Steps between two votes, at most: steps may become much slower from one to the next."""


class VotePace:
    """The steps of one rank between two votes of its island whether to stop. No communication.

    A vote takes 0.3 ms, and every rank waits in it, so it is held at every exchange and otherwise
    every n steps, about once a second. All ranks must count the same n: each makes a pace at the
    same step, calls `due` at the end of each step, and after a vote `agreed` with the largest
    `seconds` of all. The number of the step has no part in it, so a resumed run counts anew.

    Attributes:
        steps: between two votes, as agreed.

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
        """Count a step; whether the island votes at its end. now: it does, on all ranks."""
        self._taken += 1
        return now or self._taken >= self.steps

    def seconds(self) -> float:
        """Seconds per step since the last vote, on this rank; inf where there was none yet."""
        passed = (time.monotonic() - self._since) / max(self._taken, 1)
        return math.inf if math.isnan(passed) else passed

    def agreed(self, slowest: float) -> None:
        """Set the pace after a vote: `slowest` is the largest `seconds` of all ranks."""
        wanted = int(min(VOTE_EVERY / max(slowest, 1e-9), VOTE_STEPS))
        self.steps = max(1, min(wanted, 2 * self.steps))
        self._since, self._taken = time.monotonic(), 0
