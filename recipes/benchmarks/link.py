"""Seconds that one exchange takes on the link between islands, per payload size: how true is a rehearsed (`--link`) pace?

    fsdp-demo rehearse --islands 2 --procs 1 --link 100Mbit --rtt 40ms --launcher torchrun -- recipes/benchmarks/link.py

Run the same script by `torchrun` on machines (or in network namespaces) whose link really is that slow, and compare the tables. It runs the
library's own transport: `gather` (sparse payloads, one round trip) and `reduce` (dense vectors, header and two legs, three round trips).
Prints one table on island 0: payload bytes, median seconds of `--repeat` exchanges, and what rate and round trip alone predict. `--ring`
adds gloo's own all_gather, which the library does not use: it passes everything on from neighbour to neighbour, R - 1 round trips. (It is
not paced: compare it on a link that is slow by itself.)
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from fsdp_demo import Link, Topology
from fsdp_demo.comm.collectives import reduce
from fsdp_demo.comm.header import PAYLOAD
from fsdp_demo.comm.peers import Line
from fsdp_demo.comm.topology import Position


def seconds(line: Line, kind: str, size: int, repeat: int) -> float:
    """Median seconds of one exchange of `size` bytes, all islands starting together."""
    times, body = [], torch.zeros(size, dtype=torch.uint8)
    vector = torch.zeros(size // 4)
    for _ in range(repeat + 1):
        line.all_gather(torch.zeros(1, dtype=torch.uint8))
        start = time.perf_counter()
        if kind == "gather":
            line.gather(line.header(PAYLOAD), body)
        elif kind == "ring":
            line.group.allgather([[torch.empty(size, dtype=torch.uint8) for _ in range(line.size)]], [body]).wait()
        else:
            line.gather(line.header(PAYLOAD), body[:0])
            reduce(line, line.header(PAYLOAD), [(vector, "fp32")], [[1.0] * line.size])
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = [1_000, 100_000, 1_000_000, 4_000_000]
    parser.add_argument("--sizes", type=int, nargs="*", default=sizes, help="bytes of one island's payload")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--ring", action="store_true", help="gloo's all_gather, too")
    parser.add_argument("--expect", default="", help="rate,rtt of a real link, for the last column (default: the rehearsed one)")
    args = parser.parse_args()
    topology = Topology.from_env()
    line, _ = topology.join(Position())
    assert line is not None
    link = Link.parse(args.expect) if args.expect else Link.from_env() or Link()
    rows, kinds = [], [("gather", 1), ("reduce", 3), *([("ring", line.size - 1)] if args.ring else [])]
    for kind, legs in kinds:
        for size in args.sizes:
            sent = size * (line.size - 1) * (2 / line.size if kind == "reduce" else 1)
            wire = 8 * sent / link.bits_per_second if link.bits_per_second else 0.0
            rows.append((kind, size, seconds(line, kind, size, args.repeat), legs * link.rtt + wire))
    line.all_gather(torch.zeros(1, dtype=torch.uint8))
    connections = 1 + len(line.more)
    line.release()
    if topology.island == 0:
        print(f"{line.size} islands, connections to each: {connections}")
        print(f"{'transport':>9} {'bytes':>9} {'seconds':>8} {'rate and rtt alone':>18}")
        for kind, size, took, expected in rows:
            print(f"{kind:>9} {size:>9} {took:>8.3f} {expected:>18.3f}")


if __name__ == "__main__":
    main()
