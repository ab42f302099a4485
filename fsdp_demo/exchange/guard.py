"""The end of a training process after a lost peer or SIGTERM: it saves, logs how to resume, and
ends with status 75.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from torch.utils.data._utils import signal_handling

from ..errors import Mismatch, NeedsDecision, PeerLost, Stopped, WireError
from ..rendezvous import environment
from ..rendezvous.sibling_watch import TORN
from ..rendezvous.topology import Topology
from ..status import (
    DECIDE,
    SAVED,
    do_last,
    end_within,
    is_hosted,
    leave,
    tell_launcher,
)
from .exchange import Exchange

log = logging.getLogger("fsdp_demo")


def undecided(error: NeedsDecision, rank: int) -> NoReturn:
    """Log the error without a traceback and end the process with status 78: a person must decide,
    and another start would change nothing.

    Args:
        rank: inside the island; the first one logs, and tells the launcher.

    Example:
        >>> import tempfile, fsdp_demo
        >>> from fsdp_demo.checkpoint import CheckpointManager
        >>> topology = fsdp_demo.Topology.from_env({})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     try:
        ...         step = CheckpointManager(folder, topology).resume_point(resume=True)
        ...     except fsdp_demo.NeedsDecision as error:
        ...         fsdp_demo.undecided(error, topology.rank)
        >>> step is None  # nothing is held
        True
    """
    if rank == 0:
        log.error("%s", error)
    tell_launcher(rank, DECIDE)
    leave(DECIDE)


def start_again(topology: Topology, command: str, status: int) -> str:
    """How training goes on after this island has ended with `status`, for the log."""
    when, who = "to resume" if status == SAVED else "once that is mended", ""
    if topology.islands > 1:
        apart = status == SAVED and topology.elastic  # the others may train on
        who = "this island (and each other one that has ended) " if apart else "all islands "
    return f"{when}, start {who}again with: {command}"


@contextmanager
def guard(
    exchange: Exchange, save: Callable[[], Any] | None = None, resume: str = ""
) -> Iterator[None]:
    """Run a training loop so that a lost peer or SIGTERM ends it in order.

    On `PeerLost`, `WireError` or `Stopped` every rank of the island calls `save()`, logs the cause
    and how to resume, and ends its process at once (a regular interpreter exit could wait for peers
    that are gone). The status is 75; 78 where the islands do not run the same (`Mismatch`), which
    another start would not mend; 1 where `save` fails.

    SIGTERM, or another of ISLAND_STOP_SIGNALS, asks the exchange to stop
    (`Exchange.request_stop`); a second one is the same wish. If one island gets it, it sends its
    work since the last exchange ahead, the others train on, and it may join them again. If all get
    it, all stop after their current steps, and messages that have not reached all islands are saved
    and sent at the resume (docs/membership.md). Python handles signals in the main thread only: in
    another thread SIGTERM is not handled, and a warning is logged.

    The end takes at most ISLAND_STOP seconds from SIGTERM or from the loss. If a rank of the island
    is gone, or does not come to the save, nothing is saved, and the status is 75. SIGTERM before
    the first step ends the island at once: there is nothing to save. A long evaluation asks
    `Exchange.stop_requested`.

    Args:
        save: saves the state of the island. All its ranks call it, so it may use their collectives:
            `lambda: state.save(exchange, last=True)` of a `RunState`.
        resume: the command that resumes the run, for the log.

    Example:
        >>> import torch, fsdp_demo
        >>> optimizer = torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())
        >>> exchange = fsdp_demo.attach(optimizer, "diloco")
        >>> with fsdp_demo.guard(exchange, save=None, resume="python train.py --resume"):
        ...     pass  # the training loop
    """
    again = start_again(exchange.topology, resume or "the same command", SAVED)
    deadline = Deadline(exchange, lambda: again)
    if threading.current_thread() is not threading.main_thread() and not is_hosted():
        log.warning(
            "guard in the thread %r does not hear SIGTERM, which ends the process unsaved: Python "
            "handles signals in the main thread only. Train there, or let a handler of the main "
            "thread call exchange.request_stop()",
            threading.current_thread().name,
        )

    def told() -> bool:
        exchange.request_stop()
        deadline.begin(told=True)
        return True

    try:
        with stop_signals(told):
            try:
                yield
            except (PeerLost, WireError, Stopped) as error:
                deadline.begin()
                _leave(exchange, error, save, resume, deadline)
    finally:
        deadline.end()


class Deadline:
    """A timer that ends this process ISLAND_STOP seconds after `begin`: a rank that does not come
    to the save must not keep the others until their launcher kills them.

    Args:
        exchange: of this rank.
        again: says how training goes on, for the log; called in the timer's thread.

    Attributes:
        status: exit status of the process.
        unfinished: the phase of the stop, for the log; empty before the loop was left.
    """

    def __init__(self, exchange: Exchange, again: Callable[[], str]):
        self.status, self.unfinished = SAVED, ""
        self._exchange, self._again = exchange, again
        self._begun, self._over = False, threading.Event()

    def begin(self, told: bool = False) -> None:
        """Start the timer at the first call. Safe in a signal handler. A process that is `told` to
        end before its first step has nothing to save: it ends at once."""
        if not self._begun:
            self._begun, now = True, told and not self._exchange.has_stepped
            end_within(self._exchange.topology.stop_timeout)
            threading.Thread(target=self._run, args=(now,), name="deadline", daemon=True).start()

    def end(self) -> None:
        """Stop the timer."""
        self._over.set()

    def _run(self, now: bool) -> None:
        exchange, topology = self._exchange, self._exchange.topology
        if self._over.wait(0 if now else topology.stop_timeout) or exchange.closed:
            return
        waits = exchange.activity.kind == "waiting"
        verb = "waits for the others" if waits else "is under way"
        why = (
            f"{topology.stop_timeout:g} s after it was told to end, or has lost its peers, "
            f"{self.unfinished or f'step {exchange.step + 1} still {verb}'}: it ends, and nothing "
            "is saved. ISLAND_STOP says how many seconds there are"
        )
        if now:
            why = "it is told to end before its first step, so there is nothing to save"
            with suppress(PeerLost):  # of the store
                exchange.leave(stopped=True)
        log.error("%s, rank %d: %s; %s", topology.name, topology.rank, why, self._again())
        tell_launcher(topology.rank, self.status)
        leave(self.status)


@contextmanager
def stop_signals(told: Callable[[], bool]) -> Iterator[None]:
    """Call `told` within this context when one of ISLAND_STOP_SIGNALS comes (SIGTERM is always
    one); where it returns False, the handler that was there before takes the signal. Python handles
    signals in the main thread only: in another one this does nothing.

    A forked child has these handlers, too. It is no rank: there SIGTERM does what it did before,
    and the other signals do nothing. A forked worker of torch's loaders hears only its rank:
    torchrun tells the process group of a rank, which cannot go on once a worker has died. Workers
    end when their rank has ended (torch 2.13, `SubprocessHandler.close`, `_worker_loop`), or ends
    them (`Process.terminate`, for those that it still has at its exit).
    """
    here, before = os.getpid(), dict[int, Any]()
    as_torch_does = signal_handling._set_worker_signal_handlers

    def in_worker() -> None:
        as_torch_does()
        signal.pthread_sigmask(signal.SIG_BLOCK, before)
        threading.Thread(target=_hear_rank, args=(os.getppid(),), daemon=True).start()

    def handle(number: int, frame: object) -> None:
        if not (told() if os.getpid() == here else number != signal.SIGTERM):
            signal.signal(number, before[number])
            os.kill(os.getpid(), number)

    if threading.current_thread() is threading.main_thread():
        numbers = environment.stop_signals(os.environ)
        before = {number: signal.signal(number, handle) for number in numbers}
        signal_handling._set_worker_signal_handlers = in_worker
    try:
        yield
    finally:
        signal_handling._set_worker_signal_handlers = as_torch_does
        for number, old in before.items():
            signal.signal(number, old)


def _hear_rank(rank: int) -> None:
    """End this process, a loader's worker that blocks SIGTERM, when `rank`, its parent, sends
    it.
    """
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != rank:
        pass
    os._exit(0)


def _leave(
    exchange: Exchange,
    error: Exception,
    save: Callable[[], Any] | None,
    resume: str,
    deadline: Deadline,
) -> None:
    deadline.status = status = DECIDE if isinstance(error, Mismatch) else SAVED
    deadline.unfinished = "it still waits for the other islands"
    topology, asked = exchange.topology, isinstance(error, Stopped)
    where = (
        f"{topology.name} (island {topology.island}, rank {topology.rank}), step {exchange.step}"
    )
    level = logging.WARNING if asked else logging.ERROR
    log.log(level, "%s: %s", where, error)
    try:
        exchange.leave(stopped=asked)
        deadline.unfinished = (
            "its save has not ended: another rank of the island did not come to it, or it takes "
            "longer"
        )
        if save is not None:
            try:
                save()
            except PeerLost:  # found only now: what was under way is saved as it was sent
                save()
            deadline.unfinished = "its last uploads have not ended"
            do_last()
        deadline.end()
        if topology.rank == 0:
            done = "saved" if save is not None else "nothing was saved"
            again = start_again(topology, resume or "the same command", status)
            log.log(level, "%s: %s; %s", where, done, again)
            if save is not None and topology.islands > 1:
                log.log(level, "%s: for the steps of the others see fsdp-demo inspect", where)
    except PeerLost as lost:
        # how far the others are is not known, so a checkpoint might contradict theirs
        log.error("%s: nothing was saved: %s", where, lost)
        status = SAVED if topology.elastic else 1
    except Exception as failure:
        if topology.world > 1 and TORN.search(str(failure)):
            log.error("%s: nothing was saved: a rank of this island is gone (%s)", where, failure)
        else:
            log.exception("%s: saving failed", where)
            status = 1
    tell_launcher(topology.rank, status)
    leave(status)
