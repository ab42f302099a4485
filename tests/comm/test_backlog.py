"""What a peer group keeps since its last checkpoints: in order, within a bound, and no longer than
the disk can be written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_demo.comm.backlog import INDEX, MARKS, Backlog
from fsdp_demo.comm.collectives import ReceivedMessage
from fsdp_demo.comm.header import PAYLOAD, Header
from fsdp_demo.comm.joining import Expected, Snapshot, Tick, unpacked


def arrived(n: int, size: int = 100) -> ReceivedMessage:
    bodies = [torch.full((size,), n + i, dtype=torch.uint8) for i in range(2)]
    return ReceivedMessage(
        [Header(0, n, kind=PAYLOAD)] * 2, bodies, [torch.full((7,), float(n))], slots=(0, 1)
    )


def filled(folder: Path, marks: int = 2, each: int = 3, limit: int = 1 << 20) -> Backlog:
    """Marks "0", "1", ... with `each` steps and messages after each; one step and message ahead of
    the first, which nobody needs.
    """
    backlog, n = Backlog(), 1
    backlog.tick(Tick(0, []))
    backlog.message(0, arrived(0))
    for k in range(marks):
        backlog.mark(str(k), Snapshot({"step": n}, {}), n, folder, limit)
        for _ in range(each):
            backlog.tick(Tick(n, [[{"lr": n / 3}]]))
            backlog.message(n, arrived(n))
            n += 1
        backlog.write()
    return backlog


def read(backlog: Backlog) -> tuple[list[Tick], list[int]]:
    """Steps and numbers of messages since the mark that is held; every message whole."""
    _, items = backlog.since()
    ticks = [Tick.unpack(parts[0]) for wire, _, parts in items if wire == "ticks"]
    numbers = [head.n for wire, head, _ in items if wire == "messages"]
    for n, parts in zip(
        numbers, [parts for wire, _, parts in items if wire == "messages"], strict=True
    ):
        found, then = unpacked(parts, Expected(PAYLOAD, n, 100, [(7, "fp32")])), arrived(n)
        assert all(map(torch.equal, found.bodies, then.bodies)) and torch.equal(
            found.means[0], then.means[0]
        )
        assert found.slots == (0, 1)
    return ticks, numbers


def test_all_since_a_mark_comes_back_in_order(tmp_path: Path) -> None:
    backlog = filled(tmp_path)
    for mark, first in (("0", 1), ("1", 4)):
        assert backlog.hold(mark)
        segment, _ = backlog.since()
        ticks, numbers = read(backlog)
        assert segment.next == first and numbers == list(range(first, 7)) == [t.step for t in ticks]
        assert ticks[0].rates == [[{"lr": first / 3}]]
        backlog.release()
    # files without a name
    assert not backlog.hold("2") and not backlog.hold("") and not list(tmp_path.iterdir())
    backlog.close()
    assert not backlog.keeps and not backlog.hold("1")


def test_the_oldest_mark_goes_beyond_the_bound(tmp_path: Path) -> None:
    one = 3 * (2 * INDEX + 700)
    backlog = filled(tmp_path, marks=3, limit=2 * one)
    assert [backlog.hold(str(k)) for k in range(3)] == [False, True, True]
    backlog.release()
    backlog = filled(tmp_path, marks=2, each=9, limit=one)
    # more than a snapshot: nothing is kept until the next checkpoint
    assert not backlog.keeps and not backlog.hold("1")
    backlog.mark("next", Snapshot({}, {}), 19, tmp_path, one)
    assert backlog.keeps
    backlog.tick(Tick(19, []))
    backlog.write()
    assert backlog.hold("next") and [t.step for t in read(backlog)[0]] == [19]
    assert MARKS < 9 and sum(filled(tmp_path, marks=9).hold(str(k)) for k in range(9)) == MARKS


def test_what_is_held_stays_until_it_was_handed_over(tmp_path: Path) -> None:
    backlog = filled(tmp_path, marks=1, limit=4 * (2 * INDEX + 600))
    assert backlog.hold("0")
    for n in range(4, 20):
        backlog.message(n, arrived(n))
    backlog.write()
    assert read(backlog)[1] == list(range(1, 20))
    backlog.release()
    backlog.write()
    assert not backlog.hold("0")


def test_a_disk_that_cannot_be_written_ends_nothing(tmp_path: Path, caplog: Any) -> None:
    backlog = filled(tmp_path)
    backlog.mark("x", Snapshot({}, {}), 7, tmp_path / "no such folder", 1 << 20)
    backlog.tick(Tick(7, []))
    backlog.write()
    assert not backlog.keeps and not backlog.hold("1") and not backlog.hold("x")
    assert "cannot be kept on disk" in caplog.text
    backlog = filled(tmp_path)
    assert backlog.hold("1")
    backlog.mark("x", Snapshot({}, {}), 7, tmp_path / "no such folder", 1 << 20)
    backlog.write()
    with pytest.raises(OSError, match="it was dropped, since the disk cannot be written"):
        backlog.since()
