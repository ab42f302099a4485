"""`RunState` in a plain loop: 2N steps are N steps, a stop, a restore and N steps, bit for bit."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint  # before the first fork: it takes a second

import fsdp_demo
from fsdp_demo.checkpoint import CheckpointManager, RunState, run_state
from fsdp_demo.checkpoint.files import read_part
from fsdp_demo.checkpoint.manager import ResumePoint
from fsdp_demo.checkpoint.run_state import random_states, set_random_states

from ..support.heard import heard
from ..support.inside import in_ranks
from ..support.plain_loop import PlainLoop
from ..support.small import same

STEPS, STOP = 6, 3


class Job(PlainLoop):
    """A small loop, whose dropout and data draw from torch's generator."""

    rows = 0

    def __init__(self, folder, resume, seed, delay=0):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)
        )
        config = fsdp_demo.load_config("diloco", ["period=2", f"delta.schedule.delay={delay}"])
        optimizer = fsdp_demo.base_optimizer(config, model.named_parameters(), 0.01)
        super().__init__(folder, model, optimizer, config, resume, facts={"seed": seed})
        self.rows = self.state.extra.get("rows", 0)

    def extra(self):
        return {"rows": self.rows, "seen": torch.tensor([self.rows])}

    def loss(self):
        self.rows += 3
        return self.model(torch.randn(3, 4)).square().sum()

    def numbers(self):
        states = [self.optimizer.state.get(p, {}) for p in self.model.parameters()]
        moments = [v.clone() for state in states for v in state.values()]
        return [*super().numbers(), *moments, torch.tensor(self.rows)]


@pytest.mark.parametrize("how", ["waiting", "behind", "last"])
@in_ranks(2, 1)
def test_run_state_resume_bit_for_bit(me, how):
    """A restored run is the uninterrupted one, bit for bit: it was left after STOP steps and
    restored from other weights.
    """
    run = os.environ["ISLAND_RUN"]
    whole = Job(me.folder, False, me.island, delay=1)
    whole.until(STOP)
    whole.state.save(whole.exchange, whole.extra, wait=how != "behind", last=how == "last")
    whole.until(STEPS)
    end = whole.finish()
    os.environ["ISLAND_RUN"] = f"{run}-again"
    again = Job(me.folder, True, 100 + me.island, delay=1)
    begun = again.state.step, again.state.same, again.rows, int(again.state.extra["seen"])
    again.until(STEPS)
    again.exchange.finish()
    again.state.finish()
    assert begun == (STOP, True, 3 * STOP, 3 * STOP) and same(end, again.numbers())
    left = [p.name for p in again.checkpoints.root.iterdir() if p.name[0] != "."]
    assert left == [f"checkpoint-{STOP}"]


@in_ranks(1, 1)
def test_run_state_random_states_per_rank(me):
    """Random states come back to the rank that saved them: a checkpoint of another island gives its
    numbers, not its random states.
    """
    one = Job(me.folder, False, 5)
    one.until(2)
    one.state.save(one.exchange, one.extra)
    one.exchange.finish()
    torch.manual_seed(9)
    before = torch.get_rng_state()
    moved = CheckpointManager(
        me.folder / "island0", fsdp_demo.Topology("islands", 1, 2, name="island1")
    )
    moved.resume_point = lambda resume, take_over: ResumePoint(2, moved.path(2), False)
    state = RunState(moved, one.model, one.optimizer)
    state.restore()
    state.restore_random()
    assert (state.step, state.same, state.extra["rows"]) == (2, False, 6)
    assert torch.equal(before, torch.get_rng_state())


@in_ranks(1, 1)
def test_run_state_files_and_keys(me):
    """The files and keys of a checkpoint are a format: tools and older runs read them."""
    one = Job(me.folder, False, 5)
    one.until(1)
    one.state.save(one.exchange, one.extra)
    root = one.checkpoints.path(1)
    head, loop = read_part(root / "loop" / "rank0.json")
    files = {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()}
    model = {f for f in files if f.startswith("model/")}
    kinds, ends = ("exchange", "loop"), ("json", "safetensors")
    parts = {f"{kind}/rank0.{end}" for kind in kinds for end in ends}
    assert files - model == {*parts, "facts.json", "manifest.json"}
    assert any(f.endswith(".safetensors") for f in model)
    assert sorted(loop) == ["random", "rows", "seen"]
    assert [head[k] for k in ("step", "rank", "world")] == [1, 0, 1]


def test_run_state_optimizer_objects_refused(tmp_path):
    """An optimizer whose state holds other objects than tensors and numbers is refused."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.state[model.weight]["note"] = "text"
    with pytest.raises(
        ValueError,
        match="keeps note for weight, of type str: .*Use an optimizer whose states are such",
    ):
        run_state.tensors_of(model, [optimizer])


class Lists(torch.optim.SGD):
    """Keeps a list of tensors for each parameter from its first step on, as Shampoo and SOAP."""

    def step(self, closure=None):
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            self.state[p]["factors"] = [torch.eye(2)]


def test_run_state_list_states_refused_early(tmp_path):
    """An optimizer whose states are lists is refused before the first save: at the end of its first
    step, or at once where it has states. Where nothing is saved it trains.
    """

    # torch wraps the step of a class that has had an object: that of the base, too, then
    torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)

    def training(saves):
        model = torch.nn.Linear(2, 2)
        optimizer = Lists(model.parameters(), lr=0.1)
        if saves:
            RunState(CheckpointManager(tmp_path, fsdp_demo.Topology()), model, optimizer)
        exchange = fsdp_demo.attach(
            optimizer, "diloco", model=model, period=2, inner_optimizers="as_is"
        )
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        exchange.finish()
        return model, optimizer

    with pytest.raises(ValueError, match="the optimizer keeps factors for weight, of type list"):
        training(True)
    model, optimizer = training(False)
    with pytest.raises(ValueError, match=r"docs/troubleshooting.md#unsaveable-state"):
        RunState(CheckpointManager(tmp_path, fsdp_demo.Topology()), model, optimizer)


@in_ranks(1, 2)
def test_run_state_extra_not_saveable_is_warning(me):
    """A DTensor, or an object, in what a loop keeps is a warning that names it; the third in a row
    ends the run. Shards are saved.
    """
    from torch.distributed.fsdp import fully_shard

    model, said = torch.nn.Linear(4, 4), heard()
    fully_shard(model, mesh=me.mesh())
    optimizer = torch.optim.AdamW(model.parameters())
    manager = CheckpointManager(me.folder / "own", fsdp_demo.Topology.from_env())
    state = RunState(manager, model, optimizer)
    exchange = fsdp_demo.attach(optimizer, "diloco", model=model, period=2)
    shards = {n: p.to_local().clone() for n, p in model.named_parameters()}
    for kept in (
        lambda: {"ema": dict(model.named_parameters())},
        lambda: {"note": object()} if me.proc else {},
    ):
        state.save(exchange, kept)
        assert not manager.whole()
    with pytest.raises(ValueError):
        state.save(exchange, lambda: {"ema": dict(model.named_parameters())}, wait=False)
        manager.wait()
    state.save(exchange, lambda: {"ema": shards})
    exchange.finish()
    again = RunState(manager, model, optimizer)
    again.restore()
    assert manager.failed_saves == 3
    assert all(torch.equal(shards[n], t) for n, t in again.extra["ema"].items())
    words = ("'note' is of type object",)
    if me.proc == 0:
        other = "another rank found a value that cannot be saved"
        words = ("'ema.weight' is a DTensor: keep its shard", other)
    assert all(any(word in line for line in said) for word in words), said


def test_run_state_random_states_round_trip(tmp_path):
    """Random states are a tree that comes back."""
    import random

    numpy = pytest.importorskip("numpy")
    states = random_states()
    drawn = [random.random(), float(numpy.random.rand()), float(torch.rand(()))]
    set_random_states(states)
    assert drawn == [random.random(), float(numpy.random.rand()), float(torch.rand(()))]


PUBLIC = (
    "fsdp_demo", "fsdp_demo.checkpoint", "fsdp_demo.cli", "fsdp_demo.errors",
    "fsdp_demo.tools.planner", "fsdp_demo.tools.report", "fsdp_demo.runlog", "fsdp_demo.status",
    "deepspeed_ext",
)  # fmt: skip
RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.py"))


@pytest.mark.parametrize("script", RECIPES, ids=lambda path: path.stem)
def test_run_state_recipes_import_public_names(script):
    """The scripts that users copy import public names only."""
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        module = getattr(node, "module", None) or ""
        ours = module.partition(".")[0] in ("fsdp_demo", "deepspeed_ext")
        if not ours or module.startswith("fsdp_demo.integrations."):
            continue
        assert module in PUBLIC, f"{script.name}:{node.lineno} imports from {module}"
        public = getattr(__import__(module, fromlist=["*"]), "__all__", None)
        names = {alias.name for alias in node.names}
        assert public is None or names <= set(public), f"{script.name}:{node.lineno}"
