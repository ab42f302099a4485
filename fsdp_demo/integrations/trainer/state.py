"""The exchange's part of the Trainer's checkpoints: `checkpoint-N/exchange/rank<r>.json` and
`.safetensors` (see `checkpoint/exchange_state.py`).

In a mesh each replica has a folder of its own below `exchange/`, which also holds its parameters
and optimizer states where replicas differ: what the Trainer itself saves there is a mixture of
them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from transformers import PretrainedConfig, Trainer

from ...checkpoint.exchange_state import SavedExchange, load_exchange, save_exchange
from ...checkpoint.files import read_head, refuse_exchange
from ...checkpoint.manager import CheckpointManager
from ...checkpoint.sharded_state import load_tensors, save_tensors, tensors_of
from ...exchange.exchange import Exchange
from ...rendezvous.topology import Topology

CURE = (
    "Resume from another checkpoint, or start the exchange's state anew with ExchangeCallback(..., "
    "fresh=True)"
)


def save_state(
    checkpoint: Path, exchange: Exchange, model: Any, group: Any, apart: bool = False
) -> None:
    """Write the exchange's part of this rank and, in a mesh whose replicas differ, parameters and
    inner optimizer states of this replica. All ranks of the replica call it together.

    Args:
        model: sharded or not.
        group: process group of the replica's ranks over CPU tensors (`CheckpointManager.group`).
        apart: in a mesh, the Trainer's own files are those of each replica (DeepSpeed), not a
            mixture.
    """
    topology, folder = exchange.topology, checkpoint / "exchange"
    if topology.one_world:
        folder = folder / f"replica{topology.island}"
    save_exchange(folder, exchange)
    if saves_tensors(exchange, apart):
        save_tensors(folder / "model", tensors_of(model, exchange.optimizers), group, wait=True)


def saves_tensors(exchange: Exchange, apart: bool) -> bool:
    """Whether `save_state` writes parameters and optimizer states, too."""
    return exchange.topology.one_world and not apart and _differs(exchange)


def open_state(checkpoint: Path) -> SavedExchange:
    """The saved exchange for `attach(state=...)`: of this island, in a mesh of all replicas. Raises
    ValueError: there is none; parts that are half-written or damaged.
    """
    folder = checkpoint / "exchange"
    if not folder.is_dir():
        raise ValueError(
            f"the Trainer resumes from {checkpoint}, which was saved without the exchange. {CURE}"
        )
    return load_exchange(folder)


def restore_local(
    checkpoint: Path, exchange: Exchange, model: Any, group: Any, apart: bool = False
) -> None:
    """Load this replica's own parameters and optimizer states from a checkpoint of a mesh, in place
    of the mixture that the Trainer has loaded. From a mesh of other numbers the parameters become
    the anchors, which all replicas share.

    Args:
        model, group, apart: as for `save_state`; apart, there is nothing to put right in a mesh.

    Raises:
        ValueError: a mesh of other numbers, whose replicas share no anchors; a checkpoint of
            islands in a mesh, of which the Trainer has loaded one island's model.
    """
    topology, folder = exchange.topology, checkpoint / "exchange"
    saved_in_mesh = (folder / "replica0").is_dir()
    if not _differs(exchange) or (not saved_in_mesh and not topology.one_world):
        return
    if not saved_in_mesh:
        raise ValueError(
            f"{checkpoint} was saved by islands, whose models differ: resume it as islands. {CURE}"
        )
    if apart and topology.one_world:
        return
    head = read_head(folder / "replica0" / "rank0.json")[0]
    if (head["islands"], head["world"]) != (topology.islands, topology.world):
        _begin_at_anchors(exchange, folder)
        return
    own = folder / f"replica{topology.island}" / "model"
    if not own.is_dir():
        raise ValueError(
            f"{own} is missing: what the Trainer saved in a mesh mixes replicas of preset "
            f"{exchange.config.preset!r}. {CURE}"
        )
    load_tensors(own, model, exchange.optimizers, group, head["optimizers"])


def _begin_at_anchors(exchange: Exchange, folder: Path) -> None:
    """Set the parameters to the anchors. All ranks of a replica call it together."""
    if exchange.config.result(exchange.topology.islands) != "anchor":
        raise ValueError(
            f"{folder} was saved by a mesh of other numbers, and replicas of preset "
            f"{exchange.config.preset!r} share no anchors to go on from: resume with as many nodes "
            f"and ranks. {CURE}"
        )
    for c in exchange.channels:
        if c.channel.source == "delta":
            c.show_anchor()
            c.anchor_here()


def _differs(exchange: Exchange) -> bool:
    """Whether replicas have states of their own between exchanges."""
    return any(not c.channel.before_step for c in exchange.channels)


def refuse_alone(checkpoint: Any, preset: str) -> None:
    """Raise ValueError where a single replica would resume a checkpoint of several islands."""
    if isinstance(checkpoint, (str, os.PathLike)) and (Path(checkpoint) / "exchange").is_dir():
        raise ValueError(
            f"{checkpoint} was saved by several islands; alone preset {preset!r} exchanges "
            "nothing, and outer parameters and momentum would be left behind. Go on from this "
            "island's own parameters with ExchangeCallback(..., fresh=True), or from those of all "
            "by `fsdp-demo export RUN OUT`"
        )


# The Trainer's saves, by the one saver of this package (`checkpoint/manager.py`): sealed with
# checksums when all is there, refused where values are not finite or the folder belongs to a
# later life, a warning where the disk is full, and `save_total_limit` among islands.


def manager_of(
    trainer: Trainer, topology: Topology, remote: str | None = None
) -> CheckpointManager:
    """The manager of the Trainer's folder, and of its copies (`remote`). A mesh has one folder, and
    there all ranks save together; its `group` is that of one replica all the same. All ranks of all
    islands call it together.
    """
    args: Any = trainer.args
    replica = topology
    if not topology.elastic:
        together = {"rank": args.process_index, "world": args.world_size, "group": None}
        topology = replace(topology, kind="single", island=0, islands=1, **together)
    limit = args.save_total_limit
    keep = limit if limit and limit > 0 else None
    grouped = replica if replica.one_world else None
    return CheckpointManager(args.output_dir, topology, keep, grouped=grouped, remote=remote)


def save_all(
    trainer: Trainer,
    exchange: Exchange,
    manager: CheckpointManager,
    original: Callable[..., Any],
    model: Any,
    trial: Any,
) -> bool:
    """Save by the Trainer's `_save_checkpoint` (`original`), with the exchange's parts beside its
    files; returns whether the checkpoint is there. All ranks of an island, in a mesh of all
    replicas, call it together.

    Raises:
        PeerLost: what was under way in the exchange is lost, on any rank.
        OSError, NotFinite: the third save in a row that failed.
        Superseded: the folder belongs to a later life.
    """
    state = trainer.state

    def write(folder: Path) -> None:
        manager.ranks.together(lambda: refuse_exchange(exchange), folder.name)
        try:
            original(model, trial)
        except CheckpointException as error:  # torch's, of sharded states
            raise OSError(str(error).strip().splitlines()[-1]) from error
        save_state(folder, exchange, model, manager.group, trainer.is_deepspeed_enabled)
        config = getattr(model, "config", None)
        # a sharded checkpoint has none, `fsdp-demo export` needs it
        missing = trainer.args.should_save and not (folder / "config.json").exists()
        if missing and isinstance(config, PretrainedConfig):
            config.save_pretrained(folder)
        manager.spare(step_of(state.best_model_checkpoint))

    made = manager.save(state.global_step, write)
    if not made and step_of(state.best_model_checkpoint) == state.global_step:
        state.best_model_checkpoint = None
    return made


def step_of(checkpoint: str | None) -> int | None:
    """The step in the path of one of the Trainer's checkpoints; None without a path."""
    return None if checkpoint is None else int(checkpoint.rsplit("-", 1)[-1])
