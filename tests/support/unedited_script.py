"""A Trainer script of somebody who knows nothing of this package. It takes the flags of
TrainingArguments, and one of its own.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)


@dataclass
class ScriptArguments:
    """`until`: train at most 20 steps a second, and stop when this file is there."""

    until: str = ""


class Until(TrainerCallback):
    def __init__(self, file: str):
        self.file = Path(file)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.file.is_file():
            control.should_training_stop = True
        else:
            time.sleep(0.05)


def main() -> None:
    own, args = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(vocab_size=32, tie_word_embeddings=False, **sizes, **heads)
    ids = torch.randint(32, (65, 8)).tolist()
    trainer = Trainer(
        model=LlamaForCausalLM(config),
        args=args,
        train_dataset=Dataset.from_dict({"input_ids": ids, "labels": ids}),
        callbacks=[Until(own.until)] if own.until else [],
    )
    trainer.train()
    trainer.save_model(args.output_dir + "/final")


if __name__ == "__main__":
    main()
