"""Files that somebody has made up end in one sentence; a link in the place of a temporary file is
not followed.
"""

from __future__ import annotations

import argparse
import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fsdp_demo
import fsdp_demo.store.server as launched
from fsdp_demo.checkpoint import CheckpointManager, load_exchange, save_exchange
from fsdp_demo.checkpoint.files import read_part, write_part
from fsdp_demo.checkpoint.folders import misfits, seal, sum_up
from fsdp_demo.commands import during_run
from fsdp_demo.config.parsing import read_yaml
from fsdp_demo.errors import NeedsDecision
from fsdp_demo.files import in_one_piece
from fsdp_demo.net import tcp
from fsdp_demo.runlog import files
from fsdp_demo.tools import inspect
from fsdp_demo.tools.doctor import reading
from fsdp_demo.tools.planner import asking

# ---- links -------------------------------------------------------------------------------------


def port_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = SimpleNamespace(
        warnings=[], port=7, host="h", file="", endpoint="e", serve_while=lambda wanted: None
    )
    monkeypatch.setattr(launched, "StoreServer", lambda *_: served)
    # what it changes of its process would stay
    monkeypatch.setattr(launched, "bound_memory", lambda: None)
    monkeypatch.setattr(tcp, "raise_to", lambda _: None)
    monkeypatch.setattr(during_run, "end_with_parent", lambda _: None)
    words = argparse.Namespace(file=None, port_file=str(path), quiet=True)
    during_run.serve(words, "", None, os.getpid(), first=True)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "write"), [
    ("note", lambda path, monkeypatch: in_one_piece(path, lambda part: part.write_text("1"))),
    ("run.json", lambda path, monkeypatch: files.write_json(path, {"step": 1})),
    ("port", port_file),
])  # fmt: skip
def test_files_temporary_link_is_not_followed(tmp_path, monkeypatch, name, write) -> None:
    """A link in the place of a temporary file is not followed."""
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "folder"
    elsewhere.write_text("kept")
    folder.mkdir()
    for part in (f"{name}.part", Path(name).with_suffix(".part").name):
        if not (folder / part).is_symlink():
            (folder / part).symlink_to(elsewhere)
    write(folder / name, monkeypatch)
    assert elsewhere.read_text() == "kept"
    assert (folder / name).read_text() and not (folder / name).is_symlink()


# ---- checkpoints -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a checkpoint of one replica, by their names."""
    folder = tmp_path_factory.mktemp("whole") / "checkpoint-1"
    model = torch.nn.Linear(2, 2)
    exchange = fsdp_demo.attach(torch.optim.AdamW(model.parameters()), "diloco", model=model)
    model(torch.ones(1, 2)).sum().backward()
    exchange.optimizers[0].step()
    save_exchange(folder / "exchange", exchange)
    exchange.finish()
    sum_up(folder, 0, 1)
    seal(folder, 1, 1)
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


Files = dict[str, bytes]


def sealed(content: Any) -> bytes:
    """A json of a part, its checksum right."""
    text = json.dumps(content)
    return json.dumps({"crc32": zlib.crc32(text.encode()), "part": text}).encode()


def part(found: Files) -> Any:
    return json.loads(json.loads(found["exchange/rank0.json"])["part"])


def nested(found: Files) -> None:
    content = part(found)
    for _ in range(900):
        content["state"] = [content["state"]]
    found["exchange/rank0.json"] = sealed(content)


def without(*keys: str) -> Callable[[Files], None]:
    def cut(found: Files) -> None:
        content = part(found)
        for key in keys:
            content["head"].pop(key)
        found["exchange/rank0.json"] = sealed(content)

    return cut


def header(text: bytes, length: int | None = None) -> Callable[[Files], None]:
    """Another header of the tensors; size and checksum are those that the json names."""

    def change(found: Files) -> None:
        content = part(found)
        size = len(text) if length is None else length
        data = size.to_bytes(8, "little") + text
        content["head"]["file"] |= {"bytes": len(data), "crc32": zlib.crc32(data)}
        found["exchange/rank0.safetensors"] = data
        found["exchange/rank0.json"] = sealed(content)

    return change


def named(name: str) -> Callable[[Files], None]:
    def add(found: Files) -> None:
        content = json.loads(found["manifest.json"])
        content["files"][name] = {"bytes": 1, "crc32": 1}
        found["manifest.json"] = json.dumps(content).encode()

    return add


def deep_manifest(found: Files) -> None:
    found["manifest.json"] = b"[" * 50_000 + b"]" * 50_000


CASES: dict[str, tuple[Callable[[Files], None], str]] = {
    "nested": (nested, "more than 100 levels"),
    "no shards": (without("shards"), "'shards'"),
    "no file": (without("file"), "'file'"),
    "no header": (header(b"{", 2**62), "no safetensors file"),
    "odd header": (header(b'{"a": {"dtype": "F32", "data_offsets": [7]}}'), "no safetensors file"),
    "other tensors": (header(b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'),
        "lacks 'channels."),
    "long name": (named("x" * 5000), "longer than 255 bytes"),
    "name elsewhere": (named("../../elsewhere"), "which cannot lie in it"),
    "deep manifest": (deep_manifest, "more than 100 levels"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_files_inspect_says_what_is_odd(tmp_path: Path, whole: Files, case: str) -> None:
    """`inspect` says in one sentence what is odd in made-up files."""
    change, text = CASES[case]
    found = dict(whole)
    change(found)
    for folder, contents in (("checkpoint-1", found), ("checkpoint-2", dict(whole))):
        for name, data in contents.items():
            path = tmp_path / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    odd, fine = inspect.inspect(tmp_path)
    assert fine["complete"] and not odd["complete"]
    problems = "; ".join(odd["problems"])
    assert text in problems and "\n" not in problems, problems
    misfits(tmp_path / "checkpoint-1")  # a sentence, or nothing


def test_files_resume_from_a_part_without_tokens_is_refused(tmp_path: Path, whole: Files) -> None:
    """A part that lacks a field, though its checksum fits, is refused in a sentence."""
    content = part(whole)
    content["state"].pop("tokens")
    (tmp_path / "rank0.json").write_bytes(sealed(content))
    (tmp_path / "rank0.safetensors").write_bytes(whole["exchange/rank0.safetensors"])
    with pytest.raises(ValueError, match=r"does not know \(KeyError\('tokens'\)\)"):
        load_exchange(tmp_path).state(0, 0)


@pytest.mark.parametrize("name", ["rank0.json", "rank0.safetensors", "../manifest.json"])
def test_files_fifo_is_not_waited_for(tmp_path: Path, whole: Files, name: str) -> None:
    """A fifo in the place of a file is refused by `inspect` and by a resume: neither waits for a
    writer.
    """
    for file, data in whole.items():
        path = tmp_path / "checkpoint-1" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    fifo = tmp_path / "checkpoint-1" / "exchange" / name
    fifo.unlink()
    os.mkfifo(fifo)
    try:
        problems = "; ".join(p for found in inspect.inspect(tmp_path) for p in found["problems"])
    except ValueError as error:
        problems = str(error)
    assert "a fifo" in problems or "safetensors is missing" in problems, problems
    with pytest.raises(NeedsDecision, match="no island holds a whole checkpoint"):
        CheckpointManager(tmp_path, fsdp_demo.Topology()).resume_point("auto")


@pytest.mark.parametrize("case", ["nested", "no file", "no header", "odd header", "other tensors"])
def test_files_resume_from_an_odd_part_is_refused(tmp_path: Path, whole: Files, case: str) -> None:
    """A resume from an odd part is refused."""
    found = dict(whole)
    CASES[case][0](found)
    (tmp_path / "exchange").mkdir()
    for name in ("exchange/rank0.json", "exchange/rank0.safetensors"):
        (tmp_path / name).write_bytes(found[name])
    with pytest.raises(ValueError, match="is damaged"):
        load_exchange(tmp_path / "exchange").state(0, 0)


def test_files_too_deep_state_is_not_written(tmp_path: Path) -> None:
    """A state that could not be read again is not written."""
    tree: Any = torch.ones(2)
    for _ in range(98):
        tree = [tree]
    write_part(tmp_path, "kept", {}, tree)
    found = read_part(tmp_path / "kept.json")[1]
    for _ in range(98):
        (found,) = found
    assert torch.equal(found, torch.ones(2))
    with pytest.raises(ValueError, match="more than 100 levels"):
        write_part(tmp_path, "deep", {}, [[[tree]]])


@pytest.mark.parametrize("read_file", [
    reading.load, asking.step_from, files.read_json,
], ids=["doctor", "summary", "report"])  # fmt: skip
def test_files_nested_too_deeply_are_refused(tmp_path: Path, read_file: Callable[..., Any]) -> None:
    """Files that are nested too deeply are refused."""
    (tmp_path / "deep.json").write_text("[" * 50_000 + "]" * 50_000)
    with pytest.raises(ValueError, match="more than 100 levels"):
        read_file(tmp_path / "deep.json")


# ---- yaml --------------------------------------------------------------------------------------


def bomb(value: str) -> str:
    """Nine lines that stand for 9**9 values."""
    lines = [f"a: &a {value}"]
    for one, next_one in zip("abcdefgh", "bcdefghi", strict=True):
        lines.append(f"{next_one}: &{next_one} [{', '.join([f'*{one}'] * 9)}]")
    return "\n".join(lines)


@pytest.mark.parametrize(("text", "says"), [
    (bomb("x"), "has more than 10,000 values"),
    ("[" * 900 + "]" * 900, "is nested too deeply"),
    ("a: &a [*a]", "is nested too deeply, or in itself"),
    ("a: " + "x" * 60_000, "has 60,003 characters, allowed are 50,000"),
])  # fmt: skip
def test_files_yaml_that_expands_too_far_is_refused(text: str, says: str) -> None:
    """Yaml whose aliases stand for too much is refused."""
    with pytest.raises(ValueError, match=says):
        read_yaml(text, "a.yaml")


def test_files_yaml_with_small_aliases_is_read() -> None:
    """Yaml whose aliases stand for little is read."""
    assert read_yaml("a: &a [1]\nb: *a", "a.yaml") == {"a": [1], "b": [1]}
