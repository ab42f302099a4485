"""gloo as the transport between islands: what torch brings along. It cannot cancel a wait, dies
whole with one peer, neither authenticates nor encrypts, and every rank must be reachable."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..errors import PeerLost
from .store_client import first_line, within
from .transport import Meeting

log = logging.getLogger("fsdp_demo")


class Gloo:
    """`open(k)` gives a process group of the peer group's ranks; one thread serves all connections
    of this rank.
    """

    def __init__(self, meeting: Meeting):
        self._meeting = meeting
        self._options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        self._options._timeout, self._options._threads = timedelta(seconds=meeting.timeout), 1
        if meeting.token:
            log.warning(
                "ISLAND_TOKEN is set, but gloo neither authenticates nor encrypts what islands "
                "send: ISLAND_TRANSPORT=zeromq does"
            )

    def open(self, k: int) -> Any:
        """See `transport.Opener`; concurrent.futures.TimeoutError: the store does not answer."""
        m, options = self._meeting, self._options
        try:
            options._devices = options._devices or [
                dist.ProcessGroupGloo.create_device(hostname=m.address)
            ]
            keys = dist.PrefixStore(f"{m.prefix}/{k}", m.store.store)
            # gloo asks the store without a limit of its own
            return within(
                m.timeout + m.store.deadline,
                lambda: dist.ProcessGroupGloo(keys, m.rank, m.size, options),
            )
        except RuntimeError as error:
            reason = first_line(error)
            raise PeerLost(
                f"{m.names[m.rank]} could not connect to its peers from {m.address} "
                f"(ISLAND_ADDRESS): {reason}"
            ) from error
