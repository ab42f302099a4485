"""Blocks on a GPU in kernels of Triton (`fused_kernels.py`) instead of hundreds of torch's
operations: the same bytes, and the same mean, except that products of matrices add up in another
order. No kernel has run on a GPU yet; docs/performance.md has the switch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..config.channel import Channel
from ..config.names import FORMATS
from ..config.parts import BLOCK, Codec
from . import formats, sparse
from .blocks import Layout
from .transform import matrix
from .windows import EDGE, Group, Window, stretches, upload

CODES = {(8, 1), (2, 2), (1, 1)}
"""Bits and scales of the number formats that the kernels know."""
MOST = 128
"""Coefficients of a block that the kernels know at most: then a block has one group of scales."""
WARPS = {"accumulate": 8, "select": 8, "mean": 8}  # with 4, `accumulate` spills registers


def takes(codec: Codec) -> bool:
    """Whether the kernels know what a codec sends."""
    code = FORMATS[codec.value_dtype]
    return codec.selection.by == "data" and codec.topk <= MOST and (code.bits, code.scales) in CODES


def fits(tensors: Sequence[Tensor | None]) -> bool:
    """Whether kernels can read and write these tensors where they lie: fp32, contiguous."""
    return all(t is None or (t.dtype == torch.float32 and t.is_contiguous()) for t in tensors)


class FusedBlocks:
    """The blocks of a layout under top-k, on a device that Triton compiles for.

    Args:
        layout, channel: the channel's; the kernels know its codec (`takes`).
        device: of the workspaces.

    Attributes:
        mark: the release of Triton.

    Raises:
        ImportError: there is no `triton`.
    """

    def __init__(self, layout: Layout, channel: Channel, device: torch.device):
        from . import fused_kernels

        self._kernels = fused_kernels
        self._zero = torch.zeros(1, dtype=torch.float32, device=device)
        self.layout, self.channel, self.device = layout, channel, device
        self.codec, self.mark = channel.codec, fused_kernels.triton.__version__
        self._spans = dict(zip(layout.groups, sparse.spans(layout, self.codec), strict=True))
        self._known = {g: self._constants(g) for g in layout.groups}
        self._tables = {g: self._table(g) for g in layout.groups}
        self._matrices = {(g, b): self._pair(g, b) for g in layout.groups for b in (False, True)}

    def _constants(self, g: Group) -> dict[str, Any]:
        """What is compiled into the kernels of a group."""
        k, form = g.k(self.codec.topk), sparse.position_form(g, self.codec.topk)
        powers = {"PK": k, "PF": form.flags, "PS": 2 * k}
        return {
            **{name: max(16, 1 << (n - 1).bit_length()) for name, n in powers.items()},
            **{"K": k, "FLAGS": form.flags, "LOW": form.low, "ROWS": g.r, "COLS": g.s},
            "BITS": FORMATS[self.codec.value_dtype].bits,
            "PRECISION": "tf32" if self.codec.transform_precision == "bf16" else "ieee",
        }

    def _table(self, g: Group) -> list[Tensor]:
        """Of each block its tensor, first element, and elements from row to row: int64 [count]."""
        found = [
            (box.tensor, box.offset + y * box.strides[0] + x * box.strides[1], box.strides[2])
            for box in self.layout.whole(g).boxes
            for y in range(box.shape[0])
            for x in range(box.shape[1])
        ]
        columns = torch.tensor(found, dtype=torch.int64, device="cpu").t().contiguous()
        return [upload(t, self.device) for t in columns]

    def _pair(self, g: Group, inverse: bool) -> list[Tensor]:
        """D_r and D_s^T, or D_r^T and D_s, filled up by zeros to 64 x 64."""
        out = [self._zero.new_zeros(EDGE, EDGE) for _ in range(2)]
        for m, n, turned in zip(out, (g.r, g.s), (inverse, not inverse), strict=True):
            if g.transform:
                d = matrix(self.codec.transform, n, self.device)
                m[:n, :n] = d.t() if turned else d
        return out

    def _addresses(self, tensors: Sequence[Tensor | None]) -> Tensor:
        found = [0 if t is None else t.data_ptr() for t in tensors]
        return upload(torch.tensor(found, dtype=torch.int64, device="cpu"), self.device)

    def _run(self, name: str, grid: int, g: Group, *args: Any, **more: Any) -> None:
        """Launch `grid` programs of a kernel, with those of the group's constants that it takes."""
        kernel = getattr(self._kernels, name)
        known = {n: v for n, v in {**self._known[g], **more}.items() if n in kernel.arg_names}
        # no multiply-add in the place of two roundings
        kernel[(grid,)](*args, **known, num_warps=WARPS.get(name, 4), enable_fp_fusion=False)

    def _starts(self, g: Group) -> tuple[int, int, int]:
        """The first byte of a group in a section; those of its codes and positions, from there."""
        begin, middle, _ = self._spans[g]
        return begin, 2 * g.count * FORMATS[self.codec.value_dtype].scales, middle - begin

    def accumulate(
        self, tensors: Sequence[Tensor | None], before: Tensor | None, work: Tensor,
        beta: float, gain: float, bad: float | Tensor = 0.0,
    ) -> None:  # fmt: skip
        """work = beta work + gain T(tensors), in blocks; with `before` (a workspace in the element
        domain) of `before` minus tensors; of zeros where `bad` is not 0."""
        pointers = self._addresses(tensors)
        bad = self._zero + bad  # in memory of its own: Triton compiles for the alignment
        for g in self.layout.groups:
            start = g.start * BLOCK
            self._run(
                "accumulate", g.count, g, pointers, *self._tables[g],
                (work if before is None else before)[start:], bad, *self._matrices[g, False],
                work[start:], float(beta), float(gain), DELTA=before is not None, DCT=g.transform,
            )  # fmt: skip

    def encode(self, work: Tensor) -> tuple[Tensor, list[Tensor]]:
        """As `sparse.encode_sparse`: the section of a workspace, and the positions chosen."""
        codec, device, chosen = self.codec, self.device, {}
        size = sparse.sparse_bytes(self.layout, codec)
        data = torch.empty(size, dtype=torch.uint8, device=device)
        for g in self.layout.groups:
            shape, (begin, *starts) = (g.count, g.k(codec.topk)), self._starts(g)
            values = torch.empty(shape, dtype=torch.float32, device=device)
            codes = torch.empty(shape, dtype=torch.uint8, device=device)
            chosen[g] = torch.empty(shape, dtype=torch.int16, device=device)
            self._run("select", g.count, g, work[g.start * BLOCK :], chosen[g], values)
            self._run("code", g.count, g, values, codes, data, begin)
            self._run("pack", -(-g.count // 8), g, chosen[g], codes, data, begin, *starts, g.count)
        dense = formats.encode(sparse.dense_code(codec), self.layout.dense_part(work).view(1, -1))
        data[size - dense.numel() :] = dense
        cut = stretches(self.layout.windows(self.device), self.device, codec.topk)
        return data, [chosen[s.group][s.first : s.first + s.count] for s in cut if s.group]

    def mean(
        self, bodies: Sequence[Tensor], window: Window, out: Tensor | None, inverse: bool,
        factors: Tensor | None = None, tensors: Sequence[Tensor | None] = (None,),
        sign: bool = False,
    ) -> None:  # fmt: skip
        """The mean of sections, of equal weight, for a window of blocks, added in rank order.

        Args:
            out: for the blocks, fp32 [numel]; None: they, or their `sign`, go to `tensors` (None is
                left out).
            inverse: transform them back.
            factors: by which each replica's values are multiplied, fp32 [R, count of the group].
        """
        g, size = window.group, len(bodies)
        assert g is not None
        self._run(
            "mean", window.count, g, self._addresses(bodies),
            self._zero if factors is None else factors, self._addresses(tensors),
            *self._tables[g], self._zero if out is None else out, *self._matrices[g, True],
            *self._starts(g), g.count, window.first, size, 1.0 / size,
            INVERSE=inverse and g.transform, SIGN=sign, TABLE=out is None,
            SENDERS=self.channel.reducer.mean_over == "senders", CLIP=factors is not None,
        )  # fmt: skip

    def compile(self) -> None:
        """Make the kernels that the channel uses, and compare their bytes with torch's. Raises
        RuntimeError: they differ; and whatever Triton raises."""
        channel, work = self.channel, self.layout.new(self.device)
        none = [None] * self.layout.num_tensors
        if channel.accumulator is not None:
            self.accumulate(none, work if channel.source == "delta" else None, work, 1.0, 0.0)
        work.normal_(generator=torch.Generator(self.device).manual_seed(0))
        body, _ = self.encode(work)
        if not torch.equal(body, sparse.encode_sparse(self.layout, self.codec, work)):
            raise RuntimeError("fused kernels and torch do not make the same bytes here")
        clip = channel.reducer.clip != "none"
        for g in self.layout.groups:
            first = Window(g, g.start * BLOCK, (g.start + 1) * BLOCK)
            factors = self._zero.new_ones(1, g.count) if clip else None
            for inverse in {False, g.transform}:
                self.mean([body], first, work, inverse, factors)
            if channel.before_step:
                self.mean([body], first, None, True, factors, none, channel.applier.sign)
