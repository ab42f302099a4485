"""A script of PyTorch Lightning of somebody who knows nothing of this package. It has flags of its
own; tests import what it is made of. LIGHTNING names the package to take.
"""

from __future__ import annotations

import argparse
import importlib
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

pl: Any = importlib.import_module(os.environ.get("LIGHTNING", "lightning.pytorch"))

ROWS, BATCH = 66, 4


def rows() -> TensorDataset:
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(ROWS, 8, generator=draw)
    return TensorDataset(inputs, inputs.square().mean(1, keepdim=True))


def layers(dropout: float = 0.0) -> torch.nn.Sequential:
    hidden = [torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Dropout(dropout)]
    return torch.nn.Sequential(*hidden, torch.nn.Linear(16, 1))


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=5e-3)


def schedule_of(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.8)


class Net(pl.LightningModule):
    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.layers = layers(dropout)

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("val", torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = optimizer_of(self)
        plan = {"scheduler": schedule_of(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": plan}


class Until(pl.Callback):
    """Train at most 20 steps a second, and stop when this file is there."""

    def __init__(self, file: str):
        self.file = Path(file)

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if self.file.is_file():
            trainer.should_stop = True
        else:
            time.sleep(0.05)


def main() -> None:
    flags = argparse.ArgumentParser()
    flags.add_argument("--out", default=".")
    flags.add_argument("--until", default="")
    flags.add_argument("--devices", type=int, default=1)
    flags.add_argument("--max_steps", type=int, default=8)
    given = flags.parse_args()
    pl.seed_everything(1)
    saver = pl.callbacks.ModelCheckpoint(every_n_train_steps=5)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=given.devices,
        default_root_dir=given.out,
        max_steps=given.max_steps,
        callbacks=[saver, *([Until(given.until)] if given.until else [])],
        log_every_n_steps=2,
        enable_progress_bar=False,
    )
    data = rows()
    trainer.fit(Net(), DataLoader(data, BATCH, shuffle=True), DataLoader(data, 32))
    trainer.save_checkpoint(Path(trainer.default_root_dir) / "final.ckpt")


if __name__ == "__main__":
    main()
