"""Names and shapes of the parameters of a model: of known ones without transformers and without a
network, of others from their config.json.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from math import prod
from pathlib import Path

Tensors = list[tuple[str, tuple[int, ...]]]
"""Names and whole shapes of trained parameters, ties once."""


@dataclass(frozen=True)
class Shape:
    """A decoder of the Llama family, as far as shapes depend on it. A test compares them with the
    models that transformers makes of the same configurations.

    Attributes:
        hidden, mlp, layers, heads, kv_heads, vocab: widths and counts, as in config.json.
        head: width of one head; 0 is hidden / heads.
        tied: the head is the embedding.
        norms: its norms have weights (not in OLMo). qk_norms: queries and keys have norms, too
            (Qwen3). qkv_biases: their projections have biases (Qwen2).
    """

    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    head: int = 0
    tied: bool = False
    norms: bool = True
    qk_norms: bool = False
    qkv_biases: bool = False

    def tensors(self) -> Tensors:
        """Names and shapes, in the order and with the names of transformers."""
        out: Tensors = [("model.embed_tokens.weight", (self.vocab, self.hidden))]
        for i in range(self.layers):
            out += [(f"model.layers.{i}.{name}", shape) for name, shape in self._layer()]
        if self.norms:
            out.append(("model.norm.weight", (self.hidden,)))
        if not self.tied:
            out.append(("lm_head.weight", (self.vocab, self.hidden)))
        return out

    def _layer(self) -> Tensors:
        head = self.head or self.hidden // self.heads
        queries, keys = self.heads * head, self.kv_heads * head
        attention: Tensors = []
        for letter, rows in (("q", queries), ("k", keys), ("v", keys)):
            attention.append((f"self_attn.{letter}_proj.weight", (rows, self.hidden)))
            if self.qkv_biases:
                attention.append((f"self_attn.{letter}_proj.bias", (rows,)))
        attention.append(("self_attn.o_proj.weight", (self.hidden, queries)))
        if self.qk_norms:
            attention += [(f"self_attn.{letter}_norm.weight", (head,)) for letter in "qk"]
        wide, narrow = (self.mlp, self.hidden), (self.hidden, self.mlp)
        mlp: Tensors = [("mlp.gate_proj.weight", wide), ("mlp.up_proj.weight", wide)]
        mlp.append(("mlp.down_proj.weight", narrow))
        names = ("input_layernorm.weight", "post_attention_layernorm.weight")
        norms: Tensors = [(n, (self.hidden,)) for n in names] if self.norms else []
        return [*attention, *mlp, *norms]


KNOWN: dict[str, Shape] = {
    "llama-3.2-1b": Shape(2048, 8192, 16, 32, 8, 128256, 64, tied=True),
    "llama-3.2-3b": Shape(3072, 8192, 28, 24, 8, 128256, 128, tied=True),
    "llama-3.1-8b": Shape(4096, 14336, 32, 32, 8, 128256),
    "llama-3.1-70b": Shape(8192, 28672, 80, 64, 8, 128256),
    "mistral-7b": Shape(4096, 14336, 32, 32, 8, 32768),
    "qwen2.5-0.5b": Shape(896, 4864, 24, 14, 2, 151936, tied=True, qkv_biases=True),
    "qwen2.5-1.5b": Shape(1536, 8960, 28, 12, 2, 151936, tied=True, qkv_biases=True),
    "qwen2.5-7b": Shape(3584, 18944, 28, 28, 4, 152064, qkv_biases=True),
    "qwen3-0.6b": Shape(1024, 3072, 28, 16, 8, 151936, 128, tied=True, qk_norms=True),
    "qwen3-1.7b": Shape(2048, 6144, 28, 16, 8, 151936, 128, tied=True, qk_norms=True),
    "qwen3-8b": Shape(4096, 12288, 36, 32, 8, 151936, 128, qk_norms=True),
    "olmo-1b": Shape(2048, 8192, 16, 16, 16, 50304, tied=True, norms=False),
    "olmo-300m": Shape(1024, 4096, 16, 16, 16, 50304, tied=True, norms=False),
    "smollm2-135m": Shape(576, 1536, 30, 9, 3, 49152, tied=True),
    "smollm2-360m": Shape(960, 2560, 32, 15, 5, 49152, tied=True),
    "smollm2-1.7b": Shape(2048, 8192, 24, 32, 32, 49152, tied=True),
    "tinyllama-1.1b": Shape(2048, 5632, 22, 32, 4, 32000),
    "tiny": Shape(128, 384, 2, 2, 1, 258),
    "small": Shape(256, 768, 4, 4, 2, 258),
    "study-small": Shape(128, 384, 2, 4, 4, 258),
    "study": Shape(128, 384, 4, 4, 4, 258),
    "study-large": Shape(320, 1024, 7, 5, 5, 258),
}
"""Name -> shape; the recipes' models (recipes/models) and common ones."""


def equal_layers(parameters: int, layers: int) -> Tensors:
    """A model of `parameters` values in `layers` layers of equal size (to one value), and nothing
    else; what simulations in papers assume.

    Example:
        >>> from fsdp_demo.tools.planner.models import equal_layers
        >>> equal_layers(5001, 2)[:2]
        [('layers.0.weight', (2, 1024)), ('layers.0.rest', (453,))]
    """
    if layers < 1 or parameters < layers:
        raise ValueError(
            f"{parameters} parameters in {layers} layers make no model: allowed are 1 layer or "
            "more, of 1 parameter or more"
        )
    out: Tensors = []
    for i in range(layers):
        rows, rest = divmod(parameters // layers + (i < parameters % layers), 1024)
        out += [(f"layers.{i}.weight", (rows, 1024))] if rows else []
        out += [(f"layers.{i}.rest", (rest,))] if rest else []
    return out


def numel(tensors: Tensors) -> int:
    """The number of parameters of a model."""
    return sum(prod(shape) for _, shape in tensors)


# ---- what a user calls a model -----------------------------------------------------------------

_TUNED = re.compile(r"-(base|instruct|it)$")
"""What hub ids add for the same shapes with other weights."""


def load(name: str) -> Tensors:
    """Names and whole shapes of a model's trained parameters, ties once.

    Args:
        name: a known model (`KNOWN`), which needs neither a network nor transformers; the
            path of a config.json or of a folder with one; or a hub id, which need transformers.

    Raises:
        ValueError: nothing of the kind is known or reachable; names the nearest known models.

    Example:
        >>> from fsdp_demo.tools.planner.models import load
        >>> load("tiny")[0]
        ('model.embed_tokens.weight', (258, 128))
    """
    path = Path(name)
    short = _TUNED.sub("", name.rpartition("/")[2].lower())
    if not path.exists() and (shape := KNOWN.get(short)) is not None:
        return shape.tensors()
    if not path.exists() and "/" not in name:
        raise ValueError(f"--model {name!r} is not known: {_allowed(name)}")
    if not path.exists() and (path.suffix == ".json" or name.startswith((".", "/", "~"))):
        raise ValueError(f"--model {name!r}: there is no such file")
    return _by_transformers(name, path)


def _by_transformers(name: str, path: Path) -> Tensors:
    """As `load`, of a model that transformers makes on the meta device."""
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ValueError(
            f"the shapes of --model {name!r} need transformers: pip install 'fsdp-demo[hf]', or "
            f"take a known model ({error})"
        ) from None
    try:
        config = AutoConfig.from_pretrained(name)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # whatever transformers makes of a wrong file, or of no network
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        what = "it is no file that is there, and the hub did not give it"
        if path.exists():
            what = f"{path} does not describe a causal language model"
        raise ValueError(f"--model {name!r}: {what} ({reason[:160]}): {_allowed(name)}") from None
    return [(n, tuple(p.shape)) for n, p in model.named_parameters()]


def _allowed(name: str) -> str:
    near = difflib.get_close_matches(name.rpartition("/")[2].lower(), KNOWN, n=3, cutoff=0.3)
    known = f"the nearest known are {', '.join(near)}" if near else f"known are {', '.join(KNOWN)}"
    return f"{known}; else give the path of a config.json, or --params N"
