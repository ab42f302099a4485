"""The devices, variables and command line of each island of a rehearsal.

What runs is what runs on separate machines: `accelerate launch`, `torchrun` or `deepspeed` once per
island, with the `ISLAND_*` variables that a user would set there. Only the addresses (127.0.0.1)
and, with a link, the pacing differ.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import shutil
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import counted
from ..net.link import Link
from ..status import FOLDER as STATUS_FOLDER
from .processes import LAUNCHERS, path_with_site, reserve_port

LOCALHOST = "127.0.0.1"

COMMAND = "command"
"""The launcher's name where no launcher is put ahead: a whole command starts the ranks."""

_ACCELERATE_CONFIG = """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
num_machines: 1
mixed_precision: 'no'
use_cpu: {use_cpu}
"""
"""MULTI_GPU is what makes `accelerate launch` start several processes, on a CPU too: with MULTI_CPU
(or --cpu and no file) it starts one, or asks for mpirun. A file of our own also keeps the user's
default configuration out of it."""


@dataclass(frozen=True)
class Rehearsal:
    """The arguments of a rehearsal.

    Attributes:
        islands, procs: number of islands, and of processes (ranks) in each.
        script: a path and its arguments, or "-m", a module and its arguments; with `COMMAND` a
            command and its arguments.
        launcher: name in `processes.LAUNCHERS`, or `COMMAND`.
        link: rate and round trip between the islands; None: not limited.
        run: id of the run.
        cpu: whether the ranks use the CPU even where there are GPUs.
        grace: seconds that the others get when one island dies for good.
        restarts: how often an island is started again at most (`processes.supervise`).
        resume_args: arguments that are added to the script's from the second start on.
        variables: those of `unedited.variables`.

    Raises:
        ValueError: an argument that is not allowed, or a launcher or script that is not there.
    """

    islands: int
    procs: int
    script: tuple[str, ...]
    launcher: str = "accelerate"
    link: Link | None = None
    run: str = "rehearse"
    cpu: bool = False
    grace: float = 40.0
    restarts: int = 0
    resume_args: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in (("islands", self.islands), ("procs", self.procs)):
            if value < 1:
                raise ValueError(f"--{name} {value}: must be 1 or more")
        self._check_launcher()
        if not re.fullmatch(r"[A-Za-z0-9._-]+", self.run):
            raise ValueError(
                f"--run {self.run!r}: a run id has letters, digits, dot, dash and underscore only"
            )
        if self.restarts < 0:
            raise ValueError(f"--restarts {self.restarts}: must be 0 or more")
        if not 0 <= self.grace < math.inf:
            raise ValueError(f"--grace {self.grace:g}: must be 0 or more seconds")
        if self.resume_args and not self.restarts:
            raise ValueError("--resume-args: of islands that are restarted; give --restarts N, too")
        if not self.script:
            raise ValueError("no script: fsdp-demo rehearse --islands 2 --procs 2 -- SCRIPT ARGS")
        if self.launcher == COMMAND:
            if not shutil.which(self.script[0]):
                raise ValueError(
                    f"command {self.script[0]!r}: there is none; of a script write: -- python "
                    "SCRIPT ARGS"
                )
        elif self.module:
            name = self.script[1] if len(self.script) > 1 else ""
            if not _is_module(name):
                raise ValueError(f"-m {name}: no such module (looked in {Path.cwd()})")
        elif not Path(self.script[0]).is_file():
            raise ValueError(f"script {self.script[0]!r}: no such file (looked in {Path.cwd()})")

    def _check_launcher(self) -> None:
        known = (*LAUNCHERS, COMMAND)
        if self.launcher not in known:
            raise ValueError(f"--launcher {self.launcher}: expected one of {', '.join(known)}")
        package = LAUNCHERS.get(self.launcher, "torch").partition(".")[0]
        spec = importlib.util.find_spec(package)
        # no origin: a mere folder, such as recipes/deepspeed seen from recipes/
        if spec is None or spec.origin is None:
            extra = "deepspeed" if self.launcher == "deepspeed" else "hf"
            raise ValueError(
                f"--launcher {self.launcher}: not installed; pip install -e '.[{extra}]', or "
                "--launcher torchrun"
            )

    @property
    def module(self) -> bool:
        """Whether the script is named as a module."""
        return self.script[0] == "-m"


def _is_module(name: str) -> bool:
    """Whether the first part of a dotted name can be imported from here; nothing is imported."""
    first = name.partition(".")[0]
    here = Path(first).is_dir() or Path(f"{first}.py").is_file()
    return bool(first) and (here or importlib.util.find_spec(first) is not None)


def devices(plan: Rehearsal) -> tuple[list[str], str]:
    """`CUDA_VISIBLE_DEVICES` of each island ("" is the CPU), and words for it.

    Every rank of an island needs a GPU of its own (NCCL refuses to share one); islands may share,
    and do if there are too few.
    """
    count = 0 if plan.cpu or not may_have_gpus() else _gpus()
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    named = len(names) >= count > 0 and names[0]
    ids = names[:count] if named else [str(number) for number in range(count)]
    if count < plan.procs:
        words = "on the CPU"
        if count:
            found = counted(count, "GPU")
            words += f" ({found} for {plan.procs} processes per island is too few)"
        return [""] * plan.islands, words
    groups = count // plan.procs
    slices = [ids[part * plan.procs : (part + 1) * plan.procs] for part in range(groups)]
    enough = groups >= plan.islands
    words = "on GPUs of their own" if enough else f"sharing {counted(groups * plan.procs, 'GPU')}"
    return [",".join(slices[island % groups]) for island in range(plan.islands)], words


def _gpus() -> int:
    import torch  # it takes seconds

    return torch.cuda.device_count()


def may_have_gpus() -> bool:
    """Whether a driver of NVIDIA (also inside Windows) or AMD has left a device here."""
    if sys.platform != "linux":
        return True
    dev = Path("/dev")
    named = (dev / name for name in ("kfd", "dxg", "nvmap"))
    return any(dev.glob("nvidia*")) or any(path.exists() for path in named)


def environment(
    plan: Rehearsal, island: int, endpoint: str, folder: Path, visible: str
) -> dict[str, str]:
    """The variables of one island's launcher: this process's own, and what makes it that island."""
    env = dict(os.environ)
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    env.setdefault("OMP_NUM_THREADS", str(max(1, cores // (plan.islands * plan.procs))))
    env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if any(name == "lo" for _, name in socket.if_nameindex()):
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    env.update(
        ISLAND_RANK=str(island),
        ISLAND_COUNT=str(plan.islands),
        ISLAND_ENDPOINT=endpoint,
        ISLAND_RUN=plan.run,
        ISLAND_NAME=f"island{island}",
        ISLAND_ADDRESS=LOCALHOST,
        CUDA_VISIBLE_DEVICES=visible,
    )
    env.update(plan.variables)
    if plan.launcher == COMMAND:  # what launcher it starts reads one of these; each has its own
        env["MASTER_PORT"] = env["PET_MASTER_PORT"] = str(reserve_port(LOCALHOST))
    env[STATUS_FOLDER] = str(folder / f"island{island}")
    if plan.link is not None:
        env["ISLAND_LINK"] = str(plan.link)
    if not visible:
        env["DS_ACCELERATOR"] = "cpu"
        if plan.launcher == "deepspeed":
            env["PYTHONPATH"] = path_with_site(env)
        else:  # Accelerate would leave DeepSpeed out without a word
            env["ACCELERATE_USE_CPU"] = "true"
    return env


def command(plan: Rehearsal, folder: Path, on_gpu: bool) -> list[str]:
    """The launcher's command line, with a master port of its own."""
    port, deepspeed = str(reserve_port(LOCALHOST)), plan.launcher == "deepspeed"
    if plan.launcher == "torchrun":
        words = ["--nnodes", "1", "--nproc-per-node", str(plan.procs)]
        words += ["--master-addr", LOCALHOST, "--master-port", port]
    elif deepspeed:
        # It takes the GPUs of CUDA_VISIBLE_DEVICES unless their number is given; then it takes the
        # first ones. A hostfile of the machine would make it start ranks elsewhere. Scripts read
        # LOCAL_RANK; few know the option --local_rank that it adds by itself.
        words = ["--hostfile", os.devnull, "--master_port", port]
        words += ["--log_level", "error", "--no_local_rank"]
        words += [] if on_gpu else ["--num_gpus", str(plan.procs)]
    elif plan.launcher == COMMAND:
        words = []
    else:
        # one for each island: the one before may be reading its own now
        config = folder / f"accelerate-{port}.yaml"
        config.write_text(_ACCELERATE_CONFIG.format(use_cpu=str(not on_gpu).lower()))
        words = ["launch", "--config_file", str(config)]
        words += ["--num_processes", str(plan.procs), "--main_process_port", port]
    # DeepSpeed's own -m is of something else
    script = ("--module", *plan.script[1:]) if plan.module and deepspeed else plan.script
    again = []
    if plan.restarts:
        again = ["--restarts", str(plan.restarts), f"--resume-args={plan.resume_args}"]
    name = [] if plan.launcher == COMMAND else [plan.launcher]
    return [sys.executable, "-m", "fsdp_demo.launch", *again, *name, *words, *script]
