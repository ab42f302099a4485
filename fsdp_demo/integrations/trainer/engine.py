"""The Trainer on DeepSpeed: what differs from a torch optimizer that the Trainer steps itself.

`accelerator.backward` steps the engine, so that a step and its exchange are over before the
Trainer's own events around it. The engine clips by its own `gradient_clipping`, saves and loads by
itself, and skips a step whose gradient norm is not finite. Facts: accelerate 1.15,
`DeepSpeedEngineWrapper.backward`; transformers 5.23, `integrations/deepspeed.py`.

What attaches to the engine is found by its entry point (`hosts/base.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from transformers import Trainer

from ...config.schema import ExchangeConfig
from ...hosts import base
from ...rendezvous.topology import Topology

_DEFAULT_CLIP = 1.0  # deepspeed 0.19, where its configuration says nothing


def engine_module_of(trainer: Trainer) -> ModuleType | None:
    """The package that attaches to the Trainer's engine; None without one."""
    return base.named("deepspeed") if trainer.is_deepspeed_enabled else None


def engine_of(trainer: Trainer) -> Any:
    """The engine that trains, None without DeepSpeed. It exists from `train()` on."""
    return trainer.model_wrapped if trainer.is_deepspeed_enabled else None


def engine_topology(trainer: Trainer) -> Topology:
    """The topology of this rank by the engine's package: a mesh, or islands whose ranks have
    compared their environments.
    """
    engine_module = engine_module_of(trainer)
    found: Topology = engine_module.topology() if engine_module is not None else Topology.from_env()
    return found


def settings_of(trainer: Trainer) -> dict[str, Any]:
    """DeepSpeed's configuration, with the Trainer's values in the place of "auto"."""
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    return dict(plugin.deepspeed_config) if plugin is not None else {}


def engine_problems(trainer: Trainer, config: ExchangeConfig) -> dict[str, bool]:
    """What cannot work under DeepSpeed, each a text with the cure, and whether it is so."""
    if not trainer.is_deepspeed_enabled:
        return {}
    settings, limit = settings_of(trainer), trainer.args.max_grad_norm
    made: Any = trainer.optimizer_cls_and_kwargs or (None, {})
    inner = getattr(made[1].get("config"), "inner_optimizers", ("",))[0]
    return {
        "a DeepSpeed engine, and no package in the entry point group fsdp_demo.engines: install "
        "this one again": engine_module_of(trainer) is None,
        f"max_grad_norm={limit} and no gradient_clipping in DeepSpeed's configuration, where it is "
        f'{_DEFAULT_CLIP} by default: write "gradient_clipping": "auto" there': (
            "gradient_clipping" not in settings and limit != _DEFAULT_CLIP
        ),
        f"exchange_optimizer({config.preset!r}), which needs matrices where ZeRO has flat "
        f"partitions: {muon(trainer)}": inner == "muonadamw" and "optimizer" not in settings,
    }


def muon(trainer: Trainer) -> str:
    """The cure for presets whose inner optimizer is Muon: DeepSpeed's, which clips what Muon has
    made of the gradient.
    """
    rates = f'{{"lr": {trainer.args.learning_rate:g}}}'
    return (
        "leave optimizer_cls_and_kwargs out and write "
        f'"optimizer": {{"type": "Muon", "params": {rates}}} into DeepSpeed\'s configuration, with '
        '"gradient_clipping": "auto" and max_grad_norm=0'
    )


def before_steps(
    accelerator: Any, hear: Callable[[torch.Tensor, bool], None]
) -> Callable[[], None]:
    """Call `hear(loss, last)` with the loss of every micro-batch before the engine steps; `last`:
    the step follows. Returns a function that undoes it.
    """
    original = accelerator.backward

    def backward(loss: torch.Tensor, **kwargs: Any) -> Any:
        hear(loss.detach(), accelerator.sync_gradients)
        return original(loss, **kwargs)

    accelerator.backward = backward
    return lambda: accelerator.__dict__.pop("backward", None)
