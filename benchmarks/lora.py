"""LoRA across islands: how far the mean of A and of B, each for itself, is from the mean of their
products, and what that costs in loss.

    pip install peft
    fsdp-demo rehearse --islands 2 --procs 1 --cpu -- benchmarks/lora.py --out outputs/lora

`small` learns the library's Python text, then adapters of it learn texts that are unlike: English
(the help of Python's language reference) on island 0, C headers on island 1. Each cell of the table
begins from the same base. The loss is that of both held-out texts, at the end, on the islands'
common model. "Off" is |mean B mean A - mean(B A)| / |mean(B A) - B0 A0| (Frobenius norms over all
adapters), the median over the rounds; B0 A0 is the product that the round began with.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import statistics
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import fsdp_demo

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks.common import Parser, processor  # noqa: E402

LENGTH, ROWS = 128, 1
METHODS: list[tuple[str, dict[str, Any], bool]] = [
    ("full", {}, False),
    *(
        ("diloco", {"period": period, **settings}, frozen)
        for period in (20, 200)
        for settings, frozen in (({}, False), ({"lr": 1.0, "momentum": 0.0}, False), ({}, True))
    ),
]
"""Preset, settings, and whether A is frozen: then the mean of B is the mean of the products
(FFA-LoRA, Sun et al., arXiv 2403.12313)."""


def text_rows(files: list[Path]) -> tuple[Tensor, Tensor]:
    """Bytes of files as rows [rows, LENGTH]; the last tenth is held out."""
    raw = b"".join(f.read_bytes() for f in sorted(files))
    ids = torch.frombuffer(bytearray(raw), dtype=torch.uint8).long()
    rows = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
    return rows[: len(rows) * 9 // 10], rows[len(rows) * 9 // 10 :]


def texts() -> list[tuple[Tensor, Tensor]]:
    """Training and held-out rows of base, English and C."""
    library = Path(sysconfig.get_path("stdlib"))
    headers = list(Path(sysconfig.get_path("include")).rglob("*.h"))
    if not headers:
        raise SystemExit("lora.py: no C headers of Python here: install them (python3-dev)")
    base = [f for f in library.glob("*.py") if f.stat().st_size < 1 << 18]
    return [text_rows(f) for f in (base, [library / "pydoc_data" / "topics.py"], headers)]


def batch(rows: Tensor, step: int, seed: int) -> Tensor:
    """ROWS rows of a step."""
    order = torch.Generator().manual_seed(1000 * seed + step)
    return rows[torch.randint(len(rows), (ROWS,), generator=order)]


def loss_of(model: torch.nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids).loss


def trained_base(rows: Tensor, steps: int) -> torch.nn.Module:
    """`small` after some steps on the base text, the same on each island."""
    torch.manual_seed(0)
    models = ROOT / "recipes" / "models"
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(models / "small.json"))
    inner = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    plan = torch.optim.lr_scheduler.CosineAnnealingLR(inner, steps)
    for step in range(steps):
        loss_of(model, batch(rows, step, 0)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        inner.step()
        plan.step()
        inner.zero_grad()
    return model


def factors(model: torch.nn.Module) -> list[tuple[Tensor, Tensor]]:
    """(B, A) of each adapter, as copies."""
    found = {n: p.detach().clone() for n, p in model.named_parameters() if "lora_" in n}
    names = [n for n in found if "lora_A" in n]
    return [(found[n.replace("lora_A", "lora_B")], found[n]) for n in names]


def off(start: list, one: list, two: list) -> float:
    """|mean B mean A - mean(B A)| / |mean(B A) - B0 A0| of two islands over all adapters."""
    apart = moved = 0.0
    for (b0, a0), (b, a), (c, d) in zip(start, one, two, strict=True):
        mean = (b @ a + c @ d) / 2
        apart += float(((b + c) / 2 @ ((a + d) / 2) - mean).square().sum())
        moved += float((mean - b0 @ a0).square().sum())
    return math.sqrt(apart / moved)


def cell(base: torch.nn.Module, data: list, args: Any, rank: int, seed: int, method: tuple) -> dict:
    """Train one cell on this island; the row of the table."""
    preset, settings, frozen = method
    torch.manual_seed(seed)
    adapters = LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear")
    model = get_peft_model(copy.deepcopy(base), adapters)
    for name, p in model.named_parameters():
        p.requires_grad_(p.requires_grad and not (frozen and "lora_A" in name))
    inner = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.lr)
    period, starts, ends = settings.get("period", 1), [factors(model)], []
    # registered ahead of attach: this hook runs before the exchange does
    hook = inner.register_step_post_hook(
        lambda *_: (exchange.step + 1) % period or ends.append(factors(model))
    )
    exchange = fsdp_demo.attach(inner, preset, model=model, **settings)
    island = exchange.topology.island
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(inner, args.steps)
    while exchange.step < args.steps:
        loss_of(model, batch(data[1 + island][0], exchange.step, seed + 7 * island)).backward()
        inner.step()
        schedule.step()
        inner.zero_grad()
        if exchange.step % period == 0:
            starts.append(factors(model))
    hook.remove()
    torch.save(ends, args.out / f"ends-{island}.pt")
    exchange.finish()  # all islands have written their file then
    others = [torch.load(args.out / f"ends-{i}.pt") for i in (0, 1)]
    apart = [off(*each) for each in zip(starts, *others, strict=False)] if preset != "full" else [0]
    with torch.no_grad():
        held_out = [r for i in (1, 2) for r in data[i][1][:64].split(16)]
        loss = statistics.fmean(float(loss_of(model, r)) for r in held_out)
    return {
        "r": rank,
        "seed": seed,
        "method": " ".join([preset, *(f"{k}={v:g}" for k, v in settings.items())]),
        "A": "frozen" if frozen else "trained",
        "loss": round(loss, 4),
        "off": round(statistics.median(apart or [0]), 4),
        "bytes per step": round(exchange.metrics()["bytes_sent"] / args.steps),
    }


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("outputs/lora"))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--base-steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--ranks", type=int, nargs="+", default=(8, 64))
    args = parser.parse_args()
    topology = fsdp_demo.Topology.from_env()
    if topology.islands != 2:
        raise SystemExit("lora.py: needs two islands: fsdp-demo rehearse --islands 2 --procs 1")
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    data = texts()
    base = trained_base(data[0][0], args.base_steps)
    print(processor())
    for seed, rank, method in itertools.product(range(args.seeds), args.ranks, METHODS):
        row = cell(base, data, args, rank, seed, method)
        if topology.island == 0:
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
