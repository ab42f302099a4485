"""The rank server: a fresh interpreter with one thread that forks the ranks of a test process, one
call after another.

A plugin of pytest, so that test modules are imported as pytest imports them, with assertions
rewritten. It never collects a test: `python -m pytest -p tests.support.server`, started by
`client.py`, serves until its pipe closes. The pytest process itself has threads (execnet's, and
those of whatever the tests use), so it must not fork.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import selectors
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

import pytest

from . import child, threads
from .ranks import HUNG, Call, Job, Outcome, Rank, unpack
from .stores import Stores

PIPE = "FSDP_DEMO_RANK_SERVER"  # the descriptor of the pipe to the test process


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int:
    """In place of a test session."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the test process decides
    Server(Connection(int(os.environ.pop(PIPE)))).serve()
    return 0


class Server:
    """Answers ("call", Call), ("store", name) and ("end", names) with (True, result) or (False,
    error as text).
    """

    def __init__(self, pipe: Connection):
        self.pipe = pipe
        self.stores = Stores(close=[pipe.fileno()])
        threads.warm()

    def serve(self) -> None:
        """Until the test process closes its end, also by dying."""
        try:
            while True:
                word, what = pickle.loads(self.pipe.recv_bytes())
                try:
                    answer = True, self.answer(word, what)
                except EOFError:
                    raise
                except Exception:
                    # the test process ends this server and starts another: what a test has left
                    # here is gone
                    answer = False, traceback.format_exc()
                self.pipe.send(answer)
        except (EOFError, OSError):
            pass
        finally:
            self.stores.end_all()

    def answer(self, word: str, what: Any) -> Any:
        if word == "store":
            return self.stores.endpoint(what)
        if word == "end":
            return [self.stores.end(name) for name in what]
        sys.path[:] = what.path
        return self.run(what, unpack(what.job))

    def run(self, call: Call, job: Job) -> list[Outcome]:
        """Start all ranks, collect what they send, and leave no child behind."""
        threads.preload()
        threads.assert_one("the rank server")  # modules of tests were imported
        endpoint = self.stores.endpoint(call.store)
        ranks = Ranks(call, self.pipe)
        gc.freeze()  # a collection in a child would touch, and so copy, every page of the server
        try:
            for rank in call.ranks:
                ranks.start(rank, job, endpoint)
            ranks.collect()
            ranks.reap()
        finally:
            gc.unfreeze()
            ranks.end()
        return ranks.outcomes


class Ranks:
    """The processes of one call."""

    def __init__(self, call: Call, pipe: Connection):
        self.call, self.server = call, pipe
        self.outcomes = [Outcome(rank.rank) for rank in call.ranks]
        self.pids: dict[int, int] = {}  # process id: rank
        self.selector = selectors.DefaultSelector()

    def start(self, rank: Rank, job: Job, endpoint: str) -> None:
        read, write = os.pipe()
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            child.end_with(parent)
            for fd in (read, self.server.fileno()):
                os.close(fd)
            child.live(rank, self.call, job, endpoint, write)  # never returns
        os.close(write)
        self.pids[pid] = rank.rank
        self.selector.register(read, selectors.EVENT_READ, rank.rank)

    def collect(self) -> None:
        """Read every pipe to its end, until the deadline, which moves near once a rank has
        failed.
        """
        deadline, open_ = time.monotonic() + self.call.timeout, len(self.outcomes)
        # the test process says nothing now: it closes, or it dies
        self.selector.register(self.server, selectors.EVENT_READ, None)
        while open_ and (left := deadline - time.monotonic()) > 0:
            for key, _ in self.selector.select(left):
                if key.data is None:
                    raise EOFError("the test process is gone")
                outcome = self.outcomes[key.data]
                data = os.read(key.fd, 1 << 20)
                outcome.raw += data
                if data:
                    continue
                self.selector.unregister(key.fileobj)
                os.close(key.fd)
                open_ -= 1
                sent = bool(outcome.raw)
                if sent:
                    outcome.raw, outcome.error = pickle.loads(bytes(outcome.raw))
                if outcome.error or not sent:
                    deadline = min(deadline, time.monotonic() + self.call.grace)
        self.selector.unregister(self.server)
        for key in self.selector.get_map().values():
            self.outcomes[key.data].error = HUNG
            self.outcomes[key.data].raw.clear()

    def reap(self) -> None:
        """Wait for the children, which have closed their pipes; those that hang first say where
        (SIGUSR1), then are killed.
        """
        hung = [pid for pid, r in self.pids.items() if self.outcomes[r].error == HUNG]
        for pid in hung:
            os.kill(pid, signal.SIGUSR1)
        if hung:
            time.sleep(0.3)
        for pid in hung:
            os.kill(pid, signal.SIGKILL)
        for pid, r in list(self.pids.items()):
            end = time.monotonic() + 10
            while (done := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < end:
                time.sleep(0.005)
            if done[0] == 0:  # closed its pipe and yet does not end: `end` kills it
                self.outcomes[r].error = (
                    self.outcomes[r].error or "gave its value and then did not exit"
                )
                continue
            self.outcomes[r].status = os.waitstatus_to_exitcode(done[1])
            del self.pids[pid]

    def end(self) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        for key in list(self.selector.get_map().values()):
            if key.data is not None:
                os.close(key.fd)
        self.selector.close()
