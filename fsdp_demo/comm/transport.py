"""What a `PeerGroup` needs of a transport between islands, and the choice among them
(ISLAND_TRANSPORT).

A transport is one module with a class that has `open(k)`: connections k = 0, 1, ... from this rank
to all others of its peer group. What it returns moves pieces of messages between two ranks, in the
order in which they were handed over under one number. `PeerGroup.swap` cuts messages into pieces,
deals them to the connections, and writes and checks their headers; none of this is a transport's
matter.

`torch.distributed.ProcessGroupGloo` has this form by itself, so that a group that a user made
serves as well (`Topology.from_group`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from typing import Any, Protocol

from torch import Tensor

from .environment import TRANSPORTS
from .store_client import Asker


class Moving(Protocol):
    """One piece under way."""

    def wait(self, timeout: timedelta) -> Any:
        """Until it is there, or may be written over here.

        Raises:
            WireError: what came is refused. RuntimeError: the peer is gone, was silent for
                `timeout`, or the wait was cancelled.
        """
        ...

    def is_completed(self) -> bool:
        """Whether `wait` would return or raise at once."""
        ...


class Pieces(Protocol):
    """Connections to the other ranks of a peer group. No call waits."""

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Moving:
        """Send tensors[0] (uint8, on the CPU, contiguous, at most `frames.LARGEST` bytes) to `rank`
        as the next piece of message `tag`. It must stay as it is until `wait` has returned."""
        ...

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Moving:
        """Receive the next piece of message `tag` from `rank` into tensors[0]; it may be shorter,
        not longer.
        """
        ...


class Transport(ABC):
    """`Pieces` that can be cancelled and closed.

    One peer that dies, or whose pieces are refused, leaves the connections to the others as they
    are. Pieces of a short message overtake those of a long one that wait to be sent on the same
    connection.
    """

    @abstractmethod
    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Moving:
        """See `Pieces`."""

    @abstractmethod
    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Moving:
        """See `Pieces`."""

    @abstractmethod
    def cancel(self, reason: str) -> None:
        """End all waits at once with RuntimeError(reason), from any thread. Messages up to the
        highest number so far are over: what comes of them later is dropped. Later numbers may
        follow on the same connections. Leave the tensors of a cancelled send as they are: a
        piece that has been handed over may still go out."""

    @abstractmethod
    def close(self) -> None:
        """Let what was sent leave, and close the connections; waits end."""


@dataclass(frozen=True)
class Meeting:
    """How a rank finds the others of its peer group.

    Attributes:
        store: where addresses are told, with a deadline for each question; `prefix` stands before
            the keys of this peer group.
        rank, size: this one, and how many there are. names: how errors call them.
        address: where the others reach this rank; "" if nobody can: then the others must be
            reachable.
        timeout: seconds to wait for the others, and of silence after which one counts as lost.
        token: the run's secret, "" for none. epoch: which membership these connections serve; what
            comes from another is refused.
        among: the ranks that meet, where they are not all of them.
    """

    store: Asker
    prefix: str
    rank: int
    size: int
    names: tuple[str, ...]
    address: str
    timeout: float
    token: str = ""
    epoch: int = 0
    among: tuple[int, ...] | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that meet."""
        return tuple(range(self.size)) if self.among is None else self.among

    @property
    def others(self) -> list[int]:
        """Those that meet, but for this one."""
        return [j for j in self.ranks if j != self.rank]

    def label(self, j: int) -> str:
        """How errors name the island of rank j."""
        return f"island {j} ({self.names[j]})"


class Opener(Protocol):
    """A transport that can connect."""

    def open(self, k: int) -> Any:
        """Connections k = 0, 1, ... to the others, who all call it, too.

        Raises:
            ValueError: the islands do not fit together. PeerLost: somebody did not come in time.
        """
        ...


def opener(name: str, meeting: Meeting) -> Opener:
    """The transport of that name for a peer group.

    Raises:
        ValueError: a library is missing; says what to install.
    """
    made: Opener = getattr(import_module(f".{name}", __package__), TRANSPORTS[name])(meeting)
    return made
