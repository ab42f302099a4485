"""States of the random number generators that a training loop draws from, as a tree for a
checkpoint.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def random_states() -> dict[str, Any]:
    """Of python, torch, this rank's GPU, and numpy where the process has it loaded."""
    version, words, gauss = random.getstate()
    out: dict[str, Any] = {
        "python": [version, torch.tensor(words, dtype=torch.int64, device="cpu"), gauss]
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = numpy.random.get_state()
        out["numpy"] = [kind, torch.from_numpy(keys.astype(numpy.int64)), *rest]
    out["torch"] = torch.get_rng_state()
    return out | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def set_random_states(states: dict[str, Any]) -> None:
    """The inverse of `random_states`."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    if "numpy" in states:
        import numpy

        kind, keys, *rest = states["numpy"]
        numpy.random.set_state((kind, keys.numpy().astype(numpy.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
