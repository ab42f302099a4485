"""Beside the loop of pretrain.py and its twins: their options, the schedule of the rate, and what a
loop keeps in a checkpoint.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from data import Position, forever
from report import Report
from transformers.hf_argparser import HfArg

from fsdp_demo import Exchange, ExchangeConfig
from fsdp_demo.checkpoint import RunState
from fsdp_demo.integrations.arguments import ExchangeArguments
from fsdp_demo.integrations.mesh import ExchangeParallelismConfig


@dataclass
class ModelArguments:
    model: str = HfArg(
        default="small", help="a json of recipes/models by name or path, or a hub id; fresh weights"
    )
    data: str = HfArg(
        default="stdlib",
        help="stdlib, files or a folder of text, jsonl or parquet, or a hub id[:subset]",
    )
    tokenizer: str = HfArg(default="bytes", help="bytes, or a hub id or folder")
    sequence_length: int = HfArg(default=256, help="tokens per row")


@dataclass
class LoopArguments(ModelArguments, ExchangeArguments):
    exchange: str = HfArg(default="demo", help="preset name or yaml file")
    batch_size: int = HfArg(default=4, help="rows per rank and micro-batch")
    accumulation: int = HfArg(default=1, help="micro-batches per optimizer step")
    steps: int = HfArg(default=300, help="optimizer steps, the same on every island")
    lr: float | None = HfArg(default=None, help="learning rate; None: the preset's published one")
    schedule: str = HfArg(
        default="cosine",
        help="cosine, constant or wsd",
        metadata={"choices": ["cosine", "constant", "wsd"]},
    )
    warmup_steps: int = HfArg(default=20, help="steps of linear warm-up")
    seed: int = HfArg(default=0, help="the same on every island; the order of data differs")
    eval_every: int = HfArg(default=50, help="steps between evaluations; 0: only before and after")
    eval_batches: int = HfArg(default=16, help="held-out batches, the same on every island")
    log_every: int = HfArg(default=10, help="steps between lines of metrics.jsonl")
    save_every: int = HfArg(
        default=0, help="steps between checkpoints in OUTPUT/<island>, and one at the end; 0: none"
    )


@dataclass
class Arguments(LoopArguments):
    clip: float | None = HfArg(default=None, help="largest gradient norm; None: the preset's")
    shard: bool = HfArg(
        default=True, help="--shard: FSDP2 inside the island; --no-shard: whole on each rank (DDP)"
    )
    bf16: bool = HfArg(
        default=False, help="compute in bf16, parameters stay fp32; else the launcher's yaml says"
    )
    mesh: bool = HfArg(
        default=False, help="all nodes are one world (one accelerate launch), each node a replica"
    )
    activation_checkpointing: bool = HfArg(
        default=False, help="keep layers' inputs only, compute the rest again"
    )
    compile: str | None = HfArg(
        default=None,
        help="torch.compile of the decoder layers: inductor, or the backend named",
        metadata={"nargs": "?", "const": "inductor"},
    )
    peak_tflops: float | None = HfArg(
        default=None, help="peak of one device in bf16, for MFU; None: by the GPU's name"
    )
    output: str = HfArg(
        default="outputs/pretrain", help="folder of summary, report and one folder per island"
    )
    report_to: str | None = HfArg(
        default=None, help="a tracker of Accelerate, as in tensorboard: one run per island"
    )
    kept_energy: bool = HfArg(
        default=False, help="measure which share of its energy a channel sends"
    )
    keep: int = HfArg(
        default=2, help="checkpoints to keep, beside those after the newest that all islands hold"
    )
    save_async: bool = HfArg(default=False, help="go on training while a checkpoint is written")
    resume: str | None = HfArg(
        default=None,
        help="go on from the newest step that all islands hold in OUTPUT, if they hold any; auto: "
        "where they have none in common, islands that hold none take over from the others",
        metadata={"nargs": "?", "const": "common", "choices": ["common", "auto"]},
    )
    take_over: bool = HfArg(
        default=False, help="with --resume: islands without that step take over from the others"
    )
    fresh_exchange: bool = HfArg(
        default=False, help="with --resume: the exchange starts anew, model and optimizer go on"
    )


def agreed(args: Any) -> dict[str, Any]:
    """Options that must be the same on every island."""
    names = ("steps", "lr", "schedule", "warmup_steps", "seed", "eval_every", "data", "tokenizer")
    names += ("sequence_length", "batch_size", "accumulation")
    return {name: getattr(args, name) for name in names}


def refuse_unlike(args: Any, config: ExchangeConfig) -> None:
    """Raise ValueError where islands that take unlike steps would save or evaluate at unlike ones:
    they stand together at the end of each round only.
    """
    period = min(c.schedule.sync_every for c in config.channels)
    odd = [name for name in ("save_every", "eval_every") if getattr(args, name) % period]
    if config.by_speed and (args.mesh or odd):
        raise ValueError(
            f"local_steps=by_speed beside {'--mesh' if args.mesh else '--' + odd[0]}: start the "
            f"nodes as islands, with --save-every and --eval-every multiples of {period}, or 0"
        )


def facts_of(args: Any, *more: str) -> dict[str, Any]:
    """Options that the summary of a run tells, and `more`."""
    names = ("model", "data", "tokenizer", "seed", "batch_size", "accumulation", "sequence_length")
    return {name: getattr(args, name) for name in (*names, *more)}


def mesh_config() -> ExchangeParallelismConfig:
    """Sizes of `accelerate launch` if it gives them; else each node is a replica."""
    if os.environ.get("ISLAND_COUNT", "1") != "1":
        raise ValueError(
            "--mesh with ISLAND_COUNT: nodes are one world or islands; leave one of the two out"
        )
    if os.environ.get("PARALLELISM_CONFIG_DP_REPLICATE_SIZE"):
        return ExchangeParallelismConfig()
    local, world = (int(os.environ.get(name, "1")) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    return ExchangeParallelismConfig(dp_replicate_size=world // local, dp_shard_size=local)


def schedule(step: int, args: Any) -> float:
    """Factor of the learning rate, a pure function of the step; cosine and wsd (decay in the last
    fifth) end at a tenth. args: steps, warmup_steps and schedule.
    """
    rise = min(1.0, (step + 1) / (args.warmup_steps + 1))
    if args.schedule == "wsd":
        return rise * min(1.0, 0.1 + 0.9 * (args.steps - step) / (0.2 * args.steps))
    if args.schedule == "cosine":
        return rise * (0.55 + 0.45 * math.cos(math.pi * min(1.0, step / args.steps)))
    return rise


class LoopState:
    """What a loop keeps in a checkpoint beside model, optimizer and exchange: its place in the
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
        self.position = Position(0, exchange.steps_taken * accumulation)
        if state.extra and exchange.step == state.step:
            report.load_state_dict(state.extra["report"])
            epoch, batch = state.extra["position"]
            self.position = Position(
                epoch, batch if state.same else round(batch * state.extra["rows"] / rows)
            )
        report.counters = lambda: {
            "failed_saves": state.checkpoints.failed_saves,
            "not_finite": exchange.metrics()["not_finite"],
            **({} if exchange.drift is None else {"drift": exchange.drift}),
        }
        self.done = report.step
        self.step_ended()

    def step_ended(self) -> None:
        """The report has counted this step: the next one starts from here."""
        self._before = Position(self.position.epoch, self.position.batch)

    def extra(self) -> dict[str, Any]:
        """For a checkpoint. Batches of a step that was not taken are handed out again."""
        at = self.position if self.exchange.step > self.report.step else self._before
        place, report = [at.epoch, at.batch], self.report.state_dict()
        return {"position": place, "rows": self.rows, "report": report}

    def batches(self, loader: Any) -> Iterator[dict[str, torch.Tensor]]:
        """Batches from the place on; the random states come back where the uninterrupted run had
        them: inside an epoch its loader had drawn its number already, so the loader comes first.
        """
        if not self.position.normal(loader):
            self.state.restore_random()
        for batch in forever(loader, self.position):
            self.state.restore_random()
            yield batch
