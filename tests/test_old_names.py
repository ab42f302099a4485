"""Names of the first release that users may have written: each raises an error that says the new
one.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import fsdp_demo
from fsdp_demo import checkpoint
from fsdp_demo.checkpoint import CheckpointManager
from fsdp_demo.comm.position import ShardPosition
from fsdp_demo.hosts.torch_params import TorchHost


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ISLAND_COUNT", raising=False)


def renamed(get: Any, new: str) -> None:
    with pytest.raises(AttributeError, match=rf"is called {new} now$"):
        get()


def test_of_the_package() -> None:
    renamed(lambda: fsdp_demo.Clock, "fsdp_demo.SyncSchedule")
    for old, new in {
        "Checkpoints": "CheckpointManager",
        "Saved": "SavedExchange",
        "open_exchange": "load_exchange",
        "describe": "describe_part",
    }.items():
        renamed(lambda old=old: getattr(checkpoint, old), f"fsdp_demo.checkpoint.{new}")
    for module in (fsdp_demo, checkpoint):
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            module.nothing  # noqa: B018


def test_of_an_exchange() -> None:
    exchange = fsdp_demo.attach(torch.optim.AdamW(torch.nn.Linear(2, 2).parameters()), "diloco")
    for old, new in {
        "note": "report",
        "council": "across_islands",
        "consensus": "equal_after_exchange",
        "shards": "host",
        "shows": "result_kind",
        "showing": "shows_result",
    }.items():
        renamed(lambda old=old: getattr(exchange, old), f"Exchange.{new}")
        assert hasattr(exchange, new) and not hasattr(exchange, old)
    with pytest.raises(AttributeError, match="Exchange has no attribute 'nothing'"):
        exchange.nothing  # noqa: B018
    exchange.finish()


def test_of_a_host() -> None:
    host = TorchHost([torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())])
    names = {
        "shards": "params",
        "ticks": "hooks",
        "read": "tensors",
        "materialise": "init_optimizer_state",
        "rest": "untrained_tensors",
        "gradients": "prepare_gradients",
        "check": "assert_unchanged",
        "position": "shard_position",
    }
    for old, new in names.items():
        renamed(lambda old=old: getattr(host, old), f"TorchHost.{new}")
        assert hasattr(host, new)


def test_of_a_position() -> None:
    position = ShardPosition(2, 1, 4, 3)
    renamed(lambda: position.shards, "ShardPosition.num_shards")
    renamed(lambda: position.copies, "ShardPosition.num_copies")
    assert (position.num_shards, position.shard, position.num_copies, position.copy) == (2, 1, 4, 3)
    assert copy.deepcopy(position) == position == pickle.loads(pickle.dumps(position))


def test_a_head_on_disk_keeps_the_names_that_it_had(tmp_path: Any) -> None:
    exchange = fsdp_demo.attach(torch.optim.AdamW(torch.nn.Linear(2, 2).parameters()), "diloco")
    checkpoint.save_exchange(tmp_path, exchange)
    head = checkpoint.load_exchange(tmp_path).heads[0]
    assert {k: head[k] for k in ("shards", "shard", "copies", "copy")} == {
        "shards": 1,
        "shard": 0,
        "copies": 1,
        "copy": 0,
    }
    assert not {"num_shards", "num_copies"} & set(head)
    exchange.finish()


def test_of_the_manager_of_checkpoints(tmp_path: Any) -> None:
    kept = CheckpointManager(tmp_path, fsdp_demo.Topology())
    names = {
        "agreed": "resolve_resume_step",
        "left": "crash_saves",
        "holds": "has",
        "forget_emergencies": "clear_crash_saves",
    }
    for old, new in names.items():
        renamed(lambda old=old: getattr(kept, old), f"CheckpointManager.{new}")
        assert callable(getattr(kept, new))


def test_the_old_keyword_of_attach() -> None:
    optimizer = torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())
    with pytest.raises(
        TypeError, match=r"attach\(agree=\.\.\.\) is called attach\(must_match=\.\.\.\)"
    ):
        fsdp_demo.attach(optimizer, "diloco", agree={"steps": 10})
