"""The way out when a peer is lost or the job is told to stop: save, say how to go on, end with
status 75.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from ..errors import Mismatch, NeedsDecision, PeerLost, Stopped, WireError
from ..status import DECIDE, SAVED, leave, tell_launcher
from .exchange import Exchange

log = logging.getLogger("fsdp_demo")


def undecided(error: NeedsDecision, rank: int) -> NoReturn:
    """End the process with status 78 and the sentence, without a traceback: another start would
    change nothing.

    Args:
        rank: inside the island; the first one speaks, and tells the launcher.

    Example:
        >>> import tempfile, fsdp_demo
        >>> from fsdp_demo.checkpoint import CheckpointManager
        >>> topology = fsdp_demo.Topology.from_env({})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     try:
        ...         step = CheckpointManager(folder, topology).resolve_resume_step(resume=True)
        ...     except fsdp_demo.NeedsDecision as error:
        ...         fsdp_demo.undecided(error, topology.rank)
        >>> step is None  # nothing is held
        True
    """
    if rank == 0:
        log.error("%s", error)
    tell_launcher(rank, DECIDE)
    leave(DECIDE)


@contextmanager
def guard(
    exchange: Exchange, save: Callable[[], Any] | None = None, resume: str = ""
) -> Iterator[None]:
    """Run a training loop so that a lost peer or SIGTERM ends it in order.

    On `PeerLost`, `WireError` or `Stopped` every rank of the island calls `save()`, logs island,
    step, cause and how to resume, and the process ends with status 75 at once (a regular
    interpreter exit could wait for peers that are gone); with 78 where the islands do not do the
    same (`Mismatch`), which another start would not mend. SIGTERM is `Exchange.request_stop`: an
    island that is told to end sends the others what it has done since its last exchange first, for
    at most ISLAND_STOP seconds. The others train on, no loss of another island ends this one, and
    who is started again joins them. Where all are told to end, all stop after their current steps,
    and what not all of them have sent is saved to be sent at the resume.

    In a thread that is not the main one SIGTERM is left alone, since Python handles signals in the
    main thread only; a warning says so.

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
    leaves = threading.Event()
    with _sigterm(exchange, leaves):
        try:
            yield
        except (PeerLost, WireError, Stopped) as error:
            leaves.set()
            _leave(exchange, error, save, resume)


@contextmanager
def _sigterm(exchange: Exchange, leaves: threading.Event) -> Iterator[None]:
    """SIGTERM is a wish to stop, where this thread may say so. leaves: set when the loop has
    ended."""
    if threading.current_thread() is not threading.main_thread():
        log.warning(
            "guard in the thread %r does not hear SIGTERM, which ends the process unsaved: Python "
            "handles signals in the main thread only. Train there, or let a handler of the main "
            "thread call exchange.request_stop()",
            threading.current_thread().name,
        )
        yield
        return
    old = signal.signal(signal.SIGTERM, lambda *_: _told(exchange, leaves))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)


def _told(exchange: Exchange, leaves: threading.Event) -> None:
    """SIGTERM. Where islands come and go, a rank may stand in an exchange for longer than its
    launcher waits: it ends without saving before that, and may join again.
    """
    exchange.request_stop()
    if exchange.topology.elastic:
        threading.Thread(
            target=_end_if_stuck, args=(exchange, leaves), name="stop", daemon=True
        ).start()


def _end_if_stuck(exchange: Exchange, leaves: threading.Event) -> None:
    """End without saving where one step has stood in an exchange for all of ISLAND_STOP."""
    limit = exchange.topology.stop_timeout
    step, since = exchange.step, time.monotonic()
    while not leaves.wait(0.2) and not exchange.closed:
        now = time.monotonic()
        if exchange.step != step or not exchange.waiting:
            step, since = exchange.step, now
        elif now - since > limit:
            log.error(
                "%s: told to end %g s ago, but step %d still waits for the others: ends, and "
                "nothing is saved. ISLAND_STOP says how many seconds the launcher leaves",
                exchange.topology.name,
                limit,
                step,
            )
            tell_launcher(exchange.topology.rank, SAVED)
            leave(SAVED)


def _leave(
    exchange: Exchange, error: Exception, save: Callable[[], Any] | None, resume: str
) -> None:
    status = DECIDE if isinstance(error, Mismatch) else SAVED
    where = (
        f"{exchange.topology.name} (island {exchange.topology.island}, rank "
        f"{exchange.topology.rank}), step {exchange.step}"
    )
    # a stop that was asked for is no error
    level = logging.WARNING if isinstance(error, Stopped) else logging.ERROR
    log.log(level, "%s: %s", where, error)
    exchange.leave(stopped=isinstance(error, Stopped))
    try:
        if save is not None:
            _save(save)
        if exchange.topology.rank == 0:
            done = "saved" if save is not None else "nothing was saved"
            command = resume or "the same command"
            when = "to resume" if status == SAVED else "once that is mended"
            who = _who(exchange, status)
            log.log(level, "%s: %s; %s, start %sagain with: %s", where, done, when, who, command)
            if save is not None and exchange.topology.islands > 1:
                log.log(level, "%s: for the steps of the others see fsdp-demo inspect", where)
    except PeerLost as lost:
        # what the others have is not known: it must not be saved, and is not needed to start again
        log.error("%s: nothing was saved: %s", where, lost)
        status = SAVED if exchange.topology.elastic else 1
    except Exception:
        log.exception("%s: saving failed", where)
        status = 1
    tell_launcher(exchange.topology.rank, status)
    leave(status)


def _who(exchange: Exchange, status: int) -> str:
    """Whom to start again. Where islands come and go, the others may train on, or have ended."""
    if exchange.topology.islands == 1:
        return ""
    if status == SAVED and exchange.topology.elastic:
        return "this island (and each other one that has ended) "
    return "all islands "


def _save(save: Callable[[], Any]) -> None:
    """Save; once more if only now a peer is found lost, since what was under way is then saved as
    it was sent.
    """
    try:
        save()
    except PeerLost:
        save()
