"""An island comes back to a run under way with a checkpoint of its Trainer
(`exchange/returning.py`).

Nothing of it is loaded when training begins: the Trainer starts as if anew. When the others keep
what came since, the Trainer's own methods load it, and `joining.move_to` takes the counters from
there. Facts: transformers 5.23, `Trainer._prepare_for_training`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import Trainer

from ...checkpoint import folders
from ...checkpoint.returning import opened
from ...comm.ranks import Ranks
from ...comm.topology import Topology
from ...exchange.exchange import Exchange
from ...exchange.startup import OwnCheckpoint


def own_checkpoint(trainer: Trainer, topology: Topology) -> OwnCheckpoint | None:
    """The newest whole checkpoint of this island that can stand for a snapshot. All ranks of the
    island call it together.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    ranks = Ranks(
        dist.new_group(backend="gloo") if world > 1 else None, trainer.args.process_index, world
    )
    root = Path(str(trainer.args.output_dir))
    step = ranks.from_first(
        lambda: max(
            (s for s, folder in folders.found(root) if _whole(folder)),
            default=-1,
        )
    )
    folder = root / f"checkpoint-{step}"
    found = None if step < 0 else opened(folder, step, topology, ranks)
    if found is None:
        return None
    saved, mark = found[1:]

    def load(exchange: Exchange) -> dict[str, Any]:
        state, trained = saved.state_for(exchange), _private(trainer)
        trained._load_from_checkpoint(
            str(folder), *([trainer.model_wrapped] if trainer.is_fsdp_enabled else [])
        )
        trained._load_optimizer_and_scheduler(str(folder))
        return state

    return OwnCheckpoint(step, mark, load)


def _whole(folder: Path) -> bool:
    """Sealed, and with the optimizer's state (`save_only_model` leaves it out)."""
    return not folders.misfits(folder) and any(folder.glob("optimizer*"))


def _private(trainer: Any) -> Any:
    return trainer
