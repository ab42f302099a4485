"""A Trainer script of somebody who knows nothing of this package. It takes the flags of
TrainingArguments; `--mode` and the folder of `--texts` are its own.
"""

import sys
from dataclasses import dataclass

import torch
from datasets import Dataset, load_dataset
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


@dataclass
class ScriptArguments:
    """`mode`: "train"; "score" only evaluates; "twice" trains two models in turn."""

    mode: str = "train"
    texts: str = ""  # a file of json lines, read as a stream
    rows: int = 65


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, tie_word_embeddings=False, **sizes, **heads))


def main() -> None:
    own, args = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(32, (own.rows, 8), generator=draw).tolist()
    data = Dataset.from_dict({"input_ids": ids, "labels": ids})
    if own.texts:
        data = load_dataset("json", data_files=own.texts, split="train", streaming=True)
    trainer = Trainer(model=model(), args=args, train_dataset=data, eval_dataset=data)
    if own.mode == "score":
        print("scored", trainer.evaluate()["eval_loss"], args.output_dir)
        return
    trainer.train()
    if own.mode == "twice":
        second = Trainer(model=model(), args=args, train_dataset=data)
        second.train()
    trainer.save_model(args.output_dir + "/final")


if __name__ == "__main__":
    sys.exit(main())
