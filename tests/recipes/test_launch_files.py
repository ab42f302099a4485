"""The files of recipes/slurm and ssh, run as they stand: tiny model, CPU, a few steps, every host
this machine. `ssh`, `srun` and `hostname` on PATH are small scripts that run here what they are
given.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fsdp_demo.launch.processes import reserve_port

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
RUN = f"test-{os.getpid()}"
SMALL = "--sequence-length 32 --batch-size 1 --eval-batches 1 --eval-every 0 --log-every 2"

# Like the real ones where it matters: ssh joins its words and hands them to a shell, without
# variables of this one; srun starts one task per node, and its status is the worst of theirs.
FAKES = {
    "ssh": 'while [[ $1 == -* ]]; do shift 2; done; echo "$1" >>"$FAKE_LOG"; shift; unset '
    '"${!ISLAND_@}"; exec sh -c "$*"',
    "srun": """while [[ $1 == -* ]]; do shift; done
pids=() status=0
for ((node = 0; node < SLURM_NNODES; node++)); do
    SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=$SLURM_NNODES SLURM_PROCID=$node "$@" & pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || { one=$?; [ $one -le $status ] || status=$one; }; done
exit $status""",
    "hostname": "[ $1 = -I ] && echo 127.0.0.1 10.9.8.7",
}


@pytest.fixture
def launch(tmp_path):
    """Starts a file of recipes/ with these variables; `launch.output` is where the run writes."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in FAKES.items():
        (commands / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (commands / name).chmod(0o755)
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ISLAND_", "ACCELERATE_", "SLURM_"))
    }

    def start(file, **variables):
        env = {
            **clean,
            **dict(OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="true", OPTIONS=SMALL),
            **dict(MODEL="tiny", STEPS="4", PROCS="1", PORT=reserve_port(), OUTPUT=start.output),
            **dict(PYTHON=sys.executable, PYTHONPATH=ROOT, FAKE_LOG=start.hosts),
            "PATH": f"{commands}{os.pathsep}{clean['PATH']}",
            **variables,
        }
        words = ["bash", str(RECIPES / file)]
        how = dict(cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        return subprocess.Popen(words, env={k: str(v) for k, v in env.items()}, **how)

    def stub(text):
        """A program in place of Python."""
        path = tmp_path / "python"
        path.write_text(f"#!/usr/bin/env bash\n{text}\n")
        path.chmod(0o755)
        return path

    start.output = tmp_path / "out"
    start.hosts = tmp_path / "hosts"
    start.stub = stub
    return start


def ended(process, status=0, timeout=380):
    output = process.communicate(timeout=timeout)[0]
    assert process.returncode == status, output
    return output


def slurm(nodes, **variables):
    job = {"SLURM_JOB_ID": "4711", "SLURM_NNODES": nodes, "SLURM_SUBMIT_DIR": ROOT}
    return job | variables


def ssh(nodes, **variables):
    hosts = " ".join(f"node{n}" for n in range(nodes))
    return {"HOSTS": hosts, "ADDRESSES": " ".join(["127.0.0.1"] * nodes), **variables}


FILES = [("slurm/islands-2nodes.sbatch", slurm), ("ssh/islands.sh", ssh)]


def metrics_of(launch):
    """The log of a run that has logged something."""
    metrics, until = launch.output / "island0" / "metrics.jsonl", time.monotonic() + 200
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < until:
        time.sleep(0.2)
    return metrics


def last_step(metrics):
    return json.loads(metrics.read_text().splitlines()[-1])["step"]


def check(output, islands, procs, preset, steps=4):
    """What every run of islands leaves behind: a summary of each, which agree."""
    found = [
        json.loads((output / f"island{n}" / "summary.json").read_text()) for n in range(islands)
    ]
    facts = dict(islands=islands, procs=procs, preset=preset, steps=steps, digests_equal=True)
    for summary in found:
        assert facts.items() <= summary.items()
        assert summary["bytes_sent_per_island"] > 0 and summary["exchanges"] > 0
        assert summary["loss_end"] < 6
    assert len({summary["tokens"] for summary in found}) == 1
    assert not (output / f"island{islands}").exists()


# -- slurm/ and ssh/ -----------------------------------------------------------------------------


@pytest.mark.timeout(400)
def test_slurm_islands_on_two_nodes(launch):
    """Two islands under Slurm train on two nodes."""
    exchange = RECIPES / "exchange" / "demo.yaml"
    output = ended(launch("slurm/islands-2nodes.sbatch", **slurm(2, PROCS=2, EXCHANGE=exchange)))
    check(launch.output, islands=2, procs=2, preset="demo")
    assert "yes, bit for bit" in output and "store listening on 127.0.0.1" in output


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_ssh_islands_on_two_hosts(launch):
    """Two islands over ssh train on two hosts."""
    options = f"{SMALL} --set schedule.sync_every=2"
    config = RECIPES / "accelerate" / "cpu-island.yaml"
    ended(launch("ssh/islands.sh", **ssh(2, OPTIONS=options, CONFIG=config, RUN=RUN)))
    check(launch.output, islands=2, procs=1, preset="diloco")
    # The store and its end, and for each host its island and the file with its process id.
    assert sorted(launch.hosts.read_text().split()) == ["node0"] * 4 + ["node1"] * 2
    assert not list(Path("/tmp").glob(f"fsdp-demo-{RUN}-*"))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_slurm_islands_on_four_nodes(launch):
    """Four islands under Slurm train on four nodes."""
    exchange = RECIPES / "exchange" / "decoupled_momentum.yaml"
    options = f"{SMALL} --no-shard --set schedule.sync_every=2"
    config = RECIPES / "accelerate" / "unsharded-island.yaml"
    variables = slurm(4, EXCHANGE=exchange, OPTIONS=options, CONFIG=config)
    ended(launch("slurm/islands-4nodes.sbatch", **variables))
    check(launch.output, islands=4, procs=1, preset="decoupled_momentum")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ssh_islands_on_four_hosts_with_torchrun(launch):
    """Four islands over ssh train on four hosts, by torchrun."""
    exchange = RECIPES / "exchange" / "streaming_diloco.yaml"
    options = f"{SMALL} --set schedule.sync_every=4 schedule.delay=1"
    variables = ssh(4, EXCHANGE=exchange, OPTIONS=options, LAUNCHER="torchrun", STEPS=8)
    ended(launch("ssh/islands.sh", **variables))
    check(launch.output, islands=4, procs=1, preset="streaming_diloco", steps=8)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_slurm_mesh_on_two_nodes(launch):
    """A mesh under Slurm trains on two nodes."""
    exchange = RECIPES / "exchange" / "demo.yaml"
    ended(launch("slurm/mesh-2nodes.sbatch", **slurm(2, PROCS=2, EXCHANGE=exchange)))
    check_mesh(launch.output, replicas=2, preset="demo")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("hosts", "launcher"), [(2, "torchrun"), (4, "accelerate")])
def test_ssh_mesh_on_two_and_four_hosts(launch, hosts, launcher):
    """A mesh over ssh trains on two and four hosts."""
    options = f"{SMALL} --set schedule.sync_every=2"
    variables = ssh(hosts, ADDRESS="127.0.0.1", PROCS=2, OPTIONS=options, LAUNCHER=launcher)
    ended(launch("ssh/mesh.sh", **variables))
    check_mesh(launch.output, replicas=hosts, preset="diloco")


def check_mesh(output, replicas, preset):
    summary = json.loads((output / "summary.json").read_text())
    facts = dict(islands=replicas, preset=preset, digests_equal=True)
    assert facts.items() <= summary.items()
    assert summary["bytes_sent_per_island"] > 0


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("file", ["slurm/mesh-2nodes.sbatch", "ssh/mesh.sh"])
def test_mesh_stop_saves_and_resumes(launch, file):
    """A mesh that is stopped saves and goes on. Slurm tells the launchers of all nodes, ssh's file
    does it itself.
    """
    common = {"PROCS": 2, "OPTIONS": f"{SMALL} --log-every 20", "EXCHANGE": "demo"}
    hosts = slurm(2) if file.startswith("slurm") else ssh(2, ADDRESS="127.0.0.1")
    process = launch(file, **hosts, **common, STEPS=10_000)
    metrics = metrics_of(launch)
    if file.startswith("slurm"):
        mine = f"--output {launch.output}"
        words = ["pkill", "-TERM", "-f", f"^{sys.executable} -m fsdp_demo.launch --from .*{mine}"]
        assert subprocess.run(words).returncode == 0
    else:
        process.send_signal(signal.SIGTERM)
    output = ended(process, status=75)
    assert len(list(launch.output.glob("replica*/checkpoint-*/manifest.json"))) == 2, output
    steps = last_step(metrics) + 50
    again = {"SLURM_RESTART_COUNT": 1} if file.startswith("slurm") else {"RESUME": "auto"}
    output = ended(launch(file, **hosts, **common, **again, STEPS=steps, PORT=reserve_port()))
    assert "resumed from checkpoint" in output
    check_mesh(launch.output, replicas=2, preset="demo")


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_ssh_islands_stop_saves_and_resumes(launch):
    """Islands over ssh that are stopped save and go on."""
    process = launch("ssh/islands.sh", **ssh(2, STEPS=10_000, OPTIONS=SMALL, EXCHANGE="demo"))
    metrics = metrics_of(launch)
    process.send_signal(signal.SIGTERM)
    output = ended(process, status=75)
    assert all(
        list((launch.output / f"island{n}").glob("checkpoint-*/manifest.json")) for n in range(2)
    ), output
    # more than were taken between the last line and the stop
    steps = last_step(metrics) + 10
    ended(launch("ssh/islands.sh", **ssh(2, STEPS=steps, EXCHANGE="demo", RESUME=1)))
    check(launch.output, islands=2, procs=1, preset="demo", steps=steps)


STUB = """
case "$*" in
    *store*) [[ $* != *--port-file* ]] || echo 29400 >"${@: -1}"; exec sleep 60 ;;
    *"launch --from"*) LAUNCH ;;
    *) echo "island $ISLAND_RANK of $ISLAND_COUNT at $ISLAND_ENDPOINT run $ISLAND_RUN: $*"; exit "$STUB_STATUS" ;;
esac
"""  # noqa: E501
# the launcher of `--from`, which starts this stub in place of Python
LAUNCH = """shift 2; exec {python} -c 'import sys
from fsdp_demo.launch.__main__ import main
sys.executable = sys.argv.pop(1)
sys.exit(main(sys.argv[1:]))' "$0" "$@"
""".replace("{python}", sys.executable).strip()
STUB = STUB.replace("LAUNCH", LAUNCH)
NODE = f"""case "$*" in
    *"launch --from"*) {LAUNCH} ;;
    *) echo "node: $*"; exit "${{STUB_STATUS:-0}}" ;;
esac"""
REQUEUED = pytest.mark.parametrize(("count", "status"), [(None, 0), (1, 75), (2, 78)])


def requeued(launch, file, text, count, status):
    """What a job says that is the `count`-th life of one, and whose nodes end with `status`."""
    again = {} if count is None else {"SLURM_RESTART_COUNT": count}
    variables = slurm(2, PYTHON=launch.stub(text), STUB_STATUS=status, RESTARTS=0, **again)
    output = ended(launch(file, **variables), status=status)
    assert ("scontrol requeue 4711" in output) == (status == 75)
    assert ("choose, then submit again" in output) == (status == 78)
    return output


@REQUEUED
def test_slurm_islands_requeue_resumes_under_a_new_run_id(launch, count, status):
    """A requeued Slurm job has a run id of its own and resumes."""
    output = requeued(launch, "slurm/islands-2nodes.sbatch", STUB, count, status)
    lines = sorted(line for line in output.splitlines() if line.startswith("island "))
    assert [line.split(" run ")[0] for line in lines] == [
        f"island {n} of 2 at 127.0.0.1:29400" for n in range(2)
    ]
    assert all(
        f" run 4711-{count or 0}: " in line and line.endswith("--resume auto") == bool(count)
        for line in lines
    ), output
    assert all("--save-every 200" in line for line in lines)  # a crash costs at most these steps


@REQUEUED
def test_slurm_mesh_requeue_resumes(launch, count, status):
    """A requeued mesh resumes."""
    output = requeued(launch, "slurm/mesh-2nodes.sbatch", NODE, count, status)
    lines = [line for line in output.splitlines() if "node: " in line]
    assert lines and all(line.endswith("--resume auto") == bool(count) for line in lines)
    head = (RECIPES / "slurm" / "mesh-2nodes.sbatch").read_text().split("set -euo")[0]
    assert "#SBATCH --signal=TERM@300" in head


@pytest.mark.parametrize(
    ("resume", "word"), [("", None), ("1", "--resume"), ("auto", "--resume auto")]
)
def test_ssh_mesh_resumes(launch, resume, word):
    """RESUME reaches each node of a mesh over ssh."""
    output = ended(launch("ssh/mesh.sh", **ssh(2, PYTHON=launch.stub(NODE), RESUME=resume)))
    lines = [line for line in output.splitlines() if "node: " in line]
    assert len(lines) == 2
    assert all(line.endswith(word) if word else "--resume" not in line for line in lines), output


@pytest.mark.parametrize(("file", "hosts"), FILES)
def test_launch_file_starts_a_durable_store(launch, file, hosts):
    """The launch files of islands start a store with a file."""
    told = '*store*) [ -z "$ISLAND_RANK" ] && echo "$@" >>"$FAKE_LOG.store";'
    stub = launch.stub(STUB.replace("*store*)", told))
    output = ended(launch(file, **hosts(2, PYTHON=stub, STUB_STATUS=0, PORT=29400, RUN="z")))
    assert output.count("at 127.0.0.1:29400 run ") == 2
    (words,) = Path(f"{launch.hosts}.store").read_text().splitlines()
    assert "--bind 127.0.0.1:" in words and ".sqlite" in words.partition("--file ")[2]


@pytest.mark.parametrize(("file", "hosts"), FILES)
def test_launch_file_passes_the_users_variables(launch, file, hosts):
    """The variables that a user sets reach every island, whatever their characters."""
    said = "has $ISLAND_MIN $ISLAND_TOKEN $ISLAND_TIMEOUT $ISLAND_NAME"
    stub = launch.stub(STUB.replace('echo "island', f'echo "{said}"; echo "island'))
    token = 'it\'s a "secret" $HOME \\ `x` \u00e9'
    given = {"ISLAND_MIN": "1", "ISLAND_TOKEN": token, "ISLAND_TIMEOUT": "77", "RUN": "v"}
    output = ended(launch(file, **hosts(2, PYTHON=stub, STUB_STATUS=0, PORT=29400, **given)))
    assert output.count(f"has 1 {token} 77 \n") == 2, output


LOST = """
case "$*" in
    *store*) [[ $* != *--port-file* ]] || echo 29400 >"${@: -1}"; exec sleep 600 ;;
    *"launch --from"* | *"launch --restarts 9"*) LAUNCH ;;
    *)  echo "life ${ISLAND_ATTEMPT:-0} of island $ISLAND_RANK: $*"
        if [ "$ISLAND_RANK ${ISLAND_ATTEMPT:-0}" = "1 0" ]; then kill -9 $$; fi ;;
esac
""".replace("LAUNCH", LAUNCH)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("file", "hosts"), FILES)
def test_launch_file_restarts_a_lost_island(launch, file, hosts):
    """A lost island is started again by the supervisor of `fsdp_demo.launch`; what it starts is
    killed in its first life.
    """
    stub = launch.stub(LOST)
    output = ended(launch(file, **hosts(2, PYTHON=stub, RUN=RUN)))
    found = sorted(
        line[line.index("life ") :] for line in output.splitlines() if line.startswith("life ")
    )
    lives = [line.partition(":")[0] for line in found]
    assert lives == [f"life {n} of island {i}" for n, i in ((0, 0), (0, 1), (1, 1))]
    assert [line.endswith("--resume auto") for line in found] == [False, False, True], output


@pytest.mark.parametrize(("of_islands", "whole"), [(0, 0), (75, 75), (78, 78), (3, 1)])
def test_ssh_islands_status_is_the_worst(launch, of_islands, whole):
    """The status of islands over ssh is the worst of theirs."""
    stub = launch.stub(STUB)
    variables = ssh(2, PYTHON=stub, STUB_STATUS=of_islands, RUN="r", RESUME="auto", SAVE_EVERY=7)
    output = ended(launch("ssh/islands.sh", **variables), status=whole)
    assert output.count("run r: ") == 2
    assert output.count("--save-every 7") == output.count("--resume auto") == 2
    assert output.count(f"ended with status {of_islands}") == (2 if of_islands else 0)


@pytest.mark.parametrize(("file", "variables", "message"), [
    ("ssh/islands.sh", {"HOSTS": ""}, "the hosts as ssh knows them"),
    ("ssh/islands.sh", {"HOSTS": "a b", "ADDRESSES": "127.0.0.1"}, "2 HOSTS and 1 ADDRESSES"),
    ("ssh/mesh.sh", {"HOSTS": "a b", "LAUNCHER": "mpirun"}, "LAUNCHER=mpirun"),
    ("slurm/islands-4nodes.sbatch", {"SLURM_JOB_ID": ""}, "start it with sbatch"),
    ("slurm/mesh-2nodes.sbatch", {"SLURM_JOB_ID": ""}, "start it with sbatch"),
    ("slurm/island.sbatch", {"SLURM_JOB_ID": "1"}, "not in a job array"),
])  # fmt: skip
def test_launch_file_refuses_wrong_variables(launch, file, variables, message):
    """Wrong variables of a launch file are refused at once."""
    output = ended(launch(file, **variables), status=2, timeout=30)
    assert message in output


SHELL = [*RECIPES.glob("ssh/*.sh"), *RECIPES.glob("slurm/*.sbatch")]


@pytest.mark.parametrize("file", [file.relative_to(RECIPES).as_posix() for file in SHELL])
def test_launch_file_help_is_its_head(file):
    """The word `--help` of a launch file prints its head."""
    words = ["bash", str(RECIPES / file), "--help"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=RECIPES.parent, timeout=30)
    assert done.returncode == 0 and "recipes/" in done.stdout and not done.stderr


@pytest.mark.parametrize("nodes", [2, 4])
def test_slurm_file_head_asks_for_its_nodes(nodes):
    """The head of a Slurm file asks for its nodes."""
    text = (RECIPES / "slurm" / f"islands-{nodes}nodes.sbatch").read_text()
    assert (
        text.startswith("#!/usr/bin/env bash\n#SBATCH")
        and f"#SBATCH --nodes={nodes}\n#SBATCH --ntasks-per-node=1\n" in text
    )
