"""Rules about what reaches whom: addresses, firewalls, sizes of packets.

Each takes an `Examination` and gives its findings, with no other input.
"""

from __future__ import annotations

from collections.abc import Iterator

from .measured import OK, OTHER, REFUSED, TIMEOUT, Examination, Finding, Reach

BECAME = {
    TIMEOUT: "nothing comes back",
    REFUSED: "the connection is refused",
    OTHER: "somebody else answers",
}
RANGE = (
    'bound the ports (sysctl -w net.ipv4.ip_local_port_range="40000 40999") and open that range '
)


def became(reach: Reach) -> str:
    """What became of a connection, in words."""
    return BECAME.get(reach.state, "there is no way there, or nobody listens")


def misplaced(seen: Examination) -> set[int]:
    """Islands that nobody reaches at the address that they name, but some island at another."""
    towards: dict[int, list[Reach]] = {}
    for (_, receiver), reach in seen.reaches.items():
        towards.setdefault(receiver, []).append(reach)
    return {
        i
        for i, found in towards.items()
        if all(r.state != OK for r in found) and any(r.other for r in found)
    }


def wrong_interface(seen: Examination) -> Iterator[Finding]:
    """An island names an address of the wrong interface: it is reached at another one."""
    for i in sorted(misplaced(seen)):
        island = seen.islands[i]
        found = next(r for (_, to), r in sorted(seen.reaches.items()) if to == i and r.other)
        at = f" ({island.interface})" if island.interface else ", an address that it does not have"
        yield Finding(
            "wrong-interface",
            f"{island.label} names the address {island.address}{at}; nobody reaches it there "
            f"({became(found)}), but {seen.label(found.sender)} reaches it at {found.other}",
            f"set ISLAND_ADDRESS={found.other} on {island.label}",
            stops=True,
        )


def one_sided_firewall(seen: Examination) -> Iterator[Finding]:
    """Connections stand in one direction only. Of two islands the lower one listens at the start,
    so the run starts if that one is reached.
    """
    wrong = misplaced(seen)
    for (i, j), reach in sorted(seen.reaches.items()):
        back = seen.reaches.get((j, i))
        if reach.state == OK or j in wrong or back is None or back.state != OK:
            continue
        starts = j > i
        then = (
            "the run starts, but an island that comes back cannot join by this way"
            if starts
            else "a run does not start"
        )
        yield Finding(
            "one-sided-firewall",
            f"{seen.label(i)} cannot connect to {seen.label(j)} at {reach.address} "
            f"({became(reach)}), while {seen.label(j)} connects to {seen.label(i)}: {then}",
            f"on {seen.label(j)} {RANGE}for the address of {seen.label(i)}; or put both machines "
            "into a WireGuard network",
            stops=not starts,
        )


def unreachable(seen: Examination) -> Iterator[Finding]:
    """No connection stands, in neither direction."""
    wrong = misplaced(seen)
    for (i, j), reach in sorted(seen.reaches.items()):
        back = seen.reaches.get((j, i))
        if i > j or reach.state == OK or (back is not None and back.state == OK):
            continue
        if {i, j} & wrong:
            continue
        there = "" if back is None else f", nor the other way at {back.address} ({became(back)})"
        yield Finding(
            "unreachable",
            f"{seen.label(i)} cannot connect to {seen.label(j)} at {reach.address} "
            f"({became(reach)}){there}",
            f"check ISLAND_ADDRESS on both; {RANGE}between them; or put both machines into a "
            "WireGuard network",
            stops=True,
        )


def mtu_black_hole(seen: Examination) -> Iterator[Finding]:
    """A connection stands, but large packets vanish, and nobody says so (RFC 2923)."""
    told = set()
    for (i, j), reach in sorted(seen.reaches.items()):
        pair = frozenset((i, j))
        if reach.state != OK or reach.whole or not reach.packet or pair in told:
            continue
        told.add(pair)
        yield Finding(
            "mtu-black-hole",
            f"between {seen.label(i)} and {seen.label(j)} packets of {usual(seen, i, j)} bytes "
            f"vanish, those of {reach.packet} bytes pass: something on the way takes smaller "
            "packets only, and does not say so",
            f"on both machines: ip link set dev INTERFACE mtu {reach.packet} (or let the firewalls "
            "on the way pass ICMP of type 3, code 4; or sysctl -w net.ipv4.tcp_mtu_probing=1)",
            stops=True,
        )


def usual(seen: Examination, i: int, j: int) -> int:
    """Bytes of the packets that two islands send each other: of the smaller interface."""
    return min((m for k in (i, j) if (m := seen.islands[k].mtu)), default=1500)


def stalled(seen: Examination) -> Iterator[Finding]:
    """A connection stands, but data do not pass, in packets of any size."""
    for (i, j), reach in sorted(seen.reaches.items()):
        if reach.state == OK and not reach.whole and reach.packet == 0:
            way = "to" if reach.forth is False else "from"
            yield Finding(
                "stalled",
                f"{seen.label(i)} connects to {seen.label(j)}, but data {way} it do not pass, in "
                "packets of any size",
                "look for a proxy, a firewall that inspects connections, or a link that loses most "
                "packets, and take it out of the way",
                stops=True,
            )


def not_measured(seen: Examination) -> Iterator[Finding]:
    """The exchange's connections failed where plain connections stand."""
    for (i, j), found in sorted(seen.directions.items()):
        reach = seen.reaches.get((i, j)), seen.reaches.get((j, i))
        passes = all(r is not None and r.whole for r in reach)  # else that is the reason
        if found.error and passes and (i < j or not seen.directions[j, i].error):
            yield Finding(
                "not-measured",
                f"the connections of the exchange between {seen.label(i)} and {seen.label(j)} "
                f"failed while they were measured: {found.error}",
                "start fsdp-demo doctor again; if it stays, look at what else uses the link, and "
                "at the log of the firewall",
                stops=True,
            )
