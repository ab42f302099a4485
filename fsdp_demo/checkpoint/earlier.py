"""Parts of an exchange's state of format 1 (before 0.2) in the names of format 2: the settings have
other names, the tensors are the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config.renamed import translated
from ..config.schema import ExchangeConfig


def in_names_of_today(head: Mapping[str, Any], state: Any) -> tuple[dict[str, Any], Any]:
    """Head and tree of a part of format 1. Parts without a configuration (a model's, a loop's) are
    the same in both formats.

    Raises:
        KeyError, TypeError, ValueError: no release has written it so.
    """
    if "config" not in head:
        return dict(head), state
    config = translated(head["config"])
    digest = ExchangeConfig.from_dict(config).digest()
    new = {("active_copies" if key == "lanes" else key): value for key, value in head.items()} | {
        "config": config,
        "digest": digest,
    }
    same = isinstance(state, Mapping) and state.get("digest") == head["digest"]
    return new, {**state, "digest": digest} if same else state
