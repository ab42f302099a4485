"""What a step of Muon costs on FSDP2 shards: torch's Muon beside `fsdp_demo.MuonAdamW`'s, in one
run, on the matrices of Llama layers.

    torchrun --nproc-per-node 4 benchmarks/muon.py [--hidden 256] [--device cuda]

Collectives are counted, seconds are medians of `--repeat` steps taken in turn. "whole" is one rank
with unsharded matrices: the work that the ranks could share.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]

from report import table  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor.debug import CommDebugMode  # noqa: E402

from fsdp_demo.compression.transform import cpu_name  # noqa: E402
from fsdp_demo.compression.windows import synchronize  # noqa: E402
from fsdp_demo.hosts.sharded_muon import ShardedMuon  # noqa: E402


def layers(hidden: int, count: int) -> nn.Sequential:
    """The matrices of `count` layers: four of attention, three of an MLP of 4 times the width."""
    shapes = [(hidden, hidden)] * 4 + [(hidden, 4 * hidden)] * 2 + [(4 * hidden, hidden)]
    return nn.Sequential(
        *(nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in shapes)) for _ in range(count))
    )


class Trial:
    """One way to step: its collectives per matrix, and the seconds of its steps."""

    def __init__(self, kind: Any, args: argparse.Namespace, device: torch.device, sharded: bool):
        torch.manual_seed(0)
        model = layers(args.hidden, args.layers).to(device)
        self.alone, self.device, self.seconds = not sharded, device, list[float]()
        if sharded:
            mesh = init_device_mesh(device.type, (dist.get_world_size(),))
            for layer in model:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        self.parameters = list(model.parameters())
        self.optimizer = kind(list(model.named_parameters()), lr=0.02)
        for p in self.parameters:
            p.grad = torch.randn_like(p)
        with CommDebugMode() as seen:
            self.optimizer.step()
        self.collectives = seen.get_total_counts() / len(self.parameters)

    def step(self) -> None:
        """One step, timed; the ranks begin together."""
        synchronize(self.device)
        dist.barrier()
        begin = time.perf_counter()
        if not self.alone or dist.get_rank() == 0:
            self.optimizer.step()
        synchronize(self.device)
        dist.barrier()
        self.seconds.append(time.perf_counter() - begin)


def main() -> None:
    """Measure and print; rank 0 speaks."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--hidden", type=int, default=256, help="width of the layers")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=7, help="steps of each that are timed")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    if not dist.is_torchelastic_launched():
        parser.error("start it with torchrun: torchrun --nproc-per-node 4 " + sys.argv[0])
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    device = torch.device(args.device)
    if args.device == "cuda":
        device = torch.device("cuda", dist.get_node_local_rank())
        torch.cuda.set_device(device)
    trials = {
        "torch.optim.Muon": Trial(torch.optim.Muon, args, device, True),
        "MuonAdamW's": Trial(ShardedMuon, args, device, True),
        "whole": Trial(torch.optim.Muon, args, device, False),
    }
    for _ in range(args.repeat):
        for trial in trials.values():
            trial.step()
    if dist.get_rank() == 0:
        took = {name: statistics.median(t.seconds) for name, t in trials.items()}
        rows = [["Muon", "collectives per matrix", "ms per step", "beside whole"]]
        for name, trial in trials.items():
            ms, ratio = f"{1e3 * took[name]:.1f}", f"{took[name] / took['whole']:.2f}"
            rows.append([name, f"{trial.collectives:.3g}", ms, ratio])
        matrices, ranks = len(trials["whole"].parameters), dist.get_world_size()
        print(
            f"{matrices} matrices, width {args.hidden}, {ranks} ranks, {args.device}; {cpu_name()}"
        )
        print(table(rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
