"""One replica's NaN: nobody else takes anything of it, it comes back by itself, and where it does
not it stops with an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fsdp_demo import ExchangeConfig, NotFinite, PeerLost, Topology, preset
from fsdp_demo.exchange.watch import LIMIT

from ..support import probe
from ..support.inside import in_ranks, in_threads
from ..support.small import Noise, finite
from ..support.threaded import islands, values
from ..support.two_layers import sgd

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


def made_of(topology: Topology, config: ExchangeConfig) -> Noise:
    """With the inner optimizer that the configuration asks for."""
    plain = config.inner_optimizers[0] == "sgd" or config.preset in ("random", "muloco")
    return Noise(topology, config, adamw=not plain)


def one_gradient(value: float) -> Callable[[list[torch.nn.Parameter]], None]:
    def change(params: list[torch.nn.Parameter]) -> None:
        params[0].grad[3, 5] = value  # type: ignore[index]

    return change


def one_parameter(params: list[torch.nn.Parameter]) -> None:
    with torch.no_grad():
        params[1][2, 2] = torch.inf


# the inner optimizer of "diloco without clip" holds NaN from then on: see the next test
@pytest.mark.parametrize("name", [n for n in CONFIGS if n != "diloco without clip"])
@in_threads()
def test_nan_one_gradient_element(island: int, topology: Topology, name: str) -> None:
    """One element spoils nothing. NaN in one element of one gradient of island 0, at one step: all
    goes on, everywhere, and replicas end equal.
    """
    config, spoil = CONFIGS[name], {4: torch.nan, 5: torch.inf} if island == 0 else {}
    made = made_of(topology, config)
    for t in range(12):
        made.step(one_gradient(spoil[t]) if t in spoil else None)
        if t == 6:
            before = made.tensors()
    moved = [float((a != b).float().mean()) for a, b in zip(before, made.tensors(), strict=True)]
    counted = made.exchange.metrics()["not_finite"]
    kept = [v for c in made.exchange.channels for v in c.state().workspaces.values()]
    made.exchange.finish()
    watched = config.clip is not None or config.channels[0].before_step
    assert finite(made.tensors())
    # else the inner optimizer has taken the NaN in, and only the exchange keeps it to itself
    assert not watched or finite([*made.states(), *kept])
    assert min(moved) > (0.05 if name == "random" else 0.9)  # no block stands still
    assert counted > 0 or watched and not config.channels[0].before_step
    assert made.exchange.digests_equal() is not False


@in_threads()
def test_nan_after_torch_clip(island: int, topology: Topology) -> None:
    """A host that clips by itself asks to look for NaN. torch's `clip_grad_norm_` has spread one
    NaN over all gradients: the inner optimizer takes no step on them.
    """

    def spread(params: list[torch.nn.Parameter]) -> None:
        one_gradient(torch.nan)(params)
        torch.nn.utils.clip_grad_norm_(params, 1.0)

    made = made_of(topology, CONFIGS["diloco without clip"])
    made.exchange.watch_gradients()
    for t in range(12):
        made.step(spread if island == 0 and t == 4 else None)
    moments = made.states()
    made.exchange.finish()
    assert finite([*made.tensors(), *moments]) and made.exchange.digests_equal() is not False


HEALED = [
    "diloco", "diloco late", "decoupled_momentum", "released", "streaming_diloco", "local_sgd",
    "local_sgd late",
]  # fmt: skip


@pytest.mark.parametrize("name", HEALED)
@in_threads()
def test_nan_parameters_healed_by_others(island: int, topology: Topology, name: str) -> None:
    """Parameters that are not finite are replaced by those of the others."""
    made = made_of(topology, CONFIGS[name])
    for t in range(12):
        made.step(one_parameter if island == 1 and t == 4 else None)
    assert finite(made.tensors())
    made.exchange.finish()
    assert finite(made.tensors()) and made.exchange.metrics()["not_finite"] > 0


@in_ranks(1, 1)
def test_nan_island_left_out_of_mean() -> None:
    """Three islands, one of which brings NaN to the first exchange: the anchor moves by the mean of
    the other two's deltas.
    """
    config = preset("diloco", period=2, momentum=0.0, lr=1.0, clip=None, **AS_IS)

    def island(i: int, topology: Topology) -> Any:
        made = made_of(topology, config)
        made.step()
        made.step(one_parameter if i == 1 else None)
        return made.tensors()

    def alone(i: int) -> list[torch.Tensor]:
        made = made_of(Topology(), preset("full", **{"clip": None}))
        made.island = i
        for _ in range(2):
            made.step()
        made.exchange.detach()
        return made.tensors()

    found, (first, third) = values(islands(island, 3)), (alone(0), alone(2))
    for tensors in found:
        for t, a, c in zip(tensors, first, third, strict=True):
            torch.testing.assert_close(t, (a + c) / 2, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["demo", "diloco"])
@in_threads(timeout=5)
def test_nan_repeated_stops_island(island: int, topology: Topology, name: str) -> None:
    """An island whose values stay not finite stops with an error."""
    made, steps = made_of(topology, CONFIGS[name]), 0
    with pytest.raises(PeerLost if island else NotFinite):
        for _ in range(3 * LIMIT):
            made.step(None if island else one_gradient(torch.nan))
            steps += 1
    made.exchange.detach()
    assert finite(made.tensors()) and (island or steps == LIMIT - 1)


@in_threads()
def test_nan_parameters_on_all_islands(topology: Topology) -> None:
    """Parameters that are finite on no island end the run with an error."""
    made = made_of(topology, CONFIGS["local_sgd"])
    with pytest.raises(NotFinite, match="no island"):
        for t in range(4):
            made.step(one_parameter if t == 1 else None)
    made.exchange.detach()


@pytest.mark.parametrize(("what", "name"), [  # gradient presets send no parameters
    ("gradient", "demo"), ("gradient", "full"), ("gradient", "diloco"), ("parameter", "diloco"),
    ("gradient", "decoupled_momentum"), ("parameter", "decoupled_momentum"),
])  # fmt: skip
@in_ranks()
def test_nan_one_shard_leaves_out_island(me: Any, what: str, name: str) -> None:
    """2 x 2 FSDP2 ranks; one rank of one island brings NaN: both lines leave the island out."""
    config = preset(name, **({} if name in ("demo", "full") else {"period": 2, **AS_IS}))
    job = probe.Job(me, config, sgd)
    for t in range(6):
        job.backward(t)
        if me.island == 1 and me.proc == 1 and t == 3:
            weight = job.model.layer.weight
            spoiled = weight.grad if what == "gradient" else weight
            spoiled.detach().to_local()[0, 0] = torch.nan
        job.end_step()
    job.exchange.finish()
    assert finite(probe.parts(job.model).values()) and job.exchange.digests_equal()
    expected = 1 if config.channels[0].before_step or what == "parameter" else 0
    assert job.exchange.metrics()["not_finite"] == expected
