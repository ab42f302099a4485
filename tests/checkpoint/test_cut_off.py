"""An exchange that was cut off by a loss: the states saved on the way out, taken up again, give the
run that was never interrupted, bit for bit.

Islands are threads; what is cut off is one of their messages, on its way (`Tap`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fsdp_demo import ExchangeConfig, PeerLost, Topology, preset

from ..support import threaded
from ..support.inside import in_ranks
from ..support.small import Small, same
from ..support.threaded import Tap, values

CONFIGS = {
    "demo": preset("demo"),
    "demo, late": preset("demo", **{"schedule.delay": 2}),
    "full": preset("full"),
    "full, late": preset("full", clip=0.5, **{"schedule.delay": 2}),
    "random": preset("random", inner_optimizer="adamw"),
    "diloco": preset("diloco", period=4, inner_optimizers="as_is"),
    "diloco, int8": preset("diloco", period=4, value_dtype="int8", inner_optimizers="as_is"),
    "diloco, late": preset("diloco", period=4, inner_optimizers="as_is", **{"schedule.delay": 2}),
    "diloco, kept": preset("diloco", period=4, inner_optimizers="as_is",
        **{"schedule.delay": 2, "applier.keep_steps": True}),
    "diloco, queue": preset("diloco", period=2, inner_optimizers="as_is", **{"schedule.delay": 3}),
    "diloco, eager": preset("diloco", period=2, eager=2, inner_optimizers="as_is"),
    "streaming": preset("streaming_diloco", period=3, delay=1, layers=0, inner_optimizers="as_is"),
    "consensus": preset("decoupled_momentum", period=4, inner_optimizers="as_is"),
    "released": preset("decoupled_momentum", rule="released", period=4, inner_optimizers="as_is"),
    "released, averaged": preset("decoupled_momentum", rule="released", period=2, average_every=2,
        inner_optimizers="as_is"),
    "sparse_loco": preset("sparse_loco", period=4, inner_optimizers="as_is"),
    "sign_loco": preset("sign_loco", period=4, momentum_warmup=2, inner_optimizers="as_is"),
    "muloco": preset("muloco", period=4, inner_optimizers="as_is"),
    "local_sgd": preset("local_sgd", period=4),
    "local_sgd, late": preset("local_sgd", period=4, **{"schedule.delay": 2}),
    "desloc": preset("desloc", period=2),
}  # fmt: skip
STEPS = 18


def cut_after(exchange: Any, step: int, sends: int) -> None:
    """Of the messages of step `step` and later `sends` more pieces leave; then the line is dead, on
    this side as on the other.
    """
    left, cut, number = [sends], list[int](), [exchange.peers._next]
    launch = exchange._queue.launch

    def launched(*given: Any, **named: Any) -> Any:
        if exchange.step >= step:
            cut.append(number[0])
        number[0] += 1
        return launch(*given, **named)

    def change(data: torch.Tensor, index: int) -> torch.Tensor:
        if cut and tap.message >= cut[0]:
            left[0] -= 1
            if left[0] < 0:
                raise RuntimeError("Connection closed by peer")
        return data

    exchange._queue.launch = launched
    tap = Tap(exchange, change)


def whole(config: ExchangeConfig) -> list[Any]:
    """What the islands hold after STEPS steps that nothing has interrupted."""

    def island(i: int, topology: Topology) -> Any:
        small = Small(topology, config)
        small.train(STEPS)
        return end_of(small)

    return values(threaded.islands(island))


def left(small: Small) -> Any:
    """What a small run saves on its way out."""
    saved = small.save()
    small.exchange.detach()
    return saved


def end_of(small: Small) -> Any:
    """What a small run holds, but for what is counted anew in every life, and for norms, which are
    those of what has come so far.
    """
    params, optimizer, state = left(small)
    anew = ("in_flight", "digest", "losses", "norms")
    return params, optimizer, {k: v for k, v in state.items() if k not in anew}


def lives(
    config: ExchangeConfig, first: Callable[[int, Small], None], timeout: float = 3.0
) -> tuple[list[int], list[Any]]:
    """Two islands live as `first` says and are saved as `guard` does; then each is taken up again.
    Their steps in between, and what they hold at the end.
    """

    def one(i: int, topology: Topology) -> Any:
        small = Small(topology, config)
        first(i, small)
        return left(small)

    def two(i: int, topology: Topology) -> Any:
        small = Small(topology, config, seed=99, saved=saved[i])
        assert small.exchange.step == saved[i][2]["step"]
        small.train(STEPS)
        return end_of(small)

    saved = values(threaded.islands(one, timeout=timeout))
    return [s[2]["step"] for s in saved], values(threaded.islands(two))


def lost(small: Small, at: int, sends: int) -> None:
    """A line that is cut at step `at` after `sends` messages is noticed."""
    cut_after(small.exchange, at, sends)
    with pytest.raises(PeerLost):
        small.train(STEPS)
    assert small.exchange._queue.broken


@pytest.mark.parametrize("sends", [0, 1])
@pytest.mark.parametrize("name", CONFIGS)
@in_ranks(1, 1, timeout=100)
def test_cut_off_resume_bit_for_bit(name: str, sends: int) -> None:
    """A resume makes up for an exchange that was cut off, bit for bit. Cut in the middle of a
    message: before anything left, or after one of the two islands' first messages.
    """
    expected = whole(CONFIGS[name])
    for at in (7, 8):
        steps, found = lives(CONFIGS[name], lambda i, small, at=at: lost(small, at, sends))
        pairs = zip(found, expected, strict=True)
        equal = [[same(x, y) for x, y in zip(a, b, strict=True)] for a, b in pairs]
        assert all(map(all, equal)), (at, steps, equal)


@pytest.mark.parametrize("name", ["demo", "full"])
@in_ranks(1, 1, timeout=100)
def test_cut_off_first_exchange(name: str) -> None:
    """A resume makes up for the very first exchange. Nobody has taken a step, and yet there is a
    message under way.
    """
    steps, found = lives(CONFIGS[name], lambda i, small: lost(small, 0, 0))
    assert steps == [0, 0] and same(found, whole(CONFIGS[name]))


APART = [
    "diloco", "diloco, int8", "consensus", "released", "sparse_loco", "sign_loco", "muloco",
    "local_sgd", "diloco, late", "local_sgd, late",
]  # fmt: skip


@pytest.mark.parametrize("name", APART)
@in_ranks(1, 1, timeout=100)
def test_cut_off_stop_at_unlike_steps(name: str) -> None:
    """Islands that stop at unlike steps resume from their own. Steps 9 and 11 of periods of 4 (with
    a delay 8 and 9, while a payload is under way): no exchange lies between. Each goes on from
    where it was; nothing is lost.
    """
    stops = [9, 8] if "late" in name else [11, 9]
    steps, found = lives(CONFIGS[name], lambda i, small: small.train(stops[i]), timeout=10.0)
    assert steps == stops and same(found, whole(CONFIGS[name]))


@pytest.mark.parametrize("name", ["diloco", "consensus", "released, averaged", "local_sgd"])
@in_ranks(1, 1, timeout=100)
def test_cut_off_stop_before_begun_exchange(name: str) -> None:
    """One island stops before an exchange that the other had begun. Island 1 leaves after step 7 of
    periods of 4, or of 2: island 0 loses it in the exchange of step 8, which both make up for.
    """

    def first(i: int, small: Small) -> None:
        if i == 1:
            small.train(7)
        else:
            with pytest.raises(PeerLost):
                small.train(STEPS)

    steps, found = lives(CONFIGS[name], first)
    assert steps == [8, 7] and same(found, whole(CONFIGS[name]))


@in_ranks(1, 1, timeout=100)
def test_cut_off_only_some_can_repeat() -> None:
    """A message that only some islands can repeat is dropped, and the log says so. Island 1 comes
    back without what it had sent: the other takes its payload back, and all go on equal.
    """
    config = CONFIGS["consensus"]

    def first(i: int, topology: Topology) -> Any:
        small = Small(topology, config)
        lost(small, 7, 0)
        return left(small)

    def second(i: int, topology: Topology) -> Any:
        params, optimizer, state = saved[i]
        state = {**state, "in_flight": [] if i else state["in_flight"]}
        small = Small(topology, config, seed=99, saved=(params, optimizer, state))
        small.train(STEPS)
        small.exchange.finish()
        return small.exchange.digests_equal(), [bool(p.isfinite().all()) for p in small.params]

    saved = values(threaded.islands(first, timeout=3))
    assert values(threaded.islands(second)) == [(True, [True, True])] * 2


@in_ranks(1, 1)
def test_cut_off_regular_save_refused_once() -> None:
    """A regular save that finds the loss is refused once. A checkpoint must not be sealed without
    what was under way; the save that follows, on the way out, holds it.
    """
    config = CONFIGS["demo, late"]

    def island(i: int, topology: Topology) -> Any:
        small = Small(topology, config)
        small.train(4)
        small.exchange.state_dict()  # waits for what is under way
        cut_after(small.exchange, 4, 0)
        for k, p in enumerate(small.params):
            p.grad = torch.full_like(p, float(k))
        small.optimizer.step()  # what it sends is lost; that shows two steps later, or now
        with pytest.raises(PeerLost):
            small.exchange.state_dict()
        state = small.exchange.state_dict()
        small.exchange.detach()
        return [(f["step"], f["arrived"] is None) for f in state["in_flight"]]

    assert values(threaded.islands(island, timeout=3)) == [[(3, False), (4, True)]] * 2
