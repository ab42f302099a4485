"""State on disk: save, agree on what to load, load it with other numbers of islands or shards.

May import `exchange` and all below it.
"""

from __future__ import annotations

from .exchange_state import SavedExchange, load_exchange, save_exchange
from .manager import CheckpointManager
from .run_state import RunState

__all__ = ["CheckpointManager", "RunState", "SavedExchange", "load_exchange", "save_exchange"]
