"""The fixture `run_ranks` of conftest.py."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from fsdp_demo.store.client import StoreClient

from .support.inside import in_a_process, in_ranks, in_threads


def test_run_ranks_values_and_environment(run_ranks):
    """Each rank has its environment, and its value is returned."""

    def who(me):
        store = StoreClient(os.environ["ISLAND_ENDPOINT"])
        store.set(f"{me.island}/{me.proc}", "here")
        total = torch.ones(())
        dist.all_reduce(total)
        here = store.get(f"{me.island}/{me.proc}") == "here"
        where = os.environ["ISLAND_RANK"], os.environ["ISLAND_COUNT"]
        return me.island, me.proc, *where, int(total), here

    began = time.monotonic()
    assert run_ranks(who) == [(i, p, str(i), "2", 2, True) for i in (0, 1) for p in (0, 1)]
    assert time.monotonic() - began < 20


def test_run_ranks_islands_of_different_size(run_ranks):
    """Islands may have different sizes."""

    def group(me):
        return dist.is_initialized() and dist.get_world_size()

    assert run_ranks(group, procs=[1, 2]) == [False, 2, 2]
    assert run_ranks(group, procs=1, group=True) == [1, 1]
    found = run_ranks(lambda: os.environ.get("ISLAND_RANK"), 1, 1, env={"ISLAND_COUNT": ""})
    assert found == [None]


def test_run_ranks_after_a_backward_in_the_parent(run_ranks):
    """Ranks start after a backward in the parent."""

    def backward():
        x = torch.randn(300, 300, requires_grad=True)
        (x @ x).sum().backward()
        return float(x.grad.sum())

    backward()
    assert len(run_ranks(backward, procs=1)) == 2


def test_run_ranks_failing_rank_is_shown(run_ranks):
    """A failing rank is shown, and the others end."""

    def fail(me):
        if me.rank == 2:
            raise KeyError("this one")
        time.sleep(0 if me.rank else 30)

    began = time.monotonic()
    with pytest.raises(pytest.fail.Exception, match="this one"):
        run_ranks(fail, grace=0.5)
    assert time.monotonic() - began < 20


def test_run_ranks_hanging_ranks_are_killed(run_ranks):
    """Hanging ranks are killed and show where they hang."""

    def here_it_hangs(me):
        if me.rank == 1:
            time.sleep(60)

    with pytest.raises(pytest.fail.Exception, match="here_it_hangs"):
        run_ranks(here_it_hangs, procs=1, timeout=1.5)


def test_run_ranks_exit_codes(run_ranks):
    """Exit codes of the ranks are returned."""

    def leave(me):
        if me.rank == 0:
            os._exit(75)
        if me.rank == 1:
            raise SystemExit(3)

    assert [o.status for o in run_ranks(leave, islands=3, procs=1, check=False)] == [75, 3, 0]
    with pytest.raises(pytest.fail.Exception, match="exit status 75"):
        run_ranks(leave, islands=1, procs=1)


def test_in_ranks_runs_in_every_rank(run_ranks, tmp_path):
    """The body of an `in_ranks` test runs in every rank, with the variables of its argument `env`,
    that of an `in_threads` test on every island, that of an `in_a_process` test elsewhere; what
    fails there fails the test, and so does a value that is not that of rank 0.
    """

    @in_ranks(2, 1, env={"SECOND": "2"})
    def of_ranks(me, tmp_path, env):
        (tmp_path / f"rank{me.rank}{os.environ['FIRST']}{os.environ['SECOND']}").touch()
        assert me.rank == 0

    @in_ranks(2, 1)
    def unlike(me):
        return torch.tensor([0.0, float(me.rank)])

    @in_threads(2)
    def of_islands(island, tmp_path):
        (tmp_path / f"island{island}").touch()
        assert island == 0

    @in_a_process
    def of_a_process(tmp_path):
        (tmp_path / "process").touch()
        assert tmp_path.name == str(os.getpid())

    env = {"FIRST": "1"}
    for test, given in ((of_ranks, {"env": env}), (of_islands, {}), (of_a_process, {})):
        with pytest.raises(pytest.fail.Exception, match="assert 1 == 0|AssertionError"):
            test(run_ranks=run_ranks, tmp_path=tmp_path, **given)
    with pytest.raises(AssertionError, match=r"ranks \[1\] return another value than rank 0"):
        unlike(run_ranks=run_ranks)
    found = sorted(p.name for p in tmp_path.iterdir() if not p.is_dir())
    assert found == ["island0", "island1", "process", "rank012", "rank112"]
