"""What comes back beside the model's trained parameters in their usual order: parameters in another
order, the rest of the model, what only an optimizer holds.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint  # before the first fork: it takes a second
from torch import nn

import fsdp_demo
from fsdp_demo.checkpoint import run_state

from ..support.inside import in_ranks
from ..support.plain_loop import PlainLoop

STOP, END = 5, 9  # the exchanges are at 4 and 8
# torch keeps layouts by shape, and those of width 8 are from the rank server's own warm-up
WIDTH = 12


class Net(nn.Module):
    """Two layers of equal shapes; and beside them what no optimizer steps."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.register_buffer("chosen", torch.zeros(3, dtype=torch.int64))  # by a router
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.b(self.a(x))) - self.teacher(x)


class Job(PlainLoop):
    """Its method clips nothing: a norm over another order of parameters has other last bits."""

    def __init__(self, me: Any, where: Path, seed: int, resume: bool, groups: str = "abn"):
        torch.manual_seed(seed)
        self.me, model = me, Net()
        # learns beside the model: nothing of it depends on a rank's own data
        self.criterion, self.learns = nn.Parameter(torch.full((3,), float(seed))), "c" in groups
        if me.procs > 1:
            from torch.distributed.fsdp import fully_shard

            fully_shard(model, mesh=me.mesh())
        parts = {
            "a": model.a,
            "b": model.b,
            "n": model.norm,
            "c": nn.ParameterList([self.criterion]),
        }
        chosen = [{"params": [*parts[g].parameters()]} for g in groups]
        config = fsdp_demo.preset("diloco", period=4, clip=None)
        super().__init__(where, model, torch.optim.AdamW(chosen, lr=0.01), config, resume)

    def loss(self) -> torch.Tensor:
        draw = torch.Generator().manual_seed(100 * self.exchange.step + self.me.island)
        loss = self.model(torch.randn(4, WIDTH, generator=draw) + 1).square().mean()
        if self.learns:
            loss = loss + (self.criterion - 3 - self.me.island).square().sum()
        return loss

    def step(self) -> None:
        super().step()
        with torch.no_grad():
            self.model.teacher.weight.lerp_(self.model.a.weight, 0.5)
            self.model.chosen.add_(torch.tensor([1, 0, 1 + self.me.island]))

    def numbers(self) -> dict[str, torch.Tensor]:
        """This rank's parts by name, with Adam's states."""
        live = dict(self.model.state_dict()) | {"criterion": self.criterion}
        live |= {
            f"{name}.{key}": value
            for name, p in [*self.model.named_parameters(), ("criterion", self.criterion)]
            for key, value in self.optimizer.state.get(p, {}).items()
        }
        return {
            n: getattr(t, "to_local", lambda t=t: t)().detach().clone() for n, t in live.items()
        }


def apart(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> list[str]:
    return [n for n in sorted({*one, *two}) if n not in one or not torch.equal(one[n], two[n])]


def gone_on(me, groups, anew) -> tuple[list[str], list[str]]:
    """What differs after a restore, and at the end, from the run that was not stopped."""
    logging.basicConfig(level=logging.INFO, force=True)
    whole = Job(me, me.folder / "run", 1, False, groups)
    there = whole.until(STOP)
    whole.state.save(whole.exchange)
    end = whole.until(END)
    whole.finish()
    os.environ["ISLAND_RUN"] += "-again"
    again = Job(me, me.folder / "run", 2, True, anew)
    assert again.state.step == STOP
    reached = again.until(END)
    again.finish()
    return apart(there, again.loaded), apart(end, reached)


@pytest.mark.parametrize("procs", [1, 2])
@in_ranks(2)
def test_run_state_parameters_in_other_order(me: Any, procs: int) -> None:
    """Parameters in another order keep their values, moments and anchors. Values, moments and,
    after the next exchange, anchors: `a` and `b` have the same shapes.
    """
    assert gone_on(me, "abn", "ban") == (["criterion"], ["criterion"])


@pytest.mark.parametrize("procs", [1, 2])
@in_ranks(2)
def test_run_state_optimizer_only_parameters(me: Any, procs: int) -> None:
    """Parameters that only the optimizer holds come back."""
    assert gone_on(me, "abnc", "abnc") == ([], [])


def left(me: Any, where: Path) -> dict[str, torch.Tensor]:
    job = Job(me, where, 1, False, "abnc")
    there = job.until(STOP)
    job.state.save(job.exchange)
    job.finish()
    return there


def taken(me: Any, where: Path) -> dict[str, torch.Tensor]:
    job = Job(me, where, 2, True, "abnc")
    job.exchange.finish()
    return job.loaded


def test_run_state_fewer_islands(run_ranks: Any, tmp_path: Path) -> None:
    """Fewer islands go on from their own checkpoint."""
    one, two = run_ranks(left, islands=2, procs=1, args=(tmp_path / "run",))
    (found,) = run_ranks(taken, islands=1, procs=1, args=(tmp_path / "run",))
    for name in ("a.weight", "norm.running_var", "teacher.weight", "criterion"):
        assert not torch.equal(one[name], two[name])
    assert apart(one, found) == []


def test_run_state_names_outside_model() -> None:
    """The names of parameters outside the model differ from those in it."""
    model, criterion = nn.Linear(2, 2), nn.Linear(2, 2)
    groups = [{"params": list(m.named_parameters())} for m in (model, criterion)]
    live = run_state.tensors_of(model, [torch.optim.SGD(groups)])
    assert list(live) == [
        "model.weight",
        "model.bias",
        "optimizer.weight'.parameter",
        "optimizer.bias'.parameter",
    ]
    assert live["optimizer.bias'.parameter"].data_ptr() == criterion.bias.data_ptr()


def test_run_state_mask_of_infinities(tmp_path: Path) -> None:
    """A mask of -inf does not prevent a save of the model."""

    def made(value: float, resume: bool) -> PlainLoop:
        model = nn.BatchNorm1d(4)
        model.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
        with torch.no_grad():
            model.running_var.fill_(value)
        optimizer, alone = torch.optim.AdamW(model.parameters()), fsdp_demo.Topology.from_env({})
        return PlainLoop(tmp_path, model, optimizer, fsdp_demo.preset("diloco"), resume, alone)

    first = made(3.0, False)
    first.state.save(first.exchange, last=True)
    first.close()
    again = made(1.0, True)
    again.close()
    assert torch.equal(again.model.running_var, first.model.running_var)
