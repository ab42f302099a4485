"""`fsdp_demo.integrations.accelerate`: Accelerate's own FSDP2 path inside an island, on CPU."""

import os

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM

import fsdp_demo
from fsdp_demo.checkpoint import load_exchange, save_exchange
from fsdp_demo.integrations import accelerate as integration

from ..support.inside import in_ranks
from ..support.llama import llama
from ..support.small import same

# [micro-batch, rank, row, token]
ROWS = torch.randint(0, 64, (2, 2, 3, 16), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")


def expected_gradients(tied=False):
    """Of one process that sees the micro-batches of all ranks."""
    model = llama(tied)
    for rows in ROWS.flatten(0, 1):
        (model(input_ids=rows, labels=rows).loss / 4).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def train(rank, shard, precision, tied):
    """Two micro-batches through `accumulate`; the model, and whether a step came early."""
    more = {"mixed_precision": precision, "gradient_accumulation_steps": 2}
    accelerator = integration.accelerator(shard=shard, **more)
    model = llama(tied)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    synced = []
    for micro in ROWS:
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=micro[rank.proc], labels=micro[rank.proc]).loss)
            synced.append(accelerator.sync_gradients)
    return model, synced


@pytest.mark.parametrize(("shard", "precision", "tied", "tolerance"), [
    (True, "no", False, 1e-5), (True, "no", True, 1e-5), (True, "bf16", False, 0.05),
    (False, "no", False, 1e-5), (False, "bf16", False, 0.05),
])  # fmt: skip
@in_ranks(1, 2, env={"ISLAND_COUNT": "1"})
def test_accelerate_gradient_mean_over_island(me, shard, precision, tied, tolerance):
    """The gradient is the mean over the ranks of the island."""
    model, synced = train(me, shard, precision, tied)
    named = {name.removeprefix("module."): p for name, p in model.named_parameters()}
    kinds = {(isinstance(p, DTensor), p.dtype, p.grad.dtype) for p in named.values()}
    assert kinds == {(shard, torch.float32, torch.float32)} and synced == [False, True]
    units = {name for name, m in model.named_modules() if type(m).__name__.startswith("FSDP")}
    assert ({"model.layers.0", "model.layers.1"} <= units) == shard
    expected = expected_gradients(tied)
    assert set(named) == set(expected)
    for name, p in named.items():
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        assert torch.dist(grad, expected[name]) <= tolerance * expected[name].norm(), name


@in_ranks()
def test_accelerate_islands_follow_one_process(me):
    """Two islands that Accelerate shards follow one process and send nothing on micro-batches."""
    config, whole = fsdp_demo.preset("full"), llama()
    reference = fsdp_demo.base_optimizer(config, whole.named_parameters(), lr=0.01)
    for _ in range(2):
        for rows in ROWS.flatten(0, 1):
            (whole(input_ids=rows, labels=rows).loss / 4).backward()
        reference.step()
        reference.zero_grad()
    accelerator, model = integration.accelerator(gradient_accumulation_steps=2), llama()
    optimizer = fsdp_demo.base_optimizer(config, model.named_parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    exchange = fsdp_demo.attach(optimizer, config, model=model)
    for micro in [ROWS[me.island], ROWS[1 - me.island]] * 2:
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=micro[me.proc], labels=micro[me.proc]).loss)
            optimizer.step()
            optimizer.zero_grad()
    # per optimizer step: header, reduce-scatter, all-gather
    assert exchange.step == 2 and exchange.metrics()["messages"] == 2 * 3
    assert exchange.digests_equal()
    exchange.finish()
    expected = dict(whole.named_parameters())
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.full_tensor(), expected[name], rtol=1e-3, atol=2e-5)


def test_accelerate_one_process_unsharded():
    """One process is not sharded."""
    accelerator = integration.accelerator()
    model = llama()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert type(model) is LlamaForCausalLM and accelerator.num_processes == 1
    assert not any(isinstance(p, DTensor) for p in model.parameters())


@in_ranks(1, env={"ISLAND_COUNT": "1"})
def test_accelerate_scheduler_once_per_call(me):
    """The scheduler advances once per call on islands of any size."""
    accelerator = integration.accelerator()
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer, scheduler = accelerator.prepare(
        model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    )
    accelerator.backward(model(input_ids=ROWS[0, 0], labels=ROWS[0, 0]).loss)
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [0.5]


def test_accelerate_refusals_name_cure(monkeypatch):
    """Settings that cannot work are refused with the cure."""
    with pytest.raises(ValueError, match="fp16"):
        integration.accelerator(mixed_precision="fp16")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="fsdp_version=1: allowed is 2"):
        integration.accelerator(
            cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=1)
        )
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="start at most 1, or set ACCELERATE_USE_CPU"):
        integration.accelerator()
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert integration._use_cpu()


@in_ranks(1, env={"ISLAND_COUNT": "1"})
def test_accelerate_moved_internals_named(me):
    """The error names internals of Accelerate that a release has moved."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Accelerator, "is_fsdp2", False)
        patch.setattr(ParallelismConfig, "_validate_accelerator", lambda *_: None)
        with pytest.raises(RuntimeError, match="did not turn FSDP2 on .*accelerate "):
            integration.accelerator()
    AcceleratorState._reset_state(True)
    integration.accelerator(shard=False)
    with pytest.raises(RuntimeError, match="model.embed_tokens.weight is not sharded"):
        integration.check_axes(llama(), 2)
    assert os.environ["ACCELERATE_USE_FSDP"] == "false"


# ---- save and resume ---------------------------------------------------------------------------


class Life:
    """One start of a script that saves by Accelerate, as docs/accelerate.md has it."""

    def __init__(self, rank, folder=None):
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):  # a single process
            os.environ.pop(name, None)
        self.rank, self.accelerator = rank, integration.accelerator(shard=False)
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        state = None
        if folder is not None:
            self.accelerator.load_state(folder / "state")
            state = load_exchange(folder / "exchange")
        self.exchange = fsdp_demo.attach(
            self.optimizer, "diloco", model=self.model, period=4, state=state
        )

    def train(self, steps):
        while self.exchange.step < steps:
            seed = 100 * self.exchange.step + self.rank.island
            rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
            self.accelerator.backward((self.model(rows) - rows.flip(1)).square().mean())
            self.optimizer.step()
            self.optimizer.zero_grad()

    def weights(self):
        return [p.detach().clone() for p in self.model.parameters()]


def test_accelerate_resume_bit_for_bit(run_ranks):
    """A run that Accelerate saved goes on bit for bit. Anchors, outer momenta and the islands' own
    steps between two exchanges included.
    """

    def work(rank):
        """Six steps after twelve in one go, and six more in a second life."""
        straight = Life(rank)
        straight.train(12)
        straight.exchange.finish()
        first, mine = Life(rank), rank.folder / f"island{rank.island}"
        first.train(6)
        first.accelerator.save_state(mine / "state")
        save_exchange(mine / "exchange", first.exchange)
        first.exchange.detach()
        second = Life(rank, mine)
        own = second.weights()
        assert second.exchange.step == 6 and same(own, first.weights())
        second.train(12)
        second.exchange.finish()
        assert same(second.weights(), straight.weights())
        return own

    assert not same(*run_ranks(work, 2, 1))  # own steps


@in_ranks(1, env={"ISLAND_COUNT": "1"})
def test_accelerate_save_of_exchange_refused(me, tmp_path):
    """Accelerate does not save an exchange. It keeps the file of one rank for all: refused at the
    registration, or at the save of an Accelerator of the user's own, on every rank.
    """
    made = integration.accelerator(shard=False)
    model = made.prepare(torch.nn.Linear(2, 2))
    exchange = fsdp_demo.attach(torch.optim.AdamW(model.parameters()), "diloco", model=model)
    with pytest.raises(ValueError, match="registered for checkpointing with Accelerate: each"):
        made.register_for_checkpointing(exchange)
    Accelerator.register_for_checkpointing(made, exchange)
    with pytest.raises(ValueError, match=r"save_exchange\(FOLDER, exchange\) on every rank"):
        made.save_state(tmp_path / "state")
    exchange.detach()
