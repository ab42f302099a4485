"""Adapters to training frameworks, one module or package each. `fsdp_demo` itself imports torch
only, so import these by name.

May import everything but `launch`, `cli` and `deepspeed_ext`.
"""

from __future__ import annotations

import os
from typing import Any


def lightning_callbacks() -> list[Any]:
    """The callbacks that every Trainer of Lightning gets by its entry point: the exchange that
    ISLAND_EXCHANGE asks for; none, and nothing imported, without that variable.

    Raises:
        ValueError: the variables cannot be read, or ask for what is not there.
    """
    if not os.environ.get("ISLAND_EXCHANGE", "").strip():
        return []
    from ..config.load import load_config
    from ..rendezvous import environment
    from .lightning import LightningExchange

    source, changes = environment.exchange(os.environ)
    callback = LightningExchange(load_config(source, changes))
    callback.added = f"exchange {' '.join([source, *changes])} added"
    return [callback]
