"""The failure detector: who is slow, and for how long that is borne."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch

from fsdp_demo.elastic.connect import patience
from fsdp_demo.elastic.failure_detector import FailureDetector
from fsdp_demo.membership.protocol_types import Member
from fsdp_demo.peers.header import PAYLOAD, QUESTION, SETUP

from ..support.elastic import Islands
from ..support.inside import in_a_process

NEW = Member(1, 1)


class Quiet(SimpleNamespace):
    """A connection on which something has just come."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def signs_of(member: Member) -> FailureDetector:
    """What a rank hears of `member`, after 50 quick messages."""

    def wire() -> Any:
        heard = {"heard_at": time.monotonic(), "doubted": 0.0, "stood": 0.0}
        return Quiet(gone="", close=lambda linger: None, **heard)

    bears = lambda rounds: patience(rounds, 600.0, 60.0)  # noqa: E731
    signs = FailureDetector(None, {}, {}, {}, 10.0, 600.0, bears)  # type: ignore[arg-type]
    signs.rounds.extend([0.3] * 50)
    signs.admit(member, wire(), [wire()], time.monotonic())
    return signs


def test_failure_detector_newcomer_may_compile_first() -> None:
    """A newcomer has the time of the start, ISLAND_TIMEOUT, before its first step; after it what
    all have.
    """
    signs, now = signs_of(NEW), time.monotonic()
    signs.note_next(NEW, 1003)  # its base
    assert signs.patience_with(NEW) == 600.0
    signs.note_next(NEW, 1004)
    assert signs.patience_with(NEW) == 60.0
    signs.began = {1004: now - 61.0}
    assert signs.behind(now) == (1004, 61.0, [NEW]) and signs.lost(now) == {}
    signs.drop(NEW)
    assert signs.behind(now)[2] == []


def test_failure_detector_undecryptable_then_silent_is_lost() -> None:
    """A connection that is silent behind bytes that could not be decrypted is lost: libzmq says it
    once and reads no more, and a stranger's try is said in the same way.
    """
    signs, now = signs_of(NEW), time.monotonic()
    signs.note_next(NEW, 5)
    (wire,) = signs.connections[NEW]
    for w in signs.of(NEW):
        w.heard_at = now
    wire.doubted = now
    signs.notes[NEW].heard_at = now + 30.0  # it lives
    assert signs.lost(now + 9.0) == {}
    assert "could not be decrypted" in signs.lost(now + 11.0)[NEW]
    signs.restart_clocks(now + 11.0)  # another member was lost meanwhile
    signs.notes[NEW].heard_at = now + 30.0
    assert "could not be decrypted" in signs.lost(now + 22.0)[NEW]
    wire.heard_at = now + 22.0  # it was a stranger's
    assert signs.lost(now + 23.0) == {}


@in_a_process
def test_failure_detector_ignores_messages_of_the_start() -> None:
    """Messages of the start do not count for the patience with slow islands: they are quick; a
    first round of 500 steps, or a step that compiles, is not.
    """

    def ask(line: Any) -> list[float]:
        byte, found = torch.zeros(1, dtype=torch.uint8), []
        detector = line._driver.detector
        for kind in (SETUP, SETUP, SETUP, QUESTION, PAYLOAD, PAYLOAD, PAYLOAD):
            line.all_gather(byte, kind, step=1)
            found.append(detector._patience(detector.rounds))
        return found

    for found in Islands(2, timeout=90.0).run(ask).values():
        assert found == [90.0] * 6 + [60.0]
