"""A Trainer script as users write them; `extra` is the one line under test. Run in a rank's process
by tests of the Trainer.
"""

from __future__ import annotations

import functools
import os
import signal
from pathlib import Path

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from datasets import Dataset
from packaging.version import Version
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DataCollatorForLanguageModeling,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from fsdp_demo import PeerLost
from fsdp_demo.checkpoint.folders import found, misfits
from fsdp_demo.integrations.accelerate import allow_fsdp_on_cpu
from fsdp_demo.integrations.data import split_dataset_by_island
from fsdp_demo.integrations.trainer import ExchangeCallback, exchange_optimizer
from fsdp_demo.integrations.trainer.setup import has_own_optimizer
from fsdp_demo.status import status_of

WORDS = (
    "the of and to in a is that for it with as was on be by this are from at or an have not".split()
)

ROWS = 64  # to train on

ACCELERATE = Version(accelerate.__version__)
MESH = pytest.mark.skipif(
    ACCELERATE < Version("1.12"), reason="transformers takes a mesh from Accelerate 1.12 on"
)


def need_moments(fsdp: bool) -> None:
    """Skip a test that resumes moments under FSDP2 where Accelerate does not load them."""
    if fsdp and ACCELERATE < Version("1.13"):
        pytest.skip("Accelerate before 1.13 loads no moments under FSDP2")


def tokenizer():
    vocabulary = {word: i for i, word in enumerate(["<eos>", "<unk>", *WORDS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<eos>", unk_token="<unk>", pad_token="<eos>"
    )


def texts(rows, seed):
    """Sentences in which each word follows from the one before, most of the time: something to
    learn.
    """
    draw = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(rows):
        at, words = int(torch.randint(len(WORDS), (1,), generator=draw)), []
        for _ in range(12):
            words.append(WORDS[at])
            jump = int(torch.randint(10, (1,), generator=draw))
            at = (at * 3 + 1 + (jump if jump > 7 else 0)) % len(WORDS)
        out.append(" ".join(words))
    return out


@functools.cache
def data(rows):
    """What `trainer` trains on, so many rows, and evaluates on, by name. Made without the threads
    of the tokenizer, so that the rank server may do it.
    """
    words = tokenizer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        made = {"train": words(texts(rows, 1)), "eval": words(texts(16, 2))}
    return {name: Dataset.from_dict(dict(columns)) for name, columns in made.items()}


def before_ranks():
    """The usual rows are made once for all ranks."""
    data(ROWS)


def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=len(WORDS) + 2, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=False,
    ))  # fmt: skip


def fresh_state():
    """Accelerate keeps its state in the process; a forked rank would inherit the parent's. A rank
    alone has no launcher.
    """
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    if os.environ.get("WORLD_SIZE") == "1":
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)


def one_line(preset, *, lr=5e-3, **changes):
    """The keywords that an exchange adds to a Trainer: its callback, and the optimizer of a preset
    that brings one.
    """
    callback = ExchangeCallback(preset, **changes)
    line = {"callbacks": [callback]}
    if has_own_optimizer(callback.config):
        line["optimizer_cls_and_kwargs"] = exchange_optimizer(callback.config, lr=lr)
    return line


def trainer(
    folder, extra, *, fsdp=False, split=True, rows=ROWS, callbacks=(), axes=None, **changes
):
    """What stands above `trainer.train()` in a script. `extra`: keywords that the exchange adds."""
    fresh_state()
    set_seed(1)
    words, made = tokenizer(), data(rows)
    settings = {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 8,
        "learning_rate": 5e-3,
        "max_steps": 8,
        "logging_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_steps": 4,
        "report_to": [],
        "disable_tqdm": True,
    }
    if fsdp:
        settings |= {
            "fsdp": True,
            "fsdp_config": dict(
                version=2, reshard_after_forward=True, state_dict_type="SHARDED_STATE_DICT"
            ),
        }
    if axes:
        settings["parallelism_config"] = axes
    args = TrainingArguments(**{**settings, **changes})
    if fsdp:
        allow_fsdp_on_cpu()
    keywords = dict(extra)
    added = [*callbacks, *keywords.pop("callbacks", [])]
    return Trainer(
        model=model(),
        args=args,
        train_dataset=split_dataset_by_island(made["train"]) if split else made["train"],
        eval_dataset=made["eval"],
        processing_class=words,
        data_collator=DataCollatorForLanguageModeling(words, mlm=False),
        callbacks=added,
        **keywords,
    )


def alone(me, callbacks=(), **changes):
    """A `trainer` of one island, whose preset has an optimizer of its own."""
    changes = {"max_steps": 6, "eval_strategy": "no", "save_steps": 2, **changes}
    return trainer(me.folder / "out", one_line("demo"), callbacks=callbacks, **changes)


def trained(folder, extra, *, resume=None, **changes):
    """A `trainer` that has trained; `resume` is what the script passes on."""
    made = trainer(folder, extra, **changes)
    made.train(resume_from_checkpoint=resume)
    return made


class At(TrainerCallback):
    """A user's callback: at an event of these steps it calls do(args, state, control, **more)."""

    def __init__(self, event, do, *steps):
        def called(args, state, control, **more):
            if state.global_step in steps:
                do(args, state, control, **more)

        setattr(self, event, called)


def sigterm(*_, **__):
    """For `At`: this process is told to end."""
    os.kill(os.getpid(), signal.SIGTERM)


def stop(args, state, control, **_):
    """For `At`: this island asks to stop."""
    control.should_training_stop = True


def ended(made, resume=None):
    """Train; the status with which training ends the process, None where it does not. A rank that
    was told to end ends without an error; its siblings may learn of it as of a lost peer.
    """
    try:
        made.train(resume_from_checkpoint=resume)
    except SystemExit as end:
        return end.code
    except PeerLost as error:
        assert not exchange_of(made).stop_requested
        return status_of(error)
    return None


def history(trained, key):
    """What the Trainer has logged under a key, in order."""
    return [row[key] for row in trained.state.log_history if key in row]


def checkpoints(trained):
    """The names of the checkpoints in the folder that it saves to."""
    return sorted(p.name for p in Path(trained.args.output_dir).glob("checkpoint-*"))


def recipe_resumed(main, rank, preset, *flags):
    """`main` of recipes/pretrain_trainer.py as it is launched: 6 steps, then up to 8 from the
    checkpoint. Returns the folder that this rank's island saved.
    """
    patch = pytest.MonkeyPatch()  # of a rank, which ends with it
    # two launches share a process and its group here
    patch.setattr("accelerate.Accelerator.end_training", lambda self: None)
    text, out = rank.folder / f"text{rank.rank}.txt", rank.folder / "out"
    text.write_text("to be, or not to be, that is the question\n" * 400)
    common = (
        f"--model tiny --sequence_length 32 --exchange {preset} --learning_rate 3e-3 "
        "--eval_rows 8 --eval_steps 4 --save_steps 4 --lr_scheduler_type constant "
        "--disable_tqdm True"
    ).split()
    common += ["--data", str(text), "--output_dir", str(out)]
    common += ["--set", "period=2"] if preset == "diloco" else []
    for more in ("--max_steps 6", "--max_steps 8 --resume_from_checkpoint auto"):
        fresh_state()
        patch.setattr("sys.argv", ["pretrain_trainer.py", *common, *flags, *more.split()])
        main()
    fresh_state()
    return out / f"island{rank.island}"


def parameters(trained):
    """The whole model as one vector, on every rank; under DeepSpeed its fp32 masters."""
    if trained.is_deepspeed_enabled:
        from . import zero

        return torch.cat([p.flatten() for p in zero.whole(trained.deepspeed).values()])
    parts = [
        p.full_tensor() if hasattr(p, "full_tensor") else p for p in trained.model.parameters()
    ]
    return torch.cat([p.detach().flatten() for p in parts])


def shards(trained):
    """What this rank holds, from the optimizer."""
    params = [p for group in trained.optimizer.param_groups for p in group["params"]]
    return torch.cat(
        [(p.to_local() if hasattr(p, "to_local") else p).detach().flatten().clone() for p in params]
    )


def exchange_of(trained):
    """What its `ExchangeCallback` shows."""
    (callback,) = (c for c in trained.callback_handler.callbacks if isinstance(c, ExchangeCallback))
    return callback.exchange


def whole_steps(folder):
    """The steps of the checkpoints that are whole in an island's folder."""
    return [step for step, place in found(folder) if not misfits(place)]
