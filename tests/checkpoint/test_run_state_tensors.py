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
from fsdp_demo.checkpoint import CheckpointManager, RunState, run_state

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


class Job:
    """A loop in plain torch. Its method clips nothing: a norm over another order of parameters has
    other last bits.
    """

    def __init__(self, me: Any, where: Path, seed: int, resume: bool, groups: str = "abn"):
        torch.manual_seed(seed)
        self.me, self.model = me, Net()
        # learns beside the model: nothing of it depends on a rank's own data
        self.criterion = nn.Parameter(torch.full((3,), float(seed)))
        if me.procs > 1:
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.model, mesh=me.mesh())
        parts = {
            "a": [*self.model.a.parameters()],
            "b": [*self.model.b.parameters()],
            "n": [*self.model.norm.parameters()],
            "c": [self.criterion],
        }
        self.learns = "c" in groups
        self.optimizer = torch.optim.AdamW([{"params": parts[g]} for g in groups], lr=0.01)
        topology = fsdp_demo.Topology.from_env()
        self.state = RunState(
            CheckpointManager(where / topology.name, topology), self.model, self.optimizer
        )
        self.state.restore(resume)
        self.loaded = self.numbers()
        self.exchange = fsdp_demo.attach(
            self.optimizer,
            fsdp_demo.preset("diloco", period=4, clip=None),
            model=self.model,
            topology=topology,
            step=self.state.step,
            state=self.state.saved,
        )
        self.state.restore_random()

    def until(self, step: int) -> dict[str, torch.Tensor]:
        while self.exchange.step < step:
            draw = torch.Generator().manual_seed(100 * self.exchange.step + self.me.island)
            loss = self.model(torch.randn(4, WIDTH, generator=draw) + 1).square().mean()
            if self.learns:
                loss = loss + (self.criterion - 3 - self.me.island).square().sum()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            with torch.no_grad():
                self.model.teacher.weight.lerp_(self.model.a.weight, 0.5)
                self.model.chosen.add_(torch.tensor([1, 0, 1 + self.me.island]))
        return self.numbers()

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


def gone_on(me, groups, anew, spoil=lambda job: None) -> tuple[list[str], list[str], int]:
    """What differs after a restore, and at the end, from the run that was not stopped."""
    logging.basicConfig(level=logging.INFO, force=True)
    run = os.environ["ISLAND_RUN"]
    whole = Job(me, me.folder / "run", 1, False, groups)
    there = whole.until(STOP)
    whole.state.save(whole.exchange)
    spoil(whole)
    end = whole.until(END)
    whole.exchange.finish()
    whole.state.checkpoints.close()
    os.environ["ISLAND_RUN"] = f"{run}-again"
    again = Job(me, me.folder / "run", 2, True, anew)
    reached = again.until(END)
    again.exchange.finish()
    again.state.checkpoints.close()
    return apart(there, again.loaded), apart(end, reached), again.state.step


@pytest.mark.parametrize("procs", [1, 2])
def test_run_state_parameters_in_other_order(run_ranks: Any, procs: int) -> None:
    """Parameters in another order keep their values, moments and anchors. Values, moments and,
    after the next exchange, anchors: `a` and `b` have the same shapes.
    """
    found = run_ranks(gone_on, islands=2, procs=procs, args=("abn", "ban"), check=False)
    for rank in found:
        assert rank.value == (["criterion"], ["criterion"], STOP), rank.error or rank.log


@pytest.mark.parametrize("procs", [1, 2])
def test_run_state_optimizer_only_parameters(run_ranks: Any, procs: int) -> None:
    """Parameters that only the optimizer holds come back."""
    for found in run_ranks(gone_on, islands=2, procs=procs, args=("abnc", "abnc")):
        assert found == ([], [], STOP)


def left(me: Any, where: Path) -> dict[str, torch.Tensor]:
    job = Job(me, where, 1, False, "abnc")
    there = job.until(STOP)
    job.state.save(job.exchange)
    job.exchange.finish()
    job.state.checkpoints.close()
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

    def made(value: float, resume: bool) -> tuple[nn.Module, RunState, Any]:
        model = nn.BatchNorm1d(4)
        model.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
        with torch.no_grad():
            model.running_var.fill_(value)
        optimizer, topology = torch.optim.AdamW(model.parameters()), fsdp_demo.Topology.from_env({})
        state = RunState(CheckpointManager(tmp_path / "run", topology), model, optimizer)
        state.restore(resume)
        exchange = fsdp_demo.attach(
            optimizer, "diloco", model=model, topology=topology, state=state.saved
        )
        return model, state, exchange

    model, state, exchange = made(3.0, False)
    state.save(exchange, last=True)
    exchange.detach()
    again, _, exchange = made(1.0, True)
    exchange.detach()
    assert torch.equal(again.running_var, model.running_var)
