"""Where channels stand on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..comm.position import ShardPosition
from ..hosts.base import TrainingHost


@dataclass(frozen=True)
class Placement:
    """The shards of one rank, its place in the island, and who shares the work on them.

    Attributes:
        host: what the engine offers: all local tensors.
        position: of the rank in its island.
        active_copies: how many of the copies of a shard send; a copy beyond them keeps no state and
            only receives.
        copies: process group of the ranks of this island that hold the same shard (None: the
            default group).
        islands: number of replicas.
        home: device on which anchor and outer momentum are kept; None: with the shards.

    Example:
        >>> from fsdp_demo.channels.placement import Placement
        >>> from fsdp_demo.comm.position import ShardPosition
        >>> position = ShardPosition(num_copies=2, copy=1)
        >>> Placement(None, position, active_copies=1).active_copy is None
        True
    """

    host: TrainingHost
    position: ShardPosition = ShardPosition()
    active_copies: int = 1
    copies: Any = None
    islands: int = 1
    home: str | None = None

    @property
    def active_copy(self) -> int | None:
        """Which of the active copies this rank is; None beyond them."""
        return self.position.copy if self.position.copy < self.active_copies else None

    @property
    def home_device(self) -> torch.device:
        """The device that `home` names."""
        return self.host.device if self.home is None else torch.device(self.home)
