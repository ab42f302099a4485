"""What no optimizer steps: statistics are averaged, what is an island's own is left alone, and
frozen parameters that move are noticed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fsdp_demo

from ..support import threaded
from ..support.heard import heard
from ..support.inside import in_ranks
from ..support.threaded import values

MOVED = "frozen parameters were moved since attach"


class Net(nn.Module):
    """A student, a teacher, a queue and a statistic, all other on each island at the start."""

    def __init__(self, island: int):
        super().__init__()
        torch.manual_seed(island)
        self.student, self.teacher = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("queue", torch.randn(4))
        self.register_buffer("mean", torch.randn(4))

    def train_on(self, rows: torch.Tensor) -> None:
        (self.student(rows) - self.teacher(rows)).square().mean().backward()
        with torch.no_grad():
            self.mean.lerp_(rows.mean(0), 0.1)
            self.queue.copy_(rows[0])


def trained(island, topology, preset, moves, everything, steps, **more) -> dict[str, torch.Tensor]:
    """The model after some steps and finish(). moves: the teacher follows. everything: the
    optimizer holds frozen parameters, too.
    """
    net = Net(island)
    own = net.parameters() if everything else net.student.parameters()
    optimizer = torch.optim.AdamW(own, lr=0.1)
    exchange = fsdp_demo.attach(optimizer, preset, model=net, topology=topology, **more)
    for t in range(steps):
        net.train_on(torch.randn(8, 4, generator=torch.Generator().manual_seed(9 * t + island)))
        optimizer.step()
        optimizer.zero_grad()
        for a, b in zip(net.teacher.parameters(), net.student.parameters(), strict=True):
            with torch.no_grad():
                a.lerp_(b, 0.1 * moves)
    exchange.finish()
    assert exchange.digests_equal()
    return {n: t.clone() for n, t in net.state_dict().items()}


def both(*words: Any, **more: Any) -> tuple[Any, Any, list[str]]:
    """The models of two islands, and what was warned of."""
    lines = heard()
    made = threaded.islands(lambda i, topology: trained(i, topology, *words, **more))
    return *values(made), lines


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("preset", ["full", "diloco"])
@in_ranks(1, 1)
def test_frozen_parameters_moved_named_once(preset: str, everything: bool) -> None:
    """A warning names frozen parameters that move, once per island."""
    one, two, lines = both(preset, True, everything, 4)
    said = [line for line in lines if MOVED in line]
    assert len(said) == 2 and "(teacher.weight, teacher.bias)" in said[0], lines
    assert 'own_tensors=["NAME*"]' in said[0]
    assert not any("unlike training" in line for line in lines)
    assert torch.equal(one["student.weight"], two["student.weight"])
    assert torch.equal(one["mean"], two["mean"]) and torch.equal(one["queue"], two["queue"])


@in_ranks(1, 1)
def test_frozen_parameters_moved_before_finish() -> None:
    """`finish` notices frozen parameters that moved after the first comparison. In a run of one
    step.
    """
    *_, lines = both("full", True, False, 1)
    assert sum(MOVED in line for line in lines) == 2


@in_ranks(1, 1)
def test_frozen_parameters_unmoved_silent() -> None:
    """Frozen parameters that do not move are equal on all islands and cause no warning."""
    one, two, lines = both("diloco", False, True, 4)
    assert not any(MOVED in line for line in lines)
    assert all(torch.equal(one[name], two[name]) for name in one)


@in_ranks(1, 1)
def test_own_tensors_left_alone() -> None:
    """Tensors that `own_tensors` names are neither averaged nor compared."""
    for everything in (False, True):
        one, two, lines = both("diloco", True, everything, 4, own_tensors=["queue", "teacher.*"])
        assert not any(MOVED in line or "unlike training" in line for line in lines)
        for name in one:
            apart = name == "queue" or name.startswith("teacher")
            assert torch.equal(one[name], two[name]) is not apart, name
        rows = [torch.randn(8, 4, generator=torch.Generator().manual_seed(27 + i)) for i in (0, 1)]
        assert torch.equal(one["queue"], rows[0][0]) and torch.equal(two["queue"], rows[1][0])


def test_own_tensors_unused_pattern_refused() -> None:
    """A pattern of `own_tensors` that fits no buffer and no frozen parameter is refused."""
    net = Net(0)
    optimizer = torch.optim.AdamW(net.student.parameters())
    for pattern in ("quue", "student.weight"):
        with pytest.raises(ValueError, match=f"'{pattern}' fits no buffer and no frozen.*queue"):
            fsdp_demo.attach(optimizer, "diloco", model=net, own_tensors=[pattern])
    with pytest.raises(ValueError, match="pass model= to attach"):
        fsdp_demo.attach(optimizer, "diloco", own_tensors="queue")
    fsdp_demo.attach(optimizer, "auto", model=net, own_tensors=["queue"]).detach()
