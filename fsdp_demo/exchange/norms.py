"""Which contributions are far from the others': a decision that every island makes alike, from what
headers say.

A header says how large what its sender contributes is (`Header.norm`, one number of a whole
island). A contribution is left out of a message when its norm is more than `limit` times both
medians: that of the last MESSAGES messages of the same channels, and that of this message. The
first knows what is usual where only one is there to compare with; the second lets all change
together. Both are the lower median, so somebody is always left. Norms that are too small are not
looked at: they do no harm. One that no byte can say (Inf, NaN) is left out from the first message
on, unless it is the median.

What is remembered is the same on all islands: it follows from the headers of delivered messages, in
their order. It is saved with a checkpoint, taken over by who starts beside others that resume, and
handed to a newcomer.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..comm.header import BEYOND, FAR, NOT_FINITE, Header, norm_of

MESSAGES = 16
"""Messages of which the norms are remembered."""

LEAST = 4
"""Messages before which nothing finite is left out."""

Kept = Mapping[str, Sequence[tuple[int, Sequence[int]]]]
"""By the channels of a message: its step and the norms in it that counted, oldest first."""


class Norms:
    """The norms in the last messages of one peer group.

    Args:
        limit: `ExchangeConfig.norm_limit`.
        in_flight: messages of the same channels that may be under way at once.
    """

    def __init__(self, limit: float | None, in_flight: int = 1):
        self._limit, self._room = limit, MESSAGES + in_flight
        self._kept: dict[str, list[tuple[int, list[int]]]] = {}

    def judged(self, members: Collection[str], headers: Sequence[Header]) -> list[Header]:
        """The headers of the next message of these channels, FAR set in those that are left out."""
        known = [replace(h, flags=h.flags & ~FAR) if h.flags & FAR else h for h in headers]
        before = self._kept.get(_key(members), [])[-MESSAGES:]
        now = [h.norm for h in known if _counts(h)]
        if self._limit is None or not now:
            return known
        middle, most = median(now), math.inf
        if len(before) >= LEAST:
            usual = max(median([code for _, codes in before for code in codes]), middle)
            most = self._limit * norm_of(usual)
        return [
            replace(h, flags=h.flags | FAR)
            if _counts(h) and (norm_of(h.norm) > most or h.norm == BEYOND > middle)
            else h
            for h in known
        ]

    def note(self, members: Collection[str], step: int, headers: Sequence[Header]) -> None:
        """Remember the headers of a message, as they were judged."""
        codes = [h.norm for h in headers if _counts(h) and not h.flags & FAR]
        if codes and self._limit is not None:
            # it was sent once more
            before = [entry for entry in self._kept.get(_key(members), []) if entry[0] != step]
            self._kept[_key(members)] = sorted([*before, (step, codes)])[-self._room :]

    def state(self, without: Collection[tuple[Sequence[str], int]] = ()) -> dict[str, Any]:
        """What is remembered, as JSON. without: channels and step of messages that somebody is
        still to hear of.
        """
        left = {(_key(members), step) for members, step in without}
        found = {
            key: [[step, list(codes)] for step, codes in kept if (key, step) not in left]
            for key, kept in list(self._kept.items())
        }
        return {key: entries for key, entries in found.items() if entries}

    def load(self, kept: Kept) -> None:
        """The inverse of `state`."""
        self._kept = {
            key: [(step, list(codes)) for step, codes in entries] for key, entries in kept.items()
        }


def read(tree: Any, channels: Collection[str], most: int) -> dict[str, list[tuple[int, list[int]]]]:
    """What `Norms.state` gave, from somebody else. Raises ValueError or TypeError for another form.

    Args:
        channels: that are known here. most: messages of the same channels that there may be, and
            norms in each.
    """
    found = {}
    for key, entries in dict(tree).items():
        if not set(key.split(",")) <= set(channels) or len(entries) > most:
            raise ValueError(f"norms of channels {key!r:.80}")
        found[key] = [(int(step), [int(code) for code in codes]) for step, codes in entries]
        if not all(
            0 < len(codes) <= most and all(0 < code < 256 for code in codes)
            for _, codes in found[key]
        ):
            raise ValueError(f"norms of channels {key!r:.80} of another form")
    return found


def median(values: Sequence[int]) -> int:
    """The lower median.

    >>> median([3, 1, 2]), median([1, 9])
    (2, 1)
    """
    return sorted(values)[(len(values) - 1) // 2]


def _key(members: Collection[str]) -> str:
    return ",".join(members)


def _counts(header: Header) -> bool:
    return header.norm > 0 and not header.flags & NOT_FINITE
