"""`Exchange.load_state_dict` takes a run back to an earlier step: all islands together, and what
follows is what followed the first time.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

import fsdp_demo
from fsdp_demo.errors import Mismatch

from ..support.inside import in_threads
from ..support.small import RESUMED, Small, same

SAVED, LAST = 5, 11


def rolled_back(topology: Any, name: str) -> None:
    small = Small(topology, RESUMED[name])
    small.train(SAVED)
    saved = small.save()
    small.train(LAST)
    end = small.save()
    for t in range(2):
        small.train(LAST + t)
        params, inner, state = copy.deepcopy(saved)
        for p, q in zip(small.params, params, strict=True):
            p.data.copy_(q)
        small.optimizer.load_state_dict(inner)
        small.exchange.load_state_dict(state)
        assert small.exchange.step == SAVED
        again = small.save()
        assert same([again[0], again[2]], [saved[0], saved[2]])
        small.exchange.digests_equal()  # a question at this step
        small.train(LAST)
        again = small.save()
        assert same([again[0], again[2]], [end[0], end[2]])
    small.exchange.finish()
    assert small.exchange.digests_equal() is not False


@pytest.mark.parametrize("name", RESUMED)
@in_threads()
def test_load_state_dict_all_islands(topology: Any, name: str) -> None:
    """All islands go back together to an earlier step, and the run repeats bit for bit."""
    rolled_back(topology, name)


def test_load_state_dict_elastic(run_ranks: Any) -> None:
    """A run whose islands come and go can be taken back as well."""
    for name in ("demo, in flight", "diloco, in flight"):
        run_ranks(lambda me, name=name: rolled_back(fsdp_demo.Topology.from_env(), name), 2, 1)


@in_threads()
def test_load_state_dict_one_island_error(topology: Any) -> None:
    """An island that goes back alone gets an error at the next exchange, which says at which step
    the others are.
    """
    small = Small(topology, RESUMED["full"])
    small.train(SAVED)
    state = small.save()[2]
    small.train(SAVED + 3)
    if topology.island == 1:
        small.exchange.load_state_dict(state)
    with pytest.raises(Mismatch) as error:
        small.train(SAVED + 5)
    small.exchange.detach()
    text = str(error.value)
    assert f"step {SAVED + 1}" in text and f"step {SAVED + 4}" in text, text


@in_threads()
def test_load_state_dict_cut_off_message_refused(topology: Any) -> None:
    """A state with a message that a loss cut off is refused, and the error names
    `attach(state=...)`.
    """
    small = Small(topology, RESUMED["diloco, in flight"])
    small.train(SAVED)
    state = small.save()[2]
    assert len(state["in_flight"]) == 1
    state["in_flight"][0]["arrived"] = None
    small.train(SAVED + 1)
    with pytest.raises(ValueError, match=r"never came back.*attach\(state=...\)"):
        small.exchange.load_state_dict(state)
    assert small.exchange.step == SAVED + 1
    small.exchange.finish()
