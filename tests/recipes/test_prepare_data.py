"""`recipes/prepare_data.py`: the same rows as packing in memory, in one piece, and read back
without a copy.
"""

import contextlib
import io
import json
import os
from pathlib import Path

import data
import datasets
import numpy as np
import prepare_data
import pytest

pytestmark = pytest.mark.usefixtures("own_cache")
TOKENIZER = data.ByteTokenizer()
LENGTH = 32


def texts(count=230, seed=0):
    rng = np.random.default_rng(seed)
    return [
        f"document {i} ä: "
        + " ".join(str(n) for n in rng.integers(0, 1000, int(rng.integers(0, 40))))
        for i in range(count)
    ]


def jsonl(folder, documents):
    folder.mkdir(exist_ok=True)
    (folder / "a.jsonl").write_text(
        "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(documents))
    )
    return folder


def prepared(source, output, procs=1, *options):
    words = ["--data", source, "--output", output, "--procs", procs, "--sequence-length", LENGTH]
    return prepare_data.main([str(word) for word in (*words, *options)])


@pytest.fixture
def prepared_apart(run_ranks):
    """`prepared` in a process of its own, which has one thread when it forks its workers; returns
    what it has printed.
    """

    def call(*args):
        ((status, told),) = run_ranks(prepared_alone, 1, 1, env={"ISLAND_COUNT": ""}, args=args)
        assert status == 0, told
        return told

    return call


def prepared_alone(rank, *args):
    datasets.disable_progress_bars()
    with contextlib.redirect_stdout(io.StringIO()) as told:
        return prepared(*args), told.getvalue()


def ids(split):
    return np.array(split.with_format("numpy")["input_ids"][:])


def in_memory(documents):
    return data.pack(TOKENIZER.encode(documents["text"]), LENGTH, TOKENIZER.eos_token_id)


@pytest.mark.parametrize("procs", [1, 3])
def test_prepare_data_rows_are_those_of_packing_in_memory(tmp_path, prepared_apart, procs):
    """Prepared rows are those of packing in memory, whatever the number of processes."""
    folder = jsonl(tmp_path / "texts", texts())
    told = prepared_apart(folder, tmp_path / "out", procs)
    found, expected = datasets.load_from_disk(tmp_path / "out"), data.open_local(folder)
    for name, part in zip(("train", "validation"), expected, strict=True):
        rows = in_memory(part)
        assert found[name].column_names == ["input_ids"] and len(rows) > 10
        assert np.array_equal(ids(found[name]), rows)
        assert found[name].features["input_ids"].length == LENGTH
    total = len(found["train"]) + len(found["validation"])
    size = sum(p.stat().st_size for p in (tmp_path / "out").rglob("*") if p.is_file())
    rows = (len(found["train"]), len(found["validation"]))
    assert "{} training rows, {} validation rows".format(*rows) in told
    assert f"{total * LENGTH} tokens, {size} bytes, " in told and told.endswith(" s\n")
    left = {p for p in os.listdir(tmp_path) if not p.startswith("ranks-")}
    assert left == {"cache", "out", "texts"}  # no scratch is left


def test_prepare_data_of_text_files(tmp_path, prepared_apart):
    """Text files are documents, and one long text is cut for validation."""
    (tmp_path / "many").mkdir()
    for i, text in enumerate(texts(60)):
        (tmp_path / "many" / f"{i:03d}.md").write_text(text + "\n\nsecond paragraph")
    (tmp_path / "long.txt").write_text("\n".join(texts()))
    for source in (tmp_path / "many", tmp_path / "long.txt"):
        prepared_apart(source, tmp_path / "out", 2, "--overwrite")
        found = datasets.load_from_disk(tmp_path / "out")
        for name, part in zip(("train", "validation"), data.open_local(source), strict=True):
            assert np.array_equal(ids(found[name]), in_memory(part))


def test_prepare_data_of_parquet_and_hub_splits(tmp_path):
    """Parquet files, and the splits of a set of the Hub, are prepared."""
    (tmp_path / "texts").mkdir()
    datasets.Dataset.from_dict({"content": texts(), "id": range(230)}).to_parquet(
        str(tmp_path / "texts" / "a.parquet")
    )
    assert prepared(tmp_path / "texts", tmp_path / "out") == 0
    train, _ = data.open_local(tmp_path / "texts")
    expected = data.pack(TOKENIZER.encode(train["content"]), LENGTH, TOKENIZER.eos_token_id)
    assert np.array_equal(ids(datasets.load_from_disk(tmp_path / "out")["train"]), expected)
    one = datasets.Dataset.from_dict({"text": texts()})
    assert prepare_data.held_out_of({"train": one, "test": one.select([3])})[1]["text"] == [
        one["text"][3]
    ]
    parts = prepare_data.held_out_of({"train": one})
    assert len(parts[1]) == 11 and not set(parts[0]["text"]) & set(parts[1]["text"])
    assert len(parts[0]) + len(parts[1]) == 230


def test_prepare_data_of_stdlib_for_each_island(tmp_path, everywhere, prepared_apart):
    """Each island reads from prepared data the rows that it gets in memory."""
    files = data.stdlib_files()
    few = lambda: (files[0][:25], files[1][:5])  # noqa: E731
    everywhere.setattr(data, "stdlib_files", few)
    everywhere.setattr(prepare_data, "stdlib_files", few)
    prepared_apart("stdlib", tmp_path / "out", 2)
    for island in range(3):
        here, there = (
            data.load_data(source, TOKENIZER, LENGTH, island=island, islands=3, validation_rows=7)
            for source in (str(tmp_path / "out"), "stdlib")
        )
        assert np.array_equal(np.stack([row["input_ids"] for row in here.train]), there.train.ids)
        assert np.array_equal(here.validation.ids, there.validation.ids)
        assert len(here.validation) == 7
    batch = next(iter(here.loaders(4)[0]))
    assert batch["input_ids"].shape == (4, LENGTH) and set(batch) == {"input_ids", "labels"}


def test_prepare_data_rows_stay_on_disk(tmp_path):
    """Rows are mapped, not read: Arrow's own count of what it allocated stays far below the size of
    the file.
    """
    import pyarrow

    assert prepared(jsonl(tmp_path / "texts", texts(4000)), tmp_path / "out") == 0
    before = pyarrow.total_allocated_bytes()
    size = sum(p.stat().st_size for p in (tmp_path / "out").rglob("*.arrow"))
    part = data.load_data(str(tmp_path / "out"), TOKENIZER, LENGTH, islands=2)
    part.train[len(part.train) // 2]
    assert size > 1_000_000 and pyarrow.total_allocated_bytes() - before < size / 4
    files = {"data-00000-of-00001.arrow", "dataset_info.json", "state.json"}
    assert set(os.listdir(tmp_path / "out" / "train")) == files


def test_prepare_data_overwrites_only_when_asked(tmp_path, capsys, monkeypatch):
    """A folder that is there is replaced only when asked, and only by whole data."""
    first, second = jsonl(tmp_path / "one", texts()), jsonl(tmp_path / "two", texts(seed=1))
    out = tmp_path / "out"

    def kept():
        return ids(datasets.load_from_disk(out)["train"])

    def full(*_, **__):
        raise OSError("disk full")

    assert prepared(first, out) == 0
    before = kept()
    assert prepared(second, out) == 2 and "--overwrite" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(datasets.DatasetDict, "save_to_disk", full)
        with pytest.raises(OSError, match="disk full"):
            prepared(second, out, 1, "--overwrite")
    assert np.array_equal(kept(), before)
    assert prepared(second, out, 1, "--overwrite") == 0
    assert not np.array_equal(kept()[:5], before[:5])
    assert prepared(first, tmp_path / "two", 1, "--overwrite") == 2
    assert "not written by this script" in capsys.readouterr().err
    assert (second / "a.jsonl").exists()
    assert sorted(os.listdir(tmp_path)) == ["cache", "one", "out", "two"]


@pytest.mark.parametrize(("source", "message"), [
    ("./nowhere", "no such file"),
    ("short.txt", "less than one row of 32 tokens"),
    ("titles.jsonl", "expected 'text'"),
])  # fmt: skip
def test_prepare_data_refusal_leaves_nothing(tmp_path, capsys, monkeypatch, source, message):
    """Data that cannot be prepared are refused, and nothing is left."""
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("a\nb\nc")
    Path("titles.jsonl").write_text('{"title": "x"}\n' * 30)
    assert prepared(source, tmp_path / "out") == 2 and message in capsys.readouterr().err
    assert sorted(set(os.listdir(tmp_path)) - {"cache"}) == ["short.txt", "titles.jsonl"]


def test_prepare_data_refuses_another_length_or_tokenizer(tmp_path):
    """Another length or tokenizer than that of the prepared data is refused."""
    assert prepared(jsonl(tmp_path / "texts", texts()), tmp_path / "out") == 0
    with pytest.raises(ValueError, match="give --sequence-length 32"):
        data.load_data(str(tmp_path / "out"), TOKENIZER, 64)
    other = data.ByteTokenizer()
    other.vocab_size = 300
    unlike = "prepared with --tokenizer bytes: 258 ids, end 256. The one given has 300 ids"
    with pytest.raises(ValueError, match=unlike):
        data.load_data(str(tmp_path / "out"), other, LENGTH)
