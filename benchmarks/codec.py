"""What compression costs: one exchange of momentum compression against its published form.

    python benchmarks/codec.py [--json FILE] [--device cuda]

The first line names the processor, and what selects on it (`compression/_kernels.c` or torch).
The first table: nanoseconds per element of momentum, DCT, top-k, encode, decode and apply on one
replica (`hotpath.py`), one thread pinned to one core, in the thread's own CPU time (what else runs
on the machine is left out, but for the caches it shares), medians of `--repeat` rounds in which all
forms take turns; bytes of a message per coefficient; the most memory that temporaries take. Whether
the same coefficients are chosen and the same is left is seen in rounds of their own with fp32
values, where nothing but the order of sums differs. bf16 also on gradients of a small model that
learns this repository's text. The second table has the stages.

Memory time is that of passes over as many elements: one that reads and writes, and those that an
exchange without a transform cannot do without (gradient and accumulator are read, the accumulator
is written, and read for the selection; the new gradient is written, and read by the step, which
reads and writes the parameter).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]

from report import table  # noqa: E402

from benchmarks.hotpath import (  # noqa: E402
    BETA,
    LR,
    Ours,
    Published,
    Watch,
    arguments,
    elements,
    here,
    layer,
    pin,
    say_where,
    silent,
    temporaries,
)  # noqa: E402
from fsdp_demo import ExchangeConfig, preset  # noqa: E402

HOT = {  # name: topk, products; None: no transform
    "k8": (8, "fp32"),
    "k32": (32, "fp32"),
    "k8_bf16": (8, "bf16"),
    "k32_bf16": (32, "bf16"),
    "plain_k8": (8, None),
    "plain_k64": (64, None),
}
GOALS = {"k8": 3.0, "k8_bf16": 4.5}  # times faster than the published form
PLAIN_GOAL = 2.5  # times the passes that are needed, of "plain_k8"
REPLICAS = 2
STAGES = {
    "momentum, transform": "momentum, transform",
    "selection, codes, residual": "selection, codes",
    "decode, gradient": "decode",
    "apply": "apply",
    "all": "all",
}


def config(name: str, code: str = "int8") -> ExchangeConfig:
    """The configuration of one row of the table."""
    topk, products = HOT[name]
    if products is None:
        return preset("demo", topk=topk, value_dtype=code, transform=False)
    return preset("demo", topk=topk, value_dtype=code, **{"codec.transform_precision": products})


def noise(shapes: Sequence[tuple[int, int]], device: str) -> list[Tensor]:
    return [torch.randn(s, device=device) for s in shapes]


def times(
    shapes: Sequence[tuple[int, int]], names: Sequence[str], device: str, repeat: int
) -> dict[str, dict[str, float]]:
    """Medians per stage of every form; those in the published form are called "published 8" and so
    on.
    """
    sizes = sorted({HOT[n][0] for n in names if HOT[n][1] is not None})
    ours = {
        n: ([Ours(shapes, config(n), REPLICAS, device) for _ in range(REPLICAS)], Watch(device))
        for n in names
    }
    theirs = {
        k: ([Published(shapes, k, device) for _ in range(REPLICAS)], Watch(device)) for k in sizes
    }
    for round_ in range(repeat + 1):  # the first is a warm-up
        for (me, *others), watch in (*ours.values(), *theirs.values()):
            sent = [o.send(noise(shapes, device), silent) for o in others]
            if round_:
                watch.start()
            look = watch if round_ else silent
            mine = me.send(noise(shapes, device), look)
            all_ = [mine, *sent]
            me.receive(all_ if isinstance(me, Published) else [o.body for o in all_], look)
    found = {n: w.medians(elements(shapes)) for n, (_, w) in ours.items()}
    return {
        **found,
        **{f"published {k}": w.medians(elements(shapes)) for k, (_, w) in theirs.items()},
    }


def memory(shapes: Sequence[tuple[int, int]], device: str, repeat: int) -> dict[str, float]:
    """Nanoseconds per element of one pass that reads and writes, and of all that a plain exchange
    needs, medians.
    """
    p, g, m = (noise(shapes, device) for _ in range(3))
    watch = Watch(device)

    def needed() -> None:
        for x, y in zip(g, m, strict=True):
            torch.add(x, y, alpha=BETA, out=y)
        for y in m:
            y.sum()
        for x in g:
            x.fill_(1.0)
        for x, y in zip(g, p, strict=True):
            y.add_(x, alpha=-LR)

    for _ in range(repeat):
        watch.start()
        watch("pass", lambda: [x.copy_(y) for x, y in zip(p, m, strict=True)])
        watch("needed", needed)
    found = watch.medians(elements(shapes))
    return {"pass_ns": found["pass"], "needed_ns": found["needed"]}


def agreement(
    shapes: Sequence[tuple[int, int]], name: str, device: str, steps: int = 3
) -> dict[str, float]:
    """The share of coefficients that both forms choose in equal steps with fp32 values, the largest
    difference of what is left after them relative to the largest element, and the energy of the
    set chosen, relative to the exact one."""
    ours, theirs = (
        Ours(shapes, config(name, "fp32"), REPLICAS, device),
        Published(shapes, HOT[name][0], device),
    )
    return compared(
        ours, theirs, [noise(shapes, device) for _ in range(steps)], HOT[name][1] != "fp32"
    )


def compared(
    ours: Ours, theirs: Published, gradients: Sequence[Sequence[Tensor]], anew: bool
) -> dict[str, float]:
    """See `agreement`; the accumulators start at zero and see the same gradients, times the
    published rate. `anew`: every step starts from what ours has left; else only the first one
    does, and differences add up."""
    same = total = 0
    energies = []
    for step in gradients:
        if anew:
            theirs.momentum = ours.residuals()
        exact = [
            theirs.forward(m * BETA + g * LR).flatten(0, 1).flatten(1)
            for m, g in zip(theirs.momentum, step, strict=True)
        ]
        sent = theirs.send(step, silent)
        ours.send([g * LR for g in step], silent)
        chosen = ours.chosen()
        for (index, _), mine, whole in zip(sent, chosen, exact, strict=True):
            wanted = torch.zeros_like(whole, dtype=torch.bool).scatter_(
                1, index.flatten(0, 1), True
            )
            same, total = same + int(wanted.gather(1, mine).sum()), total + mine.numel()
            energies.append(
                (float(whole.gather(1, mine).square().sum()), float(whole[wanted].square().sum()))
            )
    left = [
        (o - m).abs().max() / m.abs().max()
        for o, m in zip(ours.residuals(), theirs.momentum, strict=True)
    ]
    share = sum(e for e, _ in energies) / sum(e for _, e in energies)
    return {"same_coefficients": same / total, "residual_error": float(max(left)), "energy": share}


def recorded(
    device: str, hidden: int = 256, steps: int = 60, last: int = 6
) -> tuple[list[tuple[int, int]], list[list[Tensor]]]:
    """Shapes of the matrices of a small byte-level transformer and their gradients in the last
    steps of a short training on the source text of this repository, scaled to a root mean square
    of 1."""
    root = ROOT / "fsdp_demo"
    text = (
        torch.frombuffer(
            bytearray(b"".join(p.read_bytes() for p in sorted(root.rglob("*.py")))),
            dtype=torch.uint8,
        )
        .long()
        .to(device)
    )
    torch.manual_seed(1)
    block = nn.TransformerEncoderLayer(
        hidden, 4, 4 * hidden, dropout=0.0, batch_first=True, norm_first=True
    )
    model = nn.Sequential(
        nn.Embedding(256, hidden),
        nn.TransformerEncoder(block, 2, enable_nested_tensor=False),
        nn.Linear(hidden, 256),
    )
    model.to(device)
    optimizer, length = torch.optim.AdamW(model.parameters(), lr=1e-3), 64
    mask = nn.Transformer.generate_square_subsequent_mask(length, device=device)
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "layers" in n]
    kept = []
    for step in range(steps):
        rows = torch.stack(
            [text[i : i + length + 1] for i in torch.randint(len(text) - length - 1, (8,)).tolist()]
        )
        hidden_ = model[1](model[0](rows[:, :-1]), mask=mask, is_causal=True)
        loss = nn.functional.cross_entropy(model[2](hidden_).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        if step >= steps - last:
            kept.append(
                [
                    p.grad.detach() / p.grad.square().mean().sqrt()
                    for p in matrices
                    if p.grad is not None
                ]
            )
        optimizer.step()
    return [tuple(p.shape) for p in matrices], kept  # type: ignore[misc]


def hot(
    shapes: Sequence[tuple[int, int]], names: Sequence[str], device: str, repeat: int, training: int
) -> dict[str, dict[str, Any]]:
    """The rows of the first table, as they go into the json file."""
    timed, rows = times(shapes, names, device, repeat), {}
    learned = recorded(device, steps=training) if any(HOT[n][1] == "bf16" for n in names) else None
    for n in names:
        topk, products = HOT[n]
        replicas = [Ours(shapes, config(n), REPLICAS, device) for _ in range(REPLICAS)]
        body = replicas[1].send(noise(shapes, device), silent).body
        gradients = noise(shapes, device)
        row: dict[str, Any] = {
            "ours_ns": timed[n]["all"],
            "goal": GOALS.get(n),
            "bytes_per_coefficient": body.numel() / replicas[1].count,
            "workspace_mb": temporaries(lambda: _round(replicas[0], gradients, body)) / 1e6,  # noqa: B023
            "stages_ns": stages(timed[n]),
        }
        if products is not None:
            published = timed[f"published {topk}"]
            row |= {
                "published_ns": published["all"],
                "ratio": published["all"] / row["ours_ns"],
                "published_stages_ns": stages(published),
            }
            row["published_temporaries_mb"] = published_memory(shapes, topk, device) / 1e6
            row |= agreement(shapes, n, device)
        if products == "bf16" and learned is not None:
            found = compared(
                Ours(learned[0], config(n, "fp32"), 1, device),
                Published(learned[0], topk, device),
                learned[1],
                True,
            )
            row |= {"same_recorded": found["same_coefficients"], "energy_recorded": found["energy"]}
        rows[n] = row
    return rows


def _round(replica: Ours, gradients: Sequence[Tensor], other: Tensor) -> Any:
    body = replica.send(gradients, silent).body
    replica.receive([body, other], silent)
    return body


def published_memory(shapes: Sequence[tuple[int, int]], topk: int, device: str) -> int:
    """The most that the published form takes for its largest tensor alone."""
    alone = [max(shapes, key=prod)]
    one, gradients = Published(alone, topk, device), noise(alone, device)

    def work() -> Any:
        sent = one.send(gradients, silent)
        one.receive([sent] * REPLICAS, silent)
        return sent

    return temporaries(work)


def show_hot(rows: dict[str, dict[str, Any]]) -> None:
    """Print the first table and what bf16 chooses."""
    head = [
        "",
        "ns, published",
        "ours",
        "ratio",
        "goal",
        "bytes/coeff.",
        "same",
        "residual off by",
        "energy",
        "MB, published",
        "ours",
    ]
    body = []
    for name, r in rows.items():

        def cell(key: str, form: str, r: dict[str, Any] = r) -> str:
            return format(r[key], form) if r.get(key) is not None else "-"

        goal = r["goal"]
        met = "-" if goal is None else "met" if r["ratio"] >= goal else "missed"
        verdict = "-" if goal is None else f"{goal:g}: {met}"
        cells = [
            cell("published_ns", ".1f"),
            cell("ours_ns", ".2f"),
            cell("ratio", ".2f"),
            verdict,
            cell("bytes_per_coefficient", ".2f"),
        ]
        cells += [
            cell("same_coefficients", ".4%"),
            cell("residual_error", ".0e"),
            cell("energy", ".4%"),
        ]
        body.append(
            [name, *cells, cell("published_temporaries_mb", ".1f"), cell("workspace_mb", ".1f")]
        )
    print(table([head, *body]))
    for name, r in rows.items():
        if "same_recorded" in r:
            print(
                f"{name}, recorded gradients: same {r['same_recorded']:.3%}, energy "
                f"{r['energy_recorded']:.4%}"
            )


def show_stages(rows: dict[str, dict[str, Any]], passes: dict[str, float]) -> None:
    """Print the second table, and memory time."""
    body = [["ns per element", *STAGES.values()]]
    for name, r in rows.items():
        for form, key in (("published", "published_stages_ns"), ("ours", "stages_ns")):
            if key in r and (form == "ours" or not name.endswith("bf16")):
                body.append([f"{name}, {form}", *(f"{v:.2f}" for v in r[key].values())])
    print(table(body))
    print(
        f"memory time: one pass {passes['pass_ns']:.2f} ns, those needed {passes['needed_ns']:.2f}"
    )
    if "plain_k8" in rows:
        times = rows["plain_k8"]["ours_ns"] / passes["needed_ns"]
        verdict = "met" if times <= PLAIN_GOAL else "missed"
        print(
            f"plain_k8: {times:.2f} times those needed (goal {PLAIN_GOAL:g}: {verdict}), "
            f"{rows['plain_k8']['ours_ns'] / passes['pass_ns']:.1f} passes"
        )


def stages(found: dict[str, float]) -> dict[str, float]:
    """Nanoseconds by the names of `STAGES`; those of the published form are put where ours do the
    same."""
    out = dict.fromkeys(STAGES, 0.0)
    of = {"momentum": 0, "transform": 0, "selection": 1, "own decode": 1, "residual": 1}
    for name, ns in found.items():
        same = list(STAGES)[of[name]] if name in of else name
        out["decode, gradient" if same == "decode" else same] += ns
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="*", choices=tuple(HOT), default=list(HOT), help="rows of the table"
    )
    parser.add_argument(
        "--training", type=int, default=60, help="steps in which gradients are recorded for bf16"
    )
    if (args := arguments(parser, repeat=9)) is None:
        return
    pin()
    torch.manual_seed(0)
    shapes = layer(args.hidden, args.shards)
    found = hot(shapes, args.only, args.device, args.repeat, args.training)
    passes = memory(shapes, args.device, args.repeat)
    say_where(args.device)
    show_hot(found)
    show_stages(found, passes)
    head = {"repeat": args.repeat, **here(args.device)}
    head |= {"elements": elements(shapes), "replicas": REPLICAS, "memory": passes}
    if args.json:
        args.json.write_text(json.dumps({**head, **found}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
