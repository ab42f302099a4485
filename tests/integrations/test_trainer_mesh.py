"""One world on a mesh: under the Trainer and Accelerate nothing but the exchange's payloads crosses
nodes.
"""

import logging
import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers")
pytest.importorskip("datasets")

from accelerate.utils import ParallelismConfig  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from transformers import TrainerCallback  # noqa: E402

from fsdp_demo.integrations.mesh import ExchangeParallelismConfig, mesh_topology  # noqa: E402
from fsdp_demo.integrations.trainer import (  # noqa: E402
    ExchangeCallback,
    exchange_optimizer,
    state,
)

from ..support import trainer_script as script  # noqa: E402

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


def train(rank, preset, noisy=False, **changes):
    os.environ.update(
        PARALLELISM_CONFIG_DP_REPLICATE_SIZE="2", PARALLELISM_CONFIG_DP_SHARD_SIZE="2"
    )
    callback, watch = ExchangeCallback(preset, **changes), Watch(noisy)
    extra = {"callbacks": [callback, watch]}
    if preset == "demo":
        extra["optimizer_cls_and_kwargs"] = exchange_optimizer(preset, lr=4e-3)
    settings = {
        "max_steps": 4,
        "logging_steps": 4,
        "gradient_accumulation_steps": 2,
        "save_strategy": "no",
    }
    trained = script.trainer(
        rank.folder / "out", extra, fsdp=True, axes=ExchangeParallelismConfig(), **settings
    )
    trained.train()
    exchange = callback.exchange
    evaluated = [row["eval_loss"] for row in trained.state.log_history if "eval_loss" in row]
    mesh = exchange.optimizers[0].param_groups[0]["params"][0].device_mesh
    counts = (
        exchange.topology.islands,
        exchange.metrics()["exchanges"],
        exchange.metrics()["bytes_sent"],
    )
    inside = {ranks for _, ranks in watch.mode.seen} - {ranks for _, ranks in watch.mode.across()}
    return (
        watch.mode.across(),
        inside,
        counts,
        script.shards(trained),
        evaluated,
        mesh.ndim,
        trained.args.output_dir,
    )


@pytest.mark.parametrize(
    "preset, changes, exchanges", [("demo", {}, 4), ("diloco", {"period": 2}, 2)]
)
def test_trainer_mesh_sends_payloads_only(run_ranks, preset, changes, exchanges):
    """Two steps in a mesh send nothing but payloads between nodes."""

    def run(rank):
        return train(rank, preset, **changes)

    out = run_ranks(run, islands=1, procs=4, env=WORLD, timeout=120)
    for r, (across, inside, counts, mine, evaluated, ndim, folder) in enumerate(out):
        assert across == [] and inside == {(0, 1) if r < 2 else (2, 3)}
        assert (
            counts[:2] == (2, exchanges) and counts[2] > 0 and ndim == 1 and folder.endswith("/out")
        )
        assert torch.equal(mine, out[r % 2][3]) and evaluated == out[0][4]


def test_trainer_mesh_recorder_sees_gather(run_ranks):
    """The recorder of collectives sees a gather over all nodes."""

    def run(rank):
        return train(rank, "demo", noisy=True)

    for across, *_ in run_ranks(run, islands=1, procs=4, env=WORLD, timeout=120):
        assert len(across) == 2 and all(
            "allgather" in name and ranks == (0, 1, 2, 3) for name, ranks in across
        )


@pytest.mark.parametrize(
    "preset, changes",
    [
        ("demo", {}),
        ("diloco", {"period": 3}),
        ("decoupled_momentum", {"period": 3, "rule": "released"}),
    ],
)
def test_trainer_mesh_resume_bit_for_bit(run_ranks, tmp_path, preset, changes):
    """A mesh resumes bit for bit. What the Trainer saves in a mesh is a mixture of replicas: where
    they differ, each keeps its own beside it.
    """

    def run(rank):
        os.environ.update(
            PARALLELISM_CONFIG_DP_REPLICATE_SIZE="2", PARALLELISM_CONFIG_DP_SHARD_SIZE="2"
        )
        out, groups, cpu_group = [], [], state.cpu_group
        state.cpu_group = lambda topology: groups.append(topology) or cpu_group(topology)
        for where, resume in (("whole", None), ("cut", None), ("cut", "checkpoint-4")):
            extra = {"callbacks": [ExchangeCallback(preset, **changes)]}
            if preset == "demo":
                extra["optimizer_cls_and_kwargs"] = exchange_optimizer("demo", lr=4e-3)
            settings = {"eval_strategy": "no", "save_steps": 4, "lr_scheduler_type": "constant"}
            trained = script.trainer(
                rank.folder / where, extra, fsdp=True, axes=ExchangeParallelismConfig(), **settings
            )
            trained.train(resume_from_checkpoint=resume and str(rank.folder / where / resume))
            out.append(script.shards(trained))
        state.cpu_group = cpu_group
        assert len(groups) == 3  # one per training, none per save
        return torch.equal(out[0], out[1]), torch.equal(out[0], out[2]), out[0]

    def as_islands(rank):
        for name in ("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "PARALLELISM_CONFIG_DP_SHARD_SIZE"):
            os.environ.pop(name, None)
        extra = {"callbacks": [ExchangeCallback(preset, **changes)]}
        settings = {
            "eval_strategy": "no",
            "save_strategy": "no",
            "lr_scheduler_type": "constant",
            "optim": "adamw_torch",
        }
        trained = script.trainer(tmp_path / "again", extra, fsdp=True, **settings)
        trained.train(resume_from_checkpoint=str(next(tmp_path.glob("ranks-*/cut/checkpoint-4"))))
        return script.shards(trained)

    mesh = run_ranks(run, islands=1, procs=4, env=WORLD, timeout=180)
    assert [m[:2] for m in mesh] == [(True, True)] * 4
    # the same replicas go on as islands; other rows from here on, so only equality of the islands
    # is asked
    if preset == "diloco":
        out = run_ranks(as_islands, islands=2, procs=2, timeout=120)
        assert (
            torch.equal(out[0], out[2])
            and torch.equal(out[1], out[3])
            and out[0].norm() < 2 * mesh[0][2].norm()
        )


@pytest.mark.parametrize("told", [(3,), (0, 1, 2, 3)])
def test_trainer_mesh_sigterm(run_ranks, told):
    """SIGTERM to one rank stops a mesh. Saving is a collective over all nodes here, so nothing is
    saved before all have heard of it. Where the first rank was told, it says how to resume.
    """

    class Term(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    def run(rank):
        os.environ.update(
            PARALLELISM_CONFIG_DP_REPLICATE_SIZE="2", PARALLELISM_CONFIG_DP_SHARD_SIZE="2"
        )
        extra = {
            "callbacks": [ExchangeCallback("demo")],
            "optimizer_cls_and_kwargs": exchange_optimizer("demo", lr=4e-3),
        }
        callbacks = [Term()] if rank.rank in told else []
        trained = script.trainer(
            rank.folder / "out",
            extra,
            fsdp=True,
            axes=ExchangeParallelismConfig(),
            callbacks=callbacks,
            save_steps=50,
        )
        handler, lines = logging.Handler(), []
        handler.emit = lambda record: lines.append(record.getMessage())
        logging.getLogger("fsdp_demo").addHandler(handler)
        trained.train()
        return (
            trained.state.global_step,
            script.shards(trained),
            [p.name for p in (rank.folder / "out").glob("checkpoint-*")],
            [line for line in lines if "to resume, start all islands again" in line],
        )

    out = run_ranks(run, islands=1, procs=4, env=WORLD, timeout=120)
    assert [(o[0], o[2]) for o in out] == [(3, ["checkpoint-3"])] * 4
    assert [len(o[3]) for o in out] == [int(0 in told), 0, 0, 0]
    assert torch.equal(out[0][1], out[2][1]) and torch.equal(out[1][1], out[3][1])


def test_trainer_mesh_plain_hsdp_refused(run_ranks):
    """A plain HSDP mesh is refused."""

    def run(rank):
        extra = {"callbacks": [ExchangeCallback("diloco")]}
        with pytest.raises(
            ValueError,
            match=r"ParallelismConfig\(dp_replicate_size=2\) is HSDP: it all-reduces every "
            r"gradient",
        ):
            script.trainer(
                rank.folder / "out",
                extra,
                fsdp=True,
                axes=ParallelismConfig(dp_replicate_size=2, dp_shard_size=2),
            )

    run_ranks(run, islands=1, procs=4, env=WORLD, timeout=60)


def test_trainer_mesh_sizes_refused(monkeypatch):
    """Sizes of a mesh that do not fit the nodes are refused."""
    with pytest.raises(
        ValueError, match="dp_replicate_size=2 with dp_shard_size=1: Accelerate would take DDP"
    ):
        ExchangeParallelismConfig(dp_replicate_size=2, dp_shard_size=1)
    with pytest.raises(ValueError, match="{'cp_size': 2} beside an exchange was never tried"):
        ExchangeParallelismConfig(dp_replicate_size=2, dp_shard_size=2, cp_size=2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "6")
    with pytest.raises(
        ValueError, match="dp_shard_size=4 on nodes of 6 ranks: shards would cross the slow link"
    ):
        ExchangeParallelismConfig(dp_replicate_size=3, dp_shard_size=4)
    with pytest.raises(ValueError, match="a mesh needs ExchangeParallelismConfig"):
        mesh_topology(type("Accelerator", (), {"parallelism_config": None}))


def test_accelerate_mesh(run_ranks):
    """Accelerate trains in a mesh.
    `accelerator(parallelism_config=ExchangeParallelismConfig(...))`, attach with `mesh_topology`.
    """
    from fsdp_demo import attach
    from fsdp_demo.integrations.accelerate import accelerator

    def run(rank):
        script.fresh_state()
        acc = accelerator(
            cpu=True,
            parallelism_config=ExchangeParallelismConfig(dp_replicate_size=2, dp_shard_size=2),
        )
        inner = script.model()
        model, optimizer = acc.prepare(inner, torch.optim.AdamW(inner.named_parameters(), lr=1e-3))
        exchange = attach(optimizer, "diloco", model=model, topology=mesh_topology(acc), period=2)
        rows = torch.randint(0, 20, (4, 2, 8), generator=torch.Generator().manual_seed(3))[
            rank.rank
        ]
        mode = Collectives()
        with mode:
            for _ in range(2):
                acc.backward(model(input_ids=rows, labels=rows).loss)
                acc.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        exchange.finish()
        params = [p.to_local() for g in optimizer.param_groups for p in g["params"]]
        return (
            mode.across(),
            torch.cat([p.detach().flatten() for p in params]),
            exchange.topology.kind,
        )

    out = run_ranks(run, islands=1, procs=4, env=WORLD)
    assert all(o[0] == [] and o[2] == "mesh" for o in out)
    assert torch.equal(out[0][1], out[2][1]) and torch.equal(out[1][1], out[3][1])
