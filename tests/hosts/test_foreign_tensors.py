"""Tensors whose meaning lies in more than their bytes (quantized weights of other packages): they
are left as each island has them, and everything else is exchanged as ever.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_demo
from fsdp_demo.hosts.base import is_foreign

from ..support import threaded
from ..support.heard import heard
from ..support.inside import in_ranks
from ..support.threaded import values


class Coded(torch.Tensor):
    """Codes and a scale, with no operation but a detach, as torchao's classes are made."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor):
        self.codes, self.scale = codes, scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(f"{func} of codes")

    def value(self) -> torch.Tensor:
        return self.codes * self.scale


class Net(nn.Module):
    """A quantized weight of both kinds, a frozen one and a trained one, other on each island."""

    def __init__(self, island: int):
        super().__init__()
        torch.manual_seed(island)
        self.wrapped = nn.Parameter(Coded(torch.randint(9, (4, 4)), torch.rand(1)), False)
        self.packed = nn.Parameter(torch.randint(9, (4, 4), dtype=torch.uint8), False)
        self.packed.quant_state = torch.rand(1)  # type: ignore[attr-defined]
        self.register_buffer("coded", Coded(torch.randint(9, (4, 4)), torch.rand(1)))
        self.frozen = nn.Parameter(torch.rand(4, 4), False)
        self.register_buffer("mean", torch.rand(4))
        self.trained = nn.Parameter(torch.rand(4, 4))

    def own(self) -> list[torch.Tensor]:
        parts = self.packed.clone(), self.packed.quant_state.clone()  # type: ignore[attr-defined]
        return [self.wrapped.value(), self.coded.value(), *parts]

    def shared(self) -> list[torch.Tensor]:
        return [t.detach().clone() for t in (self.frozen, self.mean, self.trained)]


@pytest.mark.parametrize("preset", ["full", "diloco"])
@pytest.mark.parametrize("everything", [True, False])
@in_ranks(1, 1)
def test_foreign_tensor_is_left_alone(me: Any, preset: str, everything: bool) -> None:
    """Quantized codes without their scales stay as each island has them. everything: the optimizer
    holds the frozen ones, too.
    """

    def run(island: int, topology: Any) -> list[torch.Tensor]:
        net = Net(island)
        before, parameters = net.own(), list(net.parameters()) if everything else [net.trained]
        optimizer = torch.optim.AdamW(parameters, lr=0.1)
        exchange = fsdp_demo.attach(optimizer, preset, model=net, topology=topology)
        first = net.shared()
        for _ in range(2):
            (net.trained * (island + 1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        exchange.finish()
        assert exchange.digests_equal()
        assert all(map(torch.equal, net.own(), before))
        return [*first, *net.shared()]

    lines = heard(logging.INFO)
    one, two = values(threaded.islands(run))
    said = [line for line in lines if "quantized weights are left alone" in line]
    assert said and all("(3 tensors): wrapped (Coded), packed (Param" in s for s in said)
    assert all(map(torch.equal, one, two))


def test_foreign_tensor_is_recognised() -> None:
    """A tensor of a foreign type, or with scales as an attribute, is foreign."""
    plain = nn.Parameter(torch.rand(2))
    assert not is_foreign(plain) and not is_foreign(torch.rand(2))
    assert is_foreign(Coded(torch.ones(2), torch.ones(1)))
    plain.SCB = torch.ones(1)  # type: ignore[attr-defined]
    assert is_foreign(plain)
