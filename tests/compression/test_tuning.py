"""Forms of compression on a CPU: all give the same bits, and the fastest is found, remembered, or
said by the user. No times.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fsdp_demo
from fsdp_demo import ExchangeConfig, preset
from fsdp_demo.channels.channel import ChannelPayload, ChannelRunner, Incoming, Received
from fsdp_demo.channels.placement import Placement
from fsdp_demo.compression import machine, native, topk, tuning
from fsdp_demo.compression.blocks import Layout
from fsdp_demo.compression.machine import LIBRARIES, PARTS, SELECTIONS, Form
from fsdp_demo.compression.precision import onednn
from fsdp_demo.compression.transform import Transform
from fsdp_demo.compression.windows import ContiguousViews
from fsdp_demo.hosts.torch_params import TorchHost

SHAPES = [(192, 1088), (704, 128), (187, 250), (9000,), (70, 65), (5, 7), (64, 640)]
FORMS = [
    Form(part, library, strided, selection=selection)
    for part, library, strided, selection in product(PARTS, LIBRARIES, (True, False), SELECTIONS)
    if library == "mkl" or onednn()
]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No form is chosen yet, and the user's cache is an empty folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("ISLAND_TUNING", raising=False)
    tuning.forget()
    yield
    tuning.forget()


@pytest.fixture
def compiled() -> None:
    """What is in C is there, or it cannot be had."""
    assert topk.kernel() is not None or not native.compiler()


# ---- equal bits --------------------------------------------------------------------------------


class Replica:
    """One channel on plain parameters, all in one form."""

    def __init__(self, form: Form, config: ExchangeConfig, size: int):
        self.form = form
        machine.use(form)
        self.parameters = [nn.Parameter(torch.zeros(s)) for s in SHAPES]
        named = [(f"layers.0.{i}.weight", p) for i, p in enumerate(self.parameters)]
        host = TorchHost([fsdp_demo.base_optimizer(config, named)])
        self.channel = ChannelRunner(config.channels[0], Placement(host, islands=size))
        self.channel.start()

    @torch.no_grad()
    def send(self, seed: int) -> ChannelPayload:
        machine.use(self.form)
        for i, p in enumerate(self.parameters):
            p.grad = random(*p.shape, seed=100 * seed + i)
        self.parameters[0].grad = self.parameters[0].grad.t().contiguous().t()
        if seed % 2:
            self.parameters[1].grad = None
        out = self.channel.encode(0, self.channel.accumulate())
        self.channel.subtract(out)
        return out

    @torch.no_grad()
    def receive(self, sent: ChannelPayload, bodies: list[Tensor]) -> list[Tensor]:
        machine.use(self.form)
        received = Received(bodies, [], [1.0] * len(bodies))
        self.channel.apply(Incoming(sent, received, [True] * len(SHAPES)))
        return [p.grad.clone() for p in self.parameters]


@pytest.mark.parametrize(
    "transform, topk, sign", [(True, 8, True), (True, 40, False), (False, 8, False)]
)
def test_every_form_gives_the_same_bits(
    compiled: None, transform: bool, topk: int, sign: bool
) -> None:
    """Two exchanges of two replicas in each form: what is sent, left and received. Where a library
    of products sums in another order on this processor, it is left out at `attach`.
    """
    config = preset("demo", topk=topk, transform=transform, **{"applier.sign": sign})
    found: dict[str, list[list[Tensor]]] = {}
    for form in FORMS:
        (one, two), out = (Replica(form, config, 2) for _ in range(2)), []
        for seed in (2, 3):
            mine, other = one.send(seed), two.send(seed + 10)
            assert one.channel.accumulator is not None
            out += [mine.body, other.body, *one.receive(mine, [mine.body, other.body])]
            out.append(one.channel.accumulator.clone())
        found.setdefault(form.library, []).append(out)
    first = found["mkl"][0]
    for library, forms in found.items():
        usual, tried = (tuning._Trial(Form(library=x), "fp32") for x in ("mkl", library))
        alike = first if tried.equal(usual.bits()) else forms[0]
        for other in forms:
            assert all(map(torch.equal, other, alike))


def test_islands_that_chose_apart_decode_alike(compiled: None) -> None:
    """Under bf16, too, where what they select may differ: each makes the same gradients of what
    all have sent."""
    config = preset("demo", topk=8, **{"codec.transform_precision": "bf16"})
    forms = [replace(f, products=p) for f, p in zip(FORMS, ("fp32", "bf16", "fp32"), strict=False)]
    islands = [Replica(f, config, len(forms)) for f in forms]
    sent = [island.send(2 * i) for i, island in enumerate(islands)]
    bodies = [s.body for s in sent]
    first, *others = [i.receive(s, bodies) for i, s in zip(islands, sent, strict=True)]
    for other in others:
        assert all(map(torch.equal, other, first))


@pytest.mark.parametrize("beta, gain", [(0.999, 1.0), (0.5, 2.0)])
def test_where_blocks_lie_makes_no_difference(beta: float, gain: float) -> None:
    machine.use(Form(16, "mkl"))
    layout = Layout(SHAPES, ["transform"] * 5 + ["dense", "plain"])
    tensors = [random(*s, seed=i) for i, s in enumerate(SHAPES)]
    before, read = random(layout.numel, seed=9), 0
    found, packed = before.clone(), before.clone()
    with ContiguousViews(tensors) as memory, Transform("dct", "cpu") as made:
        for part in (part for w in layout.windows("cpu") for part in w.inner):
            x = part.pack(memory, made.room(part))
            made.add(part.group, x.clone(), part.of(packed), beta, gain)
            if made.reads(part, memory):
                read += 1
                made.add_from(part, memory, part.of(found), beta, gain)
            else:
                made.add(part.group, x, part.of(found), beta, gain)
    filled = [part for w in layout.windows("cpu") for part in w.inner if part.group is not None]
    assert 3 < read < len(filled)
    for part in filled:  # the padding of edge blocks is nobody's
        g = part.group
        cut = [t.view(-1, 64, 64)[:, : g.r, : g.s] for t in (part.of(found), part.of(packed))]
        assert torch.equal(*cut)


# ---- the choice --------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Measuring takes no time, and says that it was done."""
    calls: list[bool] = []

    def measure(low: bool) -> tuple[Form, dict[Form, float]]:
        calls.append(low)
        found = Form(32, "mkl", False, "fp32")
        return found, {machine.default(): 3.0, found: 2.0}

    monkeypatch.setattr(tuning, "measure", measure)
    return calls


def test_it_is_measured_once_and_remembered(
    quick: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fsdp_demo")
    assert tuning.tune() == tuning.tune() == machine.form() == Form(32, "mkl", False, "fp32")
    assert quick == [False] and len(caplog.messages) == 1
    assert "part=32,library=mkl,strided=False" in caplog.messages[0]
    tuning.forget()  # as another process
    assert tuning.tune() == Form(32, "mkl", False, "fp32") and quick == [False]
    assert len(caplog.messages) == 2 and str(tuning.cache_file(False)) in caplog.messages[1]
    tuning.tune("bf16")  # whether bf16 pays is another question
    assert quick == [False, True]
    assert tuning.tune("fp32") == tuning.tune("bf16") and quick == [False, True]


@pytest.mark.parametrize(
    "text", ["", "{", "{}", '{"form": {"part": 5}}', '{"form": {}, "of": {"torch": "1.0"}}']
)
def test_a_file_that_is_not_ours_is_written_anew(quick: list[bool], text: str) -> None:
    file = tuning.cache_file(False)
    file.parent.mkdir(parents=True)
    file.write_text(text)
    tuning.tune()
    assert quick == [False] and json.loads(file.read_text())["form"]["part"] == 32
    assert [f.name for f in file.parent.iterdir()] == [file.name]


def test_a_cache_that_cannot_be_written_is_ignored(
    quick: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert tuning.tune().part == 32 and quick == [False]


def test_many_ranks_write_at_once() -> None:
    file, forms = tuning.cache_file(False), [Form(PARTS[i % 3]) for i in range(60)]
    tuning._write(file, forms[0], False)
    with ThreadPoolExecutor(8) as pool:
        writes = [pool.submit(tuning._write, file, f, False) for f in forms]
        while not all(w.done() for w in writes):
            assert tuning._read(file, False) in forms
    assert [f.name for f in file.parent.iterdir()] == [file.name]


def test_a_form_with_other_bits_is_left_out(
    compiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However fast it is."""
    monkeypatch.setattr(tuning, "SHAPE", (64, 128))
    monkeypatch.setattr(
        tuning, "_timed", lambda trials: {t.form: 1.0 / (i + 1) for i, t in enumerate(trials)}
    )
    best, tried = tuning.measure(low=False)
    assert best != machine.default() and machine.default() in tried
    monkeypatch.setattr(tuning._Trial, "equal", lambda trial, bits: False)
    best, tried = tuning.measure(low=False)
    assert best == machine.default() and list(tried) == [best]


def test_a_real_measurement(compiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "SHAPE", (128, 256))
    for low in (False, True):
        best, tried = tuning.measure(low)
        assert machine.default() in tried and all(ns > 0 for ns in tried.values())
        assert replace(best, products="bf16") in {replace(f, products="bf16") for f in tried}
        assert any(f.selection == "c" for f in tried) == (topk.kernel() is not None)
    assert machine.form() == machine.default()


def test_only_much_work_on_a_cpu_is_worth_it(quick: list[bool]) -> None:
    codec = preset("demo").channels[0].codec
    small, large = (Layout([(64 * n, 64)], ["transform"]) for n in (8, tuning.LEAST))
    assert tuning.pays(large, codec, torch.device("cpu"))
    assert not tuning.pays(small, codec, torch.device("cpu"))
    assert not tuning.pays(large, codec, torch.device("cuda"))
    assert not tuning.pays(large, preset("diloco").channels[0].codec, torch.device("cpu"))
    Replica(machine.default(), preset("demo"), 1)
    assert quick == []


# ---- what the user says ------------------------------------------------------------------------


def test_the_user_decides(quick: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISLAND_TUNING", "part=16, library=onednn, strided=False, products=bf16")
    assert machine.form() == tuning.tune() == Form(16, "onednn", False, "bf16")
    tuning.forget()
    monkeypatch.setenv("ISLAND_TUNING", "off")
    assert machine.form() == tuning.tune("bf16") == machine.default()
    assert quick == [] and not tuning.cache_file(False).exists()
    assert machine.wanted({"ISLAND_TUNING": "auto"}) is None


@pytest.mark.parametrize(
    "text, said",
    [
        ("fast", "allowed are auto, off"),
        ("part=12", "part=12: allowed are 16, 32, 64"),
        ("library=blas", "library=blas: allowed are mkl, onednn"),
        ("strided=maybe", "maybe"),
        ("selection=fortran", "selection=fortran: allowed are torch, c"),
        ("colour=red", "colour"),
    ],
)
def test_what_the_user_may_say(text: str, said: str) -> None:
    with pytest.raises(ValueError, match="ISLAND_TUNING=") as caught:
        machine.wanted({"ISLAND_TUNING": text})
    assert said in str(caught.value)


def test_bf16_is_decoded_by_the_processor_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by what was measured: islands on like machines decode alike."""
    found = {"amx_tile": False, "avx512_bf16": True}
    monkeypatch.setattr(machine, "_supports", found.__getitem__)
    for name, amx, fast in (
        ("Intel(R) Xeon(R) Processor", False, False),
        ("Intel(R) Xeon(R) Processor", True, True),
        ("AMD EPYC 9J14", False, True),
    ):
        found["amx_tile"] = amx
        monkeypatch.setattr(machine, "cpu_name", lambda name=name: name)
        machine.fast_bf16.cache_clear()
        assert machine.fast_bf16() == fast and ("AMX" in machine.kernels()) == amx
        assert machine.default().products == ("bf16" if fast else "fp32")
    monkeypatch.undo()
    machine.fast_bf16.cache_clear()
