"""The byte layout of a payload: header, sparse sections, packed indices.

Header, 32 bytes, little-endian: magic "FDX1", wire version (u16), flags (u16), digest of the configuration (u64), step (u32),
weight (f32), loss (f32, NaN if none), CRC-32 of the header's first 28 bytes and of everything that follows (u32).

A sparse channel's section: for each group of the layout the values (`values.encode`, one row per block) and then the positions inside the
r x s block, slot coordinates (64 row + column), ascending, 12 bits each, two in three bytes; after all groups the dense elements.
The size is fixed by layout and codec, so both sides know it.
"""

from __future__ import annotations

import struct
import sys
import zlib
from ctypes import c_char
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..blocks import EDGE, Layout
from ..config import BLOCK, Codec
from . import values
from .select import top_k

assert sys.byteorder == "little", "the wire format is little-endian and written without swapping"

MAGIC, VERSION = b"FDX1", 1
HEADER = struct.Struct("<4sHHQIffI")
STOP = 1  # flag: this island asks all to stop after this step
CHUNK = 512  # blocks whose largest values are sought at once, 8 MiB: sorting takes six times that where many are equal


class WireError(RuntimeError):
    """A payload that is torn, of another configuration, version or step. Nothing of it has been applied.

    Example:
        >>> from fsdp_demo import WireError
        >>> issubclass(WireError, RuntimeError)
        True
    """


@dataclass(frozen=True)
class Header:
    """What every message says about itself; `weight` is the sender's share in a mean, `loss` is NaN where unknown."""

    digest: int
    step: int
    weight: float = 1.0
    loss: float = float("nan")
    flags: int = 0


def seal(header: Header, body: Tensor) -> Tensor:
    """Header and body as one uint8 tensor [32 + n] on the CPU, with checksum."""
    out = torch.empty(HEADER.size + body.numel(), dtype=torch.uint8)
    out[HEADER.size :] = body
    head = HEADER.pack(MAGIC, VERSION, header.flags, header.digest, header.step, header.weight, header.loss, 0)[:-4]
    crc = zlib.crc32(memory(out[HEADER.size :]), zlib.crc32(head))
    out[: HEADER.size] = torch.frombuffer(bytearray(head + struct.pack("<I", crc)), dtype=torch.uint8)
    return out


def unseal(message: Tensor, digest: int, step: int, sender: str) -> tuple[Header, Tensor]:
    """Check a message from `sender` and split it into header and body (a view).

    Raises:
        WireError: truncated, torn, of another wire version, configuration digest or step; says which, with both values.
    """
    if message.numel() < HEADER.size:
        raise WireError(f"payload from {sender} is truncated: {message.numel()} bytes, a header alone has {HEADER.size}")
    head = bytes(message[: HEADER.size].tolist())
    magic, version, flags, its_digest, its_step, weight, loss, crc = HEADER.unpack(head)
    if magic != MAGIC or version != VERSION:
        expected = f"expected {MAGIC!r} version {VERSION}"
        raise WireError(f"payload from {sender} starts with {magic!r} version {version}, {expected}: use one release everywhere")
    if crc != zlib.crc32(memory(message[HEADER.size :]), zlib.crc32(head[:-4])):
        raise WireError(f"payload from {sender} is damaged or truncated: its checksum does not fit its {message.numel()} bytes")
    if its_digest != digest:
        both = f"{its_digest:016x}, ours is {digest:016x}"
        raise WireError(f"payload from {sender} has configuration digest {both}: start all islands with one configuration")
    if its_step != step:
        raise WireError(f"payload from {sender} is of step {its_step}, we are at step {step}: the islands do not take the same steps")
    return Header(its_digest, its_step, weight, loss, flags), message[HEADER.size :]


def memory(t: Tensor) -> Any:
    """The memory of a contiguous CPU tensor as a buffer, without a copy and without numpy."""
    return (c_char * (t.numel() * t.element_size())).from_address(t.data_ptr()) if t.numel() else b""


def pack12(index: Tensor) -> Tensor:
    """Pack numbers 0..4095 into uint8 [ceil(1.5 n)]: a, b -> a & 255, a >> 8 | (b & 15) << 4, b >> 4; an odd last one is padded by 0."""
    flat = index.reshape(-1)
    if flat.numel() % 2:
        flat = torch.cat([flat, flat.new_zeros(1)])
    a, b = flat.view(-1, 2).unbind(1)
    packed = torch.stack([a & 255, (a >> 8) | ((b & 15) << 4), b >> 4], 1).to(torch.uint8).view(-1)
    return packed[: (3 * index.numel() + 1) // 2]


def unpack12(data: Tensor, n: int) -> Tensor:
    """The inverse of `pack12`: int64 [n]."""
    if data.numel() % 3:
        data = torch.cat([data, data.new_zeros(1)])
    x, y, z = data.to(torch.int64).view(-1, 3).unbind(1)
    return torch.stack([x | ((y & 15) << 8), (y >> 4) | (z << 4)], 1).view(-1)[:n]


def dense_code(codec: Codec) -> str:
    """How a sparse channel codes the tensors it sends whole: a scale shared by small tensors would hurt, so bf16 unless it is fp32."""
    return "fp32" if codec.code == "fp32" else "bf16"


def sparse_bytes(layout: Layout, codec: Codec) -> int:
    """Bytes of a sparse channel's section, without the header."""
    total = values.num_bytes(dense_code(codec), 1, layout.num_dense)
    for g in layout.groups:
        k = g.k(codec.topk)
        total += values.num_bytes(codec.code, g.count, k) + (3 * g.count * k + 1) // 2
    return total


def encode_sparse(layout: Layout, codec: Codec, work: Tensor) -> Tensor:
    """Select and code the workspace `work` (flat fp32): uint8 [sparse_bytes]. `work` is not changed."""
    slots, parts = layout.blocks(work).view(-1, EDGE, EDGE), []
    for g in layout.groups:
        chosen = [_select(slots[lo : min(lo + CHUNK, g.stop), : g.r, : g.s], g.k(codec.topk)) for lo in range(g.start, g.stop, CHUNK)]
        parts.append(values.encode(codec.code, torch.cat([found for found, _ in chosen])))
        parts.append(pack12(torch.cat([slot for _, slot in chosen])))
    parts.append(values.encode(dense_code(codec), layout.dense_part(work).view(1, -1)))
    return torch.cat(parts)


def _select(blocks: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Values and slot coordinates [n, k] of the k largest of each of n blocks [n, r, s]."""
    rows = blocks.reshape(len(blocks), -1)
    index, s = top_k(rows, k), blocks.shape[2]
    return rows.gather(1, index), index // s * EDGE + index % s


def decode_sparse(layout: Layout, codec: Codec, data: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Positions in the workspace (int64 [m], distinct), their values (fp32 [m]) and the dense part (fp32 [num_dense])."""
    positions, found, at = [], [], 0
    for g in layout.groups:
        k = g.k(codec.topk)
        size = values.num_bytes(codec.code, g.count, k)
        found.append(values.decode(codec.code, data[at : at + size], g.count, k).view(-1))
        at += size
        size = (3 * g.count * k + 1) // 2
        slot = unpack12(data[at : at + size], g.count * k).view(g.count, k)
        at += size
        positions.append((slot + torch.arange(g.start, g.stop, device=data.device)[:, None] * BLOCK).view(-1))
    dense = values.decode(dense_code(codec), data[at:], 1, layout.num_dense).view(-1)
    empty = torch.empty(0, device=data.device)
    return torch.cat(positions) if positions else empty.long(), torch.cat(found) if found else empty, dense
