"""Bytes before anything runs: published figures, the largest number of islands, and what `bytes.py`
and `published_bytes.py` print.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bytes as counting
from benchmarks import published_bytes
from fsdp_demo import Link, preset, presets, ring_all_reduce_bytes
from fsdp_demo.compression import formats
from fsdp_demo.exchange import plan
from tests.oracles.wire import block_bytes

BENCHMARKS = Path(__file__).resolve().parents[1]

# ---- published figures -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {name: counting.load(name) for name in ("olmo-300m", "olmo-1b", "llama-3.2-1b")}


@pytest.fixture(scope="module")
def claims(models: dict[str, Any]) -> dict[str, published_bytes.Claim]:
    return {c.claim: c for c in published_bytes.published(models["olmo-300m"], models["olmo-1b"])}


def test_bytes_published_model_shapes(models: dict[str, Any]) -> None:
    """The shapes of the published models have the published numbers of elements."""
    assert {n: counting.numel(t) for n, t in models.items()} == {
        "olmo-300m": 16 * 16 * 1024**2 + 50304 * 1024,
        "olmo-1b": 16 * 16 * 2048**2 + 50304 * 2048,
        "llama-3.2-1b": 1_235_814_400,
    }
    assert len(models["olmo-1b"]) == 16 * 7 + 1 and all(
        n % 64 == 0 for _, shape in models["olmo-1b"] for n in shape
    )


@pytest.mark.parametrize(
    ("claim", "figure", "k"),
    [
        ("300M: k = 8", 7.49, 8),
        ("300M: k = 1", 0.93, 1),
        ("1B: k = 16", 55.16, 16),
        ("1B: k = 2", 6.89, 2),
    ],
)
def test_bytes_published_demo(
    claims: dict[str, published_bytes.Claim],
    models: dict[str, Any],
    claim: str,
    figure: float,
    k: int,
) -> None:
    """The bytes of DeMo are those that its paper claims. MB per step, two decimals, cut; ours is
    8-bit values, positions and a scale per block, a header and one bit per tensor.
    """
    row = claims[f"DeMo {claim}, per step"]
    assert math.floor(100 * row.by_format) / 100 == figure
    tensors = models["olmo-300m" if "300M" in claim else "olmo-1b"]
    blocks = counting.numel(tensors) // 4096
    head = 56 + math.ceil(len(tensors) / 8)
    assert round(1e6 * row.ours) == pytest.approx(head + blocks * block_bytes(k), abs=8)
    assert row.ratio == pytest.approx(12 * k / block_bytes(k), rel=1e-3)


def test_bytes_published_demo_adamw(claims: dict[str, published_bytes.Claim]) -> None:
    """The gradient of AdamW in DeMo's table is the bytes of its shapes, to 3 %. The two gradients
    of the table are not exactly those of the shapes that its payloads give.
    """
    for label, figure, off in (("300M", 636.9, 0.005), ("1B", 2416.6, 0.027)):
        row = claims[f"DeMo {label}: gradient of AdamW, per step"]
        assert row.by_format == pytest.approx(figure, rel=off)
        assert 0 <= row.ours - row.by_format < 3e-4  # header and checksums


def test_bytes_published_desloc(claims: dict[str, published_bytes.Claim]) -> None:
    """The savings of DES-LOC are those that its paper claims."""
    row = claims["DES-LOC: below data parallelism, period 256"]
    assert round(row.by_format, 1) == round(row.ours, 1) == 170.7
    row = claims["DES-LOC: below Local Adam"]
    assert round(row.by_format, 1) == round(row.ours, 1) == 2.0


def test_bytes_published_streaming(
    claims: dict[str, published_bytes.Claim], models: dict[str, Any]
) -> None:
    """The bytes of Streaming DiLoCo are those that its paper claims."""
    two, four = (claims[f"Streaming DiLoCo: below bf16 data parallelism, R = {r}"] for r in (2, 4))
    assert round(two.ours / 100) * 100 == two.by_format == 400 and 0.998 < two.ratio < 1
    assert four.ours == pytest.approx(400 / 1.5, rel=2e-3)  # half a byte there, one back
    (peak,) = (c for name, c in claims.items() if "peak" in name)
    assert 1e6 * peak.by_format == 3 * 16 * 2048**2 / 2
    assert peak.ratio == pytest.approx(1 / (1 + 2 / 2048), rel=1e-4)  # a scale per 4096 values


def test_bytes_published_sparse_loco(
    claims: dict[str, published_bytes.Claim], models: dict[str, Any]
) -> None:
    """The compression of SparseLoCo is the one that its paper claims. 146 by the formula, with 12
    bits for a position; ours has two levels of each block on top and shorter positions.
    """
    row = claims["SparseLoCo: payload below fp32, k = 64"]
    assert round(row.by_format, 1) == 146.3
    levels = formats.num_bytes("2bit", 1, 64) - 16
    block = block_bytes(64, 16 + levels)
    assert levels == 4 and block < 112 and row.ours == pytest.approx(16384 / block, rel=1e-4)
    llama, norms = models["llama-3.2-1b"], 33 * 2048  # norms travel whole, in bf16
    sent = counting.count(preset("sparse_loco"), llama, 2).largest.bytes_sent
    whole = block * ((counting.numel(llama) - norms) // 4096)
    assert sent == pytest.approx(56 + whole + 2 * norms, abs=8)


def test_bytes_published_decoupled_momentum(claims: dict[str, published_bytes.Claim]) -> None:
    """The savings of decoupled momentum are those that its paper claims. 2 rho / R against DiLoCo,
    sent and received: 42.7, 21.3, 10.7 by the released format.
    """
    name = "decoupled momentum"
    meter = claims[f"{name}: below DiLoCo, k = 16, R = 4, released meter"]
    assert round(meter.by_format, 1) == 17.1 and 15 < meter.by_format < meter.ours
    rho = 16384 / block_bytes(32)
    whole = claims[f"{name}: payload below DiLoCo's, k = 32"]
    assert round(whole.by_format, 1) == 42.7 and whole.ours == pytest.approx(rho, rel=1e-4)
    for islands, figure in ((2, 42.7), (4, 21.3), (8, 10.7)):
        for word in ("sent", "received"):
            row = claims[f"{name}: below DiLoCo, k = 32, {word}, R = {islands}"]
            assert round(row.by_format, 1) == figure
            assert row.ours == pytest.approx(2 * rho / islands, rel=1e-3)


def test_bytes_released_chunks_divisors() -> None:
    """The chunks of the released DeMo code shrink to divisors of a tensor's sides."""
    assert (
        published_bytes.coefficients(
            [("a", (128, 192)), ("b", (5,)), ("c", (67, 3)), ("d", (2048,))], 32
        )
        == 6 * 32 + 5 + 67 * 3 + 32 * 32
    )


# ---- the largest number of islands -------------------------------------------------------------


@pytest.mark.parametrize("topk", [32, 64, 1000])
def test_bytes_most_islands_of_gather(topk: int) -> None:
    """A gather sends less than a ring all-reduce up to `most_islands`, and no further."""
    tensors = [("layers.0.weight", (4096, 4096))]
    config = preset("demo", topk=topk)
    most = counting.most_islands(config, tensors)
    assert most == pytest.approx(2 * 8192 / block_bytes(topk), abs=1)
    for islands, less in ((most, True), (most + 1, False)):
        sent = counting.count(config, tensors, islands).largest.bytes_sent
        assert (sent < ring_all_reduce_bytes(islands, 2 * 4096**2)) == less


def test_bytes_most_islands_of_reduce(models: dict[str, Any]) -> None:
    """A method that reduces has no largest number of islands."""
    llama = models["llama-3.2-1b"]
    assert {
        n: counting.most_islands(preset(n), llama)
        for n in ("full", "random", "muloco", "streaming_diloco")
    } == {
        "full": 0,
        "random": None,
        "muloco": None,
        "streaming_diloco": None,
    }
    assert counting.most_islands(preset("demo", topk=4096, value_dtype="bf16"), llama) == 0


# ---- the scripts --------------------------------------------------------------------------------


def script(name: str, *words: str) -> str:
    env = {k: v for k, v in os.environ.items() if not k.startswith("ISLAND_")}
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / name), *words],
        capture_output=True,
        text=True,
        timeout=120,
        env=env,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def row(text: str, first: str) -> list[str]:
    (found,) = (line for line in text.splitlines() if line.startswith(first))
    return found.removeprefix(first).split()


def test_bytes_benchmark_published_table(
    claims: dict[str, published_bytes.Claim], tmp_path: Path
) -> None:
    """The byte benchmark prints the table of published figures."""
    text = script("published_bytes.py", "--json", str(tmp_path / "out.json"))
    saved = json.loads((tmp_path / "out.json").read_text())
    assert set(saved) == {"published"} and len(saved["published"]) == len(claims)
    for c, numbers in zip(claims.values(), saved["published"], strict=True):
        assert (
            numbers["ours"] == c.ours
            and numbers["by_format"] == c.by_format
            and numbers["ratio"] == c.ratio
        )
        unit = " MB" if c.unit == "MB" else "x"
        cells = [
            f"{c.by_format:.{2 if c.unit == 'MB' else 1}f}{unit}",
            f"{c.ours:.{2 if c.unit == 'MB' else 1}f}{unit}",
            f"{c.ratio:.2f}x",
        ]
        (line,) = (line for line in text.splitlines() if line.startswith(c.claim + " "))
        assert line.split()[-len(" ".join(cells).split()) :] == " ".join(cells).split()
    assert all(f"[{i}]" in text for i in range(1, 6)) and "318.45 and 1208.3 M" in " ".join(
        text.split()
    )
    assert max(map(len, text.splitlines())) <= 160


def test_bytes_benchmark_presets_table(tmp_path: Path) -> None:
    """The table of presets that the byte benchmark prints is the plan."""
    words = [
        "--model",
        "tiny",
        "--islands",
        "3",
        "--shards",
        "2",
        "--link",
        "20Mbit",
        "--rtt",
        "40ms",
    ]
    text = script("bytes.py", *words, "--json", str(tmp_path / "out.json"))
    saved = json.loads((tmp_path / "out.json").read_text())
    assert set(saved) == {"presets"} and "Published figures" not in text
    assert (
        saved["presets"]["model"],
        saved["presets"]["parameters"],
        saved["presets"]["link"],
    ) == ("tiny", 459_904, "20Mbit,40ms")
    assert [r["preset"] for r in saved["presets"]["rows"]] == ["(all-reduce)", *presets()]
    ring, tensors = ring_all_reduce_bytes(3, 2 * 459_904), counting.load("tiny")
    for found in saved["presets"]["rows"][1:]:
        config = preset(found["preset"])
        plans = plan.plan_model(config, tensors, 3, 2)
        sent, received = (
            sum(getattr(p.most(), k) for p in plans) for k in ("bytes_sent", "bytes_received")
        )
        trips = 1 if all(s.gathered for p in plans for s in p.sections) else 3
        trips += config.checks  # of eight bytes
        assert (found["sent"], found["received"], found["messages"]) == (sent, received, trips)
        assert found["seconds"] == pytest.approx(8 * max(sent, received) / 20e6 + trips * 0.04)
        per_step = sum(p.average()[0] for p in plans)
        assert found["sent_per_step"] == pytest.approx(per_step)
        assert found["ratio"] == pytest.approx(ring / sent) and found[
            "ratio_per_step"
        ] == pytest.approx(ring / per_step)
        cells = row(text, found["preset"] + " ")
        assert " ".join(counting.size(sent).split()) in " ".join(cells) and cells[0] == "every"
    assert saved["presets"]["rows"][0]["sent"] == ring


def test_bytes_benchmark_llama(models: dict[str, Any]) -> None:
    """The bytes of Llama 3.2 1B are those that the README quotes, and the seconds are those of the
    bytes.
    """
    llama = models["llama-3.2-1b"]
    rows = {e.preset: e for e in counting.entries(llama, 3, 1, Link.parse("200Mbit"))}
    assert rows["(all-reduce)"].sent == 2 * 2 * 2 * counting.numel(llama) // 3
    assert rows["demo"].seconds == rows["demo"].seconds_per_step == 8 * rows["demo"].sent / 200e6
    assert rows["decoupled_momentum"].seconds_per_step == pytest.approx(
        rows["decoupled_momentum"].seconds / 128
    )


def test_bytes_benchmark_without_link(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a link the byte benchmark prints no seconds."""
    monkeypatch.setattr(
        sys, "argv", ["bytes.py", "--model", "tiny", "--link", "none", "--islands", "1"]
    )
    counting.main()
    text = capsys.readouterr().out
    assert "ratio/step" in text.splitlines()[2] and " s/step" not in text.splitlines()[2]
    # sent, received, trips, ratio; per step
    assert row(text, "demo ")[6:-1] == ["0", "B", "0", "B", "0", "-", "0", "B", "0", "B", "-"]


def test_bytes_benchmark_one_setting(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The byte benchmark counts one setting alone."""
    words = ["--model", "tiny", "--islands", "2", "--exchange", "demo", "--set", "topk=16"]
    monkeypatch.setattr(sys, "argv", ["bytes.py", *words])
    counting.main()
    text = capsys.readouterr().out
    sent = counting.count(preset("demo", topk=16), counting.load("tiny"), 2).largest.bytes_sent
    assert text.startswith("demo --set topk=16: tiny") and "\ndiloco" not in text
    assert " ".join(counting.size(sent).split()) in " ".join(row(text, "demo  "))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--set", "topk=16"], "give --exchange NAME|YAML, too"),
        (["--exchange", "nothere.yaml"], "neither a preset nor a file"),
        (["--model", "nothing"], "'nothing' is not known: "),
        (["--model", "{folder}/torn.json"], "does not describe a causal language model"),
        (["--islands", "0"], "'0' is not allowed"),
        (["--islands", "two"], "'two' is not allowed"),
        (["--shards", "-1"], "is not allowed"),
        (["--link", "fast"], "link rate 'fast': expected"),
        (["--link", "100MB/s"], "bits, not bytes"),
        (["--rtt", "40"], "link round trip '40': expected"),
        (["--model", "tiny", "--json", "{folder}/no/such/folder.json"], "No such file"),
    ],
)
def test_bytes_benchmark_bad_input(
    words: list[str],
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bad input of the byte benchmark ends in an error of one line."""
    (tmp_path / "torn.json").write_text('{"model_type": "none of these"}')
    monkeypatch.setattr(sys, "argv", ["bytes.py", *(w.format(folder=tmp_path) for w in words)])
    with pytest.raises(SystemExit) as ended:
        counting.main()
    printed = capsys.readouterr()
    assert ended.value.code == 2 and printed.out == ""
    assert (
        says in printed.err
        and printed.err.count("\n") == 1
        and printed.err.startswith("bytes.py: error: ")
    )
