"""A voice for scripts that have set up no logging: without one all that the library says at INFO
would be lost.
"""

from __future__ import annotations

import logging

from ..comm.topology import Topology

log = logging.getLogger("fsdp_demo")


class Voice(logging.StreamHandler):
    """Writes to stderr, each record under the island's name. Falls silent for good as soon as
    somebody else listens.

    Args:
        name: of the island.
        given: the level that the logger gets; None: it has one.
    """

    def __init__(self, name: str, given: int | None):
        super().__init__()
        self._island, self.given = name, given
        if given is not None:
            log.setLevel(given)

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record, unless logging was set up since."""
        if len(log.handlers) > 1 or logging.getLogger().handlers:
            hush()
        else:
            super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        """`[island0] text`, and the level where it is no information."""
        level = "" if record.levelno == logging.INFO else f"{record.levelname}: "
        return f"[{self._island}] {level}{super().format(record).removeprefix(f'{self._island}: ')}"


def speak(topology: Topology) -> None:
    """If neither this package's logger nor the root logger has a handler, let it write to stderr:
    information on the first rank of an island, warnings on all. Once per process; a level that
    was set stays."""
    if log.hasHandlers():
        return
    level = logging.WARNING if topology.rank else logging.INFO
    log.addHandler(Voice(topology.name, level if log.level == logging.NOTSET else None))


def hush() -> None:
    """Take back what `speak` has done."""
    for voice in [h for h in log.handlers if isinstance(h, Voice)]:
        log.removeHandler(voice)
        if voice.given == log.level:
            log.setLevel(logging.NOTSET)
