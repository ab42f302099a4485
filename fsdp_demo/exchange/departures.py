"""How islands stop being part of a run: what this one tells the others when it stops or ends, and
what it hears of them.

Where members are fixed the store carries it (`comm/presence.py`): an island tells after which step
it stops, and all others stop, too. Where islands come and go the peer group knows who is there and
who is told to end; the others train on, unless all are told.
"""

from __future__ import annotations

from collections.abc import Callable

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
        follow: called in a thread when another island of fixed members is first heard to stop.
    """

    def __init__(self, topology: Topology, connections: Connections, follow: Callable[[], None]):
        self._topology, self._connections, self._follow = topology, connections, follow
        self._presence = Presence(topology, self._heard)

    def listen(self) -> None:
        """Begin to hear of the others; where islands come and go, of another attempt that they have
        begun without this one.
        """
        topology, peers = self._topology, self._connections.peers
        self._presence.start()
        if topology.elastic and topology.rank == 0 and peers is not None:
            self._presence.fence(
                lambda: len(peers.alive) < topology.count,
                lambda: peers.epoch,
                # told to end, too: this one saves what it has, and is no member any more
                lambda why: None if peers.all_end else peers.expel(why),
            )

    def gone(self, step: float) -> str:
        """Why the messages of a step will not come, as far as other islands have told; empty if
        they will.
        """
        if self._connections.elastic:
            return ""
        told = [(island, at) for island, at in self._presence.stopping.items() if at <= step]
        return f"island {told[0][0]} stops after step {told[0][1]}" if told else ""

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
        if peers is not None and peers.elastic:
            alone = together or len(peers.alive) == 1
            peers.leave()
            if alone and topology.rank == 0:
                self._presence.end("left")
            return
        self._presence.tell_stop(runtime.step)
        if stopped:
            self._presence.wait_for_stops(farewell.patience(runtime))
        if topology.rank == 0:
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

    def _heard(self) -> None:
        if not self._connections.elastic:
            self._follow()
