"""Whole examinations on loopback: every island prints the same, and a dead way is a finding."""

from __future__ import annotations

import dataclasses
import json
import math
import resource

import pytest

from fsdp_demo import PeerLost, Topology
from fsdp_demo.files import from_json, to_json
from fsdp_demo.tools.doctor import examine as examining
from fsdp_demo.tools.doctor import probe, reach
from fsdp_demo.tools.doctor.examine import examine, tournament
from fsdp_demo.tools.doctor.findings import findings
from fsdp_demo.tools.doctor.measured import Direction, Examination, Island, Reach
from fsdp_demo.tools.doctor.reading import as_json, summary, text

from ...support.inside import in_ranks

SHORT = 1.0  # seconds for the links


@pytest.fixture(autouse=True)
def hasty(everywhere) -> None:
    """The pause before a first message, in each direction of each link, is shorter than TCP's."""
    everywhere.setattr(probe, "PAUSE", 0.05)


def examined(step_seconds: float | None = None) -> tuple[Examination, str]:
    seen = examine(Topology.from_env(), SHORT, 100.0, step_seconds)
    return seen, text(seen, findings(seen))


@pytest.mark.parametrize("islands", [2, 3])
def test_doctor_examine_equal_on_all_islands(run_ranks, islands) -> None:
    """All islands see the same measurements and print the same text."""
    found = run_ranks(lambda: examined(), islands=islands, procs=1, timeout=120)
    assert len({said for _, said in found}) == 1
    seen = found[0][0]
    assert [i.island for i in seen.islands] == list(range(islands))
    assert len(seen.directions) == len(seen.reaches) == islands * (islands - 1)
    for (i, j), d in seen.directions.items():
        assert (d.sender, d.receiver, d.error) == (i, j, "")
        assert d.rtt_ms > 0 and abs(d.clock_offset_ms) < 1000
        assert set(d.mbit_s) >= {"1", "2", "4"} and str(d.connections) in d.mbit_s
        assert min([*d.mbit_s.values(), d.first_after_idle_ms, d.warm_ms]) > 0
    assert all(r.whole for r in seen.reaches.values())
    number = summary(seen)
    assert number["bits_per_second"] == 1e6 * min(d.rate for d in seen.directions.values())
    assert json.loads(json.dumps(as_json(seen, findings(seen))))["links"][0]["from"] == 0


def test_doctor_examine_twice(run_ranks) -> None:
    """One run can be examined twice."""
    env = {"ISLAND_RUN": "examined-twice"}
    for _ in range(2):
        found = run_ranks(lambda: examined(), islands=2, procs=1, env=env, timeout=120)
        assert found[0][1] == found[1][1]


@in_ranks(2, 1, timeout=120)
def test_doctor_examine_step_times(me) -> None:
    """The step times of all islands are compared."""
    seen, _ = examined(1.0 + me.island)
    found = [f.name for f in findings(seen)]
    assert "unequal-islands" in found


@in_ranks(2, 1, env={"ISLAND_SLOTS": "32"}, timeout=120)
def test_doctor_examine_open_files(me) -> None:
    """A limit of open files that is too low for all slots is found."""
    if me.island:
        resource.setrlimit(resource.RLIMIT_NOFILE, (400, 400))
    (finding,) = [f for f in findings(examined()[0]) if f.name == "open-files"]
    assert finding.says.startswith("island 1 (island1) allows 400 open files")


# RFC 5737
@in_ranks(2, 1, env=lambda me: {"ISLAND_ADDRESS": "192.0.2.7"} if me.island else {}, timeout=120)
def test_doctor_examine_wrong_interface() -> None:
    """An address that no machine has is found as the wrong interface."""
    seen, said = examined()
    (finding,) = [f for f in findings(seen) if f.stops]
    assert finding.name == "wrong-interface" and "127.0.0.1" in finding.cure
    assert "wrong-interface (stops a run)" in said


@pytest.mark.parametrize("deaf", [0, 1])
@in_ranks(2, 1, timeout=120)
def test_doctor_examine_unreachable_island(me, deaf) -> None:
    """An island that nobody reaches is found: it does not listen any more, as behind a firewall
    that refuses.
    """
    if me.island == deaf:

        class Deaf(reach.Listener):
            def __init__(self, *args) -> None:
                super().__init__(*args)
                self.close()

        examining.reach.Listener = Deaf
    seen, _ = examined()
    (finding,) = [f for f in findings(seen) if f.name == "one-sided-firewall"]
    assert finding.stops == (deaf == 0)
    # the other one can listen, so there are numbers all the same
    assert all(d.rate for d in seen.directions.values())


@in_ranks(2, 1)
def test_doctor_examine_missing_island(me) -> None:
    """A missing island is an error after the deadline."""
    if me.island == 0:
        topology = dataclasses.replace(Topology.from_env(), timeout=1.0)
        with pytest.raises(PeerLost, match="missing 1.*Start fsdp-demo doctor on all islands"):
            examine(topology, SHORT)


def test_doctor_examine_single_replica() -> None:
    """A single replica has no links."""
    seen = examine(Topology.from_env({}), SHORT)
    assert len(seen.islands) == 1 and not seen.directions
    assert summary(seen) is None and as_json(seen, [])["link"] is None


def test_doctor_examine_later_islands_refused() -> None:
    """Islands beyond ISLAND_COUNT are refused."""
    late = {"ISLAND_COUNT": "2", "ISLAND_SLOTS": "3", "ISLAND_RANK": "2"}
    topology = Topology.from_env({**late, "ISLAND_ENDPOINT": "127.0.0.1:1"})
    with pytest.raises(ValueError, match="ISLAND_RANK=2 with ISLAND_COUNT=2"):
        examine(topology, SHORT)


@pytest.mark.parametrize("count", range(1, 10))
def test_doctor_examine_tournament(count) -> None:
    """Each two islands meet once, and each island once per round."""
    rounds = list(tournament(count))
    met = [pair for pairs in rounds for pair in pairs]
    assert sorted(met) == [(i, j) for i in range(count) for j in range(i + 1, count)]
    for pairs in rounds:
        taking_part = [island for pair in pairs for island in pair]
        assert len(taking_part) == len(set(taking_part))


def test_doctor_records_json_round_trip() -> None:
    """Records come back from JSON, also from a later release."""
    for record in (
        Island(0, "a", "host", versions={"torch": "2"}),
        Reach(0, 1, "ok", forth=True),
        Direction(0, 1, mbit_s={"1": 2.0}, error="x"),
    ):
        note = {**json.loads(to_json(record)), "of_a_later_release": math.pi}
        assert from_json(json.dumps(note), type(record), "a record") == record


def test_doctor_summary_needs_all_directions() -> None:
    """The summary of the links needs the measurements of all directions."""
    islands = Island(0, "a", "h"), Island(1, "b", "h")
    whole = {(0, 1): Direction(0, 1, 10.0, mbit_s={"1": 50.0})}
    assert summary(Examination(islands, {}, whole)) is None
    whole[1, 0] = Direction(1, 0, 12.0, mbit_s={"1": 30.0, "4": 90.0})
    assert summary(Examination(islands, {}, whole)) == {"bits_per_second": 3e7, "rtt": 0.012}
