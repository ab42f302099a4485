"""Names and what is behind them: a number format, a transform, a selection or a way of applying the
mean is one entry in a table of names and one in a table of functions, and nobody else knows of
it."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_demo
from fsdp_demo import Accumulator, Applier, Channel, Codec, ExchangeConfig, SyncSchedule
from fsdp_demo.channels import appliers, apply
from fsdp_demo.compression import formats, selection, threshold, transform
from fsdp_demo.config import channel, names, parts

from .oracles import quantise
from .support import threaded
from .support.inside import in_ranks

PACKAGE = Path(fsdp_demo.__file__).parent


def test_registry_names_and_functions_agree() -> None:
    """Each name of the configuration has code, and all code has a name."""
    exact = {name for name, form in names.FORMATS.items() if form.exact}
    assert set(formats.EXACT) == exact, (
        "a format without scales is a dtype in compression/formats.py"
    )
    assert set(formats.CODERS) == set(names.FORMATS) - exact, (
        "a format with scales is a coder in compression/formats.py"
    )
    assert {name: (form.bits, form.group) for name, form in quantise.FORMATS.items()} == {
        name: (form.bits, form.group) for name, form in names.FORMATS.items()
    }, "the oracle of a format is a line of FORMATS in tests/oracles/quantise.py"
    assert set(transform.MATRICES) == set(names.TRANSFORMS) - {"none"}
    by = {
        who: {name for name, chosen in names.SELECTIONS.items() if chosen.by == who}
        for who in ("nobody", "data", "tensor", "step")
    }
    assert (by["nobody"], set(selection.BY_DATA), set(selection.BY_STEP)) == (
        {"dense"},
        by["data"],
        by["step"],
    )
    assert set(threshold.BY_TENSOR) == by["tensor"]
    assert set().union(*by.values()) == set(names.SELECTIONS)
    assert set(appliers.APPLIERS) == set(names.APPLIERS)
    assert {source for acts in names.APPLIERS.values() for source in acts.sources} == {
        *channel.SOURCES,
        "state",
    }


def test_registry_facts_of_the_formats() -> None:
    """The facts of a number format are those of its coder."""
    for name, form in names.FORMATS.items():
        if form.exact:
            assert 8 * formats.EXACT[name].itemsize == form.bits, name
            continue
        scales, codes = formats.CODERS[name].encode(
            torch.linspace(-1, 1, 2 * 3 * 32).view(2, 3, 32)
        )
        assert scales.shape == (2, 3, form.scales) and scales.dtype == torch.bfloat16, name
        assert codes.shape == (2, 3, 32) and codes.dtype == torch.uint8, name
        assert int(codes.max()) < 2**form.bits, f"{name}: a code has more bits than its format"
        flat = codes.view(-1)
        assert torch.equal(formats.unpack(formats.pack(flat, form.bits), form.bits), flat), name
        assert formats.CODERS[name].decode(scales.float(), codes).shape == (2, 3, 32), name


def test_registry_transform_matrices_are_orthonormal() -> None:
    """Matrices of the transforms are orthonormal."""
    for make in transform.MATRICES.values():
        for n in range(1, 65):
            assert torch.allclose(
                make(n) @ make(n).t(), torch.eye(n, dtype=torch.float64), atol=1e-12
            )


TABLES = (
    "config/names.py", "compression/formats.py", "compression/transform.py",
    "compression/selection.py", "compression/threshold.py",
)  # fmt: skip


def test_registry_names_stand_nowhere_else() -> None:
    """No other module names them as literals in code; documentation may. The mean of low codes
    comes back in int8 (`dense.mean_code`), by decree.
    """
    words, found = {"none", "dense", "fp32", "bf16", "random"}, []
    known = {*names.FORMATS, *names.TRANSFORMS, *names.SELECTIONS} - words
    packages = "config compression channels net store membership peers elastic rendezvous exchange "
    for package in [*packages.split(), "checkpoint"]:
        for file in sorted((PACKAGE / package).glob("*.py")):
            if (where := f"{package}/{file.name}") in TABLES:
                continue
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                value = node.value if isinstance(node, ast.Constant) else None
                if isinstance(value, str) and value in known:
                    found.append(f"{where} names {value!r}")
    assert found == ["compression/dense.py names 'int8'"]


# ---- one entry is enough -----------------------------------------------------------------------


class Ternary:
    """Sign or zero, times the largest magnitude of the group."""

    def encode(self, v: Tensor) -> tuple[Tensor, Tensor]:
        scale = v.abs().amax(-1, keepdim=True).to(torch.bfloat16)
        return scale, (v.abs() * 2 > scale.float()).to(torch.uint8) * (
            1 + 2 * (v < 0).to(torch.uint8)
        )

    def decode(self, scales: Tensor, q: Tensor) -> Tensor:
        return (q.float() * (2 - q.float()) * (q < 2) - (q == 3).float()) * scales


def hadamard(n: int) -> Tensor:
    """Walsh-Hadamard on each power of two in n."""
    blocks = []
    for size in (1 << bit for bit in reversed(range(7)) if n >> bit & 1):
        h = torch.ones(1, 1, dtype=torch.float64)
        while len(h) < size:
            h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
        blocks.append(h / size**0.5)
    return torch.block_diag(*blocks)


def head(size: int, k: int, count: int, number: int, seed: int, device: torch.device) -> Tensor:
    """The first k of the coefficients not sent lately, in order."""
    return ((torch.arange(k) + number * k) % size).to(device).expand(count, k)


def halved(c: Any, mean: Any, arrival: Any) -> None:
    """Half of the mean is the gradient."""
    targets = c.set_gradients(arrival.present)
    with transform.make_transform(c.channel.codec, c.host.device) as made:
        apply.deliver(c, mean, targets, lambda _, x: x.mul_(0.5), made)


def enter(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of each, as a contributor would."""
    monkeypatch.setitem(names.FORMATS, "ternary", names.Format(2, 64))
    monkeypatch.setitem(formats.CODERS, "ternary", Ternary())
    monkeypatch.setattr(parts, "TRANSFORMS", (*names.TRANSFORMS, "hadamard"))
    monkeypatch.setitem(transform.MATRICES, "hadamard", hadamard)
    monkeypatch.setitem(names.SELECTIONS, "head", names.Selection("step", alike=True))
    monkeypatch.setitem(selection.BY_STEP, "head", head)
    monkeypatch.setitem(names.SELECTIONS, "first", names.Selection("data"))
    monkeypatch.setitem(
        selection.BY_DATA, "first", lambda rows, k: torch.arange(k).expand(len(rows), k)
    )
    monkeypatch.setitem(names.APPLIERS, "halved", names.Acts(("gradient",)))
    monkeypatch.setitem(appliers.APPLIERS, "halved", halved)


def trained(codec: Codec, applier: str, beta: float) -> tuple[list[Tensor], list[Tensor]]:
    """Two islands, three steps on given gradients: the parameters, and what is left in the
    accumulators (element domain), of each.
    """

    def island(i: int, topology: fsdp_demo.Topology) -> tuple[Tensor, Tensor]:
        weight = nn.Parameter(torch.zeros(130, 128))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        parts = SyncSchedule(), Accumulator(beta=beta), codec
        own = Channel("m", "gradient", *parts, feedback="subtract", applier=Applier(applier))
        exchange = fsdp_demo.attach(optimizer, ExchangeConfig("own", (own,)), topology=topology)
        for t in range(3):
            weight.grad = torch.randn(130, 128, generator=torch.Generator().manual_seed(10 * t + i))
            optimizer.step()
        channel = exchange.channels[0]
        assert channel.layout is not None and channel.accumulator is not None
        work = transform.transform(codec, channel.layout, channel.accumulator.clone(), inverse=True)
        left = torch.zeros(130, 128)
        channel.layout.unpack(work, [left])
        exchange.finish()
        return weight.detach(), left

    found = threaded.values(threaded.islands(island))
    return [weight for weight, _ in found], [left for _, left in found]


@pytest.mark.parametrize("select", ["topk", "first", "head", "random"])
@in_ranks(1, 1)
def test_registry_own_entries_train(select: str) -> None:
    """An own format, transform, selection and applier train. Nothing is lost with beta 1: what was
    sent and what is left is what came in; and both islands apply the same bits.
    """
    enter(pytest.MonkeyPatch())  # the process ends with the run
    for code in ("ternary", "fp32"):
        (a, b), left = trained(Codec("hadamard", select, 64, code), "halved", 1.0)
        came = sum(
            torch.randn(130, 128, generator=torch.Generator().manual_seed(10 * t + i))
            for t in range(3)
            for i in range(2)
        )
        assert torch.equal(a, b) and bool(a.any())
        # Half of the mean of two, once: parameters are minus a quarter of the sum that was
        # sent.
        assert torch.allclose(
            -4 * a + left[0] + left[1], came, atol=2e-2 if code == "ternary" else 1e-4
        )


def test_registry_refuses_entries_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry is refused where it does not fit."""
    enter(monkeypatch)
    for source, acts, codec, says in (
        ("delta", "halved", Codec(), "applier.acts_as='halved' cannot apply source 'delta': use "
            "applier.acts_as='outer_step'"),
        ("gradient", "outer_step", Codec(), "applier.acts_as='outer_step' cannot apply source "
            "'gradient': use applier.acts_as='gradient' or 'halved'"),
        ("parameter", "replace", Codec(value_dtype="ternary"), "value_dtype fp32 or bf16"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=says):
            channel = Channel("c", source, codec=codec, applier=Applier(acts))
            ExchangeConfig("own", (channel,))
