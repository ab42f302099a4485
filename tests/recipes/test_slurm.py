"""The files of recipes/slurm under a real Slurm on this machine (tests/support/slurm.py): tiny
model, CPU, a node a slurmd. Skipped where there is no Slurm to be had.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from fsdp_demo.launch.processes import reserve_port
from tests.recipes.test_launch_files import ROOT, SMALL
from tests.support.slurm import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ENDLESS = "1000000"
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


class Run:
    """Jobs of one output folder."""

    def __init__(self, slurm: Cluster) -> None:
        self.slurm, self.output, self._jobs = slurm, slurm.folder / "out", 0
        self.env = dict(
            MODEL="tiny", PROCS="1", OPTIONS=SMALL, EXCHANGE="demo", SAVE_EVERY="20",
            OUTPUT=str(self.output), PYTHON=sys.executable, PYTHONPATH=str(ROOT),
            ADDRESS="127.0.0.1", ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1",
            CONFIG="recipes/accelerate/cpu-island.yaml",
        )  # fmt: skip

    def submit(self, file: str, *flags: str, **env: str) -> str:
        self._jobs += 1
        words = ["sbatch", "--parsable", "--gpus-per-node=0", f"--chdir={ROOT}", *flags]
        out = f"--output={self.slurm.folder}/{self._jobs}-%a.out"
        path = str(ROOT / "recipes/slurm" / file)
        return self.slurm.ask(*words, "--open-mode=append", out, path, **self.env, **env).strip()

    def step(self, island: int = 0) -> int:
        """The last step that this island has logged."""
        file = self.output / f"island{island}" / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return json.loads(lines[-1])["step"] if lines else -1

    def trains(self, *islands: int) -> None:
        """Wait until these islands have taken some more steps."""
        for island in islands:
            before = self.step(island)
            self.slurm.until(lambda at=island, than=before: self.step(at) > than + 4)

    def is_in(self, job: str, *states: str) -> None:
        self.slurm.until(lambda: self.slurm.job(job)["JobState"] in states)

    def stop(self, *jobs: str) -> None:
        """Tell jobs to save and end, as `--signal` does before the time limit."""
        for job in jobs:
            self.slurm.ask("scancel", "--signal=TERM", job)
        for job in jobs:
            self.is_in(job, *OVER)
            assert self.slurm.job(job)["ExitCode"] == "75:0", self.slurm.log()

    def to_the_end(self, file: str, *tasks: str, **env: str) -> None:
        """A new job (tasks: of an array) goes on from what lies in the folder, and ends with
        islands or replicas that are equal.
        """
        steps = self.step() + 20
        self.env |= {"STEPS": str(steps), "OPTIONS": f"{SMALL} --resume auto"}
        job = self.submit(file, **env)
        for task in tasks or ("",):
            self.is_in(job + task, *OVER)
            assert self.slurm.job(job + task)["ExitCode"] == "0:0", self.slurm.log()
        summaries = [json.loads(file.read_text()) for file in self.output.rglob("summary.json")]
        assert len(summaries) >= 2
        for found in summaries:
            facts = dict(islands=2, preset="demo", steps=steps, digests_equal=True)
            assert facts.items() <= found.items() and found["bytes_sent_per_island"] > 0


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """A cluster of as many nodes as the test asks for, in a folder whose name is short: Slurm makes
    Unix sockets there, whose paths have at most 107 bytes.
    """
    with (
        tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder,
        closing(Cluster(Path(folder) / "slurm", request.param)) as slurm,
    ):
        for n in range(request.param):
            slurm.give(f"node{n}")
        yield Run(slurm)


@pytest.mark.parametrize("run", [2], indirect=True)
def test_slurm_requeues_a_job_of_two_islands(run: Run) -> None:
    """Two islands in one job save at a signal and go on when the job is requeued; a node that dies
    requeues the whole job. At the end the islands are equal.
    """
    file, slurm = "islands-2nodes.sbatch", run.slurm
    job = run.submit(file, STEPS=ENDLESS)
    run.trains(0, 1)
    run.stop(job)
    assert all(list((run.output / f"island{n}").glob("checkpoint-*/manifest.json")) for n in (0, 1))
    slurm.ask("scontrol", "requeue", job)
    run.trains(0, 1)
    assert slurm.job(job)["Restarts"] == "1"
    slurm.take("node1")
    run.is_in(job, "PENDING")
    slurm.give("node1")
    run.trains(0, 1)
    assert slurm.job(job)["Restarts"] == "2"
    run.stop(job)
    run.to_the_end(file)
    said = (slurm.folder / "1-4294967294.out").read_text()
    for start in range(3):
        assert f"--from slurm: island 1 of 2, run {job}-{start}, store 127.0.0.1:" in said
    assert said.count("resumed from checkpoint") >= 2 and "scontrol requeue" in said


@pytest.mark.parametrize("run", [2], indirect=True)
def test_slurm_keeps_an_island_with_no_kill(run: Run) -> None:
    """With `--no-kill` the island of the node that is left trains on when Slurm has given up the
    other node, and saves at the end.
    """
    job = run.submit("islands-2nodes.sbatch", "--no-kill", STEPS=ENDLESS)
    run.trains(0, 1)
    run.slurm.take("node1")
    run.slurm.until(lambda: run.slurm.state("node1").startswith("down"))
    run.trains(0)
    assert run.slurm.job(job)["JobState"] == "RUNNING"
    run.stop(job)
    assert list((run.output / "island0").glob("checkpoint-*/manifest.json"))


@pytest.mark.parametrize("run", [3], indirect=True)
def test_slurm_starts_one_island_again(run: Run) -> None:
    """Each island is a job of an array. The node of one dies: Slurm starts that island on another
    node, it joins the other one, whose job never stopped, and the islands are equal at the end.
    """
    slurm, place = run.slurm, f"127.0.0.1:{reserve_port()}"
    words = [sys.executable, "-m", "fsdp_demo.cli", "store", "--bind", place]
    store = subprocess.Popen([*words, "--file", slurm.folder / "store.sqlite", "--quiet"])
    try:
        job = run.submit("island.sbatch", STEPS=ENDLESS, ISLAND_ENDPOINT=place)
        run.trains(0, 1)
        first = {n: slurm.job(f"{job}_{n}")["NodeList"] for n in (0, 1)}
        slurm.take(first[1])
        run.trains(0)
        slurm.until(lambda: slurm.job(f"{job}_1")["Restarts"] == "1")
        run.trains(1)
        again = {n: slurm.job(f"{job}_{n}") for n in (0, 1)}
        assert again[1]["NodeList"] not in first.values()
        assert (again[0]["NodeList"], again[0]["Restarts"]) == (first[0], "0")
        run.stop(f"{job}_0", f"{job}_1")
        said = (slurm.folder / "1-1.out").read_text()
        assert f"island 1 of 2, run {job}, store {place}, start 1" in said
        assert "the run is under way: this island joins it" in said
        run.to_the_end("island.sbatch", "_0", "_1", ISLAND_ENDPOINT=place)
    finally:
        store.kill()
        store.wait()


@pytest.mark.parametrize("run", [2], indirect=True)
def test_slurm_makes_a_mesh_of_two_nodes(run: Run) -> None:
    """All nodes of a job are one world, whose words `--from slurm` gives to Accelerate; it saves at
    a signal, and a new job goes on.
    """
    run.env |= dict(PROCS="2", CONFIG="recipes/accelerate/fsdp2-mesh.yaml")
    job = run.submit("mesh-2nodes.sbatch", STEPS=ENDLESS, PORT=str(reserve_port()))
    run.trains(0)
    run.stop(job)
    run.to_the_end("mesh-2nodes.sbatch", PORT=str(reserve_port()))
