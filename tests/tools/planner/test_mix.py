"""Plans for islands of unlike machines."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdp_demo import Link, load_config, preset
from fsdp_demo.automatic import measuring
from fsdp_demo.cli import main
from fsdp_demo.tools.planner import Situation, choose, load, mix, plan_rows
from fsdp_demo.tools.planner.mix import Machine
from fsdp_demo.tools.planner.situation import device, guessed_step

TINY = load("tiny")
LINK = Link(1e7)
UNLIKE = tuple(Machine(t, link=LINK, device="cpu") for t in (0.1, 0.2, 0.4))
THERE = Situation(TINY, 3, LINK, 0.1, device="cpu", machines=UNLIKE)
DILOCO = preset("diloco", period=20)
BY_SPEED = DILOCO.changed({"local_steps": "by_speed"})


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    """The rows that the command prints."""
    assert main(["plan", "--model", "tiny", *words, "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def test_mix_of_like_machines_is_the_plan() -> None:
    """A mix of like machines costs what the same islands do without one."""
    alike = replace(THERE, machines=())
    for config in (DILOCO, BY_SPEED, preset("demo"), preset("streaming_diloco")):
        (of_mix,) = plan_rows(replace(THERE, machines=UNLIKE[:1] * 3), [config])
        (plain,) = plan_rows(alike, [config])
        assert replace(of_mix, settings="") == replace(plain, settings="")


def test_mix_by_hand() -> None:
    """With steps by speed a round of unlike machines is as long as the fastest one's, and all of
    their speed is used but for the exchange; with equal steps all wait for the slowest.
    """
    (by_speed,) = plan_rows(THERE, [BY_SPEED])
    (equal,) = plan_rows(THERE, [DILOCO])
    (alone,) = plan_rows(replace(THERE, machines=()), [DILOCO])
    assert "steps 20/10/5" in by_speed.settings
    assert by_speed.exposed_seconds_per_step == pytest.approx(alone.exposed_seconds_per_step)
    exposed = alone.exposed_seconds_per_step
    assert by_speed.compute_utilisation == pytest.approx(0.1 / (0.1 + exposed))
    speed = 10 + 5 + 2.5  # steps per second of all, each for itself
    assert equal.compute_utilisation == pytest.approx(3 / (0.4 + exposed) / speed)


def test_mix_slowest_line_counts() -> None:
    """All wait for the island with the slowest line."""
    unlike = (UNLIKE[0], replace(UNLIKE[1], step_seconds=0.1, link=Link(1e6, 0.05)))
    two = Situation(TINY, 2, LINK, 0.1, device="cpu", machines=unlike)
    (row,) = plan_rows(two, [DILOCO])
    (slow,) = plan_rows(replace(two, machines=(), link=Link(1e6, 0.05)), [DILOCO])
    assert row.exposed_seconds_per_step == pytest.approx(slow.exposed_seconds_per_step)


def test_mix_length_counts_tokens_taken() -> None:
    """A run of so many tokens takes more ticks where islands leave some out."""
    long = replace(THERE, tokens=3e6, tokens_per_step=1e3)
    (equal,), (own,) = (plan_rows(long, [c]) for c in (DILOCO, BY_SPEED))
    ticks = 1000 * 60 / 35  # 35 of 60 steps are taken in a round
    each = 0.1 + own.exposed_seconds_per_step
    assert own.days == pytest.approx(ticks * each / 86400)
    assert equal.days == pytest.approx(1000 * (0.4 + equal.exposed_seconds_per_step) / 86400)


def test_mix_planner_lets_islands_take_own_steps() -> None:
    """Where machines are unlike, settings with a period let islands take own steps."""
    chosen = choose(plan_rows(THERE), THERE)
    assert chosen.config.by_speed
    rows = {r.name: r.config for r in plan_rows(THERE) if r.chosen}
    assert rows["demo"] is not None and not rows["demo"].by_speed
    nearly = replace(THERE, machines=(UNLIKE[0],) * 2 + (replace(UNLIKE[0], step_seconds=0.11),))
    assert not any(r.config.by_speed for r in plan_rows(nearly) if r.config is not None)


def test_mix_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The command reads islands, devices, links and times of steps, and writes the method."""
    words = ["--mix", "2xA100@1Gbit,2*4x4090@10Mbit=0.3s", "--rtt", "20ms"]
    file = tmp_path / "a.yaml"
    rows = planned(capsys, *words, "--yaml", str(file))
    assert {(r["islands"], r["shards"], r["link"]) for r in rows} == {(3, 2, "10Mbit,20ms")}
    guess = guessed_step(sum(a * b for _, (a, *r) in TINY for b in [r[0] if r else 1]), 1, 1,
                         device("a100"))  # fmt: skip
    assert rows[0]["step_seconds"] == pytest.approx(8192 * guess)
    assert load_config(str(file)).by_speed


def test_mix_of_doctor(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The islands of a doctor.json are a mix: the steps of each, and its slowest direction."""
    file = tmp_path / "doctor.json"
    links = [
        {"from": 0, "to": 1, "connections": 1, "mbit_s": {"1": 10.0}, "rtt_ms": 20.0},
        {"from": 1, "to": 0, "connections": 2, "mbit_s": {"1": 1.0, "2": 5.0}, "rtt_ms": 20.0},
    ]
    islands = [{"step_seconds": 0.1}, {"step_seconds": 0.4}]
    whole = {"format": 1, "link": {"bits_per_second": 5e6, "rtt": 0.02}, "islands": islands}
    file.write_text(json.dumps({**whole, "links": links}))
    (row,) = planned(
        capsys, "--mix", str(file), "--device", "cpu", "--exchange", "diloco",
        "--set", "period=20", "local_steps=by_speed", "--tokens", "1M", "--tokens-per-step", "1k",
    )  # fmt: skip
    assert row["link"] == "5Mbit,20ms" and row["settings"].endswith("steps 20/5")
    ticks = 500 * 40 / 25  # 25 of 40 steps are taken in a round
    assert row["run_bytes"] == pytest.approx(ticks * row["bytes_per_step"])
    file.write_text(json.dumps({**whole, "links": links[:1]}))
    assert main(["plan", "--model", "tiny", "--mix", str(file)]) == 2
    assert "lacks steps or links of an island" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--mix", "8xA100@1Gbit"], "name two or more"),
        (["--mix", "8xA100,4x4090@1Gbit"], "'8xA100': expected the ranks, device and link"),
        (["--mix", "0xcpu@1Gbit,cpu@1Gbit"], "'0xcpu@1Gbit': expected the ranks"),
        (["--mix", "h101@1Gbit,cpu@1Gbit"], "'h101' is not known"),
        (["--mix", "cpu@1Gbit=0s,cpu@1Gbit"], "expected a time above 0"),
        (["--mix", "3xcpu@1Gbit,2xcpu@1Gbit", "--shards", "2"], "does not divide the 3 ranks"),
        (["--mix", "cpu@1Gbit,cpu@1Gbit", "--step-time", "1s"], "--step-time all as one"),
        (["--mix", "cpu@1Gbit,cpu@1Gbit", "--islands", "3"], "--islands all as one"),
    ],
)
def test_mix_refused(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong mix is refused, with what is allowed."""
    assert main(["plan", "--model", "tiny", *words]) == 2
    assert says in capsys.readouterr().err


def test_auto_takes_unlike_steps_for_a_mix() -> None:
    """`auto` plans for unlike machines where the slowest step takes half as long again."""
    assert measuring.unlike(3, LINK, "cpu", 0.1, 0.14) == ()
    assert measuring.unlike(3, LINK, "cpu", 0.0, 0.4) == ()
    found = measuring.unlike(3, LINK, "cpu", 0.1, 0.4)
    assert [m.step_seconds for m in found] == [0.1, 0.5, 0.5]
    assert mix.with_own_steps(found, DILOCO).by_speed
