"""The transform as most tests mean it, the DCT, and tensors to transform."""

from __future__ import annotations

import torch
from torch import Tensor

from fsdp_demo import Codec
from fsdp_demo.compression import transform as module
from fsdp_demo.compression.blocks import Layout


def transform(
    layout: Layout, work: Tensor, inverse: bool = False, products: str = "fp32"
) -> Tensor:
    """`fsdp_demo.compression.transform.transform` with the DCT."""
    return module.transform(
        Codec("dct", "topk", transform_precision=products), layout, work, inverse
    )


def random(*shape: int, seed: int = 0) -> Tensor:
    """Normal fp32 numbers on the CPU, the same for each seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
