"""Fixtures that every test may use: `run_ranks` plays islands x processes on this machine by forking.

torch stays on one thread everywhere: a fork after an OpenMP region of several threads would hang in the child.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import importlib
import inspect
import os
import pickle
import secrets
import selectors
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # reverse look-ups of addresses warn on every connection
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

torch.set_num_threads(1)

GRACE = 5.0  # seconds that the other ranks get to end after one has failed
# What torch imports at the first optimizer or fully_shard: once here, before the first fork, instead of 0.8 s in every rank.
LAZY = ("torch._dynamo", "torch._dynamo.device_interface", "torch.distributed.fsdp", "torch.distributed.tensor")
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")


@dataclass(frozen=True)
class Rank:
    """Who a function run by `run_ranks` is: its island, its process in the island, and how many there are of each."""

    island: int
    proc: int
    islands: int
    procs: int
    rank: int  # over all islands, island by island
    folder: Path  # shared by all ranks of the call

    def mesh(self):
        """The island's shard mesh for `fully_shard`."""
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh("cpu", (self.procs,))


@dataclass
class Outcome:
    """How one rank ended: its value, or its error as text, its exit status (negative: signal), what it wrote to the terminal."""

    rank: int
    value: Any = None
    error: str | None = None
    status: int | None = None
    log: str = ""
    raw: bytearray = field(default_factory=bytearray, repr=False)


@pytest.fixture(scope="session")
def exchange_store() -> Iterator[tuple[str, int]]:
    """(host, port) of a TCPStore, served by a process of its own: its server threads must not run in the parent of a fork,
    where a child would inherit whatever lock they hold at that moment."""
    for module in LAZY:
        importlib.import_module(module)
    port_read, port_write = os.pipe()
    life_read, life_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(life_write)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, timeout=datetime.timedelta(seconds=60))
            os.write(port_write, str(store.port).encode())
            os.close(port_write)
            os.read(life_read, 1)  # returns when the parent closes its end, also by dying
        finally:
            os._exit(0)
    os.close(port_write)
    os.close(life_read)
    os.set_inheritable(life_write, False)
    port = os.read(port_read, 16)
    os.close(port_read)
    _LIFE.append(life_write)
    yield ("127.0.0.1", int(port))
    os.close(life_write)
    _LIFE.clear()
    os.waitpid(pid, 0)


_LIFE: list[int] = []  # write ends that forked ranks must not keep open


@pytest.fixture
def run_ranks(tmp_path: Path, exchange_store: tuple[str, int]) -> Callable[..., list[Any]]:
    """`run_ranks(fn, islands=2, procs=2, timeout=60, *, group=None, env=None, check=True, args=())`.

    Forks islands x procs processes; `procs` may be a list, one number per island. Each runs `fn(rank, *args)` (or `fn()` if it
    takes nothing) with the ISLAND_* environment of its island and, if the island has more than one process (or `group=True`), its
    own default gloo group. Returns the values, island by island; they must be picklable. A rank that raises fails the call with its
    traceback; ranks that hang are killed after `timeout` seconds and show where they were. `env` adds variables (a function of
    the Rank, or a dict). With `check=False` the result is a list of `Outcome`, whatever happened.
    """

    def call(
        fn: Callable[..., Any],
        islands: int = 2,
        procs: int | Sequence[int] = 2,
        timeout: float = 60,
        *,
        group: bool | None = None,
        env: dict[str, str] | Callable[[Rank], dict[str, str]] | None = None,
        check: bool = True,
        args: tuple[Any, ...] = (),
    ) -> list[Any]:
        counts = [procs] * islands if isinstance(procs, int) else list(procs)
        islands = len(counts)
        folder = tmp_path / f"ranks-{secrets.token_hex(4)}"
        folder.mkdir()
        common = {
            "ISLAND_COUNT": str(islands),
            "ISLAND_ENDPOINT": f"{exchange_store[0]}:{exchange_store[1]}",
            "ISLAND_RUN": f"test-{secrets.token_hex(6)}",
            "ISLAND_ADDRESS": "127.0.0.1",
            "ISLAND_TIMEOUT": str(max(5, int(timeout / 2))),
        }
        ranks = [Rank(i, p, islands, n, sum(counts[:i]) + p, folder) for i, n in enumerate(counts) for p in range(n)]
        outcomes = _fork(ranks, fn, args, common, env, group, timeout)
        if check:
            _raise_on_failure(outcomes)
            return [o.value for o in outcomes]
        return outcomes

    return call


def _fork(ranks, fn, args, common, env, group, timeout) -> list[Outcome]:
    """Start all ranks, collect what they send, and leave no child behind."""
    outcomes, pids, selector = [Outcome(r.rank) for r in ranks], {}, selectors.DefaultSelector()
    sys.stdout.flush()
    sys.stderr.flush()
    gc.freeze()  # a collection in a child would touch, and so copy, every page of the parent
    try:
        for rank in ranks:
            read, write = os.pipe()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # "multi-threaded, use of fork() may lead to deadlocks": torch on one thread is tested
                pid = os.fork()
            if pid == 0:
                os.close(read)
                _child(rank, fn, args, common, env, group, write)  # never returns
            os.close(write)
            pids[pid] = rank.rank
            selector.register(read, selectors.EVENT_READ, rank.rank)
        _collect(outcomes, selector, timeout)
        _reap(outcomes, pids, ask=any(o.error == _HUNG for o in outcomes))
    finally:
        gc.unfreeze()
        for pid in list(pids):
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        for key in list(selector.get_map().values()):
            os.close(key.fd)  # type: ignore[arg-type]
        selector.close()
    for rank, outcome in zip(ranks, outcomes, strict=True):
        outcome.log = (rank.folder / f"rank{rank.rank}.log").read_text(errors="replace")
    return outcomes


_HUNG = "did not end"


def _collect(outcomes: list[Outcome], selector: selectors.BaseSelector, timeout: float) -> None:
    """Read every pipe to its end, until the deadline, which moves near once a rank has failed."""
    deadline = time.monotonic() + timeout
    while selector.get_map() and (left := deadline - time.monotonic()) > 0:
        for key, _ in selector.select(left):
            outcome = outcomes[key.data]
            data = os.read(key.fd, 1 << 20)  # type: ignore[arg-type]
            outcome.raw += data
            if data:
                continue
            selector.unregister(key.fileobj)
            os.close(key.fd)  # type: ignore[arg-type]
            if outcome.raw:
                outcome.value, outcome.error = pickle.loads(bytes(outcome.raw))
            if outcome.error or not outcome.raw:
                deadline = min(deadline, time.monotonic() + GRACE)
    for key in selector.get_map().values():
        outcomes[key.data].error = _HUNG


def _reap(outcomes: list[Outcome], pids: dict[int, int], ask: bool) -> None:
    """Wait for the children, which have closed their pipes; those that hang first say where (SIGUSR1), then are killed."""
    hung = [pid for pid, r in pids.items() if outcomes[r].error == _HUNG]
    for pid in hung:
        os.kill(pid, signal.SIGUSR1)
    if ask:
        time.sleep(0.3)
    for pid in hung:
        os.kill(pid, signal.SIGKILL)
    for pid, r in list(pids.items()):
        end = time.monotonic() + 10
        while (done := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < end:
            time.sleep(0.005)
        if done[0] == 0:  # closed its pipe and yet does not end: the finally clause of the caller kills it
            outcomes[r].error = outcomes[r].error or "gave its value and then did not exit"
            continue
        outcomes[r].status = os.waitstatus_to_exitcode(done[1])
        del pids[pid]


def _raise_on_failure(outcomes: list[Outcome]) -> None:
    bad = [o for o in outcomes if o.error or o.status != 0]
    if not bad:
        return
    bad.sort(key=lambda o: o.error == _HUNG)  # those that raised first: the others mostly hang because of them
    parts = []
    for o in bad:
        lines = [line for line in o.log.strip().splitlines() if "/_pytest/" not in line and "/pluggy/" not in line]
        tail = "\n".join(lines[-60:])
        parts.append(f"--- rank {o.rank} (exit status {o.status}) ---\n{o.error or ''}\n{tail}")
    pytest.fail(f"{len(bad)} of {len(outcomes)} ranks failed\n" + "\n".join(parts), pytrace=False)


def _child(rank: Rank, fn, args, common, env, group, pipe: int) -> None:
    """A rank's whole life. Ends by os._exit, so that nothing of pytest runs twice."""
    status, result = 1, (None, "no result")
    try:
        for end in _LIFE:
            os.close(end)
        log = os.open(rank.folder / f"rank{rank.rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        torch.set_num_threads(1)
        _environment(rank, common, env)
        value = _in_group(rank, fn, args, group)
        result, status = (value, None), 0
        data = pickle.dumps(result)
    except BaseException as error:
        if isinstance(error, SystemExit):
            status = error.code if isinstance(error.code, int) else 1
        result = (None, f"exit {status}" if isinstance(error, SystemExit) else traceback.format_exc())
        data = pickle.dumps(result)
    with contextlib.suppress(BaseException):
        with os.fdopen(pipe, "wb") as file:
            file.write(data)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _environment(rank: Rank, common, env) -> None:
    for name in [n for n in os.environ if n.startswith("ISLAND_") or n in LAUNCHER]:
        del os.environ[name]
    os.environ.update(common, ISLAND_RANK=str(rank.island), ISLAND_NAME=f"island{rank.island}")
    os.environ.update(RANK=str(rank.proc), LOCAL_RANK=str(rank.proc), WORLD_SIZE=str(rank.procs), LOCAL_WORLD_SIZE=str(rank.procs))
    os.environ.update(env(rank) if callable(env) else env or {})
    if os.environ["ISLAND_COUNT"] == "":  # env={"ISLAND_COUNT": ""}: play a process that is on no island
        for name in [n for n in os.environ if n.startswith("ISLAND_")]:
            del os.environ[name]


def _in_group(rank: Rank, fn, args, group) -> Any:
    takes = len(inspect.signature(fn).parameters)
    call = (lambda: fn()) if takes == 0 and not args else (lambda: fn(rank, *args))
    if not (rank.procs > 1 if group is None else group):
        return call()
    init = f"file://{rank.folder}/island{rank.island}"
    dist.init_process_group("gloo", init_method=init, rank=rank.proc, world_size=rank.procs, timeout=datetime.timedelta(seconds=60))
    value = call()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return value
