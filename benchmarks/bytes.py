"""Count bytes before anything runs: every preset on a link, or a setting of your own.

    python benchmarks/bytes.py --model llama-3.2-1b --islands 3 --link 200Mbit --rtt 40ms --shards 8
    python benchmarks/bytes.py --model tiny --exchange demo --set topk=16              # one setting of yours

Whole shapes on the meta device, no weights. What the library sends is counted by
`fsdp_demo.exchange.plan`, through the meter that training uses: a test compares the two on real
processes, to the byte. `published_bytes.py` compares published figures.
"""  # noqa: E501

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]

from report import size, table  # noqa: E402

from benchmarks.common import Parser, at_least_one, wrapped  # noqa: E402
from fsdp_demo import (  # noqa: E402
    ExchangeConfig,
    Link,
    load_config,
    preset,
    presets,
    ring_all_reduce_bytes,
)
from fsdp_demo.exchange.plan import plan_model  # noqa: E402
from fsdp_demo.net.link import TCP_SHARE, parse_rtt  # noqa: E402
from fsdp_demo.peers.header import Meter  # noqa: E402
from fsdp_demo.tools.planner.models import Tensors, load, numel  # noqa: E402
from fsdp_demo.tools.planner.rows import settings  # noqa: E402


@dataclass(frozen=True)
class Counts:
    """What island 0 moves: in its largest exchange, and per step on average (bytes sent, received,
    messages one after the other).
    """

    largest: Meter
    average: tuple[float, float, float]


def count(config: ExchangeConfig, tensors: Tensors, islands: int, shards: int = 1) -> Counts:
    """The plan of the library, summed over the ranks of the island; they work side by side, so
    messages are not.
    """
    plans, largest = plan_model(config, tensors, islands, shards), Meter()
    for plan in plans:
        largest.add(plan.most())
    largest.messages = max(p.most().messages for p in plans)
    sent, received, messages = zip(*(p.average() for p in plans), strict=True)
    return Counts(largest, (sum(sent), sum(received), max(messages)))


@dataclass(frozen=True)
class Entry:
    """One preset: per exchange (its largest) and per step on average, for one island. Seconds are
    None without a link.
    """

    preset: str
    settings: str
    sent: int
    received: int
    messages: int
    seconds: float | None
    ratio: float | None
    sent_per_step: float
    received_per_step: float
    seconds_per_step: float | None
    ratio_per_step: float | None
    most_islands: int | None
    """Up to how many islands one exchange sends less than a bf16 ring all-reduce of the model; 0:
    at no number, None: at any.
    """


def seconds(link: Link, sent: float, received: float, messages: float) -> float | None:
    """Bytes over the rate, both directions at once, plus a round trip per message; None if the link
    slows nothing.
    """
    if not link:
        return None
    return messages * link.rtt + (
        8 * max(sent, received) / link.bits_per_second if link.bits_per_second else 0.0
    )


def most_islands(config: ExchangeConfig, tensors: Tensors) -> int | None:
    """See `Entry`. What is gathered costs (R - 1) payloads, a ring 2 (R - 1) / R of the model: the
    former loses from R = 2 x ratio on.
    """

    def less(islands: int) -> bool:
        return count(config, tensors, islands).largest.bytes_sent < ring_all_reduce_bytes(
            islands, 2 * numel(tensors)
        )

    if not less(2):
        return 0
    # reduced, from 6 islands on at the latest: the ratio is the same at any number
    if not any(c.codec.indexed for c in config.channels):
        return None if less(8) else 0
    low, high = 2, 4
    while less(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if less(middle) else (low, middle)
    return low


def entries(
    tensors: Tensors,
    islands: int,
    shards: int,
    link: Link,
    configs: Sequence[ExchangeConfig] | None = None,
) -> list[Entry]:
    """A bf16 ring all-reduce of the gradients at every step, and `configs`; default all presets at
    their published settings.
    """
    chosen = [preset(name) for name in presets()] if configs is None else configs
    ring = ring_all_reduce_bytes(islands, 2 * numel(tensors))
    took = seconds(link, ring, ring, 2 * (islands - 1))
    out = [
        Entry(
            "(all-reduce)",
            "every 1, bf16, ring",
            ring,
            ring,
            2 * (islands - 1),
            took,
            None,
            ring,
            ring,
            took,
            None,
            0,
        )
    ]
    for config in chosen:
        counts = count(config, tensors, islands, shards)
        largest, average = counts.largest, counts.average
        moved = largest.bytes_sent, largest.bytes_received
        out.append(
            Entry(
                config.preset,
                settings(config),
                *moved,
                largest.messages,
                seconds(link, *moved, largest.messages),
                ring / moved[0] if moved[0] else None,
                average[0],
                average[1],
                seconds(link, *average),
                ring / average[0] if average[0] else None,
                most_islands(config, tensors),
            )
        )
    return out


# ---- printing ----------------------------------------------------------------------------------


def _number(value: float | None, unit: str = "") -> str:
    if value is None:
        return "-"
    return (
        f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.3g}"
    ) + unit


def presets_table(facts: dict[str, Any], rows: Sequence[Entry]) -> str:
    timed = rows[0].seconds is not None
    head = (
        "preset settings sent received trips seconds ratio sent/step received/step s/step "
        "ratio/step R<="
    ).split()
    body = []
    for e in rows:
        limit = (
            "any" if e.most_islands is None else str(e.most_islands) if e.most_islands else "none"
        )
        exchange = [
            size(e.sent),
            size(e.received),
            str(e.messages),
            _number(e.seconds),
            _number(e.ratio),
        ]
        step = [
            size(e.sent_per_step),
            size(e.received_per_step),
            _number(e.seconds_per_step),
            _number(e.ratio_per_step),
        ]
        body.append([e.preset, e.settings, *exchange, *step, "-" if e is rows[0] else limit])
    keep = [i for i, name in enumerate(head) if timed or name not in ("seconds", "s/step")]
    cells = [[row[i] for i in keep] for row in (head, *body)]
    shape = f"{facts['islands']} islands" + (
        f" of {facts['shards']} shards" if facts["shards"] > 1 else ""
    )
    title = (
        f"{facts['model']} ({facts['parameters'] / 1e6:.1f} M parameters), {shape}, link "
        f"{facts['link'] or 'not given'}"
    )
    texts = (
        "Bytes of one island (island 0), all its ranks together: of its largest exchange (of "
        "fragments: the largest one), and per step on "
        "average. ratio: times fewer "
        "bytes sent than a bf16 ring all-reduce of the gradients (first row), per exchange and per "
        "step. R<=: up to how many islands one "
        "exchange sends less than that all-reduce. A gather of sparse payloads grows with the "
        "number of islands and loses from R = 2 x "
        "payload ratio on; what is reduced keeps its ratio at any R; none: fp32 loses to bf16 per "
        "exchange, the saving is in the period "
        "alone.",
        "trips: round trips of the exchange: 1 where all is gathered (sparse payloads; low-bit "
        "codes between few islands), 3 where "
        "vectors are reduced (header, parts, means), 2 (R - 1) in a ring. seconds: the larger "
        "direction over the link's rate, plus the "
        f"round trips. Headers of Ethernet, IP and TCP add {1 / TCP_SHARE - 1:.1%}. Training waits "
        "for these seconds, except where a "
        "channel has a delay "
        f"({', '.join(n for n in presets() if any(c.schedule.delay for c in preset(n).channels))}).",  # noqa: E501
    )
    what = "Presets at their published settings"
    if "exchange" in facts:
        what = " ".join([facts["exchange"], *(f"--set {text}" for text in facts["set"])])
    return "\n".join(
        [
            f"{what}: {title}",
            "",
            table(cells),
            "",
            *map(wrapped, texts),
        ]
    )


def _parser() -> Parser:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="a known model, or the path of a config.json (default: llama-3.2-1b)",
    )
    parser.add_argument(
        "--exchange",
        metavar="NAME|YAML",
        help="count this preset or yaml file alone",
    )
    parser.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="PATH=VALUE",
        help="changes to it, as in --set topk=16 schedule.sync_every=50",
    )
    parser.add_argument("--islands", type=at_least_one, default=3, metavar="R", help="default: 3")
    parser.add_argument(
        "--shards",
        type=at_least_one,
        default=1,
        metavar="S",
        help="FSDP2 shards of each island (default: 1)",
    )
    parser.add_argument(
        "--link",
        default="200Mbit",
        metavar="RATE",
        help="of an island's connection, or none (default: 200Mbit)",
    )
    parser.add_argument(
        "--rtt", default="", metavar="TIME", help="its round trip, as in 40ms (default: 0)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there, too")
    return parser


def main() -> None:
    parser = _parser()
    args = parser.parse_args()
    try:
        if args.exchange is None and args.set:
            raise ValueError("--set changes an exchange: give --exchange NAME|YAML, too")
        configs = [load_config(args.exchange, args.set)] if args.exchange is not None else None
        link = Link.parse(args.link)
        link = Link(link.bits_per_second, parse_rtt(args.rtt)) if args.rtt else link
        name = args.model or "llama-3.2-1b"
        tensors = load(name)
        facts = {
            "model": Path(name).stem if name.endswith(".json") else name,
            "parameters": numel(tensors),
            "islands": args.islands,
            "shards": args.shards,
            "link": str(link) if link else "",
        }
        if configs is not None:
            facts |= {"exchange": args.exchange, "set": args.set}
        rows = entries(tensors, args.islands, args.shards, link, configs)
        if args.json is not None:
            found = {"presets": {**facts, "rows": [asdict(e) for e in rows]}}
            args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(presets_table(facts, rows))


if __name__ == "__main__":
    main()
