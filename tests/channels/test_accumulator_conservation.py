"""Nothing that comes into an accumulator is lost or made: what the replicas were given is what has
moved the parameters and what they keep, in every number format, for every kind of channel.

Some tensors have no gradient: on one replica, on any, or not yet. A code without a zero (1bit,
2bit) gives them the level of their neighbours.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_demo
from fsdp_demo import Accumulator, Applier, Channel, Codec, ExchangeConfig, SyncSchedule
from fsdp_demo.config.names import FORMATS, SELECTIONS

from ..support import threaded
from ..support.cases import named
from ..support.inside import in_ranks
from ..support.transforms import transform

STEPS = 5
SHAPES = {"all": (64, 64), "first": (64, 65), "late": (64, 64), "none": (70, 64), "small": (9,)}
PRESENT = {
    "all": lambda t, island: True,
    "first": lambda t, island: island == 0,
    "late": lambda t, island: t >= 2,
    "none": lambda t, island: False,
    "small": lambda t, island: island == 1,
}
SOURCES = {
    "gradient": ("gradient", 0), "gradient, delayed": ("gradient", 2), "delta": ("delta", 0),
}  # fmt: skip
CODECS = [
    ("dense", "none"),
    *((select, turned) for select in list(SELECTIONS)[1:] for turned in ("none", "dct")),
]


ALL = list(itertools.product(FORMATS, CODECS))
PAIRS = [  # each format with each selection, turned or not by turns
    (code, (select, "none" if select == "dense" or (i + k) % 2 else "dct"))
    for i, code in enumerate(FORMATS)
    for k, select in enumerate(SELECTIONS)
]
FEW = [(code, CODECS[i % len(CODECS)]) for i, code in enumerate(FORMATS)]
FEW += [(list(FORMATS)[0], codec) for codec in CODECS]


def channel(code: str, select: str, turned: str, source: str) -> Channel:
    what, delay = SOURCES[source]
    return Channel(
        "any",
        what,
        SyncSchedule(1, delay=delay),
        Accumulator(1.0, 1.0, 1.0),
        Codec(turned, select, 512, code),
        "subtract",
        applier=Applier("gradient" if what == "gradient" else "outer_step"),
    )


def given(t: int, island: int, name: str) -> Tensor | None:
    """The gradient of a tensor on an island at a step."""
    if not PRESENT[name](t, island):
        return None
    # multiples of 1/8: sums are exact
    made = torch.Generator().manual_seed(t + 10 * island + 100 * list(SHAPES).index(name))
    return torch.randint(-16, 17, SHAPES[name], generator=made) / 8


def trained(config, island, topology) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Where the parameters have ended (they begin at 0), and what the accumulator keeps of each."""
    model = nn.ParameterDict({n: nn.Parameter(torch.zeros(s)) for n, s in SHAPES.items()})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    exchange = fsdp_demo.attach(optimizer, config, model=model, topology=topology)
    for t in range(STEPS):
        for name, p in model.items():
            p.grad = given(t, island, name)
        optimizer.step()
    exchange.finish()  # what is under way lands
    at = exchange.channels[0]
    work = at.accumulator.clone()
    if config.channels[0].codec.transform == "dct":
        work = transform(at.layout, work, inverse=True)
    kept = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    at.layout.unpack(work, list(kept.values()))
    return {n: p.detach() for n, p in model.items()}, kept


def conserved(results: list[Any], at: Channel) -> None:
    """Of every tensor. What nobody had a gradient for has neither moved, nor is any of it kept."""
    # of what is summed on the way the mean comes back rounded, to bf16 or int8
    summed = len(results) > 1 and not at.codec.indexed and at.codec.value_dtype in ("bf16", "int8")
    bound = 0.2 if summed else 1e-4
    islands = range(len(results))
    for name in SHAPES:
        grads = [given(t, i, name) for t in range(STEPS) for i in islands]
        came = sum((g.double() for g in grads if g is not None), torch.zeros(SHAPES[name]).double())
        moved = -results[0][0][name].double() * len(results)
        kept = sum(r[1][name].double() for r in results)
        far = float((moved + kept - came).abs().max())
        assert far < bound, (name, far)
        if name == "none" and at.before_step:
            assert all(not r[0][name].any() and not r[1][name].any() for r in results)


@pytest.mark.parametrize(
    ("count", "source", "cases"),
    [
        (2, "gradient", PAIRS),
        (2, "delta", FEW),
        pytest.param(2, "gradient", ALL, marks=pytest.mark.slow),
        pytest.param(2, "delta", ALL, marks=pytest.mark.slow),
        (2, "gradient, delayed", FEW),
        (1, "gradient", FEW),
        (1, "delta", FEW),
        (1, "gradient, delayed", FEW),
    ],
    ids=lambda value: {id(ALL): "all", id(PAIRS): "pairs", id(FEW): "few"}.get(id(value)),
)
@in_ranks(1, 1, timeout=240)
def test_accumulator_conserves_sum_in_every_code(count, source, cases) -> None:
    """The sum of what was applied and what an accumulator keeps is what came in, in every number
    format: with each selection, and where the code is the same (of deltas, delayed, or alone) each
    format and each selection once.
    """
    for code, (select, turned) in cases:
        at = channel(code, select, turned, source)
        config = ExchangeConfig("any", (at,))
        with named(f"{code} {select} {turned}"):
            results = threaded.islands(partial(trained, config), count)
            conserved(threaded.values(results), at)
