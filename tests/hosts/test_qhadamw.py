"""QHAdamW: its rule, AdamW as a case of it, shards, checkpoints, and the presets that take it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fsdp_demo
from fsdp_demo import QHAdamW, base_optimizer, preset
from fsdp_demo.hosts.optimizers import materialise

from ..oracles.qhadamw import qhadamw
from ..support.inside import in_ranks
from ..support.refused import refusal
from ..support.two_layers import step

RULE: dict[str, Any] = {"betas": (0.99, 0.999), "nu": 0.7, "eps": 1e-6, "weight_decay": 0.1}


def gradients(seed: int, count: int, *shape: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=g) for _ in range(count)]


def trained(optimizer: torch.optim.Optimizer, p: torch.Tensor, steps: list[Any]) -> torch.Tensor:
    for g in steps:
        p.grad = g
        optimizer.step()
    return p.detach().clone()


@pytest.mark.parametrize("nu, b1", [(0.7, 0.999), (0.9, 0.99), (0.0, 0.5)])
def test_qhadamw_follows_oracle(nu: float, b1: float) -> None:
    """A step is that of the paper's formula with AdamW's corrections and decay."""
    start, steps = gradients(0, 1, 4, 5)[0], gradients(1, 30, 4, 5)
    p = torch.nn.Parameter(start.clone())
    made = QHAdamW([p], lr=0.01, betas=(b1, 0.95), nu=nu, eps=1e-6, weight_decay=0.1)
    wanted = qhadamw(start, steps, 0.01, b1, 0.95, nu, 1e-6, 0.1)
    assert torch.allclose(trained(made, p, steps).double(), wanted, rtol=0, atol=2e-6)


def test_qhadamw_is_adamw_where_nu_is_1() -> None:
    """With nu=1 and the same betas it is torch's AdamW, to rounding; with 0.7 it is not."""
    steps, options = gradients(1, 50, 40), {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1}
    ends = []
    for make, more in ((torch.optim.AdamW, {}), (QHAdamW, {"nu": 1.0}), (QHAdamW, {"nu": 0.7})):
        p = torch.nn.Parameter(gradients(0, 1, 40)[0])
        ends.append(trained(make([p], **options, **more), p, steps))
    assert torch.allclose(ends[0], ends[1], rtol=0, atol=1e-6)
    assert float((ends[0] - ends[2]).abs().max()) > 1e-3


def test_qhadamw_state_made_at_attach_changes_nothing() -> None:
    """Moments that `attach` makes give the steps of those that the first step makes, and a state
    dict goes on to the bit.
    """
    ends = []
    for early in (False, True):
        p = torch.nn.Parameter(gradients(0, 1, 40)[0])
        made = QHAdamW([p], lr=0.01, **RULE)
        if early:
            materialise(made)
            assert set(made.state[p]) == {"step", "exp_avg", "exp_avg_sq"}
        trained(made, p, gradients(1, 5, 40))
        again = QHAdamW([p], lr=0.5)
        again.load_state_dict(copy.deepcopy(made.state_dict()))
        ends.append(trained(again if early else made, p, gradients(2, 5, 40)))
    assert torch.equal(*ends)


@in_ranks(1, 2)
def test_qhadamw_shards_train_as_whole_tensors(me: Any) -> None:
    """FSDP2's shards of a matrix take the steps that the whole matrix takes."""
    start, steps = gradients(0, 1, 6, 5)[0], gradients(1, 8, 6, 5)
    whole = torch.nn.Linear(5, 6, bias=False)
    whole.weight.data.copy_(start)
    shards = copy.deepcopy(whole)
    fully_shard(shards, mesh=init_device_mesh("cpu", (2,)))
    ends = []
    for model in (whole, shards):
        made = QHAdamW(model.named_parameters(), lr=0.01, **RULE)
        for g in steps:
            step(made, (model(torch.eye(5)) * g.t()).sum())
        ends.append(model.weight.detach())
    assert torch.equal(ends[1].full_tensor(), ends[0])


@pytest.mark.parametrize(
    "wrong, text",
    [({"nu": 1.5}, "nu=1.5"), ({"betas": (1.0, 0.9)}, "betas=(1.0, 0.9)"), ({"lr": -1}, "lr=-1")],
)
def test_qhadamw_numbers_out_of_range_refused(wrong: dict[str, Any], text: str) -> None:
    """A number out of its range is refused with what is allowed."""
    assert "allowed is" in refusal(
        lambda: QHAdamW([torch.nn.Parameter(torch.ones(1))], **wrong), text
    )


TAKERS = "full local_sgd local_adam desloc diloco streaming_diloco decoupled_momentum sparse_loco "
TAKERS += "sign_loco"


@pytest.mark.parametrize("name", TAKERS.split())
def test_qhadamw_presets_make_and_take_it(name: str) -> None:
    """Where AdamW is the inner optimizer `inner_optimizer="qhadamw"` makes and attaches it, and the
    preset as it is takes it, too.
    """
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    config = preset(name, inner_optimizer="qhadamw")
    optimizer = base_optimizer(config, model.named_parameters(), lr=1e-3)
    assert type(optimizer) is QHAdamW and optimizer.param_groups[0]["weight_decay"] == 0.1
    for chosen in (config, preset(name)):
        fsdp_demo.attach(optimizer, chosen, model=model).finish()


@pytest.mark.parametrize(
    "name, chosen, parts",
    [
        ("muloco", "qhadamw", ["'muloco'", "allowed are muonadamw"]),
        ("diloco", "sgd", ["'diloco'", "adamw, qhadamw, lowrankadamw, muonadamw"]),
        ("demo", "qhadamw", ["sgd, adamw, as_is"]),
    ],
)
def test_inner_optimizer_of_another_method_refused(
    name: str, chosen: str, parts: list[str]
) -> None:
    """An inner optimizer that the preset is not defined for is refused with those that it is."""
    refusal(lambda: preset(name, inner_optimizer=chosen), *parts)


def test_inner_optimizer_qhadamw_refuses_adamw() -> None:
    """Who asks for QHAdamW and attaches AdamW is told so."""
    optimizer = torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())
    config = preset("diloco", inner_optimizer="qhadamw")
    refusal(lambda: fsdp_demo.attach(optimizer, config), "defined for qhadamw, found AdamW")
