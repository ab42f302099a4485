"""The Trainer's saves, by the one saver of this package (`checkpoint/manager.py`): sealed with
checksums when all is there, refused where values are not finite or the folder belongs to a later
life, a warning where the disk is full, and `save_total_limit` among islands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from transformers import PretrainedConfig, Trainer

from ...checkpoint.manager import CheckpointManager
from ...checkpoint.nan_check import refuse_exchange
from ...exchange.exchange import Exchange
from ...rendezvous.topology import Topology
from .state import save_state


def manager_of(trainer: Trainer, topology: Topology) -> CheckpointManager:
    """Of the Trainer's folder, which a mesh has as one: there all ranks save together."""
    args: Any = trainer.args
    if topology.kind != "islands":
        together = {"rank": args.process_index, "world": args.world_size, "group": None}
        topology = replace(topology, kind="single", island=0, islands=1, **together)
    limit = args.save_total_limit
    manager = CheckpointManager(args.output_dir, topology, limit if limit and limit > 0 else None)
    manager.one_disk = False
    return manager


class Saves:
    """The saves of one training. All ranks that save together (the island's, in a mesh all) call
    each method together.

    Args:
        trainer: of this rank.
        exchange: of this training.
        manager: of the Trainer's folder (also an attribute).
        apart: see `state.save_state`.

    """

    def __init__(
        self, trainer: Trainer, exchange: Exchange, manager: CheckpointManager, apart: bool
    ):
        self._trainer, self._exchange, self._apart = trainer, exchange, apart
        self.manager = manager

    @property
    def failed(self) -> int:
        """Saves that could not be made."""
        return self.manager.failed_saves

    def save(self, original: Callable[..., Any], model: Any, trial: Any) -> bool:
        """`_save_checkpoint`, and the exchange's parts beside its files; whether it is there.

        Raises:
            PeerLost: what was under way in the exchange is lost, on any rank.
            OSError, NotFinite: the third save in a row that failed.
            Superseded: the folder belongs to a later life.
        """
        state = self._trainer.state

        def write(folder: Path) -> None:
            self.manager.ranks.together(lambda: refuse_exchange(self._exchange), folder.name)
            try:
                original(model, trial)
            except CheckpointException as error:  # torch's, of sharded states
                raise OSError(str(error).strip().splitlines()[-1]) from error
            save_state(folder, self._exchange, self._apart)
            self._write_config(folder, model)
            self.manager.best = step_of(state.best_model_checkpoint)

        made = self.manager.save(state.global_step, write)
        if not made and step_of(state.best_model_checkpoint) == state.global_step:
            state.best_model_checkpoint = None
        return made

    def _write_config(self, folder: Path, model: Any) -> None:
        """A sharded checkpoint has none, `fsdp-demo export` needs it."""
        config = getattr(model, "config", None)
        if (
            self._trainer.args.should_save
            and isinstance(config, PretrainedConfig)
            and not (folder / "config.json").exists()
        ):
            config.save_pretrained(folder)


def step_of(checkpoint: str | None) -> int | None:
    """Of the path of one of the Trainer's checkpoints."""
    return None if checkpoint is None else int(checkpoint.rsplit("-", 1)[-1])
