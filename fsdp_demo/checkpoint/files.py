"""A tree of tensors and JSON values on disk: two files, no pickle.

`FOLDER/NAME.safetensors` holds the tensors, `FOLDER/NAME.json` the tree with `{"tensor": KEY}` in
their places, and a head. Each is written under a temporary name, synced and renamed, the json last:
a json whose tensor file has the size it names is a whole part.

A checkpoint that holds a NaN must not take the place of the last good one: `refuse_not_finite`.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import UNREADABLE, NotFinite, NotSaveable
from ..files import DEEPEST, in_one_piece, is_deep, parse_json, read_json
from ..hosts.base import is_dtensor, local_part, plain_parts
from ..version import __version__

if TYPE_CHECKING:
    from ..exchange.exchange import Exchange


FORMAT = 3
PIECE = 8 << 20  # bytes per read of a checksum
OTHER = "resume from another checkpoint"
_PLAIN = (
    "a checkpoint keeps tensors, numbers, strings, None, and lists and dicts of these with strings "
    "as keys. Convert it, or save it in a file beside the checkpoint"
)
OPTIMIZER = (
    "take the optimizer and the preset it was saved with, or go on with the model's weights alone: "
    "RunState.restore(..., fresh=True) (recipes/pretrain.py: --fresh-exchange)"
)
FRESH = (
    "or start the exchange anew: attach(..., step=STEP, fresh=True) without state= "
    "(recipes/pretrain.py: --fresh-exchange; Trainer: ExchangeCallback(..., fresh=True))"
)


def write_part(folder: Path, name: str, head: Mapping[str, Any], tree: Any) -> None:
    """Write `folder/name.safetensors` and then `folder/name.json`. No collectives. Raises
    NotSaveable: the tree holds something else, or is nested too deeply to be read again.
    """
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    state = _detach(tree, "", tensors)
    if is_deep([state]):
        raise NotSaveable(f"{name}: more than {DEEPEST} levels of lists and dicts in each other")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.safetensors"
    in_one_piece(path, lambda part: save_file(_unshared(tensors), part))
    file = {"name": path.name, **measured(path)}
    text = json.dumps(
        {"head": {**head, "format": FORMAT, "package": __version__, "file": file}, "state": state},
        allow_nan=False,
    )
    # the text as it was: no parser may change a digit of it
    sealed = json.dumps({"crc32": zlib.crc32(text.encode()), "part": text})
    in_one_piece(folder / f"{name}.json", lambda part: part.write_text(sealed, encoding="utf-8"))
    sync_folder(folder)


def read_head(path: Path) -> tuple[dict[str, Any], Any]:
    """Head and tree of a part's json, with the key of each tensor, {"tensor": KEY}, in its place.
    The tensor file must be there in its size. Raises ValueError: torn, of another format, or
    without its tensors.
    """
    try:
        sealed = read_json(path)
        text, crc = sealed["part"], sealed["crc32"]
        part = parse_json(text)
        head, version = part["head"], part["head"].get("format")
    except UNREADABLE as error:
        raise _damaged(path, error) from None
    if version != FORMAT:
        raise ValueError(
            f"{path} has format {version!r}, written by fsdp_demo {head.get('package')}; this is "
            f"{__version__}, which reads format {FORMAT}: install fsdp_demo {head.get('package')} "
            f"or newer, {FRESH}"
        )
    if crc != zlib.crc32(text.encode()):
        raise ValueError(f"{path} is damaged, its checksum does not fit: {OTHER}, {FRESH}")
    try:
        wanted, state = int(head["file"]["bytes"]), _attach(part["state"])
    except UNREADABLE as error:
        raise _damaged(path, error) from None
    beside = path.with_suffix(".safetensors")
    found = beside.stat().st_size if beside.is_file() else None
    if found != wanted:
        what = "is missing" if found is None else f"has {found} bytes"
        raise ValueError(
            f"{beside} {what}, {path.name} names {wanted}: half-written or cut; {OTHER}, {FRESH}"
        )
    return head, state


def _damaged(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path} is damaged ({error!r:.120}): {OTHER}, {FRESH}")


def read_part(path: Path) -> tuple[dict[str, Any], Any]:
    """Head and tree of a part, with its tensors (CPU); `path` is that of the json. Raises
    ValueError: see `read_head`; or the tensors do not fit their checksum, or the json.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    head, state = read_head(path)
    beside = path.with_suffix(".safetensors")
    found, named = crc32(beside), head["file"]["crc32"]
    if found != named:
        raise ValueError(
            f"{beside} is damaged: checksum {found:08x}, {path.name} names {named:08x}; {OTHER}, "
            f"{FRESH}"
        )
    try:
        return head, _attach(state, load_file(beside))
    except (SafetensorError, *UNREADABLE) as error:
        raise _damaged(beside, error) from None


def copied(node: Any) -> Any:
    """A tree whose tensors are copies in host memory; a DTensor stays, for `_detach` to refuse."""
    if isinstance(node, Tensor) and not is_dtensor(node):
        return node.detach().to("cpu", copy=True)
    if isinstance(node, Mapping):
        return {k: copied(v) for k, v in node.items()}
    return [copied(v) for v in node] if isinstance(node, list | tuple) else node


def _detach(node: Any, key: str, tensors: dict[str, Tensor]) -> Any:
    """The tree with tensors replaced by their keys, collected in `tensors`. Floats that JSON lacks
    become {"number": TEXT}.
    """
    if is_dtensor(node):
        raise NotSaveable(
            f"{key!r} is a DTensor: keep its shard, .to_local(), which comes back to the same rank "
            "of as many. DTensor.from_local makes a DTensor of it"
        )
    if isinstance(node, Tensor):
        while key in tensors:  # {"a": {"b": t}, "a.b": t}
            key += "'"
        tensors[key] = node.detach()
        return {"tensor": key}
    if isinstance(node, Mapping):
        for k in node:
            if not isinstance(k, str):
                what = f"{key!r} has the key {k!r}, of type {type(k).__name__}"
                raise NotSaveable(f"{what}: {_PLAIN}")
        return {k: _detach(v, f"{key}.{k}" if key else k, tensors) for k, v in node.items()}
    if isinstance(node, list | tuple):
        return [_detach(v, f"{key}.{i}" if key else str(i), tensors) for i, v in enumerate(node)]
    if isinstance(node, float) and not math.isfinite(node):
        return {"number": repr(node)}
    if node is not None and not isinstance(node, bool | int | float | str):
        raise NotSaveable(f"{key!r} is of type {type(node).__name__}: {_PLAIN}")
    return node


def _attach(node: Any, tensors: Mapping[str, Tensor] | None = None) -> Any:
    """The inverse of `_detach`; without `tensors` their keys stay."""
    if isinstance(node, dict):
        if len(node) == 1:
            ((kind, value),) = node.items()
            if kind == "tensor" and isinstance(value, str):
                return node if tensors is None else tensors[value]
            if kind == "number" and isinstance(value, str):
                return float(value)
        return {k: _attach(v, tensors) for k, v in node.items()}
    return [_attach(v, tensors) for v in node] if isinstance(node, list) else node


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous, on the CPU, each with memory of its own, as safetensors wants them."""
    out: dict[str, Tensor] = {}
    seen: set[int] = set()
    for key, t in tensors.items():
        t = t.cpu().contiguous()
        if t.untyped_storage().data_ptr() in seen:
            t = t.clone()
        seen.add(t.untyped_storage().data_ptr())
        out[key] = t
    return out


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def crc32(path: Path, sync: bool = False) -> int:
    """CRC-32 of a file's bytes; `sync` also makes them durable."""
    value = 0
    with open(path, "rb") as file:
        if sync:
            os.fsync(file.fileno())
        while piece := file.read(PIECE):
            value = zlib.crc32(piece, value)
    return value


def measured(path: Path, sync: bool = False) -> dict[str, int]:
    """Size and checksum of a file, as heads and manifests name them; `sync`: see `crc32`."""
    return {"bytes": path.stat().st_size, "crc32": crc32(path, sync)}


@torch.no_grad()
def first_not_finite(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """The name of the first tensor that holds NaN or Inf, empty if there is none. Local parts only,
    no collectives.

    Of a tensor of another package's class its parts are looked at (scales are not finite where its
    values are not). Smallest and largest value of each tensor in one pass where it lies: both are
    NaN where any value is. One wait per device.
    """
    by_device: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
    local = ((name, t) for name, whole in tensors for t in plain_parts(local_part(whole)).values())
    for name, t in local:
        if t.is_complex():
            t = torch.view_as_real(t)
        if t.numel() and t.is_floating_point():
            t = t.float() if t.element_size() == 1 else t
            finite = torch.stack(torch.aminmax(t)).isfinite().all()
            by_device.setdefault(t.device, []).append((name, finite))
    for found in by_device.values():
        good = torch.stack([verdict for _, verdict in found]).tolist()
        if not all(good):
            return found[good.index(False)][0]
    return ""


def refuse_not_finite(*trees: tuple[str, Any]) -> None:
    """Raise if a tensor in one of the (name, tree of tensors) holds NaN or Inf. Raises NotFinite:
    names the first one.
    """
    if bad := first_not_finite(pair for name, tree in trees for pair in _tensors(tree, name)):
        raise NotFinite(
            f"{bad} holds values that are not finite (NaN or Inf): not saved, it would take the "
            "place of a good checkpoint"
        )


def refuse_exchange(exchange: Exchange) -> None:
    """As `refuse_not_finite`, for parameters and inner optimizer states that an exchange sees (of
    ZeRO's partitions without the padding), and its own state. Raises PeerLost: what was under way
    is lost (`Exchange.state_dict`).
    """
    host = exchange.host
    named = [
        (f"{kind} {s.name}", t)
        for kind in ("parameter", *(f"state:{name}" for name in host.states()))
        for s, t in zip(host.params, host.tensors(kind), strict=True)
    ]
    refuse_not_finite(*named, ("exchange", exchange.state_dict()))


def _tensors(node: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(node, torch.Tensor):
        yield name, node
    elif isinstance(node, Mapping | list | tuple):
        for key, value in node.items() if isinstance(node, Mapping) else enumerate(node):
            yield from _tensors(value, f"{name}.{key}")
