"""One replica's NaN: nobody else takes anything of it, it comes back by itself, and where it does
not it stops with an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fsdp_demo
from fsdp_demo import ExchangeConfig, NotFinite, PeerLost, Topology, preset
from fsdp_demo.exchange.watch import LIMIT

from ..support import probe
from ..support.threaded import islands, values

AS_IS = {"inner_optimizers": "as_is"}
CONFIGS = {
    "full": preset("full"),
    "full clipped": preset("full", clip=1.0),
    "demo": preset("demo"),
    "demo without clip": preset("demo", clip=None),
    "demo late": preset("demo", **{"schedule.delay": 2}),
    "random": preset("random", **AS_IS),
    "diloco": preset("diloco", period=2),
    "diloco without clip": preset("diloco", period=2, clip=None),
    "diloco late": preset("diloco", period=3, **{"schedule.delay": 1, "applier.mix": 0.5}),
    "diloco queue": preset("diloco", period=2, **{"schedule.delay": 3}),
    "one norm": preset("diloco", period=2, clip_scope="islands"),
    "streaming_diloco": preset("streaming_diloco", period=4, delay=1, layers=0),
    "decoupled_momentum": preset("decoupled_momentum", period=2),
    "released": preset("decoupled_momentum", period=2, rule="released"),
    "sparse_loco": preset("sparse_loco", period=2),
    "sign_loco": preset("sign_loco", period=2, momentum_warmup=0),
    "muloco": preset("muloco", period=2, **AS_IS),
    "local_sgd": preset("local_sgd", period=2),
    "local_sgd late": preset("local_sgd", period=3, **{"schedule.delay": 1}),
    "local_adam": preset("local_adam", period=2),
    "desloc": preset("desloc", period=2),
}


class Island:
    """Two matrices and a vector; gradients are noise of island and step, but where the test puts
    something else.
    """

    def __init__(self, topology: Topology, config: ExchangeConfig):
        g = torch.Generator().manual_seed(7)
        self.me = topology.island
        self.named = [
            (n, torch.nn.Parameter(torch.randn(s, generator=g)))
            for n, s in (("a", (70, 66)), ("b", (64, 64)), ("c", (5,)))
        ]
        plain = config.inner_optimizers[0] == "sgd" or config.preset in ("random", "muloco")
        self.optimizer: Any = (
            torch.optim.SGD(self.named, lr=0.01)
            if plain
            else torch.optim.AdamW(self.named, lr=0.01)
        )
        self.exchange = fsdp_demo.attach(self.optimizer, config, topology=topology)

    def step(self, change: Callable[[list[torch.nn.Parameter]], Any] | None = None) -> None:
        params = [p for _, p in self.named]
        for k, p in enumerate(params):
            seed = 1000 * self.exchange.step + 10 * self.me + k
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))
        if change:
            change(params)
        self.optimizer.step()

    def tensors(self) -> list[torch.Tensor]:
        return [p.detach().clone() for _, p in self.named]


def one_gradient(value: float) -> Callable[[list[torch.nn.Parameter]], None]:
    def change(params: list[torch.nn.Parameter]) -> None:
        assert params[0].grad is not None
        params[0].grad[3, 5] = value

    return change


def one_parameter(params: list[torch.nn.Parameter]) -> None:
    with torch.no_grad():
        params[1][2, 2] = torch.inf


@pytest.mark.parametrize("name", CONFIGS)
def test_nan_one_gradient_element(run_ranks: Callable[..., Any], name: str) -> None:
    """One element spoils nothing. NaN in one element of one gradient of island 0, at one step: all
    goes on, everywhere, and replicas end equal.
    """

    def island(i: int, topology: Topology) -> Any:
        made = Island(topology, CONFIGS[name])
        for t in range(12):
            made.step(
                one_gradient(torch.nan if t == 4 else torch.inf) if i == 0 and t in (4, 5) else None
            )
            if t == 6:
                before = made.tensors()
        moved = [
            float((a != b).float().mean()) for a, b in zip(before, made.tensors(), strict=True)
        ]
        state = [
            v
            for kept in made.optimizer.state.values()
            for v in kept.values()
            if isinstance(v, torch.Tensor)
        ]
        counted = made.exchange.metrics()["not_finite"]
        kept = [v for c in made.exchange.channels for v in c.state().workspaces.values()]
        made.exchange.finish()
        return made.tensors(), moved, [*state, *kept], counted, made.exchange.digests_equal()

    def run() -> Any:
        config = CONFIGS[name]
        watched = config.clip is not None or config.channels[0].before_step
        for tensors, moved, kept, counted, equal in values(islands(island)):
            assert all(bool(t.isfinite().all()) for t in tensors)
            # else the inner optimizer has taken the NaN in, and only the exchange keeps it to
            # itself
            if watched:
                assert all(bool(t.isfinite().all()) for t in kept)
            assert min(moved) > (0.05 if name == "random" else 0.9)  # no block stands still
            assert counted > 0 or watched and not config.channels[0].before_step
            assert equal is not False
        return True

    if name == "diloco without clip":
        pytest.skip("its inner optimizer holds NaN from then on: see the next tests")
    assert run_ranks(run, 1, 1) == [True]


def test_nan_after_torch_clip(run_ranks: Callable[..., Any]) -> None:
    """A host that clips by itself asks to look for NaN. torch's `clip_grad_norm_` has spread one
    NaN over all gradients: the inner optimizer takes no step on them.
    """

    def spread(params: list[torch.nn.Parameter]) -> None:
        one_gradient(torch.nan)(params)
        torch.nn.utils.clip_grad_norm_(params, 1.0)

    def island(i: int, topology: Topology) -> Any:
        made = Island(topology, CONFIGS["diloco without clip"])
        made.exchange.watch_gradients()
        for t in range(12):
            made.step(spread if i == 0 and t == 4 else None)
        moments = [
            v
            for kept in made.optimizer.state.values()
            for v in kept.values()
            if isinstance(v, torch.Tensor)
        ]
        made.exchange.finish()
        return [*made.tensors(), *moments], made.exchange.digests_equal()

    def run() -> Any:
        for tensors, equal in values(islands(island)):
            assert all(bool(t.isfinite().all()) for t in tensors) and equal is not False
        return True

    assert run_ranks(run, 1, 1) == [True]


HEALED = [
    "diloco",
    "diloco late",
    "decoupled_momentum",
    "released",
    "streaming_diloco",
    "local_sgd",
    "local_sgd late",
]


@pytest.mark.parametrize("name", HEALED)
def test_nan_parameters_healed_by_others(run_ranks: Callable[..., Any], name: str) -> None:
    """Parameters that are not finite are replaced by those of the others."""
    config = CONFIGS[name]

    def island(i: int, topology: Topology) -> Any:
        made = Island(topology, config)
        for t in range(12):
            made.step(one_parameter if i == 1 and t == 4 else None)
        healed = made.tensors()
        made.exchange.finish()
        return healed, made.tensors(), made.exchange.metrics()["not_finite"]

    def run() -> Any:
        for healed, end, counted in values(islands(island)):
            assert all(bool(t.isfinite().all()) for t in (*healed, *end)) and counted > 0
        return True

    assert run_ranks(run, 1, 1) == [True]


def test_nan_island_left_out_of_mean(run_ranks: Callable[..., Any]) -> None:
    """Three islands, one of which brings NaN to the first exchange: the anchor moves by the mean of
    the other two's deltas.
    """
    config = preset("diloco", period=2, momentum=0.0, lr=1.0, clip=None, **AS_IS)

    def island(i: int, topology: Topology) -> Any:
        made = Island(topology, config)
        made.step()
        made.step(one_parameter if i == 1 else None)
        return made.tensors()

    def alone(i: int) -> list[torch.Tensor]:
        made = Island(Topology(), preset("full", **{"clip": None}))
        made.me = i
        for _ in range(2):
            made.step()
        made.exchange.detach()
        return made.tensors()

    def run() -> Any:
        found, (first, third) = values(islands(island, 3)), (alone(0), alone(2))
        for tensors in found:
            for t, a, c in zip(tensors, first, third, strict=True):
                torch.testing.assert_close(t, (a + c) / 2, rtol=1e-5, atol=1e-6)
        return True

    assert run_ranks(run, 1, 1) == [True]


@pytest.mark.parametrize("name", ["demo", "diloco"])
def test_nan_repeated_stops_island(run_ranks: Callable[..., Any], name: str) -> None:
    """An island whose values stay not finite stops with an error."""

    def island(i: int, topology: Topology) -> Any:
        made = Island(topology, CONFIGS[name])
        steps = 0
        try:
            for _ in range(3 * LIMIT):
                made.step(one_gradient(torch.nan) if i == 0 else None)
                steps += 1
        except RuntimeError as error:
            made.exchange.detach()
            return type(error), steps, all(bool(t.isfinite().all()) for t in made.tensors())
        return None, steps, False

    def run() -> Any:
        (bad, taken, finite), (other, _, whole) = values(islands(island, timeout=5))
        assert bad is NotFinite and taken == LIMIT - 1 and finite
        assert other is PeerLost and whole
        return True

    assert run_ranks(run, 1, 1) == [True]


def test_nan_parameters_on_all_islands(run_ranks: Callable[..., Any]) -> None:
    """Parameters that are finite on no island end the run with an error."""

    def island(i: int, topology: Topology) -> Any:
        made = Island(topology, CONFIGS["local_sgd"])
        with pytest.raises(NotFinite, match="no island"):
            for t in range(4):
                made.step(one_parameter if t == 1 else None)
        made.exchange.detach()
        return True

    assert run_ranks(lambda: values(islands(island)), 1, 1) == [[True, True]]


@pytest.mark.parametrize("name", ["demo", "full", "diloco", "decoupled_momentum"])
@pytest.mark.parametrize("what", ["gradient", "parameter"])
def test_nan_one_shard_leaves_out_island(
    run_ranks: Callable[..., Any], name: str, what: str
) -> None:
    """2 x 2 FSDP2 ranks; one rank of one island brings NaN: both lines leave the island out."""
    config = {
        "demo": preset("demo"),
        "full": preset("full"),
        "diloco": preset("diloco", period=2, **AS_IS),
        "decoupled_momentum": preset("decoupled_momentum", period=2, **AS_IS),
    }[name]
    if what == "parameter" and config.channels[0].before_step:
        pytest.skip("gradient presets send no parameters")

    def run(me: Any) -> Any:
        model = probe.Probe()
        probe.shard(model, me.mesh())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        exchange = fsdp_demo.attach(optimizer, config, model=model)
        for t in range(6):
            probe.backward(model, me, t, 0, True)
            if me.island == 1 and me.proc == 1 and t == 3:
                spoiled = model.layer.weight.grad if what == "gradient" else model.layer.weight
                spoiled.detach().to_local()[0, 0] = torch.nan
            optimizer.step()
            optimizer.zero_grad()
        exchange.finish()
        finite = all(bool(p.isfinite().all()) for p in probe.parts(model).values())
        return finite, exchange.digests_equal(), exchange.metrics()["not_finite"]

    outs = run_ranks(run, 2, 2)
    expected = 1 if config.channels[0].before_step or what == "parameter" else 0
    assert outs == [(True, True, expected)] * 4
