"""From which state each island goes on: a pure function of what all of them hold, so that all come
to the same answer.

Islands go on together from states between the same exchanges: equal steps, or unlike steps at which
the same messages were applied last (`applied` in the heads of the exchange's parts). What replicas
share, anchors and outer momenta, is equal there, and between two exchanges each island's path is
its own. Whose contributions those messages had must be equal, too (`history` in the heads): an
island that is lost may have had them from other islands than those that went on without it. One
that has lost the answer to a message holds that message, and sends it once more. Of states of
another number of islands only equal steps count. What does not say its history fits any.

Where islands may leave one by one, those that were away when the newest state was saved do not hold
the others back: they take over from them (`present`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from ..errors import NeedsDecision, see
from .files import read_head


@dataclass(frozen=True, order=True)
class HeldCheckpoint:
    """A state that a replica can go on from.

    Attributes:
        step: optimizer steps done.
        applied: between which exchanges it lies, as JSON.
        owner: the island that saved it.
        history: digest of whose contributions it has.
        participants: numbers of the islands that took part in the last exchange before it, have
            applied it, and were there when this was saved, as JSON.

    What is not known is "", and -1 for `owner`; so are `applied`, `owner` and `history` of a state
    of another number of islands.
    """

    step: int
    applied: str = ""
    owner: int = -1
    history: str = ""
    participants: str = ""

    def note(self) -> list[Any]:
        """The fields as a JSON list; `HeldCheckpoint(*note)` is the inverse."""
        return list(astuple(self))

    def fits(self, applied: str, history: str = "") -> bool:
        """Whether it may lie between the same exchanges as a state that says these two."""
        pairs = (self.applied, applied), (self.history, history)
        return all(not one or not two or one == two for one, two in pairs)


Held = Sequence[Sequence[HeldCheckpoint]]
"""The states that each island holds, in order of the islands."""


def look(exchange: Path, step: int, islands: int) -> HeldCheckpoint:
    """`held_by` of the exchange's parts in a folder; the step alone where there is no part. Raises
    ValueError: a part is torn, or ranks stand between unlike exchanges.
    """
    try:
        heads = [read_head(path)[0] for path in sorted(exchange.glob("rank*.json"))]
    except OSError as error:
        raise ValueError(f"{exchange} cannot be read: {error}") from None
    return held_by(heads, step, islands, exchange)


def held_by(
    heads: Sequence[dict[str, Any]], step: int, islands: int, where: Path
) -> HeldCheckpoint:
    """A checkpoint as islands compare it, from the heads of one island's parts.

    Args:
        islands: of this run: a state of another number of islands says less. where: for the error.

    Raises:
        ValueError: ranks stand between unlike exchanges.
    """
    kin = [h for h in heads if h.get("islands") == islands]
    applied = {_as_text(h.get("applied"), dict) for h in kin} or {""}
    if len(applied) > 1 or 0 < len(kin) < len(heads):
        raise ValueError(
            f"{where}: ranks stand between unlike exchanges: {', '.join(sorted(applied))}"
        )
    # copies that are not active know none
    histories = {str(h.get("history", "")) for h in kin} - {""} or {""}
    if len(histories) > 1:
        raise ValueError(f"{where}: ranks have unlike histories: {', '.join(sorted(histories))}")
    owner = min((int(h.get("island", -1)) for h in kin), default=-1)
    # islands keep their numbers where their count changes: these count in any case
    took_part = {_as_text(h.get("participants"), list) for h in heads} - {"", "[]"}
    participants = took_part.pop() if len(took_part) == 1 else ""
    return HeldCheckpoint(step, applied.pop(), owner, histories.pop(), participants)


def _as_text(value: Any, kind: type) -> str:
    """JSON that is equal for equal values; empty where a head does not have this kind there."""
    return json.dumps(value, sort_keys=True) if isinstance(value, kind) else ""


def present(held: Held, slots: Sequence[int]) -> list[bool]:
    """Which islands hold something and took part when the newest state was saved, in the order of
    `held`. All that hold something, where that state does not say who took part.

    A newcomer that had not taken part yet does not count, be it the one that saved last: what it
    holds from before it was lost would drag the others back. `slots` are the islands' numbers.

    >>> at = HeldCheckpoint
    >>> present([[at(30, participants="[0, 1]")], [at(20)], [at(10)]], range(3))
    [True, True, False]
    """
    newest = max((h for each in held for h in each), key=_step)
    then = json.loads(newest.participants or "null") or slots
    return [bool(each) and slot in then for each, slot in zip(held, slots, strict=True)]


def together(held: Held) -> list[HeldCheckpoint] | None:
    """The newest states, one of each list, that `fit` together; None if there are none."""
    found = alike(held)
    for applied in sorted({h.applied for each in held for h in each if h.applied}):
        found += _fitting([[h for h in each if h.applied == applied] for each in held])
    return max(
        found,
        key=lambda states: (min(h.step for h in states), sum(h.step for h in states)),
        default=None,
    )


def alike(held: Held) -> list[list[HeldCheckpoint]]:
    """All choices, a state of each list, of one step and history, between the same exchanges."""
    common = set.intersection(*({h.step for h in each} for each in held)) if held else set()
    return [
        states
        for step in sorted(common)
        for states in _fitting([[h for h in each if h.step == step] for each in held])
    ]


def _fitting(held: Held) -> list[list[HeldCheckpoint]]:
    """The newest states, one of each list, for each pair of `applied` and history that all lists
    can have; what a state does not say fits any.
    """
    said = (
        sorted({getattr(h, name) for each in held for h in each} - {""}) or [""]
        for name in ("applied", "history")
    )
    found = ([[h for h in each if h.fits(*pair)] for each in held] for pair in product(*said))
    return [[max(each, key=_step) for each in lists] for lists in found if all(lists)]


def _step(held: HeldCheckpoint) -> int:
    return held.step


def choose(
    names: Sequence[str], held: Held, how: str, slots: Sequence[int] | None = None
) -> list[HeldCheckpoint | None] | None:
    """The state from which each island goes on; None for one that takes over from the others. None
    in all where nobody holds any.

    Args:
        names: of the islands, for the error. held: what each holds.
        how: "common": what all hold. "auto": else islands that hold none take over from the others.
            "newest": what all hold that were `present`; the others take over; where there is none,
            all that do not hold the newest of them. "take_over": what all hold, else as "newest";
            folders may be swapped.
        slots: the numbers of the islands, if they are not all.

    Raises:
        NeedsDecision: a person must choose; or the folders of islands are swapped.
    """
    slots = range(len(names)) if slots is None else slots
    if not any(held):
        return None
    chosen: list[HeldCheckpoint | None] | None = None
    if all(held) or how != "common":
        asked = present(held, slots) if how == "newest" else [bool(each) for each in held]
        chosen = _joined(held, asked)
    common = chosen is not None
    if not common and how in ("newest", "take_over"):
        newest = max((h for each in held for h in each), key=_step)
        like = [
            [h for h in each if h.step == newest.step and h.fits(newest.applied, newest.history)]
            for each in held
        ]
        chosen = [max(each, key=_step, default=None) for each in like]
    if chosen is None:
        raise NeedsDecision(_choices(names, held, how))
    if common and how != "take_over":
        _check_owners(names, chosen, slots)
    if None in chosen:  # what others have done after the furthest step is lost in any case
        furthest = max(h.step for h in chosen if h is not None)
        return [h if h is not None and h.step == furthest else None for h in chosen]
    return chosen


def _joined(held: Held, asked: Sequence[bool]) -> list[HeldCheckpoint | None] | None:
    """The newest states that all `asked` hold together, with what fits of others; None: no such."""
    states = together([each for each, one in zip(held, asked, strict=True) if one])
    if not states:
        return None
    rest = iter(states)
    chosen: list[HeldCheckpoint | None] = [next(rest) if one else None for one in asked]
    for i, each in enumerate(held):
        if chosen[i] is None and each:
            fitting = together([*([h] for h in chosen if h is not None), each])
            chosen[i] = fitting[-1] if fitting else None
    return chosen


def superfluous(
    steps: Sequence[int], common: int, keep: int | None, best: int | None = None
) -> list[int]:
    """The steps of an island's checkpoints that rotation may delete. Never the newest step that all
    islands hold, nor what follows it: an island whose peer died before its save goes on from there.

    Args:
        steps: that the island holds, ascending.
        common: the newest that all are known to hold.
        keep: as many of the newest stay; None or 0: all.
        best: the step of the best model, which stays.

    >>> superfluous([10, 20, 30, 40, 50], common=40, keep=1, best=10)
    [20, 30]
    """
    return [s for s in steps[:-keep] if s < common and s != best] if keep else []


def _choices(names: Sequence[str], held: Held, how: str) -> str:
    pairs = list(zip(names, held, strict=True))
    have = "; ".join(
        f"{name}: {', '.join(map(str, sorted({h.step for h in each}))) or 'none'}"
        for name, each in pairs
    )
    newest, name = max((max(each, key=_step).step, name) for name, each in pairs if each)
    parted = lacking = ""
    if set.intersection(*({h.step for h in each} for each in held)):
        parted = (
            " (at equal steps they have applied unlike exchanges, or the contributions of unlike "
            "islands)"
        )
    if how != "auto" and not all(held):
        lacking = "; or let those that hold none take over from the others (--resume auto)"
    return (
        f"no checkpoint is held by all islands ({have}){parted}: copy or mount the missing folder "
        f"there{lacking}; or let all go on from step {newest} of {name}, where what others have "
        "done alone is lost (take_over=True; recipes/pretrain.py: --take-over; Trainer: name it "
        f"by its path); or start anew in another folder{see('no-common-checkpoint')}"
    )


def _check_owners(
    names: Sequence[str], chosen: Sequence[HeldCheckpoint | None], slots: Sequence[int]
) -> None:
    """Folders that change hands between islands mix up data and accumulators; a copy of one
    island's folder is a way to take over.
    """
    owners = [h.owner if h is not None else -1 for h in chosen]
    swapped = [i for i, owner in enumerate(owners) if owner not in (-1, slots[i])]
    known = [owner for owner in owners if owner != -1]
    if swapped and len(set(known)) == len(known):
        who = ", ".join(
            f"{names[i]} (ISLAND_RANK={slots[i]}) finds what island {owners[i]} saved"
            for i in swapped
        )
        raise NeedsDecision(
            f"folders of islands are swapped: {who}. Give each island the ISLAND_RANK or the "
            "folder that it had, or take over on purpose "
            "(take_over=True; recipes/pretrain.py: --take-over)"
        )
