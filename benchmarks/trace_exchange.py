"""A trace of an exchange that overlaps training, and a picture of it.

    fsdp-demo rehearse --islands 2 --procs 1 --link 20Mbit --rtt 100ms -- benchmarks/trace_exchange.py --out outputs/trace

Each island trains a small Llama with delayed exchanges (`--exchange demo --delay 1`), and records
the last `--steps` steps with torch.profiler, in all its threads: OUT/island0.json, OUT/island1.json
(open them at ui.perfetto.dev). Island 0 then draws the ranges of the exchange, OUT/trace.svg:

    python benchmarks/trace_exchange.py --draw OUT/island0.json OUT/island1.json --out OUT

draws again. Needs torch 2.13 to see the thread that sends.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]

RANGES = ("forward", "backward", "accumulate", "encode", "send", "wait", "decode", "apply")
SENDING = "send"
WIDTH, LEFT, RIGHT, ROW = 1000, 150, 16, 34

STYLE = """
  .page { fill: #ffffff; stroke: #d0d7de } text { font: 13px sans-serif; fill: #1f2328 }
  .soft { fill: #57606a; font-size: 12px } .grid { stroke: #d8dee4 }
  .forward { fill: #b6e3ff } .backward { fill: #54aeff } .send { fill: #fb8f44 }
  .accumulate { fill: #4ac26b } .encode { fill: #1a7f37 } .apply { fill: #a475f9 }
  .decode { fill: #6639ba } .wait { fill: #cf222e }
  @media (prefers-color-scheme: dark) {
    .page { fill: #161b22; stroke: #30363d } text { fill: #e6edf3 } .soft { fill: #9da7b3 }
    .grid { stroke: #30363d } .forward { fill: #0c4a7d } .backward { fill: #388bfd }
  }
"""


@dataclass(frozen=True)
class Range:
    """One range of one thread, in seconds."""

    name: str
    thread: int
    start: float
    end: float


def ranges(trace: dict[str, Any]) -> list[Range]:
    """Those of RANGES in a trace of torch.profiler, in time. Their times are of one clock for all
    processes of a machine.
    """
    base = float(trace.get("baseTimeNanoseconds", 0)) / 1e9
    found = []
    for event in trace["traceEvents"]:
        name = str(event.get("name", "")).removeprefix("fsdp_demo::").removeprefix("trace::")
        if event.get("ph") == "X" and name in RANGES and "::" in event["name"]:
            start = base + float(event["ts"]) / 1e6
            found.append(Range(name, int(event["tid"]), start, start + float(event["dur"]) / 1e6))
    return sorted(found, key=lambda one: (one.start, -one.end))


def draw(traces: Sequence[list[Range]], title: str) -> str:
    """Two rows for each island: what its training does, and what its exchange sends. svg."""
    first = min(r.start for found in traces for r in found)
    last = max(r.end for found in traces for r in found)
    span = last - first

    def x(at: float) -> float:
        return LEFT + (at - first) / span * (WIDTH - LEFT - RIGHT)

    height = 66 + 2 * ROW * len(traces) + 50
    parts = [f'<text x="{LEFT}" y="26">{escape(title)}</text>']
    key = LEFT
    for name in RANGES:
        parts.append(f'<rect class="{name}" x="{key}" y="38" width="11" height="11"/>')
        parts.append(f'<text class="soft" x="{key + 15}" y="48">{name}</text>')
        key += 32 + 7 * len(name)
    floor = 66 + 2 * ROW * len(traces)
    step = next(s for s in (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 60) if span / s <= 12)
    for i in range(int(span / step) + 1):
        at = x(first + i * step)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="60" y2="{floor}"/>')
        label = f"{1e3 * i * step:.0f}"
        parts.append(
            f'<text class="soft" x="{at:.1f}" y="{floor + 17}" text-anchor="middle">{label}</text>'
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f'<text class="soft" x="{middle}" y="{floor + 38}" text-anchor="middle">milliseconds</text>'
    )
    for number, found in enumerate(traces):
        for row, sends in enumerate((False, True)):
            top = 62 + ROW * (2 * number + row)
            words = f"island {number}, {'exchange' if sends else 'training'}"
            parts.append(f'<text x="{LEFT - 10}" y="{top + 21}" text-anchor="end">{words}</text>')
            for r in found:
                if (r.name == SENDING) == sends:
                    inner = 6 if r.name == "decode" else 0  # inside apply
                    parts.append(
                        f'<rect class="{r.name}" x="{x(r.start):.1f}" y="{top + 4 + inner}" '
                        f'width="{max(x(r.end) - x(r.start), 0.6):.1f}" height="{26 - 2 * inner}">'
                        f"<title>{r.name}: {1e3 * (r.end - r.start):.1f} ms</title></rect>"
                    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img">\n<title>{escape(title)}</title>\n<style>{STYLE}</style>\n'
        f'<rect class="page" x="1" y="1" width="{WIDTH - 2}" height="{height - 2}" rx="10"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def summed(found: Sequence[Range]) -> dict[str, float]:
    """Seconds of each range."""
    return {name: sum(r.end - r.start for r in found if r.name == name) for name in RANGES}


def record(args: argparse.Namespace) -> None:
    """Train on this island, and leave its trace."""
    import torch
    from data import forever, load_data, load_tokenizer
    from model import load_model
    from torch.profiler import ProfilerActivity, profile, record_function

    from fsdp_demo import Topology, attach, base_optimizer, load_config

    topology, tokenizer = Topology.from_env(), load_tokenizer("bytes")
    torch.manual_seed(0)
    model = load_model(args.model, tokenizer.vocab_size)
    config = load_config(args.exchange, [f"schedule.delay={args.delay}", *args.set])
    optimizer = base_optimizer(config, model.named_parameters(), lr=config.lr or 4e-4)
    sets = load_data(
        "stdlib", tokenizer, 256, island=topology.island, islands=topology.islands, seed=1
    )
    batches = forever(Epochs(sets.loaders(4)[0]))
    exchange = attach(optimizer, config, model=model, topology=topology)

    def step() -> None:
        with record_function("trace::forward"):
            loss = model(**next(batches)).loss
        with record_function("trace::backward"):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(args.warm_up):
        step()
    exchange.across_islands.mean([0.0])  # the traces of all islands begin together
    every = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    kinds = [ProfilerActivity.CPU]
    kinds += [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    with profile(activities=kinds, experimental_config=every) as seen:
        for _ in range(args.steps):
            step()
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    part = out / f"island{topology.island}.part"
    seen.export_chrome_trace(str(part))
    part.replace(out / f"island{topology.island}.json")
    exchange.finish(close=False)
    exchange.across_islands.mean([0.0])  # all traces are written
    exchange.finish()
    if topology.island == 0:
        files = [out / f"island{i}.json" for i in range(topology.islands)]
        if all(file.exists() for file in files):  # islands of one machine
            picture(args, files)


class Epochs:
    """A loader with the `set_epoch` that Accelerate's have."""

    def __init__(self, loader: Any):
        self.loader, self.dataset = loader, loader.dataset

    def set_epoch(self, epoch: int) -> None:
        pass

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Any:
        return iter(self.loader)


def picture(args: argparse.Namespace, files: Sequence[Path]) -> None:
    """Write OUT/trace.svg, and print the seconds of each range."""
    traces = [ranges(json.loads(Path(file).read_text(encoding="utf-8"))) for file in files]
    for number, found in enumerate(traces):
        if not any(r.name == SENDING for r in found):
            raise ValueError(
                f"{files[number]} has no range {SENDING}: torch 2.13 records all threads"
            )
        text = ", ".join(f"{name} {1e3 * s:.0f} ms" for name, s in summed(found).items() if s)
        print(f"island {number}: {text}")
    out = Path(args.out)
    title = f"{args.exchange}, delay {args.delay}: {args.steps} steps on {len(files)} islands"
    (out / "trace.svg").write_text(draw(traces, title), encoding="utf-8")
    print(out / "trace.svg")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--out", default="outputs/trace", help="folder of the traces and the picture")
    made.add_argument("--exchange", default="demo", help="preset or yaml file")
    made.add_argument("--delay", type=int, default=1, help="steps that a message has to travel")
    made.add_argument("--set", nargs="*", default=[], help="more changes to the preset")
    made.add_argument("--model", default="small", help="a json of recipes/models")
    made.add_argument("--steps", type=int, default=4, help="that are recorded")
    made.add_argument("--warm-up", type=int, default=6, help="steps before")
    made.add_argument("--draw", nargs="+", metavar="TRACE", help="draw these, train nothing")
    return made


def main() -> None:
    args = parser().parse_args()
    if args.draw:
        picture(args, [Path(name) for name in args.draw])
    else:
        record(args)


if __name__ == "__main__":
    main()
