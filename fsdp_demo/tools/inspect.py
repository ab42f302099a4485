"""`fsdp-demo inspect CHECKPOINT`: what lies in a checkpoint's exchange states, told from their
heads; tensors are checked, not loaded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ..checkpoint.choice import held_by
from ..checkpoint.exchange_state import SavedExchange, load_exchange
from ..checkpoint.files import OTHER, crc32
from ..checkpoint.folders import MANIFEST, is_put_off, sums
from ..config.load import preset
from ..config.methods import presets
from ..config.parsing import by_path
from ..config.schema import ExchangeConfig
from ..errors import UNREADABLE

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
