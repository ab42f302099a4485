"""What the file of an engine starts, as processes of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Self

from fsdp_demo.launch.processes import reserve_port

ROOT = Path(__file__).parents[2]
SMALL = "--sequence-length 32 --batch-size 1 --eval-batches 1 --eval-every 0 --log-every 2 "
SMALL += "--set schedule.sync_every=2"


class Played:
    """Processes that end with a `with`, and what islands of recipes/pretrain.py leave in a folder.

    Args:
        folder: where they run; it has the recipes.
        output: of the islands.
    """

    def __init__(self, folder: Path, output: str):
        self.folder, self.output = folder, folder / output
        self.running: list[subprocess.Popen[bytes]] = []
        (folder / "recipes").symlink_to(ROOT / "recipes")
        foreign = ("ISLAND_", "PET_", "SLURM_")
        self.env = {n: v for n, v in os.environ.items() if not n.startswith(foreign)}
        path = (str(folder), str(Path(sys.executable).parent), self.env["PATH"])
        self.env |= {"PATH": os.pathsep.join(path), "PYTHONPATH": str(ROOT)}
        self.env |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}

    def __enter__(self) -> Self:
        return self

    def address(self, number: int) -> str:
        """A loopback address of its own for each machine that is played."""
        return f"127.{64 + os.getpid() % 64}.{os.getpid() // 64 % 256}.{number + 1}"

    def spawn(self, words: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        """A process; each has a port of its own for torchrun, since they share this machine."""
        port = {"PET_MASTER_PORT": str(reserve_port())}
        with open(self.folder / "log", "a") as log:
            how = dict(cwd=self.folder, stdout=log, stderr=log, env=self.env | port | env)
            self.running.append(subprocess.Popen(words, **how))  # type: ignore[call-overload]
        return self.running[-1]

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def statuses(self, *processes: subprocess.Popen[bytes]) -> list[int]:
        try:
            return [process.wait(500) for process in processes]
        except subprocess.TimeoutExpired:
            raise AssertionError(self.log()) from None

    def agree(self, steps: int) -> None:
        """Two islands have come to this step, and hold the same model."""
        for island in range(2):
            found = json.loads((self.output / f"island{island}" / "summary.json").read_text())
            assert {"islands": 2, "steps": steps, "digests_equal": True}.items() <= found.items()

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """A process with all below it at once, as when their machine is gone."""
        import psutil

        if process.poll() is None:
            tree = psutil.Process(process.pid)
            for found in (tree, *tree.children(recursive=True)):
                found.kill()
            process.wait(60)

    def __exit__(self, *_: object) -> None:
        for process in self.running:
            self.kill(process)
