"""Properties of the exchange that need no trajectory: identities, layouts, bytes, messages, clocks,
and what can go wrong.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fsdp_demo
from fsdp_demo import Channel, ExchangeConfig, SyncSchedule, preset
from fsdp_demo.checkpoint import load_exchange, save_exchange

from ..channels.test_presets_oracle import (
    adamw,
    coding,
    demo,
    follow,
    low_rank,
    sgd,
    start,
    worst_of,
)
from ..oracles import presets as oracle
from ..support import probe
from ..support.inside import in_ranks
from ..support.small import same as bit_equal
from ..support.two_layers import train

ALIGNED = ["aligned.weight"]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[n], b[n]) for n in a)


def difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max(float((a[n] - b[n]).abs().max()) for n in a)


def diloco(**more: Any) -> ExchangeConfig:
    return preset("diloco", **{"momentum_warmup": 0, "period": 2, "clip": None, **more})


def decoupled(**more: Any) -> ExchangeConfig:
    return preset("decoupled_momentum", **{"transform": True, "period": 2, "clip": None, **more})


CONFIGS = {
    "full": preset("full"), "demo": demo(), "diloco": diloco(),
    "released": decoupled(rule="released", value_dtype="fp32"),
    "desloc-rank": preset("desloc", rank=16, embeddings=True, period=2, clip=None,
        states={"exp_avg": 1, "exp_avg_sq": 2}),
}  # fmt: skip
RELEASED = decoupled(rule="released")


def inner_of(name: str) -> Any:
    return {"demo": sgd, "desloc-rank": low_rank}.get(name, adamw)


def method_of(name: str, inner: Any = None, islands: int = 2, **options: Any) -> Any:
    """The oracle of a configuration of `CONFIGS`."""
    kind, given = {
        "full": (oracle.Full, {}),
        "demo": (oracle.Demo, {"coding": coding()}),
        "diloco": (oracle.DiLoCo, {"period": 2}),
        "released": (
            oracle.DecoupledMomentum,
            {"rule": "released", "period": 2, "coding": coding(senders=False)},
        ),
        "desloc-rank": (
            oracle.LowRank,
            {"period": 2, "rank": 16, "states": {"exp_avg": 2, "exp_avg_sq": 4}},
        ),
    }[name]
    return kind(start(6), islands, inner or inner_of(name), **given, **options)


def off(params: Any, island: int, truth: Any, method: Any) -> float:
    """How far an island's parameters are from the oracle's, at worst."""
    return worst_of(params, island, truth, getattr(method, "smallest", None))


# -- identities ----------------------------------------------------------------------------------


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 5, bias=False), nn.LayerNorm(5))


def batch(t: int, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(t)
    x, y = (torch.randn(16, n, generator=generator) for n in (7, 5))
    return x[rows], y[rows]


def error(model: nn.Module, t: int, rows: slice) -> torch.Tensor:
    x, y = batch(t, rows)
    return (model(x) - y).square().mean()


@pytest.mark.parametrize("clip", [None, 0.5])
def test_full_equals_large_batch(run_ranks, clip):
    """The preset `full` is training on one large batch. 2 x 2 processes with 4 rows each, FSDP2
    inside: AdamW on the batch of 16 rows of one process, the clip after the mean.
    """

    def run(me):
        model, rows = mlp(), slice(4 * me.rank, 4 * me.rank + 4)
        fully_shard(model, mesh=me.mesh())
        optimizer = adamw(model.parameters())
        exchange = fsdp_demo.attach(optimizer, "full", model=model, clip=clip)
        train(optimizer, lambda t: error(model, t, rows), 20)
        exchange.finish()
        return exchange.digests_equal(), exchange.clips, probe.whole(model)

    model, clipped = mlp(), 0
    optimizer = adamw(model.parameters())
    for t in range(20):
        optimizer.zero_grad()
        error(model, t, slice(None)).backward()
        if clip is not None:
            clipped += int(nn.utils.clip_grad_norm_(model.parameters(), clip) > clip)
        optimizer.step()
    assert clip is None or clipped > 5
    for equal, clips, params in run_ranks(run):
        assert equal and ("mean" in clips) == (clip is not None)
        assert difference(params, {n: p.detach() for n, p in model.named_parameters()}) < 2e-5


# -- shards --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["full", "diloco"])
def test_sharding_elementwise_presets_equal(run_ranks, name):
    """Element-wise presets do not depend on the sharding. Bit-equal for one process, two with FSDP2
    and two without, on every kind of parameter.
    """
    config = diloco(period=5) if name == "diloco" else preset("full")

    def run(me):
        ways = [True, False] if me.procs == 2 else [True]
        return [probe.train(me, config, adamw, 10, sharded)["params"] for sharded in ways]

    (one, *_), (two, *_) = run_ranks(run, 2, 1), run_ranks(run, 2, 2)
    for other in two:
        assert all(same(a, b) for a, b in zip(one[0], other, strict=True))


@pytest.mark.parametrize("config", [
    preset("demo", **probe.PLAIN_EMBEDDINGS, clip=None), decoupled(), RELEASED,
], ids=["demo", "consensus", "released"])  # fmt: skip
def test_sharding_dct_presets_block_edges(run_ranks, config):
    """DCT presets do not depend on shards whose edges are edges of blocks. 128 x 128 in two shards
    of 64 x 128: the same bits as unsharded, with int8 values.
    """

    def run(me):
        return probe.train(me, config, inner_of(config.preset), 8, names=ALIGNED)["params"]

    one, two = run_ranks(run, 2, 1), run_ranks(run, 2, 2)
    assert all(same(a, b) for a, b in zip(one[0], two[0], strict=True))
    assert all(same(a, b) for a, b in zip(one[1], two[2], strict=True))


def mesh_of_islands(me, names=("dp_replicate", "dp_shard")):
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


@pytest.mark.parametrize("name", ["demo", "desloc-rank"])
def test_hsdp_inside_one_island(run_ranks, name):
    """Two shards in two copies each: the active copies of a shard complete each other inside the
    island (R = 1 here), and projections are made of each shard once.
    """

    def run(me):
        mesh = mesh_of_islands(me, ("copy", "shard"))
        job = probe.Job(me, CONFIGS[name], inner_of(name), 6, mesh=mesh)
        params = []
        for t in range(6):
            job.model(probe.gradient(6, t, 0, me.proc % 2)).backward()
            job.end_step()
            params.append(job.whole())
        position = job.exchange.channels[0].position
        job.exchange.finish()
        return params, (position.num_shards, position.shard, position.num_copies, position.copy)

    method = method_of(name, islands=1, shards=2)
    truth = follow(method, 6, 6)
    results = run_ranks(run, 1, 4)
    assert [at for _, at in results] == [(2, 0, 2, 0), (2, 1, 2, 0), (2, 0, 2, 1), (2, 1, 2, 1)]
    for params, _ in results:
        assert off(params, 0, truth, method) < 1e-5


@pytest.mark.parametrize("procs", [[1, 2], [2, 1]])
@pytest.mark.parametrize("name", CONFIGS)
def test_copies_differ_between_islands(run_ranks, procs, name):
    """Islands with unlike numbers of copies of a shard exchange and stay equal."""

    def run(me):
        out = probe.train(me, CONFIGS[name], inner_of(name), 6, sharded=False, seed=6, finish=True)
        return out["params"], out["equal"], out["final"]

    results, method = run_ranks(run, procs=procs), method_of(name)
    truth = follow(method, 6, 6)
    for rank, (params, equal, final) in enumerate(results):
        assert equal[1::2] == [name != "released"] * 3
        assert off(params, int(rank >= procs[0]), truth, method) < 1e-5
        assert same(final, results[0][2])


@in_ranks(procs=1)
def test_scalar_parameters_exchanged(me):
    """Parameters without a dimension are exchanged like others."""
    scale = nn.Parameter(torch.tensor(1.0 + me.island))
    optimizer = sgd([scale])
    exchange = fsdp_demo.attach(optimizer, "full")
    (scale * (1.0 + 2 * me.island)).backward()
    optimizer.step()
    exchange.finish()
    assert float(scale) == pytest.approx(1 - 0.01 * 2)


# -- bytes and messages --------------------------------------------------------------------------


def sent(me, config, steps, sharded, names=None) -> int:
    """Bytes that this rank has sent in so many steps."""
    job = probe.Job(me, config, sgd, 0, names, sharded, inner_optimizers="as_is")
    job.steps(steps)
    found = job.exchange.metrics()["bytes_sent"]
    job.exchange.detach()
    return found


@pytest.mark.parametrize("config", [
    preset("demo"), preset("full"), preset("diloco", momentum_warmup=0, period=1),
], ids=lambda c: c.preset)  # fmt: skip
def test_bytes_independent_of_sharding(run_ranks, config):
    """An island sends the same bytes however it is sharded. 2 x 1, FSDP2 2 x 2 and unsharded 2 x 2,
    summed over the ranks of an island: equal up to headers, checksums and presence bits.
    """

    def run(me):
        ways = [True, False] if me.procs == 2 else [True]
        return [sent(me, config, 2, sharded, ALIGNED) for sharded in ways]

    one = [sum(v) for v in zip(*run_ranks(run, 2, 1)[:1], strict=True)]
    two = [sum(v) for v in zip(*run_ranks(run, 2, 2)[:2], strict=True)]
    for total in two:
        assert 0 <= total - one[0] <= 2 * (3 * 56 + 1 + 2 * 4)


def test_bytes_unsharded_blocks_dealt(run_ranks):
    """The copies of an unsharded island send together the blocks of one process. All shapes of the
    probe, so edge blocks and dense elements too: equal up to a header, presence bits and odd counts
    of indices.
    """

    def run(me):
        return sent(me, preset("demo"), 1, sharded=False)

    one, two = run_ranks(run, 2, 1), run_ranks(run, 2, 2)
    assert one[0] == one[1] and two[0] + two[1] == two[2] + two[3]
    assert 0 <= two[0] + two[1] - one[0] <= 56 + 2 + 8


# -- the schedule --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["demo", "diloco"])
@in_ranks()
def test_step_count_checkpoint_and_evaluation(me, name):
    """Checkpoints and evaluation take no step of the exchange. Fresh and used optimizers: get and
    set state_dict through torch.distributed.checkpoint, forward passes; nothing moves.
    """
    job = probe.Job(me, name, inner_of(name))
    model, optimizer, exchange = job.model, job.optimizer, job.exchange
    for steps, messages in ((0, 0), (2, 2 if name == "demo" else 0)):
        job.steps(exchange.step, steps)
        before = job.whole()
        exchange.state_dict()
        optimizer.state_dict()
        states = get_state_dict(model, optimizer)
        set_state_dict(model, optimizer, model_state_dict=states[0], optim_state_dict=states[1])
        with torch.no_grad():
            model(probe.gradient(0, 0, 0, 0))
        model.layer.reshard()
        assert (exchange.step, exchange.metrics()["messages"]) == (steps, messages)
        assert difference(before, job.whole()) == 0.0


@pytest.mark.parametrize("name", ["full", "demo", "diloco"])
def test_skip_leaves_replicas_equal(run_ranks, name):
    """A skipped step leaves the replicas together. Replica 1 drops steps 2 and 3: full takes the
    mean over the others; demo adds nothing to its momentum; diloco stays where it is.
    """
    skips = ((2, 1), (3, 1))

    def run(me):
        job = probe.Job(me, CONFIGS[name], inner_of(name), 6)
        params, equal = [], []
        for t in range(6):
            job.backward(t)
            if (t, me.island) in skips:
                for p in job.model.parameters():
                    if p.grad is not None:
                        p.grad.fill_(float("nan"))
                job.exchange.skip()
                job.optimizer.zero_grad()
            else:
                job.end_step()
            params.append(job.whole())
            equal.append(job.exchange.digests_equal())
        assert job.exchange.step == 6 and equal[1::2] == [True] * 3
        return params

    method = method_of(name)
    truth = follow(method, 6, 6, skips=skips)
    for r, params in enumerate(run_ranks(run, procs=1)):
        assert off(params, r, truth, method) < 1e-5


@pytest.mark.parametrize("name", ["full", "demo", "diloco"])
def test_token_weights_mean(run_ranks, name):
    """The mean over islands is weighted by the tokens of each. Island 0 saw one token for each
    three of island 1; two processes of an island add up.
    """
    plain = {"sign": False} if name == "demo" else {}
    config = demo(**plain) if plain else CONFIGS[name]
    config = config.changed({"reducer.weight": "tokens"})

    def tell(me):
        return lambda t, e: e.report(50 if me.island == 0 else 150, loss=me.island + t)

    def run(me):
        out = probe.train(me, config, inner_of(name), 4, seed=6, before=tell(me))
        return out["params"], out["metrics"]["loss"]

    method = method_of(name, **plain, **({"shards": 2} if plain else {}))
    method.weights = [1.0, 3.0]
    truth = follow(method, 6, 4)
    for rank, (params, loss) in enumerate(run_ranks(run)):
        assert worst_of(params, rank // 2, truth) < 1e-5
        # The mean over the islands of what was noted since the last exchange: in step 3, or with a
        # period of 2 in steps 2 and 3.
        assert loss == (3.0 if name == "diloco" else 3.5)


# -- more than one schedule, delays --------------------------------------------------------------


def test_period_gradient_accumulates(run_ranks):
    """A gradient channel with a period accumulates. Every third step the base optimizer steps with
    what gathered; in between it does nothing.
    """
    config = demo(sign=False, topk=4096, beta=1.0, **{"schedule.sync_every": 3})
    truth = follow(oracle.Full(start(0), 2, sgd), 0, 6)
    for params in run_ranks(lambda me: probe.train(me, config, sgd, 6)["params"], procs=1):
        for t in range(6):
            done = (t + 1) // 3 * 3
            assert difference(truth[done - 1][0] if done else start(0), params[t]) < 1e-5


def two_channels(first: Channel, second: Channel) -> ExchangeConfig:
    return ExchangeConfig("two", (first, second), inner_optimizers=("any",))


def test_channels_due_together(run_ranks):
    """Several channels may be due at one step. A sparse delta channel beside a gradient channel,
    and two sparse delta channels with different clocks, also at finish().
    """
    full, sparse = preset("full"), decoupled(topk=4096, value_dtype="fp32")
    full, sparse = full.channels[0], sparse.channels[0]
    gradient = replace(full, name="gradient", include=("aligned*", "bias"))
    delta = replace(sparse, name="delta", exclude=("aligned*", "bias"))
    odd = replace(sparse, name="odd", include=("odd*", "layer*"), schedule=SyncSchedule(3))
    rest = replace(sparse, name="rest", exclude=("odd*", "layer*"))

    def run(me):
        pairs = ((delta, gradient), (odd, rest))
        return [probe.train(me, two_channels(*p), sgd, 5, finish=True) for p in pairs]

    truth = follow(oracle.Full(start(0), 2, sgd), 0, 5)[-1][0]
    for rank in run_ranks(run):
        for out in rank:
            assert out["final_equal"] and difference(truth, out["final"]) < 2e-5


# -- start, end, resume --------------------------------------------------------------------------


def test_finish_without_consensus_takes_the_mean(run_ranks):
    """`finish` makes replicas equal that had no consensus: they take the mean, and the drift is
    told.
    """
    a, b = run_ranks(lambda me: probe.train(me, RELEASED, adamw, 6, finish=True), 2, 1)
    assert same(a["final"], b["final"]) and not same(a["params"][-1], b["params"][-1])
    mean = {n: (a["params"][-1][n] + b["params"][-1][n]) / 2 for n in a["final"]}
    assert difference(mean, a["final"]) < 1e-6
    assert a["final_equal"] is None and a["drift"] > 0


def test_outer_parameters_show_anchor(run_ranks):
    """`outer_parameters` shows the anchor in the model and puts the own parameters back."""

    def loss(params, g):
        return sum(float((params[n] * v).sum(dtype=torch.float64)) for n, v in g.items())

    def run(me, config):
        job = probe.Job(me, config, adamw)
        job.steps(2)
        anchor = job.whole()
        job.step(2)
        model, local, g = job.model, job.whole(), probe.gradient(0, 9, 0, 0)
        with torch.no_grad():
            losses = [float(model(g))]
            with job.exchange.outer_parameters(model):
                shown = job.whole()
                losses.append(float(model(g)))
            losses.append(float(model(g)))
        assert same(local, job.whole()) and job.exchange.step == 3
        expected = [loss(local, g), loss(shown, g), loss(local, g)]
        assert losses == pytest.approx(expected, abs=1e-2)
        return anchor, local, shown

    for anchor, local, shown in run_ranks(lambda me: run(me, CONFIGS["diloco"])):
        assert same(shown, anchor) and not same(local, anchor)
    results = run_ranks(lambda me: run(me, RELEASED))
    mean = {n: (results[0][1][n] + results[2][1][n]) / 2 for n in results[0][1]}
    assert all(difference(mean, shown) < 1e-6 for _, _, shown in results)


PLAIN = {"clip": None}
LATE = {"schedule.delay": 1}
RESUMED = {
    "demo": demo(value_dtype="int8"),
    "demo-late": demo(value_dtype="int8", **{"schedule.delay": 2}),
    "random": preset("random", **PLAIN),
    "diloco": preset("diloco", period=3, momentum_warmup=3, **PLAIN, **LATE),
    "diloco-queue": preset("diloco", momentum_warmup=0, period=2, **PLAIN, **{"schedule.delay": 5}),
    "decoupled_momentum": preset("decoupled_momentum", transform=True, period=3, **PLAIN),
    "released": decoupled(rule="released", average_every=2),
    "streaming_diloco": preset("streaming_diloco", momentum_warmup=0, period=3, delay=2, layers=0,
        **PLAIN),
    "local_sgd-queue": preset("local_sgd", period=2, **PLAIN, **{"schedule.delay": 5}),
    "desloc": preset("desloc", embeddings=True, period=2, **PLAIN),
    "sparse_loco": preset("sparse_loco", period=3, **PLAIN),
    "threshold": preset("sparse_loco", period=2, **PLAIN, **LATE,
        **{"codec.select": "threshold", "codec.threshold_every": 4}),
    "sign_loco": preset("sign_loco", beta=0.6, period=3, momentum_warmup=2, **PLAIN, **LATE),
    # the second phase begins at the step of the save, before the last message of the first lands
    "sign_loco-switch": preset("sign_loco", period=3, momentum_warmup=2, switch=6, **PLAIN, **LATE),
    # in the middle of the second phase, with what is kept
    "sign_loco-late": preset("sign_loco", period=2, switch=3, late_topk=20, **PLAIN),
    "sign_loco-kept": preset("sign_loco", period=4,
        **{"schedule.delay": 2, "applier.keep_steps": True}),
    "diloco-share": preset("diloco", period=3, **{"schedule.delay": 3, "applier.own_share": 0.5}),
    "diloco-eager": preset("diloco", period=2, eager=2, **{"applier.dampening": 0.5}),
    "desloc-rank": preset("desloc", rank=16, embeddings=True, period=4, clip=None,
        states={"exp_avg": 1, "exp_avg_sq": 2}),
}  # fmt: skip


@pytest.mark.parametrize("name", RESUMED)
@in_ranks()
def test_resume_equals_uninterrupted_run(me, name):
    """A run that is resumed from the files of `save_exchange` is the run that was not interrupted.
    Bit for bit, in the middle of a period, with payloads in flight.
    """
    config, inner = RESUMED[name], sgd if name.startswith(("demo", "random")) else adamw
    inner = low_rank if config.inner_rank else inner
    job, folder = probe.Job(me, config, inner), me.folder / f"home{me.island}"
    job.steps(6)
    save_exchange(folder, job.exchange)
    moments = copy.deepcopy(job.optimizer.state_dict())
    weights = [p.to_local().detach().clone() for p in job.model.parameters()]
    flights = len(job.exchange.state_dict()["in_flight"])
    assert flights == 2 if name == "demo-late" else flights <= 3
    job.steps(6, 11)
    state = copy.deepcopy(job.exchange.state_dict())
    job.exchange.detach()

    def loaded(params):
        params = list(params)
        with torch.no_grad():
            for p, w in zip(params, weights, strict=True):
                p.to_local().copy_(w)
        optimizer = inner(params)
        optimizer.load_state_dict(moments)
        return optimizer

    again = probe.Job(me, config, loaded, state=load_exchange(folder))
    assert again.exchange.step == 6 and len(again.exchange.state_dict()["in_flight"]) == flights
    again.steps(6, 11)
    assert same(job.whole(), again.whole())
    assert bit_equal(state, again.exchange.state_dict())


@in_ranks(procs=1)
def test_bf16_anchor_keeps_small_steps():
    """bf16 parameters keep what rounding takes. Ten outer steps of a tenth of 2^-6 each, every one
    too small for bf16 at 1.0: the fp32 anchor adds them up to 2^-6.
    """
    config = diloco(period=1, lr=0.1, momentum=0.0, inner_optimizers="as_is")
    weight = nn.Parameter(torch.ones(70, 3, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    exchange = fsdp_demo.attach(optimizer, config)
    for _ in range(10):
        weight.grad = torch.full_like(weight, 2**-6)
        optimizer.step()
    exchange.finish()
    assert weight.detach().float().unique().tolist() == [1 - 2**-6]
