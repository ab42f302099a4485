"""The exchanges for which this island may be late (`ExchangeConfig.backup_islands`), as training
sees them: one is opened when the exchange before it has been applied, and settled when training
comes to it. `elastic/late_rounds.py` decides in between.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..channels.channel import ChannelPayload
from ..config.schema import ExchangeConfig
from ..elastic.late_rounds import Gate
from ..rendezvous.topology import Topology
from .in_flight import InFlightQueue
from .sending import PendingExchange


def refuse(config: ExchangeConfig, topology: Topology) -> None:
    """Raise ValueError where no exchange of these islands can go on without one of them."""
    if topology.kind == "single":
        return
    what = f"backup_islands={config.backup_islands}"
    if not topology.elastic:
        raise ValueError(
            f"{what} is for islands that may come and go, and in a mesh all must stay: start the "
            "islands by ISLAND_COUNT, or leave it out"
        )
    if topology.least == topology.count:
        raise ValueError(
            f"{what}, but ISLAND_MIN={topology.least} of ISLAND_COUNT={topology.count} says that "
            "all must stay: lower ISLAND_MIN, or leave backup_islands out"
        )
    if config.backup_islands >= topology.islands:
        raise ValueError(
            f"{what} of {topology.islands} islands leaves none to wait for: allowed are 0 to "
            f"{topology.islands - 1}"
        )


class BackupIslands:
    """The exchanges that this island may pass, on one rank. All ranks of the island call the
    methods together, but for `pending`.

    Args:
        leads: this is the first rank of the island, which decides.
    """

    def __init__(self, queue: InFlightQueue, config: ExchangeConfig, leads: bool):
        self._queue, self._leads, self._ended = queue, leads, False
        self._gate = Gate(config.late_rounds)
        self._flight = PendingExchange(-1, [], {})
        if (peers := queue.connections.peers) is not None:
            peers.pass_by(config.backup_islands, self._gate)

    @property
    def pending(self) -> int:
        """The step of the exchange that was passed, until training comes to it; -1: none was."""
        return self._gate.passed

    def open(self, step: int, names: Sequence[str]) -> None:
        """Allow that the next exchange, of these channels at `step`, is passed."""
        if self._ended or self._gate.passed >= 0 or self._gate.step == step:
            return
        parts = {name: ChannelPayload(step) for name in names}
        layout = self._queue.layout(names, step)
        flight = self._flight = PendingExchange(step, list(names), parts, layout=layout)
        self._gate.open(step, lambda: self._queue.sender.pass_by(flight))

    def settle(self, ends: bool = False) -> int:
        """Training has come to the exchange, or `ends`: nothing is passed from now on. The step of
        an exchange that was passed, on all ranks; -1: none was.
        """
        self._ended |= ends
        island = self._queue.connections.island
        (step,) = island.max(float(self._gate.close() if self._leads else -1))
        if step < 0:
            self._gate.reset()
        else:
            self._gate.take(int(step))
        return int(step)

    def take(self) -> bool:
        """Training has come to an exchange. Whether it was passed: it is under way then."""
        passed = self.settle() >= 0
        if passed:
            self._gate.reset()
            self._queue.passed(self._flight)
        return passed

    def forget(self) -> None:
        """Training goes on at another step."""
        self._gate.reset()
