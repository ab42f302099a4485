"""Top-k in C: the same positions as by torch, and torch where it cannot be had."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fsdp_demo.compression import machine, native, topk
from fsdp_demo.compression.machine import Form

from ..oracles.topk import topk as oracle

needs_compiler = pytest.mark.skipif(not native.compiler(), reason="there is no C compiler")


@pytest.fixture(autouse=True)
def anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nothing is compiled yet, and the user's cache is an empty folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = topk.kernel
    made.cache_clear()
    machine.use(Form(selection="c"))
    yield
    made.cache_clear()
    machine.use(None)


def blocks(kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    out = torch.randn(6, 4096, generator=generator)
    if kind == "ties":
        out.mul_(3).round_()
    elif kind == "zeros":
        out[::2] = 0.0
        out[1, 20:] = -0.0
    elif kind == "steep":  # almost all that is large lies in a few rows, as after a transform
        out.mul_(torch.linspace(0, 20, 64).neg().exp().repeat_interleave(64))
    elif kind == "denormal":
        out.mul_(1e-41)
    elif kind == "not finite":
        out[0, 9], out[1], out[2, 4095], out[3, 0] = float("nan"), float("nan"), -1e38, 1e38
        out[4, 100:300] = float("inf")
        out[5] = -float("inf")
    return out


@needs_compiler
@pytest.mark.parametrize("kind", ["random", "ties", "zeros", "steep", "denormal", "not finite"])
def test_it_selects_what_torch_selects(kind: str) -> None:
    rows, kernel = blocks(kind), topk.kernel()
    assert kernel is not None
    for k in (1, 2, 8, 31, 64, 90, 128, 129, 255, 256):
        found = kernel(rows, k)
        assert torch.equal(found, topk.top_k(rows, k))
        assert torch.equal(found, topk._exact(rows, k))
        if kind != "not finite":  # by torch's sort NaN has another place
            assert found.tolist() == [oracle(row, k) for row in rows]


@needs_compiler
def test_what_it_does_not_do_is_done_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of a block, other sizes, other strides."""
    rows = blocks("random")
    wide = torch.randn(5, 8192, generator=torch.Generator().manual_seed(2))[:, :4096]
    asked: list[int] = []
    kernel = topk.kernel()
    assert kernel is not None
    monkeypatch.setattr(topk, "kernel", lambda: lambda a, k: asked.append(k) or kernel(a, k))
    cases = [(rows, 256), (rows, 257), (rows, 4096), (rows[:, :100].contiguous(), 7), (wide, 8)]
    for a, k in cases:
        assert topk.top_k(a, k).tolist() == [oracle(row, k) for row in a]
    assert asked == [256]
    machine.use(Form())
    topk.top_k(rows, 8)
    assert asked == [256]


def test_without_a_compiler_torch_does_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    caplog.set_level(logging.INFO, "fsdp_demo")
    assert native.compiler() == [] and topk.kernel() is None
    rows = blocks("random")
    assert topk.top_k(rows, 8).tolist() == [oracle(row, 8) for row in rows]
    assert not caplog.messages


def test_the_user_says_which_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", f"{sys.executable} -c pass")
    assert native.compiler() == [sys.executable, "-c", "pass"]
    monkeypatch.setenv("CC", "no-such-compiler")
    assert native.compiler() == []


def test_a_compiler_that_fails_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    script = tmp_path / "cc"
    script.write_text("#!/bin/sh\necho no licence >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    rows = blocks("random")
    for _ in range(2):
        assert topk.top_k(rows, 8).tolist() == [oracle(row, 8) for row in rows]
    assert len(caplog.messages) == 1 and "no licence" in caplog.messages[0]
    assert list((tmp_path / "cache" / "fsdp_demo").iterdir()) == []


@needs_compiler
def test_what_was_compiled_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert topk.kernel() is not None
    (kept,) = (tmp_path / "cache" / "fsdp_demo").iterdir()
    assert kept.name.startswith("topk-") and kept.suffix == ".so"
    topk.kernel.cache_clear()
    monkeypatch.setattr(subprocess, "run", None)  # as another process, without the compiler's run
    assert topk.kernel() is not None


@needs_compiler
def test_a_broken_file_in_the_cache_is_made_anew(tmp_path: Path) -> None:
    assert topk.kernel() is not None
    (kept,) = (tmp_path / "cache" / "fsdp_demo").iterdir()
    code = (
        "import torch; from fsdp_demo.compression import topk; "
        "print(topk.kernel()(torch.arange(4096.)[None], 2).tolist())"
    )
    kept.unlink()  # not written over: this process runs it
    kept.write_bytes(b"")
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ)
    )
    assert ran.stdout.strip() == "[[4094, 4095]]", ran.stderr


@needs_compiler
def test_a_cache_that_cannot_be_written_is_done_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert topk.kernel() is not None


@needs_compiler
def test_a_compiler_without_the_flag_for_this_processor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "cc"
    real = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    script.write_text(
        '#!/bin/sh\ncase "$*" in *-march=native*) echo unknown flag >&2; exit 1;; esac\n'
        f'exec {real} "$@"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    assert topk.kernel() is not None


@needs_compiler
def test_code_that_selects_otherwise_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    source = tmp_path / "topk.c"
    source.write_text(topk.SOURCE.read_text().replace("(int16_t)here", "(int16_t)(here ^ 1)"))
    monkeypatch.setattr(topk, "SOURCE", source)
    assert topk.kernel() is None
    assert any("selects other elements" in m for m in caplog.messages)
