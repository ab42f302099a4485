"""A llama of two small layers, the same in every process."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def llama(tied: bool = False) -> LlamaForCausalLM:
    """64 words, width 32."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=64, tie_word_embeddings=tied, use_cache=False, **sizes)
    )
