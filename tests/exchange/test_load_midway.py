"""`load_state_dict` of the model or an optimizer in mid-run: refused at the next step, unless the
exchange's state came with it or nothing is other than before. Buffers that are registered late.
"""

from __future__ import annotations

import gc
import logging
import pickle
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_demo
from fsdp_demo.exchange.first_step import Noted

from ..support import threaded
from ..support.inside import in_ranks
from ..support.two_layers import attached, step, train


class Loop:
    """Three steps of `diloco`, period 2, and what the script has kept of step 1."""

    def __init__(self, topology: Any = None) -> None:
        def adamw(net: nn.Module) -> torch.optim.Optimizer:
            return torch.optim.AdamW(net.parameters(), lr=0.01)

        self.net, self.optimizer, self.exchange = attached("diloco", topology, adamw, period=2)
        self.train(1)
        self.kept = deepcopy((self.net.state_dict(), self.optimizer.state_dict()))
        self.state = deepcopy(self.exchange.state_dict())
        self.train(3)

    def train(self, upto: int) -> None:
        train(self.optimizer, self.net.loss, self.exchange.step, upto)

    def put_back(self) -> None:
        self.net.load_state_dict(self.kept[0])
        self.optimizer.load_state_dict(self.kept[1])


@pytest.fixture
def loop() -> Loop:
    return Loop()


LOADS: dict[str, tuple[Callable[[Loop], Any], str]] = {
    "both": (Loop.put_back, "a.weight, a.bias, b.weight ..."),
    "submodule": (lambda me: me.net.b.load_state_dict({"weight": me.kept[0]["b.weight"]},
        strict=False), "b.weight"),
    "optimizer": (lambda me: me.optimizer.load_state_dict(me.kept[1]), "exp_avg of a.weight, .*"),
}  # fmt: skip


@pytest.mark.parametrize("what", LOADS)
def test_load_midway_refused_by_name(loop: Loop, what: str) -> None:
    """A load alone is refused at each further step, by name, until the exchange's state is set."""
    load, names = LOADS[what]
    load(loop)
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"(?s)after step 3 .*\({names} changed\)"):
            loop.train(4)
    loop.put_back()
    loop.exchange.load_state_dict(loop.state)
    loop.train(4)
    loop.exchange.finish()


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_load_midway_with_exchange_state_is_taken(loop: Loop, first: bool) -> None:
    """With the exchange's state, ahead of the load or behind it, the run goes on from there."""
    before = [p.detach().clone() for p in loop.net.parameters()]
    if first:
        loop.exchange.load_state_dict(loop.state)
    loop.put_back()
    if not first:
        loop.exchange.load_state_dict(loop.state)
    loop.train(3)
    assert all(torch.equal(a, b) for a, b in zip(before, loop.net.parameters(), strict=True))
    loop.train(4)
    loop.put_back()  # what was accepted is the load of that step alone
    with pytest.raises(ValueError, match="after step 4"):
        loop.train(5)
    loop.exchange.detach()


def test_load_midway_of_equal_values_is_taken(loop: Loop) -> None:
    """Other weights for an evaluation are no load where the own ones are put back; nor is another
    rate in a state of the optimizer, a load inside `outer_parameters`, a search inside `paused`.
    """
    own = deepcopy(loop.net.state_dict())
    loop.net.load_state_dict(loop.kept[0])
    loop.net.load_state_dict(own)
    state = loop.optimizer.state_dict()
    state["param_groups"][0]["lr"] = 0.02
    loop.optimizer.load_state_dict(state)
    loop.train(4)
    with loop.exchange.outer_parameters(loop.net):
        loop.net.load_state_dict(loop.kept[0])
    loop.train(5)
    kept = deepcopy((loop.net.state_dict(), loop.optimizer.state_dict()))
    with loop.exchange.paused():
        loop.net.loss(0).backward()
        loop.optimizer.step()
        loop.net.load_state_dict(kept[0])
        loop.optimizer.load_state_dict(kept[1])
    loop.train(6)
    loop.put_back()
    loop.exchange.accept_parameters()
    loop.train(7)
    loop.put_back()
    loop.exchange.finish()  # takes no step


@pytest.mark.parametrize("end", ["finish", "detach"])
def test_load_hooks_leave_with_exchange(loop: Loop, end: str) -> None:
    """The hooks are gone at the end, and copies of the model have none that reach the exchange."""
    modules = list(loop.net.modules())
    copies = [deepcopy(loop.net), pickle.loads(pickle.dumps(loop.net))]
    for copied in copies:
        copied.load_state_dict(loop.kept[0])
    loop.train(4)
    getattr(loop.exchange, end)()
    assert not any(m._load_state_dict_pre_hooks for m in modules)
    assert not loop.optimizer._optimizer_load_state_dict_pre_hooks
    gc.collect()
    loop.put_back()


@in_ranks()
def test_load_midway_refused_on_all_ranks(me: Any) -> None:
    """Under FSDP2 all ranks refuse a load that has changed the shard of one."""
    from torch.distributed.checkpoint import state_dict as dcp
    from torch.distributed.fsdp import fully_shard

    net = nn.Linear(4, 4)
    fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    exchange = fsdp_demo.attach(optimizer, "diloco", model=net, period=2)

    def advance() -> None:
        step(optimizer, net(torch.ones(2, 4)).sum())

    advance()
    with torch.no_grad():
        net(torch.ones(2, 4))  # leaves the root unsharded
    whole = dcp.StateDictOptions(full_state_dict=True)
    state = dcp.get_model_state_dict(net, options=whole)
    dcp.set_model_state_dict(net, state, options=whole)
    advance()
    state = {n: t.clone() for n, t in dcp.get_model_state_dict(net, options=whole).items()}
    state["weight"][0] += 1.0
    dcp.set_model_state_dict(net, state, options=whole)
    words = r"\(weight changed\)" if me.proc == 0 else "those of another rank"
    with pytest.raises(ValueError, match=words):
        advance()
    exchange.detach()


def test_noted_sums_all_shards_of_a_name() -> None:
    """A parameter that lies in several shards of its name is watched in each of them."""
    shards = [("w", torch.zeros(3)), ("w", torch.zeros(4)), ("v", torch.zeros(2))]
    noted = Noted(lambda: shards, torch.device("cpu"))
    noted.note()
    shards[0][1][1] = 1.0
    assert noted.moved() == ["w"]


@pytest.mark.parametrize("unlike", [True, False])
def test_finish_names_unlike_late_buffers(unlike: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Buffers that were registered after attach are compared at the end, and named where they
    differ.
    """

    def island(i: int, topology: Any) -> None:
        me = Loop(topology)
        me.net.a.register_buffer("mask", torch.full((3,), float(i * unlike)))
        me.exchange.finish()

    with caplog.at_level(logging.INFO, "fsdp_demo"):
        threaded.values(threaded.islands(island))
    warned = [m for m in caplog.messages if "registered after attach differ" in m]
    ends = [m for m in caplog.messages if "in all trained parameters" in m]
    assert len(ends) == 2 and len(warned) == 2 * unlike
    assert all(("a.mask" in m) is unlike for m in [*ends, *warned])
