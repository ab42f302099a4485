"""What a GPU is given to do, on a machine without one: every kind of channel runs on a stand-in
(`support/accelerator.py`) that refuses whatever would make the host wait, and must come to the
bits that the CPU comes to."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_demo
from fsdp_demo import ExchangeConfig, Topology, preset
from fsdp_demo.channels.channel import ChannelPayload, ChannelRunner, Incoming, Received
from fsdp_demo.channels.codec import ChannelCodec
from fsdp_demo.channels.state import Placement
from fsdp_demo.compression import blocks, transform, windows
from fsdp_demo.compression.blocks import Layout
from fsdp_demo.config.fragments import expand
from fsdp_demo.exchange.message import MessageLayout
from fsdp_demo.exchange.rewritten import Rewritten
from fsdp_demo.hosts.torch_params import TorchHost
from fsdp_demo.rendezvous.island import IslandGroup
from fsdp_demo.rendezvous.position import ShardPosition

from ..support.accelerator import DEVICE, Accelerator, Synchronised, There, pin, plug_in
from ..support.inside import in_ranks
from ..support.threaded import islands, values

CPU, R = torch.device("cpu"), 3
SHAPES = {"q": (128, 192), "up": (140, 192), "odd": (187, 70), "flat": (9000,), "norm": (192,)}
ALL = [
    ("embed.weight", (300, 64)),
    *((f"layers.{i}.{n}.weight", s) for i in range(2) for n, s in SHAPES.items()),
]
CASES = {
    "full": preset("full"),
    "demo": preset("demo"),
    "demo bf16 products": preset("demo", **{"codec.transform_precision": "bf16"}),
    "demo plain": preset("demo", transform=False, topk=128),
    "random": preset("random"),
    "random int8": preset("random", value_dtype="int8"),
    "stride": preset("stride"),
    **{f"diloco {code}": preset("diloco", period=2, value_dtype=code)
        for code in ("fp32", "int8", "int4", "2bit", "1bit")},
    "streaming_diloco": preset("streaming_diloco", period=6, delay=2, layers=1),
    "decoupled_momentum": preset("decoupled_momentum", period=2),
    "decoupled_momentum dct": preset("decoupled_momentum", period=2, transform=True),
    "decoupled_momentum released": preset("decoupled_momentum", period=2, rule="released"),
    "sparse_loco": preset("sparse_loco", period=2),
    "sign_loco": preset("sign_loco", period=2, momentum_warmup=1),
    "desloc": preset("desloc", period=2),
    "local_sgd late": preset("local_sgd", period=4, **{"schedule.delay": 3, "applier.mix": 0.5}),
    "muloco": preset("muloco", period=2),
}  # fmt: skip


def random(shape, seed, device: torch.device = CPU, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


class Play:
    """A channel of each kind that a configuration has, on a device, through three rounds."""

    def __init__(self, config, device, mode: Accelerator, dtype: torch.dtype, home: str | None):
        self.device, self.mode, self.dtype = device, mode, dtype
        self.parameters = [
            (n, nn.Parameter(random(s, i, device, dtype))) for i, (n, s) in enumerate(ALL)
        ]
        optimizer = torch.optim.AdamW(self.parameters)
        for i, (_, p) in enumerate(self.parameters):
            moments = {
                n: random(p.shape, 100 * j + i, device).abs()
                for j, n in enumerate(("exp_avg", "exp_avg_sq"), 1)
            }
            optimizer.state[p] = {"step": torch.zeros(()), **moments}
        host = TorchHost([optimizer])
        channels = expand(config, [s.name for s in host.params])
        self.channels = [ChannelRunner(c, Placement(host, islands=R, home=home)) for c in channels]
        for c in self.channels:
            c.start()

    def rounds(self) -> list[Tensor]:
        """What is sent, written and kept, in order; the first round may wait, for constants to be
        made.
        """
        seen: list[Tensor] = []
        for c in self.channels:
            bodies: list[Tensor] = []
            for number in range(3):
                seen += self._round(
                    c, number, bodies, [1.0, 1.0, 1.0] if number < 2 else [1.0, 2.0, 0.5]
                )
        return seen

    def _round(self, c, number, bodies: list[Tensor], weights: list[float]) -> list[Tensor]:
        for i, (_, p) in enumerate(self.parameters):
            p.add_(random(p.shape, 1000 * number + i, self.device, self.dtype), alpha=0.1)
            p.grad = random(p.shape, 2000 * number + i, self.device, self.dtype)
        self.mode.lenient = number == 0
        out = c.encode(number * c.channel.schedule.sync_every, c.accumulate())
        c.subtract(out)
        self.mode.lenient = True
        sent = [t.cpu().clone() for t in ([] if out.body is None else [out.body]) + out.vectors]
        bodies += sent if out.body is not None else []
        # what was sent in earlier rounds plays the other replicas
        arrived = [pin(b.clone()) for b in (bodies * R)[-R:]]
        means = [pin(v / 2) for v in sent] if out.body is None else []
        self.mode.lenient = number == 0
        c.apply(Incoming(out, Received(arrived, means, weights), out.present))
        self.mode.lenient = True
        written = c.tensors("parameter" if c.channel.source == "delta" else c.channel.source)
        kept = (*written, c.accumulator, c.anchor, c.momentum, c.written)
        return [*sent, *(t.cpu().clone() for t in kept if t is not None)]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows so small that a few blocks are several."""
    monkeypatch.setattr(blocks, "WINDOW", 8)
    monkeypatch.setattr(blocks, "WINDOW_GPU", 16)
    monkeypatch.setattr(blocks, "CACHED", 4)
    monkeypatch.setattr(windows, "CODED", 800)  # two windows or more are coded at once
    monkeypatch.setattr(windows, "CODED_GPU", 3200)
    # products in bf16 where they are asked for, also on a CPU that has no unit for them
    monkeypatch.setattr(transform, "fast_bf16", lambda: True)
    monkeypatch.setattr(transform, "intel", lambda: False)


def compare(config, dtype: torch.dtype = torch.float32, home: str | None = None) -> None:
    with torch.no_grad(), plug_in(), Accelerator() as mode:
        mode.lenient = True
        found = Play(config, DEVICE, mode, dtype, home).rounds()
        expected = Play(config, CPU, mode, dtype, None).rounds()
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))


LOW = ("demo", "diloco fp32", "decoupled_momentum released")
PLAYED: dict[str, tuple[ExchangeConfig, dict[str, Any]]] = {
    **{name: (config, {}) for name, config in CASES.items()},
    **{f"{name}, bf16 parameters": (CASES[name], {"dtype": torch.bfloat16}) for name in LOW},
    "diloco, outer state on the host": (CASES["diloco fp32"], {"home": "cpu"}),
}


@pytest.mark.parametrize("name", PLAYED)
def test_device_no_wait_and_same_bits(name: str, small: None) -> None:
    """No kind of channel waits for the device, and each comes to the bits of the CPU."""
    config, options = PLAYED[name]
    compare(config, **options)


# ---- a whole exchange --------------------------------------------------------------------------


def train(config: ExchangeConfig, device: torch.device, steps=7) -> Callable[[int, Topology], Any]:
    """Two islands that train `steps` steps on gradients of noise; what each ends with."""

    def island(i: int, topology: Topology) -> Any:
        with Accelerator() as mode:
            with mode.waiting():
                named = [
                    (f"layers.{n}", nn.Parameter(random((130, 64) if n < 3 else (70,), n, device)))
                    for n in range(4)
                ]
                optimizer = torch.optim.SGD(named, lr=0.1, foreach=False)
                exchange = fsdp_demo.attach(optimizer, config, topology=topology)
            for t in range(steps):
                with mode.waiting():
                    for n, (_, p) in enumerate(named):
                        p.grad = random(p.shape, 100 * t + 10 * n + i, device)
                    loss = random((), t + i, device)
                exchange.report(loss=loss)
                mode.lenient = t == 0  # constants are made once
                optimizer.step()
            with mode.waiting():
                exchange.finish()
                return exchange.metrics()["loss"], [p.detach().cpu() for _, p in named]

    return island


@pytest.mark.parametrize("name, config", [
    ("demo", preset("demo")),
    ("demo late", preset("demo", **{"schedule.delay": 2})),
    ("full", preset("full")),
    ("full bf16", preset("full", value_dtype="bf16")),
    ("diloco", preset("diloco", period=2, inner_optimizers="as_is",
        **{"schedule.delay": 1, "applier.mix": 0.5})),
    ("decoupled_momentum", preset("decoupled_momentum", period=2, inner_optimizers="as_is")),
])  # fmt: skip
@in_ranks(1, 1)
def test_device_exchange_steps_never_wait(name: str, config: ExchangeConfig) -> None:
    """The steps of an exchange never wait for the device. Only the worker waits, for the copy it is
    about to send; parameters and the loss are those of the CPU. The watch for written parameters is
    left out: it reads one vector from the device ahead of the step behind an exchange.
    """

    with plug_in() as plug, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rewritten, "compare", lambda *_: None)
        found = values(islands(train(config, DEVICE)))
    for (loss, params), (same_loss, same_params) in zip(
        found, values(islands(train(config, CPU))), strict=True
    ):
        assert all(map(torch.equal, params, same_params)) and loss == pytest.approx(same_loss)
    waits = Counter(entry.split(" waits for ")[0] for entry in plug.log if " waits for " in entry)
    held = [len(s.held) for s in plug.streams[1:]]
    assert not Counter(plug.log)["everything"]
    sent = waits.pop("exchange")
    assert sent > 4 and sum(waits.values()) == sent and set(waits) == {"stream1", "stream2"}
    assert len(held) == 2 and all(n >= sent for n in held)  # the loss and the payload of each


def test_device_rounds_before_copy() -> None:
    """Vectors that are sent as bf16 are rounded on the device: half of the bytes are copied."""
    with plug_in(), Accelerator():
        channel = preset("full", value_dtype="bf16").channels[0]
        layout = MessageLayout([ChannelCodec(Layout([(8, 8)], ["none"]), channel, R)])
        payload = ChannelPayload(0, vectors=[torch.ones(64, device=DEVICE)], present=[True])
        (sent,) = layout.pack({channel.name: payload})[2]
        assert sent.device == DEVICE and sent.dtype == torch.bfloat16


def test_device_released_average_reads_drift() -> None:
    """The average of the released rule reads one number from the device: how far replicas had
    drifted, each time all parameters are averaged.
    """
    config = preset("decoupled_momentum", period=2, rule="released", average_every=1)
    with torch.no_grad(), plug_in(), Accelerator() as mode:
        mode.lenient = True
        play = Play(config, DEVICE, mode, torch.float32, None)
        play.channels = play.channels[-1:]
        with pytest.raises(Synchronised, match="_local_scalar_dense"):
            play.rounds()


# ---- clipping ----------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 1e-4])
def test_device_clip_reads_nothing(scale: float) -> None:
    """Clipping reads nothing from the device and equals that of torch."""
    gradients = [random(s, i) * scale for i, (_, s) in enumerate(ALL)]
    host = [g.clone() for g in gradients]
    torchs = [nn.Parameter(torch.zeros_like(g)) for g in gradients]
    for p, g in zip(torchs, gradients, strict=True):
        p.grad = g.clone()
    IslandGroup(Topology(), ShardPosition()).clip([*host, None], 1.0)
    nn.utils.clip_grad_norm_(torchs, 1.0)
    with plug_in(), Accelerator() as mode:
        with mode.waiting():
            there = [g.to(DEVICE) for g in gradients]
        IslandGroup(Topology(), ShardPosition(), DEVICE).clip([*there, None], 1.0)
        IslandGroup(Topology(), ShardPosition(), DEVICE).clip([None], 1.0)
        with mode.waiting():
            found = [g.cpu() for g in there]
    for a, b, p, g in zip(found, host, torchs, gradients, strict=True):
        torch.testing.assert_close(a, p.grad, rtol=5e-7, atol=0)
        assert torch.equal(a, b)
        assert torch.equal(a, g) == (scale < 1)


@pytest.mark.parametrize("limit", [1.0, None])
def test_device_nan_gradients_zeroed_without_wait(limit: float | None) -> None:
    """Gradients that are not finite become zeros without a wait for the device."""
    with plug_in(), Accelerator() as mode:
        with mode.waiting():
            there = [torch.tensor([torch.nan, 3.0]).to(DEVICE), torch.tensor([5.0]).to(DEVICE)]
        island = IslandGroup(Topology(), ShardPosition(), DEVICE)
        bad = island.clip(there, limit)
        lost = island.not_finite([there[0], torch.full((1,), torch.inf, device=DEVICE)])
        with mode.waiting():
            assert [float(v) for v in (*there[0], there[1][0])] == [0.0, 0.0, 0.0]
            assert float(bad) == float(lost) == 1.0


# ---- how much a device is given to do ----------------------------------------------------------


def kernels(config: ExchangeConfig, layers: int) -> tuple[Counter[str], int, int]:
    """What one exchange (the second) of 3 replicas takes: operations on the device by name; windows
    and tensors of the channel.
    """
    with torch.no_grad(), plug_in(), Accelerator() as mode:
        shapes = {"q": (128, 128), "up": (256, 128), "norm": (128,)}
        with mode.waiting():
            named = [
                (f"layers.{i}.{n}", nn.Parameter(torch.ones(s).to(DEVICE)))
                for i in range(layers)
                for n, s in shapes.items()
            ]
            for _, p in named:
                p.grad = torch.ones_like(p)
            host = TorchHost([torch.optim.SGD(named)])
            c = ChannelRunner(config.channels[0], Placement(host, islands=R))
            c.start()
        for mode.lenient in (True, False):
            mode.kernels.clear()
            out = c.encode(0, c.accumulate())
            c.subtract(out)
            assert out.body is not None
            with mode.waiting():
                before, bodies = Counter(mode.kernels), [pin(out.body.cpu()) for _ in range(R)]
            mode.kernels = before
            c.apply(Incoming(out, Received(bodies, [], [1.0] * R), out.present))
        return Counter(mode.kernels), len(c.windows), len(named)


@pytest.mark.parametrize("transform", [True, False])
def test_device_kernels_batched_over_layers(transform, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers are batched. Of an exchange's kernels only two per tensor depend on how many there
    are, those that copy it into a window and its signs back; the others on the number of windows.
    """
    config = preset("demo", transform=transform)
    few, windows, tensors = kernels(config, 16)
    many, same, more = kernels(config, 64)
    assert windows == same == 2 and set(few) == set(many)
    assert (
        sum(many.values()) - sum(few.values())
        == many["copy_"] - few["copy_"] + many["sign"] - few["sign"]
        == 2 * (more - tensors)
    )
    assert sum(few.values()) - 2 * tensors <= 280
    monkeypatch.setattr(blocks, "WINDOW_GPU", 96)
    cut, windows, _ = kernels(config, 16)
    assert windows == 3 and sum(cut.values()) - sum(few.values()) <= 50


# ---- the stand-in ------------------------------------------------------------------------------


def test_device_stand_in_refuses_waits() -> None:
    """The stand-in for a GPU refuses every operation that would wait."""
    with plug_in(), Accelerator() as mode:
        a, host = torch.ones(8, device=DEVICE), torch.ones(8)
        assert isinstance(a, There) and a.device == DEVICE and (a[2:4] + 1).shape == (2,)
        reads: list[Callable[[], Any]] = [
            lambda: float(a[0]),
            lambda: bool(a.any()),
            a.nonzero,
            lambda: a[a > 0],
            lambda: a.index_put_((a > 0,), torch.ones((), device=DEVICE)),
            lambda: torch.equal(a, a),
            a.cpu,
            lambda: host.to(DEVICE),
            lambda: host.to(DEVICE, non_blocking=True),
            lambda: host.copy_(a, non_blocking=True),
            lambda: pin(host.clone()).copy_(a),
            lambda: operator.setitem(a, 0, 1.0),
        ]
        for read in reads:
            with pytest.raises(Synchronised):
                read()
        for mix in (
            lambda: a + host,
            lambda: torch.gather(a, 0, torch.zeros(1, dtype=torch.int64)),
        ):
            with pytest.raises(AssertionError, match="mixes"):
                mix()
        there = pin(host.clone()).to(DEVICE, non_blocking=True)
        a[2:4] = 5.0
        a.add_(there * torch.tensor(2.0))
        with mode.waiting():
            assert a.cpu().tolist() == [3.0, 3.0, 7.0, 7.0, 3.0, 3.0, 3.0, 3.0]
    with pytest.raises(AssertionError, match="no Accelerator"):
        a + 1
