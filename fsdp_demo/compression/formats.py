"""What codes the values of each number format. Bits, groups and scales are facts of the
configuration (`config/names.py`).

A new format is a `Coder` in a file of its own, a line in `config/names.py` and a line here; one
whose values stand for themselves is a dtype, and needs the two lines only. `quantize.py` cuts rows
into groups and packs what a coder makes of them.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .integers import Integer
from .levels import OneLevel, TwoLevels
from .small_floats import E2M1, E3M0


class Coder(Protocol):
    """Groups of values, each with scales of its own.

    A group of zeros has scales of 0 and stays zero. A group that is not finite has scales that are
    not, so that all of it is decoded so. The same bytes of finite values on every device: only
    operations that IEEE 754 defines, sums in a fixed order.
    """

    def encode(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """Scales bf16 [n, groups, scales] and codes uint8 [n, groups, size], below 2^bits, of
        values fp32 [n, groups, size].
        """

    def decode(self, scales: Tensor, q: Tensor) -> Tensor:
        """The inverse of `encode`: fp32 [n, groups, size], from scales in fp32."""


EXACT: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
CODERS: dict[str, Coder] = {
    "int8": Integer(127.0),
    "int4": Integer(7.0),
    "fp4_e3m0": E3M0,
    "fp4_e2m1": E2M1,
    "2bit": TwoLevels(),
    "1bit": OneLevel(),
}
