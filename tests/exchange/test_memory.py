"""What `fsdp_demo.exchange.plan` plans against what an exchange makes, every storage followed."""

from __future__ import annotations

import functools
import time
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_demo
from fsdp_demo import ExchangeConfig, Topology, preset, presets
from fsdp_demo.channels.channel import ChannelRunner
from fsdp_demo.channels.state import Placement
from fsdp_demo.compression import blocks, dense, formats, sparse, windows
from fsdp_demo.elastic import chunks
from fsdp_demo.exchange.plan import Memory, inner_state, local_shape, plan_memory, plan_model
from fsdp_demo.hosts.optimizers import materialise
from fsdp_demo.hosts.torch_params import TorchHost
from fsdp_demo.peers import collectives
from fsdp_demo.tools.planner.models import Tensors, load

from ..support.held import followed, measure, shortened, small, steps_of
from ..support.tensor_ledger import Ledger

# the test's model is this much smaller than one that 64 MB are small for: so are the chunks, and
# the bound
SCALE = 64
BOUND = 64_000_000
TENSORS = small(128, 8, 16384)  # 0.72 M parameters, the largest tensor 262 kB
ODD = [
    ("embed.weight", (200, 150)),
    ("layers.0.weight", (124, 122)),
    ("layers.1.weight", (131, 70)),
    ("norm", (5,)),
    ("one", (1,)),
]

CASES: dict[str, ExchangeConfig] = {
    **{name: shortened(name) for name in presets()},
    # a cycle of 4 steps, not of 12
    "desloc": preset("desloc", period=1, states={"exp_avg": 2, "exp_avg_sq": 4}),
    # forms that no preset takes by default
    "desloc, rank": preset("desloc", rank=8, period=1, states={"exp_avg": 2, "exp_avg_sq": 4}),
    "demo, late": preset("demo", **{"schedule.delay": 3}),
    "demo, no senders": preset("demo", **{"reducer.mean_over": "replicas"}),
    "diloco, int8": preset("diloco", period=2, value_dtype="int8"),
    "diloco, kept": preset("diloco", period=3, **{"schedule.delay": 1, "applier.keep_steps": True}),
    "diloco, eager": preset("diloco", period=3, eager=2),
    "diloco, queued": preset("diloco", period=1, **{"schedule.delay": 2}),
    "local_sgd, late": preset("local_sgd", period=3, **{"schedule.delay": 1}),
    "sign_loco, feedback": preset("sign_loco", beta=0.6, period=2),
    "sparse_loco, threshold": preset("sparse_loco", period=2, **{"codec.select": "threshold"}),
    "muloco, int4": preset("muloco", period=2, value_dtype="int4"),
    "muloco, no codes": preset("muloco", period=2, value_dtype="fp32"),
    "released": preset("decoupled_momentum", rule="released", period=2),
    "released, averaged": preset("decoupled_momentum", rule="released", period=1, average_every=2),
    "streaming_diloco, whole": preset("streaming_diloco", period=3, layers=0, delay=1,
        value_dtype="bf16"),
}  # fmt: skip
# each way to travel: with positions, seeded, reduced, in few bits
FOUR = ("demo", "random", "diloco", "streaming_diloco", "muloco")
RUNS = [(name, 2) for name in CASES] + [
    pytest.param(name, 4, marks=() if name in FOUR else pytest.mark.slow) for name in presets()
]


def one_step_late(config: ExchangeConfig) -> ExchangeConfig:
    late = (replace(c, schedule=replace(c.schedule, delay=1)) for c in config.channels)
    return replace(config, channels=tuple(late))


# of the largest of four shards; what islands decide on is never late
LATE = {
    n: one_step_late(c) for n, c in CASES.items() if n in presets() and not (c.checks or c.pairs)
}


def constants() -> None:
    """The tables of the decoder of positions, which are made once in a process (80 kB)."""
    form = sparse.shortest_form(4096, 128)
    planes = sparse.encode_positions(form, torch.arange(128).expand(8, 128))
    sparse.decode_positions(form, planes, 8)


@pytest.fixture(autouse=True)
def made_once() -> None:
    constants()


@pytest.fixture
def smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks and network pieces that are to the test's model what the real ones are to a real
    model.
    """
    every = (blocks, "WINDOW"), (blocks, "CACHED"), (windows, "CODED"), (dense, "STEP")
    for module, name in (*every, (collectives, "STRETCH"), (formats, "CHUNK"), (chunks, "LARGEST")):
        monkeypatch.setattr(module, name, max(getattr(module, name) // SCALE, 1))


@functools.cache
def measured(name: str, islands: int) -> Memory:
    return measure(CASES[name], TENSORS, islands, steps_of(CASES[name]))


def most(found: Memory, place: str) -> int:
    return int(sum(getattr(found, f"{place}_{part}") for part in ("state", "flight", "workspace")))


def allowed(tensors: Tensors, scale: int) -> int:
    return BOUND // scale + 2 * max(4 * prod(shape) for _, shape in tensors)


# ---- the plan and what is held -----------------------------------------------------------------


def compare(config: ExchangeConfig, planned: Memory, found: Memory) -> None:
    """State to the byte. With what is under way, and at the most of a step, at least what is held,
    but for chunks, and at most 2 % above: what channels share in one message is counted for each.
    """
    schedules = [c.schedule for c in config.channels]
    # else something is always under way: state and flights are not told apart
    if all(s.delay < s.sync_every for s in schedules):
        assert (found.device_state, found.host_state) == (planned.device_state, planned.host_state)
    for place in ("device", "host"):
        kept, held = (
            getattr(m, f"{place}_state") + getattr(m, f"{place}_flight") for m in (planned, found)
        )
        # bits that say which gradients there were
        assert held - 64 <= kept <= 1.02 * held + 64, (place, planned, found)
        assert most(found, place) - allowed(TENSORS, SCALE) <= most(planned, place), place
        # else what is under way may land before the next message is at its largest
        if not any(s.delay for s in schedules):
            assert most(planned, place) <= 1.02 * most(found, place), (place, planned, found)


@pytest.mark.parametrize(("name", "islands"), RUNS)
def test_memory_plan_equals_held(name: str, islands: int, smaller: None) -> None:
    """The planned memory is what an exchange holds."""
    config = CASES[name]
    planned = plan_memory(config, TENSORS, islands, staged=False)
    compare(config, planned, measured(name, islands))


@pytest.mark.parametrize("name", LATE)
def test_memory_plan_shard_and_delay(name: str, smaller: None) -> None:
    """The planned memory of a shard and of delayed exchanges is what they hold."""
    config = LATE[name]
    local = [(n, local_shape(shape, 4, 0)) for n, shape in TENSORS]
    found = measure(config, local, 2, steps_of(config))
    compare(config, plan_memory(config, TENSORS, 2, 4, staged=False), found)


REDUCED = tuple(
    name
    for name in presets()
    if not any(c.codec.sparse or c.accumulator for c in CASES[name].channels)
)
"""They send whole vectors that are summed on the way."""
KEPT = tuple(n for n in REDUCED if [c.whole_every_step for c in CASES[n].channels] == [True])
"""Of them those that keep the memory of a vector: it counts as state."""


@pytest.mark.parametrize("name", [name for name in presets() if name not in REDUCED])
def test_memory_workspace_of_a_step(name: str, smaller: None) -> None:
    """A step with an exchange takes at most 64 MB and twice the largest shard (64 times smaller) on
    top of what is kept. Without feedback the delta itself is made for it.
    """
    found = measured(name, 2)
    plain = [c for c in CASES[name].channels if not c.accumulator]
    deltas = sum(c.source == "delta" or c.codec.sparse for c in plain)
    own = 4 * found.parameters * deltas
    assert own <= found.device_workspace <= own + allowed(TENSORS, SCALE)


@pytest.mark.parametrize("name", [name for name in REDUCED if name not in KEPT])
def test_memory_reduced_vector_held_once(name: str, smaller: None) -> None:
    """A vector that is reduced is held once. The message itself is what these presets send, 4 bytes
    per element of each channel that is due; nothing of that size comes on top.
    """
    sections = plan_model(CASES[name], TENSORS, 2)[0].sections
    sent = max(
        sum(4 * n for s in sections if s.channel.schedule.due(step) for n, _ in s.spans)
        for step in range(steps_of(CASES[name]))
    )
    # a step also frees norms of gradients that nobody has read (sel_sync)
    assert sent - 64 <= measured(name, 2).device_workspace <= sent + allowed(TENSORS, SCALE)


@pytest.mark.parametrize("name", KEPT)
def test_memory_vector_kept(name: str, smaller: None) -> None:
    """A vector and its mean that come in every step keep their memory, and a step makes none."""
    found = measured(name, 2)
    assert found.device_state == found.host_state == 4 * found.parameters
    assert max(found.device_workspace, found.host_workspace) <= allowed(TENSORS, SCALE)


@pytest.mark.parametrize("name", presets())
def test_memory_plan_edges_and_small_tensors(name: str, smaller: None) -> None:
    """Padded blocks and whole tensors are counted as they are laid out."""
    config = CASES[name]
    planned = plan_memory(config, ODD, 2, staged=False)
    found = measure(config, ODD, 2, steps_of(config))
    assert (found.device_state, found.host_state) == (planned.device_state, planned.host_state)


def test_memory_plan_two_islands_of_two_ranks(run_ranks: Any) -> None:
    """The planned memory holds with real peers and FSDP2 shards instead of an echo."""
    config = preset("decoupled_momentum", period=1, **{"applier.momentum": 0.9})
    tensors = small(64, 2, 100)

    def run(me: Any) -> tuple[int, int]:
        from torch.distributed.fsdp import fully_shard

        params = {n.replace(".", "_"): nn.Parameter(torch.randn(shape)) for n, shape in tensors}
        model = nn.ParameterDict(params)
        fully_shard(model, mesh=me.mesh())
        named = list(model.named_parameters())
        optimizer = fsdp_demo.base_optimizer(config, named)
        ledger = Ledger()
        constants()
        with followed(ledger):
            exchange = fsdp_demo.attach(optimizer, config, model=model)
            for _ in range(2):
                for _, p in named:
                    p.grad = torch.ones_like(p)
                optimizer.step()
            shapes = [(n, p.shape) for n, p in named]
            planned = plan_memory(config, shapes, 2, 2, me.proc, staged=False).device_state
            end = time.monotonic() + 10.0
            # a message is kept until all have landed it: the next beat says so
            while ledger.now["device"] > planned and time.monotonic() < end:
                time.sleep(0.05)
            exchange.detach()
        return ledger.now["device"], planned

    for held, planned in run_ranks(run, 2, 2):
        assert held == planned > 0


# ---- where it is kept --------------------------------------------------------------------------


@pytest.mark.parametrize("name", presets())
def test_memory_offload_outer_state(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anchors and outer momenta go to their home (here the meta device), nothing else does."""
    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *size, pin_memory=False, **options: empty(*size, **options)
    )
    config = replace(CASES[name], offload_outer_state=True)
    planned = plan_memory(config, TENSORS, 2)
    kept = {"cpu": 0, "meta": 0}
    for section in plan_model(config, TENSORS, 2)[0].sections:
        named = [(n, nn.Parameter(torch.zeros(shape))) for n, shape in TENSORS]
        optimizer = fsdp_demo.base_optimizer(config, named, lr=1e-3)
        materialise(optimizer)
        place = Placement(TorchHost([optimizer]), islands=2, home="meta")
        active = ChannelRunner(section.channel, place)
        active.start()
        assert len(active.covered) == section.layout.num_tensors
        for work in (active.accumulator, active.anchor, active.momentum):
            if work is not None:
                kept[work.device.type] += 4 * work.numel()
        if section.codec.seeded:
            kept["cpu"] += section.known_bytes
    assert (planned.device_state, planned.host_state) == (kept["cpu"], kept["meta"])
    alike = plan_memory(config, TENSORS, 2, staged=False)
    vector = 4 * planned.parameters * (name in KEPT)
    assert alike.device_state == planned.device_state + planned.host_state + vector
    assert alike.host_state == vector


def test_memory_plan_low_precision() -> None:
    """Parameters in low precision keep 4 bytes more per parameter: the values as they
    were written.
    """
    whole, low = (
        plan_memory(preset("diloco"), TENSORS, 2, low_precision=low) for low in (False, True)
    )
    assert (whole.per_parameter("device_state"), low.per_parameter("device_state")) == (8.0, 12.0)


@pytest.mark.parametrize("shards", [1, 8])
def test_memory_plan_llama_meta_device(shards: int) -> None:
    """`attach` as far as it goes without data: state of the whole model, and of one eighth."""
    whole = load("llama-3.2-1b")
    for name in ("demo", "diloco", "decoupled_momentum"):
        named = [
            (n, nn.Parameter(torch.empty(local_shape(shape, shards, 0), device="meta")))
            for n, shape in whole
        ]
        optimizer = fsdp_demo.base_optimizer(preset(name), named)
        exchange = fsdp_demo.attach(optimizer, preset(name), topology=Topology("single"))
        held = [w for c in exchange.channels for w in c.state().workspaces.values()]
        planned = plan_memory(preset(name), whole, 1, shards)
        assert sum(w.nbytes for w in held) == planned.device_state
        assert planned.parameters == sum(p.numel() for _, p in named) == 1_235_814_400 // shards
        exchange.detach()


def test_memory_inner_optimizer_state() -> None:
    """The bytes of the inner optimizer's state follow from the preset and the shard."""
    tensors = [("layers.0.weight", (64, 128)), ("embed.weight", (32, 16)), ("norm", (16,))]
    numel = 64 * 128 + 32 * 16 + 16
    found = {name: inner_state(preset(name), tensors) for name in ("demo", "diloco", "muloco")}
    assert found == {"demo": 0, "diloco": 8 * numel, "muloco": 8 * numel - 4 * 64 * 128}
    last = 20 * 128 + 10 * 16 + 4  # of three: 20 of 64 rows, 10 of 32, 4 of 16
    assert inner_state(preset("diloco"), tensors, 3, 2) == 8 * last


def test_memory_plan_llama_bytes_per_parameter() -> None:
    """The planned bytes per parameter, state and payloads under way, of every preset on an eighth
    of a Llama among four islands: on the device, and on the host with `offload_outer_state`.
    """
    llama = load("llama-3.2-1b")

    def planned(place: str, **changes: Any) -> dict[str, float]:
        plans = {n: plan_memory(replace(preset(n), **changes), llama, 4, 8) for n in presets()}
        return {n: round(p.per_parameter(place), 2) for n, p in plans.items()}

    none = dict.fromkeys(("full", "local_sgd", "sel_sync", "local_adam", "desloc"), 0.0)
    both = {**none, "diloco": 8.0, "streaming_diloco": 8.0, "sign_loco": 8.0, "noloco": 8.0}
    assert planned("device_state") == {
        **both, "demo": 4.0, "random": 4.25, "stride": 4.0, "decoupled_momentum": 8.0,
        "sparse_loco": 8.0, "muloco": 12.0, "sign_muloco": 12.0, "saps": 0.08,
    }  # fmt: skip
    assert planned("host_state", offload_outer_state=True) == {
        **both, "demo": 0.0, "random": 0.0, "stride": 0.0, "decoupled_momentum": 4.0,
        "sparse_loco": 4.0, "muloco": 8.0, "sign_muloco": 8.0, "saps": 0.0,
    }  # fmt: skip
