"""The connections of one rank: the line to the other islands with its courier, and the control group inside its own. Opened and closed
together."""

from __future__ import annotations

import torch

from ..channels.placement import Placement
from ..comm.island import Island
from ..comm.meter import Meter
from ..comm.peers import Line
from ..comm.topology import Position, Topology
from ..comm.worker import Courier
from ..hosts.base import Shards


class Connections:
    """What a topology gives the rank at `position`, whose parameters are on `device`.

    Attributes:
        lanes: how many of the copies of a shard have a line.
        courier: runs exchanges on the line; None on a copy beyond the lanes, and when closed.
        island: the other ranks of this replica.
        meter: of the line.
        closed: `close` was called.
    """

    def __init__(self, topology: Topology, position: Position, device: torch.device):
        self._topology, self.closed = topology, False
        self.courier: Courier | None = None
        try:
            line, self.lanes = topology.join(position)
            self.courier = Courier(line) if line is not None else None
            if line is not None and self.courier is not None:
                line.runs_in(self.courier.submit)
            self.meter = line.meter if line is not None else Meter()
            self.island = Island(topology, position, device)
        except BaseException:  # Ctrl-C while waiting for peers, too
            self._close_line()
            raise

    @property
    def line(self) -> Line | None:
        """To the ranks with the same shard on the other islands; None on a copy beyond the lanes, and when closed."""
        return None if self.courier is None else self.courier.line

    def placement(self, shards: Shards, home: str | None) -> Placement:
        """Where channels over `shards` stand; `home`: see there."""
        return Placement(shards, self.island.position, self.lanes, self.island.copies, self._topology.islands, home)

    def close(self) -> bool:
        """Let go of everything; False if a silent peer still holds the courier, which is left behind."""
        self.closed = True
        ended = self._close_line()
        self.island.release()
        return ended

    def _close_line(self) -> bool:
        ended = self.courier is None or self.courier.close()
        self.courier = None
        self._topology.release()
        return ended
