"""Islands that take unlike steps in a round: the run against a slow oracle, its clock, what is
saved and known to newcomers, and what is refused. Speeds are given, not measured.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp_demo
from fsdp_demo import ExchangeConfig, preset
from fsdp_demo.config.local_steps import local_steps, takes_step
from fsdp_demo.exchange.pace import Pace

from ..support import threaded
from ..support.heard import heard
from ..support.inside import in_ranks, in_threads
from ..support.refused import refusal

SPEEDS = (1.0, 2.0, 4.0)
"""Seconds of a step, by island."""


def given_speeds(seconds: Sequence[float] = SPEEDS) -> None:
    """Let each island of this process measure these seconds."""
    pytest.MonkeyPatch().setattr(Pace, "seconds", lambda self, device: seconds[self._slot])


def rows(island: int, number: int, seed: int = 0) -> torch.Tensor:
    """The batch of one own step, fp32 [4, 6]."""
    key = 10_000 * seed + 100 * number + island
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(key))


def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(6, 3)
    with torch.no_grad():
        for k, p in enumerate(model.parameters()):
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(k)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


class Run:
    """One island that trains on its own rows, in their order.

    Attributes:
        ticks: the clock ahead of each own step.
    """

    def __init__(self, topology: Any, config: Any, saved: Any = None, **given: Any):
        self.island, self.ticks = topology.island, list[int]()
        self.model, self.optimizer = made()
        state = None
        if saved is not None:
            self.model.load_state_dict(saved[0])
            self.optimizer.load_state_dict(saved[1])
            state = saved[2]
        self.exchange = fsdp_demo.attach(
            self.optimizer, config, model=self.model, topology=topology, state=state, **given
        )

    def train(self, stop: int) -> None:
        while self.exchange.step < stop:
            self.ticks.append(self.exchange.step)
            self.model(rows(self.island, self.exchange.steps_taken)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def saved(self) -> Any:
        model = {n: t.clone() for n, t in self.model.state_dict().items()}
        return model, self.optimizer.state_dict(), self.exchange.state_dict()

    def values(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


def by_hand(rounds: Sequence[Sequence[int]], lr: float, mu: float) -> torch.Tensor:
    """DiLoCo with so many steps of each island in each round, one island after the other: the mean
    of deltas, each weighted by its steps, then Nesterov's step on the anchor.
    """
    islands = [made() for _ in rounds[0]]
    taken = [0] * len(islands)
    anchor = [p.detach().clone() for p in islands[0][0].parameters()]
    momentum = [torch.zeros_like(a) for a in anchor]
    for number, steps in enumerate(rounds):
        deltas = []
        for i, (model, optimizer) in enumerate(islands):
            for _ in range(steps[i]):
                model(rows(i, taken[i])).square().mean().backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                taken[i] += 1
            pairs = zip(anchor, model.parameters(), strict=True)
            deltas.append([a - p.detach() for a, p in pairs])
        mu_now = mu if number else 0.0  # a warm-up of one round
        for k, (a, m) in enumerate(zip(anchor, momentum, strict=True)):
            mean = sum(n * d[k] for n, d in zip(steps, deltas, strict=True)) / sum(steps)
            m.mul_(mu_now).add_(mean)
            a.sub_(lr * (mean + mu_now * m))
            for model, _ in islands:
                list(model.parameters())[k].data.copy_(a)
    return torch.cat([a.flatten() for a in anchor])


# ---- pure ---------------------------------------------------------------------------------------


def test_local_steps_by_hand() -> None:
    """Shares are floored, never 0, full for equal speeds; unknown counts as the slowest."""
    assert local_steps(20, [1.0, 2.0, 4.0]) == [20, 10, 5]
    assert local_steps(20, [1.0, 1.02, 500.0]) == [20, 20, 1]  # nearly equal; far too slow
    assert local_steps(10, [0.0, 1.0, 3.0]) == [3, 10, 3]
    assert local_steps(10, [0.0, 0.0]) == [10, 10] and local_steps(10, []) == []
    assert local_steps(30, [3.0, 2.9, 5.0]) == [29, 30, 17]


@pytest.mark.parametrize("period", [2, 5, 20, 31])
def test_takes_step_counts_and_spreads(period: int) -> None:
    """A round has as many own steps as its share, the first tick among them, no gap is long."""
    for steps in range(1, period + 1):
        own = [t for t in range(period) if takes_step(t, steps, period)]
        assert len(own) == steps and own[0] == 0
        gaps = [b - a for a, b in zip(own, [*own[1:], period], strict=True)]
        assert max(gaps) <= -(-period // steps)


# ---- against the oracle -------------------------------------------------------------------------


@in_threads(3)
def test_local_steps_equal_the_oracle(topology: Any) -> None:
    """Three islands at 1, 1/2 and 1/4 of the speed end where a plain simulation of 8, 4 and 2 steps
    in a round ends, with the deltas weighted by them.
    """
    given_speeds()
    config = preset("diloco", period=8, local_steps="by_speed", momentum_warmup=1)
    run = Run(topology, config)
    run.train(32)
    (channel,) = config.channels
    lr, mu = channel.applier.lr, channel.applier.momentum
    expected = by_hand([(8, 8, 8), (8, 4, 2), (8, 4, 2), (8, 4, 2)], lr, mu)
    assert torch.allclose(run.values(), expected, rtol=0, atol=2e-6)
    far = by_hand([(8, 8, 8)] * 4, lr, mu)
    assert not torch.allclose(run.values(), far, rtol=0, atol=1e-4)  # the shares do act
    own = [(8, 8, 8, 8), (8, 4, 4, 4), (8, 2, 2, 2)][topology.island]
    assert run.exchange.steps_taken == sum(own) and run.exchange.step == 32
    assert run.exchange.local_steps == {0: 8, 1: 4, 2: 2}
    if topology.island == 2:
        assert run.ticks == [*range(8), 8, 12, 16, 20, 24, 28]
    assert run.exchange.metrics()["steps_taken"] == run.exchange.steps_taken
    run.exchange.finish()
    assert run.exchange.digests_equal()


PRESETS = {
    "sparse_loco": {"period": 8},
    "sign_loco": {"period": 8, "switch": 10},
    "decoupled_momentum": {"period": 8},
    "muloco": {"period": 8, "inner_optimizers": "as_is"},
    "local_adam": {"period": 8},
    "desloc": {"period": 4},
    "streaming_diloco": {"period": 8, "layers": 0, "delay": 3},
    "delayed": {"period": 8, "schedule.delay": 3},
}


@pytest.mark.parametrize("name", PRESETS)
@in_threads(3)
def test_local_steps_of_presets(topology: Any, name: str) -> None:
    """Under each preset with a period the islands stand at one clock with the steps of their share,
    and end with one model where the preset promises it.
    """
    given_speeds()
    changes = PRESETS[name] | {"local_steps": "by_speed"}
    config = preset("diloco" if name == "delayed" else name, **changes)
    run = Run(topology, config)
    run.train(32)
    share = min(c.schedule.sync_every for c in config.channels) // 2**topology.island
    assert run.exchange.step == 32 and run.exchange.local_steps[topology.island] == share
    assert run.exchange.steps_taken < 32 or topology.island == 0
    run.exchange.finish()
    assert run.exchange.digests_equal()


@in_threads(2)
def test_local_steps_equal_is_as_before(topology: Any) -> None:
    """Islands that are equally fast leave nothing out, and train as under local_steps=equal."""
    given_speeds((1.0, 1.01))
    ends = []
    for how in ("by_speed", "equal"):
        config = preset("diloco", period=4, local_steps=how, **{"reducer.weight": "tokens"})
        run = Run(topology, config)
        while run.exchange.step < 12:
            run.exchange.report(tokens=4)
            run.train(run.exchange.step + 1)
        run.exchange.finish()
        assert run.exchange.steps_taken == 12
        ends.append(run.values())
    assert torch.equal(*ends)


# ---- the clock ----------------------------------------------------------------------------------


@in_threads(2)
def test_left_out_steps_move_the_schedule(topology: Any) -> None:
    """`on_left_out` is called in each tick that is left out: rates stay equal at every exchange."""
    given_speeds((1.0, 4.0))
    config = preset("diloco", period=8, local_steps="by_speed")
    said, run = heard(logging.INFO), Run(topology, config)
    scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda t: 0.9**t)
    run.exchange.on_left_out(scheduler.step)
    while run.exchange.step < 24:
        run.train(run.exchange.step + 1)
        scheduler.step()
        assert scheduler.last_epoch == run.exchange.step
    run.exchange.finish()
    assert not [text for text in said if "learning rates differ" in text]
    assert "steps of each island in a round of 8: 8, 2" in said


@in_threads(2)
def test_left_out_steps_end_with_the_run(topology: Any) -> None:
    """Where the steps of the run are known it may end within a round: no island leaves out more."""
    given_speeds((1.0, 4.0))
    config = preset("diloco", period=8, local_steps="by_speed")
    run = Run(topology, config, must_match={"steps": 11})
    run.train(11)
    assert run.exchange.step == 11 and run.ticks[-1] == (10, 8)[topology.island]
    run.exchange.finish()
    assert run.exchange.digests_equal()


@in_threads(2)
def test_left_out_steps_follow_a_skip(topology: Any) -> None:
    """A step that is skipped counts as taken in the data, and the ticks behind it are left out."""
    given_speeds((1.0, 4.0))
    run = Run(topology, preset("diloco", period=8, local_steps="by_speed"))
    run.train(8)
    run.exchange.skip()
    assert run.exchange.step == (9, 12)[topology.island] and run.exchange.steps_taken == 9
    run.train(16)
    assert run.exchange.step == 16
    run.exchange.finish()
    assert run.exchange.digests_equal()


@in_threads(2)
def test_local_steps_weigh_reported_tokens(topology: Any) -> None:
    """What a script reports weighs; steps weigh only where nothing is reported."""
    given_speeds((1.0, 2.0))
    run = Run(topology, preset("diloco", period=4, local_steps="by_speed"))
    status = run.exchange._runtime.status
    run.train(4)
    assert status.counted == 4  # what the second message is weighed by comes on top
    while run.exchange.step < 8:
        run.exchange.report(tokens=10)
        run.train(run.exchange.step + 1)
    assert status.counted == 4 + (40, 20)[topology.island]
    run.exchange.finish()


# ---- what is saved, and known to newcomers -------------------------------------------------------

RESUMED = {
    "diloco": {"period": 8},
    "sparse_loco": {"period": 8},
    "delayed": {"period": 8, "schedule.delay": 3},
}


@pytest.mark.parametrize("name", RESUMED)
@in_ranks(1, 1)
def test_local_steps_resume_bit_for_bit(name: str) -> None:
    """Islands that are saved in the midst of a round, at unlike steps, go on from there: shares,
    place in the data and all bits are those of a run that was never interrupted.
    """
    given_speeds()
    changes = RESUMED[name] | {"local_steps": "by_speed"}
    config = preset("diloco" if name == "delayed" else name, **changes)

    def whole(i: int, topology: Any) -> Any:
        run = Run(topology, config)
        run.train(27)
        saved = copy.deepcopy(run.saved())
        run.train(48)
        return saved, run.exchange.steps_taken, run.exchange.local_steps, run.values()

    found = threaded.values(threaded.islands(whole, 3))
    assert [f[0][2]["step"] for f in found] == [27, 28, 28]

    def again(i: int, topology: Any) -> None:
        saved, taken, shares, end = found[i]
        run = Run(topology, config, saved)
        assert run.exchange.step == saved[2]["step"]
        assert run.exchange.local_steps == {0: 8, 1: 4, 2: 2}
        run.train(48)
        assert (run.exchange.steps_taken, run.exchange.local_steps) == (taken, shares)
        assert torch.equal(run.values(), end)
        run.exchange.finish()

    threaded.values(threaded.islands(again, 3))


def working(config: ExchangeConfig, slot: int) -> Pace:
    """The pace of an island under this method."""
    pace = Pace(slot)
    pace.work_with(config)
    return pace


def test_pace_state_of_other_settings() -> None:
    """Shares begin anew under equal steps; the place in the data stays. Strangers are slow."""
    by_speed, equal = preset("diloco", period=8, local_steps="by_speed"), preset("diloco", period=8)
    pace = working(by_speed, 1)
    pace.load({"left_out": 5, "shares": [[0, 8], [1, 3]], "coming": []})
    assert (pace.steps, pace.left_out, pace.leaves_out(1)) == (3, 5, True)
    begun = {"left_out": 0, "seconds": [], "shares": [], "coming": []}
    assert working(by_speed, 7).state() == begun
    measured = working(by_speed, 1)  # with one step in a round it has measured none yet
    measured.load(begun | {"seconds": [0.25]})
    assert measured.seconds(torch.device("cpu")) == pytest.approx(0.25, abs=0.1)
    other = working(equal, 1)
    other.load(pace.state())
    assert (other.left_out, other.shares, other.leaves_out(1)) == (5, {}, False)
    pace.load({})
    assert (pace.steps, pace.left_out) == (8, 0)
    stranger = working(by_speed, 2)  # a newcomer is as slow as the slowest
    stranger.load({"shares": [[0, 8], [1, 3]]})
    assert stranger.steps == 3


def joined(me: Any) -> Any:
    """Train two islands of three until the third has come, and two rounds longer."""
    given_speeds((1.0, 2.0, 1.0))
    begun, end = me.folder / "begun", me.folder / "end"
    while me.island == 2 and not begun.exists():
        time.sleep(0.02)
    topology = fsdp_demo.Topology.from_env()
    run = Run(topology, preset("diloco", period=6, local_steps="by_speed"))
    first, share = run.exchange.step, run.exchange._runtime.pace.steps
    assert run.exchange.steps_taken == 0
    while not end.exists() or run.exchange.step < int(end.read_text()):
        run.train(run.exchange.step + 1)
        if run.exchange.step == 18:
            begun.touch()
        if me.island == 0 and not end.exists():
            time.sleep(0.02)
            if run.exchange.peers.slots == (0, 1, 2):
                part = me.folder / "part"
                part.write_text(str(run.exchange.step // 6 * 6 + 24))
                part.rename(end)
    exchange = run.exchange
    exchange.finish()
    assert exchange.steps_taken == len(run.ticks)
    return first, share, exchange.local_steps, exchange.digests_equal(), exchange.step, run.values()


def test_local_steps_newcomer_joins(run_ranks: Any) -> None:
    """A third island that joins begins with its first rows, and takes as many steps as the slowest
    until an exchange has told how fast it is; all end at one step with one model.
    """

    def env(me: Any) -> dict[str, str]:
        return dict(ISLAND_MIN="2", ISLAND_TIMEOUT="40" if me.island == 2 else "5")

    found = run_ranks(joined, 3, 1, timeout=120, env=env)
    assert found[2][0] >= 18 and found[2][1] == 3  # where islands 0 and 1 take 6 and 3
    for _, _, shares, equal, step, values in found:
        assert shares == {0: 6, 1: 3, 2: 6} and equal and step == found[0][4]
        assert torch.equal(values, found[0][5])


@in_ranks(1, 1)
def test_local_steps_place_of_who_is_behind() -> None:
    """An island that takes over from others goes on behind the rows that it has trained on itself,
    from a state of before, and from its first row without one. Under equal steps it stands where
    the others do.
    """
    given_speeds((1.0, 2.0, 1.0))

    def begun(i: int, topology: Any, how: str, saved: Any, until: int) -> Any:
        run = Run(topology, preset("diloco", period=4, local_steps=how), saved)
        place = run.exchange.step, run.exchange.steps_taken
        run.train(min(until, 9) if i == 1 else until)
        kept = copy.deepcopy(run.saved())
        run.train(until)
        run.exchange.detach()
        return place, kept

    for how, places in {"by_speed": (4 + 2 + 1, 0), "equal": (16, 16)}.items():
        first = threaded.values(
            threaded.islands(lambda i, at, how=how: begun(i, at, how, None, 16), 3)
        )
        saved = [first[0][1], first[1][1], None]
        again = threaded.values(
            threaded.islands(lambda i, at, how=how, saved=saved: begun(i, at, how, saved[i], 20), 3)
        )
        assert [at for (at, _), _ in again] == [16, 16, 16]
        assert [taken for (_, taken), _ in again] == [16, *places]


@in_ranks(2, 2)
def test_local_steps_by_measured_speed(me: Any) -> None:
    """Islands of two ranks measure their steps themselves; one that sleeps takes fewer of them, and
    its ranks agree on how many.
    """
    config = preset("diloco", period=8, local_steps="by_speed")
    run = Run(fsdp_demo.Topology.from_env(), config)
    while run.exchange.step < 24:
        time.sleep(0.2 if me.island else 0.02)
        run.train(run.exchange.step + 1)
    shares = run.exchange.local_steps
    assert shares[0] == 8 > shares[1] >= 1 and run.exchange.step == 24
    run.exchange.finish()
    assert run.exchange.digests_equal()
    return shares


# ---- what is refused -----------------------------------------------------------------------------

WRONG = {
    "demo": ({}, "DropCompute: exchange.time_is_up()"),
    "full": ({}, "exchanges gradient in every step"),
    "diloco": ({"clip_scope": "islands"}, "clip_scope='islands' asks for them in every step"),
    "sparse_loco": ({"reducer.weight": "equal"}, "set reducer.weight=tokens"),
    "local_sgd": ({"period": 1}, "in every step"),
    "diloco-drop": (
        {"drop": {"limit": "auto", "divisor": "exact"}},
        "drop.limit='auto' compares islands",
    ),
    "diloco-backup": ({"backup_islands": 1}, "backup_islands=1 beside local_steps='by_speed'"),
    "auto": ({}, "it chooses the method and its settings"),
}


@pytest.mark.parametrize("name", WRONG)
def test_local_steps_refused(name: str) -> None:
    """What cannot take unlike steps is refused with a sentence that says what to do."""
    changes, text = WRONG[name]
    name = name.partition("-")[0]
    refusal(lambda: preset(name, local_steps="by_speed", **changes), text)


def test_local_steps_through_yaml(tmp_path: Path) -> None:
    """The key comes through yaml, in both forms, and through `--set`."""
    short, long = tmp_path / "short.yaml", tmp_path / "long.yaml"
    short.write_text("preset: diloco\nperiod: 20\nlocal_steps: by_speed\n")
    config = fsdp_demo.load_config(str(short))
    long.write_text(config.to_yaml())
    assert (
        config
        == fsdp_demo.load_config(str(long))
        == preset("diloco", period=20, local_steps="by_speed")
    )
    assert config == fsdp_demo.load_config("diloco", ["period=20", "local_steps=by_speed"])
    assert config.digest() != preset("diloco", period=20, **{"reducer.weight": "tokens"}).digest()
