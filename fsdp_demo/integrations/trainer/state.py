"""The exchange's part of the Trainer's checkpoints: `checkpoint-N/exchange/rank<r>.json` and
`.safetensors` (see `checkpoint/exchange_state.py`).

In a mesh each replica has a folder of its own below `exchange/`, which also holds its parameters
and optimizer states where replicas differ: what the Trainer itself saves there is a mixture of
them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ...checkpoint.exchange_state import SavedExchange, describe_part, load_exchange, save_exchange
from ...checkpoint.files import read_head, read_part, write_part
from ...checkpoint.local_state import fill_replica, replica_tree
from ...exchange.exchange import Exchange
from ...rendezvous.topology import Topology

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
