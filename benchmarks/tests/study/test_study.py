"""The study: its threads against processes, what stops and starts again, keys, tables, numbers."""

import dataclasses
import json
import math
import multiprocessing
import shutil
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from model import load_model
from pretrain_parts import Arguments, schedule
from torch.optim.lr_scheduler import LambdaLR

from fsdp_demo import attach, base_optimizer
from fsdp_demo.compression import transform as transforms
from fsdp_demo.compression.blocks import EDGE, Layout
from fsdp_demo.config import parts as checks
from study import cells as study_cells
from study import chosen
from study import gain as study_gain
from study import jobs as study_jobs
from study import methods as study_methods
from study import precision as study_precision
from study import results as study_results
from study import rounds as study_rounds
from study import run as study_run
from study import show as study_show
from study import stats as study_stats
from study import study as script
from study import texts as study_texts
from study import transforms as study_transforms
from study.cells import Cell, Run, Setting
from tests.oracles.dct import basis

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "benchmarks" / "study" / "study.py"

SHORT = Setting("tiny", steps=5, batch=2, length=32, warmup=2, held_out=4, precision="fp32")
CELLS = [
    Cell("full", "full", {"value_dtype": "bf16"}),
    Cell("sparse", "sparse_loco", {"period": 2, "topk": 32}, lr=4e-3),
    Cell("demo", "demo"),
]


def texts(*_):
    rows = np.random.default_rng(0).integers(0, 256, (40, 32)).astype(np.int32)
    return study_texts.Texts(rows[4:], rows[:4])


@pytest.fixture(autouse=True)
def own_transforms(monkeypatch):
    """What the study registers ends with its test."""
    monkeypatch.setattr(transforms, "MATRICES", dict(transforms.MATRICES))
    monkeypatch.setattr(transforms, "Transform", transforms.Transform)
    monkeypatch.setattr(checks, "TRANSFORMS", checks.TRANSFORMS)
    yield
    transforms._matrix.cache_clear()


# -- replicas as threads --------------------------------------------------------------------------


def as_processes(rank, cell):
    """The same run in the plainest form: replica `rank.island`, eagerly, attached by ISLAND_*."""
    torch.set_num_threads(1)
    run = Run(cell, SHORT, 3)
    torch.manual_seed(run.seed)
    model = load_model(SHORT.model, 258)
    optimizer = base_optimizer(cell.config(), model.named_parameters(), cell.lr)
    facts = Arguments(steps=SHORT.steps, warmup_steps=SHORT.warmup)
    rates = LambdaLR(optimizer, lambda t: schedule(t, facts))
    exchange = attach(optimizer, cell.config(), model=model)
    rows, losses = study_run.batches(texts().train[rank.island :: 4], run, rank.island), []
    for _ in range(SHORT.steps):
        ids = next(rows)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        rates.step()
        losses.append(loss.item())
    sent = exchange.metrics()["bytes_sent"]
    exchange.finish()
    with torch.no_grad():
        held_out = torch.from_numpy(texts().held_out.astype(np.int64))
        end = [model(input_ids=ids, labels=ids).loss.item() for ids in held_out.split(2)]
    return losses, sent, sum(end) / 2


def as_threads(rank, cell):
    study_run.load_texts = texts
    return study_run.train_run(Run(cell, SHORT, 3), compiled=False)


@pytest.mark.parametrize("cell", CELLS, ids=lambda c: c.name)
def test_study_threads_equal_processes(run_ranks, cell):
    """Replicas as threads equal replicas as processes."""
    (found,) = run_ranks(as_threads, 1, 1, args=(cell,))
    others = run_ranks(as_processes, 4, 1, args=(cell,))
    losses = np.mean([losses for losses, _, _ in others], axis=0)
    np.testing.assert_allclose(
        found["curve"]["loss"], losses, rtol=2e-4
    )  # signs of sums that nearly cancel
    assert found["bytes_sent"] == others[0][1] and found["equal_at_end"] is True
    assert found["loss"]["finished"] == pytest.approx(others[0][2], rel=2e-4)
    assert found["curve"]["tokens"] == [64, 128, 192, 256, 320]
    assert found["curve"]["bytes"][-1] == found["bytes_sent"] and found["drift"] < 1e-2


def test_study_mixed_precision_trains_the_same_model(run_ranks):
    """bf16 products, and attention written out, train the same model: near fp32, and not equal to
    it.
    """

    def losses():
        study_run.load_texts = texts
        runs = [Run(CELLS[0], dataclasses.replace(SHORT, precision=p), 3) for p in ("fp32", "bf16")]
        return [study_run.train_run(run, compiled=False)["curve"]["loss"] for run in runs]

    ((fp32, bf16),) = run_ranks(losses, 1, 1)
    np.testing.assert_allclose(bf16, fp32, rtol=2e-3)
    assert bf16 != fp32


def test_study_late_method_and_slow_island(run_ranks):
    """A method may be attached at half of a run, and an island may be slow."""
    late = dataclasses.replace(CELLS[1], attach_at=2, lr=CELLS[0].lr)
    slow = dataclasses.replace(CELLS[0], changes={"reducer.weight": "tokens"}, slow=True)
    found = run_ranks(lambda: [as_threads(None, cell) for cell in (CELLS[0], late, slow)], 1, 1)
    full, after, halved = found[0]
    assert after["curve"]["loss"][:2] == full["curve"]["loss"][:2]  # `full` until then
    assert full["curve"]["bytes"][1] == after["curve"]["bytes"][1]
    assert after["bytes_sent"] < full["bytes_sent"]
    assert halved["curve"]["tokens"][-1] == 280  # (32 + 3 x 64) / 4 rows of five steps
    assert all(math.isfinite(r["loss"]["finished"]) for r in (after, halved))


def test_study_cosines_are_those_before_the_exchange(run_ranks):
    """The cosines of deltas are those before the exchange. Deltas by hand; then a run: after an
    exchange all deltas would be equal.
    """
    deltas = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    together = types.SimpleNamespace(vectors=torch.zeros(3, 2), meet=lambda: None)
    config = CELLS[1].config()
    rounds = study_rounds.Rounds(0, together, torch.nn.Linear(2, 1, bias=False), config)
    rounds._note(deltas)
    rounds._note(torch.stack([deltas[0]] * 3))
    root = math.sqrt(0.5)
    assert rounds.islands == pytest.approx([2 * root / 3, 1.0])  # 0, root and root; then equal
    assert rounds.successive == pytest.approx([root])

    ((found,),) = run_ranks(lambda: [as_threads(None, CELLS[1])["rounds"]], 1, 1)
    assert len(found["islands"]) == 2 and len(found["successive"]) == 1
    assert all(abs(v) < 0.9 for v in found["islands"]), found  # the texts are noise


def test_study_gain_cap_sets_the_momentum():
    """A cap on the gain sets the momentum. Where it binds, the steady step of a round is the cap;
    it needs a round before.
    """
    for lr, gain, rho in ((0.7, 1.3, 0.5), (0.7, 2.0, 0.9), (0.7, 1.0, 0.0)):
        mu = study_gain.allowed(0.99, lr, gain, rho)
        assert lr * (1 + mu / (1 - mu * rho)) == pytest.approx(gain)
    assert study_gain.allowed(0.5, 0.7, 2.0, 0.1) == 0.5
    assert study_gain.allowed(0.9, 0.7, 0.5, 0.5) == 0.0  # the rate alone is above the cap
    assert study_gain.allowed(0.9, 0.7, 2.0, -0.9) == 0.9
    applier = Cell("capped", "diloco", {"period": 1}, gain=1.3).config().channels[0].applier
    assert applier.momentum_in(1) == 0.0
    applier.measured.extend([1.0, 0.5])
    assert applier.momentum_in(2) == study_gain.allowed(0.9, 0.7, 1.3, 0.9)


def test_study_gain_capped_run(run_ranks):
    """A cap at the outer rate leaves no momentum, and a higher one leaves some."""
    plain = {"period": 1, "momentum_warmup": 0}
    none = Cell("none", "diloco", {**plain, "momentum": 0.0})
    low, high = (Cell(f"{gain}", "diloco", plain, gain=gain) for gain in (0.7, 2.0))

    def ends(rank):
        return [as_threads(rank, cell) for cell in (none, low, high)]

    ((without, at_rate, above),) = run_ranks(ends, 1, 1)
    assert at_rate["loss"] == without["loss"] and above["loss"] != without["loss"]
    assert above["equal_at_end"] is True
    assert Run(low, SHORT, 0).key("v") != Run(high, SHORT, 0).key("v")


@pytest.mark.parametrize("name", study_transforms.TRIALS)
def test_study_transform_works_block_by_block(name):
    """A trial transforms block by block. Written out for every block of 64 rows and columns, the
    last one of 2 rows; both directions, and into an accumulator, as the library calls it.
    """

    def matrix(n):
        if name == "rotation":
            return study_transforms.turned(n)
        if name == "square":
            return torch.eye(n)
        tile = int(name[3:]) if name[3:].isdigit() else n
        parts = [basis(min(tile, n - at)) for at in range(0, n, tile)]
        return torch.block_diag(*parts)

    cell = Cell(name, "demo", {"momentum.no_transform": [], "codec.transform": name})
    codec = cell.config().channels[0].codec
    layout = Layout([(642, 128)], ["transform"])
    x = torch.randn(642, 128)
    expected = torch.empty(642, 128)
    for i in range(0, 642, EDGE):
        for j in range(0, 128, EDGE):
            block = x[i : i + EDGE, j : j + EDGE].double()
            left = torch.eye(len(block)) if name == "dct_right" else matrix(len(block))
            right = torch.eye(EDGE) if name == "dct_left" else matrix(EDGE)
            expected[i : i + EDGE, j : j + EDGE] = left.double() @ block @ right.double().T

    def unpacked(work):
        out = torch.empty(642, 128)
        layout.unpack(work, [out])
        return out

    work = layout.new("cpu")
    layout.pack([x], work)
    start = work.clone()
    transforms.transform(codec, layout, work)
    torch.testing.assert_close(unpacked(work), expected, atol=1e-5, rtol=1e-5)

    added = torch.ones_like(work)
    with transforms.make_transform(codec, "cpu") as made:
        for part in (part for w in layout.windows("cpu") for part in w.inner):
            made.add(part.group, part.of(start.clone()), part.of(added), 0.5, 2.0)
    torch.testing.assert_close(unpacked(added), 0.5 + 2.0 * expected, atol=2e-5, rtol=1e-5)

    transforms.transform(codec, layout, work, inverse=True)
    torch.testing.assert_close(unpacked(work), x, atol=1e-5, rtol=1e-5)


def test_study_failed_replica_ends_the_run(run_ranks):
    """A replica that fails ends the run."""

    def fails():
        good = study_run.Loop.step

        def step(loop):
            if loop.i == 1 and loop.seen:
                raise ValueError("a broken replica")
            return good(loop)

        study_run.Loop.step = step
        with pytest.raises(study_run.Failed, match="replica 1:[^$]*a broken replica"):
            as_threads(None, CELLS[0])
        return True

    assert run_ranks(fails, 1, 1) == [True]


# -- keys and tables ------------------------------------------------------------------------------


def test_study_keys_follow_the_settings(monkeypatch):
    """Keys of runs follow their settings and not their names."""
    monkeypatch.setattr(study_cells, "digest", lambda data, *_: f"the texts of {data}")
    cell, setting = Cell("a", "diloco", {"period": 20}), Setting()
    key = Run(cell, setting, 0).key("v")
    same = dataclasses.replace(cell, name="b", changes={"period": 20, "momentum": 0.9})
    assert Run(same, setting, 0).key("v") == key
    others = [Run(cell, setting, 1).key("v"), Run(cell, setting, 0).key("w")]
    others += [
        Run(cell, dataclasses.replace(setting, **change), 0).key("v")
        for change in ({"steps": 12}, {"data": "other"}, {"model": "study"})
    ]
    others += [
        Run(dataclasses.replace(cell, **change), setting, 0).key("v")
        for change in (
            {"lr": 1e-3},
            {"replicas": 2},
            {"preset": "local_sgd"},
            {"changes": {"period": 20, "momentum": 0.5}},
            {"attach_at": 240},
            {"slow": True},
        )
    ]
    assert len({key, *others}) == 12


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        *((name, True) for name in ("data.py", "run.py", "gain.py", "collectives.py")),
        *((name, True) for name in ("_kernels.c", "fragments.py", "muon.py", "formats.py")),
        *((name, False) for name in ("show.py", "presets.py", "driver.py")),
    ],
)
def test_study_version_covers_what_calculates(monkeypatch, name, counts):
    """The version covers the files that calculate."""
    read = Path.read_bytes
    version = study_cells.code_version.__wrapped__()

    def changed(path):
        return read(path) + b"#" * (path.name == name)

    monkeypatch.setattr(Path, "read_bytes", changed)
    assert (study_cells.code_version.__wrapped__() != version) == counts


@pytest.mark.parametrize("name", chosen.TABLES)
def test_study_cells_are_taken_by_the_library(name):
    """Each cell of a table is taken by the library, under one name."""
    table, keys = chosen.TABLES[name], {}
    cells = [cell for part in table.groups.values() for cell in part]
    cells += [cell for m in table.methods for cell in (m.published, *m.grid)]
    for cell in cells:
        key = Run(cell, table.at(cell, {}), 0).key("")
        assert keys.setdefault(cell.name, key) == key and "," not in cell.name
    # the page on Muon shows each trial of its grids, which are smaller
    least = 6 if name == "muon_short" else study_methods.TRIALS
    assert all(len(m.grid) >= least for m in table.methods)
    assert table.seeds <= min(study_methods.TUNING_SEEDS)


@pytest.mark.parametrize("model", ["study", "study-small", "study-large", "small", "tiny"])
def test_study_parameters_by_the_file(model):
    """The count of parameters by the file is that of the model."""
    with torch.device("meta"):
        built = load_model(model, 258)
    assert study_cells.parameters(model) == sum(p.numel() for p in built.parameters())


# -- numbers --------------------------------------------------------------------------------------


def test_study_interval_of_a_mean():
    """The interval of a mean is that worked out by hand."""
    # by hand: mean 2, deviation 1, 2.920 of Student's t with two degrees of freedom
    assert study_stats.interval([1.0, 2.0, 3.0]) == pytest.approx((2.0, 2.920 / math.sqrt(3)))
    mean, half = study_stats.interval([5.0])
    assert mean == 5.0 and math.isnan(half)
    with pytest.raises(ValueError, match="1 to 31 seeds"):
        study_stats.interval([0.0] * 32)


def result(loss, sent=1000):
    run = Run(CELLS[0], Setting(), 0)
    return {
        "loss": {"finished": loss},
        "bytes_sent": sent,
        "parameters": 500,
        "setting": dataclasses.asdict(run.setting),
        "cell": dataclasses.asdict(run.cell),
        "seconds": 60.0,
        "curve": {"tokens": [1.0, 2.0], "loss": [loss, loss], "bytes": [1, 2], "seconds": [1, 2]},
    }


def test_study_differences_are_paired_by_seed():
    """Differences are paired by seed."""
    reference = {0: result(1.0), 1: result(3.0), 2: result(2.0)}
    found = {0: result(1.1), 1: result(3.1), 2: result(2.1)}
    row = study_stats.summarise("a", "", found, reference)
    assert row.difference == pytest.approx(0.1) and row.half == pytest.approx(0.0, abs=1e-9)
    assert row.ratio == 2 * 3 / 4 * 2 * 500 * 480 / 1000
    row = study_stats.summarise("b", "", {**found, 2: {"error": "lost"}}, reference)
    assert row.failed == 1 and row.cells()[2] == "failed"
    assert math.isnan(study_stats.summarise("c", "", reference, reference).difference)


def test_study_pareto_line():
    """The line holds the rows that no other one beats."""
    rows = [
        study_stats.summarise(name, "", {0: result(loss, sent)}, {})
        for name, loss, sent in (("a", 1.0, 9), ("b", 1.2, 5), ("c", 1.3, 6), ("d", 1.1, 0))
    ]
    assert [row.name for row in study_stats.pareto(rows)] == ["b", "a"]


# -- a table, with training played ----------------------------------------------------------------


@pytest.fixture
def played(monkeypatch):
    """Runs that end at once; a rate of 4e-3 is the best of every grid, and desloc fails."""
    trained = []

    def train_all(runs, jobs, done, compiled, states=None):
        for run in runs:
            trained.append(run)
            failed = run.cell.preset == "desloc"
            loss = 1.0 + abs(run.cell.lr - 4e-3) + run.seed / 1000
            done(run, {"error": "Traceback\nLost: peers"} if failed else result(loss))

    monkeypatch.setattr(script, "train_all", train_all)
    monkeypatch.setattr(script, "code_version", lambda: "played")
    return trained


def command(monkeypatch, output, *words):
    monkeypatch.setattr(sys, "argv", ["study.py", "--output", str(output), *words])
    return script.main()


def test_study_table_is_tuned_and_resumed(tmp_path, monkeypatch, played):
    """A table is tuned on other seeds and goes on where it stood."""
    words = ("--table", "main", "--seeds", "2", "--only", "desloc,local_sgd", "--no-pictures")
    assert command(monkeypatch, tmp_path, *words) == 1  # desloc failed
    grids = {m.published.preset: len(m.grid) for m in study_methods.METHODS}
    tuning = sum(grids[n] for n in ("full", "desloc", "local_sgd"))
    tuning *= len(study_methods.TUNING_SEEDS)
    whole = json.loads((tmp_path / "main.json").read_text())
    names = [row["name"] for row in whole["rows"]]
    assert names[:3] == ["full tuned", "local_sgd tuned", "desloc tuned"]
    rows = dict(zip(names, whole["rows"], strict=True))
    assert rows["local_sgd tuned"]["difference"] == 0.0 and rows["local_sgd"]["difference"] > 0
    assert rows["desloc tuned"]["failed"] == 2 and rows["desloc tuned"]["loss"] is None
    assert "desloc" not in rows  # what was published is the first of its grid: one row
    assert len(whole["tuning"]) == tuning
    assert whole["tuned"]["local_sgd tuned"] == "lr=0.004"
    # what was published may be a cell of the grid, but never on a reported seed
    assert {run.seed for run in played[:tuning]} == set(study_methods.TUNING_SEEDS)

    count = len(played)
    stored = sorted((tmp_path / "runs").iterdir())
    assert len(stored) == count and not list(tmp_path.rglob("*.part"))
    next(p for p in stored if "error" not in json.loads(p.read_text())).unlink()
    command(monkeypatch, tmp_path, *words)
    assert len(played) == count + 1  # as after an interrupt; failures are results
    command(monkeypatch, tmp_path, *words, "--retry")
    assert {run.cell.preset for run in played[count + 1 :]} == {"desloc"}


def test_study_list_counts_missing_runs(tmp_path, monkeypatch, capsys, played):
    """`--list` counts the missing runs."""
    words = ("--table", "robust", "--only", "R=2")
    command(monkeypatch, tmp_path, *words, "--list")
    assert not played and "table robust: 21 runs are missing" in capsys.readouterr().out
    command(monkeypatch, tmp_path, *words, "--seeds", "1")
    assert len(played) == 7
    command(monkeypatch, tmp_path, *words, "--list")
    assert "table robust: 14 runs are missing" in capsys.readouterr().out


def test_study_table_without_the_reference(tmp_path, monkeypatch, played):
    """Without the grid of the reference no row is compared."""
    words = ("--table", "main", "--seeds", "1", "--only", "local_sgd", "--no-pictures")
    command(monkeypatch, tmp_path, *words)
    one = Run(study_methods.METHODS[0].grid[0], Setting(), study_methods.TUNING_SEEDS[0])
    (tmp_path / "runs" / f"{one.key('played')}.json").unlink()
    kept = study_results.Results(tmp_path / "runs", "played", tmp_path / "none")
    rows = chosen.Study("main", range(1), kept, {}, "local_sgd").rows()
    assert [row.name for row in rows] == ["full", "local_sgd"]
    assert math.isnan(rows[0].difference) and rows[1].difference == 0.0


def test_study_table_is_published_whole(tmp_path, monkeypatch, played):
    """A table is published whole or not at all."""
    monkeypatch.setattr(study_show, "FIGURES", tmp_path)
    (tmp_path / "study-precision.json").write_text('{"rows": [{"seeds": 15}]}')
    words = ("--table", "precision", "--no-pictures")
    assert command(monkeypatch, tmp_path, *words) == 0
    monkeypatch.setattr(study_results.Results, "keep", lambda self, runs: 0)
    with pytest.raises(SystemExit, match="has 15 results of rows, and only 14 are there now"):
        command(monkeypatch, tmp_path, *words, "--keep")
    (tmp_path / "study-precision.json").write_text('{"rows": [{"seeds": 14}]}')
    assert command(monkeypatch, tmp_path, *words, "--keep") == 0
    assert len(json.loads((tmp_path / "study-precision.json").read_text())["rows"]) == 14


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--seeds", "0"], "--seeds 0: must be 1 or more"),
        (["--seeds", "40"], "known for up to 31 seeds"),
        (["--verify", "0"], "--verify 0: must be 1 or more"),
        (["--keep", "--only", "demo"], "publishes whole tables"),
        (["--keep", "--table", "text"], "the table text has another text"),
    ],
)
def test_study_odd_words_are_refused(tmp_path, monkeypatch, capsys, words, says):
    """Odd words are refused."""
    with pytest.raises(SystemExit):
        command(monkeypatch, tmp_path, *words)
    assert says in capsys.readouterr().err


def test_study_dead_idle_process_is_replaced(monkeypatch):
    """An idle process that died is replaced."""
    made, results = [], []

    class Pipe:
        def __init__(self, dead):
            self.dead = dead

        def send(self, run):
            if self.dead:
                raise BrokenPipeError

        def close(self):
            pass

    def start(compiled):
        process = types.SimpleNamespace(kill=lambda: None, join=lambda timeout=None: None)
        worker = study_jobs.Worker(process, Pipe(dead=not made))
        worker.result = lambda: {"loss": 1}
        made.append(worker)
        return worker

    monkeypatch.setattr(study_jobs.Worker, "start", start)
    monkeypatch.setattr(study_jobs, "wait", lambda pipes: pipes)
    study_jobs.train_all(["a", "b"], 1, lambda run, result: results.append((run, result)))
    assert results == [("a", {"loss": 1}), ("b", {"loss": 1})] and len(made) == 2


def test_study_kept_results_count_for_equal_code(tmp_path, monkeypatch, played):
    """Kept results count for code that ends alike."""
    kept, alike = tmp_path / "kept.jsonl", tmp_path / "codes.json"
    runs = [Run(CELLS[0], Setting(), seed) for seed in (1, 0)]
    first = study_results.Results(tmp_path / "a", "one", kept, alike)
    first.put(runs[0], result(1.23456789))
    first.put(runs[1], {"error": "lost"})
    assert first.keep(runs) == 1 and first.keep(runs) == 0  # a failure stays out
    second = study_results.Results(tmp_path / "b", "two", kept, alike)
    assert second.get(runs[0]) is None
    alike.write_text(json.dumps([{"codes": ["one", "two"], "why": "a comment"}]))
    second = study_results.Results(tmp_path / "b", "two", kept, alike)
    found = second.get(runs[0])
    assert found["loss"] == {"finished": 1.23457} and found["code"] == "one"
    assert second.get(runs[1]) is None
    second.put(runs[0], result(2.0))  # what this code has trained comes first
    assert second.get(runs[0])["loss"] == {"finished": 2.0}


def test_study_verify_names_differences(tmp_path, monkeypatch, capsys, played):
    """`--verify` names the runs that end elsewhere."""
    words = ("--table", "front", "--seeds", "1", "--only", "local_sgd", "--no-pictures")
    assert command(monkeypatch, tmp_path, *words) == 0
    monkeypatch.setattr(script.alike, "newest", lambda codes: "played")
    shutil.copytree(tmp_path / "runs", tmp_path / "kept alone")  # in the place of what is kept
    assert command(monkeypatch, tmp_path, *words, "--verify", "2") == 0
    stored = {p: json.loads(p.read_text()) for p in (tmp_path / "kept alone").iterdir()}
    path = next(p for p, known in stored.items() if known["loss"]["finished"] == 1.002)
    path.write_text(path.read_text().replace('"finished": 1.002', '"finished": 1.012'))
    assert command(monkeypatch, tmp_path, *words, "--verify", "3") == 1
    assert " seed 0: 1.01200 by played, 1.00200 now; bytes equal" in capsys.readouterr().out


def test_study_pictures_of_a_table(tmp_path, monkeypatch, played):
    """A table has its three pictures."""
    pytest.importorskip("matplotlib")
    command(monkeypatch, tmp_path, "--table", "front", "--seeds", "2", "--only", "local_sgd,demo")
    for name in ("bytes", "intervals", "tokens"):
        assert "<svg" in (tmp_path / f"front-{name}.svg").read_text()


def test_study_killed_process_is_a_result():
    """A process that was killed is a result."""
    here, there = multiprocessing.Pipe()
    there.close()
    gone = types.SimpleNamespace(join=lambda: None, exitcode=-9)
    assert study_jobs.Worker(gone, here).result() == {"error": "its process ended with status -9"}


def test_study_wrong_words_are_told(tmp_path, monkeypatch, capsys):
    """Wrong words are refused with what is allowed."""
    with pytest.raises(SystemExit):
        command(monkeypatch, tmp_path, "--table", "mian")
    assert "--table mian: expected main, front" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="--only dmo: no such cell in table front"):
        command(monkeypatch, tmp_path, "--table", "front", "--only", "dmo")
    with pytest.raises(SystemExit, match="--data ./none.txt: no such file"):
        command(monkeypatch, tmp_path, "--table", "front", "--data", "./none.txt")


# -- the real command -----------------------------------------------------------------------------


def call(output, *words):
    words = [
        sys.executable,
        str(SCRIPT),
        "--steps",
        "4",
        "--eager",
        "--output",
        str(output),
        *words,
    ]
    return subprocess.run(words, capture_output=True, text=True, timeout=300, cwd=ROOT)


@pytest.mark.slow
def test_study_two_processes_train_a_table(tmp_path):
    """Two processes train a table."""
    words = ("--table", "front", "--only", "local_sgd H=5", "--seeds", "1", "--no-pictures")
    done = call(tmp_path, *words, "--jobs", "2")
    assert done.returncode == 0, done.stderr
    table = json.loads((tmp_path / "front.json").read_text())
    full, local = table["rows"]
    # a bf16 ring all-reduce, four steps
    assert full["ratio"] == pytest.approx(1, rel=0.01) and local["name"] == "local_sgd H=5"
    assert all(2 < row["loss"] < 5.7 for row in table["rows"])
    assert "done" in done.stdout and "front 2/2" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_study_compiled_pass_is_the_eager_one(run_ranks):
    """The compiled pass has the losses of the eager one."""

    def both():
        study_run.load_texts = texts
        run = Run(CELLS[1], SHORT, 3)
        return [study_run.train_run(run, compiled) for compiled in (False, True)]

    ((eager, compiled),) = run_ranks(both, 1, 1, timeout=500)
    np.testing.assert_allclose(eager["curve"]["loss"], compiled["curve"]["loss"], rtol=2e-5)
    assert eager["bytes_sent"] == compiled["bytes_sent"]


@pytest.mark.parametrize("shape", [(48, 130), (130, 48), (64, 64)])
def test_study_muon_iteration_is_torchs(shape):
    """Muon's iteration is torch's but for the order of sums."""
    gradient = 1e-3 * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    given = (gradient, (3.4445, -4.775, 2.0315), 5, 1e-7)
    torchs = torch.optim._muon._zeropower_via_newtonschulz(*given)
    ours = study_precision.newton_schulz(*given)
    assert ours.dtype == torchs.dtype == torch.bfloat16 and ours.shape == torchs.shape
    off = (ours.float() - torchs.float()).norm() / torchs.float().norm()
    assert off < 0.01  # a rounding to bf16 is 0.4 %
    assert torch.linalg.svdvals(ours.float())[0] < 1.3


@pytest.mark.parametrize("name", ["study-small", "small"])
def test_study_bf16_both_ways_agree(name):
    """Both ways of bf16 give one loss and one gradient: these are nearer to each other than to
    those of fp32. Between products autocast rounds more, unless it is compiled.
    """
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, 64)))
    found = {}
    for how in ("autocast", "rounded", "fp32"):
        torch.manual_seed(0)
        model = load_model(name, 258)
        if how != "fp32":
            study_precision.prepare(model, how)
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        found[how] = (loss.item(), gradient)
    assert found["rounded"][0] == pytest.approx(found["autocast"][0], abs=1e-3)
    apart = {
        how: float((found[how][1] - found["autocast"][1]).norm() / found["autocast"][1].norm())
        for how in ("rounded", "fp32")
    }
    assert apart["rounded"] < 0.9 * apart["fp32"] < 0.05, apart


def test_study_nearest_rounds_as_a_cast_to_bf16():
    """`nearest` rounds as a cast to bf16."""
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    x[:3] = torch.tensor([0.0, -0.0, 1.00390625])  # the last lies between two values of bf16
    assert torch.equal(study_precision.nearest(x), x.bfloat16().float())
