"""Optimizers that write parameters from a copy of their own are refused where the exchange writes
parameters, too; whatever else writes them behind an exchange is noticed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from fsdp_demo import preset
from fsdp_demo.hosts.torch_params import TorchHost

from ..support import threaded
from ..support.heard import heard
from ..support.inside import in_ranks
from ..support.threaded import values
from ..support.two_layers import Net, alone, attached, sgd, train

AS_IS: dict[str, Any] = {"inner_optimizers": "as_is"}
FULL = preset("full")
WRITES = {
    "diloco": preset("diloco", period=2, **AS_IS),
    "local_sgd": preset("local_sgd", period=2, **AS_IS),
    "decoupled_momentum": preset("decoupled_momentum", period=2, rule="released", **AS_IS),
}


class FusedAdam(torch.optim.SGD):
    """Its settings are those of apex (an attribute) or of TransformerEngine's later ones."""

    def __init__(self, params: Any, master_weights: bool = True, in_group: bool = False):
        super().__init__(params, lr=0.01)
        if in_group:
            self.param_groups[0]["master_weights"] = master_weights
        else:
            self.master_weights = master_weights


class Wrapper(torch.optim.Optimizer):
    """Steps an optimizer, and writes the parameters from slow weights now and then."""

    def __init__(self, optimizer: torch.optim.Optimizer, every: int = 2):
        self.optimizer, self.every, self.taken = optimizer, every, 0
        self.slow = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]

    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()
        self.taken += 1
        if self.taken % self.every == 0:
            for slow, p in zip(self.slow, self.param_groups[0]["params"], strict=True):
                p.copy_(slow.lerp_(p, 0.5))

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad()


class Lookahead(Wrapper):
    pass


class Accelerated(Wrapper):
    """As Accelerate's: nothing but steps."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        super().__init__(optimizer, every=1 << 30)


def named(name: str, base: type = torch.optim.SGD) -> Callable[[Any], torch.optim.Optimizer]:
    made: Any = type(name, (base,), {})
    return lambda params: made(params, lr=0.01)


KEEPS = {"AdamWScheduleFree": "z", "ScheduleFreeRAdam": "z", "MADGRAD": "x0", "DAdaptSGD": "x0"}
KEEPS |= {"Ranger": "slow weights", "Ranger21": "slow weights"}
COPIES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "apex": (FusedAdam, "FusedAdam keeps .*fp32 masters.*master_weights=False"),
    "a group": (lambda p: FusedAdam(p, in_group=True),
        "FusedAdam keeps .*fp32 masters.*master_weights=False"),
    "slow weights": (lambda p: Lookahead(sgd(p)),
        "Lookahead keeps .*slow weights.*leave it out, and step the SGD in it"),
    "wrapped": (lambda p: Accelerated(Lookahead(Accelerated(sgd(p)))),
        "Lookahead keeps .*leave it out, and step the Accelerated in it"),
    **{name: (named(name), rf"{name} keeps .*\({copy}\).*torch.optim.AdamW")
        for name, copy in KEEPS.items()},
    "derived": (named("Mine", type("SGDScheduleFree", (torch.optim.SGD,), {})),
        r"Mine keeps .*\(z\)"),
}  # fmt: skip


def of(make: Callable[[Any], Any]) -> Callable[[Net], Any]:
    """What makes the optimizer of a net."""
    return lambda net: make(net.parameters())


@pytest.mark.parametrize("name", COPIES)
def test_second_copy_refused_where_parameters_are_written(name: str) -> None:
    """An optimizer with a second copy of the parameters is refused where the exchange writes
    parameters.
    """
    make, words = COPIES[name]
    for config in WRITES.values():
        with pytest.raises(ValueError, match=f"(?s){words}.*exchanges gradients, such as full"):
            attached(config, inner=of(make))
    net, optimizer, exchange = attached(FULL, inner=of(make))
    train(optimizer, net.loss, 4)
    assert exchange.step == 4
    exchange.finish()


def test_second_copy_absent_optimizers_are_taken() -> None:
    """Optimizers without a second copy are taken."""
    none = partial(FusedAdam, master_weights=False)
    for make in (none, lambda p: Accelerated(sgd(p)), named("Prodigy"), named("DAdaptAdam")):
        attached(WRITES["diloco"], inner=of(make))[2].detach()


def test_second_copy_on_the_host_is_refused() -> None:
    """An optimizer that steps copies in host memory is refused."""
    for config in (FULL, WRITES["diloco"]):
        with pytest.raises(ValueError, match="CPUOffloadOptimizer steps copies .* in host memory"):
            attached(config, inner=of(named("CPUOffloadOptimizer")))


# ---- what no name tells ------------------------------------------------------------------------


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], int]:
    caplog.set_level(logging.WARNING, logger="fsdp_demo")
    return lambda: sum("parameters were written between" in r.getMessage() for r in caplog.records)


@pytest.mark.parametrize("kind", WRITES)
def test_second_copy_of_an_unknown_wrapper_is_said_once(kind: str, said: Callable[[], int]) -> None:
    """A wrapper that writes parameters behind the exchange is said once."""
    net, optimizer, exchange = attached(
        WRITES[kind], inner=lambda net: Wrapper(sgd(net.parameters()))
    )
    with exchange.paused():
        train(optimizer.optimizer, net.loss, 1)
    train(optimizer, net.loss, 2)
    assert said() == 0  # it is read with the next message
    train(optimizer, net.loss, 120)
    exchange.finish()
    assert said() == 1


@pytest.mark.parametrize("kind", ["diloco", "local_sgd"])
def test_rewritten_named_after_every_exchange(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """A write behind any exchange is said with the names of its tensors, each name once."""
    net, optimizer, exchange = attached(WRITES[kind])

    @torch.no_grad()
    def write(t: int) -> None:
        if t in (5, 9):
            net.a.weight[0] = 0.0
        if t in (9, 13):
            net.b.bias.zero_()

    train(optimizer, net.loss, 16, each=write)
    exchange.finish()
    found = [m for m in caplog.messages if "parameters were written between" in m]
    assert ["optimizer: a.weight." in m for m in found] == [True, False]
    assert ["optimizer: b.bias." in m for m in found] == [False, True]


def test_rewritten_after_every_step_is_information(caplog: pytest.LogCaptureFixture) -> None:
    """A clamp of one small tensor after every step is one line of information, that names it."""
    caplog.set_level(logging.INFO, logger="fsdp_demo")
    net, optimizer, exchange = attached(preset("diloco", period=4, **AS_IS))

    @torch.no_grad()
    def clamp(t: int) -> None:
        net.b.bias.clamp_(-1e-3, 1e-3)

    train(optimizer, net.loss, 16, each=clamp)
    exchange.finish()
    found = [r.levelname for r in caplog.records if "b.bias" in r.getMessage()]
    assert found == ["INFO"] and "parameters were written" not in caplog.text


@in_ranks(1, 1)
def test_second_copy_on_one_island_is_said() -> None:
    """A write behind the exchange on one island is said there."""
    found = heard(logging.INFO)

    def island(i: int, topology: Any) -> None:
        net, optimizer, exchange = attached(WRITES["diloco"], topology)

        @torch.no_grad()
        def clip(t: int) -> None:
            for p in net.parameters():
                p.clamp_(-0.01, 0.01) if i else None

        train(optimizer, net.loss, 6, each=clip)
        exchange.finish()

    values(threaded.islands(island))
    assert sum("parameters were written between" in m for m in found) == 1


ACTIONS = ("nothing", "flush", "evaluate", "steps aside", "accept", "load", "frozen")


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("kind", WRITES)
def test_second_copy_warning_not_for_allowed_writes(kind, action, said: Callable[[], int]) -> None:
    """Allowed writes behind the first exchange, after which parameters are compared, cause no
    warning.
    """
    frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    net, optimizer, exchange = attached(
        WRITES[kind], inner=lambda net: sgd([*net.parameters(), frozen])
    )

    @torch.no_grad()
    def behind(t: int) -> None:
        if t != 1:
            return
        if action == "flush":
            exchange.flush()
        elif action == "evaluate":
            with exchange.outer_parameters(net):
                net.loss(t)
        elif action == "steps aside":
            with exchange.paused():
                for p in net.parameters():
                    p.grad = torch.ones_like(p)
                optimizer.step()
                optimizer.zero_grad()
        elif action == "frozen":
            frozen.add_(1.0)
        elif action != "nothing":
            for p in net.parameters():
                p.add_(1.0)
            if action == "accept":
                exchange.accept_parameters()
            else:
                exchange.load_state_dict(exchange.state_dict())

    train(optimizer, net.loss, 6, each=behind)
    exchange.finish()
    assert said() == 0


def test_torch_host_lists_wrappers() -> None:
    """A host lists the wrappers that stand around the optimizers."""
    inner = sgd(alone().parameters())
    outer = Accelerated(Lookahead(inner))
    host = TorchHost([outer])
    assert host.optimizers == [inner] and host.wrappers == [outer, outer.optimizer]
