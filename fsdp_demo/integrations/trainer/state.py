"""The exchange's part of the Trainer's checkpoints: `checkpoint-N/exchange/rank<r>.json` and
`.safetensors` (see `checkpoint/exchange_state.py`).

In a mesh each replica has a folder of its own below `exchange/`, which also holds its parameters
and optimizer states where replicas differ: what the Trainer itself saves there is a mixture of
them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from transformers import PretrainedConfig, Trainer

from ...checkpoint.exchange_state import SavedExchange, describe_part, load_exchange, save_exchange
from ...checkpoint.files import read_head, read_part, refuse_exchange, write_part
from ...checkpoint.manager import CheckpointManager
from ...exchange.exchange import Exchange
from ...hosts.base import local_part, plain_parts
from ...hosts.optimizers import holders, materialise, room, take_empty_step
from ...rendezvous.topology import Topology

# One rank's shards of a replica, for a mesh in which the host saves one model for all replicas
# (`integrations/trainer`): local parameters and the states of the inner optimizers. No
# collectives.


def _parameters(
    optimizers: Sequence[torch.optim.Optimizer],
) -> list[tuple[torch.optim.Optimizer, torch.Tensor]]:
    """From the optimizers, not from the model: under FSDP2 the model shows unsharded parameters
    between forward and backward.
    """
    return [(o, p) for o in optimizers for group in o.param_groups for p in group["params"]]


def replica_tree(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """References to the live local tensors: `parameters`, and for each of them its states by name
    in `optimizer`; of one that is of another package's class its parts by name, in a dict.
    """
    pairs = _parameters(optimizers)
    states = [{k: _plain(v) for k, v in o.state.get(p, {}).items()} for o, p in pairs]
    return {"parameters": [local_part(p) for _, p in pairs], "optimizer": states}


def _plain(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    parts = plain_parts(local_part(value))
    return parts.get("", parts)


@torch.no_grad()
def fill_replica(
    optimizers: Sequence[torch.optim.Optimizer], tree: dict[str, Any], where: str
) -> None:
    """Put the values of a `replica_tree` into the live tensors.

    Args:
        where: the file it came from, for the error.

    Raises:
        ValueError: it belongs to another model or number of ranks.
    """
    pairs = _parameters(optimizers)
    if [local_part(p).shape for _, p in pairs] != [saved.shape for saved in tree["parameters"]]:
        raise ValueError(
            f"{where} was saved by another model or number of ranks: give the same, or resume from "
            "a checkpoint that fits any"
        )
    for optimizer in optimizers:
        materialise(optimizer)
    _make_foreign(pairs, tree["optimizer"])
    by_id = holders(optimizers)
    for (optimizer, p), saved, kept in zip(
        pairs, tree["parameters"], tree["optimizer"], strict=True
    ):
        local_part(p).copy_(saved)
        for key, value in kept.items():
            live, group = optimizer.state[p].get(key), by_id[id(p)][1]
            if isinstance(value, torch.Tensor):
                if not isinstance(live, torch.Tensor):  # made at the first step only: by RMSprop
                    shape = value.shape, value.dtype, local_part(p).shape
                    live = optimizer.state[p][key] = room(group, p, key, *shape)
                local_part(live).copy_(value)
            elif isinstance(value, Mapping):
                for part, t in plain_parts(local_part(live)).items():
                    t.copy_(value[part])
            else:
                optimizer.state[p][key] = value


def _make_foreign(
    pairs: Sequence[tuple[torch.optim.Optimizer, torch.Tensor]],
    kept: Sequence[Mapping[str, Any]],
) -> None:
    """States of other packages' classes are made by their optimizers, which know the class."""
    for optimizer in dict.fromkeys(o for o, _ in pairs):
        mine = [(p, states) for (o, p), states in zip(pairs, kept, strict=True) if o is optimizer]
        lacking = any(
            isinstance(value, Mapping) and key not in optimizer.state[p]
            for p, states in mine
            for key, value in states.items()
        )
        if lacking:
            take_empty_step(optimizer, [p for p, states in mine if states])


CURE = (
    "Resume from another checkpoint, or start the exchange's state anew with ExchangeCallback(..., "
    "fresh=True)"
)


def save_state(checkpoint: Path, exchange: Exchange, apart: bool = False) -> None:
    """Write this rank's part. No collectives.

    Args:
        apart: in a mesh, the Trainer's own files are those of each replica (DeepSpeed), not a
            mixture.
    """
    folder = _folder(checkpoint, exchange.topology)
    save_exchange(folder, exchange)
    if exchange.topology.kind == "mesh" and not apart and _differs(exchange):
        write_part(
            folder,
            f"local{exchange.topology.rank}",
            describe_part(exchange),
            replica_tree(exchange.optimizers),
        )


def open_state(checkpoint: Path) -> SavedExchange:
    """What `attach(state=...)` takes: the part of this island, in a mesh those of all replicas.

    Raises:
        ValueError: there is none; parts that are half-written or damaged.
    """
    folder = checkpoint / "exchange"
    if not folder.is_dir():
        raise ValueError(
            f"the Trainer resumes from {checkpoint}, which was saved without the exchange. {CURE}"
        )
    return load_exchange(folder)


def restore_local(checkpoint: Path, exchange: Exchange, apart: bool = False) -> None:
    """From a checkpoint of a mesh put this replica's own parameters and optimizer states in the
    place of the mixture that the Trainer has loaded; of a mesh of other numbers the anchors, which
    all replicas share.

    Args:
        apart: as for `save_state`: in a mesh there is nothing to put right.

    Raises:
        ValueError: a mesh of other numbers, whose replicas share no anchors; a checkpoint of
            islands in a mesh, of which the Trainer has loaded one island's model.
    """
    topology, folder = exchange.topology, Path(checkpoint) / "exchange"
    saved_in_mesh = (folder / "replica0").is_dir()
    if not _differs(exchange) or (not saved_in_mesh and topology.kind != "mesh"):
        return
    if not saved_in_mesh:
        raise ValueError(
            f"{checkpoint} was saved by islands, whose models differ: resume it as islands. {CURE}"
        )
    if apart and topology.kind == "mesh":
        return
    head = read_head(folder / "replica0" / "rank0.json")[0]
    if (head["islands"], head["world"]) != (topology.islands, topology.world):
        _begin_at_anchors(exchange, folder)
        return
    path = folder / f"replica{topology.island}" / f"local{topology.rank}.json"
    if not path.exists():
        raise ValueError(
            f"{path} is missing: what the Trainer saved in a mesh mixes replicas of preset "
            f"{exchange.config.preset!r}. {CURE}"
        )
    fill_replica(exchange.optimizers, read_part(path)[1], str(path))


def _begin_at_anchors(exchange: Exchange, folder: Path) -> None:
    """All ranks of a replica call it together."""
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


def _folder(checkpoint: Path, topology: Topology) -> Path:
    folder = Path(checkpoint) / "exchange"
    return folder / f"replica{topology.island}" if topology.kind == "mesh" else folder


def refuse_alone(checkpoint: Any, preset: str) -> None:
    """Raise ValueError where a checkpoint of several islands would go on without peers and without
    its exchange, unsaid.
    """
    if isinstance(checkpoint, (str, os.PathLike)) and (Path(checkpoint) / "exchange").is_dir():
        raise ValueError(
            f"{checkpoint} was saved by several islands; alone preset {preset!r} exchanges "
            "nothing, and outer parameters and momentum "
            "would be left behind. Go on from this island's own parameters with "
            "ExchangeCallback(..., fresh=True), or from those of all by "
            "`fsdp-demo export RUN OUT`"
        )


# The Trainer's saves, by the one saver of this package (`checkpoint/manager.py`): sealed with
# checksums when all is there, refused where values are not finite or the folder belongs to a
# later life, a warning where the disk is full, and `save_total_limit` among islands.


def manager_of(trainer: Trainer, topology: Topology) -> CheckpointManager:
    """Of the Trainer's folder, which a mesh has as one: there all ranks save together."""
    args: Any = trainer.args
    if topology.kind != "islands":
        together = {"rank": args.process_index, "world": args.world_size, "group": None}
        topology = replace(topology, kind="single", island=0, islands=1, **together)
    limit = args.save_total_limit
    manager = CheckpointManager(args.output_dir, topology, limit if limit and limit > 0 else None)
    manager.one_disk = False
    return manager


class Saves:
    """The saves of one training. All ranks that save together (the island's, in a mesh all) call
    each method together.

    Args:
        trainer: of this rank.
        exchange: of this training.
        manager: of the Trainer's folder (also an attribute).
        apart: see `state.save_state`.

    """

    def __init__(
        self, trainer: Trainer, exchange: Exchange, manager: CheckpointManager, apart: bool
    ):
        self._trainer, self._exchange, self._apart = trainer, exchange, apart
        self.manager = manager

    @property
    def failed(self) -> int:
        """Saves that could not be made."""
        return self.manager.failed_saves

    def save(self, original: Callable[..., Any], model: Any, trial: Any) -> bool:
        """`_save_checkpoint`, and the exchange's parts beside its files; whether it is there.

        Raises:
            PeerLost: what was under way in the exchange is lost, on any rank.
            OSError, NotFinite: the third save in a row that failed.
            Superseded: the folder belongs to a later life.
        """
        state = self._trainer.state

        def write(folder: Path) -> None:
            self.manager.ranks.together(lambda: refuse_exchange(self._exchange), folder.name)
            try:
                original(model, trial)
            except CheckpointException as error:  # torch's, of sharded states
                raise OSError(str(error).strip().splitlines()[-1]) from error
            save_state(folder, self._exchange, self._apart)
            self._write_config(folder, model)
            self.manager.best = step_of(state.best_model_checkpoint)

        made = self.manager.save(state.global_step, write)
        if not made and step_of(state.best_model_checkpoint) == state.global_step:
            state.best_model_checkpoint = None
        return made

    def _write_config(self, folder: Path, model: Any) -> None:
        """A sharded checkpoint has none, `fsdp-demo export` needs it."""
        config = getattr(model, "config", None)
        if (
            self._trainer.args.should_save
            and isinstance(config, PretrainedConfig)
            and not (folder / "config.json").exists()
        ):
            config.save_pretrained(folder)


def step_of(checkpoint: str | None) -> int | None:
    """Of the path of one of the Trainer's checkpoints."""
    return None if checkpoint is None else int(checkpoint.rsplit("-", 1)[-1])
