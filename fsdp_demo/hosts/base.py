"""The parameters as the exchange sees them: local fp32 (or lower) tensors of this rank, behind one
class.

`TrainingHost` is what an engine offers the exchange: `torch_params.TorchHost` for torch optimizers
(FSDP2, unsharded), others by packages of their own (`base.py`). It hands out local tensors and
views, steps the base optimizers, and hooks into the engine's steps.
"""

from __future__ import annotations

import functools
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
from torch import Tensor

from ..rendezvous.position import ShardPosition
from .lowrank import PROJECTION
from .optimizers import optimizer_kind

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor, Replicate

    from .step_hooks import StepHooks, TickCalls

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


@dataclass(frozen=True)
class LocalParam:
    """What is fixed about one local tensor: its name, the whole tensor's shape and the local one.

    `offset` is where it begins in the flattened whole tensor, in elements; None where the tensor is
    whole or cut along dim 0 as FSDP2 does, in the order of the ranks. A parameter may lie here in
    several shards of one name, or in an empty one. `repeats`: how many of the shards of a copy hold
    this same part: 1 where each holds its own, as under FSDP2; more where a tensor is whole on
    ranks that cut others.
    """

    name: str
    global_shape: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    frozen: bool
    offset: int | None = None
    repeats: int = 1


class TrainingHost(ABC):
    """What an engine (torch, ZeRO) offers the exchange. Tensor lists are in the order of
    `params`.

    Attributes:
        optimizers: the base optimizers.
        wrappers: what was given to `attach` around the base optimizers, and steps them.
    """

    params: list[LocalParam]
    device: torch.device
    optimizers: list[torch.optim.Optimizer]
    wrappers: list[Any]

    @property
    def clips(self) -> str:
        """A sentence on the clipping that the engine itself does; empty for none, or not known."""
        return ""

    @property
    def optimizer_names(self) -> list[str]:
        """The kind of each optimizer, by the name of torch's class where it does the same."""
        return [optimizer_kind(o) for o in self.optimizers]

    @abstractmethod
    def tensors(self, source: str) -> list[Tensor | None]:
        """Local tensors of "parameter", "gradient" or "state:NAME"; None where there is none."""

    @abstractmethod
    def parameter(self, index: int) -> Tensor:
        """The model's parameter, as the script holds it, of a shard by its index in `params`."""

    @abstractmethod
    def rates(self) -> list[float]:
        """The learning rate that the optimizer has for each shard at this step."""

    def states(self) -> list[str]:
        """Names of the optimizer states that are exchangeable (`exchangeable`)."""
        return sorted({key for p, s in self.optimizer_states() for key in exchangeable(p, s)})

    @abstractmethod
    def optimizer_states(self) -> list[tuple[Tensor, dict[str, Any]]]:
        """What the optimizers step, with the state of each."""

    @abstractmethod
    def init_optimizer_state(self) -> None:
        """Make the optimizers' state now, as their first step would."""

    @abstractmethod
    def untrained_tensors(self, model: torch.nn.Module) -> dict[str, Tensor]:
        """Local tensors of the model that no optimizer steps, by name: frozen parameters and
        buffers. Without the `foreign_tensors`, whose bytes mean nothing alone.
        """

    @abstractmethod
    def prepare_gradients(self, wanted: Sequence[bool | None]) -> list[Tensor | None]:
        """Writable gradients: made (zeros) where wanted, removed where not, left where None."""

    @abstractmethod
    def base_step(self) -> None:
        """Run the base optimizers once (for a step that the training loop did not take)."""

    @abstractmethod
    def commit(self, model: torch.nn.Module | None = None) -> None:
        """Let the model (where it is not known, `model`) see what was written into the local
        parameters. All ranks of the island call it together."""

    @abstractmethod
    def outside(self, model: torch.nn.Module) -> list[str]:
        """Names of the trainable parameters of a model that no optimizer here steps."""

    @abstractmethod
    def assert_unchanged(self) -> None:
        """Raise RuntimeError if the parameters, or which are trained, have changed."""

    def check_loaded(self) -> None:
        """Raise RuntimeError if the model computes with other values than the local parameters."""
        return  # they are the same tensors

    @abstractmethod
    def shard_position(self, rank: int, world: int) -> ShardPosition:
        """Shard and copy of this rank in an island of `world` ranks."""

    @abstractmethod
    def hooks(self, calls: TickCalls) -> StepHooks:
        """Hooks on this engine's steps, which drive the job; not started."""


def exchangeable(p: Tensor, state: Mapping[str, Any]) -> list[str]:
    """Names of the states of a parameter that have its shape, or a low rank of it."""
    tensors = [(k, v) for k, v in state.items() if isinstance(v, Tensor) and k != "step"]
    return [k for k, v in tensors if v.shape == p.shape or PROJECTION in state]


def plain_name(name: str) -> str:
    """A parameter's name without what torch.compile and torch's activation checkpointing put into
    it: islands may differ in these, and patterns are written for the model as it was defined."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def local_part(t: Tensor) -> Tensor:
    """This rank's part of a DTensor, a view; a plain tensor as it is."""
    return t.to_local().detach() if is_dtensor(t) else t.detach()


def is_foreign(t: Tensor) -> bool:
    """Whether a tensor has codes with scales elsewhere: its bytes alone mean nothing."""
    if any(getattr(t, name, None) is not None for name in ("quant_state", "SCB")):
        return True
    local = t._local_tensor if is_dtensor(t) else t
    return type(local).__torch_dispatch__ is not Tensor.__torch_dispatch__


def named_buffers(model: torch.nn.Module) -> dict[str, Tensor]:
    """All buffers of a model, by their plain names."""
    return {plain_name(n): b for n, b in model.named_buffers()}


def foreign_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """The foreign tensors (`is_foreign`) of a model, by name. `fully_shard` leaves plain codes of a
    bitsandbytes weight, whose scales its module holds.
    """
    found = {}
    for prefix, module in model.named_modules():
        coded = getattr(module, "quant_state", None) is not None
        for name, t in (*module._parameters.items(), *module._buffers.items()):
            if t is not None and (is_foreign(t) or (coded and name == "weight")):
                found[plain_name(f"{prefix}.{name}".lstrip("."))] = t
    return found


def plain_parts(t: Tensor) -> dict[str, Tensor]:
    """The tensors of which a local tensor is made, by their names in it; a plain one is its own
    part, with an empty name.

    Classes of other packages (8-bit states, quantized weights) keep codes and scales in tensors of
    their own, and have only those operations that training needs. One that does not say what it is
    made of (`__tensor_flatten__`) has no parts.
    """
    if type(t).__torch_dispatch__ is Tensor.__torch_dispatch__:
        return {"": t}
    names = t.__tensor_flatten__()[0] if hasattr(t, "__tensor_flatten__") else ()
    return {
        f"{name}.{inner}".rstrip("."): part
        for name in names
        for inner, part in plain_parts(getattr(t, name)).items()
    }


# ---- FSDP2, asked without an import of it ------------------------------------------------------
#
# `torch.distributed.tensor` takes a second to import (sympy comes with it). Nobody can hold a
# DTensor before somebody has imported it, so it is looked for among the modules that are there.


def is_dtensor(t: Any) -> TypeGuard[DTensor]:
    """Whether `t` is a DTensor: a tensor of which this rank holds a part."""
    return _is(t, "torch.distributed.tensor", "DTensor")


def is_replicate(placement: Any) -> TypeGuard[Replicate]:
    """Whether a DTensor is whole on every rank of the mesh axis with this placement."""
    return _is(placement, "torch.distributed.tensor", "Replicate")


def pieces(t: Tensor) -> int:
    """In how many parts a DTensor is cut; 1 for a plain tensor."""
    if not is_dtensor(t):
        return 1
    cut = [d for d, placement in enumerate(t.placements) if not is_replicate(placement)]
    return math.prod(t.device_mesh.size(d) for d in cut)


def strided_offset(t: Tensor) -> int | None:
    """Where this rank's part begins in the flattened whole tensor, in elements, if FSDP2 has cut
    along dim 0 what tensor parallelism had cut along it before. The parts then do not lie in the
    order of the ranks. None for all others.
    """
    if not is_dtensor(t):
        return None
    cut = [(d, p) for d, p in enumerate(t.placements) if not is_replicate(p)]
    if not any(_is_strided(p) for _, p in cut) or any(getattr(p, "dim", -1) != 0 for _, p in cut):
        return None
    lo, rows, place = 0, t.shape[0], t.device_mesh.get_coordinate()
    assert place is not None  # this rank holds a part
    for d, _ in sorted(cut, key=lambda axis: _is_strided(axis[1])):  # who has cut first
        each = -(-rows // t.device_mesh.size(d))  # as torch.chunk does
        begin = min(place[d] * each, rows)
        lo, rows = lo + begin, min(each, rows - begin)
    return lo * math.prod(t.shape[1:])


def _is_strided(placement: Any) -> bool:
    return bool(getattr(placement, "split_factor", 1) > 1)


def is_fsdp_module(module: Any) -> TypeGuard[FSDPModule]:
    """Whether `fully_shard` was applied to this module itself."""
    return _is(module, "torch.distributed.fsdp", "FSDPModule")


def is_fsdp1_module(module: Any) -> bool:
    """Whether the module is wrapped by FSDP1, whose parameters are flat parts of several."""
    return _is(module, "torch.distributed.fsdp", "FullyShardedDataParallel")


def _is(thing: Any, module: str, name: str) -> bool:
    return isinstance(thing, getattr(sys.modules.get(module), name, ()))


# Training engines of other packages: who offers an `attach` of its own for an object that is not
# a torch optimizer.
#
# A package names itself in the entry point group `fsdp_demo.engines`: the entry's name is the
# top-level module of the engine's classes, its value a module with
#
# * `attach(engine, config, **keywords) -> Exchange`, keywords as of `fsdp_demo.attach`;
# * `topology() -> Topology | None` and `advance(engine, step)` (of a replica that takes over:
#   counters and scheduler), for hosts that build the engine themselves (the Trainer).
#
# It is imported only when such an object turns up.

GROUP = "fsdp_demo.engines"
_LEVELS = 4  # of wrappers: a list, Accelerate's, the engine's own


def find_host(thing: Any) -> ModuleType | None:
    """The module that attaches to `thing`, or to what it wraps under `.optimizer` (it says what to
    pass instead); None for what is torch's own, whoever wrote the class."""
    for _ in range(_LEVELS):
        if isinstance(thing, torch.optim.Optimizer) and getattr(thing, "optimizer", None) is None:
            return None
        packages = {c.__module__.partition(".")[0] for c in type(thing).__mro__}
        for module in packages - {"torch", "builtins"}:
            if (engine_module := named(module)) is not None:
                return engine_module
        several = isinstance(thing, (list, tuple))
        thing = next(iter(thing), None) if several else getattr(thing, "optimizer", None)
    return None


@functools.cache  # the metadata of all installed packages is read, several times a start
def named(name: str) -> ModuleType | None:
    """The module that attaches to engines of package `name`; None where no package does."""
    entry = next(iter(entry_points(group=GROUP, name=name)), None)
    return cast("ModuleType", entry.load()) if entry else None
