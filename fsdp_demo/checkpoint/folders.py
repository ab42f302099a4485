"""Folders of checkpoints on disk: which are there, whether they are whole, and how one is sealed or
put aside. Only manifests move, never data.

    <any name>/manifest.json            version, step, and every file with its size and checksum; written last: a folder is a checkpoint while it has one
               manifest.unfinished      a save under way, or one that was cut off: never read
               manifest.aside.json      the manifest of one that is newer than the step a later life went on from: not held

What is put aside comes back at the next start, and is deleted when the life that put it there has a
checkpoint that all islands hold: until then nobody knows whether that life will get anywhere. What
a person has given up on purpose stays aside.

One life at a time writes into a folder: `.life.json` in it is a lock that the newest life replaces.
A process that was stopped, suspended or cut off may wake when its successor has begun. It looks at
the lock before it gives anything its name, finds another token there, and writes nothing more.
"""  # noqa: E501

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import UNREADABLE, Superseded, see
from ..files import in_one_piece, read_json
from ..peers.votes import Ranks
from ..version import __version__
from .files import crc32, measured, sync_folder

log = logging.getLogger("fsdp_demo")

VERSION = 1  # of the manifest
MANIFEST = "manifest.json"
ASIDE = "manifest.aside.json"
GIVEN_UP = "manifest.given-up.json"  # nobody takes it back
UNFINISHED = "manifest.unfinished"
LOCK = ".life.json"
MANIFESTS = (MANIFEST, ASIDE, GIVEN_UP, UNFINISHED)
NEWER = "its manifest has version"
LONGEST_NAME = 255  # bytes of a part of a path, by file systems
_NAME = re.compile(r"checkpoint-(\d+)")


def found(root: Path, manifest: str = MANIFEST) -> list[tuple[int, Path]]:
    """Step and folder of each checkpoint in `root`, ascending; of one step the newest last.
    manifest: `ASIDE` or `GIVEN_UP`: those that are put aside.
    """
    out = []
    for path in root.glob(f"*/{manifest}"):
        if _is_second_name(path.parent):
            continue
        try:
            named = _NAME.fullmatch(path.parent.name)
            step = int(named[1]) if named else int(read_json(path)["step"])
            out.append((step, path.stat().st_mtime_ns, path.parent))
        except (OSError, *UNREADABLE):
            log.warning("%s cannot be read: it is left out", path)
    return [(step, folder) for step, _, folder in sorted(out)]


def unsealed(root: Path, sealed: list[tuple[int, Path]]) -> list[tuple[int, Path]]:
    """Folders with an exchange's parts, but no manifest that says a step (-1 stands for it)."""
    parts = {path.parent for path in root.glob("*/exchange")} - {folder for _, folder in sealed}
    there = (folder for folder in sorted(parts) if not _is_second_name(folder))
    return [(-1, folder) for folder in there if not is_put_off(folder)]


def _is_second_name(folder: Path) -> bool:
    """Whether it is a link to a folder beside it (`last-checkpoint` of `swift sft`)."""
    return folder.is_symlink() and folder.resolve().parent == folder.parent.resolve()


def clear(folder: Path) -> None:
    """Make room for a checkpoint: what was there is not whole from now on."""
    remove(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / UNFINISHED).touch()


def remove(folder: Path) -> None:
    """Make a checkpoint one that is not there, then delete it: a reader never sees a half."""
    for name in MANIFESTS:
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def is_put_off(folder: Path) -> bool:
    """Whether a checkpoint is put aside, or its save was cut off."""
    return not (folder / MANIFEST).exists() and any((folder / n).exists() for n in MANIFESTS)


# ---- manifests ---------------------------------------------------------------------------------


def files_in(folder: Path) -> list[str]:
    """The files of a checkpoint by their names below it, sorted; without manifest and sums."""
    paths = (p for p in folder.rglob("*") if p.is_file() and not p.name.startswith(".sums"))
    return sorted(name for p in paths if (name := str(p.relative_to(folder))) not in MANIFESTS)


def sum_up(folder: Path, rank: int, world: int) -> None:
    """Make this rank's share of the files durable; write sizes and checksums for `seal`."""
    names = files_in(folder)[rank::world]
    sums = {name: measured(folder / name, sync=True) for name in names}
    in_one_piece(folder / f".sums{rank}", lambda p: p.write_text(json.dumps(sums)))


def seal(folder: Path, step: int, world: int, generation: str = "") -> None:
    """Write the manifest from the sums of all ranks on this disk: the checkpoint is whole then.
    generation: in a store of objects (`remote.py`).
    """
    files: dict[str, Any] = {}
    for path in [folder / f".sums{r}" for r in range(world)]:
        files |= json.loads(path.read_text())
    content: dict[str, Any] = {"version": VERSION, "package": __version__, "step": step}
    content |= {"generation": generation} if generation else {}
    content["files"] = dict(sorted(files.items()))
    in_one_piece(folder / MANIFEST, lambda p: p.write_text(json.dumps(content, indent=1)))
    for r in range(world):
        (folder / f".sums{r}").unlink()
    (folder / UNFINISHED).unlink(missing_ok=True)
    for place in {folder.parent, folder, *((folder / name).parent for name in files)}:
        sync_folder(place)


def sums(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and checksum (None: not taken) of each file in the manifest. Raises ValueError: it
    cannot be read, or is of another version (the text begins with `NEWER`).
    """
    try:
        content = read_json(folder / MANIFEST)
        version, files = content["version"], content["files"]
        if version == VERSION:
            return {
                in_folder(name): {"bytes": int(f["bytes"]), "crc32": f["crc32"]}
                for name, f in files.items()
            }
    except (OSError, *UNREADABLE) as error:
        raise ValueError(f"no manifest that can be read ({error!s:.160})") from None
    raise ValueError(
        f"{NEWER} {version}, written by fsdp_demo {content.get('package')}; this is {__version__}, "
        f"which reads {VERSION}"
    )


def generation(folder: Path) -> str:
    """What a checkpoint is called in a store of objects; "": it was saved without one."""
    return str(read_json(folder / MANIFEST).get("generation", ""))


def in_folder(name: str) -> str:
    """A name in a manifest. Raises ValueError for one that no file below the folder can have."""
    parts = Path(name).parts
    if Path(name).is_absolute() or {"..", "\0"} & {*parts, *name}:
        raise ValueError(f"it names {name[:30]!r}, which cannot lie in it")
    if max((len(os.fsencode(part)) for part in parts), default=LONGEST_NAME + 1) > LONGEST_NAME:
        raise ValueError(f"it names {name[:30]!r}..., longer than {LONGEST_NAME} bytes")
    return name


def misfits(folder: Path) -> str:
    """Why a checkpoint is not complete; empty if it is. Sizes only: `damaged` reads the files."""
    try:
        named = sums(folder)
    except ValueError as error:
        return str(error)
    there = {n: folder / n for n in named if (folder / n).is_file()}
    bad = [n for n in named if n not in there or there[n].stat().st_size != named[n]["bytes"]]
    return f"{', '.join(bad[:4])} missing or of another size" if bad else ""


def damaged(folder: Path, rank: int = 0, world: int = 1) -> list[str]:
    """The files, of this rank's share, whose checksum does not fit; none where there is no manifest
    (of other tools). Those that are missing are a matter of `misfits`.
    """
    if not (folder / MANIFEST).exists():
        return []
    named = sorted((n, f["crc32"]) for n, f in sums(folder).items() if f["crc32"] is not None)
    return [
        n for n, crc in named[rank::world] if (folder / n).is_file() and crc32(folder / n) != crc
    ]


# ---- what is put aside -------------------------------------------------------------------------


def put_aside(root: Path, step: int, given_up: bool = False) -> None:
    """Let what is newer than `step` be held no more, and say so.

    Args:
        given_up: a person named this step: what is newer does not come back by itself.
    """
    aside = GIVEN_UP if given_up else ASIDE
    if names := _rename(root, MANIFEST, aside, step):
        text = "%s: newer than step %d, from which training goes on: %s. Put aside (%s), deleted "
        text += "at the next checkpoint that all islands hold"
        log.warning(text, root, step, names, aside)


def adopt(root: Path) -> None:
    """Delete saves that were cut off, and make valid again what was put aside: the life that did so
    made no checkpoint that all islands hold.
    """
    for half in root.glob(f"*/{UNFINISHED}"):
        if (half.parent / MANIFEST).exists():
            half.unlink(missing_ok=True)  # gone: of a link
        else:
            remove(half.parent)
    if names := _rename(root, ASIDE, MANIFEST):
        text = "%s: the start that put %s aside got to no checkpoint of all islands: held again"
        log.warning(text, root, names)


def _rename(root: Path, manifest: str, to: str, newer: int = -1) -> str:
    """Give the manifests of checkpoints newer than a step another name; the checkpoints' names."""
    places = [folder for step, folder in found(root, manifest) if step > newer]
    for folder in places:
        os.replace(folder / manifest, folder / to)
        sync_folder(folder)
    return ", ".join(folder.name for folder in places)


def forget_asides(root: Path) -> None:
    """Delete all that was put aside: there is a newer common checkpoint."""
    gone = [folder for _, folder in [*found(root, ASIDE), *found(root, GIVEN_UP)]]
    for folder in gone:
        remove(folder)
    if gone:
        text = "%s: %s, put aside before, deleted: all islands hold a newer checkpoint"
        log.info(text, root, ", ".join(folder.name for folder in gone))


# ---- one writer at a time ----------------------------------------------------------------------


class Fence:
    """The lock of one replica.

    Args:
        root: folder of this replica.
        run, name: run id and replica, for people who look into the file; another replica of the
            same run has mistaken this folder for its own.

    Attributes:
        token: of this life; empty before `take`.
    """

    def __init__(self, root: Path, run: str, name: str = ""):
        self.root, self.run, self.name, self.token = root, run, name, ""

    def take(self, ranks: Ranks, writes: bool = True) -> None:
        """Make this life the owner of the folder; all ranks of the replica call it together."""
        self.token = ranks.from_first(lambda: secrets.token_hex(6))
        ranks.together(lambda: self._write() if writes else None, str(self.root))

    def _write(self) -> None:
        whose = {"run": self.run, "name": self.name, "token": self.token}
        text = json.dumps({**whose, "host": socket.gethostname(), "pid": os.getpid()})
        self.root.mkdir(parents=True, exist_ok=True)
        in_one_piece(self.root / LOCK, lambda part: part.write_text(text, encoding="utf-8"))

    def check(self) -> None:
        """Call it before anything in the folder gets its name. A lock that is gone or cannot be
        read hinders nobody. Raises Superseded: the lock is another life's, or another replica's of
        this run.
        """
        if not self.token:
            return
        try:
            lock = read_json(self.root / LOCK)
            token, run, name = lock["token"], lock["run"], lock.get("name", "")
        except (OSError, *UNREADABLE):
            return
        if token == self.token:
            return
        if run == self.run and name and self.name and name != self.name:
            raise Superseded(
                f"{self.root} is also the folder of {name!r}: {self.name!r} saves nothing there; "
                f"give each island a folder of its own{see('later-life')}"
            )
        raise Superseded(
            f"{self.root} belongs to a later life (run {run!r}) than this process (run "
            f"{self.run!r}), which was taken for dead: nothing is saved; end it{see('later-life')}"
        )


def sharers(root: Path, ranks: Ranks) -> list[int]:
    """The ranks of the replica that see the same folder `root` as this one, itself included: fewer
    than all where nodes have a disk each. All ranks come together.
    """
    if ranks.world == 1:
        return [0]

    def leave() -> str:
        name = f".seen-{secrets.token_hex(6)}"
        with suppress(OSError):  # the first save will say so
            root.mkdir(parents=True, exist_ok=True)
            (root / name).touch()
        return name

    probe = root / ranks.from_first(leave)
    # a path on a network's disk is one folder on unlike machines: who sees the probe shares it
    where = ranks.everyone("" if probe.exists() else place(root))
    if ranks.rank == 0:
        probe.unlink(missing_ok=True)
    return [rank for rank, theirs in enumerate(where) if theirs == where[ranks.rank]]


def place(root: Path) -> str:
    """A folder under one name for all processes of a machine, by whatever path it is reached."""
    whole = Path(os.path.realpath(root))
    there = next(p for p in (whole, *whole.parents) if p.exists())
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        machine = socket.gethostname()
    of = there.stat()
    # containers may share a machine and have other disks under one path
    text = f"{machine} {of.st_dev} {of.st_ino} {whole.relative_to(there)}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]
