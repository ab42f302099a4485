"""Forward passes and Muon's iteration in bf16 on a CPU, by the faster of two ways.

Products of bf16 operands with sums in fp32, as users train. Some processors calculate them faster
than those of fp32. On others they take twice the time; there the operands are rounded to bf16 and
multiplied as fp32. Both round what goes in and what comes out, forward and backward. They differ in
the order of sums.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WAYS = ("autocast", "rounded")


@functools.cache
def way() -> str:
    """Which of `WAYS` is faster here: on a product of the study's shape, best of 30 each."""
    seconds = []
    for dtype in (torch.bfloat16, torch.float32):
        a, b = torch.ones(1024, 128, dtype=dtype), torch.ones(128, 352, dtype=dtype)
        taken = []
        for _ in range(30):
            began = time.perf_counter()
            a @ b
            taken.append(time.perf_counter() - began)
        seconds.append(min(taken))
    # a margin: rounding costs a little, and equal machines are to choose alike
    return WAYS[seconds[0] > 1.3 * seconds[1]]


def prepare(model: nn.Module, how: str) -> None:
    """Make a Llama of transformers calculate in bf16 by one of `WAYS`; "autocast" is the caller's
    to enter.
    """
    if how == "rounded":
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        torch.optim._muon._zeropower_via_newtonschulz = newton_schulz  # type: ignore[attr-defined]
        ALL_ATTENTION_FUNCTIONS.register(how, attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(how, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = Rounded
    # torch's fused attention is slow backward in bf16 on a CPU
    model.set_attn_implementation({"autocast": "eager", "rounded": "rounded"}[how])  # type: ignore[operator]


class Rounding(torch.autograd.Function):
    """fp32 to the nearest bf16, ties to even, as fp32; of gradients too. In bits, since the
    compiler drops a cast that another one takes back.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return nearest(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return nearest(gradient)


def nearest(x: Tensor) -> Tensor:
    """fp32 of any shape, finite -> the nearest values that bf16 has."""
    bits = x.view(torch.int32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).view(torch.float32)


rounded = Rounding.apply


class Rounded(nn.Linear):
    """A linear layer without bias whose product is one of bf16."""

    def forward(self, x: Tensor) -> Tensor:
        return rounded(F.linear(rounded(x), rounded(self.weight)))


def newton_schulz(
    gradient: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """Muon's iteration as torch.optim.Muon has it in bf16: fp32 [rows, columns] -> bf16, nearly
    orthogonal. With every result rounded, which torch's products of bf16 do, too.
    """
    a, b, c = coefficients
    turned = gradient.size(0) > gradient.size(1)
    x = nearest(gradient.T.contiguous() if turned else gradient)
    x = nearest(x / nearest(x.norm()).clamp(min=eps))
    for _ in range(steps):
        gram = nearest(x @ x.T)
        x = nearest(a * x + nearest(b * gram + c * (gram @ gram)) @ x)
    return (x.T if turned else x).bfloat16()


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers asks for it: query [rows, heads, length, width], key and value with
    as many heads or fewer -> [rows, length, heads, width], no weights.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = rounded(rounded(query) @ rounded(key).transpose(2, 3)) * scaling
    chances = torch.softmax(scores if mask is None else scores + mask, dim=-1)
    return rounded(rounded(chances) @ rounded(value)).transpose(1, 2).contiguous(), None
