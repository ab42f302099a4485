"""doctor.json as a planner reads it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fsdp_demo import Link
from fsdp_demo.tools.doctor.reading import Reading, load

GOOD: dict[str, Any] = {
    "format": 1,
    "link": {"bits_per_second": 9.3e7, "rtt": 0.041},
    "islands": [{"step_seconds": 0.5}, {"step_seconds": 0.75}],
}


def written(tmp_path: Any, value: Any) -> Any:
    path = tmp_path / "doctor.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_doctor_reading_steps(tmp_path) -> None:
    """A reading has the step time of each island."""
    assert load(written(tmp_path, GOOD)) == Reading(Link(9.3e7, 0.041), (0.5, 0.75))


def test_doctor_reading_missing_step_times(tmp_path) -> None:
    """Without the step times of all islands a reading has none."""
    steps = [{"step_seconds": 0.5}, {"step_seconds": None}]
    assert load(written(tmp_path, {**GOOD, "islands": steps})).steps == ()
    assert load(written(tmp_path, {**GOOD, "islands": []})).steps == ()


@pytest.mark.parametrize("value, message", [
    ("{", "cannot be read"),
    ([], "has format None"),
    ({**GOOD, "format": 2}, "has format 2, this release reads 1"),
    ({**GOOD, "link": None}, "holds no measured link"),
    ({**GOOD, "link": {"bits_per_second": "fast", "rtt": 0.1}}, "holds no measured link"),
    ({**GOOD, "link": {"bits_per_second": 1e6}}, "holds no measured link"),
])  # fmt: skip
def test_doctor_reading_refused(tmp_path, value, message) -> None:
    """A file that is no `doctor.json` of this release is refused."""
    with pytest.raises(ValueError, match=message):
        load(written(tmp_path, value))


def test_doctor_reading_missing_file(tmp_path) -> None:
    """A missing file is refused."""
    with pytest.raises(ValueError, match="cannot be read"):
        load(tmp_path / "none.json")
