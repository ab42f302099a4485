"""The saver of a run's checkpoints, for plain loops, the Trainer and DeepSpeed, which give `write`
and a folder's name: a checkpoint is whole or not there, the newest few are kept, and all islands
agree on the one to resume from.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import NeedsDecision, NotFinite, NotSaveable, see
from ..exchange import summary
from ..peers.votes import Ranks
from ..rendezvous import environment
from ..rendezvous.topology import Topology
from ..status import before_leaving, end_within, seconds_left
from . import folders
from .choice import HeldCheckpoint, superfluous
from .copies import RemoteCopies
from .folders import place
from .local import LocalFolder
from .registry import CheckpointRegistry
from .sharded_state import cpu_group

log = logging.getLogger("fsdp_demo")

LONG = 1e6  # seconds, for those that were not told to end

LAST_FAILURE = 3
"""Saves that may fail one after the other; this one raises."""


@dataclass(frozen=True)
class ResumePoint:
    """From where an island goes on, as all islands have agreed.

    Attributes:
        step: optimizer steps done there, by this island or by those it takes over from.
        folder: its own checkpoint, which it loads; None: it takes over from the other islands.
        tells: some islands take over, and hear from those that do not.
    """

    step: int
    folder: Path | None
    tells: bool


class CheckpointManager:
    """Checkpoints of this replica. All ranks of all islands make one before `attach`, at the same
    point.

    Args:
        root: folder of this island alone, such as `Path(folder) / topology.name`: two islands must
            not have the same. In a mesh, where all replicas share it, each gets `root/replica<i>`.
            Nodes of an island that have a disk each keep what their own ranks write.
        topology: as for `attach`.
        keep: how many to keep; never fewer than all that follow the newest step which every island
            is known to hold. None: all.
        registry: of a host that has one: where the islands ask each other, and the words between
            the ranks. No process group is made then, and in a mesh, too, `root` is this replica's.
        votes: between all ranks whose collectives `write` uses, if these are more than the ranks.
        rotates: remove what is not needed any more after a save.
        grouped: the replica whose ranks `group` joins, where all replicas save together.
        remote: address of a store of objects (`s3://bucket/run`), where each replica has a folder
            of its name, and gets a copy of each checkpoint while training goes on. Default
            ISLAND_REMOTE; "": none. below: a folder in it: see `enter`.

    Raises:
        ValueError: `root` is such an address; what opens `remote` is not installed.

    Attributes:
        copies: of `root`, in a store of objects; None: there are none.
        group: process group of the replica's ranks over CPU tensors; None: a single rank.
        ranks: the words between the ranks of this replica, over that group.
        registry: where the islands ask each other.
        common: the newest step that all islands are known to hold.
        best: a step that rotation spares.
        failed_saves: saves of this life that could not be made.
        damaged: why the last `held` has left out the newest checkpoints that it could not use.
    """

    def __init__(
        self,
        root: Path | str,
        topology: Topology,
        keep: int | None = 2,
        registry: CheckpointRegistry | None = None,
        votes: Ranks | None = None,
        rotates: bool = True,
        grouped: Topology | None = None,
        remote: str | None = None,
        below: str = "",
    ):
        if keep is not None and keep < 1:
            raise ValueError(f"keep={keep}: allowed is 1 or more")
        shared = topology.one_world and registry is None
        name = f"replica{topology.island}" if shared else topology.name
        root, refused = Path(root) / name if shared else Path(root), str(root)
        if re.match(r"\w[\w+.-]+:/", refused):
            raise ValueError(
                f"{refused} is no local folder: give one as root, and this address as remote= "
                "(ISLAND_REMOTE), for copies of what is saved there"
            )
        self.topology, self.keep = topology, keep
        summary.speak(topology)  # the first lines may come before `attach`
        self.group = None if registry else cpu_group(topology)
        ranks = registry.ranks if registry else Ranks(self.group, topology.rank, topology.world)
        self.ranks, self.votes = ranks, votes or ranks
        self.registry = registry or CheckpointRegistry(topology, ranks)
        self.rotates, self.damaged, self._name = rotates, "", name
        self.best: int | None = None
        self.failed_saves = self._failed_in_a_row = self._saves = 0
        self._worker: ThreadPoolExecutor | None = None
        self._pending: Future[bool] | None = None
        self._url = environment.remote(os.environ if remote is None else {"ISLAND_REMOTE": remote})
        self._places: dict[Path, tuple[LocalFolder, RemoteCopies | None]] = {}
        if self._url:
            before_leaving(self.upload_rest)
        self.enter(root, below)
        if grouped is not None:
            self.group = cpu_group(grouped)

    def enter(self, root: Path, below: str = "") -> None:
        """Look into `root` and save there from now on. All ranks of the replica come together.

        Args:
            below: of `remote`, the place for this root where there are several.
        """
        self.root, self.common = root, -1
        self._made: set[int] = set()
        self._loaded: int | None = None
        if root not in self._places:
            local = LocalFolder(root, self.topology, self.ranks)
            url = f"{self._url.rstrip('/')}/{below}"
            copies = RemoteCopies(url, self._name, local) if self._url else None
            self._places[root] = local, copies
        self._local, self.copies = self._places[root]

    def spare(self, step: int | None) -> None:
        """Let rotation spare this step from now on (`best`)."""
        self.best = step

    def path(self, step: int) -> Path:
        """The folder of a checkpoint, where no host gives it another name."""
        return self.root / f"checkpoint-{step}"

    def whole(self) -> dict[int, Path]:
        """The checkpoints whose manifest fits the sizes of the files, by step, ascending."""
        return self._local.whole()

    def held(self, name: str = "") -> list[HeldCheckpoint]:
        """What the replica can resume from, the same list on all its ranks, `copies` included. What
        is not complete is named in the log, and what is of a newer release refused.

        Args:
            name: look into the folder of this name only.

        Raises:
            OSError: `remote` does not answer within ISLAND_TIMEOUT.
        """
        notes, generations, self.damaged = self._local.notes(name, self.copies is not None)
        if self.copies is not None:
            notes = self.copies.remote.merge(notes, generations, name)
        return [HeldCheckpoint(*note) for note in notes]

    def adopt(self) -> None:
        """Delete saves that were cut off, and take back checkpoints that an earlier start has put
        aside without getting to a common one. All ranks of the replica come together.
        """
        self._local.once_per_disk(lambda: folders.adopt(self.root))

    def verify(self, folder: Path) -> None:
        """Compare all checksums of a checkpoint, this replica's or another's, each rank its share.
        All ranks of the replica come together.

        Raises:
            ValueError: on every rank, if a file is damaged.
        """
        mine = self.ranks.together(lambda: folders.damaged(folder, *self._local.share), str(folder))
        if bad := [name for names in self.ranks.everyone(mine) for name in names]:
            raise ValueError(
                f"{folder} is damaged ({', '.join(bad[:4])}: checksum does not fit): remove this "
                "folder on one island, and all resume from the common step before it"
                f"{see('damaged-checkpoint')}"
            )

    # ---- saving --------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        write: Callable[[Path], Callable[[], Any] | None],
        wait: bool = True,
        last: bool = False,
        name: str = "",
    ) -> bool:
        """Make the checkpoint of `step`. All ranks of the replica call it together.

        A save that fails on any rank, since a file cannot be written (OSError), or values are not
        finite or of a kind that files do not hold, is a warning and counted in `failed_saves`; the
        half is removed and training goes on. The third one in a row raises.

        Args:
            write: `write(folder)` on every rank puts this rank's files below `folder`; it may
                return a function that does the rest, which runs in a thread if `wait` is False.
                Before collectives of its own it lets all ranks come to a point where none has
                failed (`ranks.together`).
            wait: False lets training go on; the checkpoint is there when all ranks have written.
                The one before is waited for.
            last: the process ends after it (`guard`): a save that fails raises at once, no old
                checkpoint is removed, and one of this step that this life has made, or has gone on
                from, stays.
            name: of the folder, default that of `path`. What is there is written over.

        Returns:
            Whether it is there; with `wait=False` whether nothing has failed so far.

        Raises:
            PeerLost: what was under way in the exchange is lost, on any rank: no checkpoint is
                sealed, `guard` saves what is left.
            OSError, NotFinite, NotSaveable: the third save in a row that failed, or the last one.
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
        if last and (step in self._made or step == self._loaded):
            return True
        self._saves += 1
        folder = self.root / name if name else self.path(step)
        rest: Callable[[], Any] | None = None
        error: Exception | None = None
        try:
            self.votes.together(lambda: self._make(folder), str(folder))
        except OSError as e:  # of rank 0, on all ranks
            error = e
        try:
            rest = write(folder) if error is None else None
        except Exception as e:  # the other ranks wait for this one's vote
            error = e
        if wait or last:
            return self._complete(step, folder, rest, error, last)
        self._worker = self._worker or ThreadPoolExecutor(1, "checkpoint")
        self._pending = self._worker.submit(self._complete, step, folder, rest, error)
        return error is None

    def _make(self, folder: Path) -> None:
        if not self._local.fence.token:  # nothing has been agreed on before
            self.own()
        self._local.fence.check()
        if self.copies is not None:
            self.copies.uploads.check()
        if not self._local.share[0]:
            folders.clear(folder)

    def wait(self) -> None:
        """Wait for a save that is under way; raises what it ran into."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def upload_rest(self) -> None:
        """Upload what is not, before this process ends in order, until ISLAND_STOP is over. All
        ranks of the replica come together: a launcher ends the others when the first one ends.
        """
        try:
            self.wait()
            if self.copies is not None:
                end_within(-self.ranks.max(-min(seconds_left(), LONG))[0])
                self._flush()
                self.ranks.any(False)
        except Exception as error:  # it is saved here
            log.warning("%s: the last uploads have failed: %s", self.topology.name, error)

    def _flush(self) -> None:
        for _, copies in self._places.values():
            if copies is not None:
                copies.uploads.flush()

    def close(self) -> None:
        """Wait, and end the thread and the connection."""
        try:
            self.wait()
            self._flush()
        finally:
            if self._worker is not None:
                self._worker.shutdown()
            self._worker = None
            self.registry.close()

    def finish(self) -> None:
        """The run came to its end: `close`, and delete what this life has put aside."""
        self.close()
        if not self._local.share[0] and self._made:
            folders.forget_asides(self.root)

    def _complete(
        self,
        step: int,
        folder: Path,
        rest: Callable[[], Any] | None,
        error: Exception | None,
        last: bool = False,
    ) -> bool:
        """Finish writing, vote, seal, rotate."""
        share, what = self._local.share, f"checkpoint of step {step}"
        try:
            if error is None and rest is not None:
                rest()
        except Exception as e:
            error = e
        try:
            self.votes.settle(error, what)
            self.votes.together(lambda: folders.sum_up(folder, *share), what)
            called = self.copies.remote.generation(self._saves) if self.copies else ""
            self._local.once_per_disk(lambda: self._local.seal(step, folder, called), self.votes)
        except (OSError, NotFinite, NotSaveable) as why:
            self._failed(step, folder, why, last)
            return False
        self._failed_in_a_row = 0
        self._made.add(step)
        if self.rotates and not last:
            self._rotate()
        if self.copies is not None:
            self.copies.uploads.add(step, folder)
        return True

    def _failed(self, step: int, folder: Path, why: Exception, last: bool) -> None:
        # a later life removes what this one was writing
        self.votes.together(self._local.fence.check, str(folder))
        if not self._local.share[0]:
            folders.remove(folder)  # a disk that is full needs the room
        if last:
            raise why
        self.failed_saves += 1
        self._failed_in_a_row += 1
        if self._failed_in_a_row >= LAST_FAILURE:
            raise why
        log.warning(
            "%s: checkpoint of step %d not saved (%s); training goes on, failure %d in a row of "
            "the %d that end it" + see("save-failed"),
            *(self.topology.name, step, why, self._failed_in_a_row, LAST_FAILURE),
        )

    def _rotate(self) -> None:
        """Remove what is not needed any more (`choice.superfluous`). The list is published before
        anything goes. What cannot be asked or removed stays: nothing here may end a training."""
        try:
            held = [HeldCheckpoint(*note) for note in self._local.notes()[0]]
            common = self.ranks.from_first(lambda: self.registry.common(held))
            self.common = self.common if common is None else common
            if self.copies is not None:
                self.copies.rotate(self.registry, self.keep, self.best)
            self._local.once_per_disk(self._remove_superfluous)
        except (RuntimeError, OSError, ValueError, TypeError) as error:
            # PeerLost is a RuntimeError
            if self.topology.rank == 0:
                why = (str(error).splitlines() or [""])[0]
                log.warning("%s: no old checkpoint is removed: %s", self.topology.name, why)

    def _remove_superfluous(self) -> None:
        there = self.whole()
        self._local.fence.check()
        gone = superfluous(list(there), self.common, self.keep, self.best)
        if self.copies is not None and self.keep:
            gone = self.copies.unneeded(gone, len(there), self.keep)
        for step in gone:
            folders.remove(there[step])
        if self.common in self._made:  # what this life has left behind is not needed any more
            folders.forget_asides(self.root)
            if self.copies is not None:
                self.copies.uploads.settled = True

    # ---- what all islands hold -----------------------------------------------------------------

    def resume_point(
        self, resume: bool | str = True, take_over: bool = False
    ) -> ResumePoint | None:
        """From where this island resumes: the newest states that lie between the same exchanges on
        all islands (`choice.py`). All ranks of all islands call it, before `attach`.

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
            None where no island has any, and on an island that joins a run under way. Islands may
            go on from unlike steps.

        Raises:
            NeedsDecision: a ValueError: no step in common; none that is whole, but a damaged one;
                one resumes and another does not; a new run where an old one has left checkpoints;
                folders of islands that are swapped; one folder for two islands.
            PeerLost: islands that did not come in time.
        """
        if resume not in (True, False, "auto"):
            raise ValueError(f"resume={resume!r}: allowed are True, False and 'auto'")
        self.adopt()
        # all that this island holds is older than what the others have
        if self.topology.under_way():
            self.own()
            self.fetch_newest()
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
        point = self.agree(held, how, resume=resume, take_over=take_over)
        if point is None:
            if resume is True and self.topology.rank == 0:
                text = "%s: no island holds a checkpoint, this one looked in %s: begins at step 0"
                log.warning(text, self.topology.name, self.root)
        elif point.folder is None and self.topology.rank == 0:
            text = "%s: %s holds nothing of step %d that fits: it takes over from the other islands"
            log.warning(text, self.topology.name, self.root, point.step)
        self.own(None if point is None else point.step)
        return point

    def agree(
        self, held: list[HeldCheckpoint], how: str, name: str = "", **same: Any
    ) -> ResumePoint | None:
        """From where this island goes on, by `CheckpointRegistry.choose`; None where no island has
        a checkpoint. All ranks of all islands come together.

        Args:
            held: what `held` said, with the same `name`. how, same: as for `choose`.
        """
        of = self.topology
        about = {"place": place(self.root), "damaged": self.damaged}
        about |= {"remote": self.copies.remote.url} if self.copies else {}
        chosen = self.registry.choose(held, how, about, **same)
        if chosen is None:
            return None
        mine = chosen[of.starters.index(of.island)]
        step = max(h.step for h in chosen if h is not None) if mine is None else mine.step
        self.common = step if {h and h.step for h in chosen} == {step} else -1
        if mine is None:
            return ResumePoint(step, None, True)
        self._loaded = step
        folder = self.copies.bring(step) if self.copies else None
        if self.copies is not None and of.rank == 0:
            where = self.copies.remote.url if folder else self.root
            log.info("%s: goes on from step %d of %s", of.name, step, where)
        if folder is None:
            folder = self.root / (name or self.ranks.from_first(lambda: self.whole()[step].name))
        return ResumePoint(step, folder, None in chosen)

    def fetch_newest(self, name: str = "") -> None:
        """Bring the newest checkpoint here, or that of a name, where only the store of objects has
        it; what fails is a warning. All ranks of the replica come together.
        """
        if self.copies is not None:
            try:
                if held := self.held(name):
                    self.copies.bring(held[-1].step)
            except (OSError, ValueError, RuntimeError) as error:
                log.warning("%s: nothing comes from %s: %s", self.topology.name, self._url, error)

    def own(self, step: int | None = None, given_up: bool = False) -> None:
        """Make this life the owner of the folder, and put aside what is newer than `step`. All
        ranks of the replica come together.

        Args:
            given_up: a person named that step: see `folders.put_aside`.
        """
        self._local.fence.take(self.ranks, not self._local.share[0])
        if self.copies is not None:
            self.copies.remote.begin(step, given_up)
        if step is not None:
            self._local.once_per_disk(lambda: folders.put_aside(self.root, step, given_up))
            if self.copies is not None:
                self.copies.upload_origin(step)
