"""The way out when a peer is lost or the job is told to stop: save, say how to go on, end with status 75."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .codecs.frame import WireError
from .exchange import Exchange
from .notes import Stopped
from .transport import PeerLost, leave

log = logging.getLogger("fsdp_demo")

RESUMABLE = 75  # EX_TEMPFAIL of sysexits.h: try again later


@contextmanager
def guard(exchange: Exchange, save: Callable[[], Any] | None = None, resume: str = "") -> Iterator[None]:
    """Run a training loop so that a lost peer or SIGTERM ends it in order.

    On `PeerLost`, `WireError` or `Stopped` every rank of the island calls `save()`, logs island, step, cause and how to resume, and the
    process ends with status 75 at once (a regular interpreter exit could wait for peers that are gone). SIGTERM is `Exchange.request_stop`.

    Args:
        save: saves what this rank has; must not use collectives.
        resume: the command that goes on from there, for the log.

    Example:
        >>> import torch, fsdp_demo
        >>> optimizer = torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())
        >>> exchange = fsdp_demo.attach(optimizer, "diloco")
        >>> with fsdp_demo.guard(exchange, save=None, resume="python train.py --resume"):
        ...     pass  # the training loop
    """
    old = signal.signal(signal.SIGTERM, lambda *_: exchange.request_stop())
    try:
        yield
    except (PeerLost, WireError, Stopped) as error:
        _leave(exchange, error, save, resume)
    finally:
        signal.signal(signal.SIGTERM, old)


def _leave(exchange: Exchange, error: Exception, save: Callable[[], Any] | None, resume: str) -> None:
    status = RESUMABLE
    where = f"{exchange.topology.name} (island {exchange.topology.island}, rank {exchange.topology.rank}), step {exchange.step}"
    log.error("%s: %s", where, error)
    try:
        if save is not None:
            save()
        if exchange.topology.rank == 0:
            done, command = "saved" if save is not None else "nothing was saved", resume or "the same command"
            log.error("%s: %s; to resume, start all islands under a new ISLAND_RUN with: %s", where, done, command)
    except Exception:
        log.exception("%s: saving failed", where)
        status = 1
    folder = os.environ.get("ISLAND_STATUS")
    if folder:  # launchers turn every status into 1; a rehearsal reads the true one here
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"rank{exchange.topology.rank}").write_text(str(status))
    leave(status)
