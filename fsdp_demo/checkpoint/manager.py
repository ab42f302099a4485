"""A loop's checkpoints: whole or not there, the newest few kept, the one to resume from agreed by
all islands.

Layout, below a folder of the replica's own (`folders.py`):

    checkpoint-<step>/          what `write` put there, and manifest.json: version, step, every file with its size and checksum
    .checkpoint-<step>.part/    a save under way, or one that was cut off: never read
    .aside/<life>/              what is newer than the step that a later life went on from
    .life.json                  whose folder this is (`fence.py`)

Nothing here sends more than names of steps between islands: they lie in the store, under keys of
this run.
"""  # noqa: E501

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..comm.ranks import Ranks
from ..comm.topology import Topology
from ..errors import NeedsDecision, NotFinite, Superseded
from . import folders
from .choice import Held, superfluous
from .failures import SaveFailures
from .fence import Fence, place
from .files import sync_folder
from .folders import MANIFEST, misfits
from .registry import CheckpointRegistry
from .shelf import Shelf

__all__ = ["MANIFEST", "CheckpointManager", "misfits"]

log = logging.getLogger("fsdp_demo")

Write = Callable[[Path], Callable[[], Any] | None]


class CheckpointManager(Shelf):
    """Checkpoints of this replica, for a training loop. All ranks of all islands make one before
    `attach`, at the same point.

    Args:
        root: folder of this island alone, seen by all its ranks, such as `Path(folder) /
            topology.name`: two islands must not have the same. In a mesh, where all replicas share
            it, each gets `root/replica<i>`.
        topology: as for `attach`.
        keep: how many to keep; never fewer than all that follow the newest step which every island
            is known to hold.
        group: process group of the replica's ranks over CPU tensors; default one of its own.

    Attributes:
        group: that group (None: a single rank), for `torch.distributed.checkpoint`.
        ranks: the words between the ranks of this replica, over that group.
        common: the newest step that all islands are known to hold.
    """

    def __init__(
        self,
        root: Path | str,
        topology: Topology,
        keep: int = 2,
        group: Any = None,
    ):
        if keep < 1:
            raise ValueError(f"keep={keep}: allowed is 1 or more")
        own = Path(root) / f"replica{topology.island}" if topology.kind == "mesh" else Path(root)
        # also for one rank that torch has joined, be it to itself: an NCCL group saves no copies,
        # and with none torch would save with all replicas of a mesh
        if group is None and dist.is_available() and dist.is_initialized():
            if topology.group is not None:
                members: list[int] | None = dist.get_process_group_ranks(topology.group)
            else:
                members = [dist.get_rank()] if topology.world == 1 else None
            group = dist.new_group(
                members,
                timedelta(seconds=topology.timeout + 60),
                "gloo",
                use_local_synchronization=members is not None,
            )
        super().__init__(own, topology, Ranks(group, topology.rank, topology.world))
        self.group, self.keep, self.common = group, keep, -1
        self._failures = SaveFailures(topology.name)
        self._fence = Fence(own, topology.run, topology.name)
        self._registry = CheckpointRegistry(topology)
        self._made: set[int] = set()
        self._worker: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None

    @property
    def failed_saves(self) -> int:
        """Saves of this life that could not be made."""
        return self._failures.count

    # ---- saving --------------------------------------------------------------------------------

    def save(self, step: int, write: Write, wait: bool = True, last: bool = False) -> None:
        """Make the checkpoint of `step`. All ranks of the replica call it together; islands need
        not.

        A save that fails on any rank, since a file cannot be written (OSError) or values are not
        finite, is a warning and counted in `failed_saves`; the half is removed and training goes
        on. The third one in a row raises.

        Args:
            write: `write(folder)` on every rank puts this rank's files below `folder`; it may
                return a function that does the rest, which runs in a thread if `wait` is False.
                Before collectives of its own it lets all ranks come to a point where none has
                failed (`ranks.together`).
            wait: False lets training go on; the checkpoint appears when all ranks have written. The
                one before is waited for.
            last: the process ends after it (`guard`): a save that fails raises at once, no old
                checkpoint is removed, and one of this step that this life has made already stays.

        Raises:
            PeerLost: what was under way in the exchange is lost, on any rank: no checkpoint is
                sealed, `guard` saves what is left.
            OSError, NotFinite: the third save in a row that failed, or the last one.
            RuntimeError: any other error of a rank (its own is raised there). The half is not
                picked up.
            Superseded: the folder belongs to a later life.
        """
        try:
            self.wait()
        except Exception as e:
            if not last:
                raise
            log.error("%s: the save before failed: %s", self.topology.name, e)
        if last and step in self._made:
            return
        part = self.root / f".checkpoint-{step}.part"
        rest: Callable[[], Any] | None = None
        error = self._start(part)
        try:
            rest = write(part) if error is None else None
        except Exception as e:  # the other ranks wait for this one's vote
            error = e
        if wait or last:
            self._complete(step, part, rest, error, last)
            return
        self._worker = self._worker or ThreadPoolExecutor(1, "checkpoint")
        self._pending = self._worker.submit(self._complete, step, part, rest, error)

    def _start(self, part: Path) -> Exception | None:
        """Make an empty folder; where rank 0 cannot, all ranks get the error. All else is raised on
        all.
        """

        def make() -> None:
            self._own()
            if self.topology.rank == 0:
                shutil.rmtree(part, ignore_errors=True)
                part.mkdir(parents=True)

        try:
            self.ranks.together(make, str(part))
        except OSError as error:
            return error
        return None

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
            self._registry.close()

    def finish(self) -> None:
        """The run came to its end: `close`, and delete what this life has put aside."""
        self.close()
        if self.topology.rank == 0 and self._made:
            folders.forget_asides(self.root)

    def _complete(
        self,
        step: int,
        part: Path,
        rest: Callable[[], Any] | None,
        error: Exception | None,
        last: bool = False,
    ) -> None:
        """Finish writing, vote, seal, rename, rotate: the same on all ranks, in order."""
        rank, world = self.topology.rank, self.topology.world
        try:
            if error is None and rest is not None:
                rest()
        except Exception as e:
            error = e
        try:
            self.ranks.settle(error, f"checkpoint of step {step}")
            self.ranks.together(lambda: folders.sum_up(part, rank, world), str(part))
            self.ranks.together(lambda: self._seal(step, part) if rank == 0 else None, str(part))
        except (OSError, NotFinite) as why:
            self._failed(step, part, why, last)
            return
        self._failures.made()
        self._made.add(step)
        if rank == 0 and not last:
            self._rotate()

    def _failed(self, step: int, part: Path, why: Exception, last: bool) -> None:
        """Of any rank: all come here."""
        # a later life removes what this one was writing
        self.ranks.together(self._fence.check, str(part))
        if self.topology.rank == 0:
            shutil.rmtree(part, ignore_errors=True)  # a disk that is full needs the room
        if last:
            raise why
        self._failures.failed(f"checkpoint of step {step} not saved", why)

    def _seal(self, step: int, part: Path) -> None:
        """Write the manifest and give the folder its name."""
        # one of this step from before a resume, or damaged
        old = self.path(step).with_name(f".checkpoint-{step}.old")
        self._fence.check()
        folders.seal(part, step, self.topology.world)
        try:
            self._fence.check()
        except Superseded:  # whole by now: the next start would give it the name
            (part / MANIFEST).unlink(missing_ok=True)
            raise
        if self.path(step).exists():
            shutil.rmtree(old, ignore_errors=True)
            os.replace(self.path(step), old)
        os.replace(part, self.path(step))
        sync_folder(self.root)
        shutil.rmtree(old, ignore_errors=True)

    def _rotate(self) -> None:
        """On rank 0: remove what is not needed any more (`choice.superfluous`). The list is
        published before anything goes. What cannot be asked or removed stays: nothing here may
        end a training."""
        mine = [self.regular(s) for s in self.complete()]
        try:
            common = self._registry.common(mine)
            self.common = self.common if common is None else common
            self._fence.check()
            self._remove_before(self.common, [h.step for h in mine])
        except (RuntimeError, OSError, ValueError, TypeError) as error:
            # PeerLost is a RuntimeError
            log.warning(
                "%s: no old checkpoint is removed: %s",
                self.topology.name,
                (str(error).splitlines() or [""])[0],
            )

    def _remove_before(self, common: int, mine: list[int]) -> None:
        for step in superfluous(mine, common, self.keep):
            folders.remove(self.path(step))
        # this life has got somewhere: what it has left behind is not needed any more
        if common in self._made:
            folders.forget_asides(self.root)

    # ---- what all islands hold -----------------------------------------------------------------

    def resolve_resume_step(self, resume: bool | str = True, take_over: bool = False) -> int | None:
        """The step from which this island resumes: the newest states that lie between the same
        exchanges on all islands (`choice.py`). All ranks of all islands call it, before
        `attach`.

        Nothing is deleted: what is newer is put aside, and held again at the next start if this one
        does not get to a common checkpoint.

        Args:
            resume: False: this is a new run, in folders that hold none. "auto": as True, and
                islands that hold none take over from the others. Where islands may come and go,
                those that took no part when the newest state was saved take over, too; and where
                the others hold no step in common, the newest that any holds counts.
            take_over: islands without the newest common step take over from those that have it;
                what was theirs alone is lost. Where no step is common, the newest that any island
                holds. Give it on all islands.

        Returns:
            None where no island holds any, and on an island that joins a run under way. This island
            may lack the step that is returned, and then takes over: see `has`. Islands may go on
            from unlike steps.

        Raises:
            NeedsDecision: a ValueError: no step in common; one resumes and another does not; a new
                run where an old one has left checkpoints; folders of islands that are swapped; one
                folder for two islands.
            PeerLost: islands that did not come in time.
        """
        if resume not in (True, False, "auto"):
            raise ValueError(f"resume={resume!r}: allowed are True, False and 'auto'")
        self.ranks.from_first(self.adopt)
        # all that this island holds is older than what the others have
        if self.topology.under_way():
            log.info(
                "%s: the run is under way: this island joins it, and does not agree on a step to "
                "resume from",
                self.topology.name,
            )
            self._fence.take(self.ranks)
            return None
        held = self.held()
        if held and not resume:
            steps = sorted({h.step for h in held})
            raise NeedsDecision(
                f"{self.root} holds checkpoints of steps {steps}: go on from there (--resume), or "
                "give another folder, or remove this one"
            )
        # where islands may leave one by one, the last to end has the newest state, and the others
        # lost their place when they left
        auto = "newest" if self.topology.elastic else "auto"
        how = "take_over" if take_over else auto if resume == "auto" else "common"

        def choice() -> Any:
            chosen = self._registry.choose(
                held, how, place(self.root), resume=resume, take_over=take_over
            )
            return None if chosen is None else [h and h.note() for h in chosen]

        notes = self.ranks.from_first(choice)
        self._fence.take(self.ranks)
        if notes is None:
            if resume is True and self.topology.rank == 0:
                log.warning(
                    "%s: no island holds a checkpoint, this one looked in %s: begins at step 0",
                    self.topology.name,
                    self.root,
                )
            return None
        return self._go_on([note and Held(*note) for note in notes])

    def _go_on(self, chosen: list[Held | None]) -> int:
        """Put aside what is newer than what this island goes on from."""
        mine = chosen[self.topology.starters.index(self.topology.island)]
        step = mine.step if mine is not None else max(h.step for h in chosen if h is not None)
        alike = mine is not None and len({h and h.step for h in chosen}) == 1
        self.common = step if alike else -1
        if mine is None and self.topology.rank == 0:
            log.warning(
                "%s: %s holds nothing of step %d: it takes over from the other islands",
                self.topology.name,
                self.root,
                step,
            )
        life = f"{self.topology.run}-{self._fence.token}".replace(os.sep, "_")
        self.ranks.from_first(lambda: folders.put_aside(self.root, step, life))
        return step

    def _own(self) -> None:
        """At a save: begin, if nothing has been agreed on before."""
        if not self._fence.token:
            self._fence.take(self.ranks)
        self._fence.check()
