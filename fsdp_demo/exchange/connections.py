"""The connections of one rank: the peer group to the other islands with its worker, and the control
group inside its own. Opened and closed together."""

from __future__ import annotations

import torch

from ..channels.state import Placement
from ..comm.island import IslandGroup
from ..comm.meter import Meter
from ..comm.peers import PeerGroup
from ..comm.position import ShardPosition
from ..comm.topology import Topology
from ..comm.worker import CommWorker
from ..hosts.base import TrainingHost


class Connections:
    """What a topology gives the rank at `position`, whose parameters are on `device`.

    Attributes:
        active_copies: how many of the copies of a shard have peers.
        worker: runs exchanges on the wire; None on a copy that is not active, and when closed.
        island: the other ranks of this replica.
        meter: of the peer group.
        closed: `close` was called.
    """

    def __init__(self, topology: Topology, position: ShardPosition, device: torch.device):
        self._topology, self.closed = topology, False
        self.worker: CommWorker | None = None
        try:
            peers, self.active_copies = topology.join(position)
            self.worker = CommWorker(peers) if peers is not None else None
            if peers is not None and self.worker is not None:
                peers.runs_in(self.worker.submit)
            self.meter = peers.meter if peers is not None else Meter()
            self.island = IslandGroup(topology, position, device)
        except BaseException:  # Ctrl-C while waiting for peers, too
            self._close_peers()
            raise

    @property
    def peers(self) -> PeerGroup | None:
        """To the ranks with the same shard on the other islands; None on a copy that is not active,
        and when closed.
        """
        return None if self.worker is None else self.worker.peers

    @property
    def elastic(self) -> bool:
        """Whether there is a peer group whose islands come and go."""
        return self.peers is not None and self.peers.elastic

    def placement(self, host: TrainingHost, home: str | None) -> Placement:
        """Where channels over the tensors of `host` stand; `home`: see there."""
        return Placement(
            host,
            self.island.position,
            self.active_copies,
            self.island.copies,
            self._topology.islands,
            home,
        )

    def close(self) -> bool:
        """Let go of everything; False if a silent peer still holds the worker, which is left
        behind.
        """
        self.closed = True
        ended = self._close_peers()
        self.island.release()
        return ended

    def _close_peers(self) -> bool:
        ended = self.worker is None or self.worker.close()
        self.worker = None
        self._topology.release()
        return ended
