"""The block rule: which elements of a (local) tensor form a block, and which are sent whole.

A block is a matrix of flat positions of the tensor, r x s with r, s <= 64; what is in no block is
dense.
"""

from __future__ import annotations

import math

import torch

EDGE = 64
FLAT = EDGE * EDGE
PADDING = 1.1


def view_2d(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns under which a tensor is cut: [-1, last] if ndim > 2 and last >= 64, else
    [dim 0, -1].
    """
    if not shape:
        return (1, 1)
    numel = math.prod(shape)
    if len(shape) > 2 and shape[-1] >= EDGE:
        return (numel // shape[-1], shape[-1])
    return (shape[0], numel // shape[0]) if shape[0] else (0, 0)


def cut(
    shape: tuple[int, ...], dense: bool = False, flat: bool = False
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """(blocks, dense): flat int64 positions, each block r x s.

    `dense=True` sends all of it whole; `flat=True` (what is not transformed) never cuts in two
    directions.
    """
    numel = math.prod(shape)
    positions = torch.arange(numel)
    if dense or numel < FLAT:
        return [], positions
    rows, cols = view_2d(shape)
    up_rows, up_cols = -(-rows // EDGE) * EDGE, -(-cols // EDGE) * EDGE
    if not flat and rows >= EDGE and cols >= EDGE and up_rows * up_cols <= PADDING * numel:
        matrix = positions.reshape(rows, cols)
        return [
            matrix[i : i + EDGE, j : j + EDGE]
            for i in range(0, rows, EDGE)
            for j in range(0, cols, EDGE)
        ], positions[:0]
    blocks = [positions[i : i + FLAT].reshape(EDGE, EDGE) for i in range(0, numel - FLAT + 1, FLAT)]
    tail = positions[len(blocks) * FLAT :]
    rows = len(tail) // EDGE
    if rows:
        blocks.append(tail[: rows * EDGE].reshape(rows, EDGE))
    return blocks, tail[rows * EDGE :]


def shard_rows(tensor: torch.Tensor, shards: int) -> list[torch.Tensor]:
    """FSDP2's shards of dim 0: ceil(rows / shards) rows each, the last ones shorter or empty;
    views.
    """
    if shards == 1:
        return [tensor]
    step = -(-tensor.shape[0] // shards)
    return [tensor[i * step : (i + 1) * step] for i in range(shards)]
