"""The donor's side of joining on one rank: what its training hands out to a guest, and keeps for
one that comes later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from msgspec import structs
from torch import Tensor

from . import spool
from .backlog import Backlog, Item
from .collectives import ReceivedMessage
from .guests import LEAST, Guest, Guests
from .header import WITHIN
from .held import Message
from .joining import OWN, Snapshot, Tick, packed


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
        self._backlog = Backlog()

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
        return self._guests.first and (
            self._backlog.keeps or self._for is not None and self._for is self._guests.guest
        )

    def mark(self, mark: str, snapshot: Snapshot, folder: Path, limit: int) -> None:
        """See `Desk`."""
        self._backlog.mark(mark, snapshot, self._next(), folder, max(LEAST, limit))
        self.submit(self._backlog.write)

    def hold(self) -> bool:
        """See `Desk`."""
        return self._backlog.hold(self.brings.get(OWN, ""))

    def hand(self, snapshot: Snapshot, under_way: Sequence[Future[ReceivedMessage]]) -> None:
        """See `Desk`."""
        self._backlog.release()
        guest = self._for = self._guests.guest
        parts = snapshot.pack()

        def begin() -> None:
            items: list[Item] = [
                ("messages", spool.Head("message"), packed(future.result())) for future in under_way
            ]
            self._begin(guest, self._next(), parts, items)

        self.submit(begin)

    def hand_since(self) -> None:
        """See `Desk`."""
        guest = self._for = self._guests.guest

        def begin() -> None:
            try:
                self._backlog.write()
                held, items = self._backlog.since()
                self._begin(
                    guest,
                    held.next,
                    held.snapshot.pack(),
                    [item for item in items if item[0] == "messages" or self._guests.first],
                )
            except OSError as error:
                why = f"what came since its checkpoint cannot be read ({error})"
                self._do(lambda: self._guests.drop(why))
                self._backlog.close()  # with its next life it gets a snapshot
            finally:
                self._backlog.release()

        self.submit(begin)

    def _begin(
        self, guest: Guest | None, first: int, parts: Sequence[Tensor], items: Sequence[Item]
    ) -> None:
        """What the guest begins with: a snapshot, `first` the number of the message after it, and
        what follows on it.
        """
        ticks = sum(wire == "ticks" for wire, _, _ in items)
        head = spool.Head("snapshot", next=first, more=ticks > 0)
        self._put(guest, "ticks", head, parts)
        for wire, head, of in items:
            ticks -= wire == "ticks"
            more = wire == "ticks" and ticks > 0
            self._put(guest, wire, structs.replace(head, more=more), of)
        if guest is not None:
            every = [*parts, *(p for _, _, of in items for p in of)]
            most = max(LEAST, sum(p.numel() for p in every)) // spool.LONGEST
            guest.limit = most + len(every) + len(items) + 1024
            guest.following = True

    def tick(self, tick: Tick) -> None:
        """See `Desk`."""
        if not self._guests.first:
            return
        self._backlog.tick(tick)
        guest = self._for
        if guest is not None:
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
        if self._backlog.keeps:
            self._backlog.message(n, arrived, coded)
            self.submit(self._backlog.write)  # after what waits for this message has gone on

    def forget(self) -> None:
        """See `Desk`."""
        self.submit(self._backlog.close)

    def close(self) -> None:
        """Forget what is kept. Nothing is submitted any more."""
        self._backlog.close()

    def _put(
        self, guest: Guest | None, wire: str, head: spool.Head, parts: Sequence[Tensor]
    ) -> None:
        self._do(lambda: self._guests.put(guest, wire, head, parts))
