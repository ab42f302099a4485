"""`attach`: from a DeepSpeed engine to an `Exchange`."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

from fsdp_demo import Exchange, ExchangeConfig, Topology, preset, presets
from fsdp_demo.attaching import join, settled, vacate
from fsdp_demo.checkpoint import SavedExchange

from . import checkpoints as folders
from .checkpoints import advance
from .node_mesh import compare_environment
from .node_mesh import topology as place
from .refusals import refuse, warn
from .zero_params import ZeroHost


def attach(
    engine: Any,
    config: ExchangeConfig | str,
    *,
    model: Any = None,
    topology: Topology | None = None,
    must_match: dict[str, Any] | None = None,
    step: int | None = None,
    state: dict[str, Any] | SavedExchange | None = None,
    batch: tuple[int, int] | None = None,
    catch_up: bool = True,
    fresh: bool = False,
    checkpoints: bool = True,
    remote: str | None = None,
    **changes: Any,
) -> Exchange:
    """Join the replicas of a model that a ZeRO engine trains: from now on every step of `engine`
    takes part in the exchange.

    Call it after `deepspeed.initialize`, on all ranks of all replicas. Steps are counted by
    `engine.global_steps`; gradients are clipped by the engine's `gradient_clipping`, which takes
    the place of the preset's norm.

    Args:
        engine: a DeepSpeed engine at ZeRO-1, 2 or 3 (under Accelerate: the prepared model).
        config: a preset name, the path of a yaml file, or an `ExchangeConfig`.
        model: not needed, the engine has one; there so that `fsdp_demo.attach(engine, ...,
            model=...)` works.
        topology: default the node of `shard_within_node`, else `Topology.from_env()` (islands).
        must_match, batch, catch_up, fresh: as for `fsdp_demo.attach`; `batch` is known from the engine,
            and the norm that clips is agreed anyway.
        step: default `engine.global_steps`.
        state: the exchange's state to go on from, where the engine itself is loaded already. With
            `checkpoints` nobody needs it: `engine.load_checkpoint`, called after `attach`, brings
            it.
        checkpoints: `engine.save_checkpoint` and `engine.load_checkpoint` keep a folder per
            replica, with the exchange's state in it.
        remote: address of a store of objects that gets a copy of each checkpoint, below the name of
            DIR (`fsdp_demo.checkpoint.CheckpointManager`).
        changes: changes of the preset, as in `fsdp_demo.preset(name, **changes)`.

    Raises:
        ValueError: an engine without ZeRO or with something the exchange does not go with; a wrong
            configuration; islands that run something else; ISLAND_* variables that only some ranks
            have.
        PeerLost: replicas that did not come in time.

    Example:
        >>> import deepspeed_ext
        >>> engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config="zero2.json")  # doctest: +SKIP
        >>> exchange = deepspeed_ext.attach(engine, "demo")  # doctest: +SKIP
    """  # noqa: E501
    config = settled(config, changes)
    if topology is None:
        topology = place(engine)  # it compares what the ranks were given
    else:
        compare_environment()
    refuse(engine, config, topology)
    norm = engine.gradient_clipping()
    _refuse_two_norms(config, changes, norm)
    host = ZeroHost(engine)
    vacate(host.optimizers)
    # a checkpoint that was loaded may have brought another norm
    config, engine.optimizer.clip_grad = config.clipped_once(norm)
    with ExitStack() as undo:  # whoever goes on without an exchange has the engine as it was
        undo.callback(host.partitions.clip_again)
        exchange = join(
            host,
            config,
            model=engine.module,
            topology=topology,
            must_match={"gradient_clipping": norm, **(must_match or {})},
            step=engine.global_steps if step is None else step,
            state=state,
            batch=batch
            or (engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()),
            catch_up=catch_up,
            fresh=fresh,
        )
        undo.callback(exchange.detach)
        exchange.on_left_out(partial(_leave_out, engine))
        warn(engine)
        if exchange.newcomer:
            advance(engine, exchange.step)
        if checkpoints:
            folders.follow(engine, exchange, remote)
        undo.pop_all()
    return exchange


def _leave_out(engine: Any) -> None:
    """Count a step that this island leaves out, since it is slower than another."""
    engine.global_steps += 1
    if engine.lr_scheduler is not None:
        engine.lr_scheduler.step()


def _refuse_two_norms(config: ExchangeConfig, changes: dict[str, Any], norm: float) -> None:
    """Raise ValueError for a norm of the caller's own beside the engine's, `norm`."""
    usual = preset(config.preset).clip if config.preset in presets() else None
    own = (changes["clip"] or 0.0) if "clip" in changes else config.clip
    if own == norm or ("clip" not in changes and own in (None, usual)):
        return
    raise ValueError(
        f"clip={own:g} beside DeepSpeed's gradient_clipping={norm:g} (1.0 where its "
        "configuration is silent): set "
        f'"gradient_clipping": {own:g} there, and no clip here'
    )
