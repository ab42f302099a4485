"""The checkpoint with which an island comes back to a run under way (`exchange/returning.py`):
which, and what its head says.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from ..comm.ranks import Ranks
from ..comm.topology import Topology
from ..exchange.exchange import Exchange
from .exchange_state import SavedExchange, describe_part, load_exchange
from .files import read_head
from .folders import damaged
from .manager import CheckpointManager

log = logging.getLogger("fsdp_demo")

MARK = "mark"
"""In the head of a part: see `Exchange.keep_since`."""


def described(exchange: Exchange, folder: Path) -> dict[str, Any]:
    """The head of this rank's part of a checkpoint that is saved now, from which on `folder` keeps
    what comes.
    """
    mark = exchange.keep_since(folder)
    return describe_part(exchange) | ({MARK: mark} if mark else {})


def newest(shelf: CheckpointManager) -> tuple[int, SavedExchange, str] | None:
    """Step, exchange's state and mark of this rank of the newest whole checkpoint; of one with a
    mark if there is any: what an island saves on its way out has none. All ranks of the replica
    come together.
    """

    def fetched_least(step: int) -> tuple[bool, int]:
        return _has_mark(shelf.path(step)), step

    step = shelf.ranks.from_first(lambda: max(shelf.complete(), key=fetched_least, default=-1))
    return None if step < 0 else opened(shelf.path(step), step, shelf.topology, shelf.ranks)


def _has_mark(folder: Path) -> bool:
    """Whether the first rank's part of a checkpoint says a mark."""
    try:
        return MARK in read_head(folder / "exchange" / "rank0.json")[0]
    except (OSError, ValueError):
        return False


def opened(
    folder: Path, step: int, topology: Topology, ranks: Ranks
) -> tuple[int, SavedExchange, str] | None:
    """The same of a checkpoint in `folder`; None, and a line in the log, where it cannot stand for
    a snapshot.
    """
    saved, mark, why = None, "", ""
    try:
        saved = load_exchange(folder / "exchange")
        head = saved.head(topology.rank, topology.island)
        own = len(saved.islands) == 1 and (head["islands"], head["world"]) == (
            topology.islands,
            topology.world,
        )
        mark = str(head.get(MARK, "")) if own else ""
        why = (
            ""
            if mark
            else "it has no mark of what the others hold"
            if own
            else "it is of other numbers of islands or ranks"
        )
        bad = damaged(folder, topology.rank, topology.world)
        why = why or (f"{', '.join(bad)}: checksum does not fit" if bad else "")
    except (OSError, ValueError, KeyError) as error:
        why = str(error)
    if ranks.any(bool(why)) or saved is None:
        log.info(
            "%s: nothing of %s can be used here (%s)",
            topology.name,
            folder.name,
            why or "another rank has no part that fits",
        )
        return None
    return step, saved, mark
