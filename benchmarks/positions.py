"""Positions on the wire: bytes of a coefficient, and what packing costs against 12 bits each.

    python benchmarks/positions.py [--json FILE] [--repeat 25]

Blocks of 4096 elements, k of each. Bytes are lengths of real sections (`compression/sparse.py`)
divided by their coefficients, without headers. The code has a fixed length, so they are those of
any positions. What a code of variable length would take is shown beside it: the best Rice code of
the gaps, on uniform positions and on those that momentum compression chooses while a small
transformer learns the sources of this repository.

Nanoseconds per position, CPU time of one pinned thread, medians of rounds in which all forms take
turns, as many positions at once as the library codes (`windows.CODED`). The form up to wire version
3, 12 bits each, is `pack12`. Both also with the values beside them, in int8.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]

from report import table  # noqa: E402

from benchmarks.codec import recorded  # noqa: E402
from benchmarks.common import processor  # noqa: E402
from benchmarks.hotpath import Ours, pin, silent  # noqa: E402
from fsdp_demo import preset  # noqa: E402
from fsdp_demo.compression import blocks, formats, sparse, windows  # noqa: E402
from fsdp_demo.config.parts import BLOCK, Codec  # noqa: E402

TOPK = (8, 16, 32, 64, 90)
GOALS = {("int8", 32): 2.2, ("int8", 64): 2.0, ("1bit", 32): 1.3, ("1bit", 90): 1.1}
CODES = ("int8", "2bit", "1bit")


def pack12(index: Tensor) -> Tensor:
    """Pack numbers 0..4095 into uint8 [ceil(1.5 n)]: a, b -> a & 255, a >> 8 | (b & 15) << 4, b >>
    4; an odd last one is padded by 0.
    """
    flat = index.reshape(-1)
    if flat.numel() % 2:
        flat = torch.cat([flat, flat.new_zeros(1)])
    a, b = flat.view(-1, 2).unbind(1)
    packed = torch.stack([a & 255, (a >> 8) | ((b & 15) << 4), b >> 4], 1).to(torch.uint8).view(-1)
    return packed[: (3 * index.numel() + 1) // 2]


def unpack12(data: Tensor, n: int) -> Tensor:
    """The inverse of `pack12`: int64 [n]."""
    if data.numel() % 3:
        data = torch.cat([data, data.new_zeros(1)])
    x, y, z = data.to(torch.int64).view(-1, 3).unbind(1)
    return torch.stack([x | ((y & 15) << 8), (y >> 4) | (z << 4)], 1).view(-1)[:n]


def uniform(k: int, rows: int) -> Tensor:
    """Ascending positions, each set as likely as any other: int64 [rows, k]."""
    return torch.rand(rows, BLOCK).argsort(1)[:, :k].sort(1).values


def rice_bits(index: Tensor) -> float:
    """Bits of a position under the best Rice code of the gaps: low bits as they are, the rest in
    unary.
    """
    gap = torch.diff(index, dim=1, prepend=torch.full_like(index[:, :1], -1)) - 1
    return min(low + 1 + float((gap >> low).double().mean()) for low in range(12))


def chosen(k: int, training: tuple[Any, Sequence[Sequence[Tensor]]]) -> Tensor:
    """Positions that momentum compression chooses in the last step of a training, int64 [n, k]."""
    shapes, gradients = training
    replica = Ours(shapes, preset("demo", topk=k, value_dtype="fp32"), 1, "cpu")
    for step in gradients:
        replica.send(step, silent)
    return torch.cat([part.sort(1).values for part in replica.chosen()])


def section_bytes(code: str, k: int, rows: int = 256) -> float:
    """Bytes of a coefficient of a real section, everything in it counted."""
    layout = blocks.Layout([(rows * BLOCK,)], ["plain"])
    data = sparse.encode_sparse(layout, Codec("none", "topk", k, code), torch.randn(layout.numel))
    return data.numel() / (rows * k)


def timed(k: int, repeat: int) -> dict[str, float]:
    """Nanoseconds per position of every form."""
    rows = max(windows.CODED // k // blocks.WINDOW, 1) * blocks.WINDOW
    index, values, form = uniform(k, rows), torch.randn(rows, k), sparse.shortest_form(BLOCK, k)
    packed, planes = pack12(index), sparse.encode_positions(form, index)
    coded, count = formats.encode("int8", values), rows * k
    forms: dict[str, Callable[[], Any]] = {
        "encode12": lambda: pack12(index),
        "decode12": lambda: unpack12(packed, count),
        "encode": lambda: sparse.encode_positions(form, index),
        "decode": lambda: sparse.decode_positions(form, planes, rows),
        "encode_values": lambda: formats.encode("int8", values),
        "decode_values": lambda: formats.decode("int8", coded, rows, k),
    }
    seen: dict[str, list[float]] = {name: [] for name in forms}
    for round_ in range(repeat + 1):  # the first is a warm-up
        for name, run in forms.items():
            start = time.thread_time_ns()
            run()
            if round_:
                seen[name].append((time.thread_time_ns() - start) / count)
    return {name: statistics.median(times) for name, times in seen.items()}


def measure(k: int, repeat: int, training: Any) -> dict[str, Any]:
    """One line of the table, as it goes into the json file."""
    ns = timed(k, repeat)
    before, now = ns["encode12"] + ns["decode12"], ns["encode"] + ns["decode"]
    values = ns["encode_values"] + ns["decode_values"]
    return {
        "k": k,
        "bits": sparse.shortest_form(BLOCK, k).bits / k,
        "bytes": {code: section_bytes(code, k) for code in CODES},
        "rice_uniform": rice_bits(uniform(k, 4096)),
        "rice_chosen": rice_bits(chosen(k, training)),
        "ns": ns,
        "ratio": now / before,
        "ratio_with_values": (now + values) / (before + values),
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the table and whether the goals are met."""
    head = ["k", "bits", "Rice, uniform", "Rice, chosen", *CODES, "ns, 12 bits", "ns", "ratio"]
    body = []
    for r in rows:
        ns = r["ns"]
        before, now = (f"{ns['encode' + v]:.1f} + {ns['decode' + v]:.1f}" for v in ("12", ""))
        bits = [f"{r[key]:.2f}" for key in ("bits", "rice_uniform", "rice_chosen")]
        sizes = [f"{r['bytes'][code]:.3f}" for code in CODES]
        ratios = f"{r['ratio']:.2f}, with int8 values {r['ratio_with_values']:.2f}"
        body.append([str(r["k"]), *bits, *sizes, before, now, ratios])
    print(table([head, *body]))
    found = {(code, r["k"]): r["bytes"][code] for r in rows for code in CODES}
    for (code, k), most in GOALS.items():
        if (code, k) in found:
            verdict = "met" if found[code, k] <= most else "missed"
            print(f"{code}, k = {k}: {found[code, k]:.3f} bytes, goal {most:g}: {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topk", type=int, nargs="*", default=list(TOPK), help="rows of the table")
    parser.add_argument(
        "--training", type=int, default=60, help="steps of the training whose choice is looked at"
    )
    parser.add_argument("--repeat", type=int, default=25)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there, too")
    args = parser.parse_args()
    pin()
    torch.manual_seed(0)
    training = recorded("cpu", steps=args.training, last=args.training // 2)
    rows = [measure(k, args.repeat, training) for k in args.topk]
    print(processor())
    show(rows)
    if args.json:
        head = {"processor": processor(), "repeat": args.repeat, "torch": torch.__version__}
        args.json.write_text(json.dumps({**head, "rows": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
