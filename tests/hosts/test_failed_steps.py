"""A step of the inner optimizer that raises an error, which the training loop catches: the same
step is taken once more, and nothing is sent twice. Two islands as threads.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from fsdp_demo import preset

from ..support.inside import in_threads
from ..support.two_layers import AS_IS, Net, attached, equal, plain, step, two

GRADIENTS = {
    "full": preset("full"),
    "full, clipped": preset("full", clip=0.01),
    "full, late": preset("full", **{"schedule.delay": 1}),
    "demo": preset("demo", topk=8, **AS_IS),
}
DELTAS = {
    "diloco": preset("diloco", period=3, inner_optimizers="as_is"),
    "diloco unclipped": preset("diloco", period=3, **AS_IS),
}
TOGETHER = {
    "diloco, one norm": preset(
        "diloco", period=3, clip=0.01, clip_scope="islands", inner_optimizers="as_is"
    )
}
LIMIT = 5


class Failing:
    """A hook behind that of the exchange, which raises once."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.armed = False
        optimizer.register_step_pre_hook(self._hook)

    def _hook(self, *_: Any) -> None:
        if self.armed:
            self.armed = False
            raise MemoryError("out of memory")


def made(config, count=1, topology=None) -> tuple[Net, list[Any], Any, Failing]:
    """A net, its optimizers (of each layer, if `count` is 2), its exchange, and what lets the last
    optimizer fail.
    """
    net, optimizers, exchange = attached(
        config, topology, two if count == 2 else lambda net: [plain(net)]
    )
    return net, optimizers, exchange, Failing(optimizers[-1])


def trained(topology, config, recover, count=1) -> tuple[Net, Any]:
    """Five steps; in the third the last optimizer of island 1 fails, and `recover` goes on."""
    net, optimizers, exchange, failing = made(config, count, topology)
    for t in range(LIMIT):
        failing.armed = recover is not None and topology.island == 1 and t == 2
        try:
            step(optimizers, net.loss(t))
        except MemoryError:
            assert recover is not None and exchange.step == 2
            recover(net, optimizers, exchange)
            net.zero_grad()
        assert exchange.step == t + 1
    return net, exchange


def another_batch(net: Net, optimizers: list[Any], exchange: Any) -> None:
    """As loops do that catch an error: the batch is dropped."""
    net.zero_grad()
    net.loss(77).backward()
    optimizers[-1].step()


def once_more(net: Net, optimizers: list[Any], exchange: Any) -> None:
    optimizers[-1].step()


def emptied(net: Net, optimizers: list[Any], exchange: Any) -> None:
    net.zero_grad()
    optimizers[-1].step()


def skipped(net: Net, optimizers: list[Any], exchange: Any) -> None:
    exchange.skip()


WAYS = [another_batch, once_more, emptied, skipped]


@pytest.mark.parametrize("count", [1, 2])
@in_threads()
def test_failed_step_exchanged_gradients(topology: Any, count: int) -> None:
    """Islands hold the bits of a run in which nothing has failed when a step is taken once more."""
    for name, config in GRADIENTS.items():
        undisturbed, exchange = trained(topology, config, None, count)
        exchange.finish()
        exchanges = exchange.metrics()["exchanges"]
        for way in WAYS:
            net, exchange = trained(topology, config, way, count)
            assert exchange.digests_equal(), (name, way)
            exchange.finish()
            assert exchange.metrics()["exchanges"] == exchanges, (name, way)
            assert equal(net.copies(), undisturbed.copies()), (name, way)


@pytest.mark.parametrize("count", [1, 2])
@in_threads()
def test_failed_step_delta(topology: Any, count: int) -> None:
    """A delta is of whatever step was taken at last."""
    for name, config in (DELTAS | TOGETHER).items():
        for way in WAYS:
            if count == 2 and way is another_batch:
                continue
            net, exchange = trained(topology, config, way, count)
            exchange.finish()
            assert exchange.digests_equal(), (name, way)
            assert exchange.metrics()["exchanges"] == 2, (name, way)


def test_failed_step_refuses_overwritten_gradients() -> None:
    """Gradients that were overwritten behind a failed step are refused: they cannot come back, and
    islands would part. A preset that exchanges none takes the new ones.
    """
    for config in (*GRADIENTS.values(), *DELTAS.values()):
        net, (optimizer,), exchange, failing = made(config.changed({"schedule.delay": 0}))
        net.loss(0).backward()
        failing.armed = True
        with pytest.raises(MemoryError):
            optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        net.loss(1).backward()
        if config in DELTAS.values():
            optimizer.step()
            assert exchange.step == 1
        else:
            for call in (optimizer.step, exchange.skip):
                net.loss(1).backward()
                for p in net.parameters():
                    assert p.grad is not None
                    p.grad.zero_()
                with pytest.raises(RuntimeError, match="optimizer 0 failed .*overwritten since.*"):
                    call()
            assert exchange.step == 0
        exchange.detach()


@pytest.mark.parametrize("config", [GRADIENTS["full"], DELTAS["diloco"]])
def test_failed_step_names_the_optimizer_that_failed(config: Any) -> None:
    """A second step of one optimizer is refused by an error that names the other one, which
    failed.
    """
    net, (first, second), exchange, failing = made(config, 2)
    for end in (second.step, exchange.skip):
        step = exchange.step
        net.loss(0).backward()
        failing.armed = True
        first.step()
        with pytest.raises(MemoryError):
            second.step()
        with pytest.raises(RuntimeError, match=r"optimizer 1 failed in its step.*once more.*skip"):
            first.step()
        end()
        assert exchange.step == step + 1
    net.loss(0).backward()
    first.step()
    with pytest.raises(RuntimeError, match="1 of 2"):
        exchange.skip()
    exchange.detach()


def test_failed_step_begun_again_sends_nothing_twice() -> None:
    """A step that is begun again sends nothing twice. Hooks of other engines may call `before` once
    more; a preset of deltas lets them.
    """
    for config in (*GRADIENTS.values(), *DELTAS.values()):
        net, _, exchange, _ = made(config)
        net.loss(0).backward()
        runtime = exchange._runtime
        if runtime.before():
            with pytest.raises(RuntimeError, match="step 1 was begun again.*not sent twice"):
                runtime.before()
        else:
            assert config in DELTAS.values() and not runtime.before()
        runtime.after()
        runtime.before()
        exchange.detach()


@pytest.mark.parametrize("count", [1, 2])
@in_threads()
def test_failed_step_is_forgotten_by_a_rollback(topology: Any, count: int) -> None:
    """A failed step is forgotten where a run is rolled back, to the very step in which it failed,
    too.
    """
    for name, config in (GRADIENTS | DELTAS).items():
        undisturbed, exchange = trained(topology, config, None, count)
        exchange.finish()
        net, optimizers, exchange, failing = made(config, count, topology)
        kept = None
        while exchange.step < LIMIT:
            if exchange.step == 2 and kept is None:
                kept = copy.deepcopy((net.state_dict(), exchange.state_dict()))
                failing.armed = True
            try:
                step(optimizers, net.loss(exchange.step))
            except MemoryError:
                assert kept is not None
                net.load_state_dict(kept[0])
                exchange.load_state_dict(kept[1])
                net.zero_grad()
        exchange.finish()
        assert equal(net.copies(), undisturbed.copies()), name
