"""A save while the durable store is being started again: training does not wait for it, and a later
save asks it. A start while another island ends the attempt: nobody is waited for then.
"""

from __future__ import annotations

import contextlib
import socket
import time
from pathlib import Path
from typing import Any

import pytest

import fsdp_demo
from fsdp_demo.checkpoint import registry
from fsdp_demo.errors import PeerLost, StoreSilent
from fsdp_demo.peers.votes import Ranks

from ..support.durable import Durable
from ..support.inside import in_ranks


def test_save_without_store_does_not_wait(run_ranks, tmp_path: Path) -> None:
    """A save does not wait for a store that is not there."""

    def fn(me: Any) -> Any:
        registry.PATIENCE, registry.QUIET = 60.0, 0.0
        store = Durable(tmp_path / "keys")
        board = registry.CheckpointRegistry(
            fsdp_demo.Topology("islands", 0, 2, endpoint=store.endpoint, timeout=30.0, run="r"),
            Ranks(None, 0, 1),
        )
        before = board.exchange([1])
        store.kill()
        with pytest.raises(StoreSilent) as error:
            board.exchange([1, 2])
        with pytest.raises(StoreSilent, match="nobody listens, for 0.3 s"):  # a new connection
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


def test_save_beside_a_store_that_hangs_asks_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save beside a store that hangs waits for its answer and asks nothing more, and the next
    ones ask nothing for some time.
    """
    monkeypatch.setattr(registry, "PATIENCE", 0.2)
    monkeypatch.setattr(fsdp_demo.Topology, "prefix", lambda self: "r/0")
    monkeypatch.setattr(fsdp_demo.Topology, "starters", (0, 1))
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = f"127.0.0.1:{server.getsockname()[1]}"
        board = registry.CheckpointRegistry(
            fsdp_demo.Topology("islands", 0, 2, endpoint=where, timeout=30.0, run="r"),
            Ranks(None, 0, 1),
        )

        def connections() -> int:
            server.settimeout(0.2)
            count = 0
            with contextlib.suppress(TimeoutError):
                while True:
                    server.accept()[0].close()
                    count += 1
            return count

        with pytest.raises(StoreSilent, match="does not answer within 0.2 s"):
            board.exchange([1])
        assert connections() == 1  # nobody asks who listens there
        with pytest.raises(StoreSilent, match="did not answer before: it is asked again in"):
            board.exchange([1, 2])
        assert connections() == 0
        board._quiet_until = 0.0
        with pytest.raises(StoreSilent, match="does not answer within 0.2 s"):
            board.exchange([1, 2, 3])
        assert connections() == 1


@in_ranks(1, 1)
def test_resume_after_attempt_ended_does_not_wait(me: Any) -> None:
    """A question for common checkpoints does not wait once the attempt has ended. Another island's
    process was lost and started again: it opened the next attempt.
    """
    topology = fsdp_demo.Topology(
        "islands", 0, 2, endpoint=Durable().endpoint, timeout=3600.0, run="r"
    )
    topology.open_store().under(topology.prefix()).set("ended", "1")
    with pytest.raises(PeerLost, match=r"waited for islands 1, when island \d left"):
        registry.CheckpointRegistry(topology, Ranks(None, 0, 1)).meet({})
