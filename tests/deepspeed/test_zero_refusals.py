"""What an engine may have that the exchange does not go with: ValueError with the cure, on every
rank, before anything is sent.
"""

import os
from dataclasses import replace

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn

import deepspeed_ext
import fsdp_demo
from deepspeed_ext import refusals
from deepspeed_ext.node_mesh import compare_environment
from deepspeed_ext.refusals import refuse
from fsdp_demo import LowRankAdamW, MuonAdamW, Topology, preset

from ..support import zero
from ..support.inside import in_ranks

CPU = {"device": "cpu", "pin_memory": False}
NVME = {"device": "nvme", "nvme_path": "/nvme"}


def said(call):
    """The sentence of a ValueError."""
    with pytest.raises(ValueError) as error:
        call()
    return str(error.value)


# ---- engines that DeepSpeed makes without a compiler or an accelerator -------------------------


def at_stage(stage, **more):
    return {"zero_optimization": {"stage": stage, **more}}


ENGINES = {
    "ZeRO stage 0: set zero_optimization.stage to 1, 2 or 3": at_stage(0),
    "offload_param, which was never tried: take it out": at_stage(3, offload_param=CPU),
    "DeepCompile, .*: set compile.deepcompile to false": {"compile": {"deepcompile": True}},
    "zero_hpz_partition_size=2, .*: set it to 1": at_stage(3, zero_hpz_partition_size=2),
    "zero_quantized_gradients, .*: set it to false": at_stage(3, zero_quantized_gradients=True),
    "torch_autocast in float16: .* set torch_autocast.dtype to bfloat16":
        {"torch_autocast": {"enabled": True, "dtype": "float16"}},
    "sequence parallelism, size 2, .*: train with data":
        {"sequence_parallel_size": 2, "data_parallel_size": 1},
    "gradients that nobody looks at, .*compute_grad_norm to true":
        {"bf16": {"enabled": True, "check_grad_overflow": False}},
    "checkpoint.load_universal, .*: take it out": {"checkpoint": {"load_universal": True}},
}  # fmt: skip


@in_ranks(timeout=90)
def test_zero_refusal_of_untried_engines(me):
    """Engines with untried settings are refused, and their parameters stay as they are."""
    for pattern, changes in ENGINES.items():
        made = zero.engine(zero.settings("zero1") | changes)
        before = [p.detach().clone() for p in made.module.parameters()]
        with pytest.raises(ValueError, match=f"^deepspeed_ext.attach found {pattern}"):
            deepspeed_ext.attach(made, "diloco")
        assert all(torch.equal(a, b) for a, b in zip(before, made.module.parameters(), strict=True))
        assert "step" not in vars(made)


@in_ranks()
def test_zero_accepts_bf16_autocast_and_host_masters(me):
    """bf16 autocast and masters in host memory are accepted: the engine trains, and replicas stay
    equal.
    """
    out = []
    for changes in (
        {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
        {"zero_optimization": {"stage": 2, "offload_optimizer": CPU}},
    ):
        config = zero.settings("zero1") | changes
        made, exchange = zero.attached(config, "demo", checkpoints=False)
        zero.train(made, range(3), me.rank)
        exchange.finish()
        out.append(zero.whole(made))
    return out


# ---- what needs an accelerator or a compiler: DeepSpeed's own reading of the configuration -----


class Read(DeepSpeedEngine):
    """An engine as far as its configuration goes: DeepSpeed's own methods on DeepSpeed's own
    `DeepSpeedConfig`.
    """

    def __init__(self, **changes):
        nn.Module.__init__(self)
        self._config = DeepSpeedConfig(zero.settings("zero1") | changes)
        self.module, self.mpu = zero.Model(), None
        inner = zero.adamw(self.module.parameters())
        self.optimizer = type("Zero", (), {"optimizer": inner, "param_groups": [{}]})()


MASTERS = {"enabled": True, "bf16_master_weights_and_grads": True}
CONFIGURED = {
    "fp16: its loss scaling .*; set fp16.enabled to false": {"fp16": {"enabled": True}},
    "offload_optimizer to NVMe, ": at_stage(3, offload_optimizer=NVME),
    "offload_param, ": at_stage(3, offload_param=NVME),
    "the hybrid engine, .*: set hybrid_engine.enabled to false":
        {"hybrid_engine": {"enabled": True}},
    "ZenFlow, .*: take zero_optimization.zenflow out": at_stage(2, zenflow={"topk_ratio": 0.1}),
    "SuperOffload, .*super_offload to false":
        at_stage(3, offload_optimizer=CPU | {"super_offload": True}),
    r"offload_optimizer.ratio=0.5 \(Twin-Flow\), .* to 1.0":
        at_stage(3, offload_optimizer=CPU | {"ratio": 0.5}),
    "zero_quantized_weights, ": at_stage(3, zero_quantized_weights=True),
    "zero_quantized_nontrainable_weights, ": at_stage(3, zero_quantized_nontrainable_weights=True),
    "bf16 masters or .*bf16_optimizer_states to false": {"bf16": MASTERS},
    "bf16 masters or optimizer states": {"bf16": MASTERS | {"bf16_optimizer_states": True}},
    "tensor_parallel.autotp_size 2, .*: train with data parallelism alone":
        {"tensor_parallel": {"autotp_size": 2}},
}  # fmt: skip


@pytest.mark.parametrize("pattern", CONFIGURED)
def test_zero_refusal_of_configurations(pattern):
    """Configurations of DeepSpeed that cannot work are refused."""
    with pytest.raises(ValueError, match=f"deepspeed_ext.attach found {pattern}"):
        refuse(Read(**CONFIGURED[pattern]), preset("diloco"), Topology())


def test_zero_refusal_of_older_versions(monkeypatch):
    """DeepSpeed 0.18, which lacks functions that the exchange hooks into, is refused by name."""
    monkeypatch.setattr(refusals, "VERSION", "0.18.9")
    with pytest.raises(ValueError, match="deepspeed 0.18.9: take deepspeed>=0.19"):
        refuse(Read(), preset("diloco"), Topology())


def test_zero_accepts_neighbouring_configuration():
    """The configuration beside the refused ones is accepted."""
    near = {"bf16": {"enabled": True}, **at_stage(3, offload_optimizer=CPU)}
    refuse(Read(**near), preset("diloco"), Topology())


@pytest.mark.parametrize("name, value, pattern", [
    ("pipeline_parallelism", True, "a pipeline engine, .*: train without PipelineModule"),
    ("has_moe_layers", True, "MoE layers of DeepSpeed, .*: take a model of ordinary modules"),
    ("mp_world_size", 2, "an mpu with model parallelism, size 2, "),
    ("sequence_parallel_size", 4, "sequence parallelism, size 4, "),
    (None, None, "MoE layers of DeepSpeed"),  # groups of experts in the optimizer
])  # fmt: skip
def test_zero_refusal_of_other_engines(name, value, pattern):
    """Engines of another kind are refused."""
    engine = Read()
    if name is None:
        engine.optimizer.param_groups.append({"moe": True})
    else:
        setattr(engine, name, value)
    with pytest.raises(ValueError, match=pattern):
        refuse(engine, preset("diloco"), Topology())


# ---- what is attached, and with what -----------------------------------------------------------


@in_ranks()
def test_zero_refusal_of_other_objects(me):
    """Objects other than one engine are refused."""
    made = zero.engine(zero.settings("zero1"), zero.sgd)
    several = "a list of 2: an exchange counts the steps of one engine, so pass one engine"
    model = "found Model: pass the engine, the first thing that deepspeed.initialize returns"
    for thing, words, doors in (
        ([made, made], several, (deepspeed_ext, fsdp_demo)),  # the latter finds its way here
        (made.optimizer, "found DeepSpeedZeroOptimizer: pass the engine",
            (deepspeed_ext, fsdp_demo)),
        (made.module, model, (deepspeed_ext,)),
    ):  # fmt: skip
        for door in doors:
            assert words in said(lambda door=door, thing=thing: door.attach(thing, "demo"))


@in_ranks(1)
def test_zero_refusal_of_matrix_optimizers(me):
    """Optimizers that need matrices are refused. DeepSpeed takes them without a word, and their
    first step fails.
    """
    for name, make in (
        ("Muon", lambda ps: torch.optim.Muon([p for p in ps if p.ndim == 2], lr=1e-2)),
        (
            "MuonAdamW",
            lambda ps: MuonAdamW([(f"layers.0.p{i}", p) for i, p in enumerate(ps)], 1e-2),
        ),
    ):
        made = zero.engine(zero.settings("zero1"), make)
        text = said(lambda made=made: deepspeed_ext.attach(made, "muloco"))
        assert f"{name} as the client optimizer" in text
        assert '{"type": "Muon", "params": {"lr": ...}}' in text
    low = zero.engine(zero.settings("zero1"), lambda ps: LowRankAdamW([{"params": ps, "rank": 4}]))
    config = preset("desloc", rank=4, clip=None)
    assert "LowRankAdamW, which needs matrices" in said(lambda: deepspeed_ext.attach(low, config))
    with pytest.raises(ValueError, match="must be a 2D matrix"):  # what is spared the user
        zero.train(made, range(1), me.rank)


@in_ranks(1)
def test_zero_refusal_of_foreign_parameter(me):
    """A parameter that the model does not have is refused. A criterion that learns, say. DeepSpeed
    itself refuses it at stages 1 and 2.
    """
    zero.engine(zero.settings("zero3"))  # DeepSpeed is initialised with it
    with deepspeed.zero.Init(config_dict_or_path=zero.settings("zero3")):
        lone = nn.Linear(2, 3, bias=False)
    model = zero.Model()
    groups = [*model.parameters(), *lone.parameters()]
    made = zero.engine(zero.settings("zero3"), model=model, groups=groups)
    text = said(lambda: deepspeed_ext.attach(made, "diloco"))
    assert "a parameter of shape (3, 2) that is not in the model of the engine" in text
    assert "put it into the module that deepspeed.initialize gets" in text


def test_zero_refusal_of_split_partition():
    """Gradient channels that split a partition are refused."""
    demo = preset("demo").channels[0]

    def tried(*clocks, exclude=(), frozen=False):
        patterns, engine = (("embed*", "norm*"), ("layers*", "head*")), Read()
        engine.module.head.requires_grad_(not frozen)
        channels = [
            replace(
                demo,
                name=f"g{i}",
                schedule=fsdp_demo.SyncSchedule(**schedule),
                include=patterns[i] if len(clocks) > 1 else ("*",),
                exclude=exclude,
            )
            for i, schedule in enumerate(clocks)
        ]
        refuse(engine, replace(preset("demo"), channels=tuple(channels)), Topology())

    tried({}, {})
    tried({"delay": 2}, {"delay": 2})
    tried({}, exclude=("head*",))
    tried({"sync_every": 2}, exclude=("head*",), frozen=True)
    clocks = r"unlike schedules .*'g0': \(1, 0, 0\), 'g1': \(1, 0, 2\).*give all one schedule"
    with pytest.raises(ValueError, match=clocks):
        tried({}, {"delay": 2})
    cover = "does not cover head.weight, head.bias, where ZeRO .*let it cover every trained param"
    with pytest.raises(ValueError, match=cover):
        tried({"sync_every": 2}, exclude=("head*",))


# ---- where it is attached ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["ISLAND_COUNT", "ISLAND_RANK", "ISLAND_RUN", "ISLAND_NAME", "ISLAND_ENDPOINT"]
)
@in_ranks(timeout=30)
def test_zero_refusal_of_unset_variable(me, name):
    """A rank that lacks a variable stops all ranks. As in a hostfile launch: rank 1's node has not
    got it. Nobody waits, and nobody trains as a single replica.
    """
    if me.proc == 1:
        del os.environ[name]
    text = said(deepspeed_ext.topology)
    assert text.startswith(f"ranks of one launch have different {name}: ")
    assert "; nothing on rank 1. " in text and ".deepspeed_env" in text
    assert name != "ISLAND_RANK" or f"{me.island} on rank 0" in text


@in_ranks(timeout=30)
def test_zero_refusal_of_unset_variables_at_attach(me):
    """Ranks that lack variables are refused at attach."""
    for variable in [v for v in os.environ if v.startswith("ISLAND_") and me.proc]:
        del os.environ[variable]
    made = zero.engine(zero.settings("zero2"), zero.sgd)
    for more in ({}, {"topology": Topology.from_env()}):
        text = said(lambda more=more: deepspeed_ext.attach(made, "demo", **more))
        assert "different ISLAND_COUNT: 2 on rank 0; nothing on rank 1" in text


@in_ranks(1, 5)
def test_zero_refusal_names_spans_of_ranks(me):
    """The error names ranks in spans."""
    os.environ["ISLAND_RUN"] = "b" if me.rank in (1, 4) else "a long name é"
    text = said(compare_environment)
    assert "ISLAND_RUN: a long name é on ranks 0, 2-3; b on ranks 1, 4. All need" in text


@in_ranks(1, 4, env={"ISLAND_COUNT": ""})
def test_zero_refusal_of_unsaid_nodes(me):
    """A world over several nodes that does not say what its islands are is refused."""

    def engine():
        return zero.engine(zero.settings("zero1"), zero.sgd)

    def text(made, **more):
        return said(lambda: deepspeed_ext.attach(made, "demo", **more))

    os.environ["LOCAL_WORLD_SIZE"] = "2"
    made = engine()
    unsaid = text(made)
    assert "one world of 4 ranks over nodes of 2: ZeRO reduces between the nodes" in unsaid
    assert "ISLAND_COUNT=1" in unsaid
    mesh = Topology("mesh", me.rank // 2, 2, rank=me.rank % 2, world=2)
    words = "a mesh, and an engine that reduces over all nodes: call deepspeed_ext.shard_within_nod"
    assert words in text(made, topology=mesh)
    os.environ["ISLAND_COUNT"] = "1"  # all nodes are one replica: as was said
    exchange = deepspeed_ext.attach(engine(), "demo")
    assert (exchange.topology.kind, dist.get_world_size()) == ("single", 4)
    exchange.detach()
    os.environ["ISLAND_COUNT"] = ""
    deepspeed_ext.shard_within_node(2)
    assert "an engine that was made before shard_within_node" in text(made)
    os.environ.update(ISLAND_COUNT="2", ISLAND_RANK="0", ISLAND_ENDPOINT="localhost:1")
    assert "ISLAND_COUNT=2 and shard_within_node(2) at once" in text(engine())
