"""What counts as a step and what does not. Two islands as threads, messages counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)

from fsdp_demo import preset

from ..support.inside import in_threads
from ..support.two_layers import AS_IS, Net, attached, equal, plain, sgd, step, two

FULL = preset("full")
DEMO = preset("demo", topk=8, **AS_IS)
DILOCO = preset("diloco", period=3, **AS_IS)


OPTIMIZERS: dict[str, Callable[[Net], torch.optim.Optimizer]] = {
    "sgd": plain,
    "sgd with momentum": lambda net: torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9),
    "adamw": lambda net: torch.optim.AdamW(net.parameters(), lr=0.01),
    "adamw, tensor lr": lambda net: torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.01)),
    "of unknown kind": lambda net: torch.optim.RMSprop(net.parameters(), lr=0.01),
}


def checkpoint(net: Net, optimizer: torch.optim.Optimizer, exchange: Any) -> None:
    """All that a loop saves and loads; nothing is other than before."""

    def seen() -> Any:
        rates = [float(g["lr"]) for g in optimizer.param_groups]
        return exchange.step, exchange.metrics()["messages"], rates

    before, kept = seen(), net.copies()
    state = get_optimizer_state_dict(net, optimizer)
    set_optimizer_state_dict(net, optimizer, state)
    get_state_dict(net, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    exchange.state_dict()
    assert before == seen() and equal(kept, net.copies())


@pytest.mark.parametrize("name", OPTIMIZERS)
@in_threads()
def test_tick_not_by_a_checkpoint(topology: Any, name: str) -> None:
    """Checkpoints are no step: torch.distributed.checkpoint makes the state of an optimizer by a
    step of its own; accelerate and others go through it.
    """
    for config in (FULL, DILOCO):
        net, optimizer, exchange = attached(config, topology, OPTIMIZERS[name])
        checkpoint(net, optimizer, exchange)
        for t in range(4):
            net.loss(t).backward()
            if t == 2 and name != "sgd":
                checkpoint(net, optimizer, exchange)  # gradients are there, too
            optimizer.step()
            optimizer.zero_grad()
            assert exchange.step == t + 1
            checkpoint(net, optimizer, exchange)
        assert exchange.metrics()["exchanges"] == (4 if config is FULL else 1)
        exchange.finish()


@in_threads()
def test_tick_by_a_step_with_rate_zero(topology: Any) -> None:
    """A step with learning rate zero is a step, also where one island's gradients are all zero."""
    for make in (OPTIMIZERS[n] for n in ("adamw", "sgd with momentum", "sgd")):
        net, optimizer, exchange = attached(FULL, topology, make)
        for t, factor in enumerate((0.0, 0.5, 1.0)):
            optimizer.param_groups[0]["lr"] = 0.01 * factor
            step(optimizer, net.loss(t) * (topology.island if t == 0 else 1))
        assert exchange.step == 3
        assert exchange.metrics()["exchanges"] == 3
        assert exchange.digests_equal()
        exchange.finish()


@in_threads()
def test_tick_not_by_a_micro_batch(topology: Any) -> None:
    """Nothing is sent on a micro-batch."""
    for config, legs, period in ((FULL, 3, 1), (DEMO, 1, 1), (DILOCO, 3, 3)):
        net, optimizer, exchange = attached(config, topology)
        for t in range(6):
            before = exchange.metrics()
            for micro in range(4):
                (net.loss(10 * t + micro) / 4).backward()
                now = exchange.metrics()
                assert now["step"] == t
                assert all(now[k] == before[k] for k in ("messages", "bytes_sent"))
            optimizer.step()
            optimizer.zero_grad()
            sent = exchange.metrics()["messages"] - before["messages"]
            assert sent == legs * ((t + 1) % period == 0)
        exchange.finish()


@in_threads()
def test_tick_once_for_two_optimizers(topology: Any) -> None:
    """Two optimizers that step in turns are one step."""
    for config in (FULL, DILOCO):
        ends = []
        for inner in (two, lambda net: [plain(net)]):
            net, optimizers, exchange = attached(config, topology, inner)
            for t in range(6):
                net.loss(t).backward()
                # the order does not matter
                for o in optimizers if t % 2 else reversed(optimizers):
                    assert exchange.step == t
                    o.step()
                for o in optimizers:
                    o.zero_grad()
            assert exchange.step == 6
            assert exchange.metrics()["exchanges"] == (6 if config is FULL else 2)
            ends.append(net.copies())
            if inner is two:
                net.loss(6).backward()
                optimizers[0].step()
                with pytest.raises(RuntimeError, match="stepped twice"):
                    optimizers[0].step()
                with pytest.raises(RuntimeError, match="1 of 2"):
                    exchange.skip()
            exchange.detach()
        assert equal(*ends)


@in_threads()
def test_tick_refuses_a_parameter_added_later(topology: Any) -> None:
    """A parameter that was added after attach is refused at the next step."""
    net, optimizer, _ = attached(FULL, topology, lambda net: sgd(net.a.parameters()))
    optimizer.add_param_group({"params": list(net.b.parameters())})
    net.loss(0).backward()
    with pytest.raises(RuntimeError, match="attach again"):
        optimizer.step()


def test_host_is_chosen_by_the_type_of_the_optimizer() -> None:
    """A torch.optim.Optimizer goes to torch's host, whatever package wrote it; odd objects end the
    search.
    """
    from unittest.mock import MagicMock

    from fsdp_demo.hosts import base

    other = type("FusedAdam", (torch.optim.SGD,), {"__module__": "deepspeed.ops.adam.fused_adam"})
    engine = type("DeepSpeedEngine", (), {"__module__": "deepspeed.runtime.engine"})()
    wrapper = type("Wrapper", (), {"__module__": "accelerate.utils", "optimizer": engine})()
    accelerated = type(
        "DeepSpeedOptimizerWrapper", (torch.optim.SGD,), {"__module__": "accelerate.utils"}
    )([torch.zeros(1)], lr=0.1)
    accelerated.optimizer = type("ZeRO", (), {"__module__": "deepspeed.runtime.zero"})()  # type: ignore[attr-defined]
    round_and_round = type("Odd", (), {"__module__": "odd"})()
    round_and_round.optimizer = round_and_round  # type: ignore[attr-defined]
    assert base.find_host(other([torch.zeros(1)], lr=0.1)) is None
    assert base.find_host(round_and_round) is None and base.find_host(MagicMock()) is None
    doors = [base.find_host(thing) for thing in (engine, wrapper, [engine, engine], accelerated)]
    assert all(door is not None and door.__name__ == "deepspeed_ext" for door in doors)
