"""A model is freed when its exchange has ended, and threads and sockets go."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fsdp_demo
from fsdp_demo import PeerLost
from fsdp_demo.rendezvous import attempts

from ..support.freed import left, references
from ..support.two_layers import train


def made(sharded: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def life(end: str, sharded: bool) -> dict[str, Any]:
    """A training of three steps that ends in this way; weak references to what took part."""
    model, optimizer = made(sharded)
    found = references(model=model, optimizer=optimizer, weight=next(model.parameters()))
    exchange: Any = None
    if end == "wrong names":
        with pytest.raises(ValueError, match="no parameter of this model"):
            fsdp_demo.attach(optimizer, "diloco", model=torch.nn.Linear(3, 3))
    elif end == "unlike islands":
        unlike = {"island": int(os.environ["ISLAND_RANK"])}
        with pytest.raises((ValueError, PeerLost)):
            fsdp_demo.attach(optimizer, "diloco", model=model, must_match=unlike)
    else:
        exchange = fsdp_demo.attach(optimizer, "diloco", model=model, period=2)
        found |= references(exchange=exchange)
        with pytest.raises(ValueError, match="has an exchange already"):
            fsdp_demo.attach(optimizer, "diloco", model=model, period=2)
    train(optimizer, lambda t: model(torch.randn(4, 8)).square().mean(), 3)
    if end == "finish":
        exchange.finish()
    elif end == "detach":
        exchange.detach()
    elif end == "next one":  # it takes the place of the one that has ended
        exchange.finish()
        fsdp_demo.attach(optimizer, "diloco", model=model, period=2).detach()
    return found


@pytest.mark.parametrize("sharded", [False, True])
def test_freed_when_it_has_ended(run_ranks: Any, sharded: bool) -> None:
    """Behind finish() or detach(), behind an error in attach, and where a script drops all without
    either, nothing of model, optimizer and exchange is left, and a second attach to an optimizer
    was refused while the first one ran.
    """

    def run() -> dict[str, list[str]]:
        ends = ("finish", "detach", "next one", "wrong names", "forgotten", "unlike islands")
        return {end: left(life, end, sharded) for end in ends}

    for found in run_ranks(run, 2, 2 if sharded else 1):
        assert not any(found.values()), found


def test_freed_when_attach_is_interrupted(monkeypatch: Any) -> None:
    """An error behind the making of the exchange leaves the optimizer free for another attach."""
    model, optimizer = made(False)
    monkeypatch.setattr("fsdp_demo.automatic.begin", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fsdp_demo.attach(optimizer, "auto", model=model)
    assert not optimizer._optimizer_step_pre_hooks
    fsdp_demo.attach(optimizer, "diloco", model=model).detach()


def test_freed_while_the_optimizer_is_held() -> None:
    """The hooks hold an exchange that the script does not: its step is counted on, and that of one
    which has finished says so.
    """
    model, optimizer = made(False)
    fsdp_demo.attach(optimizer, "diloco", model=model).finish()
    gc.collect()
    with pytest.raises(RuntimeError, match="finished"):
        optimizer.step()
    fsdp_demo.attach(optimizer, "diloco", model=model)
    gc.collect()
    with pytest.raises(ValueError, match="has an exchange already"):
        fsdp_demo.attach(optimizer, "diloco", model=model)


def test_freed_when_nobody_came(monkeypatch: Any) -> None:
    """An island that has waited in vain keeps the words of the error, not the frames that hold its
    model, and says them at the next attach again.
    """
    monkeypatch.setattr(attempts, "_in_vain", {})
    topology = fsdp_demo.Topology("islands", 0, 2, endpoint="127.0.0.1:1", run="in-vain")

    def in_vain(*_: Any) -> Any:
        raise PeerLost("nobody came")

    monkeypatch.setattr(attempts, "_from_first", in_vain)

    def wait() -> dict[str, Any]:
        model, _ = made(False)
        with pytest.raises(PeerLost, match="nobody came"):
            attempts.join(topology)
        return references(model=model)

    for _ in range(2):
        assert not left(wait)
