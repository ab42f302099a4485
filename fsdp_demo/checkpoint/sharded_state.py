"""A replica's parameters, buffers and inner optimizer states in one set of safetensors files, which
another number of shards can load.

The files are those of `torch.distributed.checkpoint`, which is imported where it is used: it takes
a second. All ranks of the replica come together; one rank alone: `integrations/trainer/state.py`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..errors import NotSaveable, as_disk_error, see
from ..hosts.base import is_dtensor, is_replicate, local_part, pieces, plain_name, plain_parts
from ..hosts.optimizers import holders, materialise, misfit, room, take_empty_step
from ..hosts.torch_params import named_parameters, unwrap_model
from ..rendezvous.topology import Topology
from .files import OPTIMIZER, OTHER

log = logging.getLogger("fsdp_demo")

OUTSIDE = "parameter"
"""As the state of a parameter that only an optimizer holds: its value."""

NUMBER = "number"
"""As a part of a state: it is a number, not a tensor."""

_SHARD = re.compile(r"@\d+of\d+$")


def cpu_group(topology: Topology) -> Any:
    """A process group of a replica's ranks over CPU tensors; None without torch's distributed. All
    ranks of the replica make it together.

    Also for one rank that torch has joined, be it to itself: an NCCL group saves no copies, and
    with none torch would save with all replicas of a mesh.
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    if topology.group is not None:
        members: list[int] | None = dist.get_process_group_ranks(topology.group)
    else:
        members = [dist.get_rank()] if topology.world == 1 else None
    patience = timedelta(seconds=topology.timeout + 60)
    return dist.new_group(members, patience, "gloo", use_local_synchronization=members is not None)


def model_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A model's parameters and persistent buffers by name; DTensors stay. No collectives."""
    whole = unwrap_model(model)
    state = whole.state_dict()  # shards again what an evaluation has gathered
    return {plain_name(name): p for name, p in whole.named_parameters()} | {
        plain_name(name): b for name, b in whole.named_buffers() if name in state
    }


def outside(
    held: Mapping[str, torch.Tensor], optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, torch.Tensor]:
    """What the optimizers hold beside the `model_tensors` (a criterion that learns), by name."""
    inside, out = {id(t) for t in held.values()}, dict[str, torch.Tensor]()
    for _, _, _, p, name in named_parameters(optimizers, None):
        if id(p) not in inside:
            while name in held or name in out:
                name += "'"
            out[name] = p
    return out


def tensors_of(
    model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, torch.Tensor]:
    """The live tensors of a replica by name: `model.NAME` and `optimizer.NAME.STATE`; DTensors
    where it is sharded. What only an optimizer holds is `optimizer.NAME.parameter`.

    A state that is a number (a step counter) is `optimizer.NAME.STATE.number`. Of a tensor of
    another package's class there are its parts, such as `optimizer.NAME.STATE.codes`. Where each
    shard has a part of its own that cannot be cut anew, `@1of2` follows.

    Raises:
        NotSaveable: an optimizer keeps a state that is neither tensor nor number.
    """
    held = model_tensors(model)
    beside = outside(held, optimizers)
    out = _weights(held, beside)
    for name, p in (held | beside).items():
        for key, value in next((kept for o in optimizers if (kept := o.state.get(p))), {}).items():
            found = _as_tensors(f"optimizer.{name}.{key}", value, p)
            if not found and value is not None:
                raise NotSaveable(
                    f"the optimizer keeps {key} for {name}, of type {type(value).__name__}: a "
                    "checkpoint that any number of shards loads holds tensors and numbers only. "
                    "Use an optimizer whose states are such (AdamW, SGD, MuonAdamW)"
                    f"{see('unsaveable-state')}"
                )
            out |= found
    return out


def refuse_unsaveable(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse, as `tensors_of`, optimizers with states that cannot be saved; one that has none yet
    raises at the end of its first step.
    """

    def look(stepped: torch.optim.Optimizer, *_: Any) -> None:
        # torch walks its hooks here: none may be removed. A step that calls that of its base class
        # comes here twice, first before its states are made.
        if stepped in waiting and stepped.state:
            waiting.remove(stepped)
            tensors_of(model, optimizers)

    tensors_of(model, optimizers)
    waiting = {o for o in optimizers if not o.state}
    for o in waiting:
        o.register_step_post_hook(look)


def _weights(
    held: Mapping[str, torch.Tensor], beside: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Of the live tensors those that are not states."""
    named = [(f"model.{name}", t) for name, t in held.items()]
    named += [(f"optimizer.{name}.{OUTSIDE}", p) for name, p in beside.items()]
    return {n: t for name, whole in named for n, t in _as_tensors(name, whole, whole).items()}


def _as_tensors(name: str, value: Any, p: torch.Tensor) -> dict[str, torch.Tensor]:
    """A state of parameter `p` (or itself) as the files hold it; empty where they cannot."""
    if isinstance(value, bool | int | float):
        kind = torch.float64 if isinstance(value, float) else None
        return {f"{name}.{NUMBER}": torch.tensor(value, dtype=kind, device="cpu")}
    if not isinstance(value, torch.Tensor):
        return {}
    parts = plain_parts(local_part(value))
    if "" not in parts:
        return {f"{name}.{part}{_mark(p)}": t for part, t in parts.items()}
    if is_dtensor(value) or value.numel() == 1:
        return {name: value.detach()}
    return {f"{name}{_mark(p)}": value.detach()}


def _mark(p: torch.Tensor) -> str:
    """Which shard of `p` this rank holds; empty where it is whole."""
    if not is_dtensor(p) or pieces(p) == 1:
        return ""
    at, sizes = p.device_mesh.get_coordinate() or (), p.device_mesh.shape
    index = 0
    for here, size, placement in zip(at, sizes, p.placements, strict=True):
        index = index if is_replicate(placement) else index * size + here
    return f"@{index}of{pieces(p)}"


def save_tensors(
    folder: Path, live: dict[str, torch.Tensor], group: Any, wait: bool
) -> Callable[[], None]:
    """Write `live` below `folder`; what is returned waits until the files are there. Collectives
    happen before this returns.

    Args:
        group: of the replica's ranks over CPU tensors; None: a single rank.
        wait: False: a thread writes a copy while training goes on.

    Raises:
        OSError: a file cannot be written, on any rank; here or from what is returned.
    """
    import torch.distributed.checkpoint as dcp

    live = _unshared(live)
    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    if wait:
        with _as_os_error():
            dcp.save(live, storage_writer=writer, process_group=group)
        return lambda: None
    under_way: Any = dcp.async_save(live, storage_writer=writer, process_group=group)

    def finish() -> None:
        with _as_os_error():
            under_way.result()

    return finish


def _unshared(live: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each state with memory of its own: bitsandbytes gives all parameters one table."""
    seen: set[int] = set()
    out = dict(live)
    for name, tensor in live.items():
        at = local_part(tensor).untyped_storage().data_ptr()
        if at in seen and name.startswith("optimizer.") and not is_dtensor(tensor):
            out[name] = tensor.clone()
        seen.add(at)
    return out


def load_tensors(
    folder: Path,
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    group: Any,
    kinds: Sequence[str] | None = None,
    weights_suffice: bool = False,
) -> bool:
    """Fill the live tensors of a replica from the model folder of a checkpoint: all that is in it,
    also states that the optimizers here make at their first step only.

    Args:
        folder: of the model, in a checkpoint.
        group: as for `save_tensors`.
        kinds: of the optimizers that saved it (`optimizer_kind`); None: not known.
        weights_suffice: of other optimizers the states begin anew, with a warning.

    Returns:
        Whether the optimizers' states were loaded.

    Raises:
        ValueError: another model or optimizer.
    """
    import torch.distributed.checkpoint as dcp

    for optimizer in optimizers:
        materialise(optimizer)
    held = model_tensors(model)
    beside = outside(held, optimizers)
    named = held | beside
    with _as_value_error(folder):
        reader = dcp.HuggingFaceStorageReader(str(folder))
        saved = reader.read_metadata().state_dict_metadata
    states = [k for name, size in saved.items() if (k := _kept(name, size, named)) is not None]
    why = _misfit(optimizers, kinds, named, states)
    if why and not weights_suffice:
        raise ValueError(f"{folder} does not fit this optimizer ({why}): {OPTIMIZER}")
    if why:
        text = "%s: only the model is taken, the optimizer's state begins anew (%s)"
        log.warning(text, folder, why)
    rooms = {} if why else _rooms(optimizers, named, states)
    live = _weights(held, beside) | {k.name: t for k, t in rooms.items()}
    _compare(folder, live, saved, not why)
    with _as_value_error(folder):
        dcp.load(live, storage_reader=reader, process_group=group)
    by_id = holders(optimizers)
    for k, number in ((k, t) for k, t in rooms.items() if k.part == NUMBER):
        p = named[k.parameter]
        by_id[id(p)][0].state[p][k.key] = number.item()
    return not why


@dataclass(frozen=True)
class _Kept:
    """A tensor of a model folder that belongs to an optimizer's state.

    Attributes:
        parameter: empty where no parameter here has that name.
        part: empty for a plain tensor, `NUMBER`, or a part of a tensor of another class.
        shard: whose own it is, such as "@1of2"; empty where all ranks can have it.
    """

    name: str
    parameter: str
    key: str
    part: str
    shard: str
    size: torch.Size
    dtype: torch.dtype


def _kept(name: str, found: Any, named: Mapping[str, torch.Tensor]) -> _Kept | None:
    """What `tensors_of` has called so; None where it is no state."""
    kind, _, path = name.partition(".")
    if kind != "optimizer":
        return None
    shard = at.group() if (at := _SHARD.search(path)) else ""
    path = path.removesuffix(shard)
    parameter = path.rpartition(".")[0]
    while parameter and parameter not in named:
        parameter = parameter.rpartition(".")[0]
    key, _, part = path.removeprefix(parameter).removeprefix(".").partition(".")
    if key == OUTSIDE and parameter:
        return None
    return _Kept(name, parameter, key, part, shard, found.size, found.properties.dtype)


def _misfit(
    optimizers: Sequence[torch.optim.Optimizer],
    kinds: Sequence[str] | None,
    named: Mapping[str, torch.Tensor],
    states: Sequence[_Kept],
) -> str:
    """Why these states are not those of the optimizers here; empty where they are."""
    keys: dict[str, set[str]] = {}
    for k in states:
        if not k.parameter:
            return f"nothing here takes {k.name}"
        shards = pieces(named[k.parameter])
        if k.shard and int(k.shard.rpartition("of")[2]) != shards:
            return (
                f"{k.key} of {k.parameter} lies there in {k.shard.rpartition('of')[2]} shards, "
                f"which are not cut anew, and here it has {shards}"
            )
        keys.setdefault(k.parameter, set()).add(k.key)
    return misfit(optimizers, kinds, [(n, p, keys.get(n, set())) for n, p in named.items()])


def _rooms(
    optimizers: Sequence[torch.optim.Optimizer],
    named: Mapping[str, torch.Tensor],
    states: Sequence[_Kept],
) -> dict[_Kept, torch.Tensor]:
    """Where each state goes that this rank is to have: the live tensor, made where the optimizer
    has none yet; of a number a tensor.
    """
    mine = [k for k in states if k.shard in ("", _mark(named[k.parameter]))]
    foreign = {(k.parameter, k.key) for k in mine if k.part not in ("", NUMBER)}
    # of a state that is cut in classes of its own and plain tensors this rank has one
    mine = [k for k in mine if k.part or (k.parameter, k.key) not in foreign]
    by_id = holders(optimizers)
    for optimizer in {id(o): o for o, _ in by_id.values()}.values():
        steps = {k.parameter for k in mine if by_id[id(named[k.parameter])][0] is optimizer}
        if any(n in steps and key not in optimizer.state[named[n]] for n, key in foreign):
            take_empty_step(optimizer, [named[n] for n in steps])
    return {k: _place(*by_id[id(named[k.parameter])], named[k.parameter], k) for k in mine}


def _place(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], p: torch.Tensor, k: _Kept
) -> torch.Tensor:
    """The live tensor that a state goes to."""
    if k.part == NUMBER:
        return torch.empty(k.size, dtype=k.dtype, device="cpu")
    live = optimizer.state[p].get(k.key)
    if k.part:
        parts = plain_parts(local_part(live)) if isinstance(live, torch.Tensor) else {}
        if k.part not in parts:
            raise ValueError(
                f"{k.key} of {k.parameter} was saved with a part {k.part!r}, which it does not "
                f"have here ({type(optimizer).__name__}): install the version of the optimizer's "
                f"package that saved it, {OPTIMIZER}"
            )
        return parts[k.part]
    if not isinstance(live, torch.Tensor):
        live = room(group, p, k.key, k.size, k.dtype, p.shape)
        if is_dtensor(p) and not is_dtensor(live) and live.numel() > 1 and not k.shard:
            from torch.distributed.tensor import DTensor, Replicate

            # of another shape than its sharded parameter: the optimizer computes with both
            whole = [Replicate()] * p.device_mesh.ndim
            live = DTensor.from_local(live, p.device_mesh, whole, run_check=False)
        optimizer.state[p][k.key] = live
    return live


def _compare(
    folder: Path, live: Mapping[str, torch.Tensor], saved: Mapping[str, Any], states: bool
) -> None:
    """Raise ValueError where the folder holds another model; `states`: or other states."""
    shapes = {name: tuple(t.shape) for name, t in live.items()}
    kinds = ("model.", "optimizer.") if states else ("model.",)
    theirs = {n: tuple(found.size) for n, found in saved.items() if n.startswith(kinds)}
    odd = [n for n in shapes if shapes[n] != theirs.get(n)]
    odd += [n for n in theirs if n not in shapes and not _SHARD.search(n)]
    if odd:
        there, here = (x.get(odd[0], "absent") for x in (theirs, shapes))
        raise ValueError(
            f"{folder} does not fit this model and optimizer (another model, preset or "
            f"optimizer?): {odd[0]} is {there} there, {here} here. Give those it was saved with, "
            f"or {OTHER}"
        )


@contextmanager
def _as_value_error(folder: Path) -> Iterator[None]:
    """What ranks could not read: safetensors and torch have no class of their own for damage."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except (Exception, CheckpointException) as error:
        causes = [cause for cause, _ in getattr(error, "failures", {}).values()]
        why = f"{[*causes, error][0]!r:.200}".splitlines()[0]
        raise ValueError(f"{folder} cannot be read ({why}): {OTHER}") from error


@contextmanager
def _as_os_error() -> Iterator[None]:
    """What ranks could not write, as an OSError: torch's own exception is no `Exception`."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        if causes and all(
            isinstance(as_disk_error(c), OSError) for c in causes if isinstance(c, Exception)
        ):
            raise OSError(f"{causes[0]} (rank {next(iter(error.failures))})") from None
        raise RuntimeError(str(error)) from None
