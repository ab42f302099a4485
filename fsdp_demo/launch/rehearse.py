"""Several islands on one machine: each launched on its own, one store, output prefixed by island.

What runs is what runs on separate machines: `accelerate launch`, `torchrun` or `deepspeed` once per
island, with the `ISLAND_*` variables that a user would set there. Only the addresses (127.0.0.1)
and, with a link, the pacing differ.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from ..comm.environment import transport
from ..comm.link import Link
from ..comm.stores import FILE, SCHEME
from ..errors import counted
from ..status import DECIDE, SAVED
from ..status import FOLDER as STATUS_FOLDER
from .console import Console, Splitter
from .deepspeed import without_compiler
from .forking import Forked, Template
from .launchers import FORKED, LAUNCHED, LAUNCHERS, shell_status
from .processes import adopt_orphans, descendants, end_with_parent, reap, reserve_port, send
from .run import main, main_module
from .starting import share_imports, start

STOP = 40.0
"""Seconds between SIGTERM and SIGKILL: the launchers give their ranks 30 of them."""

LOCALHOST = "127.0.0.1"

BRIEF = 30.0
"""Seconds: a store that ends sooner after it was started again has a reason of its own, and is not
started once more.
"""

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
    """What to rehearse. `script` is a path and its arguments; `grace` seconds are left to the
    others when one dies for good. An island is restarted `restarts` times at most, with
    `resume_args` (`restarts.py`). With `fork` this process makes the imports of all ranks, which
    are forked from it where they can be (`forking.py`)."""

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
    fork: bool = False

    def __post_init__(self) -> None:
        for name, value in (("islands", self.islands), ("procs", self.procs)):
            if value < 1:
                raise ValueError(f"--{name} {value}: must be 1 or more")
        if self.launcher not in LAUNCHERS:
            raise ValueError(f"--launcher {self.launcher}: expected one of {', '.join(LAUNCHERS)}")
        spec = importlib.util.find_spec(LAUNCHERS[self.launcher].partition(".")[0])
        # no origin: a mere folder, as recipes/deepspeed for who stands in recipes/
        if spec is None or spec.origin is None:
            extra = "deepspeed" if self.launcher == "deepspeed" else "hf"
            raise ValueError(
                f"--launcher {self.launcher}: not installed; pip install -e '.[{extra}]', or "
                "--launcher torchrun"
            )
        if not re.fullmatch(r"[A-Za-z0-9._-]+", self.run):
            raise ValueError(
                f"--run {self.run!r}: a run id has letters, digits, dot, dash and underscore only"
            )
        if self.restarts < 0:
            raise ValueError(f"--restarts {self.restarts}: must be 0 or more")
        if self.grace < 0:
            raise ValueError(f"--grace {self.grace:g}: must be 0 or more seconds")
        if not self.script:
            raise ValueError("no script: fsdp-demo rehearse --islands 2 --procs 2 -- SCRIPT ARGS")
        if not Path(self.script[0]).is_file():
            raise ValueError(f"script {self.script[0]!r}: no such file (looked in {Path.cwd()})")


@dataclass
class Island:
    """One launched island and what is known of it."""

    name: str
    process: Forked | subprocess.Popen[bytes]
    status: int | None = None
    stopped: bool = False


def devices(plan: Rehearsal) -> tuple[list[str], str]:
    """`CUDA_VISIBLE_DEVICES` of each island ("" is the CPU), and words for it.

    Every rank of an island needs a GPU of its own (NCCL refuses to share one); islands may share,
    and do if there are too few.
    """
    count = 0 if plan.cpu or not _may_have_gpus() else _gpus()
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    ids = (
        names[:count]
        if len(names) >= count > 0 and names[0]
        else [str(number) for number in range(count)]
    )
    if count < plan.procs:
        too_few = (
            f" ({counted(count, 'GPU')} for {plan.procs} processes per island is too few)"
            if count
            else ""
        )
        return [""] * plan.islands, f"on the CPU{too_few}"
    groups = count // plan.procs
    slices = [ids[part * plan.procs : (part + 1) * plan.procs] for part in range(groups)]
    words = (
        "on GPUs of their own"
        if groups >= plan.islands
        else f"sharing {counted(groups * plan.procs, 'GPU')}"
    )
    return [",".join(slices[island % groups]) for island in range(plan.islands)], words


def _gpus() -> int:
    import torch  # it takes seconds

    return torch.cuda.device_count()


def _may_have_gpus() -> bool:
    """Whether a driver of NVIDIA (also inside Windows) or AMD has left a device here."""
    if sys.platform != "linux":
        return True
    dev = Path("/dev")
    return any((dev / name).exists() for name in ("kfd", "dxg", "nvmap")) or any(
        dev.glob("nvidia*")
    )


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
    env[STATUS_FOLDER] = str(folder / f"island{island}")
    if plan.link is not None:
        env["ISLAND_LINK"] = str(plan.link)
    if not visible:
        env["DS_ACCELERATOR"] = "cpu"
        if plan.launcher == "deepspeed":
            env |= without_compiler(folder / "site", env)
        else:  # Accelerate would leave DeepSpeed out without a word
            env["ACCELERATE_USE_CPU"] = "true"
    if sys.stdout.isatty():
        # Progress bars take the width from here; the prefix needs some of it.
        env["COLUMNS"] = str(
            max(20, shutil.get_terminal_size().columns - len(f"[island{island}] ") - 1)
        )
    return env


def shared_environment(env: dict[str, str]) -> dict[str, str]:
    """What the variables of one island have in common with those of all others."""
    own = ("ISLAND_RANK", "ISLAND_NAME", STATUS_FOLDER)
    return {name: value for name, value in env.items() if name not in own}


def command(plan: Rehearsal, folder: Path, on_gpu: bool) -> list[str]:
    """The launcher's command line, with a master port of its own."""
    port = str(reserve_port(LOCALHOST))
    if plan.launcher == "torchrun":
        words = [
            "--nnodes",
            "1",
            "--nproc-per-node",
            str(plan.procs),
            "--master-addr",
            LOCALHOST,
            "--master-port",
            port,
        ]
    elif plan.launcher == "deepspeed":
        # It takes the GPUs of CUDA_VISIBLE_DEVICES unless their number is given; then it takes the
        # first ones. A hostfile of the machine would make it start ranks elsewhere. Scripts read
        # LOCAL_RANK; few know the option --local_rank that it adds by itself.
        words = [
            "--hostfile",
            os.devnull,
            "--master_port",
            port,
            "--log_level",
            "error",
            "--no_local_rank",
        ]
        words += [] if on_gpu else ["--num_gpus", str(plan.procs)]
    else:
        # one for each island: the one before may be reading its own now
        config = folder / f"accelerate-{port}.yaml"
        config.write_text(_ACCELERATE_CONFIG.format(use_cpu=str(not on_gpu).lower()))
        words = [
            "launch",
            "--config_file",
            str(config),
            "--num_processes",
            str(plan.procs),
            "--main_process_port",
            port,
        ]
    again = (
        ["--restarts", str(plan.restarts), f"--resume-args={plan.resume_args}"]
        if plan.restarts
        else []
    )
    return [sys.executable, "-m", "fsdp_demo.launch", *again, plan.launcher, *words, *plan.script]


class Supervisor:
    """Starts store and islands, passes their output on, and sees to it that nothing of it is
    left.
    """

    def __init__(self, plan: Rehearsal, stream: TextIO) -> None:
        self.plan, self.console = plan, Console(stream)
        self.folder = Path(tempfile.mkdtemp(prefix="fsdp-demo-"))
        self.store: subprocess.Popen[bytes] | None = None
        self.template: Template | None = None
        # where the store is, and when it was started again
        self.endpoint, self.store_again_at = "", -math.inf
        self.islands: list[Island] = []
        self.ended: list[Island] = []  # in the order in which they ended
        self.selector = selectors.DefaultSelector()
        self.signals: list[int] = []
        self.stop_at: float | None = None  # SIGTERM is due then
        self.kill_at: float | None = None  # SIGKILL is due then; set when SIGTERM was sent
        self.store_lost, self.started = False, time.monotonic()
        self.launched = time.time()
        # the others train on when an island is lost
        self.elastic = transport(os.environ) == "zeromq"

    def on_signal(self, number: int, frame: object) -> None:
        self.signals.append(number)

    def run(self) -> int:
        adopt_orphans()
        before = {
            number: signal.signal(number, self.on_signal)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            self.launch_first_store()
            self.share_imports()  # meanwhile
            self.await_store()
            self.start_islands()
            while any(island.status is None for island in self.islands):
                self.pass_output(0.1)
                self.watch()
            self.drain()
            return self.verdict()
        finally:
            self.leave_nothing()
            for number, handler in before.items():
                signal.signal(number, handler)

    # Start

    def launch_first_store(self) -> None:
        scheme = SCHEME if self.elastic else ""
        self.launch_store(f"{scheme}{LOCALHOST}:0", "--port-file", str(self.folder / "port"))

    def share_imports(self) -> None:
        """Make the imports of all ranks in this process, unless they may see a GPU."""
        if not self.plan.fork or self.plan.launcher == "deepspeed":
            return
        if not self.plan.cpu and _may_have_gpus():
            self.console.note("each rank imports by itself: it may use a GPU")
            return
        env = shared_environment(environment(self.plan, 0, "", self.folder, ""))
        del env["ISLAND_ENDPOINT"]  # not known yet
        module = main_module([self.plan.launcher, "launch"])
        self.template, lines = share_imports(
            self.plan.script[0], self.plan.procs, main, module, env, lambda: bool(self.signals)
        )
        for line in lines:
            self.console.note(line)

    def await_store(self) -> None:
        port_file, scheme = self.folder / "port", SCHEME if self.elastic else ""
        assert self.store is not None
        deadline = time.monotonic() + 120
        while not port_file.exists() and not self.signals:
            if self.store.poll() is not None or time.monotonic() > deadline:
                raise ValueError(
                    f"the store did not start (status {self.store.poll()}); its error is above"
                )
            time.sleep(0.05)
        self.endpoint = (
            f"{scheme}{LOCALHOST}:{port_file.read_text().strip()}" if port_file.exists() else ""
        )

    def launch_store(self, bind: str, *words: str) -> None:
        kept = ["--file", str(self.folder / FILE)] if self.elastic else []
        command = ["-m", "fsdp_demo.cli", "store", "--bind", bind, *kept, *words, "--quiet"]
        self.store = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # as an island's (`starting.py`)
            preexec_fn=end_with_parent,
        )

    def start_islands(self) -> None:
        if self.signals:
            return
        visible, where = devices(self.plan)
        link = f", link {self.plan.link}" if self.plan.link else ""
        of = (
            f"{counted(self.plan.islands, 'island')} of "
            f"{counted(self.plan.procs, 'process', 'processes')}"
        )
        self.console.note(f"{of} {where}, {self.plan.launcher}, store at {self.endpoint}{link}")
        for number in range(self.plan.islands):
            env = environment(self.plan, number, self.endpoint, self.folder, visible[number])
            env[LAUNCHED] = str(self.launched)
            if self.template is not None:
                env[FORKED] = f"0 {self.template.imported.seconds:.2f}"
            Path(env[STATUS_FOLDER]).mkdir()
            words = command(self.plan, self.folder, bool(visible[number]))
            process = start(words, env, self.template, apart=True)
            island = Island(env["ISLAND_NAME"], process)
            self.islands.append(island)
            for pipe in (process.stdout, process.stderr):
                # Apart from each other: a progress bar on one leaves lines on the other whole.
                assert pipe is not None
                self.selector.register(pipe, selectors.EVENT_READ, (island, Splitter()))

    # While it runs

    def pass_output(self, seconds: float) -> None:
        for key, _ in self.selector.select(seconds):
            island, splitter = key.data
            data = os.read(key.fd, 65536)
            if not data:
                self.selector.unregister(key.fileobj)
            for text, passing in splitter.feed(data, final=not data):
                self.console.show(
                    island.name, text, passing=passing, first=island is self.islands[0]
                )

    def watch(self) -> None:
        now = time.monotonic()
        for island in self.islands:
            if island.status is None and island.process.poll() is not None:
                self.has_ended(island, now)
        if self.store is not None and self.store.poll() is not None and not self.store_lost:
            self.store_has_ended(now)
        if self.signals and self.kill_at is None:
            if self.stop_at is None or self.stop_at > now:
                self.console.note(
                    f"{signal.Signals(self.signals[0]).name}: ending the islands, once more to "
                    "kill them"
                )
            self.stop_at = now
        if self.kill_at is not None and (now >= self.kill_at or len(self.signals) > 1):
            send(self.everything(), signal.SIGKILL)
        elif self.stop_at is not None and now >= self.stop_at and self.kill_at is None:
            self.stop_islands(now)

    def store_has_ended(self, now: float) -> None:
        """A durable store goes on from its file, and the islands with it. Another one has forgotten
        all, and they end.
        """
        if self.elastic and now - self.store_again_at > BRIEF:
            self.console.note("the store has ended; starting it again on its file")
            self.store_again_at = now
            self.launch_store(self.endpoint)
            return
        self.store_lost = True
        self.console.note("the store has ended; ending the islands")
        self.stop_at = now

    def has_ended(self, island: Island, now: float) -> None:
        island.status = shell_status(island.process.wait())
        self.ended.append(island)
        if island.status == 0:
            return
        self.console.note(
            f"{island.name} ended with status {island.status} after {now - self.started:.0f} s"
        )
        # Its launcher is gone; ranks that it left behind are told to end now (and save).
        send(self.strays(), signal.SIGTERM)
        if self.elastic and island.status != DECIDE:
            return
        if self.stop_at is None and any(other.status is None for other in self.islands):
            self.stop_at = now + self.plan.grace
            self.console.note(
                f"the others have {self.plan.grace:g} s to notice, save and end by themselves"
            )

    def stop_islands(self, now: float) -> None:
        self.kill_at = now + STOP
        for island in self.islands:
            if island.status is None:
                # Once, and to the launcher only: it passes it on, and a second one would interrupt
                # that.
                island.stopped = True
                send([island.process.pid], signal.SIGTERM)

    def known(self) -> list[int]:
        return [
            process.pid
            for process in [self.store, *(island.process for island in self.islands)]
            if process is not None
        ]

    def strays(self) -> list[int]:
        """Processes that a launcher left behind, and what descends from them."""
        return descendants(os.getpid(), leave_out=self.known())

    def everything(self) -> list[int]:
        """All there is but the store."""
        launchers = [island.process.pid for island in self.islands if island.process.poll() is None]
        return list(
            {
                *launchers,
                *descendants(os.getpid(), leave_out=[self.store.pid] if self.store else []),
            }
        )

    # End

    def drain(self) -> None:
        """What is still in the pipes; a process left behind may hold one open for ever, so not for
        long.
        """
        until = time.monotonic() + 1
        while self.selector.get_map() and time.monotonic() < until:
            self.pass_output(0.05)

    def verdict(self) -> int:
        """The worst status: of islands that ended by themselves, 78 (somebody must decide) being
        worse than any other and 75 (saved) better; else that of the signal."""
        statuses = ", ".join(f"{island.name} {island.status}" for island in self.islands)
        own = [island.status for island in self.ended if island.status and not island.stopped]
        told = [island.status for island in self.ended if island.status and island.stopped]
        if own:
            worst = (
                DECIDE
                if DECIDE in own
                else next((status for status in own if status != SAVED), SAVED)
            )
        elif told and set(told) == {SAVED}:
            worst = SAVED
        elif self.signals:
            worst = 128 + self.signals[0]
        else:
            worst = 1 if self.store_lost else 0
        self.console.note(
            f"ended after {time.monotonic() - self.started:.0f} s with status {worst} ({statuses})"
        )
        return worst

    def leave_nothing(self) -> None:
        """Whatever happened before, nothing runs on after this; the store goes last."""
        send(
            self.everything(),
            signal.SIGTERM
            if all(island.status is not None for island in self.islands)
            else signal.SIGKILL,
        )
        until = time.monotonic() + 5
        while self.everything() and time.monotonic() < until:
            self.poll_all()
        send(self.everything(), signal.SIGKILL)
        if self.store is not None:
            send([self.store.pid], signal.SIGTERM)
            try:
                self.store.wait(5)
            except subprocess.TimeoutExpired:
                self.store.kill()
        self.poll_all()
        self.selector.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def poll_all(self) -> None:
        for island in self.islands:
            island.process.poll()
        reap(self.known())
        time.sleep(0.05)


def rehearse(plan: Rehearsal, stream: TextIO | None = None) -> int:
    """Run the rehearsal to its end; returns the worst exit status.

    Raises:
        ValueError: the store did not start.
    """
    return Supervisor(plan, stream or sys.stdout).run()
