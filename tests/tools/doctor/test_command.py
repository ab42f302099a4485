"""The command: one machine, two islands, what it refuses, the file it writes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdp_demo.cli import main
from fsdp_demo.tools.doctor import facts
from fsdp_demo.tools.doctor.reading import load

from ...support.programs import fresh_python

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [*os.environ]:
        if name.startswith("ISLAND_") or name == "RANK":
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def test_doctor_command_one_machine(capsys, tmp_path) -> None:
    """Without islands the command examines this machine."""
    assert main(["doctor", "--step-time", "0.5", "--json", "doctor.json"]) == 0
    out = capsys.readouterr().out
    assert "MB/s to disk, 0.5 s per step" in out and "Links" not in out
    found = json.loads(Path("doctor.json").read_text())
    assert found["format"] == 1 and found["links"] == [] and found["link"] is None
    assert found["islands"][0]["versions"] == facts.versions()
    assert [p.name for p in tmp_path.iterdir()] == ["doctor.json"]  # nothing else is left


def test_doctor_command_step_time_of_model(capsys) -> None:
    """The command measures the step time of a model."""
    pytest.importorskip("transformers")
    model = str(ROOT / "recipes" / "models" / "tiny.json")
    assert main(["doctor", "--no-disk", "--model", model]) == 0
    assert "s per step" in capsys.readouterr().out


def test_doctor_command_few_long_steps(monkeypatch) -> None:
    """Fewer steps are measured where they are long, so that a slow island tells its step time
    before the others miss it.
    """
    pytest.importorskip("transformers")
    import torch

    from fsdp_demo.tools.doctor import facts

    taken, step = [], torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: (taken.append(1), step(self))[1])
    model = str(ROOT / "recipes" / "models" / "tiny.json")
    for seconds, count in ((0.0, 2), (600.0, 1 + facts.STEPS)):
        taken.clear()
        assert facts.step_seconds(model, tokens=8, seconds=seconds) > 0
        assert len(taken) == count


@pytest.mark.parametrize("words, message", [
    (["--seconds", "0"], "--seconds 0: must be"),
    (["--seconds", "nan"], "--seconds nan: must be"),
    (["--step-time", "-1"], "--step-time -1: must be"),
    (["--step-time", "1", "--model", "tiny"], "leave one of them out"),
    (["--no-disk", "--folder", "."], "leave out --no-disk"),
    (["--folder", "nowhere"], "--folder nowhere: no file can be written there"),
    (["--json", "nowhere/doctor.json"], "there is no folder nowhere"),
])  # fmt: skip
def test_doctor_command_words_refused(capsys, words, message) -> None:
    """Words that cannot work are refused."""
    assert main(["doctor", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1


def test_doctor_command_missing_model_refused(capsys, monkeypatch) -> None:
    """A model that is not there is refused."""
    pytest.importorskip("transformers")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main(["doctor", "--no-disk", "--model", "no/such-model"]) == 2
    assert "--model no/such-model: expected a config.json" in capsys.readouterr().err


def test_doctor_command_other_ranks_silent(capsys, monkeypatch) -> None:
    """The other ranks of an island have nothing to do."""
    monkeypatch.setenv("RANK", "1")
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out == ""


def test_doctor_command_missing_store(capsys, monkeypatch) -> None:
    """A store that does not answer is an error."""
    for name, value in {"COUNT": "2", "RANK": "0", "TIMEOUT": "0.5"}.items():
        monkeypatch.setenv(f"ISLAND_{name}", value)
    monkeypatch.setenv("ISLAND_ENDPOINT", "127.0.0.1:1")
    assert main(["doctor", "--no-disk"]) == 1
    assert "no store answers" in capsys.readouterr().err


def test_doctor_command_two_islands(run_ranks, tmp_path) -> None:
    """Two islands print the same, and island 0 writes the file."""

    def run(rank: Any) -> tuple[int, str]:
        import contextlib
        import io

        out, file = io.StringIO(), f"{tmp_path}/{rank.island}.json"
        words = ["doctor", "--no-disk", "--seconds", "1", "--step-time", "0.25", "--json", file]
        with contextlib.redirect_stdout(out):
            return main(words), out.getvalue()

    found = run_ranks(run, islands=2, procs=1, timeout=120)
    assert found[0] == found[1]
    assert found[0][0] == 0 and "island0 -> island1" in found[0][1]
    assert [p.name for p in tmp_path.iterdir() if p.suffix == ".json"] == ["0.json"]
    reading = load(tmp_path / "0.json")
    assert reading.link.bits_per_second > 0 < reading.link.rtt
    assert reading.steps == (0.25, 0.25) and len(reading.lines) == 2


def test_doctor_command_help_without_torch() -> None:
    """The help of the command imports no torch."""
    code = (
        "import sys\nfrom fsdp_demo.cli import main\n"
        "try: main(['doctor', '--help'])\nexcept SystemExit: sys.exit('torch' in sys.modules)"
    )
    assert "--seconds" in fresh_python(code)


# ---- facts -------------------------------------------------------------------------------------


def test_doctor_facts_interface_of_address() -> None:
    """The interface of an address, its MTU and its speed are found."""
    if not sys.platform.startswith("linux"):
        assert facts.interface("127.0.0.1") == ""
        return
    assert facts.interface("127.0.0.1") == "lo" and facts.mtu("lo") > 1500
    assert facts.interface("192.0.2.1") == "" and facts.mtu("") is None
    assert facts.speed("lo") is None


def test_doctor_facts_interface_speed(monkeypatch, tmp_path) -> None:
    """The speed of an interface is read as the driver writes it."""
    monkeypatch.setattr(facts, "NETWORK", tmp_path)
    for name, text in {"a": "1000\n", "b": "-1\n", "c": "", "d": "?"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "speed").write_text(text)
    assert [facts.speed(name) for name in "abcde"] == [1000, None, None, None, None]


def test_doctor_facts_tcp_settings(monkeypatch, tmp_path) -> None:
    """Settings of TCP that the system does not have are empty."""
    monkeypatch.setattr(facts, "SYSCTL", tmp_path)
    none = {"congestion": "", "slow_start_after_idle": None}
    assert facts.tcp_settings() == none
    (tmp_path / "tcp_congestion_control").write_text("cubic\n")
    (tmp_path / "tcp_slow_start_after_idle").write_text("0\n")
    assert facts.tcp_settings() == {"congestion": "cubic", "slow_start_after_idle": False}


def test_doctor_facts_disk(tmp_path) -> None:
    """The measurement of the disk leaves no file."""
    assert facts.disk_mb_s(tmp_path, size=facts.BLOCK) > 0
    assert list(tmp_path.iterdir()) == []
