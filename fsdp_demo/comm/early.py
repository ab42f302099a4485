"""What an island that leaves sends ahead of its time (K21), on one rank: the offer, and who keeps
it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from .epochs import Member, Piece
from .held import Early
from .membership import Rank
from .signs import SOON, Signs
from .traffic import SHORT, Traffic


class EarlyPieces:
    """Both sides. All of it runs in the network thread, but for `wait`.

    Args:
        rank: the membership machine as it is now. later: does a job some seconds from now. changed:
            told when something has moved.
        over: whether nobody answers any more.
    """

    def __init__(
        self,
        traffic: Traffic,
        signs: Signs,
        rank: Callable[[], Rank],
        later: Callable[[float, Callable[[], None]], None],
        changed: threading.Condition,
        over: Callable[[], bool],
    ):
        self._traffic = traffic
        self._signs = signs
        self._rank = rank
        self._later = later
        self._changed = changed
        self._over = over
        self._going: Early | None = None
        self._offered, self._kept_by, self._nobody = set[Member](), set[Member](), False

    def begin(self, early: Early) -> None:
        """This island leaves, and offers this."""
        self._going = early
        self.offer()

    def offer(self) -> None:
        """Again in each view: what was under way in the one before has not come. A long one goes to
        one other island only, which forwards it in the change."""
        early, rank = self._going, self._rank()
        if early is None or rank.state != "running":
            return
        to = [m for m in rank.record.contributors(early.n) if m != rank.me]
        assert early.data is not None
        to = to if early.data.size <= SHORT else to[:1]
        with self._changed:
            self._offered, self._nobody = set(to), not to
            self._changed.notify_all()
        self._signs.say(
            ["early", early.n, early.kind],
            [self._signs.notes[m] for m in to if m in self._signs.notes],
        )
        for m in to:
            self._traffic.send_early(early, Piece("early", rank.me), m)

    def wait(self, seconds: float) -> bool:
        """Whether others have it within so many seconds. In the thread that trains."""
        end = time.monotonic() + seconds
        with self._changed:
            while (
                not (self._is_kept() or self._nobody or self._over())
                and (left := end - time.monotonic()) > 0
            ):
                self._changed.wait(min(left, 0.5))
            return self._is_kept()

    def _is_kept(self) -> bool:
        return bool(self._offered) and self._offered <= self._kept_by

    def hear(self, word: list[Any], member: Member) -> None:
        """A peer offers one. Raises ValueError for what cannot be."""
        n, kind, rank = int(word[1]), word[2], self._rank()
        if rank.state == "frozen":  # the sender may have adopted the next view already
            self._later(SOON, lambda: self.hear(word, member))
            return
        if kind not in ("gather", "mixed") or n > rank.landed + 2 * rank.window:
            raise ValueError(f"message {n} of kind {kind!r:.20}")
        self._traffic.expect_early(member, n, kind, Piece("early", member))

    def hear_kept(self, n: int, member: Member) -> None:
        """A peer keeps this island's."""
        with self._changed:
            if self._going is not None and n == self._going.n:
                self._kept_by.add(member)
            self._changed.notify_all()
