"""The copies of a local folder of checkpoints in a store of objects: uploaded while training goes
on (`uploads.py`), and fetched where they are newer than what is here (`remote.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from . import folders
from .local import LocalFolder
from .registry import CheckpointRegistry
from .remote import Remote
from .uploads import Uploads

MORE = 2
"""Local checkpoints beyond `keep` that rotation spares while they wait for their upload."""


class RemoteCopies:
    """The copies of `local` in the folder `url` of a store. All ranks of the replica make it, and
    call its methods but `unneeded`, together.

    Args:
        name: of this replica's own place below `url`.

    Attributes:
        remote: what is there. uploads: what waits to get there.
    """

    def __init__(self, url: str, name: str, local: LocalFolder):
        self._local = local
        self.remote = Remote(url, name, local.topology, local.ranks, local.disk)
        self.uploads = Uploads(self.remote)

    def upload_origin(self, step: int) -> None:
        """Upload what this life goes on from, where it is here alone."""
        if folder := self._local.whole().get(step):
            if f"{folder.name}/{folders.generation(folder)}" not in self.remote.there:
                self.uploads.add(step, folder)

    def bring(self, step: int) -> Path | None:
        """Write a step here as by a save, where it is newer there; else None. Raises OSError."""
        path = self.remote.origin.get(step)
        if path is None:
            return None
        local = self._local
        called, _, generation = path.partition("/")
        folder = local.root / called
        local.once_per_disk(lambda: folders.clear(folder))
        local.ranks.together(lambda: self.remote.download(path, folder), path)
        local.once_per_disk(lambda: folders.seal(folder, step, len(local.disk), generation))
        return folder

    def rotate(self, registry: CheckpointRegistry, keep: int | None, best: int | None) -> None:
        """Let the next upload remove what `superfluous` names there."""
        common = self._local.ranks.from_first(
            lambda: registry.common(self.remote.known, where="remote")
        )
        self.uploads.keeps = -1 if common is None else common, keep, best

    def unneeded(self, gone: Sequence[int], there: int, keep: int) -> list[int]:
        """Of the steps that rotation would remove here, of the `there` that there are, those that
        need not wait for their upload."""
        stay = self.uploads.spared(gone, max(keep + MORE - there + len(gone), 0))
        return [step for step in gone if step not in stay]
