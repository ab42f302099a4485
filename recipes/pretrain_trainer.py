r"""Pretrain a causal language model with `transformers.Trainer` on islands (or a mesh): the twin of
pretrain.py.

    fsdp-demo rehearse --islands 2 --procs 2 -- \
        recipes/pretrain_trainer.py --model small --data stdlib --exchange diloco --set period=20

Takes all flags of TrainingArguments; `--deepspeed recipes/deepspeed/zero2.json` takes ZeRO in the
place of FSDP2. Lines that differ from an ordinary Trainer script are marked (*).
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import torch
from data import Collate, load_data, load_tokenizer
from model import load_model
from pretrain_parts import ModelArguments
from report import log_lines
from transformers import HfArgumentParser, Trainer, TrainingArguments, set_seed
from transformers.hf_argparser import HfArg
from wrong_use import parse, plainly

from fsdp_demo import NeedsDecision, PeerLost, Topology, undecided
from fsdp_demo.integrations.accelerate import allow_fsdp_on_cpu
from fsdp_demo.integrations.arguments import ExchangeArguments
from fsdp_demo.integrations.mesh import ExchangeParallelismConfig
from fsdp_demo.status import leave, status_of


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


def main() -> None:
    data, exchange, args = parse(parser())
    log_lines(args.process_index == 0)
    config = exchange.config()  # (*) the method, None without --exchange
    if args.learning_rate is None:
        args.learning_rate = (config.lr if config else None) or 3e-4
    if args.fsdp and args.use_cpu:
        allow_fsdp_on_cpu()  # (*) a rehearsal: Accelerate shards on accelerators only

    set_seed(args.seed)  # the same weights everywhere
    tokenizer, topology = load_tokenizer(data.tokenizer), Topology.from_env()
    sets = load_data(
        data.data,
        tokenizer,
        data.sequence_length,
        # (*) the data are split by island first; other scripts: split_dataset_by_island(dataset)
        island=topology.island,
        islands=topology.islands,
        seed=args.seed + 1 + topology.island,
        validation_rows=data.eval_rows,
    )
    trainer = Trainer(
        model=load_model(data.model, tokenizer.vocab_size),
        args=args,
        train_dataset=sets.train,
        eval_dataset=sets.validation,
        data_collator=Collate(sets.pad),
        # (*) the callback, and the optimizer of presets that have their own
        **exchange.trainer(lr=args.learning_rate),
    )
    resume = args.resume_from_checkpoint
    try:
        newest = ("true",) if config else ("true", "auto")  # (*) "auto" is for the callback
        trainer.train(resume_from_checkpoint=True if str(resume).lower() in newest else resume)
    except NeedsDecision as error:
        undecided(error, args.process_index)  # (*) status 78: trying again changes nothing
    except SystemExit as end:
        leave(int(end.code or 0))  # (*) SIGTERM, here or elsewhere: 75, or 1 if nothing was saved
    except PeerLost as lost:
        leave(status_of(lost))  # (*) an island is gone: 75, or 1 if what there is was not saved
    if trainer.is_fsdp_enabled:
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model()  # every island has the same model by now
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    # ranks that leave their process group to the interpreter sometimes abort, under DeepSpeed above
    # all
    trainer.accelerator.end_training()


if __name__ == "__main__":
    with plainly():
        main()
