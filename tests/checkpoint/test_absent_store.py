"""A save while the durable store is being started again: training does not wait for it, and a later
save asks it. A start while another island ends the attempt: nobody is waited for then.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq")

import fsdp_demo
from fsdp_demo.checkpoint import registry
from fsdp_demo.errors import PeerLost, StoreSilent
from fsdp_demo.peers.votes import Ranks

from ..support.durable import Durable


def test_save_without_store_does_not_wait(run_ranks, tmp_path: Path) -> None:
    """A save does not wait for a store that is not there."""

    def fn(me: Any) -> Any:
        registry.PATIENCE = 60.0
        store = Durable(tmp_path / "keys")
        board = registry.CheckpointRegistry(
            fsdp_demo.Topology("islands", 0, 2, endpoint=store.endpoint, timeout=30.0, run="r"),
            Ranks(None, 0, 1),
        )
        before = board.exchange([1])
        store.kill()
        with pytest.raises(StoreSilent) as error:
            board.exchange([1, 2])
        store.start()
        while True:  # it is asked again when a connection stands
            try:
                return before, str(error.value), board.exchange([1, 2, 3])
            except StoreSilent:
                time.sleep(0.05)

    before, text, after = run_ranks(fn, 1, 1)[0]
    assert before == [[1], None] and after == [[1, 2, 3], None]
    assert "is not there (nobody listens" in text


def test_resume_after_attempt_ended_does_not_wait(run_ranks) -> None:
    """A question for common checkpoints does not wait once the attempt has ended. Another island's
    process was lost and started again: it opened the next attempt.
    """

    def fn(me: Any) -> None:
        topology = fsdp_demo.Topology(
            "islands", 0, 2, endpoint=Durable().endpoint, timeout=3600.0, run="r"
        )
        topology.open_store().under(topology.prefix()).set("ended", "1")
        with pytest.raises(PeerLost, match=r"waited for islands 1, when island \d left"):
            registry.CheckpointRegistry(topology, Ranks(None, 0, 1)).meet({})

    run_ranks(fn, 1, 1)
