"""What `shard_within_node` puts in place inside DeepSpeed, and the proof that an engine is
confined.

Replaced until `remove()`: `deepspeed.initialize` (mpu, batch arithmetic, data loader, proof),
`zero.Init` and `GatheredParameters` (ZeRO-3 cuts and fills parameters before there is an engine),
and the world-wide checks of ZeRO-3's fetch order. After `remove()` references to a replaced
function fall back to DeepSpeed's own.
"""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import partition_parameters, partitioned_param_coordinator, stage3
from deepspeed.utils import groups
from torch.utils.data import DistributedSampler

from .checkpoints import separate
from .node_config import node_config, refuse_beside

KNOWN = "0.19.8 is known to work"
_ABSENT = object()


class Confinement:
    """The replacements, for one `NodeMPU`. A context manager whose end is `remove()`.

    Attributes:
        mpu: the node's process groups.
    """

    def __init__(self, mpu: Any):
        self.mpu, self._world, self._in_place = mpu, dist.group.WORLD, True
        self._undo: list[Callable[[], None]] = []
        self._engines: list[weakref.ref[Any]] = []
        self._groups_mpu = groups.mpu
        # torch's group was not made by DeepSpeed: its own layer does not know of it yet
        if not deepspeed.comm.is_initialized():
            deepspeed.init_distributed(dist_init_required=False)
        zero_init, gathered = partition_parameters.Init, partition_parameters.GatheredParameters
        try:
            self._replace(deepspeed, "initialize", self._initialize)
            self._replace(zero_init, "__init__", self._zero_init)
            self._replace(zero_init, "patch_init_and_builtins", self._patch_modules)
            self._replace(gathered, "__exit__", self._leave_gathered)
            for module in (partitioned_param_coordinator, stage3, partition_parameters):
                self._replace(module, "assert_ints_same_as_other_ranks", self._agree)
        except AttributeError as error:
            self.remove()
            raise RuntimeError(
                f"DeepSpeed {deepspeed.__version__} lacks what has to be replaced ({error}): "
                f"{KNOWN}"
            ) from error

    @property
    def active(self) -> bool:
        """Whether it is in place, in the world for which it was made."""
        return self._in_place and dist.is_initialized() and dist.group.WORLD is self._world

    def __enter__(self) -> Confinement:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Take the replacements out. Engines that exist keep their groups, but their ZeRO-3 checks
        span the world again.
        """
        self._in_place = False
        while self._undo:
            self._undo.pop()()
        # DeepSpeed would give it to the next engine, which was passed none
        if groups.mpu is self.mpu:
            groups.mpu = self._groups_mpu

    def _replace(self, owner: Any, name: str, ours: Callable[..., Any]) -> None:
        """Put `ours(original, ...)` in the place of `owner.name`."""
        own, original = vars(owner).get(name, _ABSENT), getattr(owner, name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return ours(original, *args, **kwargs) if self.active else original(*args, **kwargs)

        def undo() -> None:
            if vars(owner).get(name) is not call:
                # somebody else has wrapped it since: `call` stays, and does nothing of its own
                return
            if own is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, own)

        setattr(owner, name, call)
        self._undo.append(undo)

    # ---- deepspeed.initialize ------------------------------------------------------------------

    def _initialize(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(original).bind_partial(*args, **kwargs).arguments
        config = call.pop("config", None)
        config = call.pop("config_params", None) if config is None else config
        if config is None and getattr(call.get("args"), "deepspeed_config", None) is not None:
            config = call["args"].deepspeed_config
            call["args"] = copy.copy(call["args"])
            call["args"].deepspeed_config = None
        if call.get("mpu") is not None and call["mpu"] is not self.mpu:
            raise ValueError(
                f"deepspeed.initialize(mpu={type(call['mpu']).__name__}) after shard_within_node, "
                "which supplies it: pass none"
            )
        refuse_beside(config, call.get("mesh_param"), call.get("model"))
        if config is not None:
            call["config"] = node_config(config, self.mpu.node_size, self.mpu.replicas)
        data = call.pop("training_data", None)
        engine, optimizer, loader, scheduler = original(**{**call, "mpu": self.mpu})
        self._engines.append(weakref.ref(engine))
        assert_confined(engine, self.mpu)
        engine.deepspeed_io = functools.partial(self._loader, engine, engine.deepspeed_io)
        if self.mpu.replicas > 1:
            separate(engine, self.mpu.replica)
        if data is not None:
            engine.training_dataloader = loader = engine.deepspeed_io(data)
        return engine, optimizer, loader, scheduler

    def _loader(
        self, engine: Any, original: Callable[..., Any], dataset: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """`engine.deepspeed_io`, which asks the mpu for rank and size, and so would give every
        replica the same samples.
        """
        call = inspect.signature(original).bind(dataset, *args, **kwargs).arguments
        if engine.curriculum_learning_enabled():
            raise ValueError(
                "curriculum learning of DeepSpeed under shard_within_node draws the same samples "
                "on every replica: make the data loader "
                "yourself, or launch each node as an island (ISLAND_RANK, ISLAND_COUNT)"
            )
        if call.get("data_sampler") is None and hasattr(dataset, "__len__"):
            shuffle = call.get("route", "train") == "train"
            call["data_sampler"] = DistributedSampler(
                dataset, self.mpu.world, self.mpu.rank, shuffle=shuffle
            )
        return original(**call)

    # ---- ZeRO-3 before there is an engine ------------------------------------------------------

    def _zero_init(
        self, original: Callable[..., Any], this: Any, *args: Any, **kwargs: Any
    ) -> None:
        call = inspect.signature(original).bind(this, *args, **kwargs).arguments
        for key in ("data_parallel_group", "sequence_data_parallel_group"):
            group = call.pop(key, None)
            if group is not None and tuple(dist.get_process_group_ranks(group)) != self.mpu.ranks:
                found = dist.get_process_group_ranks(group)
                raise ValueError(
                    f"zero.Init({key}=...) over ranks {found} after shard_within_node, which "
                    "supplies the node: pass none"
                )
        if call.get("mpu") is not None and call["mpu"] is not self.mpu:
            raise ValueError(
                f"zero.Init(mpu={type(call['mpu']).__name__}) after shard_within_node, which "
                "supplies it: pass none"
            )
        for key in ("config", "config_dict_or_path"):
            if call.get(key) is not None:
                refuse_beside(call[key])
                call[key] = node_config(
                    call[key], self.mpu.node_size, self.mpu.replicas, batch=False
                )
        original(**{**call, "data_parallel_group": self.mpu.group, "mpu": self.mpu})

    def _patch_modules(self, original: Callable[..., Any], this: Any) -> None:
        """After DeepSpeed has replaced `Module.apply`: its broadcast after a weight init names rank
        0, which is not in every node.
        """
        original(this)
        if not type(this).override_module_apply:
            return
        theirs = torch.nn.Module.apply

        def apply(module: torch.nn.Module, fn: Callable[[torch.nn.Module], None]) -> Any:
            return theirs(module, _gathering(fn))

        torch.nn.Module.apply = apply  # type: ignore[method-assign,assignment]  # unpatch_init_and_builtins restores torch's own

    def _leave_gathered(self, original: Callable[..., Any], this: Any, *exc: Any) -> Any:
        """What rank 0 alone wrote (transformers loads so) goes to the other replicas, then
        DeepSpeed spreads it in the node.

        Parameters of an engine are left to their replica: they differ between replicas by design.
        """
        if this.enabled and this.src_rank is not None and not any(exc) and self.mpu.replicas > 1:
            owned = {
                id(p)
                for ref in self._engines
                if (engine := ref()) is not None
                for p in engine.module.parameters()
            }
            for p in this.params:
                if (
                    id(p) not in owned
                    and this.src_rank_by_group[id(p.ds_process_group)] == self.mpu.rank
                ):
                    self._from_first_replica(p.data)
        return original(this, *exc)

    def _from_first_replica(self, data: torch.Tensor) -> None:
        host = data.detach().cpu().contiguous()
        dist.broadcast(host.reshape(-1).view(torch.uint8), group_src=0, group=self.mpu.cross)
        if host.data_ptr() != data.data_ptr():
            data.copy_(host)

    # ---- ZeRO-3 while it trains ----------------------------------------------------------------

    def _agree(self, original: Callable[..., Any], ints: list[int]) -> None:
        """`assert_ints_same_as_other_ranks` among the node's ranks: nodes may use their modules in
        different orders.
        """
        data = torch.tensor(
            [len(ints), zlib.crc32(repr(list(ints)).encode())],
            device=get_accelerator().current_device_name(),
        )
        everyone = [torch.empty_like(data) for _ in self.mpu.ranks]
        dist.all_gather(everyone, data, group=self.mpu.group)
        said = [tuple(t.tolist()) for t in everyone]
        if len(set(said)) > 1:
            lengths = dict(zip(self.mpu.ranks, (n for n, _ in said), strict=True))
            raise RuntimeError(
                f"the ranks of {list(self.mpu.ranks)}, one node, disagree on the order of modules "
                "or parameters (ZeRO-3): lists of lengths "
                f"{lengths}; rank {self.mpu.rank} has {ints}"
            )


def _gathering(fn: Callable[[torch.nn.Module], None]) -> Callable[[torch.nn.Module], None]:
    """`fn` on the whole parameters of a module, as DeepSpeed's own wrapper does it, which leaves
    functions marked `wrapped` alone.
    """
    if hasattr(fn, "wrapped"):
        return fn

    @functools.wraps(fn)
    def call(module: torch.nn.Module) -> None:
        with partition_parameters.GatheredParameters(
            list(module.parameters(recurse=False)), modifier_rank=0
        ):
            fn(module)

    call.wrapped = True  # type: ignore[attr-defined]
    return call


# ---- the proof ---------------------------------------------------------------------------------


def assert_confined(engine: Any, mpu: Any) -> None:
    """Raise RuntimeError unless all that `engine` shards and reduces over is exactly this node.

    Without this everything would run and look synchronised, with ZeRO reducing over the slow link.
    """
    cure = (
        f"DeepSpeed {deepspeed.__version__}. Call shard_within_node before the model is made; if "
        "that was done, launch each node as an "
        "island (ISLAND_RANK, ISLAND_COUNT)"
    )
    if engine.mpu is not mpu or engine.seq_dp_world_size != mpu.node_size:
        raise RuntimeError(
            f"not confined to the node: the engine works with {type(engine.mpu).__name__} over "
            f"{engine.seq_dp_world_size} ranks, where "
            f"{mpu.node_size} are a node; {cure}"
        )
    for what, group, wanted in _groups_in_use(engine, mpu):
        ranks = tuple(dist.get_process_group_ranks(group))
        if ranks != wanted:
            raise RuntimeError(
                f"not confined to the node: {what} spans ranks {list(ranks)}, allowed are "
                f"{list(wanted)}; {cure}"
            )


def _groups_in_use(engine: Any, mpu: Any) -> Iterator[tuple[str, Any, tuple[int, ...]]]:
    """(what, process group, the ranks it must have) of everything in an engine over which
    collectives run.
    """
    z, stage = engine.optimizer, engine.zero_optimization_stage()
    yield "the data-parallel group", engine.data_parallel_group, mpu.ranks
    yield "the group that reduces gradients", engine.seq_data_parallel_group, mpu.ranks
    kind = type(z).__name__
    if stage > 0 and z is not None:  # else no ZeRO, and the two groups above are all there is
        yield f"{kind}.dp_process_group", _attribute(z, "dp_process_group"), mpu.ranks
    if stage in (1, 2) and z is not None:
        for i, group in enumerate(_attribute(z, "real_dp_process_group")):
            yield f"{kind}.real_dp_process_group[{i}]", group, mpu.ranks
    if stage == 3 and z is not None:
        # no optimizer: no method
        group_of = getattr(
            z, "_get_param_partition_group", lambda p: _attribute(p, "ds_process_group")
        )
        for name, p in engine.module.named_parameters():
            yield f"the partition of {name}", group_of(p), mpu.ranks
        for i, group in enumerate(getattr(z, "sub_group_process_groups", [])):
            yield f"{kind}.sub_group_process_groups[{i}]", group, mpu.ranks
    if getattr(z, "model_parallel_group", None) is not None:
        yield f"{kind}.model_parallel_group", z.model_parallel_group, (mpu.rank,)


def _attribute(owner: Any, name: str) -> Any:
    value = getattr(owner, name, None)
    if value is None:
        found = f"DeepSpeed {deepspeed.__version__}: {type(owner).__name__} has no {name}"
        raise RuntimeError(
            f"{found}, so nobody can tell whether ZeRO stays inside the node. {KNOWN}"
        )
    return value
