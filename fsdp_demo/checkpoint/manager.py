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

from ..errors import NeedsDecision, NotFinite, NotSaveable, Superseded, see
from ..exchange import summary
from ..peers.votes import Ranks
from ..rendezvous import environment
from ..rendezvous.topology import Topology
from ..status import before_leaving, end_within, seconds_left
from . import folders
from .choice import HeldCheckpoint, look, superfluous
from .files import OTHER
from .folders import MANIFEST, NEWER, Fence, misfits, place
from .registry import CheckpointRegistry
from .remote import Remote
from .sharded_state import cpu_group
from .uploads import Uploads

log = logging.getLogger("fsdp_demo")

LONG = 1e6  # seconds, for those that were not told to end

MORE = 2
"""Local checkpoints beyond `keep` that rotation spares while they wait for their upload."""

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
        remote: the copies of this replica; None: there are none.
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
        self.rotates, self.damaged = rotates, ""
        self.best: int | None = None
        self.failed_saves = self._failed_in_a_row = 0
        self._fences: dict[Path, Fence] = {}
        self._worker: ThreadPoolExecutor | None = None
        self._pending: Future[bool] | None = None
        self._remotes: dict[Path, tuple[Remote, Uploads]] = {}
        self.remote: Remote | None = None
        self.uploads: Uploads | None = None
        self._url = environment.remote(os.environ if remote is None else {"ISLAND_REMOTE": remote})
        self._name, self._saves = name, 0
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
        fence = Fence(root, self.topology.run, self.topology.name)
        self._fence = self._fences.setdefault(root, fence)
        disk = folders.sharers(root, self.ranks)
        self._number, self._sharers = disk.index(self.ranks.rank), len(disk)
        if self._url and root not in self._remotes:
            url = f"{self._url.rstrip('/')}/{below}"
            remote = Remote(url, self._name, self.topology, self.ranks, disk)
            self._remotes[root] = remote, Uploads(remote)
        self.remote, self.uploads = self._remotes.get(root, (None, None))

    def _once_per_disk(self, work: Callable[[], Any], ranks: Ranks | None = None) -> None:
        """Let the first rank on each disk do something. All `ranks` come together."""
        (ranks or self.ranks).together(lambda: self._number or work(), str(self.root))

    def spare(self, step: int | None) -> None:
        """Let rotation spare this step from now on (`best`)."""
        self.best = step

    def path(self, step: int) -> Path:
        """The folder of a checkpoint, where no host gives it another name."""
        return self.root / f"checkpoint-{step}"

    def whole(self) -> dict[int, Path]:
        """The checkpoints whose manifest fits the sizes of the files, by step, ascending."""
        return {step: path for step, path in folders.found(self.root) if not misfits(path)}

    def held(self, name: str = "") -> list[HeldCheckpoint]:
        """What the replica can resume from, the same list on all its ranks, `remote` included. What
        is not complete is named in the log, and what is of a newer release refused.

        Args:
            name: look into the folder of this name only.

        Raises:
            OSError: `remote` does not answer within ISLAND_TIMEOUT.
        """
        notes, generations = self._here(name)
        if self.remote is not None:
            notes = self.remote.merge(notes, generations, name)
        return [HeldCheckpoint(*note) for note in notes]

    def _here(self, name: str = "") -> tuple[list[list[Any]], dict[int, str]]:
        """Notes of what is whole in the folders, on all disks, and the generations by step, as far
        as somebody asks for them."""
        notes, self.damaged = self.ranks.from_first(lambda: self._held(name))
        if self.remote is None and self._sharers == self.ranks.world:
            return notes, {}

        def look() -> list[Any]:
            return [[step, folders.generation(folder)] for step, folder in self.whole().items()]

        there = self.ranks.everyone(self.ranks.together(look, str(self.root)))
        if self._sharers < self.ranks.world:  # nodes with a disk each
            common = [pair for pair in there[0] if all(pair in pairs for pairs in there)]
            lacking = [n[0] for n in notes if not any(n[0] == step for step, _ in common)]
            if lacking:
                self.damaged += f"{self.root}: steps {lacking} are not whole on the disk of a node"
                notes = [note for note in notes if note[0] not in lacking]
        return notes, dict(there[0])

    def _held(self, name: str = "") -> tuple[list[list[Any]], str]:
        """Notes of `held`, and what is left out."""
        out: dict[int, HeldCheckpoint] = {}
        bad, found = [], folders.found(self.root)
        for step, folder in [*found, *folders.unsealed(self.root, found)]:
            if name and folder.name != name:
                continue
            why = misfits(folder)
            if why.startswith(NEWER):
                raise ValueError(f"{folder}: {why}: install that release, or move this folder away")
            try:
                if why:
                    raise ValueError(f"{folder} is not complete: {why}")
                out[step] = look(folder / "exchange", step, self.topology.islands)
            except ValueError as error:
                log.warning("%s; it is left out", error)
                bad.append(str(error).partition(OTHER)[0].rstrip(":; ")[:300])
        return [h.note() for h in out.values()], "; ".join(bad[-2:])

    def adopt(self) -> None:
        """Delete saves that were cut off, and take back checkpoints that an earlier start has put
        aside without getting to a common one. All ranks of the replica come together.
        """
        self._once_per_disk(self._adopt)

    def _adopt(self) -> None:
        for half in self.root.glob(f"*/{folders.UNFINISHED}"):
            if (half.parent / MANIFEST).exists():
                half.unlink(missing_ok=True)  # gone: of a link
            else:
                folders.remove(half.parent)
        folders.take_back(self.root)

    def verify(self, folder: Path) -> None:
        """Compare all checksums of a checkpoint, this replica's or another's, each rank its share.
        All ranks of the replica come together.

        Raises:
            ValueError: on every rank, if a file is damaged.
        """
        share = self._number, self._sharers
        mine = self.ranks.together(lambda: folders.damaged(folder, *share), str(folder))
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
        if not self._fence.token:  # nothing has been agreed on before
            self.own()
        self._fence.check()
        if self.uploads is not None:
            self.uploads.check()
        if not self._number:
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
            if self.uploads is not None:
                end_within(-self.ranks.max(-min(seconds_left(), LONG))[0])
                self._flush()
                self.ranks.any(False)
        except Exception as error:  # it is saved here
            log.warning("%s: the last uploads have failed: %s", self.topology.name, error)

    def _flush(self) -> None:
        for _, uploads in self._remotes.values():
            uploads.flush()

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
        if not self._number and self._made:
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
        share, what = (self._number, self._sharers), f"checkpoint of step {step}"
        try:
            if error is None and rest is not None:
                rest()
        except Exception as e:
            error = e
        try:
            self.votes.settle(error, what)
            self.votes.together(lambda: folders.sum_up(folder, *share), what)
            self._once_per_disk(lambda: self._seal(step, folder), self.votes)
        except (OSError, NotFinite, NotSaveable) as why:
            self._failed(step, folder, why, last)
            return False
        self._failed_in_a_row = 0
        self._made.add(step)
        if self.rotates and not last:
            self._rotate()
        if self.uploads is not None:
            self.uploads.add(step, folder)
        return True

    def _failed(self, step: int, folder: Path, why: Exception, last: bool) -> None:
        # a later life removes what this one was writing
        self.votes.together(self._fence.check, str(folder))
        if not self._number:
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

    def _seal(self, step: int, folder: Path) -> None:
        """Write the manifest: from then on the checkpoint is there."""
        self._fence.check()
        called = "" if self.remote is None else self.remote.generation(self._saves)
        folders.seal(folder, step, self._sharers, called)
        try:
            self._fence.check()
        except Superseded:
            (folder / MANIFEST).unlink(missing_ok=True)
            raise

    def _rotate(self) -> None:
        """Remove what is not needed any more (`choice.superfluous`). The list is published before
        anything goes. What cannot be asked or removed stays: nothing here may end a training."""
        try:
            held = [HeldCheckpoint(*note) for note in self._here()[0]]
            common = self.ranks.from_first(lambda: self.registry.common(held))
            self.common = self.common if common is None else common
            if self.uploads is not None:
                there = self.ranks.from_first(self._common_remote)
                self.uploads.keeps = there, self.keep, self.best
            self._once_per_disk(self._remove_superfluous)
        except (RuntimeError, OSError, ValueError, TypeError) as error:
            # PeerLost is a RuntimeError
            if self.topology.rank == 0:
                why = (str(error).splitlines() or [""])[0]
                log.warning("%s: no old checkpoint is removed: %s", self.topology.name, why)

    def _common_remote(self) -> int:
        """The newest step that all islands have in their stores; -1 where one has none."""
        assert self.remote is not None
        common = self.registry.common(self.remote.known, where="remote")
        return -1 if common is None else common

    def _remove_superfluous(self) -> None:
        there = self.whole()
        self._fence.check()
        gone = superfluous(list(there), self.common, self.keep, self.best)
        if self.uploads is not None and self.keep:
            room = max(self.keep + MORE - len(there) + len(gone), 0)
            stay = self.uploads.spared(gone, room)
            gone = [step for step in gone if step not in stay]
        for step in gone:
            folders.remove(there[step])
        if self.common in self._made:  # what this life has left behind is not needed any more
            folders.forget_asides(self.root)
            if self.uploads is not None:
                self.uploads.settled = True

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
        about |= {} if self.remote is None else {"remote": self.remote.url}
        chosen = self.registry.choose(held, how, about, **same)
        if chosen is None:
            return None
        mine = chosen[of.starters.index(of.island)]
        step = max(h.step for h in chosen if h is not None) if mine is None else mine.step
        self.common = step if {h and h.step for h in chosen} == {step} else -1
        if mine is None:
            return ResumePoint(step, None, True)
        self._loaded = step
        folder = self._bring(step, name)
        if self.remote is not None and of.rank == 0:
            where = self.remote.url if step in self.remote.origin else self.root
            log.info("%s: goes on from step %d of %s", of.name, step, where)
        return ResumePoint(step, folder, None in chosen)

    def _bring(self, step: int, name: str = "") -> Path:
        """The folder of a step that is held; from `remote` it is written here as by a save. All
        ranks of the replica come together. Raises OSError.
        """
        remote = self.remote
        path = None if remote is None else remote.origin.get(step)
        if remote is None or path is None:
            found = name or self.ranks.from_first(lambda: self.whole()[step].name)
            return self.root / str(found)
        called, _, generation = path.partition("/")
        folder = self.root / called
        self._once_per_disk(lambda: folders.clear(folder))
        self.ranks.together(lambda: remote.download(path, folder), path)
        self._once_per_disk(lambda: folders.seal(folder, step, self._sharers, generation))
        return folder

    def fetch_newest(self, name: str = "") -> None:
        """Bring the newest checkpoint here, or that of a name, where only `remote` has it; what
        fails is a warning. All ranks of the replica come together.
        """
        if self.remote is not None:
            try:
                if held := self.held(name):
                    self._bring(held[-1].step)
            except (OSError, ValueError, RuntimeError) as error:
                log.warning("%s: nothing comes from %s: %s", self.topology.name, self._url, error)

    def own(self, step: int | None = None, given_up: bool = False) -> None:
        """Make this life the owner of the folder, and put aside what is newer than `step`. All
        ranks of the replica come together.

        Args:
            given_up: a person named that step: see `folders.put_aside`.
        """
        self._fence.take(self.ranks, not self._number)
        if self.remote is not None:
            self.remote.begin(step, given_up)
        if step is not None:
            self._once_per_disk(lambda: folders.put_aside(self.root, step, given_up))
            if self.remote is not None and self.uploads is not None:
                if folder := self.whole().get(step):
                    if f"{folder.name}/{folders.generation(folder)}" not in self.remote.there:
                        self.uploads.add(step, folder)
