"""The way out when a peer is lost or the job is told to stop: save, say how to go on, end with status 75."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from .codecs.wire import WireError
from .notes import Stopped
from .transport import PeerLost, leave

if TYPE_CHECKING:  # the exchange's own modules import NeedsDecision from here
    from .exchange import Exchange

log = logging.getLogger("fsdp_demo")

RESUMABLE = 75  # EX_TEMPFAIL of sysexits.h: try again later
DECISION = 78  # EX_CONFIG of sysexits.h: trying again changes nothing, a person must choose


class NeedsDecision(ValueError):
    """A run cannot go on by itself: the sentence says what was found and what there is to choose from. Scripts end with status 78.

    Example:
        >>> from fsdp_demo.guard import DECISION, NeedsDecision
        >>> DECISION, issubclass(NeedsDecision, ValueError)
        (78, True)
    """


def undecided(error: NeedsDecision, rank: int) -> NoReturn:
    """End the process with status 78 and the sentence, without a traceback. `rank`: inside the island, for the launchers."""
    if rank == 0:
        log.error("%s", error)
    _tell_launcher(rank, DECISION)
    leave(DECISION)


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
    _tell_launcher(exchange.topology.rank, status)
    leave(status)


def _tell_launcher(rank: int, status: int) -> None:
    """Launchers turn every status into 1; a rehearsal and `fsdp_demo.launch` read the true one here."""
    folder = os.environ.get("ISLAND_STATUS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"rank{rank}").write_text(str(status))
