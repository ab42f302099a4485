"""Islands that do not do the same: an error on both sides, at once, that says what each of them
does; and never status 75.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fsdp_demo
from fsdp_demo import ExchangeConfig, Mismatch, Topology, preset

from ..support import threaded
from ..support.inside import in_ranks
from ..support.small import Small, same
from ..support.threaded import values

CONFIGS = {
    "demo": preset("demo"),
    "demo, late": preset("demo", **{"schedule.delay": 2}),
    "full": preset("full"),
    "random": preset("random", inner_optimizer="adamw"),
    "diloco": preset("diloco", period=2, inner_optimizers="as_is"),
    "consensus": preset("decoupled_momentum", period=2, inner_optimizers="as_is"),
    "released": preset("decoupled_momentum", rule="released", period=2, inner_optimizers="as_is"),
    "streaming_diloco": preset(
        "streaming_diloco", period=2, delay=1, layers=0, inner_optimizers="as_is"
    ),
    "local_sgd": preset("local_sgd", period=2),
    "desloc": preset("desloc", period=2),
}


def both(config: ExchangeConfig, acts: Callable[[int, Small], Any]) -> list[str]:
    """What the two islands' errors say when `acts` has led them apart."""

    def island(i: int, topology: Topology) -> Any:
        small = Small(topology, config)
        try:
            acts(i, small)
        except RuntimeError as error:
            assert type(error) is Mismatch, error
            return str(error)
        finally:
            small.exchange.detach()
        raise AssertionError("not noticed")

    return values(threaded.islands(island, timeout=20))  # nobody waits so long: the test would


@pytest.mark.parametrize("name", CONFIGS)
@in_ranks(1, 1)
def test_out_of_step_early_finish(name: str) -> None:
    """An island that finishes earlier than the other causes an error on both sides. Four steps
    here, six there: the likeliest mistake of a loop over unequal data.
    """

    def acts(i: int, small: Small) -> None:
        small.train(6 if i else 4)
        small.exchange.finish()

    ended, goes_on = both(CONFIGS[name], acts)
    now = 5 if CONFIGS[name].channels[0].before_step else 6
    assert f"island 1 (island1) is at step {now}, we finished at step 4" in ended, ended
    assert f"island 0 (island0) finished at step 4, we are at step {now}" in goes_on, goes_on
    for text in (ended, goes_on):
        assert "same number of steps" in text and "skip()" in text
        assert "request_stop(together=True)" in text


def evaluates(small: Small) -> None:
    with small.exchange.outer_parameters(torch.nn.Linear(1, 1)):
        pass


def asks(small: Small) -> None:
    small.exchange.across_islands.all_equal("eval")


def compares(small: Small) -> None:
    small.exchange.digests_equal()


def trains(small: Small) -> None:
    pass


DIGEST = "a digest of parameters"


def behind(step: int) -> tuple[str, str]:
    """What the errors say where island 1 stands at step 4, and island 0 at this one."""
    one = f"island 1 (island1) is at step 4, we are at step {step}"
    return one, f"island 0 (island0) is at step {step}, we are at step 4"


# what the islands do at step 4, before they train on
CALLS = [
    ("local_sgd", trains, evaluates, *behind(6)),
    ("released", trains, evaluates, *behind(6)),
    ("diloco", trains, compares, *behind(6)),
    ("demo", trains, compares, *behind(5)),
    ("full", trains, compares, *behind(5)),
    ("diloco", asks, compares, f"{DIGEST} came from there, a question was expected",
        f"a question came from there, {DIGEST} was expected"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "here", "there", "said", "said_there"), CALLS)
@in_ranks(1, 1)
def test_out_of_step_unlike_calls(name: str, here, there, said: str, said_there: str) -> None:
    """A call of one island alone, or unlike calls at one step, cause an error on both sides that
    says what the other one does.
    """

    def acts(i: int, small: Small) -> None:
        small.train(4)
        (there if i else here)(small)
        small.train(8)

    one, two = both(CONFIGS[name], acts)
    assert said in one and said_there in two, (one, two)


@pytest.mark.parametrize(
    ("name", "steps"), [("demo", (4, 5)), ("full", (4, 5)), ("diloco", (4, 6))]
)
@in_ranks(1, 1)
def test_out_of_step_dropped_step(name: str, steps: tuple[int, int]) -> None:
    """A step that one loop drops causes an error that names `skip()`; gradients that are exchanged
    move no parameter.
    """

    def acts(i: int, small: Small) -> None:
        small.train(3)
        small.exchange._runtime.go_to(small.exchange.step + i)
        before = small.save()[0]
        try:
            small.train(8)
        finally:
            assert name == "diloco" or same(before, small.save()[0])

    here, there = both(CONFIGS[name], acts)
    assert f"island 1 (island1) is at step {steps[1]}, we are at step {steps[0]}" in here
    assert "skip()" in here and "skip()" in there


def test_out_of_step_guard_exits_78(run_ranks: Callable[..., Any]) -> None:
    """`guard` ends with status 78, not 75, where islands are out of step."""

    def run(me: Any) -> None:
        logging.basicConfig(level=logging.INFO, force=True)
        small = Small(Topology.from_env(), CONFIGS["diloco"])
        with fsdp_demo.guard(small.exchange, lambda: None, resume="python job.py --resume"):
            small.train(6 if me.island else 4)
            small.exchange.finish()

    outcomes = run_ranks(run, 2, 1, check=False)
    assert [o.status for o in outcomes] == [78, 78]
    assert all("for the steps of the others see fsdp-demo inspect" in o.log for o in outcomes)
    assert "once that is mended" in outcomes[0].log and "finished at step 4" in outcomes[1].log
