"""Errors of a configuration: settings without effect and wrong values are refused with what is
allowed, in the words of yaml.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from fsdp_demo import ExchangeConfig, load_config, preset, presets

from ..support.refused import refusal as refused


@pytest.mark.parametrize(("name", "path", "value", "why"), [
    ("diloco", "codec.topk", 3, "codec.select='dense'"),
    ("diloco", "delta.codec.topk", 3, "channel 'delta' sends every value"),
    ("local_adam", "codec.topk", 3, "codec.select='dense'"),
    ("diloco", "applier.dense_lr", 0.5, "codec.select='dense'"),
    ("diloco", "accumulator.alpha", 0.5, "feedback='subtract', found 'none'"),
    ("sparse_loco", "applier.momentum_warmup", 20, "applier.momentum=0"),
    ("demo", "applier.lr", 0.1, "its rate is that of your optimizer"),
    ("demo", "applier.momentum", 0.9, "takes no outer step"),
    ("local_sgd", "applier.lr", 0.7, "applier.acts_as='replace'"),
    ("diloco", "seed", 3, "codec.select='random'"),
    ("demo", "offload_outer_state", True, "source 'delta'"),
    ("full", "clip_scope", "islands", "mean gradient"),
])  # fmt: skip
def test_config_setting_without_effect_refused(name: str, path: str, value: Any, why: str) -> None:
    """A setting without effect is refused, and the error says why."""
    text = refused(lambda: preset(name, **{path: value}), why)
    assert text.startswith(f"{path}={value!r} has no effect: ")
    assert text.endswith(f"leave {path} out")


def test_config_setting_of_one_channel_for_all() -> None:
    """A setting that one channel uses is taken for all channels."""
    made = preset("decoupled_momentum", rule="released", average_every=2, **{"codec.topk": 3})
    assert [c.codec.topk for c in made.channels] == [3, 3]
    refused(lambda: made.changed({"average.codec.topk": 3}), "channel 'average'")
    # the released rule has a momentum of its own
    refused(lambda: made.changed({"applier.momentum": 0.9}), "accumulator.beta")


def test_config_changes_count_together() -> None:
    """Changes are checked together, not one by one."""
    both = {"codec.topk": 3, "codec.select": "topk"}
    assert preset("diloco", **both).channels[0].codec.topk == 3
    refused(lambda: preset("demo", **{"codec.topk": 3, "codec.select": "dense"}))


def test_config_switching_off_accepted() -> None:
    """A setting that switches off what is off is taken."""
    made = preset("diloco", **{"delta.uncompressed": ["*bias"], "delta.no_transform": ["*head*"]})
    assert made.channels[0].uncompressed == ("*bias",)  # as it is with all
    off = {"applier.momentum": 0.0, "applier.momentum_warmup": 0, "applier.nesterov": False}
    assert preset("demo", **off, seed=0, offload_outer_state=False) == preset("demo")


@pytest.mark.parametrize("name", sorted(presets()))
def test_config_defaults_without_effect(name: str, tmp_path: Path) -> None:
    """Defaults without effect in a whole file are no error."""
    whole = tmp_path / "whole.yaml"
    whole.write_text(preset(name).to_yaml())
    assert load_config(str(whole), ["clip=2"]) == preset(name, clip=2.0)
    refused(lambda: load_config(str(whole), ["codec.topk=5000"]))


def test_config_error_names_file(tmp_path: Path) -> None:
    """The error of a setting without effect names its file."""
    file = tmp_path / "short.yaml"
    file.write_text("preset: diloco\ncodec: {topk: 3}\n")
    assert refused(lambda: load_config(str(file))).startswith(f"{file}: codec.topk=3 has no effect")


@pytest.mark.parametrize(("text", "path", "lines"), [
    ("preset: diloco\nperiod: 7\nclip: 1\nperiod: 9\n", "period", (2, 4)),
    ("preset: demo\ncodec:\n  topk: 3\n  topk: 4\n", "codec.topk", (3, 4)),
    ("preset: demo\ncodec: {topk: 3}\ncodec.topk: 4\n", "codec.topk", (2, 3)),
    ("preset: demo\ncodec: {topk: 3}\ncodec: {select: topk}\n", "codec", (2, 3)),
])  # fmt: skip
def test_config_yaml_repeated_key_refused(tmp_path: Path, text: str, path: str, lines: Any) -> None:
    """A key that stands twice in a yaml file is refused with both lines."""
    file = tmp_path / "twice.yaml"
    file.write_text(text)
    wanted = f"{file}: {path} stands twice, in line {lines[0]} and in line {lines[1]}: remove one"
    refused(lambda: load_config(str(file)), wanted)


def test_config_yaml_repeated_key_in_whole_file(tmp_path: Path) -> None:
    """A key that stands twice in a whole file is refused with its path and both lines."""
    file = tmp_path / "whole.yaml"
    text = preset("diloco").to_yaml().replace("    delay: 0\n", "    delay: 0\n    delay: 1\n")
    file.write_text(text)
    where = refused(lambda: load_config(str(file)), "channels[0].schedule.delay stands twice")
    line = 1 + text.splitlines().index("    delay: 0")
    assert f"in line {line} and in line {line + 1}" in where
    refused(lambda: ExchangeConfig.from_yaml(text), "the configuration: channels[0].schedule.delay")


def test_config_yaml_syntax_error_names_line(tmp_path: Path) -> None:
    """Text that is no yaml is refused with its place."""
    file = tmp_path / "broken.yaml"
    file.write_text("preset: [demo\n")
    assert refused(lambda: load_config(str(file)), "line").startswith(f"{file} is no yaml: ")
    refused(lambda: load_config("demo", ["clip=[1"]), "override 'clip=[1' is no yaml")


def test_config_unknown_channel_lists_channels() -> None:
    """The error of an unknown channel lists the channels."""
    text = refused(lambda: preset("decoupled_momentum", **{"momentum.codec.topk": 3}))
    assert "did you mean 'codec.topk'?" in text and "; channels: delta)" in text
    assert "channels:" not in refused(lambda: preset("diloco", **{"schedule.sync_evry": 3}))


@pytest.mark.parametrize(("name", "changes", "said"), [
    ("diloco", {"period": "x"}, "period='x' must be a whole number; found a text"),
    ("diloco", {"period": "often"}, "period='often' must be a whole number; found a text"),
    ("diloco", {"period": "2.5"}, "must be a whole number"),
    ("diloco", {"period": None}, "must be a whole number; found nothing (null)"),
    ("diloco", {"period": True}, "must be a whole number; found true or false"),
    ("demo", {"clip": "none"}, "clip='none' must be a number, or null; found a text"),
    ("diloco", {"topk": 4}, "codec.topk has no effect: channel 'delta' sends every value"),
    ("diloco", {"delay": 4}, "did you mean 'schedule.delay'?"),
])  # fmt: skip
def test_config_wrong_value_says_allowed(name: str, changes: dict, said: str) -> None:
    """The error of a wrong value says what is allowed, in the words of yaml."""
    refused(lambda: preset(name, **changes), said)


def test_config_number_as_text() -> None:
    """A number may be given as a text, whatever its kind."""
    assert preset("demo", clip="1").clip == 1.0
    assert preset("diloco", lr=1).channels[0].applier.lr == 1.0
    for text in ("20", "2e1"):
        assert preset("diloco", period=text) == preset("diloco", period=20)


def test_config_changes_must_be_list() -> None:
    """Changes must be a list of texts."""
    refused(lambda: load_config("diloco", "period=5"), "write ['period=5']")


def test_config_missing_file_lists_presets() -> None:
    """The error of a missing file says that it is no preset either, and lists the presets."""
    says = "neither a preset nor a file", "demo, "
    refused(lambda: load_config("nothere.yaml"), *says, kind=FileNotFoundError)


def test_config_keyword_and_path_of_one_key_refused(tmp_path: Path) -> None:
    """A keyword and a path of one key are refused together."""
    both = "period=8 and schedule.sync_every=12"
    path = {"schedule.sync_every": 12}
    refused(lambda: preset("diloco", period=8, **path), f"{both} set the same key")
    file = tmp_path / "short.yaml"
    file.write_text("preset: diloco\nperiod: 8\nschedule.sync_every: 12\n")
    refused(lambda: load_config(str(file)), f"{file}: {both}")
    # a path for one channel says more than the keyword
    preset("demo", topk=8, **{"momentum.codec.topk": 16})


@pytest.mark.parametrize("name", presets())
def test_config_sync_every_is_keyword_for_it(name: str) -> None:
    """`sync_every` stands for the preset's own keyword for it, whatever that is called; both of
    them are refused. A preset without one refuses it.
    """
    word = "check_every" if name == "sel_sync" else "period"
    if word not in inspect.signature(presets()[name]).parameters:
        refused(lambda: preset(name, sync_every=4), "did you mean 'schedule.sync_every'?")
        return
    assert preset(name, sync_every=4) == preset(name, **{word: 4})
    refused(lambda: preset(name, sync_every=4, **{word: 4}), f"{word} and sync_every are the same")
    path = {"schedule.sync_every": 8}
    refused(lambda: preset(name, **{word: 4}, **path), f"{word}=4 and", "set the same key")


def test_config_set_wins_over_file(tmp_path: Path) -> None:
    """A setting wins over the file by either of its names."""
    file, wanted = tmp_path / "short.yaml", preset("diloco", period=4)
    for written in ("period", "schedule.sync_every", "sync_every"):
        file.write_text(f"preset: diloco\n{written}: 12\n")
        for change in ("period=4", "schedule.sync_every=4"):
            assert load_config(str(file), [change]) == wanted, (written, change)
    wanted = preset("sel_sync", check_every=4)
    for written in ("check_every", "schedule.sync_every", "sync_every"):
        file.write_text(f"preset: sel_sync\n{written}: 16\n")
        for change in ("check_every=4", "schedule.sync_every=4", "sync_every=4"):
            assert load_config(str(file), [change]) == wanted, (written, change)
