"""`save_exchange` and `load_exchange`: the parts on disk, and what is refused."""

import copy
import json
import math
import shutil

import pytest
import torch
from torch import nn

import fsdp_demo
from fsdp_demo.checkpoint import load_exchange, save_exchange
from fsdp_demo.checkpoint.files import read_part, write_part
from fsdp_demo.tools.inspect import inspect

from ..support.damage import cut, flip


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
    assert found.step == 5 and not found.missing and found.islands == [0]
    assert {k: head[k] for k in ("preset", "islands", "shards", "copies", "rank", "world")} == dict(
        preset="diloco", islands=1, shards=1, copies=1, rank=0, world=1
    )
    assert fsdp_demo.ExchangeConfig.from_dict(head["config"]).digest() == head["digest"]
    assert [p["name"] for p in head["parameters"]] == ["weight", "bias"]
    assert head["parameters"][0]["shape"] == [66, 70]


# -- what is refused -----------------------------------------------------------------------------


def newer(path):
    sealed = json.loads(path.read_text())
    part = json.loads(sealed["part"])
    part["head"] |= {"format": 4, "package": "9.1"}
    path.write_text(json.dumps(sealed | {"part": json.dumps(part)}))


DAMAGE = {
    "no part": (lambda f: [p.unlink() for p in f.iterdir()], "no part of an exchange's state"),
    "no json": (lambda f: (f / "rank0.json").rename(f / "rank0.json.part"),
        "only unfinished files"),
    "no tensors": (lambda f: (f / "rank0.safetensors").unlink(), "rank0.safetensors is missing"),
    "cut": (lambda f: cut(f / "rank0.safetensors", 1000), "has 1000 bytes.*half-written or cut"),
    "cut json": (lambda f: cut(f / "rank0.json", 200), "rank0.json is damaged"),
    "flipped json": (lambda f: flip(f / "rank0.json", -300), "rank0.json is damaged"),
    "newer": (lambda f: newer(f / "rank0.json"),
        "format 4, written by fsdp_demo 9.1.*install fsdp_demo 9.1 or newer"),
}  # fmt: skip


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
    flip(tmp_path / "rank0.safetensors", -3)
    found = load_exchange(tmp_path)  # only heads
    with pytest.raises(ValueError, match="damaged: checksum"):
        attached(state=found, period=2)


FOREIGN = {
    "preset": (lambda: {"preset": "decoupled_momentum", "period": 2},
        "saved by preset 'diloco', this run has 'decoupled_momentum'"),
    "shapes": (lambda: {"model": nn.Linear(70, 65), "period": 2},
        "another model: weight is .66, 70. there, .65, 70. here"),
    "names": (lambda: {"model": nn.Sequential(nn.Linear(70, 66)), "period": 2},
        r"another model: 0.weight is absent there"),
    "dtype": (lambda: {"model": nn.Linear(70, 66).bfloat16(), "period": 2},
        "with weight in float32, this run has it in bfloat16: load the model with dtype=torch.fl"),
}  # fmt: skip


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
    outline = load_exchange(tmp_path).outline(0, 0)
    assert (outline.step, outline.last) == (5, whole["last"])
    assert all(
        set(work) == {"tensor"}
        for kept in outline.channels.values()
        for work in kept.workspaces.values()
    )
    head, state = read_part(tmp_path / "rank0.json")
    late = dict(step=4, members=["delta"], parts={"delta": {"step": 4, "speed": 2}}, arrived=None)
    write_part(tmp_path, "rank0", head, {**state, "in_flight": [late]})
    with pytest.raises(
        ValueError,
        match=r"rank0.json holds what this fsdp_demo, .*'speed'.*install that one, or start the "
        r"exchange anew",
    ):
        load_exchange(tmp_path).outline(0, 0)
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
    assert not found.missing and found.islands == [0, 1] and len(found.heads) == 4
    assert found.state(1, island=1)["step"] == 5
    (tmp_path / "replica1" / "rank1.json").unlink()
    found = load_exchange(tmp_path)
    assert found.missing == [(1, 1)]
    with pytest.raises(ValueError, match=r"lacks the part of island 1, rank 1 \(has ranks \[0\]\)"):
        found.state(1, island=1)
    head, state = read_part(tmp_path / "replica0" / "rank0.json")
    write_part(tmp_path / "replica0", "rank0", head | {"step": 6}, state)
    with pytest.raises(ValueError, match=r"several checkpoints \(steps \[5, 6\]\)"):
        load_exchange(tmp_path)
    shutil.rmtree(tmp_path / "replica1")
    shutil.copytree(tmp_path / "replica0", tmp_path / "copy")
    (tmp_path / "copy" / "rank1.json").unlink()
    with pytest.raises(ValueError, match="several checkpoints"):
        load_exchange(tmp_path)
