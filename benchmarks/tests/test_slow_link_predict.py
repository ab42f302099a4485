"""Predictions of slow links: against the measurement that is kept, and what is written."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

from benchmarks import slow_link_predict as predict  # noqa: E402
from fsdp_demo import Link  # noqa: E402

MEASURED = ROOT / "docs" / "figures" / "slow_link.json"


def test_slow_link_predict_meets_the_measurement() -> None:
    """Predicted seconds per step on other links, from those without a limit, meet the measurement
    of 2026-11-23.
    """
    text = predict.offline(MEASURED)
    met, of = (int(n) for n in text.splitlines()[-1].split(" cells")[0].split(" of "))
    assert of == 29 and met >= 27, text


def test_slow_link_predict_grid_has_36_cells() -> None:
    """The grid has 36 cells."""
    cases = predict.grid()
    links = [Link.parse(text) for text in predict.LINKS.split(",")]
    rows = predict.predicted(cases, {c.name: 0.2 for c in cases}, links, 2, predict.LAYERS)
    assert len(rows) == len({(r["case"], r["link"]) for r in rows}) == 36
    assert all(r["added_seconds_per_step"] >= -1e-9 for r in rows)
    alone = {(c.name, str(Link())): 0.2 for c in cases}
    exact = {(r["case"], r["link"]): 0.2 + r["added_seconds_per_step"] for r in rows}
    found = predict.compared(rows, {**alone, **exact})
    assert len(found) == 36 and all(r["met"] and abs(r["off"]) < 1e-9 for r in found)
    wrong = {key: 1.3 * seconds for key, seconds in exact.items()}
    found = predict.compared(rows, {**alone, **wrong})
    assert not any(r["met"] for r in found)
    assert "0 of 36 cells within 20%" in predict.show(found, "")


def test_slow_link_predict_shared_uplink_adds_up() -> None:
    """A shared uplink adds what crosses it. Two sites of two islands: 4/3 of the bytes of one
    island cross each uplink.
    """
    cases = [c for c in predict.grid(5) if c.name in ("full", "diloco, period 5")]
    assert len(cases) == 2
    steps, link = {c.name: 0.1 for c in cases}, [Link(1e6)]
    own, shared = (
        [r["added_seconds_per_step"] for r in predict.predicted(cases, steps, link, 4, 1, sharing)]
        for sharing in (1, 2)
    )
    # the work of the host, a hundredth of the whole, is the same
    assert [b / a for a, b in zip(own, shared, strict=True)] == pytest.approx([4 / 3] * 2, rel=0.01)


@pytest.mark.parametrize("number", ["0", "4"])
def test_slow_link_predict_refuses_idle_uplinks(
    number: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uplinks that nothing crosses are refused."""
    words = ["--predict", "x.json", "--islands", "4", "--islands-per-uplink", number]
    monkeypatch.setattr(sys, "argv", ["slow_link_predict.py", *words])
    with pytest.raises(SystemExit) as ended:
        predict.main()
    assert ended.value.code == 2
    assert "from 1 to 3 of 4 islands" in capsys.readouterr().err


def test_slow_link_predict_needs_a_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file for the predictions is needed."""
    monkeypatch.setattr(sys, "argv", ["slow_link_predict.py"])
    with pytest.raises(SystemExit) as ended:
        predict.main()
    assert ended.value.code == 2 and "give --predict FILE" in capsys.readouterr().err
