"""Each rule on both sides of its threshold, from made-up measurements of two or three islands."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdp_demo.tools.doctor import findings as module
from fsdp_demo.tools.doctor.findings import RULES, findings
from fsdp_demo.tools.doctor.measured import (
    OK,
    OTHER,
    REFUSED,
    TIMEOUT,
    UNREACHABLE,
    Direction,
    Examination,
    Island,
    Reach,
)
from fsdp_demo.tools.doctor.reading import as_json

PAGE = Path(__file__).parents[3] / "docs" / "doctor.md"


def islands(count: int = 2, **each: Any) -> tuple[Island, ...]:
    """Islands without a fault; `each`: a field's values, by island."""
    made = []
    for i in range(count):
        own = {name: values[i] for name, values in each.items()}
        good = Island(i, f"i{i}", f"host{i}", f"10.0.0.{i + 1}", {"torch": "2.13"}, "eth0", 1000)
        good = replace(good, mtu=1500, slow_start_after_idle=True)
        made.append(replace(good, **own))
    return tuple(made)


def reached(i: int, j: int, state: str = OK, **more: Any) -> Reach:
    whole = {"forth": True, "back": True} if state == OK else {}
    return Reach(i, j, state, f"10.0.0.{j + 1}", **{**whole, **more})


def direction(i: int, j: int, **more: Any) -> Direction:
    good: dict[str, Any] = {
        **dict(rtt_ms=20.0, loss=0.0, mbit_s={"1": 300.0, "2": 310.0, "4": 320.0}),
        **dict(first_after_idle_ms=40.0, warm_ms=39.0, idle_bytes=1 << 20),
        **dict(held_here=0.0, held_there=0.0, clock_offset_ms=1.0),
    }
    return Direction(i, j, **{**good, **more})


def seen(*changed: Reach | Direction, of: tuple[Island, ...] | None = None, **each) -> Examination:
    """Islands without a fault, but for what is given."""
    made = of or islands(**each)
    pairs = [(i.island, j.island) for i in made for j in made if i is not j]
    reaches = {pair: reached(*pair) for pair in pairs}
    directions = {pair: direction(*pair) for pair in pairs}
    for one in changed:
        kept: dict[tuple[int, int], Any] = reaches if isinstance(one, Reach) else directions
        kept[one.sender, one.receiver] = one
    return Examination(made, reaches, directions)


def names(found: Examination) -> list[str]:
    return [finding.name for finding in findings(found)]


def only(found: Examination) -> Any:
    (finding,) = findings(found)
    return finding


@pytest.mark.parametrize("count", [1, 2, 3])
def test_doctor_findings_none(count) -> None:
    """Islands without a fault have no finding."""
    assert findings(seen(of=islands(count))) == []


def test_doctor_findings_documented() -> None:
    """Every finding has a section in the documents that names its cure."""
    text = PAGE.read_text(encoding="utf-8")
    for name in RULES:
        (section,) = [s for s in text.split("\n### ")[1:] if f"{{#{name}}}" in s.splitlines()[0]]
        assert "* **Found:**" in section and "* **Cure:**" in section


# ---- what reaches whom -------------------------------------------------------------------------


@pytest.mark.parametrize("state", [TIMEOUT, REFUSED, UNREACHABLE, OTHER])
def test_doctor_firewall_of_listener_stops_run(state) -> None:
    """A firewall on the side that listens stops the run."""
    finding = only(seen(reached(1, 0, state)))
    assert (finding.name, finding.stops) == ("one-sided-firewall", True)
    assert "island 1 (i1) cannot connect to island 0 (i0) at 10.0.0.1" in finding.says
    assert "on island 0 (i0)" in finding.cure and "10.0.0" not in finding.cure


def test_doctor_firewall_of_other_side() -> None:
    """A firewall on the other side stops joins only."""
    finding = only(seen(reached(0, 1, TIMEOUT)))
    assert (finding.name, finding.stops) == ("one-sided-firewall", False)
    assert "cannot join" in finding.says


def test_doctor_unreachable_both_ways_once() -> None:
    """Two islands that do not reach each other make one finding."""
    finding = only(seen(reached(0, 1, TIMEOUT), reached(1, 0, REFUSED)))
    assert (finding.name, finding.stops) == ("unreachable", True)
    assert "nothing comes back" in finding.says and "refused" in finding.says


def test_doctor_wrong_interface() -> None:
    """An address that leads nowhere is the wrong interface, not a firewall."""
    wrong = reached(0, 1, TIMEOUT, other="10.0.0.9")
    finding = only(seen(wrong))
    assert (finding.name, finding.stops) == ("wrong-interface", True)
    assert "ISLAND_ADDRESS=10.0.0.9" in finding.cure and "(eth0)" in finding.says
    # also where nobody reaches the others either
    assert names(seen(wrong, reached(1, 0, TIMEOUT))) == ["wrong-interface"]
    # an address that the machine does not have
    gone = seen(wrong, interface=["eth0", ""])
    assert "an address that it does not have" in only(gone).says


def test_doctor_wrong_interface_not_if_reached() -> None:
    """An address that one island reaches is right."""
    found = seen(reached(0, 1, TIMEOUT, other="10.0.0.9"), of=islands(3))
    assert names(found) == ["one-sided-firewall"]


def test_doctor_mtu_black_hole() -> None:
    """An MTU black hole is found with the size that passes."""
    holes = reached(0, 1, forth=False, back=None, packet=1400), reached(1, 0, packet=None)
    finding = only(seen(*holes))
    assert (finding.name, finding.stops) == ("mtu-black-hole", True)
    assert "packets of 1500 bytes vanish, those of 1400 bytes pass" in finding.says
    assert "mtu 1400" in finding.cure
    # seen from both sides it is one
    both = seen(holes[0], reached(1, 0, back=False, packet=1400))
    assert names(both) == ["mtu-black-hole"]


def test_doctor_stalled_not_black_hole() -> None:
    """A link on which no packet passes has stalled: it is no black hole."""
    finding = only(seen(reached(0, 1, forth=False, packet=0)))
    assert (finding.name, finding.stops) == ("stalled", True)


def test_doctor_not_measured_once() -> None:
    """An error of the connections makes one finding, and none where no connection stands."""
    errors = direction(0, 1, error="nothing came"), direction(1, 0, error="closed")
    finding = only(seen(*errors))
    assert (finding.name, finding.stops) == ("not-measured", True)
    assert "nothing came" in finding.says
    assert "closed" in only(seen(errors[1])).says
    cut = reached(0, 1, TIMEOUT), reached(1, 0, TIMEOUT)
    assert names(seen(*errors, *cut)) == ["unreachable"]


# ---- how fast ----------------------------------------------------------------------------------


def of_rate(rate: float, **more: Any) -> list[Direction]:
    return [direction(i, j, mbit_s={"1": rate, "4": rate}, **more) for i, j in ((0, 1), (1, 0))]


@pytest.mark.parametrize("rate, named", [(84.0, False), (94.1, True), (98.0, True), (101, False)])
def test_doctor_port_100_mbit_by_rate(rate, named) -> None:
    """The rate of a 100 Mbit/s port is recognized."""
    assert names(seen(*of_rate(rate))) == ["port-100-mbit"] * named


@pytest.mark.parametrize("speed, named", [(10, True), (100, True), (1000, False), (None, False)])
def test_doctor_port_100_mbit_by_interface(speed, named) -> None:
    """An interface of 100 Mbit/s is named once."""
    found = seen(*of_rate(94.0 if named else 500.0), speed_mbit=[1000, speed])
    assert names(found) == ["port-100-mbit"] * named
    if named:
        assert f"eth0 of island 1 (i1) runs at {speed} Mbit/s" in only(found).says


def windowed(**more: Any) -> Direction:
    slow = {"rtt_ms": 50.0, "mbit_s": {"1": 40.0, "2": 80.0, "4": 160.0}, "connections": 4}
    return direction(0, 1, **{**slow, "held_here": 0.9, **more})


def test_doctor_window_limited() -> None:
    """A TCP window that limits the rate is found on the side that holds it."""
    finding = only(seen(windowed()))
    assert finding.name == "window-limited" and not finding.stops
    assert "40.0 Mbit/s and waited 90 % of the time for the send buffer" in finding.says
    assert "250 kB per round trip of 50 ms" in finding.says  # 40e6 / 8 * 0.05
    assert "on island 0 (i0): sysctl -w net.ipv4.tcp_wmem" in finding.cure
    there = only(seen(windowed(held_here=0.1, held_there=0.5)))
    assert "on island 1 (i1): sysctl -w net.ipv4.tcp_rmem" in there.cure
    assert "receiver's window" in there.says


@pytest.mark.parametrize("changes, named", [
    ({"held_here": 0.29}, False),  # the kernel says that it is something else
    ({"held_here": None, "held_there": None}, True),  # the kernel says nothing
    ({"mbit_s": {"1": 40.0, "4": 59.0}}, False),
    ({"mbit_s": {"1": 40.0, "4": 61.0}}, True),
    ({"rtt_ms": 1.0}, False),
])  # fmt: skip
def test_doctor_window_limited_threshold(changes, named) -> None:
    """The finding of a limiting window needs a rate that more connections raise."""
    found = seen(windowed(**changes))
    assert len(list(module.window_limited(found))) == named


@pytest.mark.parametrize("changes, named", [
    ({"first_after_idle_ms": 130.0, "warm_ms": 60.0}, True),
    ({"first_after_idle_ms": 89.0, "warm_ms": 60.0}, False),  # 1.5 round trips are 30 ms
    ({"first_after_idle_ms": 40.0, "warm_ms": 31.0, "rtt_ms": 2.0}, False),  # below 10 ms
    ({"first_after_idle_ms": 300.0, "warm_ms": 240.0}, False),  # 1.25 times
    ({"first_after_idle_ms": None}, False),
])  # fmt: skip
def test_doctor_slow_start_after_idle(changes, named) -> None:
    """Slow start after a pause is found."""
    found = seen(direction(0, 1, **changes))
    assert names(found) == ["slow-start-after-idle"] * named
    if named:
        assert "1.05 MB from island 0 (i0) to island 1 (i1) take 130 ms" in only(found).says
        off = seen(direction(0, 1, **changes), slow_start_after_idle=[False, True])
        assert names(off) == []


@pytest.mark.parametrize("loss, named", [(0.019, False), (0.021, True), (None, False)])
def test_doctor_packet_loss(loss, named) -> None:
    """Lost packets are found above 2 %."""
    assert names(seen(direction(0, 1, loss=loss))) == ["packet-loss"] * named


@pytest.mark.parametrize("rate, named", [(161.0, False), (159.0, True)])
def test_doctor_unequal_links(rate, named) -> None:
    """A direction at half the rate of the others is found."""
    slow = direction(1, 0, mbit_s={"1": rate, "4": rate})
    assert names(seen(slow)) == ["unequal-links"] * named


# ---- the islands -------------------------------------------------------------------------------


@pytest.mark.parametrize("slow, named", [(1.14, False), (1.16, True)])
def test_doctor_unequal_islands(slow, named) -> None:
    """An island whose steps are more than 15 % slower is found."""
    found = seen(of=islands(3, step_seconds=[1.0, slow, 1.0]))
    assert names(found) == ["unequal-islands"] * named
    if named:
        assert "waits 14 % of the time" in only(found).says
        assert "runs on island 1 (i1)" in only(found).cure


def test_doctor_unequal_islands_one_step_time() -> None:
    """One step time is not compared."""
    assert list(module.unequal_islands(seen(step_seconds=[None, 2.0]))) == []


@pytest.mark.parametrize("speed, named", [(49.0, True), (51.0, False), (None, False)])
def test_doctor_slow_disk(speed, named) -> None:
    """A disk below 50 MB/s is found."""
    assert names(seen(disk_mb_s=[900.0, speed])) == ["slow-disk"] * named


@pytest.mark.parametrize(
    "what, stops", [("fsdp_demo", True), ("wire", True), ("torch", False), ("python", False)]
)
def test_doctor_unlike_versions(what, stops) -> None:
    """Unlike versions are found, and those of the library stop a run."""
    finding = only(seen(versions=[{what: "1"}, {what: "2"}]))
    assert (finding.name, finding.stops) == ("unlike-versions", stops)
    assert f"{what} differs: island 0 (i0) has 1, island 1 (i1) has 2" in finding.says


@pytest.mark.parametrize("offset, word", [(4999.0, ""), (5001.0, "ahead of"), (-5001.0, "behind")])
def test_doctor_clock_offset(offset, word) -> None:
    """Clocks that are 5 s apart are found."""
    found = seen(direction(0, 1, clock_offset_ms=offset), direction(1, 0, clock_offset_ms=-offset))
    assert names(found) == ["clock-offset"] * bool(word)
    if word:
        assert f"clock of island 1 (i1) is 5.0 s {word} that of island 0 (i0)" in only(found).says


# ---- all together ------------------------------------------------------------------------------


def test_doctor_findings_order() -> None:
    """The findings that stop a run come first."""
    found = seen(reached(1, 0, TIMEOUT), direction(0, 1, loss=0.5), disk_mb_s=[1.0, None])
    assert names(found) == ["one-sided-firewall", "packet-loss", "slow-disk"]
    for finding in findings(found):
        assert finding.see == f"docs/doctor.md#{finding.name}"
    for note in as_json(found, findings(found))["findings"]:
        assert note.keys() == {"name", "says", "cure", "stops", "see"}


def test_doctor_findings_rule_names() -> None:
    """The table of rules has each rule under its name."""
    assert set(RULES) == {
        rule.__name__.replace("_", "-")
        for rule in vars(module).values()
        if getattr(rule, "__module__", "") == module.__name__
        and rule.__annotations__.get("return") == "Iterator[Finding]"
    }


@pytest.mark.parametrize("has, named", [(640, False), (639, True), (None, False)])
def test_doctor_open_files(has, named) -> None:
    """An island that may not open its connections does not start."""
    found = seen(open_files=[None, has], open_files_needed=[None, 640])
    assert names(found) == ["open-files"] * named
    if named:
        finding = only(found)
        assert finding.stops and "island 1 (i1) allows 639 open files" in finding.says
        assert "ulimit -n 1024" in finding.cure
