"""What Accelerate offers beside sharding, with an exchange attached after `prepare`: each against a
run without it, or by hand.

Two islands of two ranks, FSDP2 on CPU, real gloo; compilation by dynamo alone (backend "eager").
"""

from __future__ import annotations

import functools
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.scheduler import AcceleratedScheduler
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import TorchDynamoPlugin
from torch.distributed.tensor import DTensor

import fsdp_demo
from fsdp_demo.integrations import accelerate as integration

from ..support.llama import llama

WINDOWS, MICRO = 3, 2
ROWS = torch.randint(
    0, 64, (WINDOWS, MICRO, 2, 2, 3, 16), generator=torch.Generator().manual_seed(1)
)
"""[window, micro-batch, island, rank, row, token]"""


class Memory(GeneralTracker):
    """A tracker that keeps what it is told; `requires_logging_directory` and `name` are what
    Accelerate asks of one.
    """

    name, requires_logging_directory = "memory", False

    def __init__(self):
        super().__init__()
        self.stored: dict[str, Any] = {}
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.ended = False

    @property
    def tracker(self):
        return self.logged

    @on_main_process
    def store_init_configuration(self, values):
        self.stored = values

    @on_main_process
    def log(self, values, step=None, **_):
        self.logged.append((step, values))

    @on_main_process
    def finish(self):
        self.ended = True


def compiled(way, island):
    """(what the Accelerator is given, which layers are compiled before `prepare`) for a way to
    compile.
    """
    if way == "regional" or (way == "whole on island 0" and island == 0):
        plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=way == "regional")
        return {"dynamo_plugin": plugin}, slice(0)
    return {}, slice(None) if way == "layers" else slice(0)


DEFAULTS = {
    "together": False, "compile": "", "recompute": "", "precision": "no", "clip": None,
    "schedule": (1.0,), "log": False,
}  # fmt: skip


def train(rank, preset, changes=None, **options):
    """Three optimizer steps of two micro-batches each; what came of them. `together`: both
    micro-batches at once, no accumulation.

    The loss is a mean over equally long rows, so both ways have the same gradient.
    """
    o, tracker = SimpleNamespace(**DEFAULTS | options), Memory()
    # `fsdp_activation_checkpointing` of a yaml
    os.environ["FSDP_ACTIVATION_CHECKPOINTING"] = str(o.recompute == "launcher").lower()
    more, layers = compiled(o.compile, rank.island)
    more |= {"mixed_precision": o.precision, "log_with": [tracker] if o.log else None}
    accelerator = integration.accelerator(
        gradient_accumulation_steps=1 if o.together else MICRO, **more
    )
    model = llama()
    if o.recompute == "model":
        older = model.gradient_checkpointing_enable
        getattr(model, "activation_checkpointing_enable", older)()
    for layer in model.model.layers[layers]:
        layer.compile(backend="eager")
    config = fsdp_demo.preset(preset, **(changes or {}))
    optimizer = fsdp_demo.base_optimizer(config, model.named_parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: o.schedule[min(step, len(o.schedule) - 1)]
    )
    forwards = []
    model.model.layers[1].mlp.register_forward_pre_hook(
        lambda *_: forwards.append(torch.is_grad_enabled())
    )
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    exchange = fsdp_demo.attach(optimizer, config, model=model)
    if o.log:
        accelerator.init_trackers("run", {"preset": config.preset})
    parameters = [p for g in optimizer.param_groups for p in g["params"]]
    out: dict[str, Any] = {"steps": [], "rates": [], "norms": [], "kinds": set()}
    out["scheduler"] = type(scheduler) is AcceleratedScheduler
    handle = optimizer.optimizer.register_step_pre_hook(
        lambda *_: out["rates"].append(optimizer.param_groups[0]["lr"])
    )
    for window in ROWS[:, :, rank.island, rank.proc]:
        for rows in [window.flatten(0, 1)] if o.together else window:
            with accelerator.accumulate(model):
                loss = model(input_ids=rows, labels=rows).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    out["kinds"] |= {
                        (isinstance(p, DTensor), p.dtype, p.grad.dtype) for p in parameters
                    }
                    if o.clip:
                        norm = accelerator.clip_grad_norm_(model.parameters(), o.clip)
                        # of torch 2.9 it is a DTensor, whose number is this rank's part
                        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
                        out["norms"].append(float(whole))
                exchange.report(tokens=rows.numel(), loss=loss)
                optimizer.step()
                optimizer.zero_grad()
                out["steps"].append(exchange.step)
                if accelerator.sync_gradients:
                    scheduler.step()
                    if o.log:
                        values = {"own loss": loss.item(), **exchange.metrics()}
                        accelerator.log(values, step=exchange.step)
    handle.remove()
    out["exchanges"] = exchange.metrics()["exchanges"]
    out["forwards"] = len(forwards)
    out["names"] = [s.name for s in exchange.host.params]
    exchange.finish()
    out["compiled"] = torch._dynamo.utils.counters["frames"]["ok"]
    assert exchange.digests_equal() is True
    whole = [(p.full_tensor() if isinstance(p, DTensor) else p).detach() for p in parameters]
    out["params"] = torch.cat([p.flatten() for p in whole])
    accelerator.end_training()
    out["tracker"] = (tracker.stored, tracker.logged, tracker.ended)
    return out


DONE: dict[str, list[dict[str, Any]]] = {}  # runs that several tests compare with


@functools.cache
def before_ranks():
    """What torch imports with the first compilation: once, instead of in every rank."""
    torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(2))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.fixture
def islands(run_ranks):
    """`islands(...)`: `train(...)` on two islands of two ranks; what all ranks gave, whose
    parameters must be equal bit for bit.
    """

    def call(*args, **options):
        key = repr((args, options))
        if key not in DONE:
            work = functools.partial(train, **options)
            DONE[key] = run_ranks(work, islands=2, procs=2, timeout=100, args=args)
            assert all(torch.equal(o["params"], DONE[key][0]["params"]) for o in DONE[key])
        return DONE[key]

    return call


def differ(a, b):
    """Relative distance of the parameters of two runs."""
    a, b = (x[0]["params"].double() for x in (a, b))
    return float((a - b).norm() / b.norm())


def by_hand(clip=None, schedule=(1.0,) * WINDOWS):
    """`full` in one process that sees the rows of all: parameters, and each island's gradient
    norms.
    """
    model, norms = llama(), ([], [])
    optimizer = fsdp_demo.base_optimizer(
        fsdp_demo.preset("full"), model.named_parameters(), lr=0.01
    )
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for step, window in enumerate(ROWS):
        total = [torch.zeros_like(p) for p in parameters]
        for island in range(2):
            rows = window[:, island].flatten(0, 2)
            grads = torch.autograd.grad(model(input_ids=rows, labels=rows).loss, parameters)
            norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads]))
            norms[island].append(norm.item())
            scale = 1.0 if clip is None else min(1.0, clip / norm.item())
            for t, g in zip(total, grads, strict=True):
                t += scale * g / 2
        for p, t in zip(parameters, total, strict=True):
            p.grad = t
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * schedule[step]
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in parameters]), norms


def test_accelerate_accumulation_is_one_step(islands):
    """Accumulated micro-batches are one step of the exchange."""
    accumulated = islands("diloco", {"period": 2})
    at_once = islands("diloco", {"period": 2}, together=True)
    for result in accumulated:
        # a step per window, one exchange in two of them
        assert result["steps"] == [0, 1, 1, 2, 2, 3] and result["exchanges"] == 1
        assert result["kinds"] == {(True, torch.float32, torch.float32)}
    assert at_once[0]["steps"] == [1, 2, 3] and at_once[0]["exchanges"] == 1
    assert differ(accumulated, at_once) < 1e-4


def test_accelerate_clip_of_own_gradient(islands):
    """`clip_grad_norm_` clips each island's own gradient."""
    clip = 0.2
    clipped = islands("full", {"clip": None}, clip=clip)
    expected, norms = by_hand(clip)
    assert min(norms[0] + norms[1]) > 2 * clip and norms[0] != norms[1]
    for rank, result in enumerate(clipped):
        assert result["norms"] == pytest.approx(norms[rank // 2], rel=1e-4)
    torch.testing.assert_close(clipped[0]["params"], expected, rtol=1e-3, atol=2e-5)


def test_accelerate_clip_reaches_sgd_step(islands):
    """Clipping before an SGD step reaches the parameters. AdamW forgets the scale of a gradient,
    SGD does not: a run that clips moves less, one with a far limit as if there were none.
    """
    start = torch.cat([p.detach().flatten() for p in llama().parameters()])
    free, far, near = (
        islands("demo", {"clip": None, "sign": False}, clip=clip) for clip in (None, 1e6, 1e-3)
    )
    moved = [float((run[0]["params"] - start).norm()) for run in (free, near)]
    assert torch.equal(far[0]["params"], free[0]["params"]) and moved[1] < 0.1 * moved[0]


def test_accelerate_prepared_scheduler_rate(islands):
    """The prepared scheduler sets the rate of every step."""
    schedule = (1.0, 0.5, 0.1)
    scheduled = islands("full", {"clip": None}, schedule=schedule)
    for result in scheduled:
        assert result["scheduler"] and result["rates"] == pytest.approx([0.01, 0.005, 0.001])
    expected, _ = by_hand(schedule=schedule)
    torch.testing.assert_close(scheduled[0]["params"], expected, rtol=1e-3, atol=2e-5)
    assert differ(scheduled, islands("full", {"clip": None})) > 1e-2


def test_accelerate_tracker_gets_metrics(islands):
    """A tracker gets the metrics on the main process and changes nothing."""
    tracked, silent = islands("demo", log=True), islands("demo")
    assert torch.equal(tracked[0]["params"], silent[0]["params"])
    for rank, result in enumerate(tracked):
        stored, logged, ended = result["tracker"]
        if rank % 2:  # not the main process of its island
            assert (stored, logged, ended) == ({}, [], False)
            continue
        assert stored == {"preset": "demo"} and ended and [step for step, _ in logged] == [1, 2, 3]
        assert [values["step"] for _, values in logged] == [1, 2, 3]
        assert logged[0][1]["bytes_sent"] > 0
        sent = [values["bytes_sent"] for _, values in logged]
        assert sent[1] == 2 * sent[0] and sent[2] == 3 * sent[0]
        assert all(
            values["loss"] == pytest.approx(tracked[0]["tracker"][1][i][1]["loss"], abs=1e-6)
            for i, (_, values) in enumerate(logged)
        )


@pytest.mark.parametrize("way", [
    "layers",
    pytest.param("regional", marks=[pytest.mark.slow,
        pytest.mark.skipif(not hasattr(torch._dynamo.config,
        "skip_fwd_side_effects_in_bwd_under_checkpoint"),
        reason="Accelerate's FSDP2 sets what this torch does not have")]),
    "whole on island 0",
])  # fmt: skip
def test_accelerate_compile_equals_eager(islands, way):
    """A compiled model trains as the eager one."""
    eager = islands("diloco", {"period": 2})
    compiled_runs = islands("diloco", {"period": 2}, compile=way)
    for rank, (plain, result) in enumerate(zip(eager, compiled_runs, strict=True)):
        assert plain["compiled"] == 0
        assert (result["compiled"] > 0) == (way != "whole on island 0" or rank < 2)
        assert result["steps"] == plain["steps"] and result["exchanges"] == plain["exchanges"] == 1
        assert result["names"] == plain["names"]
    assert differ(compiled_runs, eager) < 1e-4


@pytest.mark.parametrize("way", ["model", "launcher"])
def test_accelerate_activation_checkpointing(islands, way):
    """Activation checkpointing computes twice and trains the same."""
    plain, again = islands("demo"), islands("demo", recompute=way)
    for one, two in zip(plain, again, strict=True):
        assert two["forwards"] == 2 * one["forwards"] == 4 * WINDOWS * MICRO // 2
        assert two["steps"] == one["steps"] and torch.equal(two["params"], one["params"])
        assert two["names"] == one["names"]


def test_accelerate_checkpointing_compile_and_bf16(islands):
    """Activation checkpointing, compilation and bf16 work together."""
    everything = {"compile": "layers", "recompute": "model", "precision": "bf16"}
    bf16 = islands("diloco", {"period": 2}, precision="bf16")
    all_of_it = islands("diloco", {"period": 2}, **everything)
    fp32 = islands("diloco", {"period": 2})
    for result in all_of_it:
        assert result["kinds"] == {(True, torch.float32, torch.float32)}
        assert result["steps"] == [0, 1, 1, 2, 2, 3]
    assert 1e-6 < differ(bf16, fp32) < 0.05 and differ(all_of_it, bf16) < 0.05


@pytest.mark.parametrize("preset", ["full", "demo"])
def test_accelerate_bf16_exchanges_fp32(islands, preset):
    """A bf16 run computes in bf16 and exchanges fp32."""
    changes = {"clip": None} if preset == "full" else {"clip": None, "sign": False}
    half, whole = islands(preset, changes, precision="bf16"), islands(preset, changes)
    assert all(result["kinds"] == {(True, torch.float32, torch.float32)} for result in half)
    assert 1e-6 < differ(half, whole) < 0.05
