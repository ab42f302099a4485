"""What a reader of the Trainer example has already: a model, arguments and rows of tokens."""

from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

config = LlamaConfig(
    vocab_size=16,
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=1,
    pad_token_id=0,
    eos_token_id=1,
)
model = LlamaForCausalLM(config)
args = TrainingArguments(
    "out", max_steps=2, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True
)
dataset = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 32
