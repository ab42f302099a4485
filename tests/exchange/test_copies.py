"""Ranks of an island that hold the same shard, and do not hold the same values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fsdp_demo
from fsdp_demo import Mismatch
from fsdp_demo.exchange import refusals

from ..support.inside import in_ranks
from ..support.refused import refusal
from ..support.two_layers import train

OPTIONS: dict[str, dict[str, Any]] = {
    "demo": {},
    "diloco": {"period": 2, "inner_optimizers": "as_is"},
}


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("name", OPTIONS)
@in_ranks(1, 2)
def test_copies_without_ddp_refused(me: Any, name: str) -> None:
    """Ranks that nobody synchronizes are refused. The model is whole on both ranks, and was not
    given to DDP: each trains on its own rows.
    """
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = sgd(model)
    fsdp_demo.attach(optimizer, name, model=model, **OPTIONS[name])
    torch.manual_seed(1 + me.rank)
    what, taken = ("gradients", []) if name == "demo" else ("parameters", [0])
    steps: list[int] = []
    differ = f"ranks 0 and 1 of this island hold the same shard, but their {what} differ"
    with pytest.raises(Mismatch, match=f"{differ}.*first in weight.*DistributedDataParallel"):
        train(optimizer, lambda t: model(torch.randn(4, 8)).square().mean(), 3, each=steps.append)
    assert steps == taken


@pytest.mark.parametrize("mesh", ["fsdp axis first", "shards down the columns"])
@in_ranks(1, 4)
def test_copies_of_odd_mesh_refused(mesh: str) -> None:
    """A mesh whose copies of a shard do not follow each other is refused."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    if mesh == "fsdp axis first":
        axes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "cp"))["fsdp"]
    else:
        axes = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=axes)
    said = "hold the same shard, but their parameters.*init_device_mesh"
    with pytest.raises(ValueError, match=said):
        fsdp_demo.attach(sgd(model), "demo", model=model)


@pytest.mark.parametrize("sharded", [False, True])
@in_ranks(1, 3)
def test_copies_of_unlike_models_refused(me: Any, sharded: bool) -> None:
    """Ranks that attach unlike numbers of parameters are refused on all ranks, with the numbers."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(2 + me.rank // 2)))
    if sharded:  # but for the layer that the others lack
        torch.distributed.fsdp.fully_shard(model[0])
        torch.distributed.fsdp.fully_shard(model[1])
    said = "rank 0 of this island attaches 4 parameters, rank 2 6: build the same model"
    refusal(lambda: fsdp_demo.attach(sgd(model), "demo", model=model), said)


def test_copies_under_ddp_accepted(run_ranks: Callable[..., Any]) -> None:
    """Copies that DDP keeps equal are accepted."""

    def run(me: Any) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8)
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = sgd(model)
        exchange = fsdp_demo.attach(optimizer, "demo", model=wrapped)
        torch.manual_seed(1 + me.rank)
        train(optimizer, lambda t: wrapped(torch.randn(4, 8)).square().mean(), 2)
        exchange.finish()
        return model.weight.flatten().tolist()

    found = run_ranks(run, 2, 2)
    assert all(f == found[0] for f in found)


@pytest.mark.parametrize("name", ["diloco", "demo"])
@pytest.mark.parametrize("root", [True, False])
def test_copies_unsharded_root_warned(run_ranks: Callable[..., Any], name: str, root: bool) -> None:
    """A warning names the root module that nobody sharded. Only one layer is sharded: the ranks
    hold the other whole, and train it on rows of their own.
    """

    def run(me: Any) -> list[str]:
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6))
        fully_shard(model[0])
        if root:
            fully_shard(model)
        optimizer = sgd(model)
        told: list[str] = []
        refusals.log.warning = lambda text, *args, **_: told.append(text % args)
        exchange = fsdp_demo.attach(optimizer, name, model=model, **OPTIONS[name])
        torch.manual_seed(1 + me.rank)
        train(optimizer, lambda t: model(torch.randn(4, 6)).square().mean(), 4)
        exchange.detach()
        return told

    told, others = run_ranks(run, 1, 2)
    assert others == []
    if root:
        assert told == []
        return
    what = "gradients" if name == "demo" else "parameters"
    assert len(told) == 1 and f"2 {what} that all ranks of this island hold whole differ" in told[0]
    assert "first in 1.weight" in told[0] and "fully_shard(model)" in told[0]


@pytest.mark.parametrize("flat", [True, False])
@in_ranks(1, 2)
def test_copies_fsdp1_refused(flat: bool) -> None:
    """A model under FSDP1 is refused, and the error names FSDP1."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    options = {"device_id": torch.device("cpu"), "use_orig_params": not flat}
    model = FullyShardedDataParallel(torch.nn.Linear(8, 8), **options)
    with pytest.raises(ValueError, match="FSDP1.*fully_shard|fully_shard.*FSDP1"):
        fsdp_demo.attach(sgd(model), "demo", model=model)
