"""Islands that would train something else are refused on both sides with both values; machines that
differ are said in one line.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fsdp_demo
from fsdp_demo import preset
from fsdp_demo.errors import Mismatch
from fsdp_demo.exchange import run_specification
from fsdp_demo.exchange.message import mean_rate
from fsdp_demo.hosts.torch_params import TorchHost

from ..support.accelerator import DEVICE, Accelerator, plug_in
from ..support.heard import heard
from ..support.inside import in_threads
from ..support.two_layers import Net, attached

Make = Callable[[Net], torch.optim.Optimizer]


def adamw(**options: Any) -> Make:
    return lambda net: torch.optim.AdamW(net.parameters(), **{"lr": 0.01, **options})


def sgd(**options: Any) -> Make:
    return lambda net: torch.optim.SGD(net.parameters(), **{"lr": 0.01, **options})


def in_groups(decay: float) -> Make:
    def make(net: Net) -> torch.optim.Optimizer:
        second = {"params": net.b.parameters(), "weight_decay": decay}
        groups = [{"params": net.a.parameters()}, second]
        return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)

    return make


def scheduled(factor: float) -> Make:
    def make(net: Net) -> torch.optim.Optimizer:
        optimizer = adamw()(net)
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor)
        return optimizer

    return make


GROUP = "optimizer0.group0"
UNLIKE: dict[str, tuple[Make, Make, str, Any, Any]] = {
    "class": (adamw(), sgd(), "optimizer0", "'AdamW'", "'SGD'"),
    "betas": (adamw(), adamw(betas=(0.5, 0.999)), f"{GROUP}.betas", [0.9, 0.999], [0.5, 0.999]),
    "decay": (in_groups(0.1), in_groups(0.0), "optimizer0.group1.weight_decay", 0.1, 0.0),
    "groups": (adamw(), in_groups(0.01), "optimizer0.groups", 1, 2),
    "eps": (adamw(), adamw(eps=1e-6), f"{GROUP}.eps", 1e-08, 1e-06),
    "amsgrad": (adamw(), adamw(amsgrad=True), f"{GROUP}.amsgrad", False, True),
    "momentum": (sgd(momentum=0.9), sgd(momentum=0.8), f"{GROUP}.momentum", 0.9, 0.8),
    "nesterov": (sgd(momentum=0.9), sgd(momentum=0.9, nesterov=True), f"{GROUP}.nesterov", False,
        True),
    "lr": (adamw(), adamw(lr=0.02), f"{GROUP}.lr", 0.01, 0.02),
    "lr in a tensor": (adamw(), adamw(lr=torch.tensor(0.02)), f"{GROUP}.lr", 0.01, 0.02),
    "schedule": (scheduled(1.0), scheduled(0.5), f"{GROUP}.lr", 0.01, 0.005),
}  # fmt: skip
ALIKE: dict[str, tuple[Make, Make]] = {
    "kernels": (adamw(foreach=True), adamw(foreach=False)),
    "lr in a tensor": (adamw(lr=1e-3), adamw(lr=torch.tensor(1e-3))),
    "a schedule on one side": (adamw(lr=0.01), scheduled(1.0)),
}
CONFIG = preset("full", clip=None)


def refused(kind: Any, make: Make, topology: Any, match: str = "runs something else") -> str:
    """What the error says of the islands' models and optimizers."""
    with pytest.raises(ValueError, match=match) as error:
        attached(CONFIG, topology, make, kind(topology))
    return str(error.value)


@in_threads()
def test_attach_unlike_optimizers_refused(island: int, topology: Any) -> None:
    """Optimizers that differ between islands are refused with both values."""
    for name, (one, two, what, *sides) in UNLIKE.items():
        text = refused(Net, (one, two)[island], topology)
        here, there = sides[island], sides[1 - island]
        assert f"{what}: {here} here, {there} there" in text, (name, text)
    for name, alike in ALIKE.items():
        _, _, exchange = attached(CONFIG, topology, alike[island])
        assert exchange._queue.watch.unlike is False, name
        exchange.detach()


@in_threads()
def test_attach_scheduled_rate_accepted(island: int, topology: Any) -> None:
    """The current learning rate may differ where an island resumes at another step. A schedule has
    moved the rate of the one that is further, and a cycle its momentum.
    """
    step, lr = (40, 0.002) if island else (0, 0.01)
    for cyclic in (False, True):
        net = Net(topology)
        optimizer = sgd(lr=lr, momentum=0.9)(net)
        if cyclic:
            torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=50)
            optimizer.param_groups[0]["momentum"] = 0.95 - 0.01 * island
            optimizer.param_groups[0]["lr"] = lr
        exchange = fsdp_demo.attach(optimizer, CONFIG, model=net, topology=topology, step=step)
        assert exchange.step == 40
        exchange.detach()
        with pytest.raises(ValueError, match="group0.lr: 0.0.* here, 0.0.* there"):
            fsdp_demo.attach(optimizer, CONFIG, model=net, topology=topology, step=7)


class Wide(Net):
    def __init__(self, topology: Any):
        super().__init__(topology)
        self.b = torch.nn.Linear(64, 3 + topology.island)


class More(Net):
    def __init__(self, topology: Any):
        super().__init__(topology)
        if topology.island:
            self.c = torch.nn.Linear(2, 2)


def turned(net: Net) -> torch.optim.Optimizer:
    order = list(net.parameters())
    return torch.optim.SGD(order[::-1] if net.island else order, lr=0.01)


def frozen(net: Net) -> torch.optim.Optimizer:
    net.a.bias.requires_grad_(not net.island)
    return sgd()(net)


APART: list[tuple[type[Net], Make, str, str]] = [
    (Wide, sgd(), "parameter 2 is {} here, {} there",
        "b.weight [3, 64] float32, trained|b.weight [4, 64] float32, trained"),
    (More, sgd(), "parameter 4 is {} here, {} there", "none|c.weight [2, 2] float32, trained"),
    (Net, turned, "the same parameters in another order: parameter 0 is {} here, {} there",
        "a.weight [64, 66]|b.bias [3]"),
    (Net, frozen, "parameter 1 is {} here, {} there",
        "a.bias [64] float32, trained|a.bias [64] float32, frozen"),
]  # fmt: skip


@in_threads()
def test_attach_unlike_parameters_named(island: int, topology: Any) -> None:
    """The error names the first parameter that differs between islands."""
    for kind, make, form, both in APART:
        sides, text = both.split("|"), refused(kind, make, topology)
        assert all(part.strip() in text for part in form.format("|", "|").split("|")), text
        assert text.index(sides[island]) < text.rindex(sides[1 - island]), text
    low = Net(topology).to(torch.bfloat16 if island else torch.float32)
    mine, theirs = ("bfloat16", "float32") if island else ("float32", "bfloat16")
    said = rf"a.weight \[64, 66\] {mine}, trained here, a.weight \[64, 66\] {theirs}"
    with pytest.raises(ValueError, match=said):
        attached(CONFIG, topology, sgd(), low)


class Odd(Net):
    def __init__(self, topology: Any):
        super().__init__(topology)
        if topology.island == 1:
            self.b = torch.nn.Linear(64, 9)
        if topology.island == 2:
            self.a = torch.nn.Linear(66, 64, bias=False)


NAMED = (
    ("island 1", "parameter 2 is b.weight [3, 64] float32, trained here, b.weight [9, 64]"),
    ("island 0", "parameter 2 is b.weight [9, 64] float32, trained here, b.weight [3, 64]"),
    ("3 parameters here, 4 there; parameter 1 is b.weight [3, 64] float32, trained here, a.bias "
        "[64]",),
)  # fmt: skip


@in_threads(3)
def test_attach_unlike_island_named_to_all(island: int, topology: Any) -> None:
    """Each of three islands gets an error that names one that differs."""
    text = refused(Odd, sgd(), topology, "")
    assert all(part in text for part in NAMED[island]), text


place = threading.local()  # whose island a thread is
MACHINE = run_specification.machine


@in_threads()
def test_attach_unlike_machines_logged(topology: Any) -> None:
    """One line of the log says how the machines of the islands differ."""
    assert set(MACHINE(torch.device("cpu"))) == {"torch", "device", "processor"}

    def machine(device: torch.device) -> dict[str, str]:
        return {"torch": f"2.{place.island}", "device": "cpu", "processor": f"kind {place.island}"}

    run_specification.machine = machine  # of a process of its own
    place.island, thread, lines = topology.island, threading.get_ident(), list[str]()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: (
        lines.append(record.getMessage()) if record.thread == thread else None
    )  # type: ignore[method-assign]
    logging.getLogger("fsdp_demo").addHandler(handler)
    _, _, exchange = attached(CONFIG, topology, sgd())
    me, you = topology.island, 1 - topology.island
    (line,) = lines
    assert f"has processor kind {you}, here it is kind {me}" in line
    assert f"has torch 2.{you}, here it is 2.{me}" in line
    assert "last bit" in line and exchange._queue.watch.unlike is True
    exchange.detach()


RATES: dict[str, Callable[[int, int], Any]] = {
    "apart": lambda island, step: 1e-4 * 0.5**island,
    "apart later": lambda island, step: 1e-4 * 0.5 ** (island * (step > 20)),
    "tensors": lambda island, step: torch.tensor(1e-4 * 0.5**island),
    "equal": lambda island, step: 1e-4 * 0.9**step,
    "last bits": lambda island, step: 1e-4 * (1 + 1e-4 * island),
    "zero": lambda island, step: 0.0,
    "one at zero": lambda island, step: 1e-4 * island,
}


def steps_at(rate: Callable[[int, int], Any], config: Any, topology: Any) -> list[str]:
    """60 steps at these rates; the warnings of all islands about them, on the first."""
    lines = heard() if topology.island == 0 else []
    net, optimizer, exchange = attached(config, topology, adamw())
    try:
        for step in range(60):
            optimizer.param_groups[0]["lr"] = rate(topology.island, step)
            for p in net.parameters():
                p.grad = torch.full_like(p, 1e-3 * (topology.island + 1))
            optimizer.step()
        exchange.finish()
    except Mismatch as error:
        assert "replicas are no longer equal" in str(error)
        exchange.detach()
    return [line for line in lines if "learning rates differ" in line]


@in_threads()
def test_learning_rates_drift_warned_once(topology: Any) -> None:
    """Learning rates that drift apart are warned of once."""
    config = preset("diloco", period=5, clip=None)
    said = {case: steps_at(rate, config, topology) for case, rate in RATES.items()}
    said["full"] = steps_at(RATES["apart"], CONFIG, topology)
    for case, step in {"apart": 5, "apart later": 25, "tensors": 5, "full": 1}.items():
        both = said.pop(case)
        assert topology.island or len(both) == 2, (case, both)  # one of each island
        assert all(f"differ at step {step}: 5e-05 on island 1" in line for line in both)
        assert all("0.0001 on island 0" in line for line in both)
    assert not any(said.values())


def test_learning_rates_on_device_no_wait() -> None:
    """The mean learning rate does not wait for rates that lie on a device."""
    with plug_in(), Accelerator() as mode:
        with mode.waiting():
            there = torch.tensor(0.25).to(DEVICE)
        p = torch.nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.AdamW([{"params": [p], "lr": 0.0}], foreach=False)
        optimizer.param_groups += [{"params": [], "lr": r} for r in (there, torch.tensor(0.5))]
        mean = mean_rate(TorchHost([optimizer]))
        with mode.waiting():
            assert float(mean) == 0.25
