"""Who talks to whom: the environment, the meeting of the islands, what they must agree on, islands
and mesh alike.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fsdp_demo
from fsdp_demo import PeerLost, Topology
from fsdp_demo.errors import StoreSilent
from fsdp_demo.peers.poller import Poller
from fsdp_demo.rendezvous import attempts, starting
from fsdp_demo.rendezvous import environment as variables
from fsdp_demo.rendezvous.position import ShardPosition
from fsdp_demo.rendezvous.stop_notices import Presence
from fsdp_demo.store.client import NotAllCame
from fsdp_demo.store.server import StoreServer

from ..support import probe
from ..support.cases import named
from ..support.heard import heard
from ..support.inside import in_ranks
from ..support.stores import InThread

runs = itertools.count()


def environment(store: tuple[str, int], **changes: str) -> dict[str, str]:
    """Of island 0 of two, in a run of its own."""
    return {
        "ISLAND_COUNT": "2",
        "ISLAND_RANK": "0",
        "ISLAND_RUN": f"{os.getpid()}-{next(runs)}",
        "ISLAND_TIMEOUT": "0.4",
        "ISLAND_ENDPOINT": f"{store[0]}:{store[1]}",
        "ISLAND_ADDRESS": "127.0.0.1",
        **changes,
    }


def refusal(call: Callable[[], Any], *parts: str, kind: type[Exception] = ValueError) -> str:
    """The text of an error of just this kind, or of those that only say more; it holds `parts`."""
    with pytest.raises(kind) as error:
        call()
    assert type(error.value) in (kind, attempts.Finished, starting.Unlike, NotAllCame)
    text = str(error.value)
    assert not [part for part in parts if part not in text], text
    return text


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01)


def attach(value: float = 0.0) -> fsdp_demo.Exchange:
    """An exchange of one parameter that holds this value."""
    return fsdp_demo.attach(sgd([torch.nn.Parameter(torch.full((3,), value))]), "full")


# ---- the environment ---------------------------------------------------------------------------


def test_topology_defaults() -> None:
    """A topology has its documented defaults."""
    env = {"ISLAND_COUNT": "3", "ISLAND_RANK": "2", "ISLAND_ENDPOINT": "[fd00::1]:29500"}
    t = Topology.from_env(env)
    assert (t.kind, t.island, t.islands, t.name) == ("islands", 2, 3, "island2")
    assert (t.run, t.timeout, t.address) == ("run", 600.0, "")
    assert Topology.from_env({}).kind == Topology.from_env({"ISLAND_COUNT": "1"}).kind == "single"
    assert Topology.from_env({"ISLAND_COUNT": "", "ISLAND_NAME": "paris"}).name == "paris"


# ---- meeting -----------------------------------------------------------------------------------


def join(env: dict[str, str], position: ShardPosition | None = None) -> Any:
    return Topology.from_env(env).join(position or ShardPosition())


@in_ranks(2, 1, env=lambda rank: {
    "ISLAND_COUNT": "4",
    "ISLAND_RANK": "13"[rank.island],
    "ISLAND_NAME": ["oslo", "rome"][rank.island],
    "ISLAND_TIMEOUT": "1.5",
})  # fmt: skip
def test_topology_lists_missing_and_present_islands() -> None:
    """The error of a timeout lists the missing islands and those that came."""
    start = time.monotonic()
    refusal(
        lambda: join(dict(os.environ)),
        *(f"1 (oslo on {socket.gethostname()})", "3 (rome on", "missing 0, 2"),
        *("run 'test-", "ISLAND_ENDPOINT", "ISLAND_TIMEOUT"),
        kind=PeerLost,
    )
    assert 1.4 < time.monotonic() - start < 8


def test_topology_without_a_store_says_where_to_start_one() -> None:
    """The error of an absent store has the command that starts one."""
    with socket.socket() as probe_socket:
        probe_socket.bind(("127.0.0.1", 0))
        port = probe_socket.getsockname()[1]
    start = f"fsdp-demo store --bind 127.0.0.1:{port}"
    refusal(lambda: join(environment(("127.0.0.1", port))), start, "0.4 s", kind=StoreSilent)


@in_ranks(2, 1)
def test_topology_refuses_another_layout_at_once(me) -> None:
    """Another count or layout is refused on both sides, at once."""
    start, env = time.monotonic(), dict(os.environ)
    counts = {0: "ISLAND_COUNT=3, island0 has 2", 1: "ISLAND_COUNT=2, island1 has 3"}
    refusal(lambda: join({**env, "ISLAND_COUNT": "23"[me.island]}), counts[me.island])
    position = [ShardPosition(2, 0, 1, 0), ShardPosition(1, 0, 2, 0)][me.island]
    other = {**env, "ISLAND_RUN": env["ISLAND_RUN"] + "-2"}
    layouts = "2 shards x 1 copy", "1 shard x 2 copies", "must agree"
    refusal(lambda: join(other, position), *layouts)
    assert time.monotonic() - start < 25  # ISLAND_TIMEOUT is 30 s: nobody waited for it


def test_topology_islands_start_in_any_order(run_ranks) -> None:
    """Islands start in any order, and a finished run is not started again."""
    names = ["oslo", "rome", "lima"]
    run = f"once-{os.getpid()}-{next(runs)}"

    def fn(me: Any) -> Any:
        time.sleep((0.6, 0.0, 0.3)[me.island])
        exchange = attach(float(me.island))
        out = exchange.peers.names, exchange.topology.island, exchange.digests_equal()
        exchange.finish()
        Presence(exchange.topology).end("finished")
        return out

    env = {"ISLAND_RUN": run}
    named = run_ranks(fn, 3, 1, env=lambda r: {**env, "ISLAND_NAME": names[r.island]})
    assert named == [(names, i, True) for i in range(3)]

    def again(me: Any) -> str:
        return refusal(attach)

    for i, text in enumerate(run_ranks(again, 3, 1, env=env)):
        assert f"ISLAND_RUN={run!r}" in text and f"ISLAND_RANK={i}" in text
        assert "set a new ISLAND_RUN on all islands" in text


@in_ranks(2, 1)
def test_topology_attach_twice_in_turn(me) -> None:
    """One process may attach twice, one exchange after the other, under one run."""
    for _ in range(2):
        p = torch.nn.Parameter(torch.full((3,), float(me.island)))
        optimizer = sgd([p])
        exchange = fsdp_demo.attach(optimizer, "full")
        p.grad = torch.ones(3)
        optimizer.step()
        exchange.finish()
        assert exchange.step == 1


@in_ranks(2, 1, env={"ISLAND_TIMEOUT": "1.5"})
def test_topology_attach_again_alone_is_an_error(me) -> None:
    """An island that attaches again alone, as by `find_executable_batch_size`, is told so: the
    others train on in the first exchange.
    """
    first = attach()
    if me.island == 0:
        refusal(attach, "missing 1.", "This is attach number 2 of this process", kind=PeerLost)
        return
    time.sleep(2)
    first.detach()


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as s:
            s.bind(("::1", 0))
        return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
def test_topology_endpoint_may_be_ipv6(run_ranks) -> None:
    """An endpoint may be IPv6."""
    store = InThread(StoreServer("[::1]:0", ":memory:"))
    env = {"ISLAND_ENDPOINT": store.endpoint, "ISLAND_ADDRESS": ""}
    equal = run_ranks(lambda me: attach(float(me.island)).digests_equal(), 2, 1, env=env)
    assert equal == [True, True]
    store.end()


# ---- what islands must agree on ----------------------------------------------------------------


@in_ranks(2, 1)
def test_topology_refuses_differences_with_both_values(me) -> None:
    """What differs between two islands is refused on both sides, with both values. One pair of
    processes goes through all cases, each under a run of its own.
    """
    cases: list[tuple[str, list[dict[str, Any]], list[str]]] = [
        ("preset", [{"config": "demo"}, {"config": "diloco", "inner_optimizers": "as_is"}],
            ["config.preset", "'demo'", "'diloco'"]),
        ("number", [{"config": "demo"}, {"config": "demo", "topk": 16}],
            ["config.channels.0.codec.topk", "32", "16"]),
        ("clip", [{"clip": 1.0}, {}], ["config.clip", "1.0", "None"]),
        ("pattern", [{"gradient.include": ("*", "x")}, {}],
            ["config.channels.0.include.1", "'x'", "None"]),
        ("fact", [{"must_match": {"steps": 300}}, {"must_match": {"steps": 200}}],
            ["must_match.steps", f"steps: {3 - me.island}00 here, {2 + me.island}00 there"]),
        ("lack", [{"must_match": {"seq_len": 7}}, {}], ["must_match.seq_len", "7", "None"]),
        ("shape", [{"shape": (3, 4)}, {"shape": (4, 3)}], ["[3, 4]", "[4, 3]"]),
        ("frozen", [{"frozen": True}, {}], ["frozen", "trained"]),
        ("number of tensors", [{"shape": (3,)}, {"shape": (3,), "more": True}],
            ["parameters", "2", "3"]),
    ]  # fmt: skip
    run, other = os.environ["ISLAND_RUN"], 1 - me.island
    for name, sides, parts in cases:
        os.environ["ISLAND_RUN"] = f"{run}-{name}"
        options = {"config": "full", **sides[me.island]}
        shapes = [options.pop("shape", (3, 4))] + [(2,)] * options.pop("more", False) + [(2,)]
        params = [torch.nn.Parameter(torch.zeros(s)) for s in shapes]
        params[-1].requires_grad_(not options.pop("frozen", False))
        config = options.pop("config")
        unlike = f"island {other} (island{other}) runs something else than island{me.island}"
        with named(name):
            refusal(lambda: fsdp_demo.attach(sgd(params), config, **options), unlike, *parts)  # noqa: B023


@in_ranks(2, 1)
def test_topology_refusal_is_heard_by_a_late_thread(me) -> None:
    """A late thread still hears why the other island left. The other island's facts and its "leave"
    wait together: the facts are read first.
    """
    turn = Poller._turn

    def late(self: Poller, *given: Any) -> None:
        time.sleep(0.3)
        turn(self, *given)

    if me.island == 0:
        Poller._turn = late  # type: ignore[method-assign]
    refusal(
        lambda: fsdp_demo.attach(
            sgd([torch.nn.Parameter(torch.zeros(2))]), "full", must_match={"steps": me.island}
        ),
        f"steps: {me.island} here, {1 - me.island} there",
    )


@in_ranks(procs=[2, 1])
def test_topology_refuses_unlike_shards(me) -> None:
    """An island with FSDP2 over two ranks and one of one rank are refused on all three, with both
    layouts.
    """
    model = probe.Probe()
    if me.procs == 2:
        probe.shard(model, me.mesh())
    refusal(
        lambda: fsdp_demo.attach(sgd(model.parameters()), "full", model=model),
        *("2 shards x 1 copy", "1 shard x 1 copy"),
    )


# ---- equal at the start ------------------------------------------------------------------------


class Mixed(torch.nn.Module):
    """Everything a model may hold: trained, frozen, tied, empty, buffers of several dtypes. Values
    depend on the seed.
    """

    def __init__(self, seed: int):
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        for name, shape in (("a", (65, 70)), ("b", (5,)), ("frozen", (8, 4)), ("scale", ())):
            setattr(self, name, torch.nn.Parameter(torch.randn(shape, generator=g)))
        self.tied = self.a
        self.frozen.requires_grad_(False)
        self.register_buffer("mean", torch.randn(3, generator=g))
        self.register_buffer("count", torch.randint(100, (), generator=g))
        self.register_buffer("flags", torch.rand(7, generator=g) > 0.5)
        self.register_buffer("low", torch.randn(5, generator=g).bfloat16())
        self.register_buffer("none", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.a * self.scale


def everything(model: torch.nn.Module) -> dict[str, Any]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        k: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().float().tolist()
        for k, t in tensors.items()
    }


def attached(model: torch.nn.Module) -> fsdp_demo.Exchange:
    """An exchange of what is trained of it."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return fsdp_demo.attach(sgd(trained), "demo", model=model)


@pytest.mark.parametrize("layout", ["2x1", "sharded", "copies"])
def test_topology_islands_of_unlike_seeds_start_equal(run_ranks, layout) -> None:
    """Islands with unlike seeds start with the parameters of the first one."""
    procs = {"2x1": [1, 1], "sharded": [2, 2], "copies": [1, 2]}[layout]

    def fn(me: Any) -> Any:
        model = Mixed(seed=me.island)
        if layout == "sharded":
            from torch.distributed.fsdp import fully_shard

            model.scale.data = model.scale.data.view(1)  # FSDP2 has no shards of a 0-dim parameter
            fully_shard(model, mesh=me.mesh())
        before = everything(model)
        exchange = attached(model)
        after = everything(model)
        exchange.detach()
        return before, after

    results = run_ranks(fn, procs=procs)
    donor = results[0][0]
    assert results[-1][0] != donor
    assert all(after == donor for _, after in results)


@pytest.mark.parametrize("where", ["trained", "frozen"])
def test_topology_one_shard_that_differs_is_sent(run_ranks, where) -> None:
    """The shard of one rank differs. A message is complete when all ranks of the island hold it:
    they send equally many, whatever one of them has to send.
    """

    def fn(me: Any) -> list[list[float]]:
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4, bias=False)
        model.register_parameter("one", torch.nn.Parameter(torch.zeros(1), requires_grad=False))
        fully_shard(model, mesh=me.mesh())  # of `one` rank 1 has an empty shard
        mine: Any = model.weight if where == "trained" else model.one
        if me.island == 0 and me.proc == (1 if where == "trained" else 0):
            with torch.no_grad():
                mine.to_local().add_(1.0)
        fsdp_demo.attach(sgd([model.weight]), "demo", model=model).detach()
        return [p.to_local().flatten().tolist() for p in model.parameters()]

    found = run_ranks(fn, 2, 2, timeout=60)
    assert found[:2] == found[2:]


@in_ranks(2, 1)
def test_topology_equal_parameters_are_not_sent() -> None:
    """Parameters that are equal at the start are not sent."""
    # the specification and digests; the parameters are 18 kB
    assert attached(Mixed(seed=0)).metrics()["setup_bytes"] < 5000


@in_ranks(2, 1)
def test_topology_frozen_parameters_must_be_equal_without_model(me) -> None:
    """Frozen parameters must be equal where attach has no model."""
    trained = torch.nn.Parameter(torch.full((3,), float(me.island)))
    frozen = [
        torch.nn.Parameter(torch.full((3,), value), requires_grad=False)
        for value in (float(me.island), 0.0)
    ]
    unlike, equal = (sgd([trained, f]) for f in frozen)
    refusal(lambda: fsdp_demo.attach(unlike, "full"), "frozen parameters differ", "model=")
    os.environ["ISLAND_RUN"] += "-2"
    exchange = fsdp_demo.attach(equal, "full")
    assert exchange.digests_equal() and trained.sum().item() == 0.0
    exchange.finish()


@in_ranks(2, 1)
def test_topology_refuses_a_parameter_without_channel() -> None:
    """A trained parameter that no channel covers is refused."""
    model, changes = torch.nn.Linear(3, 3), {"gradient.exclude": ("bias",)}
    refusal(
        lambda: fsdp_demo.attach(sgd(model.parameters()), "full", model=model, **changes),
        "no channel covers bias",
    )


# ---- one world: mesh and group -----------------------------------------------------------------


def play(
    me: Any, topology: Topology | None, mesh: Any = None, config: str = "demo"
) -> tuple[list[bool | None], dict[str, Any]]:
    """Five steps of the probe; the parameters at the end."""
    model = probe.Probe()
    if mesh is not None:
        probe.shard(model, mesh)
    optimizer = sgd(model.parameters())
    changes = {"period": 2, "inner_optimizers": "as_is"} if config == "diloco" else {}
    exchange = fsdp_demo.attach(optimizer, config, model=model, topology=topology, **changes)
    equal = []
    for t in range(4):
        probe.backward(model, me, t, 0, mesh is not None)
        optimizer.step()
        optimizer.zero_grad()
        equal.append(exchange.digests_equal())
    sent = exchange.metrics()["bytes_sent"]
    exchange.finish()
    return equal, {"sent": sent, **{k: v.numpy().tobytes() for k, v in probe.whole(model).items()}}


def test_topology_mesh_trains_as_islands(run_ranks, tmp_path) -> None:
    """Replicas of a mesh get the same bits as islands that meet over a store, with and without a
    token.
    """
    configs = ("demo", "diloco")

    def islands(me: Any) -> Any:
        out, run = [], os.environ["ISLAND_RUN"]
        for config in configs:
            os.environ["ISLAND_RUN"] = f"{run}-{config}"
            out.append(play(me, None, me.mesh() if me.procs > 1 else None, config))
        return out

    def world(me: Any) -> Any:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        place = dataclasses.replace(me, island=me.proc // 2, proc=me.proc % 2, procs=2)
        alone = dataclasses.replace(place, procs=1)
        store = dist.PrefixStore(f"shard{place.proc}", dist.distributed_c10d._get_default_store())

        def all_of(who: Any, topology: Callable[[], Topology], shards: Any = None) -> Any:
            return [play(who, topology(), shards, config) for config in configs]

        sharded = all_of(place, lambda: Topology.from_mesh(mesh), mesh["dp_shard"])
        grouped = all_of(alone, lambda: Topology.from_store(store, place.island, 2))
        assert all_of(alone, lambda: Topology.from_mesh(mesh["dp_replicate"])) == grouped
        return sharded, grouped

    of_islands = run_ranks(islands, 2, 2)
    token = "a secret of this test"
    store = InThread(StoreServer("127.0.0.1:0", tmp_path / "keys", token))
    env = {"ISLAND_TOKEN": token, "ISLAND_ENDPOINT": store.endpoint}
    of_single = run_ranks(islands, 2, 1, env=env)
    store.end()
    in_a_world = run_ranks(world, 1, 4, env={"ISLAND_COUNT": ""}, timeout=180)
    for rank, (sharded, grouped) in enumerate(in_a_world):
        assert sharded == of_islands[rank]
        assert grouped == of_single[rank // 2]
    assert all(
        equal == ([True] * 4 if c == 0 else [False, True] * 2)
        for r in of_islands
        for c, (equal, _) in enumerate(r)
    )


@in_ranks(1, 1, group=True, env={"ISLAND_COUNT": ""})
def test_topology_refuses_a_mesh_that_does_not_fit() -> None:
    """A mesh of three dimensions, or without the replicate dimension, is refused."""
    mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    refusal(lambda: Topology.from_mesh(mesh), "tp", "1-D or 2-D")
    flat = init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",))
    wrong = "'dp_replicate'", "dp_shard"
    refusal(lambda: Topology.from_mesh(flat, replicate="dp_replicate"), *wrong)


# ---- one replica -------------------------------------------------------------------------------


@in_ranks(1, 1, env={"ISLAND_COUNT": ""})
def test_topology_without_islands_is_one_replica() -> None:
    """Without islands nothing is sent, it is said once, and the method is the published one with R
    = 1.
    """
    variables._said.clear()  # what the parent of this fork has said
    lines, p = heard(logging.INFO), torch.nn.Parameter(torch.zeros(4))
    optimizer = sgd([p])
    exchange = fsdp_demo.attach(optimizer, "full", clip=1.0)
    for _ in range(3):
        p.grad = torch.full((4,), 3.0)
        optimizer.step()
    metrics, topology = exchange.metrics(), exchange.topology
    exchange.finish()
    assert (topology.kind, topology.islands) == ("single", 1)
    assert sum(line.startswith("one replica:") for line in lines) == 1, lines
    assert any("one replica, nothing is sent" in line and "clips" in line for line in lines)
    assert not any(metrics[k] for k in ("bytes_sent", "bytes_received", "messages", "setup_bytes"))
    whole = torch.full((4,), -3 * 0.01 * 0.5)
    torch.testing.assert_close(p.detach(), whole, rtol=1e-5, atol=0)
