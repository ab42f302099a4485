"""The donor's side of joining on one rank: what its training hands out to a joining island."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from ..peers import bulk_stream
from ..peers.collectives import ReceivedMessage
from ..peers.header import WITHIN
from ..peers.join_messages import DonorSnapshot, Tick, packed
from .join_server import LEAST, JoiningIsland, JoinServer
from .message_state import RoundMessage


class DonorFeed:
    """`JoinFeed` of one peer group: what the donor's training hands out.

    Args:
        joining islands: of this rank. do: runs a job in the network thread. next_message: the
            number of the next message of the peer group.

    Attributes:
        submit: runs a job in the worker's thread, after all that is under way.
    """

    def __init__(
        self,
        join_server: JoinServer,
        do: Callable[[Callable[[], None]], None],
        next_message: Callable[[], int],
    ):
        self._join_server, self._do, self._next = join_server, do, next_message
        self.submit: Callable[[Callable[[], None]], Any] = lambda job: job()
        self._for: JoiningIsland | None = None

    @property
    def wanted(self) -> bool:
        """See `JoinFeed`."""
        joining_island = self._join_server.joining_island
        return (
            joining_island is not None and joining_island.asked and self._for is not joining_island
        )

    @property
    def brings(self) -> Mapping[str, str]:
        """See `JoinFeed`."""
        joining_island = self._join_server.joining_island
        return {} if joining_island is None else joining_island.brings

    @property
    def follows(self) -> bool:
        """See `JoinFeed`."""
        return (
            self._join_server.first
            and self._for is not None
            and self._for is self._join_server.joining_island
        )

    def hand(self, snapshot: DonorSnapshot, under_way: Sequence[Future[ReceivedMessage]]) -> None:
        """See `JoinFeed`."""
        joining_island = self._for = self._join_server.joining_island
        parts = snapshot.pack()

        def begin() -> None:
            messages = [packed(future.result()) for future in under_way]
            self._put(
                joining_island, "ticks", bulk_stream.ItemHead("snapshot", next=self._next()), parts
            )
            for message in messages:
                self._put(joining_island, "messages", bulk_stream.ItemHead("message"), message)
            if joining_island is not None:
                every = [p for item in (parts, *messages) for p in item]
                most = max(LEAST, sum(p.numel() for p in every)) // bulk_stream.LONGEST
                joining_island.limit = most + len(every) + len(messages) + 1024
                joining_island.following = True

        self.submit(begin)

    def tick(self, tick: Tick) -> None:
        """See `JoinFeed`."""
        joining_island = self._for
        if joining_island is not None and self._join_server.first:
            self.submit(
                lambda: self._put(
                    joining_island, "ticks", bulk_stream.ItemHead("tick"), [tick.pack()]
                )
            )

    def launching(self, message: RoundMessage) -> None:
        """A message that is sent here now: a newcomer may begin with it, if it is of a step. In the
        worker's thread.
        """
        joining_island, of_step = self._for, message.header.kind in WITHIN
        if (
            of_step
            and joining_island is not None
            and joining_island.following
            and joining_island is self._join_server.joining_island
        ):
            self._put(joining_island, "messages", bulk_stream.ItemHead("launch", message.n), [])

    def message(self, n: int, arrived: ReceivedMessage, coded: Sequence[Tensor] = ()) -> None:
        """A message that has been delivered here; `coded`: see `packed`. In the worker's thread."""
        joining_island = self._for
        if (
            joining_island is not None
            and joining_island.following
            and joining_island is self._join_server.joining_island
        ):
            self._put(
                joining_island,
                "messages",
                bulk_stream.ItemHead("message", n),
                packed(arrived, coded),
            )

    def _put(
        self,
        joining_island: JoiningIsland | None,
        wire: str,
        head: bulk_stream.ItemHead,
        parts: Sequence[Tensor],
    ) -> None:
        self._do(lambda: self._join_server.put(joining_island, wire, head, parts))
