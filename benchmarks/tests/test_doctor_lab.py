"""The lab that provokes doctor's findings: its rows, what it says where there is no lab; and, as
root, each fault once.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

from benchmarks import doctor_faults as machine  # noqa: E402
from benchmarks import doctor_lab as lab  # noqa: E402
from fsdp_demo.tools.doctor.findings import RULES  # noqa: E402


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["doctor_lab.py", *words])
    try:
        return lab.main()
    except SystemExit as end:
        return int(end.code or 0)


def found(*names: str, says: str = "says") -> dict[str, Any]:
    return {
        "findings": [{"name": name, "says": says} for name in names],
        "statuses": [0, 1],
        "alike": True,
        "seconds": 1.25,
        "link": None,
    }


def test_doctor_lab_without_root_says_so(monkeypatch, capsys) -> None:
    """Without root the lab says what it needs."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert call(monkeypatch) == 2
    err = capsys.readouterr().err
    assert "network lab needs" in err or "needs root" in err


def test_doctor_lab_unknown_fault_is_refused(monkeypatch, capsys) -> None:
    """A fault that is not known is refused."""
    assert call(monkeypatch, "--only", "none,flood") == 2
    assert "--only flood: allowed are none, one-sided-firewall" in capsys.readouterr().err


def test_doctor_lab_faults_provoke_known_findings() -> None:
    """Each fault provokes a finding of the doctor, or none."""
    assert {fault.finding for fault in lab.FAULTS.values()} <= {"", *RULES}
    assert [name for name, fault in lab.FAULTS.items() if name != (fault.finding or "none")] == []


def test_doctor_lab_row_says_whether_the_fault_was_named() -> None:
    """A row says whether the right finding was named."""
    fault = lab.Fault("packet-loss", "loses", about="to island 1")
    right = lab.row("x", fault, found("packet-loss", "slow-disk", says="to island 1, 5 %"))
    assert (right["named"], right["others"], right["status"]) == (True, ["slow-disk"], 1)
    assert not lab.row("x", fault, found("packet-loss", says="to island 0"))["named"]
    assert not lab.row("x", fault, found("slow-disk"))["named"]
    healthy = lab.Fault("", "none")
    assert lab.row("none", healthy, found())["named"]
    assert not lab.row("none", healthy, found("slow-disk"))["named"]


def test_doctor_lab_status_says_whether_all_were_named(monkeypatch, capsys, tmp_path) -> None:
    """The status says whether all faults were named."""
    monkeypatch.setattr(lab, "missing", lambda: "")
    named = {"packet-loss": found("packet-loss", says="to island 1"), "none": found()}
    monkeypatch.setattr(lab, "examine", lambda fault, seconds: named[fault.finding or "none"])
    file = tmp_path / "rows.json"
    words = ("--only", "none,packet-loss", "--json", str(file))
    assert call(monkeypatch, *words) == 0
    assert [row["fault"] for row in json.loads(file.read_text())] == ["none", "packet-loss"]
    named["none"] = found("slow-disk")
    assert call(monkeypatch, *words) == 1
    assert "NO" in capsys.readouterr().out


@pytest.mark.parametrize(
    "version, files",
    [
        (1, {"cpu.shares": str(1024 * machine.WEIGHT), "cpu.cfs_quota_us": "25000"}),
        (2, {"cpu.weight": str(100 * machine.WEIGHT), "cpu.max": "25000 100000"}),
    ],
)
def test_doctor_lab_slow_core_is_a_control_group(monkeypatch, tmp_path, version, files) -> None:
    """A slow core is a control group, of either version."""
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    if version == 1:
        (tmp_path / "cpu").mkdir()
    with machine.slow_core(machine.Call(("doctor",), {}), tmp_path) as call:
        machine.join(call.group, 17)
        found = {file.name: file.read_text() for file in call.group.parent.iterdir()}
    assert found == {**files, "cgroup.procs": "17"}


def test_doctor_lab_slow_core_needs_control_groups(monkeypatch, tmp_path) -> None:
    """Without control groups there is no slow core; the other faults need none."""
    monkeypatch.setattr(machine, "CGROUP", tmp_path / "none")
    with machine.ahead() as group:
        assert group is None  # the other faults need none
    with (
        pytest.raises(lab.LabError, match="no control group can limit a core here"),
        machine.slow_core(machine.Call(("doctor",), {}), tmp_path),
    ):
        pass


def test_doctor_lab_kept_rows_name_every_fault() -> None:
    """The rows that are kept name every fault."""
    rows = json.loads((ROOT / "benchmarks" / "figures" / "doctor.json").read_text())
    faults = {name: fault.says for name, fault in lab.FAULTS.items()}
    assert {row["fault"]: row["done"] for row in rows} == faults
    assert all(row["named"] and row["alike"] for row in rows)


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.parametrize("name", lab.FAULTS)
def test_doctor_lab_each_fault_is_named(name) -> None:
    """Each fault is named by the doctor in the lab."""
    if why := lab.missing():
        pytest.skip(why)
    fault = lab.FAULTS[name]
    row = lab.row(name, fault, lab.examine(fault, 15.0))
    assert row["alike"] and row["named"], row
