"""One world on a mesh: under the Trainer and Accelerate nothing but the exchange's payloads crosses
nodes.
"""

import logging
import os

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import ParallelismConfig
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback

from fsdp_demo import attach
from fsdp_demo.checkpoint import manager
from fsdp_demo.integrations.accelerate import accelerator
from fsdp_demo.integrations.mesh import ExchangeParallelismConfig, mesh_topology
from fsdp_demo.integrations.trainer import ExchangeCallback

from ..support import trainer_script as script
from ..support.heard import heard
from ..support.inside import in_ranks
from ..support.trainer_script import history, one_line

WORLD = {"ISLAND_COUNT": ""}  # no ISLAND_* variables: four ranks, two nodes of two


class Collectives(TorchDispatchMode):
    """Collectives of this thread and the ranks they span."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor's own collectives come back as plain ones
        name = str(func)
        if name.startswith(("c10d.", "_c10d_functional.")):
            for arg in [*args, *(kwargs or {}).values()]:
                if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
                    self.seen.append(
                        (name, tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(arg))))
                    )
                elif (
                    isinstance(arg, str)
                    and name.startswith("_c10d_functional.")
                    and "wait" not in name
                ):
                    group = (
                        dist.distributed_c10d._resolve_process_group(arg) if arg.isdigit() else None
                    )
                    if group is not None:
                        self.seen.append((name, tuple(dist.get_process_group_ranks(group))))
        return func(*args, **(kwargs or {}))

    def across(self):
        return [(name, ranks) for name, ranks in self.seen if len({r // 2 for r in ranks}) > 1]


class Watch(TrainerCallback):
    """Counts from the start of the first epoch, when the islands have met, to the end of the second
    step.
    """

    def __init__(self, noisy):
        self.mode, self.noisy = Collectives(), noisy

    def on_epoch_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            args.average_tokens_across_devices = self.noisy or args.average_tokens_across_devices
            self.mode.__enter__()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            self.mode.__exit__(None, None, None)


def trainer(rank, where, preset, changes, callbacks=(), **settings):
    """A Trainer on two nodes of two ranks."""
    os.environ.update(
        PARALLELISM_CONFIG_DP_REPLICATE_SIZE="2", PARALLELISM_CONFIG_DP_SHARD_SIZE="2"
    )
    settings |= {"fsdp": True, "axes": ExchangeParallelismConfig(), "callbacks": callbacks}
    return script.trainer(rank.folder / where, one_line(preset, **changes), **settings)


def train(rank, preset, changes, noisy=False):
    """What crosses nodes in two steps, and the Trainer."""
    watch = Watch(noisy)
    settings = dict(max_steps=4, logging_steps=4, gradient_accumulation_steps=2, save_strategy="no")
    trained = trainer(rank, "out", preset, changes, [watch], **settings)
    trained.train()
    return watch.mode, trained


@script.MESH
@pytest.mark.parametrize(
    "preset, changes, exchanges", [("demo", {}, 4), ("diloco", {"period": 2}, 2)]
)
@in_ranks(1, 4, env=WORLD, timeout=120)
def test_trainer_mesh_sends_payloads_only(me, preset, changes, exchanges):
    """Two steps in a mesh send nothing but payloads between nodes."""
    mode, trained = train(me, preset, changes)
    exchange, first = script.exchange_of(trained), me.proc // 2 * 2
    assert mode.across() == [] and {ranks for _, ranks in mode.seen} == {(first, first + 1)}
    sent = exchange.metrics()
    assert exchange.topology.islands == 2 and sent["exchanges"] == exchanges
    assert sent["bytes_sent"] > 0 and trained.args.output_dir.endswith("/out")
    assert exchange.optimizers[0].param_groups[0]["params"][0].device_mesh.ndim == 1
    return script.parameters(trained), history(trained, "eval_loss")


@script.MESH
@in_ranks(1, 4, env=WORLD, timeout=120)
def test_trainer_mesh_recorder_sees_gather(me):
    """The recorder of collectives sees a gather over all nodes."""
    across = train(me, "demo", {}, noisy=True)[0].across()
    assert len(across) == 2
    assert all("allgather" in name and ranks == (0, 1, 2, 3) for name, ranks in across)


@script.MESH
@pytest.mark.parametrize("preset, changes", [
    ("demo", {}),
    ("diloco", {"period": 3}),
    ("decoupled_momentum", {"period": 3, "rule": "released"}),
])  # fmt: skip
def test_trainer_mesh_resume_bit_for_bit(run_ranks, tmp_path, preset, changes):
    """A mesh resumes bit for bit. What the Trainer saves in a mesh is a mixture of replicas: where
    they differ, each keeps its own beside it.
    """

    def run(rank):
        out, groups, cpu_group = [], [], manager.cpu_group
        manager.cpu_group = lambda topology: groups.append(topology.kind) or cpu_group(topology)
        for where, resume in (("whole", None), ("cut", None), ("cut", "checkpoint-4")):
            settings = {"eval_strategy": "no", "save_steps": 4, "lr_scheduler_type": "constant"}
            trained = trainer(rank, where, preset, changes, **settings)
            trained.train(resume and str(rank.folder / where / resume))
            out.append(script.shards(trained))
        manager.cpu_group = cpu_group
        assert groups.count("mesh") == 3  # one per training, none per save
        assert torch.equal(out[0], out[1]) and torch.equal(out[0], out[2])
        return out[0]

    def as_islands(rank):
        for name in ("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "PARALLELISM_CONFIG_DP_SHARD_SIZE"):
            os.environ.pop(name, None)
        at, settings = next(tmp_path.glob("ranks-*/cut/checkpoint-4")), dict(
            eval_strategy="no", save_strategy="no", lr_scheduler_type="constant",
            optim="adamw_torch",
        )  # fmt: skip
        line = one_line(preset, **changes)
        trained = script.trained(tmp_path / "again", line, resume=str(at), fsdp=True, **settings)
        return script.shards(trained)

    mesh = run_ranks(run, islands=1, procs=4, env=WORLD, timeout=180)
    # the same replicas go on as islands; other rows from here on, so only equality of the islands
    # is asked
    if preset == "diloco":
        out = run_ranks(as_islands, islands=2, procs=2, timeout=120)
        assert torch.equal(out[0], out[2])
        assert torch.equal(out[1], out[3])
        assert out[0].norm() < 2 * mesh[0].norm()


@script.MESH
@pytest.mark.parametrize("told", [(3,), (0, 1, 2, 3)])
@in_ranks(1, 4, env=WORLD, timeout=120)
def test_trainer_mesh_sigterm(me, told):
    """SIGTERM to one rank stops a mesh. Saving is a collective over all nodes here, so nothing is
    saved before all have heard of it. Where the first rank was told, it says how to resume.
    """
    callbacks = [script.At("on_step_end", script.sigterm, 2)] * (me.rank in told)
    trained = trainer(me, "out", "demo", {}, callbacks, save_steps=50)
    lines = heard(logging.INFO)
    trained.train()
    assert trained.state.global_step == 3 and script.checkpoints(trained) == ["checkpoint-3"]
    said = [line for line in lines if "to resume, start all islands again" in line]
    assert len(said) == (me.rank == 0 and 0 in told)
    return script.parameters(trained)


@script.MESH
@in_ranks(1, 4, env=WORLD)
def test_trainer_mesh_plain_hsdp_refused(me):
    """A plain HSDP mesh is refused."""
    line = {"callbacks": [ExchangeCallback("diloco")]}
    axes = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    said = r"ParallelismConfig\(dp_replicate_size=2\) is HSDP: it all-reduces every gradient"
    with pytest.raises(ValueError, match=said):
        script.trainer(me.folder / "out", line, fsdp=True, axes=axes)


def test_trainer_mesh_sizes_refused(monkeypatch):
    """Sizes of a mesh that do not fit the nodes are refused."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "6")
    for said, replicas, shards, more in (
        ("dp_replicate_size=2 with dp_shard_size=1: Accelerate would take DDP", 2, 1, {}),
        ("{'cp_size': 2} beside an exchange was never tried", 2, 2, {"cp_size": 2}),
        ("dp_shard_size=4 on nodes of 6 ranks: shards would cross the slow link", 3, 4, {}),
    ):
        with pytest.raises(ValueError, match=said):
            ExchangeParallelismConfig(dp_replicate_size=replicas, dp_shard_size=shards, **more)
    with pytest.raises(ValueError, match="a mesh needs ExchangeParallelismConfig"):
        mesh_topology(type("Accelerator", (), {"parallelism_config": None}))


@in_ranks(1, 4, env=WORLD)
def test_accelerate_mesh(me):
    """Accelerate trains in a mesh.
    `accelerator(parallelism_config=ExchangeParallelismConfig(...))`, attach with `mesh_topology`.
    """
    script.fresh_state()
    axes = ExchangeParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    acc = accelerator(cpu=True, parallelism_config=axes)
    inner = script.model()
    model, optimizer = acc.prepare(inner, torch.optim.AdamW(inner.named_parameters(), lr=1e-3))
    exchange = attach(optimizer, "diloco", model=model, topology=mesh_topology(acc), period=2)
    g, mode = torch.Generator().manual_seed(3), Collectives()
    rows = torch.randint(0, 20, (4, 2, 8), generator=g)[me.rank]
    with mode:
        for _ in range(2):
            acc.backward(model(input_ids=rows, labels=rows).loss)
            acc.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    exchange.finish()
    assert mode.across() == [] and exchange.topology.kind == "mesh"
    params = [p.full_tensor() for g in optimizer.param_groups for p in g["params"]]
    return torch.cat([p.detach().flatten() for p in params])
