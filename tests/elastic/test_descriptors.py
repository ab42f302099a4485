"""How many connections a rank may have: limits of the system, and of libzmq."""

from __future__ import annotations

import resource
from typing import Any

import pytest

from fsdp_demo.elastic import descriptors
from fsdp_demo.elastic.connect import Limits, PeerPosition, newcomer_peers, starting_peers
from fsdp_demo.elastic.join_server import num_connections
from fsdp_demo.errors import PeerLost
from fsdp_demo.net.tcp import raise_to
from fsdp_demo.peers.poller import Poller
from fsdp_demo.peers.zeromq import Meeting

from ..support.inside import in_ranks

CLOSED = "nobody is asked"


class NoStore:
    """The start comes no further than this."""

    def under(self, prefix: str) -> NoStore:
        raise PeerLost(CLOSED)

    get = set = under


def start(enter: Any, slots: int) -> Exception:
    """What a start with so many islands ends with, without a store."""
    names = {slot: f"island{slot}" for slot in range(slots)}
    meeting: Any = Meeting(NoStore(), "run", 0, slots, tuple(names.values()), "", 1.0, among=(0, 1))
    place = PeerPosition(0, 0, 1, names)
    more = (1,) if enter is newcomer_peers else ()
    with pytest.raises((ValueError, PeerLost)) as caught:
        enter(meeting, place, *more, NoStore, None, Limits())
    return caught.value


@pytest.mark.parametrize("enter", [starting_peers, newcomer_peers])
@in_ranks(1, 1)
def test_open_files_soft_limit_raised_hard_limit_named(enter) -> None:
    """A start raises the soft limit of open files, and names a hard limit that is too low."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    assert CLOSED in str(start(enter, 2))
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= descriptors.needed(2)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 512))
    assert CLOSED in str(start(enter, 2))  # it suffices, with less to spare
    said = str(start(enter, 32))
    assert "the limit of open files is 512, and 32 islands need up to" in said
    assert "raise the hard limit to 1024" in said and said.endswith("#open-files)")


@in_ranks(1, 1)
def test_open_files_more_sockets_than_libzmq_allows() -> None:
    """A poller has more connections than libzmq allows by itself: it allows 1,023 sockets, and
    takes three for each.
    """
    if raise_to(2048) < 2048:
        return  # this machine does not let us try
    poller = Poller()
    try:
        assert len(poller.run(lambda: [poller.add(True) for _ in range(360)])) == 360
    finally:
        poller.close(0)


def test_newcomer_of_many_has_fewer_connections() -> None:
    """A newcomer to many islands has few connections to each; those that began were few, and opened
    many to each other.
    """
    few, many = ({n: [None] * 8 for n in range(count)} for count in (2, 20))
    assert num_connections(few) == 8  # type: ignore[arg-type]
    assert num_connections(many) == 1  # type: ignore[arg-type]
