"""The exchange's part of the Trainer's checkpoints: `checkpoint-N/exchange/rank<r>.json` and
`.safetensors` (see `checkpoint/exchange_state.py`).

In a mesh each replica has a folder of its own below `exchange/`, which also holds its parameters
and optimizer states where replicas differ: what the Trainer itself saves there is a mixture of
them.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers.trainer import TRAINER_STATE_NAME

from ...checkpoint.choice import Held, superfluous
from ...checkpoint.exchange_state import SavedExchange, describe_part, load_exchange, save_exchange
from ...checkpoint.files import read_part, write_part
from ...checkpoint.folders import damaged, forget_asides, misfits, steps, take_back
from ...checkpoint.local_state import fill_replica, replica_tree
from ...checkpoint.registry import CheckpointRegistry
from ...checkpoint.whole import whole
from ...comm.ranks import Ranks
from ...comm.topology import Topology
from ...errors import NeedsDecision, see
from ...exchange.exchange import Exchange
from .take_over import TakeOver, heard, sources, told

log = logging.getLogger("fsdp_demo")

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


def open_state(checkpoint: Path, topology: Topology, fresh: bool) -> SavedExchange | None:
    """What `attach(state=...)` takes: this island's part, and those of the others where they can be
    seen, for other numbers of islands.

    Raises:
        ValueError: there is none, and `fresh` does not allow that; parts that are half-written or
            damaged.
    """
    if fresh:
        return None
    own = checkpoint / "exchange"
    if not own.is_dir():
        raise ValueError(
            f"the Trainer resumes from {checkpoint}, which was saved without the exchange. {CURE}"
        )
    saved = load_exchange(own)
    if topology.kind == "mesh" or (
        topology.island in saved.islands and saved.heads[0].get("islands") == topology.islands
    ):
        return saved
    beside = sorted(checkpoint.parent.parent.glob(f"*/{checkpoint.name}/exchange"))
    log.warning(
        "%s was saved by %d islands, there are %d now: the exchange's state is converted, "
        "parameters and optimizer states are those in %s",
        checkpoint.name,
        saved.heads[0].get("islands", 0),
        topology.islands,
        checkpoint.parent.name,
    )
    return load_exchange(*beside) if len(beside) > 1 else saved


def restore_local(checkpoint: Path, exchange: Exchange, apart: bool = False) -> None:
    """From a checkpoint of a mesh put this replica's own parameters and optimizer states in the
    place of the mixture that the Trainer has loaded.

    Args:
        apart: as for `save_state`: in a mesh there is nothing to put right.

    Raises:
        ValueError: the mesh had other numbers; a checkpoint of islands in a mesh, of which the
            Trainer has loaded one island's model.
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
    path = folder / f"replica{topology.island}" / f"local{topology.rank}.json"
    if not path.exists():
        raise ValueError(
            f"{path} is missing: what the Trainer saved in a mesh mixes replicas of preset "
            f"{exchange.config.preset!r}. {CURE}"
        )
    fill_replica(exchange.optimizers, read_part(path)[1], str(path))


def _differs(exchange: Exchange) -> bool:
    """Whether replicas have states of their own between exchanges."""
    return any(not c.channel.before_step for c in exchange.channels)


def _folder(checkpoint: Path, topology: Topology) -> Path:
    folder = Path(checkpoint) / "exchange"
    return folder / f"replica{topology.island}" if topology.kind == "mesh" else folder


# ---- which checkpoint --------------------------------------------------------------------------


def held_in(output_dir: Path, islands: int, fresh: bool = False) -> list[Held]:
    """The checkpoints below `output_dir` that are whole, with what their heads say: the Trainer's
    last file is there, and every rank's part (with `fresh` parts do not count)."""
    out = []
    for step in steps(output_dir):
        folder = output_dir / f"checkpoint-{step}"
        if not (folder / TRAINER_STATE_NAME).exists():
            continue
        try:
            if not fresh:
                out.append(replace(whole(folder, islands)[0], step=step))  # by the Trainer's count
            elif not misfits(folder, sealed=False):
                out.append(Held(step))
        except ValueError as error:
            log.warning("%s is left out: %s", folder, error)
    return out


def whole_steps(output_dir: Path, fresh: bool = False) -> list[int]:
    """The steps of `held_in`, whatever the number of islands."""
    return [h.step for h in held_in(output_dir, 0, fresh)]


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


def refuse_elsewhere(output_dir: Path, topology: Topology) -> None:
    """Raise where "auto" would begin anew beside checkpoints that the same `output_dir` got from
    another number of islands: several have a folder each below it, one has none. All islands ask
    together.

    Raises:
        NeedsDecision: names the newest of them.
    """
    if several := topology.kind == "islands" and topology.islands > 1:
        said = {"name": topology.name, "elsewhere": _newest_in([output_dir.parent])}
        with _registry(topology) as registry:  # another machine may not see it
            seen = [str(n["elsewhere"]) for n in registry.meet(said) if n.get("elsewhere")]
    else:
        islands = {p.parent.parent for p in output_dir.glob("*/checkpoint-*/exchange")}
        seen = [newest] if (newest := _newest_in(sorted(islands))) else []
    if seen:
        raise NeedsDecision(
            f"resume_from_checkpoint='auto' finds no checkpoint in {output_dir}, but "
            f"{'one island' if several else 'several islands'} saved {seen[-1]}. Go on from its "
            f"parameters and optimizer state with resume_from_checkpoint='{seen[-1]}' and "
            "ExchangeCallback(..., fresh=True), or begin in another output_dir"
            f"{see('no-common-checkpoint')}"
        )


def _newest_in(folders: Sequence[Path]) -> str:
    """The checkpoint of the most steps in any of these folders; empty where there is none."""
    found = [(step, folder) for folder in folders for step in steps(folder)]
    step, folder = max(found, default=(0, None))
    return f"{folder}/checkpoint-{step}" if folder is not None else ""


def find_checkpoint(wanted: Any, output_dir: Path, topology: Topology, fresh: bool) -> Any:
    """What `resume_from_checkpoint` means on this island, so that one command line serves all.

    True ("True", "true" on a command line) is the newest checkpoint that all islands hold whole, or
    the newest of each between the same exchanges (`checkpoint/choice.py`). "auto" is the same, and
    the beginning where no island holds any. A path `.../checkpoint-N` is that checkpoint in this
    island's own folder, if it is there. An island that holds none takes one that it sees beside its
    own folder, or else what the others bring (`take_over.py`).

    Returns:
        A path, a `TakeOver`, or what the Trainer takes for none.

    Raises:
        NeedsDecision: a ValueError: there is none, or none in common; says what each island holds.
        ValueError: a file's checksum does not fit.
    """
    if not isinstance(wanted, (str, os.PathLike)) and wanted is not True:
        return wanted
    auto = str(wanted).lower() == "auto"
    newest = wanted is True or str(wanted).lower() in ("true", "auto")
    ranks = Ranks.everywhere(PartialState().device)  # of the island, in a mesh of the world
    ranks.from_first(lambda: take_back(output_dir))
    if topology.kind != "islands":
        # the Trainer alone would take one that was cut off
        own = whole_steps(output_dir, fresh) if newest else []
        alone = (
            str(output_dir / f"checkpoint-{own[-1]}")
            if own
            else (None if auto else True)
            if newest
            else str(wanted)
        )
        if alone is None:
            ranks.from_first(lambda: refuse_elsewhere(output_dir, topology))
        return _verified(alone, ranks)
    if newest:
        found = _from_first(ranks, lambda: _newest(output_dir, topology, fresh, auto))
    else:
        found = _from_first(ranks, lambda: _named(str(wanted), output_dir, topology))
    if found is None:
        log.warning("%s: no island holds a checkpoint: training begins", topology.name)
    return _verified(found, ranks)


def _newest(output_dir: Path, topology: Topology, fresh: bool, auto: bool) -> str | TakeOver | None:
    """From the newest state that all islands hold which hold any; with `fresh` the Trainer's own
    files are enough. None with `auto` where nobody holds any."""
    with _registry(topology) as registry:
        # the last to end has the newest state
        how = "newest" if auto and topology.elastic else "auto"
        chosen = registry.choose(held_in(output_dir, topology.islands, fresh), how)
    if chosen is None and not auto:
        raise NeedsDecision(
            "no island holds a checkpoint: start without resume_from_checkpoint, or with "
            "resume_from_checkpoint='auto'"
        )
    if chosen is None:
        refuse_elsewhere(output_dir, topology)
        return None
    loaded = sources(chosen)
    furthest = max(s for s in loaded if s is not None)
    own = loaded[topology.starters.index(topology.island)]
    beside = [
        p
        for p in sorted(output_dir.parent.glob(f"*/checkpoint-{furthest}"))
        if furthest in whole_steps(p.parent, fresh)
    ]
    found = (
        str(output_dir / f"checkpoint-{own}")
        if own is not None
        else str(beside[0])
        if beside
        else None
    )
    return _with_others(found, furthest, own is not None, topology) if None in loaded else found


def _named(wanted: str, output_dir: Path, topology: Topology) -> str | TakeOver:
    """The folder that was named: this island's own, that very one, or one beside its own. All
    islands ask together.
    """
    name, found = Path(wanted).name, None
    if (output_dir / name).is_dir():
        found = str(output_dir / name)
    elif not name.startswith("checkpoint-") or Path(wanted).is_dir():
        found = wanted
    elif beside := sorted(output_dir.parent.glob(f"*/{name}")):
        found = str(beside[0])
    step = re.fullmatch(r"checkpoint-(\d+)", name)
    with _registry(topology) as registry:
        notes = registry.meet(
            {"name": topology.name, "checkpoint": name, "found": found is not None}
        )
    if found is not None and all(n.get("found") for n in notes):
        if Path(found).parent.parent == output_dir.parent and Path(found).parent != output_dir:
            log.warning("%s has no %s and takes over from %s", topology.name, name, found)
        return found
    have = ", ".join(
        f"{n.get('name')}: {n.get('checkpoint')}{'' if n.get('found') else ' (not there)'}"
        for n in notes
    )
    if (
        step is None
        or len({n.get("checkpoint") for n in notes}) > 1
        or not any(n.get("found") for n in notes)
    ):
        cure = f"name on all the same one, which an island holds{see('no-common-checkpoint')}"
        raise NeedsDecision(f"not every island sees a checkpoint that was named ({have}): {cure}")
    return _with_others(found, int(step[1]), found == str(output_dir / name), topology)


def _with_others(found: str | None, step: int, own: bool, topology: Topology) -> str | TakeOver:
    """Where some islands have nothing to load: tell them what the Trainer keeps, or hear it. `own`:
    this island loads its own.
    """
    said = {
        "name": topology.name,
        "state": told(Path(found)) if found is not None and own else None,
    }
    with _registry(topology) as registry:
        notes = registry.meet(said)
    if found is None:
        return heard(step, notes)
    if not own:
        log.warning(
            "%s holds nothing of step %d and takes over from %s", topology.name, step, found
        )
    return found


@contextmanager
def _registry(topology: Topology) -> Iterator[CheckpointRegistry]:
    """For one question."""
    registry = CheckpointRegistry(topology)
    try:
        yield registry
    finally:
        registry.close()


def _verified(where: Any, ranks: Ranks) -> Any:
    """The path, if the checksums of its manifest fit; each process reads its share."""
    if not isinstance(where, str):
        return where
    mine = ranks.together(
        lambda: damaged(Path(where), ranks.rank, ranks.world, sealed=False), where
    )
    if bad := [name for names in ranks.everyone(mine) for name in names]:
        raise ValueError(
            f"{where} is damaged ({', '.join(bad[:4])}: checksum does not fit): move this folder "
            "away on one island, and all resume from "
            f"the checkpoint before it{see('damaged-checkpoint')}"
        )
    return where


def _from_first(ranks: Ranks, ask: Callable[[], str | TakeOver | None]) -> str | TakeOver | None:
    """What `ask` gives on rank 0, on all; an error there is raised on all."""

    def told() -> Any:
        found = ask()
        return vars(found) if isinstance(found, TakeOver) else found

    found = ranks.from_first(told)
    return TakeOver(**found) if isinstance(found, dict) else found


class Rotation:
    """`save_total_limit` among islands: the newest checkpoint that all islands are known to hold is
    never deleted.

    The Trainer's own rotation knows this island only: the island whose peer died before its save
    would delete what both could resume from. On rank 0 of each island. The store is asked with a
    short deadline, in the midst of training (`checkpoint/registry.py`).
    """

    def __init__(self, output_dir: Path, topology: Topology, keep: int | None):
        self._folder = output_dir
        self._topology = topology
        self._keep = keep
        self._registry = CheckpointRegistry(topology)
        self._made: set[int] = set()

    def saved(self, step: int, best: str | None) -> None:
        """After a save: tell the others, delete what is not needed any more
        (`checkpoint/choice.superfluous`). `best`: a path.
        """
        self._made.add(step)
        mine = held_in(self._folder, self._topology.islands)
        try:
            common = self._registry.common(mine)
        except (RuntimeError, ValueError, TypeError) as error:
            # with the machine of the store gone, say
            log.warning(
                "no old checkpoint is removed: %s", (str(error).splitlines() or [""])[0][:160]
            )
            return
        if common is None:
            return
        if common in self._made:
            forget_asides(self._folder)
        kept = None if best is None else int(best.rsplit("-", 1)[-1])
        for old in superfluous([h.step for h in mine], common, self._keep, kept):
            shutil.rmtree(self._folder / f"checkpoint-{old}", ignore_errors=True)

    def close(self) -> None:
        """Drop the connection to the store."""
        self._registry.close()
