"""Checkpoints of unknown origin: what an index names, what is nested too deep, what is no whole
model.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from fsdp_demo.integrations.export.weights import read_model


def indexed(folder, *files):
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {f"w{i}": f for i, f in enumerate(files)}})
    )


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "a/../../secret.safetensors", "/etc/passwd"]
)
def test_export_index_outside_folder_refused(tmp_path, name):
    """An index that names files outside its folder is refused."""
    save_file({"w1": torch.ones(2)}, tmp_path / "secret.safetensors")
    folder = tmp_path / "checkpoint"
    (folder / "a").mkdir(parents=True)
    save_file({"w0": torch.ones(2)}, folder / "one.safetensors")
    indexed(folder, "one.safetensors", name)
    with pytest.raises(ValueError, match="which is not in its folder: allowed are files beside it"):
        read_model(folder)
    save_file({"w1": torch.ones(2)}, folder / "a" / "two.safetensors")
    indexed(folder, "one.safetensors", "a/two.safetensors")
    assert sorted(read_model(folder)) == ["w0", "w1"]


@pytest.mark.parametrize(
    "text", ["[" * 200_000, "[]", "{}", '{"weight_map": []}', '{"weight_map": 3}']
)
def test_export_damaged_index_named(tmp_path, text):
    """The error names a damaged index."""
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match="index.json is damaged"):
        read_model(tmp_path)


@pytest.mark.parametrize("fsdp", [False, True])
def test_export_adapter_refused(tmp_path, fsdp):
    """An adapter is refused: it is not a whole model. FSDP's file beside it is none, either."""
    save_file({"lora_A": torch.ones(2)}, tmp_path / "adapter_model.safetensors")
    if fsdp:
        torch.save({"lora_A.default": torch.ones(2)}, tmp_path / "pytorch_model_fsdp.bin")
    with pytest.raises(
        ValueError, match=r"holds an adapter of peft.*PeftModel.from_pretrained\(BASE, "
    ):
        read_model(tmp_path)
