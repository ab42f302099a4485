"""Shell patterns over parameter names: which parameters a channel covers."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import Channel

EMBEDDINGS = ("*embed*", "*wte*", "*wpe*", "*lm_head*")
"""Embeddings and heads: rows of unseen tokens are zero and a transform over them spreads what top-k wants concentrated."""


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a parameter name fits one of the shell patterns."""
    return any(fnmatchcase(name, p) for p in patterns)


def covers(channel: Channel, name: str) -> bool:
    """Whether a channel exchanges the parameter of this name."""
    return matches(name, channel.include) and not matches(name, channel.exclude)


def literal(name: str) -> str:
    """The pattern that fits this name alone."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)
