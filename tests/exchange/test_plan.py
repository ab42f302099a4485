"""The plan of bytes against the meter of real processes; published figures; what
`recipes/benchmarks/bytes.py` prints; the warning.
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
import torch
from torch import nn

import fsdp_demo
from fsdp_demo import ExchangeConfig, Link, preset, presets, ring_all_reduce_bytes
from fsdp_demo.compression import dense as vectors
from fsdp_demo.compression import formats
from fsdp_demo.exchange import plan
from fsdp_demo.peers import header
from fsdp_demo.peers.header import Meter

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
BENCHMARKS = RECIPES / "benchmarks"
sys.path.insert(0, str(RECIPES))

from benchmarks import bytes as counting  # noqa: E402
from benchmarks import published_bytes  # noqa: E402

from ..oracles import wire  # noqa: E402

# ---- the plan and the meter --------------------------------------------------------------------

# blocks of 64 x 64 with edges, flat blocks with a tail, small tensors, one element: uneven or empty
# shards
SHAPES = {
    "embed.weight": (100, 50), "layers.0.weight": (124, 122), "layers.1.weight": (131, 70),
    "layers.2.weight": (128, 128), "layers.3.weight": (67, 3), "norm": (5,), "one": (1,),
    "unused": (3, 3), "frozen": (4, 4),
}  # fmt: skip
STEPS = 13

CASES: dict[str, ExchangeConfig] = {
    "full": preset("full"),
    "local_sgd": preset("local_sgd", period=2),
    "local_adam": preset("local_adam", period=3),
    "desloc": preset("desloc", embeddings=True, period=2, states={"exp_avg": 2, "exp_avg_sq": 3}),
    "diloco": preset("diloco", period=3),
    "streaming_diloco": preset("streaming_diloco", period=5, layers=2, delay=2),
    "demo": preset("demo"),
    "random": preset("random"),
    "stride": preset("stride", topk=100),
    "decoupled_momentum": preset("decoupled_momentum", period=3),
    "sparse_loco": preset("sparse_loco", period=3),
    "sign_loco": preset("sign_loco", period=3),
    "muloco": preset("muloco", period=4),
    "sign_muloco": preset("sign_muloco", period=3),
    # forms that no preset takes by default
    "demo, late": preset("demo", topk=3, **{"schedule.delay": 2}),
    "diloco, int8": preset("diloco", period=4, value_dtype="int8"),
    "sign_loco, feedback, late": preset("sign_loco", beta=0.6, period=4, **{"schedule.delay": 1}),
    "muloco, int4": preset("muloco", period=4, value_dtype="int4"),
    "muloco, later than its period": preset("muloco", period=2, **{"schedule.delay": 5}),
    "streaming_diloco, e2m1": preset("streaming_diloco", period=4, layers=1, delay=1,
        value_dtype="fp4_e2m1", order="sequential"),
    "decoupled_momentum, released": preset("decoupled_momentum", rule="released", period=2,
        average_every=2),
}  # fmt: skip


class Model(nn.Module):
    """Parameters of these shapes; the loss is the sum of their elements times a number."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Held(SHAPES["embed.weight"])
        self.layers = nn.ModuleList([Held(SHAPES[f"layers.{i}.weight"]) for i in range(4)])
        for name in ("norm", "one", "unused", "frozen"):
            setattr(
                self, name, nn.Parameter(torch.ones(SHAPES[name]), requires_grad=name != "frozen")
            )

    def forward(self, scale: float) -> torch.Tensor:
        held = self.embed() + sum(layer() for layer in self.layers)
        return scale * (held + self.norm.square().sum() + self.one.sum() + self.frozen.sum())


class Held(nn.Module):
    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, math.prod(shape)).view(shape))

    def forward(self) -> torch.Tensor:
        return self.weight.square().sum()


def counted(me: Any, name: str, config: ExchangeConfig) -> list[tuple[int, ...]]:
    """(exchanges, messages, bytes sent, bytes received) of this rank at each step of a short
    training.
    """
    from torch.distributed.fsdp import fully_shard

    os.environ["ISLAND_RUN"] += "-" + "".join(c for c in name if c.isalnum())
    torch.manual_seed(0)
    model = Model()
    if me.procs > 1:
        for layer in model.layers:
            fully_shard(layer, mesh=me.mesh())
        fully_shard(model, mesh=me.mesh())
    kind = torch.optim.SGD if config.inner_optimizers[0] == "sgd" else torch.optim.AdamW
    optimizer = kind([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    # bytes do not depend on it, and AdamW alone is refused under muloco
    insists = {"inner_optimizers": "as_is"} if config.preset.endswith("muloco") else {}
    exchange = fsdp_demo.attach(optimizer, config, model=model, **insists)
    out, before = [], (0, 0, 0, 0)
    for t in range(STEPS):
        model(1.0 + t + me.island).backward()
        optimizer.step()
        optimizer.zero_grad()
        exchange.digests_equal()  # on the line after what is under way: that has been counted then
        m = exchange.metrics()
        now = m["exchanges"], m["messages"], m["bytes_sent"], m["bytes_received"]
        out.append(tuple(a - b for a, b in zip(now, before, strict=True)))
        before = now
    exchange.flush()
    m = exchange.metrics()
    assert (m["exchanges"], m["messages"], m["bytes_sent"], m["bytes_received"]) == before, (
        "flush sends nothing"
    )
    exchange.detach()
    return out


def test_bytes_plan_covers_every_preset() -> None:
    """Every preset is a case of this file."""
    assert set(presets()) <= set(CASES)
    assert [CASES[name].preset for name in presets()] == list(presets())


LONG = [pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((2, 2), (4, 1))]


@pytest.mark.parametrize(("islands", "procs"), [(2, 1), (3, 1), *LONG])
def test_bytes_plan_equals_meter(run_ranks: Any, islands: int, procs: int) -> None:
    """The plan of bytes is what the meter counts. Every step of every rank: exchanges, messages,
    bytes sent and received.
    """
    tensors = [(n, s) for n, s in SHAPES.items() if n != "frozen"]

    def run(me: Any) -> dict[str, list[tuple[int, ...]]]:
        return {name: counted(me, name, config) for name, config in CASES.items()}

    results = run_ranks(run, islands, procs, timeout=240)
    for name, config in CASES.items():
        for i in range(islands):
            plans = plan.plan_model(config, tensors, islands, procs, rank=i)
            for p in range(procs):
                found = results[i * procs + p][name]
                planned = [plans[p].message(t) for t in range(STEPS)]
                assert found == [
                    (m.exchanges, m.messages, m.bytes_sent, m.bytes_received) for m in planned
                ], (name, i, p)
                assert sum(f[2] for f in found) > 0, name
                total = plans[p].over(range(STEPS))
                assert (total.bytes_sent, total.messages) == tuple(
                    sum(f[j] for f in found) for j in (2, 1)
                )


@pytest.mark.parametrize("name", CASES)
def test_bytes_plan_average_and_largest(name: str) -> None:
    """The average and the largest exchange of a plan follow from its steps."""
    tensors = [(n, s) for n, s in SHAPES.items() if n != "frozen"]
    (made,) = plan.plan_model(CASES[name], tensors, 3)
    steps = [made.message(t) for t in range(made.cycle, 3 * made.cycle)]
    sent, received, messages = made.average()
    assert sent == made.average()[0] == sum(m.bytes_sent for m in steps) / len(steps)
    assert (received, messages) == tuple(
        sum(getattr(m, k) for m in steps) / len(steps) for k in ("bytes_received", "messages")
    )
    assert made.most().bytes_sent == max(m.bytes_sent for m in steps)


def test_bytes_plan_long_cycle() -> None:
    """The plan of a long cycle counts exchange by exchange. Periods without a common divisor: close
    to the exact mean (a header per channel more), without walking the cycle.
    """
    config = preset("desloc", embeddings=True, period=1, states={"exp_avg": 101, "exp_avg_sq": 103})
    (made,) = plan.plan_model(config, [("layers.0.weight", (128, 128))], 2)
    assert made.cycle == 101 * 103 > 10_000
    exact = made.over(range(made.cycle)).bytes_sent / made.cycle
    assert exact <= made.average()[0] < exact + 2 * 3 * header.HEADER.size / 101
    assert made.most().bytes_sent == 3 * 56 + 3 * 4 * 128 * 128


def test_bytes_plan_one_island() -> None:
    """The plan of one island sends nothing."""
    for config in CASES.values():
        for made in plan.plan_model(config, [(n, s) for n, s in SHAPES.items()], 1, 2):
            assert made.average() == (0, 0, 0) and made.most().bytes_sent == 0


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
    assert len(models["olmo-1b"]) == 16 * 7 + 1
    assert all(n % 64 == 0 for _, shape in models["olmo-1b"] for n in shape)


def block_bytes(k: int, values: float | None = None) -> float:
    """Of a whole block: k values of 8 bits and a scale, or other `values`, and the positions."""
    low, flags = wire.low_and_flags(4096, k)
    return (2 + k if values is None else values) + (flags + (2 * k if flags else 0) + low * k) / 8


@pytest.mark.parametrize(("claim", "figure", "k"), [
    ("300M: k = 8", 7.49, 8), ("300M: k = 1", 0.93, 1), ("1B: k = 16", 55.16, 16),
    ("1B: k = 2", 6.89, 2),
])  # fmt: skip
def test_bytes_published_demo(claims, models: dict[str, Any], claim, figure, k) -> None:
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


def test_bytes_published_streaming(claims, models: dict[str, Any]) -> None:
    """The bytes of Streaming DiLoCo are those that its paper claims."""
    two, four = (claims[f"Streaming DiLoCo: below bf16 data parallelism, R = {r}"] for r in (2, 4))
    assert round(two.ours / 100) * 100 == two.by_format == 400 and 0.998 < two.ratio < 1
    assert four.ours == pytest.approx(400 / 1.5, rel=2e-3)  # half a byte there, one back
    (peak,) = (c for name, c in claims.items() if "peak" in name)
    assert 1e6 * peak.by_format == 3 * 16 * 2048**2 / 2
    assert peak.ratio == pytest.approx(1 / (1 + 2 / 2048), rel=1e-4)  # a scale per 4096 values


def test_bytes_published_sparse_loco(claims, models: dict[str, Any]) -> None:
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
    } == dict(full=0, random=None, muloco=None, streaming_diloco=None)
    assert counting.most_islands(preset("demo", topk=4096, value_dtype="bf16"), llama) == 0


# ---- the script --------------------------------------------------------------------------------


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


def test_bytes_benchmark_published_table(claims, tmp_path) -> None:
    """The byte benchmark prints the table of published figures."""
    text = script("published_bytes.py", "--json", str(tmp_path / "out.json"))
    saved = json.loads((tmp_path / "out.json").read_text())
    assert set(saved) == {"published"} and len(saved["published"]) == len(claims)
    for c, numbers in zip(claims.values(), saved["published"], strict=True):
        assert numbers["ours"] == c.ours
        assert numbers["by_format"] == c.by_format
        assert numbers["ratio"] == c.ratio
        unit = " MB" if c.unit == "MB" else "x"
        cells = [
            f"{c.by_format:.{2 if c.unit == 'MB' else 1}f}{unit}",
            f"{c.ours:.{2 if c.unit == 'MB' else 1}f}{unit}",
            f"{c.ratio:.2f}x",
        ]
        (line,) = (line for line in text.splitlines() if line.startswith(c.claim + " "))
        assert line.split()[-len(" ".join(cells).split()) :] == " ".join(cells).split()
    assert all(f"[{i}]" in text for i in range(1, 6))
    assert "318.45 and 1208.3 M" in " ".join(text.split())
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
        assert (found["sent"], found["received"], found["messages"]) == (sent, received, trips)
        assert found["seconds"] == pytest.approx(8 * max(sent, received) / 20e6 + trips * 0.04)
        per_step = sum(p.average()[0] for p in plans)
        assert found["sent_per_step"] == pytest.approx(per_step)
        assert found["ratio"] == pytest.approx(ring / sent)
        assert found["ratio_per_step"] == pytest.approx(ring / per_step)
        cells = row(text, found["preset"] + " ")
        assert " ".join(counting.size(sent).split()) in " ".join(cells) and cells[0] == "every"
    assert saved["presets"]["rows"][0]["sent"] == ring


def test_bytes_plan_llama(models: dict[str, Any]) -> None:
    """The bytes of Llama 3.2 1B are those that the README quotes; they do not depend on an island's
    shards, but for edges of blocks.
    """
    llama = models["llama-3.2-1b"]
    rows = {e.preset: e for e in counting.entries(llama, 3, 1, Link.parse("200Mbit"))}
    eighths = {e.preset: e for e in counting.entries(llama, 3, 8, Link.parse("200Mbit"))}
    for name in presets():
        assert eighths[name].sent == pytest.approx(rows[name].sent, rel=0.01), name
    assert rows["(all-reduce)"].sent == 2 * 2 * 2 * counting.numel(llama) // 3
    norms = 33 * 2048  # dense, in bf16
    blocks = (counting.numel(llama) - norms) // 4096
    one = rows["demo"].sent / 2
    assert one == pytest.approx(56 + 19 + block_bytes(32) * blocks + 2 * norms, abs=8)
    assert rows["demo"].seconds == rows["demo"].seconds_per_step == 8 * rows["demo"].sent / 200e6
    assert rows["decoupled_momentum"].seconds_per_step == pytest.approx(
        rows["decoupled_momentum"].seconds / 128
    )


def test_bytes_benchmark_without_link(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a link the byte benchmark prints no seconds."""
    monkeypatch.setattr(
        sys, "argv", ["bytes.py", "--model", "tiny", "--link", "none", "--islands", "1"]
    )
    counting.main()
    text = capsys.readouterr().out
    assert "ratio/step" in text.splitlines()[2] and " s/step" not in text.splitlines()[2]
    # sent, received, trips, ratio; per step
    assert row(text, "demo ")[6:-1] == ["0", "B", "0", "B", "0", "-", "0", "B", "0", "B", "-"]


def test_bytes_benchmark_one_setting(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """The byte benchmark counts one setting alone."""
    words = ["--model", "tiny", "--islands", "2", "--exchange", "demo", "--set", "topk=16"]
    monkeypatch.setattr(sys, "argv", ["bytes.py", *words])
    counting.main()
    text = capsys.readouterr().out
    sent = counting.count(preset("demo", topk=16), counting.load("tiny"), 2).largest.bytes_sent
    assert text.startswith("demo --set topk=16: tiny") and "\ndiloco" not in text
    assert " ".join(counting.size(sent).split()) in " ".join(row(text, "demo  "))


@pytest.mark.parametrize(("words", "says"), [
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
])  # fmt: skip
def test_bytes_benchmark_bad_input(words: list[str], says, tmp_path, capsys, monkeypatch) -> None:
    """Bad input of the byte benchmark ends in an error of one line."""
    (tmp_path / "torn.json").write_text('{"model_type": "none of these"}')
    monkeypatch.setattr(sys, "argv", ["bytes.py", *(w.format(folder=tmp_path) for w in words)])
    with pytest.raises(SystemExit) as ended:
        counting.main()
    printed = capsys.readouterr()
    assert ended.value.code == 2 and printed.out == ""
    assert says in printed.err
    assert printed.err.count("\n") == 1
    assert printed.err.startswith("bytes.py: error: ")


def test_bytes_plan_meter_adds_up() -> None:
    """The meters of a plan's messages add up."""
    (made,) = plan.plan_model(preset("demo"), [("a", (64, 64))], 2)
    total = Meter()
    total.add(made.message(0))
    total.add(made.message(1))
    assert total == made.over(range(2)) and total.messages == 2
    assert made.message(0).bytes_sent == header.HEADER.size + 1 + 2 + 32 + (7 + 8 + 16 + 4)
    assert vectors.num_bytes("int8", 4096) == 4098
