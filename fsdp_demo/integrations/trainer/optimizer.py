"""The inner optimizer of presets that have one of their own, as the Trainer takes it."""

from __future__ import annotations

from typing import Any

import torch

from ...config.load import changed, load_config
from ...config.schema import ExchangeConfig
from ...hosts.optimizers import base_optimizer


def exchange_optimizer(
    config: ExchangeConfig | str, lr: float | None = None, **changes: Any
) -> tuple[type, dict[str, Any]]:
    """The optimizer a preset is defined for, as
    `Trainer(optimizer_cls_and_kwargs=exchange_optimizer("demo", lr=1e-3))`.

    Vectors (biases, norms) get no weight decay, as the Trainer does it; the rate follows the
    Trainer's schedule.

    Args:
        config: as for `ExchangeCallback`.
        lr: default the preset's published one.
        changes: of the preset; and `weight_decay` of the optimizer, by default that of
            `fsdp_demo.base_optimizer`.

    Raises:
        ValueError: no learning rate is given and the preset has none.

    Example:
        >>> from fsdp_demo.integrations.trainer import exchange_optimizer
        >>> exchange_optimizer("demo", lr=1e-3)[1]["lr"]
        0.001
    """
    decay = changes.pop("weight_decay", None)
    config = load_config(config, changes) if isinstance(config, str) else changed(config, changes)
    if lr is None and config.lr is None:
        raise ValueError(
            f"preset {config.preset!r} has no published learning rate: pass "
            "lr=training_args.learning_rate"
        )
    return _Factory, {
        "config": config,
        "lr": lr if lr is not None else config.lr,
        "weight_decay": decay,
    }


class _Factory:
    """What the Trainer calls an optimizer factory: `_Factory()(model, **keywords)`."""

    def __call__(
        self, model: torch.nn.Module, config: ExchangeConfig, lr: float, weight_decay: float | None
    ) -> torch.optim.Optimizer:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        options = {} if weight_decay is None else {"weight_decay": weight_decay}
        if config.inner_optimizers[0] == "muonadamw":  # sorts parameters by itself
            return base_optimizer(config, named, lr, **options)
        # ZeRO-3 may have cut it already
        dims = {name: len(getattr(p, "ds_shape", p.shape)) for name, p in named}
        matrices = {"params": [pair for pair in named if dims[pair[0]] >= 2]}
        vectors = {"params": [pair for pair in named if dims[pair[0]] < 2], "weight_decay": 0.0}
        return base_optimizer(
            config, [group for group in (matrices, vectors) if group["params"]], lr, **options
        )
