"""LowRankAdamW: its rule, AdamW as a case of it, shards, checkpoints, bytes, memory, refusals."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import fsdp_demo
from fsdp_demo import LowRankAdamW, Mismatch, base_optimizer, preset
from fsdp_demo.checkpoint.sharded_state import load_tensors, save_tensors, tensors_of
from fsdp_demo.exchange import run_specification, runtime
from fsdp_demo.exchange.plan import inner_state, plan_model
from fsdp_demo.hosts.optimizers import materialise
from fsdp_demo.tools.planner.models import load

from ..oracles.lowrank import first, iterated
from ..support import threaded
from ..support.inside import in_ranks, in_threads
from ..support.plain_loop import PlainLoop
from ..support.refused import refusal
from .test_qhadamw import gradients, trained

LOW = preset("desloc", rank=4, period=2, states={"exp_avg": 2, "exp_avg_sq": 3}, clip=None)


def whole(t: torch.Tensor) -> torch.Tensor:
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def matrix(p: torch.nn.Parameter, **options: Any) -> LowRankAdamW:
    return LowRankAdamW([("a.weight", p)], lr=0.01, **options)


def test_lowrank_is_adamw_at_full_rank() -> None:
    """At full rank, and for embeddings and vectors at any rank, it is AdamW, whatever `nu`."""
    named = {"a.weight": (6, 8), "embed.weight": (6, 8), "bias": (5,)}
    ends = []
    for make, more in (
        (torch.optim.AdamW, {}),
        (LowRankAdamW, {"rank": 8}),
        (LowRankAdamW, {"rank": 2}),
    ):
        ps = [(n, torch.nn.Parameter(gradients(0, 1, *s)[0])) for n, s in named.items()]
        made = make(ps, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, **more)
        for t in range(20):
            for i, (_, p) in enumerate(ps):
                p.grad = gradients(10 * t + i, 1, *p.shape)[0]
            made.step()
        ends.append([p.detach() for _, p in ps])
    for full, low, adamw in zip(ends[1], ends[2], ends[0], strict=True):
        assert torch.allclose(full, adamw, rtol=0, atol=1e-6)
        assert torch.allclose(low, adamw, rtol=0, atol=1e-6) != (low is ends[2][0])


def test_lowrank_is_adamw_of_projected_gradient() -> None:
    """With a fixed projection Q and nu=1 it is torch's AdamW on G Q, brought back by Q^T: GaLore's
    step.
    """
    start, steps = gradients(0, 1, 6, 9)[0], gradients(1, 30, 6, 9)
    p, q = torch.nn.Parameter(start.clone()), first(9, 3).float()
    low = torch.nn.Parameter(torch.zeros(6, 3))
    options: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.0}
    adamw = torch.optim.AdamW([low], **options)
    moved = trained(adamw, low, [g @ q for g in steps]) @ q.T
    made = LowRankAdamW([("a.weight", p)], rank=3, nu=1.0, **options)
    assert torch.allclose(trained(made, p, steps), start + moved, rtol=0, atol=1e-6)


def test_lowrank_projection_is_that_of_svd() -> None:
    """Remade often from one change, Q spans its leading right singular vectors; without a change it
    stays; what a change of lower rank leaves open stays, too.
    """
    p = torch.nn.Parameter(torch.zeros(12, 10))
    made = matrix(p, rank=3)
    materialise(made)
    q = made.state[p]["projection"]
    before = q.clone()
    made.remake(p, torch.zeros(12, 10))
    assert torch.allclose(q, before, atol=1e-6)
    change = gradients(1, 1, 12, 10)[0]
    made.remake(p, change)
    assert torch.allclose(q.double(), iterated(change.double(), before.double()), atol=1e-5)
    for _ in range(60):
        made.remake(p, change)
    right = torch.linalg.svd(change)[2][:3].T
    assert torch.allclose(q @ q.T, right @ right.T, atol=1e-4)
    thin = gradients(2, 1, 12, 1)[0] @ gradients(3, 1, 1, 10)[0]
    made.remake(p, thin)
    assert torch.allclose(thin @ q @ q.T, thin, atol=1e-4)
    assert torch.allclose(q.T @ q, torch.eye(3), atol=1e-5)


@in_ranks(1, 2)
def test_lowrank_shards_train_as_whole_and_reshard(me: Any) -> None:
    """FSDP2's unequal rows of a matrix take the whole one's steps, with projections from unequal
    rows of its change; saved by two shards its state is that of a whole matrix, and back.
    """
    full = torch.nn.Linear(9, 7, bias=False)
    full.weight.data.copy_(gradients(0, 1, 7, 9)[0])
    shards = copy.deepcopy(full)
    fully_shard(shards, mesh=init_device_mesh("cpu", (2,)))
    optimizers = []
    for model in (full, shards):
        made = LowRankAdamW(model.named_parameters(), lr=0.01, rank=4, error_feedback=True)
        for t, g in enumerate(gradients(1, 8, 7, 9)):
            (model(torch.eye(9)) * g.t()).sum().backward()
            made.step()
            made.zero_grad()
            if t % 3 == 2:
                rows = slice(0, 4) if me.proc == 0 else slice(4, 7)
                change = gradients(t, 1, 7, 9)[0]
                made.remake(model.weight, change if model is full else change[rows])
        optimizers.append(made)
    assert torch.allclose(whole(shards.weight), full.weight, rtol=0, atol=1e-6)
    both = [o.state[m.weight] for o, m in zip(optimizers, (full, shards), strict=True)]
    for key, value in both[0].items():
        assert torch.allclose(whole(both[1][key]), value, rtol=0, atol=1e-5), key
    folder, group = me.folder / "model", dist.group.WORLD
    kept = {k: whole(v).clone() for k, v in both[1].items()}
    save_tensors(folder, tensors_of(shards, [optimizers[1]]), group, True)()
    for model in (full, shards):
        again = LowRankAdamW(model.named_parameters(), lr=0.01, rank=4, error_feedback=True)
        assert load_tensors(folder, model, [again], group)
        found = again.state[model.weight]
        assert all(torch.equal(whole(found[k]), v) for k, v in kept.items())


def test_lowrank_bytes_and_memory() -> None:
    """Moments of a matrix [n, k] have rank / k of AdamW's bytes, in memory and on the wire. Of
    Llama-3.2-1B's matrices at rank 512 0.28, projections included.
    """
    llama = [(n, s) for n, s in load("llama-3.2-1b") if len(s) == 2 and "embed" not in n]
    plain, low = preset("desloc"), preset("desloc", rank=512)
    moments = sum(8 * n * 512 for _, (n, _) in llama)
    bases = sum(4 * k * 512 for _, (_, k) in llama)
    assert inner_state(low, llama) == moments + bases
    assert inner_state(plain, llama) == sum(8 * n * k for _, (n, k) in llama)
    assert 0.28 < (moments + bases) / inner_state(plain, llama) < 0.29
    assert inner_state(low, llama, 2, 0) == moments // 2 + bases
    ours, theirs = (plan_model(c, llama, 3)[0].sections for c in (low, plain))
    assert ours[0].layout.numel == theirs[0].layout.numel
    assert all(8 * s.layout.numel == moments for s in ours[1:])


@pytest.mark.parametrize("touched", [False, True])
@in_ranks(2, 2)
def test_lowrank_projections_equal_and_compared(me: Any, touched: bool) -> Any:
    """Islands of two shards make equal projections, to the bit; where one island's has another bit,
    the next comparison finds it.
    """
    runtime.EVERY = 1  # rounds between comparisons
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Linear(8, 6))
    fully_shard(model, mesh=me.mesh())
    made = base_optimizer(LOW, model.named_parameters(), lr=0.01)
    exchange = fsdp_demo.attach(made, LOW, model=model)
    first_one = made.state[model[0].weight]["projection"].to_local().clone()

    def steps(count: int) -> None:
        for _ in range(count):
            torch.manual_seed(100 * exchange.step + me.rank)
            model(torch.randn(4, 16)).square().mean().backward()
            made.step()
            made.zero_grad()

    steps(6)
    found = [s["projection"].to_local() for s in made.state.values() if "projection" in s]
    assert len(found) == 2 and not torch.allclose(found[0], first_one, atol=1e-2)
    if touched:
        found[0][0, 0] += 1e-6 * me.island
        with pytest.raises(Mismatch, match="no longer equal"):
            steps(4)
        exchange.detach()
        return None
    exchange.finish()
    return [t.clone() for t in found]


class Life(PlainLoop):
    """One life of an island of `me.procs` shards, whose gradients do not depend on their number."""

    def __init__(self, me: Any, resume: bool):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Linear(8, 7))
        if me.procs > 1:
            fully_shard(model, mesh=me.mesh())
        made = base_optimizer(LOW, model.named_parameters(), lr=0.01)
        super().__init__(me.folder.parent / "saved", model, made, LOW, resume)

    def loss(self) -> torch.Tensor:
        return self.model(gradients(self.exchange.step, 1, 4, 16)[0]).square().mean()

    def numbers(self) -> list[torch.Tensor]:
        """Projections, then moments, then parameters, whole."""
        states = [self.optimizer.state.get(p, {}) for p in self.model.parameters()]
        keys = ("projection", "exp_avg", "exp_avg_sq")
        kept = [whole(s[key]) for key in keys for s in states if key in s]
        return [t.detach().clone() for t in [*kept, *map(whole, self.model.parameters())]]


def test_lowrank_state_of_other_shards(run_ranks: Any) -> None:
    """Saved by two shards in the midst of a round, projections come back as they were in one shard
    and in four, and make the same next ones.
    """

    def first_life(me: Any) -> Any:
        life = Life(me, False)
        saved = life.until(5)
        life.state.save(life.exchange)
        life.until(9)
        return saved, life.close()

    def second_life(me: Any) -> Any:
        life = Life(me, True)
        assert life.exchange.step == 5
        found = life.numbers()
        life.until(9)
        return found, life.close()

    (saved, end), _ = run_ranks(first_life, 1, 2)
    for procs in (1, 4):
        for found, last in run_ranks(second_life, 1, procs):
            assert all(map(torch.equal, found, saved))
            assert not torch.allclose(last[0], saved[0], atol=1e-3)
            for a, b in zip(last, end, strict=True):
                assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("behind", [False, True])
@in_ranks(1, 1)
def test_lowrank_projections_taken_over(behind: bool) -> None:
    """An island that takes over from another, with nothing of its own or with a state of before,
    takes its projections: moments are averaged in one basis.
    """
    runtime.EVERY = 1  # rounds between comparisons

    def life(topology: Any, steps: int, saved: Any = None) -> Any:
        torch.manual_seed(0)
        model = torch.nn.Linear(16, 8)
        made = base_optimizer(LOW, model.named_parameters(), lr=0.01)
        if saved is not None:
            model.load_state_dict(saved[0])
            made.load_state_dict(copy.deepcopy(saved[1]))
        state = None if saved is None else saved[2]
        exchange = fsdp_demo.attach(made, LOW, model=model, topology=topology, state=state)
        begun = made.state[model.weight]["projection"].clone()
        for t in range(exchange.step, steps):
            model(gradients(10 * t + topology.island, 1, 4, 16)[0]).square().mean().backward()
            made.step()
            made.zero_grad()
            if t == 3 and topology.island == 1 and behind:
                early = copy.deepcopy((model.state_dict(), made.state_dict()))
                early = (*early, copy.deepcopy(exchange.state_dict()))
        now = copy.deepcopy((model.state_dict(), made.state_dict(), exchange.state_dict()))
        kept = now if topology.island == 0 else early if behind and steps < 12 else None
        moments = made.state[model.weight]["exp_avg"]
        exchange.detach()
        return begun, kept, moments

    values = threaded.values
    saved = [kept for _, kept, _ in values(threaded.islands(lambda i, at: life(at, 9), 2))]
    assert (saved[1] is None) != behind
    again = values(threaded.islands(lambda i, at: life(at, 14, saved[i]), 2))
    (mine, _, _), (theirs, _, _) = again
    assert torch.equal(mine, theirs)
    assert torch.equal(mine, saved[0][1]["state"][0]["projection"])


@in_threads()
def test_lowrank_unlike_islands_refused(topology: Any) -> None:
    """Islands of unlike hardware or libraries may not average moments of low rank."""
    run_specification.machine = lambda device: {"torch": threading.current_thread().name}
    model = torch.nn.Linear(8, 4)
    made = base_optimizer(LOW, model.named_parameters(), lr=0.01)
    refusal(
        lambda: fsdp_demo.attach(made, LOW, model=model, topology=topology),
        "islands of unlike hardware or libraries", "inner_optimizer='lowrankadamw'",
    )  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "parts"), [
    ("local_adam", {"inner_optimizer": "lowrankadamw", "inner_rank": 4}, ["channel of deltas"]),
    ("desloc", {"inner_optimizer": "lowrankadamw", "inner_rank": 4}, ["deltas", "anchor"]),
    ("full", {"inner_optimizer": "lowrankadamw", "inner_rank": 4}, ["channel of deltas"]),
    ("diloco", {"inner_optimizer": "lowrankadamw"}, ["inner_rank=0", "needs inner_rank > 0"]),
    ("diloco", {"inner_rank": 4}, ["inner_rank=4", "no other takes one"]),
    ("muloco", {"inner_optimizer": "lowrankadamw"}, ["allowed are muonadamw"]),
    ("desloc", {"rank": 4, "exp_avg.schedule.delay": 1}, ["exp_avg", "another basis"]),
    ("desloc", {"rank": -1}, ["inner_rank=-1"]),
])  # fmt: skip
def test_lowrank_combinations_refused(name: str, changes: dict[str, Any], parts: list[str]) -> None:
    """What has no anchor, no rank, or moments that land in another basis, is refused with why."""
    refusal(lambda: preset(name, **changes), *parts)


def test_lowrank_parameters_refused() -> None:
    """Parameters without names, matrices in half precision, and another rank than the method's, are
    refused with the cure.
    """
    model = torch.nn.Linear(8, 4)
    refusal(lambda: LowRankAdamW(model.parameters()), "LowRankAdamW", "model.named_parameters()")
    other = LowRankAdamW(model.named_parameters(), rank=3)
    refusal(lambda: fsdp_demo.attach(other, LOW, model=model), "rank 3", "inner_rank=4")
    half = torch.nn.Linear(8, 4, dtype=torch.bfloat16)
    made = LowRankAdamW(half.named_parameters(), rank=4)
    refusal(lambda: fsdp_demo.attach(made, LOW, model=half), "bfloat16", "in fp32")


@in_ranks(1, 2)
def test_lowrank_columns_cut_refused(me: Any) -> None:
    """A matrix whose columns are cut is refused."""
    mesh = init_device_mesh("cpu", (2,))
    cut = torch.nn.Parameter(distribute_tensor(torch.ones(4, 8), mesh, [Shard(1)]))
    refusal(lambda: materialise(matrix(cut, rank=2)), "whole or cut by rows", "[4, 8]")
