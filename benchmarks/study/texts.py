"""What the study trains on and evaluates with."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

import numpy as np
from data import ByteTokenizer, load_data


@dataclass
class Texts:
    """Rows of bytes as ids, [rows, length] int32."""

    train: np.ndarray
    held_out: np.ndarray


@functools.lru_cache(2)
def load_texts(data: str, length: int, held_out: int) -> Texts:
    """The training rows of all replicas, dealt by whoever trains, and the same held-out rows for
    all runs.
    """
    found = load_data(data, ByteTokenizer(), length, validation_rows=held_out)
    train = getattr(found.train, "ids", None)
    if train is None:
        train = np.stack([row["input_ids"] for row in found.train])
    return Texts(train, np.stack(list(found.validation.ids)))


@functools.lru_cache(8)
def digest(data: str, length: int, held_out: int) -> str:
    """Of all rows: the Python library is another one with another version of Python."""
    texts = load_texts(data, length, held_out)
    return hashlib.sha256(texts.train.tobytes() + texts.held_out.tobytes()).hexdigest()[:16]
