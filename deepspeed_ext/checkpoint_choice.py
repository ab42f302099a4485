"""Which checkpoint all replicas load, and from which folders each takes its part: told from the
heads of the exchange's parts.

    DIR/<name>/TAG/...            DeepSpeed's files of one replica (a replica alone: DIR/TAG)
    DIR/<name>/TAG/exchange/      the exchange's parts, written after them: where they are whole, the checkpoint is
    DIR/<name>/TAG/manifest.json  every file with its size and checksum, written last
    DIR/<name>/latest             the newest TAG

Replicas whose newest states lie between the same exchanges go on from these, each from its own tag
(`fsdp_demo.checkpoint.choice`). A replica goes on from its own folder. One without takes what
another has saved, where it sees that in DIR.
"""  # noqa: E501

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_demo import Topology
from fsdp_demo.checkpoint import SavedExchange, load_exchange
from fsdp_demo.checkpoint.choice import Held, present, together
from fsdp_demo.checkpoint.whole import PARTS, whole
from fsdp_demo.errors import NeedsDecision, see

log = logging.getLogger("fsdp_demo")

CURE = "with DeepSpeed: engine.load_checkpoint(FOLDER OF ONE REPLICA) before attach starts it anew"


def folder_of(root: Path, topology: Topology) -> Path:
    """Where a replica's checkpoints lie in the directory that the user names."""
    return root if topology.islands == 1 else root / topology.name


@dataclass(frozen=True)
class Choice:
    """What one replica loads.

    Attributes:
        tag: of DeepSpeed; None where there is nothing to load.
        source: folder of the replica that saved it. None where this replica sees none, and takes
            over what the others bring.
        parts: whether the exchange's parts are in it.
        alone: every replica loads by itself; False where some take over from the others.
    """

    tag: str | None
    source: Path | None
    parts: bool = False
    alone: bool = True


def look(root: Path, topology: Topology, tag: str | None) -> dict[str, Any]:
    """What a replica sees, as JSON: `seen` {tag: {run: [step, time]}}, tags of plain DeepSpeed
    checkpoints, and what is not whole, in its own folder (`bad`) or beside it. What is bad in
    its own folder does not count as seen elsewhere."""
    own = folder_of(root, topology)
    note: dict[str, Any] = {
        "name": topology.name,
        "tag": tag,
        "latest": latest(own),
        "seen": {},
        "plain": [],
        "bad": {},
        "beside": {},
    }
    note["own"] = []  # [held, tag, run] of what this replica saved itself, in these numbers
    for folder in _folders(root):
        for place in (
            [folder / tag] if tag is not None else sorted(p for p in folder.iterdir() if p.is_dir())
        ):
            if (place / PARTS).is_dir():
                _note_parts(note, place, folder == own, topology)
            elif folder == root and any(place.glob("*model_states.pt")):
                note["plain"].append(place.name)
            elif folder == own and any(place.glob("*model_states.pt")):
                note["bad"][place.name] = (
                    f"{place} has no exchange state: it was saved without an exchange, or the save "
                    "was cut off"
                )
    note["plain_latest"] = latest(root)
    note["seen"] = {t: runs for t, runs in note["seen"].items() if t not in note["bad"]}
    return note


def _note_parts(note: dict[str, Any], place: Path, own: bool, topology: Topology) -> None:
    try:
        held, saved = whole(place, topology.islands)
    except ValueError as error:
        note["bad" if own else "beside"][place.name] = str(error)
        return
    runs = note["seen"].setdefault(place.name, {})
    times = [path.stat().st_mtime for path in saved.paths.values()]
    runs[_run(saved)] = [saved.step, max(times + runs.get(_run(saved), [0, 0.0])[1:])]
    if own and held.owner == topology.island:
        note["own"].append([held.note(), place.name, _run(saved)])
    elif own and held.owner != -1:
        note["owner"] = held.owner


def choose_tags(
    notes: Sequence[dict[str, Any]],
    take_over: bool = True,
    elastic: Sequence[int] | None = None,
) -> list[tuple[str, str] | None] | None:
    """`choose_tag` for each replica. Without a tag each takes the newest of its own between the
    same exchanges, where that is newer. One that sees no whole checkpoint then takes over from
    the others: None in its place. None in all where nobody has any.

    Args:
        take_over: replicas load apart from each other (islands), so that one need not load.
        elastic: the numbers of the islands, where they may leave one by one: those that were away
            when the newest checkpoint was saved take over, too.

    Raises:
        NeedsDecision: as `choose_tag`; folders of replicas are swapped.
    """
    owners = [n.get("owner", i if n["own"] else -1) for i, n in enumerate(notes)]
    if (
        any(owner not in (-1, i) for i, owner in enumerate(owners))
        and len(set(owners)) == len(owners)
        and -1 not in owners
    ):
        who = ", ".join(
            f"{n['name']} holds what replica {owner} saved"
            for n, owner in zip(notes, owners, strict=True)
        )
        raise NeedsDecision(
            f"folders of replicas are swapped ({who}): give each the ISLAND_RANK or the folder "
            "that it had"
        )
    asked = [bool(n["seen"]) for n in notes]
    if not any(asked) or not take_over or any(n["tag"] is not None for n in notes):
        return _tags_of(notes)
    own = _own(notes)
    if elastic is not None and any(own):
        here = present(own, elastic)
        asked = [a and (now or not mine) for a, now, mine in zip(asked, here, own, strict=True)]
    tags = _tags_of([n for n, one in zip(notes, asked, strict=True) if one]) or []
    one, rest = tags[0] if len(set(tags)) == 1 else None, iter(tags)
    return [
        next(rest) if loads else one if one is not None and _sees(n, one) else None
        for n, loads in zip(notes, asked, strict=True)
    ]


def _own(notes: Sequence[dict[str, Any]]) -> list[list[Held]]:
    return [[Held(*held) for held, _, _ in n["own"]] for n in notes]


def _sees(note: dict[str, Any], found: tuple[str, str]) -> bool:
    return found[1] in note["seen"].get(found[0], {})


def _tags_of(notes: Sequence[dict[str, Any]]) -> list[tuple[str, str] | None] | None:
    """The tags of replicas that hold something."""
    own = _own(notes)
    states = together(own) if all(own) and all(n["tag"] is None for n in notes) else None
    if states is not None and len({h.step for h in states}) > 1:
        common = _common(notes)
        if not common or min(h.step for h in states) >= _step(notes, _newest(notes, common)):
            return [
                next((tag, run) for held, tag, run in n["own"] if Held(*held) == h)
                for n, h in zip(notes, states, strict=True)
            ]
    found = choose_tag(notes)
    return None if found is None else [found] * len(notes)


def _common(notes: Sequence[dict[str, Any]]) -> set[str]:
    """The tags of which all replicas see one run."""
    return {
        tag for tag in notes[0]["seen"] if all(_runs(n, tag) & _runs(notes[0], tag) for n in notes)
    }


def _step(notes: Sequence[dict[str, Any]], tag: str) -> int:
    return max(step for n in notes for step, _ in n["seen"][tag].values())


# Not `CheckpointRegistry.choose`: there each island goes on from a state in its own folder, which
# is known by its step. Here a tag is asked for by name, or told by `latest`. Replicas load one run
# from any folder that they see, also one that is not their own (their number has changed). A
# checkpoint of plain DeepSpeed counts, too: it has no head that says a step. Swapped folders are
# refused only where every replica has one. Which of their own states lie between the same exchanges
# is asked in one place by both: `fsdp_demo.checkpoint.choice.together`.


def choose_tag(notes: Sequence[dict[str, Any]]) -> tuple[str, str] | None:
    """From the notes of all replicas, the same on all: tag and run of the checkpoint that all load;
    the run is "" for a plain DeepSpeed checkpoint. None where nobody has any.

    Raises:
        NeedsDecision: a ValueError: replicas want different tags; no checkpoint that all see.
        ValueError: one that is half-written.
    """
    wanted = sorted({n["tag"] for n in notes if n["tag"] is not None})
    if len(wanted) > 1 or (wanted and any(n["tag"] is None for n in notes)):
        both = ", ".join(f"{n['name']}: {n['tag']!r}" for n in notes)
        raise NeedsDecision(
            f"replicas load different tags ({both}): give the same on all, or none (the newest "
            "that all hold)"
        )
    bad = [
        text
        for n in notes
        for tag, text in (n["bad"] | ({} if n["seen"] else n["beside"])).items()
        if tag in wanted or not wanted
    ]
    if wanted and bad:
        raise ValueError(
            f"{bad[0]}. Without that folder, its replica takes over from another; {CURE}"
        )
    common = _common(notes)
    if wanted:
        common &= set(wanted)
    if common:
        tag = _newest(notes, common)
        every = set.intersection(*(_runs(n, tag) for n in notes))
        return tag, max(every, key=lambda run: max(n["seen"][tag][run][1] for n in notes))
    if any(n["seen"] for n in notes):
        have = "; ".join(f"{n['name']}: {', '.join(sorted(n['seen'])) or 'none'}" for n in notes)
        raise NeedsDecision(
            f"no checkpoint is seen by all replicas ({have}): copy the folder of one replica into "
            "the directory of those that lack it, or "
            "name a tag that all have (without a tag, an island that holds no checkpoint takes "
            "over from the others; in a mesh none does)"
            f"{see('no-common-checkpoint')}"
        )
    plain = set.intersection(*(set(n["plain"]) for n in notes))
    latest = {n["plain_latest"] for n in notes}
    if wanted and plain & set(wanted):
        return wanted[0], ""
    if not wanted and len(latest) == 1 and latest & plain:
        return str(latest.pop()), ""
    if bad:
        raise ValueError(f"{bad[0]}; {CURE}")
    if wanted:
        raise ValueError(
            f"no replica sees a checkpoint {wanted[0]!r}: name one that is there, or none (the "
            "newest that all hold)"
        )
    if any(n["plain"] for n in notes):
        have = "; ".join(f"{n['name']}: {n['plain_latest'] or 'none'}" for n in notes)
        cure = f"copy or mount it for all{see('no-common-checkpoint')}"
        raise NeedsDecision(
            f"replicas do not see the same checkpoint of plain DeepSpeed ({have}): {cure}"
        )
    return None


def _newest(notes: Sequence[dict[str, Any]], tags: set[str]) -> str:
    """What every replica's `latest` names; where they differ (a save was cut off), the newest that
    none of them is behind.
    """
    named = {n["latest"] for n in notes if n["latest"] is not None}
    if len(named) == 1 and named <= tags:
        return next(iter(named))
    steps = {t: _step(notes, t) for t in tags}
    limit = min((steps[t] for t in named if t in steps), default=max(steps.values()))
    tag = max((t for t in tags if steps[t] <= limit), key=lambda t: (steps[t], t))
    if named - {tag} and notes[0]["tag"] is None:
        log.warning(
            "`latest` of the replicas names %s: %s is the newest that all hold whole",
            ", ".join(sorted(named)),
            tag,
        )
    return tag


def choose(root: Path, topology: Topology, tag: str, run: str) -> Choice:
    """Where this replica takes the agreed checkpoint from."""
    own = folder_of(root, topology)
    if not run:
        return Choice(tag, root)
    for folder in sorted(_folders(root), key=lambda f: f != own):  # its own is preferred
        try:
            saved = load_exchange(folder / tag / PARTS)
        except ValueError:
            continue
        if saved.complete and _run(saved) == run:
            return Choice(tag, folder, parts=True)
    raise ValueError(f"{root} held {tag} whole when it was looked at, and does no more; {CURE}")


def _run(saved: SavedExchange) -> str:
    """What the parts of one save have in common."""
    head = saved.heads[0]
    return json.dumps(
        [head["islands"], head.get("run"), saved.step, head.get("applied")], sort_keys=True
    )


def _runs(note: dict[str, Any], tag: str) -> set[str]:
    return set(note["seen"].get(tag, ()))


def latest(folder: Path) -> str | None:
    """The tag that `FOLDER/latest` names."""
    try:
        return (folder / "latest").read_text(encoding="utf-8").strip()
    except OSError:
        return None


def _folders(root: Path) -> list[Path]:
    """The directory itself and what may be replicas' folders in it."""
    return (
        [root, *sorted(p for p in root.iterdir() if p.is_dir() and p.name != PARTS)]
        if root.is_dir()
        else []
    )
