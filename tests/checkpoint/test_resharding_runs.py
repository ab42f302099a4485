"""A run on 2 islands x 2 shards, stopped between two exchanges and continued with other numbers:
the loss goes on without a jump.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

import fsdp_demo
from fsdp_demo.checkpoint import load_exchange, save_exchange

from ..support import layered, probe

STOP, MORE = 18, 8  # steps before the stop, and after it
# preset: changes, learning rate, largest difference to the uninterrupted losses with 2 islands, and
# with 1 or 3
RUNS = {
    "demo": ({}, 1e-3, 0.05, 0.2),  # each shard has its own top-k
    "decoupled_momentum": ({"period": 4, "topk": 512}, 2e-3, 0.005, 0.25),
    "diloco": ({"period": 4, "momentum_warmup": 0, "momentum": 0.5}, 2e-3, 0.002, 0.01),
    "streaming_diloco": ({"period": 4, "delay": 3, "layers": 1, "momentum_warmup": 0,
        "momentum": 0.5}, 2e-3, 0.002, 0.02),
}  # fmt: skip
FORMS = [(3, 1), (1, 2), (2, 1), (2, 4), "mesh 2 x 1"]
WORDS, WIDTH = 128, 128
TOKENS = torch.arange(WORDS)


def words() -> nn.Module:
    """Word to logits of the next one. Its matrices have blocks of 4096 in 1, 2 and 4 shards, so
    that compression is alike.
    """
    return layered.Small(words=WORDS, width=WIDTH, inner=2 * WIDTH)


def following(tokens: torch.Tensor) -> torch.Tensor:
    return (7 * tokens + 3) % WORDS


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens), following(tokens))


def backward(model: nn.Module, t: int, island: int, proc: int, procs: int) -> None:
    """Each process of an island has its part of 256 tokens that the island draws."""
    tokens = torch.randint(
        WORDS, (256,), generator=torch.Generator().manual_seed(1000 * t + island)
    )
    loss_of(model, tokens.view(procs, -1)[proc]).backward()


def start(me, sharded, name, replica) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Model and inner optimizer as `replica` says (whole tensors), before attach."""
    changes, lr = RUNS[name][:2]
    model = words()
    if replica is not None:
        model.load_state_dict(replica["model"])
    if sharded:
        layered.shard(model, me, bf16=False)
    optimizer = fsdp_demo.base_optimizer(
        fsdp_demo.preset(name, **changes), model.named_parameters(), lr=lr
    )
    for n, p in model.named_parameters() if replica is not None else ():
        for key, value in replica["inner"].get(n, {}).items():
            cut = isinstance(p, DTensor) and key != "step"
            optimizer.state[p][key] = (
                distribute_tensor(value, p.device_mesh, p.placements) if cut else value.clone()
            )
    return model, optimizer


def run(me, name, folder, resume: bool, fresh: bool = False, mesh: bool = False) -> dict[str, Any]:
    """Losses on all tokens after each step, by this replica's own parameters."""
    island, islands = (me.proc, me.procs) if mesh else (me.island, me.islands)
    sharded = me.procs > 1 and not mesh
    mine, replica, saved = folder / f"island{island}", None, None
    own = resume and mine.is_dir()  # another island takes over
    if own:
        replica = torch.load(mine / "replica.pt", weights_only=True)
    model, optimizer = start(me, sharded, name, replica)
    if own and not fresh:
        saved = load_exchange(mine)
    topology = (
        fsdp_demo.Topology.from_mesh(dist.device_mesh.init_device_mesh("cpu", (me.procs,)))
        if mesh
        else None
    )
    changes = RUNS[name][0]
    at = {"step": STOP if own else 0} if fresh else {"state": saved}
    exchange = fsdp_demo.attach(
        optimizer, fsdp_demo.preset(name, **changes), model=model, topology=topology, **at
    )
    flying = len(exchange._queue.flights)
    losses = []
    for t in range(STOP if resume else 0, STOP + MORE):
        if t == STOP and not resume:
            save_exchange(folder / f"island{island}", exchange)
            save_replica(me, model, optimizer, folder / f"island{island}")
            flying = len(exchange._queue.flights)
        backward(model, t, island, *((0, 1) if mesh else (me.proc, me.procs)))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append(float(loss_of(model, TOKENS)))
        for module in model.modules():
            # else its parameters stay whole until the next backward
            if isinstance(module, FSDPModule):
                module.reshard()
    out = {"losses": losses, "flying": flying, "step": exchange.step}
    exchange.finish()
    return {**out, "equal": exchange.digests_equal()}


def save_replica(me: Any, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Whole parameters and inner states, by rank 0 of the island."""
    inner = {
        n: {k: full(v) for k, v in optimizer.state.get(p, {}).items() if v is not None}
        for n, p in model.named_parameters()
    }
    replica = {"model": probe.whole(model), "inner": inner}
    if me.proc == 0:
        torch.save(replica, folder / "replica.pt")


def full(t: torch.Tensor) -> torch.Tensor:
    return (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()


def mean_losses(outs: list[dict[str, Any]]) -> list[float]:
    return [sum(column) / len(column) for column in zip(*(o["losses"] for o in outs), strict=True)]


@pytest.mark.parametrize("name", RUNS)
def test_resharding_run_loss_goes_on(name: str, run_ranks, tmp_path: Path) -> None:
    """The loss of a run goes on without a jump under other numbers. More islands send more
    coefficients, fewer send fewer, so with sparse presets those curves part from the first exchange
    on.
    """
    for i in (0, 1):
        (tmp_path / f"island{i}").mkdir()
    outs = run_ranks(run, 2, 2, args=(name, tmp_path, False))
    before, after = mean_losses(outs)[:STOP], mean_losses(outs)[STOP:]
    print(f"\n{name:20} {before[-1]:.3f} | " + " ".join(f"{x:.3f}" for x in after))
    assert (outs[0]["flying"] > 0) == (name == "streaming_diloco")
    _, _, same, other = RUNS[name]
    for form in FORMS:
        islands, procs = (1, 2) if isinstance(form, str) else form
        others = run_ranks(
            run, islands, procs, args=(name, tmp_path, True, False, isinstance(form, str))
        )
        losses = mean_losses(others)
        print(f"  {form!s:26} " + " ".join(f"{x:.3f}" for x in losses))
        assert all(o["flying"] == 0 and o["step"] == STOP + MORE and o["equal"] for o in others)
        bound = same if isinstance(form, str) or islands == 2 else other
        assert max(a - b for a, b in zip(losses, after, strict=True)) < bound
    fresh = mean_losses(run_ranks(run, 2, 1, args=(name, tmp_path, True, True)))
    print("  without its state          " + " ".join(f"{x:.3f}" for x in fresh))
    assert max(abs(a - b) for a, b in zip(fresh, after, strict=True)) > same  # the bound would tell
