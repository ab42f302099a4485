"""The configurations of recipes/models: each builds, and has the parameters it is known for, to the
unit.

Tied embeddings are counted once. Where the figures of the published models are from: the number of
elements in `model.safetensors` on the hub (meta-llama/Llama-3.2-1B, HuggingFaceTB/SmolLM2-360M,
Qwen/Qwen3-1.7B-Base; the file of Qwen/Qwen3-1.7B holds the tied head a second time, 2 031 739 904).
The other two ways to the same number are below: the built model, and the formula.
"""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

MODELS = Path(__file__).parents[2] / "recipes" / "models"
PARAMETERS = {
    "llama-3.2-1b": 1_235_814_400,  # published
    "qwen3-1.7b": 1_720_574_976,  # published
    "smollm2-360m": 361_821_120,  # published
    "olmo-1b": 1_176_764_416,  # published: OLMo-1B, DeMo's larger model
    "olmo-300m": 319_946_752,  # ours, after DeMo's smaller model; no checkpoint of it is published
    "small": 3_280_128,  # ours
    "study": 919_168,  # ours
    "study-large": 9_918_400,  # ours
    "study-small": 492_672,  # ours
    "tiny": 459_904,  # ours
}


def build(path):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(path), dtype=torch.float32
        )


def by_formula(c):
    """Parameters of a Llama-like decoder, from the numbers in the file alone."""
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    head = c.get("head_dim", hidden // heads)
    attention = 2 * hidden * heads * head + 2 * hidden * c["num_key_value_heads"] * head
    # OLMo's norms have no weights
    norms = {"olmo": 0, "llama": 2 * hidden, "qwen3": 2 * hidden + 2 * head}[c["model_type"]]
    layer = attention + 3 * hidden * c["intermediate_size"] + norms
    embeddings = c["vocab_size"] * hidden * (1 if c["tie_word_embeddings"] else 2)
    return (
        embeddings + c["num_hidden_layers"] * layer + (0 if c["model_type"] == "olmo" else hidden)
    )


def test_models_every_file_listed():
    """Every file of `recipes/models` has a case here."""
    assert {path.stem for path in MODELS.glob("*.json")} == set(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_models_number_of_parameters(name):
    """Each model has the number of parameters that it is known for, to the unit."""
    path = MODELS / f"{name}.json"
    model = build(path)
    assert (
        sum(p.numel() for p in model.parameters())
        == PARAMETERS[name]
        == by_formula(json.loads(path.read_text()))
    )
    assert model._no_split_modules, "FSDP2 finds the layers by these names"


@pytest.mark.parametrize(("name", "expected"), [
    ("llama-3.2-1b",
        {"max_position_embeddings": 131_072, "rope_theta": 500_000.0, "rms_norm_eps": 1e-5}),
    ("qwen3-1.7b",
        {"max_position_embeddings": 40_960, "rope_theta": 1_000_000.0, "rms_norm_eps": 1e-6}),
    ("smollm2-360m",
        {"max_position_embeddings": 8_192, "rope_theta": 100_000.0, "rms_norm_eps": 1e-5}),
])  # fmt: skip
def test_models_other_settings(name, expected):
    """Rotary base, length and epsilon of the published config.json reach the model's own
    configuration.
    """
    config = AutoConfig.from_pretrained(MODELS / f"{name}.json")
    theta = config.rope_parameters["rope_theta"]
    assert {
        **{key: getattr(config, key) for key in expected if key != "rope_theta"},
        "rope_theta": theta,
    } == expected
    if name == "llama-3.2-1b":
        scaling = dict(rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0)
        assert scaling.items() <= config.rope_parameters.items()
