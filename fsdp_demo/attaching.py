"""`attach`: from what users have (an optimizer, a preset's name) to an `Exchange`."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.nn.parallel import DistributedDataParallel

from .checkpoint import Saved
from .config import ExchangeConfig
from .exchange import Exchange
from .loading import load_config
from .shards import unwrap
from .topology import Topology

_attached: WeakValueDictionary[torch.optim.Optimizer, Exchange] = WeakValueDictionary()


def attach(
    optimizer: Any,
    config: ExchangeConfig | str,
    *,
    model: torch.nn.Module | None = None,
    topology: Topology | None = None,
    agree: dict[str, Any] | None = None,
    step: int = 0,
    state: dict[str, Any] | Saved | None = None,
    batch: tuple[int, int] | None = None,
    **changes: Any,
) -> Exchange:
    """Join the replicas of a model: from now on every `optimizer.step()` takes part in the exchange.

    Call it after the model is sharded and the optimizer built (after `accelerator.prepare`), on all ranks of all islands.

    Args:
        optimizer: a torch optimizer, an Accelerate wrapper of one, or a list of them that step in turns.
        config: a preset name, the path of a yaml file, or an `ExchangeConfig`.
        model: gives parameters their names, and its frozen parameters and buffers are made equal on all replicas.
        topology: default `Topology.from_env()`.
        agree: further facts of the run (steps, batch, schedule; JSON values) that all replicas must share.
        step: the job's step to start from (resume).
        state: `Exchange.state_dict()` of this rank to resume from, or `checkpoint.open_exchange(...)`, which may have been saved by another
            number of islands or shards. Replicas without one take over from the one that is furthest.
        batch: rows of a micro-batch per rank and micro-batches per step, for the line in the log that says the effective batch.
        changes: changes of the preset, as in `preset(name, **changes)`.

    Raises:
        ValueError: a wrong configuration, a preset not defined for this optimizer, islands that run something else.
        PeerLost: islands that did not come in time.

    Example:
        >>> import torch, fsdp_demo
        >>> model = torch.nn.Linear(4, 4)
        >>> exchange = fsdp_demo.attach(torch.optim.AdamW(model.parameters()), "diloco", model=model)
        >>> exchange.consensus
        True
    """
    if isinstance(config, str):
        config = load_config(config, changes)
    elif changes:
        config = config.changed(changes)
    optimizers = [unwrap(o) for o in (optimizer if isinstance(optimizer, (list, tuple)) else [optimizer])]
    for o in optimizers:
        before = _attached.get(o)
        if before is not None and before.running:
            raise ValueError("this optimizer has an exchange already: finish() or detach() that one first, or attach once")
    facts = {f"agree.{k}": v for k, v in (agree or {}).items()}
    inner: Any = getattr(model, "_orig_mod", model)  # torch.compile
    inner = inner.module if isinstance(inner, DistributedDataParallel) else inner
    exchange = Exchange(optimizers, config, inner, topology or Topology.from_env(), facts, step, state, batch or ())
    _attached.update(dict.fromkeys(optimizers, exchange))
    return exchange
