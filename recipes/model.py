"""The model of the recipes: fresh weights from a configuration, compiled or checkpointed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

MODELS = Path(__file__).parent / "models"


def load_model(name: str, vocabulary: int) -> PreTrainedModel:
    """Fresh fp32 weights from a configuration."""
    path = next((p for p in (MODELS / f"{name}.json", Path(name)) if p.is_file()), None)
    config = AutoConfig.from_pretrained(path or name)
    if config.vocab_size < vocabulary:
        raise ValueError(
            f"--model {name} has vocab_size={config.vocab_size}, the tokenizer needs {vocabulary}: "
            "change one of them"
        )
    # for generation; with it every layer would be compiled anew, and from the ninth on not at all
    config.use_cache = False
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def checkpoint_and_compile(
    model: PreTrainedModel, device: torch.device, checkpoint: bool, backend: str | None
) -> None:
    """Before `prepare`: FSDP2 then puts its hooks around what is made here.

    The layers are compiled one by one and in place: equal layers share one compilation, parameters
    keep their names, and FSDP2's hooks, the optimizer and the exchange stay outside. The whole
    model in one piece would break its graph at every hook. Activation checkpointing is inside of
    the layer's forward, so the compiler knows what is to be computed again.

    Args:
        checkpoint: keep layers' inputs only, compute the rest again.
        backend: of torch.compile; None: not compiled.

    Raises:
        ValueError: inductor on a CPU without a C++ compiler.
    """
    if checkpoint:
        # its older name, where transformers has no other
        enable = getattr(
            model, "activation_checkpointing_enable", model.gradient_checkpointing_enable
        )
        enable()
    if backend is None:
        return
    cxx = os.environ.get("CXX", "g++")
    needs_cxx = backend == "inductor" and device.type == "cpu"
    if needs_cxx and not (shutil.which(cxx) or shutil.which("clang++")):
        raise ValueError(
            f"--compile on the CPU needs a C++ compiler, found no {cxx}: install one, or "
            "--compile aot_eager"
        )
    # what FSDP2 shards one by one
    layers = [m for m in model.modules() if type(m).__name__ in (model._no_split_modules or ())]
    for module in layers or [model]:
        module.compile(backend=backend)
