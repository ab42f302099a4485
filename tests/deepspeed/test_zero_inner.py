"""DeepSpeed's own inner optimizers under the exchange. They are compiled at run time: minutes, and
a C++ compiler.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed_ext
import fsdp_demo

from ..support import zero
from ..support.inside import in_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("c++") is None,
        reason="DeepSpeed compiles its optimizers: needs a C++ compiler (c++)"),
]  # fmt: skip

OWN: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "AdamW": ("zero2", {}, "desloc", "AdamW"),
    "Adam": ("zero3-parts", {"offload": True}, "local_adam", "AdamW"),
    "SGD": ("zero3", {}, "demo", "SGD"),
    "Muon": ("zero2", {}, "muloco", "MuonAdamW"),
}


def train(me: Any, kind: str) -> Any:
    """Six steps; what the exchange calls the optimizer, and the parameters at the end."""
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # ninja
    stage, more, preset, _ = OWN[kind]
    torch.manual_seed(7)
    model = zero.Model()
    for p in model.parameters():  # as DeepSpeed wants it told
        p.use_muon = p.ndim == 2  # type: ignore[attr-defined]
    settings = zero.settings(stage, **more, optimizer={"type": kind, "params": {"lr": 1e-2}})
    made = zero.engine(settings, None, model)
    exchange = deepspeed_ext.attach(made, preset, **({} if preset == "demo" else {"period": 2}))
    losses = zero.train(made, range(6), me.rank)
    exchange.finish()
    if kind == "Muon":
        rates = {g["use_muon"]: g["lr"] for g in made.optimizer.param_groups}
        assert rates == {True: 1e-2, False: 1e-2}
    return exchange.host.optimizer_names, losses, exchange.digests_equal(), zero.whole(made)


@pytest.mark.parametrize("kind", OWN)
@pytest.mark.timeout(900)
def test_zero_inner_optimizers_of_deepspeed(run_ranks, kind):
    """DeepSpeed's own optimizers train under the exchange."""
    results = run_ranks(train, args=(kind,), timeout=800)
    for names, losses, equal, whole in results:
        assert names == [OWN[kind][3]] and equal and len(losses) == 6
        assert all(bool(x.isfinite().all()) for x in whole.values())
        assert all(torch.equal(whole[n], results[0][3][n]) for n in whole)
    assert set(results[0][3]) == {n for n, _ in zero.Model().named_parameters()}


@in_ranks(1, group=True)
def test_zero_inner_muon_of_library_refused(me):
    """MuonAdamW is refused, and the error names DeepSpeed's Muon."""
    torch.manual_seed(7)
    model = zero.Model()
    inner = fsdp_demo.MuonAdamW(model.named_parameters())
    with pytest.raises(ValueError, match='"type": "Muon"'):
        deepspeed_ext.attach(zero.engine(zero.settings("zero2"), lambda _: inner, model), "muloco")


@pytest.mark.timeout(900)
@in_ranks(1, 1, group=True, timeout=800)
def test_zero_inner_adam_state_fresh(me):
    """The state of DeepSpeed's own Adam is fresh after attach. Coupled decay is left out of the
    step that makes it: one replica is plain training.
    """
    # ninja
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ends = []
    for attached in (True, False):
        params = {"lr": 1e-2, "weight_decay": 0.1, "adam_w_mode": False}
        made = zero.engine(
            zero.settings("zero2", optimizer={"type": "Adam", "params": params}), None
        )
        exchange = deepspeed_ext.attach(made, "full") if attached else None
        if exchange is not None:
            states = exchange.host.tensors("state:exp_avg")
            assert states and not any(bool(s.any()) for s in states if s is not None)
        zero.train(made, range(5), me.rank)
        ends.append(zero.whole(made))
        if exchange is not None:
            exchange.finish()
    assert all(torch.equal(ends[0][n], ends[1][n]) for n in ends[0])
