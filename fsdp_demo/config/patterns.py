"""Shell patterns over parameter names: which parameters a channel covers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from fnmatch import fnmatchcase

from .channel import Channel

EMBEDDINGS = (
    *("*embed*", "*wte*", "*wpe*", "*lm_head*"),
    # torchtitan's Llama, ViT: the module that holds the weight
    *("output.weight", "*.output.weight", "head.weight", "*.head.weight"),
    # models that classify
    *("score.weight", "*.score.weight", "classifier.*", "*.classifier.weight"),
)
"""Embeddings and heads: rows of unseen tokens are zero and a transform over them spreads what top-k
wants concentrated. A head is told by the last module of its name, so that BERT's
`attention.output.dense.weight` is none."""


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a parameter name fits one of the shell patterns."""
    return _matches(name, tuple(patterns))


@functools.lru_cache(2**16)
def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    # the planner asks for the same names hundreds of times
    return any(fnmatchcase(name, p) for p in patterns)


def covers(channel: Channel, name: str) -> bool:
    """Whether a channel exchanges the parameter of this name."""
    return matches(name, channel.include) and not matches(name, channel.exclude)


def tensor_layout_kind(channel: Channel, name: str) -> str:
    """How a covered tensor is laid out (`blocks.Layout`): "dense" (sent whole), "plain" (blocks,
    not transformed) or "transform".
    """
    if not channel.codec.sparse or matches(name, channel.uncompressed):
        return "dense"
    return (
        "plain"
        if channel.codec.transform == "none" or matches(name, channel.no_transform)
        else "transform"
    )


def literal(name: str) -> str:
    """The pattern that fits this name alone."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)
