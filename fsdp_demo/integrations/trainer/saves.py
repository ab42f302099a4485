"""The Trainer's saves, as those of a plain loop: sealed with checksums when all is there, refused
where values are not finite or the folder belongs to a later life, a warning where the disk is
full.

The Trainer writes `checkpoint-N` file by file under its own name. Here it is looked at before
(`write`, around `_save_checkpoint`) and completed after (`seal`, in `on_save`); a checkpoint
without a manifest that fits does not count as held.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from transformers import PretrainedConfig, Trainer

from ...checkpoint import folders
from ...checkpoint.failures import SaveFailures
from ...checkpoint.fence import Fence
from ...checkpoint.finite import refuse_exchange
from ...comm.ranks import Ranks
from ...errors import NotFinite, as_disk_error
from ...exchange.exchange import Exchange
from .state import save_state

log = logging.getLogger("fsdp_demo")


class Saves:
    """The saves of one training. All ranks that save together (the island's, in a mesh all) call
    each method together.

    Args:
        trainer: of this rank.
        exchange: of this training.
        apart: see `state.save_state`.

    """

    def __init__(self, trainer: Trainer, exchange: Exchange, apart: bool):
        self._trainer, self._exchange, self._apart = trainer, exchange, apart
        self._folder = Path(str(trainer.args.output_dir))
        world = dist.get_world_size() if dist.is_initialized() else 1
        self._ranks = Ranks(
            dist.new_group(backend="gloo") if world > 1 else None, trainer.args.process_index, world
        )
        self._fence = Fence(self._folder, exchange.topology.run)
        self._error: Exception | None = None
        self._failures = SaveFailures(exchange.topology.name)

    @property
    def failed(self) -> int:
        """Saves that could not be made."""
        return self._failures.count

    def begin(self, step: int, given_up: bool) -> None:
        """This life owns the folder, and goes on from `step`: what is newer is put aside.
        `given_up`: a person named that step.
        """
        self._fence.take(self._ranks)
        if step:
            life = f"{self._exchange.topology.run}-{self._fence.token}".replace("/", "_")
            self._ranks.from_first(lambda: folders.put_aside(self._folder, step, life, given_up))

    def write(self, original: Callable[..., Any], model: Any, trial: Any) -> None:
        """`_save_checkpoint`, where there is something to be saved.

        Raises:
            PeerLost: what was under way in the exchange is lost, on any rank.
            Superseded: the folder belongs to a later life.
        """
        self._error = None
        try:
            self._ranks.together(self._check, f"checkpoint-{self._trainer.state.global_step}")
            try:
                original(model, trial)
            except Exception as error:
                raise as_disk_error(error) from error
        except (OSError, NotFinite) as error:
            self._error = error
        except CheckpointException as error:  # torch's, of sharded states: raised on all ranks
            self._error = OSError(str(error).strip().splitlines()[-1])

    def _check(self) -> None:
        self._fence.check()
        refuse_exchange(self._exchange)
        if self._ranks.rank == 0:
            folder = self._folder / f"checkpoint-{self._trainer.state.global_step}"
            # The Trainer looks on each rank whether the folder of the best model is there. Of
            # sharded models it makes it only then, so that ranks would find unlike answers.
            folder.mkdir(parents=True, exist_ok=True)
            # one of this step from before is not whole from now on
            (folder / folders.MANIFEST).unlink(missing_ok=True)

    def seal(self, step: int, model: Any) -> bool:
        """The exchange's parts and the manifest; whether the checkpoint is there now.

        Raises:
            OSError, NotFinite: the third save in a row that failed.
        """
        folder, ranks, error = self._folder / f"checkpoint-{step}", self._ranks, self._error
        self._error = None
        try:
            ranks.settle(error, folder.name)
            ranks.together(lambda: self._complete(folder, model), folder.name)
            ranks.together(
                lambda: folders.sum_up(folder, ranks.rank, ranks.world, sync=False), folder.name
            )
            ranks.together(lambda: self._named(folder, step), folder.name)
        except (OSError, NotFinite) as why:
            self._failed(folder, why)
            return False
        self._failures.made()
        return True

    def _complete(self, folder: Path, model: Any) -> None:
        save_state(folder, self._exchange, self._apart)
        config = getattr(model, "config", None)
        if (
            self._trainer.args.should_save
            and isinstance(config, PretrainedConfig)
            and not (folder / "config.json").exists()
        ):
            # a sharded checkpoint has none, `fsdp-demo export` needs it
            config.save_pretrained(folder)

    def _named(self, folder: Path, step: int) -> None:
        self._fence.check()
        if self._ranks.rank == 0:
            folders.seal(folder, step, self._ranks.world, alone=True)

    def _failed(self, folder: Path, why: Exception) -> None:
        self._ranks.together(self._fence.check, folder.name)
        state = self._trainer.state
        if (
            state.best_model_checkpoint is not None
            and Path(state.best_model_checkpoint).name == folder.name
        ):
            state.best_model_checkpoint = None
        if self._ranks.rank == 0 and folders.misfits(folder):
            shutil.rmtree(folder, ignore_errors=True)  # a disk that is full needs the room
        self._failures.failed(f"{folder.name} not saved", why, speaks=self._ranks.rank == 0)
