"""Small ZeRO engines in forked ranks, without a compiler and without ports: `import` this in the
parent, so that ranks share DeepSpeed.

A rank's world is the default group that `run_ranks` made: an island (islands=2, procs=2), or all
nodes (islands=1, procs=4).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from deepspeed import comm
from torch import nn

import deepspeed_ext

# compiled at run time, only for inference
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)

STAGES = {
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero3": {"stage": 3, "stage3_param_persistence_threshold": 0},
    # several sub-groups, and small tensors that stay gathered
    "zero3-parts": {"stage": 3, "sub_group_size": 3000, "stage3_param_persistence_threshold": 100},
}
BUCKETS = {"reduce_bucket_size": 1_000_000, "allgather_bucket_size": 1_000_000}
"""DeepSpeed's default of 5e8 elements asks for 2 GB a rank, which a machine that does not
overcommit refuses.
"""


class Model(nn.Module):
    """Sizes that ZeRO cuts in the middle of rows, a bias that is one short, and a buffer."""

    def __init__(self, width: int = 66, vocabulary: int = 37):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 5)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Logits [batch, 5] of token rows [batch, length]."""
        x = self.embed(rows).mean(1)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(self.norm(x))


class Aligned(Model):
    """Every dim 0 can be halved: ZeRO-3 cuts it as FSDP2 does."""

    def __init__(self) -> None:
        super().__init__(width=64, vocabulary=38)
        self.head = nn.Linear(64, 6)


def settings(
    stage: str,
    *,
    clip: float = 0.0,
    accumulate: int = 1,
    bf16: bool = False,
    offload: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """DeepSpeed's configuration as a dict. Stage "wrapper": bf16 with gradients accumulated in
    fp32, which `BF16_Optimizer` does; "...-offload": the optimizer in host memory."""
    stage, offload = stage.removesuffix("-offload"), offload or stage.endswith("-offload")
    if stage == "wrapper":
        stage, bf16, more = "zero1", True, {"data_types": {"grad_accum_dtype": "fp32"}, **more}
    zero = BUCKETS | STAGES[stage]
    if offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": clip,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": bf16},
        "steps_per_print": 10**9,
        **more,
    }


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """The inner optimizer of most presets."""
    return torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """The inner optimizer of `demo`."""
    return torch.optim.SGD(parameters, lr=1e-2)


def muon(model: nn.Module, outside: tuple[str, ...] = ("embed", "head")) -> torch.optim.Optimizer:
    """DeepSpeed's own Muon, with its Adam for vectors and for what has a name of `outside`: as its
    engine makes it of `"type": "Muon"`, without a compiler."""
    for n, p in model.named_parameters():
        p.use_muon = p.ndim == 2 and not any(word in n for word in outside)  # type: ignore[attr-defined]
    halves = [
        {
            "params": [p for p in model.parameters() if p.use_muon is matrices],
            "use_muon": matrices,
            "lr": 1e-2,
        }
        for matrices in (True, False)
    ]
    # 3 s, which the rank server takes once (threads.py), and a collection of the tests never
    from deepspeed.runtime.zero.muon import muon_optimizer

    made: torch.optim.Optimizer = muon_optimizer.MuonWithAuxAdam(halves)
    return made


def engine(
    config: dict[str, Any] | str,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = adamw,
    model: nn.Module | None = None,
    **keywords: Any,
) -> Any:
    """A DeepSpeed engine on the default group of this rank; equal weights everywhere unless `model`
    is given. Without `optimizer` the configuration names one."""
    if not comm.is_initialized():
        deepspeed.init_distributed("gloo", dist_init_required=False, verbose=False)
    if model is None:
        torch.manual_seed(7)
        model = Model()
    groups = keywords.pop("groups", None) or [p for p in model.parameters() if p.requires_grad]
    if isinstance(config, dict):  # not the path of a file
        config = {**config, "zero_optimization": BUCKETS | config["zero_optimization"]}
    handed = {"model_parameters": groups} if optimizer is None else {"optimizer": optimizer(groups)}
    made, *_ = deepspeed.initialize(model=model, config=config, **handed, **keywords)
    return made


def attached(
    config: dict[str, Any] | str,
    preset: str,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    model: nn.Module | None = None,
    **changes: Any,
) -> tuple[Any, Any]:
    """An engine, with the optimizer of its preset, and its exchange, in a run of its own: a process
    attaches more than once. `config`: DeepSpeed's, or a stage.
    """
    config = settings(config) if isinstance(config, str) else config
    made = engine(config, optimizer or (sgd if preset == "demo" else adamw), model)
    with another_run():
        return made, deepspeed_ext.attach(made, preset, **changes)


def batch(step: int, rank: int, micro: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [4, 6] and targets [4] of one rank at one step."""
    g = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    return torch.randint(37, (4, 6), generator=g), torch.randint(5, (4,), generator=g)


def train(made: Any, steps: range, rank: int, accumulate: int = 1) -> list[float]:
    """Steps of an engine on data of this rank (over all islands); the losses."""
    losses = []
    for step in steps:
        for micro in range(accumulate):
            rows, targets = batch(step, rank, micro)
            loss = nn.functional.cross_entropy(made(rows).float(), targets)
            made.backward(loss)
            made.step()
            losses.append(float(loss))
    return losses


def gathered(module: nn.Module) -> Any:
    """Within this context the model's own parameters are whole, at any stage."""
    return deepspeed.zero.GatheredParameters(
        [p for p in module.parameters() if hasattr(p, "ds_id")]
    )


def warnings() -> list[str]:
    """Filled with what this rank is warned of from now on."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fsdp_demo").addHandler(handler)
    return said


@contextmanager
def another_run() -> Iterator[None]:
    """An attach within this context has a run id of its own: a process attaches more than once."""
    os.environ["ISLAND_RUN"] += "+"
    yield


def whole(made: Any) -> dict[str, torch.Tensor]:
    """The fp32 parameters by name, gathered inside the island."""
    from deepspeed.utils import safe_get_full_fp32_param

    return {
        n: safe_get_full_fp32_param(p).clone()
        for n, p in made.module.named_parameters()
        if p.requires_grad
    }


def for_trainer(stage: str, **more: Any) -> dict[str, Any]:
    """DeepSpeed's configuration as users of a Trainer write it: "auto" wherever it knows better."""
    numbers = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    return {
        **dict.fromkeys((*numbers, "gradient_clipping"), "auto"),
        "zero_optimization": BUCKETS | STAGES[stage],
        "bf16": {"enabled": "auto"},
        "steps_per_print": 10**9,
        **more,
    }


def shown(trained: Any) -> torch.Tensor:
    """A Trainer's own parameters as one vector, as a forward sees them."""
    params = list(trained.model.parameters())
    with deepspeed.zero.GatheredParameters(params):
        return torch.cat([p.detach().float().flatten() for p in params])
