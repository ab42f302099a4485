r"""Pretrain a causal language model with `transformers.Trainer` on islands (or a mesh): the twin of
pretrain.py.

    fsdp-demo rehearse --islands 2 --procs 2 -- \
        recipes/pretrain_trainer.py --model small --data stdlib --exchange diloco --set period=20

Takes all flags of TrainingArguments; `--deepspeed recipes/deepspeed/zero2.json` takes ZeRO in the
place of FSDP2. Lines that differ from an ordinary Trainer script are marked (*).
"""

from __future__ import annotations

from data import Collate, load_data, load_tokenizer
from model import load_model
from report import log_lines
from trainer_parts import parser
from transformers import Trainer, set_seed
from wrong_use import parse, plainly

from fsdp_demo import NeedsDecision, PeerLost, Topology, undecided
from fsdp_demo.integrations.accelerate import allow_fsdp_on_cpu
from fsdp_demo.status import leave, status_of


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
