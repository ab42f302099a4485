"""What `peers.py` compares with: for each of our presets the program that does the same, and how a
model is trained by it.

Not a program. `PEERS` names the comparisons. A `Twin` is the other program's side in an island's
process. DiLoCo is torchft's, which has no place among this project's dependencies: `--torchft DIR`
of `peers.py` says where it lies. DeMo is the published algorithm in our own words (`hotpath.py`),
with the published exchange: two `all_gather` per tensor, of int64 indices and fp32 values.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]

from benchmarks.hotpath import BETA, Published  # noqa: E402
from fsdp_demo import ExchangeConfig, base_optimizer, preset  # noqa: E402

FOLDER = "PEERS_PATH"
"""Variable: a folder of packages that the environment does not have. It comes last."""

if FOLDER in os.environ:
    sys.path.append(os.environ[FOLDER])

LIMIT = timedelta(seconds=600)  # of an exchange
OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}  # of DiLoCo, as published


@dataclass(frozen=True)
class Place:
    """Where a twin meets those on the other islands.

    Attributes:
        island: number of this one, of `islands`.
        address: of this island, which the others reach. host: of island 0.
        port: this one and the next `islands` ones are taken by nobody.
    """

    island: int
    islands: int
    address: str
    host: str
    port: int


class Twin:
    """A model that another program trains, equal to ours; torch's process group is up.

    Args:
        model: with our first weights.
        config: of our side.
        period: steps between exchanges.
    """

    def __init__(self, model: nn.Module, config: ExchangeConfig, period: int, place: Place):
        self.model = self.wrapped = model
        self.config, self.period, self.place = config, period, place
        named = list(model.named_parameters())
        self.optimizer = base_optimizer(config, named, lr=config.lr or 4e-4)
        self.kept = contextlib.ExitStack()  # contexts that last as long as the process
        self.start()

    def start(self) -> None:
        """Put the other program around model and optimizer."""

    def step(self, batch: dict[str, Tensor]) -> None:
        """One step of an ordinary training loop."""
        self.wrapped(**batch).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Ddp(Twin):
    """PyTorch's DistributedDataParallel."""

    def start(self) -> None:
        self.wrapped = nn.parallel.DistributedDataParallel(self.model)


class LocalSgd(Twin):
    """Accelerate's LocalSGD."""

    def start(self) -> None:
        from accelerate import Accelerator
        from accelerate.local_sgd import LocalSGD

        rank, size = str(self.place.island), str(self.place.islands)
        ranks = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        with _environment(ranks | {"MASTER_ADDR": self.place.host}):  # it takes the group that is
            self.accelerator = Accelerator(cpu=True)
        self.wrapped, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
        self.local = self.kept.enter_context(
            LocalSGD(self.accelerator, self.wrapped, self.period, enabled=True)
        )

    def step(self, batch: dict[str, Tensor]) -> None:
        self.accelerator.backward(self.wrapped(**batch).loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.local.step()


class TorchftDiLoCo(Twin):
    """torchft's DiLoCo: one replica group per island, the lighthouse on island 0."""

    def start(self) -> None:
        from torchft import Manager, ProcessGroupGloo
        from torchft.local_sgd import DiLoCo

        at = self.place
        # it tells others the machine's name, which leads nowhere from another network namespace
        socket.gethostname = lambda: at.address
        port = at.port + 1 + at.island  # of this replica group's store
        if at.island == 0:
            self._lighthouse(at.port)
        self.store = dist.TCPStore(at.address, port, is_master=True, wait_for_workers=False)
        manager = Manager(
            pg=ProcessGroupGloo(timeout=LIMIT),
            load_state_dict=lambda state: None,
            state_dict=dict,
            min_replica_size=at.islands,
            use_async_quorum=False,
            init_sync=False,  # the models are equal
            timeout=LIMIT,
            quorum_timeout=LIMIT,
            connect_timeout=LIMIT,
            rank=0,
            world_size=1,
            store_addr=at.address,
            store_port=port,
            lighthouse_addr=f"http://{at.host}:{at.port}",
            replica_id=f"island_{at.island}",
            hostname=at.address,
        )
        outer = torch.optim.SGD(self.model.parameters(), **OUTER)
        self.kept.enter_context(DiLoCo(manager, [self.model], self.optimizer, outer, self.period))

    def _lighthouse(self, port: int) -> None:
        """In a process of its own, whose time is not an island's; it ends with this one."""
        words = [sys.executable, __file__, str(port), str(self.place.islands)]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        self.process = process  # its standard input stays open


def lighthouse(port: int, replicas: int) -> None:
    """torchft's lighthouse, until the standard input ends."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(f"[::]:{port}", replicas)
    print("ready", flush=True)
    sys.stdin.read()
    server.shutdown()


class PublishedDemo(Twin):
    """The published algorithm and its exchange, tensor by tensor."""

    def start(self) -> None:
        # a vector is a matrix of one row
        shapes = [(1, *p.shape) if p.dim() == 1 else tuple(p.shape) for p in self.parameters()]
        self.form = Published(shapes, self.config.channels[0].codec.topk, "cpu")

    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def step(self, batch: dict[str, Tensor]) -> None:
        self.wrapped(**batch).loss.backward()
        rate = self.optimizer.param_groups[0]["lr"]
        form, parameters = self.form, self.parameters()
        for p, m, shape in zip(parameters, form.momentum, form.shapes, strict=True):
            assert p.grad is not None
            m.mul_(BETA).add_(p.grad.view(shape), alpha=rate)
            mine = form.largest(form.forward(m))
            m.sub_(form.backward(form.scattered(*mine, shape), shape))
            index, values = self._gathered(*mine)
            mean = form.backward(form.scattered(index, values, shape), shape)
            p.grad.copy_(mean.sign_().view(p.shape))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _gathered(self, *mine: Tensor) -> list[Tensor]:
        """Those of all islands, one after the other along the last dimension."""
        every = [[torch.empty_like(t) for _ in range(self.place.islands)] for t in mine]
        under_way = [dist.all_gather(e, t, async_op=True) for e, t in zip(every, mine, strict=True)]
        for work in under_way:
            work.wait()
        return [torch.cat(e, 2) for e in every]


@contextlib.contextmanager
def _environment(names: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(names)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@dataclass(frozen=True)
class Peer:
    """One comparison.

    Attributes:
        name: our preset. program: that of the other side. twin: its side in a process.
        settings: ours, beside the period.
        periodic: whether exchanges are `--period` steps apart, else one step.
        differs: why both models cannot end equal; empty where they should.
        module: that must be there. cure: how it is had.
    """

    name: str
    program: str
    twin: type[Twin]
    settings: dict[str, Any] = field(default_factory=dict)
    periodic: bool = False
    differs: str = ""
    module: str = "torch"
    cure: str = ""

    def all_settings(self, period: int) -> dict[str, Any]:
        """Ours. Nothing is clipped on either side."""
        own = {"clip": None, **self.settings}
        return own | {"period": period} if self.periodic else own

    def config(self, period: int) -> ExchangeConfig:
        return preset(self.name, **self.all_settings(period))

    def cycle(self, period: int) -> int:
        """Steps after which the exchanges repeat."""
        return period if self.periodic else 1

    def missing(self) -> str:
        """Why it cannot run here, as a sentence; empty if it can."""
        try:
            importlib.import_module(self.module)
        except ImportError as error:
            return f"{self.name} is not compared with {self.program}: {error} ({self.cure})"
        return ""


PEERS = {
    peer.name: peer
    for peer in (
        Peer("full", "PyTorch DDP", Ddp, {"value_dtype": "fp32"}),
        Peer(
            "local_sgd",
            "Accelerate LocalSGD",
            LocalSgd,
            periodic=True,
            module="accelerate.local_sgd",
            cure="pip install accelerate",
        ),
        Peer(
            "diloco",
            "torchft DiLoCo",
            TorchftDiLoCo,
            {"momentum_warmup": 0},
            periodic=True,
            module="torchft.local_sgd",
            cure="benchmarks/results/links.md, Beside other programs, says how it is installed",
        ),
        Peer(
            "demo",
            "published DeMo",
            PublishedDemo,
            differs="int8 values",
        ),
    )
}

if __name__ == "__main__":
    lighthouse(int(sys.argv[1]), int(sys.argv[2]))
