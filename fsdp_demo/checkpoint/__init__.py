"""State on disk: save, agree on what to load, load it with other numbers of islands or shards.

May import `exchange` and all below it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import renamed
from .exchange_state import (
    SavedExchange,
    Snapshot,
    describe_part,
    load_exchange,
    save_exchange,
    snapshot,
)
from .files import crc32
from .manager import CheckpointManager
from .run_state import RunState

__all__ = [
    "CheckpointManager",
    "RunState",
    "SavedExchange",
    "Snapshot",
    "crc32",
    "describe_part",
    "load_exchange",
    "save_exchange",
    "snapshot",
]

if not TYPE_CHECKING:

    def __getattr__(name: str):
        old = {
            "Checkpoints": "CheckpointManager",
            "Saved": "SavedExchange",
            "open_exchange": "load_exchange",
            "describe": "describe_part",
        }
        raise renamed("fsdp_demo.checkpoint", name, old)
