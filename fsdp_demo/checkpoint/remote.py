"""Checkpoints of one replica in a store of objects that fsspec opens (S3, GCS, a file system of all
machines), beside its local folder: for machines whose disks do not outlive them.

    URL/<replica>/.lives/000004-1f3ab2                           the newest start of the replica
                 /<checkpoint>/000004-1f3ab2-000007/rank0/...    its 7th save: the files on the disk of rank 0
                                                   /rank0/manifest.json  the last object of each disk: sizes, sums, all disks

Nothing can be renamed there, so the key of a checkpoint says which save of which life it is (its
generation). It is whole when the manifests of all disks are there, and all that they name in its
size. What is newer than the step a life goes on from stays until that life has a checkpoint that
all islands hold, as in the folder (`folders.py`). `uploads.py` writes all this.
"""  # noqa: E501

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ..errors import UNREADABLE, NeedsDecision
from ..files import from_json, in_one_piece
from ..peers.votes import Ranks
from ..rendezvous.topology import Topology
from .choice import HeldCheckpoint, held_by
from .files import measured
from .folders import GIVEN_UP, MANIFEST, NEWER, VERSION, in_folder

log = logging.getLogger("fsdp_demo")
T = TypeVar("T")

LIVES = ".lives"
AGAIN = 1.0  # seconds after which what has failed is tried again, the first time


class Manifest(msgspec.Struct):
    """The last object of what one disk has of a checkpoint.

    Attributes:
        files: size and checksum (None: not taken) by their names below the folder.
        parts: the parts of the key for all disks. ranks, world: who saves on this one, of how many.
        heads: of the exchange's parts here, as `choice.held_by` reads them.
    """

    version: int
    step: int
    files: dict[str, dict[str, int | None]]
    parts: list[str]
    ranks: list[int]
    world: int
    heads: list[dict[str, Any]]


class ObjectStore:
    """The objects below `url`, by keys relative to it. Methods raise OSError where the store does
    not do what they ask; its client may have tried several times.

    Attributes:
        moved: when bytes have passed last. until: what fails before is tried again.

    Raises:
        ValueError: fsspec, or its package for this kind of store, is not installed.
    """

    def __init__(self, url: str):
        self.url, self.moved, self.until = url, time.monotonic(), 0.0
        options = {"auto_mkdir": True} if url.startswith(("file:", "local:")) else {}
        try:
            from fsspec.callbacks import Callback
            from fsspec.core import url_to_fs

            # listings of before say nothing about other lives
            opened = url_to_fs(url, skip_instance_cache=True, use_listings_cache=False, **options)
        except ImportError as error:
            what = "'fsdp_demo[cloud]' for S3, or fsspec and its package for another store"
            raise ValueError(f"{url} cannot be opened ({error}): pip install {what}") from None
        self._fs, self._root = opened[0], opened[1].rstrip("/")
        self._told = {"callback": Callback(hooks={"moved": self._move})}

    def _move(self, *_: Any, **__: Any) -> None:
        self.moved = time.monotonic()

    def _do(self, ask: Callable[..., T], key: str, *given: Any, **named: Any) -> T:
        wait = AGAIN
        while True:
            try:
                return ask(f"{self._root}/{key}".rstrip("/"), *given, **named)
            except (FileNotFoundError, PermissionError):
                raise
            except Exception as error:  # clients have some of their own (botocore, aiohttp)
                if time.monotonic() + wait > self.until:
                    raise OSError(f"{type(error).__name__}: {error!s:.200}") from error
                log.warning("%s: %s; it is tried again", self.url, error)
                time.sleep(wait)
                wait = min(2 * wait, 10.0)

    def sizes(self, below: str = "") -> dict[str, int]:
        """Bytes of all objects below a key, by their keys relative to that."""
        there: dict[str, Any] = {}
        with suppress(FileNotFoundError):
            there = self._do(self._fs.find, below, detail=True)
        start = len(f"{self._root}/{below}".rstrip("/")) + 1
        return {key[start:]: int(info["size"]) for key, info in there.items()}

    def read(self, key: str) -> bytes:
        """An object's bytes."""
        return bytes(self._do(self._fs.cat_file, key))

    def write(self, key: str, data: bytes) -> None:
        """Make an object of `data`."""
        self._do(self._fs.pipe_file, key, data)

    def put(self, file: Path, key: str) -> None:
        """Make an object of a file."""
        self._do(lambda at: self._fs.put_file(str(file), at, **self._told), key)
        self._move()

    def get(self, key: str, file: Path, fits: Callable[[], T]) -> T:
        """Make a file of an object, and see that it `fits`, which may raise OSError."""
        return self._do(lambda at: self._fs.get_file(at, str(file), **self._told) or fits(), key)

    def remove(self, key: str) -> None:
        """Delete an object, or all below a key; nothing where it is not there."""
        with suppress(FileNotFoundError):
            self._do(self._fs.rm, key, recursive=True)


class Remote:
    """The checkpoints of one replica in a store. All ranks of the replica make one together.

    Args:
        url: of the folder in which each replica has its own, `name`.
        disk: the ranks that share this one's disk; the first of them uploads what is there.

    Attributes:
        origin: paths (checkpoint/generation) of the steps that `merge` has found newer, or only, in
            the store; there: those of all that is whole in it.
        known: what was whole there when this rank has looked last.
        parts: the parts of the key for all disks.
        life, at: this life, and the step that it went on from. opening: one is being opened.
    """

    def __init__(self, url: str, name: str, topology: Topology, ranks: Ranks, disk: Sequence[int]):
        self.url = f"{url.rstrip('/')}/{ranks.from_first(lambda: name)}"
        self.topology, self.ranks, self.disk = topology, ranks, list(disk)
        self.parts = sorted({f"rank{first}" for first in ranks.everyone(disk[0])})
        self.origin, self.there = dict[int, str](), set[str]()
        self.known: list[HeldCheckpoint] = []
        self.life, self.opening = "", False
        self.at: int | None = None
        self.manifests: dict[str, Manifest] = {}
        self.store = ObjectStore(self.url)

    # ---- at the start --------------------------------------------------------------------------

    def merge(
        self, notes: Sequence[list[Any]], local: Mapping[int, str], name: str = ""
    ) -> list[list[Any]]:
        """What the replica can resume from, there and here; of one step the newer generation. All
        ranks come together.

        Args:
            notes: of what is whole here (`HeldCheckpoint.note`).
            local: their generations, by step; "" was saved without a store, and stays.
            name: checkpoints of this name only.

        Raises:
            OSError: the store does not answer within ISLAND_TIMEOUT. ValueError: see `scan`.
        """

        def look() -> list[Any]:
            here, origin = {note[0]: note for note in notes}, {}
            whole = self.whole(self.scan())
            for step, (path, held) in whole.items():
                newer = step not in here or "" < local.get(step, "") < generation_in(path)
                if newer and name in ("", path.split("/")[0]):
                    here[step], origin[step] = held.note(), path
            merged = [here[step] for step in sorted(here)]
            return [merged, [*origin.items()], [path for path, _ in whole.values()]]

        out, origin, there = self.ranks.from_first(lambda: self._asked(look))
        self.origin, self.there = {int(step): path for step, path in origin}, {*there}
        return list(out)

    def begin(self, at: int | None, given_up: bool) -> None:
        """Open a life that goes on from step `at`. All ranks come together.

        Args:
            given_up: what is newer does not come back, unless a person renames its manifests.

        Raises:
            NeedsDecision: another island of this run has this place. OSError: see `merge`.
        """

        def write() -> str:
            lives, mine = self.lives(), [self.topology.run, self.topology.island]
            for last in lives[-1:]:
                run, island = from_json(self.store.read(f"{LIVES}/{last}"), list[Any], "a life")
                if run == mine[0] and island != mine[1]:
                    raise NeedsDecision(
                        f"{self.url} is also the place of island {island} of run {run!r}: give "
                        "each island a name of its own (ISLAND_NAME)"
                    )
            number = int(lives[-1][:6]) if lives else 0
            life = f"{number + 1:06d}-{secrets.token_hex(3)}"
            self.store.write(f"{LIVES}/{life}", json.dumps(mine).encode())
            for old in lives:
                self.store.remove(f"{LIVES}/{old}")
            newer = self.whole(self.scan()) if given_up else {}
            for path in [path for step, (path, _) in newer.items() if step > (at or 0)]:
                self.hide(path, aside=True)
            return life

        self.opening = True
        self.ranks.any(False)  # no upload of this process takes the new life for another's
        self.life, self.at = self.ranks.from_first(lambda: self._asked(write)), at
        self.opening = False

    def generation(self, save: int) -> str:
        """What the how manieth save of this life is called."""
        return f"{self.life}-{save:06d}"

    def _asked(self, ask: Callable[[], T]) -> T:
        """The answer to questions at the start: what fails is tried again for ISLAND_TIMEOUT."""
        try:
            self.store.until = time.monotonic() + self.topology.timeout
            return ask()
        except OSError as error:
            cure = "mend that, or leave it out (ISLAND_REMOTE) to go on with local folders alone"
            raise OSError(f"{self.url} cannot be used ({error}): {cure}") from error
        finally:
            self.store.until = 0.0

    def download(self, path: str, folder: Path) -> None:
        """Fetch this rank's share of what its disk needs of a checkpoint (what its ranks have
        saved; all, of another number of ranks), with the sums for `folders.seal`."""
        number = self.disk.index(self.ranks.rank)

        def fetch() -> dict[str, dict[str, int]]:
            files: dict[str, tuple[str, dict[str, int | None]]] = {}
            for part in sorted({key.split("/")[0] for key in self.store.sizes(path)}):
                m = self.manifest(f"{path}/{part}/{MANIFEST}")
                if m and (m.world != self.ranks.world or {*m.ranks} & {*self.disk}):
                    files = {n: (f"{path}/{part}/{n}", s) for n, s in m.files.items()} | files
            mine = sorted(files)[number :: len(self.disk)]
            return {name: one(folder / name, *files[name]) for name in mine}

        def one(file: Path, key: str, wanted: dict[str, int | None]) -> dict[str, int]:
            def fits() -> dict[str, int]:
                found = measured(file, sync=True)
                if any(wanted[k] not in (None, found[k]) for k in found):
                    raise OSError(f"{key} has not come as it was saved")
                return found

            file.parent.mkdir(parents=True, exist_ok=True)
            self.store.until = time.monotonic() + self.topology.timeout
            return self.store.get(key, file, fits)

        sums = json.dumps(self._asked(fetch))
        in_one_piece(folder / f".sums{number}", lambda part: part.write_text(sums))

    # ---- what is there -------------------------------------------------------------------------

    def lives(self) -> list[str]:
        """The starts of this replica, the newest last."""
        return sorted(key for key in self.store.sizes(LIVES) if key[:6].isdigit())

    def scan(self) -> dict[str, HeldCheckpoint | None]:
        """All checkpoints there, by path; None: not whole. Raises OSError; ValueError: of another
        release."""
        sizes, parts = self.store.sizes(), dict[str, dict[str, Manifest]]()
        for key in sizes:
            name, *rest = key.split("/", 3)
            if len(rest) == 3 and name not in ("", ".", ".."):
                found = parts.setdefault(f"{name}/{rest[0]}", {})
                if rest[2] == MANIFEST and (manifest := self.manifest(key)) is not None:
                    found[rest[1]] = manifest
        return {path: self._held(path, found, sizes) for path, found in parts.items()}

    def _held(
        self, path: str, parts: Mapping[str, Manifest], sizes: Mapping[str, int]
    ) -> HeldCheckpoint | None:
        """The checkpoint, where its parts make a whole."""
        if not parts or any(sorted(parts) != sorted(m.parts) for m in parts.values()):
            return None
        named = ((f"{path}/{p}/{n}", f) for p, m in parts.items() for n, f in m.files.items())
        heads = [head for manifest in parts.values() for head in manifest.heads]
        step, islands = next(iter(parts.values())).step, self.topology.islands
        try:
            if lost := [key for key, file in named if sizes.get(key) != file["bytes"]]:
                raise ValueError(f"{lost[0]} is missing or of another size")
            return held_by(heads, step, islands, Path(path))
        except ValueError as error:
            log.warning("%s: %s; %s is left out", self.url, error, path)
            return None

    def manifest(self, key: str) -> Manifest | None:
        """A manifest, which does not change; None, with a warning, for what is none."""
        if key in self.manifests:
            return self.manifests[key]
        data = self.store.read(key)
        try:
            version = from_json(data, dict[str, Any], key)["version"]
            found = from_json(data, Manifest, key) if version == VERSION else None
            for name in found.files if found else ():
                in_folder(name)
        except UNREADABLE as error:
            log.warning("%s: %s; it is left out", self.url, error)
            return None
        if found is None:
            raise ValueError(f"{self.url}/{key}: {NEWER} {version}, allowed is {VERSION}")
        self.manifests[key] = found
        return found

    def whole(
        self, copies: Mapping[str, HeldCheckpoint | None], own: bool = False
    ) -> dict[int, tuple[str, HeldCheckpoint]]:
        """By step what is whole, the newest generation of each name and step. own: without what
        this life has put aside.
        """
        names: dict[str, tuple[str, HeldCheckpoint]] = {}
        for path in sorted(copies, key=generation_in):
            held, aside = copies[path], own and generation_in(path) < self.life
            if held is not None and not (aside and self.at is not None and held.step > self.at):
                names[path.split("/")[0]] = path, held
        newest = sorted(names.values(), key=lambda copy: generation_in(copy[0]))
        out = {held.step: (path, held) for path, held in newest}
        self.known = [held for _, held in out.values()]
        return out

    def hide(self, path: str, aside: bool = False) -> None:
        """Make a checkpoint one that is not there; aside: keep its manifests under another name."""
        for key in [key for key in self.manifests if key.startswith(f"{path}/")]:
            if aside:
                given_up = key.removesuffix(MANIFEST) + GIVEN_UP
                self.store.write(given_up, self.store.read(key))
            self.store.remove(key)
            del self.manifests[key]


def generation_in(path: str) -> str:
    """The part of a path that says which save it is: `<life>-<number>`."""
    return path.partition("/")[2]
