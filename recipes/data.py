"""Text for pretraining: find documents, tokenise, pack into rows, split by island.

Everything ends as rows of token ids: `pack` joins documents with EOS and cuts them into rows of
equal length. Local data become a dataset with random access, a hub id is streamed, a folder of
`prepare_data.py` is mapped from disk. The split goes by island first (disjoint, never changes
during a run); the ranks inside an island then share what the island got: Accelerate's loader does
that.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

TEXT = {
    ".txt": "text",
    ".md": "text",
    ".rst": "text",
    ".py": "text",
    ".jsonl": "json",
    ".json": "json",
    ".parquet": "parquet",
}
PREPARED = "prepared.json"  # what tells a folder of `prepare_data.py` from others
# part of the documents that is kept for validation where the data bring no split of their own
HELD_OUT = 0.05


class ByteTokenizer:
    """Ids 0..255 are the bytes of UTF-8, 256 ends a document, 257 pads."""

    eos_token_id, pad_token_id, vocab_size = 256, 257, 258

    def encode(self, texts: Iterable[str]) -> list[np.ndarray]:
        return [
            np.frombuffer(text.encode("utf-8", "surrogatepass"), dtype=np.uint8) for text in texts
        ]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", "surrogatepass")


class HubTokenizer:
    """A tokenizer of transformers (hub id or folder) behind the same three names."""

    def __init__(self, name: str):
        from transformers import AutoTokenizer

        self.inner = AutoTokenizer.from_pretrained(name)
        self.vocab_size = len(self.inner)
        self.eos_token_id = (
            self.inner.eos_token_id
            if self.inner.eos_token_id is not None
            else self.inner.sep_token_id
        )
        if self.eos_token_id is None:
            raise ValueError(
                f"tokenizer {name!r} has neither an EOS nor a SEP token: nothing to put between "
                "documents"
            )
        self.pad_token_id = (
            self.inner.pad_token_id if self.inner.pad_token_id is not None else self.eos_token_id
        )

    def encode(self, texts: Iterable[str]) -> list[list[int]]:
        return self.inner(list(texts), add_special_tokens=False, verbose=False)["input_ids"]

    def decode(self, ids: Iterable[int]) -> str:
        return str(self.inner.decode(list(ids)))


def load_tokenizer(name: str) -> ByteTokenizer | HubTokenizer:
    return ByteTokenizer() if name == "bytes" else HubTokenizer(name)


def pack(documents: Iterable[Sequence[int] | np.ndarray], length: int, eos: int) -> np.ndarray:
    """Join documents, EOS after each, and cut into rows [rows, length] int32; what is left at the
    end is dropped.
    """
    end, parts = np.array([eos], dtype=np.int32), [np.empty(0, np.int32)]
    for document in documents:
        parts += [np.asarray(document, dtype=np.int32), end]
    ids = np.concatenate(parts)
    return ids[: len(ids) // length * length].reshape(-1, length)


class Rows(Dataset):
    """Rows of ids in memory, [rows, length], as a dataset of `{"input_ids": [length]}`."""

    def __init__(self, ids: np.ndarray):
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"input_ids": self.ids[index]}


@dataclass
class Data:
    """train: this island's part. validation: the same rows on every island."""

    train: Any
    validation: Rows
    pad: int

    def loaders(self, batch_size: int) -> tuple[DataLoader, DataLoader]:
        """Not split by rank yet: `accelerator.prepare` does that."""
        shuffle = hasattr(self.train, "__len__")
        collate = Collate(self.pad)
        train = DataLoader(
            self.train, batch_size, shuffle=shuffle, drop_last=True, collate_fn=collate
        )
        return train, DataLoader(self.validation, batch_size, collate_fn=collate)


@dataclass
class Collate:
    """Rows -> `input_ids` and `labels`, both int64 [batch, longest]; shorter rows (ready
    `input_ids`) are padded, labels -100 there.
    """

    pad: int

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        longest = max(len(row["input_ids"]) for row in rows)
        ids = torch.full((len(rows), longest), self.pad, dtype=torch.int64)
        labels = torch.full((len(rows), longest), -100, dtype=torch.int64)
        for i, row in enumerate(rows):
            n = len(row["input_ids"])
            ids[i, :n] = torch.as_tensor(np.asarray(row["input_ids"]))
            labels[i, :n] = torch.as_tensor(np.asarray(row.get("labels", row["input_ids"])))
        return {"input_ids": ids, "labels": labels}


def load_data(
    source: str,
    tokenizer: ByteTokenizer | HubTokenizer,
    length: int,
    *,
    island: int = 0,
    islands: int = 1,
    seed: int = 0,
    validation_rows: int = 64,
) -> Data:
    """Open `--data`, and return this island's training data and the common validation rows.

    Args:
        source: "stdlib", a file or folder, a folder of `prepare_data.py`, or a hub id ("name" or
            "name:subset"), which is streamed.
        length: tokens per row. Data that bring `input_ids` are taken as they are, whatever their
            length.
        seed: of the order in which a stream is shuffled; rows with random access are shuffled by
            the loader.

    Raises:
        ValueError: nothing to read, no text column, fewer tokens than one row; data that were
            prepared for another tokenizer or length.
    """
    if source == "stdlib":
        train, held_out = (pack_files(files, tokenizer, length) for files in stdlib_files())
        return Data(
            Rows(train[island::islands]), spread(held_out, validation_rows), tokenizer.pad_token_id
        )
    here = Path(source).expanduser()
    if not here.exists() and (source[0] in "./~" or here.suffix in TEXT):
        raise ValueError(f"--data {source}: no such file or folder")
    if (here / PREPARED).is_file():
        train, held_out = open_prepared(here, tokenizer, length)
        return Data(
            train.select(range(island, len(train), islands)),
            spread(held_out, validation_rows),
            tokenizer.pad_token_id,
        )
    train, held_out = open_local(here) if here.exists() else open_hub(source, validation_rows)
    train, held_out = (to_rows(part, tokenizer, length) for part in (train, held_out))
    train = split_by_island(train, island, islands, seed)
    return Data(train, first_rows(held_out, validation_rows), tokenizer.pad_token_id)


# -- the Python library of this machine ----------------------------------------------------------


def stdlib_files() -> tuple[list[Path], list[Path]]:
    """The .py files of the running Python's library, without its tests: (training, held out), by a
    hash of the path, sorted.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in skip]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    parts: tuple[list[Path], list[Path]] = ([], [])
    for path in sorted(found):
        digest = hashlib.sha256(path.relative_to(root).as_posix().encode()).digest()
        parts[digest[0] < 256 * HELD_OUT].append(path)
    return parts


def pack_files(
    files: Iterable[Path], tokenizer: ByteTokenizer | HubTokenizer, length: int
) -> np.ndarray:
    """Rows [rows, length] of whole files; with the byte tokenizer the bytes are taken as they lie
    on disk.
    """
    return pack(read_text(files, tokenizer), length, tokenizer.eos_token_id)


def read_text(files: Iterable[Path], tokenizer: ByteTokenizer | HubTokenizer) -> Iterable[Any]:
    """The ids of each file."""
    if isinstance(tokenizer, ByteTokenizer):
        return (np.frombuffer(path.read_bytes(), dtype=np.uint8) for path in files)
    return tokenizer.encode(path.read_text("utf-8", "replace") for path in files)


def spread(rows: Any, count: int) -> Rows:
    """`count` rows taken evenly over all of them, so that they come from many documents; `rows` is
    an array or a dataset of arrays.
    """
    if not len(rows):
        raise ValueError(
            "the held-out part holds less than one row: give more data or a smaller "
            "--sequence-length"
        )
    chosen = rows[np.linspace(0, len(rows) - 1, min(count, len(rows))).astype(int)]
    return Rows(chosen if isinstance(rows, np.ndarray) else chosen["input_ids"])


# -- what prepare_data.py wrote ------------------------------------------------------------------


def open_prepared(
    folder: Path, tokenizer: ByteTokenizer | HubTokenizer, length: int
) -> tuple[Any, Any]:
    """(training, held out), mapped from disk: what is in memory does not grow with the data, but
    for 8 bytes per row of this island.
    """
    from datasets import load_from_disk

    facts = json.loads((folder / PREPARED).read_text("utf-8"))
    if facts["sequence_length"] != length:
        raise ValueError(
            f"{folder} has rows of {facts['sequence_length']} tokens: give --sequence-length "
            f"{facts['sequence_length']}"
        )
    if (facts["vocab_size"], facts["eos_token_id"]) != (
        tokenizer.vocab_size,
        tokenizer.eos_token_id,
    ):
        raise ValueError(
            f"{folder} was prepared with --tokenizer {facts['tokenizer']}: {facts['vocab_size']} "
            f"ids, end {facts['eos_token_id']}. The one "
            f"given has {tokenizer.vocab_size} ids, end {tokenizer.eos_token_id}: give the same, "
            "or prepare the data again"
        )
    splits = load_from_disk(folder).with_format("numpy")
    return splits["train"], splits["validation"]


# -- anything that `datasets` reads --------------------------------------------------------------


def open_local(path: Path) -> tuple[Any, Any]:
    """(training, held out) of a file or of all files below a folder; a folder may hold one
    format.
    """
    from datasets import load_dataset

    files = sorted(p for p in ([path] if path.is_file() else path.rglob("*")) if p.suffix in TEXT)
    formats = {TEXT[p.suffix] for p in files}
    if len(formats) != 1:
        raise ValueError(
            f"{path}: found {sorted(formats) or 'no data files'}; expected files of one format out "
            f"of {', '.join(TEXT)}"
        )
    kind = formats.pop()
    options = {"sample_by": "document"} if kind == "text" else {}
    whole = load_dataset(kind, data_files=[str(p) for p in files], split="train", **options)
    if len(whole) == 1:  # one long text: its end is held out, at the end of a line
        text = whole[0][text_column(whole.column_names)]
        cut = text.rfind("\n", 0, int(len(text) * (1 - HELD_OUT))) + 1 or int(
            len(text) * (1 - HELD_OUT)
        )
        return whole.from_dict({"text": [text[:cut]]}), whole.from_dict({"text": [text[cut:]]})
    parts = whole.train_test_split(test_size=max(1, int(len(whole) * HELD_OUT)), seed=0)
    return parts["train"], parts["test"]


def open_hub(source: str, validation_rows: int) -> tuple[Any, Any]:
    """(training, held out) of a hub data set, streamed."""
    from datasets import load_dataset

    name, _, subset = source.partition(":")
    return held_out_of_stream(load_dataset(name, subset or None, streaming=True), validation_rows)


def held_out_of_stream(splits: Any, validation_rows: int) -> tuple[Any, Any]:
    """The validation (or test) split; where there is none, the first documents of the stream are
    held out.
    """
    held_out = next((splits[key] for key in ("validation", "test") if key in splits), None)
    if held_out is not None:
        return splits["train"], held_out
    return splits["train"].skip(validation_rows), splits["train"].take(validation_rows)


def text_column(columns: Sequence[str] | None) -> str:
    for name in ("text", "content", "document"):
        if name in (columns or ()):
            return name
    raise ValueError(
        f"found the columns {list(columns or ())}; expected 'text' (or 'content', 'document'), or "
        "ready 'input_ids'"
    )


def to_rows(dataset: Any, tokenizer: ByteTokenizer | HubTokenizer, length: int) -> Any:
    """Tokenise and pack 1000 documents at a time; a dataset with `input_ids` is returned as it
    is.
    """
    columns = dataset.column_names or list(next(iter(dataset)))
    if "input_ids" in columns:
        return dataset.select_columns([c for c in columns if c in ("input_ids", "labels")])
    text = text_column(columns)

    def rows(batch: dict[str, list[str]]) -> dict[str, list[np.ndarray]]:
        return {
            "input_ids": list(pack(tokenizer.encode(batch[text]), length, tokenizer.eos_token_id))
        }

    return dataset.map(rows, batched=True, batch_size=1000, remove_columns=columns)


def split_by_island(dataset: Any, island: int, islands: int, seed: int) -> Any:
    from datasets.distributed import split_dataset_by_node

    random_access = hasattr(dataset, "__len__")
    if random_access and len(dataset) < islands:
        raise ValueError(
            f"{len(dataset)} rows for {islands} islands: give more data or a smaller "
            "--sequence-length"
        )
    if random_access:
        # the same on all islands: parts of one order are disjoint and alike
        dataset = dataset.shuffle(seed=0)
        return split_dataset_by_node(dataset, rank=island, world_size=islands).with_format("numpy")
    return split_dataset_by_node(dataset, rank=island, world_size=islands).shuffle(
        seed=seed, buffer_size=1000
    )


def first_rows(dataset: Any, count: int) -> Rows:
    """The first `count` rows in memory; rows of unequal length stay as they are."""
    rows: list[np.ndarray] = []
    for row in dataset:
        rows.append(np.asarray(row["input_ids"], dtype=np.int32))
        if len(rows) == count:
            break
    if not rows:
        raise ValueError(
            "the held-out part holds less than one row: give more data or a smaller "
            "--sequence-length"
        )
    ids = np.empty(len(rows), dtype=object)
    ids[:] = rows
    return Rows(ids)


@dataclass
class Position:
    """Where in the data a rank stands: batches handed out in an epoch.

    Rows with random access (files, a folder of `prepare_data.py`) are shuffled by a sampler whose
    order follows from seed and epoch, so skipping is a matter of indices and costs nothing. A
    stream is read again up to the position, since its shuffle buffer cannot be stored: exact too,
    but as slow as tokenising was. With other numbers of islands or ranks the same share of the
    epoch counts as seen; since the split is another one, some rows come twice in it and others not
    at all.
    """

    epoch: int = 0
    batch: int = 0

    def normal(self, loader: Any) -> bool:
        """Count whole epochs where their length is known; returns whether an epoch has begun."""
        if hasattr(loader.dataset, "__len__") and len(loader):
            more, self.batch = divmod(self.batch, len(loader))
            self.epoch += more
        return self.batch > 0


def forever(loader: Any, skip: int | Position = 0) -> Iterator[dict[str, torch.Tensor]]:
    """Batches without end, epoch after epoch, each in another order; `skip` batches were used
    before a resume, or those before a `Position`, which is kept up to date."""
    from accelerate import skip_first_batches

    at = skip if isinstance(skip, Position) else Position(0, skip)
    at.normal(loader)
    while True:
        loader.set_epoch(at.epoch)
        before = at.batch
        for batch in skip_first_batches(loader, before) if before else loader:
            at.batch += 1
            yield batch
        if not at.batch:
            raise ValueError(
                "this island's part of the data gives no full batch: give more data or a smaller "
                "--batch-size"
            )
        at.epoch, at.batch = at.epoch + 1, 0
