"""A loop's checkpoints: whole or not there, the newest few kept, the one to resume from agreed by all islands.

Layout, below a folder of the replica's own:

    checkpoint-<step>/          what `write` put there, and manifest.json: version, step, every file with its size and checksum
    .checkpoint-<step>.part/    a save under way, or one that was cut off: never read
    emergency-<step>/           what single ranks saved on their way out (`guard`), without asking each other

Nothing here sends more than names of steps between islands: they lie in the store, under keys of this run.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .board import Board
from .parts import crc32, in_one_piece, read_head, sync_folder
from .topology import Topology
from .transport import PeerLost
from .version import __version__

log = logging.getLogger("fsdp_demo")

VERSION = 1  # of the manifest
MANIFEST = "manifest.json"
NEWER = "its manifest has version"

Write = Callable[[Path], Callable[[], Any] | None]


class Checkpoints:
    """Checkpoints of this replica, for a training loop. All ranks of all islands make one before `attach`, at the same point.

    Args:
        root: folder of this island, seen by all its ranks. In a mesh, where all replicas share it, each gets `root/replica<i>`.
        topology: as for `attach`.
        keep: how many to keep; never fewer than all that follow the newest step which every island is known to hold.
        group: process group of the replica's ranks over CPU tensors; default one of its own.

    Attributes:
        group: that group (None: a single rank), for `torch.distributed.checkpoint`.
        common: the newest step that all islands are known to hold.
    """

    def __init__(self, root: Path | str, topology: Topology, keep: int = 2, group: Any = None):
        if keep < 1:
            raise ValueError(f"keep={keep}: allowed is 1 or more")
        self.root = Path(root) / f"replica{topology.island}" if topology.kind == "mesh" else Path(root)
        self.topology, self.keep, self.common = topology, keep, -1
        if group is None and topology.world > 1:
            ranks = dist.get_process_group_ranks(topology.group) if topology.group is not None else None
            group = dist.new_group(ranks, timedelta(seconds=topology.timeout + 60), "gloo", use_local_synchronization=ranks is not None)
        self.group = group
        self._worker: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None
        self._board = Board(topology)

    # ---- what is there ---------------------------------------------------------------------------------------------

    def path(self, step: int) -> Path:
        """The folder of a complete checkpoint."""
        return self.root / f"checkpoint-{step}"

    def emergency(self, step: int) -> Path:
        """The folder for what ranks save alone at `step`: `parts.write_part(folder, f"rank{rank}", ...)`."""
        return self.root / f"emergency-{step}"

    def complete(self) -> list[int]:
        """The steps of the checkpoints whose manifest is there and fits the sizes of the files."""
        return [s for s in _steps(self.root, "checkpoint") if not misfits(self.path(s))]

    def _readable(self) -> list[int]:
        """`complete()`; those that are not are named in the log, and those of a newer release refused."""
        for step in _steps(self.root, "checkpoint"):
            why = misfits(self.path(step))
            if why.startswith(NEWER):
                raise ValueError(f"{self.path(step)}: {why}: install that release, or move this folder away")
            if why:
                log.warning("%s is not complete: %s; it is left out", self.path(step), why)
        return self.complete()

    def left(self) -> list[int]:
        """The steps at which this rank has left a whole part of its own."""
        name = f"rank{self.topology.rank}.json"
        return [s for s in _steps(self.root, "emergency") if _whole(self.emergency(s) / name, self.topology.world)]

    def verify(self, step: int) -> None:
        """Compare all checksums of a checkpoint, each rank its share. All ranks of the replica come together.

        Raises:
            ValueError: on every rank, if a file is damaged.
        """
        folder, rank, world = self.path(step), self.topology.rank, self.topology.world
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        bad = [name for name, f in sorted(files.items())[rank::world] if crc32(folder / name) != f["crc32"]]
        if self._any(bool(bad)):
            what = f"{', '.join(bad)}: checksum does not fit" if bad else "another rank found a file whose checksum does not fit"
            raise ValueError(
                f"{folder} is damaged ({what}): remove this folder on one island, and all resume from the common step before it"
            )

    # ---- saving ------------------------------------------------------------------------------------------------------

    def save(self, step: int, write: Write, wait: bool = True) -> None:
        """Make the checkpoint of `step`. All ranks of the replica call it together; islands need not.

        Args:
            write: `write(folder)` on every rank puts this rank's files below `folder`; it may return a function that does the rest, which
                runs in a thread if `wait` is False.
            wait: False lets training go on; the checkpoint appears when all ranks have written. The one before is waited for.

        Raises:
            RuntimeError: a rank could not write (its own error is raised there). The half is not picked up.
        """
        self.wait()
        part = self.root / f".checkpoint-{step}.part"
        if self.topology.rank == 0:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        self._any(False)
        rest, error = None, None
        try:
            rest = write(part)
        except Exception as e:  # the other ranks wait for this one's vote
            error = e
        if wait:
            self._complete(step, part, rest, error)
            return
        self._worker = self._worker or ThreadPoolExecutor(1, "checkpoint")
        self._pending = self._worker.submit(self._complete, step, part, rest, error)

    def wait(self) -> None:
        """Wait for a save that is under way; raises what it ran into."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait, and end the thread and the connection."""
        try:
            self.wait()
        finally:
            if self._worker is not None:
                self._worker.shutdown()
            self._worker = None
            self._board.close()

    def forget_emergencies(self) -> None:
        """Remove what ranks have left on the way: the run came to its end. All ranks of the replica come together."""
        self._any(False)
        if self.topology.rank == 0:
            for step in _steps(self.root, "emergency"):
                _remove(self.emergency(step))
        self._any(False)

    def _complete(self, step: int, part: Path, rest: Callable[[], Any] | None, error: Exception | None) -> None:
        """Finish writing, vote, seal, rename, rotate: the same on all ranks, in order."""
        rank, world = self.topology.rank, self.topology.world
        try:
            if error is None and rest is not None:
                rest()
        except Exception as e:
            error = e
        if self._any(error is not None):
            raise error or RuntimeError(f"checkpoint of step {step}: another rank could not write; {part} stays unfinished")
        self._together(part, lambda: self._sum_up(part, rank, world))
        self._together(part, lambda: self._seal(step, part, world) if rank == 0 else None)

    def _together(self, part: Path, work: Callable[[], Any]) -> None:
        """Run `work` on every rank; an error of one is raised on all, and none waits for it in a collective."""
        error: Exception | None = None
        try:
            work()
        except Exception as e:
            error = e
        if self._any(error is not None):
            raise error or RuntimeError(f"{part}: another rank could not write; it stays unfinished")

    def _sum_up(self, part: Path, rank: int, world: int) -> None:
        """Sizes and checksums of this rank's share of the files."""
        names = sorted(str(p.relative_to(part)) for p in part.rglob("*") if p.is_file() and not p.name.startswith(".sums"))
        sums = {n: {"bytes": (part / n).stat().st_size, "crc32": crc32(part / n, sync=True)} for n in names[rank::world]}
        in_one_piece(part / f".sums{rank}", lambda p: p.write_text(json.dumps(sums)))

    def _seal(self, step: int, part: Path, world: int) -> None:
        """Write the manifest, give the folder its name, and remove what is not needed any more."""
        files: dict[str, Any] = {}
        for r in range(world):
            files |= json.loads((part / f".sums{r}").read_text())
            (part / f".sums{r}").unlink()
        content = {"version": VERSION, "package": __version__, "step": step, "files": dict(sorted(files.items()))}
        in_one_piece(part / MANIFEST, lambda p: p.write_text(json.dumps(content, indent=1)))
        for folder in {part, *((part / name).parent for name in files)}:
            sync_folder(folder)
        old = self.path(step).with_name(f".checkpoint-{step}.old")  # one of this step from before a resume, or damaged
        if self.path(step).exists():
            shutil.rmtree(old, ignore_errors=True)
            os.replace(self.path(step), old)
        os.replace(part, self.path(step))
        sync_folder(self.root)
        shutil.rmtree(old, ignore_errors=True)
        self._rotate()

    def _rotate(self) -> None:
        """Remove all but the newest `keep` before the newest step that all islands hold. The list is published before anything goes."""
        mine = self.complete()
        try:
            self._board.publish(mine)
            everyone = [set(mine), *map(set, self._board.others())]
            self.common = max(set.intersection(*everyone), default=self.common)
        except RuntimeError as e:  # torch's DistStoreError is one
            log.warning("checkpoints: the store does not answer, so none is removed (%s)", str(e).splitlines()[0])
            return
        old = [s for s in mine[: -self.keep] if s < self.common]
        self._board.publish([s for s in mine if s not in old])
        for step in old:
            _remove(self.path(step))
        for step in [s for s in _steps(self.root, "emergency") if s < self.common]:
            _remove(self.emergency(step))

    # ---- what all islands hold -----------------------------------------------------------------------------------------

    def agreed(self, resume: bool = True, take_over: bool = False) -> int | None:
        """The step from which all islands resume: the newest that all hold. All ranks of all islands call it, before `attach`.

        Args:
            resume: False: this is a new run, in folders that hold none.
            take_over: islands without the newest common step take over from those that have it; what was theirs alone is lost. Where no
                step is common, the newest that any island holds. Give it on all islands.

        Returns:
            None where no island holds any. With `take_over` this island may lack the step that is returned: see `holds`.

        Raises:
            ValueError: no step in common; one resumes and another does not; a new run where an old one has left checkpoints.
            PeerLost: islands that did not come in time.
        """
        self._from_first(self._adopt)
        held, me = self._held(), self.topology
        if held and not resume:
            raise ValueError(
                f"{self.root} holds checkpoints of steps {held}: go on from there (--resume), or give another folder, or remove this one"
            )
        wish = {"steps": held, "resume": resume, "take_over": take_over, "name": me.name}
        everyone = self._from_first(lambda: self._board.meet(wish))
        for key in ("resume", "take_over"):
            if len({w[key] for w in everyone}) > 1:
                both = ", ".join(f"{w['name']}: {w[key]}" for w in everyone)
                raise ValueError(f"islands differ in {key} ({both}): give the same on all")
        every = [set(w["steps"]) for w in everyone]
        if not any(every):
            return None
        common = set.intersection(*(e for e in every if e or not take_over))
        if not common and not take_over:
            have = "; ".join(f"{w['name']}: {', '.join(map(str, w['steps'])) or 'none'}" for w in everyone)
            raise ValueError(
                f"no checkpoint is held by all islands ({have}): copy the missing folder there, or let islands without the newest take "
                "over from the others (take_over=True; recipes/pretrain.py: --take-over), or start anew in another folder"
            )
        step = max(common) if common else max(set.union(*every))
        self.common = step if step in self.complete() else -1
        self._from_first(lambda: self._put_aside(step))
        return step

    def _adopt(self) -> None:
        """A save that was cut off between its manifest and its name is whole: give it the name. Other leavings of a killed process go."""
        for part in self.root.glob(".checkpoint-*.part") if self.root.is_dir() else ():
            whole = self.root / part.name[1 : -len(".part")]
            if not misfits(part) and not whole.exists():
                os.replace(part, whole)
            else:
                shutil.rmtree(part, ignore_errors=True)
        for old in self.root.glob(".checkpoint-*.old") if self.root.is_dir() else ():
            whole = self.root / old.name[1 : -len(".old")]
            if not whole.exists() and not misfits(old):
                os.replace(old, whole)
            else:
                shutil.rmtree(old, ignore_errors=True)

    def _put_aside(self, step: int) -> None:
        """What is newer than the step all go on from belongs to a life that ends here, and must not count as held."""
        for folder in [self.path(s) for s in _steps(self.root, "checkpoint") if s > step]:
            _remove(folder)
        for folder in [self.emergency(s) for s in _steps(self.root, "emergency") if s > step]:
            _remove(folder)

    def holds(self, step: int) -> str:
        """What this replica has of `step`: "checkpoint", "emergency" or "" (all ranks come together)."""
        if not self._any(step not in self.complete()):
            return "checkpoint"
        return "" if self._any(step not in self.left()) else "emergency"

    def _held(self) -> list[int]:
        """Steps that all ranks of the replica can resume from, the same list on all."""
        complete, left = self._from_first(lambda: (self._readable(), self.left()))
        return sorted({*complete, *(s for s in left if not self._any(s not in self.left()))})

    # ---- inside the replica ------------------------------------------------------------------------------------------------

    def _any(self, flag: bool) -> bool:
        """Whether any rank of the replica says so; also a barrier."""
        if self.group is None:
            return flag
        vote = torch.tensor([float(flag)])
        dist.all_reduce(vote, dist.ReduceOp.MAX, group=self.group)
        return bool(vote)

    def _from_first(self, ask: Callable[[], Any]) -> Any:
        """What `ask` gives on rank 0 (JSON), on all ranks of the replica; an error there is raised on all."""
        if self.group is None:
            return ask()
        value: list[Any] = [None, "", ""]
        if self.topology.rank == 0:
            try:
                value[0] = ask()
            except (ValueError, RuntimeError, OSError) as error:  # PeerLost and torch's DistStoreError are RuntimeErrors
                value = [None, type(error).__name__, str(error)]
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        size = torch.tensor([data.numel()])
        dist.broadcast(size, group_src=0, group=self.group)
        data = data if self.topology.rank == 0 else torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, group_src=0, group=self.group)
        got, kind, text = json.loads(bytes(data.tolist()))
        if kind:
            raise {"PeerLost": PeerLost, "ValueError": ValueError}.get(kind, RuntimeError)(text)
        return got


def _steps(root: Path, kind: str) -> list[int]:
    """Steps of the folders `root/<kind>-<step>`, ascending."""
    found = (re.fullmatch(rf"{kind}-(\d+)", p.name) for p in (root.iterdir() if root.is_dir() else ()))
    return sorted(int(match[1]) for match in found if match)


def seal_sizes(folder: Path, step: int) -> None:
    """Write the manifest of a checkpoint whose files somebody else has written: sizes only, since checksums would read all again."""
    found = [p for p in sorted(folder.rglob("*")) if p.is_file()]
    files = {str(p.relative_to(folder)): {"bytes": p.stat().st_size, "crc32": None} for p in found}
    files.pop(MANIFEST, None)
    content = {"version": VERSION, "package": __version__, "step": step, "files": files}
    in_one_piece(folder / MANIFEST, lambda p: p.write_text(json.dumps(content, indent=1)))


def misfits(folder: Path) -> str:
    """Why a checkpoint is not complete; empty if it is."""
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if content["version"] != VERSION:
            return (
                f"{NEWER} {content['version']}, written by fsdp_demo {content.get('package')}; this is {__version__}, which reads {VERSION}"
            )
        sizes = {name: f["bytes"] for name, f in content["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"no manifest that can be read ({error!r:.80})"
    bad = [n for n, size in sizes.items() if not (folder / n).is_file() or (folder / n).stat().st_size != size]
    return f"{', '.join(bad[:4])} missing or of another size" if bad else ""


def _whole(path: Path, world: int) -> bool:
    """Whether a part that a rank left on its way out is whole, and of an island of as many ranks: others load regular checkpoints."""
    try:
        return int(read_head(path)[0].get("world", world)) == world
    except (OSError, ValueError):
        return False


def _remove(folder: Path) -> None:
    """Make a checkpoint one that is not there, then delete it: a reader never sees a half."""
    hidden = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(hidden, ignore_errors=True)
    os.replace(folder, hidden)
    shutil.rmtree(hidden, ignore_errors=True)
