r"""Pretrain a causal language model with a plain DeepSpeed loop: ZeRO-1, 2 or 3 inside each island,
one exchange object between them.

    fsdp-demo rehearse --islands 2 --procs 2 --launcher deepspeed -- \
        recipes/pretrain_deepspeed.py --exchange demo

The twin of pretrain.py: same models, text, split of the data, evaluation and report. Lines that
differ from an ordinary DeepSpeed script are marked (*). Without ISLAND_* variables it trains one
replica; with --mesh RANKS all nodes are one world, and each node a replica.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from data import Collate, Data, load_data, load_tokenizer
from deepspeed.accelerator import get_accelerator
from pretrain import DataArguments, LoopArguments, load_model, schedule, warn_unsaved
from report import Report
from torch.optim.lr_scheduler import LambdaLR
from transformers import HfArgumentParser
from wrong_use import parse, plainly

import deepspeed_ext
from fsdp_demo import (
    Exchange,
    NeedsDecision,
    Topology,
    base_optimizer,
    guard,
    load_config,
    undecided,
)
from fsdp_demo.integrations.arguments import ExchangeArguments


@dataclass
class Arguments(LoopArguments, DataArguments, ExchangeArguments):
    exchange: str = field(default="demo", metadata={"help": "preset name or yaml file"})
    data: str = field(
        default="stdlib",
        metadata={
            "help": "stdlib, a folder of prepare_data.py, or files of text, jsonl or parquet"
        },
    )
    deepspeed: str = field(
        default=str(Path(__file__).parent / "deepspeed" / "zero2.json"),
        metadata={"help": "DeepSpeed's json"},
    )
    mesh: int = field(
        default=0,
        metadata={
            "help": "all nodes are one world: ranks of a node, each node a replica; 0: islands"
        },
    )
    bf16: bool = field(
        default=False,
        metadata={
            "help": "compute in bf16 on a CPU, too (a GPU does where the json says auto or true)"
        },
    )
    output: str = field(
        default="outputs/pretrain-deepspeed",
        metadata={"help": "folder of summary, report and one folder per replica"},
    )
    save_every: int = field(
        default=0,
        metadata={
            "help": "steps between checkpoints in OUTPUT/<island>, and one at the end; 0: none"
        },
    )
    resume: str | None = field(
        default=None,
        metadata={
            "help": "go on from the newest checkpoint that all replicas hold in OUTPUT, if they "
            "hold any; who holds none takes over from the others",
            "nargs": "?",
            "const": "auto",
            "choices": ["auto"],
        },
    )
    local_rank: int = field(
        default=-1, metadata={"help": "the deepspeed launcher adds it; LOCAL_RANK counts"}
    )


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


@torch.no_grad()
def evaluate(
    world: World,
    engine: Any,
    held_out: list[dict[str, torch.Tensor]],
    exchange: Exchange,
    report: Report,
) -> None:
    """Mean loss of the held-out rows, shared by the ranks, under the parameters that all replicas
    agree on (*).
    """
    began, sums = time.monotonic(), torch.zeros(1, 2, dtype=torch.float64)
    engine.eval()
    with exchange.outer_parameters(engine.module):
        # as many for every rank: ZeRO-3 gathers parameters in each
        for turn in range(-(-len(held_out) // world.num_processes)):
            number = turn * world.num_processes + world.process_index
            batch = held_out[number % len(held_out)]
            rows = len(batch["input_ids"]) if number < len(held_out) else 0
            loss = engine(**{name: value.to(world.device) for name, value in batch.items()}).loss
            sums += torch.tensor([[loss.item() * rows, rows]], dtype=torch.float64)
    engine.train()
    total, rows = world.gather(sums.to(world.device)).sum(0).tolist()
    report.evaluated(total / rows, time.monotonic() - began)


def main() -> None:
    logging.basicConfig(format="%(message)s")
    (args,) = parse(HfArgumentParser(Arguments))
    world = World()
    logging.getLogger("fsdp_demo").setLevel(
        logging.INFO if world.is_main_process else logging.WARNING
    )
    # it warns of every optimizer that is not its own
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # of names that DeepSpeed calls
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    if args.mesh:
        deepspeed_ext.shard_within_node(args.mesh)  # (*) ZeRO stays inside the node
    # (*) Which island this is. In a mesh all ranks of all nodes share the data; an island's ranks
    # share what their island got.
    part, parts = (0, 1) if args.mesh else ((here := Topology.from_env()).island, here.islands)
    config = load_config(args.exchange, args.set)

    tokenizer = load_tokenizer(args.tokenizer)
    torch.manual_seed(args.seed)  # the same weights everywhere
    model = load_model(args.model, tokenizer.vocab_size)
    parameters = sum(p.numel() for p in model.parameters())
    seed = args.seed + 1 + part  # (*) an order of the data for each island
    sets = load_data(
        args.data,
        tokenizer,
        args.sequence_length,
        island=part,  # (*) the data are split by island first, then by rank
        islands=parts,
        seed=seed,
        validation_rows=args.eval_batches * args.batch_size,
    )
    held_out = list(sets.loaders(args.batch_size)[1])
    # (*) the one the preset is defined for
    optimizer = base_optimizer(config, model.named_parameters(), args.lr)
    lr = optimizer.param_groups[0]["lr"]
    settings = engine_config(args, world.device)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=LambdaLR(optimizer, lambda step: schedule(step, args)),
        config=settings,
    )
    agreed = {
        name: getattr(args, name)
        for name in ("steps", "lr", "schedule", "warmup_steps", "seed", "eval_every")
    }
    agreed |= {
        name: getattr(args, name)
        for name in ("data", "tokenizer", "sequence_length", "batch_size", "accumulation")
    }
    # (*) the one line; checkpoints are per replica from here on
    exchange = deepspeed_ext.attach(engine, config, must_match=agreed)
    warn_unsaved(bool(args.resume), args.save_every, world.process_index)
    try:
        counters = (
            (engine.load_checkpoint(args.output)[1] or {}).get("report", []) if args.resume else []
        )
    except NeedsDecision as error:
        undecided(error, world.process_index)  # (*) status 78: trying again changes nothing

    facts = {
        "model": args.model,
        "data": args.data,
        "tokenizer": args.tokenizer,
        "seed": args.seed,
        "lr": lr,
    }
    facts |= {
        "zero": engine.zero_optimization_stage(),
        "bf16": settings["bf16"]["enabled"],
        "batch_size": args.batch_size,
    }
    facts |= {"accumulation": args.accumulation, "sequence_length": args.sequence_length}
    report = Report(
        world,
        exchange,
        Path(args.output),
        steps=args.steps,
        log_every=args.log_every,
        parameters=parameters,
        facts=facts,
    )
    if len(counters) == world.num_processes:
        report.load_state_dict(counters[world.process_index])
    rows = batches(
        sets,
        args,
        seed,
        world.process_index,
        world.num_processes,
        exchange.step * args.accumulation,
    )
    resume = shlex.join(sys.argv if args.resume else [*sys.argv, "--resume"])
    saved, failed = exchange.step, 0

    def save(last: bool = False) -> None:
        """Once per step: what is left when a peer is lost in the next one must not take the place
        of a whole checkpoint.
        """
        nonlocal saved, failed
        if last or saved < exchange.step:
            done = engine.save_checkpoint(
                args.output, client_state={"report": world.listed(report.state_dict())}
            )
            saved, failed = (exchange.step, failed) if done else (saved, failed + 1)
            report.saved()

    def leave() -> None:
        save()
        if saved < exchange.step:
            raise RuntimeError(f"the checkpoint of step {exchange.step} could not be written")

    report.counters = lambda: {"failed_saves": failed}

    def end_step() -> None:
        report.optimizer_step(lr * schedule(report.step, args))
        if args.eval_every and exchange.step % args.eval_every == 0 and exchange.step < args.steps:
            evaluate(world, engine, held_out, exchange, report)
        if args.save_every and exchange.step % args.save_every == 0 and exchange.step < args.steps:
            save()

    # (*) DeepSpeed saves with collectives: they work while this replica is whole, but in a mesh
    # they wait for the lost one, too.
    with guard(exchange, save=None if args.mesh else leave, resume=resume):
        if not exchange.step:
            evaluate(world, engine, held_out, exchange, report)
        if report.step < exchange.step:
            end_step()  # a run that was told to stop had taken the step already
        while exchange.step < args.steps:
            for _ in range(args.accumulation):
                batch = {name: value.to(world.device) for name, value in next(rows).items()}
                loss = engine(**batch).loss
                engine.backward(loss)
                report.micro_batch(loss, batch["input_ids"].numel())
                # (*) optional: weights, and the loss of all islands
                exchange.report(tokens=batch["input_ids"].numel(), loss=loss)
                # (*) the exchange hooks in here, once per `accumulation` micro-batches
                engine.step()
            end_step()
        exchange.finish(close=False)  # (*) every island ends with the same model
        evaluate(world, engine, held_out, exchange, report)
        if args.save_every:
            save(last=True)
        report.finish(exchange.digests_equal())
        exchange.finish()  # (*) all are done
        report.draw()
    dist.destroy_process_group()


if __name__ == "__main__":
    with plainly():
        main()
