"""Digests that islands compare: of their parameters, and of their first payloads."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fsdp_demo import Mismatch, Topology
from fsdp_demo.exchange import runtime
from fsdp_demo.exchange.rewritten import odd_ones, total

from ..support.inside import in_threads
from ..support.small import Small
from .test_out_of_step import CONFIGS


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", ["demo", "full", "diloco", "consensus", "streaming_diloco"])
@in_threads()
def test_digest_flipped_bit_names_island(island: int, topology: Topology, name: str, count: int):
    """A bit that flipped on one island causes an error that names the island and the tensors."""
    runtime.EVERY = 4  # of a process of its own
    small = Small(topology, CONFIGS[name])
    small.train(3)
    if island == 1:
        (channel,) = small.exchange.channels
        spoiled = small.params[0].data if channel.anchor is None else channel.anchor
        spoiled.view(-1).view(torch.int32)[7] ^= 1 << 3
    what = "parameters" if CONFIGS[name].channels[0].before_step else "outer parameters (anchors)"
    with pytest.raises(Mismatch) as caught:
        small.train(20)
    small.exchange.detach()
    text = str(caught.value)
    assert f"no longer equal: {what}" in text and "island 1 (island1)" in text, text
    # of two nobody knows which is right
    assert ("island 0 (island0)" in text) == (count == 2) and small.exchange.step <= 9


def test_digest_unlike_machines_averaged(run_ranks: Callable[..., Any], everywhere: Any) -> None:
    """Between unlike machines a difference is logged, averaged away, and training goes on."""
    everywhere.setattr("fsdp_demo.exchange.runtime", "EVERY", 4)

    def run(me: Any) -> Any:
        logging.basicConfig(level=logging.INFO, force=True)
        small = Small(Topology.from_env(), CONFIGS["demo"])
        small.exchange._queue.watch.unlike = True
        small.train(3)
        small.params[0].data.view(-1)[7] += 1e-6 * me.island
        small.train(10)
        small.exchange.finish()
        whole = torch.cat([p.detach().view(-1) for p in small.params])
        return whole, small.exchange.digests_equal(), small.exchange.metrics()["drift"]

    outcomes = run_ranks(run, 2, 1, check=False)
    assert [o.status for o in outcomes] == [0, 0]
    for o in outcomes:
        assert "no longer equal" in o.log and "are the mean over the islands now" in o.log
        whole, equal, drift = o.value
        assert torch.equal(whole, outcomes[0].value[0]) and equal is True and 0 < drift < 1e-6


def test_digest_sums_and_odd_ones() -> None:
    """The sum of a digest counts all words of its tensors, and the majority tells which replica is
    odd.
    """
    g = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        t = torch.randn(1000, generator=g).to(dtype)
        words = t.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])
        assert int(total([t], t.device)) % 2**64 == sum(int(w) for w in words.tolist()) % 2**64
        assert int(total([t[:400], t[400:]], t.device)) == int(total([t], t.device))
    assert int(total([torch.empty(0)], torch.device("cpu"))) == 0
    assert [odd_ones(v) for v in ([1, 1], [1, 2], [1, 1, 2], [1, 2, 3], [None, 2, 2], [None, 2, 3])] == [  # noqa: E501
        [], [0, 1], [2], [0, 1, 2], [], [1, 2],
    ]  # fmt: skip


# ---- the same rows -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["demo", "full", "random", "diloco", "consensus", "local_sgd"])
def test_same_rows_warned_once(run_ranks: Callable[..., Any], name: str) -> None:
    """Islands that train on the same rows are warned once."""
    config = CONFIGS[name]

    def run(me: Any, same: bool) -> None:
        logging.basicConfig(level=logging.INFO, force=True)
        small = Small(Topology.from_env(), config)
        for p in small.params:  # zeros first: what says nothing is not compared
            p.grad = torch.zeros_like(p)
        small.optimizer.step()
        small.island = 0 if same else small.island
        small.train(6)
        small.exchange.finish()

    for same in (True, False):
        logs = [o.log for o in run_ranks(run, 2, 1, check=False, args=(same,))]
        assert [log.count("sent the same first payload") for log in logs] == [int(same)] * 2, logs


@pytest.mark.parametrize("name", ["demo", "full"])
def test_same_rows_no_warning_alone(run_ranks: Callable[..., Any], name: str) -> None:
    """An island that is alone gets no warning of equal rows."""
    config = CONFIGS[name]

    def run(me: Any) -> None:
        logging.basicConfig(level=logging.INFO, force=True)
        small = Small(Topology.from_env(), config)
        if me.island == 1:
            return  # it is lost before its first message
        small.train(3)
        small.exchange.finish()

    logs = [o.log for o in run_ranks(run, 2, 1, check=False)]
    assert "training goes on with island 0" in logs[0], logs
    assert "sent the same first payload" not in logs[0], logs
