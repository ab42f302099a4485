r"""Tokenise and pack once, so that a run starts at once and maps its rows from disk.

    python recipes/prepare_data.py --data my_texts/ --tokenizer HUB_ID --sequence-length 2048 \
        --output prepared/

Train with `--data prepared/ --tokenizer HUB_ID --sequence-length 2048`.

The folder is what `datasets.load_from_disk` opens: splits "train" and "validation" with one column,
`input_ids`, in rows of one length. The rows are those of `data.pack` over all documents in their
order, however many processes tokenised them. It is written beside its place and renamed, so a
folder that is there is complete. Scratch files beside it need about twice its size meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from data import (
    HELD_OUT,
    PREPARED,
    TEXT,
    ByteTokenizer,
    HubTokenizer,
    load_tokenizer,
    open_local,
    read_text,
    stdlib_files,
    text_column,
)
from datasets import Dataset, DatasetDict, Features, List, Value, load_dataset

Tokenizer = ByteTokenizer | HubTokenizer


def open_documents(source: str) -> tuple[Any, Any]:
    """(training, validation) documents, split as `data.load_data` splits them; a hub id is
    downloaded, not streamed.
    """
    if source == "stdlib":
        train, held_out = (
            Dataset.from_dict({"path": [str(p) for p in files]}) for files in stdlib_files()
        )
        return train, held_out
    here = Path(source).expanduser()
    if here.exists():
        return open_local(here)
    if source[0] in "./~" or here.suffix in TEXT:
        raise ValueError(f"--data {source}: no such file or folder")
    name, _, subset = source.partition(":")
    return held_out_of(load_dataset(name, subset or None))


def held_out_of(splits: Any) -> tuple[Any, Any]:
    """The validation (or test) split; where there is none, a part of the training documents, taken
    at random.
    """
    for key in ("validation", "test"):
        if key in splits:
            return splits["train"], splits[key]
    parts = splits["train"].train_test_split(
        test_size=max(1, int(len(splits["train"]) * HELD_OUT)), seed=0
    )
    return parts["train"], parts["test"]


def tokenise(documents: Any, tokenizer: Tokenizer, procs: int, cache: Path) -> Any:
    """Each document's ids with the end of the document behind them, in the order of the
    documents.
    """
    column = "path" if "path" in documents.column_names else text_column(documents.column_names)

    def ids(batch: dict[str, list[str]]) -> dict[str, list[np.ndarray]]:
        values = batch[column]
        encoded = (
            read_text(map(Path, values), tokenizer)
            if column == "path"
            else tokenizer.encode(values)
        )
        return {
            "input_ids": [
                np.append(np.asarray(one, dtype=np.int32), np.int32(tokenizer.eos_token_id))
                for one in encoded
            ]
        }

    return documents.map(
        ids,
        batched=True,
        batch_size=100,
        num_proc=min(procs, len(documents)) if procs > 1 else None,
        remove_columns=documents.column_names,
        features=Features({"input_ids": List(Value("int32"))}),
        cache_file_name=str(cache),
        load_from_cache_file=False,
        desc="tokenise",
    )


def rows(documents: Any, length: int) -> Iterator[dict[str, np.ndarray]]:
    """The ids of all documents in one string, cut into rows; what is left at the end is dropped."""
    left = np.empty(0, dtype=np.int32)
    for batch in documents.with_format("arrow").iter(batch_size=1000):
        flat = batch.column("input_ids").combine_chunks().flatten().to_numpy()
        left = np.concatenate([left, flat])
        whole = len(left) // length * length
        for row in left[:whole].reshape(-1, length):
            yield {"input_ids": row}
        left = left[whole:]


def pack_split(
    name: str, documents: Any, tokenizer: Tokenizer, length: int, procs: int, scratch: Path
) -> Any:
    tokenised = tokenise(documents, tokenizer, procs, scratch / f"{name}.arrow")
    if next(rows(tokenised, length), None) is None:
        raise ValueError(
            f"the {name} part holds less than one row of {length} tokens: give more data or a "
            "smaller --sequence-length"
        )
    features, given = (
        Features({"input_ids": List(Value("int32"), length=length)}),
        {"documents": tokenised, "length": length},
    )
    return Dataset.from_generator(
        rows, features=features, cache_dir=str(scratch), gen_kwargs=given, split=name
    )


def prepare(
    source: str, tokenizer_name: str, length: int, output: Path, procs: int, overwrite: bool
) -> dict[str, Any]:
    """Write the folder `output`; returns what is printed.

    Raises:
        ValueError: `output` is there and `overwrite` is not set; nothing to read; fewer tokens than
            one row.
    """
    began, output = time.monotonic(), output.expanduser().absolute()
    if output.exists() and not overwrite:
        raise ValueError(
            f"--output {output} is there already: give another folder, or --overwrite to replace it"
        )
    if output.exists() and not (output / PREPARED).is_file():
        raise ValueError(
            f"--output {output} was not written by this script: nothing of it is overwritten, give "
            "another folder"
        )
    tokenizer, documents = load_tokenizer(tokenizer_name), open_documents(source)
    output.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        done = scratch / "done"
        splits = DatasetDict()
        for name, part in zip(("train", "validation"), documents, strict=True):
            splits[name] = pack_split(name, part, tokenizer, length, procs, scratch)
        splits.save_to_disk(done)
        facts = {
            "data": source,
            "tokenizer": tokenizer_name,
            "vocab_size": tokenizer.vocab_size,
            "sequence_length": length,
        }
        facts |= {
            "eos_token_id": tokenizer.eos_token_id,
            "rows": {name: len(part) for name, part in splits.items()},
        }
        (done / PREPARED).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        if output.exists():
            os.replace(output, scratch / "old")
        os.replace(done, output)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    total = sum(facts["rows"].values())
    size = sum(p.stat().st_size for p in output.rglob("*") if p.is_file())
    return {
        **facts["rows"],
        "tokens": total * length,
        "bytes": size,
        "seconds": round(time.monotonic() - began, 1),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Tokenise and pack text once, for pretrain.py and any Trainer script."
    )
    parser.add_argument(
        "--data",
        required=True,
        help="stdlib, a file or folder of text, jsonl or parquet, or a hub id[:subset]",
    )
    parser.add_argument(
        "--tokenizer", default="bytes", help="bytes, or a hub id or folder (default: bytes)"
    )
    parser.add_argument(
        "--sequence-length", type=int, default=256, help="tokens per row (default: 256)"
    )
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument(
        "--procs",
        type=int,
        default=min(8, os.cpu_count() or 1),
        help="processes that tokenise (default: cores, at most 8)",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a folder that this script wrote earlier"
    )
    given = parser.parse_args(arguments)
    try:
        if given.sequence_length < 1 or given.procs < 1:
            raise ValueError(
                f"--sequence-length {given.sequence_length}, --procs {given.procs}: must be 1 or "
                "more"
            )
        done = prepare(
            given.data,
            given.tokenizer,
            given.sequence_length,
            given.output,
            given.procs,
            given.overwrite,
        )
    except ValueError as error:
        print(f"prepare_data: {error}", file=sys.stderr)
        return 2
    told = (
        "{train} training rows, {validation} validation rows, {tokens} tokens, {bytes} bytes, "
        "{seconds} s"
    )
    print(f"{given.output}: {told.format(**done)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
