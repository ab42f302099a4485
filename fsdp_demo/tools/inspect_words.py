"""What `fsdp-demo inspect` has found, in words: one checkpoint as a table, several as a line on
each, behind what the islands hold in common.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..checkpoint.choice import HeldCheckpoint, alike, choose
from ..errors import NeedsDecision, counted, size


def listed(numbers: Iterable[int]) -> str:
    """`0, 2 and 3`."""
    words = [str(n) for n in sorted(numbers)]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _named(islands: Iterable[int]) -> str:
    """`island 0`, `islands 0 and 1`."""
    numbers = list(islands)
    return ("island " if len(numbers) == 1 else "islands ") + listed(numbers)


def of_islands(numbers: Iterable[int]) -> str:
    """The islands of a count in words: `of island 0`, `the sum over islands 0 and 1`."""
    known = set(numbers)
    return f"{'of' if len(known) == 1 else 'the sum over'} {_named(known)}"


def _took_part(info: Mapping[str, Any]) -> str:
    """The islands whose contributions the last exchange has, as in exchanges.jsonl, and those of
    them that had left early or were lost when the checkpoint was saved; empty where not known.
    """
    took_part, gone = info["participants"], info["gone"]
    who = f"{listed(took_part)} of {info['islands']}" if took_part else ""
    return f"{who}; gone since: {listed(gone)}" if gone else who


def ranks(head: Mapping[str, Any]) -> str:
    """Ranks, shards and copies of an island in words, such as `4 ranks, 2 shards`."""
    shards, copies = int(head["shards"]), int(head["copies"])
    share = counted(shards, "shard") if copies == 1 or shards > 1 else "the whole model on each"
    return f"{counted(shards * copies, 'rank')}, {share}" + (
        f" on {copies} of them each" if copies > 1 and shards > 1 else ""
    )


def text(info: Mapping[str, Any]) -> str:
    """`describe_checkpoint`'s answer for people."""
    here = ", ".join(f"{number} ({name})" for number, name in info["holds"].items())
    changed = ", ".join(f"{key}={value}" for key, value in info["settings"].items())
    frozen = f", and {info['frozen']:,} frozen" if info["frozen"] else ""
    versions = (f"{name} {value}" for name, value in info["versions"].items() if value is not None)
    took_part, tokens = _took_part(info), info["tokens"]
    rows = [
        ("step", info["step"]),
        ("islands", f"{info['islands']}, here {here}"),
        ("took part", took_part and f"in the last exchange {took_part}"),
        ("each island", f"{ranks(info)}; {info['topology']}, run {info['run']!r}"),
        ("method", info["method"]),
        ("settings", changed or "those of the preset"),
        ("chosen by auto", info["chosen_because"]),
        ("parameters", f"{info['parameters']:,}{frozen}"),
        ("tokens", tokens and f"{tokens:,}, {of_islands(map(int, info['holds']))}"),
    ]
    for channel, kept in info["states"].items():
        states = ", ".join(f"{name} {size(count)}" for name, count in kept.items())
        rows.append((f"state {channel}", states or "none between exchanges"))
    for flight in info["in_flight"]:
        sent = f"sent in step {flight['step'] + 1} by {', '.join(flight['channels'])}"
        rows.append(("in flight", f"{sent}: {size(flight['bytes'])}"))
    rows += [
        ("size", f"{size(info['bytes'])} of exchange states"),
        ("versions", ", ".join(versions)),
        ("complete", "yes" if info["complete"] else "NO: " + "; ".join(info["problems"])),
    ]
    told = (f"  {label:18}{value}" for label, value in rows if value or label == "step")
    return "\n".join([info["folder"], *told])


def overview(found: Sequence[Mapping[str, Any]]) -> str:
    """Several checkpoints for people: what the islands hold in common, then a line for each."""
    lines = [shared(found), ""]
    for info in found:
        if "step" not in info:
            lines.append(f"{info['folder']}: NOT READABLE: {info['problems'][0]}")
            continue
        state = "whole" if info["complete"] else f"NOT WHOLE: {'; '.join(info['problems'])}"
        whose = f"step {info['step']} of {_named(map(int, info['holds']))}"
        lines.append(f"{info['folder']}: {whose}, {info['preset']}; {state}")
    return "\n".join([*lines, "", "what one of them holds: fsdp-demo inspect CHECKPOINT"])


def shared(found: Sequence[Mapping[str, Any]]) -> str:
    """The steps that the islands of a run hold in common, in words."""
    readable = [info for info in found if "step" in info]
    if not readable:
        return "whole on all islands: no step"
    newest = max(readable, key=lambda info: int(info["step"]))
    count, took_part = newest["islands"], newest["participants"]
    held = _held_here(readable, count)
    whole = sorted({states[0].step for states in alike(list(held.values()))})
    lines = [f"whole on all islands: {listed(whole) or 'no step'}"]
    if missing := set(range(count)) - set(held):
        them = f"{'that' if len(missing) == 1 else 'those'} of {listed(missing)}"
        lines = [
            f"whole on the islands whose folders are here ({_named(held)} of {count}): "
            f"{listed(whole) or 'no step'}",
            f"the folders here say nothing of {them}: look there, too",
        ]
    if took_part and (newest["gone"] or took_part != list(range(count))):
        lines.append(f"in step {newest['step']}, the newest, took part: {_took_part(newest)}")
    return "\n".join([*lines, *_resumed(held, whole)])


def _held_here(found: Sequence[Mapping[str, Any]], count: int) -> dict[int, list[HeldCheckpoint]]:
    """Number of each island whose folder is here -> its whole checkpoints, as the choice of a state
    to resume from sees them; `count` islands are in the run now.
    """
    here = {int(i) for info in found if info["islands"] == count for i in info["holds"]}
    held: dict[int, list[HeldCheckpoint]] = {i: [] for i in sorted(here)}
    for info in found:
        for island, note in info["held"].items() if info["complete"] else ():
            known = HeldCheckpoint(*note)
            if info["islands"] != count:  # it says less, see `choice.held_by`
                known = HeldCheckpoint(known.step, participants=known.participants)
            held.get(int(island), []).append(known)
    return held


def _resumed(held: Mapping[int, list[HeldCheckpoint]], whole: Sequence[int]) -> Iterator[str]:
    """A line on the steps that `--resume auto` takes where islands may come and go, by the rule of
    the resume itself; none where all go on from the newest step that all hold.
    """
    islands = list(held)
    try:
        chosen = choose([f"island {i}" for i in islands], list(held.values()), "newest", islands)
    except NeedsDecision as error:
        yield f"with --resume auto: {error}"
        return
    steps = {i: state and state.step for i, state in zip(islands, chosen or (), strict=False)}
    if set(steps.values()) <= set(whole[-1:]):
        return
    parts = [
        f"{_named(i for i in steps if steps[i] == step)} from step {step}"
        for step in sorted({s for s in steps.values() if s is not None}, reverse=True)
    ]
    if others := [i for i, step in steps.items() if step is None]:
        parts.append(f"{_named(others)} take{'s' * (len(others) == 1)} over from them")
    yield f"with --resume auto: {', '.join(parts)}"
