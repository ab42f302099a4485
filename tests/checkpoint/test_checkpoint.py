"""fsdp_demo.checkpoint: the form on disk, what is refused, and which checkpoints stay."""

import copy
import json
import math
import os
import shutil
import time

import pytest
import torch
from torch import nn

import fsdp_demo
from fsdp_demo.checkpoint import CheckpointManager, load_exchange, save_exchange, snapshot
from fsdp_demo.checkpoint.files import crc32, read_part, write_part
from fsdp_demo.checkpoint.folders import MANIFEST
from fsdp_demo.checkpoint.inspect import inspect

from ..support import probe


def attached(preset="diloco", model=None, state=None, lr=0.1, **changes):
    """A single replica that exchanges with nobody."""
    torch.manual_seed(0)
    model = model or nn.Linear(70, 66)
    config = fsdp_demo.preset(preset, **changes)
    optimizer = fsdp_demo.base_optimizer(config, model.named_parameters(), lr)
    return model, optimizer, fsdp_demo.attach(optimizer, config, model=model, state=state)


def run(model, optimizer, steps, seed=0):
    for i in range(steps):
        model(torch.full((2, 70), 0.1 * (i + seed))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def saved(folder, preset="diloco", steps=5, **changes):
    """A folder with one part, and the state in it."""
    model, optimizer, exchange = attached(
        preset, **({"period": 2} if preset == "diloco" else {}), **changes
    )
    run(model, optimizer, steps)
    save_exchange(folder, exchange)
    state = copy.deepcopy(exchange.state_dict())
    exchange.detach()
    return state


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            and torch.equal(a.contiguous().view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))
        )
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return (a == b and type(a) is type(b)) or (
        isinstance(a, float) and math.isnan(a) and math.isnan(b)
    )


# -- the form on disk ----------------------------------------------------------------------------


def test_part_round_trip_without_pickle(tmp_path):
    """A tree comes back from a part bit for bit and without pickle."""
    work = torch.arange(12.0)
    tree = {
        "whole": work,
        "view": work[3:7],
        "turned": work.view(3, 4).T,
        "empty": torch.empty(0),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "bf16": torch.randn(5).bfloat16(),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "nested": [{"tensor": torch.tensor([1])}, {"number": 3}, [], {}, None, True],
        "numbers": [math.nan, math.inf, -math.inf, 0.1, 1e-300, 2**63 + 1, -0.0],
        "a": {"b": torch.tensor([1.0])},
        "a.b": torch.tensor([2.0]),
        "text": "ä",
    }
    write_part(tmp_path, "rank0", {"step": 3}, tree)
    head, again = read_part(tmp_path / "rank0.json")
    assert equal(tree, again) and math.copysign(1, again["numbers"][-1]) == -1
    assert head["step"] == 3 and head["format"] == 3 and head["package"] == fsdp_demo.__version__
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rank0.json", "rank0.safetensors"]


def test_part_head_names_its_rank(tmp_path):
    """The head of a part says which rank saved it."""
    saved(tmp_path)
    found = load_exchange(tmp_path)
    (head,) = found.heads
    assert found.step == 5 and found.complete and found.islands == [0]
    assert {k: head[k] for k in ("preset", "islands", "shards", "copies", "rank", "world")} == {
        "preset": "diloco",
        "islands": 1,
        "shards": 1,
        "copies": 1,
        "rank": 0,
        "world": 1,
    }
    assert fsdp_demo.ExchangeConfig.from_dict(head["config"]).digest() == head["digest"]
    assert [p["name"] for p in head["parameters"]] == ["weight", "bias"] and head["parameters"][0][
        "shape"
    ] == [66, 70]


PRESETS = {
    "demo": {},
    "demo, delayed": {"momentum.schedule.delay": 2},
    "diloco": {"period": 4},
    "streaming_diloco": {"period": 4, "delay": 2, "layers": 0},
    "decoupled_momentum": {"period": 3, "rule": "released"},
    "desloc": {"period": 2},
    "random": {},
    "sign_loco, kept": {"period": 4, "schedule.delay": 2, "applier.keep_steps": True},
    "diloco, eager": {"period": 3, "schedule.delay": 3, "applier.own_share": 0.5},
}


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", PRESETS)
def test_resume_attach_bit_for_bit(run_ranks, name, sharded):
    """`attach` takes a saved state bit for bit."""

    def job(me):
        config = fsdp_demo.preset(name.split(",")[0], **PRESETS[name])
        folder = me.folder / f"home{me.island}"
        run_id = os.environ["ISLAND_RUN"]

        def start(state):
            os.environ["ISLAND_RUN"] = f"{run_id}-{state is not None}"
            model = probe.Probe(3)
            if sharded:
                probe.shard(model, me.mesh())
            optimizer = fsdp_demo.base_optimizer(config, model.named_parameters(), 0.05)
            return model, optimizer

        def steps(model, optimizer, begin, end):
            for t in range(begin, end):
                probe.backward(model, me, t, 0, sharded)
                optimizer.step()
                optimizer.zero_grad()

        model, optimizer = start(None)
        exchange = fsdp_demo.attach(optimizer, config, model=model)
        steps(model, optimizer, 0, 5)
        save_exchange(folder, exchange)
        copy_of = snapshot(exchange)
        kept = copy.deepcopy([state for state in (model.state_dict(), optimizer.state_dict())])
        flights = len(exchange.state_dict()["in_flight"])
        steps(model, optimizer, 5, 9)
        copy_of.write(me.folder / f"late{me.island}")  # training went on meanwhile
        whole, state = probe.parts(model), copy.deepcopy(exchange.state_dict())
        exchange.detach()
        model, optimizer = start(folder)
        model.load_state_dict(kept[0])
        optimizer.load_state_dict(kept[1])
        exchange = fsdp_demo.attach(optimizer, config, model=model, state=load_exchange(folder))
        assert exchange.step == 5 and len(exchange.state_dict()["in_flight"]) == flights
        steps(model, optimizer, 5, 9)
        same = equal(state, exchange.state_dict()) and equal(whole, probe.parts(model))
        exchange.detach()
        late = [
            crc32(f / f"rank{me.proc}.safetensors")
            for f in (folder, me.folder / f"late{me.island}")
        ]
        return same, flights, late[0] == late[1]

    for same, flights, late in run_ranks(job, islands=2, procs=2 if sharded else 1):
        under_way = {"demo, delayed": 2, "streaming_diloco": 1}
        under_way |= {"sign_loco, kept": 1, "diloco, eager": 1}
        assert same and late and flights == under_way.get(name, 0)


# -- what is refused -----------------------------------------------------------------------------


def cut(path, keep):
    path.write_bytes(path.read_bytes()[:keep])


def flip(path, at=-3):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(bytes(content))


def newer(path):
    sealed = json.loads(path.read_text())
    part = json.loads(sealed["part"])
    part["head"] |= {"format": 4, "package": "9.1"}
    path.write_text(json.dumps(sealed | {"part": json.dumps(part)}))


DAMAGE = {
    "no part": (lambda f: [p.unlink() for p in f.iterdir()], "no part of an exchange's state"),
    "no json": (
        lambda f: (f / "rank0.json").rename(f / "rank0.json.part"),
        "only unfinished files",
    ),
    "no tensors": (lambda f: (f / "rank0.safetensors").unlink(), "rank0.safetensors is missing"),
    "cut": (lambda f: cut(f / "rank0.safetensors", 1000), "has 1000 bytes.*half-written or cut"),
    "cut json": (lambda f: cut(f / "rank0.json", 200), "rank0.json is damaged"),
    "flipped json": (lambda f: flip(f / "rank0.json", -300), "rank0.json is damaged"),
    "newer": (
        lambda f: newer(f / "rank0.json"),
        "format 4, written by fsdp_demo 9.1.*install fsdp_demo 9.1 or newer",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_part_damage_refused(tmp_path, name):
    """A damaged part is refused, and the error names a way out."""
    saved(tmp_path)
    damage, message = DAMAGE[name]
    damage(tmp_path)
    with pytest.raises(ValueError, match=message) as caught:
        load_exchange(tmp_path)
    assert str(tmp_path) in str(caught.value) and "start the exchange anew" in str(caught.value)


def test_part_flipped_bit_found(tmp_path):
    """A flipped bit in the tensors is found when they are read."""
    saved(tmp_path)
    flip(tmp_path / "rank0.safetensors")
    found = load_exchange(tmp_path)  # only heads
    with pytest.raises(ValueError, match="damaged: checksum"):
        attached(state=found, period=2)


FOREIGN = {
    "preset": (
        lambda: {"preset": "decoupled_momentum", "period": 2},
        "saved by preset 'diloco', this run has 'decoupled_momentum'",
    ),
    "shapes": (
        lambda: {"model": nn.Linear(70, 65), "period": 2},
        "another model: weight is .66, 70. there, .65, 70. here",
    ),
    "names": (
        lambda: {"model": nn.Sequential(nn.Linear(70, 66)), "period": 2},
        r"another model: 0.weight is absent there",
    ),
    "dtype": (
        lambda: {"model": nn.Linear(70, 66).bfloat16(), "period": 2},
        "with weight in float32, this run has it in bfloat16: load the model with dtype=torch.fl",
    ),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_resume_state_of_other_run_refused(tmp_path, name):
    """A state of another run is refused with the way to begin anew."""
    saved(tmp_path)
    make, message = FOREIGN[name]
    with pytest.raises(ValueError, match=message) as caught:
        attached(**make(), state=load_exchange(tmp_path))
    assert "start the exchange anew" in str(caught.value)


def test_resume_other_period_goes_on(tmp_path, caplog):
    """A state that was saved with another period is taken, and the log says so."""
    saved(tmp_path)
    _, _, exchange = attached(state=load_exchange(tmp_path), period=5)
    assert exchange.step == 5 and "another configuration" in caplog.text
    exchange.detach()


def test_part_outline_without_tensors(tmp_path):
    """An outline has the names of a part and none of its tensors. A part that holds what this
    release does not know is refused.
    """
    whole = saved(tmp_path)
    outline = load_exchange(tmp_path).outline(0)
    assert (outline.step, outline.last) == (5, whole["last"])
    assert all(
        set(work) == {"tensor"}
        for kept in outline.channels.values()
        for work in kept.workspaces.values()
    )
    head, state = read_part(tmp_path / "rank0.json")
    late = {
        "step": 4,
        "members": ["delta"],
        "parts": {"delta": {"step": 4, "speed": 2}},
        "arrived": None,
    }
    write_part(tmp_path, "rank0", head, {**state, "in_flight": [late]})
    with pytest.raises(
        ValueError,
        match=r"rank0.json holds what this fsdp_demo, .*'speed'.*install that one, or start the "
        r"exchange anew",
    ):
        load_exchange(tmp_path).outline(0)
    with pytest.raises(ValueError, match="'speed'"):
        inspect(tmp_path)


def test_load_exchange_parts_of_several_islands(tmp_path):
    """`load_exchange` finds the parts of several islands and says which ranks are missing."""
    saved(tmp_path / "a")
    for island in range(2):
        for rank in range(2):
            head, state = read_part(tmp_path / "a" / "rank0.json")
            write_part(
                tmp_path / f"replica{island}",
                f"rank{rank}",
                head | {"island": island, "rank": rank, "world": 2, "islands": 2},
                state,
            )
    shutil.rmtree(tmp_path / "a")
    found = load_exchange(tmp_path)
    assert found.complete and found.islands == [0, 1] and len(found.heads) == 4
    with pytest.raises(ValueError, match="say of which one"):
        found.state(0)
    assert found.state(1, island=1)["step"] == 5
    (tmp_path / "replica1" / "rank1.json").unlink()
    found = load_exchange(tmp_path / "replica0", tmp_path / "replica1")
    assert not found.complete and found.missing == [(1, 1)]
    with pytest.raises(ValueError, match=r"lacks the part of island 1, rank 1 \(has ranks \[0\]\)"):
        found.state(1, island=1)
    head, state = read_part(tmp_path / "replica0" / "rank0.json")
    write_part(tmp_path / "replica0", "rank0", head | {"step": 6}, state)
    with pytest.raises(ValueError, match=r"different steps \[5, 6\]"):
        load_exchange(tmp_path)
    with pytest.raises(ValueError, match="more than once"):
        load_exchange(tmp_path / "replica0", tmp_path / "replica0")


# -- which checkpoints stay ----------------------------------------------------------------------


def single(tmp_path, keep=2):
    return CheckpointManager(tmp_path, fsdp_demo.Topology(), keep)


def write(text="x"):
    return lambda folder: (folder / "a.txt").write_text(text) and None


def test_save_whole_or_absent(tmp_path):
    """A checkpoint is whole or not there."""
    kept = single(tmp_path)
    kept.save(10, write())
    assert list(kept.whole()) == [10] and sorted(p.name for p in tmp_path.iterdir()) == [
        ".life.json",
        "checkpoint-10",
    ]
    content = json.loads((kept.path(10) / MANIFEST).read_text())
    assert (
        content["version"] == 1
        and content["step"] == 10
        and content["files"]["a.txt"]["bytes"] == 1
    )

    def fails(folder):
        (folder / "a.txt").write_text("half")
        raise OSError("disk full")

    kept.save(20, fails)  # a warning: tests/test_failed_saves.py
    assert list(kept.whole()) == [10] and not (tmp_path / "checkpoint-20").exists()
    kept.save(20, write())
    assert list(kept.whole()) == [10, 20]
    (kept.path(20) / "a.txt").write_text("xy")  # another size
    assert list(kept.whole()) == [10]
    kept.save(20, write("z"))
    (kept.path(20) / "a.txt").write_text("y")  # the same size
    assert list(kept.whole()) == [10, 20]
    kept.verify(kept.path(10))
    with pytest.raises(ValueError, match="a.txt: checksum does not fit"):
        kept.verify(kept.path(20))


def test_rotation_keeps_newest(tmp_path):
    """The newest checkpoints stay."""
    kept = single(tmp_path)
    for step in range(1, 5):
        kept.save(step, write())
    assert list(kept.whole()) == [3, 4] and kept.common == 4
    assert [
        single(tmp_path).resolve_resume_step(),
        single(tmp_path / "other").resolve_resume_step(),
    ] == [4, None]
    with pytest.raises(ValueError, match=r"holds checkpoints of steps \[3, 4\]: go on from there"):
        single(tmp_path).resolve_resume_step(resume=False)
    cut(kept.path(4) / MANIFEST, 20)
    assert single(tmp_path).resolve_resume_step() == 3
    manifest = kept.path(3) / MANIFEST
    manifest.write_text(
        json.dumps(json.loads(manifest.read_text()) | {"version": 2, "package": "9.1"})
    )
    with pytest.raises(ValueError, match="version 2, written by fsdp_demo 9.1"):
        single(tmp_path).resolve_resume_step()
    with pytest.raises(ValueError, match="keep=0"):
        single(tmp_path, 0)


def test_save_in_background(tmp_path):
    """Training goes on while a checkpoint is written."""
    import threading

    kept, may = single(tmp_path), threading.Event()
    kept.save(1, lambda folder: lambda: may.wait(20) and write("late")(folder), wait=False)
    assert list(kept.whole()) == []
    may.set()
    kept.save(2, write(), wait=False)
    kept.close()
    assert list(kept.whole()) == [1, 2] and (kept.path(1) / "a.txt").read_text() == "late"
    kept.save(3, lambda folder: lambda: 1 / 0, wait=False)
    with pytest.raises(ZeroDivisionError):
        kept.wait()
    assert list(kept.whole()) == [1, 2]


def plays(me, plan, keep=2, resume=True, take_over=False):
    """Saves the steps of `plan` for this island in turns with the others, then what is there and
    what is agreed on in the next run.
    """
    topology = fsdp_demo.Topology.from_env()
    kept = CheckpointManager(me.folder / f"home{me.island}", topology, keep)
    for turn, (island, steps) in enumerate(plan, 1):
        if island == me.island:
            for step in steps:
                kept.save(step, lambda folder: (folder / f"rank{me.proc}").write_text("x") and None)
        with open(me.folder / f"done{me.rank}", "a") as file:
            file.write("x")
        while (
            sum(len(p.read_text()) for p in me.folder.glob("done*")) < turn * me.islands * me.procs
        ):
            time.sleep(0.01)
    kept.close()
    try:
        return list(kept.whole()), CheckpointManager(
            me.folder / f"home{me.island}", topology, keep
        ).resolve_resume_step(resume, take_over)
    except ValueError as error:
        return list(kept.whole()), str(error)


def test_rotation_keeps_what_others_need(run_ranks):
    """No island removes a checkpoint that another still needs. Island 0 is far ahead; island 1 has
    said that it holds 2, and later 8.
    """
    ahead = [(0, [2]), (1, [2]), (0, [4, 6, 8, 10]), (1, [])]
    assert (
        run_ranks(plays, islands=2, procs=2, args=(ahead,))
        == [([2, 4, 6, 8, 10], 2)] * 2 + [([2], 2)] * 2
    )
    after = [*ahead, (1, [4, 6, 8]), (0, [12])]
    (mine, step), _, (theirs, _), _ = run_ranks(plays, islands=2, procs=2, args=(after,))
    assert step == 8 and mine == [8, 10, 12] and theirs == [6, 8]


def test_resume_nothing_in_common_refused(run_ranks):
    """A resume without a common checkpoint is refused, and the error lists what each
    island holds.
    """
    plan = [(0, [4]), (1, [6])]
    for _, text in run_ranks(plays, islands=2, procs=1, args=(plan,)):
        assert (
            "no checkpoint is held by all islands (island0: 4; island1: 6)" in text
            and "--take-over" in text
        )
    for _, step in run_ranks(plays, islands=2, procs=2, args=(plan, 2, True, True)):
        assert step == 6
    for _, step in run_ranks(plays, islands=2, procs=1, args=([(0, [4])], 2, True, True)):
        assert step == 4
    for _, step in run_ranks(plays, islands=3, procs=1, args=([],)):
        assert step is None


def test_resume_islands_differ_refused(run_ranks):
    """An island that resumes beside one that does not is refused."""

    def job(me):
        with pytest.raises(
            ValueError, match="islands differ in resume .island0: True, island1: False"
        ):
            CheckpointManager(
                me.folder / str(me.island), fsdp_demo.Topology.from_env()
            ).resolve_resume_step(resume=me.island == 0)

    run_ranks(job, islands=2, procs=2)
