"""The recipes' own parts: data, models, report, and short runs for the flags. What training reaches
is tested by `test_quickstart.py`.
"""

import json
import math
import shutil
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")

RECIPES = Path(__file__).parents[2] / "recipes"
sys.path.insert(0, str(RECIPES))

import compare  # noqa: E402
import data  # noqa: E402
import report  # noqa: E402

TOKENIZER = data.ByteTokenizer()


@pytest.fixture(autouse=True)
def own_cache(tmp_path, everywhere):
    """Nothing that a test maps may come from, or stay in, the user's cache of `datasets`."""
    everywhere.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def documents(count=400, words=60, seed=0):
    rng = np.random.default_rng(seed)
    return [
        f"document {i}: " + " ".join(str(n) for n in rng.integers(0, 1000, words))
        for i in range(count)
    ]


def texts(rows):
    return [TOKENIZER.decode(row["input_ids"]) for row in rows]


# -- packing -------------------------------------------------------------------------------------


def test_data_pack_puts_eos_after_every_document():
    """`pack` puts the end after every document and loses nothing but the last row's rest."""
    rows = data.pack([[1, 2, 3], [4], [5, 6, 7, 8, 9]], 4, 99)
    assert rows.tolist() == [[1, 2, 3, 99], [4, 99, 5, 6], [7, 8, 9, 99]]
    assert data.pack([[1, 2, 3], [4, 5]], 4, 99).tolist() == [[1, 2, 3, 99]]
    assert data.pack([], 4, 99).shape == (0, 4)


def test_data_byte_tokenizer_reads_back():
    """Text reads back from the byte tokenizer."""
    text = "def ä(x):\n\treturn '€𝄞' + \"\\x00\"\n\x00"
    (ids,) = TOKENIZER.encode([text])
    assert max(ids) < 256 and TOKENIZER.decode(ids) == text
    assert TOKENIZER.decode([*ids, TOKENIZER.eos_token_id, TOKENIZER.pad_token_id]) == text


def test_data_collate_pads_and_masks():
    """Rows of unequal length are padded, and the loss ignores the padding."""
    batch = data.Collate(257)(
        [{"input_ids": np.array([1, 2, 3])}, {"input_ids": [4], "labels": [5]}]
    )
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 257, 257]]
    assert batch["labels"].tolist() == [[1, 2, 3], [5, -100, -100]]
    assert batch["input_ids"].dtype == torch.int64


# -- stdlib --------------------------------------------------------------------------------------


def test_data_stdlib_files_are_disjoint():
    """The files of the standard library are disjoint, sorted and without tests."""
    train, held_out = data.stdlib_files()
    assert not set(train) & set(held_out) and data.stdlib_files() == (train, held_out)
    assert train == sorted(train) and 0.02 < len(held_out) / len(train) < 0.12
    root = sysconfig.get_paths()["stdlib"]
    assert not any(
        {"site-packages", "test", "tests"} & set(path.relative_to(root).parts)
        for path in train + held_out
    )
    assert sum(path.stat().st_size for path in train) > 3e6


def test_data_stdlib_is_split_by_island(monkeypatch):
    """Islands get disjoint rows of the standard library, and equal validation."""
    files = data.stdlib_files()
    monkeypatch.setattr(data, "stdlib_files", lambda: (files[0][:40], files[1]))
    parts = [data.load_data("stdlib", TOKENIZER, 128, island=i, islands=3) for i in range(3)]
    whole = data.load_data("stdlib", TOKENIZER, 128)
    for i, part in enumerate(parts):  # every third row: together all rows, each once
        assert np.array_equal(part.train.ids, whole.train.ids[i::3])
        assert np.array_equal(part.validation.ids, whole.validation.ids)
    first = files[0][0].read_bytes()[: 128 * len(whole.train)]
    assert bytes(whole.train.ids.flatten()[: len(first)].astype(np.uint8)) == first


# -- files ---------------------------------------------------------------------------------------


def write(folder, kind, docs):
    folder.mkdir(exist_ok=True)
    if kind == "txt":
        for i, text in enumerate(docs):
            (folder / f"{i:04d}.txt").write_text(text + "\n\nsecond paragraph")
    elif kind == "jsonl":
        (folder / "a.jsonl").write_text(
            "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(docs))
        )
    elif kind == "parquet":
        datasets.Dataset.from_dict({"content": docs, "id": list(range(len(docs)))}).to_parquet(
            str(folder / "a.parquet")
        )
    return folder


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
def test_data_local_files_are_split_by_island(tmp_path, kind):
    """Local files are packed and split by island."""
    folder = write(tmp_path / kind, kind, documents(120 if kind == "txt" else 400))
    parts = [
        data.load_data(str(folder), TOKENIZER, 64, island=i, islands=2, validation_rows=8)
        for i in range(2)
    ]
    seen = [set(texts(part.train)) for part in parts]
    assert seen[0] and seen[1] and not seen[0] & seen[1]
    assert abs(len(parts[0].train) - len(parts[1].train)) <= 1
    held_out = [texts(part.validation) for part in parts]
    assert held_out[0] == held_out[1] and len(held_out[0]) == 8
    assert not set(held_out[0]) & (seen[0] | seen[1])
    rows = [row["input_ids"] for part in parts for row in part.train]
    assert all(len(row) == 64 for row in rows) and any(
        TOKENIZER.eos_token_id in row for row in rows
    )
    if kind == "txt":  # a file is a document: the paragraph break stays inside it
        assert any("\n\nsecond" in text for text in seen[0] | seen[1])


def test_data_long_text_is_cut_at_a_line(tmp_path):
    """One long text file is cut at a line for validation."""
    path = tmp_path / "long.txt"
    path.write_text("\n".join(documents()))
    part = data.load_data(str(path), TOKENIZER, 64, validation_rows=4)
    assert texts(part.validation)[0].startswith("document 3")
    assert not set(texts(part.validation)) & set(texts(part.train))


def test_data_ready_input_ids_are_kept(tmp_path):
    """Ready `input_ids` are taken as they are."""
    rows = [[i, i + 1, i + 2] + [7] * (i % 3) for i in range(100)]
    datasets.Dataset.from_dict({"input_ids": rows, "attention_mask": rows}).to_parquet(
        str(tmp_path / "ready.parquet")
    )
    part = data.load_data(str(tmp_path / "ready.parquet"), TOKENIZER, 64, validation_rows=5)
    found = [list(row["input_ids"]) for row in part.train] + [
        list(row["input_ids"]) for row in part.validation
    ]
    assert sorted(found) == sorted(rows)
    batch = next(iter(part.loaders(8)[0]))
    assert batch["input_ids"].shape[0] == 8 and set(batch) == {"input_ids", "labels"}


def test_data_streams_are_split_by_island(tmp_path):
    """Streams are split by island and have common validation."""
    write(tmp_path / "hub", "jsonl", documents())
    (tmp_path / "hub" / "a.jsonl").rename(tmp_path / "hub" / "b.jsonl")
    write(tmp_path / "hub", "jsonl", documents(seed=1))
    files = [str(tmp_path / "hub" / name) for name in ("a.jsonl", "b.jsonl")]

    def opened():
        stream = datasets.load_dataset("json", data_files=files, split="train", streaming=True)
        return data.held_out_of_stream({"train": stream}, 16)

    parts = []
    for island in range(2):
        train, held_out = (data.to_rows(part, TOKENIZER, 64) for part in opened())
        parts.append(
            (
                texts(data.split_by_island(train, island, 2, seed=island)),
                texts(data.first_rows(held_out, 8)),
            )
        )
    assert parts[0][0] and not set(parts[0][0]) & set(parts[1][0])
    assert parts[0][1] == parts[1][1] and not set(parts[0][1]) & set(parts[0][0] + parts[1][0])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "no data files"),
        ({"a.jsonl": '{"title": "x"}\n' * 30}, "expected 'text'"),
        ({"a.csv": "x"}, "no data files"),
        ({"a.txt": "x", "b.jsonl": "{}"}, "one format"),
    ],
)
def test_data_wrong_are_refused_with_what_was_found(tmp_path, content, message):
    """Wrong data are refused with what was found."""
    for name, text in content.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        data.load_data(str(tmp_path), TOKENIZER, 16)


@pytest.fixture
def accelerate_state():
    """Accelerate keeps its state in the process; other tests must not find it."""
    from accelerate.state import AcceleratorState, GradientState

    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def test_data_missing_path_is_not_looked_for_on_the_hub():
    """A path that is not there is not looked for on the Hub."""
    for source in ("./nowhere", "/nowhere", "texts.jsonl"):
        with pytest.raises(ValueError, match="no such file"):
            data.load_data(source, TOKENIZER, 16)


def test_data_hub_tokenizer_from_a_folder(tmp_path):
    """A tokenizer of the Hub is read from a folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0, "<end>": 1, "a": 2, "b": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<end>", unk_token="<unk>"
    ).save_pretrained(tmp_path)
    tokenizer = data.load_tokenizer(str(tmp_path))
    assert (tokenizer.vocab_size, tokenizer.eos_token_id, tokenizer.pad_token_id) == (4, 1, 1)
    assert data.pack(tokenizer.encode(["a b b", "b"]), 2, tokenizer.eos_token_id).tolist() == [
        [2, 3],
        [3, 1],
        [3, 1],
    ]
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(
        tmp_path / "no_end"
    )
    with pytest.raises(ValueError, match="neither an EOS"):
        data.load_tokenizer(str(tmp_path / "no_end"))


def test_data_forever_repeats_and_skips_on_resume(accelerate_state):
    """`forever` repeats the data in another order, and skips what was seen on a resume."""
    from accelerate import Accelerator, DataLoaderConfiguration

    torch.manual_seed(3)
    rows = data.Data(
        data.Rows(np.arange(40).reshape(20, 2)), data.Rows(np.arange(4).reshape(2, 2)), 257
    )
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True)
    )
    loader = accelerator.prepare(rows.loaders(2)[0])
    batches = data.forever(loader)
    seen = [next(batches)["input_ids"][:, 0].tolist() for _ in range(30)]
    for epoch in range(3):
        assert sorted(sum(seen[10 * epoch : 10 * epoch + 10], [])) == list(range(0, 40, 2))
    assert seen[:10] != seen[10:20]
    resumed = data.forever(loader, skip=13)
    assert [next(resumed)["input_ids"][:, 0].tolist() for _ in range(17)] == seen[13:]


def test_data_too_little_for_a_batch_is_refused(accelerate_state):
    """Data that make no full batch are refused."""
    from accelerate import Accelerator

    loader = Accelerator(cpu=True).prepare(
        data.Data(data.Rows(np.zeros((3, 4), int)), data.Rows(np.zeros((1, 4), int)), 0).loaders(4)[
            0
        ]
    )
    with pytest.raises(ValueError, match="no full batch"):
        next(data.forever(loader))


# -- models --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("tiny", 459_904), ("small", 3_280_128), ("llama-3.2-1b", 1_235_814_400)],
)
def test_model_parameter_counts(name, parameters):
    """The models have the parameters that their names say."""
    from model import load_model

    with torch.device("meta"):
        model = load_model(name, TOKENIZER.vocab_size)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert next(model.parameters()).dtype == torch.float32
    if name == "llama-3.2-1b":
        assert (
            model.config.rope_parameters["rope_theta"] == 500_000
            and model.config.rope_parameters["factor"] == 32
        )


def test_model_with_too_few_tokens_is_refused():
    """A model with fewer tokens than the tokenizer is refused."""
    from model import load_model

    with pytest.raises(ValueError, match="vocab_size=258"):
        load_model("tiny", 50_000)


def test_pretrain_schedules_rise_and_end_at_a_tenth():
    """Schedules of the rate rise in the warm-up and end at a tenth."""
    from pretrain_parts import Arguments, schedule

    for name, end in (("cosine", 0.1), ("wsd", 0.1), ("constant", 1.0)):
        train = Arguments(steps=100, warmup_steps=10, schedule=name)
        values = [schedule(step, train) for step in range(101)]
        assert 0 < values[0] < 0.1 and max(values) <= 1 and values[:10] == sorted(values[:10])
        assert values[-1] == pytest.approx(end, abs=1e-6)


# -- flags that change how a step is computed ----------------------------------------------------


def test_model_layers_are_compiled_in_place(monkeypatch):
    """Layers are compiled in place and recompute."""
    from model import checkpoint_and_compile, load_model

    model, cpu = load_model("tiny", TOKENIZER.vocab_size), torch.device("cpu")
    names = [name for name, _ in model.named_parameters()]
    checkpoint_and_compile(model, cpu, False, None)
    assert not model.is_activation_checkpointing and not any(
        m._compiled_call_impl for m in model.modules()
    )
    checkpoint_and_compile(model, cpu, True, "aot_eager")
    assert [type(m).__name__ for m in model.modules() if m._compiled_call_impl] == [
        "LlamaDecoderLayer"
    ] * 2
    assert (
        model.is_activation_checkpointing
        and [name for name, _ in model.named_parameters()] == names
    )
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(ValueError, match="needs a C.. compiler.*--compile aot_eager"):
        checkpoint_and_compile(model, cpu, False, "inductor")


def test_model_equal_layers_share_one_compilation(run_ranks, tmp_path):
    """Equal layers share one compilation: dynamo gives up, and runs eagerly, at the ninth version
    of one function.
    """
    from model import MODELS, checkpoint_and_compile, load_model

    config = json.loads((MODELS / "tiny.json").read_text()) | {
        "num_hidden_layers": 10,
        "use_cache": True,
    }
    (tmp_path / "deep.json").write_text(json.dumps(config))

    def compiled():
        model = load_model(str(tmp_path / "deep.json"), TOKENIZER.vocab_size)
        checkpoint_and_compile(model, torch.device("cpu"), False, "eager")
        model(input_ids=torch.zeros(2, 8, dtype=torch.int64))
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    assert run_ranks(compiled, islands=1, procs=1, timeout=100) == [1]


def test_pretrain_compile_takes_a_backend_or_none():
    """`--compile` takes a backend or none."""
    from pretrain_parts import Arguments
    from transformers import HfArgumentParser

    def parsed(*words):
        return HfArgumentParser(Arguments).parse_args_into_dataclasses(list(words))[0].compile

    assert [
        parsed(),
        parsed("--compile"),
        parsed("--compile", "eager"),
        parsed("--compile", "--bf16"),
    ] == [
        None,
        "inductor",
        "eager",
        "inductor",
    ]


def rows_file(folder, rows):
    """A file of ready rows; one in twenty of them is held out."""
    datasets.Dataset.from_dict(
        {"input_ids": [[i % 256, i // 256, *range(30)] for i in range(rows)]}
    ).to_parquet(str(folder / "rows.parquet"))
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

    common = (
        "--model",
        "tiny",
        "--sequence-length",
        32,
        "--batch-size",
        2,
        "--eval-every",
        0,
        "--eval-batches",
        2,
        "--log-every",
        2,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain_parts, "forever", recorded)
        patch.setattr(report.Report, "draw", lambda *_: None)
        patch.setattr(
            sys,
            "argv",
            ["pretrain.py", *map(str, common), *map(str, options), "--output", str(folder)],
        )
        pretrain.main()
    return seen


def told(folder, island=0):
    """Summary and lines of an island."""
    lines = (folder / f"island{island}" / "metrics.jsonl").read_text().splitlines()
    return json.loads((folder / f"island{island}" / "summary.json").read_text()), [
        json.loads(line) for line in lines
    ]


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
    ranks = run_ranks(
        recipe,
        islands=1,
        procs=4,
        env=two_nodes,
        args=(tmp_path / "out", "--steps", steps, *options),
    )
    held_out = set(
        data.load_data(str(source), TOKENIZER, 32, validation_rows=4).validation[i]["input_ids"][0]
        for i in range(2)
    )
    seen = [row for batches in ranks for batch in batches for row in batch]
    assert (
        len(seen) == len(set(seen)) == 48
        and not held_out & set(seen)
        and set(seen) < set(range(51))
    )
    summary, lines = told(tmp_path / "out")
    assert {k: summary[k] for k in ("islands", "procs", "tokens", "digests_equal")} == {
        "islands": 2,
        "procs": 2,
        "tokens": steps * 4 * 2 * 32,
        "digests_equal": True,
    }
    assert [line["step"] for line in lines] == [2, 4, 6] and lines[-1]["bytes_sent"] == summary[
        "bytes_sent_per_island"
    ] > 0
    for line in lines:  # 4 ranks of 0.01 Tflops
        assert line["mfu"] == pytest.approx(
            line["tokens_per_second"] * report.flops_per_token(tiny(), 32) / 4e10
        )
        assert (
            line["global_loss"] == pytest.approx(math.log(258), abs=0.5)
            and line["peak_memory"] > 50e6
        )


def test_pretrain_islands_send_what_a_mesh_sends(run_ranks, tmp_path):
    """Islands send what a mesh sends and agree on the loss."""
    source, options = rows_file(tmp_path, 60), ("--steps", 4, "--exchange", "demo")
    run_ranks(recipe, islands=2, procs=2, args=(tmp_path / "islands", *options, "--data", source))
    run_ranks(
        recipe,
        islands=1,
        procs=4,
        env=two_nodes,
        args=(tmp_path / "mesh", *options, "--data", source, "--mesh"),
    )
    (mesh, _), (summary, lines), (_, others) = (
        told(tmp_path / "mesh"),
        told(tmp_path / "islands"),
        told(tmp_path / "islands", 1),
    )
    same = ("bytes_sent_per_island", "islands", "procs", "tokens", "exchanges", "parameters")
    assert {k: summary[k] for k in same} == {k: mesh[k] for k in same}
    assert summary["loss_start"] == pytest.approx(mesh["loss_start"], rel=1e-6)
    assert summary["mfu"] is None and summary["digests_equal"] is True
    # each island's own loss, and the one of both
    for here, there in zip(lines, others, strict=True):
        assert here["loss"] != there["loss"] and here["global_loss"] == pytest.approx(
            there["global_loss"], rel=1e-6
        )


def test_pretrain_compiled_run_learns_the_same(run_ranks, tmp_path):
    """A compiled run that recomputes learns the same."""
    source, runs = rows_file(tmp_path, 60), {}
    for name, flags in {
        "plain": (),
        "both": ("--compile", "aot_eager", "--activation-checkpointing"),
    }.items():
        options = (
            "--steps",
            4,
            "--data",
            source,
            "--exchange",
            "full",
            "--lr",
            0.01,
            "--warmup-steps",
            0,
            *flags,
        )
        runs[name] = run_ranks(
            recipe,
            islands=1,
            procs=2,
            env={"ISLAND_COUNT": "1"},
            timeout=100,
            args=(tmp_path / name, *options),
        )
    (plain, _), (both, _) = told(tmp_path / "plain"), told(tmp_path / "both")
    assert (
        both["compile"] == "aot_eager"
        and both["activation_checkpointing"]
        and plain["compile"] is None
    )
    assert plain["loss_end"] < plain["loss_start"] - 0.1 and both["loss_end"] == pytest.approx(
        plain["loss_end"], rel=1e-4
    )
    assert runs["both"] == runs["plain"]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, (2, 4)),
        (
            {
                "WORLD_SIZE": "8",
                "LOCAL_WORLD_SIZE": "4",
                "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "4",
                "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
            },
            (4, 2),
        ),
    ],
)
def test_pretrain_mesh_sizes_come_from_the_launcher(monkeypatch, variables, expected):
    """The sizes of a mesh come from the launcher's variables."""
    from pretrain_parts import mesh_config

    monkeypatch.delenv("ISLAND_COUNT", raising=False)
    for name, value in variables.items():
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


def test_report_flops_per_token():
    """The operations per token are those of the matrices and of attention."""
    layer = 128 * 128 * 2 + 128 * 64 * 2 + 3 * 128 * 384 + 2 * 128  # q and o, k and v, MLP, norms
    head, attention = 258 * 128, 2 * 128
    assert (
        report.flops_per_token(tiny(), 100) == 6 * (2 * layer + 128 + head) + 12 * attention * 100
    )
    assert report.flops_per_token(tiny(tie_word_embeddings=True), 100) == report.flops_per_token(
        tiny(), 100
    )


def test_report_peak_is_known_by_name_or_given(monkeypatch):
    """The peak of a GPU is known by its name, or given."""
    for name, peak in {
        "NVIDIA H200": 989,
        "NVIDIA H100 PCIe": 756,
        "NVIDIA A100-SXM4-80GB": 312,
        "NVIDIA L40S": 362,
        "NVIDIA L4": 121,
    }.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert report.peak_flops(torch.device("cuda")) == peak * 1e12
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Another GPU")
    assert (
        report.peak_flops(torch.device("cuda")) is None
        and report.peak_flops(torch.device("cuda"), 5) == 5e12
    )
    assert report.peak_flops(torch.device("cpu")) is None


# -- report --------------------------------------------------------------------------------------


def test_report_full_bytes_is_a_ring_all_reduce():
    """`full_bytes` counts a ring all-reduce of gradients in bf16."""
    # (R - 1) / R of the buffer twice, 2 bytes each
    assert report.full_bytes(1000, 10, 2) == 2 * 1 * 1000 * 10
    assert report.full_bytes(1000, 10, 4) == 3 * 1000 * 10
    assert report.full_bytes(1000, 10, 1) == 0


def test_compare_has_a_row_per_preset(tmp_path):
    """The comparison has a row per preset."""
    summary = {"preset": "demo", "loss_end": 2.5, "bytes_sent_per_island": 1_500_000, "ratio": 70.2}
    summary |= {"tokens_per_second": 5000.4, "wait_share": 0.25}
    for name, change in (("demo", {}), ("full", {"preset": "full", "ratio": 1.0})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text(json.dumps(summary | change))
    text = compare.main([str(tmp_path), "full", "demo"])
    assert text.splitlines()[1].startswith("full") and "1.5 MB" in text and "25 %" in text
    assert json.loads((tmp_path / "compare.json").read_text())[1]["preset"] == "demo"
    assert (tmp_path / "compare.md").read_text().startswith("| preset")
