"""DeepSpeed's launcher, and Accelerate's with a ZeRO file, as a user starts them: processes of
their own, on the CPU.
"""

import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time

import pytest

from fsdp_demo.launch.processes import reserve_port

from .test_zero_recipes import COMMON, RECIPES, source, told  # noqa: F401 (a fixture)


def clean(**variables):
    """This environment without what launchers and rehearsals leave there."""
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("ISLAND_", "ACCELERATE_"))}
    return kept | {"OMP_NUM_THREADS": "1"} | variables


def until(there, seconds):
    """Wait until something is there, so long at the most."""
    end = time.monotonic() + seconds
    while not there() and time.monotonic() < end:
        time.sleep(0.05)


@contextlib.contextmanager
def started(*words, **variables):
    """A process that does not outlive the test."""
    command = [sys.executable, "-m", *map(str, words)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=clean(**variables)
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.communicate(timeout=60)
        except (subprocess.TimeoutExpired, ValueError):
            process.kill()


def ended(process, status=0, timeout=200):
    output = process.communicate(timeout=timeout)[0]
    assert process.returncode == status, output
    return output


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_zero_launch_rehearse(tmp_path, source):  # noqa: F811
    """A rehearsal with DeepSpeed's launcher ends with one model."""
    options = [*COMMON, *source, "--exchange", "demo", "--steps", 4, "--output", tmp_path / "out"]
    rehearse = "fsdp_demo.cli rehearse --islands 2 --procs 2 --cpu --launcher deepspeed".split()
    rehearse += ["--run", "zero-recipes", "--", RECIPES / "pretrain_deepspeed.py"]
    with started(*rehearse, *options) as process:
        output = ended(process)
    assert "yes, bit for bit" in output
    assert "status 0 (island0 0, island1 0)" in output.splitlines()[-1]
    wanted = {"digests_equal": True, "zero": 2, "islands": 2, "procs": 2}
    for island in range(2):
        summary, lines = told(tmp_path / "out", island)
        assert summary | wanted == summary and summary["bytes_sent_per_island"] > 0
        assert [line["step"] for line in lines] == [1, 2, 3, 4]


TRAINER = (
    "--sequence-length 16 --per_device_train_batch_size 2 --max_steps 2 --eval_strategy no "
    "--save_strategy no --eval_rows 4 --logging_steps 1 --learning_rate 0.004 --exchange demo"
).split()
STORE = "fsdp_demo.cli store --bind 127.0.0.1:0 --quiet --file".split()
LAUNCH = "accelerate.commands.accelerate_cli launch --num_processes 2 --mixed_precision no".split()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "stage", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
def test_zero_launch_accelerate_file(tmp_path, source, stage):  # noqa: F811
    """Two islands, each under `accelerate launch --config_file zero<stage>.yaml`: the engine is
    found, and both end with one model.
    """
    words = [*LAUNCH, "--config_file", RECIPES / "accelerate" / f"zero{stage}.yaml"]
    words += [RECIPES / "pretrain_trainer.py", *source, *TRAINER, "--output_dir", tmp_path / "out"]
    port = tmp_path / "port"
    with started(*STORE, tmp_path / "keys.sqlite", "--port-file", port):
        until(port.exists, 60)
        here = {
            "ISLAND_COUNT": "2",
            "ISLAND_RUN": "yaml",
            "ISLAND_ADDRESS": "127.0.0.1",
            "PYTHONPATH": str(RECIPES.parent),
            "ISLAND_ENDPOINT": f"127.0.0.1:{port.read_text().strip()}",
            "DS_ACCELERATOR": "cpu",
        }
        with (
            started(*words, **here, ISLAND_RANK="0") as first,
            started(*words, **here, ISLAND_RANK="1") as second,
        ):
            logs = [ended(first), ended(second)]
    assert all(f"island {i} of 2" in log for i, log in enumerate(logs)), logs[0]
    # DDP would be 1 shard x 2 copies
    assert all("2 shards x 1 copy" in log for log in logs), logs[0]
    files = [tmp_path / "out" / f"island{n}" / "eval_results.json" for n in range(2)]
    first, second = (json.loads(file.read_text())["eval_loss"] for file in files)
    assert first == second and 0 < first < 6


# -- the deepspeed launcher's status -------------------------------------------------------------

RANKS = """
import os, signal, sys, time
rank, mode = os.environ["RANK"], sys.argv[1]
def leave(status):
    with open(os.path.join(os.environ["ISLAND_STATUS"], "rank" + rank), "w") as file:
        file.write(str(status))
    os._exit(status)
signal.signal(signal.SIGTERM, lambda *_: leave(75))
open(os.path.join(os.environ["ISLAND_STATUS"], "here" + rank), "w").close()
if rank == "1":
    time.sleep(1)
    {"error": lambda: sys.exit(1), "killed": lambda: os.kill(os.getpid(), 9),
     "saved": lambda: leave(75)}.get(mode, lambda: None)()
time.sleep(100)
"""
STATUSES = {"error": 1, "killed": 137, "saved": 75, "told": 75}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="signals of parents that end")
def test_zero_launch_exit_status(tmp_path):
    """The exit status of ranks survives DeepSpeed's launcher. All at once, since each takes seconds
    to start. An error of rank 1 is none the less for the 75 of rank 0, which was told to end.
    """
    script, runs = tmp_path / "ranks.py", {}
    script.write_text(RANKS)
    words = ["deepspeed", "--hostfile", os.devnull, "--num_gpus", "2", "--no_local_rank"]
    words += ["--log_level", "error", "--master_port", str(reserve_port()), str(script)]
    for mode in STATUSES:
        (tmp_path / mode).mkdir()
        env = {**os.environ, "ISLAND_STATUS": str(tmp_path / mode), "DS_ACCELERATOR": "cpu"}
        command = [sys.executable, "-m", "fsdp_demo.launch", *words, mode]
        runs[mode] = subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL)
    try:
        here = [tmp_path / "told" / f"here{rank}" for rank in range(2)]
        until(lambda: all(file.exists() for file in here), 120)
        runs["told"].send_signal(signal.SIGTERM)
        assert {mode: run.wait(120) for mode, run in runs.items()} == STATUSES
    finally:
        for run in runs.values():
            run.kill()


def test_zero_launch_unknown_flag_refused(run_ranks):
    """DeepSpeed's launcher refuses a flag that it does not know. In a rank, which has DeepSpeed
    imported.
    """
    from fsdp_demo.launch import __main__ as launch

    def run():
        sys.argv = ["launch", "deepspeed", "--nonsense"]
        runpy.run_module("fsdp_demo.launch", run_name="__main__", alter_sys=True)

    (outcome,) = run_ranks(run, 1, 1, check=False)
    assert outcome.status == 2 and "deepspeed: error" in outcome.log
    assert set(launch.LAUNCHERS) == {"accelerate", "torchrun", "deepspeed"}


BUILT = """
import sys
import deepspeed.comm
build = sys.modules["deepspeed.comm.torch"].build_shm_op
import deepspeed
print("op", build(), deepspeed.ops.__compatible_ops__["cpu_adam"], "mine" in dir(sys), flush=True)
"""


def test_zero_launch_rehearse_compiles_nothing(tmp_path):
    """A rehearsal on the CPU compiles nothing. A script of somebody else, who has not switched the
    operator off, with the lock of a build that was killed in its way.
    """
    from fsdp_demo.launch.processes import SITE
    from fsdp_demo.launch.rehearsal import Rehearsal, environment

    script, user, extensions = (tmp_path / name for name in ("script.py", "user", "extensions"))
    script.write_text(BUILT)
    user.mkdir()
    (user / "sitecustomize.py").write_text("import sys; sys.mine = True")
    plan = Rehearsal(2, 1, (str(script),), "deepspeed")
    before = os.environ.get("PYTHONPATH", "")
    env = environment(plan, 0, "127.0.0.1:1", tmp_path, "")
    assert env["PYTHONPATH"].startswith(str(SITE)) and before in env["PYTHONPATH"]
    env["PYTHONPATH"] += os.pathsep + str(user)
    for place in ("deepspeed_shm_comm", "py311_cpu/deepspeed_shm_comm"):
        (extensions / place).mkdir(parents=True)
        (extensions / place / "lock").touch()
    env["TORCH_EXTENSIONS_DIR"] = str(extensions)
    command, read = [sys.executable, str(script)], {"capture_output": True, "text": True}
    done = subprocess.run(command, env=env, timeout=100, **read)
    assert "op None True True" in done.stdout, done.stderr
    assert not list(extensions.rglob("*.o")) and not list(extensions.rglob("build.ninja"))
    other = environment(Rehearsal(2, 1, plan.script, "torchrun"), 0, "127.0.0.1:1", tmp_path, "")
    assert other.get("PYTHONPATH", "") == before
