"""State that is made at attach changes nothing: the steps after it give the same bits as without
it, for every optimizer of torch.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp_demo
from fsdp_demo.checkpoint.sharded_state import load_tensors, save_tensors, tensors_of
from fsdp_demo.hosts.optimizers import materialise

OPTIMIZERS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{}, {"weight_decay": 0.1}, {"momentum": 0.9, "weight_decay": 0.1},
        {"momentum": 0.9, "weight_decay": 5e-4, "nesterov": True},
        {"momentum": 0.9, "maximize": True},
        {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
        {"momentum": 0.9, "lr": torch.tensor(0.1)}],
    "Adam": [{}, {"weight_decay": 0.1}, {"weight_decay": 0.1, "decoupled_weight_decay": True},
        {"weight_decay": 0.1, "amsgrad": True, "maximize": True}, {"eps": 0.0},
        {"lr": torch.tensor(0.1), "weight_decay": 0.1}],
    "AdamW": [{}, {"amsgrad": True}, {"lr": torch.tensor(0.1)}],
    "Adamax": [{"weight_decay": 0.1}],
    "NAdam": [{"weight_decay": 0.1}, {"weight_decay": 0.1, "decoupled_weight_decay": True}],
    "RAdam": [{"weight_decay": 0.1}, {"weight_decay": 0.1, "decoupled_weight_decay": True}],
    "RMSprop": [{"weight_decay": 0.1}, {"momentum": 0.9, "centered": True}],
    "Rprop": [{}],
    "Adagrad": [{"weight_decay": 0.1}, {"initial_accumulator_value": 0.1}],
    "Adadelta": [{"weight_decay": 0.1}],
    "ASGD": [{"weight_decay": 0.1}],
    "Adafactor": [{"weight_decay": 0.1}],
    "Muon": [{}, {"nesterov": False}],
}  # fmt: skip
# refused: it calls its closure several times; it takes sparse gradients alone
OTHERS = {"LBFGS", "SparseAdam"}
KERNELS: list[dict[str, Any]] = [{}, {"foreach": True}, {"foreach": False}, {"fused": True}]


def cases() -> list[Any]:
    out = []
    for name, options in ((n, o) for n, settings in OPTIMIZERS.items() for o in settings):
        known = inspect.signature(getattr(torch.optim, name)).parameters
        in_tensor = isinstance(options.get("lr"), torch.Tensor)
        for kernel in KERNELS:
            # torch has no kernel over all tensors with a rate in a tensor
            if kernel.keys() <= known.keys() and not (kernel.get("foreach") and in_tensor):
                out.append(
                    pytest.param(name, {**options, **kernel}, id=f"{name}-{options}-{kernel}")
                )
    return out


def net(name: str) -> torch.nn.ParameterDict:
    """Matrices alone for Muon; `idle` never has a gradient, `late` from the third step on, and -0.0
    is a weight, too.
    """
    g = torch.Generator().manual_seed(0)
    made = {
        n: torch.nn.Parameter(torch.randn(6, 5, generator=g))
        for n in ("one", "two", "late", "idle")
    }
    if name != "Muon":
        made["bias"] = torch.nn.Parameter(torch.randn(7, generator=g))
        made["signed"] = torch.nn.Parameter(torch.tensor([-0.0, 0.0, -0.0, 1.0]))
    return torch.nn.ParameterDict(made)


def gradients(model: torch.nn.ParameterDict, step: int, late: int = 2) -> None:
    """`late` begins at step `late`; torch's fused SGD stops when one does after the first."""
    g = torch.Generator().manual_seed(100 + step)
    for n, p in model.items():
        p.grad = torch.randn(p.shape, generator=g)
        if n == "idle" or n == "late" and step < late:
            p.grad = None
        elif n == "signed":
            p.grad[:2] = torch.tensor([0.0, -0.0])


def build(name, options: dict[str, Any], model: torch.nn.ParameterDict) -> torch.optim.Optimizer:
    tensors = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    return getattr(torch.optim, name)(list(model.values()), **tensors)


def bits(tensors: Any) -> list[bytes]:
    return [t.detach().numpy().tobytes() for t in tensors]


def test_fresh_state_covers_every_optimizer_of_torch() -> None:
    """Each optimizer of torch is in the tables of this file."""
    found = {
        n
        for n, c in vars(torch.optim).items()
        if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)
    }
    assert found - {"Optimizer"} == set(OPTIMIZERS) | OTHERS


@pytest.mark.parametrize("name, options", cases())
def test_fresh_state_one_replica_is_plain_training(name: str, options: dict[str, Any]) -> None:
    """One replica under `full` without clipping trains as without an exchange: 20 steps, bit for
    bit.
    """
    ends = []
    for attached in (True, False):
        model = net(name)
        optimizer = build(name, options, model)
        exchange = fsdp_demo.attach(optimizer, "full", clip=None, model=model) if attached else None
        assert bits(model.values()) == bits(net(name).values())
        for step in range(20):
            gradients(model, step, 0 if options.get("fused") else 2)
            optimizer.step()
        ends.append(bits(model.values()))
        if exchange is not None:
            assert exchange.metrics()["exchanges"] == 20
            exchange.finish()
    assert ends[0] == ends[1]


@pytest.mark.parametrize(
    "name, options", [c for c in cases() if c.values[0] in ("SGD", "Adam", "AdamW", "Muon")]
)
def test_fresh_state_is_what_torch_would_make(name: str, options: dict[str, Any]) -> None:
    """State made at attach has the names, shapes, dtypes and devices of torch's own; no hook of
    anybody sees a step.
    """
    model, twin = net(name), net(name)
    optimizer, other = build(name, options, model), build(name, options, twin)
    steps: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: steps.append(1))
    materialise(optimizer)
    gradients(twin, 5)
    twin["idle"].grad = torch.zeros(6, 5)
    other.step()
    described = [
        [(k, v.shape, v.dtype, v.device) for k, v in o.state[p].items() if v is not None]
        for o, m in ((optimizer, model), (other, twin))
        for p in m.values()
        if o.state.get(p)
    ]
    assert not steps
    if options.get("dampening"):
        assert not optimizer.state
    else:
        assert described[: len(described) // 2] == described[len(described) // 2 :]
    before = {p: dict(s) for p, s in optimizer.state.items()}
    materialise(optimizer)
    assert all(optimizer.state[p][k] is v for p, s in before.items() for k, v in s.items())


@pytest.mark.parametrize(
    "name, options", [(n, o) for n, settings in OPTIMIZERS.items() for o in settings]
)
def test_fresh_state_takes_a_saved_replica(name, options: dict[str, Any], tmp_path: Path) -> None:
    """A replica is loaded into a fresh optimizer: what an optimizer makes at its first step only
    has to be there all the same when a run goes on.
    """
    model = net(name)
    optimizer = build(name, options, model)
    materialise(optimizer)  # as `attach` does
    for step in range(6):
        if step == 3:
            other_model = net(name)
            other = build(name, options, other_model)
            live = tensors_of(torch.nn.ParameterDict(model), [optimizer])
            save_tensors(tmp_path, live, None, wait=True)
            load_tensors(tmp_path, torch.nn.ParameterDict(other_model), [other], None)
            held = [
                {v.data_ptr() for s in o.state.values() for v in s.values() if torch.is_tensor(v)}
                for o in (optimizer, other)
            ]
            assert not held[0] & held[1]
        for m, o in [(model, optimizer)] + ([(other_model, other)] if step >= 3 else []):
            gradients(m, step)
            o.step()
    assert bits(model.values()) == bits(other_model.values())
