r"""Pretrain a causal language model on islands: Accelerate and FSDP2 inside each, one exchange
object between them.

    fsdp-demo rehearse --islands 2 --procs 2 -- \
        recipes/pretrain.py --model small --data stdlib --exchange demo

Without ISLAND_* variables it trains one replica, by the method's own rule; with --mesh all nodes
are one world and each node is a replica. Lines that differ from an ordinary Accelerate script are
marked (*).
"""

# ruff: noqa: E402

from __future__ import annotations

import gc

# What imports make stays: without the collector they take a fifth less. `Start` turns it on again.
if __name__ == "__main__":
    gc.disable()

import logging
import math
import os
import shutil
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from data import Position, forever, load_data, load_tokenizer
from report import Report, flops_per_token, peak_flops
from start import Start
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoConfig, AutoModelForCausalLM, HfArgumentParser, PreTrainedModel
from wrong_use import parse, plainly

from fsdp_demo import (
    Exchange,
    NeedsDecision,
    Topology,
    attach,
    base_optimizer,
    guard,
    load_config,
    undecided,
)
from fsdp_demo.checkpoint import CheckpointManager, RunState
from fsdp_demo.integrations.accelerate import accelerator as island_accelerator
from fsdp_demo.integrations.arguments import ExchangeArguments
from fsdp_demo.integrations.mesh import ExchangeParallelismConfig, mesh_topology

MODELS = Path(__file__).parent / "models"


@dataclass
class DataArguments:
    model: str = field(
        default="small",
        metadata={"help": "a json of recipes/models by name or path, or a hub id; fresh weights"},
    )
    data: str = field(
        default="stdlib",
        metadata={
            "help": "stdlib, a folder of prepare_data.py, files of text, jsonl or parquet, or a "
            "hub id[:subset]"
        },
    )
    tokenizer: str = field(default="bytes", metadata={"help": "bytes, or a hub id or folder"})
    sequence_length: int = field(default=256, metadata={"help": "tokens per row"})
    batch_size: int = field(default=4, metadata={"help": "rows per rank and micro-batch"})
    accumulation: int = field(default=1, metadata={"help": "micro-batches per optimizer step"})


@dataclass
class CrossArguments(ExchangeArguments):
    exchange: str = field(default="demo", metadata={"help": "preset name or yaml file"})
    clip: float | None = field(
        default=None, metadata={"help": "largest gradient norm; None: the preset's"}
    )
    shard: bool = field(
        default=True,
        metadata={"help": "--shard: FSDP2 inside the island; --no-shard: whole on each rank (DDP)"},
    )
    bf16: bool = field(
        default=False,
        metadata={
            "help": "compute in bf16; parameters stay fp32; without it the launcher's yaml decides"
        },
    )
    mesh: bool = field(
        default=False,
        metadata={"help": "all nodes are one world (one accelerate launch), each node a replica"},
    )
    activation_checkpointing: bool = field(
        default=False, metadata={"help": "keep layers' inputs only, compute the rest again"}
    )
    compile: str | None = field(
        default=None,
        metadata={
            "help": "torch.compile of the decoder layers: inductor, or the backend named",
            "nargs": "?",
            "const": "inductor",
        },
    )


@dataclass
class LoopArguments:
    steps: int = field(default=300, metadata={"help": "optimizer steps, the same on every island"})
    lr: float | None = field(
        default=None, metadata={"help": "learning rate; None: the published one of the preset"}
    )
    schedule: str = field(
        default="cosine",
        metadata={"help": "cosine, constant or wsd", "choices": ["cosine", "constant", "wsd"]},
    )
    warmup_steps: int = field(default=20, metadata={"help": "steps of linear warm-up"})
    seed: int = field(
        default=0,
        metadata={"help": "the same on every island; the order of the data differs by island"},
    )
    eval_every: int = field(
        default=50, metadata={"help": "steps between evaluations; 0: only before and after"}
    )
    eval_batches: int = field(
        default=16,
        metadata={"help": "held-out batches, the same on every island with the same data"},
    )
    log_every: int = field(default=10, metadata={"help": "steps between lines of metrics.jsonl"})


@dataclass
class TrainArguments(LoopArguments):
    peak_tflops: float | None = field(
        default=None,
        metadata={"help": "peak of one device in bf16, for MFU; None: by the GPU's name"},
    )
    output: str = field(
        default="outputs/pretrain",
        metadata={"help": "folder of summary.json, report.html and one folder per island"},
    )
    report_to: str | None = field(
        default=None,
        metadata={"help": "a tracker of Accelerate, as in tensorboard: one run per island"},
    )
    kept_energy: bool = field(
        default=False,
        metadata={"help": "measure which share of what a channel has to send it sends"},
    )
    save_every: int = field(
        default=0,
        metadata={
            "help": "steps between checkpoints, in OUTPUT/<island>/checkpoint-<step>, and one at "
            "the end; 0: none"
        },
    )
    keep: int = field(
        default=2,
        metadata={
            "help": "checkpoints to keep, beside those after the newest that all islands hold"
        },
    )
    save_async: bool = field(
        default=False, metadata={"help": "go on training while a checkpoint is written"}
    )
    resume: str | None = field(
        default=None,
        metadata={
            "help": "go on from the newest step that all islands hold in OUTPUT, if they hold any; "
            "auto: where they have none in common, "
            "islands that hold none take over from the others",
            "nargs": "?",
            "const": "common",
            "choices": ["common", "auto"],
        },
    )
    take_over: bool = field(
        default=False,
        metadata={"help": "with --resume: islands without that step take over from the others"},
    )
    fresh_exchange: bool = field(
        default=False,
        metadata={"help": "with --resume: model and optimizer go on, the exchange starts anew"},
    )


def load_model(name: str, vocabulary: int) -> PreTrainedModel:
    """Fresh fp32 weights from a configuration."""
    path = next((p for p in (MODELS / f"{name}.json", Path(name)) if p.is_file()), None)
    config = AutoConfig.from_pretrained(path or name)
    if config.vocab_size < vocabulary:
        raise ValueError(
            f"--model {name} has vocab_size={config.vocab_size}, the tokenizer needs {vocabulary}: "
            "change one of them"
        )
    # for generation; with it every layer would be compiled anew, and from the ninth on not at all
    config.use_cache = False
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def checkpoint_and_compile(
    model: PreTrainedModel, how: CrossArguments, device: torch.device
) -> None:
    """Before `prepare`: FSDP2 then puts its hooks around what is made here.

    The layers are compiled one by one and in place: equal layers share one compilation, parameters
    keep their names, and FSDP2's hooks, the optimizer and the exchange stay outside. The whole
    model in one piece would break its graph at every hook. What is checkpointed is inside, as
    transformers has it in the layer's forward: the compiler knows what is to be computed again.
    """
    if how.activation_checkpointing:
        model.activation_checkpointing_enable()
    if how.compile is None:
        return
    compiler = os.environ.get("CXX", "g++")
    if (
        how.compile == "inductor"
        and device.type == "cpu"
        and not (shutil.which(compiler) or shutil.which("clang++"))
    ):
        raise ValueError(
            f"--compile on the CPU needs a C++ compiler, found no {compiler}: install one, or "
            "--compile aot_eager"
        )
    # what FSDP2 shards one by one
    layers = [m for m in model.modules() if type(m).__name__ in (model._no_split_modules or ())]
    for module in layers or [model]:
        module.compile(backend=how.compile)


def mesh_config() -> ExchangeParallelismConfig:
    """Sizes of `accelerate launch` (PARALLELISM_CONFIG_*) if it gives them; else a node is a
    replica.
    """
    if os.environ.get("ISLAND_COUNT", "1") != "1":
        raise ValueError(
            "--mesh with ISLAND_COUNT: nodes are one world or islands; leave one of the two out"
        )
    if os.environ.get("PARALLELISM_CONFIG_DP_REPLICATE_SIZE"):
        return ExchangeParallelismConfig()
    local, world = (int(os.environ.get(name, "1")) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    return ExchangeParallelismConfig(dp_replicate_size=world // local, dp_shard_size=local)


def warn_unsaved(resume: bool, save_every: int, rank: int) -> None:
    """Say that `--resume` alone writes nothing. rank: inside the island; the first one speaks."""
    if resume and not save_every and rank == 0:
        logging.getLogger(__name__).warning(
            "no checkpoints are written: a run that loses all islands begins again at step 0; "
            "add --save-every 100"
        )


def schedule(step: int, train: LoopArguments) -> float:
    """Factor of the learning rate, a pure function of the step; cosine and wsd (decay in the last
    fifth) end at a tenth.
    """
    rise = min(1.0, (step + 1) / (train.warmup_steps + 1))
    if train.schedule == "wsd":
        return rise * min(1.0, 0.1 + 0.9 * (train.steps - step) / (0.2 * train.steps))
    if train.schedule == "cosine":
        return rise * (0.55 + 0.45 * math.cos(math.pi * min(1.0, step / train.steps)))
    return rise


class Loop:
    """What this loop keeps in a checkpoint beside model, optimizer and exchange: its place in the
    data, and the report's counters.

    Args:
        state: restored by now.
        rows: of one micro-batch over all ranks of all islands, to move the place where their number
            has changed.
        accumulation: micro-batches per step.

    Attributes:
        done: steps of which the report knew at the start; one less than the exchange after a stop
            inside of one.
    """

    def __init__(
        self, state: RunState, exchange: Exchange, report: Report, rows: int, accumulation: int
    ):
        self.state, self.exchange, self.report, self.rows = state, exchange, report, rows
        # of a new run 0; where all was taken over from other islands
        self.position = Position(0, exchange.step * accumulation)
        if state.extra and exchange.step == state.step:
            report.load_state_dict(state.extra["report"])
            epoch, batch = state.extra["position"]
            self.position = Position(
                epoch, batch if state.same else round(batch * state.extra["rows"] / rows)
            )
        report.counters = lambda: {
            "failed_saves": state.checkpoints.failed_saves,
            "not_finite": exchange.metrics()["not_finite"],
        }
        self.done = report.step
        self.step_ended()

    def step_ended(self) -> None:
        """The report has counted this step: the next one starts from here."""
        self._before = Position(self.position.epoch, self.position.batch)

    def extra(self) -> dict[str, Any]:
        """For a checkpoint. Batches of a step that was not taken are handed out again."""
        at = self.position if self.exchange.step > self.report.step else self._before
        return {
            "position": [at.epoch, at.batch],
            "rows": self.rows,
            "report": self.report.state_dict(),
        }

    def batches(self, loader: Any) -> Iterator[dict[str, torch.Tensor]]:
        """Batches from the place on; the random states come back where the uninterrupted run had
        them.

        Inside an epoch the loader's iterator is there already in that run; making it draws a
        number, so it comes first.
        """
        if not self.position.normal(loader):
            self.state.restore_random()
        for batch in forever(loader, self.position):
            self.state.restore_random()
            yield batch


@torch.no_grad()
def evaluate(
    acc: Accelerator, model: torch.nn.Module, loader: Any, exchange: Exchange, report: Report
) -> None:
    """Mean loss of the held-out rows, shared by the ranks of the island, under the parameters all
    islands agree on (*).
    """
    began, losses = time.monotonic(), []
    model.eval()
    with exchange.outer_parameters(model):
        for batch in loader:
            losses.append(
                acc.gather_for_metrics(model(**batch).loss.repeat(len(batch["input_ids"])))
            )
    model.train()
    report.evaluated(torch.cat(losses).mean().item(), time.monotonic() - began)


def main() -> None:
    start = Start()
    logging.basicConfig(format="%(message)s")
    data, cross, train = parse(HfArgumentParser((DataArguments, CrossArguments, TrainArguments)))
    acc = island_accelerator(  # (*) FSDP2 on GPU and CPU
        shard=cross.shard,
        mixed_precision="bf16" if cross.bf16 else None,
        gradient_accumulation_steps=data.accumulation,
        log_with=train.report_to,
        project_dir=train.output,  # some trackers ask for a folder here
        **({"parallelism_config": mesh_config()} if cross.mesh else {}),
    )
    logging.getLogger("fsdp_demo").setLevel(
        logging.INFO if acc.is_main_process else logging.WARNING
    )
    topology = mesh_topology(acc) if cross.mesh else Topology.from_env()  # (*) which island this is
    # (*) In a mesh Accelerate's loader splits the data over all ranks of all nodes; an island's
    # loader knows its own ranks only.
    part, parts = (0, 1) if cross.mesh else (topology.island, topology.islands)
    clip = [] if cross.clip is None else [f"clip={cross.clip}"]
    config = load_config(cross.exchange, [*cross.set, *clip])

    start.mark("ranks meet")
    tokenizer = load_tokenizer(data.tokenizer)
    torch.manual_seed(train.seed)  # the same weights everywhere
    model = load_model(data.model, tokenizer.vocab_size)
    torch.manual_seed(train.seed + 1 + part)  # (*) an order of the data for each island
    parameters = sum(p.numel() for p in model.parameters())
    flops = flops_per_token(model, data.sequence_length)
    checkpoint_and_compile(model, cross, acc.device)
    start.mark("model")
    sets = load_data(
        data.data,
        tokenizer,
        data.sequence_length,
        island=part,  # (*) the data are split by island first, then by rank
        islands=parts,
        seed=torch.initial_seed(),
        validation_rows=train.eval_batches * data.batch_size,
    )
    start.mark("data")
    # (*) the one the preset is defined for
    optimizer = base_optimizer(config, model.named_parameters(), train.lr)
    model, optimizer, rows, held_out = acc.prepare(model, optimizer, *sets.loaders(data.batch_size))
    start.mark("sharding")

    facts = {
        "model": data.model,
        "data": data.data,
        "tokenizer": data.tokenizer,
        "seed": train.seed,
    }
    facts |= {"lr": optimizer.param_groups[0]["lr"], "bf16": acc.mixed_precision == "bf16"}
    facts |= {"activation_checkpointing": cross.activation_checkpointing, "compile": cross.compile}
    facts |= {
        "batch_size": data.batch_size,
        "accumulation": data.accumulation,
        "sequence_length": data.sequence_length,
    }
    warn_unsaved(bool(train.resume), train.save_every, topology.rank)
    output = Path(train.output)
    root = output if cross.mesh else output / topology.name
    checkpoints = CheckpointManager(root, topology, train.keep)
    state = RunState(checkpoints, model, optimizer, facts)
    try:
        state.restore(
            "auto" if train.resume == "auto" else bool(train.resume),
            train.take_over,
            train.fresh_exchange,
        )
    except NeedsDecision as error:
        undecided(error, topology.rank)  # (*) status 78: trying again changes nothing
    start.mark("restoring")
    agreed = {
        name: getattr(train, name)
        for name in ("steps", "lr", "schedule", "warmup_steps", "seed", "eval_every")
    }
    agreed |= {
        name: getattr(data, name)
        for name in ("data", "tokenizer", "sequence_length", "batch_size", "accumulation")
    }
    exchange = attach(  # (*)
        optimizer,
        config,
        model=model,
        topology=topology,
        must_match=agreed,
        step=state.step,
        state=state.saved,
        fresh=train.fresh_exchange,
        batch=(data.batch_size, data.accumulation),
    )
    start.mark("islands meet")
    report = Report(
        acc,
        exchange,
        output,
        steps=train.steps,
        log_every=train.log_every,
        parameters=parameters,
        facts=facts,
    )
    exchange.watch_energy(train.kept_energy)
    if train.report_to:
        acc.project_configuration.logging_dir = str(output / topology.name)
        name = {"name": f"{output.name}-{topology.name}"}  # of the run; else islands look alike
        acc.init_trackers(
            "fsdp_demo",
            config={k: v for k, v in facts.items() if v is not None},
            init_kwargs={"wandb": {**name, "group": output.name}, "trackio": name},
        )
        report.tracks = True
    report.count_flops(flops, peak_flops(acc.device, train.peak_tflops))
    loop = Loop(
        state,
        exchange,
        report,
        data.batch_size * topology.world * topology.islands,
        data.accumulation,
    )
    scheduler = LambdaLR(optimizer.optimizer, lambda step: schedule(loop.done + step, train))

    def end_step() -> None:
        report.optimizer_step(float(scheduler.get_last_lr()[0]))
        scheduler.step()
        loop.step_ended()
        if (
            train.eval_every
            and exchange.step % train.eval_every == 0
            and exchange.step < train.steps
        ):
            evaluate(acc, model, held_out, exchange, report)
        if (
            train.save_every
            and exchange.step % train.save_every == 0
            and exchange.step < train.steps
        ):
            state.save(exchange, loop.extra, wait=not train.save_async)
            report.saved()

    resume = " ".join(sys.argv if train.resume else [*sys.argv, "--resume"])
    save = lambda: state.save(exchange, loop.extra, last=True)  # noqa: E731
    with guard(exchange, save=save, resume=resume):  # (*)
        if not exchange.step:
            evaluate(acc, model, held_out, exchange, report)
        start.mark("evaluation")
        if loop.done < exchange.step:
            with warnings.catch_warnings():  # torch misses an optimizer step, taken before the stop
                warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
                end_step()  # a run that was told to stop had taken the step already
        batches = loop.batches(rows)
        for _ in range(exchange.step, train.steps):
            for _ in range(data.accumulation):
                batch = next(batches)
                with acc.accumulate(model):
                    loss = model(**batch).loss
                    acc.backward(loss)
                    report.micro_batch(loss, batch["input_ids"].numel())
                    # (*) optional: weights, and the loss of all islands
                    exchange.report(tokens=batch["input_ids"].numel(), loss=loss)
                    # (*) the exchange hooks in here, once per `accumulation` micro-batches
                    optimizer.step()
                    optimizer.zero_grad()
            start.first_step(topology.name)
            end_step()
        exchange.finish(close=False)  # (*) every island ends with the same model
        evaluate(acc, model, held_out, exchange, report)
        if train.save_every:
            state.save(exchange, loop.extra)
            report.saved()
        report.finish(exchange.digests_equal())
        exchange.finish()  # (*) all are done
        report.draw()
    state.finish()
    acc.end_training()


if __name__ == "__main__":
    with plainly():
        main()
