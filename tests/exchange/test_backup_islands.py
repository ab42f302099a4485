"""Backup islands: an exchange goes on without an island that is late, and what that has trained
counts in its next one, once.

Real processes over ZeroMQ. An island is late because its training waits, before the step of the
exchange, until the island has passed: nothing here depends on how fast a machine is. Which islands
were late is read from the run, and the simulation beside it is given the same.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import fsdp_demo
from fsdp_demo import ExchangeConfig, preset
from fsdp_demo.compression.dense import round_trip
from fsdp_demo.config.channel import Channel
from fsdp_demo.config.parts import Accumulator, Applier, Codec, Reducer, SyncSchedule
from fsdp_demo.exchange import message, watch
from fsdp_demo.peers.header import COUNTED, FAR, PASSED, Header, norm_code

from ..support.inside import in_ranks
from ..support.refused import refusal
from ..support.two_layers import step

ENV = {"ISLAND_DEAD": "6", "ISLAND_STOP": "20"}
PERIOD, STEPS = 4, 18  # exchanges in steps 3, 7, 11, 15; two steps are left for the last one
SIZE = (3, 5000)


def config(code: str = "fp32", weight: str = "equal", **changes: Any) -> ExchangeConfig:
    """Outer Nesterov on the mean delta, with error feedback where a code rounds."""
    outer = Applier("outer_step", lr=0.7, momentum=0.9, nesterov=True)
    rounds = {"accumulator": Accumulator(beta=1.0), "feedback": "subtract"}
    channel = Channel(
        "delta",
        "delta",
        SyncSchedule(PERIOD),
        codec=Codec(value_dtype=code),
        reducer=Reducer(weight=weight),
        applier=outer,
        **(rounds if code == "int4" else {}),
    )
    return ExchangeConfig("made", (channel,), backup_islands=1).changed(changes)


def gradient(island: int, t: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(100 * t + island)) / 16


def tokens(island: int, t: int) -> int:
    return 10 + 3 * island + t


def until_passed(exchange: Any) -> None:
    """Wait in training, as one that is slow: the island has passed the coming exchange."""
    while exchange._runtime.backup.rounds.passed < 0:
        time.sleep(0.01)


def attached(me: Any, method: ExchangeConfig, saved: Path | None = None) -> Any:
    value, state = (torch.zeros(SIZE), None) if saved is None else torch.load(saved)
    w = torch.nn.Parameter(value)
    model = torch.nn.Module()
    model.w = w
    optimizer = torch.optim.SGD([w], lr=1.0)
    return w, optimizer, fsdp_demo.attach(optimizer, method, model=model, state=state)


def noted(exchange: Any) -> dict[int, list[int]]:
    """From now on: the step of each exchange that was applied, and the islands that were late."""
    queue, found = exchange._queue, dict[int, list[int]]()
    count = queue.watch.count

    def hear(peers: Any, headers: Any, slots: Any, at: int) -> None:
        late = [slot for slot, h in zip(slots, headers, strict=True) if h.late]
        assert found.setdefault(at, late) == late
        count(peers, headers, slots, at)

    queue.watch.count = hear
    return found


def late_only(exchange: Any, *steps: int) -> None:
    """Let this island be late for the exchanges of these steps alone, however slow the machine."""
    rounds = exchange._runtime.backup.rounds
    decide = rounds.decide
    rounds.decide = lambda step: step in steps and decide(step)


def trained(me: Any, method: ExchangeConfig, late: dict[int, int], steps: int = STEPS) -> Any:
    """Train; island late[t] is late for the exchange of step t."""
    w, optimizer, exchange = attached(me, method)
    told, seen = noted(exchange), []
    for t in range(steps):
        if late.get(t) == me.island:
            until_passed(exchange)
        exchange.report(tokens=tokens(me.island, t))
        w.grad = gradient(me.island, t)
        optimizer.step()
        seen.append(w.detach().clone())
    metrics = exchange.metrics()
    exchange.finish()
    return told, seen, w.detach().clone(), exchange.digests_equal(), metrics["late"]


class Simulated:
    """The same on plain tensors: `theta[r]` of each island, what it has `left`, one anchor."""

    def __init__(
        self, islands: int, by_tokens: bool, rounds: bool, lr: float = 0.7, mu: float = 0.9
    ):
        self.theta, self.left = ([torch.zeros(SIZE) for _ in range(islands)] for _ in range(2))
        self.anchor, self.momentum = torch.zeros(SIZE), torch.zeros(SIZE)
        self.rounds = rounds
        self.weight = [0.0] * islands
        self.by_tokens, self.lr, self.mu = by_tokens, lr, mu

    def step(self, t: int) -> None:
        for r, theta in enumerate(self.theta):
            theta.sub_(gradient(r, t))
            self.weight[r] += tokens(r, t)

    def sent(self, r: int) -> torch.Tensor:
        delta = self.anchor - self.theta[r]
        if not self.rounds:
            return delta
        self.left[r].add_(delta)
        coded = round_trip("int4", self.left[r].view(-1), 3).view(SIZE)
        self.left[r].sub_(coded)
        return coded

    def exchange(self, late: list[int], plain: bool = False) -> None:
        here = [r for r in range(len(self.theta)) if r not in late]
        w = {r: self.weight[r] if self.by_tokens else 1.0 for r in here}
        mean = torch.zeros(SIZE)
        for r in here:
            mean.add_(self.sent(r), alpha=w[r])
        mean.div_(sum(w.values()))
        kept = {r: self.anchor - self.theta[r] for r in late}
        if plain:
            self.anchor.sub_(mean)
        else:
            self.momentum.mul_(self.mu).add_(mean)
            self.anchor.sub_(mean.add_(self.momentum, alpha=self.mu), alpha=self.lr)
        for r in range(len(self.theta)):
            self.theta[r] = self.anchor - kept[r] if r in late else self.anchor.clone()
            if r not in late:
                self.weight[r] = 0.0


def simulated(told: dict[int, list[int]], method: ExchangeConfig, steps: int) -> Any:
    """Every island's parameters after each step, and those at the end."""
    (channel,), seen = method.channels, []
    sim = Simulated(3, channel.reducer.weight == "tokens", channel.feedback != "none")
    for t in range(steps):
        sim.step(t)
        if (t + 1) % PERIOD == 0:
            sim.exchange(told[t])
        seen.append([theta.clone() for theta in sim.theta])
    if steps % PERIOD or told[steps - 1]:
        if not steps % PERIOD:  # nobody but the late ones has trained since
            sim.by_tokens = False
        sim.exchange([], plain=True)
    return seen, sim.anchor


LATE = {3: 1, 11: 2}
ALL = {
    "equal": (config(), LATE, STEPS),
    "tokens": (config(weight="tokens"), LATE, STEPS),
    "int4": (config("int4"), LATE, STEPS),
    "equal, the last": (config(), {7: 1}, 8),
    "tokens, the last": (config(weight="tokens"), {7: 1}, 8),
    "int4, the last": (config("int4"), {7: 1}, 8),
    "two in a row": (config(late_rounds=2), {7: 1, 11: 1}, STEPS),
}
QUICK = ("int4", "tokens, the last")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in QUICK else pytest.mark.slow) for c in ALL]
)
def test_backup_islands_as_simulated(run_ranks, case: str) -> None:
    """Three islands of which one is late in given rounds hold the parameters of a simulation bit
    by bit, after every step and at the end; also where it is late for the last exchange.
    """
    method, late, steps = ALL[case]
    found = run_ranks(trained, 3, 1, env=ENV, args=(method, late, steps))
    told = found[0][0]
    assert all(f[0] == told for f in found) and all(told[t] == [r] for t, r in late.items())
    seen, end = simulated(told, method, steps)
    for r, (_, values, last, equal, count) in enumerate(found):
        for t, value in enumerate(values):
            assert torch.equal(value, seen[t][r]), (r, t)
        assert equal and torch.equal(last, end) and count == sum(map(len, told.values()))


@pytest.mark.parametrize("procs", [2, [1, 2]])
@in_ranks(2, 2, env=ENV)
def test_backup_islands_ranks_pass_together(me: Any, procs: Any) -> Any:
    """Two ranks of one island, whose weight is cut between them, or of which one is a copy without
    peers, pass an exchange together, and islands end with one model.
    """
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64, bias=False)
    if procs == 2:
        fully_shard(model, mesh=me.mesh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exchange = fsdp_demo.attach(optimizer, config(), model=model)
    assert (exchange.peers is None) == (procs != 2 and me.proc == 1)
    for t in range(10):
        if me.island == 1 and t == 3:
            until_passed(exchange) if exchange.peers is not None else None
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(100 * t + me.island))
        step(optimizer, (model(x) - x).square().mean())
    assert exchange.island.max(exchange.metrics()["late"]) == [1.0]
    exchange.finish()
    whole = model.weight.full_tensor() if procs == 2 else model.weight
    return whole.detach(), exchange.digests_equal()


# ---- an island that is late, and what else may happen to it --------------------------------------

GRADIENTS = (16.0, 32.0, 64.0)  # of each island, in every step: sums that fp32 holds exactly
OTHERS = (16.0, 64.0)
VICTIM, AT = 1, 6  # passes the exchange of step 7, and hears of its end in step 6


def by_hand(weight: str = "equal") -> ExchangeConfig:
    """The anchor less the mean delta."""
    outer = Applier("outer_step", lr=1.0)
    reducer = Reducer(weight=weight)
    channel = Channel("delta", "delta", SyncSchedule(PERIOD), reducer=reducer, applier=outer)
    return ExchangeConfig("made", (channel,), backup_islands=1)


def ending(me: Any, how: str, weight: str = "equal") -> Any:
    """The victim ends while it is late: `how` says by which signal."""
    w, optimizer, exchange = attached(me, by_hand(weight))
    told = noted(exchange)
    late_only(exchange, *([7] if me.island == VICTIM else []))
    with fsdp_demo.guard(exchange):
        for t in range(14):
            if me.island == VICTIM and t == AT:
                until_passed(exchange)
                os.kill(os.getpid(), getattr(signal, how))
            exchange.report(tokens=8)
            step(optimizer, (w * GRADIENTS[me.island]).sum())
        exchange.finish()
    return told, w.detach().clone(), exchange.digests_equal()


@pytest.mark.parametrize(
    ("how", "weight"),
    [
        ("SIGTERM", "equal"),
        ("SIGKILL", "equal"),
        pytest.param("SIGTERM", "tokens", marks=pytest.mark.slow),
    ],
)
def test_backup_islands_late_one_ends(run_ranks, how: str, weight: str) -> None:
    """An island that is told to end while it is late sends what it has ahead, and the others count
    it in the exchange behind the one that it passed; one that is killed is missing from then on.
    """
    found = run_ranks(ending, 3, 1, env=ENV, args=(how, weight), check=False, grace=60.0)
    assert found[VICTIM].status == (75 if how == "SIGTERM" else -signal.SIGKILL), found[VICTIM].log
    one, two = found[0].value, found[2].value
    assert one and two, [f.log for f in found]
    assert one[0] == two[0] and one[2] and torch.equal(one[1], two[1])
    assert one[0][7] == [VICTIM] or (how, one[0][7]) == ("SIGKILL", [])  # it died with its pass
    share = 0.75 * (how == "SIGTERM")  # three of four steps
    rounds = [4 * sum(GRADIENTS) / 3, 2 * sum(OTHERS), (4 * sum(OTHERS) + share * 96) / (2 + share)]
    assert torch.allclose(one[1], torch.full(SIZE, -sum(rounds) - sum(OTHERS)), rtol=1e-6, atol=0)


def stopped(me: Any, folder: Path, how: str, steps: int = STEPS) -> Any:
    """Train until all islands end while one is late, each with its state; `how` "goes on": from
    those states to the end.

    Args:
        how: "told": all are told to end, the late one in the step before it comes to the exchange,
            the others in the step behind it. "killed": all are, and hold what they were after six
            steps, the late one when it had passed. "behind": they hold what they were right behind
            the exchange. steps: of the run.
    """
    mine, over = folder / f"state{me.island}", folder / "over"
    w, optimizer, exchange = attached(me, config(), mine if how == "goes on" else None)
    told, victim = noted(exchange), me.island == VICTIM
    late_only(exchange, *([7] if victim and how != "goes on" else []))

    def save() -> None:
        torch.save((w.detach().clone(), exchange.state_dict()), mine)

    with fsdp_demo.guard(exchange, save=save):
        while (t := exchange.step) < steps:
            if t == AT and victim and how != "goes on":
                until_passed(exchange)
            if (how, t) == ("told", AT if victim else 8):
                os.kill(os.getpid(), signal.SIGTERM)
            if (how, t) in (("killed", AT), ("behind", 8)):
                save()
            if how == "behind" and t == 8:
                me.meet("saved")
                os._exit(9)
            if how == "killed" and t == (AT if victim else 8):
                over.touch() if victim else waits_for(over)
                os._exit(9)
            exchange.report(tokens=tokens(me.island, t))
            w.grad = gradient(me.island, t)
            optimizer.step()
        exchange.finish()
    return told, w.detach().clone(), exchange.digests_equal()


def waits_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


@pytest.mark.parametrize("how", ["told", pytest.param("killed", marks=pytest.mark.slow)])
def test_backup_islands_all_end_and_go_on(run_ranks, tmp_path: Path, how: str) -> None:
    """All islands end while one is late, and go on to the bits of a run that never ended."""
    found = run_ranks(stopped, 3, 1, env=ENV, args=(tmp_path, how), check=False, grace=60.0)
    assert [f.status for f in found] == [75 if how == "told" else 9] * 3, [f.log for f in found]
    steps = [torch.load(tmp_path / f"state{i}")[1]["step"] for i in range(3)]
    assert steps == ([9, 8, 9] if how == "told" else [6, 6, 6])
    found = run_ranks(stopped, 3, 1, env=ENV, args=(tmp_path, "goes on"))
    rest: dict[int, list[int]] = {t: [] for t in (7, 11, 15, STEPS) if t > 7 or how == "killed"}
    assert all(f[0] == rest and f[2] for f in found)
    _, end = simulated({3: [], 7: [VICTIM]} | rest, config(), STEPS)
    assert all(torch.equal(f[1], end) for f in found)


@pytest.mark.slow
def test_backup_islands_resume_to_finish(run_ranks, tmp_path: Path) -> None:
    """Islands that end right behind the last exchange, for which one was late, are resumed and
    finish: what it has trained still counts.
    """
    found = run_ranks(stopped, 3, 1, env=ENV, args=(tmp_path, "behind"), check=False, grace=60.0)
    assert [f.status for f in found] == [9] * 3, [f.log for f in found]
    found = run_ranks(stopped, 3, 1, env=ENV, args=(tmp_path, "goes on", 8))
    _, end = simulated({3: [], 7: [VICTIM]}, config(), 8)
    assert all(f[0] == {8: []} and f[2] and torch.equal(f[1], end) for f in found)


def grown(me: Any, folder: Path) -> Any:
    """Island 3 joins while island 1 is late for every other exchange; then all train some more."""
    begun, end, told = folder / "begun", folder / "end", dict[int, list[int]]()
    count = watch.Watch.count

    def hear(self: Any, peers: Any, headers: Any, slots: Any, at: int) -> None:
        told[at] = [slot for slot, h in zip(slots, headers, strict=True) if h.late]
        count(self, peers, headers, slots, at)

    watch.Watch.count = hear
    if me.island == 3:
        waits_for(begun)
    w, optimizer, exchange = attached(me, config())
    late_only(exchange, *(range(7, 10**6, 2 * PERIOD) if me.island == VICTIM else []))
    first = exchange.step
    while not end.exists() or exchange.step < int(end.read_text()):
        t = exchange.step
        if me.island == VICTIM and t % (2 * PERIOD) == 7:
            until_passed(exchange)
        w.grad = gradient(me.island, t)
        optimizer.step()
        if t == 16:
            begun.touch()
        if me.island == 0 and not end.exists() and exchange.peers.slots == (0, 1, 2, 3):
            (folder / "part").write_text(str(exchange.step + 14))
            (folder / "part").rename(end)
    exchange.finish()
    return first, told, w.detach().clone(), exchange.digests_equal()


def test_backup_islands_newcomer_while_one_is_late(run_ranks, tmp_path: Path) -> None:
    """An island joins while another one is late again and again, and ends with the others' bits."""
    env = {**ENV, "ISLAND_COUNT": "3", "ISLAND_SLOTS": "4"}
    found = run_ranks(grown, 4, 1, timeout=120, env=env, args=(tmp_path,))
    first, told = found[3][:2]
    assert first > 0 and all(f[3] and torch.equal(f[2], found[0][2]) for f in found)
    assert all(f[1][t] == late for f in found[:3] for t, late in told.items())
    assert [VICTIM] in told.values() and all(late in ([], [VICTIM]) for late in told.values())


# ---- what is refused, and what a pass is to others ----------------------------------------------

WRONG = {
    "demo": ("source 'gradient'", "sync_every=1"),
    "full": ("source 'gradient'",),
    "local_sgd": ("applier.acts_as='replace'",),
    "desloc": ("applier.acts_as='replace'",),
    "local_adam": ("applier.acts_as='replace'",),
    "streaming_diloco": ("mix=0.5", "delay=5"),
}


@pytest.mark.parametrize("name", WRONG)
def test_backup_islands_presets_refused(name: str) -> None:
    """Presets under which the work of a late island would be lost, or nobody waits, are refused."""
    refusal(lambda: preset(name, backup_islands=1), "backup_islands=1", *WRONG[name])


def test_backup_islands_bad_settings_refused() -> None:
    """Settings that cannot be right are refused with what is allowed."""
    refusal(lambda: preset("diloco", backup_islands=-1), "backup_islands=-1", "0")
    refusal(lambda: preset("diloco", late_rounds=0), "late_rounds=0", "1")
    released = {"rule": "released", "backup_islands": 1}
    refusal(lambda: preset("decoupled_momentum", **released), "feedback='put_back'")
    delayed = {"schedule.delay": 2, "backup_islands": 1}
    refusal(lambda: preset("diloco", **delayed), "delay=2")
    refusal(lambda: preset("diloco", backup_islands=1, norm_limit=3.0), "norm_limit >= 4")
    together = {"backup_islands": 1, "clip": 1.0, "clip_scope": "islands"}
    refusal(lambda: preset("diloco", **together), "use clip_scope='replica'")
    for name in ("diloco", "muloco", "sign_muloco", "sparse_loco", "sign_loco"):
        assert preset(name, backup_islands=1).backup_islands == 1
    assert preset("diloco").backup_islands == 0


def test_backup_islands_where_all_must_stay() -> None:
    """In a mesh, and where as many islands must be left as there are, none may be late."""
    at = {"ISLAND_COUNT": "3", "ISLAND_RANK": "0", "ISLAND_ENDPOINT": "127.0.0.1:1"}
    three = fsdp_demo.Topology.from_env({**at, "ISLAND_MIN": "3"})
    model = torch.nn.Linear(2, 2)
    for topology in (three, fsdp_demo.Topology("mesh", 0, 2)):
        optimizer = torch.optim.AdamW(model.parameters())
        method = preset("diloco", backup_islands=1)
        attach = partial(fsdp_demo.attach, optimizer, method, topology=topology)
        refusal(attach, "In a mesh, and with ISLAND_MIN as large as ISLAND_COUNT, all must stay")


def test_backup_islands_pass_has_no_share() -> None:
    """A pass has no weight, no norm and no loss: the others are weighed as if they were alone."""
    late, own, new = (Header(0, 7, weight=w) for w in (PASSED, 3.0, -1.0))
    by = {w: config(weight=w).channels[0] for w in ("equal", "tokens")}
    assert message.replica_weights(by["equal"], [own, late, new]) == [1.0, 0.0, 0.0]
    assert message.replica_weights(by["equal"], [late, new]) == [0.0, 1.0]
    assert message.replica_weights(by["tokens"], [own, late]) == [3.0, 0.0]
    counted = replace(own, weight=0.0, flags=COUNTED)
    assert message.replica_weights(by["tokens"], [counted, late]) == [1.0, 0.0]
    norms = watch.Norms(4.0)
    for t in range(6):
        norms.note(["delta"], t, [replace(own, norm=norm_code(1.0)), late])
    twice = replace(own, norm=norm_code(2.5))  # what two rounds have added up to
    far = norms.judged(["delta"], [replace(own, norm=norm_code(1.0)), twice, late])
    assert not any(h.flags & FAR for h in far)
