"""Descriptors: how many a rank needs for its connections, and the limits of the system on them.

Where there is none left, libzmq aborts the process in the midst of a run. So the soft limit is
raised at the start, and where the hard limit is too low, the start says so.
"""

from __future__ import annotations

import os
from contextlib import suppress

from ..errors import see
from ..net.tcp import raise_to
from .chunks import most_streams

FOR_EACH = 5
"""Descriptors of a connection, as libzmq has it: the connection, the port on which it was waited
for, and one each for a socket, its events and who reads them."""

SHORT = 3  # connections to each peer that are not for messages, while an island joins
SPARE = 256  # for files, loaders of data and connections of strangers, where the system allows them


def needed(slots: int, ranks: int = 1) -> int:
    """Descriptors that the connections of a rank take at most.

    Args:
        slots: islands that there may be. ranks: of this island.

    >>> [needed(slots) for slots in (2, 8, 32, 128)]
    [110, 280, 640, 2560]
    """
    # to every peer, and to one that joins
    return FOR_EACH * (slots * (SHORT + most_streams(slots - 1)) + ranks - 1)


def num_open() -> int:
    """Descriptors that this process has open; 0 where the system does not tell."""
    with suppress(OSError):
        return len(os.listdir("/dev/fd"))
    return 0


def allow(slots: int, ranks: int = 1) -> None:
    """Make sure that this process can have its connections.

    Args:
        slots, ranks: as for `needed`.

    Raises:
        ValueError: the system does not allow so many descriptors.
    """
    wanted = num_open() + needed(slots, ranks)
    found = raise_to(wanted + SPARE)
    if found < wanted:
        raise ValueError(
            f"the limit of open files is {found:,}, and {slots} islands need up to {wanted:,} in "
            f"each rank: {cure(wanted)}{see('open-files')}"
        )


def cure(wanted: int) -> str:
    """How the limit is raised so that so many suffice, and some to spare."""
    enough = 1024 * -(-(wanted + SPARE) // 1024)
    return (
        f"raise the hard limit to {enough} where the ranks are started (ulimit -n {enough}, "
        f"LimitNOFILE={enough} of systemd, --ulimit nofile={enough} of docker), or give fewer "
        "ISLAND_SLOTS"
    )
