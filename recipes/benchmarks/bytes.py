"""Count bytes before anything runs: published figures, every preset, or a setting of your own.

    python recipes/benchmarks/bytes.py                                                      # both tables
    python recipes/benchmarks/bytes.py --table published
    python recipes/benchmarks/bytes.py --model llama-3.2-1b --islands 3 --link 200Mbit --rtt 40ms --shards 8
    python recipes/benchmarks/bytes.py --model tiny --exchange demo --set topk=16              # one setting of yours

Whole shapes on the meta device, no weights. What the library sends is counted by
`fsdp_demo.exchange.plan`, through the meter that training uses: a test compares the two on real
processes, to the byte. What a publication sends is computed here, from the same shapes and its own
format.
"""  # noqa: E501

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil, prod
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import Parser, at_least_one  # noqa: E402
from report import size, table  # noqa: E402

from fsdp_demo import (  # noqa: E402
    ExchangeConfig,
    Link,
    load_config,
    preset,
    presets,
    ring_all_reduce_bytes,
)
from fsdp_demo.compression.positions import form  # noqa: E402
from fsdp_demo.compression.quantize import num_bytes  # noqa: E402
from fsdp_demo.config.fragments import layer_of  # noqa: E402
from fsdp_demo.config.parts import BLOCK  # noqa: E402
from fsdp_demo.exchange.plan import plan_model  # noqa: E402
from fsdp_demo.net.link import TCP_SHARE, parse_rtt
from fsdp_demo.peers.meter import Meter  # noqa: E402
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


# ---- published figures -------------------------------------------------------------------------


@dataclass(frozen=True)
class Claim:
    """A published figure in its unit ("MB" or "x", times fewer bytes), the same by the published
    format on the real shapes, and ours.
    """

    claim: str
    published: str
    unit: str
    by_format: float
    ours: float

    @property
    def ratio(self) -> float:
        """How many times fewer bytes ours sends than the published format."""
        return self.by_format / self.ours if self.unit == "MB" else self.ours / self.by_format


def coefficients(tensors: Tensors, k: int) -> int:
    """What DeMo's released code keeps of a model, and the decoupled momentum's after it: k of each
    chunk, the edges of a chunk being the largest divisors up to 64 of its tensor's sides."""
    total = 0
    for _, shape in tensors:
        chunk = prod(max(d for d in range(1, 65) if n % d == 0) for n in shape)
        total += prod(shape) // chunk * min(k, chunk)
    return total


def published(small: Tensors, large: Tensors) -> list[Claim]:
    """All rows; `small` and `large` are the shapes of DeMo's 300M and 1B."""
    return [
        *_demo("300M", small, "636.9", {8: "7.49", 1: "0.93"}),
        *_demo("1B", large, "2416.6", {16: "55.16", 2: "6.89"}),
        *_desloc(large),
        *_streaming(large),
        _sparse_loco(large),
        *_decoupled(small),
    ]


def _demo(label: str, tensors: Tensors, adamw: str, figures: dict[int, str]) -> list[Claim]:
    dense = count(preset("full", value_dtype="bf16"), tensors, 2).largest.bytes_sent
    out = [
        Claim(
            f"DeMo {label}: gradient of AdamW, per step",
            f"{adamw} MB [1]",
            "MB",
            2 * numel(tensors) / 1e6,
            dense / 1e6,
        )
    ]
    for k, figure in figures.items():
        ours = count(preset("demo", topk=k), tensors, 2).largest.bytes_sent
        out.append(
            Claim(
                f"DeMo {label}: k = {k}, per step",
                f"{figure} MB [1]",
                "MB",
                12 * coefficients(tensors, k) / 1e6,
                ours / 1e6,
            )
        )
    return out


def _desloc(tensors: Tensors) -> list[Claim]:
    forms = preset("full"), preset("local_adam"), preset("desloc", embeddings=True)
    ddp, adam, desloc = (count(form, tensors, 2).average[0] for form in forms)
    share = 1 / 256 + 1 / 768 + 1 / 1536  # of the parameters, per step
    return [
        Claim(
            "DES-LOC: below data parallelism, period 256", "170x [2]", "x", 1 / share, ddp / desloc
        ),
        Claim("DES-LOC: below Local Adam", "2x [2]", "x", 3 / 256 / share, adam / desloc),
    ]


def _streaming(tensors: Tensors) -> list[Claim]:
    out, config = [], preset("streaming_diloco", period=100)
    for islands in (2, 4):
        dense, ours = (
            count(c, tensors, islands).average[0]
            for c in (preset("full", value_dtype="bf16"), config)
        )
        out.append(
            Claim(
                f"Streaming DiLoCo: below bf16 data parallelism, R = {islands}",
                "400x [3]",
                "x",
                100 * 16 / 4,
                dense / ours,
            )
        )
    layers = sorted({layer for n, _ in tensors if (layer := layer_of(n)) is not None})
    fragments = ceil(len(layers) / 3)
    parts = [0] * (fragments + 1)
    for n, shape in tensors:
        layer = layer_of(n)
        parts[fragments if layer is None else layers.index(layer) % fragments] += prod(shape)
    peak = count(config, tensors, 2).largest.bytes_sent
    text = f"Streaming DiLoCo: peak ({max(parts) / numel(tensors):.0%} of the model), R = 2"
    return [*out, Claim(text, "one fragment [3]", "MB", max(parts) / 2e6, peak / 1e6)]


def _sparse_loco(tensors: Tensors) -> Claim:
    dense, sent = 4 * numel(tensors), count(preset("sparse_loco"), tensors, 2).largest.bytes_sent
    bits = (12 + 2) * coefficients(tensors, 64)
    return Claim(
        "SparseLoCo: payload below fp32, k = 64", "146x [4]", "x", 8 * dense / bits, dense / sent
    )


def _decoupled(tensors: Tensors) -> list[Claim]:
    """Against DiLoCo in fp32 at the same period."""
    name, dense, out = "decoupled momentum", 4 * numel(tensors), []
    theirs, ours = (
        {k: f(k) for k in (16, 32)}
        for f in (lambda k: 12 * coefficients(tensors, k), lambda k: payload(tensors, k))
    )
    out.append(
        Claim(
            f"{name}: below DiLoCo, k = 16, R = 4, released meter",
            "16x [5]",
            "x",
            dense / (5 * theirs[16]),
            dense / (5 * ours[16]),
        )
    )
    out.append(
        Claim(
            f"{name}: payload below DiLoCo's, k = 32",
            "none given",
            "x",
            dense / theirs[32],
            dense / ours[32],
        )
    )
    for islands in (2, 4, 8):
        diloco, sparse = (
            count(preset(n, period=128), tensors, islands).largest
            for n in ("diloco", "decoupled_momentum")
        )
        for word in ("sent", "received"):
            factor = getattr(diloco, f"bytes_{word}") / getattr(sparse, f"bytes_{word}")
            text = f"{name}: below DiLoCo, k = 32, {word}, R = {islands}"
            out.append(Claim(text, "none given", "x", 2 * dense / theirs[32] / islands, factor))
    return out


def payload(tensors: Tensors, k: int) -> int:
    """What an island sends to one other under the preset `decoupled_momentum`."""
    return count(preset("decoupled_momentum", topk=k), tensors, 2).largest.bytes_sent


def notes(small: int, large: int) -> list[str]:
    """Under the table; `small` and `large` are the parameters of its two models."""
    adamw = [636.9e6 / 2, 2416.6e6 / 2]
    off = [a / n - 1 for a, n in zip(adamw, (small, large), strict=True)]
    block = num_bytes("2bit", 1, 64) + form(BLOCK, 64).bits / 8
    rho = [4 * BLOCK / n for n in (12 * 32, num_bytes("int8", 1, 32) + form(BLOCK, 32).bits / 8)]
    return [
        f"Shapes: olmo-300m ({small / 1e6:.2f} M parameters) for DeMo 300M and decoupled momentum, "
        f"olmo-1b ({large / 1e6:.1f} M) for the "
        "rest; MB = 10^6 bytes. By its own format: a formula on these shapes. Ours: the preset, "
        "counted to the byte with headers, scales "
        "and checksums; between two islands where no R is named: what one sends is then its "
        "payload. Last column: how many times fewer "
        "bytes ours sends than the published format.",
        "[1] arXiv 2411.19870, MB per step (as summarised at en.papernotes.org, ICLR 2026): 12 "
        "bytes per coefficient (int64 position, "
        "fp32 value), one rank's own upload, digits cut, not rounded. Ours sends int8 values, "
        "positions of 8.7 to 12 bits, a bf16 scale per block. "
        "The four payloads give the shapes: at 12 k / 4096 bytes per parameter they fit 16 layers "
        "of OLMo's form, width 1024 and 2048, "
        "with 50304 tied embeddings, in every digit. The two gradients do not: at 2 bytes they "
        f"are {adamw[0] / 1e6:.2f} and "
        f"{adamw[1] / 1e6:.1f} M parameters, {off[0]:+.1%} and {off[1]:+.1%} off, and with so many "
        "parameters the payloads would be "
        "others.",
        "[2] arXiv 2505.22549, abstract: periods 256, 768, 1536 for parameters and both moments, "
        "all fp32: 1 / (1/256 + 1/768 + 1/1536).",
        "[3] arXiv 2501.18512 (as summarised in bzhng-development/summary-of-some-paper-in-cuda): "
        "100 steps times 16 bits over 4. Strided "
        "fragments of 3 layers, E3M0. Met between two islands, less the bf16 scales. With more, 12 "
        "bits per value move where the formula "
        "has 8: a sum of 4-bit codes is no 4-bit code, so three islands send all codes to all, and "
        "more of them parts in fp4 whose mean "
        "comes back in int8. Peak: the largest fragment.",
        f"[4] arXiv 2603.08163: {BLOCK} x 32 bits over 64 x (12 + 2), 112 bytes per block. Ours "
        "has two bf16 levels per block on top, and "
        f"{form(BLOCK, 64).bits / 64:.2f} bits for a position: {block:.1f} bytes.",
        "[5] arXiv 2510.03371, 'up to 16 times less than DiLoCo' (abstract); for which k and R is "
        "not known. The released code counts "
        "2 (R - 1) / R of all R + 1 payloads, own and gathered; in this way k = 16 at R = 4 gives "
        "17.1. The other rows count what is "
        "really sent: a gather against a ring all-reduce, 2 rho / R, with a payload ratio rho of "
        f"{rho[0]:.1f} by its format and "
        f"{rho[1]:.1f} by ours. The gain shrinks as islands join, since every payload goes to all.",
    ]


# ---- every preset on a link --------------------------------------------------------------------


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


def _figure(value: float, unit: str) -> str:
    return f"{value:.2f} MB" if unit == "MB" else f"{value:.1f}x"


def published_table(claims: Sequence[Claim], texts: Sequence[str]) -> str:
    head = ["claim", "published", "by its own format", "ours", "ours sends less by"]
    rows = [
        [
            c.claim,
            c.published,
            _figure(c.by_format, c.unit),
            _figure(c.ours, c.unit),
            f"{c.ratio:.2f}x",
        ]
        for c in claims
    ]
    return "\n".join(["Published figures", "", table([head, *rows]), "", *map(_wrapped, texts)])


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
            *map(_wrapped, texts),
        ]
    )


def _wrapped(text: str) -> str:
    return textwrap.fill(
        text,
        140,
        subsequent_indent="    " if text.startswith("[") else "",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _parser() -> Parser:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--table",
        choices=["published", "presets"],
        help="default: both; the second alone if --model or --exchange is given",
    )
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="a known model, or the path of a config.json (default: llama-3.2-1b)",
    )
    parser.add_argument(
        "--exchange",
        metavar="NAME|YAML",
        help="count this preset or yaml file alone; implies --table presets",
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
    alone = args.model or args.exchange
    chosen = [args.table] if args.table else ["presets"] if alone else ["published", "presets"]
    out: dict[str, Any] = {}
    texts = []
    try:
        if args.exchange is None and args.set:
            raise ValueError("--set changes an exchange: give --exchange NAME|YAML, too")
        configs = [load_config(args.exchange, args.set)] if args.exchange is not None else None
        if configs is not None and "presets" not in chosen:
            raise ValueError("--exchange is counted in --table presets: leave --table out")
        link = Link.parse(args.link)
        link = Link(link.bits_per_second, parse_rtt(args.rtt)) if args.rtt else link
        if "published" in chosen:
            small, large = load("olmo-300m"), load("olmo-1b")
            claims = published(small, large)
            out["published"] = [{**asdict(c), "ratio": c.ratio} for c in claims]
            texts.append(published_table(claims, notes(numel(small), numel(large))))
        if "presets" in chosen:
            name = args.model or "llama-3.2-1b"
            tensors = load(name)
            facts = {
                "model": Path(name).stem if name.endswith(".json") else name,
                "parameters": numel(tensors),
            }
            facts |= {
                "islands": args.islands,
                "shards": args.shards,
                "link": str(link) if link else "",
            }
            if configs is not None:
                facts |= {"exchange": args.exchange, "set": args.set}
            rows = entries(tensors, args.islands, args.shards, link, configs)
            out["presets"] = {**facts, "rows": [asdict(e) for e in rows]}
            texts.append(presets_table(facts, rows))
        if args.json is not None:
            args.json.write_text(json.dumps(out, indent=2) + "\n", encoding="utf-8")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print("\n\n".join(texts))


if __name__ == "__main__":
    main()
