"""What an optimizer keeps comes back from a checkpoint, bit for bit, whatever the optimizer: states
that are made at its first step, numbers, tensors of another package's class. What has no place is
refused.
"""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed.checkpoint  # before the first fork: it takes a second

import fsdp_demo
from fsdp_demo import LowRankAdamW
from fsdp_demo.errors import NotFinite
from fsdp_demo.rendezvous.topology import Topology

from ..support.plain_loop import PlainLoop

STOP, STEPS = 3, 6
REFUSED = ("LBFGS", "SparseAdam")  # several closures a step; sparse gradients
OF_TORCH = {
    name: getattr(torch.optim, name)
    for name in dir(torch.optim)
    if isinstance(getattr(torch.optim, name), type) and name not in ("Optimizer", *REFUSED)
}


class Coded(torch.Tensor):
    """As torchao's and others' states in 8 bits: codes and a scale; no operation but detach."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(f"{func} of Coded")

    def value(self):
        return self.codes.float() * self.scale

    def put(self, value):
        self.scale.copy_(value.abs().max() / 127)
        self.codes.copy_((value / self.scale.clamp(min=1e-12)).round())


class Foreign(torch.optim.Optimizer):
    """Keeps a counter as a number (bitsandbytes, Prodigy), a momentum in a class of its own
    (torchao), bytes with a table for all parameters (bitsandbytes), and a number in its group.
    """

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "k": 0})
        self.table = torch.linspace(0, 1, 256)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["step"], state["table"] = 0, self.table
                    zeros = torch.zeros_like(p, dtype=torch.int8)
                    state["momentum"] = Coded(zeros, torch.zeros(1))
                    state["bytes"] = torch.zeros_like(p, dtype=torch.uint8)
                state["step"] += 1
                state["momentum"].put(state["momentum"].value() * 0.9 + p.grad)
                state["bytes"].add_(p.grad.abs().mul(50).to(torch.uint8))
                seen = state["table"][state["bytes"].long()] + 1
                p.sub_(state["momentum"].value() / seen * group["lr"] / group["k"] / state["step"])


MORE = {
    "dampening": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9, dampening=0.1),
    "momentum": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9, nesterov=True),
    "centered": lambda p: torch.optim.RMSprop(p, 1e-2, momentum=0.9, centered=True),
    "amsgrad": lambda p: torch.optim.AdamW(p, 1e-2, amsgrad=True),
    "lowrank": lambda p: LowRankAdamW([{"params": p, "rank": 2, "error_feedback": True}]),
    "foreign": lambda p: Foreign(p, 1e-2),
}


class Job(PlainLoop):
    """One replica; `kind` names the optimizer."""

    def __init__(self, folder, kind, resume=False, fresh=False, seed=0, preset="diloco"):
        torch.manual_seed(seed)
        layers = torch.nn.Linear(8, 16, bias=False), torch.nn.Linear(16, 4, bias=False)
        model = torch.nn.Sequential(layers[0], torch.nn.Tanh(), layers[1])
        make = MORE.get(kind) or (lambda p: OF_TORCH[kind](p, lr=1e-2))
        changes = {"inner_optimizers": "as_is", "clip": None} if preset == "diloco" else {}
        changes |= {"inner_rank": 2} if kind == "lowrank" else {}
        config, alone = fsdp_demo.preset(preset, **changes), Topology.from_env({})
        super().__init__(
            folder, model, make(model.parameters()), config, resume, alone, fresh=fresh
        )

    def loss(self):
        generator = torch.Generator().manual_seed(self.exchange.step)
        return self.model(torch.randn(4, 8, generator=generator)).square().mean()


def stopped(folder, kind, **more):
    """The parameters of a run of STEPS that was saved at STOP."""
    job = Job(folder, kind, **more)
    job.until(STOP)
    job.state.save(job.exchange)
    job.until(STEPS)
    return job.close()


@pytest.mark.parametrize("kind", [*OF_TORCH, *MORE])
def test_optimizer_state_round_trip(tmp_path, kind):
    """The state of an optimizer comes back bit for bit."""
    whole = stopped(tmp_path, kind)
    again = Job(tmp_path, kind, resume=True, seed=1)
    assert again.exchange.step == STOP
    again.until(STEPS)
    assert all(map(torch.equal, again.close(), whole))


@pytest.mark.parametrize(("before", "after", "what"), [
    ("AdamW", "SGD", "AdamW there, SGD here: exp_avg, exp_avg_sq, step of 0.weight"),
    ("SGD", "AdamW", "SGD there, AdamW here: exp_avg, exp_avg_sq, step of 0.weight"),
    ("AdamW", "RMSprop", "AdamW there, RMSprop here"),
    ("RMSprop", "NAdam", "RMSprop there, NAdam here"),
])  # fmt: skip
def test_optimizer_state_of_other_optimizer(tmp_path, caplog, before, after, what):
    """The state of another optimizer is refused, or begins anew where the user asks for it."""
    stopped(tmp_path, before)
    with pytest.raises(ValueError, match=f"does not fit this optimizer .{what}") as found:
        Job(tmp_path, after, resume=True)
    assert "\n" not in str(found.value) and "--fresh-exchange" in str(found.value)
    first = Job(tmp_path / "reference", before)
    first.until(STOP)
    with caplog.at_level(logging.WARNING):
        weights = Job(tmp_path, after, resume=True, fresh=True, seed=1)
    assert "only the model is taken, the optimizer's state begins anew" in caplog.text
    assert weights.exchange.step == STOP
    assert all(map(torch.equal, weights.close(), first.close()))


def test_optimizer_state_other_preset_refused(tmp_path):
    """Another preset is refused in one sentence."""
    stopped(tmp_path, "SGD", preset="demo")
    with pytest.raises(ValueError, match="SGD there, AdamW here") as found:
        Job(tmp_path, "AdamW", resume=True)
    assert len(str(found.value).splitlines()) == 1


def test_optimizer_state_unknown_tensor_refused(tmp_path):
    """A saved tensor that the model does not have is refused."""
    job = Job(tmp_path, "AdamW")
    job.model.register_buffer("more", torch.ones(3))
    job.until(STOP)
    job.state.save(job.exchange)
    job.close()
    with pytest.raises(ValueError, match=r"model.more is \(3,\) there, absent here"):
        Job(tmp_path, "AdamW", resume=True)


def test_optimizer_state_not_finite_not_saved(tmp_path, caplog):
    """An optimizer state with values that are not finite is not saved."""
    job = Job(tmp_path, "foreign")
    job.until(STOP)
    job.optimizer.state[job.model[0].weight]["momentum"].scale.fill_(float("nan"))
    job.state.save(job.exchange)
    assert "momentum.scale holds values that are not finite" in caplog.text
    with pytest.raises(NotFinite, match="holds values that are not finite"):
        job.state.save(job.exchange, last=True)
    assert STOP not in job.state.checkpoints.whole()
    job.close()
