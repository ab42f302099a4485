"""The life of a forked rank, from its first line to `os._exit`."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
import inspect
import os
import pickle
import signal
import sys
import traceback
from typing import Any

import torch
import torch.distributed as dist

from . import guard
from .ranks import Call, Job, Rank, encode

LAUNCHER = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "GROUP_RANK",
)  # fmt: skip
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Be killed when the parent, which has this id, ends (Linux)."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


def live(rank: Rank, call: Call, job: Job, endpoint: str, pipe: int) -> None:
    """Do the job, send (value's pickle, error) through `pipe` and end the process by `os._exit`:
    nothing of the server runs twice.
    """
    status, value, error = 1, None, None
    try:
        _prepare(rank, call)
        _environment(rank, call, job, endpoint)
        for target, name, new in job.patches:
            setattr(target, name, new)
        value = encode(_in_group(rank, job))
        status = 0
    except BaseException as raised:
        if isinstance(raised, SystemExit):
            status = raised.code if isinstance(raised.code, int) else 1
        value = None
        error = f"exit {status}" if isinstance(raised, SystemExit) else traceback.format_exc()
    with contextlib.suppress(BaseException):
        with os.fdopen(pipe, "wb") as file:
            file.write(pickle.dumps((value, error)))
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _prepare(rank: Rank, call: Call) -> None:
    log = os.open(rank.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    guard.leave()
    torch.set_num_threads(1)
    # torch makes its autograd engine anew at its first use in a forked process, without a lock: two
    # threads that are first at once free it twice
    torch.ones(1, requires_grad=True).square()
    os.chdir(call.folder)


def _environment(rank: Rank, call: Call, job: Job, endpoint: str) -> None:
    """The test's variables, without what a launcher set there, and those of this rank."""
    os.environ.clear()
    os.environ.update(
        {k: v for k, v in call.environ.items() if not k.startswith("ISLAND_") and k not in LAUNCHER}
    )
    os.environ.update(
        call.common,
        ISLAND_ENDPOINT=endpoint,
        ISLAND_RANK=str(rank.island),
        ISLAND_NAME=f"island{rank.island}",
    )
    os.environ.update(
        RANK=str(rank.proc),
        LOCAL_RANK=str(rank.proc),
        WORLD_SIZE=str(rank.procs),
        LOCAL_WORLD_SIZE=str(rank.procs),
    )
    os.environ.update(job.env(rank) if callable(job.env) else job.env or {})
    # env={"ISLAND_COUNT": ""}: play a process that is on no island
    if os.environ["ISLAND_COUNT"] == "":
        for name in [n for n in os.environ if n.startswith("ISLAND_")]:
            del os.environ[name]


def _in_group(rank: Rank, job: Job) -> Any:
    takes = len(inspect.signature(job.fn).parameters)
    call = (lambda: job.fn()) if takes == 0 and not job.args else (lambda: job.fn(rank, *job.args))
    if not (rank.procs > 1 if job.group is None else job.group):
        value = call()
        if job.group is False and dist.is_initialized():
            # a rank that ends while another one still connects to it in gloo makes that one fail
            dist.barrier()
        return value
    init = f"file://{rank.folder}/world{rank.island}"
    dist.init_process_group(
        "gloo",
        init_method=init,
        rank=rank.proc,
        world_size=rank.procs,
        timeout=datetime.timedelta(seconds=60),
    )
    value = call()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return value
