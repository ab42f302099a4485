"""The plan of bytes against the meter of real processes."""

from __future__ import annotations

import math
import os
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import fsdp_demo
from fsdp_demo import ExchangeConfig, base_optimizer, preset, presets
from fsdp_demo.compression import dense as vectors
from fsdp_demo.exchange import plan
from fsdp_demo.peers import header
from fsdp_demo.peers.header import Meter
from fsdp_demo.tools.planner.models import load, numel

from ..oracles.wire import block_bytes
from ..support.two_layers import train

# ---- the plan and the meter --------------------------------------------------------------------

# blocks of 64 x 64 with edges, flat blocks with a tail, small tensors, one element: uneven or empty
# shards
SHAPES = {
    "embed.weight": (100, 50),
    "layers.0.weight": (124, 122),
    "layers.1.weight": (131, 70),
    "layers.2.weight": (128, 128),
    "layers.3.weight": (67, 3),
    "norm": (5,),
    "one": (1,),
    "unused": (3, 3),
    "frozen": (4, 4),
}
STEPS = 13

CASES: dict[str, ExchangeConfig] = {
    "full": preset("full"),
    "local_sgd": preset("local_sgd", period=2),
    "sel_sync": preset("sel_sync", check_every=2, at_most=4),  # never known in so short a run
    "local_adam": preset("local_adam", period=3),
    "desloc": preset("desloc", embeddings=True, period=2, states={"exp_avg": 2, "exp_avg_sq": 3}),
    "desloc, rank": preset("desloc", rank=16, period=2, states={"exp_avg": 2, "exp_avg_sq": 3}),
    "diloco": preset("diloco", period=3),
    "streaming_diloco": preset("streaming_diloco", period=5, layers=2, delay=2),
    "demo": preset("demo"),
    "random": preset("random"),
    "stride": preset("stride", topk=100),
    "decoupled_momentum": preset("decoupled_momentum", period=3),
    "sparse_loco": preset("sparse_loco", period=3),
    "sign_loco": preset("sign_loco", period=3),
    "muloco": preset("muloco", period=4),
    "sign_muloco": preset("sign_muloco", period=3),
    "noloco": preset("noloco", period=3),
    "saps": preset("saps", topk=100),
    # forms that no preset takes by default
    "demo, late": preset("demo", topk=3, **{"schedule.delay": 2}),
    "diloco, int8": preset("diloco", period=4, value_dtype="int8"),
    "diloco, eager": preset("diloco", eager=2, period=3),
    "sparse_loco, threshold": preset("sparse_loco", period=3,
        **{"codec.select": "threshold", "codec.threshold_every": 2}),
    "sign_loco, feedback, late": preset("sign_loco", beta=0.6, period=4, **{"schedule.delay": 1}),
    "muloco, int4": preset("muloco", period=4, value_dtype="int4"),
    "muloco, later than its period": preset("muloco", period=2, **{"schedule.delay": 5}),
    "streaming_diloco, e2m1": preset("streaming_diloco", period=4, layers=1, delay=1,
        value_dtype="fp4_e2m1", order="sequential"),
    "decoupled_momentum, released": preset("decoupled_momentum", rule="released", period=2,
        average_every=2),
}  # fmt: skip


class Model(nn.Module):
    """Parameters of these shapes; the loss is the sum of their elements times a number."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Held(SHAPES["embed.weight"])
        self.layers = nn.ModuleList([Held(SHAPES[f"layers.{i}.weight"]) for i in range(4)])
        for name in ("norm", "one", "unused", "frozen"):
            setattr(self, name, nn.Parameter(torch.ones(SHAPES[name]), name != "frozen"))

    def forward(self, scale: float) -> torch.Tensor:
        held = self.embed() + sum(layer() for layer in self.layers)
        return scale * (held + self.norm.square().sum() + self.one.sum() + self.frozen.sum())


class Held(nn.Module):
    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, math.prod(shape)).view(shape))

    def forward(self) -> torch.Tensor:
        return self.weight.square().sum()


def counted(me: Any, name: str, config: ExchangeConfig) -> list[tuple[int, ...]]:
    """(exchanges, messages, bytes sent, bytes received) of this rank at each step of a short
    training.
    """
    os.environ["ISLAND_RUN"] += "-" + "".join(c for c in name if c.isalnum())
    torch.manual_seed(0)
    model = Model()
    if me.procs > 1:
        for part in (*model.layers, model):
            fully_shard(part, mesh=me.mesh())
    kind = torch.optim.SGD if config.inner_optimizers[0] == "sgd" else torch.optim.AdamW
    kind = partial(base_optimizer, config) if config.inner_rank else kind
    optimizer = kind([(n, p) for n, p in model.named_parameters() if p.requires_grad], lr=1e-3)
    # bytes do not depend on it, and AdamW alone is refused under muloco
    insists = {"inner_optimizers": "as_is"} if config.preset.endswith("muloco") else {}
    exchange = fsdp_demo.attach(optimizer, config, model=model, **insists)
    seen = [(0, 0, 0, 0)]

    def metrics() -> tuple[int, ...]:
        m = exchange.metrics()
        return m["exchanges"], m["messages"], m["bytes_sent"], m["bytes_received"]

    def look(t: int) -> None:
        exchange.digests_equal()  # on the line after what is under way: that has been counted then
        seen.append(metrics())

    train(optimizer, lambda t: model(1.0 + t + me.island), STEPS, each=look)
    exchange.flush()
    assert metrics() == seen[-1], "flush sends nothing"
    exchange.detach()
    steps = zip(seen, seen[1:], strict=False)
    return [tuple(a - b for a, b in zip(now, before, strict=True)) for before, now in steps]


def test_bytes_plan_covers_every_preset() -> None:
    """Every preset is a case of this file."""
    assert set(presets()) <= set(CASES)
    assert [CASES[name].preset for name in presets()] == list(presets())


LONG = [pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((2, 2), (4, 1))]


@pytest.mark.parametrize(("islands", "procs"), [(2, 1), (3, 1), *LONG])
def test_bytes_plan_equals_meter(run_ranks: Any, islands: int, procs: int) -> None:
    """The plan of bytes is what the meter counts. Every step of every rank: exchanges, messages,
    bytes sent and received.
    """
    tensors = [(n, s) for n, s in SHAPES.items() if n != "frozen"]

    def run(me: Any) -> dict[str, list[tuple[int, ...]]]:
        return {name: counted(me, name, config) for name, config in CASES.items()}

    results = run_ranks(run, islands, procs, timeout=240, env={"ISLAND_MIN": str(islands)})
    for name, config in CASES.items():
        if config.pairs and islands % 2:
            continue  # one stays alone in each round: `test_pairs_of_an_odd_number`
        for i in range(islands):
            plans = plan.plan_model(config, tensors, islands, procs, rank=i)
            for p in range(procs):
                found = results[i * procs + p][name]
                planned = [plans[p].message(t) for t in range(STEPS)]
                due = [(m.exchanges, m.messages, m.bytes_sent, m.bytes_received) for m in planned]
                assert found == due, (name, i, p)
                assert sum(f[2] for f in found) > 0, name
                total = plans[p].over(range(STEPS))
                sums = tuple(sum(f[j] for f in found) for j in (2, 1))
                assert (total.bytes_sent, total.messages) == sums


@pytest.mark.parametrize("name", CASES)
def test_bytes_plan_average_and_largest(name: str) -> None:
    """The average and the largest exchange of a plan follow from its steps."""
    tensors = [(n, s) for n, s in SHAPES.items() if n != "frozen"]
    (made,) = plan.plan_model(CASES[name], tensors, 3)
    steps = [made.message(t) for t in range(made.cycle, 3 * made.cycle)]
    sent, received, messages = made.average()
    assert sent == made.average()[0] == sum(m.bytes_sent for m in steps) / len(steps)
    assert (received, messages) == tuple(
        sum(getattr(m, k) for m in steps) / len(steps) for k in ("bytes_received", "messages")
    )
    assert made.most().bytes_sent == max(m.bytes_sent for m in steps)


def test_bytes_plan_long_cycle() -> None:
    """The plan of a long cycle counts exchange by exchange. Periods without a common divisor: close
    to the exact mean (a header per channel more), without walking the cycle.
    """
    config = preset("desloc", embeddings=True, period=1, states={"exp_avg": 101, "exp_avg_sq": 103})
    (made,) = plan.plan_model(config, [("layers.0.weight", (128, 128))], 2)
    assert made.cycle == 101 * 103 > 10_000
    exact = made.over(range(made.cycle)).bytes_sent / made.cycle
    assert exact <= made.average()[0] < exact + 2 * 3 * header.HEADER.size / 101
    assert made.most().bytes_sent == 3 * 56 + 3 * 4 * 128 * 128


def test_bytes_plan_one_island() -> None:
    """The plan of one island sends nothing."""
    for config in CASES.values():
        for made in plan.plan_model(config, [(n, s) for n, s in SHAPES.items()], 1, 2):
            assert made.average() == (0, 0, 0) and made.most().bytes_sent == 0


def test_bytes_plan_llama() -> None:
    """The bytes of Llama 3.2 1B do not depend on an island's shards, but for edges of blocks, and
    those of `demo` follow from its blocks.
    """
    llama = load("llama-3.2-1b")
    for name in presets():
        (whole,) = plan.plan_model(preset(name), llama, 3)
        eighths = plan.plan_model(preset(name), llama, 3, 8)
        sent = sum(p.most().bytes_sent for p in eighths)
        assert sent == pytest.approx(whole.most().bytes_sent, rel=0.01), name
    (made,) = plan.plan_model(preset("demo"), llama, 3)
    norms = 33 * 2048  # dense, in bf16
    blocks = (numel(llama) - norms) // 4096
    one = made.most().bytes_sent / 2
    assert one == pytest.approx(56 + 19 + block_bytes(32) * blocks + 2 * norms, abs=8)


def test_bytes_plan_meter_adds_up() -> None:
    """The meters of a plan's messages add up."""
    (made,) = plan.plan_model(preset("demo"), [("a", (64, 64))], 2)
    total = Meter()
    total.add(made.message(0))
    total.add(made.message(1))
    assert total == made.over(range(2)) and total.messages == 2
    section = 2 + 32 + (7 + 8 + 16 + 4)
    assert made.message(0).bytes_sent == header.HEADER.size + 1 + section
    assert vectors.num_bytes("int8", 4096) == 4098
