"""DropCompute: which micro-batches are left out, the divisor, the limit that is chosen."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fsdp_demo
from fsdp_demo.exchange import drop

from ..support.inside import in_ranks

N = 4
LR = 0.5


class Clock:
    """Seconds that pass when `work` says so."""

    def __init__(self, patch: bool = True):
        self.now = 100.0
        drop.clock = lambda: self.now

    def work(self, seconds: float) -> None:
        self.now += seconds


def rows(step: int, micro: int, rank: int) -> torch.Tensor:
    return torch.randn(
        3, 6, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    )


def net() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Linear(6, 4)


def loss_of(model: torch.nn.Module, *where: int) -> torch.Tensor:
    return model(rows(*where)).square().mean()


def train(me: Any, wrap: str, seconds: dict[int, float], **changes: Any) -> tuple[Any, list[Any]]:
    """A step of N micro-batches, of which each takes the seconds of its rank; the whole parameters,
    and the micro-batches that were taken."""
    model, clock, taken = net(), Clock(), []
    whole = model
    if wrap == "fsdp2":
        fully_shard(model, mesh=me.mesh())
    elif wrap == "ddp":
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    exchange = fsdp_demo.attach(optimizer, "full", model=whole, inner_optimizers="as_is", **changes)
    for step in range(2):
        for micro in range(N):
            if exchange.time_is_up(micro, N):
                continue
            last = micro == N - 1
            if wrap == "fsdp2":
                model.set_requires_gradient_sync(last)
            elif wrap == "ddp":
                model.require_backward_grad_sync = last
            (loss_of(model, step, micro, me.rank) / N).backward()
            clock.work(seconds[me.rank])
            exchange.report(tokens=3)
            taken.append((step, micro))
        optimizer.step()
        optimizer.zero_grad()
    exchange.finish()
    found = [p.full_tensor() if wrap == "fsdp2" else p.detach() for p in whole.parameters()]
    return found, taken, exchange


def expected(taken: list[list[tuple[int, int]]], procs: int, exact: bool, tokens: bool) -> Any:
    """The same by hand: `taken` of each island."""
    model = net()
    for step in range(2):
        total = [torch.zeros_like(p) for p in model.parameters()]
        counts = [sum(s == step for s, _ in mine) for mine in taken]
        for island, mine in enumerate(taken):
            weight = counts[island] / sum(counts) if tokens else 1 / len(taken)
            for s, micro in mine:
                if s != step:
                    continue
                for proc in range(procs):
                    rank = island * procs + proc
                    grads = torch.autograd.grad(loss_of(model, s, micro, rank), model.parameters())
                    for t, g in zip(total, grads, strict=True):
                        t += g * weight / procs / (counts[island] if exact else N)
        with torch.no_grad():
            for p, t in zip(model.parameters(), total, strict=True):
                p -= LR * t
    return [p.detach() for p in model.parameters()]


def check(wrap: str, exact: bool, tokens: bool) -> Any:
    @in_ranks(2, 2)
    def test(me: Any) -> Any:
        changes = {"drop": {"limit": 2.5, "divisor": "exact" if exact else "published"}}
        if tokens:
            changes["reducer.weight"] = "tokens"
        # the second rank of island 1 is slow: both of its ranks drop micro-batch 2
        found, taken, exchange = train(me, wrap, {0: 0.1, 1: 0.2, 2: 0.1, 3: 1.5}, **changes)
        want = expected(everyone(), 2, exact, tokens)
        assert taken == everyone()[me.island], taken
        assert exchange.metrics()["dropped"] == 2 * me.island
        for a, b in zip(found, want, strict=True):
            torch.testing.assert_close(a, b)
        return found

    return test


def everyone() -> list[list[tuple[int, int]]]:
    whole = [(step, micro) for step in range(2) for micro in range(N)]
    return [whole, [(s, m) for s, m in whole if m != 2]]


test_drop_published_with_ddp = check("ddp", False, False)
test_drop_exact_with_fsdp2 = check("fsdp2", True, True)
