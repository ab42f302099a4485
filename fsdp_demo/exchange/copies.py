"""Ranks of one island that hold the same shard must hold the same values: each of them sends a part
of it, and takes the rest from the others.

That is looked at in `attach`, and once more in the first exchange, when training has moved the
values. So ranks that nobody made one island of (no DDP, no replicate axis) are refused before they
mix what they have.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..channels.channel import ChannelRunner
from ..comm.digests import sums
from ..comm.island import IslandGroup
from ..errors import Mismatch, see
from ..hosts.base import TrainingHost


def check_copies(host: TrainingHost, island: IslandGroup) -> None:
    """Compare the parameters; all ranks of the island call it together.

    Raises:
        ValueError: on all of them, with the ranks and the first tensor that differs.
    """
    if island.position.num_copies > 1 and host.device.type != "meta":
        if found := _unlike(host, island, host.tensors("parameter")):
            raise ValueError(f"{found.format(what='parameters')}{_CURE}")


class FirstExchange:
    """Compares once what the first exchange is about: gradients, where a channel sends them, else
    parameters. It reads from the device. For islands with copies.
    """

    def __init__(self, host: TrainingHost, island: IslandGroup):
        self._host, self._island = host, island
        self._pending = True

    def look(self, channels: Sequence[ChannelRunner]) -> None:
        """What these channels are about to send; all ranks of the island call it together.

        Raises:
            Mismatch: on all of them, with the ranks and the first tensor that differs.
        """
        sources = {c.channel.source for c in channels}
        if not self._pending or not sources & {"gradient", "delta", "parameter"}:
            return
        self._pending = False
        what = "gradient" if "gradient" in sources else "parameter"
        if found := _unlike(self._host, self._island, self._host.tensors(what)):
            raise Mismatch(f"{found.format(what=what + 's')}{_CURE}")


_CURE = (
    ": give the model to DistributedDataParallel, fully_shard or accelerator.prepare before "
    "attach; in a device mesh the ranks of one copy follow each other, as "
    'init_device_mesh(DEVICE, (COPIES, SHARDS), mesh_dim_names=("replicate", "shard")) lays them'
    f"{see('copies-differ')}"
)


def _unlike(
    host: TrainingHost, island: IslandGroup, tensors: Sequence[Tensor | None]
) -> str | None:
    """Which two ranks hold other values of a tensor, as a text with a gap for `what`; None where
    all copies are equal.
    """
    shards = island.position.num_shards
    everyone = island.everyone(sums(tensors, host.device))
    for rank, theirs in enumerate(everyone):
        first = everyone[rank % shards]
        for param, a, b in zip(host.params, first, theirs, strict=True):
            if a != b:
                return (
                    f"ranks {rank % shards} and {rank} of this island hold the same shard, but "
                    f"their {{what}} differ (first in {param.name})"
                )
    return None
