"""The thread that uploads a replica's checkpoints while training goes on (`remote.py`), and removes
there what rotation does not keep.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from ..errors import Superseded, see
from ..files import parse_json, to_json
from ..status import seconds_left
from .choice import superfluous
from .files import read_head
from .folders import MANIFEST
from .remote import AGAIN, Manifest, Remote, generation_in

log = logging.getLogger("fsdp_demo")

LONGEST = 60.0
"""Seconds after which what has failed is tried again, at most."""

_HEAD = ("islands", "island", "applied", "history", "participants")  # what `held_by` asks for


class Uploads:
    """What waits for its upload on this rank's disk: the first rank there does it.

    Attributes:
        keeps: `common`, `keep` and `best` for `superfluous` in the store; None: all stays.
        settled: this life has a checkpoint that all islands hold.
    """

    def __init__(self, remote: Remote):
        self.keeps: tuple[int, int | None, int | None] | None = None
        self.settled = False
        self._remote, self._waiting = remote, dict[int, Path]()  # by step
        self._changed, self._thread = threading.Condition(), threading.Thread(None, self._work)
        self._superseded = self._failing = ""
        self._hurry, self._said = False, list[int]()

    def check(self) -> None:
        """Raise Superseded where an upload has found a later life."""
        if self._superseded:
            raise Superseded(self._superseded)

    def add(self, step: int, folder: Path) -> None:
        """Upload a checkpoint that is whole here, from now on."""
        if self._remote.ranks.rank != self._remote.disk[0]:
            return
        with self._changed:
            self._waiting.pop(step, None)
            self._waiting[step] = folder
            self._changed.notify_all()
        if self._thread.ident is None:
            self._thread.name, self._thread.daemon = "upload", True
            self._thread.start()
            # atexit comes after Python has closed the pools of threads that clients use
            getattr(threading, "_register_atexit", atexit.register)(self._at_exit, os.getpid())

    def spared(self, gone: Sequence[int], room: int) -> list[int]:
        """Of the steps that rotation would delete here those that stay, at most `room`, since they
        wait for their upload: the one under way, and the newest.
        """
        with self._changed:
            first = next(iter(self._waiting), None)
            waiting = sorted((s == first, s) for s in gone if s in self._waiting)
        lost = [step for _, step in waiting[: max(len(waiting) - room, 0)]]
        stay = [step for _, step in waiting if step not in lost]
        if lost or (stay and self._failing):
            log.warning(
                "%s: steps %s are kept for their upload%s%s",
                *(self._remote.url, stay, self._failing and f", which fails: {self._failing}"),
                f"; {lost} are deleted without one" if lost else "",
            )
        return stay

    def flush(self) -> None:
        """Wait until all is uploaded, while anything comes through within ISLAND_TIMEOUT, and as
        long as this process may live (`seconds_left`). What is not is named in the log.
        """
        remote, begun = self._remote, time.monotonic()
        with self._changed:
            self._hurry = True
            self._changed.notify_all()
            while self._waiting and not self._superseded:
                idle = time.monotonic() - max(begun, remote.store.moved)
                if (left := min(remote.topology.timeout - idle, seconds_left())) <= 0:
                    break
                self._changed.wait(min(left, 1.0))
            self._hurry, rest = False, dict(self._waiting)
        if rest and [*rest] != self._said:
            self._said = [*rest]
            log.warning(
                "%s: steps %s are not in %s (%s): they lie in %s alone, and a start with this "
                "folder goes on from there, and uploads what it goes on from",
                *(remote.topology.name, self._said, remote.url),
                self._superseded or self._failing or "no time was left",
                next(iter(rest.values())).parent,
            )

    def _at_exit(self, process: int) -> None:
        if os.getpid() == process and getattr(sys, "last_value", None) is None:
            self.flush()

    def _work(self) -> None:
        """The thread: the oldest first; the newest where the process is about to end."""
        wait = AGAIN
        while not self._superseded:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                step, folder = [*self._waiting.items()][-1 if self._hurry else 0]
            try:
                self._upload(folder)
                if self._failing:
                    log.warning("%s: uploads go on", self._remote.url)
                wait, self._failing = AGAIN, ""
            except Superseded as error:
                self._superseded = str(error)
                log.error("%s: %s", self._remote.topology.name, error)
            except Exception as error:
                if (folder / MANIFEST).exists():
                    self._pause(error, wait)
                    wait = min(2 * wait, LONGEST)
                    continue  # else it is gone here: nothing to upload
            with self._changed:
                if self._waiting.get(step) is folder:  # not one that was saved anew meanwhile
                    del self._waiting[step]
                self._changed.notify_all()

    def _pause(self, error: Exception, seconds: float) -> None:
        if not self._failing:
            text = "%s: an upload failed (%s); training goes on, and it is tried again"
            log.warning(text, self._remote.url, error)
        self._failing = str(error) or repr(error)
        with self._changed:
            hurry = self._hurry
            self._changed.wait_for(lambda: self._hurry > hurry, AGAIN if hurry else seconds)

    def _upload(self, folder: Path) -> None:
        """Upload one checkpoint, its manifest last, without what is there already. Raises OSError:
        not whole there, or gone here; Superseded.
        """
        remote, store = self._remote, self._remote.store
        text = (folder / MANIFEST).read_text(encoding="utf-8")
        local = parse_json(text)
        sizes = {name: file["bytes"] for name, file in local["files"].items()}
        called = str(local.get("generation", ""))
        if not called.startswith(remote.life):  # of an earlier start, perhaps with other disks
            called = remote.generation(0)
        path = f"{folder.name}/{called}/rank{remote.disk[0]}"
        heads = [read_head(p)[0] for p in sorted((folder / "exchange").glob("rank*.json"))]
        manifest = Manifest(
            *(local["version"], local["step"], local["files"]),
            *(remote.parts, remote.disk, remote.ranks.world),
            [{name: head[name] for name in _HEAD if name in head} for head in heads],
        )
        seal, there = to_json(manifest).encode(), store.sizes(path)
        if not {**sizes, MANIFEST: len(seal)}.items() <= there.items():
            for name in sizes:
                if there.get(name) != sizes[name]:
                    store.put(folder / name, f"{path}/{name}")
            if not sizes.items() <= store.sizes(path).items():
                raise OSError(f"not all of {path} has arrived in its size")
            self._refuse_older()
            if (folder / MANIFEST).read_text(encoding="utf-8") != text:
                raise OSError(f"{folder} was saved anew meanwhile")
            store.write(f"{path}/{MANIFEST}", seal)
        try:
            self._refuse_older()
        except Superseded:
            store.remove(f"{path}/{MANIFEST}")
            raise
        if remote.ranks.rank == 0:
            self._clean(folder)

    def _refuse_older(self) -> None:
        newest = max(self._remote.lives(), default="")
        if self._remote.opening:
            raise OSError("another life of this process begins")
        if newest > (mine := self._remote.life):
            raise Superseded(
                f"{self._remote.url} belongs to a later life ({newest}) than this process ({mine}),"
                f" which was taken for dead: nothing is uploaded; end it{see('later-life')}"
            )

    def _clean(self, uploaded: Path) -> None:
        """Remove what rotation does not keep, and what came to nothing. What fails here is done
        after the next upload.
        """
        remote = self._remote
        try:
            copies = remote.scan()
            all_there = {path for path, _ in remote.whole(copies).values()}
            whole = remote.whole(copies, own=True)
            gone = superfluous(sorted(whole), *self.keeps) if self.keeps else []
            stay = {path for step, (path, _) in whole.items() if step not in gone}
            if not self.settled:  # what was put aside
                stay |= all_there - {path for path, _ in whole.values()}
            with self._changed:
                names = {folder.name for folder in self._waiting.values() if folder is not uploaded}
            # other disks are at it, or a person has given it up
            last = max((generation_in(path) for path, _ in whole.values()), default="")
            last = last if self.settled else ""
            for path, held in copies.items():
                half = held is None and not generation_in(path) < last
                if path not in stay and path.split("/")[0] not in names and not half:
                    self._refuse_older()  # which may be fetching it
                    remote.hide(path)
                    remote.store.remove(path)
        except Exception as error:
            log.warning("%s: nothing is removed there: %s", remote.url, error)
