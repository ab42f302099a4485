"""Rows of a plan: memory of the one model, times that follow from the parts, rates that are solved
for.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_demo import Link, preset, presets
from fsdp_demo.exchange.plan import inner_state, plan_memory
from fsdp_demo.tools.planner import Situation, gaps, gbit_s, load, plan_rows
from fsdp_demo.tools.planner.gaps import expected_gap
from fsdp_demo.tools.planner.line import System
from fsdp_demo.tools.planner.rows import utilisation
from fsdp_demo.tools.planner.situation import DEVICES, guessed_step

TINY = load("tiny")
THERE = Situation(TINY, 3, Link(1e7, 0.02), 0.1, shards=2, device="cpu")


@pytest.mark.parametrize("name", presets())
def test_planner_row_memory(name: str) -> None:
    """The memory of a row is that of the memory model."""
    for device, staged in (("h100", True), ("cpu", False)):
        (row,) = plan_rows(replace(THERE, device=device), [name])
        m = plan_memory(preset(name), TINY, 3, 2, staged=staged)
        own = inner_state(preset(name), TINY, 2)
        held = m.device_state + m.device_flight + m.device_workspace
        assert row.device_bytes == 8 * m.parameters + own + held
        assert row.host_bytes == m.host_state + m.host_flight + m.host_workspace


def test_planner_row_seconds_by_hand() -> None:
    """The seconds of a simple row are those counted by hand: a delta of 459 904 values in fp32,
    every 10 steps, two islands, no round trip.
    """
    s = Situation(TINY, 2, Link(1e7), 0.1, device="cpu")
    (row,) = plan_rows(s, [preset("diloco", period=10)])
    d, sent = DEVICES["cpu"], row.bytes_per_exchange
    wire = 8 * sent / 1e7 / (1448 / 1514)
    exposed = wire + d.message + d.per_byte * sent + d.dense * 459_904
    assert row.exposed_seconds_per_step == pytest.approx(exposed / 10)
    assert row.compute_utilisation == pytest.approx(0.1 / (0.1 + exposed / 10))
    assert row.waiting_seconds_per_step == pytest.approx((exposed - d.dense * 459_904) / 10)
    assert row.mean_gbit_s == pytest.approx(8e-9 * row.bytes_per_step / 0.1)
    assert row.peak_gbit_s == pytest.approx(8e-9 * sent / 0.1)
    (free,) = plan_rows(replace(s, system=System(compression=False)), [preset("diloco", period=10)])
    assert free.exposed_seconds_per_step == pytest.approx(wire / 10)
    (own,) = plan_rows(replace(s, compression=1e-6), [preset("diloco", period=10)])
    rest = wire + d.message + d.per_byte * sent
    assert own.exposed_seconds_per_step == pytest.approx((rest + 1e-6 * 459_904) / 10)


def test_planner_row_ranks_share_line() -> None:
    """The ranks of an island work side by side and share its line."""
    one, four = (
        plan_rows(Situation(TINY, 2, Link(1e6), 0.1, shards=n, device="cpu"), ["diloco"])[0]
        for n in (1, 4)
    )
    assert four.waiting_seconds_per_step == pytest.approx(one.waiting_seconds_per_step, rel=0.01)
    one, four = (
        plan_rows(Situation(TINY, 2, Link(), 0.1, shards=n, device="cpu"), ["diloco"])[0]
        for n in (1, 4)
    )
    works = [r.exposed_seconds_per_step - r.waiting_seconds_per_step for r in (one, four)]
    assert works[0] == pytest.approx(4 * works[1], rel=0.01)


@pytest.mark.parametrize("name", ["hsdp", *presets()])
def test_planner_row_solved_rate(name: str) -> None:
    """A faster line never costs, and the solved rate keeps the target."""
    config = None if name == "hsdp" else preset(name)
    shares = [utilisation(replace(THERE, link=Link(10.0**n, 0.02)), config) for n in range(4, 13)]
    assert all(a <= b + 1e-9 for a, b in zip(shares, shares[1:], strict=False))
    target = (shares[0] + shares[-1]) / 2
    rate = gbit_s(THERE, config, target)
    if shares[-1] - shares[0] > 1e-3:
        assert rate is not None
        at = utilisation(replace(THERE, link=Link(1e9 * rate, 0.02)), config)
        below = utilisation(replace(THERE, link=Link(0.99e9 * rate, 0.02)), config)
        assert below < target <= at
    assert gbit_s(THERE, config, shares[-1] + 0.5 * (1 - shares[-1])) is None or name == "full"


def test_planner_row_days_and_bytes_of_run() -> None:
    """The days and bytes of a run follow from its tokens."""
    s = replace(THERE, tokens=3e6, tokens_per_step=1e3)
    (row,) = plan_rows(s, ["demo"])
    assert row.days == pytest.approx(1000 * (0.1 + row.exposed_seconds_per_step) / 86400)
    assert row.run_bytes == pytest.approx(1000 * row.bytes_per_step)
    assert plan_rows(THERE, ["demo"])[0].days is None


def test_planner_guessed_step() -> None:
    """A guessed step time follows from size, tokens and device. 1 B parameters, 1 M tokens, 8 H100
    at 40 %: 6e15 / (8 x 989e12 x 0.4) s.
    """
    assert guessed_step(10**9, 1e6, 8, DEVICES["h100"]) == pytest.approx(6e15 / 3.1648e15)


# ---- gaps --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "islands", "percent"),
    [(35e6, 2, 0.7), (550e6, 4, 0.7), (2.4e9, 8, 1.1), (90e6, 8, 3.1), (1.3e9, 1, -0.4)],
)
def test_planner_gap_published_entries(parameters: float, islands: int, percent: float) -> None:
    """The expected gap at the entries of the published table is the published one."""
    gap, _ = expected_gap(preset("diloco", period=30), round(parameters), islands)
    assert gap is not None and gap["percent"] == percent and gap["extrapolated"] == ""


def test_planner_gap_between_and_beyond() -> None:
    """The expected gap is interpolated between the entries, and beyond them it says so."""
    gap, _ = expected_gap(preset("diloco", period=30), round((35e6 * 90e6) ** 0.5), 2)
    assert gap is not None and gap["percent"] == pytest.approx(0.6)
    gap, _ = expected_gap(preset("diloco", period=500), 24_000_000_000, 16)
    assert gap is not None and gap["percent"] == 1.1 and gap["factor"] == pytest.approx(10)
    for words in ("10 times the table's 2.4e+09", "ends at 8 islands"):
        assert words in gap["extrapolated"]
    assert gap["period"] == 30


def test_planner_gap_of_study() -> None:
    """The gaps of our study are those of its rows in `gaps.json`."""
    study = json.loads(Path(gaps.__file__).with_name("gaps.json").read_text())["study"]
    one_phase = {"sign_loco": {"switch": 0.0}}
    for name, difference in study["difference"].items():
        if name in presets():
            gap, _ = expected_gap(preset(name, **one_phase.get(name, {})), 492_672, 4)
            assert gap is not None
            assert gap["percent"] == round(100 * difference / study["loss"], 2)
    for size in study["larger"]:
        gap, _ = expected_gap(preset("sign_loco", switch=0.0), size["parameters"], 4)
        assert gap is not None and gap["factor"] == 1.0 and gap["extrapolated"] == ""
        assert gap["percent"] == round(100 * size["difference"]["sign_loco"] / size["loss"], 2)
        assert gap["period"] is None  # the preset's own
        gap, _ = expected_gap(preset("muloco"), size["parameters"], 4)
        assert gap is not None and gap["period"] == 20
    for row in study["muon"]:
        ((name, period),), (difference,) = row["period"].items(), row["difference"].values()
        gap, _ = expected_gap(preset(name, period=period), row["parameters"], 4)
        assert gap is not None and gap["period"] is None and gap["source"].startswith(row["source"])
        assert gap["percent"] == round(100 * difference / row["loss"], 2)
    long = study["phases"][0]
    gap, _ = expected_gap(preset("sign_loco"), 492_672, 4)
    assert gap is not None
    assert gap["percent"] == round(100 * long["difference"]["sign_loco"] / long["loss"], 2)
    gap, _ = expected_gap(preset("demo"), 1_235_814_400, 2)
    assert gap is not None and "1,344 times as many" in gap["extrapolated"]
    assert "4 islands, not 2" in gap["extrapolated"]


def test_planner_gap_without_source() -> None:
    """Without a source there is no number."""
    gap, why = expected_gap(replace(preset("demo"), preset="own"), 10**9, 4)
    assert gap is None and "'own' with an all-reduce" in why
    sparse, ours = preset("sparse_loco").channels[0], preset("sign_loco").channels[0]
    changing = replace(sparse, later=(replace(ours.later[0], codec=sparse.codec),))
    gap, why = expected_gap(replace(preset("sparse_loco"), channels=(changing,)), 10**9, 4)
    assert gap is None and "'sparse_loco' with phases" in why


def test_planner_row_of_phases() -> None:
    """A run that changes has the memory of its largest phase, between two phases, too, and its
    bytes are those of all phases, each for its steps. A phase behind the end does not count.
    """
    at = Situation(TINY, 4, Link(1e6), 0.1, steps=1000)
    fewer = preset("sign_loco", switch=250, late_topk=45, **{"schedule.delay": 2})
    (row,), (first,), (late,) = (plan_rows(at, [c]) for c in (fewer, fewer.at(0), fewer.at(250)))
    assert row.bytes_per_step == first.bytes_per_step > late.bytes_per_step
    mean = 0.25 * first.bytes_per_step + 0.75 * late.bytes_per_step
    assert row.run_bytes == pytest.approx(1000 * mean) and row.days is not None
    # an anchor, what was not sent, and a momentum until the last message of the first phase lands
    between = plan_memory(fewer, TINY, 4).device_state
    assert row.device_bytes - first.device_bytes == pytest.approx(between / 3, rel=0.05)
    (alone,) = plan_rows(at, [preset("sign_loco", switch=0.0)])
    (never,) = plan_rows(at, [preset("sign_loco", switch=1000, late_topk=720)])
    assert (never.bytes_per_step, never.run_bytes) == (alone.bytes_per_step, alone.run_bytes)
    tokens = replace(at, steps=None, tokens=4e5, tokens_per_step=100.0)
    assert plan_rows(tokens, [fewer])[0].run_bytes == row.run_bytes


def test_planner_row_shared_uplink() -> None:
    """Islands behind one uplink share it. Two sites of two: each island sends two thirds of its
    bytes out, and two share the line.
    """
    alone = Situation(TINY, 4, Link(1e6), 0.1, device="cpu", system=System(compression=False))
    both = replace(alone, islands_per_uplink=2)
    assert both.crossing == pytest.approx(4 / 3) and alone.crossing == 1
    for name in ("diloco", "sparse_loco"):
        (one,), (two,) = plan_rows(alone, [name]), plan_rows(both, [name])
        assert two.waiting_seconds_per_step == pytest.approx(4 / 3 * one.waiting_seconds_per_step)
        assert two.peak_gbit_s == pytest.approx(4 / 3 * one.peak_gbit_s)
        assert two.bytes_per_step == one.bytes_per_step
        more = gbit_s(both, preset(name), 0.9), gbit_s(alone, preset(name), 0.9)
        assert more[0] == pytest.approx(4 / 3 * (more[1] or 0), rel=5e-3)
    assert plan_rows(alone, ["hsdp"]) == plan_rows(both, ["hsdp"])  # a ring leaves a site once
    with pytest.raises(ValueError, match="1 to 3 behind each"):
        replace(alone, islands_per_uplink=4)
