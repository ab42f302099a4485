"""Beside the loop of pretrain_deepspeed.py: its options, the world of its ranks, DeepSpeed's json
and the order of the data.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from data import Collate, Data
from deepspeed.accelerator import get_accelerator
from pretrain_parts import LoopArguments
from transformers.hf_argparser import HfArg


@dataclass
class Arguments(LoopArguments):
    deepspeed: str = HfArg(
        default=str(Path(__file__).parent / "deepspeed" / "zero2.json"), help="DeepSpeed's json"
    )
    mesh: int = HfArg(
        default=0,
        help="all nodes are one world: ranks of a node, each node a replica; 0: islands",
    )
    bf16: bool = HfArg(
        default=False,
        help="compute in bf16 on a CPU, too (a GPU does where the json says auto or true)",
    )
    output: str = HfArg(
        default="outputs/pretrain-deepspeed",
        help="folder of summary, report and one folder per replica",
    )
    resume: str | None = HfArg(
        default=None,
        help="go on from the newest checkpoint that all replicas hold in OUTPUT, if they hold any; "
        "who holds none takes over from the others",
        metadata={"nargs": "?", "const": "auto", "choices": ["auto"]},
    )
    local_rank: int = HfArg(default=-1, help="the deepspeed launcher adds it; LOCAL_RANK counts")


def without_compiler() -> None:
    """On a CPU, leave out what DeepSpeed compiles at its first `init_distributed`: 30 s, and a C++
    compiler, for inference only.

    Call it before. On other devices it does nothing.
    """
    if get_accelerator().device_name() == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class World:
    """This process among those that `deepspeed.init_distributed` joined, with what `Report` asks an
    Accelerator for.
    """

    def __init__(self) -> None:
        without_compiler()
        deepspeed.init_distributed(verbose=False)
        # it warns of every optimizer that is not its own, and torch of names that it calls
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        self.process_index, self.num_processes = dist.get_rank(), dist.get_world_size()
        self.is_main_process = self.process_index == 0
        self.device = torch.device(
            get_accelerator().device_name(int(os.environ.get("LOCAL_RANK", "0")))
        )

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, ...] of every rank -> [ranks * n, ...]."""
        parts = [torch.empty_like(rows) for _ in range(self.num_processes)]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    def listed(self, value: Any) -> list[Any]:
        """The value (JSON) of every rank."""
        text = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8, device=self.device)
        sizes = self.gather(torch.tensor([len(text)], device=self.device)).tolist()
        rows = self.gather(torch.nn.functional.pad(text, (0, max(sizes) - len(text)))[None])
        return [
            json.loads(bytes(row[:size])) for row, size in zip(rows.tolist(), sizes, strict=True)
        ]


def engine_config(args: Arguments, device: torch.device) -> dict[str, Any]:
    """The json with this run's numbers in the place of "auto", the word for what the HF Trainer
    fills in; any other "auto" is dropped, and DeepSpeed's default counts."""
    config = json.loads(Path(args.deepspeed).read_text(encoding="utf-8"))
    bf16 = args.bf16 or (
        device.type != "cpu" and config.get("bf16", {}).get("enabled", "auto") in ("auto", True)
    )
    config["bf16"] = {**config.get("bf16", {}), "enabled": bf16}
    config |= {
        "train_micro_batch_size_per_gpu": args.batch_size,
        "gradient_accumulation_steps": args.accumulation,
    }
    config |= {"steps_per_print": sys.maxsize}
    # it follows from the two above; these are made in the script
    for name in ("train_batch_size", "optimizer", "scheduler"):
        config.pop(name, None)
    for section in (config, *(part for part in config.values() if isinstance(part, dict))):
        for name in [name for name, value in section.items() if value == "auto"]:
            del section[name]
    return config


def batches(
    sets: Data, args: Arguments, seed: int, rank: int, ranks: int, skip: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Micro-batches of one rank without end, from the `skip`-th on: the order is a function of seed
    and epoch, as in pretrain.py.
    """
    if not hasattr(sets.train, "__len__"):
        raise ValueError(
            f"--data {args.data} is a stream: prepare it first (recipes/prepare_data.py), or take "
            "recipes/pretrain.py"
        )
    collate, size = Collate(sets.pad), args.batch_size
    each = len(sets.train) // size // ranks
    if not each:
        raise ValueError(
            "this island's part of the data gives no full batch: give more data or a smaller "
            "--batch-size"
        )
    epoch, at = divmod(skip, each)
    while True:
        order = torch.randperm(
            len(sets.train), generator=torch.Generator().manual_seed(seed + epoch)
        ).tolist()
        for batch in range(at, each):
            first = (batch * ranks + rank) * size
            yield collate([sets.train[row] for row in order[first : first + size]])
        epoch, at = epoch + 1, 0
