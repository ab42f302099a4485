"""The recipes' data: packing, tokenizers, files, streams, and the part of each island."""

import json
import sysconfig

import data
import datasets
import numpy as np
import pytest
import torch

pytestmark = pytest.mark.usefixtures("own_cache")
TOKENIZER = data.ByteTokenizer()


def documents(count=400, words=60, seed=0):
    rng = np.random.default_rng(seed)
    return [
        f"document {i}: " + " ".join(str(n) for n in rng.integers(0, 1000, words))
        for i in range(count)
    ]


def texts(rows):
    return [TOKENIZER.decode(row["input_ids"]) for row in rows]


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


def test_data_stdlib_files_are_disjoint():
    """The files of the standard library are disjoint, sorted and without tests."""
    train, held_out = data.stdlib_files()
    assert not set(train) & set(held_out) and data.stdlib_files() == (train, held_out)
    assert train == sorted(train) and 0.02 < len(held_out) / len(train) < 0.12
    root = sysconfig.get_paths()["stdlib"]
    folders = {part for path in train + held_out for part in path.relative_to(root).parts}
    assert not {"site-packages", "test", "tests"} & folders
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
    assert all(len(row) == 64 for row in rows)
    assert any(TOKENIZER.eos_token_id in row for row in rows)
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
    found = [list(row["input_ids"]) for rows_ in (part.train, part.validation) for row in rows_]
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
        own = texts(data.split_by_island(train, island, 2, seed=island))
        parts.append((own, texts(data.first_rows(held_out, 8))))
    assert parts[0][0] and not set(parts[0][0]) & set(parts[1][0])
    assert parts[0][1] == parts[1][1] and not set(parts[0][1]) & set(parts[0][0] + parts[1][0])


@pytest.mark.parametrize(("content", "message"), [
    ({}, "no data files"),
    ({"a.jsonl": '{"title": "x"}\n' * 30}, "expected 'text'"),
    ({"a.csv": "x"}, "no data files"),
    ({"a.txt": "x", "b.jsonl": "{}"}, "one format"),
])  # fmt: skip
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
    of = {"tokenizer_object": words, "unk_token": "<unk>"}
    PreTrainedTokenizerFast(eos_token="<end>", **of).save_pretrained(tmp_path)
    tokenizer = data.load_tokenizer(str(tmp_path))
    assert (tokenizer.vocab_size, tokenizer.eos_token_id, tokenizer.pad_token_id) == (4, 1, 1)
    rows = data.pack(tokenizer.encode(["a b b", "b"]), 2, tokenizer.eos_token_id)
    assert rows.tolist() == [[2, 3], [3, 1], [3, 1]]
    PreTrainedTokenizerFast(**of).save_pretrained(tmp_path / "no_end")
    with pytest.raises(ValueError, match="neither an EOS"):
        data.load_tokenizer(str(tmp_path / "no_end"))


def test_data_forever_repeats_and_skips_on_resume(accelerate_state):
    """`forever` repeats the data in another order, and skips what was seen on a resume."""
    from accelerate import Accelerator, DataLoaderConfiguration

    torch.manual_seed(3)
    both = (np.arange(40).reshape(20, 2), np.arange(4).reshape(2, 2))
    rows = data.Data(*map(data.Rows, both), 257)
    seedable = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=seedable)
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

    few = data.Data(*(data.Rows(np.zeros((n, 4), int)) for n in (3, 1)), 0)
    loader = Accelerator(cpu=True).prepare(few.loaders(4)[0])
    with pytest.raises(ValueError, match="no full batch"):
        next(data.forever(loader))
