"""State of one layout in another, the slow way: whole tensors in the element domain, mixed and cut
with loops.
"""

from __future__ import annotations

import math

import torch

from . import blocks, dct

Tensors = dict[str, torch.Tensor]


def weights(saved: int, islands: int) -> list[list[float]]:
    """Row i: what new island i takes of each saved one. Added islands take the mean of all. Of
    fewer, each takes as many grains in turn, where every saved island is worth `islands` grains."""
    if islands >= saved:
        return [
            [1.0 if i == j else 0.0 for j in range(saved)] if i < saved else [1 / saved] * saved
            for i in range(islands)
        ]
    grains = [j for j in range(saved) for _ in range(islands)]
    rows = []
    for i in range(islands):
        mine = grains[i * saved : (i + 1) * saved]
        rows.append([mine.count(j) / saved for j in range(saved)])
    return rows


def transformed(local: torch.Tensor, kind: str, inverse: bool) -> torch.Tensor:
    """The blocks of a local tensor as coefficients, or back; kinds are those of
    `fsdp_demo.compression.blocks.Layout`.
    """
    flat = local.reshape(-1).clone()
    found, _ = blocks.cut(tuple(local.shape), dense=kind == "dense", flat=kind == "plain")
    if kind == "transform":
        for positions in found:
            block = flat[positions.reshape(-1)].reshape(positions.shape)
            flat[positions.reshape(-1)] = (
                dct.idct2(block) if inverse else dct.dct2(block)
            ).reshape(-1)
    return flat.reshape(local.shape)


def whole(parts: list[torch.Tensor], kind: str) -> torch.Tensor:
    """A tensor in the element domain from its shards' coefficients."""
    return torch.cat([transformed(p, kind, inverse=True) for p in parts])


def mixed(saved: list[torch.Tensor], row: list[float]) -> torch.Tensor:
    """sum_j row[j] saved[j], element by element, in fp64."""
    out = torch.zeros(saved[0].shape, dtype=torch.float64)
    for tensor, w in zip(saved, row, strict=True):
        out += w * tensor.double()
    return out.float()


def in_blocks(local: torch.Tensor, kind: str) -> torch.Tensor:
    """True where an element of a local tensor lies in a block, False where it is sent whole."""
    _, dense = blocks.cut(tuple(local.shape), dense=kind == "dense", flat=kind == "plain")
    mask = torch.ones(math.prod(local.shape), dtype=torch.bool)
    for position in dense.tolist():
        mask[position] = False
    return mask.reshape(local.shape)


def accumulator(
    saved: list[list[torch.Tensor]],
    kind: str,
    island: int,
    islands: int,
    shards: int,
    senders: bool,
) -> list[torch.Tensor]:
    """Coefficients on each shard of a new island from `saved[island][shard]`: one tensor of a
    channel. With divisor "senders" an added island has nothing in its blocks."""
    row = weights(len(saved), islands)[island]
    full = mixed([whole(parts, kind) for parts in saved], row)
    out = []
    for part in blocks.shard_rows(full, shards):
        made = transformed(part, kind, inverse=False)
        if senders and island >= len(saved):
            made[in_blocks(part, kind)] = 0.0
        out.append(made)
    return out
