"""What the package logs, where pytest's `caplog` is not: in ranks."""

from __future__ import annotations

import logging


def heard(level: int = logging.WARNING) -> list[str]:
    """Filled with the messages of this process from now on, of this level or above."""
    said: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("fsdp_demo")
    logger.addHandler(handler)
    if level < logging.WARNING:
        logger.setLevel(level)
    return said
