"""Words between the ranks of one replica, over CPU tensors: votes, what the first one found, work that succeeds on all or on none."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from ..errors import NeedsDecision, NotFinite, PeerLost, Superseded
from .files import as_disk_error

T = TypeVar("T")


class Ranks:
    """All methods are called by all ranks of the replica together. Each is a barrier, too.

    Args:
        group: their process group for CPU tensors; None: a single rank.
        rank, world: this one, and how many there are.
    """

    def __init__(self, group: Any, rank: int, world: int):
        self.group, self.rank, self.world = group, rank, world

    def largest(self, number: float) -> float:
        """Of all ranks."""
        if self.group is None:
            return number
        vote = torch.tensor([float(number)], dtype=torch.float64)
        dist.all_reduce(vote, dist.ReduceOp.MAX, group=self.group)
        return vote.item()

    def any(self, flag: bool) -> bool:
        """Whether any rank says so."""
        return bool(self.largest(float(flag)))

    def same(self, number: int) -> bool:
        """Whether all ranks say the same, less than 2^53."""
        return self.largest(number) == -self.largest(-number)

    def together(self, work: Callable[[], T], what: str) -> T:
        """What `work` gives on each rank; an error of one is raised on all, of its kind: `settle`."""
        result, error = None, None
        try:
            result = work()
        except Exception as e:  # the other ranks wait for this one's vote
            error = e
        self.settle(error, what)
        return cast(T, result)

    def settle(self, error: Exception | None, what: str) -> None:
        """Vote on what happened. The worst is raised on all ranks: a lost peer before other errors, these before a disk that is full or
        values that are not finite.

        Raises:
            PeerLost, OSError, NotFinite, RuntimeError: or this rank's own error, where it is one of the worst.
        """
        error = error and as_disk_error(error)
        mine = 0 if error is None else next((i for kind, i in _ORDER if isinstance(error, kind)), _OTHER)
        worst = int(self.largest(mine))
        if not worst:
            return
        if error is not None and mine == worst:
            raise error
        raise _KINDS[worst](f"{what}: another rank {_WHY[worst]}") from error

    def from_first(self, ask: Callable[[], Any]) -> Any:
        """What `ask` gives on rank 0 (JSON), on all ranks; an error there is raised on all."""
        if self.group is None:
            return ask()
        value: list[Any] = [None, "", ""]
        if self.rank == 0:
            try:
                value[0] = ask()
            except (ValueError, RuntimeError, OSError) as error:  # PeerLost and torch's DistStoreError are RuntimeErrors
                value = [None, type(error).__name__, str(error)]
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        size = torch.tensor([data.numel()])
        dist.broadcast(size, group_src=0, group=self.group)
        data = data if self.rank == 0 else torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, group_src=0, group=self.group)
        got, kind, text = json.loads(bytes(data.tolist()))
        if kind:
            raise {e.__name__: e for e in (PeerLost, ValueError, NeedsDecision, Superseded)}.get(kind, RuntimeError)(text)
        return got


_OTHER = 3
_ORDER: tuple[tuple[type[Exception], int], ...] = ((PeerLost, 4), (NotFinite, 1), (OSError, 2))
_KINDS: dict[int, type[Exception]] = {1: NotFinite, 2: OSError, 3: RuntimeError, 4: PeerLost}
_WHY = {1: "found values that are not finite", 2: "could not write", 3: "failed", 4: "lost its peer"}
