"""The donor's side of joining on one rank: what its training hands out to a guest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from . import spool
from .collectives import ReceivedMessage
from .guests import LEAST, Guest, Guests
from .header import WITHIN
from .held import Message
from .joining import Snapshot, Tick, packed


class Counter:
    """`joining.Desk` of one peer group: what the donor's training hands out.

    Args:
        guests: of this rank. do: runs a job in the network thread. next_message: the number of the
            next message of the peer group.

    Attributes:
        submit: runs a job in the worker's thread, after all that is under way.
    """

    def __init__(
        self,
        guests: Guests,
        do: Callable[[Callable[[], None]], None],
        next_message: Callable[[], int],
    ):
        self._guests, self._do, self._next = guests, do, next_message
        self.submit: Callable[[Callable[[], None]], Any] = lambda job: job()
        self._for: Guest | None = None

    @property
    def wanted(self) -> bool:
        """See `Desk`."""
        guest = self._guests.guest
        return guest is not None and guest.asked and self._for is not guest

    @property
    def brings(self) -> Mapping[str, str]:
        """See `Desk`."""
        guest = self._guests.guest
        return {} if guest is None else guest.brings

    @property
    def follows(self) -> bool:
        """See `Desk`."""
        return self._guests.first and self._for is not None and self._for is self._guests.guest

    def hand(self, snapshot: Snapshot, under_way: Sequence[Future[ReceivedMessage]]) -> None:
        """See `Desk`."""
        guest = self._for = self._guests.guest
        parts = snapshot.pack()

        def begin() -> None:
            messages = [packed(future.result()) for future in under_way]
            self._put(guest, "ticks", spool.Head("snapshot", next=self._next()), parts)
            for message in messages:
                self._put(guest, "messages", spool.Head("message"), message)
            if guest is not None:
                every = [p for item in (parts, *messages) for p in item]
                most = max(LEAST, sum(p.numel() for p in every)) // spool.LONGEST
                guest.limit = most + len(every) + len(messages) + 1024
                guest.following = True

        self.submit(begin)

    def tick(self, tick: Tick) -> None:
        """See `Desk`."""
        guest = self._for
        if guest is not None and self._guests.first:
            self.submit(lambda: self._put(guest, "ticks", spool.Head("tick"), [tick.pack()]))

    def launching(self, message: Message) -> None:
        """A message that is sent here now: a newcomer may begin with it, if it is of a step. In the
        worker's thread.
        """
        guest, of_step = self._for, message.header.kind in WITHIN
        if of_step and guest is not None and guest.following and guest is self._guests.guest:
            self._put(guest, "messages", spool.Head("launch", message.n), [])

    def message(self, n: int, arrived: ReceivedMessage, coded: Sequence[Tensor] = ()) -> None:
        """A message that has been delivered here; `coded`: see `packed`. In the worker's thread."""
        guest = self._for
        if guest is not None and guest.following and guest is self._guests.guest:
            self._put(guest, "messages", spool.Head("message", n), packed(arrived, coded))

    def _put(
        self, guest: Guest | None, wire: str, head: spool.Head, parts: Sequence[Tensor]
    ) -> None:
        self._do(lambda: self._guests.put(guest, wire, head, parts))
