r"""Pretrain a causal language model with a plain DeepSpeed loop: ZeRO-1, 2 or 3 inside each island,
one exchange object between them.

    fsdp-demo rehearse --islands 2 --procs 2 --launcher deepspeed -- \
        recipes/pretrain_deepspeed.py --exchange demo

The twin of pretrain.py: same models, text, split of the data, evaluation and report. Lines that
differ from an ordinary DeepSpeed script are marked (*). Without ISLAND_* variables it trains one
replica; with --mesh RANKS all nodes are one world, and each node a replica.
"""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from data import load_data, load_tokenizer
from deepspeed_parts import Arguments, World, batches, engine_config
from model import load_model
from pretrain_parts import agreed, facts_of, refuse_unlike, schedule
from report import Report, log_lines
from torch.optim.lr_scheduler import LambdaLR
from transformers import HfArgumentParser
from wrong_use import parse, plainly, warn_unsaved

import deepspeed_ext
import fsdp_demo


def main() -> None:
    (args,) = parse(HfArgumentParser(Arguments))
    world = World()
    log_lines(world.is_main_process)
    if args.mesh:
        deepspeed_ext.shard_within_node(args.mesh)  # (*) ZeRO stays inside the node
    # (*) Which island this is. In a mesh all ranks of all nodes share the data; an island's ranks
    # share what their island got.
    here = fsdp_demo.Topology.from_env()
    part, parts = (0, 1) if args.mesh else (here.island, here.islands)
    config = fsdp_demo.load_config(args.exchange, args.set)
    refuse_unlike(args, config)

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
    optimizer = fsdp_demo.base_optimizer(config, model.named_parameters(), args.lr)  # (*)
    lr = optimizer.param_groups[0]["lr"]
    settings = engine_config(args, world.device)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=LambdaLR(optimizer, lambda step: schedule(step, args)),
        config=settings,
    )
    # (*) the one line; checkpoints are per replica from here on
    exchange = deepspeed_ext.attach(engine, config, must_match=agreed(args), remote=args.remote)
    warn_unsaved(args, world.process_index)
    try:
        kept = engine.load_checkpoint(args.output)[1] if args.resume else None
    except fsdp_demo.NeedsDecision as error:
        fsdp_demo.undecided(error, world.process_index)  # (*) status 78: another start is no use

    facts = facts_of(args) | {"lr": lr, "bf16": settings["bf16"]["enabled"]}
    facts |= {"zero": engine.zero_optimization_stage()}
    report = Report(
        world,
        exchange,
        Path(args.output),
        steps=args.steps,
        log_every=args.log_every,
        parameters=parameters,
        facts=facts,
    )
    counters = (kept or {}).get("report", [])
    if len(counters) == world.num_processes:
        report.load_state_dict(counters[world.process_index])
    skip = exchange.steps_taken * args.accumulation
    rows = batches(sets, args, seed, world.process_index, world.num_processes, skip)
    again = shlex.join(sys.argv if args.resume else [*sys.argv, "--resume"])
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

    def every(steps: int) -> bool:
        return bool(steps) and exchange.step % steps == 0 and exchange.step < args.steps

    def end_step() -> None:
        report.optimizer_step(lr * schedule(report.step, args))
        if every(args.eval_every):
            evaluate(world, engine, held_out, exchange, report)
        if every(args.save_every):
            save()

    # (*) DeepSpeed saves with collectives: they work while this replica is whole, but in a mesh
    # they wait for the lost one, too.
    with fsdp_demo.guard(exchange, save=None if args.mesh else leave, resume=again):
        if not exchange.step:
            evaluate(world, engine, held_out, exchange, report)
        if report.step < exchange.step:
            end_step()  # a run that was told to stop had taken the step already
        while exchange.step < args.steps:
            for _ in range(args.accumulation):
                batch = {name: value.to(world.device) for name, value in next(rows).items()}
                loss = engine(**batch).loss
                engine.backward(loss)
                report.micro_batch(loss)
                # (*) optional: tokens, weights, and the loss of all islands
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


@torch.no_grad()
def evaluate(
    world: World,
    engine: Any,
    held_out: list[dict[str, torch.Tensor]],
    exchange: Any,
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


if __name__ == "__main__":
    with plainly():
        main()
