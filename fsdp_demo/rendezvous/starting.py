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
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict, TypeVar

from ..errors import PeerLost, counted, see
from ..files import from_json, unreadable
from ..store.client import NotAllCame, Store
from .position import Replica

log = logging.getLogger("fsdp_demo")

LOOK = 0.1  # seconds between two looks
BEAT = 1.0  # seconds
BEATS = 3.5
"""How many beats an island listens for, before it takes another one for dead."""

NOTICE, AGAIN = 10.0, 60.0
"""Seconds of waiting for islands until the log names those that are missing, and between lines."""

T = TypeVar("T")


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
    roll.come()
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
    refused this one already, and left. Raises ValueError: which number, and both values.
    """
    roll = _Starters(at, place)
    for i in islands:
        if at.get(f"came/{i}"):
            roll.hear(i)


def gather(
    at: Store, place: Replica, islands: Sequence[int], name: str, form: type[T], more: str = ""
) -> dict[int, T]:
    """The notes that all these islands leave under `name` (`Store.gather`), when each of them still
    beats or they have met before; the log names those that are missing. An island that has waited
    in vain ends the attempt.

    Args:
        at: the store, below the keys of the attempt. more: a hint for the error.

    Raises:
        ValueError: a missing island has other numbers.
        PeerLost: some did not come within `timeout`, or the attempt has ended.
    """
    gone, beats, due = set[int](), _Beats(at), time.monotonic()
    deadline, notice = due + place.timeout, due + NOTICE

    def look(notes: dict[int, T], missing: list[int]) -> list[int]:
        nonlocal gone, due, notice
        missing = [i for i in islands if i in missing or i in gone]
        names, now = ", ".join(map(str, missing)), time.monotonic()
        if missing and now >= due:
            due = now + 1.0
            compare(at, place, missing)
            goes_on(at, place, f"islands {names}")
            gone = set() if at.get("begun") else beats.gone(notes.keys() - {place.island})
        if missing and now >= notice:
            notice = now + AGAIN
            what = "waiting for %s %s of run %r at %s, for %.0f s more (ISLAND_TIMEOUT)"
            noun = "island" if len(missing) == 1 else "islands"
            log.warning(what, noun, names, place.run, _where(place), max(deadline - now, 0.0))
        return missing

    wait = _wait(place, islands, more)
    try:
        return at.gather(name, islands, form, place.timeout, **wait, look=look)
    except NotAllCame:
        if place.elastic and not at.get("begun"):  # so nobody waits for one that has left
            at.compare_set("ended", "", str(place.island))
        raise


def goes_on(at: Store, place: Replica, waited_for: str) -> None:
    """Raise PeerLost where the attempt has ended: who is waited for does not come to it."""
    if by := at.get("ended"):
        raise PeerLost(
            f"{place.name} waited for {waited_for}, when island {by} left the attempt "
            f"{at.prefix.rstrip('/')}: start this island again to join the next"
        )


def decided(at: Store, count: int) -> tuple[int, ...] | None:
    """The islands that begin; None while that is open. Raises ValueError: what stands there cannot
    be read.
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
    return _named(island, at.note(f"came/{island}", f"island {island}", Came))[len(str(island)) :]


class _Beats:
    """The beats of islands in the store, and when the key of each was last seen to change."""

    def __init__(self, at: Store):
        self._at, self._moved = at, dict[int, tuple[str, float]]()

    def gone(self, islands: Iterable[int]) -> set[int]:
        """Those of these islands whose beats are known to have stopped; in a mesh none beats."""
        now, keys = time.monotonic(), {i: f"beat/{i}" for i in islands}
        for i, beats in zip(keys, self._at.get_all(list(keys.values())), strict=True):
            if i not in self._moved or self._moved[i][0] != beats:
                self._moved[i] = beats, now
        moved = ((i, *self._moved[i]) for i in keys)
        return {i for i, beats, at in moved if beats and now - at > BEATS * BEAT}


class _Starters:
    """One island's wait until it is known which islands begin."""

    def __init__(self, at: Store, place: Replica):
        self._at, self._place, self._beat_at = at, place, 0.0
        self._beats = _Beats(at)
        self.everyone = tuple(range(place.count))

    def come(self) -> None:
        """Say the name, host and numbers of this island."""
        said: Came = {
            "name": self._place.name,
            "host": socket.gethostname(),
            "count": self._place.count,
            "slots": self._place.islands,
            "least": self._place.suffice,
            "stall": self._place.stall,
        }
        self._at.set(f"came/{self._place.island}", json.dumps(said))

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
        """Compare the numbers that island i has noted with this one's; Unlike if they differ."""
        other, p = self._at.note(f"came/{i}", f"island {i}", Came), self._place
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
        p, here, heard = self._place, list[int](), {self._place.island}

        def look(notes: dict[int, Came], missing: list[int]) -> list[int]:
            nonlocal here
            if decided(self._at, p.count) or self._at.get("ended"):
                return []
            for i in notes.keys() - heard:
                self.hear(i)
                heard.add(i)
            self._beat()
            gone = self._beats.gone(notes.keys() - {p.island})
            here = [i for i in notes if i not in gone]
            return [i for i in self.everyone if i not in here]

        wait = _wait(p, self.everyone, least=f", at least ISLAND_MIN={p.suffice},")
        try:
            self._at.gather("came", self.everyone, Came, p.timeout, **wait, look=look)
        except NotAllCame:
            if len(here) < p.suffice:
                raise
        if known := decided(self._at, p.count):
            return known
        return None if self._at.get("ended") else self._decide(here)

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


def _wait(place: Replica, wanted: Sequence[int], more: str = "", least: str = "") -> dict[str, Any]:
    """The words of `Store.gather` for a wait for islands. more: a hint. least: how many suffice."""
    what = f"{counted(len(wanted), 'island')}{least} at {_where(place)}, run {place.run!r}"
    variables = "ISLAND_COUNT, ISLAND_RUN, ISLAND_ENDPOINT and ISLAND_TOKEN"
    cure = f". Check {variables} there, or raise ISLAND_TIMEOUT{more}{see('missing-islands')}"
    return {"what": what, "cure": cure, "label": _named}


def _named(island: int, said: Mapping[str, Any] | None) -> str:
    """How errors name an island that has said its name, and perhaps its host, or nothing."""
    if said is None:
        return str(island)
    host = f" on {said['host']}" if "host" in said else ""
    return f"{island} ({said.get('name')}{host})"


def _where(place: Replica) -> str:
    """Where islands meet, or the nodes of a mesh."""
    return place.endpoint or "the store of their world"


def _or_unset(number: float) -> str:
    return f"{number:g}" if number else "unset"
