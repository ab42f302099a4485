"""Folders of checkpoints on disk: which are there, whether they are whole, and how one is sealed,
hidden or put aside.

    checkpoint-<step>/manifest.json     version, step, and every file with its size and checksum; written last
    .aside/<life>/checkpoint-<step>/    newer than the step a later life went on from: not held, and never written over

What is put aside comes back at the next start, and is deleted when the life that put it there has a
checkpoint that all islands hold: until then nobody knows whether that life will get anywhere. What
a person has given up on purpose stays aside.
"""  # noqa: E501

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..errors import UNREADABLE
from ..files import in_one_piece, read_json
from ..version import __version__
from .files import crc32, sync_folder

log = logging.getLogger("fsdp_demo")

VERSION = 1  # of the manifest
MANIFEST = "manifest.json"
NEWER = "its manifest has version"
ASIDE = ".aside"
KEPT = ".given-up"  # in a folder below .aside: nobody takes it back
LONGEST_NAME = 255  # bytes of a part of a path, by file systems
_NAME = re.compile(r"checkpoint-(\d+)")


def steps(root: Path) -> list[int]:
    """Steps of the folders `root/checkpoint-<step>`, ascending."""
    found = (_NAME.fullmatch(p.name) for p in (root.iterdir() if root.is_dir() else ()))
    return sorted(int(match[1]) for match in found if match)


def remove(folder: Path) -> None:
    """Make a checkpoint one that is not there, then delete it: a reader never sees a half."""
    hidden = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(hidden, ignore_errors=True)
    os.replace(folder, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


# ---- manifests ---------------------------------------------------------------------------------


def files_in(folder: Path) -> list[str]:
    """The files of a checkpoint by their names below it, sorted; without manifest and sums."""
    found = (p for p in folder.rglob("*") if p.is_file() and not p.name.startswith(".sums"))
    return sorted(name for p in found if (name := str(p.relative_to(folder))) != MANIFEST)


def sum_up(folder: Path, rank: int, world: int, sync: bool = True) -> None:
    """Write sizes and checksums of this rank's share of the files, for `seal`. `sync`: also make
    the files durable.
    """
    names = files_in(folder)[rank::world]
    sums = {
        n: {"bytes": (folder / n).stat().st_size, "crc32": crc32(folder / n, sync)} for n in names
    }
    in_one_piece(folder / f".sums{rank}", lambda p: p.write_text(json.dumps(sums)))


def seal(folder: Path, step: int, world: int, alone: bool = False) -> None:
    """Write the manifest from the sums of all ranks: from now on the checkpoint is whole.

    Args:
        alone: ranks may be on other disks: files here whose sums are not to be seen are summed up
            here.
    """
    files: dict[str, Any] = {}
    for path in [folder / f".sums{r}" for r in range(world)]:
        files |= json.loads(path.read_text()) if path.exists() or not alone else {}
    for name in sorted(set(files_in(folder)) - set(files)) if alone else ():
        files[name] = {"bytes": (folder / name).stat().st_size, "crc32": crc32(folder / name)}
    files = {name: f for name, f in files.items() if not alone or (folder / name).is_file()}
    content = {
        "version": VERSION,
        "package": __version__,
        "step": step,
        "files": dict(sorted(files.items())),
    }
    in_one_piece(folder / MANIFEST, lambda p: p.write_text(json.dumps(content, indent=1)))
    for r in range(world):
        (folder / f".sums{r}").unlink(missing_ok=alone)
    for place in {folder, *((folder / name).parent for name in files)}:
        sync_folder(place)


def sums(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and checksum (None: not taken) of each file in the manifest.

    Raises:
        ValueError: it cannot be read, or is of another version (the text begins with `NEWER`).
    """
    try:
        content = read_json(folder / MANIFEST)
        if content["version"] != VERSION:
            whose = (
                f"written by fsdp_demo {content.get('package')}; this is {__version__}, which "
                f"reads {VERSION}"
            )
            raise ValueError(f"{NEWER} {content['version']}, {whose}")
        return {
            _in_folder(name): {"bytes": int(f["bytes"]), "crc32": f["crc32"]}
            for name, f in content["files"].items()
        }
    except ValueError as error:
        if str(error).startswith(NEWER):
            raise
        raise ValueError(f"no manifest that can be read ({error!s:.160})") from None
    except (OSError, *UNREADABLE) as error:
        raise ValueError(f"no manifest that can be read ({error!r:.80})") from None


def _in_folder(name: str) -> str:
    """A name in a manifest. Raises ValueError for one that no file below the folder can have."""
    parts = Path(name).parts
    if Path(name).is_absolute() or {"..", "\0"} & {*parts, *name}:
        raise ValueError(f"it names {name[:30]!r}, which cannot lie in it")
    if max((len(os.fsencode(part)) for part in parts), default=LONGEST_NAME + 1) > LONGEST_NAME:
        raise ValueError(f"it names {name[:30]!r}..., longer than {LONGEST_NAME} bytes")
    return name


def misfits(folder: Path, sealed: bool = True) -> str:
    """Why a checkpoint is not complete; empty if it is. Sizes only: `damaged` reads the files.

    Args:
        sealed: False: one without a manifest may be complete (of other tools).
    """
    if not sealed and not (folder / MANIFEST).exists():
        return ""
    try:
        named = sums(folder)
    except ValueError as error:
        return str(error)
    bad = [
        n
        for n, f in named.items()
        if not (folder / n).is_file() or (folder / n).stat().st_size != f["bytes"]
    ]
    return f"{', '.join(bad[:4])} missing or of another size" if bad else ""


def damaged(folder: Path, rank: int = 0, world: int = 1, sealed: bool = True) -> list[str]:
    """The files, of this rank's share, whose checksum does not fit. Those that are missing are a
    matter of `misfits`, which see.
    """
    if not sealed and not (folder / MANIFEST).exists():
        return []
    named = sorted((n, f["crc32"]) for n, f in sums(folder).items() if f["crc32"] is not None)
    return [
        n for n, crc in named[rank::world] if (folder / n).is_file() and crc32(folder / n) != crc
    ]


# ---- what is put aside -------------------------------------------------------------------------


def put_aside(root: Path, step: int, life: str, given_up: bool = False) -> list[str]:
    """Move what is newer than `step` below `.aside/<life>`, and say so; returns the names.

    Args:
        life: not used before in this folder.
        given_up: a person named this step: what is newer does not come back by itself.
    """
    found = [f"checkpoint-{s}" for s in steps(root) if s > step]
    if not found:
        return []
    aside = root / ASIDE / life
    aside.mkdir(parents=True, exist_ok=True)
    if given_up:
        (aside / KEPT).touch()
    for name in found:
        os.replace(root / name, aside / name)
    sync_folder(root)
    log.warning(
        "%s: newer than step %d, from which training goes on: %s. Put aside in %s, deleted at the "
        "next checkpoint that all islands hold",
        root,
        step,
        ", ".join(found),
        aside.relative_to(root),
    )
    return found


def take_back(root: Path) -> list[str]:
    """What lives that never made a common checkpoint have put aside is held again, where its name
    is free; returns the names.
    """
    back = []
    for aside in _asides(root):
        if (aside / KEPT).exists():
            continue
        for place in sorted(aside.iterdir()):
            if _NAME.fullmatch(place.name) and not (root / place.name).exists():
                os.replace(place, root / place.name)
                back.append(place.name)
        if not any(aside.iterdir()):
            aside.rmdir()
    if back:
        sync_folder(root)
        log.warning(
            "%s: the start that put %s aside did not get to a checkpoint of all islands: held "
            "again",
            root,
            ", ".join(back),
        )
    return back


def forget_asides(root: Path) -> None:
    """Delete all that was put aside: there is a newer common checkpoint."""
    for aside in _asides(root):
        names = ", ".join(sorted(p.name for p in aside.iterdir() if _NAME.fullmatch(p.name)))
        log.info(
            "%s: %s, put aside before, deleted: all islands hold a newer checkpoint", root, names
        )
    if (root / ASIDE).is_dir():
        remove(root / ASIDE)


def _asides(root: Path) -> Iterable[Path]:
    """The newest first."""
    folder = root / ASIDE
    found = [p for p in folder.iterdir() if p.is_dir()] if folder.is_dir() else []
    return sorted(found, key=lambda p: p.stat().st_mtime_ns, reverse=True)
