"""`--from ENGINE` of `launch`: what Slurm, MPI or Kubernetes say of a process in its variables
becomes ISLAND_* and words for torch's launchers. ISLAND_* that a user has set win.

Sources: sbatch(1) and srun(1), "OUTPUT ENVIRONMENT VARIABLES" (22.05, run); Open MPI and MPICH;
Kubernetes, "Indexed Job"; labels and annotations of JobSet (v1alpha2), which a manifest hands over
by the downward API (docs/commands.md); the torch plugin of Kubeflow Trainer v2 (PET_*).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from ..rendezvous.environment import endpoint, islands, whole
from .processes import ATTEMPT

Variables = Mapping[str, str]
STORE_PORT, MAIN_PORT = 29400, 29500
"""Ports of the store and of an island's first node, where nothing else is said."""

ACCELERATE = {
    "num_machines": "PET_NNODES",
    "machine_rank": "PET_NODE_RANK",
    "main_process_ip": "PET_MASTER_ADDR",
    "main_process_port": "PET_MASTER_PORT",
}
"""Flags of `accelerate launch` -> what torchrun reads instead."""


@dataclass(frozen=True)
class Place:
    """What an engine says of a process; None, 0 and "" where it does not say it.

    Attributes:
        said: the variables that give rank and count.
        run, attempt, store: for ISLAND_RUN, ISLAND_ATTEMPT and ISLAND_ENDPOINT.
        nodes, node: how many nodes the island has, and which of them this one is.
        main, port: where the first of them listens.
        procs: ranks of this node.
    """

    said: str
    rank: int | None
    count: int | None
    run: str = ""
    store: str = ""
    attempt: int = 0
    nodes: int = 1
    node: int = 0
    main: str = ""
    port: int = MAIN_PORT
    procs: int = 0


def hosts(nodelist: str) -> list[str]:
    """The names in a node list of Slurm.

    >>> hosts("gpu[08-10,12],big1")
    ['gpu08', 'gpu09', 'gpu10', 'gpu12', 'big1']
    """
    found = []
    for name, ranges in re.findall(r"([^,\[\]]+)(?:\[([\d,-]*)\])?", nodelist):
        for part in ranges.split(","):
            first, _, last = part.partition("-")
            numbers = range(int(first), int(last or first) + 1) if first else ()
            found += [f"{name}{n:0{len(first)}}" for n in numbers] or [name]
    return found


def _slurm(env: Variables) -> list[Place]:
    """An island is a task of an array; else a task of the step, or, with ISLAND_COUNT by hand, as
    many tasks as come to one island. With ISLAND_RANK by hand the whole job is one.
    """
    if "SLURM_JOB_ID" not in env:
        return []
    nodes, tasks, task, attempt, job, gpus = (
        whole(env, f"SLURM_{name}", 0)
        for name in "NNODES STEP_NUM_TASKS PROCID RESTART_COUNT JOB_ID GPUS_ON_NODE".split()
    )
    in_step, array = "SLURM_STEP_ID" in env, "SLURM_ARRAY_TASK_ID" in env
    if nodes > 1 and not in_step:
        found = f"SLURM_NNODES={nodes}, but a batch script runs on the first node alone"
        raise ValueError(f"{found}: start this command by srun --ntasks-per-node=1")
    tasks, task = (tasks, task) if in_step else (1, 0)
    one = array or bool(env.get("ISLAND_RANK"))
    count = 1 if one else whole(env, "ISLAND_COUNT", tasks)
    if count < 1 or tasks % count or tasks not in (count, nodes):
        found = f"{tasks} tasks of srun on {nodes} nodes make no {count} islands: allowed are one"
        raise ValueError(f"{found} task per island, or one per node and as many nodes per island")
    island, node = divmod(task, tasks // count)
    names = hosts(env.get("SLURM_STEP_NODELIST", ""))
    main = names[task - node] if len(names) == tasks else ""
    said, run, store = "SLURM_PROCID, SLURM_STEP_NUM_TASKS", f"{job}-{attempt}", ""
    rank, total = (None, None) if one else (island, count)
    if array:
        index, least, step, total = (
            whole(env, f"SLURM_ARRAY_TASK_{name}", 1) for name in ("ID", "MIN", "STEP", "COUNT")
        )
        job = whole(env, "SLURM_ARRAY_JOB_ID", job)
        said, run = "SLURM_ARRAY_TASK_ID, SLURM_ARRAY_TASK_COUNT", str(job)
        rank = island = (index - least) // step
    elif one:  # of several jobs: a user alone knows how many, and a name for the run
        run = ""
    elif count > 1 and (launcher := env.get("SLURM_LAUNCH_NODE_IPADDR")):
        store = f"{launcher}:{STORE_PORT}"  # a batch script starts it where it calls srun
    # islands may share a node, also with those of other jobs
    port = 20_000 + (31 * job + island) % 10_000
    return [Place(said, rank, total, run, store, attempt, tasks // count, node, main, port, gpus)]


def _mpi(env: Variables) -> list[Place]:
    """An island is a process. PMIX_RANK comes without a count."""
    names = (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"))
    found = []
    for name, size in (*names, ("PMIX_RANK", "")):
        if name in env:
            rank, count = whole(env, name, 0), whole(env, size, 0) or None
            said = f"{name}, {size}".strip(", ")
            found.append(Place(said, rank, count, port=MAIN_PORT + rank))
    return found


def _kubernetes(env: Variables) -> list[Place]:
    """An island is a Job of a JobSet, with all its pods; without JOB_INDEX, and without ISLAND_RANK
    by hand, a node of a TrainJob or a pod of an Indexed Job.
    """
    names = ("JOB_INDEX", "JOB_GLOBAL_INDEX"), ("PET_NODE_RANK", "JOB_COMPLETION_INDEX")
    index, pod = (next((name for name in two if env.get(name)), "") for two in names)
    if not index and not pod:
        return []
    jobset, store = env.get("JOBSET_NAME", ""), env.get("JOBSET_COORDINATOR", "")
    store = f"{store}:{STORE_PORT}" if store and ":" not in store else store
    seen = jobset, store, whole(env, "JOBSET_RESTART_ATTEMPT", 0)
    node, nodes = whole(env, pod, 0), whole(env, "PET_NNODES", 1)
    if not index and not env.get("ISLAND_RANK"):
        count = nodes if "PET_NNODES" in env else None
        return [Place(f"{pod}, PET_NNODES" if count else pod, node, count, *seen)]
    parts = [env.get(name, "") for name in ("JOBSET_NAME", "REPLICATED_JOB_NAME", "JOB_INDEX")]
    main = f"{'-'.join(parts)}-0.{jobset}" if all(parts) else ""
    own = (*seen, nodes, node, main)
    size = "REPLICATED_JOB_REPLICAS" if index == "JOB_INDEX" else ""
    rank, count = whole(env, index, 0) if index else None, whole(env, size, 0) or None
    return [Place(f"{index or pod}, {size}".strip(", "), rank, count, *own)]


ENGINES = {"slurm": _slurm, "mpi": _mpi, "kubernetes": _kubernetes}


def _place(engine: str, env: Variables) -> Place:
    """What `engine` says, where no other engine says something else."""
    if not (places := ENGINES[engine](env)):
        raise ValueError(f"no variable of {engine} says who this process is")
    chosen = places[0]
    if env.get("ISLAND_RANK") and env.get("ISLAND_COUNT"):
        return chosen
    for other, says in ENGINES.items():
        with suppress(ValueError):  # what is wrong there is no matter where it is not asked
            places = [*places, *(says(env) if other != engine else ())]
    for place in places:
        # srun, too, sets PMI_RANK
        of_step = engine == "slurm" and str(place.rank) == env.get("SLURM_PROCID")
        pairs = (chosen.rank, place.rank), (chosen.count, place.count)
        differ = any(None not in two and two[0] != two[1] for two in pairs)
        if differ and place.count != 1 and not of_step:
            found = (
                f"{chosen.said} say island {chosen.rank} of {chosen.count}, but {place.said} say"
            )
            cure = "set ISLAND_RANK and ISLAND_COUNT, or unset what counts no islands (env -u NAME)"
            raise ValueError(f"{found} {place.rank} of {place.count}: {cure}")
    return chosen


def told(engine: str, env: Variables, command: list[str]) -> tuple[dict[str, str], list[str]]:
    """The variables ISLAND_* and PET_* that follow from what `engine` says, and `command` with what
    it must be told of an island of several nodes. One line on stderr says what was chosen.

    Raises:
        ValueError: the engine says nothing, or something else than another one; a rank outside the
            count; no count; no address of the store; a launcher that cannot be told.
    """
    place = _place(engine, env)
    values = place.rank, place.count, place.run, place.store, place.attempt
    names = ("ISLAND_RANK", "ISLAND_COUNT", "ISLAND_RUN", "ISLAND_ENDPOINT", ATTEMPT)
    found = {n: str(v) for n, v in zip(names, values, strict=True) if v not in (None, "")}
    hand = {name: env[name] for name in names if env.get(name, "").strip()}
    found |= hand
    try:
        if missing := [name for name in names[:2] if name not in found]:
            raise ValueError(f"no {missing[0]} in it: set {' and '.join(missing)} by hand")
        if islands({**env, **found})[1] > 1:
            endpoint(found)
    except ValueError as error:
        raise ValueError(f"{place.said}: {error}") from None
    text, pet = f"island {found['ISLAND_RANK']} of {found['ISLAND_COUNT']}", _nodes(place, env)
    if place.nodes > 1:
        text += ", node {1} of {0} at {2}:{3}".format(*pet.values())
    for name, word in zip(names[2:], ("run", "store", "start"), strict=True):
        text += f", {word} {found[name]}" if found.get(name) else ""
    text += f", by {place.said}" + (f"; set by hand: {', '.join(hand)}" if hand else "")
    command = _several(place.nodes, pet, command) if place.nodes > 1 else command
    sys.stderr.write(f"fsdp_demo.launch: --from {engine}: {text}\n")
    return found | pet, command


def _nodes(place: Place, env: Variables) -> dict[str, str]:
    """PET_*, as torchrun reads them, of this node."""
    main, port = "127.0.0.1", whole(env, "PET_MASTER_PORT", place.port)
    if place.nodes > 1:
        main = env.get("PET_MASTER_ADDR") or place.main
    if not main:
        found = f"an island of {place.nodes} nodes, but no address of its first node"
        raise ValueError(f"{found}: set PET_MASTER_ADDR by hand")
    values = place.nodes, place.node, main, port
    pet = {name: str(value) for name, value in zip(ACCELERATE.values(), values, strict=True)}
    procs = env.get("PET_NPROC_PER_NODE") or place.procs  # a number, or gpu, cpu, auto
    return pet | ({"PET_NPROC_PER_NODE": str(procs)} if procs else {})


def _several(nodes: int, pet: Variables, command: list[str]) -> list[str]:
    """The command on one of several nodes; flags that stand there win."""
    if command[0] == "torchrun":
        return command
    if command[:2] != ["accelerate", "launch"]:
        text = f"{command[0]} on an island of {nodes} nodes would start alone on each of them"
        raise ValueError(f"{text}: allowed are torchrun and accelerate launch")
    flags = {flag: pet[name] for flag, name in ACCELERATE.items()}
    if (procs := pet.get("PET_NPROC_PER_NODE", "")).isdigit():
        flags["num_processes"] = str(nodes * int(procs))
    given = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in command}
    return [*command[:2], *(f"--{f}={v}" for f, v in flags.items() if f not in given), *command[2:]]
