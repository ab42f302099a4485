"""What a wrong key is answered with: the right key comes first, then those that are allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_demo import attach, load_config, preset
from fsdp_demo.config.load import changed
from fsdp_demo.errors import see


def refused(call: Any, *parts: str) -> str:
    with pytest.raises(ValueError) as error:
        call()
    text = str(error.value)
    assert all(part in text for part in parts), text
    return text


@pytest.mark.parametrize(
    ("name", "key", "right"),
    [
        ("demo", "period", "schedule.sync_every"),
        ("demo", "sync_every", "schedule.sync_every"),
        ("demo", "H", "schedule.sync_every"),
        ("demo", "k", "topk"),
        ("diloco", "H", "period"),
        ("diloco", "perid", "period"),
        ("diloco", "schedule.period", "schedule.sync_every"),
        ("diloco", "schedule.H", "schedule.sync_every"),
        ("diloco", "delta.schedule.period", "delta.schedule.sync_every"),
        ("diloco", "delta.codec.topkk", "delta.codec.topk"),
        ("demo", "momentun.codec.topk", "momentum.codec.topk"),
        ("demo", "momentum.topk", "momentum.codec.topk"),
        ("demo", "applier.beta", "accumulator.beta"),
    ],
)
def test_a_wrong_key_is_told_the_right_one_first(name: str, key: str, right: str) -> None:
    text = refused(lambda: preset(name, **{key: 3}), f"; did you mean {right!r}? (")
    assert text.index("did you mean") < text.index("(") and text.endswith(see("unknown-key"))


def test_the_keys_below_a_section_are_enough() -> None:
    text = refused(lambda: preset("diloco", **{"schedule.sync_evry": 3}), "(known: schedule.delay")
    assert "codec." not in text and "clip" not in text


def test_a_key_of_a_whole_file_that_papers_call_so(tmp_path: Path) -> None:
    file = tmp_path / "whole.yaml"
    file.write_text(preset("diloco").to_yaml().replace("sync_every:", "period:"))
    refused(
        lambda: load_config(str(file)),
        f"{file}: unknown key channels[0].schedule.period; did you mean 'sync_every'?",
    )


def test_a_keyword_of_the_preset_beside_a_configuration() -> None:
    wanted = "write schedule.sync_every=10, or preset('diloco', period=10)"
    optimizer = torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())
    for key in ("period", "sync_every"):
        text = refused(lambda key=key: attach(optimizer, preset("diloco"), **{key: 10}), wanted)
        assert text.startswith(f"{key} is a keyword of the preset")
    assert "write codec.topk=3" in refused(lambda: changed(preset("demo"), {"topk": 3}))
    # one path would set the periods of all channels to one
    assert "schedule.sync_every" not in refused(lambda: changed(preset("desloc"), {"period": 3}))
    assert changed(preset("diloco"), {"lr": 1e-3, "clip": 2.0}).clip == 2.0
    assert changed(preset("diloco"), {"schedule.sync_every": 10}) == preset("diloco", period=10)


def test_a_wrong_value_in_a_file_names_the_file_and_no_other_does(tmp_path: Path) -> None:
    file = tmp_path / "short.yaml"
    for body in ("codec: {topk: lots}", "topk: lots", "beta: 7", "topkk: 3"):
        file.write_text(f"preset: demo\n{body}\n")
        assert refused(lambda: load_config(str(file))).startswith(f"{file}: ")
        assert refused(lambda: load_config(str(file), ["clip=1"])).startswith(f"{file}: ")
    file.write_text("preset: demo\ntopk: 8\n")
    assert str(file) not in refused(lambda: load_config(str(file), ["topk=lots"]))
