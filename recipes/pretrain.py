r"""Pretrain a causal language model on islands: Accelerate and FSDP2 inside each, one exchange
object between them.

    fsdp-demo rehearse --islands 2 --procs 2 -- \
        recipes/pretrain.py --model small --data stdlib --exchange demo

Without ISLAND_* variables it trains one replica, by the method's own rule; with --mesh all nodes
are one world and each node is a replica. Lines that differ from an ordinary Accelerate script are
marked (*).
"""

from __future__ import annotations

from start import Start

# isort: split

import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from data import load_data, load_tokenizer
from model import checkpoint_and_compile, load_model
from pretrain_parts import (
    Arguments,
    LoopState,
    agreed,
    facts_of,
    mesh_config,
    refuse_unlike,
    schedule,
)
from report import Report, flops_per_token, log_lines, peak_flops
from torch.optim.lr_scheduler import LambdaLR
from transformers import HfArgumentParser
from wrong_use import parse, plainly, warn_unsaved

import fsdp_demo
from fsdp_demo.checkpoint import CheckpointManager, RunState
from fsdp_demo.integrations.accelerate import accelerator as island_accelerator
from fsdp_demo.integrations.mesh import mesh_topology


def main() -> None:
    start = Start()
    (args,) = parse(HfArgumentParser(Arguments))
    acc = island_accelerator(  # (*) FSDP2 on GPU and CPU
        shard=args.shard,
        mixed_precision="bf16" if args.bf16 else None,
        gradient_accumulation_steps=args.accumulation,
        log_with=args.report_to,
        project_dir=args.output,  # some trackers ask for a folder here
        parallelism_config=mesh_config() if args.mesh else None,
    )
    log_lines(acc.is_main_process)
    # (*) which island this is
    topology = mesh_topology(acc) if args.mesh else fsdp_demo.Topology.from_env()
    # (*) In a mesh Accelerate's loader splits the data over all ranks of all nodes; an island's
    # loader knows its own ranks only.
    part, parts = (0, 1) if args.mesh else (topology.island, topology.islands)
    clip = [] if args.clip is None else [f"clip={args.clip}"]
    config = fsdp_demo.load_config(args.exchange, [*args.set, *clip])
    refuse_unlike(args, config)
    start.mark("ranks meet")

    tokenizer = load_tokenizer(args.tokenizer)
    torch.manual_seed(args.seed)  # the same weights everywhere
    model = load_model(args.model, tokenizer.vocab_size)
    torch.manual_seed(args.seed + 1 + part)  # (*) an order of the data for each island
    parameters = sum(p.numel() for p in model.parameters())
    flops = flops_per_token(model, args.sequence_length)
    checkpoint_and_compile(model, acc.device, args.activation_checkpointing, args.compile)
    start.mark("model")

    sets = load_data(
        args.data,
        tokenizer,
        args.sequence_length,
        island=part,  # (*) the data are split by island first, then by rank
        islands=parts,
        seed=torch.initial_seed(),
        validation_rows=args.eval_batches * args.batch_size,
    )
    start.mark("data")

    optimizer = fsdp_demo.base_optimizer(config, model.named_parameters(), args.lr)  # (*)
    model, optimizer, rows, held_out = acc.prepare(model, optimizer, *sets.loaders(args.batch_size))
    start.mark("sharding")

    output = Path(args.output)
    facts = facts_of(args, "activation_checkpointing", "compile")
    facts |= {"lr": optimizer.param_groups[0]["lr"], "bf16": acc.mixed_precision == "bf16"}
    warn_unsaved(args, topology.rank)
    root = output if args.mesh else output / topology.name
    state = RunState(
        CheckpointManager(root, topology, args.keep, remote=args.remote), model, optimizer, facts
    )
    try:
        resume = "auto" if args.resume == "auto" else bool(args.resume)
        state.restore(resume, args.take_over, args.fresh_exchange)
    except fsdp_demo.NeedsDecision as error:
        fsdp_demo.undecided(error, topology.rank)  # (*) status 78: another start is no use
    start.mark("resuming, with the wait for the others")

    exchange = fsdp_demo.attach(  # (*)
        optimizer,
        config,
        model=model,
        topology=topology,
        must_match=agreed(args),
        step=state.step,
        state=state.saved,
        fresh=args.fresh_exchange,
        batch=(args.batch_size, args.accumulation),
    )
    exchange.watch_energy(args.kept_energy)
    start.mark("islands meet")

    report = Report(
        acc,
        exchange,
        output,
        steps=args.steps,
        log_every=args.log_every,
        parameters=parameters,
        facts=facts,
    )
    report.count_flops(flops, peak_flops(acc.device, args.peak_tflops))
    if args.report_to:
        report.track()
    batch_rows = args.batch_size * topology.world * topology.islands
    loop = LoopState(state, exchange, report, batch_rows, args.accumulation)
    scheduler = LambdaLR(optimizer.optimizer, lambda step: schedule(loop.done + step, args))
    exchange.on_left_out(scheduler.step)  # with local_steps=by_speed

    def every(steps: int) -> bool:
        return bool(steps) and exchange.step % steps == 0 and exchange.step < args.steps

    def end_step() -> None:
        report.optimizer_step(float(scheduler.get_last_lr()[0]))
        scheduler.step()
        loop.step_ended()
        if every(args.eval_every):
            evaluate(acc, model, held_out, exchange, report)
        if every(args.save_every):
            state.save(exchange, loop.extra, wait=not args.save_async)
            report.saved()

    def save_and_leave() -> None:
        state.save(exchange, loop.extra, last=True)

    again = " ".join(sys.argv if args.resume else [*sys.argv, "--resume"])
    with fsdp_demo.guard(exchange, save=save_and_leave, resume=again):  # (*)
        if not exchange.step:
            evaluate(acc, model, held_out, exchange, report)
        start.mark("evaluation")
        if loop.done < exchange.step:  # a run that was told to stop had taken the step already
            with warnings.catch_warnings():  # of an optimizer step that torch has not seen
                warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
                end_step()
        batches = loop.batches(rows)
        while exchange.step < args.steps:
            for _ in range(args.accumulation):
                batch = next(batches)
                with acc.accumulate(model):
                    loss = model(**batch).loss
                    acc.backward(loss)
                    report.micro_batch(loss)
                    # (*) optional: tokens, weights, and the loss of all islands
                    exchange.report(tokens=batch["input_ids"].numel(), loss=loss)
                    # (*) the exchange hooks in here, once per `accumulation` micro-batches
                    optimizer.step()
                    optimizer.zero_grad()
            start.first_step(topology.name)
            end_step()
        exchange.finish(close=False)  # (*) every island ends with the same model
        evaluate(acc, model, held_out, exchange, report)
        if args.save_every:
            state.save(exchange, loop.extra)
            report.saved()
        report.finish(exchange.digests_equal())
        exchange.finish()  # (*) all are done
        report.draw()
    state.finish()
    acc.end_training()


@torch.no_grad()
def evaluate(
    acc: Accelerator, model: torch.nn.Module, loader: Any, exchange: Any, report: Report
) -> None:
    """Mean loss of the held-out rows, shared by the ranks of the island, under the parameters all
    islands agree on (*).
    """
    began, losses = time.monotonic(), []
    model.eval()
    with exchange.outer_parameters(model):
        for batch in loader:
            loss = model(**batch).loss.repeat(len(batch["input_ids"]))
            losses.append(acc.gather_for_metrics(loss))
    model.train()
    report.evaluated(torch.cat(losses).mean().item(), time.monotonic() - began)


if __name__ == "__main__":
    with plainly():
        main()
