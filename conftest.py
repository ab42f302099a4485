"""Fixtures that every test may use: `run_ranks` plays islands x processes on this machine, forked
by the rank server (tests/support).

torch stays on one thread everywhere: a fork after an OpenMP region of several threads would hang in
the child.
"""

from __future__ import annotations

import os
import pickle
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
# reverse look-ups of addresses warn on every connection
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

from tests.support import guard, kinds, matrices  # noqa: E402
from tests.support.client import RankServer  # noqa: E402
from tests.support.everywhere import Everywhere  # noqa: E402
from tests.support.ranks import HUNG, Call, Job, Outcome, Rank, pack  # noqa: E402
from tests.support.stores import SHARED  # noqa: E402

# machines are shared: a slow example is no error
settings.register_profile("shared", deadline=None)
settings.load_profile("shared")

torch.set_num_threads(1)
guard.watch()

GRACE = 5.0  # seconds that the other ranks get to end after one has failed
GOING_ON = 20.0  # the same where a test expects that, and the others may go on without it


def pytest_configure() -> None:
    """What is attached in this process is one replica."""
    os.environ.pop("ISLAND_COUNT", None)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Markers `ranks` and `launch`, by what a test uses; `slow` within large matrices. First, since
    -m chooses by markers afterwards.
    """
    kinds.mark(items)
    matrices.thin(items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A test without these markers may start no process."""
    guard.alone(None if kinds.starts_processes(item) else item.nodeid)
    try:
        return (yield)
    finally:
        guard.alone(None)


@pytest.fixture(scope="session")
def rank_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RankServer]:
    """The process that forks the ranks of this test process."""
    server = RankServer(request.config.rootpath, tmp_path_factory.getbasetemp() / "rank_server.log")
    yield server
    server.end()


@pytest.fixture
def exchange_store(rank_server: RankServer) -> Iterator[tuple[str, int]]:
    """(host, port) of a store in a process of its own, for a test that starts its processes
    itself.
    """
    name = f"test-{secrets.token_hex(6)}"
    host, port = rank_server.ask("store", name).rsplit(":", 1)
    yield host, int(port)
    rank_server.ask("end", [name])


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> Everywhere:
    """`everywhere.setattr(target, name, value)`: `monkeypatch.setattr` for the test process and the
    ranks it starts from now on.
    """
    return Everywhere(monkeypatch)


@pytest.fixture
def run_ranks(
    request: pytest.FixtureRequest, tmp_path: Path, rank_server: RankServer, everywhere: Everywhere
) -> Iterator[Callable[..., list[Any]]]:
    """`run_ranks(fn, islands=2, procs=2, timeout=60, *, group=None, env=None, check=True,
    args=(), grace=None)`.

    Forks islands x procs processes; `procs` may be a list, one number per island. Each runs
    `fn(rank, *args)` (or `fn()` if it takes nothing) with the ISLAND_* environment of its island
    and, if the island has more than one process (or `group=True`), its own default gloo group.
    Returns the values, island by island; they must be picklable. A rank that raises fails the call
    with its traceback; ranks that hang are killed after `timeout` seconds and show where they were.
    `env` adds variables (a function of the Rank, or a dict). With `check=False` the result is a
    list of `Outcome`, whatever happened. Those that outlive a rank that has failed are killed
    `grace` seconds later (`GRACE`; `GOING_ON` with `check=False`).

    The ranks are forked by another process: what `fn` holds is copied, patches are made by
    `everywhere`, environment and working folder are those of the test. Each call has a run id of
    its own, in a store that they share; calls whose `env` has the same ISLAND_RUN have a store of
    their own until the test ends.
    """
    runs: set[str] = set()

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
        grace: float | None = None,
    ) -> list[Any]:
        counts = [procs] * islands if isinstance(procs, int) else list(procs)
        folder = tmp_path / f"ranks-{secrets.token_hex(4)}"
        folder.mkdir()
        ranks = [
            Rank(i, p, len(counts), n, sum(counts[:i]) + p, folder)
            for i, n in enumerate(counts)
            for p in range(n)
        ]
        run = f"test-{secrets.token_hex(6)}"
        common = {
            "ISLAND_COUNT": str(len(counts)),
            "ISLAND_RUN": run,
            "ISLAND_ADDRESS": "127.0.0.1",
        }
        common["ISLAND_TIMEOUT"] = str(max(5, int(timeout / 2)))
        # a busy machine lets a living island be silent for long; tests of losses say when one is
        common["ISLAND_DEAD"] = "30"
        store = ((env(ranks[0]) if callable(env) else env) or {}).get("ISLAND_RUN", SHARED)
        job = pack(Job(fn, args, env, everywhere.patches, group))
        grace = grace or (GRACE if check else GOING_ON)
        outcomes = rank_server.run(Call(ranks, job, common, store, timeout, grace))
        if store != SHARED:
            runs.add(store)
        return finished(ranks, outcomes, check)

    yield call
    if runs:
        rank_server.ask("end", sorted(runs))


def finished(ranks: list[Rank], outcomes: list[Outcome], check: bool) -> list[Any]:
    """The values, if `check` and nothing failed; else the outcomes, with logs and values."""
    for rank, outcome in zip(ranks, outcomes, strict=True):
        outcome.value = pickle.loads(outcome.raw) if outcome.raw else None
        outcome.log = rank.log.read_text(errors="replace")
    if not check:
        return outcomes
    _raise_on_failure(outcomes)
    return [o.value for o in outcomes]


def _raise_on_failure(outcomes: list[Outcome]) -> None:
    bad = [o for o in outcomes if o.error or o.status != 0]
    if not bad:
        return
    # those that raised first: the others mostly hang because of them
    bad.sort(key=lambda o: o.error == HUNG)
    parts = []
    for o in bad:
        lines = [
            line
            for line in o.log.strip().splitlines()
            if "/_pytest/" not in line and "/pluggy/" not in line
        ]
        tail = "\n".join(lines[-60:])
        parts.append(f"--- rank {o.rank} (exit status {o.status}) ---\n{o.error or ''}\n{tail}")
    pytest.fail(f"{len(bad)} of {len(outcomes)} ranks failed\n" + "\n".join(parts), pytrace=False)
