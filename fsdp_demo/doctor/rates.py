"""Rules about how fast messages pass: ports, windows, pauses, lost packets, unequal links."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from .measured import Direction, Examination, Finding

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


def measured(seen: Examination) -> Iterator[tuple[int, int, Direction]]:
    """(sender, receiver, what was measured) of the directions that have a rate."""
    for (i, j), found in sorted(seen.directions.items()):
        if found.best is not None:
            yield i, j, found


def port_100_mbit(seen: Examination) -> Iterator[Finding]:
    """An interface runs at 100 Mbit/s or less, or all that an island sends or receives is as fast
    as one of 100 Mbit/s lets it be.
    """
    named = set()
    for island in seen.islands:
        if island.speed_mbit is not None and island.speed_mbit <= 100:
            named.add(island.island)
            yield Finding(
                "port-100-mbit",
                f"{island.interface} of {island.label} runs at {island.speed_mbit} Mbit/s",
                "look at cable, plug and the setting of the switch's port: a gigabit needs all "
                "eight wires and auto-negotiation at both ends (ethtool INTERFACE)",
            )
    low, high = PORT
    slow = [(i, j, d.best) for i, j, d in measured(seen) if d.best and low <= d.best <= high]
    pairs = {frozenset((i, j)) for i, j, _ in slow}
    for pair in sorted(map(sorted, pairs)):
        if named & set(pair):
            continue
        rate = max(best for i, j, best in slow if {i, j} == set(pair))
        one, other = (seen.label(i) for i in pair)
        yield Finding(
            "port-100-mbit",
            f"between {one} and {other} {rate:.0f} Mbit/s pass, with any number of connections: "
            "as much as a port of 100 Mbit/s lets through",
            "look for the port of 100 Mbit/s on the way (ethtool INTERFACE on both machines, then "
            "the switches), or raise the line's contract; otherwise plan with this rate",
        )


def window_limited(seen: Examination) -> Iterator[Finding]:
    """One connection is slower than the link: the window is smaller than rate x round trip."""
    for i, j, found in measured(seen):
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
        where = (
            f"waited {100 * max(here, there):.0f} % of the time for the "
            + ("receiver's window" if there > here else "send buffer")
            if told
            else "is limited by its window"
        )
        yield Finding(
            "window-limited",
            f"one connection from {seen.label(i)} to {seen.label(j)} carries {one:.1f} Mbit/s and "
            f"{where} (about {size(window)} per round trip of {found.rtt_ms:.0f} ms); several "
            f"carry {best:.1f} Mbit/s. The exchange uses {found.connections}",
            f'on {seen.label(who)}: sysctl -w net.ipv4.{variable}="4096 131072 '
            f'{power(needed)}" (its third number is the largest window in bytes)',
        )


def slow_start_after_idle(seen: Examination) -> Iterator[Finding]:
    """The first message after a pause is slow, since TCP forgot its window meanwhile."""
    for i, j, found in measured(seen):
        first, warm, rtt = found.first_after_idle_ms, found.warm_ms, found.rtt_ms
        if first is None or warm is None or rtt is None:
            continue
        if seen.islands[i].slow_start_after_idle is False:
            continue
        more = first - warm
        if more < max(PAUSE_MS, PAUSE_TRIPS * rtt) or first < PAUSE_TIMES * warm:
            continue
        yield Finding(
            "slow-start-after-idle",
            f"after a pause of a second {size(found.idle_bytes or 0)} from {seen.label(i)} to "
            f"{seen.label(j)} take {first:.0f} ms, without a pause {warm:.0f} ms: TCP begins with "
            "a small window again, so each exchange of a method with a period pays it",
            f"on {seen.label(i)}: sysctl -w net.ipv4.tcp_slow_start_after_idle=0",
        )


def packet_loss(seen: Examination) -> Iterator[Finding]:
    """Packets are lost on the way."""
    for i, j, found in measured(seen):
        if found.loss is not None and found.loss >= LOSS:
            yield Finding(
                "packet-loss",
                f"of the packets from {seen.label(i)} to {seen.label(j)} {100 * found.loss:.1f} % "
                "had to be sent again",
                "look at cables, wireless parts and overfull queues on the way; "
                "sysctl -w net.ipv4.tcp_congestion_control=bbr on the sender bears losses better",
            )


def unequal_links(seen: Examination) -> Iterator[Finding]:
    """One direction is much slower than the others, with any number of connections: the exchange
    waits for it.
    """
    found = [(i, j, rate) for i, j, d in measured(seen) if (rate := d.best)]
    for i, j, rate in found:
        others = [r for a, b, r in found if (a, b) != (i, j)]
        if others and rate < UNEQUAL * statistics.median(others):
            yield Finding(
                "unequal-links",
                f"from {seen.label(i)} to {seen.label(j)} {rate:.1f} Mbit/s pass, in the other "
                f"directions {statistics.median(others):.1f} (median): each exchange waits for the "
                "slowest",
                "look at what else sends on this way, and at the upload of the line; otherwise "
                "plan with the slowest rate",
            )


def size(count: float) -> str:
    """Bytes for people.

    >>> size(65536), size(3_000_000)
    ('66 kB', '3.0 MB')
    """
    return f"{count / 1e6:.1f} MB" if count >= 999_500 else f"{count / 1e3:.0f} kB"


def power(count: float) -> int:
    """The next power of two, at least 4 MiB.

    >>> power(5_000_000)
    8388608
    """
    return int(max(1 << 22, 1 << int(max(count, 1) - 1).bit_length()))
