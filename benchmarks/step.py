"""A whole training step with and without the exchange: time and memory, a model whole on one rank
and in FSDP2 shards on two.

    python benchmarks/step.py [--json FILE] [--device cuda]         # some ten minutes on two cores
    python benchmarks/step.py --steps 16 --only demo,diloco         # some two

One process per rank holds two copies of a small Llama, one trained alone and one with an exchange
attached, and steps them in turns (ABAB), so that a machine that gets slower slows both; figures are
medians, and ratios of medians. The other replica is played by an echo, which costs no time on a
link: what is left is what the exchange costs this rank. Steps in which a message leaves or is
applied are counted apart from those in which nothing is due. "NaN check" is the part of the hooks
that asks whether what is sent is finite. Neither copy clips its gradients: a loop without the
exchange would do that, too. Memory is the most that a process of its own has taken in a few steps
(on a GPU: that tensors have).
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]

from report import peak_memory, table  # noqa: E402

from benchmarks.training_island import make_model  # noqa: E402
from fsdp_demo import ExchangeConfig, attach, base_optimizer, preset  # noqa: E402
from tests.support.tensor_ledger import Echo  # noqa: E402

PERIOD = 4
CASES: dict[str, dict[str, Any]] = {
    "full": {"value_dtype": "bf16"},
    "demo": {},
    "diloco": {"period": PERIOD},
    "streaming_diloco": {"period": 4 * PERIOD, "layers": 2, "delay": 2},
    "decoupled_momentum": {"period": PERIOD},
    "desloc": {"period": PERIOD},
    "sign_loco": {"period": PERIOD},
}
SETTINGS = {"whole": 1, "FSDP2, 2 ranks": 2}
VOCABULARY = 258


class Trained:
    """A model, its optimizer and, if there is a configuration, its exchange."""

    def __init__(self, config: ExchangeConfig, args: dict[str, Any], exchange: bool):
        self.device = torch.device(args["device"])
        model = make_model(args["layers"], VOCABULARY).to(self.device)
        world = dist.get_world_size() if dist.is_initialized() else 1
        if world > 1:
            from torch.distributed.fsdp import fully_shard

            mesh = dist.init_device_mesh(self.device.type, (world,))
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        self.model, self.exchange, self.inside, self.looking = model, None, 0, 0
        self.optimizer = base_optimizer(config, model.named_parameters(), lr=config.lr or 4e-4)
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(0, 256, (args["rows"], args["length"]), generator=generator).to(
            self.device
        )
        if exchange:
            rank, group = (dist.get_rank(), dist.group.WORLD) if world > 1 else (0, None)
            topology = Echo("mesh", 0, 2, rank=rank, world=world, group=group)
            self.exchange = attach(self.optimizer, config, model=model, topology=topology)
            ticks: Any = self.exchange._hooks
            ticks._run_before, ticks._run_after = (
                self._timed("inside", ticks._run_before),
                self._timed("inside", ticks._run_after),
            )
            # whether what is sent is finite; nothing is clipped here
            island: Any = self.exchange._island
            island.clip, island.not_finite = (
                self._timed("looking", island.clip),
                self._timed("looking", island.not_finite),
            )

    def _timed(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.perf_counter_ns()
            try:
                return run(*args)
            finally:
                setattr(self, name, getattr(self, name) + time.perf_counter_ns() - began)

        return timed

    def busy(self) -> bool:
        """Whether a message leaves in the next step, or is under way."""
        e = self.exchange
        return e is not None and (e.next_exchange() == e.step or bool(e._queue.flights))

    def step(self) -> float:
        """Seconds of one training step."""
        self.inside = self.looking = 0
        began = time.perf_counter()
        self.model(input_ids=self.ids, labels=self.ids).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began


def times(config: ExchangeConfig, args: dict[str, Any]) -> dict[str, Any]:
    """Seconds of steps alone and with the exchange, in turns; and of these, what the exchange's
    hooks took.
    """
    alone, joined = Trained(config, args, False), Trained(config, args, True)
    for trained in (alone, joined):
        for _ in range(3):
            trained.step()
    out: dict[str, list[float]] = {
        "alone": [],
        "idle": [],
        "busy": [],
        "idle_hooks": [],
        "busy_hooks": [],
        "looking": [],
    }
    for _ in range(args["steps"]):
        out["alone"].append(alone.step())
        kind = "busy" if joined.busy() else "idle"
        out[kind].append(joined.step())
        out[f"{kind}_hooks"].append(joined.inside / 1e9)
        if joined.looking:
            out["looking"].append(joined.looking / 1e9)
    tensors = len(list(joined.model.parameters()))
    joined.exchange.detach()
    return {"tensors": tensors, **{k: statistics.median(v) if v else None for k, v in out.items()}}


def memory(config: ExchangeConfig, args: dict[str, Any], exchange: bool) -> int:
    """Most bytes in a few steps, of a process that does nothing else."""
    trained = Trained(config, args, exchange)
    for _ in range(PERIOD * 4 + 2):
        trained.step()
    if trained.exchange is not None:
        trained.exchange.detach()
    return peak_memory(trained.device)


def work(args: dict[str, Any]) -> None:
    """One rank: what `args["do"]` says; rank 0 writes it to a file."""
    torch.set_num_threads(1)
    rank, world = args["rank"], args["world"]
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]} if args["device"] == "cpu" else cores)
    if args["device"] == "cuda":
        torch.cuda.set_device(rank)
    if world > 1:
        backend = "gloo" if args["device"] == "cpu" else "nccl"
        dist.init_process_group(
            backend, init_method=f"file://{args['folder']}/meet", rank=rank, world_size=world
        )
    config = preset(args["preset"], **CASES[args["preset"]], clip=None)
    out = (
        times(config, args)
        if args["do"] == "times"
        else memory(config, args, args["do"] == "memory")
    )
    if rank == 0:
        Path(args["folder"], "out.json").write_text(json.dumps(out))
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


def ask(**args: Any) -> Any:
    """Run `work` on `world` processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(args["world"]):
            words = [
                sys.executable,
                __file__,
                "--work",
                json.dumps({**args, "rank": rank, "folder": folder}),
            ]
            env = {k: v for k, v in os.environ.items() if not k.startswith("ISLAND_")} | {
                "OMP_NUM_THREADS": "1"
            }
            ranks.append(
                subprocess.Popen(
                    words, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
                )
            )
        errors = [p.communicate()[1] for p in ranks]
        if any(p.returncode for p in ranks):
            raise RuntimeError("\n".join(e for e in errors if e)[-2000:])
        return json.loads(Path(folder, "out.json").read_text())


def row(setting: str, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One line of the table."""
    common = {
        "preset": name,
        "world": SETTINGS[setting],
        "device": args.device,
        "steps": args.steps,
    }
    common |= {"rows": args.rows, "length": args.length, "layers": args.layers}
    took = ask(do="times", **common)
    alone, joined = ask(do="memory alone", **common), ask(do="memory", **common)
    return {
        "setting": setting,
        "preset": name,
        "settings": CASES[name],
        **took,
        "bytes_alone": alone,
        "bytes": joined,
    }


def show(rows: list[dict[str, Any]]) -> str:
    head = (
        "model|preset|tensors|alone, ms|nothing due|hooks, us|exchange|hooks, ms|NaN check, "
        "ms|alone, MB|exchange, MB more"
    ).split("|")
    body = []
    for r in rows:
        idle, busy = (
            "-" if r[k] is None else f"{r[k] / r['alone']:.3f}x" for k in ("idle", "busy")
        )
        hooks = "-" if r["idle_hooks"] is None else f"{1e6 * r['idle_hooks']:.0f}"
        late = "-" if r["busy_hooks"] is None else f"{1e3 * r['busy_hooks']:.2f}"
        looks = "-" if r["looking"] is None else f"{1e3 * r['looking']:.2f}"
        memory = f"{r['bytes_alone'] / 1e6:.0f}", f"{(r['bytes'] - r['bytes_alone']) / 1e6:.0f}"
        body.append(
            [
                r["setting"],
                r["preset"],
                str(r["tensors"]),
                f"{1e3 * r['alone']:.1f}",
                idle,
                hooks,
                busy,
                late,
                looks,
                *memory,
            ]
        )
    return table([head, *body])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", default="", metavar="A,B", help=f"presets out of {', '.join(CASES)}"
    )
    parser.add_argument(
        "--worlds", type=int, nargs="+", default=[*SETTINGS.values()], help="ranks: 1, 2 or both"
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--steps", type=int, default=40, help="steps of each copy")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--length", type=int, default=256, help="tokens per row")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there, too")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(json.loads(args.work))
        return
    wanted = [name for name in args.only.split(",") if name] or list(CASES)
    if unknown := [name for name in wanted if name not in CASES]:
        parser.error(f"--only {','.join(unknown)}: allowed are {', '.join(CASES)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU here")
    gpus = torch.cuda.device_count() if args.device == "cuda" else max(SETTINGS.values())
    rows = []
    settings = [s for s, world in SETTINGS.items() if world <= gpus and world in args.worlds]
    for setting, name in [(s, n) for s in settings for n in wanted]:
        print(f"{setting}, {name} ...", file=sys.stderr)
        rows.append(row(setting, name, args))
    print(show(rows))
    if gpus < max(SETTINGS.values()):
        print("one GPU: the FSDP2 rows need two", file=sys.stderr)
    if args.json is not None:
        head = {
            "device": args.device,
            "torch": torch.__version__,
            "steps": args.steps,
            "tokens": args.rows * args.length,
        }
        args.json.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
