"""Checkpoints of one step whose exchanges had the contributions of unlike islands are not common
(seal-stable).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp_demo
from fsdp_demo import preset
from fsdp_demo.checkpoint import save_exchange
from fsdp_demo.checkpoint.choice import HeldCheckpoint, alike, choose, look, together
from fsdp_demo.checkpoint.files import write_part
from fsdp_demo.checkpoint.registry import CheckpointRegistry
from fsdp_demo.errors import NeedsDecision
from fsdp_demo.exchange.saved_state import BEGUN, ExchangeState, History
from fsdp_demo.peers.votes import Ranks

from ..support.forked import forked
from ..support.inside import in_ranks

ALL, TWO = "a" * 16, "b" * 16


def held(step: int, history: str, applied: str = "9") -> HeldCheckpoint:
    return HeldCheckpoint(step, applied, -1, history)


def steps(*each: list[HeldCheckpoint], how: str = "common") -> list[int | None]:
    found = choose([f"island{i}" for i in range(len(each))], each, how)
    assert found is not None
    return [h and h.step for h in found]


def test_history_unlike_not_common() -> None:
    """Checkpoints of one step with unlike histories are not common."""
    a = [held(10, ALL), held(20, ALL, applied="19")]
    b = [held(10, ALL), held(20, TWO, applied="19")]
    assert steps(a, b) == [10, 10]
    with pytest.raises(NeedsDecision, match="or the contributions of unlike islands"):
        steps(a[1:], b[1:])
    with pytest.raises(NeedsDecision):
        steps(a[1:], b[1:], [], how="auto")
    assert steps(a[1:], b[1:], how="take_over") in ([20, None], [None, 20])


def test_history_between_same_exchanges() -> None:
    """Checkpoints of unlike steps between the same exchanges need one history, too."""
    a, b = [held(12, ALL)], [held(15, TWO)]
    assert together([a, b]) is None
    assert steps(a, [held(15, ALL)]) == [12, 15]


def test_history_unsaid_fits_any() -> None:
    """A checkpoint without a history fits any other, but it does not join two whose histories
    differ.
    """
    assert steps([held(10, "")], [held(10, ALL)]) == [10, 10]
    assert steps([held(12, "")], [held(15, ALL)]) == [12, 15]
    assert steps([held(10, "")], [held(10, "")]) == [10, 10]
    assert alike([[held(10, "")], [held(10, ALL)], [held(10, TWO)]]) == []
    assert together([[held(12, "")], [held(13, ALL)], [held(14, TWO)]]) is None


def test_history_in_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotation knows histories: nothing is deleted for a checkpoint that the others hold in name
    only.
    """
    registry = CheckpointRegistry(fsdp_demo.Topology.from_env({}), Ranks(None, 0, 1))
    for theirs, common in ((ALL, 20), (TWO, 10)):
        said = [[10, "9", 1, ALL], [20, "19", 1, theirs]]
        monkeypatch.setattr(registry, "exchange", lambda mine, said=said: [mine, said])
        assert registry.common([held(10, ALL), held(20, ALL, applied="19")]) == common


def test_history_in_heads(tmp_path: Path) -> None:
    """The heads of a checkpoint hold the history."""

    def write(rank: int, **more: Any) -> None:
        write_part(
            tmp_path,
            f"rank{rank}",
            {"islands": 3, "island": 1, "applied": {"a": 9}, "rank": rank, **more},
            {},
        )

    write(0)
    assert look(tmp_path, 9, 3) == HeldCheckpoint(9, '{"a": 9}', 1)
    write(0, history=ALL)
    write(1, history="")  # a copy that is not active
    assert look(tmp_path, 9, 3) == HeldCheckpoint(9, '{"a": 9}', 1, ALL)
    assert look(tmp_path, 9, 2) == HeldCheckpoint(9)
    write(1, history=TWO)
    with pytest.raises(ValueError, match="ranks have unlike histories"):
        look(tmp_path, 9, 3)


def test_history_changes_with_members() -> None:
    """A history changes at an exchange in which other islands take part than before."""
    one, two = History(3), History(3)
    for h in (one, two):
        h.hear(0, (0, 1, 2))
        assert h.digest == BEGUN
    one.hear(1, (0, 1, 2))
    one.hear(2, (0, 2))
    two.hear(1, (0, 2))  # lost one exchange earlier
    two.hear(2, (0, 2))
    assert len({one.digest, two.digest, BEGUN}) == 3
    before = one.digest
    # again, older, not known, as before
    for step, slots in ((2, (0, 2)), (1, (0, 1, 2)), (3, ()), (4, (0, 2))):
        one.hear(step, slots)
        assert one.digest == before
    again = History(3)
    again.load(one.note())
    for h in (one, again):
        h.hear(5, (0, 1, 2))
    assert again == one and one.digest not in (before, BEGUN)
    again.load({})
    assert again.digest == "", "not known"


def trained(me: Any) -> Any:
    if me.island == 1 and (child := forked()):
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    w = torch.nn.Parameter(torch.zeros(40))
    optimizer = torch.optim.AdamW([w], lr=0.1)
    exchange = fsdp_demo.attach(optimizer, preset("diloco", period=2, momentum_warmup=0))
    heads = []
    for t in range(8):
        if me.island == 1 and t == 5:
            os._exit(9)
        (w * (t + me.island)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if t in (3, 7) and me.island != 1:
            save_exchange(me.folder / f"{me.island}-{t}", exchange)
            held = look(me.folder / f"{me.island}-{t}", t, 3)
            heads.append((held.history, held.participants))
        if t == 3:
            me.meet("saved")  # a slow island would hear of the loss before it has saved
    tree = exchange.state_dict()
    state = ExchangeState.from_tree(tree)
    unsaid = ExchangeState.from_tree({k: v for k, v in tree.items() if k != "history"})
    exchange.load_state_dict(tree)
    exchange.finish()
    return heads, state.history["digest"], unsaid.history, exchange._queue.history.digest


def test_history_of_survivors_holds_loss(run_ranks) -> None:
    """The history of all survivors holds the loss of an island."""
    one, died, two = run_ranks(trained, 3, 1)  # the end of a process is a loss at once
    assert died == 9 and one == two
    heads, saved, unsaid, now = one
    (first, all_three), (last, two_of_them) = heads
    assert first == BEGUN != last == saved == now and unsaid == {}
    assert (all_three, two_of_them) == ("[0, 1, 2]", "[0, 2]")


@in_ranks(2, 1)
def test_history_common_after_resume(me: Any) -> None:
    """All islands resume with one history, also one whose state has none: one island's state does
    not say it; the other's knows of a loss.
    """
    w = torch.nn.Parameter(torch.zeros(40))
    exchange = fsdp_demo.attach(torch.optim.SGD([w], lr=0.1), preset("full"))
    tree = exchange.state_dict()
    exchange.detach()
    tree["history"] = {"digest": TWO, "slots": [0], "at": -1} if me.island == 0 else {}
    tree["step"] = 1
    os.environ["ISLAND_RUN"] += "-again"
    again = fsdp_demo.attach(torch.optim.SGD([w], lr=0.1), preset("full"), state=tree)
    assert again.history == TWO
    again.detach()
