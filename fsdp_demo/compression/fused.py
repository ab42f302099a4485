"""Blocks on a GPU in kernels of Triton (`fused_kernels.py`) instead of some hundred operations of
torch: the same bytes, the same mean up to the order in which products of matrices add up.

No kernel has run on a GPU yet: docs/performance.md says how they are switched on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..config.channel import Channel
from ..config.parts import BLOCK, Codec, Reducer
from . import formats, sparse
from .blocks import Layout
from .transform import matrix
from .windows import EDGE, Group, Window, stretches, upload

CODES = ("int8", "int4", "2bit", "1bit")
"""The number formats that the kernels know."""
MOST = 128
"""Coefficients of a block that they select at most: with more, a row has several scales."""
WARPS = {"accumulate": 8, "select": 8, "mean": 8}  # with 4, `accumulate` spills registers


def takes(codec: Codec) -> bool:
    """Whether the kernels know what a codec sends."""
    known = codec.value_dtype in CODES and codec.transform in ("none", "dct")
    return codec.select == "topk" and codec.topk <= MOST and known


def fits(tensors: Sequence[Tensor | None]) -> bool:
    """Whether kernels can read and write these tensors where they lie: fp32, contiguous."""
    return all(t is None or (t.dtype == torch.float32 and t.is_contiguous()) for t in tensors)


class FusedBlocks:
    """The blocks of a layout under top-k, on a device that Triton compiles for.

    Args:
        layout, codec, reducer: of the channel; `takes(codec)`.
        device: of the workspaces.

    Raises:
        ImportError: there is no `triton`.
    """

    def __init__(self, layout: Layout, codec: Codec, reducer: Reducer, device: torch.device):
        from . import fused_kernels

        self._kernels = fused_kernels
        self.layout, self.codec, self.reducer, self.device = layout, codec, reducer, device
        self._precision = "tf32" if codec.transform_precision == "bf16" else "ieee"
        self._zero = torch.zeros(1, device=device)
        self._groups = {
            g: (self._constants(g), span)
            for g, span in zip(layout.groups, sparse.spans(layout, codec), strict=True)
        }
        self._tables = {g: self._table(g) for g in layout.groups}

    def _constants(self, g: Group) -> dict[str, int]:
        k, form = g.k(self.codec.topk), sparse.position_form(g, self.codec.topk)
        return {"K": k, "FLAGS": form.flags, "LOW": form.low, "ROWS": g.r, "COLS": g.s,
            "PK": _power(k), "PF": _power(form.flags), "PS": _power(2 * k),
            "BITS": formats.FORMATS[self.codec.value_dtype].bits}  # fmt: skip

    def _table(self, g: Group) -> list[Tensor]:
        """Of each block its tensor, first element and elements from row to row: int64 [count]."""
        found: list[tuple[int, int, int]] = []
        for box in self.layout._window(g, g.start, g.stop).boxes:
            for y in range(box.shape[0]):
                for x in range(box.shape[1]):
                    at = box.offset + y * box.strides[0] + x * box.strides[1]
                    found.append((box.tensor, at, box.strides[2]))
        return [upload(t.contiguous(), self.device) for t in torch.tensor(found).unbind(1)]

    def _factors(self, g: Group) -> tuple[Tensor, Tensor]:
        """D_r and D_s, filled up by zeros to 64 x 64."""
        out = torch.zeros(2, EDGE, EDGE, device=self.device)
        for m, n in zip(out, (g.r, g.s) if g.transform else (), strict=False):
            m[:n, :n] = matrix(self.codec.transform, n, self.device)
        return out[0], out[1]

    def _addresses(self, tensors: Sequence[Tensor | None], at: int = 0) -> Tensor:
        found = [0 if t is None else t.data_ptr() + at for t in tensors]
        return upload(torch.tensor(found, dtype=torch.int64), self.device)

    def _use(self, kernel: str, grid: tuple[int, ...], g: Group, *args: object, **more: object):
        """Launch a kernel with those of a group's constants that it takes."""
        made = getattr(self._kernels, kernel)
        every = {**self._groups[g][0], "CODE": self.codec.value_dtype, **more}
        every = {"PRECISION": self._precision, **every}
        known = {n: v for n, v in every.items() if n in made.arg_names}
        # no multiply-add in the place of two roundings
        made[grid](*args, **known, num_warps=WARPS.get(kernel, 4), enable_fp_fusion=False)

    def accumulate(
        self,
        tensors: Sequence[Tensor | None],
        before: Tensor | None,
        work: Tensor,
        beta: float,
        gain: float,
        bad: float | Tensor = 0.0,
    ) -> None:
        """work = beta work + gain T(tensors), in blocks; with `before` (a workspace in the element
        domain) of `before` minus tensors; of zeros where `bad` is not 0."""
        pointers = self._addresses(tensors)
        if not isinstance(bad, Tensor):
            bad = self._zero + bad
        for g in self.layout.groups:
            d_r, d_s = self._factors(g)
            start, delta = g.start * BLOCK, before is not None
            self._use(
                "accumulate", (g.count,), g, pointers, *self._tables[g],
                (work if before is None else before)[start:], bad,
                d_r, d_s.t().contiguous(), work[start:], beta, gain, DELTA=delta, DCT=g.transform,
            )  # fmt: skip

    def encode(self, work: Tensor) -> tuple[Tensor, list[Tensor]]:
        """What `sparse.encode_sparse` makes of a workspace: a section, and the positions chosen."""
        codec, of = self.codec, {}
        data = torch.empty(
            sparse.sparse_bytes(self.layout, codec), dtype=torch.uint8, device=self.device
        )
        for g, (known, (begin, middle, _)) in self._groups.items():
            shape = g.count, known["K"]
            of[g] = index = torch.empty(shape, dtype=torch.int16, device=self.device)
            values = torch.empty(shape, device=self.device)
            codes = torch.empty(shape, dtype=torch.uint8, device=self.device)
            self._use("select", (g.count,), g, work[g.start * BLOCK :], index, values)
            self._use("code", (g.count,), g, values, codes, data, begin)
            self._use(
                "pack", (-(-g.count // 8),), g, index, codes, data, begin, self._scales(g),
                middle - begin, g.count,
            )  # fmt: skip
        dense = formats.encode(sparse.dense_code(codec), self.layout.dense_part(work).view(1, -1))
        data[data.numel() - dense.numel() :] = dense
        windows = stretches(self.layout.windows(self.device), self.device, codec.topk)
        return data, [of[s.group][s.first : s.first + s.count] for s in windows if s.group]

    def _scales(self, g: Group) -> int:
        """Bytes of a group's scales."""
        return 2 * g.count * formats.FORMATS[self.codec.value_dtype].scales

    def factors(self, bodies: Sequence[Tensor], g: Group) -> Tensor | None:
        """By what each replica's values of a block are scaled (fp32 [R, count]), where the reducer
        clips them."""
        if self.reducer.clip != "median_norm":
            return None
        size, n = len(bodies), g.count
        norms = torch.empty(size, n, device=self.device)
        begin, at = self._groups[g][1][0], self._scales(g)
        self._use("norms", (n, size), g, self._addresses(bodies), norms, begin, at, n)
        ordered = norms.sort(0).values
        median = (ordered[(size - 1) // 2] + ordered[size // 2]) / 2
        return torch.where(norms > median, median / norms, 1.0)

    def compile(self, channel: Channel) -> None:
        """Make each kernel that a channel uses, and compare with what torch makes. Raises
        RuntimeError: the bytes differ; and what Triton raises."""
        work, none = self.layout.new(self.device), [None] * self.layout.num_tensors
        if channel.accumulator is not None:
            self.accumulate(none, work if channel.source == "delta" else None, work, 1.0, 0.0)
        work.normal_(generator=torch.Generator(self.device).manual_seed(0))
        body, _ = self.encode(work)
        if not torch.equal(body, sparse.encode_sparse(self.layout, self.codec, work)):
            raise RuntimeError("the kernels and torch do not make the same bytes on this device")
        for g in self.layout.groups:
            first = Window(g, g.start * BLOCK, (g.start + 1) * BLOCK)
            factors = self.factors([body], g)
            for inverse in (False, True):
                self.mean([body], first, work, inverse, factors)
            if channel.before_step:
                self.mean([body], first, None, True, factors, none, channel.applier.sign)

    def mean(
        self,
        bodies: Sequence[Tensor],
        window: Window,
        out: Tensor | None,
        inverse: bool,
        factors: Tensor | None = None,
        tensors: Sequence[Tensor | None] = (),
        sign: bool = False,
    ) -> None:
        """The mean of sections for a window of blocks, all of equal weight, added in rank order.

        Args:
            out: fp32 [numel], for the blocks; None: they are written into `tensors` (None is left
                out).
            inverse: transform them back. sign: write the sign.
            factors: as `factors` gives them for the window's group.
        """
        g = window.group
        assert g is not None
        begin, middle, _ = self._groups[g][1]
        sections, (d_r, d_s) = self._addresses(bodies), self._factors(g)
        at, n, size = self._scales(g), g.count, len(bodies)
        self._use(
            "mean", (window.count,), g, sections,
            self._zero if factors is None else factors, self._addresses(tensors or [None]),
            *self._tables[g], self._zero if out is None else out, d_r.t().contiguous(), d_s,
            begin, at, middle - begin, n, window.first, size, 1.0 / size,
            INVERSE=inverse and g.transform, SIGN=sign, TABLE=out is None,
            SENDERS=self.reducer.mean_over == "senders", CLIP=factors is not None,
        )  # fmt: skip


def _power(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length()) if n else 16
