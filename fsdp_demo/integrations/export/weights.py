"""A run's parameters from its checkpoints alone: model files in the forms that loops write, anchors
from exchange states.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Iterable, Sequence
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, StorageReader, load
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from ...checkpoint.exchange_state import SavedExchange
from ...checkpoint.reshard import Stretch, channels_of, gather
from ...config.channel import covers
from ...errors import UNREADABLE
from ...files import read_json
from ...hosts.base import plain_name

FULL, SHARDED, ADAPTER = "pytorch_model_fsdp.bin", ".metadata", "adapter_model.safetensors"


def read_model(folder: Path) -> dict[str, Tensor]:
    """The model's tensors in a checkpoint folder by plain name, on the CPU: safetensors, a
    distributed checkpoint, or FSDP's one file.
    """
    from safetensors.torch import load_file

    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        found = {name: t for file in _indexed(index) for name, t in load_file(file).items()}
    elif single.is_file():
        found = load_file(single)
    elif (folder / ADAPTER).is_file():
        raise ValueError(
            f"{folder} holds an adapter of peft ({ADAPTER}), not a whole model: load it as it "
            f"is, PeftModel.from_pretrained(BASE, {str(folder)!r}), where BASE is the model "
            "named in its adapter_config.json; with diloco and other presets that have an "
            "anchor take a step right after an exchange, or trainer.save_model() at the end "
            "of the run"
        )
    elif (folder / FULL).is_file():
        found = torch.load(folder / FULL, map_location="cpu", weights_only=True)
    elif any((folder / "model").glob("*.safetensors")):
        from torch.distributed.checkpoint import HuggingFaceStorageReader

        found = _read_distributed(HuggingFaceStorageReader(str(folder / "model")))
    else:
        metadata = sorted(folder.glob(f"*/{SHARDED}"), key=lambda path: "optim" in path.parent.name)
        if not metadata:
            raise ValueError(
                f"{folder} holds no model: looked for model.safetensors, {FULL}, "
                f"model/*.safetensors and */{SHARDED}"
            )
        try:
            found = _read_distributed(_PlainReader(str(metadata[0].parent)))
        except (MemoryError, AttributeError, KeyError, TypeError) as error:
            why = f"{metadata[0]} is damaged ({error!r:.80})"
            raise ValueError(f"{why}: take another step") from None
    return {plain_name(name): tensor for name, tensor in found.items()}


def _indexed(index: Path) -> list[Path]:
    """The files that an index names; all lie in its folder. Raises ValueError: it is damaged, or
    names a file elsewhere.
    """
    try:
        files = read_json(index)["weight_map"].values()
        names = sorted({str(name) for name in files})
    except UNREADABLE as error:
        raise ValueError(f"{index} is damaged ({error!r:.80}): take another step") from None
    for name in names:
        if not Path(os.path.normpath(index.parent / name)).is_relative_to(index.parent):
            raise ValueError(
                f"{index} names {name!r}, which is not in its folder: allowed are files beside it; "
                "do not trust it"
            )
    return [index.parent / name for name in names]


class _Names(pickle.Unpickler):
    """An unpickler for torch's `.metadata` that looks up listed names only: no file runs code."""

    PLAIN = {
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("collections", "OrderedDict"),
        ("builtins", "set"),
        ("pathlib", "PosixPath"),
    }
    MOVED = {"pathlib._local": "pathlib"}  # how Python 3.13 names the module of its paths
    OWN: dict[str, tuple[str, ...]] = {
        "torch.distributed.checkpoint.metadata": (),  # all classes defined there
        "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    }

    def find_class(self, module: str, name: str) -> Any:
        module = self.MOVED.get(module, module)
        names = self.OWN.get(module)
        if names is not None and "." not in name and (not names or name in names):
            found = getattr(import_module(module), name, None)
            if isinstance(found, type) and found.__module__ == module:
                return found
        if (module, name) in self.PLAIN or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return super().find_class(module, name)
        raise ValueError(
            f"it names {module}.{name}, which no checkpoint of tensors needs: do not load it"
        )


class _PlainReader(FileSystemReader):
    """torch's reader of files, but for the metadata, which it would unpickle without a check."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / SHARDED
        with open(path, "rb") as file:
            try:
                metadata: Metadata = _Names(file).load()
            except (pickle.UnpicklingError, MemoryError, EOFError, *UNREADABLE) as error:
                raise ValueError(
                    f"{path} is no metadata of a distributed checkpoint: {error}"
                ) from None
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def _read_distributed(reader: StorageReader) -> dict[str, Tensor]:
    """The tensors of a model in a distributed checkpoint, `model.NAME`, or `NAME` alone."""
    entries = reader.read_metadata().state_dict_metadata
    tensors = {k: v for k, v in entries.items() if isinstance(v, TensorStorageMetadata)}
    marked = {k: v for k, v in tensors.items() if k.startswith("model.")}
    nested = len(marked) == len(tensors) or any(
        k.startswith(("optimizer.", "optim.")) for k in entries
    )
    state: dict[str, Any] = {
        k: torch.empty(v.size, dtype=v.properties.dtype)
        for k, v in (marked if nested else tensors).items()
    }
    with warnings.catch_warnings():
        # one process reads all
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(state, storage_reader=reader, no_dist=True)
    return {k.removeprefix("model.") if nested else k: v for k, v in state.items()}


def outer_tensors(
    which: str, parts: Sequence[tuple[Path, SavedExchange, int]]
) -> dict[str, Tensor]:
    """Whole tensors by plain name: the model of the first checkpoint, its parameters replaced by
    anchors or by the mean.

    Args:
        which: "anchor", "mean", "replica" or "parameters" (equal everywhere).
        parts: checkpoint folder, exchange state and number of each island that is needed.
    """
    folder, saved, island = parts[0]
    if which in ("mean", "replica"):
        frozen = {p["name"] for p in saved.heads[0]["parameters"] if p["frozen"]}
        return average_models((replica(*part) for part in parts), frozen)
    tensors = read_model(folder)
    if which == "anchor":
        for name, anchor in anchors(saved, island).items():
            tensors[name] = anchor.to(tensors[name].dtype if name in tensors else anchor.dtype)
    return tensors


def replica(folder: Path, saved: SavedExchange, island: int) -> dict[str, Tensor]:
    """The whole tensors of one island's model by plain name. In a mesh the model file mixes the
    replicas, and each has its own beside the exchange states. Raises ValueError: that is missing.
    """
    if len(saved.islands) == 1:
        return read_model(folder)
    return read_model(saved.paths[island, 0].parent)


def anchors(saved: SavedExchange, island: int) -> dict[str, Tensor]:
    """The anchors of delta channels, whole, fp32, by name, from the parts of one island."""
    first = saved.of_island(island)[0]
    whole = {
        p["name"]: Stretch(p["name"], tuple(p["global_shape"]), 0, prod(p["global_shape"]))
        for p in first["parameters"]
        if not p["frozen"]
    }
    wanted = {
        name: [s for s in whole.values() if covers(channel, s.name)]
        for name, channel in channels_of(first).items()
        if channel.source == "delta"
    }
    found = gather(saved, island, wanted, ("anchor",))
    by_name = {
        s.name: anchor
        for channel, there in wanted.items()
        for s, anchor in zip(there, found[channel]["anchor"], strict=True)
    }
    return {name: by_name[name] for name in whole if name in by_name}


def average_models(replicas: Iterable[dict[str, Tensor]], frozen: set[str]) -> dict[str, Tensor]:
    """The mean of floating-point tensors, in fp32; frozen and integer ones are those of the first
    replica, equal ones stay as they are.
    """
    every = iter(replicas)
    first, count = next(every), 1
    total: dict[str, Tensor] = {}
    differ: set[str] = set()
    for tensors in every:
        count += 1
        for name, own in first.items():
            other = tensors.get(name)
            if other is None or own.shape != other.shape:
                there = "absent" if other is None else tuple(other.shape)
                raise ValueError(
                    f"{name} is {tuple(own.shape)} on one island, {there} on another: these are "
                    "not replicas of one model"
                )
            if name in frozen or not own.is_floating_point():
                continue
            total[name] = total.get(name, own.float()) + other.float()
            if not torch.equal(own, other):
                differ.add(name)
    return first | {name: (total[name] / count).to(first[name].dtype) for name in differ}
