"""Ranks of one island need a process group before `attach`."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_demo import Topology
from fsdp_demo.attaching import refuse_lone_rank
from fsdp_demo.errors import see

from ..support.inside import in_ranks
from .test_finish import attached


@in_ranks(2, 3, group=False)
def test_attach_before_init_process_group_refused() -> None:
    """An attach on ranks that made no process group is refused."""
    with pytest.raises(ValueError, match="started 3 ranks on island .* not initialised") as e:
        attached()
    text = str(e.value)
    assert "init_process_group" in text and text.endswith(see("rank-taken"))


def test_attach_lone_rank_allowed_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """`refuse_lone_rank` refuses only ranks of one island that made no process group."""
    island = Topology("islands", 1, 2, endpoint="127.0.0.1:1")
    several = {"WORLD_SIZE": "2", "RANK": "0"}
    with pytest.raises(ValueError, match="WORLD_SIZE=2"):
        refuse_lone_rank(island, several)
    refuse_lone_rank(island, {})
    refuse_lone_rank(island, {"WORLD_SIZE": "1", "RANK": "0"})
    # each process of one launch is an island of its own
    refuse_lone_rank(island, {"WORLD_SIZE": "2", "RANK": "1"})
    refuse_lone_rank(Topology(), several)
    refuse_lone_rank(Topology("islands", 1, 2, endpoint="127.0.0.1:1", rank=1, world=2), several)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    for count, rank in ((1, 0), (2, 1)):  # one rank; or each is an island of its own
        monkeypatch.setattr("torch.distributed.get_world_size", lambda count=count: count)
        monkeypatch.setattr("torch.distributed.get_rank", lambda rank=rank: rank)
        refuse_lone_rank(island, several)


@pytest.mark.parametrize("islands", [1, 2])
@in_ranks(procs=3)
def test_topology_before_process_group_refused(me: Any, islands: int) -> None:
    """A topology that was made before `init_process_group` is refused."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.distributed.is_initialized", lambda: False)
        topology = Topology.from_env()
    with pytest.raises(ValueError, match="has 3 ranks, .* made before init_process_group") as e:
        attached(topology)
    text = str(e.value)
    assert text.endswith(see("rank-taken"))
