"""Overrides for torchtitan: `--override.imports` with
`'fsdp_demo.integrations.torchtitan.optimizer={"preset": "diloco"}'`, which exchanges, and
`fsdp_demo.integrations.torchtitan.dataloader`, which gives each island its part of the data. Facts:
torchtitan 0.3.0, `config/override.py`, `Trainer.train`.
"""

from __future__ import annotations

import io
import math
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config.override import derive, override

from ..attaching import attach
from ..config.load import load_config
from ..config.schema import ExchangeConfig
from ..errors import Stopped
from ..exchange.exchange import Exchange
from ..exchange.guard import guard
from ..hosts.step_checks import callers
from ..rendezvous.topology import Topology


class IslandOptimizers(OptimizersContainer):
    """torchtitan's optimizers with an exchange, whose state is an entry per rank beside theirs."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """torchtitan's, with the exchange; `fresh`: its state in a checkpoint is left out."""

        exchange: ExchangeConfig
        fresh: bool = False

    def __init__(self, config: Any, *, model_parts: list[torch.nn.Module]):
        super().__init__(config, model_parts=model_parts)
        self._config, self._saved = config, b""
        self._exchange: Exchange | None = None
        self._part = f"exchange.rank{dist.get_rank()}"

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Attach where the first step begins: a checkpoint has been loaded by then."""
        if self._exchange is None:
            self._exchange = self._attached(_trainer_of(self))
        super().zero_grad(set_to_none=set_to_none)

    def _attached(self, trainer: Any) -> Exchange:
        if trainer.parallel_dims.pp_enabled:
            raise ValueError(
                "pipeline_parallel_degree above 1: ranks of an island must hold one model; set 1"
            )
        training, step = trainer.config.training, trainer.step - 1
        config, norm = self._config.exchange.clipped_once(training.max_norm)
        training.max_norm = norm or math.inf
        exchange = attach(
            self.optimizers,
            config,
            model=self.model_parts[0],
            must_match={"steps": training.steps, "lr_scheduler": str(trainer.config.lr_scheduler)},
            step=step,
            state=torch.load(io.BytesIO(self._saved), "cpu") if self._saved else None,
            batch=(training.local_batch_size, trainer.gradient_accumulation_steps),
            fresh=self._config.fresh,
        )
        if exchange.step != step:  # the others are further
            trainer.step = exchange.step + 1
            trainer.lr_schedulers.load_state_dict({"last_epoch": exchange.step})
        guarded = ExitStack()
        exchange.raise_stopped(False)
        guarded.enter_context(guard(exchange, partial(_save_now, trainer)))
        go_on = trainer.should_continue_training

        def goes_on() -> bool:  # asked between two steps, behind torchtitan's own save
            if exchange.stopped and not exchange.finished:
                guarded.__exit__(Stopped, Stopped("this island is told to end"), None)
            return bool(go_on())

        def ends(*_: Any) -> None:
            if exchange.step == training.steps:
                exchange.finish()
                guarded.close()

        trainer.should_continue_training = goes_on
        self.register_step_post_hook(ends)
        return exchange

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizers, and of the exchange as bytes."""
        state, part = super().state_dict(), io.BytesIO()
        if self._exchange is not None:
            torch.save(self._exchange.state_dict(), part)
        if self._exchange is not None or not self._config.fresh:  # else it is about to be loaded
            state[self._part] = part.getvalue()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the optimizers; the exchange gets its state when it attaches."""
        self._saved = state_dict.get(self._part, b"")
        super().load_state_dict(state_dict)


def _save_now(trainer: Any) -> None:
    """Save what a resume needs, where torchtitan has not done so at this step."""
    saves = trainer.checkpointer
    if saves.enable and trainer.step % saves.interval:
        saves.last_save_model_only = saves.last_save_in_hf = False  # it is not the end of the job
        saves.save(trainer.step, last_step=True)
    saves.maybe_wait_for_saving()


def _trainer_of(optimizers: IslandOptimizers) -> Any:
    """The Trainer, which no optimizer is told of: the next one up the call stack."""
    for found in (frame.f_locals.get("self") for frame in callers()):
        if getattr(found, "optimizers", None) is optimizers:
            return found
    raise RuntimeError("these optimizers need torchtitan's Trainer: else call fsdp_demo.attach")


@override(target=OptimizersContainer.Config)
def optimizer(
    cfg: Any, preset: str, fresh: bool = False, **changes: Any
) -> IslandOptimizers.Config:
    """Optimizers with the exchange of a preset, or of a yaml file, with changes to it."""
    config = load_config(preset, changes)
    if config.by_speed:
        raise ValueError(
            "local_steps='by_speed': torchtitan counts its steps in a loop of its own, which takes "
            "each of them; leave it 'equal'"
        )
    if config.drop is not None:
        raise ValueError("drop: torchtitan accumulates in a loop of its own: leave it out")
    if type(cfg) is not OptimizersContainer.Config or "clip" in changes:
        raise ValueError(
            f"clip={changes.get('clip')}, {type(cfg).__qualname__}: the norm that clips is "
            "--training.max_norm, and the optimizers must be an OptimizersContainer"
        )
    return derive(cfg, IslandOptimizers.Config, exchange=config, fresh=fresh)


@dataclass(kw_only=True, slots=True)
class IslandData(BaseDataLoader.Config):
    """A data loader that counts the ranks of all islands."""

    inner: BaseDataLoader.Config

    def build(self, *, dp_rank: int, dp_world_size: int, **given: Any) -> Any:
        """Make the loader of `inner`."""
        here = Topology.from_env()
        rank, ranks = here.island * dp_world_size + dp_rank, here.islands * dp_world_size
        return self.inner.build(dp_rank=rank, dp_world_size=ranks, **given)


@override(target=BaseDataLoader.Config, fqns=["dataloader"])
def dataloader(cfg: Any) -> IslandData:
    """The loader of training data, for this island's part."""
    return IslandData(inner=cfg)
