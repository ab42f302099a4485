"""`fsdp-demo inspect CHECKPOINT`: what lies in a checkpoint's exchange states, told from their
heads; tensors are checked, not loaded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ..config.load import preset
from ..config.methods import presets
from ..config.schema import ExchangeConfig
from ..errors import UNREADABLE, NeedsDecision, counted, size
from .choice import HeldCheckpoint, choose, held_by
from .exchange_state import SavedExchange, load_exchange
from .files import OTHER, crc32
from .folders import MANIFEST, is_put_off, sums

# folders below a run: an island's or a replica's, perhaps one for its checkpoints, the checkpoint
DEPTH = 4
_CHECKPOINT = re.compile(r"checkpoint-\d+")


@dataclass(frozen=True)
class Found:
    """A checkpoint: its folder, and the folder in it (or itself) where the ranks' exchange states
    lie.
    """

    folder: Path
    exchange: Path

    def open(self) -> SavedExchange:
        """Read the heads. Raises ValueError for what is missing, torn, foreign or of another
        version.
        """
        return load_exchange(self.exchange)


def find_checkpoints(root: Path) -> list[Found]:
    """All checkpoints at or below `root`, those of one island together, by step.

    Raises:
        ValueError: there is no such folder, or none in it.
    """
    if not root.is_dir():
        raise ValueError(
            f"{root}: no such folder; name a checkpoint-N, or a run's folder that holds some"
        )
    if root.name == "exchange" or not _is_checkpoint(root) and any(root.glob("rank*.json")):
        return [Found(root.parent if root.name == "exchange" else root, root)]
    folders = (
        [root]
        if _is_checkpoint(root)
        else sorted(_below(root, DEPTH), key=lambda f: (str(f.parent), _step(f)))
    )
    if not folders:
        raise ValueError(
            f"{root} holds no checkpoint: looked for folders named checkpoint-N or with "
            f"exchange/rank0.json, {DEPTH} levels deep"
        )
    return [Found(folder, _exchange_in(folder)) for folder in folders]


def _below(folder: Path, depth: int) -> Iterator[Path]:
    for child in folder.iterdir() if depth else ():
        if child.is_dir() and _is_checkpoint(child):
            if not is_put_off(child):
                yield child
        elif child.is_dir() and not child.name.startswith("."):
            yield from _below(child, depth - 1)


def _is_checkpoint(folder: Path) -> bool:
    """By its name, or, where an engine names it otherwise (DeepSpeed: global_stepN), by the
    exchange's parts in it.
    """
    return (
        _CHECKPOINT.fullmatch(folder.name) is not None
        or (folder / "exchange").is_dir()
        and any((folder / "exchange").glob("rank*"))
    )


def _exchange_in(folder: Path) -> Path:
    return folder / "exchange" if (folder / "exchange").is_dir() else folder


def _step(folder: Path) -> int:
    found = re.search(r"(\d+)$", folder.name)
    return int(found[1]) if found else -1


def above(folder: Path, run: Path) -> list[Path]:
    """The folders that may hold a run's files about a checkpoint: its own, and those from there up
    to the run's.
    """
    last = run.parent if folder == run else run
    return [
        place
        for place in (folder, *folder.parents)
        if place == folder or place == last or last in place.parents
    ]


def settings(config: ExchangeConfig) -> dict[str, Any]:
    """Dotted paths in which a configuration differs from its preset; all of them if there is no
    such preset.
    """
    here = _flat(config.to_dict())
    there = _flat(preset(config.preset).to_dict()) if config.preset in presets() else {}
    return {key: value for key, value in here.items() if key not in there or there[key] != value}


def _flat(data: Any, prefix: str = "") -> dict[str, Any]:
    """Channels by their names, all else by their keys."""
    if isinstance(data, dict):
        parts = [(key, value) for key, value in data.items() if not (key == "name" and prefix)]
    elif isinstance(data, list) and data and isinstance(data[0], dict):
        return {k: v for item in data for k, v in _flat(item, f"{item['name']}.").items()}
    else:
        return {prefix.rstrip("."): data}
    return {
        k: v
        for key, value in parts
        for k, v in _flat(value, "" if key == "channels" else f"{prefix}{key}.").items()
    }


def describe_checkpoint(found: Found) -> dict[str, Any]:
    """The contents of one checkpoint as JSON values.

    Raises:
        ValueError: a head cannot be read.
    """
    saved = found.open()
    first = saved.heads[0]
    config = ExchangeConfig.from_dict(first["config"])
    problems = [f"island {i} lacks the part of rank {r}" for i, r in saved.missing]
    files = {f for path in saved.paths.values() for f in (path, path.with_suffix(".safetensors"))}
    said = {tuple(head["participants"]) for head in saved.heads if head.get("participants")}
    out: dict[str, Any] = {
        "folder": str(found.folder),
        "complete": True,
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
        "bytes": sum(f.stat().st_size for f in files if f.exists()),
        "participants": list(said.pop()) if len(said) == 1 else [],
        "held": _held(saved, found.folder, problems),
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
    wanted = {
        path.with_suffix(".safetensors"): head["file"]
        for (island, rank), path in saved.paths.items()
        for head in [saved.head(rank, island)]
    }
    problems += _damage(wanted | _manifest(found.folder, problems))
    out["complete"] = not problems
    return out


def _elements(head: dict[str, Any], frozen: bool) -> int:
    """Of whole tensors: ZeRO has one in several shards."""
    whole = {p["name"]: p["global_shape"] for p in head["parameters"] if p["frozen"] == frozen}
    return sum(map(math.prod, whole.values()))


def _held(saved: SavedExchange, folder: Path, problems: list[str]) -> dict[str, list[Any]]:
    """By the number of an island, what the choice of a state to resume from knows of its part
    (`HeldCheckpoint.note`).
    """
    found = {}
    for island in sorted({int(head["island"]) for head in saved.heads}):
        heads = [head for head in saved.heads if head["island"] == island]
        try:
            known = held_by(heads, saved.step, int(heads[0]["islands"]), folder)
        except ValueError as error:
            problems.append(str(error))
            continue
        found[str(island)] = known.note()
    return found


def _add_part(
    out: dict[str, Any], saved: SavedExchange, island: int, rank: int, problems: list[str]
) -> None:
    """Add one rank's part: its tokens, and the bytes of its states by channel and kind."""
    state = saved.outline(rank, island)
    beside = saved.paths[island, rank].with_suffix(".safetensors")
    tensors = _tensor_sizes(beside, problems)
    if tensors and (lacking := sorted(set(_keys(state.to_tree())) - set(tensors))):
        problems.append(f"{beside} lacks {lacking[0]!r:.80}")
    out["tokens"] += state.tokens
    for channel, kept in state.channels.items():
        sums = out["states"].setdefault(channel, {})
        for name, work in kept.workspaces.items():
            sums[name] = sums.get(name, 0) + sum(tensors.get(key, 0) for key in _keys(work))
    for i, flight in enumerate(state.in_flight):
        if i == len(out["in_flight"]):
            out["in_flight"].append({"step": flight.step, "channels": flight.members, "bytes": 0})
        out["in_flight"][i]["bytes"] += sum(tensors.get(key, 0) for key in _keys(flight.to_tree()))


def _manifest(folder: Path, problems: list[str]) -> dict[Path, dict[str, Any]]:
    """Size and checksum (None in the Trainer's) of each file that the manifest of a checkpoint
    names; nothing where there is none.
    """
    if not (folder / MANIFEST).is_file():
        return {}
    try:
        return {folder / name: about for name, about in sums(folder).items()}
    except ValueError as error:
        problems.append(f"{folder / MANIFEST}: {error}")
        return {}


def _damage(files: dict[Path, dict[str, Any]]) -> Iterator[str]:
    """What is wrong with files of known size and checksum."""
    for path, wanted in sorted(files.items()):
        if not path.is_file():
            yield f"{path} is missing"
        elif path.stat().st_size != wanted["bytes"]:
            yield f"{path} has {path.stat().st_size} bytes, not {wanted['bytes']}"
        elif wanted["crc32"] is not None and crc32(path) != wanted["crc32"]:
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


def listed(numbers: Iterable[int]) -> str:
    """`0, 2 and 3`."""
    words = [str(n) for n in sorted(numbers)]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def of_islands(numbers: Iterable[int]) -> str:
    """Whose count it is: `of island 0`, `the sum over islands 0 and 1`."""
    known = set(numbers)
    return f"{'of island' if len(known) == 1 else 'the sum over islands'} {listed(known)}"


def ranks(head: dict[str, Any]) -> str:
    """Ranks, shards and copies of an island in words, such as `4 ranks, 2 shards`."""
    shards, copies = int(head["shards"]), int(head["copies"])
    share = counted(shards, "shard") if copies == 1 or shards > 1 else "the whole model on each"
    return f"{counted(shards * copies, 'rank')}, {share}" + (
        f" on {copies} of them each" if copies > 1 and shards > 1 else ""
    )


def texts(found: Sequence[dict[str, Any]]) -> str:
    """`text` of all of them; a reason of `auto` that several share is told once."""
    parts, told = [], set[str]()
    for one in found:
        why = one.get("chosen_because", "")
        parts.append(text({**one, "chosen_because": "as above"} if why in told else one))
        told |= {why} - {""}
    return "\n\n".join(parts)


def text(info: dict[str, Any]) -> str:
    """`describe_checkpoint`'s answer for people."""
    if "step" not in info:
        return f"{info['folder']}\n  NOT READABLE: {info['problems'][0]}"
    here = ", ".join(f"{number} ({name})" for number, name in info["holds"].items())
    rows = [("step", str(info["step"])), ("islands", f"{info['islands']}, here {here}")]
    if info["participants"]:
        rows.append(("took part", f"{listed(info['participants'])} in the last exchange"))
    versions = (f"{name} {value}" for name, value in info["versions"].items() if value is not None)
    rows += [
        *_details(info),
        ("size", f"{size(info['bytes'])} of exchange states"),
        ("versions", ", ".join(versions)),
        ("complete", "yes" if info["complete"] else "NO: " + "; ".join(info["problems"])),
    ]
    return "\n".join([info["folder"], *(f"  {label:18}{value}" for label, value in rows)])


def _details(info: dict[str, Any]) -> list[tuple[str, str]]:
    changed = ", ".join(f"{key}={value}" for key, value in info["settings"].items())
    frozen = f", and {info['frozen']:,} frozen" if info["frozen"] else ""
    rows = [
        ("each island", f"{ranks(info)}; {info['topology']}, run {info['run']!r}"),
        ("method", info["method"]),
        ("settings", changed or "those of the preset"),
        ("parameters", f"{info['parameters']:,}{frozen}"),
    ]
    if info["chosen_because"]:
        rows.insert(3, ("chosen by auto", info["chosen_because"]))
    if info["tokens"]:
        rows.append(("tokens", f"{info['tokens']:,}, {of_islands(map(int, info['holds']))}"))
    for channel, kept in info["states"].items():
        states = ", ".join(f"{name} {size(count)}" for name, count in kept.items())
        rows.append((f"state {channel}", states or "none between exchanges"))
    for flight in info["in_flight"]:
        sent = f"sent in step {flight['step']} by {', '.join(flight['channels'])}"
        rows.append(("in flight", f"{sent}: {size(flight['bytes'])}"))
    return rows


def common(found: Sequence[dict[str, Any]], only: Collection[int] | None = None) -> list[int]:
    """The steps that all islands of a run hold whole.

    An old folder of an island that a later start did without holds nothing of that start: of each
    step the number of islands counts with which it was saved.

    Args:
        only: of these islands alone.
    """
    holders: dict[tuple[int, int], set[int]] = {}
    for info in found:
        if info["complete"]:
            key = info["step"], info["islands"]
            holders.setdefault(key, set()).update(map(int, info["holds"]))
    wanted = {key: {i for i in range(key[1]) if only is None or i in only} for key in holders}
    return sorted({step for (step, n), who in holders.items() if who >= wanted[step, n]})


def shared(found: Sequence[dict[str, Any]]) -> str:
    """The steps that the islands of a run hold in common, in words."""
    readable = [info for info in found if "step" in info]
    if not readable:
        return "whole on all islands: no step"
    newest = max(readable, key=lambda info: int(info["step"]))
    count = newest["islands"]
    here = {int(i) for info in readable if info["islands"] == count for i in info["holds"]}
    lines = [f"whole on all islands: {listed(common(found)) or 'no step'}"]
    if missing := set(range(count)) - here:
        who = _named(here)
        them = f"{'that' if len(missing) == 1 else 'those'} of {listed(missing)}"
        lines = [
            f"whole on the islands whose folders are here ({who} of {count}): "
            f"{listed(common(found, here)) or 'no step'}",
            f"the folders here say nothing of {them}: look there, too",
        ]
    took = newest["participants"]
    if took and took != list(range(count)):
        lines.append(f"in step {newest['step']}, the newest, took part: {listed(took)} of {count}")
    return "\n".join([*lines, *_resumed(readable, sorted(here), count, common(found, here))])


def _resumed(
    found: Sequence[dict[str, Any]], islands: Sequence[int], count: int, whole: Sequence[int]
) -> Iterator[str]:
    """What `--resume auto` does where islands may come and go, by the rule of the resume itself;
    nothing where all go on from the newest step that all hold.
    """
    held: dict[int, list[HeldCheckpoint]] = {i: [] for i in islands}
    for info in found:
        for island, note in info["held"].items() if info["complete"] else ():
            known = HeldCheckpoint(*note)
            if info["islands"] != count:  # it says less, see `choice.held_by`
                known = HeldCheckpoint(known.step, participants=known.participants)
            held.get(int(island), []).append(known)
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


def _named(islands: Iterable[int]) -> str:
    """`island 0`, `islands 0 and 1`."""
    numbers = list(islands)
    return ("island " if len(numbers) == 1 else "islands ") + listed(numbers)


def inspect(root: str | Path) -> list[dict[str, Any]]:
    """`describe_checkpoint` of every checkpoint at or below `root`; one that cannot be read has
    `complete` False, `problems`, and no step.

    Raises:
        ValueError: no checkpoint is there, or the only one cannot be read.
    """
    found, out = find_checkpoints(Path(root)), []
    for one in found:
        try:
            out.append(describe_checkpoint(one))
        except UNREADABLE as error:
            why = str(error) if isinstance(error, ValueError) else _odd(one, error)
            if len(found) == 1:
                raise ValueError(why) from None
            out.append({"folder": str(one.folder), "complete": False, "problems": [why]})
    return out


def _odd(found: Found, error: Exception) -> str:
    return f"{found.exchange} holds a head of another form ({error!r:.80}): {OTHER}"
