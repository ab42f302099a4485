"""What a donor sends to an island that joins: items of several tensors, as notes on a connection of
their own.

An item is a note with a head (JSON: what it is, bytes of each part), then its parts in notes of 64
KiB. Nothing is made room for before the reader has said how long it expects a part to be. What is
not read stays with the sender, whose queue has a bound.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

import torch
from msgspec import Struct, structs
from torch import Tensor

from ..errors import PeerLost, WireError
from ..files import from_json, to_json
from .connection import PeerConnection, QueuedPiece
from .pieces import LONGEST
from .poller import Poller

AHEAD = 256
"""Notes that a reader keeps at most: 16 MiB."""


class ItemHead(Struct):
    """The head of an item.

    Attributes:
        n: of a message, its number; -1 for one that was under way at the snapshot.
        next: of a snapshot, the number of the first message behind it.
        parts: bytes of each part.
    """

    item: Literal["snapshot", "tick", "reset", "message", "launch"]
    n: int = -1
    next: int = 0
    parts: list[int] = []


def put(poller: Poller, wire: PeerConnection, head: ItemHead, parts: Sequence[Tensor]) -> None:
    """Send an item. Tensors (uint8, on the CPU) must stay as they are until they have left."""
    head = structs.replace(head, parts=[p.numel() for p in parts])
    pieces = [torch.frombuffer(bytearray(to_json(head).encode()), dtype=torch.uint8)]
    for part in parts:
        pieces += part.split(LONGEST) if part.numel() else []
    with poller.lock:
        for piece in pieces:
            wire.post_note(QueuedPiece(poller, piece))
    poller.nudge(wire)


class Reader:
    """Reads items, one after the other, in one thread.

    Args:
        who: whom the connection leads to, for errors.

    Attributes:
        taken: bytes read so far.
    """

    def __init__(self, poller: Poller, wire: PeerConnection, who: str):
        self._poller, self._wire, self._who = poller, wire, who
        wire.most = AHEAD
        self.head: ItemHead | None = None
        self._sizes: list[int] = []
        self._into: Tensor | None = None
        self._at = self.taken = 0

    def begin(self, seconds: float) -> ItemHead | None:
        """The head of the next item, or of the one that is being read; None: not within so many
        seconds. Raises PeerLost: the connection is gone. WireError: this is no head.
        """
        if self.head is None and (data := self._note(seconds)) is not None:
            self.head = from_json(data, ItemHead, f"what {self._who} sends", WireError)
            self._sizes = list(self.head.parts)
        return self.head

    @property
    def sizes(self) -> list[int]:
        """Bytes of the parts that are still to be read."""
        return list(self._sizes)

    def part(self, longest: int, seconds: float) -> Tensor | None:
        """The next part of the item, uint8; None: not all of it came within so many seconds, ask
        again. Raises WireError: it has more than `longest` bytes, or its notes do not fit.
        PeerLost: the connection is gone.
        """
        if not self._sizes:
            raise WireError(
                f"{self._who} has sent an item with fewer parts than expected: use one release "
                "everywhere"
            )
        if self._into is None:
            if not 0 <= self._sizes[0] <= longest:
                raise WireError(
                    f"{self._who} sends a part of {self._sizes[0]} bytes, expected are at most "
                    f"{longest}"
                )
            self._into, self._at = torch.empty(self._sizes[0], dtype=torch.uint8, device="cpu"), 0
        end = time.monotonic() + seconds
        while self._at < self._into.numel():
            data = self._note(max(end - time.monotonic(), 0.0))
            if data is None:
                return None
            if len(data) > self._into.numel() - self._at:
                raise WireError(f"{self._who} sends more than it has announced")
            self._into[self._at : self._at + len(data)] = torch.frombuffer(
                bytearray(data), dtype=torch.uint8
            )
            self._at += len(data)
        self._sizes.pop(0)
        done, self._into = self._into, None
        return done

    def end(self) -> None:
        """The item has been read. Raises WireError: something of it has not."""
        if self._sizes:
            raise WireError(
                f"{self._who} has sent an item with more parts than expected: use one release "
                "everywhere"
            )
        self.head = None

    def _note(self, seconds: float) -> bytes | None:
        end = time.monotonic() + seconds
        while not self._wire.notes:
            if self._wire.gone:
                raise PeerLost(f"{self._who} is gone: {self._wire.gone}")
            left = end - time.monotonic()
            if left <= 0:
                return None
            self._poller.wait_until(
                lambda: bool(self._wire.notes) or bool(self._wire.gone), min(left, 0.5)
            )
        full = len(self._wire.notes) >= AHEAD
        data = self._wire.notes.popleft()
        self.taken += len(data)
        if full:
            self._poller.tell()
        return data
