"""`fsdp-demo export`: what a run of two islands showed in its evaluation is what `from_pretrained`
loads from the folder.
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from fsdp_demo import attach, cli
from fsdp_demo.checkpoint import save_exchange
from fsdp_demo.integrations.export import export
from fsdp_demo.integrations.export.card import numbers
from fsdp_demo.integrations.export.weights import read_model
from fsdp_demo.integrations.mesh import ExchangeParallelismConfig

from ..support import trainer_script as script
from ..support.damage import flip, sealed_anew
from ..support.trainer_script import history, one_line


def small(tied=False, wide=False):
    torch.manual_seed(0)
    sizes = {"hidden_size": 80 if wide else 16, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(vocab_size=67, tie_word_embeddings=tied, **sizes, **heads))


def rows(seed, count=4):
    return torch.randint(67, (count, 12), generator=torch.Generator().manual_seed(seed))


def held_out_loss(model):
    """Of rows that no island trains on."""
    model.eval()
    with torch.no_grad():
        ids = rows(999, 8)
        loss = model(input_ids=ids, labels=ids).loss.item()
    model.train()
    return loss


def save(rank, folder, model, exchange, sharded):
    """A checkpoint as loops write it: the model (whole, or in one of two sharded forms), its
    config, the exchange's part.
    """
    if sharded:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        whole = get_model_state_dict(model)
        if sharded == "safetensors":
            named = {f"model.{k}": v for k, v in whole.items()}
            named["optimizer.model.norm.weight.step"] = torch.ones(())
            place = str(folder / "model")
            dcp.save(
                named, storage_writer=dcp.HuggingFaceStorageWriter(place, save_distributed=True)
            )
        else:
            dcp.save({"model": whole}, checkpoint_id=folder / "pytorch_model_fsdp_0")
        model.config.save_pretrained(folder)
    elif rank.proc == 0:
        model.save_pretrained(folder)
    save_exchange(folder / "exchange", exchange)


def trained(rank, preset, steps, at=(), sharded=False, finish=False, make=small, **changes):
    """Two islands on rows of their own. Checkpoints after the steps `at`; returns the outer
    parameters' loss there.
    """
    model, losses = make(), []
    if sharded:
        from torch.distributed.fsdp import fully_shard

        for layer in model.model.layers:
            fully_shard(layer, mesh=rank.mesh())
        fully_shard(model, mesh=rank.mesh())
    own = torch.optim.SGD if preset == "demo" else torch.optim.AdamW
    optimizer = own(model.parameters(), lr=1e-2)
    exchange = attach(optimizer, preset, model=model, **changes)
    for step in range(steps):
        # copies of a whole model see the same
        ids = rows(100 * rank.island + 10 * step + rank.proc * bool(sharded))
        model(input_ids=ids, labels=ids).loss.backward()
        exchange.report(tokens=ids.numel())
        optimizer.step()
        optimizer.zero_grad()
        if finish and step + 1 == steps:
            exchange.finish(close=False)
        if step + 1 in at:
            with exchange.outer_parameters(model):
                losses.append(held_out_loss(model))
            own = rank.folder / "run" / f"island{rank.island}"
            save(rank, own / f"checkpoint-{step + 1}", model, exchange, sharded)
    exchange.finish()
    return losses, str(rank.folder / "run")


def run_of(run_ranks, *args, islands=2, procs=1, **changes):
    """The losses of all ranks, and the folder, of islands that have `trained`."""
    options = {"islands": islands, "procs": procs, "timeout": 120}
    out = run_ranks(lambda r: trained(r, *args, **changes), **options)
    return [losses for losses, _ in out], Path(out[0][1])


def loaded(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


PRESETS = {
    "diloco": ("diloco", {"period": 4}, "anchor"),
    "streaming": ("streaming_diloco", {"period": 4, "layers": 1, "delay": 1}, "anchor"),
    "sparse": ("decoupled_momentum", {"period": 4}, "anchor"),
    "released": ("decoupled_momentum", {"rule": "released", "period": 3}, "mean"),
    "averages": ("local_sgd", {"period": 4}, "mean"),
    "desloc": ("desloc", {"period": 3}, "mean"),
    "demo": ("demo", {}, "parameters"),
}


@pytest.mark.parametrize("case", PRESETS)
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "fsdp2"])
def test_export_has_evaluated_loss(run_ranks, tmp_path, case, sharded):
    """The exported folder has the loss that the run evaluated. In the middle of a run, between
    exchanges.
    """
    preset, changes, kind = PRESETS[case]
    procs = 2 if sharded else 1
    out, run = run_of(run_ranks, preset, 6, [2, 6], sharded, procs=procs, **changes)
    for step, loss in zip((2, 6), out[0], strict=True):
        chosen = export(run, tmp_path / str(step), step=step)
        assert (chosen.kind, chosen.step) == (kind, step)
        assert abs(held_out_loss(loaded(tmp_path / str(step))) - loss) < 1e-6
        assert all(abs(o[(2, 6).index(step)] - loss) < 1e-6 for o in out)
    if kind != "parameters":  # it would not do to take an island's own parameters
        own = read_model(run / "island0" / "checkpoint-2")
        ours = loaded(tmp_path / "2").state_dict()
        assert any(not torch.equal(own[name], ours[name]) for name in own)


FORMS = {
    "safetensors shards": ("local_sgd", {"sharded": "safetensors"}),
    # ranks that hold copies of the model have the anchors together
    "anchors of copies": ("diloco", {"make": lambda: small(wide=True)}),
}


@pytest.mark.parametrize("form", FORMS)
def test_export_of_several_files(run_ranks, tmp_path, form):
    """A model in several safetensors files is exported, and one whose anchors are in several."""
    preset, more = FORMS[form]
    out, run = run_of(run_ranks, preset, 3, [3], procs=2, period=2, **more)
    export(run, tmp_path / "out")
    assert abs(held_out_loss(loaded(tmp_path / "out")) - out[0][0]) < 1e-6


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "fsdp2"])
def test_export_tied_frozen_and_low_precision(run_ranks, tmp_path, sharded):
    """A model with tied, frozen and bf16 parameters is exported."""

    def make():
        model = small(tied=True).to(torch.bfloat16)
        model.model.layers[0].requires_grad_(False)
        return model

    options = {"make": make, "procs": 1 + sharded, "period": 2}
    out, run = run_of(run_ranks, "diloco", 3, [3], sharded, **options)
    export(run, tmp_path / "out")
    model = loaded(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight is model.model.embed_tokens.weight
    # the run's rotary frequencies are bf16, those of a loaded model fp32
    assert abs(held_out_loss(model) - out[0][0]) < 2e-5
    frozen, as_made = (m.model.layers[0].mlp.up_proj.weight for m in (model, make()))
    assert torch.equal(frozen, as_made)


def test_export_after_finish_of_any_island(run_ranks, tmp_path):
    """After `finish` every island holds the model."""
    for case in ("averages", "released"):
        preset, changes, _ = PRESETS[case]
        _, run = run_of(run_ranks, preset, 5, [5], finish=True, **changes)
        export(run, tmp_path / case)
        export(run, tmp_path / f"{case}1", island=1)
        mine, one = (loaded(tmp_path / name).state_dict() for name in (case, f"{case}1"))
        own = read_model(run / "island0" / "checkpoint-5")
        assert all(torch.equal(mine[n], own[n]) and torch.equal(one[n], own[n]) for n in own)


def refused(run, out, **keywords):
    with pytest.raises(ValueError) as caught:
        export(run, out, **keywords)
    assert not Path(out).exists() or any(Path(out).iterdir()), "a refused export leaves no folder"
    return str(caught.value)


def test_export_mean_needs_all_islands(run_ranks, tmp_path, caplog):
    """A model that is a mean needs the checkpoints of all islands."""
    _, run = run_of(run_ranks, "local_sgd", 4, [2, 4], period=4)
    (run / "island1" / "checkpoint-4").rename(tmp_path / "lost")
    assert export(run, tmp_path / "older").step == 2
    assert "step 4 is not whole on all islands" in caplog.text
    text = refused(run, tmp_path / "no", step=4)
    assert "not there (or not whole): island 1" in text and "--island 0" in text
    assert "of step 3: there are 2 and 4" in refused(run, tmp_path / "no", step=3)
    assert "nothing of island 5 at step 4, there are islands 0" in refused(
        run, tmp_path / "no", step=4, island=5
    )
    chosen = export(run, tmp_path / "one", step=4, island=0)
    own = read_model(run / "island0" / "checkpoint-4")
    card = (tmp_path / "one" / "README.md").read_text()
    assert chosen.kind == "replica"
    assert all(torch.equal(t, own[n]) for n, t in loaded(tmp_path / "one").state_dict().items())
    assert "those of island 0 alone, **not** the mean" in card
    one_checkpoint = export(run / "island0" / "checkpoint-4", tmp_path / "two", island=0)
    assert (one_checkpoint.kind, one_checkpoint.step) == ("replica", 4)


def test_export_takes_the_best_of_the_trainer(run_ranks, tmp_path, caplog, capsys):
    """Without --step the step is the one that the Trainer's newest state calls its best."""
    _, run = run_of(run_ranks, "diloco", 6, [2, 4, 6], period=2)
    for island in (0, 1):
        for step, best in ((4, 2), (6, 4)):
            named = {"best_model_checkpoint": f"/moved/checkpoint-{best}", "best_metric": 2.5}
            at = run / f"island{island}" / f"checkpoint-{step}" / "trainer_state.json"
            at.write_text(json.dumps(named))
    assert cli.main(["export", str(run), str(tmp_path / "best")]) == 0
    assert "step 4, the Trainer's best (metric 2.5), the outer" in capsys.readouterr().out
    assert "| step | 4, the Trainer's best" in (tmp_path / "best" / "README.md").read_text()
    assert (export(run, tmp_path / "six", step=6).step, caplog.text) == (6, "")
    for island in (0, 1):
        (run / f"island{island}" / "checkpoint-4").rename(tmp_path / f"away{island}")
    assert export(run, tmp_path / "newest").step == 6
    assert "step 4, the Trainer's best, is not here" in caplog.text


def test_export_two_runs_refused(run_ranks, tmp_path):
    """A folder with two runs is refused."""
    runs = [run_of(run_ranks, "local_sgd", 2, [2], islands=1, period=k)[1] for k in (1, 2)]
    export(runs[0], tmp_path / "alone")
    both = tmp_path / "both"
    both.mkdir()
    for i, run in enumerate(runs):
        run.rename(both / f"run{i}")
    assert "are both of island 0 at one step" in refused(both, tmp_path / "no")
    for file in (both / "run0" / "island0" / "checkpoint-2" / "exchange").iterdir():
        file.unlink()
    assert "holds no part of an exchange's state" in refused(both / "run0", tmp_path / "no")
    assert export(both, tmp_path / "other").step == 2


def test_export_refusals_in_a_sentence(run_ranks, tmp_path):
    """A run that cannot be exported is refused in a sentence."""
    _, run = run_of(run_ranks, "diloco", 3, [3], True, islands=1, procs=2, period=2)
    here, no = run / "island0" / "checkpoint-3", tmp_path / "no"
    empty, other, config = (str(tmp_path / name) for name in ("empty", "other", "config"))
    Path(empty).mkdir()
    size = {"hidden_size": 32, "intermediate_size": 96, "num_attention_heads": 2}
    LlamaConfig(vocab_size=67, num_hidden_layers=2, **size).save_pretrained(other)
    small().config.save_pretrained(config)
    assert "no such folder" in refused(tmp_path / "nowhere", no)
    assert "holds no checkpoint" in refused(empty, no)
    assert "not an empty folder" in refused(run, run)
    assert "--model names another size" in refused(run, no, model=other)
    assert "--tokenizer" in refused(run, no, model=config, tokenizer=empty)
    (here / "config.json").unlink()
    assert "holds no config.json: say with --model" in refused(run, no)
    export(run, tmp_path / "given", model=config)
    small().config.save_pretrained(here)
    sealed_anew(here, 3)
    deepspeed = here / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    deepspeed.touch()
    assert f"zero_to_fp32.py {here.parent} OUT --tag" in refused(run, no)
    deepspeed.unlink()
    files = [p for p in here.rglob("*") if p.suffix in (".safetensors", ".distcp", ".bin")]
    model = next(p for p in files if "model" in str(p.relative_to(here)))
    for damaged in (model, here / "exchange" / "rank1.safetensors"):
        flip(damaged, -5)
        said = refused(run, no)
        assert "checksum" in said and damaged.name in said
        flip(damaged, -5)  # and back
    (here / "exchange" / "rank1.json").unlink()
    assert "lacks rank 1 of island 0" in refused(run, no)


def evaluated(folder):
    """The evaluation loss of what was exported to folder/out, by a Trainer without islands."""
    again = script.trainer(folder / "again", {}, split=False)
    again.model = again.model_wrapped = loaded(folder / "out")
    return again.evaluate()["eval_loss"]


def test_export_of_trainer_run(run_ranks, tmp_path):
    """A Trainer run is exported with its tokenizer and a card. The evaluation loss of step 4,
    between exchanges, as the Trainer logged it; then again by a Trainer without islands.
    """

    def run(rank, fsdp):
        line = one_line("diloco", period=3)
        own = script.trained(rank.folder / "out", line, fsdp=fsdp, max_steps=6)
        return history(own, "eval_loss")[0], str(rank.folder / "out")

    for fsdp in (False, True):
        loss, where = run_ranks(run, islands=2, procs=1 + fsdp, timeout=120, args=(fsdp,))[0]
        folder = tmp_path / f"fsdp{fsdp}" / "out"
        words = ("--tokenizer", str(tmp_path / "fsdpFalse" / "out")) if fsdp else ()
        assert cli.main(["export", where, str(folder), "--step", "4", *words]) == 0
        files = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
        assert {*files, "README.md"} <= set(os.listdir(folder))
        assert abs(evaluated(folder.parent) - loss) < 1e-6
        tokens = AutoTokenizer.from_pretrained(folder)("the of")["input_ids"]
        assert tokens == script.tokenizer()("the of")["input_ids"]
        card = (folder / "README.md").read_text()
        wanted = ["preset diloco: delta every 3", "delta.schedule.sync_every=3", "anchors"]
        wanted += ["in its last start on 2 islands", "| islands | 2 in the last start, each of"]
        wanted += ["| step | 4 |", "tokens", "evaluation loss", "bytes sent by an island"]
        wanted += ["fsdp-demo 0", f'from_pretrained("{folder.name}")', "source: delta"]
        assert [w for w in (*wanted, f"{loss:.4f}") if w not in card] == [], card


@script.MESH
@pytest.mark.parametrize("case", ["diloco", "released", "demo"])
def test_export_of_trainer_mesh(run_ranks, tmp_path, case):
    """A Trainer run in a mesh is exported. One world of four ranks: the model file of a checkpoint
    mixes replicas, which differ at step 4.
    """
    preset, changes, kind = PRESETS[case]
    changes = changes | ({"period": 3} if kind != "parameters" else {})

    def run(rank):
        os.environ |= dict(
            PARALLELISM_CONFIG_DP_REPLICATE_SIZE="2", PARALLELISM_CONFIG_DP_SHARD_SIZE="2"
        )
        plan = dict(axes=ExchangeParallelismConfig(), split=False, max_steps=6, fsdp=True)
        own = script.trained(rank.folder / "out", one_line(preset, **changes), **plan)
        return history(own, "eval_loss"), str(rank.folder / "out")

    out = run_ranks(run, islands=1, procs=4, timeout=120, env={"ISLAND_COUNT": ""})
    assert export(out[0][1], tmp_path / "out", step=4).kind == kind
    assert abs(evaluated(tmp_path) - out[0][0][0]) < 1e-6


def test_export_command_without_deepspeed_warning(monkeypatch, tmp_path):
    """The command runs on the CPU without a warning of DeepSpeed. transformers imports DeepSpeed
    where it is there, which warns if it finds no GPU.
    """
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    seen = []

    def write(*_, **__):
        seen.append(os.environ.get("DS_ACCELERATOR"))
        return SimpleNamespace(step=4, why="", says="the anchor")

    monkeypatch.setattr("fsdp_demo.integrations.export.pretrained.export", write)
    assert cli.main(["export", str(tmp_path), str(tmp_path / "out")]) == 0 and seen == ["cpu"]


def test_export_command_error_is_one_line(tmp_path, capsys):
    """The command says in one line what is wrong."""
    assert cli.main(["export", str(tmp_path / "none"), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("fsdp-demo: error: ") and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_export_card_numbers_of_step(tmp_path):
    """The card takes the numbers of its step from the run log. What recipes/pretrain.py logs: the
    evaluation after the end is that of the last checkpoint only if that came after the end, too.
    """
    island = tmp_path / "island0"
    (island / "checkpoint-4").mkdir(parents=True)

    def written(name, rows):
        (island / name).write_text("\n".join(map(json.dumps, rows)))

    losses = [(s, {"loss": 10.0 - s, "global_loss": 9.5 - s}) for s in (2, 4, 6)]
    written("metrics.jsonl", [{"step": s, **loss, "bytes_sent": 1000 * s} for s, loss in losses])
    evaluated = ((0, 11), (4, 6.25), (6, 4.25))
    event = {"kind": "evaluation"}
    written("events.jsonl", [{**event, "step": s, "loss": loss} for s, loss in evaluated])
    written("summary.json", [{"steps": 6, "bytes_sent_per_island": 7000}])
    (tmp_path / "summary.json").write_text("{}")

    def at(step, ended):
        return numbers(island / f"checkpoint-{step}", tmp_path, step, ended)

    both = {"training loss, all islands": "5.5000", "training loss, one island": "6.0000"}
    assert at(4, False) == both | {"evaluation loss": "6.2500", "bytes sent by an island": "4 kB"}
    last = at(6, True)
    assert (last["evaluation loss"], last["bytes sent by an island"]) == ("4.2500", "7 kB")
    assert "evaluation loss" not in at(6, False)
    alone = numbers(island / "checkpoint-4", island / "checkpoint-4", 4, True)
    assert alone["evaluation loss"] == "6.2500"
    assert numbers(tmp_path / "elsewhere", tmp_path / "elsewhere", 4, True) == {}


def test_export_metadata_executes_no_code(tmp_path):
    """Metadata that names code is not executed. `.metadata` of torch's distributed checkpoints is a
    pickle: only names that a checkpoint of tensors needs are looked up.
    """
    import pickle

    from fsdp_demo.integrations.export.weights import _PlainReader

    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'executed'}",)

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(
        ValueError, match=r"it names posix.system, which no checkpoint of tensors needs"
    ):
        _PlainReader(str(tmp_path)).read_metadata()
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("data", [b"\x94", b"N.", b"p-1\n.", b"]."])
def test_export_odd_metadata_is_damage(tmp_path, data):
    """Metadata that is no pickle, or of something else, ends in a sentence."""
    from fsdp_demo.integrations.export.weights import read_model

    (tmp_path / "model_0").mkdir()
    (tmp_path / "model_0" / ".metadata").write_bytes(data)
    with pytest.raises(ValueError, match=r"is damaged \(|is no metadata of a distributed"):
        read_model(tmp_path)


def test_export_metadata_of_any_python():
    """Metadata that any release of Python wrote is read. Python 3.13 names the module of its paths
    `pathlib._local`, others `pathlib`.
    """
    import io

    from fsdp_demo.integrations.export.weights import _Names

    for module in (b"pathlib", b"pathlib._local"):
        wrote = b"c" + module + b"\nPosixPath\n(S'a/b'\ntR."  # protocol 0 of pickle
        assert _Names(io.BytesIO(wrote)).load() == Path("a/b")
