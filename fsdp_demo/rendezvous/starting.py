"""Who begins a run whose islands may come and go: one decision in the store, before the islands ask
each other anything else.

ISLAND_COUNT islands are expected. With ISLAND_MIN, that many suffice when one of them has waited
ISLAND_TIMEOUT seconds. The others, and islands beyond ISLAND_COUNT, wait until the run has begun,
and join it.

Keys below those of the attempt:

    came/<island>   what an island says of itself when all its ranks have come
    starters        the islands that begin, a JSON list: compare_set, the first decides
"""

from __future__ import annotations

import json
import logging
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

from ..errors import PeerLost, counted, see
from ..files import from_json, unreadable
from ..store.client import Store
from .position import Replica

log = logging.getLogger("fsdp_demo")

LOOK = 0.1  # seconds between two looks
BEAT = 1.0  # seconds
BEATS = 3.5
"""How many beats an island listens for, before it takes another one for dead."""

NOTICE, AGAIN = 10.0, 60.0
"""Seconds of waiting for islands until the log names those that are missing, and between lines."""


class Came(TypedDict):
    """The note in which an island says its name and its numbers."""

    name: str
    host: str
    count: int
    slots: int
    least: int
    stall: float


class Unlike(ValueError):
    """The error of an island that finds another number of islands at another one."""


class Called(NamedTuple):
    """The islands that begin, and whether this one joins them later."""

    starters: tuple[int, ...]
    late: bool


def call(
    at: Store, place: Replica, late: bool, lives: Callable[[Sequence[int]], bool]
) -> Called | None:
    """Wait until it is known who begins, and, on an island that does not, until they have begun.

    Args:
        at: the store, below the keys of the attempt. late: the run is under way already.
        lives: whether any of these islands lives.

    Returns:
        None: the attempt has ended meanwhile; there is a place in the next.

    Raises:
        ValueError: islands have unlike numbers.
        PeerLost: too few came within `timeout`, or the run has not begun by then.
    """
    roll = _Starters(at, place)
    if roll.of_an_earlier_start(late, lives):
        return None
    said: Came = {
        "name": place.name,
        "host": socket.gethostname(),
        "count": place.count,
        "slots": place.islands,
        "least": place.suffice,
        "stall": place.stall,
    }
    at.set(f"came/{place.island}", json.dumps(said))
    expected = place.island < place.count
    for i in roll.came():
        roll.hear(i, begins=expected and not late)
    if late:
        return Called(decided(at, place.count) or roll.everyone, True)
    if expected:
        starters = decided(at, place.count) or (roll.wait() if place.suffice else roll.everyone)
        if starters is None:
            return None
        if place.island in starters:
            return Called(starters, False)
    if not roll.wait_for_begin():
        return None
    return Called(decided(at, place.count) or roll.everyone, True)


def compare(at: Store, place: Replica, islands: Sequence[int]) -> None:
    """Refuse these islands, as far as they have come, if they have other numbers: they may have
    refused this one already, and left.

    Raises:
        ValueError: which number, and both values.
    """
    roll = _Starters(at, place)
    for i in islands:
        if at.get(f"came/{i}"):
            roll.hear(i)


def wait_for(
    at: Store, place: Replica, islands: Sequence[int], heard: Callable[[int], str], more: str = ""
) -> None:
    """Wait until all these islands have left a note and still beat, if they have not met before;
    the log names those that are missing. An island that has waited in vain ends the attempt.

    Args:
        at: the store, below the keys of the attempt.
        heard: how an error names an island; empty as long as its note is not there.
        more: a hint for the error.

    Raises:
        ValueError: a missing island has other numbers.
        PeerLost: some did not come within `timeout`, or the attempt has ended.
    """
    came, gone, beats = dict[int, str](), set[int](), _Beats(at)
    look = time.monotonic()
    deadline, notice = look + place.timeout, look + NOTICE
    while True:
        came |= {i: heard(i) for i in islands if not came.get(i)}
        missing = [i for i in islands if not came[i] or i in gone]
        names = ", ".join(map(str, missing))
        now = time.monotonic()
        if not missing:
            return
        if now > deadline:
            if place.elastic and not at.get("begun"):  # so nobody waits for one that has left
                at.compare_set("ended", "", str(place.island))
            here = {i: came[i] for i in islands if i not in missing}
            raise waited(place, islands, here, more=more)
        if now >= look:
            look = now + 1.0
            compare(at, place, missing)
            goes_on(at, place, f"islands {names}")
            others = [i for i in islands if came[i] and i != place.island]
            gone = {i for i in others if not beats.lives(i, now)} if not at.get("begun") else set()
        if now >= notice:
            notice = now + AGAIN
            log.warning(
                "waiting for %s %s of run %r at %s, for %.0f s more (ISLAND_TIMEOUT)",
                "island" if len(missing) == 1 else "islands",
                names,
                place.run,
                _where(place),
                deadline - now,
            )
        time.sleep(0.02)


def goes_on(at: Store, place: Replica, waited_for: str) -> None:
    """Raise PeerLost where the attempt has ended: who is waited for does not come to it."""
    if by := at.get("ended"):
        raise PeerLost(
            f"{place.name} waited for {waited_for}, when island {by} left the attempt "
            f"{at.prefix.rstrip('/')}: start this island again to join the next"
        )


def decided(at: Store, count: int) -> tuple[int, ...] | None:
    """The islands that begin; None while that is open.

    Raises:
        ValueError: what stands there cannot be read.
    """
    text = at.get("starters")
    return _read(text, count) if text else None


def _read(text: str, count: int) -> tuple[int, ...]:
    what = "the list of the islands that begin, in the store,"
    found = from_json(text, tuple[int, ...], what)
    if not found or sorted(set(found)) != list(found) or not 0 <= found[0] <= found[-1] < count:
        raise unreadable(text, what, f"not islands below {count} in their order")
    return found


def beat(at: Store, island: int) -> None:
    """Show that this island lives, by another value of its key each time."""
    at.set(f"beat/{island}", secrets.token_hex(8))


def where(at: Store, island: int) -> str:
    """` (NAME on HOST)` as an island has said of itself; empty where it has said nothing yet."""
    if not at.get(f"came/{island}"):
        return ""
    said = at.note(f"came/{island}", f"island {island}", Came)
    return f" ({said['name']} on {said['host']})"


class _Beats:
    """The beats of islands, and when each was last seen to move."""

    def __init__(self, at: Store):
        self._at, self._moved = at, dict[int, tuple[str, float]]()

    def lives(self, i: int, now: float) -> bool:
        """Whether an island beats, as far as it is known by now. In a mesh none does."""
        beats = self._at.get(f"beat/{i}")
        if i not in self._moved or self._moved[i][0] != beats:
            self._moved[i] = beats, now
        return not beats or now - self._moved[i][1] <= BEATS * BEAT


class _Starters:
    """One island's wait until it is known which islands begin."""

    def __init__(self, at: Store, place: Replica):
        self._at, self._place, self._beat_at = at, place, 0.0
        self._names: dict[int, str] = {}
        self._beats = _Beats(at)
        self.everyone = tuple(range(place.count))

    def came(self) -> list[int]:
        """The other islands that have said something of themselves, whether they live or not."""
        others = (i for i in range(self._place.islands) if i != self._place.island)
        return [i for i in others if self._at.get(f"came/{i}")]

    def of_an_earlier_start(self, late: bool, lives: Callable[[Sequence[int]], bool]) -> bool:
        """Whether the islands that have come have other numbers, and are gone. A start with those
        numbers is over then, and this island belongs to the next attempt. Asked before this island
        says anything of itself: an island that lives would refuse it, and be gone, too.
        """
        came = self.came()
        try:
            for i in came:
                self.hear(i, begins=self._place.island < self._place.count and not late)
        except Unlike as error:
            if lives(came):
                return False  # they hear of each other, and all are refused
            log.info(
                "%s; but none of the islands that came before lives: that attempt has ended", error
            )
            self._at.compare_set("ended", "", str(self._place.island))
            return True
        return False

    def hear(self, i: int, begins: bool = True) -> None:
        """What island i says of itself, compared with this one."""
        other, p = self._at.note(f"came/{i}", f"island {i}", Came), self._place
        self._names[i] = f"{i} ({other['name']} on {other['host']})"
        numbers: list[tuple[str, Any, Any]] = [
            ("ISLAND_COUNT", other["count"], p.count),
            ("ISLAND_SLOTS", other["slots"], p.islands),
            ("ISLAND_STALL", _or_unset(other["stall"]), _or_unset(p.stall)),
        ]
        if begins and i < p.count:
            numbers.append(("ISLAND_MIN", _or_unset(other["least"]), _or_unset(p.suffice)))
        for variable, theirs, mine in numbers:
            if theirs != mine:
                both = f"{variable}={theirs}, {p.name} has {mine}"
                raise Unlike(f"island {i} ({other['name']}) has {both}: set one number everywhere")

    def wait(self) -> tuple[int, ...] | None:
        """The islands that begin; None where the attempt has ended."""
        p, end = self._place, time.monotonic() + self._place.timeout
        while True:
            if (known := decided(self._at, p.count)) is not None:
                return known
            if self._at.get("ended"):
                return None
            here, over = self._here(), time.monotonic() > end
            if len(here) == p.count or (over and len(here) >= p.suffice):
                return self._decide(here)
            if over:
                own = f"{p.island} ({p.name} on {socket.gethostname()})"
                came = {i: self._names.get(i, own) for i in here}
                raise waited(p, self.everyone, came, f", at least ISLAND_MIN={p.suffice},")
            self._beat()
            time.sleep(LOOK)

    def wait_for_begin(self) -> bool:
        """Until the others have met; False where the attempt has ended before."""
        p, end = self._place, time.monotonic() + self._place.timeout
        log.info("%s waits for run %r to begin, and joins it then", p.name, p.run)
        while not self._at.get("begun"):
            if self._at.get("ended"):
                return False
            if time.monotonic() > end:
                raise PeerLost(
                    f"{p.name} waited {p.timeout:g} s for run {p.run!r} at {p.endpoint} to begin, "
                    "which it would join: start the islands "
                    f"0 to {p.count - 1}, or raise ISLAND_TIMEOUT"
                )
            self._beat()
            time.sleep(LOOK)
        return True

    def _here(self) -> list[int]:
        """The islands that have come and live."""
        now, me = time.monotonic(), self._place.island
        for i in self.everyone:
            if i != me and i not in self._names and self._at.get(f"came/{i}"):
                self.hear(i)
        others = [i for i in self._names if i in self.everyone and self._beats.lives(i, now)]
        return sorted([me, *others])

    def _decide(self, here: list[int]) -> tuple[int, ...]:
        starters = _read(self._at.compare_set("starters", "", json.dumps(here)), self._place.count)
        if missing := [str(i) for i in self.everyone if i not in starters]:
            log.warning(
                "run %r begins with islands %s of %d: ISLAND_MIN=%d suffices after ISLAND_TIMEOUT; "
                "missing %s, which may join later",
                self._place.run,
                ", ".join(map(str, starters)),
                self._place.count,
                self._place.suffice,
                ", ".join(missing),
            )
        return starters

    def _beat(self) -> None:
        if (now := time.monotonic()) - self._beat_at >= BEAT:
            self._beat_at = now
            beat(self._at, self._place.island)


def waited(
    place: Replica, wanted: Sequence[int], came: Mapping[int, str], least: str = "", more: str = ""
) -> PeerLost:
    """The error where not all the wanted islands have come in time.

    Args:
        came: who has come, by island. least: how many suffice; more: a hint.
    """
    missing = ", ".join(str(i) for i in wanted if i not in came)
    return PeerLost(
        f"waited {place.timeout:g} s for {counted(len(wanted), 'island')}{least} at "
        f"{_where(place)}, run {place.run!r}: came {', '.join(came.values()) or 'nobody'}; "
        f"missing {missing}. Check ISLAND_COUNT, ISLAND_RUN, ISLAND_ENDPOINT and ISLAND_TOKEN "
        f"there, or raise ISLAND_TIMEOUT{more}{see('missing-islands')}"
    )


def _where(place: Replica) -> str:
    """Where islands meet, or the nodes of a mesh."""
    return place.endpoint or "the store of their world"


def _or_unset(number: float) -> str:
    return f"{number:g}" if number else "unset"
