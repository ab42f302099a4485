"""Channels that exchange where the gradient of an island has changed: the meter against the
released rule, one decision on all islands, what is saved and known to newcomers, stops, the range
of plans, and what is refused.
"""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

import fsdp_demo
from fsdp_demo import Link, preset
from fsdp_demo.exchange import leaving
from fsdp_demo.exchange.on_change import CHECK, ChangeMeter
from fsdp_demo.exchange.plan import plan_model
from fsdp_demo.peers.header import HEADER
from fsdp_demo.tools.planner import Situation, load
from fsdp_demo.tools.planner.rows import plan_row
from fsdp_demo.tools.planner.show import notes

from ..oracles.averaging import SelSyncMeter
from ..support.inside import in_threads
from ..support.refused import refusal

EVERY = 4
SHAPE = (6, 3)


def config(**changes: Any) -> Any:
    """Checks every 4 steps, known after 4 steps."""
    given = {"check_every": EVERY, "window": 2, "delta": 0.2, "at_most": 0, "clip": None}
    return preset("sel_sync", **{**given, **changes})


class Run:
    """One island with a gradient that is given: ones times a factor, that of its island.

    Attributes:
        exchanged: the steps, from 0, after which a payload had left.
    """

    def __init__(self, topology: Any, made: Any, state: Any = None):
        self.island, self.exchanged = topology.island, list[int]()
        start = torch.zeros(SHAPE) if state is None else state[0]
        self.weight = torch.nn.Parameter(start.clone())
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1)
        self.exchange = fsdp_demo.attach(
            self.optimizer, made, topology=topology, state=None if state is None else state[1]
        )

    def train(self, stop: int, jumps: dict[int, int]) -> None:
        """To step `stop`; jumps: island -> the step from which its gradient is three times as
        large, and grows on for two more.
        """
        while (t := self.exchange.step) < stop:
            late = t - jumps.get(self.island, 1 << 30)
            factor = 1.0 + self.island + (3.0 ** min(late + 1, 3) if late >= 0 else 0.0)
            self.weight.grad = torch.full(SHAPE, factor)
            before = self.exchange.metrics()["exchanges"]
            self.optimizer.step()
            if self.exchange.metrics()["exchanges"] > before:
                self.exchanged.append(t)

    def saved(self) -> Any:
        return self.weight.detach().clone(), self.exchange.state_dict()


# ---- the meter ----------------------------------------------------------------------------------


def meter(window: int = 25, delta: float = 0.3) -> ChangeMeter:
    return ChangeMeter(preset("sel_sync", check_every=1, window=window, delta=delta).channels)


def heard(one: ChangeMeter, norm: float) -> None:
    one._unread.append(torch.tensor(norm, dtype=torch.float64))


@pytest.mark.parametrize("seed", range(3))
def test_change_meter_equals_release(seed: int) -> None:
    """On the same norms decisions are the release's at its published settings, from the step on in
    which it divides by no norm of zero any more; before, and while nothing is known, it is yes.
    """
    draw, mine, theirs = random.Random(seed), meter(), SelSyncMeter(25)
    said, scale = [], 1.0
    for t in range(600):
        scale *= draw.choice((1.0, 1.0, 1.0, 1.5, 0.7)) if t % 100 > 60 else 1.0
        norms = [scale * draw.lognormvariate(0, 4.0 if t % 150 > 100 else 0.2) for _ in range(5)]
        theirs.hear(norms)
        heard(mine, sum(norms))
        said.append(mine.wants(0))
        wanted = theirs.change >= 0.3
        assert said[-1] == (wanted or t < 49), t
        assert t < 49 or math.isfinite(theirs.change)
    assert 50 < sum(said[50:]) < 500  # both happen, often


def test_change_meter_check_looks_back() -> None:
    """A change between two checks counts at the next one, once; bad norms count as no step."""
    one = meter(window=2, delta=0.5)
    for norm in (1.0, 1.0, 1.0, 1.0, 1.0):
        heard(one, norm)
    assert one.wants(0) and not one.wants(0)
    for norm in (9.0, 9.0, 9.0, 9.0, 9.0, math.nan, math.inf, 0.0):
        heard(one, norm)
    assert one.wants(0) and not one.wants(0)
    kept = one.state()
    other = meter(window=2, delta=0.5)
    assert other.wants(0)  # nothing is known
    other.load(kept)
    assert other.state() == kept and not other.wants(0)
    assert other.wants(256) and not other.wants(255)  # at_most


# ---- one decision -------------------------------------------------------------------------------


@in_threads(3)
def test_on_change_one_decision(topology: Any) -> None:
    """The change of one island lets all exchange, at the same steps; the bytes are those of the
    plan: a check each time, a payload where one was decided.
    """
    made = config()
    run = Run(topology, made)
    run.train(32, {1: 17})
    assert run.exchanged == [3, 19, 23]  # in steps 18 to 20 it grows
    assert run.exchange.applied == {"parameter": 31}  # the last check
    assert run.exchange.next_exchange() == 35
    (plan,) = plan_model(made, [("weight", SHAPE)], 3, rank=topology.island)
    payload = plan.message(3).bytes_sent - plan.check().bytes_sent
    assert plan.check().bytes_sent == 2 * (HEADER.size + CHECK)
    seen = run.exchange.metrics()
    assert seen["bytes_sent"] == 3 * payload + 8 * plan.check().bytes_sent
    assert seen["messages"] == 3 * (plan.message(3).messages - 1) + 8
    assert seen["bytes_sent"] <= plan.over(range(32)).bytes_sent
    apart = run.weight.detach().clone()
    run.exchange.finish()
    assert not torch.equal(apart, run.weight) and run.exchange.digests_equal()


@in_threads(2)
def test_on_change_at_most(topology: Any) -> None:
    """Where nothing changes all exchange after `at_most` steps; skipped steps are not measured."""
    run = Run(topology, config(at_most=12))
    run.train(20, {})
    run.exchange.skip()
    run.train(32, {})
    assert run.exchanged == [3, 15, 27]


@in_threads(2)
def test_on_change_stop_needs_no_change(topology: Any) -> None:
    """Who asks all to stop gets an exchange at the next check, and all stop with it."""
    run = Run(topology, config())
    run.exchange.raise_stopped(False)
    run.train(9, {})
    if topology.island == 1:
        run.exchange.request_stop(together=True)
    while not run.exchange.stopped:
        run.train(run.exchange.step + 1, {})
    assert run.exchange.step == 12 and run.exchanged == [3, 11]
    assert run.exchange.digests_equal()


@in_threads(2)
def test_on_change_next_payload_is_not_known(topology: Any) -> None:
    """The next step in which a payload may leave is the next check: no part of it goes ahead, and
    the Trainer knows no step whose checkpoint holds the mean.
    """
    checks = pytest.importorskip("fsdp_demo.integrations.trainer.evaluation")
    run = Run(topology, config())
    run.train(6, {})
    assert leaving.coming(run.exchange._runtime) == (7, [])
    refusal(lambda: checks.check_best(run.exchange, range(8, 9)), "at_end=False")
    run.train(8, {})


@pytest.mark.parametrize("cut", [5, 16, 18])
@in_threads(2)
def test_on_change_resumes(topology: Any, cut: int) -> None:
    """A run that is saved and resumed decides as one that goes on, also where the gradient has
    changed since the last check; one of the islands may have lost what it has measured, and does
    not know for a window.
    """
    jumps = {1: 17}
    whole = Run(topology, config())
    whole.train(cut, jumps)
    kept = whole.saved()
    whole.train(28, jumps)
    if topology.island == 0:
        kept[1].pop("changes")
    whole.exchange.detach()
    again = Run(topology, config(), kept)
    again.train(28, jumps)
    assert again.exchanged == {5: [7, 19, 23]}.get(cut, [19, 23])
    assert whole.exchanged == [3, 19, 23]
    assert torch.equal(again.weight, whole.weight) or cut == 5


# ---- plans --------------------------------------------------------------------------------------


def test_on_change_plan_is_a_range() -> None:
    """The plan counts every check as an exchange, and at the least one after `at_most` steps."""
    made, s = preset("sel_sync"), Situation(load("tiny"), 3, Link(1e8, 0.04), 0.1, device="cpu")
    row, rare = plan_row(s, made), plan_row(s, preset("local_sgd", period=256))
    often = plan_row(s, preset("local_sgd", period=8))
    check = 2 * (HEADER.size + CHECK)
    assert row.bytes_per_step == pytest.approx(often.bytes_per_step + check / 8)
    assert row.least_bytes_per_step == pytest.approx(rare.bytes_per_step + check / 8)
    assert often.least_bytes_per_step == often.bytes_per_step
    assert row.exposed_seconds_per_step > often.exposed_seconds_per_step  # a round trip each time
    assert row.settings == "every 8 to 256, fp32"
    assert "with the fewest 9.6 kB/step" in notes([row]) and "fewest" not in notes([often])
    never = plan_row(s, preset("sel_sync", at_most=0))
    assert never.least_bytes_per_step == pytest.approx(check / 8)
    assert never.settings == "every 8 or more, fp32"


# ---- refused ------------------------------------------------------------------------------------

ON = {"schedule.when": "on_change"}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "delta": ("diloco", ON, "rounds of unlike length"),
    "gradient": ("demo", ON, "rounds of unlike length"),
    "delay": ("sel_sync", {"schedule.delay": 1}, "is one decision of all islands at a step"),
    "offset": ("sel_sync", {"schedule.offset": 1}, "leave these out"),
    "at_most": ("sel_sync", {"at_most": 20}, "make it one, or 0"),
    "by_speed": ("sel_sync", {"local_steps": "by_speed"}, "goes by rounds of one length"),
    "unlike": ("local_adam", {**ON, "period": 8, "exp_avg.schedule.delta": 0.5}, "unlike"),
    "unused": ("local_sgd", {"schedule.window": 5}, "has schedule.when='every'"),
    "name": ("sel_sync", {"schedule.when": "always"}, "allowed are every, on_change"),
    "window": ("sel_sync", {"window": 0}, "schedule.window=0"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_on_change_refusals(name: str) -> None:
    """What a decision does not go with is refused, with the reason."""
    method, changes, says = REFUSED[name]
    assert says in refusal(lambda: preset(method, **changes))


def test_on_change_clipping_is_ours() -> None:
    """A host that clips leaves that to the exchange, which measures norms before."""
    made, left = config().clipped_once(1.0)
    assert made.clip == 1.0 and left == 0.0 and made.needs_gradients
    assert config().needs_gradients and not preset("local_sgd", clip=None).needs_gradients
