"""The commonest mistakes of a first day are answered in the words of yaml, with what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_demo import load_config, preset


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("diloco", {"period": "x"}, "period='x' must be a whole number; found a text"),
        ("diloco", {"period": None}, "must be a whole number; found nothing (null)"),
        ("diloco", {"period": True}, "must be a whole number; found true or false"),
        ("demo", {"clip": "none"}, "clip='none' must be a number, or null; found a text"),
        ("diloco", {"topk": 4}, "codec.topk has no effect: channel 'delta' sends every value"),
        ("diloco", {"delay": 4}, "did you mean 'schedule.delay'?"),
    ],
)
def test_config_wrong_value_says_allowed(name: str, changes: dict, said: str) -> None:
    """The error of a wrong value says what is allowed, in the words of yaml."""
    with pytest.raises(ValueError) as error:
        preset(name, **changes)
    assert said in str(error.value)


def test_config_number_as_text() -> None:
    """A number may be given as a text, whatever its kind."""
    assert preset("demo", clip="1").clip == 1.0
    for text in ("20", "2e1"):
        assert preset("diloco", period=text) == preset("diloco", period=20)
    with pytest.raises(ValueError, match="must be a whole number"):
        preset("diloco", period="2.5")


def test_config_changes_must_be_list() -> None:
    """Changes must be a list of texts."""
    with pytest.raises(ValueError, match=r"write \['period=5'\]"):
        load_config("diloco", "period=5")


def test_config_missing_file_lists_presets() -> None:
    """The error of a missing file says that it is no preset either, and lists the presets."""
    with pytest.raises(FileNotFoundError, match="neither a preset nor a file") as error:
        load_config("nothere.yaml")
    assert "demo, " in str(error.value)


def test_config_keyword_and_path_of_one_key_refused(tmp_path: Path) -> None:
    """A keyword and a path of one key are refused together."""
    with pytest.raises(ValueError, match=r"period=8 and schedule\.sync_every=12 set the same key"):
        preset("diloco", period=8, **{"schedule.sync_every": 12})
    file = tmp_path / "short.yaml"
    file.write_text("preset: diloco\nperiod: 8\nschedule.sync_every: 12\n")
    with pytest.raises(ValueError, match=f"{file}: period=8 and schedule.sync_every=12"):
        load_config(str(file))
    # a path for one channel says more than the keyword
    preset("demo", topk=8, **{"momentum.codec.topk": 16})


def test_config_set_wins_over_file(tmp_path: Path) -> None:
    """A setting wins over the file by either of its names."""
    file, wanted = tmp_path / "short.yaml", preset("diloco", period=4)
    for written in ("period", "schedule.sync_every", "sync_every"):
        file.write_text(f"preset: diloco\n{written}: 12\n")
        for change in ("period=4", "schedule.sync_every=4"):
            assert load_config(str(file), [change]) == wanted, (written, change)
