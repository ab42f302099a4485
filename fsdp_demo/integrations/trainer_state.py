"""The exchange's part of the Trainer's checkpoints: `checkpoint-N/exchange/rank<r>.json` and `.safetensors` (see `checkpoint.py`).

In a mesh each replica has a folder of its own below `exchange/`, which also holds its parameters and optimizer states where replicas
differ: what the Trainer itself saves there is a mixture of them.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list

from ..board import Board
from ..checkpoint import Saved, describe, open_exchange, save_exchange
from ..exchange import Exchange
from ..parts import read_part, write_part
from ..replica import fill_replica, replica_tree
from ..retention import MANIFEST, misfits
from ..topology import Topology
from ..transport import PeerLost

log = logging.getLogger("fsdp_demo")

CURE = "Resume from another checkpoint, or start the exchange's state anew with ExchangeCallback(..., fresh=True)"


def save_state(checkpoint: Path, exchange: Exchange, apart: bool = False) -> None:
    """Write this rank's part. No collectives.

    Args:
        apart: in a mesh, the Trainer's own files are those of each replica (DeepSpeed), not a mixture.
    """
    folder = _folder(checkpoint, exchange.topology)
    save_exchange(folder, exchange)
    if exchange.topology.kind == "mesh" and not apart and _differs(exchange):
        write_part(folder, f"local{exchange.topology.rank}", describe(exchange), replica_tree(exchange.optimizers))


def open_state(checkpoint: Path, topology: Topology, fresh: bool) -> Saved | None:
    """What `attach(state=...)` takes: this island's part, and those of the others where they can be seen, for other numbers of islands.

    Raises:
        ValueError: there is none, and `fresh` does not allow that; parts that are half-written or damaged.
    """
    if fresh:
        return None
    own = checkpoint / "exchange"
    if not own.is_dir():
        raise ValueError(f"the Trainer resumes from {checkpoint}, which was saved without the exchange. {CURE}")
    saved = open_exchange(own)
    if topology.kind == "mesh" or (topology.island in saved.islands and saved.heads[0].get("islands") == topology.islands):
        return saved
    beside = sorted(checkpoint.parent.parent.glob(f"*/{checkpoint.name}/exchange"))
    log.warning(
        "%s was saved by %d islands, there are %d now: the exchange's state is converted, parameters and optimizer states are those in %s",
        checkpoint.name,
        saved.heads[0].get("islands", 0),
        topology.islands,
        checkpoint.parent.name,
    )
    return open_exchange(*beside) if len(beside) > 1 else saved


def restore_local(checkpoint: Path, exchange: Exchange, apart: bool = False) -> None:
    """From a checkpoint of a mesh put this replica's own parameters and optimizer states in the place of the mixture that the Trainer has
    loaded.

    Args:
        apart: as for `save_state`: in a mesh there is nothing to put right.

    Raises:
        ValueError: the mesh had other numbers; a checkpoint of islands in a mesh, of which the Trainer has loaded one island's model.
    """
    topology, folder = exchange.topology, Path(checkpoint) / "exchange"
    saved_in_mesh = (folder / "replica0").is_dir()
    if not _differs(exchange) or (not saved_in_mesh and topology.kind != "mesh"):
        return
    if not saved_in_mesh:
        raise ValueError(f"{checkpoint} was saved by islands, whose models differ: resume it as islands. {CURE}")
    if apart and topology.kind == "mesh":
        return
    path = folder / f"replica{topology.island}" / f"local{topology.rank}.json"
    if not path.exists():
        raise ValueError(f"{path} is missing: what the Trainer saved in a mesh mixes replicas of preset {exchange.config.preset!r}. {CURE}")
    fill_replica(exchange.optimizers, read_part(path)[1], str(path))


def _differs(exchange: Exchange) -> bool:
    """Whether replicas have states of their own between exchanges."""
    return any(not c.channel.before_step for c in exchange.channels)


def _folder(checkpoint: Path, topology: Topology) -> Path:
    folder = Path(checkpoint) / "exchange"
    return folder / f"replica{topology.island}" if topology.kind == "mesh" else folder


# ---- which checkpoint ---------------------------------------------------------------------------------------------------


def whole_steps(output_dir: Path, fresh: bool = False) -> list[int]:
    """Steps of the checkpoints below `output_dir` that are complete: the Trainer's last file is there, and every rank's part (with `fresh`
    they do not count)."""
    out = []
    for folder in output_dir.glob("checkpoint-*"):
        match = re.fullmatch(r"checkpoint-(\d+)", folder.name)
        if match is None or not (folder / "trainer_state.json").exists() or (misfits(folder) and (folder / MANIFEST).exists()):
            continue
        try:
            if fresh or open_exchange(folder / "exchange").complete:
                out.append(int(match[1]))
        except ValueError:
            continue
    return sorted(out)


def put_aside(output_dir: Path, step: int) -> None:
    """On rank 0 of an island that goes on from `step`: what is newer belongs to a life that ends here. It stays, under a name that nobody
    resumes from and nothing is written over."""
    for folder in output_dir.glob("checkpoint-*"):
        match = re.fullmatch(r"checkpoint-(\d+)", folder.name)
        if match is not None and int(match[1]) > step:
            aside = folder.with_name(f"{folder.name}.superseded")
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(folder, aside)
            log.warning("%s is newer than step %d, from which training goes on: now %s", folder, step, aside.name)


def refuse_alone(checkpoint: Any, preset: str) -> None:
    """Raise ValueError where a checkpoint of several islands would go on without peers and without its exchange, unsaid."""
    if isinstance(checkpoint, (str, os.PathLike)) and (Path(checkpoint) / "exchange").is_dir():
        raise ValueError(
            f"{checkpoint} was saved by several islands; alone preset {preset!r} exchanges nothing, and outer parameters and momentum "
            "would be left behind. Go on from this island's own parameters with ExchangeCallback(..., fresh=True), or from those of all by "
            "`fsdp-demo export RUN OUT`"
        )


def find_checkpoint(wanted: Any, output_dir: Path, topology: Topology, fresh: bool) -> Any:
    """What `resume_from_checkpoint` means on this island, so that one command line serves all.

    True ("True", "true", "auto" on a command line) is the newest checkpoint that all islands hold whole. A path `.../checkpoint-N` is that
    checkpoint in this island's own folder, if it is there. An island that holds none takes one that it sees beside its own folder.

    Raises:
        ValueError: there is none, or none in common; says what each island holds.
    """
    if not isinstance(wanted, (str, os.PathLike)) and wanted is not True:
        return wanted
    newest = wanted is True or str(wanted).lower() in ("true", "auto")
    if topology.kind != "islands":
        whole = whole_steps(output_dir, fresh) if newest else []  # the Trainer alone would take one that was cut off
        return str(output_dir / f"checkpoint-{whole[-1]}") if whole else True if newest else str(wanted)
    name = f"checkpoint-{_newest_common(output_dir, topology, fresh)}" if newest else Path(str(wanted)).name
    if (output_dir / name).is_dir():
        return str(output_dir / name)
    if not newest and (not name.startswith("checkpoint-") or Path(str(wanted)).is_dir()):
        return str(wanted)
    beside = sorted(output_dir.parent.glob(f"*/{name}"))
    if not beside:
        raise ValueError(f"{output_dir} has no {name}, from which the others resume: copy that folder of another island there")
    log.warning("%s has no %s and takes over from %s", topology.name, name, beside[0])
    return str(beside[0])


def _newest_common(output_dir: Path, topology: Topology, fresh: bool) -> int:
    """The newest step that all islands hold which hold any; with `fresh` the Trainer's own files are enough."""
    held = _held(output_dir, topology, fresh)
    common = set.intersection(*(set(steps) for steps in held if steps)) if any(held) else set()
    if not common:
        told = "; ".join(f"island {i} holds {steps or 'none'}" for i, steps in enumerate(held))
        raise ValueError(f"no checkpoint is held by all islands: {told}. Name one by its path, or start without resume_from_checkpoint")
    return max(common)


def _held(output_dir: Path, topology: Topology, fresh: bool) -> list[list[int]]:
    """Complete steps of every island; rank 0 asks and tells the others of its island."""
    answer: list[Any] = [None]
    if topology.rank == 0:
        board = Board(topology)
        try:
            answer[0] = [note["steps"] for note in board.meet({"steps": whole_steps(output_dir, fresh)})]
        except (ValueError, PeerLost) as error:
            answer[0] = error
        board.close()
    broadcast_object_list(answer)
    if isinstance(answer[0], Exception):
        raise answer[0]
    return list(answer[0])


class Rotation:
    """`save_total_limit` among islands: the newest checkpoint that all islands are known to hold is never deleted.

    The Trainer's own rotation knows this island only: the island whose peer died before its save would delete what both could resume from.
    On rank 0 of each island.
    """

    def __init__(self, output_dir: Path, topology: Topology, keep: int | None):
        self._folder, self._keep, self._board = output_dir, keep, Board(topology)

    def saved(self, best: str | None) -> None:
        """After a save: tell the others, delete what is neither among the newest `keep`, nor the best, nor needed to resume together."""
        held = whole_steps(self._folder)
        try:
            self._board.publish(held)
            others = self._board.others()
        except (RuntimeError, PeerLost) as error:  # with the machine of the store gone, say
            log.warning("the store does not answer, so no checkpoint is removed: %s", str(error).splitlines()[0][:120])
            return
        if not self._keep:
            return
        common = set(held).intersection(*(set(steps) for steps in others))
        safe = {*held[-self._keep :], *(s for s in held if common and s >= max(common))}
        if best is not None:
            safe.add(int(best.rsplit("-", 1)[-1]))
        for step in [s for s in held if s not in safe and common]:
            shutil.rmtree(self._folder / f"checkpoint-{step}", ignore_errors=True)

    def close(self) -> None:
        """Drop the connection to the store."""
        self._board.close()
