"""What no optimizer of an island steps: frozen parameters and buffers that islands share, and a
look whether frozen parameters stay as they were made equal at `attach`.

A script may move them by hand: the teacher of a student, a target network. Nothing is exchanged of
them then, so each island ends with its own.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm.digests import sums
from ..config.patterns import matches
from ..errors import counted, see
from ..hosts.base import TrainingHost, plain_name
from .runtime import StepRuntime

log = logging.getLogger("fsdp_demo")


def shared_tensors(
    host: TrainingHost, model: torch.nn.Module, own: Sequence[str]
) -> dict[str, Tensor]:
    """Frozen parameters and buffers, by name, but those that are each island's own by a pattern."""
    return {
        name: t
        for name, t in host.untrained_tensors(model).items()
        if t.numel() and not matches(name, own)
    }


def refuse_unknown(host: TrainingHost, model: torch.nn.Module | None, own: Sequence[str]) -> None:
    """Raise ValueError for a pattern of `own_tensors` that fits nothing which could be an island's
    own.
    """
    if not own:
        return
    if model is None:
        raise ValueError(f"own_tensors={list(own)} needs the model: pass model= to attach")
    known = list(host.untrained_tensors(model))
    for pattern in own:
        if not any(matches(name, [pattern]) for name in known):
            there = ", ".join(known[:6]) + " ..." * (len(known) > 6)
            raise ValueError(
                f"own_tensors: {pattern!r} fits no buffer and no frozen parameter of the model "
                f"(there are: {there or 'none'}); a trained parameter cannot be an island's own"
            )


class FrozenWatch:
    """Remembers a sum of the bits of every frozen parameter that islands share.

    Args:
        runtime: of this rank. model: that has them; None: nothing is looked at.

    Attributes:
        pending: there is something to compare with.
    """

    def __init__(self, runtime: StepRuntime, model: torch.nn.Module | None):
        self._runtime = runtime
        self._model = model if runtime.topology.islands > 1 else None
        self._sums: dict[str, int] = {}

    @property
    def pending(self) -> bool:
        """See `FrozenWatch`."""
        return bool(self._sums)

    def note(self) -> None:
        """They are right as they are now. One pass over them, one read from the device."""
        self._sums = self._now()

    def look(self) -> None:
        """Compare, and warn once of those that are others; all ranks of the island call it."""
        if not self.pending:
            return
        now = self._now()
        moved = [name for name, then in self._sums.items() if now.get(name, then) != then]
        if not self._runtime.island.any(bool(moved)):
            return
        self._sums = {}
        if self._runtime.topology.rank == 0:
            log.warning(
                "%s: frozen parameters were moved since attach (%s%s). Nothing keeps those equal, "
                "so each island ends with its own. Make buffers of them, which are averaged; or "
                'say attach(..., own_tensors=["NAME*"]) where that is meant%s',
                self._runtime.topology.name,
                ", ".join(moved[:3]) or "those of another rank",
                f" ..., {counted(len(moved), 'tensor')}" if len(moved) > 3 else "",
                see("frozen-moved"),
            )

    def _now(self) -> dict[str, int]:
        if self._model is None:
            return {}
        host, own = self._runtime.host, self._runtime.config.own_tensors
        frozen = {plain_name(n) for n, p in self._model.named_parameters() if not p.requires_grad}
        tensors = {n: t for n, t in shared_tensors(host, self._model, own).items() if n in frozen}
        return dict(zip(tensors, sums(list(tensors.values()), host.device), strict=True))
