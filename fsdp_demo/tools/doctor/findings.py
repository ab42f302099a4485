"""The rules that name what is wrong, from what was measured.

Each rule is a pure function of an `Examination`; its findings have its name, and a section in
docs/doctor.md under that. Thresholds stand beside the rules that have them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace

from ...elastic.descriptors import cure
from ...errors import size
from .measured import OK, Examination, Finding

# ---- rules about what reaches whom: addresses, firewalls, sizes of packets -----------------------

RANGE = (
    'bound the ports (sysctl -w net.ipv4.ip_local_port_range="40000 40999") and open that range '
)


def wrong_interface(seen: Examination) -> Iterator[Finding]:
    """An island names an address of the wrong interface: it is reached at another one."""
    for i in sorted(seen.misplaced):
        island = seen.islands[i]
        found = next(r for (_, to), r in sorted(seen.reaches.items()) if to == i and r.other)
        at = f" ({island.interface})" if island.interface else ", an address that it does not have"
        yield Finding(
            f"{island.label} names the address {island.address}{at}; nobody reaches it there "
            f"({found.became}), but {seen.label(found.sender)} reaches it at {found.other}",
            f"set ISLAND_ADDRESS={found.other} on {island.label}",
            stops=True,
        )


def one_sided_firewall(seen: Examination) -> Iterator[Finding]:
    """Connections stand in one direction only. Of two islands the lower one listens at the start,
    so the run starts if that one is reached.
    """
    wrong = seen.misplaced
    for (i, j), reach in sorted(seen.reaches.items()):
        back = seen.reaches.get((j, i))
        if reach.state == OK or j in wrong or back is None or back.state != OK:
            continue
        starts, then = j > i, "a run does not start"
        if starts:
            then = "the run starts, but an island that comes back cannot join by this way"
        yield Finding(
            f"{seen.label(i)} cannot connect to {seen.label(j)} at {reach.address} "
            f"({reach.became}), while {seen.label(j)} connects to {seen.label(i)}: {then}",
            f"on {seen.label(j)} {RANGE}for the address of {seen.label(i)}; or put both machines "
            "into a WireGuard network",
            stops=not starts,
        )


def unreachable(seen: Examination) -> Iterator[Finding]:
    """No connection stands, in neither direction."""
    for (i, j), reach in sorted(seen.reaches.items()):
        back = seen.reaches.get((j, i))
        if i > j or reach.state == OK or (back is not None and back.state == OK):
            continue
        if {i, j} & seen.misplaced:
            continue
        there = "" if back is None else f", nor the other way at {back.address} ({back.became})"
        yield Finding(
            f"{seen.label(i)} cannot connect to {seen.label(j)} at {reach.address} "
            f"({reach.became}){there}",
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
            f"between {seen.label(i)} and {seen.label(j)} packets of {seen.usual(i, j)} bytes "
            f"vanish, those of {reach.packet} bytes pass: something on the way takes smaller "
            "packets only, and does not say so",
            f"on both machines: ip link set dev INTERFACE mtu {reach.packet} (or let the firewalls "
            "on the way pass ICMP of type 3, code 4; or sysctl -w net.ipv4.tcp_mtu_probing=1)",
            stops=True,
        )


def stalled(seen: Examination) -> Iterator[Finding]:
    """A connection stands, but data do not pass, in packets of any size."""
    for (i, j), reach in sorted(seen.reaches.items()):
        if reach.state == OK and not reach.whole and reach.packet == 0:
            way = "to" if reach.forth is False else "from"
            yield Finding(
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
                f"the connections of the exchange between {seen.label(i)} and {seen.label(j)} "
                f"failed while they were measured: {found.error}",
                "start fsdp-demo doctor again; if it stays, look at what else uses the link, and "
                "at the log of the firewall",
                stops=True,
            )


# Rules about how fast messages pass: ports, windows, pauses, lost packets, unequal links.

PORT = (85.0, 99.0)
"""Mbit/s that TCP gets of a port of 100 Mbit/s: 1448 of 1538 bytes on the wire are data, 94.1; a
shaped line lets some more through at first."""

WINDOW_GAIN = 1.5  # more connections are so many times as fast as one, where a window limits
WINDOW_SHARE = 0.3  # of the time that the kernel waits for a window
WINDOW_RTT = 2.0  # ms: below, a window hardly limits

PAUSE_TIMES = 1.5  # the first message takes so many times as long, and
PAUSE_TRIPS = 1.5  # at least so many round trips longer, and
PAUSE_MS = 10.0  # at least so many milliseconds

LOSS = 0.02
"""Share of packets. A TCP that fills a link loses some at its queue, as it should; the lab's links
without a fault stay below."""

UNEQUAL = 0.5  # of the median of the others


def port_100_mbit(seen: Examination) -> Iterator[Finding]:
    """An interface runs at 100 Mbit/s or less, or all that an island sends or receives is as fast
    as one of 100 Mbit/s lets it be.
    """
    named = set()
    for island in seen.islands:
        if island.speed_mbit is not None and island.speed_mbit <= 100:
            named.add(island.island)
            yield Finding(
                f"{island.interface} of {island.label} runs at {island.speed_mbit} Mbit/s",
                "look at cable, plug and the setting of the switch's port: a gigabit needs all "
                "eight wires and auto-negotiation at both ends (ethtool INTERFACE)",
            )
    low, high = PORT
    slow = [(i, j, d.best) for i, j, d in seen.measured() if d.best and low <= d.best <= high]
    pairs = {frozenset((i, j)) for i, j, _ in slow}
    for pair in sorted(map(sorted, pairs)):
        if named & set(pair):
            continue
        rate = max(best for i, j, best in slow if {i, j} == set(pair))
        one, other = (seen.label(i) for i in pair)
        yield Finding(
            f"between {one} and {other} {rate:.0f} Mbit/s pass, with any number of connections: "
            "as much as a port of 100 Mbit/s lets through",
            "look for the port of 100 Mbit/s on the way (ethtool INTERFACE on both machines, then "
            "the switches), or raise the line's contract; otherwise plan with this rate",
        )


def window_limited(seen: Examination) -> Iterator[Finding]:
    """One connection is slower than the link: the window is smaller than rate x round trip."""
    for i, j, found in seen.measured():
        one, best = found.mbit_s.get("1"), found.best
        if one is None or best is None or found.rtt_ms is None or found.rtt_ms < WINDOW_RTT:
            continue
        held = found.held_here, found.held_there
        told = any(h is not None for h in held)
        here, there = (h or 0.0 for h in held)
        if best < WINDOW_GAIN * one or (told and max(here, there) < WINDOW_SHARE):
            continue
        window = one * 1e6 / 8 * found.rtt_ms / 1e3
        needed = 2 * best * 1e6 / 8 * found.rtt_ms / 1e3
        who, variable = (j, "tcp_rmem") if there > here else (i, "tcp_wmem")
        where = "is limited by its window"
        if told:
            what = "receiver's window" if there > here else "send buffer"
            where = f"waited {100 * max(here, there):.0f} % of the time for the {what}"
        yield Finding(
            f"one connection from {seen.label(i)} to {seen.label(j)} carries {one:.1f} Mbit/s and "
            f"{where} (about {size(window)} per round trip of {found.rtt_ms:.0f} ms); several "
            f"carry {best:.1f} Mbit/s. The exchange uses {found.connections}",
            f'on {seen.label(who)}: sysctl -w net.ipv4.{variable}="4096 131072 '
            f'{power(needed)}" (its third number is the largest window in bytes)',
        )


def slow_start_after_idle(seen: Examination) -> Iterator[Finding]:
    """The first message after a pause is slow, since TCP forgot its window meanwhile."""
    for i, j, found in seen.measured():
        first, warm, rtt = found.first_after_idle_ms, found.warm_ms, found.rtt_ms
        if first is None or warm is None or rtt is None:
            continue
        if seen.islands[i].slow_start_after_idle is False:
            continue
        more = first - warm
        if more < max(PAUSE_MS, PAUSE_TRIPS * rtt) or first < PAUSE_TIMES * warm:
            continue
        yield Finding(
            f"after a pause of a second {size(found.idle_bytes or 0)} from {seen.label(i)} to "
            f"{seen.label(j)} take {first:.0f} ms, without a pause {warm:.0f} ms: TCP begins with "
            "a small window again, so each exchange of a method with a period pays it",
            f"on {seen.label(i)}: sysctl -w net.ipv4.tcp_slow_start_after_idle=0",
        )


def packet_loss(seen: Examination) -> Iterator[Finding]:
    """Packets are lost on the way."""
    for i, j, found in seen.measured():
        if found.loss is not None and found.loss >= LOSS:
            yield Finding(
                f"of the packets from {seen.label(i)} to {seen.label(j)} {100 * found.loss:.1f} % "
                "had to be sent again",
                "look at cables, wireless parts and overfull queues on the way; "
                "sysctl -w net.ipv4.tcp_congestion_control=bbr on the sender bears losses better",
            )


def unequal_links(seen: Examination) -> Iterator[Finding]:
    """One direction is much slower, with any connections: the exchange waits for it."""
    found = [(i, j, rate) for i, j, d in seen.measured() if (rate := d.best)]
    for i, j, rate in found:
        others = [r for a, b, r in found if (a, b) != (i, j)]
        if others and rate < UNEQUAL * statistics.median(others):
            yield Finding(
                f"from {seen.label(i)} to {seen.label(j)} {rate:.1f} Mbit/s pass, in the other "
                f"directions {statistics.median(others):.1f} (median): each exchange waits for the "
                "slowest",
                "look at what else sends on this way, and at the upload of the line; otherwise "
                "plan with the slowest rate",
            )


def power(count: float) -> int:
    """The next power of two, at least 4 MiB.

    >>> power(5_000_000)
    8388608
    """
    return int(max(1 << 22, 1 << int(max(count, 1) - 1).bit_length()))


STEPS = 1.15  # the slowest step takes so many times the fastest
DISK = 50.0
"""MB/s. A checkpoint of a rank with 1e9 parameters (weights and AdamW in fp32, 12 GB) takes four
minutes at that."""

CLOCK = 5000.0  # ms


def unequal_islands(seen: Examination) -> Iterator[Finding]:
    """One island takes longer for a step: the others wait for it at each exchange."""
    took = {i.island: i.step_seconds for i in seen.islands if i.step_seconds}
    if len(took) < 2:
        return
    slow, fast = max(took, key=lambda i: took[i]), min(took, key=lambda i: took[i])
    if took[slow] < STEPS * took[fast]:
        return
    waits = 100 * (1 - took[fast] / took[slow])
    yield Finding(
        f"a step takes {took[slow]:.3g} s on {seen.label(slow)} and {took[fast]:.3g} s on "
        f"{seen.label(fast)}, which so waits {waits:.0f} % of the time",
        f"look at what else runs on {seen.label(slow)} (nvidia-smi, top), at its clocks and "
        "threads; or give it a smaller batch, or let each island take the steps that it can by "
        "local_steps=by_speed",
    )


def open_files(seen: Examination) -> Iterator[Finding]:
    """A rank may not open as many connections as there may be: it does not start."""
    for island in seen.islands:
        has, needs = island.open_files, island.open_files_needed
        if has is not None and needs is not None and has < needs:
            yield Finding(
                f"{island.label} allows {has:,} open files in a process, and a rank needs up to "
                f"{needs:,}",
                cure(needs),
                stops=True,
            )


def slow_disk(seen: Examination) -> Iterator[Finding]:
    """Checkpoints are written slowly: training stands still meanwhile."""
    for island in seen.islands:
        if island.disk_mb_s is not None and island.disk_mb_s < DISK:
            yield Finding(
                f"{island.label} writes {island.disk_mb_s:.1f} MB/s to its disk: 10 GB of "
                f"checkpoint take {10e3 / max(island.disk_mb_s, 1e-3) / 60:.0f} minutes",
                "write checkpoints to a local disk (--folder says which one is measured), or "
                "fewer of them",
            )


def unlike_versions(seen: Examination) -> Iterator[Finding]:
    """Islands have other releases. Another wire or fsdp_demo stops the run, others change bits."""
    for what in ("fsdp_demo", "wire", "torch", "python"):
        has = {i.label: i.versions.get(what, "unknown") for i in seen.islands}
        if len(set(has.values())) < 2:
            continue
        stops = what in ("fsdp_demo", "wire")
        yield Finding(
            f"{what} differs: " + ", ".join(f"{label} has {has[label]}" for label in has),
            "install one release everywhere"
            + ("" if stops else ": islands with others may differ in the last bit"),
            stops=stops,
        )


def clock_offset(seen: Examination) -> Iterator[Finding]:
    """Clocks differ by seconds: times in logs and files cannot be compared."""
    for (i, j), found in sorted(seen.directions.items()):
        off = found.clock_offset_ms
        if i < j and off is not None and abs(off) > CLOCK:
            yield Finding(
                f"the clock of {seen.label(j)} is {abs(off) / 1e3:.1f} s "
                f"{'ahead of' if off > 0 else 'behind'} that of {seen.label(i)}",
                "let both follow a time server (timedatectl set-ntp true)",
            )


RULES: dict[str, Callable[[Examination], Iterator[Finding]]] = {
    rule.__name__.replace("_", "-"): rule
    for rule in (
        *(wrong_interface, unreachable, one_sided_firewall, mtu_black_hole, stalled),
        *(not_measured, open_files, unlike_versions, port_100_mbit, window_limited),
        *(slow_start_after_idle, packet_loss, unequal_links, unequal_islands),
        *(slow_disk, clock_offset),
    )
}
"""By the name of what they find, in the order of docs/doctor.md."""


def findings(seen: Examination) -> list[Finding]:
    """The findings of all rules; those that stop a run come first."""
    found = [replace(finding, name=name) for name, rule in RULES.items() for finding in rule(seen)]
    return sorted(found, key=lambda finding: not finding.stops)
