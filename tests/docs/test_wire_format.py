"""docs/wire-format.md says byte by byte what the code writes."""

from __future__ import annotations

import re
import struct
import typing
from itertools import accumulate
from pathlib import Path

import msgspec
import pytest
import torch

from fsdp_demo.config.names import FORMATS
from fsdp_demo.elastic.notes import Note
from fsdp_demo.peers import header, pieces
from fsdp_demo.store.connection import Answer, Question

from ..support.sealed import seal

TEXT = (Path(__file__).parents[2] / "docs" / "wire-format.md").read_text(encoding="utf-8")
TYPES = {"u8": "B", "u16": "H", "u32": "I", "u48": "6s", "u64": "Q", "f32": "f"}


def tables(first: str) -> list[list[list[str]]]:
    """The tables whose first column has this heading, as rows of cells."""
    found = [t.splitlines() for t in re.findall(r"(?:^\|.*\|\n)+", TEXT, re.M)]
    rows = [
        [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in t] for t in found
    ]
    return [t[2:] for t in rows if t[0][0] == first]


LAYOUTS = dict(zip(("header", "frame"), tables("offset"), strict=True))
STRUCTS = {"header": header.HEADER, "frame": pieces.FRAME}


@pytest.mark.parametrize("name", STRUCTS)
def test_wire_format_page_has_offsets_and_types(name: str) -> None:
    """Offsets and types on the page are those of the struct."""
    rows, wanted = LAYOUTS[name], STRUCTS[name]
    form = "<" + "".join(TYPES.get(row[2], row[2]) for row in rows)
    sizes = [struct.calcsize("<" + TYPES.get(row[2], row[2])) for row in rows]
    assert [int(row[1]) for row in rows] == sizes
    assert [int(row[0]) for row in rows] == [0, *accumulate(sizes)][:-1]
    # in the struct flags and norm are one number, and so are digest and seconds, length and rate:
    # low bytes come first
    assert (
        form.replace("BBBB", "BBH", 1).replace("6sH", "Q", 2) == wanted.format
        if name == "header"
        else form == wanted.format
    )
    assert struct.calcsize(form) == wanted.size


def test_wire_format_page_parts_of_one_number() -> None:
    """Parts of one number lie in the bytes that the page says."""
    body = torch.zeros(259, dtype=torch.uint8)
    message = seal(header.Header(7, 3, flags=header.STOP, norm=200, rate=513), body)
    assert message[24:32].tolist() == [3, 1, 0, 0, 0, 0, 1, 2]
    assert message[5].item() == header.PAYLOAD and message[6].item() == header.STOP
    assert message[7].item() == 200


def test_wire_format_page_has_versions_kinds_and_flags() -> None:
    """The page has the versions, kinds, flags and statuses of the code."""
    versions = {row[1].strip("`"): int(row[2]) for row in tables("what")[0]}
    assert versions[header.MAGIC.decode()] == header.VERSION
    assert versions[pieces.MAGIC.decode()] == pieces.VERSION
    (messages,) = ({row[1].strip("`"): int(row[0]) for row in t} for t in tables("kind"))
    assert len(messages) == len(header.KINDS)
    assert all(getattr(header, name) == n for name, n in messages.items())
    assert all(getattr(header, row[1].strip("`")) == int(row[0]) for row in tables("flag")[0])


def test_wire_format_page_has_the_messages_of_the_store() -> None:
    """The page has the fields and verbs of the store's questions and answers."""
    versions = {row[1].strip("`"): row[2] for row in tables("what")[0]}
    for form, rows in zip((Question, Answer), tables("element"), strict=True):
        said = msgspec.structs.fields(form)
        assert [row[0] for row in rows] == ["tag", *(field.name for field in said)]
        tag = form.__struct_config__.tag
        assert rows[0][2] == f"`{tag}`" and versions[tag[:4]] == tag[4:]
        words = typing.get_args(typing.get_type_hints(form)[said[0].name])
        assert [word for word in re.findall("`(.+?)`", rows[1][2]) if word in words] == list(words)


def test_wire_format_page_has_the_notes() -> None:
    """The page has the tag and the fields of every note."""
    rows = {row[0].strip("`"): [f for f in row[1].split(", ") if f] for row in tables("note")[0]}
    assert rows == {
        form.__struct_config__.tag: [field.name for field in msgspec.structs.fields(form)]
        for form in Note.__subclasses__()
    }


def test_wire_format_page_has_the_number_formats() -> None:
    """The page has bits and groups of the number formats."""
    rows = {
        row[0].strip("`"): (int(row[1]), int(row[2] or 0)) for row in tables("`value_dtype`")[0]
    }
    assert rows == {name: (f.bits, f.group) for name, f in FORMATS.items()}
