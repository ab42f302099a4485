"""The checks of `attach` before anything is sent: parameters and optimizers that an exchange cannot
serve are refused, or warned of.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Sequence
from typing import Any

import torch

from ..channels.channel import ChannelRunner
from ..config.schema import ExchangeConfig
from ..errors import Mismatch, counted, first_few, see
from ..hosts.base import TrainingHost
from ..rendezvous.island import IslandGroup
from .rewritten import sums

log = logging.getLogger("fsdp_demo")


class Copies:
    """The comparison of ranks of one island that hold the same shard, and so must hold the same
    values: each of them sends a part of it, and takes the rest from the others. All ranks of the
    island call the methods together.

    They are compared in `attach`, and in the first exchange, when training has moved the values.
    So ranks that are no replica together (no DDP, no replicate axis) are refused before they mix
    their values.

    A parameter that is whole on ranks that shard others must stay equal there, too. If it differs
    (a root module that was not sharded), only a warning is logged: experts of one name may be
    different experts on each rank.

    Attributes:
        pending: there are copies, and those of the first exchange have not been compared.
    """

    def __init__(self, host: TrainingHost, island: IslandGroup):
        self._host, self._island, shards = host, island, island.position.num_shards
        self._whole = [i for i, p in enumerate(host.params) if p.repeats == shards > 1]
        several = island.position.num_copies > 1 or bool(self._whole)
        self.pending = several and host.device.type != "meta"

    def check(self) -> None:
        """Compare the parameters. Raises ValueError: on all ranks, with two of them and how many
        parameters each has, or the first tensor that differs.
        """
        groups = [group for o in self._host.optimizers for group in o.param_groups]
        held = self._island.everyone(sum(len(group["params"]) for group in groups))
        if odd := [rank for rank, number in enumerate(held) if number != held[0]]:
            raise ValueError(
                f"rank 0 of this island attaches {counted(held[0], 'parameter')}, rank {odd[0]} "
                f"{held[odd[0]]:,}: build the same model and optimizer on all ranks, then attach"
                f"{see('copies-differ')}"
            )
        if self.pending and (found := self._unlike("parameter")):
            raise ValueError(found)

    def look(self, channels: Sequence[ChannelRunner]) -> None:
        """Compare, once, the gradients of the first exchange, if one of these channels sends them,
        else the parameters. This reads from the device. Raises Mismatch: as `check`.
        """
        sources = {c.channel.source for c in channels}
        if not self.pending or not sources & {"gradient", "delta", "parameter"}:
            return
        self.pending = False
        if found := self._unlike("gradient" if "gradient" in sources else "parameter"):
            raise Mismatch(found)

    def _unlike(self, what: str) -> str | None:
        """Why two copies differ, or None. Warns of tensors whole on all shards that differ."""
        shards, names = self._island.position.num_shards, [p.name for p in self._host.params]
        everyone = self._island.everyone(sums(self._host.tensors(what), self._host.device))
        for rank, theirs in enumerate(everyone):
            first = everyone[rank % shards]
            for name, a, b in zip(names, first, theirs, strict=True):
                if a != b:
                    return (
                        f"ranks {rank % shards} and {rank} of this island hold the same shard, but "
                        f"their {what}s differ (first in {name}){_CURE}"
                    )
        odd = [i for i in self._whole if len({each[i] for each in everyone}) > 1]
        if odd and self._island.rank == 0:
            text = (
                "%d %ss that all ranks of this island hold whole differ between them (first in "
                "%s): nothing keeps them equal, each rank trains its own. Call fully_shard(model) "
                "on the whole model, too, not on its layers alone. Experts of each rank may be "
                "meant to differ%s"
            )
            log.warning(text, len(odd), what, names[odd[0]], see("copies-differ"))
        return None


_CURE = (
    ": give the model to DistributedDataParallel, fully_shard or accelerator.prepare before "
    "attach; in a device mesh the ranks of one copy follow each other, as "
    'init_device_mesh(DEVICE, (COPIES, SHARDS), mesh_dim_names=("replicate", "shard")) lays them'
    f"{see('copies-differ')}"
)


DTYPES = (torch.float32, torch.bfloat16, torch.float16)

SECOND_COPIES = {
    r"lookahead|ranger\w*": "slow weights",
    r"\w*schedulefree\w*|ftrl": "z",
    r"\w*madgrad|dadaptsgd|dadaptadagrad": "x0",
    r"trac": "theta_ref",
}
"""Optimizers that write parameters from a copy of them: names of classes -> that of the copy."""

MASTERS = "fp32 masters"


def refuse_shown(shows_result: bool, what: str) -> None:
    """Raise RuntimeError for the call `what` inside `Exchange.outer_parameters`."""
    if shows_result:
        raise RuntimeError(
            f"{what} inside outer_parameters(): the model does not hold this replica's own "
            "parameters there, and what is written to them is undone at its end. Leave the "
            f"context, then call {what}"
        )


BESIDE = (
    "each rank has a state of its own, and of those that checkpoint keeps one for all ranks. Save "
    "it beside, by fsdp_demo.checkpoint.save_exchange(FOLDER, exchange) on every rank, and give "
    "attach(state=load_exchange(FOLDER))"
)
REGISTERED = f"an exchange registered for checkpointing with Accelerate: {BESIDE}"


def refuse_foreign_savers() -> None:
    """Raise ValueError if torch.distributed.checkpoint or Accelerate asks for the state of an
    exchange: either would keep one rank's state for all.
    """
    asks = str(sys._getframe(2).f_globals.get("__name__"))  # the caller of `Exchange.state_dict`
    if asks.startswith("torch.distributed.checkpoint"):
        raise ValueError(f"an exchange in a state dict of torch.distributed.checkpoint: {BESIDE}")
    if asks == "accelerate.checkpointing":
        raise ValueError(REGISTERED)


def refuse(host: TrainingHost, config: ExchangeConfig) -> None:
    """Raise ValueError for parameters and optimizers that cannot be exchanged by this method."""
    gradients = config.needs_gradients
    trained = [s for s in host.params if not s.frozen]
    if not trained:
        raise ValueError(
            "nothing to train: none of the optimizer's parameters has requires_grad; attach after "
            "what is trained has been switched on"
        )
    other = [s for s in trained if s.dtype not in DTYPES]
    if other:
        raise ValueError(
            "parameters that cannot be exchanged: "
            f"{first_few([f'{s.name} ({_name(s.dtype)})' for s in other])}; allowed are "
            f"{', '.join(map(_name, DTYPES))}: load the model with dtype=torch.float32 (of a "
            "complex parameter train its view_as_real)"
        )
    refuse_second_copies(host, config)
    for optimizer in host.optimizers:
        refuse_inner(optimizer)
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError(
                "LBFGS calls its closure several times in a step, with gradients of one island "
                "alone: take an optimizer that calls it "
                "once (torch.optim.AdamW), or train without an exchange"
            )
        if isinstance(optimizer, torch.optim.SparseAdam) and gradients:
            raise ValueError(
                "SparseAdam takes sparse gradients, which are neither exchanged nor clipped: take "
                "torch.optim.Adam and "
                "nn.Embedding(sparse=False), or clip=None with a preset that exchanges no gradients"
            )


def refuse_meta(host: TrainingHost, model: torch.nn.Module | None) -> None:
    """Raise ValueError for tensors on the meta device, which have no values yet."""
    own = zip((s.name for s in host.params), host.tensors("parameter"), strict=True)
    rest = [] if model is None else [*model.named_parameters(), *model.named_buffers()]
    empty = [name for name, t in (*own, *rest) if t is not None and t.is_meta]
    if empty:
        raise ValueError(
            "tensors on the meta device, which have no values: "
            f"{first_few(list(dict.fromkeys(empty)))}; call model.to_empty(device=...), initialise "
            "or load the weights, build the optimizer, then attach"
        )


def refuse_inner(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for a sharpness-aware optimizer, whose own `step` may never be called."""
    inner = getattr(optimizer, "base_optimizer", None)
    if isinstance(inner, torch.optim.Optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} steps another optimizer, {type(inner).__name__}, on "
            "gradients of its own making: attach optimizer.base_optimizer, which takes the step, "
            f"and leave the loop as it is{see('base-optimizer')}"
        )
    if hasattr(optimizer, "first_step") and hasattr(optimizer, "second_step"):
        raise ValueError(
            f"{type(optimizer).__name__} takes a step in two halves, with gradients at two places, "
            "and no optimizer under it (base_optimizer) takes it whole: take another one, or train "
            f"without an exchange{see('base-optimizer')}"
        )


def refuse_second_copies(host: TrainingHost, config: ExchangeConfig) -> None:
    """Raise ValueError if both optimizer (from a copy) and exchange write parameters."""
    if not any(c.writes_parameters for c in config.channels):
        return
    for optimizer in (*host.optimizers, *reversed(host.wrappers)):
        copy = second_copy(optimizer)
        if not copy:
            continue
        cure = "take one that keeps none (torch.optim.AdamW)"
        if copy == MASTERS:
            cure = "build it with master_weights=False, on parameters in fp32 (with autocast)"
        elif optimizer in host.wrappers:
            inner = getattr(optimizer, "optimizer", None)
            cure = f"leave it out, and step the {type(inner).__name__} in it"
        raise ValueError(
            f"{type(optimizer).__name__} keeps its own copy of the parameters ({copy}) and writes "
            "them from it, so its next steps undo what an exchange has written, and preset "
            f"{config.preset!r} writes parameters: {cure}, or take a preset that exchanges "
            f"gradients, such as full{see('second-copy')}"
        )


def second_copy(optimizer: Any) -> str:
    """The name of the copy from which an optimizer writes parameters; empty where none is known."""
    places = (optimizer.__dict__, *getattr(optimizer, "param_groups", []))
    masters = [place.get("master_weights") for place in places]  # of apex, of TransformerEngine
    if any(m is not None and m is not False for m in masters):
        return MASTERS
    names = [c.__name__.lower() for c in type(optimizer).__mro__]
    known = (copy for p, copy in SECOND_COPIES.items() if any(re.fullmatch(p, n) for n in names))
    return next(known, "")


def warn_of_outside(host: TrainingHost, model: torch.nn.Module | None, name: str) -> None:
    """Log the trainable parameters of the model that no attached optimizer steps."""
    outside = host.outside(model) if model is not None else []
    if outside:
        text = (
            "%s: %d trainable parameters of the model are in no attached optimizer, and so not "
            "exchanged: %s; attach all optimizers as one "
            "list, or set requires_grad=False, unless another exchange has them"
        )
        log.warning(text, name, len(outside), first_few(outside))


def refuse_sparse(host: TrainingHost) -> None:
    """Raise ValueError if a gradient is sparse."""
    sparse = [
        s.name
        for s, g in zip(host.params, host.tensors("gradient"), strict=True)
        if g is not None and g.layout != torch.strided
    ]
    if sparse:
        raise ValueError(
            f"sparse gradients: {first_few(sparse)}; they are neither exchanged nor clipped: take "
            "nn.Embedding(sparse=False), or clip=None with a preset that exchanges no gradients"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
