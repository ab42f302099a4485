"""The recipes' own parts: data, models, report. The training loop itself is tested by `test_quickstart.py`."""

import json
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")

RECIPES = Path(__file__).parents[1] / "recipes"
sys.path.insert(0, str(RECIPES))

import compare  # noqa: E402
import data  # noqa: E402
import report  # noqa: E402

TOKENIZER = data.ByteTokenizer()


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Nothing that a test maps may come from, or stay in, the user's cache of `datasets`."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def documents(count=400, words=60, seed=0):
    rng = np.random.default_rng(seed)
    return [f"document {i}: " + " ".join(str(n) for n in rng.integers(0, 1000, words)) for i in range(count)]


def texts(rows):
    return [TOKENIZER.decode(row["input_ids"]) for row in rows]


# -- packing ----------------------------------------------------------------------------------------------------------------


def test_pack_puts_eos_after_every_document_and_loses_nothing_but_the_end():
    rows = data.pack([[1, 2, 3], [4], [5, 6, 7, 8, 9]], 4, 99)
    assert rows.tolist() == [[1, 2, 3, 99], [4, 99, 5, 6], [7, 8, 9, 99]]
    assert data.pack([[1, 2, 3], [4, 5]], 4, 99).tolist() == [[1, 2, 3, 99]]
    assert data.pack([], 4, 99).shape == (0, 4)


def test_byte_tokenizer_round_trip():
    text = "def ä(x):\n\treturn '€𝄞' + \"\\x00\"\n\x00"
    (ids,) = TOKENIZER.encode([text])
    assert max(ids) < 256 and TOKENIZER.decode(ids) == text
    assert TOKENIZER.decode([*ids, TOKENIZER.eos_token_id, TOKENIZER.pad_token_id]) == text


def test_collate_pads_rows_of_unequal_length_and_ignores_the_padding_in_the_loss():
    batch = data.Collate(257)([{"input_ids": np.array([1, 2, 3])}, {"input_ids": [4], "labels": [5]}])
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 257, 257]]
    assert batch["labels"].tolist() == [[1, 2, 3], [5, -100, -100]]
    assert batch["input_ids"].dtype == torch.int64


# -- stdlib -----------------------------------------------------------------------------------------------------------------


def test_stdlib_files_are_disjoint_sorted_and_without_tests():
    train, held_out = data.stdlib_files()
    assert not set(train) & set(held_out) and data.stdlib_files() == (train, held_out)
    assert train == sorted(train) and 0.02 < len(held_out) / len(train) < 0.12
    root = sysconfig.get_paths()["stdlib"]
    assert not any({"site-packages", "test", "tests"} & set(path.relative_to(root).parts) for path in train + held_out)
    assert sum(path.stat().st_size for path in train) > 3e6


def test_stdlib_islands_get_disjoint_rows_and_equal_validation(monkeypatch):
    files = data.stdlib_files()
    monkeypatch.setattr(data, "stdlib_files", lambda: (files[0][:40], files[1]))
    parts = [data.load_data("stdlib", TOKENIZER, 128, island=i, islands=3) for i in range(3)]
    whole = data.load_data("stdlib", TOKENIZER, 128)
    for i, part in enumerate(parts):  # every third row: together all rows, each once
        assert np.array_equal(part.train.ids, whole.train.ids[i::3])
        assert np.array_equal(part.validation.ids, whole.validation.ids)
    first = files[0][0].read_bytes()[: 128 * len(whole.train)]
    assert bytes(whole.train.ids.flatten()[: len(first)].astype(np.uint8)) == first


# -- files ------------------------------------------------------------------------------------------------------------------


def write(folder, kind, docs):
    folder.mkdir(exist_ok=True)
    if kind == "txt":
        for i, text in enumerate(docs):
            (folder / f"{i:04d}.txt").write_text(text + "\n\nsecond paragraph")
    elif kind == "jsonl":
        (folder / "a.jsonl").write_text("".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(docs)))
    elif kind == "parquet":
        datasets.Dataset.from_dict({"content": docs, "id": list(range(len(docs)))}).to_parquet(str(folder / "a.parquet"))
    return folder


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
def test_local_files_are_packed_and_split_by_island(tmp_path, kind):
    folder = write(tmp_path / kind, kind, documents(120 if kind == "txt" else 400))
    parts = [data.load_data(str(folder), TOKENIZER, 64, island=i, islands=2, validation_rows=8) for i in range(2)]
    seen = [set(texts(part.train)) for part in parts]
    assert seen[0] and seen[1] and not seen[0] & seen[1]
    assert abs(len(parts[0].train) - len(parts[1].train)) <= 1
    held_out = [texts(part.validation) for part in parts]
    assert held_out[0] == held_out[1] and len(held_out[0]) == 8
    assert not set(held_out[0]) & (seen[0] | seen[1])
    rows = [row["input_ids"] for part in parts for row in part.train]
    assert all(len(row) == 64 for row in rows) and any(TOKENIZER.eos_token_id in row for row in rows)
    if kind == "txt":  # a file is a document: the paragraph break stays inside it
        assert any("\n\nsecond" in text for text in seen[0] | seen[1])


def test_one_long_text_file_is_cut_at_a_line_for_validation(tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("\n".join(documents()))
    part = data.load_data(str(path), TOKENIZER, 64, validation_rows=4)
    assert texts(part.validation)[0].startswith("document 3")
    assert not set(texts(part.validation)) & set(texts(part.train))


def test_ready_input_ids_are_taken_as_they_are(tmp_path):
    rows = [[i, i + 1, i + 2] + [7] * (i % 3) for i in range(100)]
    datasets.Dataset.from_dict({"input_ids": rows, "attention_mask": rows}).to_parquet(str(tmp_path / "ready.parquet"))
    part = data.load_data(str(tmp_path / "ready.parquet"), TOKENIZER, 64, validation_rows=5)
    found = [list(row["input_ids"]) for row in part.train] + [list(row["input_ids"]) for row in part.validation]
    assert sorted(found) == sorted(rows)
    batch = next(iter(part.loaders(8)[0]))
    assert batch["input_ids"].shape[0] == 8 and set(batch) == {"input_ids", "labels"}


def test_streams_are_split_by_island_and_have_common_validation(tmp_path):
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
        parts.append((texts(data.split_by_island(train, island, 2, seed=island)), texts(data.first_rows(held_out, 8))))
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
def test_wrong_data_are_refused_with_what_was_found(tmp_path, content, message):
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


def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub():
    for source in ("./nowhere", "/nowhere", "texts.jsonl"):
        with pytest.raises(ValueError, match="no such file"):
            data.load_data(source, TOKENIZER, 16)


def test_hub_tokenizer_from_a_folder(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0, "<end>": 1, "a": 2, "b": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", unk_token="<unk>").save_pretrained(tmp_path)
    tokenizer = data.load_tokenizer(str(tmp_path))
    assert (tokenizer.vocab_size, tokenizer.eos_token_id, tokenizer.pad_token_id) == (4, 1, 1)
    assert data.pack(tokenizer.encode(["a b b", "b"]), 2, tokenizer.eos_token_id).tolist() == [[2, 3], [3, 1], [3, 1]]
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(tmp_path / "no_end")
    with pytest.raises(ValueError, match="neither an EOS"):
        data.load_tokenizer(str(tmp_path / "no_end"))


def test_forever_repeats_in_another_order_and_skips_on_resume(accelerate_state):
    from accelerate import Accelerator, DataLoaderConfiguration

    torch.manual_seed(3)
    rows = data.Data(data.Rows(np.arange(40).reshape(20, 2)), data.Rows(np.arange(4).reshape(2, 2)), 257)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    loader = accelerator.prepare(rows.loaders(2)[0])
    batches = data.forever(loader)
    seen = [next(batches)["input_ids"][:, 0].tolist() for _ in range(30)]
    for epoch in range(3):
        assert sorted(sum(seen[10 * epoch : 10 * epoch + 10], [])) == list(range(0, 40, 2))
    assert seen[:10] != seen[10:20]
    resumed = data.forever(loader, skip=13)
    assert [next(resumed)["input_ids"][:, 0].tolist() for _ in range(17)] == seen[13:]


def test_too_little_data_for_a_batch_is_refused(accelerate_state):
    from accelerate import Accelerator

    loader = Accelerator(cpu=True).prepare(data.Data(data.Rows(np.zeros((3, 4), int)), data.Rows(np.zeros((1, 4), int)), 0).loaders(4)[0])
    with pytest.raises(ValueError, match="no full batch"):
        next(data.forever(loader))


# -- models -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "parameters"), [("tiny", 459_904), ("small", 3_280_128), ("llama-3.2-1b", 1_235_814_400)])
def test_parameter_counts(name, parameters):
    import pretrain

    with torch.device("meta"):
        model = pretrain.load_model(name, TOKENIZER.vocab_size)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert next(model.parameters()).dtype == torch.float32
    if name == "llama-3.2-1b":
        assert model.config.rope_parameters["rope_theta"] == 500_000 and model.config.rope_parameters["factor"] == 32


def test_model_with_too_few_tokens_is_refused():
    import pretrain

    with pytest.raises(ValueError, match="vocab_size=258"):
        pretrain.load_model("tiny", 50_000)


def test_schedules_rise_and_end_at_a_tenth():
    import pretrain

    for name, end in (("cosine", 0.1), ("wsd", 0.1), ("constant", 1.0)):
        train = pretrain.TrainArguments(steps=100, warmup_steps=10, schedule=name)
        values = [pretrain.schedule(step, train) for step in range(101)]
        assert 0 < values[0] < 0.1 and max(values) <= 1 and values[:10] == sorted(values[:10])
        assert values[-1] == pytest.approx(end, abs=1e-6)


# -- report -----------------------------------------------------------------------------------------------------------------


def test_full_bytes_is_a_ring_all_reduce_of_bf16_gradients():
    assert report.full_bytes(1000, 10, 2) == 2 * 1 * 1000 * 10  # (R - 1) / R of the buffer twice, 2 bytes each
    assert report.full_bytes(1000, 10, 4) == 3 * 1000 * 10
    assert report.full_bytes(1000, 10, 1) == 0


def test_comparison_has_a_row_per_preset(tmp_path):
    summary = {"preset": "demo", "loss_end": 2.5, "bytes_sent_per_island": 1_500_000, "ratio": 70.2}
    summary |= {"tokens_per_second": 5000.4, "wait_share": 0.25}
    for name, change in (("demo", {}), ("full", {"preset": "full", "ratio": 1.0})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text(json.dumps(summary | change))
    text = compare.main([str(tmp_path), "full", "demo"])
    assert text.splitlines()[1].startswith("full") and "1.5 MB" in text and "25 %" in text
    assert json.loads((tmp_path / "compare.json").read_text())[1]["preset"] == "demo"
    assert (tmp_path / "compare.md").read_text().startswith("| preset")
