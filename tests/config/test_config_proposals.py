"""What a wrong key is answered with: the right key comes first, then those that are allowed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fsdp_demo import attach, load_config, preset
from fsdp_demo.config.load import changed
from fsdp_demo.errors import see

from ..support.refused import refusal as refused


@pytest.mark.parametrize(("name", "key", "right"), [
    ("demo", "period", "schedule.sync_every"),
    ("demo", "sync_every", "schedule.sync_every"),
    ("demo", "H", "schedule.sync_every"),
    ("demo", "k", "topk"),
    ("diloco", "H", "period"),
    ("diloco", "perid", "period"),
    ("sel_sync", "H", "check_every"),
    ("sel_sync", "period", "check_every"),
    ("diloco", "schedule.period", "schedule.sync_every"),
    ("diloco", "schedule.H", "schedule.sync_every"),
    ("diloco", "delta.schedule.period", "delta.schedule.sync_every"),
    ("diloco", "delta.codec.topkk", "delta.codec.topk"),
    ("demo", "momentun.codec.topk", "momentum.codec.topk"),
    ("demo", "momentum.topk", "momentum.codec.topk"),
    ("demo", "applier.beta", "accumulator.beta"),
])  # fmt: skip
def test_config_proposal_right_key_first(name: str, key: str, right: str) -> None:
    """The error of a wrong key offers the right one first."""
    text = refused(lambda: preset(name, **{key: 3}), f"; did you mean {right!r}? (")
    assert text.index("did you mean") < text.index("(") and text.endswith(see("unknown-key"))


def test_config_proposal_keys_of_section() -> None:
    """The error of a wrong key in a section lists the keys of that section only."""
    text = refused(
        lambda: preset("diloco", **{"schedule.sync_evry": 3}), "(known: schedule.at_most"
    )
    assert "codec." not in text and "clip" not in text


def test_config_proposal_for_name_of_papers(tmp_path: Path) -> None:
    """The error offers the right key for a name that papers use."""
    file = tmp_path / "whole.yaml"
    file.write_text(preset("diloco").to_yaml().replace("sync_every:", "period:"))
    refused(
        lambda: load_config(str(file)),
        f"{file}: unknown key channels[0].schedule.period; did you mean 'sync_every'?",
    )


def test_config_proposal_preset_keyword() -> None:
    """The error offers a path for a keyword of the preset that is given beside a configuration."""
    wanted = "write schedule.sync_every=10, or preset('diloco', period=10)"
    optimizer = torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())
    for key in ("period", "sync_every"):
        text = refused(lambda key=key: attach(optimizer, preset("diloco"), **{key: 10}), wanted)
        assert text.startswith(f"{key} is a keyword of the preset")
    refused(
        lambda: changed(preset("sel_sync"), {"sync_every": 4}),
        "write schedule.sync_every=4, or preset('sel_sync', check_every=4)",
    )
    assert "write codec.topk=3" in refused(lambda: changed(preset("demo"), {"topk": 3}))
    # one path would set the periods of all channels to one
    assert "schedule.sync_every" not in refused(lambda: changed(preset("desloc"), {"period": 3}))
    assert changed(preset("diloco"), {"lr": 1e-3, "clip": 2.0}).clip == 2.0
    assert changed(preset("diloco"), {"schedule.sync_every": 10}) == preset("diloco", period=10)


def test_config_wrong_value_names_file(tmp_path: Path) -> None:
    """The error of a wrong value names the file where it stands, and only then."""
    file = tmp_path / "short.yaml"
    for body in ("codec: {topk: lots}", "topk: lots", "beta: 7", "topkk: 3"):
        file.write_text(f"preset: demo\n{body}\n")
        assert refused(lambda: load_config(str(file))).startswith(f"{file}: ")
        assert refused(lambda: load_config(str(file), ["clip=1"])).startswith(f"{file}: ")
    file.write_text("preset: demo\ntopk: 8\n")
    assert str(file) not in refused(lambda: load_config(str(file), ["topk=lots"]))
