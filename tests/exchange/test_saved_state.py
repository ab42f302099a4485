"""What an exchange saves: names that are checked by types, and the tree that checkpoints have held
so far.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fsdp_demo
from fsdp_demo import preset
from fsdp_demo.channels.state import ChannelState
from fsdp_demo.exchange.saved_state import ExchangeState

from ..support.two_layers import train

HEADER = {
    "digest": 5, "step": 3, "weight": 2.0, "loss": 1.5, "flags": 0, "kind": 1, "total": 0,
    "number": 0, "norm": 0, "rate": 0, "seconds": 0,
}  # fmt: skip


def tree() -> dict[str, Any]:
    """Of a delta channel with a message under way that has arrived, key by key as format 3 has
    it.
    """
    sent = dict(step=3, body=None, vectors=[], own=torch.ones(2), present=None, partial=False)
    bodies = [torch.zeros(1, dtype=torch.uint8)] * 2
    arrived = dict(headers=[HEADER] * 2, bodies=bodies, means=[torch.ones(2)])
    kept = {"anchor": torch.zeros(2), "momentum": torch.ones(2), "present": [False]}
    return {
        "step": 4, "digest": 5, "last": {"delta": 4}, "applied": {"delta": 1}, "begun": -1,
        "tokens": [10, {"delta": 20.0}], "losses": [0.5, [0.25]], "channels": {"delta": kept},
        "in_flight": [
            dict(step=3, members=["delta"], parts={"delta": sent}, arrived=arrived, said=HEADER),
        ],
    }  # fmt: skip


def taken_up(state: Any) -> tuple[nn.Module, fsdp_demo.Exchange]:
    """A model with an exchange that goes on from `state`."""
    model = nn.Linear(3, 2)
    config = preset("diloco", period=2, inner_optimizers="as_is", **{"schedule.delay": 1})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, fsdp_demo.attach(optimizer, config, model=model, state=state)


def under_way() -> tuple[nn.Module, fsdp_demo.Exchange]:
    """After two steps, with a message under way that is applied after the third."""
    model, exchange = taken_up(None)
    train(exchange.optimizers[0], lambda t: model(torch.ones(1, 3)).sum(), 2)
    return model, exchange


def same(a: Any, b: Any) -> bool:
    """Equal trees, keys in one order."""
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


def test_saved_state_tree_unchanged() -> None:
    """A saved tree keeps its names and forms when its typed form is written again."""
    state = ExchangeState.from_tree(tree())
    assert same(state.to_tree(), tree())
    told = (state.tokens, state.weighed, state.loss, state.losses)
    assert told == (10, {"delta": 20.0}, 0.5, [0.25])
    (flight,) = state.in_flight
    assert flight.arrived is not None
    first, second = flight.arrived.headers
    assert second.loss == 1.5 and flight.said == first
    assert list(state.channels["delta"].workspaces) == ["anchor", "momentum"]
    assert state.channels["delta"].accumulator is None


def test_saved_state_other_channel_refused() -> None:
    """The saved state of a channel with other fields is refused."""
    other = {"anchor": torch.zeros(2), "variance": torch.zeros(2), "present": []}
    with pytest.raises(ValueError, match=r"channel 'delta'.*'variance'.*resume with"):
        ChannelState.from_tree("delta", other)


def test_saved_state_of_an_exchange() -> None:
    """The `state_dict` of an exchange is that tree."""
    _, exchange = under_way()
    given = exchange.state_dict()
    assert list(given) == [*tree(), "history", "config"]
    assert list(given["in_flight"][0]) == list(tree()["in_flight"][0])
    assert list(given["in_flight"][0]["arrived"]) == list(tree()["in_flight"][0]["arrived"])
    assert same(ExchangeState.from_tree(given).to_tree()["channels"], given["channels"])


def test_queue_applies_nothing_itself() -> None:
    """The queue only queues. What has arrived changes nothing until its channel applies it."""
    model, exchange = under_way()
    (c,) = exchange.channels
    assert c.anchor is not None
    before, anchor, queue = model.weight.detach().clone(), c.anchor.clone(), exchange._queue
    with torch.no_grad():
        assert queue.oldest() == ([c], 2) and list(queue.receive([c], 1)) == []
        ((of, arrived),) = queue.receive([c], 2)
        assert of is c and not queue.flights
        assert arrived.received is not None and arrived.flying == []
        assert torch.equal(model.weight, before) and torch.equal(c.anchor, anchor)
        c.apply(arrived)
    assert not torch.equal(c.anchor, anchor)
    exchange.detach()


def test_saved_state_message_of_absent_buffers() -> None:
    """A saved message of buffers that the model lacks is left out. Where gradients are exchanged, a
    message may hold buffers alone. Who resumes without the model has no channel for them.
    """
    _, exchange = under_way()
    state = exchange.state_dict()
    exchange.detach()
    (flight,) = state["in_flight"]
    of_buffers = {"members": ["buffers"], "parts": {"buffers": flight["parts"]["delta"]}}
    state["in_flight"] = [{**flight, **of_buffers}, flight]
    _, resumed = taken_up(state)
    assert [f["members"] for f in resumed.state_dict()["in_flight"]] == [["delta"]]
    resumed.finish()
    assert resumed.step == 2


def test_queue_failed_message_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message whose application failed does not stay in the queue. Memory ran out while a mean
    was applied: the part has left its message, which was saved without any.
    """

    def apply(arrived: Any) -> None:
        raise MemoryError

    model, exchange = under_way()
    monkeypatch.setattr(exchange.channels[0], "apply", apply)
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(MemoryError):
        exchange.optimizers[0].step()
    state = exchange.state_dict()
    exchange.detach()
    assert [f["parts"] for f in state["in_flight"]] == [{}]
    _, resumed = taken_up(state)
    assert resumed.state_dict()["in_flight"] == [] and resumed.step == 3
    resumed.finish()
