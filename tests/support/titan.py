"""torchtitan's Trainer on a machine without a GPU, with a small model: what `--module
tests.support.titan --config small` names on its command line.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from datasets import Dataset
from torch.distributed.fsdp import fully_shard
from torchtitan.tools import utils


class Cpu:
    """What torchtitan asks of `torch.cuda`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name, lambda *_: None)

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def get_device_name(self, *_: Any) -> str:
        return "cpu"

    def get_device_properties(self, *_: Any) -> Any:
        return SimpleNamespace(total_memory=1)

    def memory_stats(self, *_: Any) -> dict[str, int]:
        return {}


# before other modules import them; triton comes with torch for GPUs alone
utils.device_type, utils.device_module = "cpu", Cpu()
if importlib.util.find_spec("triton") is None:
    sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = MagicMock()

from torchtitan.components.checkpointer import CheckpointManager  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import ConfigManager, TrainingConfig  # noqa: E402
from torchtitan.distributed import utils as dist_utils  # noqa: E402
from torchtitan.hf_datasets import DatasetConfig, text_datasets  # noqa: E402
from torchtitan.models.common import Embedding, Linear  # noqa: E402
from torchtitan.protocols.model import BaseModel  # noqa: E402
from torchtitan.protocols.model_spec import ModelSpec  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

dist_utils.set_pg_timeouts = lambda **_: None  # torch 2.13 has no torch.distributed.set_timeout


class Letters(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any):
        super().__init__()

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(letter) % 32 for letter in text]

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(chr(96 + i) for i in ids)

    def get_vocab_size(self) -> int:
        return 32


class Small(BaseModel):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        embed: Embedding.Config
        head: Linear.Config

        def update_from_config(self, **_: Any) -> None:
            pass

        def get_nparams_and_flops(self, model: Any, seq_len: int) -> tuple[int, int]:
            return sum(p.numel() for p in model.parameters()), 1

    def __init__(self, config: Config):
        super().__init__()
        self.embed, self.head = config.embed.build(), config.head.build()

    def forward(self, tokens: torch.Tensor, **_: Any) -> torch.Tensor:
        return self.head(self.embed(tokens))


def parallelize(model: Any, *, parallel_dims: Any, **_: Any) -> Any:
    return fully_shard(model, mesh=parallel_dims.get_mesh("dp_shard"))


def rows(path: str) -> Dataset:
    draw = torch.Generator().manual_seed(0)
    letters = torch.randint(97, 123, (64, 24), generator=draw).tolist()
    return Dataset.from_dict({"text": ["".join(map(chr, row)) for row in letters]})


text_datasets.DATASETS["letters"] = DatasetConfig("letters", rows, lambda row: row["text"])


def small() -> Trainer.Config:
    """What a module of torchtitan has in its `config_registry`."""
    normal = {"weight": torch.nn.init.normal_}
    model = Small.Config(
        embed=Embedding.Config(num_embeddings=32, embedding_dim=8, param_init=normal),
        head=Linear.Config(in_features=8, out_features=32, param_init=normal),
    )
    return Trainer.Config(
        model_spec=ModelSpec("small", "small", model, parallelize, None, None, None),
        tokenizer=Letters.Config(),
        dataloader=text_datasets.HuggingFaceTextDataLoader.Config(dataset="letters"),
        optimizer=default_adamw(lr=1e-2, fused=False),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(local_batch_size=2, seq_len=8, steps=8, disable_cuda_graphs=True),
        loss=CrossEntropyLoss.Config(),
        checkpoint=CheckpointManager.Config(enable=True, interval=4),
    )


def trainer(folder: Any, *words: str) -> Any:
    """torchtitan's Trainer, by its command line."""
    line = ["--module", __name__, "--config", "small", "--debug.seed", "1"]
    return ConfigManager().parse_args([*line, "--dump_folder", str(folder), *words]).build()


def trained(folder: Any, *words: str, stop: int = 0) -> Any:
    """One that has trained, or was cut off behind step `stop`."""
    made = trainer(folder, *words)
    if stop:
        made.should_continue_training = lambda: made.step < stop
    made.train()
    made.close()
    return made


def parameters(made: Any) -> torch.Tensor:
    """The whole model as one vector, on every rank."""
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in parts(made)]
    return torch.cat([p.detach().flatten() for p in whole])


def parts(made: Any) -> list[Any]:
    """What this rank holds of it."""
    return [*made.model_parts[0].parameters()]
