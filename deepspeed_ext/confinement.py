"""What `shard_within_node` replaces in DeepSpeed, and the check that an engine stays in its node.

Replaced: `deepspeed.initialize` (mpu, batch size, data loader, check), `zero.Init` and
`GatheredParameters` (ZeRO-3 cuts and fills parameters before there is an engine), and the
world-wide checks of ZeRO-3's fetch order. Without nodes in place DeepSpeed's own functions run.
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
from torch.utils.data import DistributedSampler

from fsdp_demo.peers.votes import Ranks

from .all_ranks import by_value
from .checkpoint_methods import separate

TOTAL = "train_batch_size"
KNOWN = f"DeepSpeed {deepspeed.__version__} (0.19.8 is known to work)"
_engines: weakref.WeakSet[Any] = weakref.WeakSet()


@functools.cache
def replace(current: Callable[[], Any]) -> None:
    """Put the replacements in place, once in a process.

    Args:
        current: the `NodeMPU` that is in place, or None.

    Raises:
        RuntimeError: this DeepSpeed lacks what has to be replaced.
    """
    zero_init, gathered = partition_parameters.Init, partition_parameters.GatheredParameters
    try:
        _replace(current, deepspeed, "initialize", _initialize)
        _replace(current, zero_init, "__init__", _zero_init)
        _replace(current, zero_init, "patch_init_and_builtins", _patch_modules)
        _replace(current, gathered, "__exit__", _leave_gathered)
        for module in (partitioned_param_coordinator, stage3, partition_parameters):
            _replace(current, module, "assert_ints_same_as_other_ranks", _agree)
    except AttributeError as error:
        raise RuntimeError(f"{KNOWN} lacks what has to be replaced: {error}") from error


def _replace(current: Callable[[], Any], owner: Any, name: str, ours: Callable[..., Any]) -> None:
    """Put `ours(mpu, original, ...)` in the place of `owner.name`."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        mpu = current()
        return original(*args, **kwargs) if mpu is None else ours(mpu, original, *args, **kwargs)

    setattr(owner, name, call)


# ---- deepspeed.initialize ----------------------------------------------------------------------


def _initialize(mpu: Any, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    call = inspect.signature(original).bind_partial(*args, **kwargs).arguments
    config = call.pop("config", None) or call.pop("config_params", None)
    if config is None and getattr(call.get("args"), "deepspeed_config", None) is not None:
        config = call["args"].deepspeed_config
        call["args"] = copy.copy(call["args"])
        call["args"].deepspeed_config = None
    _refuse_others("deepspeed.initialize", call, mpu, "mpu")
    if config is not None:
        call["config"] = of_node(config, mpu.replicas)
    data = call.pop("training_data", None)
    engine, optimizer, loader, scheduler = original(**{**call, "mpu": mpu})
    _engines.add(engine)
    assert_confined(engine, mpu)
    engine.deepspeed_io = functools.partial(_loader, mpu, engine.deepspeed_io)
    if mpu.replicas > 1:
        separate(engine, mpu.replica)
    if data is not None:
        engine.training_dataloader = loader = engine.deepspeed_io(data)
    return engine, optimizer, loader, scheduler


def of_node(config: dict[str, Any] | str, replicas: int) -> dict[str, Any]:
    """A copy of `config` (dict, path, or base64 as DeepSpeed takes them) whose `train_batch_size`
    counts one node, as DeepSpeed then does. Raises ValueError: it does not divide.
    """
    config = dict(deepspeed.load_ds_config(config))
    total = config.get(TOTAL)
    if isinstance(total, int):  # else "auto", or DeepSpeed makes it of the other two
        if total % replicas:
            raise ValueError(
                f"{TOTAL}={total} counts all nodes, and does not divide over {replicas}: allowed "
                f"are multiples of {replicas}, or leave it out"
            )
        config[TOTAL] = total // replicas
    return config


def _loader(mpu: Any, original: Callable[..., Any], dataset: Any, *args: Any, **kwargs: Any) -> Any:
    """`engine.deepspeed_io` with a sampler over all replicas. DeepSpeed's own takes rank and size
    from the mpu, and so would give every replica the same samples.
    """
    call = inspect.signature(original).bind(dataset, *args, **kwargs).arguments
    if call.get("data_sampler") is None and hasattr(dataset, "__len__"):
        shuffle = call.get("route", "train") == "train"
        call["data_sampler"] = DistributedSampler(dataset, mpu.world, mpu.rank, shuffle=shuffle)
    return original(**call)


def _refuse_others(what: str, call: dict[str, Any], mpu: Any, *keys: str) -> None:
    """Raise ValueError for process groups and mpus of the caller's own."""
    for key in keys:
        if call.get(key) not in (None, mpu):
            raise ValueError(
                f"{what}({key}=...) after shard_within_node, which supplies the node: pass none"
            )


# ---- ZeRO-3 before there is an engine ----------------------------------------------------------


def _zero_init(
    mpu: Any, original: Callable[..., Any], this: Any, /, *args: Any, **kwargs: Any
) -> None:
    if kwargs.get("mpu") is mpu:  # an engine of the node makes it
        return original(this, *args, **kwargs)
    call = inspect.signature(original).bind(this, *args, **kwargs).arguments
    own = "data_parallel_group", "sequence_data_parallel_group", "mpu"
    _refuse_others("zero.Init", call, mpu, *own)
    for key in ("config", "config_dict_or_path"):
        if call.get(key) is not None:
            call[key] = of_node(call[key], mpu.replicas)
    original(**{**call, "data_parallel_group": mpu.group, "mpu": mpu})


def _patch_modules(mpu: Any, original: Callable[..., Any], this: Any) -> None:
    """Replace `Module.apply` once more, after DeepSpeed has: the broadcast after a weight init
    there names rank 0, which is not in every node. DeepSpeed leaves functions marked `wrapped`
    alone.
    """
    original(this)
    if not type(this).override_module_apply:
        return
    theirs = torch.nn.Module.apply

    def apply(module: torch.nn.Module, fn: Callable[[torch.nn.Module], None]) -> Any:
        @functools.wraps(fn)
        def call(part: torch.nn.Module) -> None:
            whole = list(part.parameters(recurse=False))
            with partition_parameters.GatheredParameters(whole, modifier_rank=0):
                fn(part)

        call.wrapped = True  # type: ignore[attr-defined]
        return theirs(module, fn if hasattr(fn, "wrapped") else call)

    torch.nn.Module.apply = apply  # type: ignore[method-assign,assignment]  # unpatch_init_and_builtins restores torch's own


def _leave_gathered(mpu: Any, original: Callable[..., Any], this: Any, *exc: Any) -> Any:
    """Broadcast what rank 0 alone has written (as transformers loads weights) to the other
    replicas, before DeepSpeed spreads it in the node.

    Parameters of an engine are left to their replica: they differ between replicas by design.
    """
    if this.enabled and this.src_rank is not None and not any(exc) and mpu.replicas > 1:
        owned = {id(p) for engine in _engines for p in engine.module.parameters()}
        for p in this.params:
            source = this.src_rank_by_group[id(p.ds_process_group)]
            if id(p) not in owned and source == mpu.rank:
                host = p.data.detach().cpu().contiguous()
                dist.broadcast(host.reshape(-1).view(torch.uint8), group_src=0, group=mpu.cross)
                p.data.copy_(host)
    return original(this, *exc)


# ---- ZeRO-3 while it trains --------------------------------------------------------------------


def _agree(mpu: Any, original: Callable[..., Any], ints: list[int]) -> None:
    """`assert_ints_same_as_other_ranks` in the node: nodes may use modules in different orders."""
    device = torch.device(get_accelerator().current_device_name())
    node = Ranks(mpu.group, mpu.place, mpu.node_size, device)
    checksum = zlib.crc32(repr(list(ints)).encode())
    said = node.everyone(f"{len(ints)} entries, CRC-32 {checksum:08x}")
    if len(set(said)) > 1:
        raise RuntimeError(
            f"the ranks {list(mpu.ranks)} of one node disagree on the order of modules or "
            f"parameters (ZeRO-3), counted from 0 in the node: {by_value(said)}"
        )


# ---- the check ---------------------------------------------------------------------------------


def assert_confined(engine: Any, mpu: Any) -> None:
    """Raise RuntimeError unless all that `engine` shards and reduces over is exactly this node.

    Without this everything would run and look synchronised, with ZeRO reducing over the slow link.
    An AttributeError: this DeepSpeed names its groups otherwise, so nobody can tell.
    """
    found = [(f"the engine's mpu, {type(engine.mpu).__name__},", engine.mpu is mpu)]
    for what, group, wanted in _groups_in_use(engine, mpu):
        ranks = tuple(dist.get_process_group_ranks(group))
        found.append((f"{what} of ranks {list(ranks)}, not {list(wanted)},", ranks == wanted))
    for what, confined in found:
        if not confined:
            raise RuntimeError(
                f"not confined to the node: {what} reaches further. Call shard_within_node before "
                "the model is made, without mesh_param and parallelism of other kinds; if that was "
                f"done, launch each node as an island (ISLAND_RANK, ISLAND_COUNT). {KNOWN}"
            )


def _groups_in_use(engine: Any, mpu: Any) -> Iterator[tuple[str, Any, tuple[int, ...]]]:
    """What an engine runs collectives over: (what, process group, the ranks it must have)."""
    z, stage = engine.optimizer, engine.zero_optimization_stage()
    yield "the data-parallel group", engine.data_parallel_group, mpu.ranks
    yield "the group that reduces gradients", engine.seq_data_parallel_group, mpu.ranks
    kind = type(z).__name__
    if stage > 0 and z is not None:  # else no ZeRO, and the two groups above are all there is
        yield f"{kind}.dp_process_group", z.dp_process_group, mpu.ranks
    if stage in (1, 2) and z is not None:
        for i, group in enumerate(z.real_dp_process_group):
            yield f"{kind}.real_dp_process_group[{i}]", group, mpu.ranks
    if stage == 3 and z is not None:
        # no optimizer: no method
        group_of = getattr(z, "_get_param_partition_group", lambda p: p.ds_process_group)
        for name, p in engine.module.named_parameters():
            yield f"the partition of {name}", group_of(p), mpu.ranks
        for i, group in enumerate(getattr(z, "sub_group_process_groups", [])):
            yield f"{kind}.sub_group_process_groups[{i}]", group, mpu.ranks
    if getattr(z, "model_parallel_group", None) is not None:
        yield f"{kind}.model_parallel_group", z.model_parallel_group, (mpu.rank,)
