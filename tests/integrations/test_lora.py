"""Adapters: the example of docs/lora.md as two islands; the all-reduce that a run with frozen
parameters is compared with.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from fsdp_demo import ring_all_reduce_bytes
from fsdp_demo.runlog.files import load

from ..support import pages
from ..support import trainer_script as script
from ..support.inside import in_ranks

needs_peft = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None, reason="the example needs peft: pip install peft"
)


def example() -> str:
    page = (pages.ROOT / "docs" / "lora.md").read_text(encoding="utf-8")
    (code,) = (b.code for b in pages.blocks(page) if "ExchangeCallback(" in b.code)
    assert 'TrainingArguments("out", ' in code
    return code.replace('TrainingArguments("out", ', 'TrainingArguments("out", use_cpu=True, ')


@needs_peft
@in_ranks(2, 1, timeout=300)
def test_lora_example_of_page(me):
    """Both islands save the same adapter, and nothing else has travelled."""
    script.fresh_state()
    os.chdir(me.folder)
    names = {"__name__": "__main__"}
    exec(example(), names)
    trained = names["trainer"]
    count = sum(p.numel() for p in trained.model.parameters() if p.requires_grad)
    assert script.exchange_of(trained).metrics()["bytes_sent"] == 2 * (4 * count + 3 * 56)
    return (Path(trained.args.output_dir) / "adapter/adapter_model.safetensors").read_bytes()


@in_ranks(2, 1, timeout=120)
def test_trainer_all_reduce_of_trained(me):
    """The all-reduce that bytes are compared with has the gradients of trained parameters alone."""
    line = script.one_line("diloco", period=4)
    made = script.trainer(me.folder / "out", line, save_strategy="no")
    made.model.model.embed_tokens.requires_grad_(False)
    made.train()
    parameters = list(made.model.parameters())
    count = sum(p.numel() for p in parameters if p.requires_grad)
    (own,) = load(made.args.output_dir).islands
    assert 0 < count < sum(p.numel() for p in parameters) == own.summary["parameters"]
    assert own.summary["bytes_full_per_island"] == 8 * ring_all_reduce_bytes(2, 2 * count)
