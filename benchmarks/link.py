r"""Seconds that one exchange takes on the link between islands, per payload size: how true is a
rehearsed (`--link`) pace?

    fsdp-demo rehearse --islands 2 --procs 1 --link 100Mbit --rtt 40ms --launcher torchrun -- \
        benchmarks/link.py

Run the same script by `torchrun` on machines (or in network namespaces) whose link really is that
slow, and compare the tables. It runs the library's own exchanges: `gather` (sparse payloads, one
way of the link) and `reduce` (dense vectors, there and back). Prints one table on island 0: payload
bytes, median seconds of `--repeat` exchanges (the mean of the islands), and what rate and round
trip alone predict.

`--connections` compares numbers of connections, each with a peer group of its own. They take turns,
exchange by exchange, so that what else the machines do falls on all alike; the last column is the
time over that of the first number. `processor` counts what this process computes meanwhile,
checksums and sums included, on all its cores:

    ... benchmarks/link.py --connections 1 8 --sizes 1000 1000000 32000000

`--busy` trains on something small in the main thread meanwhile, as a step under way would.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from dataclasses import dataclass
from unittest import mock

import torch

from fsdp_demo import Link, Topology
from fsdp_demo.elastic import chunks, connect
from fsdp_demo.elastic.peer_group import PeerGroup
from fsdp_demo.peers.header import PAYLOAD
from fsdp_demo.rendezvous.position import ShardPosition

WAYS = {"gather": 1, "reduce": 2}  # how often it crosses the link, half a round trip each


@dataclass
class Candidate:
    """A peer group to be measured."""

    connections: int
    line: PeerGroup


def seconds(line: PeerGroup, kind: str, size: int) -> tuple[float, float]:
    """Seconds of one exchange of `size` bytes, all islands starting together, and those of the
    processor in this process.
    """
    body = torch.zeros(size, dtype=torch.uint8)
    vector = torch.zeros(size // 4)
    line.all_gather(torch.zeros(1, dtype=torch.uint8))
    start, work = time.perf_counter(), time.process_time()
    if kind == "gather":
        line.gather(line.header(PAYLOAD), body)
    else:
        line.mean(line.header(PAYLOAD), [(vector, "fp32")])
    return time.perf_counter() - start, time.process_time() - work


def medians(
    candidates: list[Candidate], kind: str, size: int, repeat: int
) -> list[tuple[float, float]]:
    """Median seconds, and of the processor, of `repeat` exchanges of each candidate, in turns; the
    first of each does not count.

    Means over the islands: who starts half a round trip late finds what the others sent, and those
    wait longer."""
    times = [[seconds(c.line, kind, size) for c in candidates] for _ in range(repeat + 1)]
    mine = torch.tensor(
        [
            [statistics.median(column) for column in zip(*each, strict=True)]
            for each in zip(*times[1:], strict=True)
        ]
    )
    line = candidates[0].line
    all_of = [
        row.clone().view(torch.float32).view_as(mine)
        for row in line.all_gather(mine.view(-1).view(torch.uint8))
    ]
    return [(float(took), float(work)) for took, work in torch.stack(all_of).mean(0)]


def meet(topology: Topology, connections: int) -> Candidate:
    """A peer group with so many connections to each island; 0: as many as the round trip asks
    for.
    """
    made: list[int] = []

    def streams(rtt: float, num_peers: int) -> int:
        made.append(connections or chunks.streams(rtt, num_peers))
        return made[-1]

    with mock.patch.object(connect, "streams", streams):
        line, _ = topology.join(ShardPosition())
    assert line is not None
    return Candidate(made[-1], line)


def train(work: threading.Thread) -> int:
    """Steps of a small model in this thread until the other has ended, as an exchange runs beside
    training; how many.
    """
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64))
    optimizer, x, steps = torch.optim.AdamW(model.parameters()), torch.randn(32, 64), 0
    while work.is_alive():
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    return steps


def measure(candidates: list[Candidate], args: argparse.Namespace) -> None:
    """Measure all cells, and print each on island 0."""
    say = (
        (lambda text: print(text, flush=True))
        if candidates[0].line.rank == 0
        else (lambda text: None)
    )
    link, size = (
        Link.parse(args.expect) if args.expect else Link.from_env() or Link(),
        candidates[0].line.size,
    )
    say(f"{size} islands")
    names = f"{'exchange':>8} {'bytes':>9} {'connections':>11} {'seconds':>8} {'processor':>9}"
    say(f"{names} {'rate and rtt alone':>18} {'ratio':>6}")
    for kind in args.kinds:
        for n in args.sizes:
            sent = n * (size - 1) * (2 / size if kind == "reduce" else 1)
            expected = WAYS[kind] * link.rtt / 2 + (
                8 * sent / link.bits_per_second if link.bits_per_second else 0.0
            )
            found = medians(candidates, kind, n, args.repeat)
            for c, (took, work) in zip(candidates, found, strict=True):
                ratio = took / found[0][0]
                say(
                    f"{kind:>8} {n:>9} {c.connections:>11} {took:>8.4f} {work:>9.4f} "
                    f"{expected:>18.4f} {ratio:>6.2f}"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = [1_000, 100_000, 1_000_000, 4_000_000]
    parser.add_argument(
        "--sizes", type=int, nargs="*", default=sizes, help="bytes of one island's payload"
    )
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--kinds", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument(
        "--connections",
        type=int,
        nargs="*",
        default=[0],
        help="to each island; 0: as the round trip asks for",
    )
    parser.add_argument("--busy", action="store_true", help="train on something small meanwhile")
    parser.add_argument(
        "--expect",
        default="",
        help="rate,rtt of a real link, for a column (default: the rehearsed one)",
    )
    args = parser.parse_args()
    topology = Topology.from_env()
    candidates = [meet(topology, n) for n in args.connections]
    steps = 0
    if args.busy:
        work = threading.Thread(target=measure, args=(candidates, args))
        work.start()
        steps = train(work)
    else:
        measure(candidates, args)
    for c in candidates:
        c.line.all_gather(torch.zeros(1, dtype=torch.uint8))
        c.line.release()
    if args.busy and topology.island == 0:
        print(f"{steps} steps meanwhile")


if __name__ == "__main__":
    main()
