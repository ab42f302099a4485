"""What an island does at this moment, read by another thread than the one that trains: for a line
of progress. No communication.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from .in_flight import InFlightQueue


@dataclass(frozen=True)
class Activity:
    """What one rank does now.

    Attributes:
        kind: "training"; "sending": it trains while a message is under way; "waiting": training
            stands still for a message; "finished".
        islands: with which the message is not done yet; empty where that is not known.
        seconds: for which training has stood still.

    Example:
        >>> from fsdp_demo.exchange.activity import Activity
        >>> Activity("sending", (1, 2)).text, Activity("waiting", (2,)).text, Activity().text
        ('sending to 1, 2', 'waiting for 2', 'training')
    """

    kind: Literal["training", "sending", "waiting", "finished"] = "training"
    islands: tuple[int, ...] = ()
    seconds: float = 0.0

    @property
    def text(self) -> str:
        """In words."""
        who = ", ".join(map(str, self.islands))
        if self.kind == "sending":
            return f"sending to {who}" if who else "sending"
        return f"waiting for {who or 'the others'}" if self.kind == "waiting" else self.kind


def activity(queue: InFlightQueue) -> Activity:
    """Of the rank whose messages these are."""
    peers, since = queue.connections.peers, queue.waits_since
    if peers is None:
        return Activity()
    if since:
        return Activity("waiting", peers.awaited, time.monotonic() - since)
    flying = any(f.future is not None and not f.future.done() for f in list(queue.flights))
    return Activity("sending", peers.awaited) if flying else Activity()
