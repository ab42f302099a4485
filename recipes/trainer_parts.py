"""Beside pretrain_trainer.py: its options, with the defaults of a pretraining run."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import torch
from pretrain_parts import ModelArguments
from transformers import HfArgumentParser, TrainingArguments
from transformers.hf_argparser import HfArg

from fsdp_demo.integrations.arguments import ExchangeArguments
from fsdp_demo.integrations.mesh import ExchangeParallelismConfig


@dataclass
class DataArguments(ModelArguments):
    eval_rows: int = HfArg(default=64, help="held-out rows, the same on every island")


def parser() -> HfArgumentParser:
    """TrainingArguments with the defaults of a pretraining run: FSDP2 where an island has ranks
    enough (not DeepSpeed), fp32 parameters.
    """
    made = HfArgumentParser((DataArguments, ExchangeArguments, TrainingArguments))
    mesh = int(os.environ.get("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "1")) > 1
    sharded = {"version": 2, "reshard_after_forward": True, "state_dict_type": "SHARDED_STATE_DICT"}
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    zero = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true" or any(
        flag.partition("=")[0] == "--deepspeed" for flag in sys.argv
    )
    cpu = (
        os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
        or os.environ.get("DS_ACCELERATOR") == "cpu"
    )
    if zero:
        from deepspeed_parts import without_compiler

        without_compiler()
        # Accelerate would leave DeepSpeed out without a word; `use_cpu` has it
        os.environ.pop("ACCELERATE_USE_CPU", None)
    made.set_defaults(
        output_dir="outputs/pretrain-trainer",
        use_cpu=cpu or not torch.accelerator.is_available(),
        max_steps=300,
        learning_rate=None,
        lr_scheduler_type="cosine",
        warmup_steps=20,
        per_device_train_batch_size=4,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=50,
        save_steps=100,
        report_to="none",
        **({"fsdp": True, "fsdp_config": sharded} if ranks > 1 and not zero else {}),
        # (*) all nodes in one launch; else islands
        **({"parallelism_config": ExchangeParallelismConfig()} if mesh else {}),
    )
    return made
