"""The recipes' models: counts of parameters, compilation, recomputation."""

import json
import shutil

import data
import pytest
import torch

TOKENIZER = data.ByteTokenizer()


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("tiny", 459_904), ("small", 3_280_128), ("llama-3.2-1b", 1_235_814_400)],
)
def test_model_parameter_counts(name, parameters):
    """The models have the parameters that their names say."""
    from model import load_model

    with torch.device("meta"):
        model = load_model(name, TOKENIZER.vocab_size)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert next(model.parameters()).dtype == torch.float32
    if name == "llama-3.2-1b":
        assert model.config.rope_parameters["rope_theta"] == 500_000
        assert model.config.rope_parameters["factor"] == 32


def test_model_with_too_few_tokens_is_refused():
    """A model with fewer tokens than the tokenizer is refused."""
    from model import load_model

    with pytest.raises(ValueError, match="vocab_size=258"):
        load_model("tiny", 50_000)


def test_model_layers_are_compiled_in_place(monkeypatch):
    """Layers are compiled in place and recompute."""
    from model import checkpoint_and_compile, load_model

    model, cpu = load_model("tiny", TOKENIZER.vocab_size), torch.device("cpu")
    names = [name for name, _ in model.named_parameters()]
    checkpoint_and_compile(model, cpu, False, None)
    assert not model.is_activation_checkpointing
    assert not any(m._compiled_call_impl for m in model.modules())
    checkpoint_and_compile(model, cpu, True, "aot_eager")
    assert [type(m).__name__ for m in model.modules() if m._compiled_call_impl] == [
        "LlamaDecoderLayer"
    ] * 2
    assert model.is_activation_checkpointing
    assert [name for name, _ in model.named_parameters()] == names
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(ValueError, match="needs a C.. compiler.*--compile aot_eager"):
        checkpoint_and_compile(model, cpu, False, "inductor")


def test_model_equal_layers_share_one_compilation(run_ranks, tmp_path):
    """Equal layers share one compilation: dynamo gives up, and runs eagerly, at the ninth version
    of one function.
    """
    from model import MODELS, checkpoint_and_compile, load_model

    config = json.loads((MODELS / "tiny.json").read_text()) | {
        "num_hidden_layers": 10,
        "use_cache": True,
    }
    (tmp_path / "deep.json").write_text(json.dumps(config))

    def compiled():
        model = load_model(str(tmp_path / "deep.json"), TOKENIZER.vocab_size)
        checkpoint_and_compile(model, torch.device("cpu"), False, "eager")
        model(input_ids=torch.zeros(2, 8, dtype=torch.int64))
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    assert run_ranks(compiled, islands=1, procs=1, timeout=100) == [1]
