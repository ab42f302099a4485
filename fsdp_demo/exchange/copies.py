"""Ranks of one island that hold the same shard must hold the same values: each of them sends a part
of it, and takes the rest from the others.

That is looked at in `attach`, and once more in the first exchange, when training has moved the
values. So ranks that nobody made one island of (no DDP, no replicate axis) are refused before they
mix what they have.

A parameter that is whole on ranks which shard others must stay equal there, too: nothing gathers
it. Ranks that differ in one (a root that nobody sharded) are named in a warning. It may be meant:
experts of one name can be other experts on each rank.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ..channels.channel import ChannelRunner
from ..comm.digests import sums
from ..comm.island import IslandGroup
from ..errors import Mismatch, see
from ..hosts.base import TrainingHost

log = logging.getLogger("fsdp_demo")


class Copies:
    """Compares what several ranks of an island hold; all of them call it together.

    Attributes:
        any: there is something to compare.
    """

    def __init__(self, host: TrainingHost, island: IslandGroup):
        self._host, self._island = host, island
        self._pending, shards = True, island.position.num_shards
        self._whole = [i for i, p in enumerate(host.params) if p.repeats == shards > 1]
        self.any = host.device.type != "meta" and (
            island.position.num_copies > 1 or bool(self._whole)
        )

    def check(self) -> None:
        """Compare the parameters.

        Raises:
            ValueError: on all ranks, with two of them and the first tensor that differs.
        """
        if self.any and (found := self._unlike("parameter")):
            raise ValueError(found)

    def look(self, channels: Sequence[ChannelRunner]) -> None:
        """Compare once what the first exchange is about: gradients, where one of these channels
        sends them, else parameters. It reads from the device.

        Raises:
            Mismatch: as `check`.
        """
        sources = {c.channel.source for c in channels}
        if not self._pending or not sources & {"gradient", "delta", "parameter"}:
            return
        self._pending = False
        if found := self._unlike("gradient" if "gradient" in sources else "parameter"):
            raise Mismatch(found)

    def _unlike(self, what: str) -> str | None:
        """Which two copies hold other values of a tensor; None where all are equal. A warning for
        tensors that are whole on all shards.
        """
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
            log.warning(
                "%d %ss that all ranks of this island hold whole differ between them (first in "
                "%s): nothing keeps them equal, each rank trains its own. Call fully_shard(model) "
                "on the whole model, too, not on its layers alone. Experts of each rank may be "
                "meant to differ%s",
                len(odd),
                what,
                names[odd[0]],
                see("copies-differ"),
            )
        return None


_CURE = (
    ": give the model to DistributedDataParallel, fully_shard or accelerator.prepare before "
    "attach; in a device mesh the ranks of one copy follow each other, as "
    'init_device_mesh(DEVICE, (COPIES, SHARDS), mesh_dim_names=("replicate", "shard")) lays them'
    f"{see('copies-differ')}"
)
