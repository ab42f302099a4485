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

from .test_zero_recipes import COMMON, RECIPES, source, told  # noqa: F401 (a fixture)


def clean(**variables):
    """This environment without what launchers and rehearsals leave there."""
    return (
        {n: v for n, v in os.environ.items() if not n.startswith(("ISLAND_", "ACCELERATE_"))}
        | {"OMP_NUM_THREADS": "1"}
        | variables
    )


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
    rehearse = (
        "fsdp_demo.cli rehearse --islands 2 --procs 2 --cpu --launcher deepspeed --run "
        "zero-recipes --"
    ).split()
    with started(*rehearse, RECIPES / "pretrain_deepspeed.py", *options) as process:
        output = ended(process)
    assert "yes, bit for bit" in output
    assert "status 0 (island0 0, island1 0)" in output.splitlines()[-1]
    for island in range(2):
        summary, lines = told(tmp_path / "out", island)
        assert summary["digests_equal"] is True
        assert summary["zero"] == 2
        assert (summary["islands"], summary["procs"]) == (2, 2)
        assert [line["step"] for line in lines] == [1, 2, 3, 4]
        assert summary["bytes_sent_per_island"] > 0


TRAINER = (
    "--sequence-length 16 --per_device_train_batch_size 2 --max_steps 2 --eval_strategy no "
    "--save_strategy no --eval_rows 4"
)
TRAINER += " --logging_steps 1 --learning_rate 0.004"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "stage", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
def test_zero_launch_accelerate_file(tmp_path, source, stage):  # noqa: F811
    """Two islands, each under `accelerate launch --config_file zero<stage>.yaml`: the engine is
    found, and both end with one model.
    """
    words = [
        "accelerate.commands.accelerate_cli",
        "launch",
        "--num_processes",
        2,
        "--mixed_precision",
        "no",
        "--config_file",
    ]
    words += [
        RECIPES / "accelerate" / f"zero{stage}.yaml",
        RECIPES / "pretrain_trainer.py",
        *source,
        *TRAINER.split(),
    ]
    words += ["--exchange", "demo", "--output_dir", tmp_path / "out"]
    with started(
        *"fsdp_demo.cli store --bind 127.0.0.1:0 --quiet --file".split(),
        tmp_path / "keys.sqlite",
        "--port-file",
        tmp_path / "port",
    ):
        until = time.monotonic() + 60
        while not (tmp_path / "port").exists() and time.monotonic() < until:
            time.sleep(0.05)
        here = {
            "ISLAND_COUNT": "2",
            "ISLAND_RUN": "yaml",
            "ISLAND_ADDRESS": "127.0.0.1",
            "PYTHONPATH": str(RECIPES.parent),
        }
        here |= {
            "ISLAND_ENDPOINT": f"127.0.0.1:{(tmp_path / 'port').read_text().strip()}",
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
    results = [
        json.loads((tmp_path / "out" / f"island{n}" / "eval_results.json").read_text())["eval_loss"]
        for n in range(2)
    ]
    assert results[0] == results[1] and 0 < results[0] < 6


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
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    runs = {}
    for mode in STATUSES:
        (tmp_path / mode).mkdir()
        words = [
            "deepspeed",
            "--hostfile",
            os.devnull,
            "--num_gpus",
            "2",
            "--no_local_rank",
            "--log_level",
            "error",
            str(script),
            mode,
        ]
        env = {**os.environ, "ISLAND_STATUS": str(tmp_path / mode), "DS_ACCELERATOR": "cpu"}
        runs[mode] = subprocess.Popen(
            [sys.executable, "-m", "fsdp_demo.launch", *words], env=env, stderr=subprocess.DEVNULL
        )
    try:
        until = time.monotonic() + 120
        while (
            not all((tmp_path / "told" / f"here{rank}").exists() for rank in range(2))
            and time.monotonic() < until
        ):
            time.sleep(0.05)
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

    (tmp_path / "script.py").write_text(BUILT)
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "sitecustomize.py").write_text("import sys; sys.mine = True")
    plan = Rehearsal(2, 1, (str(tmp_path / "script.py"),), "deepspeed")
    before = os.environ.get("PYTHONPATH", "")
    env = environment(plan, 0, "127.0.0.1:1", tmp_path, "")
    env["PYTHONPATH"] += os.pathsep + str(tmp_path / "user")
    assert env["PYTHONPATH"].startswith(str(SITE)) and before in env["PYTHONPATH"]
    extensions = tmp_path / "extensions"
    for place in (
        extensions / "deepspeed_shm_comm",
        extensions / "py311_cpu" / "deepspeed_shm_comm",
    ):
        place.mkdir(parents=True)
        (place / "lock").touch()
    env["TORCH_EXTENSIONS_DIR"] = str(extensions)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")],
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "op None True True" in done.stdout, done.stderr
    assert not list(extensions.rglob("*.o")) and not list(extensions.rglob("build.ninja"))
    other = environment(Rehearsal(2, 1, plan.script, "torchrun"), 0, "127.0.0.1:1", tmp_path, "")
    assert other.get("PYTHONPATH", "") == before
