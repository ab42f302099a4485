"""The way out when a peer is lost or the job is told to stop: save, say how to go on, end with
status 75.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from ..errors import Mismatch, NeedsDecision, PeerLost, Stopped, WireError
from ..rendezvous.island import TORN
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
    same (`Mismatch`), which another start would not mend; with 1 where `save` fails. SIGTERM is
    `Exchange.request_stop`: an island that is told to end sends the others what it has done since
    its last exchange first. The others train on, no loss of another island ends this one, and who
    is started again joins them. Where all are told to end, all stop after their current steps, and
    what not all of them have sent is saved to be sent at the resume.

    All of it ends within ISLAND_STOP seconds of SIGTERM, or of the loss. Where a rank of the island
    does not come, or is gone, nothing is saved: the others say so, and end with 75.

    In a thread that is not the main one SIGTERM is left alone, since Python handles signals in the
    main thread only; a warning says so.

    Args:
        save: saves what the island has; all its ranks call it, so it may use their collectives:
            `lambda: state.save(exchange, last=True)` of a `RunState`.
        resume: the command that goes on from there, for the log.

    Example:
        >>> import torch, fsdp_demo
        >>> optimizer = torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())
        >>> exchange = fsdp_demo.attach(optimizer, "diloco")
        >>> with fsdp_demo.guard(exchange, save=None, resume="python train.py --resume"):
        ...     pass  # the training loop
    """
    deadline = _Deadline(exchange)
    try:
        with _sigterm(exchange, deadline):
            try:
                yield
            except (PeerLost, WireError, Stopped) as error:
                deadline.begin()
                _leave(exchange, error, save, resume, deadline)
    finally:
        deadline.end()


class _Deadline:
    """Ends this process ISLAND_STOP seconds after its way out has begun: a rank of the island that
    does not come must not keep the others until their launcher kills them.

    Attributes:
        status: with which the process ends.
        unfinished: what the process was doing, for the log; empty before it has left the loop.
    """

    def __init__(self, exchange: Exchange):
        self.status, self.unfinished = SAVED, ""
        self._exchange, self._begun, self._over = exchange, False, threading.Event()

    def begin(self) -> None:
        """The time runs from the first call on. Safe in a signal handler."""
        if not self._begun:
            self._begun = True
            threading.Thread(target=self._run, name="deadline", daemon=True).start()

    def end(self) -> None:
        """The way out has come to its end."""
        self._over.set()

    def _run(self) -> None:
        exchange, topology = self._exchange, self._exchange.topology
        if self._over.wait(topology.stop_timeout) or exchange.closed:
            return
        verb = "waits for the others" if exchange.waiting else "is under way"
        log.error(
            "%s, rank %d: %g s after it was told to end, or has lost its peers, %s: it ends, and "
            "nothing is saved. ISLAND_STOP says how many seconds there are",
            topology.name,
            topology.rank,
            topology.stop_timeout,
            self.unfinished or f"step {exchange.step} still {verb}",
        )
        tell_launcher(topology.rank, self.status)
        leave(self.status)


@contextmanager
def _sigterm(exchange: Exchange, deadline: _Deadline) -> Iterator[None]:
    """SIGTERM is a wish to stop, where this thread may say so."""
    if threading.current_thread() is not threading.main_thread():
        log.warning(
            "guard in the thread %r does not hear SIGTERM, which ends the process unsaved: Python "
            "handles signals in the main thread only. Train there, or let a handler of the main "
            "thread call exchange.request_stop()",
            threading.current_thread().name,
        )
        yield
        return

    def told(*_: Any) -> None:
        exchange.request_stop()
        deadline.begin()

    old = signal.signal(signal.SIGTERM, told)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)


def _leave(
    exchange: Exchange,
    error: Exception,
    save: Callable[[], Any] | None,
    resume: str,
    deadline: _Deadline,
) -> None:
    deadline.status = status = DECIDE if isinstance(error, Mismatch) else SAVED
    deadline.unfinished = "it still waits for the other islands"
    where = (
        f"{exchange.topology.name} (island {exchange.topology.island}, rank "
        f"{exchange.topology.rank}), step {exchange.step}"
    )
    # a stop that was asked for is no error
    level = logging.WARNING if isinstance(error, Stopped) else logging.ERROR
    log.log(level, "%s: %s", where, error)
    try:
        exchange.leave(stopped=isinstance(error, Stopped))
        deadline.unfinished = (
            "its save has not ended: another rank of the island did not come to it, or it takes "
            "longer"
        )
        if save is not None:
            try:
                save()
            except PeerLost:  # found only now: what was under way is saved as it was sent
                save()
        deadline.end()
        if exchange.topology.rank == 0:
            done = "saved" if save is not None else "nothing was saved"
            command = resume or "the same command"
            when = "to resume" if status == SAVED else "once that is mended"
            who = "all islands "
            if exchange.topology.islands == 1:
                who = ""
            elif status == SAVED and exchange.topology.elastic:  # the others may train on
                who = "this island (and each other one that has ended) "
            log.log(level, "%s: %s; %s, start %sagain with: %s", where, done, when, who, command)
            if save is not None and exchange.topology.islands > 1:
                log.log(level, "%s: for the steps of the others see fsdp-demo inspect", where)
    except PeerLost as lost:
        # what the others have is not known: it must not be saved, and is not needed to start again
        log.error("%s: nothing was saved: %s", where, lost)
        status = SAVED if exchange.topology.elastic else 1
    except Exception as failure:
        if exchange.topology.world > 1 and TORN.search(str(failure)):
            log.error("%s: nothing was saved: a rank of this island is gone (%s)", where, failure)
        else:
            log.exception("%s: saving failed", where)
            status = 1
    tell_launcher(exchange.topology.rank, status)
    leave(status)
