"""One line for a script that uses `transformers.Trainer`: `ExchangeCallback`.

May import what `fsdp_demo.integrations` may.
"""

from __future__ import annotations

from .callback import ExchangeCallback
from .setup import exchange_optimizer

__all__ = ["ExchangeCallback", "exchange_optimizer"]
