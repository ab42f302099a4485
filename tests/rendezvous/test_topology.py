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
from ..support.stores import InThread

runs = itertools.count()


def environment(store: tuple[str, int], **changes: str) -> dict[str, str]:
    fresh = {
        "ISLAND_COUNT": "2",
        "ISLAND_RANK": "0",
        "ISLAND_RUN": f"{os.getpid()}-{next(runs)}",
        "ISLAND_TIMEOUT": "0.4",
    }
    return {
        **fresh,
        "ISLAND_ENDPOINT": f"{store[0]}:{store[1]}",
        "ISLAND_ADDRESS": "127.0.0.1",
        **changes,
    }


def refusal(call: Callable[[], Any], kind: type[Exception] = ValueError) -> str:
    with pytest.raises(kind) as error:
        call()
    assert type(error.value) in (kind, attempts.Finished, starting.Unlike, NotAllCame)
    return str(error.value)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01)


# ---- the environment ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("ISLAND_RANK", "2", "ISLAND_RANK=2 with ISLAND_COUNT=2"),
        ("ISLAND_RANK", "-1", "ISLAND_RANK=-1"),
        ("ISLAND_RANK", "first", "'first' must be a whole number"),
        ("ISLAND_RANK", "0.5", "'0.5' must be a whole number"),
        ("ISLAND_COUNT", "0", "ISLAND_COUNT=0"),
        ("ISLAND_COUNT", "nan", "ISLAND_COUNT='nan'"),
        ("ISLAND_COUNT", "inf", "ISLAND_COUNT='inf'"),
        ("ISLAND_COUNT", "2.5", "ISLAND_COUNT='2.5' must be a whole number"),
        ("ISLAND_TIMEOUT", "0", "ISLAND_TIMEOUT='0' must be a number of seconds, more than 0"),
        ("ISLAND_TIMEOUT", "-3", "ISLAND_TIMEOUT='-3'"),
        ("ISLAND_TIMEOUT", "nan", "ISLAND_TIMEOUT='nan'"),
        ("ISLAND_TIMEOUT", "inf", "ISLAND_TIMEOUT='inf'"),
        ("ISLAND_TIMEOUT", "1e300", "ISLAND_TIMEOUT='1e300'"),
        ("ISLAND_TIMEOUT", "long", "ISLAND_TIMEOUT='long'"),
        (
            "ISLAND_ENDPOINT",
            "",
            "ISLAND_ENDPOINT is not set, but ISLAND_COUNT=2: it must be host:port",
        ),
        ("ISLAND_ENDPOINT", "host", "ISLAND_ENDPOINT='host'"),
        ("ISLAND_ENDPOINT", ":29500", "ISLAND_ENDPOINT=':29500'"),
        ("ISLAND_ENDPOINT", "host:", "ISLAND_ENDPOINT='host:'"),
        ("ISLAND_ENDPOINT", "host:http", "ISLAND_ENDPOINT='host:http'"),
        ("ISLAND_ENDPOINT", "host:99999", "ISLAND_ENDPOINT='host:99999'"),
        ("ISLAND_ENDPOINT", "host:0", "ISLAND_ENDPOINT='host:0'"),
        ("ISLAND_ENDPOINT", "::1:29500", "ISLAND_ENDPOINT='::1:29500'"),
    ],
)
def test_topology_names_a_wrong_variable(name: str, text: str, says: str) -> None:
    """A variable with a wrong value is named by the error."""
    assert says in refusal(lambda: Topology.from_env(environment(("host", 1), **{name: text})))


def test_topology_defaults() -> None:
    """A topology has its documented defaults."""
    t = Topology.from_env(
        {"ISLAND_COUNT": "3", "ISLAND_RANK": "2", "ISLAND_ENDPOINT": "[fd00::1]:29500"}
    )
    assert (t.kind, t.island, t.islands, t.name, t.run, t.timeout, t.address) == (
        "islands",
        2,
        3,
        "island2",
        "run",
        600.0,
        "",
    )
    assert Topology.from_env({}).kind == Topology.from_env({"ISLAND_COUNT": "1"}).kind == "single"
    assert Topology.from_env({"ISLAND_COUNT": "", "ISLAND_NAME": "paris"}).name == "paris"


def test_topology_refuses_an_island_without_a_count() -> None:
    """ISLAND_RANK without ISLAND_COUNT is refused."""
    assert "ISLAND_COUNT=1" in refusal(lambda: Topology.from_env({"ISLAND_RANK": "1"}))


# ---- meeting -----------------------------------------------------------------------------------


def join(env: dict[str, str], position: ShardPosition | None = None) -> Any:
    return Topology.from_env(env).join(position or ShardPosition())


def test_topology_lists_missing_and_present_islands(run_ranks) -> None:
    """The error of a timeout lists the missing islands and those that came."""
    names = ["oslo", "rome"]  # islands 1 and 3 of 4

    def fn(me: Any) -> tuple[str, float]:
        start = time.monotonic()
        text = refusal(lambda: join(dict(os.environ)), PeerLost)
        return text, time.monotonic() - start

    def env(rank: Any) -> dict[str, str]:
        return {
            "ISLAND_COUNT": "4",
            "ISLAND_RANK": "13"[rank.island],
            "ISLAND_NAME": names[rank.island],
            "ISLAND_TIMEOUT": "1.5",
        }

    for text, seconds in run_ranks(fn, 2, 1, env=env):
        assert (
            f"1 (oslo on {socket.gethostname()})" in text
            and "3 (rome on" in text
            and "missing 0, 2" in text
        ), text
        assert "run 'test-" in text and "ISLAND_ENDPOINT" in text and "ISLAND_TIMEOUT" in text
        assert 1.4 < seconds < 8


def test_topology_without_a_store_says_where_to_start_one() -> None:
    """The error of an absent store has the command that starts one."""
    with socket.socket() as probe_socket:
        probe_socket.bind(("127.0.0.1", 0))
        port = probe_socket.getsockname()[1]
    text = refusal(lambda: join(environment(("127.0.0.1", port))), StoreSilent)
    assert f"fsdp-demo store --bind 127.0.0.1:{port}" in text and "0.4 s" in text


def test_topology_refuses_another_layout_at_once(run_ranks) -> None:
    """Another count or layout is refused on both sides, at once."""
    positions = [ShardPosition(2, 0, 1, 0), ShardPosition(1, 0, 2, 0)]

    def fn(me: Any) -> tuple[str, str]:
        env = {**os.environ, "ISLAND_COUNT": "23"[me.island]}
        count = refusal(lambda: join(env))
        return count, refusal(
            lambda: join(
                {**os.environ, "ISLAND_RUN": os.environ["ISLAND_RUN"] + "-2"}, positions[me.island]
            )
        )

    start = time.monotonic()
    counts, shards = zip(*run_ranks(fn, 2, 1, timeout=60), strict=True)
    assert time.monotonic() - start < 25  # ISLAND_TIMEOUT is 30 s: nobody waited for it
    assert "ISLAND_COUNT=3, island0 has 2" in counts[0]
    assert "ISLAND_COUNT=2, island1 has 3" in counts[1]
    for text in shards:
        assert "2 shards x 1 copy" in text and "1 shard x 2 copies" in text and "must agree" in text


def test_topology_islands_start_in_any_order(run_ranks) -> None:
    """Islands start in any order, and a finished run is not started again."""
    names = ["oslo", "rome", "lima"]
    run = f"once-{os.getpid()}-{next(runs)}"

    def fn(me: Any) -> Any:
        time.sleep((0.6, 0.0, 0.3)[me.island])
        exchange = fsdp_demo.attach(
            sgd([torch.nn.Parameter(torch.full((3,), float(me.island)))]), "full"
        )
        out = exchange.peers.names, exchange.topology.island, exchange.digests_equal()
        exchange.finish()
        Presence(exchange.topology).end("finished")
        return out

    env = {"ISLAND_RUN": run}
    named = run_ranks(fn, 3, 1, env=lambda r: {**env, "ISLAND_NAME": names[r.island]})
    assert named == [(names, i, True) for i in range(3)]

    def again(me: Any) -> str:
        return refusal(lambda: fsdp_demo.attach(sgd([torch.nn.Parameter(torch.zeros(3))]), "full"))

    for i, text in enumerate(run_ranks(again, 3, 1, env=env)):
        assert f"ISLAND_RUN={run!r}" in text and f"ISLAND_RANK={i}" in text
        assert "set a new ISLAND_RUN on all islands" in text


def test_topology_attach_twice_in_turn(run_ranks) -> None:
    """One process may attach twice, one exchange after the other, under one run."""

    def fn(me: Any) -> list[int]:
        steps = []
        for _ in range(2):
            p = torch.nn.Parameter(torch.full((3,), float(me.island)))
            optimizer = sgd([p])
            exchange = fsdp_demo.attach(optimizer, "full")
            p.grad = torch.ones(3)
            optimizer.step()
            exchange.finish()
            steps.append(exchange.step)
        return steps

    assert run_ranks(fn, 2, 1) == [[1, 1]] * 2


def test_topology_attach_again_alone_is_an_error(run_ranks) -> None:
    """An island that attaches again alone, as by `find_executable_batch_size`, is told so: the
    others train on in the first exchange.
    """

    def fn(me: Any) -> str:
        optimizer = sgd([torch.nn.Parameter(torch.zeros(3))])
        first = fsdp_demo.attach(optimizer, "full")
        if me.island == 0:
            other = sgd([torch.nn.Parameter(torch.zeros(3))])
            return refusal(lambda: fsdp_demo.attach(other, "full"), PeerLost)
        time.sleep(2)
        first.detach()
        return ""

    text, _ = run_ranks(fn, 2, 1, env={"ISLAND_TIMEOUT": "1.5"})
    assert "missing 1." in text and "This is attach number 2 of this process" in text, text


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

    def fn(me: Any) -> bool | None:
        exchange = fsdp_demo.attach(
            sgd([torch.nn.Parameter(torch.full((3,), float(me.island)))]), "full"
        )
        return exchange.digests_equal()

    env = {"ISLAND_ENDPOINT": store.endpoint, "ISLAND_ADDRESS": ""}
    assert run_ranks(fn, 2, 1, env=env) == [True, True]
    store.end()


# ---- what islands must agree on ----------------------------------------------------------------


def test_topology_refuses_differences_with_both_values(run_ranks) -> None:
    """What differs between two islands is refused on both sides, with both values. One pair of
    processes goes through all cases, each under a run of its own.
    """
    cases: list[tuple[str, list[dict[str, Any]], list[str]]] = [
        (
            "preset",
            [{"config": "demo"}, {"config": "diloco", "inner_optimizers": "as_is"}],
            ["config.preset", "'demo'", "'diloco'"],
        ),
        (
            "number",
            [{"config": "demo"}, {"config": "demo", "topk": 16}],
            ["config.channels.0.codec.topk", "32", "16"],
        ),
        (
            "clip",
            [{"config": "full", "clip": 1.0}, {"config": "full"}],
            ["config.clip", "1.0", "None"],
        ),
        (
            "pattern",
            [{"gradient.include": ("*", "x")}, {}],
            ["config.channels.0.include.1", "'x'", "None"],
        ),
        (
            "fact",
            [{"must_match": {"steps": 300}}, {"must_match": {"steps": 200}}],
            ["must_match.steps", "300", "200"],
        ),
        ("lack", [{"must_match": {"seq_len": 7}}, {}], ["must_match.seq_len", "7", "None"]),
        ("shape", [{"shape": (3, 4)}, {"shape": (4, 3)}], ["[3, 4]", "[4, 3]"]),
        ("frozen", [{"frozen": True}, {}], ["frozen", "trained"]),
        (
            "number of tensors",
            [{"shape": (3,)}, {"shape": (3,), "more": True}],
            ["parameters", "2", "3"],
        ),
    ]

    def fn(me: Any) -> list[str]:
        texts = []
        for name, sides, _ in cases:
            os.environ["ISLAND_RUN"] = f"{run}-{name}"
            options = {"config": "full", **sides[me.island]}
            shapes = [options.pop("shape", (3, 4))] + [(2,)] * options.pop("more", False)
            params = [torch.nn.Parameter(torch.zeros(s)) for s in shapes] + [
                torch.nn.Parameter(torch.zeros(2))
            ]
            params[-1].requires_grad_(not options.pop("frozen", False))
            texts.append(
                refusal(
                    lambda params=params, options=options: fsdp_demo.attach(
                        sgd(params), options.pop("config"), **options
                    )
                )
            )
        return texts

    run = f"agree-{os.getpid()}-{next(runs)}"
    found = run_ranks(fn, 2, 1)
    for side, other in ((0, 1), (1, 0)):
        for text, (name, _, parts) in zip(found[side], cases, strict=True):
            assert (
                f"island {other} (island{other}) runs something else than island{side}" in text
            ), (name, text)
            for part in parts:
                assert part in text, (name, part, text)
        assert "steps: 300 here, 200 there" in found[0][4]
        assert "steps: 200 here, 300 there" in found[1][4]


def test_topology_refusal_is_heard_by_a_late_thread(run_ranks) -> None:
    """A late thread still hears why the other island left. The other island's facts and its "leave"
    wait together: the facts are read first.
    """
    run = f"late-{os.getpid()}-{next(runs)}"

    def fn(me: Any) -> str:
        os.environ["ISLAND_RUN"] = run
        turn = Poller._turn

        def late(self: Poller, *given: Any) -> None:
            time.sleep(0.3)
            turn(self, *given)

        if me.island == 0:
            Poller._turn = late  # type: ignore[method-assign]
        params = [torch.nn.Parameter(torch.zeros(2))]
        return refusal(
            lambda: fsdp_demo.attach(sgd(params), "full", must_match={"steps": me.island})
        )

    for side, text in enumerate(run_ranks(fn, 2, 1)):
        assert f"steps: {side} here, {1 - side} there" in text, text


def test_topology_refuses_unlike_shards(run_ranks) -> None:
    """An island with FSDP2 over two ranks and one of one rank are refused on all three, with both
    layouts.
    """

    def fn(me: Any) -> str:
        model = probe.Probe()
        if me.procs == 2:
            probe.shard(model, me.mesh())
        return refusal(lambda: fsdp_demo.attach(sgd(model.parameters()), "full", model=model))

    for text in run_ranks(fn, procs=[2, 1]):
        assert "2 shards x 1 copy" in text and "1 shard x 1 copy" in text


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


@pytest.mark.parametrize("layout", ["2x1", "sharded", "copies"])
def test_topology_islands_of_unlike_seeds_start_equal(run_ranks, layout) -> None:
    """Islands with unlike seeds start with the parameters of the first one."""
    procs = {"2x1": [1, 1], "sharded": [2, 2], "copies": [1, 2]}[layout]

    def fn(me: Any) -> Any:
        model = Mixed(seed=me.island)
        if layout == "sharded":
            from torch.distributed.fsdp import fully_shard

            for p in (model.scale,):  # FSDP2 has no shards of a 0-dim parameter
                p.data = p.data.view(1)
            fully_shard(model, mesh=me.mesh())
        before = everything(model)
        exchange = fsdp_demo.attach(
            sgd([p for p in model.parameters() if p.requires_grad]), "demo", model=model
        )
        after, setup = everything(model), exchange.metrics()["setup_bytes"]
        exchange.detach()
        return before, after, setup

    results = run_ranks(fn, procs=procs)
    donor = results[0][0]
    assert results[-1][0] != donor
    assert all(after == donor for _, after, _ in results)


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


def test_topology_equal_parameters_are_not_sent(run_ranks) -> None:
    """Parameters that are equal at the start are not sent."""

    def fn(me: Any) -> int:
        model = Mixed(seed=0)
        return fsdp_demo.attach(
            sgd([p for p in model.parameters() if p.requires_grad]), "demo", model=model
        ).metrics()["setup_bytes"]

    # the specification and digests; the parameters are 18 kB
    assert all(n < 5000 for n in run_ranks(fn, 2, 1))


def test_topology_frozen_parameters_must_be_equal_without_model(run_ranks) -> None:
    """Frozen parameters must be equal where attach has no model."""

    def fn(me: Any) -> list[str]:
        texts = []
        for differ in (True, False):
            os.environ["ISLAND_RUN"] = f"{run}-{differ}"
            trained = torch.nn.Parameter(torch.full((3,), float(me.island)))
            frozen = torch.nn.Parameter(
                torch.full((3,), float(differ * me.island)), requires_grad=False
            )
            optimizer = sgd([trained, frozen])
            if differ:
                texts.append(
                    refusal(lambda optimizer=optimizer: fsdp_demo.attach(optimizer, "full"))
                )
            else:
                exchange = fsdp_demo.attach(optimizer, "full")
                texts.append(f"{exchange.digests_equal()} {trained.sum().item()}")
                exchange.finish()
        return texts

    run = f"frozen-{os.getpid()}-{next(runs)}"
    for refused, equal in run_ranks(fn, 2, 1):
        assert "frozen parameters differ" in refused and "model=" in refused
        assert equal == "True 0.0"


def test_topology_refuses_a_parameter_without_channel(run_ranks) -> None:
    """A trained parameter that no channel covers is refused."""

    def fn(me: Any) -> str:
        model = torch.nn.Linear(3, 3)
        return refusal(
            lambda: fsdp_demo.attach(
                sgd(model.parameters()), "full", model=model, **{"gradient.exclude": ("bias",)}
            )
        )

    assert all("no channel covers bias" in text for text in run_ranks(fn, 2, 1))


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
        out = []
        for config in configs:
            os.environ["ISLAND_RUN"] = f"{run}-{me.procs}-{config}"
            out.append(play(me, None, me.mesh() if me.procs > 1 else None, config))
        return out

    def world(me: Any) -> Any:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        place = dataclasses.replace(me, island=me.proc // 2, proc=me.proc % 2, procs=2)
        sharded = [
            play(place, Topology.from_mesh(mesh), mesh["dp_shard"], config) for config in configs
        ]
        alone = dataclasses.replace(place, procs=1)
        store = dist.PrefixStore(f"shard{place.proc}", dist.distributed_c10d._get_default_store())
        grouped = [
            play(alone, Topology.from_store(store, place.island, 2), None, config)
            for config in configs
        ]
        assert [
            play(alone, Topology.from_mesh(mesh["dp_replicate"]), None, config)
            for config in configs
        ] == grouped
        return sharded, grouped

    run = f"mesh-{os.getpid()}-{next(runs)}"
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


def test_topology_refuses_a_mesh_that_does_not_fit(run_ranks) -> None:
    """A mesh of three dimensions, or without the replicate dimension, is refused."""

    def fn(me: Any) -> list[str]:
        mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
        flat = init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",))
        return [
            refusal(lambda: Topology.from_mesh(mesh)),
            refusal(lambda: Topology.from_mesh(flat, replicate="dp_replicate")),
        ]

    ((three, wrong),) = run_ranks(fn, 1, 1, group=True, env={"ISLAND_COUNT": ""})
    assert "tp" in three and "1-D or 2-D" in three
    assert "'dp_replicate'" in wrong and "dp_shard" in wrong


# ---- one replica -------------------------------------------------------------------------------


def test_topology_without_islands_is_one_replica(run_ranks) -> None:
    """Without islands nothing is sent, it is said once, and the method is the published one with R
    = 1.
    """

    class Kept(logging.Handler):
        def __init__(self) -> None:
            super().__init__()
            self.lines: list[str] = []

        def emit(self, record: logging.LogRecord) -> None:
            self.lines.append(record.getMessage())

    def fn(me: Any) -> Any:
        variables._said.clear()  # what the parent of this fork has said
        kept, logger = Kept(), logging.getLogger("fsdp_demo")
        logger.addHandler(kept)
        logger.setLevel(logging.INFO)
        p = torch.nn.Parameter(torch.zeros(4))
        optimizer = sgd([p])
        exchange = fsdp_demo.attach(optimizer, "full", clip=1.0)
        for _ in range(3):
            p.grad = torch.full((4,), 3.0)
            optimizer.step()
        metrics, topology = exchange.metrics(), exchange.topology
        exchange.finish()
        return kept.lines, p.tolist(), metrics, (topology.kind, topology.islands)

    ((lines, p, metrics, topology),) = run_ranks(fn, 1, 1, env={"ISLAND_COUNT": ""})
    assert (
        topology == ("single", 1) and sum(line.startswith("one replica:") for line in lines) == 1
    ), lines
    assert any("one replica, nothing is sent" in line and "clips" in line for line in lines)
    assert (
        metrics["bytes_sent"]
        == metrics["bytes_received"]
        == metrics["messages"]
        == metrics["setup_bytes"]
        == 0
    )
    torch.testing.assert_close(
        torch.tensor(p), torch.full((4,), -3 * 0.01 * 0.5), rtol=1e-5, atol=0
    )
