"""Number formats of values: bits per value, error, and nanoseconds of coding and decoding.

    python benchmarks/number_formats.py [--json FILE]

2^22 values as dense vectors are coded, in rows of 4096. Errors are relative L2 errors of
decode(encode(v)), on Gaussian values and on values with heavy tails (Student's t, 3 degrees of
freedom). The last column is the target for both ways together.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]

from benchmarks.common import Parser, at_least_one  # noqa: E402
from benchmarks.hotpath import pin  # noqa: E402
from fsdp_demo.compression import formats  # noqa: E402
from fsdp_demo.config.parts import BLOCK, CODES  # noqa: E402

# ns per value, encode and decode
TARGETS = {"int8": 3.0, "int4": 3.0, "fp4_e3m0": 12.0, "fp4_e2m1": 12.0}


def nanoseconds(run: Callable[[], Any], count: int, repeat: int) -> float:
    """Median CPU time of `repeat` runs, per one of `count` values; one run before them is not
    counted.
    """
    times = []
    for _ in range(repeat + 1):
        start = time.thread_time_ns()
        run()
        times.append(time.thread_time_ns() - start)
    return statistics.median(times[1:]) / count


def measure(code: str, gaussian: torch.Tensor, heavy: torch.Tensor, repeat: int) -> dict[str, Any]:
    """One line of the table, as it goes into the json file."""
    shape, count = tuple(gaussian.shape), gaussian.numel()
    data = formats.encode(code, gaussian)
    back = [formats.decode(code, formats.encode(code, v), *shape) for v in (gaussian, heavy)]
    errors = [
        float((y - v).double().norm() / v.double().norm())
        for y, v in zip(back, (gaussian, heavy), strict=True)
    ]
    return {
        "code": code,
        "bits": 8 * data.numel() / count,
        "error_gaussian": errors[0],
        "error_heavy": errors[1],
        "ns_encode": nanoseconds(lambda: formats.encode(code, gaussian), count, repeat),
        "ns_decode": nanoseconds(lambda: formats.decode(code, data, *shape), count, repeat),
        "ns_target": TARGETS.get(code),
    }


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table; codes without a target have none in the last column."""
    print(
        f"{'':<9} {'bits per':>8} {'error,':>8} {'error,':>8} {'ns per value,':>13} "
        f"{'ns per value,':>13}"
    )
    print(
        f"{'code':<9} {'value':>8} {'gaussian':>8} {'t, 3 dof':>8} {'encode':>13} {'decode':>13} "
        f"{'both':>6}  target"
    )
    for row in rows:
        both, target = row["ns_encode"] + row["ns_decode"], row["ns_target"]
        verdict = f"{target:g}: {'met' if both <= target else 'missed'}" if target else "-"
        errors = f"{row['error_gaussian']:>8.4f} {row['error_heavy']:>8.4f}"
        print(
            f"{row['code']:<9} {row['bits']:>8.3f} {errors} {row['ns_encode']:>13.2f} "
            f"{row['ns_decode']:>13.2f} {both:>6.2f}  {verdict}"
        )


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--elements", type=int, default=1 << 22, help=f"values, a multiple of {BLOCK}"
    )
    parser.add_argument("--repeat", type=at_least_one, default=9)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there, too")
    args = parser.parse_args()
    if args.elements < BLOCK or args.elements % BLOCK:
        parser.error(f"--elements {args.elements}: allowed is a multiple of {BLOCK}")
    pin()
    generator = torch.Generator().manual_seed(0)
    gaussian, *others = torch.randn(5, args.elements // BLOCK, BLOCK, generator=generator).unbind()
    # the quotient that defines Student's t
    heavy = others[0] / (sum(o.square() for o in others[1:]) / 3).sqrt()
    rows = [measure(code, gaussian, heavy, args.repeat) for code in CODES]
    show(rows)
    if args.json is not None:
        head = {"repeat": args.repeat, "torch": torch.__version__, "device": "cpu"}
        found = {**head, "elements": args.elements, "codes": rows}
        args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
