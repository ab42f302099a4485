"""The exchanges for which this island may be late (`ExchangeConfig.backup_islands`), as training
sees them; `elastic/late_rounds.py` decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..channels.channel import ChannelPayload, ChannelRunner
from ..config.schema import ExchangeConfig
from ..elastic.late_rounds import LateRounds
from ..rendezvous.topology import Topology
from .in_flight import InFlightQueue
from .sending import PendingExchange


def refuse(topology: Topology) -> None:
    """Raise ValueError where no exchange may go on without an island."""
    if topology.kind == "mesh" or (topology.elastic and topology.least == topology.count):
        raise ValueError(
            "backup_islands is for islands that may come and go. In a mesh, and with ISLAND_MIN "
            "as large as ISLAND_COUNT, all must stay: lower ISLAND_MIN, or leave it out"
        )


def refuse_pairs(config: ExchangeConfig, topology: Topology) -> None:
    """Raise ValueError for exchanges in pairs where islands may come and go."""
    if config.pairs is not None and topology.elastic and topology.least < topology.islands:
        raise ValueError(
            f"pairs with ISLAND_MIN={topology.least} of {topology.islands}: islands differ, so no "
            "other can stand for a lost one. Set ISLAND_MIN to ISLAND_COUNT, without ISLAND_SLOTS"
        )


class BackupIslands:
    """The exchanges that this island may pass, on one rank. All ranks call each method together."""

    def __init__(self, queue: InFlightQueue, config: ExchangeConfig):
        self._queue, self._flight = queue, PendingExchange(-1, [], {})
        self.rounds = LateRounds(config.backup_islands, config.late_rounds)
        if (peers := queue.connections.peers) is not None:
            peers.pass_by(self.rounds)

    def open(self, coming: Callable[[], tuple[int, Sequence[ChannelRunner]]]) -> None:
        """From now on the next exchange may be passed: `coming` gives its step and channels."""
        if self.rounds.passed >= 0 or self.rounds.step >= 0:
            return
        step, due = coming()
        names = [c.channel.name for c in due]
        parts, layout = {n: ChannelPayload(step) for n in names}, self._queue.layout(names, step)
        flight = self._flight = PendingExchange(step, names, parts, layout=layout)
        self.rounds.open(step, lambda: self._queue.sender.pass_by(flight))

    def settle(self) -> bool:
        """Training has come to an exchange, or ends: nothing is passed from now on. Whether the
        exchange was.
        """
        island = self._queue.connections.island
        (step,) = map(int, island.max(float(self.rounds.close() if island.rank == 0 else -1)))
        if step >= 0:
            self.rounds.take(step)
        self.rounds.step = -1
        return step >= 0

    def take(self) -> bool:
        """Training has come to an exchange. Whether it was passed: it is under way then."""
        if passed := self.settle():
            self.rounds.passed = -1
            self._queue.flights.append(self._flight)
        return passed
