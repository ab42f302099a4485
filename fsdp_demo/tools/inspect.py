"""`fsdp-demo inspect CHECKPOINT`: what lies in a checkpoint's exchange states, told from their
heads; tensors are checked, not loaded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ..checkpoint.choice import HeldCheckpoint, alike, choose, held_by
from ..checkpoint.exchange_state import SavedExchange, load_exchange
from ..checkpoint.files import OTHER, crc32
from ..checkpoint.folders import MANIFEST, is_put_off, sums
from ..config.load import preset
from ..config.methods import presets
from ..config.parsing import by_path
from ..config.schema import ExchangeConfig
from ..errors import UNREADABLE, NeedsDecision, counted, size

# folders below a run: an island's or a replica's, perhaps one for its checkpoints, the checkpoint
DEPTH = 4
_CHECKPOINT = re.compile(r"checkpoint-\d+")


# ---- which checkpoints are there ---------------------------------------------------------------


def find_checkpoints(root: Path) -> list[Path]:
    """The folders of all checkpoints at or below `root`, those of one island together, by step.
    Raises ValueError: there is no such folder, or none in it.
    """
    if not root.is_dir():
        raise ValueError(
            f"{root}: no such folder; name a checkpoint-N, or a run's folder that holds some"
        )
    if root.name == "exchange":
        return [root.parent]
    if _is_checkpoint(root) or any(root.glob("rank*.json")):
        return [root]
    folders = sorted(_below(root, DEPTH), key=lambda f: (str(f.parent), _step(f)))
    if not folders:
        raise ValueError(
            f"{root} holds no checkpoint: looked for folders named checkpoint-N or with "
            f"exchange/rank0.json, {DEPTH} levels deep"
        )
    return folders


def _below(folder: Path, depth: int) -> Iterator[Path]:
    for child in folder.iterdir() if depth else ():
        if child.is_dir() and _is_checkpoint(child):
            if not is_put_off(child):
                yield child
        elif child.is_dir() and not child.name.startswith("."):
            yield from _below(child, depth - 1)


def _is_checkpoint(folder: Path) -> bool:
    """Whether it is a checkpoint by its name, or, of DeepSpeed, by the exchange's parts."""
    return _CHECKPOINT.fullmatch(folder.name) is not None or any(folder.glob("exchange/rank*"))


def _step(folder: Path) -> int:
    found = re.search(r"(\d+)$", folder.name)
    return int(found[1]) if found else -1


def exchange_in(folder: Path) -> Path:
    """The folder of the exchange's parts in a checkpoint, which may be that folder itself."""
    inner = folder / "exchange"
    return inner if inner.is_dir() else folder


def above(folder: Path, run: Path) -> list[Path]:
    """The folders that may hold a run's files about a checkpoint, from its own to the run's."""
    last = run.parent if folder == run else run
    return [p for p in (folder, *folder.parents) if p in (folder, last) or last in p.parents]


# ---- what one holds ----------------------------------------------------------------------------


def inspect(root: str | Path) -> list[dict[str, Any]]:
    """`describe_checkpoint` of every checkpoint at or below `root`; one that cannot be read has
    `complete` False, `problems`, and no step. Raises ValueError: no checkpoint is there, or the
    only one cannot be read.
    """
    found, out = find_checkpoints(Path(root)), []
    for folder in found:
        try:
            out.append(describe_checkpoint(folder))
        except UNREADABLE as error:
            odd = f"{exchange_in(folder)} holds a head of another form ({error!r:.80}): {OTHER}"
            why = str(error) if isinstance(error, ValueError) else odd
            if len(found) == 1:
                raise ValueError(why) from None
            out.append({"folder": str(folder), "complete": False, "problems": [why]})
    return out


def describe_checkpoint(folder: Path) -> dict[str, Any]:
    """The contents of one checkpoint as JSON values. Raises ValueError: a head cannot be read."""
    saved = load_exchange(exchange_in(folder))
    first = saved.heads[0]
    config = ExchangeConfig.from_dict(first["config"])
    problems = [f"island {i} lacks the part of rank {r}" for i, r in saved.missing]
    out: dict[str, Any] = {
        "folder": str(folder),
        "problems": problems,
        "step": saved.step,
        "preset": first["preset"],
        "islands": first["islands"],
        "holds": {str(h["island"]): h.get("name") or f"island{h['island']}" for h in saved.heads},
        "versions": {
            "format": first["format"],
            "fsdp_demo": first.get("package"),
            "torch": first.get("torch"),
        },
        "bytes": 0,
        "participants": [],
        "gone": [],
        "held": _held(saved, folder, problems),
        "method": config.describe(),
        "settings": settings(config),
        "chosen_because": first.get("auto_choice", {}).get("reason", ""),
        "digest": f"{config.digest():016x}",
        "run": first["run"],
        "topology": first["kind"],
        "shards": first["shards"],
        "copies": first["copies"],
        "parameters": _elements(first, frozen=False),
        "frozen": _elements(first, frozen=True),
        "tokens": 0,
        "states": {},
        "in_flight": [],
    }
    for island, rank in saved.paths:
        _add_part(out, saved, island, rank, problems)
    problems += _damage(folder, saved)
    return out | {"complete": not problems}


def settings(config: ExchangeConfig) -> dict[str, Any]:
    """Dotted paths in which a configuration differs from its preset; all, if that is not known."""
    there = _by_path(preset(config.preset)) if config.preset in presets() else {}
    return {k: v for k, v in _by_path(config).items() if (k, v) not in there.items()}


def _by_path(config: ExchangeConfig) -> dict[str, Any]:
    """Channels by their names, their phases by number, all else by their keys."""
    data = config.to_dict()
    channels = data.pop("channels")
    for c in channels:
        c["later"] = dict(enumerate(c["later"])) or []
    return by_path(data | {c.pop("name"): c for c in channels})


def _elements(head: Mapping[str, Any], frozen: bool) -> int:
    """The number of elements of all whole tensors: under ZeRO one tensor lies in several shards."""
    whole = {p["name"]: p["global_shape"] for p in head["parameters"] if p["frozen"] == frozen}
    return sum(map(math.prod, whole.values()))


def _held(saved: SavedExchange, folder: Path, problems: list[str]) -> dict[str, list[Any]]:
    """Number of an island -> note of its part for the choice (`HeldCheckpoint.note`)."""
    found = {}
    for island in saved.islands:
        heads = [head for head in saved.heads if head["island"] == island]
        try:
            known = held_by(heads, saved.step, int(heads[0]["islands"]), folder)
        except ValueError as error:
            problems.append(str(error))
        else:
            found[str(island)] = known.note()
    return found


def _add_part(
    out: dict[str, Any], saved: SavedExchange, island: int, rank: int, problems: list[str]
) -> None:
    """Add one rank's part: its tokens and bytes, those of its states by channel and kind."""
    state = saved.outline(rank, island)
    path = saved.paths[island, rank]
    beside = path.with_suffix(".safetensors")
    tensors = _tensor_sizes(beside, problems)
    if tensors and (lacking := sorted(set(_keys(state.to_tree())) - set(tensors))):
        problems.append(f"{beside} lacks {lacking[0]!r:.80}")
    if present := saved.head(rank, island).get("participants"):  # of an active copy
        out["participants"] = [int(slot) for slot in state.history.get("slots", present)]
        out["gone"] = sorted({*out["gone"], *out["participants"]} - set(present))
    out["tokens"] += state.tokens
    out["bytes"] += path.stat().st_size + beside.stat().st_size
    for channel, kept in state.channels.items():
        sums = out["states"].setdefault(channel, {})
        for name, work in kept.workspaces.items():
            sums[name] = sums.get(name, 0) + sum(tensors.get(key, 0) for key in _keys(work))
    for i, flight in enumerate(state.in_flight):
        if i == len(out["in_flight"]):
            out["in_flight"].append({"step": flight.step, "channels": flight.members, "bytes": 0})
        out["in_flight"][i]["bytes"] += sum(tensors.get(key, 0) for key in _keys(flight.to_tree()))


def _damage(folder: Path, saved: SavedExchange) -> Iterator[str]:
    """A text for each damaged or missing file that the heads and the manifest name."""
    wanted = {
        path.with_suffix(".safetensors"): saved.head(rank, island)["file"]
        for (island, rank), path in saved.paths.items()
    }
    if (folder / MANIFEST).exists():
        try:
            wanted |= {folder / name: about for name, about in sums(folder).items()}
        except ValueError as error:
            yield f"{folder / MANIFEST}: {error}"
    for path, about in sorted(wanted.items()):
        if not path.is_file():
            yield f"{path} is missing"
        elif path.stat().st_size != about["bytes"]:
            yield f"{path} has {path.stat().st_size} bytes, not {about['bytes']}"
        elif about["crc32"] is not None and crc32(path) != about["crc32"]:
            yield f"{path} is damaged, its checksum does not fit"


def _keys(tree: Any) -> Iterator[str]:
    """The tensor keys that a tree names."""
    if isinstance(tree, dict) and set(tree) == {"tensor"}:
        yield tree["tensor"]
    elif isinstance(tree, (dict, list)):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from _keys(value)


def _tensor_sizes(path: Path, problems: list[str]) -> dict[str, int]:
    """Bytes of each tensor in a safetensors file."""
    try:
        with safe_open(path, "pt") as file:
            return {key: file.get_tensor(key).nbytes for key in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        problems.append(f"{path} is no safetensors file ({error!s:.120})")
        return {}


# ---- in words ----------------------------------------------------------------------------------


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
