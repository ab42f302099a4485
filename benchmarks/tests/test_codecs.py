"""Keys and rows that the benchmarks of the codecs print and write, never their times."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch

from benchmarks import codec, decode, hotpath, number_formats, scale
from fsdp_demo.compression.transform import cpu_name, kernels, matrix
from fsdp_demo.config.parts import BLOCK
from tests.compression.test_topk import by_sorting
from tests.support.transforms import random

TINY = ["--hidden", "256", "--shards", "1", "--repeat", "1"]
KEYS = {
    "published_ns", "ours_ns", "ratio", "bytes_per_coefficient", "same_coefficients",
    "residual_error", "workspace_mb",
}  # fmt: skip


def run(script: Any, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(script, "pin", lambda: None)
    monkeypatch.setattr(sys, "argv", ["script", *words])
    script.main()


def test_benchmark_of_positions() -> None:
    """The benchmark of positions prints the bytes of each form. Bytes are those of the form; gaps
    of equal length have a Rice code by hand, and 12 bits each the bytes by hand.
    """
    from benchmarks import positions as bench

    packed = bench.pack12(torch.tensor([0xABC, 0x123, 7]))
    assert bytes(packed.tolist()) == bytes([0xBC, 0x3A, 0x12, 7, 0])
    assert bench.unpack12(packed, 3).tolist() == [0xABC, 0x123, 7]
    assert bench.section_bytes("int8", 64, rows=8) == (2 + 64 + 491 / 8) / 64
    # 63 are passed each time: 6 low bits, and a one
    even = torch.arange(63, 4096, 64).expand(4, 64)
    assert bench.rice_bits(even) == 7.0
    assert bench.uniform(3, 5).shape == (5, 3) and bench.processor()
    row = bench.measure(90, 1, ([(64, 64)], [[torch.randn(64, 64)]]))
    assert row["bits"] == 651 / 90 and row["ns"]["encode"] > 0 and row["bytes"]["1bit"] < 1.1
    bench.show([row])


def test_benchmark_of_codec(tmp_path, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The codec benchmark prints and writes its keys."""
    out = tmp_path / "out.json"
    run(codec, monkeypatch, *TINY, "--training", "3", "--json", str(out))
    rows, printed = json.loads(out.read_text()), capsys.readouterr().out
    for name in ("k8", "k32", "k8_bf16", "k32_bf16"):
        assert set(rows[name]) >= KEYS | {"published_temporaries_mb", "energy"}
        assert f"\n{name} " in printed
        assert (
            rows[name]["bytes_per_coefficient"] == {8: 2.578125, 32: 2.14453125}[codec.HOT[name][0]]
        )
        assert rows[name]["workspace_mb"] <= 64 + 2 * 1024 * 256 * 4 / 1e6
    for name in ("k8", "k32"):
        assert rows[name]["same_coefficients"] > 0.9999 and rows[name]["residual_error"] < 1e-6
    for name in ("k8_bf16", "k32_bf16"):
        assert rows[name]["same_coefficients"] > 0.98
        assert rows[name]["energy"] > 0.999
        assert rows[name]["energy_recorded"] > 0.999
    assert rows["plain_k64"]["ours_ns"] > 0
    assert rows["cpu"] == f"{cpu_name()} ({kernels()})" and rows["cpu"] in printed
    assert 0 < rows["memory"]["pass_ns"] and "\nmemory time: one pass" in printed
    assert "\nk8, published " in printed and "\nplain_k64, ours " in printed
    for form in ("stages_ns", "published_stages_ns"):
        found = rows["k8"][form]
        assert list(found) == list(codec.STAGES) and all(ns > 0 for ns in found.values())


def test_benchmark_of_codes_and_decode(tmp_path, monkeypatch, capsys) -> None:
    """The benchmarks of codes and of decoding print and write their keys."""
    run(
        number_formats,
        monkeypatch,
        "--elements",
        "8192",
        "--repeat",
        "1",
        "--json",
        str(tmp_path / "codes.json"),
    )
    assert [r["code"] for r in json.loads((tmp_path / "codes.json").read_text())["codes"]] == list(
        number_formats.CODES
    )
    run(decode, monkeypatch, *TINY, "--json", str(tmp_path / "decode.json"))
    found = json.loads((tmp_path / "decode.json").read_text())
    assert list(found["replicas"]) == ["1", "2", "4", "8", "16", "32"]
    assert set(found["growth"]) == {
        "published",
        "ours",
    }
    assert "from 2 to 32 replicas" in capsys.readouterr().out
    if not torch.cuda.is_available():
        for script in (codec, decode):
            run(script, monkeypatch, "--device", "cuda")
            assert capsys.readouterr().out == "no GPU here: nothing measured\n"


def test_benchmark_of_scale(tmp_path, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The scale benchmark prints all its rows. A row for each size, each number of tensors (and as
    many that are sent whole), each number of replicas.
    """
    out = tmp_path / "out.json"
    words = "--turn 1 --sizes 1 --tensors 2 8 --replicas 2 3 --hidden 256 --repeat 1".split()
    run(scale, monkeypatch, *words, "--json", str(out))
    found, printed = json.loads(out.read_text()), capsys.readouterr().out
    assert [(r["kind"], r["tensors"], r["replicas"]) for r in found["rows"]] == [
        ("size", 1, 2),
        ("tensors", 2, 2),
        ("tensors", 8, 2),
        ("tensors", 8, 2),
        ("replicas", 7, 2),
        ("replicas", 7, 3),
    ]
    assert [r["elements"] for r in found["rows"][:4]] == [1 << 20, 32768, 32768, 8192]
    assert all(r["all"] > 0 for r in found["rows"]) and "against size: " in printed
    assert found["cpu"] in printed and set(found["spread"]) == {"size"}


def test_published_demo_step_by_hand() -> None:
    """The published form of DeMo is its definition. One block by hand: the yardstick's momentum,
    choice and step.
    """
    one, g = hotpath.Published([(64, 64)], 3, "cpu"), random(64, 64)
    d = matrix("dct", 64)
    coefficients = hotpath.LR * (d @ g @ d.t())
    (sent,) = one.send([g], hotpath.silent)
    chosen = (
        torch.zeros(BLOCK).scatter_(0, by_sorting(coefficients.view(1, -1), 3)[0], 1.0).view(64, 64)
        * coefficients
    )
    assert set(sent[0].flatten().tolist()) == set(chosen.view(-1).nonzero().flatten().tolist())
    assert torch.allclose(one.momentum[0], hotpath.LR * g - d.t() @ chosen @ d, atol=1e-6)
    one.receive([[sent]], hotpath.silent)
    assert torch.equal(one.parameters[0], -hotpath.LR * torch.sign(d.t() @ chosen @ d))
