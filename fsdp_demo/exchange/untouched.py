"""Whether parameters are still what attach left, looked at once, ahead of the first step.

Weights that are loaded after attach would be pulled back: anchors, and what the islands agreed on, are those of before.
"""

from __future__ import annotations

import torch

from ..comm.digests import total
from ..comm.island import Island
from ..hosts.base import Shards


class Untouched:
    """Remembers a sum of the bits of every local tensor: equal values give equal sums, whoever wrote them.

    Args:
        shards: the parameters. island: the ranks that look together.

    Attributes:
        pending: there is something to compare with.
    """

    def __init__(self, shards: Shards, island: Island):
        self._shards, self._island = shards, island
        self._sums: list[int] | None = None

    @property
    def pending(self) -> bool:
        return self._sums is not None

    def note(self) -> None:
        """The parameters as they are now are right. One pass over them, one read from the device."""
        self._sums = self._now() if self._shards.device.type != "meta" else None

    def forget(self) -> None:
        """Compare with nothing."""
        self._sums = None

    def check(self) -> None:
        """Compare once; all ranks of the island call it together.

        Raises:
            ValueError: on all of them, if parameters are others than those noted.
        """
        if self._sums is None:
            return
        other = [s.name for s, now, then in zip(self._shards.shards, self._now(), self._sums, strict=True) if now != then]
        if self._island.any(bool(other)):
            what = f"{', '.join(other[:3])}{' ...' if len(other) > 3 else ''}" if other else "those of another rank"
            raise ValueError(
                f"parameters were changed since attach ({what}): the exchange would pull them back. Load first, then attach, or "
                "attach(state=...) to go on with a saved run; detach() and attach again helps now"
            )
        self._sums = None

    def _now(self) -> list[int]:
        """The sums, read from the device in one go."""
        tensors = self._shards.read("parameter")
        if not tensors:
            return []
        device = self._shards.device
        return list(torch.stack([total([] if t is None else [t], device) for t in tensors]).cpu().tolist())
