"""What others wrap around a model is taken off in one place."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fsdp_demo
from fsdp_demo import Topology
from fsdp_demo.checkpoint.sharded_state import tensors_of
from fsdp_demo.hosts.torch_params import unwrap_model

ROOT = Path(__file__).parents[2]


def wrapped(me: Any) -> Any:
    """For each wrapping: whether the model is found, and the names that a checkpoint and an
    exchange have for its tensors.
    """
    out = []
    for wrap in (
        lambda m: m,
        torch.compile,
        DistributedDataParallel,
        lambda m: torch.compile(DistributedDataParallel(m)),
    ):
        model = nn.Linear(3, 2)
        outside = wrap(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        given = {"inner_optimizers": "as_is", "topology": Topology.from_env({})}
        exchange = fsdp_demo.attach(optimizer, "diloco", model=outside, **given)
        names = [s.name for s in exchange.host.params]
        out.append((unwrap_model(outside) is model, list(tensors_of(outside, [])), names))
        exchange.detach()
    return out


def test_unwrap_model_is_that_of_attach_and_checkpoints(run_ranks: Any) -> None:
    """Attach and checkpoints see the same model behind its wrappers."""
    expected = (True, ["model.weight", "model.bias"], ["weight", "bias"])
    assert run_ranks(wrapped, islands=1, procs=2) == [[expected] * 4] * 2
    assert unwrap_model(None) is None


def test_unwrap_model_is_in_one_module() -> None:
    """One module knows DistributedDataParallel."""
    files = [f for top in ("fsdp_demo", "deepspeed_ext") for f in (ROOT / top).rglob("*.py")]
    names = {
        f.name: {getattr(n, "id", "") for n in ast.walk(ast.parse(f.read_text(encoding="utf-8")))}
        for f in files
    }
    found = [name for name, used in names.items() if "DistributedDataParallel" in used]
    assert found == ["torch_params.py"]
