"""What one peer group has brought since the last checkpoints, on disk, for an island that comes
back with one of them.

A checkpoint has a *mark*: what it must be equal to (`exchange/returning.py`). From a mark on the
steps and the messages of the peer group are written to a file without a name, which is gone when
the process ends. The files of all marks together are bounded; what goes beyond is dropped, oldest
mark first, and an island that comes back with that checkpoint gets a snapshot.

The thread that trains notes marks and steps, the worker's notes messages. The worker's thread alone
touches the files.
"""

from __future__ import annotations

import logging
import mmap
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .collectives import ReceivedMessage
from .header import memory
from .joining import Snapshot, Tick, packed
from .spool import Head

log = logging.getLogger("fsdp_demo")

MARKS = 3
"""Checkpoints that are kept in mind. An island may have lost its newest one in the middle of a
save.
"""

INDEX = 512
"""Bytes that an item counts beside its own: its place is kept in memory."""

Item = tuple[str, Head, list[Tensor]]
"""The connection it goes on, its head, its parts (uint8)."""


@dataclass
class Segment:
    """What came between one mark and the next.

    Attributes:
        mark: of the checkpoint at its begin. number: of marks so far. snapshot: the head of one
            that leaves its tensors to the newcomer.
        next: the number of the first message. limit: bytes that all segments may have from here on.
    """

    mark: str
    number: int
    snapshot: Snapshot
    next: int
    folder: Path
    limit: int
    file: Any = None
    at: int = 0
    items: list[tuple[str, Head, list[tuple[int, int]]]] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """On disk, and of the index."""
        return self.at + INDEX * len(self.items)

    def add(self, wire: str, head: Head, parts: Sequence[Tensor]) -> None:
        """Write an item. Raises OSError."""
        places = []
        for part in parts:
            self.file.write(memory(part.contiguous()))
            places.append((self.at, part.numel()))
            self.at += part.numel()
        self.items.append((wire, head, places))

    def read(self) -> Iterator[Item]:
        """All items; parts are views of the file, which stays while they are used. Raises
        OSError.
        """
        self.file.flush()
        whole = mmap.mmap(self.file.fileno(), self.at, access=mmap.ACCESS_COPY) if self.at else None
        for wire, head, places in self.items:
            yield wire, head, [_view(whole, at, n) for at, n in places]


class Backlog:
    """The segments of one peer group.

    Attributes:
        keeps: something is kept since a mark: steps and messages are to be noted. In any thread.
    """

    def __init__(self) -> None:
        self._segments: list[Segment] = []
        self._pending: deque[Segment | Tick | tuple[int, ReceivedMessage, Sequence[Tensor]]] = (
            deque()
        )
        self._lock = threading.Lock()
        self._marked, self._gone = 0, 0
        self._held = ""

    @property
    def keeps(self) -> bool:
        """See the class."""
        return self._marked > self._gone

    # ---- noted ---------------------------------------------------------------------------------

    def mark(self, mark: str, snapshot: Snapshot, first: int, folder: Path, limit: int) -> None:
        """A checkpoint is saved. All messages below `first` have come, and no other is under
        way.
        """
        self._marked += 1
        self._pending.append(Segment(mark, self._marked, snapshot, first, folder, limit))

    def tick(self, tick: Tick) -> None:
        """A step has ended."""
        if self.keeps:
            self._pending.append(tick)

    def message(self, n: int, arrived: ReceivedMessage, coded: Sequence[Tensor] = ()) -> None:
        """A message has been delivered; `coded`: see `packed`. Its tensors must stay as they
        are.
        """
        if self.keeps:
            self._pending.append((n, arrived, coded))

    # ---- asked, in the thread that trains ------------------------------------------------------

    def hold(self, mark: str) -> bool:
        """Whether all since this mark is kept; then it is, until `release`."""
        with self._lock:
            found = bool(mark) and any(s.mark == mark for s in self._segments)
            self._held = mark if found else ""
            return found

    def release(self) -> None:
        """See `hold`."""
        self._held = ""

    # ---- in the worker's thread ----------------------------------------------------------------

    def write(self) -> None:
        """Write what was noted. A disk that cannot be written is no reason to end: what is kept is
        dropped.
        """
        while self._pending:
            noted = self._pending.popleft()
            try:
                self._write(noted)
            except OSError as error:
                log.warning(
                    "what came since the last checkpoint cannot be kept on disk (%s): islands that "
                    "come back get a snapshot",
                    error,
                )
                self._drop(len(self._segments), always=True)
        self._bound()

    def _write(self, noted: Segment | Tick | tuple[int, ReceivedMessage, Sequence[Tensor]]) -> None:
        if isinstance(noted, Segment):
            with self._lock:
                self._segments.append(noted)
            noted.file = tempfile.TemporaryFile(dir=noted.folder, prefix=".since-")
        elif self._segments and isinstance(noted, Tick):
            self._segments[-1].add("ticks", Head("tick"), [noted.pack()])
        elif self._segments and isinstance(noted, tuple):
            self._segments[-1].add(
                "messages", Head("message", noted[0]), packed(noted[1], noted[2])
            )

    def _bound(self) -> None:
        while self._segments and not self._held:
            over = sum(s.bytes for s in self._segments) > self._segments[-1].limit
            if not over and len(self._segments) <= MARKS:
                return
            if len(self._segments) == 1:
                log.info(
                    "more has come since the last checkpoint than a snapshot has: it is not kept "
                    "until the next one"
                )
            self._drop(1)

    def _drop(self, count: int, always: bool = False) -> None:
        with self._lock:
            if self._held and not always:
                return
            gone, self._segments = self._segments[:count], self._segments[count:]
        for s in gone:
            self._gone = max(self._gone, s.number)
            if s.file is not None:
                s.file.close()

    def since(self) -> tuple[Segment, list[Item]]:
        """The mark that is held, and all items since, in their order. Raises OSError."""
        begin = next((i for i, s in enumerate(self._segments) if s.mark == self._held), None)
        if begin is None:
            raise OSError("it was dropped, since the disk cannot be written")
        return self._segments[begin], [item for s in self._segments[begin:] for item in s.read()]

    def close(self) -> None:
        """Forget all."""
        self._drop(len(self._segments), always=True)


def _view(whole: mmap.mmap | None, at: int, n: int) -> Tensor:
    return (
        torch.frombuffer(whole, dtype=torch.uint8, count=n, offset=at)
        if n and whole is not None
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
