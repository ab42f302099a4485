"""recipes/pretrain.py stopped and resumed: 2N steps are N steps, a stop, a resume and N steps, bit
for bit.
"""

import json
import logging
import os
import shutil
import signal
import sys
from pathlib import Path

import data
import datasets
import pretrain  # imported before the first fork
import pretrain_parts
import pytest
import report
import torch
import torch.distributed.checkpoint  # before the first fork: it takes a second
from safetensors.torch import load_file

import fsdp_demo
from fsdp_demo.exchange.runtime import StepRuntime
from fsdp_demo.hosts.base import local_part

from ..support.cases import named

RECIPES = Path(__file__).parents[2] / "recipes"

STEPS = 10
# What makes a preset act within ten steps, and where it is stopped: between exchanges, or with a
# payload under way.
RUNS = {
    "full": ([], 4),
    "local_sgd": (["period=4"], 6),
    "local_adam": (["period=4"], 6),
    "desloc": (["period=2"], 5),
    "diloco": (["period=4"], 6),
    "streaming_diloco": (["period=4", "delay=2", "layers=1"], 5),
    "demo": ([], 5),
    "random": ([], 5),
    "stride": ([], 5),
    "decoupled_momentum": (["period=4"], 6),
    "sparse_loco": (["period=4"], 6),
    "sign_loco": (["period=4", "momentum_warmup=1"], 6),
    "muloco": (["period=4"], 6),
}
FAMILIES = {  # presets that share their ranks
    # one of each: gradients, parameters and moments, deltas
    "sources": ["demo", "desloc", "streaming_diloco"],
    "gradients": ["full", "random", "stride"],
    "averages": ["local_sgd", "local_adam", "diloco"],
    "momenta": ["decoupled_momentum", "sparse_loco", "sign_loco", "muloco"],
}
LATE = {  # further ways to have payloads under way
    "demo delayed": ("demo", ["momentum.schedule.delay=2"], 5),
    "diloco queued": ("diloco", ["period=2", "delta.schedule.delay=3"], 5),
    "released, averaged": (
        "decoupled_momentum", ["period=2", "rule=released", "average_every=2"], 5
    ),
}  # fmt: skip


@pytest.fixture
def source(tmp_path):
    """A model and rows for it, and a cache of `datasets` that is the test's own."""
    config = json.loads((RECIPES / "models" / "tiny.json").read_text())
    config |= dict(hidden_size=64, intermediate_size=96)
    config |= dict(num_attention_heads=2, num_key_value_heads=1)
    # random states matter
    (tmp_path / "model.json").write_text(json.dumps(config | {"attention_dropout": 0.1}))
    rows = [[i % 256, i // 256, *((7 * i + 3 * j) % 250 for j in range(14))] for i in range(64)]
    datasets.Dataset.from_dict({"input_ids": rows}).to_parquet(str(tmp_path / "rows.parquet"))
    return tmp_path


def leaves(node, key=""):
    """A tree's tensors and values by path."""
    if isinstance(node, list | tuple):
        node = dict(enumerate(node))
    if isinstance(node, dict):
        found = [leaves(part, f"{key}/{name}") for name, part in node.items()]
        return {k: v for part in found for k, v in part.items()}
    return {
        key: node.detach().cpu().clone().numpy().tobytes() if torch.is_tensor(node) else repr(node)
    }


def replica(optimizers):
    """The local parts of parameters and optimizer states."""
    pairs = [(o, p) for o in optimizers for group in o.param_groups for p in group["params"]]
    states = [[v for v in o.state.get(p, {}).values() if torch.is_tensor(v)] for o, p in pairs]
    return {
        "parameters": [local_part(p) for _, p in pairs],
        "optimizer": [[local_part(v) for v in state] for state in states],
    }


def train(rank, source, output, options, at=None):
    """`pretrain.main()`; `at` (step -> action) is called after that step."""
    run, attach = {"rows": [], "losses": [], "end": {}, "steps": []}, fsdp_demo.attach

    def recorded(loader, position):
        for batch in data.forever(loader, position):
            run["rows"].append(rows_in(batch))
            yield batch

    def attached(optimizer, *args, **kwargs):
        exchange = attach(optimizer, *args, **kwargs)
        finish = exchange.finish

        def finished(*args, **kwargs):
            if run["end"]:  # the second call closes
                return finish(*args, **kwargs)
            run["end"] = leaves({**replica(exchange.optimizers), "exchange": exchange.state_dict()})
            finish(*args, **kwargs)

        exchange.finish = finished
        return exchange

    after = StepRuntime.after

    def stepped(runtime):
        if at and runtime.step in at:
            at[runtime.step](rank)
        after(runtime)
        run["steps"].append(runtime.step)

    def counted(self, loss):
        run["losses"].append(float(loss.detach()))
        return micro(self, loss)

    micro = report.Report.micro_batch
    common = "--sequence-length 16 --batch-size 2 --eval-every 4 --eval-batches 1 --log-every 2 "
    common += f"--steps {STEPS} --warmup-steps 3"
    files = ["--model", source / "model.json", "--data", source / "rows.parquet"]
    words = [*files, *common.split(), "--output", output, *options]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(source / "cache"))
        patch.setattr(pretrain_parts, "forever", recorded)
        patch.setattr(fsdp_demo, "attach", attached)
        patch.setattr(StepRuntime, "after", stepped)
        patch.setattr(report.Report, "draw", lambda *_: None)
        patch.setattr(report.Report, "micro_batch", counted)
        patch.setattr(sys, "argv", ["pretrain.py", *map(str, words)])
        pretrain.main()
    return run


def rows_in(batch):
    """Numbers of the rows of a batch, which begin with theirs."""
    return (batch["input_ids"][:, 0] + 256 * batch["input_ids"][:, 1]).tolist()


def log_of(output, island=0):
    """The lines that an island has logged."""
    text = (output / f"island{island}" / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def lines(output, island):
    """The island's log and summary, without seconds, and without bytes before the end: what is
    under way may have been sent or not.
    """
    summary = json.loads((output / f"island{island}" / "summary.json").read_text())
    summary["validation"] = [entry[:2] for entry in summary["validation"]]
    varies = "tokens_per_second seconds_waiting peak_memory seconds wait_share hidden mfu "
    varies = [*varies.split(), "bytes_sent", "bytes"]
    found = [*log_of(output, island), summary]
    return [{k: v for k, v in each.items() if k not in varies} for each in found]


def assert_same_lines(source):
    """Both islands of a part logged what those of the whole run did."""
    for island in range(2):
        assert lines(source / "part", island) == lines(source / "whole", island)


def stopped_at(step, output, into):
    """The folder of a run as it was after the checkpoint of `step`."""
    for checkpoint in output.glob("*/checkpoint-*"):
        if int(checkpoint.name.split("-")[1]) <= step:
            shutil.copytree(checkpoint, into / checkpoint.parent.name / checkpoint.name)
    for log in output.glob("*/metrics.jsonl"):
        (into / log.parent.name).mkdir(parents=True, exist_ok=True)
        shutil.copy(log, into / log.parent.name / log.name)


def forget_the_end(output):
    for checkpoint in output.glob(f"*/checkpoint-{STEPS}"):
        shutil.rmtree(checkpoint)


def assert_same(whole, resumed, step, micro=1):
    """The resumed part is the second part of the uninterrupted run."""
    for one, two in zip(whole, resumed, strict=True):
        assert two["steps"] == list(range(step + 1, STEPS + 1))
        assert two["rows"] == one["rows"][step * micro :]
        assert two["losses"] == one["losses"][step * micro :]
        assert set(one["end"]) == set(two["end"])
        assert [k for k in one["end"] if one["end"][k] != two["end"][k]] == []


def options_of(preset, changes, step, procs):
    options = ["--exchange", preset, "--save-every", step, "--keep", 20]
    if changes:
        options += ["--set", *changes]
    options += ["--lr", 0.01] if preset in ("full", "local_sgd") else []
    return options + (["--no-shard"] if procs == 1 else [])


def shape(islands, procs):
    """What `run_ranks` is told; one rank is no launcher's."""
    env = {"LOCAL_RANK": "-1"} if procs == 1 else None
    return {"islands": islands, "procs": procs, "timeout": 120, "env": env}


def each(rank, source, where, jobs, *more):
    """The recipe for one case after another, each under a run id of its own and with Accelerate as
    in a new process.
    """
    from accelerate.state import AcceleratorState, GradientState

    out, environ = {}, dict(os.environ)
    with pytest.MonkeyPatch.context() as patch:
        # it would end the group
        patch.setattr("accelerate.Accelerator.end_training", lambda self: None)
        for number, (name, options) in enumerate(jobs.items()):
            os.environ["ISLAND_RUN"] = f"{environ['ISLAND_RUN']}-{number}"
            with named(name):
                out[name] = train(rank, source, source / name / where, [*options, *more])
            AcceleratorState._reset_state(True)
            GradientState._reset_state()
            os.environ.clear()
            os.environ.update(environ)
    return out


def go_on(run_ranks, source, cases, procs):
    """For each case (preset, changes, step) a run, and its second part, from the checkpoint of
    `step`, in other processes.

    Yields name, step and the two, of all ranks.
    """
    jobs = {
        name: options_of(preset, changes, step, procs)
        for name, (preset, changes, step) in cases.items()
    }
    common = {**shape(2, procs), "timeout": 280}
    whole = run_ranks(each, **common, args=(source, "whole", jobs))
    for name, (_, _, step) in cases.items():
        stopped_at(step, source / name / "whole", source / name / "part")
    resumed = run_ranks(each, **common, args=(source, "part", jobs, "--resume"))
    for name, (_, _, step) in cases.items():
        yield name, step, [rank[name] for rank in whole], [rank[name] for rank in resumed]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("procs", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_pretrain_resume_equals_the_uninterrupted_run(run_ranks, source, family, procs):
    """A resumed run is the uninterrupted one, bit for bit, under every preset."""
    cases = {preset: (preset, *RUNS[preset]) for preset in FAMILIES[family]}
    for name, step, whole, resumed in go_on(run_ranks, source, cases, procs):
        with named(name):
            assert_same(whole, resumed, step)
            assert_same_lines(source / name)


def test_pretrain_resume_covers_every_preset():
    """Each preset is in one family of the cases."""
    assert sorted(name for names in FAMILIES.values() for name in names) == sorted(RUNS)


@pytest.mark.timeout(600)
def test_pretrain_resume_with_a_message_under_way(run_ranks, source):
    """A resumed run is the uninterrupted one where a message is under way at the save, too."""
    for name, step, whole, resumed in go_on(run_ranks, source, LATE, 2):
        with named(name):
            assert_same(whole, resumed, step)


DEMO = ["--exchange", "demo", "--save-every", 3]


def saves(output, folders="island*"):
    found = {p.name: sorted(c.name for c in p.glob("*-*")) for p in output.glob(folders)}
    return dict(sorted(found.items()))


@pytest.mark.parametrize("procs", [1, 2])
@pytest.mark.slow
def test_pretrain_resume_after_a_stop(run_ranks, source, procs):
    """SIGTERM on all islands in the fifth step: all stop at the same step, and go on from there,
    newer than the checkpoint of 3.
    """
    more = [*DEMO, "--accumulation", 2, *(["--no-shard"] if procs == 1 else [])]
    common = shape(2, procs)
    whole = run_ranks(train, **common, args=(source, source / "whole", more))

    def told(rank):
        stop = {4: lambda rank: os.kill(os.getpid(), signal.SIGTERM)}
        train(rank, source, source / "part", more, stop)

    outcomes = run_ranks(told, **common, check=False)
    assert {o.status for o in outcomes} == {75}, outcomes[0].log
    held = ["checkpoint-3", "checkpoint-6"]
    assert saves(source / "part") == {"island0": held, "island1": held}
    resumed = run_ranks(train, **common, args=(source, source / "part", [*more, "--resume"]))
    assert_same(whole, resumed, 6, micro=2)
    assert_same_lines(source)


def test_pretrain_save_async_writes_the_same(run_ranks, source):
    """A checkpoint that is written while training goes on is the same as a plain one."""
    options = ["--exchange", "diloco", "--set", "period=4", "--save-every", 3]
    for name, more in (("whole", []), ("part", ["--save-async"])):
        run_ranks(train, **shape(2, 2), args=(source, source / name, [*options, *more]))
        forget_the_end(source / name)
    for path in sorted((source / "whole").glob("island*/checkpoint-*/*/*.safetensors")):
        other = source / "part" / path.relative_to(source / "whole")
        if path.parent.name != "loop":
            one, two = load_file(path), load_file(other)
            assert one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)
    whole, part = (
        run_ranks(train, **shape(2, 2), args=(source, source / n, [*options, "--resume"]))
        for n in ("whole", "part")
    )
    before = [None] * 9
    whole = [{**w, "rows": before + w["rows"], "losses": before + w["losses"]} for w in whole]
    assert_same(whole, part, 9)


def test_pretrain_resume_without_own_checkpoints(run_ranks, source):
    """An island without checkpoints takes over from the other one."""

    def lost(rank, *more):
        logging.basicConfig(format="%(message)s", force=True)  # pytest's handlers would keep it
        train(rank, source, source / "part", [*options, "--resume", *more])

    options = ["--exchange", "diloco", "--set", "period=4", "--save-every", 4]
    args = (source, source / "part", [*options, "--steps", 8])
    run_ranks(train, **shape(2, 2), args=args)
    shutil.rmtree(source / "part" / "island1")
    refused = run_ranks(lost, **shape(2, 2), check=False)
    # a person must choose: EX_CONFIG
    assert [o.status for o in refused] == [78] * 4 and "Traceback" not in refused[0].log
    assert "no checkpoint is held by all islands (island0: 4, 8; island1: none)" in refused[0].log
    run_ranks(lost, **shape(2, 2), args=("--take-over",))
    assert [line["step"] for line in lines(source / "part", 0)[:-1]] == [2, 4, 6, 8, 10]
    assert lines(source / "part", 0)[-1]["digests_equal"] is True


@pytest.mark.parametrize(("islands", "procs"), [(2, 1), (1, 2), (3, 2)])
def test_pretrain_resume_with_other_numbers(run_ranks, source, islands, procs):
    """2 islands x 2 shards go on as others: steps, schedule and the part of the epoch stay, the
    loss does not jump.
    """
    options = "--exchange diloco --set period=4 --lr 0.003 --save-every 6 --resume --take-over"
    options = options.split()
    run_ranks(train, **shape(2, 2), args=(source, source / "part", options))
    forget_the_end(source / "part")
    logs, how = log_of(source / "part"), shape(islands, procs)
    if islands == 1:
        how["env"] = {"ISLAND_COUNT": "1"}
    options += ["--no-shard"] if procs == 1 else []
    results = run_ranks(train, **how, args=(source, source / "part", options))
    assert all(r["steps"] == [7, 8, 9, 10] for r in results)
    after = log_of(source / "part")
    assert [line["step"] for line in after] == [2, 4, 6, 8, 10] and after[:3] == logs[:3]
    assert abs(after[3]["loss"] - logs[3]["loss"]) < 0.15, (after, logs)


def test_pretrain_resume_of_a_mesh(run_ranks, source):
    """A mesh goes on bit for bit."""

    def two_nodes(rank):
        local = {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(rank.proc % 2)}
        return {"ISLAND_COUNT": "", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", **local}

    options = ["--exchange", "diloco", "--set", "period=4", "--mesh", "--save-every", 3]
    common = {"islands": 1, "procs": 4, "env": two_nodes, "timeout": 120}
    whole = run_ranks(train, **common, args=(source, source / "whole", [*options, "--keep", 9]))
    held = saves(source / "whole", "replica*")
    assert held == {f"replica{i}": [f"checkpoint-{s}" for s in (10, 3, 6, 9)] for i in range(2)}
    stopped_at(6, source / "whole", source / "part")
    resumed = run_ranks(train, **common, args=(source, source / "part", [*options, "--resume"]))
    assert_same(whole, resumed, 6)
    assert lines(source / "part", 0) == lines(source / "whole", 0)


@pytest.mark.parametrize("stream", [False, True])
def test_pretrain_resume_position_in_the_data(run_ranks, source, stream):
    """After any number of batches, over the end of epochs too, the rest of the data is what it
    would have been.
    """

    def job(rank):
        from accelerate.state import AcceleratorState, GradientState

        from fsdp_demo.integrations.accelerate import accelerator

        def batches(position):
            AcceleratorState._reset_state(True)
            GradientState._reset_state()
            torch.manual_seed(5)
            rows = datasets.Dataset.from_dict({"input_ids": [[i, i] for i in range(41)]})
            if stream:
                rows = data.split_by_island(rows.to_iterable_dataset(num_shards=4), 0, 1, seed=3)
            loader = accelerator(shard=False).prepare(
                data.Data(rows, data.Rows(None), 0).loaders(2)[0]
            )
            return data.forever(loader, position)

        position, seen, places = data.Position(), [], []
        for _, batch in zip(range(25), batches(position)):  # noqa: B905
            seen.append(batch["input_ids"][:, 0].tolist())
            places.append((position.epoch, position.batch))
        assert places[9:11] == [(0, 10), (1, 1)] and seen[:10] != seen[10:20]
        for at in (1, 7, 9, 10, 16):
            again = batches(data.Position(*places[at - 1]))
            assert [next(again)["input_ids"][:, 0].tolist() for _ in range(at, 25)] == seen[at:], at
        return sum(seen[:10], [])

    first, second = run_ranks(job, islands=1, procs=2, timeout=100)
    assert not set(first) & set(second)
