"""Shapes without transformers against those that transformers makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdp_demo.tools.planner.models import KNOWN, equal_layers, load, numel

RECIPES = Path(__file__).resolve().parents[3] / "recipes" / "models"


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.json")), ids=lambda p: p.stem)
def test_planner_models_of_recipes(path: Path) -> None:
    """The shapes of the recipes' models are those that transformers makes."""
    pytest.importorskip("transformers")
    assert load(path.stem) == load(str(path))


@pytest.mark.parametrize(("name", "made"), [
    ("qwen2.5-0.5b", "Qwen2"), ("qwen3-0.6b", "Qwen3"), ("llama-3.2-3b", "Llama"),
    ("tinyllama-1.1b", "Llama"), ("mistral-7b", "Mistral"),
])  # fmt: skip
def test_planner_models_of_other_families(name: str, made: str) -> None:
    """The shapes of other families are those that transformers makes."""
    transformers: Any = pytest.importorskip("transformers")
    import torch

    s = KNOWN[name]
    facts: dict[str, Any] = dict(hidden_size=s.hidden, intermediate_size=s.mlp, vocab_size=s.vocab)
    facts |= dict(num_attention_heads=s.heads, num_key_value_heads=s.kv_heads)
    facts |= dict(num_hidden_layers=2, tie_word_embeddings=s.tied)
    facts |= {"head_dim": s.head} if s.head else {}
    config = getattr(transformers, f"{made}Config")(**facts)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    layer = "model.layers."
    shapes = [(n, n.startswith(layer), shape) for n, shape in load(name)]
    two = [(n, shape) for n, of, shape in shapes if not of or int(n.split(".")[2]) < 2]
    assert two == [(n, tuple(p.shape)) for n, p in model.named_parameters()]


@pytest.mark.parametrize(("name", "millions"), [
    ("llama-3.2-1b", 1235.8), ("llama-3.2-3b", 3212.7), ("llama-3.1-8b", 8030.3),
    ("llama-3.1-70b", 70553.7), ("mistral-7b", 7248.0), ("qwen2.5-7b", 7615.6),
    ("qwen3-8b", 8190.7), ("smollm2-135m", 134.5), ("smollm2-1.7b", 1711.4),
    ("tinyllama-1.1b", 1100.0),
])  # fmt: skip
def test_planner_models_published_sizes(name: str, millions: float) -> None:
    """The models have their published sizes, as the model cards say (bf16 checkpoints,
    ties once).
    """
    assert numel(load(name)) / 1e6 == pytest.approx(millions, abs=0.06)


def test_planner_models_hub_id_offline() -> None:
    """A hub id of a known model needs no network."""
    for name in ("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-1B-Instruct"):
        assert load(name) == load("llama-3.2-1b")


def test_planner_models_unknown_names_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of an unknown model names the nearest ones."""
    with pytest.raises(ValueError, match="'lama-3.2-1b' is not known: the nearest known are llama"):
        load("lama-3.2-1b")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="the hub did not give it .*nearest known are .*qwen3-8b"):
        load("nobody-at-all/qwen3-8c")


def test_planner_models_equal_layers() -> None:
    """Equal layers are equal and have all parameters."""
    for parameters, layers in ((10, 10), (100_000_000_000, 108), (1_234_567, 7)):
        made = equal_layers(parameters, layers)
        assert numel(made) == parameters
        sizes = [numel([(n, s) for n, s in made if f".{i}." in n]) for i in range(layers)]
        assert max(sizes) - min(sizes) <= 1
    with pytest.raises(ValueError, match="3 parameters in 4 layers"):
        equal_layers(3, 4)
