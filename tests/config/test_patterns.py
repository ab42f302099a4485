"""Which parameters count as embeddings and heads, by the names of models that people train."""

from __future__ import annotations

import pytest
import torch

from fsdp_demo import MuonAdamW
from fsdp_demo.config.channel import EMBEDDINGS, matches

LLAMA = [
    "model.layers.0.self_attn.o_proj.weight",
    "model.layers.0.mlp.down_proj.weight",
    "model.norm.weight",
]
BERT = [
    "attention.self.query.weight", "attention.output.dense.weight",
    "attention.output.LayerNorm.weight", "output.dense.weight",
]  # fmt: skip
BERT = [f"bert.encoder.layer.3.{name}" for name in (*BERT, "intermediate.dense.weight")]
MODELS = {  # (embeddings and heads, the rest)
    "Llama": (["model.embed_tokens.weight", "lm_head.weight"], LLAMA),
    "LlamaForSequenceClassification": (["model.embed_tokens.weight", "score.weight"], LLAMA),
    "GPT-2": (
        ["transformer.wte.weight", "transformer.wpe.weight", "lm_head.weight"],
        ["transformer.h.0.attn.c_proj.weight"],
    ),
    "BertForSequenceClassification": (
        ["bert.embeddings.word_embeddings.weight", "classifier.weight", "classifier.bias"],
        [*BERT, "bert.pooler.dense.weight"],
    ),
    "RobertaForSequenceClassification": (
        ["classifier.dense.weight", "classifier.out_proj.weight"],
        [n.replace("b", "rob") for n in BERT],
    ),
    "torchtitan's Llama": (
        ["tok_embeddings.weight", "output.weight", "model.output.weight"],
        ["layers.0.attention.wo.weight", "layers.0.feed_forward.w2.weight", "norm.weight"],
    ),
    "timm's ViT": (
        ["patch_embed.proj.weight", "pos_embed", "head.weight"],
        ["blocks.0.attn.proj.weight", "blocks.0.mlp.fc1.weight", "norm.bias"],
    ),
    "ViTForImageClassification": (
        ["vit.embeddings.position_embeddings", "classifier.weight"],
        ["vit.encoder.layer.0.output.dense.weight"],
    ),
    "others": (
        ["mtp.shared_head.head.weight", "text.score.weight"],
        [
            "attn.head_dim.weight",
            "layers.0.heads.weight",
            "layers.0.output_proj.weight",
            "layers.0.scores.weight",
            "overhead.weight",
        ],
    ),
}


@pytest.mark.parametrize("model", MODELS)
def test_patterns_embeddings_and_heads(model: str) -> None:
    """The names of embeddings and heads of many models fit the patterns, and no other name does."""
    apart, rest = MODELS[model]
    assert (
        [n for n in apart if not matches(n, EMBEDDINGS)]
        == []
        == [n for n in rest if matches(n, EMBEDDINGS)]
    )


def test_patterns_muon_leaves_head_to_adamw() -> None:
    """Muon leaves embeddings and heads to AdamW."""
    names = [
        "output.weight",
        "layers.0.attention.wo.weight",
        "layers.0.output.dense.weight",
        "score.weight",
    ]
    muon, adamw = MuonAdamW([(n, torch.nn.Parameter(torch.ones(2, 2))) for n in names]).parts
    assert [g["param_names"] for o in (muon, adamw) for g in o.param_groups] == [
        names[1:3],
        [names[0], names[3]],
    ]
