"""Checkpoints of ZeRO engines under the exchange: a folder per replica, resumed bit for bit, taken
over by more or fewer replicas.
"""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

import deepspeed_ext
from deepspeed_ext import checkpoints
from deepspeed_ext.checkpoint_methods import separate
from fsdp_demo.checkpoint import load_exchange
from fsdp_demo.checkpoint.files import copied
from fsdp_demo.errors import NeedsDecision
from fsdp_demo.integrations.export.weights import anchors
from fsdp_demo.tools.inspect import inspect

from ..support import zero
from ..support.damage import flip
from ..support.inside import in_ranks

N = 5
PRESETS: dict[str, dict[str, Any]] = {
    "demo": {}, "diloco": {"period": 3}, "decoupled_momentum": {"period": 2},
    "desloc": {"period": 2}, "streaming_diloco": {"layers": 1, "period": 4, "delay": 2},
}  # fmt: skip
QUICK = {
    ("zero1", "desloc"), ("zero1", "demo"), ("zero2", "streaming_diloco"),
    ("zero3", "decoupled_momentum"), ("zero3-parts", "diloco"),
}  # fmt: skip
CASES = [
    pytest.param(s, p, id=f"{s}-{p}", marks=() if (s, p) in QUICK else pytest.mark.slow)
    for s in zero.STAGES
    for p in PRESETS
]


def make(config: dict[str, Any], preset, seed=7, width: int = 130, **keywords) -> tuple[Any, Any]:
    """An engine whose tensors are large enough for sparse codes, attached."""
    torch.manual_seed(seed)
    made = zero.engine(config, zero.sgd if preset == "demo" else zero.adamw, zero.Model(width))
    made.lr_scheduler = torch.optim.lr_scheduler.ExponentialLR(made.optimizer.optimizer, 0.9)
    return made, deepspeed_ext.attach(made, preset, **{**PRESETS.get(preset, {}), **keywords})


def everything(made: Any, exchange: Any) -> dict[str, Any]:
    """All that must come back, on this rank."""
    inner = [{k: v for k, v in state.items()} for _, state in exchange.host.optimizer_states()]
    steps = [made.global_steps, made.skipped_steps, exchange.step, made.lr_scheduler.get_last_lr()]
    masters = exchange.host.partitions.masters()
    model = [getattr(p, "ds_tensor", p).detach() for p in made.module.parameters()]
    return copied(
        dict(masters=masters, model=model, inner=inner, steps=steps, exchange=exchange.state_dict())
    )


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """Paths at which two trees differ in any bit (NaN, which DeepSpeed leaves in padding,
    included).
    """
    if isinstance(a, torch.Tensor):
        alike = isinstance(b, torch.Tensor) and a.dtype == b.dtype and bits(a) == bits(b)
        return [] if alike else [where]
    if isinstance(a, dict | list | tuple):
        a, b = (x if isinstance(x, dict) else dict(enumerate(x)) for x in (a, b))
        if set(a) != set(b):
            return [where]
        return [d for k in a for d in differences(a[k], b[k], f"{where}.{k}")]
    return [] if a == b or a != a and b != b else [f"{where}: {a} {b}"]


def bits(t: torch.Tensor) -> bytes:
    return bytes(t.contiguous().view(-1).view(torch.uint8).numpy())


def root_of(me: Any, root: Path, own: bool) -> str:
    """The directory that a rank names: on a disk of its island alone, or one that all share."""
    return str(root / f"disk{me.island}" if own else root)


def save(me, root, config: dict[str, Any], preset: str, own: bool = False, **more) -> Any:
    """N steps and a save; N more."""
    made, exchange = make(config, preset, **more)
    losses = zero.train(made, range(N), me.rank)
    client = {"mine": [3, "x"], "tensor": torch.ones(2)}
    made.save_checkpoint(root_of(me, root, own), client_state=client)
    saved = everything(made, exchange) | {"weights": zero.whole(made), "before": losses}
    losses = zero.train(made, range(N, 2 * N), me.rank)
    saved |= {"later": everything(made, exchange), "losses": losses}
    exchange.finish()
    return saved | {"end": copied(exchange.host.tensors("parameter"))}


def load(
    me, root, config, preset, own=False, tag=None, before=0, options=None, saves=False, **more
) -> Any:
    """A fresh engine with other weights, and `before` steps, loaded; N more steps, and a save where
    it `saves`.
    """
    logging.basicConfig(level=logging.WARNING, force=True)
    made, exchange = make(config, preset, seed=8 + me.island, **more)
    zero.train(made, range(before), me.rank)
    flying = len(exchange.state_dict()["in_flight"])
    path, client = made.load_checkpoint(root_of(me, root, own), tag, **options or {})
    loaded = everything(made, exchange) | {"weights": zero.whole(made), "flying": flying}
    loaded |= {"path": path, "client": client, "samples": made.global_samples}
    losses = zero.train(made, range(N, 2 * N), me.rank)
    loaded |= {"later": everything(made, exchange), "losses": losses}
    if saves:
        made.save_checkpoint(root_of(me, root, own))
    exchange.finish()
    return loaded | {"end": copied(exchange.host.tensors("parameter"))}


def alike(saved: dict[str, Any], loaded: dict[str, Any]) -> None:
    """What was loaded is what was saved, and so is what came of it."""
    keys = ("masters", "model", "inner", "steps", "exchange", "weights", "later", "losses")
    found = {key: differences(saved[key], loaded[key]) for key in keys}
    assert not any(found.values()), found
    assert differences(saved["masters"], saved["later"]["masters"])


def goes_on(me, root: Path, config: dict[str, Any], preset, whole: bool = True) -> None:
    """N steps, a save, N more; then the same from the checkpoint with an engine of other weights.
    `whole`: DeepSpeed's script reads what this wrapper saves.
    """
    saved, loaded = save(me, root, config, preset), load(me, root, config, preset, before=N)
    alike(saved, loaded)
    flies = bool(loaded["flying"] and saved["exchange"]["in_flight"])
    assert flies == (preset == "streaming_diloco")
    folder = root / f"island{me.island}"
    assert Path(loaded["path"]).is_relative_to(folder) and loaded["client"]["mine"] == [3, "x"]
    if me.proc:
        return
    if whole:
        merged = get_fp32_state_dict_from_zero_checkpoint(str(folder))
        assert all(torch.equal(merged[n], w) for n, w in saved["weights"].items())
    assert (folder / "latest").read_text() == f"global_step{N}"
    assert (folder / "zero_to_fp32.py").exists()
    parts = sorted(p.name for p in (folder / f"global_step{N}" / "exchange").iterdir())
    assert parts == [f"rank{r}.{kind}" for r in (0, 1) for kind in ("json", "safetensors")]


@pytest.mark.parametrize("stage, preset", CASES)
@in_ranks()
def test_zero_resume_bit_for_bit(me, tmp_path, stage, preset) -> None:
    """Engines at every stage resume bit for bit."""
    goes_on(me, tmp_path, zero.settings(stage), preset)


SLOW = pytest.mark.slow
WRAPPERS = [
    pytest.param("zero2", {"bf16": True}, id="bf16"),
    pytest.param("zero3-parts", {"bf16": True}, id="bf16-zero3", marks=SLOW),
    pytest.param("wrapper", {}, id="BF16_Optimizer"),
    pytest.param("zero2", {"offload": True}, id="offload", marks=SLOW),
]


@pytest.mark.parametrize("stage, options", WRAPPERS)
@in_ranks()
def test_zero_resume_low_precision(me, tmp_path, stage, options) -> None:
    """Engines in low precision resume bit for bit."""
    # "is not a zero checkpoint", says deepspeed 0.19.8 of its own file
    whole = stage != "wrapper"
    goes_on(me, tmp_path, zero.settings(stage, **options), "diloco", whole=whole)


@pytest.mark.parametrize("stage, preset", [
    ("zero3", "diloco"), pytest.param("zero1", "demo", marks=SLOW),
])  # fmt: skip
@in_ranks(1, 4)
def test_zero_resume_mesh(me, tmp_path, stage, preset) -> None:
    """A mesh resumes. One world: DeepSpeed's rank 0 writes `latest` and the scripts for itself
    only.
    """
    me = replace(me, island=me.rank // 2, proc=me.rank % 2, islands=2, procs=2)
    deepspeed_ext.shard_within_node(2)
    goes_on(me, tmp_path, zero.settings(stage), preset)


# ---- other numbers, other processes ------------------------------------------------------------


def test_zero_resume_in_new_processes(run_ranks, tmp_path) -> None:
    """New processes resume, with messages in flight."""
    args = (tmp_path, zero.settings("zero3-parts", clip=1.0), "streaming_diloco")
    for a, b in zip(run_ranks(save, args=args), run_ranks(load, args=args), strict=True):
        assert a["exchange"]["in_flight"]
        alike(a, b)


@pytest.mark.parametrize("stage", [
    pytest.param("zero1", marks=SLOW), pytest.param("zero3", marks=SLOW), "zero3-parts",
])  # fmt: skip
def test_zero_resume_more_and_fewer_replicas(run_ranks, tmp_path, stage) -> None:
    """The number of replicas may change at a resume. One that is left goes on from its own folder;
    one that is added takes over from the others.
    """
    args = (tmp_path, zero.settings(stage), "diloco")
    saved = run_ranks(save, args=args)
    assert differences(saved[0]["masters"], saved[2]["masters"])
    for one, before in zip(run_ranks(load, islands=1, args=args), saved[:2], strict=True):
        for key in ("masters", "inner", "steps"):
            assert differences(one[key], before[key]) == []
        ours, theirs = (x["exchange"]["channels"]["delta"] for x in (one, before))
        assert torch.equal(ours["anchor"], theirs["anchor"])
        assert torch.equal(ours["momentum"], theirs["momentum"])
    three = run_ranks(load, islands=3, args=args)
    for rank, one in enumerate(three):
        for key in ("masters", "inner", "steps") if rank < 4 else ("steps",):
            assert differences(one[key], saved[rank % 4][key]) == []
        assert differences(one["end"], three[rank % 2]["end"]) == []


def test_zero_resume_torn_save(run_ranks, tmp_path) -> None:
    """A save that one replica did not end is not resumed by any; alone, it is an error that says
    so.
    """
    args = (tmp_path, zero.settings("zero1"), "demo")

    def save_more(me) -> None:
        made, exchange = make(*args[1:])
        made.load_checkpoint(str(tmp_path))
        zero.train(made, range(N, N + 2), me.rank)
        made.save_checkpoint(str(tmp_path), "later")
        exchange.detach()

    saved = run_ranks(save, args=args)
    run_ranks(save_more)
    assert (tmp_path / "island0" / "latest").read_text() == "later"
    (tmp_path / "island1" / "later" / "exchange" / "rank1.json").unlink()
    (tmp_path / "island1" / "latest").write_text(f"global_step{N}")
    for a, b in zip(saved, run_ranks(load, args=args), strict=True):
        alike(a, b)
    out = run_ranks(load, args=(*args, False, "later"), check=False)
    seen = "no checkpoint is seen by all replicas (island0: later; island1: none)"
    assert all(seen in str(o.error) for o in out)
    log = "later is not complete: exchange/rank1.json missing or of another size"
    assert log in out[2].log


def save_and_fail(me: Any, root: Path, config: dict[str, Any]) -> list[Any]:
    logging.basicConfig(level=logging.WARNING, force=True)
    made, exchange = make(config, "diloco")
    zero.train(made, range(2), me.rank)
    out = [made.save_checkpoint(str(root), "again")]
    zero.train(made, range(2), me.rank)
    if me.rank == 3:
        checkpoints.save_exchange = full
    for tag in ("again", "more", "last"):
        try:
            out.append(made.save_checkpoint(str(root), tag))
        except OSError as error:
            out.append(str(error))
    exchange.detach()
    return out


def full(*_: Any, **__: Any) -> None:
    raise OSError("the disk is full")


def test_zero_save_over_another_fails(run_ranks, tmp_path) -> None:
    """A save over another one fails. All ranks of the replica hear of it, what is left of the older
    one does not count as whole; the third failure in a row ends it.
    """
    config = zero.settings("zero1")
    out = run_ranks(save_and_fail, args=(tmp_path, config), check=False)
    said = [o.value for o in out]
    assert said[:2] == [[True] * 4] * 2 and said[2][:3] == said[3][:3] == [True, False, False]
    assert said[2][3].endswith("another rank could not write") and said[3][3] == "the disk is full"
    assert "checkpoint of step 4 not saved" in out[2].log
    assert "failure 2 in a row of the 3" in out[2].log
    assert not (tmp_path / "island1" / "again").exists()
    assert (tmp_path / "island0" / "again" / "manifest.json").exists()


@pytest.mark.parametrize("where", ["parameter", "state:exp_avg"])
@in_ranks()
def test_zero_save_nan_refused(me, tmp_path, where) -> None:
    """An engine with NaN makes no checkpoint."""
    made, exchange = make(zero.settings("zero1"), "diloco")
    zero.train(made, range(2), me.rank)
    if me.island == 1 and me.proc == 1:
        tensors = exchange.host.tensors(where)
        next(t for t in tensors if t is not None and t.numel()).view(-1)[0] = float("nan")
    saved = made.save_checkpoint(str(tmp_path), "one")
    exchange.detach()
    assert saved == (tmp_path / f"island{me.island}" / "one").exists() == (me.island == 0)


@in_ranks()
def test_zero_save_to_new_directories(me, tmp_path) -> None:
    """Saves to a new directory each time make no process group. A damaged checkpoint is no new
    run.
    """
    made, exchange = make(zero.settings("zero1"), "demo")
    zero.train(made, range(2), me.rank)
    saver, groups, managers = made.save_checkpoint.__self__, [], set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "new_group", lambda *_, **__: groups.append(1))
        for step in range(3):
            assert made.save_checkpoint(str(tmp_path / str(step)), "one")
            managers.add(id(saver._made))
    part = tmp_path / "2" / f"island{me.island}" / "one" / "exchange" / "rank0.json"
    if me.proc == 0:
        part.write_bytes(part.read_bytes()[:-9])
    saver.ranks.any(False)
    with pytest.raises(NeedsDecision, match="no island holds a whole checkpoint.*2/island1/one"):
        made.load_checkpoint(str(tmp_path / "2"))
    exchange.detach()
    assert (len(groups), len(managers)) == (0, 1)


def test_zero_resume_flipped_bit_found(run_ranks, tmp_path) -> None:
    """A flipped bit in a checkpoint is found at the resume."""
    args = (tmp_path, zero.settings("zero2"), "demo")
    run_ranks(save, args=args)
    (file,) = (tmp_path / "island1" / f"global_step{N}").glob("zero_pp_rank_1_*optim_states.pt")
    flip(file)
    out = run_ranks(load, args=args, check=False)
    assert any("optim_states.pt: checksum does not fit" in str(o.error) for o in out[2:])
    assert all(o.error for o in out[2:])


# ---- what is refused, and what starts anew -----------------------------------------------------


def test_zero_resume_other_run_refused(run_ranks, tmp_path) -> None:
    """A checkpoint of another preset, model or stage is refused, by all ranks alike."""
    run_ranks(save, args=(tmp_path, zero.settings("zero2"), "diloco"))
    for stage, preset, width, *said in (
        ("zero2", "desloc", 130, "was saved by preset 'diloco', this run has 'desloc'"),
        ("zero2", "diloco", 66, "another model: embed.weight is (37, 130) there, (37, 66) here"),
        ("zero3", "diloco", 130, "the same ZeRO stage and parameter groups", "before attach"),
    ):
        work = partial(load, width=width)
        out = run_ranks(work, args=(tmp_path, zero.settings(stage), preset), check=False)
        errors = {str(o.error).strip().splitlines()[-1].replace("island1", "island0") for o in out}
        (text,) = errors
        assert "ValueError" in text and all(words in text for words in said), text


def anew(me, root, config: dict[str, Any], options: dict[str, Any], empty: Path) -> dict[str, Any]:
    logging.basicConfig(level=logging.WARNING, force=True)
    made, exchange = make(config, "streaming_diloco", seed=8 + me.island)
    zero.train(made, range(9), me.rank)
    assert made.load_checkpoint(str(empty)) == (None, None) and exchange.step == 9
    assert exchange.state_dict()["in_flight"]
    made.load_checkpoint(str(root), **options)
    loaded = everything(made, exchange) | {"whole": zero.whole(made), "log": me.log.read_text()}
    zero.train(made, range(4), me.rank)
    exchange.finish()
    return loaded | {"end": copied(exchange.host.tensors("parameter"))}


@pytest.mark.parametrize("stage", [pytest.param("zero2", marks=SLOW), "zero3"])
@pytest.mark.parametrize("options", [{"load_optimizer_states": False}, {"load_module_only": True}])
def test_zero_resume_weights_alone(run_ranks, tmp_path, stage, options) -> None:
    """A resume may load the weights alone. The channels start anew: anchors at the weights of one
    replica, which all have.
    """
    config = zero.settings(stage)
    run_ranks(save, args=(tmp_path, config, "streaming_diloco"))
    (tmp_path / "empty").mkdir()
    out = run_ranks(anew, args=(tmp_path, config, options, tmp_path / "empty"))
    whole = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "island0"))
    for rank, o in enumerate(out):
        assert all(torch.equal(whole[n], w) for n, w in o["whole"].items())
        assert not any(c["momentum"].any() for c in o["exchange"]["channels"].values())
        assert o["exchange"]["in_flight"] == []
        steps = 9 if "load_module_only" in options else N  # DeepSpeed's own count
        assert o["steps"][0] == o["steps"][2] == steps
        assert differences(o["end"], out[rank % 2]["end"]) == []
    assert "was loaded without optimizer states: the channels start anew" in out[0]["log"]


@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_zero_resume_other_number_of_ranks(run_ranks, tmp_path, stage) -> None:
    """Another number of ranks loads the weights alone."""
    args = (tmp_path, zero.settings(stage), "diloco")
    run_ranks(save, args=args)
    out = run_ranks(load, procs=1, group=True, args=args, check=False)
    assert all(o.error is None for o in out), [o.error for o in out]
    assert "as weights alone, since 2 ranks saved it and 1 load it" in out[0].log
    whole = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "island0"))
    assert all(torch.equal(whole[n], t) for o in out for n, t in o.value["weights"].items())


@in_ranks()
def test_zero_resume_plain_checkpoint(me, tmp_path) -> None:
    """A checkpoint without the state of an exchange is loaded by all replicas, Adam's moments and
    the step, too, and the channels start anew.
    """
    logging.basicConfig(level=logging.WARNING, force=True)
    config = zero.settings("zero1")
    torch.manual_seed(7)
    made = zero.engine(config, zero.adamw, zero.Model(130))
    made.lr_scheduler = torch.optim.lr_scheduler.ExponentialLR(made.optimizer.optimizer, 0.9)

    def state(masters: list[torch.Tensor]) -> Any:
        return copied([masters, zero.whole(made), list(made.optimizer.optimizer.state.values())])

    zero.train(made, range(2), me.rank % 2)  # both islands alike
    if me.island == 0:
        made.save_checkpoint(str(tmp_path), "start")
        (tmp_path / f"written{me.rank}").touch()
    while len(list(tmp_path.glob("written*"))) < 2:
        pass
    wanted = state(deepspeed_ext.ZeroHost(made).partitions.masters())
    made, exchange = make(config, "diloco", seed=8)
    path, _ = made.load_checkpoint(str(tmp_path))
    assert differences(wanted, state(exchange.host.partitions.masters())) == []
    assert exchange.step == 2 and path.startswith(str(tmp_path / "start"))
    made.save_checkpoint(str(tmp_path))
    exchange.finish()
    assert (tmp_path / f"island{me.island}" / "latest").exists()
    said = "and holds no exchange state: the channels start anew"
    assert me.rank or said in me.log.read_text()


def test_zero_resume_unseen_checkpoint_refused(run_ranks, tmp_path) -> None:
    """A checkpoint that not all replicas see is refused."""
    config = zero.settings("zero1")
    run_ranks(save, args=(tmp_path / "here", config, "diloco"))
    (tmp_path / "there").mkdir()
    plain = tmp_path / "here" / "start"  # of DeepSpeed alone, which island 1 does not see
    plain.mkdir()
    (plain / "mp_rank_00_model_states.pt").touch()

    def elsewhere(me: Any) -> None:
        made, exchange = make(config, "diloco")
        for tags, said in (
            (["global_step5"] * 2, "no checkpoint is seen by all replicas (island0: global_step5; "
                "island1: none): copy"),
            (["start"] * 2, "replicas do not see the same checkpoint of plain DeepSpeed (island0: "
                "start; island1: none): copy"),
            (["global_step5", "other"], "replicas load different tags (island0: 'global_step5', "
                "island1: 'other')"),
        ):  # fmt: skip
            where = "here" if me.island == 0 or tags[1] == "other" else "there"
            with pytest.raises(NeedsDecision) as refused:
                made.load_checkpoint(str(tmp_path / where), tags[me.island])
            assert said in str(refused.value)
        exchange.detach()

    run_ranks(elsewhere)


@in_ranks()
def test_zero_resume_clipping_of_exchange(me, tmp_path) -> None:
    """The exchange clips the mean gradient, the engine does not; a checkpoint that is loaded
    without the exchange clips.
    """
    made, exchange = make(zero.settings("zero2", clip=0.5), "full")
    assert made.optimizer.clip_grad == 0.0
    zero.train(made, range(2), me.rank)
    made.save_checkpoint(str(tmp_path))
    assert made.optimizer.clip_grad == 0.0
    made.load_checkpoint(str(tmp_path))
    assert made.optimizer.clip_grad == 0.0
    exchange.finish()
    file = f"island{me.island}/*/zero_pp_rank_{me.proc}_mp_rank_00_optim_states.pt"
    (saved,) = tmp_path.glob(file)
    assert torch.load(saved, weights_only=False)["optimizer_state_dict"]["clip_grad"] == 0.5


def test_zero_inspect_and_outer_parameters(run_ranks, tmp_path) -> None:
    """`fsdp-demo inspect` reads DeepSpeed's folders, and the outer parameters in them."""
    # at step N the parameters are the anchor
    run_ranks(partial(save, period=N), args=(tmp_path, zero.settings("zero2"), "diloco"))
    found = inspect(tmp_path)
    assert [Path(f["folder"]).relative_to(tmp_path).as_posix() for f in found] == [
        f"island{i}/global_step{N}" for i in (0, 1)
    ]
    count = sum(p.numel() for p in zero.Model(130).parameters())
    wanted = {"complete": True, "step": N, "islands": 2, "shards": 2, "parameters": count}
    assert all(f | wanted == f for f in found)
    assert inspect(tmp_path / "island1" / f"global_step{N}")[0]["holds"] == {"1": "island1"}
    exchange = tmp_path / "island0" / f"global_step{N}" / "exchange"
    whole = anchors(load_exchange(exchange), 0)
    merged = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "island0"))
    assert sum(t.numel() for t in whole.values()) == count
    assert all(torch.equal(merged[n], t) for n, t in whole.items())
    (exchange / "rank1.json").unlink()
    assert [f["complete"] for f in inspect(tmp_path)] == [False, True]


class Tied(zero.Model):
    """Two names for one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].weight = self.layers[0].weight


@in_ranks(1, 4)
def test_zero_save_folders_of_trainer_replicas(me, tmp_path) -> None:
    """Each replica under the Trainer saves into a folder of its own."""
    mesh = deepspeed_ext.shard_within_node(2)

    def made() -> Any:
        torch.manual_seed(7)
        engine = zero.engine(zero.settings("zero2"), zero.adamw, Tied())
        separate(engine, mesh.replica)
        return engine

    def state(engine: Any) -> Any:
        return copied([engine.optimizer.optimizer.state_dict(), zero.whole(engine)])

    first = made()
    zero.train(first, range(2), me.rank)
    first.save_checkpoint(str(tmp_path), client_state={"who": mesh.replica})
    wanted, again = state(first), made()
    path, client = again.load_checkpoint(str(tmp_path))
    assert differences(wanted, state(again)) == [] and client["who"] == mesh.replica == me.rank // 2
    own = tmp_path / "replica1" if mesh.replica else tmp_path
    assert Path(path).parent == own / "global_step2"
    merged, whole = get_fp32_state_dict_from_zero_checkpoint(str(own)), wanted[1]
    assert all(torch.equal(merged[n], w) for n, w in whole.items())
    # known to rank 0 of the world only, in plain DeepSpeed
    assert torch.equal(merged["layers.1.weight"], whole["layers.0.weight"])
    torch.distributed.barrier()
    if me.rank == 0:
        shutil.rmtree(tmp_path / "replica1")
    torch.distributed.barrier()
    taken, _ = again.load_checkpoint(str(tmp_path))
    assert Path(taken).parent == tmp_path / "global_step2"
    assert not (tmp_path / "global_step2" / "exchange").exists()
