"""Whole tensors in a code: what arrives of one replica's payload, and the mean that all replicas
get.

The ranks with the same shard exchange one vector: the shards of all tensors, one after the other,
flat. Codes of 8 bits and more are reduced, and the mean comes back in the same code. Codes of b < 1
bytes per value are gathered where R <= (b + 1) / b, and the mean is fp32; else the parts travel in
the code and the mean comes back in int8. A reduce cuts vectors between rows of 4096 values, which
no group of values with a common scale crosses, so the parts are coded as the whole vector would be.
"""

from __future__ import annotations

import numpy as np
import torch

from . import quantise
from .blocks import shard_rows
from .replicas import Tensors, mean

BYTES = {code: form.bits / 8 for code, form in quantise.FORMATS.items() if form.bits < 8}


def gathers(code: str, replicas: int) -> bool:
    """Whether all codes go to everybody."""
    return code in BYTES and replicas <= (BYTES[code] + 1) / BYTES[code]


def coded(vector: torch.Tensor, code: str) -> torch.Tensor:
    """What arrives of a vector. The same as `quantise.dequantised`, with arrays instead of one
    value at a time.
    """
    if code == "fp32":
        return vector
    if code == "bf16":
        return vector.float().bfloat16().to(vector.dtype)
    groups = [_group(g.numpy(), code) for g in quantise.cut(vector, code)]
    return torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *groups])).to(vector.dtype)


def _bf16(value: np.float32) -> np.float32:
    return np.float32(quantise.bf16(float(value)))


def _group(v: np.ndarray, code: str) -> np.ndarray:
    size, sign = np.abs(v), np.where(np.signbit(v), np.float32(-1), np.float32(1))
    if code == "2bit":
        threshold = quantise.fold(list(size)) / np.float32(len(v))
        high = size >= threshold
        levels = [
            _bf16(
                quantise.fold(list(np.where(p, size, np.float32(0)))) / np.float32(max(p.sum(), 1))
            )
            for p in (~high, high)
        ]
        return sign * np.where(high, levels[1], levels[0])
    if code == "1bit":
        return sign * _bf16(quantise.fold(list(size)) / np.float32(len(v)))
    scale = np.float32(quantise.scale_of(size.max(initial=np.float32(0)), code))
    if scale == 0:
        return np.zeros_like(v)
    table = np.array([float(m) for m in quantise.FORMATS[code].magnitudes])
    step = np.diff(table)
    middle, even = table[:-1] + step / 2, table[1:] / step % 2 == 0
    # the two differ by one in the middle between two magnitudes
    low, high = (np.searchsorted(middle, size / scale, side) for side in ("left", "right"))
    nearest = np.where(np.append(False, even)[high], high, low)
    return sign * (table[nearest] * float(scale)).astype(np.float32)


def _vectors(tensors: Tensors, names: list[str], shards: int) -> list[torch.Tensor]:
    """The flat vector of each shard."""
    parts = [shard_rows(tensors[n].detach(), shards) for n in names]
    return [torch.cat([p[s].reshape(-1) for p in parts]) for s in range(shards)]


def _tensors(vectors: list[torch.Tensor], like: Tensors, names: list[str]) -> Tensors:
    """The inverse of `_vectors`."""
    shards = len(vectors)
    out: dict[str, list[torch.Tensor]] = {n: [] for n in names}
    for s, vector in enumerate(vectors):
        at = 0
        for n in names:
            shape = shard_rows(like[n].detach(), shards)[s].shape
            out[n].append(vector[at : at + shape.numel()].reshape(shape))
            at += shape.numel()
    return {n: torch.cat(parts) for n, parts in out.items()}


def arrived(tensors: Tensors, names: list[str], shards: int, code: str) -> Tensors:
    """What the others get of one replica's tensors."""
    return _tensors([coded(v, code) for v in _vectors(tensors, names, shards)], tensors, names)


def mean_of(
    tensors: list[Tensors], names: list[str], shards: int, code: str, weights: list[float]
) -> Tensors:
    """The mean over the replicas as all of them get it."""
    vectors = [_vectors(arrived(t, names, shards, code), names, shards) for t in tensors]
    means = [mean(list(of_shard), weights) for of_shard in zip(*vectors, strict=True)]
    if not gathers(code, len(tensors)):
        means = [coded(m, "int8" if code in BYTES else code) for m in means]
    return _tensors(means, tensors[0], names)
