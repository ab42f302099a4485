"""How islands stop being part of a run: what this one tells the others when it stops or ends, and
what it hears of them.

The peer group of islands knows who is there and who is told to end; the others train on, unless all
are told. In a mesh nobody leaves alone: the loss of a replica ends the attempt.
"""

from __future__ import annotations

import torch

from ..comm.header import END
from ..comm.presence import Presence
from ..comm.topology import Topology
from . import farewell
from .connections import Connections
from .runtime import StepRuntime


class Departures:
    """What one rank tells and hears of islands that stop.

    Args:
        topology, connections: of this rank.
    """

    def __init__(self, topology: Topology, connections: Connections):
        self._topology, self._connections = topology, connections
        self._presence = Presence(topology)

    def listen(self) -> None:
        """Begin to hear of another attempt that the others have begun without this one."""
        topology, peers = self._topology, self._connections.peers
        self._presence.start()
        if topology.elastic and topology.rank == 0 and peers is not None:
            self._presence.fence(
                lambda: len(peers.alive) < topology.count,
                lambda: peers.epoch,
                # told to end, too: this one saves what it has, and is no member any more
                lambda why: None if peers.all_end else peers.expel(why),
            )

    def leave(self, runtime: StepRuntime, stopped: bool) -> None:
        """See `Exchange.leave`."""
        topology, peers = self._topology, self._connections.peers
        together = runtime.stops_by is not None
        if not stopped and peers is not None and peers.abandoned:
            together = True
            farewell.stop_with_all(runtime)
        elif stopped and topology.elastic and runtime.stopped_alone and not together:
            farewell.say(runtime, farewell.patience(runtime))
        if together:
            runtime.queue.note_unsent()
        alone = together or peers is None or len(peers.alive) == 1
        if peers is not None:
            peers.leave()
        if alone and topology.rank == 0:
            self._presence.end("left")

    def finish(self, step: int) -> None:
        """The run has come to its end at `step`, on all islands: no island closes its connections
        while another still reads.
        """
        if (peers := self._connections.peers) is not None:
            peers.all_gather(torch.zeros(1, dtype=torch.uint8, device="cpu"), END, step)
            peers.wait_read(peers.timeout)
        if self._topology.rank == 0:
            self._presence.end("finished")

    def close(self) -> None:
        """Hear no more."""
        self._presence.close()
