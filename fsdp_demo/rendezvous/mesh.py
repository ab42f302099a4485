"""How the replicas of one torch.distributed world meet: over the store of that world.

They connect as islands do (`elastic/connect.py`). All must stay: the loss of one ends the run on
all others, and nothing is settled. So the store is asked at the meeting alone.

Keys below those of a peer group:

    life/<replica>       a random word of a replica that looks for the others
    <meeting>/...        where the replicas of one meeting listen; its name is made from their words

A word that is followed by another one was that of a replica that came in vain. Whoever still meets
under it begins again with the newer one, so the store may outlive the processes.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import secrets
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from hashlib import blake2b

from ..elastic.connect import Limits, PeerPosition, starting_peers
from ..elastic.peer_group import PeerGroup, PeerUser
from ..errors import PeerLost, StoreSilent, counted
from ..files import to_json
from ..net.address import interface_addresses
from ..net.link import Link
from ..peers.zeromq import Meeting
from ..store.client import Store
from .position import Replica

log = logging.getLogger("fsdp_demo")

INTERFACE = "GLOO_SOCKET_IFNAME"
"""Names the interface over which ranks of a mesh reach each other, as for torch's gloo."""


class CameAgain(PeerLost):
    """A replica that was waited for has been started again, and looks for the others anew."""


def meeting_place(ranks: Iterable[int]) -> str:
    """The prefix of a peer group's keys in the store of the world, made from its ranks there."""
    return blake2b(str(sorted(ranks)).encode(), digest_size=8).hexdigest()


def address() -> str:
    """The address of this rank, as torch's gloo chooses it: that of the interface
    GLOO_SOCKET_IFNAME (the first of several), else that of the host's name, else loopback. Raises
    ValueError: there is no such interface, or it has no address.
    """
    if names := os.environ.get(INTERFACE, ""):
        return _address_of(names.split(",")[0].strip())
    with suppress(OSError):
        for family, kind, _, _, found in socket.getaddrinfo(
            socket.gethostname(), 0, type=socket.SOCK_DGRAM
        ):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(found)  # an address of this machine; nobody can connect there
                return str(found[0])
    return "127.0.0.1"


def _address_of(interface: str) -> str:
    for _, found in interface_addresses([interface]):
        place = ipaddress.ip_address(found)
        if place.version == 4 or not (place.is_link_local or place.is_loopback):
            return found
    known = ", ".join(name for _, name in socket.if_nameindex())
    raise ValueError(
        f"{INTERFACE}={interface}: this machine has no such interface with an address; it has "
        f"{known}"
    )


def mesh_peers(topology: Replica, link: Link | None, user: PeerUser | None = None) -> PeerGroup:
    """Meet the other ranks of the peer group, all at once. user: what the user gives it. Raises
    ValueError: GLOO_SOCKET_IFNAME names no interface. PeerLost: somebody did not come in time.
    """
    t, here, own = topology, address(), to_json(secrets.token_hex(16))
    names = {i: f"island{i}" for i in range(t.islands)}
    place = PeerPosition(t.island, 0, 1, names, t.world)
    limits = Limits(t.timeout, t.timeout, t.islands, joins=False)
    store = t.open_store().under(f"fsdp_demo/peers/{t.meets_at}")
    keys = [f"life/{i}" for i in range(t.islands)]
    store.set(keys[t.island], own)
    while True:
        words = _words(store, names, t.timeout)
        name = blake2b(" ".join(words).encode(), digest_size=24).hexdigest()

        def goes_on(waited_for: str, words: list[str] = words) -> None:
            now = store.get_all(keys)
            if any(new not in ("", old) for new, old in zip(now, words, strict=True)):
                raise CameAgain(f"{waited_for}, or another replica, was started again")

        meeting = Meeting(
            store,
            name[:16],
            t.island,
            t.islands,
            tuple(names.values()),
            here,
            t.timeout,
            name[16:],
            setting=INTERFACE,
            goes_on=goes_on,
        )
        try:
            peers = starting_peers(meeting, place, lambda: store, link, limits, user)
        except CameAgain as error:
            log.info("%s: meeting again", error)
            continue
        with suppress(StoreSilent):  # it saves a replica that comes again a try with an old word
            store.compare_set(keys[t.island], own, "")
        return peers


def _words(store: Store, names: Mapping[int, str], timeout: float) -> list[str]:
    """The words of all replicas, as the store holds them, once all have come."""
    what = f"the addresses of {counted(len(names), 'island')}"
    found = store.gather(
        "life", range(len(names)), str, timeout, what, label=lambda i, _: f"{i} ({names[i]})"
    )
    return [to_json(word) for word in found.values()]
