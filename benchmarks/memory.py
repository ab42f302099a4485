"""Memory per rank before anything runs: what every preset keeps and needs, in bytes per parameter
and GB; and the same measured.

    python benchmarks/memory.py --model llama-3.2-1b --shards 8 --islands 4
    python benchmarks/memory.py --measure                     # every preset on a small model, planned and measured, on this CPU

Whole shapes on the meta device, no weights; `fsdp_demo.exchange.plan` counts. `--measure` trains
a model of plain tensors for a few steps against a peer that sends back what it gets, and follows
every tensor that the exchange makes until it is freed.
"""  # noqa: E501

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]

from report import table  # noqa: E402

from benchmarks.common import Parser, at_least_one  # noqa: E402
from fsdp_demo import preset, presets  # noqa: E402
from fsdp_demo.exchange.plan import Memory, inner_state, plan_memory  # noqa: E402
from fsdp_demo.tools.planner.models import Tensors, load, numel  # noqa: E402
from tests.support.held import measure, shortened, small, steps_of  # noqa: E402


@dataclass(frozen=True)
class Entry:
    """One preset on one rank: the inner optimizer's state, what the exchange takes, and the same
    with `offload_outer_state`.
    """

    preset: str
    inner: str
    inner_state: int
    here: Memory
    host: Memory


def entries(tensors: Tensors, islands: int, shards: int) -> list[Entry]:
    """All presets at their published settings, on the first rank of an island."""
    out = []
    for name in presets():
        config = preset(name)
        inner = {"sgd": "SGD", "muonadamw": "Muon + AdamW"}.get(config.inner_optimizers[0], "AdamW")
        kept = inner_state(replace(config, lr=1.0), tensors, shards)
        here, host = (
            plan_memory(c, tensors, islands, shards)
            for c in (config, replace(config, offload_outer_state=True))
        )
        out.append(Entry(name, inner, kept, here, host))
    return out


def presets_table(facts: dict[str, Any], rows: Sequence[Entry], markdown: bool = False) -> str:
    def figure(count: int, memory: Memory) -> str:
        return f"{count / memory.parameters:.2f} ({count / 1e9:.2f} GB)" if count else "0"

    def kept(m: Memory, place: str) -> int:
        return int(getattr(m, f"{place}_state") + getattr(m, f"{place}_flight"))

    head = [
        "preset",
        "inner",
        "inner state",
        "device",
        "host: device",
        "and host",
        "workspace",
        "host: workspace",
        "messages",
    ]
    body = []
    for e in rows:
        moved = [
            e.inner_state,
            kept(e.here, "device"),
            kept(e.host, "device"),
            kept(e.host, "host"),
        ]
        moved += [e.here.device_workspace, e.host.device_workspace, e.host.host_workspace]
        body.append([e.preset, e.inner, *(figure(n, e.here) for n in moved)])
    title = (
        f"{facts['model']} ({facts['parameters'] / 1e6:.1f} M parameters), {facts['islands']} "
        f"islands of {facts['shards']} shards"
    )
    share = (
        f"the first rank of an island, {rows[0].here.parameters / 1e6:.1f} M parameters of its own"
    )
    text = (
        "Bytes per parameter of the rank's shards, and GB. Inner state: what the inner optimizer "
        "keeps, fp32. Device: what the exchange "
        "keeps on the GPU, payloads under way included where they are most. Host: device and host: "
        "the same with "
        "offload_outer_state=true, on the GPU and in (pinned) host memory. Workspace: what a step "
        "with an exchange takes on the GPU on top "
        "and gives back, with offload_outer_state=false and with true; chunks of up to 64 MB and "
        "copies of single shards are not counted. "
        "Messages: the same on the host. Parameters, gradients and activations are not in the "
        "table."
    )
    lines = [
        f"Memory of the presets at their published settings: {title}",
        share,
        "",
        table([head, *body], markdown=markdown),
        "",
    ]
    return "\n".join(
        [*lines, textwrap.fill(text, 140, break_long_words=False, break_on_hyphens=False)]
    )


def measured_table(islands: int = 2) -> tuple[str, list[dict[str, Any]]]:
    """Every preset on `small()`: planned and measured, in bytes per parameter."""
    tensors, rows, out = small(), [], []
    fields = (
        "device_state",
        "device_flight",
        "device_workspace",
        "host_state",
        "host_flight",
        "host_workspace",
    )
    for name in presets():
        config = shortened(name)
        planned, found = (
            plan_memory(config, tensors, islands, staged=False),
            measure(config, tensors, islands, steps_of(config)),
        )
        rows.append(
            [
                name,
                *(f"{planned.per_parameter(f):.2f} / {found.per_parameter(f):.2f}" for f in fields),
            ]
        )
        out.append({"preset": name, "planned": asdict(planned), "measured": asdict(found)})
    head = ["preset", *(f.replace("_", " ") for f in fields)]
    largest = max(4 * prod(shape) for _, shape in tensors) / 1e6
    title = (
        f"Planned / measured, bytes per parameter: {numel(tensors) / 1e6:.1f} M parameters on the "
        f"CPU, {islands} islands, one shard, the "
        f"largest tensor {largest:.1f} MB, periods shortened; device: the training thread, host: "
        "the exchange's."
    )
    return "\n".join([title, "", table([head, *rows])]), out


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model",
        default="llama-3.2-1b",
        metavar="NAME",
        help="a known model, or the path of a config.json",
    )
    parser.add_argument("--islands", type=at_least_one, default=4, metavar="R", help="default: 4")
    parser.add_argument(
        "--shards",
        type=at_least_one,
        default=8,
        metavar="S",
        help="FSDP2 shards of each island (default: 8)",
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="measure every preset on a small model and two islands instead",
    )
    parser.add_argument("--markdown", action="store_true", help="the table as markdown")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there, too")
    args = parser.parse_args()
    try:
        if args.measure:
            text, rows = measured_table()
        else:
            tensors = load(args.model)
            name = Path(args.model).stem if args.model.endswith(".json") else args.model
            facts = {
                "model": name,
                "parameters": numel(tensors),
                "islands": args.islands,
                "shards": args.shards,
            }
            found = entries(tensors, args.islands, args.shards)
            text, rows = presets_table(facts, found, args.markdown), [asdict(e) for e in found]
        if args.json is not None:
            args.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(text)


if __name__ == "__main__":
    main()
