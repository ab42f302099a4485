"""recipes/pretrain.py in short runs: schedules, meshes, compilation. What training reaches is
tested by `test_quickstart.py`.
"""

import json
import math
import sys

import data
import datasets
import pytest
import report
import torch
from pretrain_parts import Arguments, refuse_unlike

import fsdp_demo
from fsdp_demo.exchange.pace import Pace

pytestmark = pytest.mark.usefixtures("own_cache")
TOKENIZER = data.ByteTokenizer()


def test_pretrain_schedules_rise_and_end_at_a_tenth():
    """Schedules of the rate rise in the warm-up and end at a tenth."""
    from pretrain_parts import Arguments, schedule

    for name, end in (("cosine", 0.1), ("wsd", 0.1), ("constant", 1.0)):
        train = Arguments(steps=100, warmup_steps=10, schedule=name)
        values = [schedule(step, train) for step in range(101)]
        assert 0 < values[0] < 0.1 and max(values) <= 1 and values[:10] == sorted(values[:10])
        assert values[-1] == pytest.approx(end, abs=1e-6)


# -- flags that change how a step is computed ----------------------------------------------------


def test_pretrain_compile_takes_a_backend_or_none():
    """`--compile` takes a backend or none."""
    from pretrain_parts import Arguments
    from transformers import HfArgumentParser

    def parsed(*words):
        return HfArgumentParser(Arguments).parse_args_into_dataclasses(list(words))[0].compile

    words = [], ["--compile"], ["--compile", "eager"], ["--compile", "--bf16"]
    assert [parsed(*w) for w in words] == [None, "inductor", "eager", "inductor"]


def rows_file(folder, rows):
    """A file of ready rows; one in twenty of them is held out."""
    ids = [[i % 256, i // 256, *range(30)] for i in range(rows)]
    datasets.Dataset.from_dict({"input_ids": ids}).to_parquet(str(folder / "rows.parquet"))
    return folder / "rows.parquet"


def recipe(rank, folder, *options):
    """A run of the recipe in this process: the numbers of the rows it trained on, batch by
    batch.
    """
    import pretrain
    import pretrain_parts

    seen = []

    def recorded(loader, skip=0):
        for batch in data.forever(loader, skip):
            seen.append((batch["input_ids"][:, 0] + 256 * batch["input_ids"][:, 1]).tolist())
            yield batch

    common = "--model tiny --sequence-length 32 --batch-size 2 --eval-every 0 --eval-batches 2"
    words = ["pretrain.py", *common.split(), "--log-every", 2, *options, "--output", folder]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain_parts, "forever", recorded)
        patch.setattr(report.Report, "draw", lambda *_: None)
        patch.setattr(sys, "argv", [*map(str, words)])
        pretrain.main()
    return seen


def told(folder, island=0):
    """Summary and lines of an island."""
    lines = (folder / f"island{island}" / "metrics.jsonl").read_text().splitlines()
    summary = json.loads((folder / f"island{island}" / "summary.json").read_text())
    return summary, [json.loads(line) for line in lines]


def two_nodes(rank):
    """What a launcher of two machines with two ranks each tells the rank."""
    local = {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(rank.proc % 2)}
    # the group is there already
    return {"ISLAND_COUNT": "", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", **local}


def test_pretrain_mesh_sees_each_row_once(run_ranks, tmp_path):
    """A mesh is one world in which no row is seen twice or lost."""
    # 2 are held out: 49, of which 6 steps of 4 ranks x 2 rows take all but the last
    source = rows_file(tmp_path, 51)
    steps, options = 6, ("--exchange", "demo", "--mesh", "--data", source, "--peak-tflops", 0.01)
    args = (tmp_path / "out", "--steps", steps, *options)
    ranks = run_ranks(recipe, 1, 4, env=two_nodes, args=args)
    rows = data.load_data(str(source), TOKENIZER, 32, validation_rows=4).validation
    held_out = {rows[i]["input_ids"][0] for i in range(2)}
    seen = [row for batches in ranks for batch in batches for row in batch]
    assert len(seen) == len(set(seen)) == 48 and not held_out & set(seen)
    assert set(seen) < set(range(51))
    summary, lines = told(tmp_path / "out")
    facts = dict(islands=2, procs=2, tokens=steps * 4 * 2 * 32, digests_equal=True)
    assert facts.items() <= summary.items()
    assert [line["step"] for line in lines] == [2, 4, 6]
    assert lines[-1]["bytes_sent"] == summary["bytes_sent_per_island"] > 0
    for line in lines:  # 4 ranks of 0.01 Tflops
        assert line["mfu"] == pytest.approx(
            line["tokens_per_second"] * report.flops_per_token(tiny(), 32) / 4e10
        )
        assert line["global_loss"] == pytest.approx(math.log(258), abs=0.5)
        assert line["peak_memory"] > 50e6


def test_pretrain_islands_send_what_a_mesh_sends(run_ranks, tmp_path):
    """Islands send what a mesh sends and agree on the loss."""
    source = rows_file(tmp_path, 60)
    options = ("--steps", 4, "--exchange", "demo", "--data", source)
    run_ranks(recipe, 2, 2, args=(tmp_path / "islands", *options))
    run_ranks(recipe, 1, 4, env=two_nodes, args=(tmp_path / "mesh", *options, "--mesh"))
    mesh, _ = told(tmp_path / "mesh")
    (summary, lines), (_, others) = (told(tmp_path / "islands", i) for i in range(2))
    same = ("bytes_sent_per_island", "islands", "procs", "tokens", "exchanges", "parameters")
    assert {k: summary[k] for k in same} == {k: mesh[k] for k in same}
    assert summary["loss_start"] == pytest.approx(mesh["loss_start"], rel=1e-6)
    assert summary["mfu"] is None and summary["digests_equal"] is True
    # each island's own loss, and the one of both
    for here, there in zip(lines, others, strict=True):
        assert here["loss"] != there["loss"]
        assert here["global_loss"] == pytest.approx(there["global_loss"], rel=1e-6)


@pytest.mark.slow
def test_pretrain_compiled_run_learns_the_same(run_ranks, tmp_path):
    """A compiled run that recomputes learns the same."""
    source, runs = rows_file(tmp_path, 60), {}
    options = ("--steps", 4, "--data", source, "--exchange", "full", "--lr", 0.01)
    both = ("--compile", "aot_eager", "--activation-checkpointing")
    for name, flags in {"plain": (), "both": both}.items():
        args = (tmp_path / name, *options, "--warmup-steps", 0, *flags)
        runs[name] = run_ranks(recipe, 1, 2, env={"ISLAND_COUNT": "1"}, timeout=100, args=args)
    (plain, _), (both, _) = told(tmp_path / "plain"), told(tmp_path / "both")
    assert both["compile"] == "aot_eager" and both["activation_checkpointing"]
    assert plain["compile"] is None
    assert plain["loss_end"] < plain["loss_start"] - 0.1
    assert both["loss_end"] == pytest.approx(plain["loss_end"], rel=1e-4)
    assert runs["both"] == runs["plain"]


@pytest.mark.parametrize(("variables", "expected"), [
    ({}, (2, 4)),
    ({"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "4", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"},
        (4, 2)),
])  # fmt: skip
def test_pretrain_mesh_sizes_come_from_the_launcher(monkeypatch, variables, expected):
    """The sizes of a mesh come from the launcher's variables."""
    from pretrain_parts import mesh_config

    monkeypatch.delenv("ISLAND_COUNT", raising=False)
    for name, value in {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", **variables}.items():
        monkeypatch.setenv(name, value)
    config = mesh_config()
    assert (config.dp_replicate_size, config.dp_shard_size) == expected
    monkeypatch.setenv("ISLAND_COUNT", "2")
    with pytest.raises(ValueError, match="one world or islands"):
        mesh_config()


def tiny(**changes):
    from model import MODELS
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(MODELS / "tiny.json", **changes)
        )


def test_pretrain_islands_take_unlike_steps(run_ranks, everywhere, tmp_path):
    """Under local_steps=by_speed a slow island trains on fewer rows, each once, also behind a
    resume; lines, rate and saves follow the clock of the run. Saves at unlike steps are refused.
    """
    everywhere.setattr(Pace, "seconds", lambda self, device: (1.0, 2.0)[self._slot])
    source, by_speed = rows_file(tmp_path, 150), ("period=4", "local_steps=by_speed")
    options = ("--exchange", "diloco", "--set", *by_speed, "--data", source, "--save-every", 4)
    seen = []
    for steps, more in ((8, ()), (16, ("--resume",))):
        args = (tmp_path / "out", "--steps", steps, *options, *more)
        seen.append(run_ranks(recipe, 2, 2, args=args))
    for island, own in ((0, (8, 8)), (1, (6, 4))):
        lives = [life[2 * island : 2 * island + 2] for life in seen]
        assert [[len(batches) for batches in life] for life in lives] == [[n] * 2 for n in own]
        rows = [row for life in lives for batches in life for batch in batches for row in batch]
        assert len(rows) == len(set(rows))
        summary, lines = told(tmp_path / "out", island)
        assert summary["steps"] == 16 and summary["digests_equal"] is True
        assert [line["step"] for line in lines] == [*range(2, 17, 2)]
    assert len({told(tmp_path / "out", i)[1][-1]["lr"] for i in range(2)}) == 1
    odd = Arguments(save_every=6, eval_every=0)
    with pytest.raises(ValueError, match="--save-every and --eval-every multiples of 4"):
        refuse_unlike(odd, fsdp_demo.load_config("diloco", by_speed))
