"""Peers that die, fall silent or are told to stop: `guard` saves and ends with the right status.
These are real processes and real signals.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import conftest
import fsdp_demo
from fsdp_demo import ExchangeConfig, preset
from fsdp_demo.exchange.guard import start_again
from fsdp_demo.status import DECIDE, SAVED

from ..support import probe
from ..support.threaded import Tap
from ..support.two_layers import sgd
from ..support.world import replica

SILENCE = 3.0  # ISLAND_TIMEOUT here, seconds
runs = itertools.count()
ISLANDS, MESH = fsdp_demo.Topology("islands", 0, 2), fsdp_demo.Topology("mesh", 0, 2)

DEMO = preset("demo", value_dtype="fp32")
DILOCO = preset("diloco", period=2, inner_optimizers="as_is")
CONSENSUS = preset(
    "decoupled_momentum", transform=True, period=2, value_dtype="bf16", inner_optimizers="as_is"
)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Survivors may take as long as the timeout and the vote after the first has died."""
    monkeypatch.setattr(conftest, "GRACE", 30.0)


@dataclass(frozen=True)
class Case:
    """What happens to which ranks of island 1 at step `at`, before its optimizer step or inside its
    message number `message`.
    """

    config: ExchangeConfig
    procs: int = 1
    victims: tuple[int, ...] = (0,)
    with_signal: int = signal.SIGKILL
    at: int = 3
    message: int | None = None
    timed_out: bool = False  # some survivor can only learn of it by silence


LOST = {
    "killed between exchanges": Case(DEMO),
    "killed inside an exchange": Case(DEMO, message=0),
    "killed inside the second leg of a reduce": Case(DILOCO, message=2),
    "killed with a payload in flight": Case(DEMO.changed({"schedule.delay": 2})),
    "silent": Case(CONSENSUS, with_signal=signal.SIGSTOP, timed_out=True),
    "2x2, all of it killed": Case(DEMO, 2, (0, 1)),
    "2x2, one rank killed inside an exchange": Case(CONSENSUS, 2, (1,), message=0, timed_out=True),
    "2x2, one rank silent inside a reduce": Case(DILOCO, 2, (1,), signal.SIGSTOP, message=1,
        timed_out=True),
}  # fmt: skip


def job(me: Any, case: Case) -> None:
    """Ten steps under guard(); island 1's victims strike themselves. Survivors write down what they
    saw when they saved.
    """
    logging.basicConfig(level=logging.INFO, force=True)
    (me.folder / f"pid{me.rank}").write_text(str(os.getpid()))
    me, topology, mesh = replica(me, case.procs, SILENCE)
    made = probe.Job(me, case.config, sgd, mesh=mesh, topology=topology)
    exchange = made.exchange

    def save() -> None:
        state = exchange.state_dict()
        record = {"step": exchange.step, "at": time.time(), "last": state["last"]}
        partial = me.folder / f"partial{me.rank}"
        torch.save({**record, "flights": len(state["in_flight"])}, partial)
        partial.rename(me.folder / f"saved{me.rank}")
        # the last survivor ends what is left of island 1
        if len(list(me.folder.glob("saved*"))) == me.procs:
            for rank in range(me.procs, 2 * me.procs):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int((me.folder / f"pid{rank}").read_text()), signal.SIGKILL)

    def strike(*_: Any) -> None:
        (me.folder / "struck").write_text(str(time.time()))
        os.kill(os.getpid(), case.with_signal)
        # a signal to a process of several threads may come late: nothing more leaves this one
        time.sleep(60)

    victim = me.island == 1 and me.proc in case.victims
    with fsdp_demo.guard(exchange, save, resume="python job.py --resume"):
        for t in range(10):
            made.backward(t)
            if victim and t == case.at:
                if case.message is None:
                    strike()
                else:
                    Tap(exchange, lambda data, n: strike() or data if n == case.message else data)
            made.end_step()
    raise AssertionError("the peer was not missed")


@pytest.mark.parametrize("name", LOST)
def test_peer_loss_saves_and_exits_75(run_ranks, tmp_path, name) -> None:
    """The ranks that survive a lost peer save at one step and end with status 75."""
    case = LOST[name]
    env = {"ISLAND_STATUS": str(tmp_path / "status")}
    outcomes = run_ranks(job, 1, 2 * case.procs, timeout=45, env=env, check=False, args=(case,))
    folder = next(tmp_path.glob("ranks-*"))
    struck = float((folder / "struck").read_text())
    (channel,) = case.config.channels
    delay, before = channel.schedule.delay, channel.before_step
    due = case.at if channel.schedule.due(case.at) else case.at + 1
    expected = [due + d + (not before) for d in range(delay + 1)]
    logs = [o.log for o in outcomes[: case.procs]]
    where = [s for s in expected if f"island0 (island 0, rank 0), step {s}:" in logs[0]]
    assert len(where) == 1 and "python job.py --resume" in logs[0], logs[0]
    for rank, log in enumerate(logs):
        assert outcomes[rank].status == 75, (outcomes[rank].status, outcomes[rank].error, log)
        assert f"island0 (island 0, rank {rank}), step {where[0]}:" in log
        saved = torch.load(folder / f"saved{rank}")
        # what was sent and not received is kept, to be sent once more
        assert saved["step"] == where[0] and saved["last"][channel.name] == where[0] + before
        assert 1 <= saved["flights"] <= delay + 1
        assert (tmp_path / "status" / f"rank{rank}").read_text() == "75"
        late = saved["at"] - struck
        assert late < SILENCE * case.timed_out + 8, f"saved {late:.1f} s after"
        if case.with_signal == signal.SIGSTOP and case.procs == 1:
            assert late > SILENCE - 0.5
    said = "".join(logs)
    assert "island 1 (island1) is lost: " in said and "2 must go on together" in said


# ---- SIGTERM -----------------------------------------------------------------------------------


# The wish is in the header of step 3: all stop when it lands, equal. With rare exchanges the others
# miss the island later.
TOLD = {
    "2x2, every step": (DEMO, 2, [4] * 4),
    "in flight": (DEMO.changed({"schedule.delay": 2}), 1, [6, 6]),
    "every few steps": (preset("diloco", period=5, inner_optimizers="as_is"), 1, [5, 4]),
}


@pytest.mark.parametrize("name", TOLD)
def test_sigterm_one_rank_ends_mesh(run_ranks, tmp_path, name) -> None:
    """SIGTERM to one rank of a mesh ends all ranks at one step."""
    config, procs, steps = TOLD[name]

    def run(me: Any) -> None:
        logging.basicConfig(level=logging.INFO, force=True)
        me, topology, mesh = replica(me, procs, 10.0)
        made = probe.Job(me, config, sgd, mesh=mesh, topology=topology)
        exchange = made.exchange

        def save() -> None:
            state, local = exchange.state_dict(), list(probe.parts(made.model).values())
            torch.save((exchange.step, state, local), me.folder / f"saved{me.rank}")

        with fsdp_demo.guard(exchange, save):
            for t in range(30):
                made.backward(t)
                if t == 3 and me.rank == me.islands * me.procs - 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                made.end_step()

    env = {"ISLAND_STATUS": str(tmp_path / "status")}
    outcomes = run_ranks(run, 1, 2 * procs, timeout=45, env=env, check=False)
    assert [o.status for o in outcomes] == [75] * (2 * procs), [o.log for o in outcomes]
    saved = [torch.load(next(tmp_path.glob("ranks-*")) / f"saved{r}") for r in range(2 * procs)]
    assert [s[0] for s in saved] == steps
    if name != "every few steps":
        for (_, one, here), (_, two, there) in zip(saved[:procs], saved[procs:], strict=True):
            flights = [len(state["in_flight"]) for state in (one, two)]
            assert flights == [config.channels[0].schedule.delay] * 2
            assert all(map(torch.equal, here, there))


@pytest.mark.parametrize(("topology", "status", "says"), [
    (fsdp_demo.Topology(), SAVED, "to resume, start again"),
    (ISLANDS, SAVED, "to resume, start this island (and each other one that has ended) again"),
    (ISLANDS, DECIDE, "once that is mended, start all islands again"),
    (MESH, SAVED, "to resume, start all islands again"),
])  # fmt: skip
def test_guard_says_who_starts_again(topology: fsdp_demo.Topology, status: int, says: str) -> None:
    """The log says when to start again, and which islands: after a `Mismatch` not before a person
    has mended it.
    """
    assert start_again(topology, "train.py", status) == f"{says} with: train.py"


def test_guard_handler_restored_and_save_error(run_ranks) -> None:
    """`guard` puts the signal handler back, passes errors on and reports a save that fails."""

    def run(me: Any) -> None:
        logging.basicConfig(level=logging.INFO, force=True)
        p = torch.nn.Parameter(torch.zeros(3))
        optimizer = torch.optim.SGD([p], lr=0.1)
        exchange = fsdp_demo.attach(optimizer, "full")
        old = signal.getsignal(signal.SIGTERM)
        with fsdp_demo.guard(exchange):
            assert signal.getsignal(signal.SIGTERM) is not old
        assert signal.getsignal(signal.SIGTERM) is old
        with pytest.raises(KeyError), fsdp_demo.guard(exchange):
            raise KeyError("the user's own errors pass")

        def save() -> None:
            raise OSError("disk full")

        with fsdp_demo.guard(exchange, save):
            for told in (False, True):
                if told:
                    os.kill(os.getpid(), signal.SIGTERM)
                p.grad = torch.ones(3)
                optimizer.step()

    (outcome,) = run_ranks(run, 1, 1, env={"ISLAND_COUNT": ""}, check=False)
    assert outcome.status == 1 and "disk full" in outcome.log and "saving failed" in outcome.log


# ---- the end of a process ----------------------------------------------------------------------

PROGRAM = """
import gc, json, os, select, sys
import torch
import fsdp_demo

torch.set_num_threads(1)
torch.optim.AdamW([torch.zeros(1)])  # imports torch's compiler, which takes seconds, once for all
gc.freeze()  # what was imported need not be looked through at the end of every child
endings = sys.argv[1:]


def job(island, number, ending):
    os.environ.update(ISLAND_RANK=str(island), ISLAND_RUN=f"end-{number}")  # one run, as often as it is joined
    model = torch.nn.Linear(70, 70)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    changes = {"must_match": {"island": island}} if ending == "refused" else {"schedule.delay": 1}
    exchange = fsdp_demo.attach(optimizer, "diloco", model=model, period=2, **changes)
    for t in range(6):
        if ending == "error" and t == 4 and island == 0:
            raise KeyError("a mistake in the training loop, one exchange under way")
        if ending == "silent" and t == 3 and island == 1:
            os.close(writer)  # the other's closes at its end
            os._exit(0 if select.select([reader], [], [], 200)[0] else 2)
        if ending == "silent" and t == 4:
            raise KeyError("a mistake, while the exchange under way waits for a silent peer")
        model(torch.ones(1, 70)).sum().backward()
        optimizer.step()
    if ending == "finish":
        exchange.finish()
        assert not torch.distributed.is_initialized()
    if ending == "detach":
        exchange.detach()


# Forked after the imports, children run to the end of this file: the interpreter's and C++'s finalisation are those of a script.
statuses, island, silent = [], None, []


def ends(ending, children):
    statuses.append([ending, [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]])


for number, ending in enumerate(endings):
    children, (reader, writer) = [], os.pipe()
    for i in range(2):
        pid = os.fork()
        if pid == 0:
            island = i
            break
        children.append(pid)
    if island is not None:
        break
    os.close(reader), os.close(writer)
    if ending == "silent":
        silent.append((ending, children))
    else:
        ends(ending, children)
if island is None:
    for which in silent:
        ends(*which)
    print(json.dumps(statuses))
else:
    for _ in range(3 if ending == "finish" else 1):
        job(island, number, ending)
"""  # noqa: E501


def test_process_exit_status(exchange_store, tmp_path) -> None:
    """Processes end with the status that they should. 6 finished jobs of 2 islands in 2 pairs of
    processes, to the real end of their interpreters, and the other ways to end: no SIGABRT, no
    hang.
    """
    program = tmp_path / "job.py"
    program.write_text(PROGRAM)
    endings = ["silent", "finish", "finish", "forget", "detach", "refused", "error"]
    env = {k: v for k, v in os.environ.items() if not k.startswith("ISLAND_")}
    host, port = exchange_store
    env |= {"ISLAND_COUNT": "2", "ISLAND_ENDPOINT": f"{host}:{port}", "ISLAND_ADDRESS": "127.0.0.1"}
    # who waited for this limit, to end then, would not end in time
    env |= {"ISLAND_TIMEOUT": "1000", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(program), *endings]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    expected = {"refused": [1, 1], "error": [1, 0], "silent": [1, 0]}
    assert sorted(ending for ending, _ in results) == sorted(endings)
    for ending, statuses in results:
        found = (ending, statuses, done.stderr[-3000:])
        assert statuses == expected.get(ending, [0, 0]), found
    assert "terminate called" not in done.stderr and "Fatal Python error" not in done.stderr


def test_stop_requested_before_the_step() -> None:
    """A wish to stop soon is seen at once, as in an evaluation; one to stop together is not."""
    model = torch.nn.Linear(2, 2)
    exchange = fsdp_demo.attach(torch.optim.AdamW(model.parameters()), "diloco")
    seen = [exchange.stop_requested]
    for together in (True, False):
        exchange.request_stop(together)
        seen.append(exchange.stop_requested)
    exchange.detach()
    assert seen == [False, False, True]
