"""What a reader of the Lightning example has already: a module, rows, settings of the Trainer."""

import torch
from lightning.pytorch import LightningModule


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def training_step(self, batch, number):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


module, loader = Module(), torch.utils.data.DataLoader(torch.randn(40, 4), 4, shuffle=True)
settings = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
settings |= {"enable_progress_bar": False, "enable_model_summary": False}
