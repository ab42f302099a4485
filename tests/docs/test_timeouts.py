"""docs/timeouts.md has the defaults of the installed versions."""

from __future__ import annotations

import inspect
import math
import os
import re
from pathlib import Path

import pytest
from torch.distributed import constants
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)
from torch.distributed.launcher.api import LaunchConfig

from fsdp_demo import Topology
from fsdp_demo.launch import rehearse
from fsdp_demo.rendezvous import environment

PAGE = (Path(__file__).parents[2] / "docs" / "timeouts.md").read_text(encoding="utf-8")


def _seconds(row: str) -> list[float]:
    """The numbers in the second column of the row that begins so."""
    (cell,) = re.findall(rf"^\| {re.escape(row)} \| ([^|]*) \|", PAGE, re.MULTILINE)
    return [float(number) for number in re.findall(r"\d+", cell)]


def test_timeouts_of_this_package() -> None:
    """The page has the defaults of the variables, and of a rehearsal."""
    alone = Topology.from_env({})
    assert _seconds("`ISLAND_TIMEOUT`") == [environment.patience({})]
    assert _seconds("`ISLAND_DEAD`") == [alone.dead] and alone.stall == 0.0
    assert _seconds("`ISLAND_STOP`") == [alone.stop_timeout]
    assert _seconds("`fsdp-demo rehearse`: from SIGTERM to SIGKILL") == [rehearse.STOP]


def test_timeouts_of_torch() -> None:
    """The page has those of torch's process groups and of its launcher."""
    gloo, nccl = constants.default_pg_timeout, constants.default_pg_nccl_timeout
    assert _seconds("torch's process group, gloo") == [gloo.total_seconds()]
    if nccl is not None:  # a build for CPUs does not say it
        assert _seconds("torch's process group, NCCL") == [nccl.total_seconds()]
    assert _seconds("torchrun: ranks come together") == [RendezvousTimeout().join.total_seconds()]
    alive = inspect.signature(DynamicRendezvousHandler.from_backend).parameters
    times = [alive[f"keep_alive_{name}"].default for name in ("interval", "max_attempt")]
    assert _seconds("torchrun: a node is silent") == [math.prod(times)]
    launched = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1)
    if "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" not in os.environ:
        assert _seconds("torchrun: from SIGTERM to SIGKILL") == [launched.shutdown_timeout]


def test_timeouts_of_trainers() -> None:
    """The page has those of Accelerate, the Trainer and DeepSpeed."""
    accelerate = pytest.importorskip("accelerate.utils")
    transformers = pytest.importorskip("transformers")
    both = [
        accelerate.InitProcessGroupKwargs(backend=backend).timeout.total_seconds()
        for backend in ("gloo", "nccl")
    ]
    assert _seconds("Accelerate, gloo and NCCL") == both
    fields = transformers.TrainingArguments.__dataclass_fields__
    assert _seconds("Trainer") == [fields["ddp_timeout"].default]
    deepspeed = pytest.importorskip("deepspeed.constants")
    if "DEEPSPEED_TIMEOUT" not in os.environ:
        assert _seconds("DeepSpeed") == [deepspeed.default_pg_timeout.total_seconds()]
