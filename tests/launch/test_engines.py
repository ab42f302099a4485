"""`--from`: what engines say in their variables, as ISLAND_* and words of a launcher.
tests/recipes/test_slurm.py asks a real Slurm.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_demo.launch import engines

GROUPS = dict(
    JOB="SLURM_JOB_ID=4711 SLURM_NNODES=2 SLURM_GPUS_ON_NODE=8",
    STEP="JOB SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=gpu[08-09] "
    "SLURM_LAUNCH_NODE_IPADDR=10.0.0.8",
    TASK="SLURM_ARRAY_JOB_ID=4711 SLURM_ARRAY_TASK_ID=3 SLURM_ARRAY_TASK_MIN=1 "
    "SLURM_ARRAY_TASK_STEP=2 SLURM_ARRAY_TASK_COUNT=2",
    ARRAY="TASK SLURM_JOB_ID=4713 SLURM_NNODES=1",
    OMPI="OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2",
    JOBSET="JOB_INDEX=1 REPLICATED_JOB_REPLICAS=2 REPLICATED_JOB_NAME=island JOBSET_NAME=lm "
    "JOBSET_COORDINATOR=lm-store-0-0.lm JOB_COMPLETION_INDEX=0",
    TRAINJOB="PET_NNODES=2 PET_NODE_RANK=1 PET_MASTER_ADDR=job-node-0-0.job PET_MASTER_PORT=29500",
    AT="ISLAND_ENDPOINT=10.0.0.1:29400",
)


def variables(text: str) -> dict[str, str]:
    """NAME=VALUE, and names of `GROUPS`."""
    found: dict[str, str] = {}
    for word in text.split():
        name, given, value = word.partition("=")
        found |= {name: value} if given else variables(GROUPS[name])
    return found


@pytest.mark.parametrize(("engine", "env", "place", "nodes"), [
    ("slurm", "STEP", "1 of 2, run 4711-0, start 0 at 10.0.0.8:29400", ""),
    ("slurm", "STEP SLURM_RESTART_COUNT=2", "1 of 2, run 4711-2, start 2 at 10.0.0.8:29400", ""),
    ("slurm", "STEP AT", "1 of 2, run 4711-0, start 0 at 10.0.0.1:29400", ""),
    ("slurm", "STEP ISLAND_COUNT=1", "0 of 1, run 4711-0, start 0 at ",
     "2 1 gpu08 26041"),
    ("slurm", "STEP AT ISLAND_RANK=3 ISLAND_COUNT=4", "3 of 4, run , start 0 at 10.0.0.1:29400",
     "2 1 gpu08 26041"),
    ("slurm", "STEP PMI_RANK=1 PMI_SIZE=2", "1 of 2, run 4711-0, start 0 at 10.0.0.8:29400", ""),
    ("slurm", "ARRAY AT", "1 of 2, run 4711, start 0 at 10.0.0.1:29400", ""),
    ("slurm", "ARRAY AT SLURM_RESTART_COUNT=1", "1 of 2, run 4711, start 1 at 10.0.0.1:29400",
     ""),
    ("slurm", "STEP TASK AT", "1 of 2, run 4711, start 0 at 10.0.0.1:29400", "2 1 gpu08 26042"),
    ("mpi", "OMPI AT ISLAND_RUN=mine", "1 of 2, run mine, start 0 at 10.0.0.1:29400", ""),
    ("mpi", "AT PMI_RANK=0 PMI_SIZE=2", "0 of 2, run , start 0 at 10.0.0.1:29400", ""),
    ("mpi", "AT PMIX_RANK=1 ISLAND_COUNT=2", "1 of 2, run , start 0 at 10.0.0.1:29400", ""),
    ("mpi", "JOB OMPI AT", "1 of 2, run , start 0 at 10.0.0.1:29400", ""),
    ("kubernetes", "JOBSET", "1 of 2, run lm, start 0 at lm-store-0-0.lm:29400", ""),
    ("kubernetes", "JOBSET PET_NNODES=2 JOBSET_RESTART_ATTEMPT=1",
     "1 of 2, run lm, start 1 at lm-store-0-0.lm:29400", "2 0 lm-island-1-0.lm 29500"),
    ("kubernetes", "AT JOB_GLOBAL_INDEX=2 ISLAND_COUNT=3",
     "2 of 3, run , start 0 at 10.0.0.1:29400", ""),
    ("kubernetes", "AT JOB_COMPLETION_INDEX=1 ISLAND_COUNT=2",
     "1 of 2, run , start 0 at 10.0.0.1:29400", ""),
    ("kubernetes", "AT TRAINJOB", "1 of 2, run , start 0 at 10.0.0.1:29400",
     "1 0 127.0.0.1 29500"),
    ("kubernetes", "AT TRAINJOB ISLAND_RANK=2 ISLAND_COUNT=3",
     "2 of 3, run , start 0 at 10.0.0.1:29400", "2 1 job-node-0-0.job 29500"),
])  # fmt: skip
def test_engine_names_the_island(
    capsys: pytest.CaptureFixture[str], engine: str, env: str, place: str, nodes: str
) -> None:
    """Each engine's variables give rank, count, run, start and store; ISLAND_* set by hand win."""
    found, words = engines.told(engine, variables(env), ["torchrun", "train.py"])
    names = ("RANK", "COUNT", "RUN", "ATTEMPT", "ENDPOINT")
    rank, count, run, start, store = (found.get(f"ISLAND_{name}", "") for name in names)
    assert f"{rank} of {count}, run {run}, start {start} at {store}" == place
    names = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
    pet = " ".join(found[f"PET_{name}"] for name in names)
    assert pet == nodes or not nodes and pet.startswith("1 0 127.0.0.1 2")
    assert words == ["torchrun", "train.py"]
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"--from {engine}: island {rank} of {count}" in said
    by_hand = [name for name in variables(env) if name.startswith("ISLAND_")]
    assert all(name in said.partition("set by hand: ")[2] for name in by_hand)


@pytest.mark.parametrize(("engine", "env", "text"), [
    ("slurm", "OMPI AT", "no variable of slurm says who this process is"),
    ("slurm", "JOB", "SLURM_NNODES=2, but a batch script runs on the first node alone"),
    ("slurm", "STEP ISLAND_COUNT=3", "2 tasks of srun on 2 nodes make no 3 islands"),
    ("slurm", "STEP ISLAND_COUNT=1 SLURM_NNODES=1", "2 tasks of srun on 1 nodes make no 1 islands"),
    ("slurm", "ARRAY", "SLURM_ARRAY_TASK_COUNT: ISLAND_ENDPOINT is not set"),
    ("slurm", "ARRAY AT SLURM_ARRAY_TASK_ID=5", "ISLAND_RANK=2 with ISLAND_COUNT=2: allowed is"),
    ("slurm", "STEP OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=4",
     "say island 1 of 2, but OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE say 0 of 4"),
    ("slurm", "STEP ISLAND_COUNT=1 SLURM_STEP_NODELIST=", "no address of its first node: set PET_"),
    ("mpi", "OMPI AT PMI_RANK=0 PMI_SIZE=2", "island 1 of 2, but PMI_RANK, PMI_SIZE say 0 of 2"),
    ("mpi", "OMPI", "ISLAND_ENDPOINT is not set"),
    ("mpi", "AT PMIX_RANK=1", "PMIX_RANK: no ISLAND_COUNT in it"),
    ("mpi", "PMI_RANK=x PMI_SIZE=2", "PMI_RANK='x' must be a whole number"),
    ("kubernetes", "JOBSET JOB_INDEX=2", "ISLAND_RANK=2 with ISLAND_COUNT=2"),
    ("kubernetes", "JOBSET OMPI JOB_INDEX=0", "say island 0 of 2, but OMPI_COMM_WORLD_RANK"),
    ("kubernetes", "AT TRAINJOB PET_NNODES=1:4", "PET_NNODES='1:4' must be a whole number"),
])  # fmt: skip
def test_engine_refusals(engine: str, env: str, text: str) -> None:
    """What an engine does not say, or another one says otherwise, is refused in a sentence."""
    with pytest.raises(ValueError) as refused:
        engines.told(engine, variables(env), ["torchrun", "train.py"])
    assert text in str(refused.value)


def test_engine_tells_accelerate_of_the_nodes() -> None:
    """Accelerate gets flags for an island of several nodes, but those that stand there; what could
    not be told of the nodes is refused.
    """
    env = variables("STEP ISLAND_COUNT=1")
    given = ["accelerate", "launch", "--main-process-port", "1234", "train.py"]
    words = engines.told("slurm", env, given)[1]
    added = "--num_machines=2 --machine_rank=1 --main_process_ip=gpu08 --num_processes=16"
    assert words == ["accelerate", "launch", *added.split(), *given[2:]]
    words = engines.told("slurm", env | {"PET_NPROC_PER_NODE": "gpu"}, given)[1]
    assert not any("num_processes" in word for word in words)
    with pytest.raises(ValueError, match="trl on an island of 2 nodes would start alone on each"):
        engines.told("slurm", env, ["trl", "sft"])


def test_engine_starts_the_command(tmp_path: Path) -> None:
    """`--from` gives the command its variables; an island that the engine starts again gets the
    arguments of a resume, and goes on with the count of its starts. A refusal is status 2.
    """
    code = "import os, sys; print(*(os.environ['ISLAND_' + n] for n in ('RANK', 'ATTEMPT')), "
    code += "*sys.argv)"
    foreign = ("ISLAND_", "SLURM_", "PET_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}

    def launch(env: str) -> subprocess.CompletedProcess[str]:
        flags = ["--from", "slurm", "--restarts", "1", "--resume-args=--resume auto"]
        words = [sys.executable, "-m", "fsdp_demo.launch", *flags, sys.executable, "-c", code]
        how = dict(capture_output=True, text=True, timeout=60, cwd=tmp_path)
        return subprocess.run(words, env=clean | variables(env), check=False, **how)

    assert launch("ARRAY AT").stdout == "1 0 -c\n"
    assert launch("ARRAY AT SLURM_RESTART_COUNT=2").stdout == "1 2 -c --resume auto\n"
    refused = launch("ARRAY")
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert "ISLAND_ENDPOINT is not set" in refused.stderr
