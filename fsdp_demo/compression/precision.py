"""The precision of torch's matrix products, which is a setting of the process, for as long as a
transform needs another one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import torch

from ..config.channel import BLOCK
from .dct import dct_matrix
from .processor import intel
from .windows import EDGE

_LOCK = threading.Lock()
# by backend: the setting as it was, then one entry for each that wants another
_HELD: dict[int, list[Any]] = {}


@contextmanager
def set_precision(backend: Any, precision: str) -> Iterator[None]:
    # the setting is the process's: it stays until the last thread that wants it has ended
    with _LOCK:
        held = _HELD.setdefault(id(backend), [])
        if not held:
            held.append(backend.fp32_precision)
            backend.fp32_precision = precision
        held.append(None)
    try:
        yield
    finally:
        with _LOCK:
            held.pop()
            if len(held) == 1:
                backend.fp32_precision = held.pop()


_MKLDNN: Any = torch.backends.mkldnn


@lru_cache(maxsize=1)
def onednn() -> bool:
    """Whether torch makes fp32 products on this CPU in oneDNN, and still in fp32, when oneDNN is
    allowed bf16.

    That is how one chooses it over MKL, whose kernels are half as fast on AMD; so it is on CPUs
    without AMX. Tried, not assumed."""
    x = (
        torch.linspace(-9.0, 9.0, 4 * BLOCK, dtype=torch.float32, device="cpu")
        .sin_()
        .view(4, EDGE, EDGE)
    )
    d = dct_matrix(EDGE).float()
    exact = torch.matmul(d.double(), x.double())
    try:
        with set_precision(_MKLDNN.matmul, "bf16"):
            found = torch.bmm(d.expand(4, EDGE, EDGE), x)
            rows = torch.mm(x.view(-1, EDGE), d)
    except (AttributeError, RuntimeError):  # a torch without it
        return False
    errors = (
        (found - exact).abs().max(),
        (rows - x.view(-1, EDGE).double() @ d.double()).abs().max(),
    )
    return bool(max(errors) < 1e-5)


def products_on(device: torch.device, tf32: bool) -> AbstractContextManager[None]:
    """The precision that the transform's products are made in on `device`, whatever the training
    asks for elsewhere.
    """
    if device.type == "cuda":
        return set_precision(torch.backends.cuda.matmul, "tf32" if tf32 else "ieee")
    return set_precision(_MKLDNN.matmul, "bf16") if not intel() and onednn() else nullcontext()
