"""A replica's parameters, buffers and inner optimizer states in one set of safetensors files, which
another number of shards can load.

The files are those of `torch.distributed.checkpoint`, which is imported where it is used: it takes
a second. All ranks of the replica come together; one rank alone: `local_state.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..errors import as_disk_error
from ..hosts.base import local_part, plain_name
from ..hosts.optimizers import materialise
from ..hosts.torch_params import named_parameters, unwrap_model

log = logging.getLogger("fsdp_demo")

OUTSIDE = "parameter"
"""As the state of a parameter that only an optimizer holds: its value."""


def model_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers of a model by name; DTensors where it is sharded. No
    collectives.
    """
    whole = unwrap_model(model)
    state = whole.state_dict()  # shards again what an evaluation has gathered
    return {plain_name(name): p for name, p in whole.named_parameters()} | {
        plain_name(name): b for name, b in whole.named_buffers() if name in state
    }


def outside(
    held: Mapping[str, torch.Tensor], optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, torch.Tensor]:
    """What the optimizers hold beside the `model_tensors` (a criterion that learns), each by a name
    of its own.
    """
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

    Raises:
        ValueError: an optimizer keeps a state that is no tensor.
    """
    held = model_tensors(model)
    beside = outside(held, optimizers)
    out = {f"model.{name}": t.detach() for name, t in held.items()}
    out |= {f"optimizer.{name}.{OUTSIDE}": p.detach() for name, p in beside.items()}
    for name, p in (held | beside).items():
        for key, value in next((kept for o in optimizers if (kept := o.state.get(p))), {}).items():
            if not torch.is_tensor(value):
                raise ValueError(
                    f"the optimizer keeps {key}={value!r:.40} for {name}: a checkpoint that any "
                    "number of shards loads holds tensors only. "
                    "Use an optimizer whose states are tensors (AdamW, SGD, MuonAdamW)"
                )
            out[f"optimizer.{name}.{key}"] = value
    return out


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


def load_tensors(
    shares: Mapping[Path, float],
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    group: Any,
) -> None:
    """Fill the live tensors of a replica from the model folder of a checkpoint.

    Args:
        shares: model folders and their weights. Several: the weighted mean of several replicas,
            which is a copy where all are equal.
        group: as for `save_tensors`.

    Raises:
        ValueError: another model or optimizer.
    """
    import torch.distributed.checkpoint as dcp

    for optimizer in optimizers:
        materialise(optimizer)
    live, beside = tensors_of(model, optimizers), outside(model_tensors(model), optimizers)
    total: dict[str, torch.Tensor] = {}
    for folder, weight in shares.items():
        try:
            reader = dcp.HuggingFaceStorageReader(str(folder))
            if beside:
                live = _as_saved(live, beside, reader.read_metadata().state_dict_metadata, folder)
            dcp.load(live, storage_reader=reader, process_group=group)
        except Exception as error:  # whatever the planner says about names and shapes
            raise ValueError(
                f"{folder} does not fit this model and optimizer (another model, preset or "
                f"optimizer?): {error}"
            ) from error
        if len(shares) > 1:
            for name, tensor in live.items():
                part = local_part(tensor).double() * weight
                total[name] = total[name] + part if name in total else part
    for name, value in total.items():
        local_part(live[name]).copy_(value)


def _as_saved(
    live: dict[str, torch.Tensor], beside: Iterable[str], saved: Iterable[str], folder: Path
) -> dict[str, torch.Tensor]:
    """Of `live` what a folder of an earlier release can fill: it has nothing of what only the
    optimizers hold (`beside`).
    """
    if any(n.startswith("optimizer.") and n.endswith(f".{OUTSIDE}") for n in saved):
        return live
    log.warning(
        "%s is of a release that did not save what only the optimizer holds (%s): it stays as it "
        "is here, with a fresh state",
        folder,
        ", ".join(beside),
    )
    missing = tuple(f"optimizer.{name}." for name in beside)
    there = set(saved)
    return {n: t for n, t in live.items() if n in there or not n.startswith(missing)}


@contextmanager
def _as_os_error() -> Iterator[None]:
    """What ranks could not write, as the error that it was: torch gathers it into an exception of
    its own, which is no `Exception`.
    """
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
