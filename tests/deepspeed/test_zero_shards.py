"""What a rank holds under ZeRO, that it is the same as under FSDP2 where it can be, and steps that
only some replicas take.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed_ext
import fsdp_demo
from deepspeed_ext.zero_params import pieces
from fsdp_demo.exchange.plan import Plan
from fsdp_demo.rendezvous.position import ShardPosition

from ..support import probe, zero
from ..support.inside import in_ranks

# -- pieces --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(7, 5), (4, 3, 2), (11,), (1, 6), (6, 1), ()])
def test_zero_shards_pieces_cover_stretches(shape):
    """The pieces cover every stretch once and keep whole rows."""
    total = math.prod(shape)
    row = math.prod(shape[1:])
    for start in range(total + 1):
        for numel in range(total - start + 1):
            found = list(pieces(shape, start, numel))
            assert sum(math.prod(s) for _, s in found) == numel
            at = start
            for begin, local in found:
                assert begin == at
                at += math.prod(local)
                if len(local) > 1 or len(shape) < 2 and local != shape:
                    assert local[1:] == tuple(shape[1:]) and (begin % row == 0 or not numel)
            assert len(found) <= 3
            assert [s for _, s in found].count(()) == (shape == () and numel == 1)
            if start % row == numel % row == 0 and numel:  # rows only: one shard, as FSDP2 has it
                assert len(found) == 1
    assert list(pieces(shape, 0, total)) == [(0, shape)]


LAYOUTS: dict[str, dict[str, Any]] = {
    **{stage: {} for stage in (*zero.STAGES, "wrapper")},
    "zero1-round": {"round_robin_gradients": True},
    "zero2-round": {"round_robin_gradients": True},
    "zero2-aligned": {"parameter_alignment": True, "round_robin_gradients": True},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bf16", [False, True])
def test_zero_shards_make_up_parameters(run_ranks, layout, bf16):
    """The shards of an island make up every parameter once. In one island of 3 ranks: nothing is
    even. Every rank names every parameter; a write through a shard is seen by the model.
    """

    def run(me):
        settings = zero.settings(layout.split("-r")[0].split("-a")[0], bf16=bf16)
        settings["zero_optimization"] |= LAYOUTS[layout]
        made = zero.engine(settings)
        host = deepspeed_ext.ZeroHost(made)
        assert host.shard_position(me.proc, me.procs) == ShardPosition(3, me.proc, 1, 0)
        # what the model computes with, and the masters are made of
        with zero.gathered(made.module):
            full = {n: p.detach().float().clone() for n, p in made.module.named_parameters()}
        held = []
        for s, x in zip(host.params, host.tensors("parameter"), strict=True):
            part = full[s.name].reshape(-1)[s.offset : s.offset + x.numel()]
            assert torch.equal(part.view(s.shape), x)
            held.append((s.name, s.offset, x.numel()))
        assert {name for name, *_ in held} == set(full)
        with torch.no_grad():
            for x in host.tensors("parameter"):
                x.mul_(2.0)
        host.commit()
        with zero.gathered(made.module):
            low = {n: p.detach().float().clone() for n, p in made.module.named_parameters()}
        assert all(torch.equal(low[n], 2 * full[n]) for n in full)
        if me.proc == 1:  # one rank holds it, all hear of it
            next(x for x in host.tensors("parameter") if x.numel()).add_(1.0)  # type: ignore[union-attr]
        with pytest.raises(RuntimeError, match="is not what the model computes with"):
            host.partitions.check()
        return {n: tuple(p.shape) for n, p in full.items()}, held

    results = run_ranks(run, 1, 3)
    for name, shape in results[0][0].items():
        stretches = sorted((o, n) for _, held in results for m, o, n in held if m == name and n)
        assert sum(n for _, n in stretches) == math.prod(shape)
        assert all(a + n == b for (a, n), (b, _) in zip(stretches, stretches[1:], strict=False))
        assert stretches[0][0] == 0


# -- ZeRO-3 and FSDP2 ----------------------------------------------------------------------------


def differing(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, tuple[int, float]]:
    """By name: how many elements of a parameter are others, and by how much."""
    return {
        name: (int((found[name] != x).sum()), float((found[name] - x).abs().max()))
        for name, x in expected.items()
        if not torch.equal(found[name], x)
    }


@pytest.mark.parametrize("preset", ["demo", "decoupled_momentum"])
def test_zero_shards_zero3_equals_fsdp2(run_ranks, preset):
    """ZeRO-3 and FSDP2 send the same bytes and end with the same parameters. 10 exchanges in fp32
    of a model whose every dim 0 is even, on real data: bit for bit.
    """
    periods = {} if preset == "demo" else {"period": 2, "transform": True}
    steps = range(10 * periods.get("period", 1))

    def model() -> nn.Module:
        torch.manual_seed(7)
        return zero.Aligned()

    def seen(exchange: Any) -> Any:
        counts = ("exchanges", "messages", "bytes_sent", "bytes_received")
        return [s.shape for s in exchange.host.params], [vars(exchange._meter)[k] for k in counts]

    def with_zero(me):
        made, exchange = zero.attached("zero3", preset, model=model(), **periods)
        losses = zero.train(made, steps, me.rank)
        return losses, seen(exchange), zero.whole(made)

    def with_fsdp2(me):
        from torch.distributed.fsdp import fully_shard

        made = model()
        fully_shard(made, mesh=me.mesh())
        inner = (zero.sgd if preset == "demo" else zero.adamw)(made.parameters())
        exchange = fsdp_demo.attach(inner, preset, model=made, clip=None, **periods)
        losses = []
        for t in steps:
            rows, targets = zero.batch(t, me.rank)
            loss = nn.functional.cross_entropy(made(rows).float(), targets)
            loss.backward()
            inner.step()
            inner.zero_grad()
            losses.append(float(loss))
        return losses, seen(exchange), probe.whole(made)

    by_zero, by_fsdp2 = run_ranks(with_zero), run_ranks(with_fsdp2)
    for results in (by_zero, by_fsdp2):
        assert not any(differing(found[2], results[0][2]) for found in results), "ranks differ"
    for ours, theirs in zip(by_zero, by_fsdp2, strict=True):
        assert ours[:2] == theirs[:2] and ours[1][1][0] == 10
        assert not differing(ours[2], theirs[2])


def test_zero_shards_persistent_sent_once(run_ranks):
    """Parameters that stay gathered are sent once. All tensors persistent, so that every rank holds
    all of them: an island sends as much as with none persistent, a whole copy once.
    """

    def run(me):
        sent = {}
        for threshold in (0, 10**9):
            settings = zero.settings("zero3")
            settings["zero_optimization"]["stage3_param_persistence_threshold"] = threshold
            made, exchange = zero.attached(settings, "local_sgd", period=1)
            if threshold:
                assert all(p.ds_persist for p in made.module.parameters())
            zero.train(made, range(1), me.rank)
            sent[threshold] = exchange.metrics()["bytes_sent"]
            exchange.detach()
            made.destroy()
        return sent

    results = run_ranks(run)
    numel = sum(p.numel() for p in zero.Model().parameters())
    for island in (results[:2], results[2:]):
        gathered, none = (sum(sent[t] for sent in island) for t in (10**9, 0))
        assert gathered == none
        assert 4 * numel <= gathered < 4 * numel + 1000  # fp32; headers and checksums


# -- start ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", zero.STAGES)
@in_ranks()
def test_zero_shards_start_of_island_0(me, stage):
    """All islands start from the masters, frozen parameters and buffers of island 0."""
    torch.manual_seed(me.island)
    model = zero.Model()
    model.layers[1].weight.requires_grad_(False)
    model.norm.weight.requires_grad_(False).fill_(1.0 + me.island)
    model.scale.fill_(me.island + 1.0)
    made, exchange = zero.attached(stage, "diloco", model=model)
    with torch.no_grad():
        seen = made(zero.batch(0, 0)[0]).clone()
    torch.manual_seed(0)
    first = zero.Model().state_dict()
    with zero.gathered(made.module):
        there = dict([*made.module.named_parameters(), *made.module.named_buffers()])
        assert all(torch.equal(there[n], value) for n, value in first.items())
    exchange.detach()
    return seen


# -- steps that are not taken --------------------------------------------------------------------


class Rate:
    """A schedule that counts."""

    def __init__(self, optimizer: Any):
        self.optimizer, self.count = optimizer, 0

    def step(self, *_: Any, **__: Any) -> None:
        self.count += 1
        for g in self.optimizer.param_groups:
            g["lr"] = 0.01 / (1 + self.count)

    def state_dict(self) -> dict[str, Any]:
        return {}


SKIPS = [("full", stage) for stage in (*zero.STAGES, "wrapper")]
SKIPS += [("full", "zero2-offload"), ("diloco", "zero3-parts-offload")]
SKIPS += [("demo", "zero2"), ("demo", "zero3-parts"), ("diloco", "zero1"), ("diloco", "zero3")]


@pytest.mark.parametrize("preset, stage", SKIPS)
@in_ranks()
def test_zero_skip_by_one_replica(me, preset, stage):
    """A replica that skips a step joins the exchange with an empty contribution. A NaN on one rank
    of island 1 in step 2: DeepSpeed skips there alone. Steps, exchanges, rates and replicas stay
    together; under `full` what is applied in that step is the other replica's gradient.
    """
    ends = []
    for poisoned in (False, True):
        inner = zero.sgd if preset == "demo" else zero.adamw
        made = zero.engine(zero.settings(stage), inner, lr_scheduler=Rate)
        with zero.another_run():
            period = {"period": 3} if preset == "diloco" else {}
            exchange = deepspeed_ext.attach(made, preset, **period)
        skipped, warned = [], zero.warnings()
        for t in range(6):
            rows, targets = zero.batch(t, me.rank)
            loss = nn.functional.cross_entropy(made(rows), targets)
            made.backward(loss * (math.nan if poisoned and t == 2 and me.rank == 2 else 1.0))
            made.step()
            skipped.append(not made.was_step_applied())
            assert skipped[-1] == any(f"step {t + 1} was skipped" in text for text in warned)
            assert exchange.step == made.global_steps == t + 1
        assert skipped == [poisoned and me.rank >= 2 and t == 2 for t in range(6)]
        assert made.lr_scheduler.count == 6 and exchange.digests_equal()
        assert exchange.metrics()["exchanges"] == (2 if preset == "diloco" else 6)
        exchange.detach()
        whole = zero.whole(made)
        assert all(bool(x.isfinite().all()) for x in whole.values())
        ends.append((made.get_lr()[0], whole))
    (rate, sound), (same, whole) = ends
    assert same == rate and not all(torch.equal(whole[n], sound[n]) for n in whole)
    return rate


@pytest.mark.parametrize("stage, preset", [
    ("zero1", "full"), ("zero3-parts", "demo"), ("zero2", "diloco"), ("wrapper", "full"),
    ("zero2-offload", "demo"), ("zero3", "full"),
])  # fmt: skip
@in_ranks()
def test_zero_skip_by_loop_equals_engine(me, stage, preset):
    """A step that the loop skips and one that the engine skips are the same."""
    ends = []
    for by_loop in (True, False):
        period = {"period": 2} if preset == "diloco" else {}
        made, exchange = zero.attached(zero.settings(stage, accumulate=2), preset, **period)
        for t in range(5):
            lost = me.island == 1 and t == 3
            for micro in range(2):
                rows, targets = zero.batch(t, me.rank, micro)
                loss = nn.functional.cross_entropy(made(rows), targets)
                made.backward(loss * (math.nan if lost else 1.0))
                if lost and micro == 1 and by_loop:
                    exchange.skip()
                else:
                    made.step()
        assert exchange.step == made.global_steps == 5 and made.skipped_steps == me.island
        ends.append(zero.whole(made))
        exchange.detach()
    assert all(torch.equal(ends[0][n], ends[1][n]) for n in ends[0])


# -- ends ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["zero2", "zero3-parts"])
@pytest.mark.parametrize(
    "preset, changes",
    [("diloco", {"period": 4}), ("streaming_diloco", {"period": 6, "delay": 2, "layers": 1})],
)
@in_ranks()
def test_zero_outer_parameters_and_finish(me, stage, preset, changes):
    """`outer_parameters` are shown and taken back, and the end is common."""
    made, exchange = zero.attached(zero.settings(stage, bf16=True), preset, **changes)
    zero.train(made, range(6), me.rank)
    rows, _ = zero.batch(100, 0)

    def shown() -> torch.Tensor:
        with torch.no_grad():
            return made(rows).float().clone()

    before = shown()
    with exchange.outer_parameters(made.module):
        outer = shown()
        with pytest.raises(RuntimeError, match="leave the context first"):
            made.save_checkpoint(str(me.folder))
    assert torch.equal(before, shown()) and not torch.equal(before, outer)
    exchange.finish()
    assert exchange.digests_equal()
    # seen with a fragment's delta under way
    return None if preset == "streaming_diloco" else outer, shown()


@in_ranks()
def test_zero_step_count_and_second_attach(me):
    """The engine counts the steps, and a second attach is refused."""
    made = zero.engine(zero.settings("zero2", accumulate=3, clip=0.5))
    zero.train(made, range(2), me.rank, accumulate=3)
    exchange = deepspeed_ext.attach(made, "diloco", period=2)
    assert exchange.step == made.global_steps == 2
    assert exchange.clips == "DeepSpeed clips each replica's own gradient to norm 0.5"
    with pytest.raises(ValueError, match="has an exchange already"):
        deepspeed_ext.attach(made, "diloco")
    zero.train(made, range(2, 5), me.rank, accumulate=3)
    assert exchange.step == made.global_steps == 5 and exchange.metrics()["exchanges"] == 1
    with exchange.paused():
        zero.train(made, range(1), me.rank, accumulate=3)
    assert exchange.step == 5
    exchange.detach()
    zero.train(made, range(1), me.rank, accumulate=3)
    assert exchange.step == 5 and made.global_steps == 7
    with zero.another_run():
        exchange = deepspeed_ext.attach(made, "full")
    assert made.optimizer.clip_grad == 0.0 and "0.5 clips the mean" in exchange.clips
    exchange.detach()
    assert made.optimizer.clip_grad == 0.5
    for clip, said in ((0.3, "0.3"), (1.0, "1"), (None, "0")):
        with pytest.raises(ValueError, match=f'set "gradient_clipping": {said} there'):
            deepspeed_ext.attach(made, "full", clip=clip)
    with pytest.raises(ValueError, match="no covered parameter has it"):
        deepspeed_ext.attach(made, "desloc", states={"momentum_buffer": 2})
    assert made.optimizer.clip_grad == 0.5


REST = [
    p
    for p in fsdp_demo.presets()
    if p not in ("full", "demo", "diloco", "desloc", "streaming_diloco")
]


@pytest.mark.parametrize("stage", ["zero2", "zero3-parts"])
@pytest.mark.parametrize("preset", REST)
@in_ranks(env={"ISLAND_MIN": "2"})
def test_zero_shards_preset_bytes_planned(me, preset, stage):
    """Every preset counts the bytes it planned and ends with one model. Those that
    `test_zero_oracle.py` does not follow step by step.
    """
    config = fsdp_demo.preset(preset)
    inner = zero.sgd if config.inner_optimizers[0] == "sgd" else zero.adamw
    every = "check_every" if preset == "sel_sync" else "period"
    changes: dict[str, Any] = {} if config.channels[0].before_step else {every: 2}
    if preset.endswith("muloco"):  # bytes do not depend on it, and AdamW alone is refused
        changes["inner_optimizers"] = "as_is"
    made, exchange = zero.attached(zero.settings(stage, bf16=True), preset, inner, **changes)
    sections = [c.section for c in (*exchange.channels, *exchange._runtime.buffers)]
    planned = Plan(sections, me.islands, me.island).over(range(4)).bytes_sent
    zero.train(made, range(4), me.rank)
    assert planned == exchange.metrics()["bytes_sent"] > 0
    exchange.finish()
    whole = zero.whole(made)
    assert all(bool(t.isfinite().all()) for t in whole.values())
    return whole


@pytest.mark.parametrize("stage", ["zero2", "zero3-parts", "wrapper"])
@in_ranks()
def test_zero_attach_again_after_finish(me, stage):
    """After `finish` the engine may be attached again, and the old exchange changes nothing."""
    made, first = zero.attached(zero.settings(stage, clip=0.7), "diloco", period=2)
    zero.train(made, range(2), me.rank)
    first.finish()
    with pytest.raises(RuntimeError, match="the exchange is finished"):
        zero.train(made, range(1), me.rank)
    with zero.another_run():
        second = deepspeed_ext.attach(made, "diloco", period=2)
    first.detach()
    at = made.global_steps
    zero.train(made, range(4), me.rank)
    assert second.step == made.global_steps == at + 4 and second.metrics()["exchanges"] == 2
    second.finish()
    with zero.another_run():
        third = fsdp_demo.attach(made, "full", step=0)
    assert third.step == 0 and made.optimizer.clip_grad == 0.0
    ours = made.step
    made.step = lambda *args, **kwargs: ours(*args, **kwargs)  # a profiler, say
    zero.train(made, range(2), me.rank)
    assert third.step == 2
    assert ours.__name__ == "step" and "lr_kwargs" in inspect.signature(ours).parameters
    third.detach()
    third.detach()
    assert made.optimizer.clip_grad == 0.7 and "_optimizer_step" not in vars(made.optimizer)
    zero.train(made, range(1), me.rank)
    assert third.step == 2
