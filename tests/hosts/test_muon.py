"""Muon for matrices and AdamW for the rest: one combined optimizer is the two it is made of, under
every trainer habit.
"""

from __future__ import annotations

import copy
import io
import math
import os
import pickle
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import fsdp_demo
from fsdp_demo import MuonAdamW, preset
from fsdp_demo.hosts.sharded_muon import ShardedMuon
from fsdp_demo.tools.planner import choosing

from ..support.inside import in_ranks
from ..support.probe import whole
from ..support.two_layers import step


class Tiny(nn.Module):
    """An embedding, two layers with biases, a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 16)
        self.layers = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        self.lm_head = nn.Linear(16, 11, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        return self.lm_head(h)


MATRICES = ["layers.0.weight", "layers.1.weight"]


def two(model: nn.Module, kind: Any = torch.optim.Muon) -> list[torch.optim.Optimizer]:
    named = dict(model.named_parameters())
    matrices = [(n, named.pop(n)) for n in MATRICES]
    muon = kind(matrices, lr=0.02, momentum=0.9, weight_decay=1e-4)
    rest = dict(lr=0.02, betas=(0.9, 0.95), weight_decay=1e-4)
    return [muon, torch.optim.AdamW(list(named.items()), **rest)]


def loss(model: nn.Module, t: int, island: int = 0) -> torch.Tensor:
    x = torch.randint(0, 11, (8, 5), generator=torch.Generator().manual_seed(100 * island + t))
    return nn.functional.cross_entropy(model(x).flatten(0, 1), (x.flatten() * 3 + 1) % 11)


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[n], b[n]) for n in b)


def test_muon_adamw_is_its_two_parts() -> None:
    """The combined optimizer takes the steps of Muon and AdamW, and schedulers reach both."""
    a, b = Tiny(), Tiny()
    one, parts = MuonAdamW(a.named_parameters(), lr=0.02), two(b)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (one, *parts)]
    for t in range(5):
        step([one], loss(a, t))
        step(parts, loss(b, t))
        for s in schedules:
            s.step()
    assert equal(whole(a), whole(b))
    rates = [g["lr"] for g in one.param_groups]
    assert rates == [g["lr"] for o in parts for g in o.param_groups] != [0.02]
    kept = {n: set(one.state[p]) for n, p in a.named_parameters()}
    moments = {"step", "exp_avg", "exp_avg_sq"}
    assert all(k == ({"momentum_buffer"} if n in MATRICES else moments) for n, k in kept.items())


def test_muon_adamw_state_dict_reads_back() -> None:
    """The state of the combined optimizer comes back from a file."""
    a = Tiny()
    one = MuonAdamW(a.named_parameters(), lr=0.02)
    for t in range(3):
        step(one, loss(a, t))
    file = io.BytesIO()
    torch.save({"model": a.state_dict(), "optimizer": one.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    b = Tiny()
    again = MuonAdamW(b.named_parameters(), lr=0.5)
    b.load_state_dict(saved["model"])
    again.load_state_dict(copy.deepcopy(saved["optimizer"]))
    for model, o in ((a, one), (b, again)):
        step(o, loss(model, 3))
    assert equal(whole(a), whole(b))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_muon_adamw_copies_train_on(copied: Any) -> None:
    """A copy of model and optimizer, by `copy` or `pickle`, goes on as they do."""
    a = Tiny()
    one = MuonAdamW(a.named_parameters(), lr=0.02)
    step([one], loss(a, 0))
    b, other = copied((a, one))
    for model, o in ((a, one), (b, other)):
        step([o], loss(model, 1))
    assert equal(whole(a), whole(b)) and other.param_groups is not one.param_groups


def test_muon_adamw_replaced_state_is_forgotten() -> None:
    """A script that gives the optimizer an empty state goes on as with a new optimizer."""
    a, b = Tiny(), Tiny()
    used = MuonAdamW(a.named_parameters(), lr=0.02)
    step([used], loss(a, 0))
    b.load_state_dict(a.state_dict())
    used.state = defaultdict(dict)
    for model, o in ((a, used), (b, MuonAdamW(b.named_parameters(), lr=0.02))):
        step([o], loss(model, 1))
    assert equal(whole(a), whole(b)) and len(used.state) == len(list(a.parameters()))


def test_muon_adamw_arguments() -> None:
    """The combined optimizer needs names, and splits parameters by shape and pattern."""
    with pytest.raises(ValueError, match="named_parameters"):
        MuonAdamW(Tiny().parameters())
    only = MuonAdamW([("layers.0.bias", nn.Parameter(torch.ones(3)))])
    patterns = MuonAdamW(Tiny().named_parameters(), adamw=("*",))
    for optimizer in (only, patterns):
        assert [type(p).__name__ for p in optimizer.parts] == ["AdamW"]
    optimizer = fsdp_demo.base_optimizer(preset("muloco"), Tiny().named_parameters())
    assert isinstance(optimizer, MuonAdamW)
    muon, adamw = optimizer.param_groups[:2]
    assert (muon["lr"], muon["momentum"], muon["weight_decay"]) == (0.0224, 0.9, 1e-4)
    assert adamw["lr"] == 0.0224


@pytest.mark.parametrize("islands, procs", [(2, 1), (2, 2)])
@in_ranks()
def test_muon_adamw_trains_as_two_optimizers(me, islands, procs):
    """Two optimizers and the combined one train alike under an exchange."""

    ends = []
    for combined in (True, False):
        os.environ["ISLAND_RUN"] += "+"
        model = Tiny()
        if procs > 1:
            fully_shard(model, mesh=me.mesh())
        kind = ShardedMuon if procs > 1 else torch.optim.Muon
        made = [MuonAdamW(model.named_parameters(), lr=0.02)] if combined else two(model, kind)
        config = preset("muloco", period=3, value_dtype="int4")
        exchange = fsdp_demo.attach(made if len(made) > 1 else made[0], config, model=model)
        for t in range(7):
            step(made, loss(model, t, me.rank))
            assert exchange.digests_equal() == ((t + 1) % 3 == 0)
        exchange.finish()
        assert exchange.digests_equal()
        ends.append(whole(model))
    assert equal(*ends)


def test_muon_adamw_desloc_averages_states_of_each_part(run_ranks):
    """Under `desloc` momentum_buffer exists for matrices, the moments for the rest: each channel
    covers its own.
    """

    def run(me):
        model = Tiny()
        optimizer = MuonAdamW(model.named_parameters(), lr=0.02)
        clocks = {"momentum_buffer": 1, "exp_avg": 2, "exp_avg_sq": 4}
        config = preset("desloc", embeddings=True, period=2, states=clocks)
        exchange = fsdp_demo.attach(optimizer, config, model=model)
        params = exchange.host.params
        covered = {c.channel.name: [params[i].name for i in c.covered] for c in exchange.channels}
        states = []
        for t in range(8):
            step(optimizer, loss(model, t, me.island))
            named = model.named_parameters()
            states.append({n: copy.deepcopy(optimizer.state[p]) for n, p in named})
        exchange.detach()
        return covered, states

    (covered, a), (_, b) = run_ranks(run, 2, 1)
    assert covered["momentum_buffer"] == MATRICES
    assert set(covered["exp_avg"]) == set(covered["parameter"]) - set(MATRICES)
    for t in range(8):
        for name, every in (("momentum_buffer", 2), ("exp_avg", 4), ("exp_avg_sq", 8)):
            for n in a[t]:
                if name in a[t][n]:
                    same = torch.equal(a[t][n][name], b[t][n][name])
                    assert same == ((t + 1) % every == 0), (t, name)


def test_muon_desloc_refuses_a_missing_state() -> None:
    """A channel of a state that no parameter has is refused."""
    model = Tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    said = "'exp_avg', but no covered parameter has it .found: momentum_buffer"
    with pytest.raises(ValueError, match=said):
        fsdp_demo.attach(optimizer, "desloc", model=model)
    optimizer = torch.optim.RMSprop(model.parameters())
    with pytest.raises(ValueError, match="found: none yet"):
        fsdp_demo.attach(optimizer, "desloc", model=model, states={"square_avg": 3})


def test_muon_muloco_refused_for_adamw_alone() -> None:
    """`muloco` is refused for AdamW alone, which is the partner of Muon there, for what is no
    matrix.
    """
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match="defined for Muon with AdamW as its partner, found AdamW"):
        fsdp_demo.attach(optimizer, "muloco", model=model)
    assert not choosing._allowed(fsdp_demo.preset("muloco"), "adamw")
    assert choosing._allowed(fsdp_demo.preset("muloco"), "muonadamw")
    assert choosing._allowed(fsdp_demo.preset("diloco"), "adamw")


def test_muon_momentum_in_bf16_is_not_normed() -> None:
    """A momentum in bf16 stays what it is: torch's Muon without Nesterov momentum divides it by its
    norm.
    """
    p = nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16))
    optimizer = ShardedMuon([("w", p)], lr=0.02, momentum=0.5, nesterov=False)
    p.grad = torch.full_like(p, 8.0)
    optimizer.step()
    assert torch.equal(optimizer.state[p]["momentum_buffer"], torch.full_like(p, 4.0))


# ---- on shards ---------------------------------------------------------------------------------


class Widths(nn.Module):
    """Matrices higher than wide and wider than high, with rows that two or three ranks share
    unequally, and more of them than ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = [(5, 7), (7, 4), (4, 4), (9, 4), (1, 9)]
        self.layers = nn.ModuleList([nn.Linear(b, a) for a, b in sizes])


def stepped(me: Any, shape: tuple[int, ...], muon: bool) -> tuple[dict[str, Any], int]:
    """Parameters and momenta after three steps, and the collectives of the last."""
    model = Widths()
    whole_gradients = [
        [torch.randn(p.shape, generator=torch.Generator().manual_seed(9 * t + i)) for t in range(3)]
        for i, p in enumerate(model.parameters())
    ]
    if shape:
        names = ("replicate", "shard")[-len(shape) :]
        fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    named = dict(model.named_parameters())
    matrices = {n: p for n, p in named.items() if p.ndim == 2}
    made = ShardedMuon if muon else torch.optim.Muon
    optimizer = made(list(matrices.items()), lr=0.02, weight_decay=0.1)
    with CommDebugMode() as seen:
        for t in range(3):
            for p, gradients in zip(named.values(), whole_gradients, strict=True):
                p.grad = (
                    distribute_tensor(gradients[t], p.device_mesh, p.placements)
                    if isinstance(p, DTensor)
                    else gradients[t]
                )
            list(matrices.values())[2].grad = None  # not every matrix has a part in a loss
            before = seen.get_total_counts()
            optimizer.step()
            last = seen.get_total_counts() - before
    states = {n: optimizer.state[p].get("momentum_buffer") for n, p in matrices.items()}
    found = {
        f"{kind}.{n}": (v.full_tensor() if isinstance(v, DTensor) else v).detach()
        for kind, every in (("weight", matrices), ("momentum", states))
        for n, v in every.items()
        if v is not None
    }
    return found, last


@pytest.mark.parametrize("shape", [(), (2,), (3,), (2, 2)])
def test_muon_step_on_shards_is_that_of_whole_matrices(run_ranks, shape: tuple[int, ...]) -> None:
    """A step of Muon on shards is that of whole matrices to the last bit, with two collectives per
    matrix.
    """

    def run(me):
        whole, _ = stepped(me, (), muon=False)
        found, counts = stepped(me, shape, muon=True)
        return equal(found, whole), whole.keys() == found.keys(), counts

    for same, keys, counts in run_ranks(run, 1, math.prod(shape)):
        assert same and keys
        assert counts == (2 * 4 if shape else 0)
