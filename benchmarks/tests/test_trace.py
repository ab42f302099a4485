"""The picture of a trace holds each range of each thread, to scale."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from benchmarks import trace_exchange as drawn  # noqa: E402


def event(name: str, start: float, seconds: float, thread: int = 1) -> dict:
    return {"ph": "X", "name": name, "ts": 1e6 * start, "dur": 1e6 * seconds, "tid": thread}


def test_trace_ranges_are_in_one_clock() -> None:
    """The ranges of a trace are those of the exchange, in one clock."""
    events = [event("aten::mm", 0, 1), event("fsdp_demo::send", 0.5, 1, 2), event("wait", 0, 1)]
    events += [event("trace::forward", 0.25, 0.5), {"ph": "M", "name": "fsdp_demo::send"}]
    found = drawn.ranges({"baseTimeNanoseconds": 2e9, "traceEvents": events})
    assert [(r.name, r.thread, r.start, r.end) for r in found] == [
        ("forward", 1, 2.25, 2.75),
        ("send", 2, 2.5, 3.5),
    ]
    assert drawn.summed(found)["send"] == 1.0


def test_trace_picture_is_to_scale() -> None:
    """The picture of a trace is to scale."""
    one = [drawn.Range("forward", 1, 0.0, 1.0), drawn.Range("send", 2, 0.5, 2.5)]
    two = [drawn.Range("wait", 1, 1.0, 4.0)]
    tree = ElementTree.fromstring(drawn.draw([one, two], "a & b"))
    bars = [e for e in tree.iter() if e.tag.endswith("rect") and len(e)]
    width = drawn.WIDTH - drawn.LEFT - drawn.RIGHT
    assert [e.attrib["class"] for e in bars] == ["forward", "send", "wait"]
    assert [float(e.attrib["width"]) / width * 4 for e in bars] == pytest.approx(
        [1, 2, 3], abs=0.01
    )
    tops = [float(e.attrib["y"]) for e in bars]
    assert tops == sorted(tops) and tops[1] - tops[0] == drawn.ROW
