"""Checkpoints of ZeRO engines under the exchange: a folder per replica, resumed bit for bit, taken
over by more or fewer replicas.
"""

from __future__ import annotations

import logging
import shutil
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
from fsdp_demo.checkpoint.folders import Fence
from fsdp_demo.errors import NeedsDecision, Superseded
from fsdp_demo.integrations.export.weights import anchors
from fsdp_demo.peers.votes import Ranks
from fsdp_demo.tools.inspect import inspect

from ..support import zero
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
    optimizer = zero.sgd if preset == "demo" else zero.adamw
    made = zero.engine(config, optimizer, zero.Model(width), **keywords.pop("engine", {}))
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
        return (
            []
            if isinstance(b, torch.Tensor) and a.dtype == b.dtype and bits(a) == bits(b)
            else [where]
        )
    if isinstance(a, dict):
        return (
            [where]
            if set(a) != set(b)
            else [d for k in a for d in differences(a[k], b[k], f"{where}.{k}")]
        )
    if isinstance(a, list | tuple):
        pairs = enumerate(zip(a, b, strict=False))
        return (
            [where]
            if len(a) != len(b)
            else [d for i, (x, y) in pairs for d in differences(x, y, f"{where}.{i}")]
        )
    return [] if a == b or a != a and b != b else [f"{where}: {a} {b}"]


def bits(t: torch.Tensor) -> bytes:
    return bytes(t.contiguous().view(-1).view(torch.uint8).numpy())


def through(me, root, config: dict[str, Any], preset, keywords: dict[str, Any]) -> dict[str, Any]:
    """N steps, a save, N more; then the same from the checkpoint with an engine of other
    weights.
    """
    made, exchange = make(config, preset, **keywords)
    first = zero.train(made, range(N), me.rank)
    made.save_checkpoint(str(root), client_state={"mine": 3})
    saved, weights = everything(made, exchange), zero.whole(made)
    losses = zero.train(made, range(N, 2 * N), me.rank)
    wanted = everything(made, exchange)
    exchange.finish()
    made, exchange = make(config, preset, seed=8 + me.island, **keywords)
    zero.train(made, range(N), me.rank)
    flying = len(exchange.state_dict()["in_flight"])  # when the checkpoint is loaded
    path, client = made.load_checkpoint(str(root))
    loaded = everything(made, exchange)
    again = zero.train(made, range(N, 2 * N), me.rank)
    got = everything(made, exchange)
    exchange.finish()
    return {
        "loaded": differences(saved, loaded),
        "resumed": differences(wanted, got) + differences(losses, again),
        "moved": bool(differences(saved["masters"], wanted["masters"])),
        "flying": min(flying, len(saved["exchange"]["in_flight"])),
        "path": path,
        "client": client,
        "weights": weights,
        "losses": first + losses,
    }


def check(out: list[dict[str, Any]], root: Path, procs: int = 2, whole: bool = True) -> None:
    """`whole`: DeepSpeed's script reads what this wrapper saves."""
    for rank, o in enumerate(out):
        folder = root / f"island{rank // procs}"
        assert o["loaded"] == [], (rank, o["loaded"], o["resumed"])
        assert o["resumed"] == [], (rank, o["loaded"], o["resumed"])
        assert o["moved"], (rank, o["loaded"], o["resumed"])
        assert Path(o["path"]).is_relative_to(folder) and o["client"]["mine"] == 3
        if rank % procs == 0:
            merged = (
                get_fp32_state_dict_from_zero_checkpoint(str(folder)) if whole else o["weights"]
            )
            assert all(torch.equal(merged[n], w) for n, w in o["weights"].items())
            assert (folder / "latest").read_text() == f"global_step{N}"
            assert (folder / "zero_to_fp32.py").exists()
            assert sorted(
                p.name for p in (folder / f"global_step{N}" / "exchange").iterdir()
            ) == sorted(f"rank{r}.{kind}" for r in range(procs) for kind in ("json", "safetensors"))


@pytest.mark.parametrize("stage, preset", CASES)
def test_zero_resume_bit_for_bit(run_ranks, tmp_path, stage, preset) -> None:
    """Engines at every stage resume bit for bit."""
    out = run_ranks(through, args=(tmp_path, zero.settings(stage), preset, {}))
    check(out, tmp_path)
    assert all(o["flying"] for o in out) == (preset == "streaming_diloco")


WRAPPERS = {
    "bf16": ("zero2", {"bf16": True}),
    "bf16-zero3": ("zero3-parts", {"bf16": True}),
    "BF16_Optimizer": ("zero1", {"bf16": True, "data_types": {"grad_accum_dtype": "fp32"}}),
    "offload": ("zero2", {"offload": True}),
}


@pytest.mark.parametrize(
    "wrapper",
    [
        pytest.param(w, marks=pytest.mark.slow if w in ("offload", "bf16-zero3") else ())
        for w in WRAPPERS
    ],
)
def test_zero_resume_low_precision(run_ranks, tmp_path, wrapper) -> None:
    """Engines in low precision resume bit for bit."""
    stage, options = WRAPPERS[wrapper]
    out = run_ranks(through, args=(tmp_path, zero.settings(stage, **options), "diloco", {}))
    # "is not a zero checkpoint", says deepspeed 0.19.8 of its own file
    check(out, tmp_path, whole=wrapper != "BF16_Optimizer")


def in_mesh(me: Any, root: Path, config: dict[str, Any], preset: str) -> Any:
    me = type(me)(me.rank // 2, me.rank % 2, 2, 2, me.rank, me.folder)
    deepspeed_ext.shard_within_node(2)
    return through(me, root, config, preset, {})


@pytest.mark.parametrize(
    "stage, preset", [("zero3", "diloco"), pytest.param("zero1", "demo", marks=pytest.mark.slow)]
)
def test_zero_resume_mesh(run_ranks, tmp_path, stage, preset) -> None:
    """A mesh resumes. One world: DeepSpeed's rank 0 writes `latest` and the scripts for itself
    only.
    """
    check(
        run_ranks(in_mesh, islands=1, procs=4, args=(tmp_path, zero.settings(stage), preset)),
        tmp_path,
    )


# ---- other numbers, other processes ------------------------------------------------------------


def save(me, root, config: dict[str, Any], preset: str, keywords: dict[str, Any]) -> dict[str, Any]:
    """N steps and a save; N more."""
    made, exchange = make(config, preset, **keywords)
    zero.train(made, range(N), me.rank)
    made.save_checkpoint(str(root))
    saved = everything(made, exchange)
    losses = zero.train(made, range(N, 2 * N), me.rank)
    saved |= {"later": everything(made, exchange), "losses": losses}
    exchange.detach()
    return saved


def load(me, root, config, preset, keywords, tag: str | None = None, **options) -> Any:
    """A fresh engine with other weights, loaded; N more steps."""
    logging.basicConfig(level=logging.WARNING, force=True)
    made, exchange = make(config, preset, seed=8 + me.island, **keywords)
    made.load_checkpoint(str(root), tag, **options)
    loaded = everything(made, exchange)
    losses = zero.train(made, range(N, 2 * N), me.rank)
    loaded |= {"later": everything(made, exchange), "losses": losses}
    exchange.finish()
    return loaded | {"end": copied(exchange.host.tensors("parameter"))}


def test_zero_resume_in_new_processes(run_ranks, tmp_path) -> None:
    """New processes resume, with messages in flight."""
    args = (tmp_path, zero.settings("zero3-parts", clip=1.0), "streaming_diloco", {})
    for a, b in zip(run_ranks(save, args=args), run_ranks(load, args=args), strict=True):
        b.pop("end")
        assert a["exchange"]["in_flight"] and differences(a, b) == []


@pytest.mark.parametrize(
    "stage", [*(pytest.param(s, marks=pytest.mark.slow) for s in ("zero1", "zero3")), "zero3-parts"]
)
def test_zero_resume_more_and_fewer_replicas(run_ranks, tmp_path, stage) -> None:
    """The number of replicas may change at a resume. One that is left goes on from its own folder;
    one that is added takes over from the others.
    """
    args = (tmp_path, zero.settings(stage), "diloco", {})
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


@pytest.mark.parametrize(
    "preset", [pytest.param("demo", marks=pytest.mark.slow), "streaming_diloco"]
)
def test_zero_resume_lost_folder(run_ranks, tmp_path, preset) -> None:
    """A replica whose folder is lost takes over from the other, also where it sees that one's
    folder; the other goes on from its own.
    """
    args = (tmp_path, zero.settings("zero2"), preset, {})
    saved = run_ranks(save, args=args)
    shutil.rmtree(tmp_path / "island1")
    out = run_ranks(load, args=args, check=False)
    assert all(o.error is None for o in out), [o.error for o in out]
    for proc in (0, 1):
        kept, new = out[proc].value, out[2 + proc].value
        for key in ("masters", "inner", "steps"):
            assert differences(saved[proc][key], kept[key]) == []
        assert differences(saved[proc]["steps"], new["steps"]) == []
        assert differences(kept["end"], new["end"]) == []
    assert f"island1 holds no whole checkpoint: took over step {N} from island0" in out[2].log


def test_zero_resume_torn_save(run_ranks, tmp_path) -> None:
    """A save that one replica did not end is not resumed by any; alone, it is an error that says
    so.
    """
    args = (tmp_path, zero.settings("zero1"), "demo", {})
    saved = run_ranks(save, args=args)
    run_ranks(save_more, args=args)
    assert (tmp_path / "island0" / "latest").read_text() == "later"
    (tmp_path / "island1" / "later" / "exchange" / "rank1.json").unlink()
    (tmp_path / "island1" / "latest").write_text(f"global_step{N}")
    out = run_ranks(load, args=args, check=False)
    assert all(o.error is None for o in out), [o.error for o in out]
    assert all(
        differences(a["later"], b.value["later"]) == [] for a, b in zip(saved, out, strict=True)
    )
    for o in run_ranks(load, args=(*args, "later"), check=False):
        assert "no checkpoint is seen by all replicas (island0: later; island1: none)" in str(
            o.error
        )
    log = run_ranks(load, args=(*args, "later"), check=False)[2].log
    assert "later is not complete: exchange/rank1.json missing or of another size" in log


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
def test_zero_save_earlier_life_writes_nothing(me, tmp_path) -> None:
    """A process of an earlier life writes nothing."""
    own = tmp_path / f"island{me.island}"
    made, exchange = make(zero.settings("zero1"), "demo")
    made.save_checkpoint(str(tmp_path), "one")
    torch.distributed.barrier()
    if me.proc == 0:
        Fence(own, "later").take(Ranks(None, 0, 1))
    torch.distributed.barrier()
    with pytest.raises(Superseded, match="belongs to a later life"):
        made.save_checkpoint(str(tmp_path), "two")
    exchange.detach()
    assert not (own / "two").exists() and (own / "latest").read_text() == "one"


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
    args = (tmp_path, zero.settings("zero2"), "demo", {})
    run_ranks(save, args=args)
    (file,) = (tmp_path / "island1" / f"global_step{N}").glob("zero_pp_rank_1_*optim_states.pt")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    out = run_ranks(load, args=args, check=False)
    assert any("optim_states.pt: checksum does not fit" in str(o.error) for o in out[2:])
    assert all(o.error for o in out[2:])


def save_more(me, root, config: dict[str, Any], preset: str, keywords: dict[str, Any]) -> None:
    made, exchange = make(config, preset, **keywords)
    made.load_checkpoint(str(root))
    zero.train(made, range(N, N + 2), me.rank)
    made.save_checkpoint(str(root), "later")
    exchange.detach()


# ---- what is refused, and what starts anew -----------------------------------------------------


def refused(run_ranks: Any, *args: Any, **keywords: Any) -> str:
    """The error that all ranks raise."""
    out = run_ranks(load, args=args, check=False, **keywords)
    errors = {str(o.error).strip().splitlines()[-1].replace("island1", "island0") for o in out}
    assert len(errors) == 1, errors
    return errors.pop()


def test_zero_resume_other_run_refused(run_ranks, tmp_path) -> None:
    """A checkpoint of another preset, model or stage is refused."""
    config = zero.settings("zero2")
    run_ranks(save, args=(tmp_path, config, "diloco", {}))
    text = refused(run_ranks, tmp_path, config, "desloc", {})
    assert "ValueError" in text and "was saved by preset 'diloco', this run has 'desloc'" in text
    text = refused(run_ranks, tmp_path, config, "diloco", {"width": 66})
    assert "belongs to another model: embed.weight is (37, 130) there, (37, 66) here" in text
    text = refused(run_ranks, tmp_path, zero.settings("zero3"), "diloco", {})
    assert "the same ZeRO stage and parameter groups" in text
    assert "before attach" in text


def anew(me, root, config: dict[str, Any], options: dict[str, Any], empty: Path) -> dict[str, Any]:
    logging.basicConfig(level=logging.WARNING, force=True)
    made, exchange = make(config, "streaming_diloco", seed=8 + me.island)
    zero.train(made, range(9), me.rank)
    assert made.load_checkpoint(str(empty)) == (None, None) and exchange.step == 9
    assert exchange.state_dict()["in_flight"]
    made.load_checkpoint(str(root), **options)
    loaded = everything(made, exchange) | {"whole": zero.whole(made)}
    zero.train(made, range(4), me.rank)
    exchange.finish()
    return loaded | {"end": copied(exchange.host.tensors("parameter"))}


@pytest.mark.parametrize("stage", [pytest.param("zero2", marks=pytest.mark.slow), "zero3"])
@pytest.mark.parametrize("options", [{"load_optimizer_states": False}, {"load_module_only": True}])
def test_zero_resume_weights_alone(run_ranks, tmp_path, stage, options) -> None:
    """A resume may load the weights alone. The channels start anew: anchors at the weights of one
    replica, which all have.
    """
    config = zero.settings(stage)
    run_ranks(save, args=(tmp_path, config, "streaming_diloco", {}))
    (tmp_path / "empty").mkdir()
    out = run_ranks(anew, args=(tmp_path, config, options, tmp_path / "empty"), check=False)
    assert all(o.error is None for o in out), [o.error for o in out]
    whole = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "island0"))
    for o in out:
        assert all(torch.equal(whole[n], w) for n, w in o.value["whole"].items())
        state = o.value["exchange"]
        assert not any(c["momentum"].any() for c in state["channels"].values())
        assert state["in_flight"] == []
        steps = 9 if "load_module_only" in options else N  # DeepSpeed's own count
        assert o.value["steps"][0] == o.value["steps"][2] == steps
        assert differences(o.value["end"], out[o.rank % 2].value["end"]) == []
    assert "was loaded without optimizer states: the channels start anew" in out[0].log


def weights(me: Any, root: Path, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    logging.basicConfig(level=logging.WARNING, force=True)
    made, exchange = make(config, "diloco", seed=8 + me.island)
    made.load_checkpoint(str(root))
    loaded = zero.whole(made)
    zero.train(made, range(N, N + 2), me.rank)
    exchange.finish()
    return loaded


@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_zero_resume_other_number_of_ranks(run_ranks, tmp_path, stage) -> None:
    """Another number of ranks loads the weights alone."""
    config = zero.settings(stage)
    run_ranks(save, args=(tmp_path, config, "diloco", {}))
    out = run_ranks(weights, procs=1, group=True, args=(tmp_path, config), check=False)
    assert all(o.error is None for o in out), [o.error for o in out]
    assert "as weights alone, since 2 ranks saved it and 1 load it" in out[0].log
    whole = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "island0"))
    assert all(torch.equal(whole[n], t) for o in out for n, t in o.value.items())


def plain(me: Any, root: Path, config: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint of an engine without an exchange, with which two replicas begin."""
    logging.basicConfig(level=logging.WARNING, force=True)
    torch.manual_seed(7)
    made = zero.engine(config, zero.adamw, zero.Model(130))
    made.lr_scheduler = torch.optim.lr_scheduler.ExponentialLR(made.optimizer.optimizer, 0.9)
    zero.train(made, range(2), me.rank % 2)  # both islands alike
    if me.island == 0:
        made.save_checkpoint(str(root), "start")
        (root / f"written{me.rank}").touch()
    while len(list(root.glob("written*"))) < 2:
        pass
    parts = [deepspeed_ext.ZeroHost(made).partitions.masters(), zero.whole(made)]
    wanted = copied([*parts, list(made.optimizer.optimizer.state.values())])
    made, exchange = make(config, "diloco", seed=8)
    path, _ = made.load_checkpoint(str(root))
    parts = [exchange.host.partitions.masters(), zero.whole(made)]
    got = copied([*parts, list(made.optimizer.optimizer.state.values())])
    step = exchange.step
    made.save_checkpoint(str(root))
    exchange.finish()
    return {"path": path, "step": step, "differences": differences(wanted, got)}


def test_zero_resume_plain_checkpoint(run_ranks, tmp_path) -> None:
    """A checkpoint without the state of an exchange is loaded by all replicas, Adam's moments and
    the step, too, and the channels start anew.
    """
    out = run_ranks(plain, args=(tmp_path, zero.settings("zero1")), check=False)
    assert [o.error for o in out] == [None] * 4
    assert all(o.value["differences"] == [] and o.value["step"] == 2 for o in out)
    assert out[2].value["path"].startswith(str(tmp_path / "start"))
    assert "and holds no exchange state: the channels start anew" in out[0].log
    assert (tmp_path / "island1" / "latest").exists()


def elsewhere(me: Any, root: Path, config: dict[str, Any], tags: list[str]) -> None:
    made, exchange = make(config, "diloco")
    try:
        made.load_checkpoint(
            str(root / ("here" if me.island == 0 or len(set(tags)) > 1 else "there")),
            *tags[me.island : me.island + 1],
        )
    finally:
        exchange.detach()


def test_zero_resume_unseen_checkpoint_refused(run_ranks, tmp_path) -> None:
    """A checkpoint that not all replicas see is refused."""
    config = zero.settings("zero1")
    run_ranks(save, args=(tmp_path / "here", config, "diloco", {}))
    (tmp_path / "there").mkdir()
    for o in run_ranks(elsewhere, args=(tmp_path, config, ["global_step5"] * 2), check=False):
        assert (
            "NeedsDecision: no checkpoint is seen by all replicas (island0: global_step5; island1: "
            "none): copy"
        ) in str(o.error)
    plain = tmp_path / "here" / "start"  # of DeepSpeed alone, which island 1 does not see
    plain.mkdir()
    (plain / "mp_rank_00_model_states.pt").touch()
    for o in run_ranks(elsewhere, args=(tmp_path, config, ["start"] * 2), check=False):
        assert (
            "NeedsDecision: replicas do not see the same checkpoint of plain DeepSpeed (island0: "
            "start; island1: none): copy"
        ) in str(o.error)
    for o in run_ranks(elsewhere, args=(tmp_path, config, ["global_step5", "other"]), check=False):
        assert (
            "NeedsDecision: replicas load different tags (island0: 'global_step5', island1: "
            "'other')"
        ) in str(o.error)


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
    run_ranks(save, args=(tmp_path, zero.settings("zero2"), "diloco", {"period": N}))
    found = inspect(tmp_path)
    assert [Path(f["folder"]).relative_to(tmp_path).as_posix() for f in found] == [
        f"island{i}/global_step{N}" for i in (0, 1)
    ]
    count = sum(p.numel() for p in zero.Model(130).parameters())
    for f in found:
        assert f["complete"]
        assert f["step"] == N
        assert f["islands"] == 2
        assert f["shards"] == 2
        assert f["parameters"] == count
    assert inspect(tmp_path / "island1" / f"global_step{N}")[0]["holds"] == {"1": "island1"}
    whole = anchors(load_exchange(tmp_path / "island0" / f"global_step{N}" / "exchange"), 0)
    merged = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "island0"))
    assert sum(t.numel() for t in whole.values()) == count
    assert all(torch.equal(merged[n], t) for n, t in whole.items())
    (tmp_path / "island0" / f"global_step{N}" / "exchange" / "rank1.json").unlink()
    assert [f["complete"] for f in inspect(tmp_path)] == [False, True]


class Tied(zero.Model):
    """Two names for one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].weight = self.layers[0].weight


def apart(me: Any, root: Path, config: dict[str, Any]) -> dict[str, Any]:
    mesh = deepspeed_ext.shard_within_node(2)
    torch.manual_seed(7)
    made = zero.engine(config, zero.adamw, Tied())
    separate(made, mesh.replica)
    zero.train(made, range(2), me.rank)
    made.save_checkpoint(str(root), client_state={"who": mesh.replica})
    wanted, whole = copied(made.optimizer.optimizer.state_dict()), zero.whole(made)
    made = zero.engine(config, zero.adamw, Tied())
    separate(made, mesh.replica)
    path, client = made.load_checkpoint(str(root))
    got = copied(made.optimizer.optimizer.state_dict())
    same = differences(wanted, got) + differences(whole, zero.whole(made))
    merged = get_fp32_state_dict_from_zero_checkpoint(
        str(root / "replica1" if mesh.replica else root)
    )
    assert all(torch.equal(merged[n], w) for n, w in whole.items())
    # known to rank 0 of the world only, in plain DeepSpeed
    assert torch.equal(merged["layers.1.weight"], whole["layers.0.weight"])
    torch.distributed.barrier()
    if me.rank == 0:
        shutil.rmtree(root / "replica1")
    torch.distributed.barrier()
    taken, _ = made.load_checkpoint(str(root))
    return dict(path=path, client=client["who"], differences=same, whole=whole, taken=taken)


def test_zero_save_folders_of_trainer_replicas(run_ranks, tmp_path) -> None:
    """Each replica under the Trainer saves into a folder of its own."""
    out = run_ranks(apart, islands=1, procs=4, args=(tmp_path, zero.settings("zero2")))
    for rank, o in enumerate(out):
        own = tmp_path / "replica1" if rank > 1 else tmp_path
        assert o["differences"] == []
        assert o["client"] == rank // 2
        assert Path(o["path"]).parent == own / "global_step2"
        assert Path(o["taken"]).parent == tmp_path / "global_step2"
    assert not (tmp_path / "global_step2" / "exchange").exists()
