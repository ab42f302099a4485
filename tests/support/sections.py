"""Whole sections of a message, decoded at once, and whole means."""

from __future__ import annotations

import torch
from torch import Tensor

from fsdp_demo import Codec
from fsdp_demo.channels.decode import DecodedMean
from fsdp_demo.compression import sparse
from fsdp_demo.compression.blocks import Layout
from fsdp_demo.compression.windows import stretches
from fsdp_demo.config.parts import BLOCK


def whole(mean: DecodedMean) -> Tensor:
    """The mean as a workspace, fp32."""
    work = torch.zeros(mean.layout.numel, device=mean.device)
    mean.add_to(work, 1.0)
    return work


def decode_sparse(layout: Layout, codec: Codec, data: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Positions in the workspace (int64 [m], distinct), their values (fp32 [m]) and the dense part
    (fp32 [num_dense]).
    """
    places = [torch.empty(0, dtype=torch.int64, device=data.device)]
    found = [torch.empty(0, device=data.device, dtype=torch.float32)]
    of = sparse.split(layout, codec, [data])
    for s in stretches(layout.windows(data.device), data.device, codec.topk):
        assert s.group is not None
        place, value = sparse.decode_window(s, of[s.group], codec)
        places.append(
            place[0]
            .add_(torch.arange(s.begin, s.end, BLOCK, device=place.device)[:, None])
            .view(-1)
        )
        found.append(value.view(-1))
    return torch.cat(places), torch.cat(found), sparse.decode_dense(layout, codec, data)
