"""A plug-in for axolotl: `plugins: [fsdp_demo.integrations.axolotl.ExchangePlugin]` in its YAML,
and the keys of `ExchangeArgs`. axolotl trains without a plug-in that it cannot import, so this
module needs nothing that axolotl can do without. Facts: axolotl 0.19.0, `train.py`.
"""

from __future__ import annotations

import math
import os
from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from ..rendezvous import environment
from .trainer.setup import topology_of, warn
from .trainer.unedited import added


class ExchangeArgs(BaseModel):
    """Keys of the YAML: a preset or a yaml file, and changes to it."""

    exchange: str
    exchange_set: dict[str, Any] = {}


class ExchangePlugin(BasePlugin):
    """Gives axolotl's Trainer an exchange, and this island's part of the rows and of the steps."""

    def get_input_args(self) -> str:
        """The name of the model of the keys."""
        return f"{__name__}.ExchangeArgs"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Change the Trainer, before it trains. Raises ValueError as `unedited.train` does."""
        args, topology = trainer.args, topology_of(trainer)
        if not cfg.max_steps and args.max_steps > 0:  # axolotl has counted those of all rows
            args.max_steps = math.ceil(args.max_steps / topology.islands)
            if cfg.warmup_steps is None:
                args.warmup_steps = math.ceil(args.warmup_steps / topology.islands)
        changes = [f"{key}={value}" for key, value in (cfg.exchange_set or {}).items()]
        _, said = added(trainer, cfg.exchange, changes)
        cfg.output_dir = args.output_dir  # of this island, for the model at the end
        if cfg.auto_resume_from_checkpoints or environment.resumes(os.environ):
            cfg.resume_from_checkpoint = cfg.resume_from_checkpoint or "auto"
        warn(trainer, topology, f"{said}; {args.max_steps} steps")
