"""Trains with Lightning's Trainer.

python -m gradsync.run --nproc-per-node 2 train_with_lightning.py gradsync FILE
"""

import sys

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))

    def training_step(self, batch, _):
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


backend, file = sys.argv[1:]  # "gradsync" or "gloo"; the checkpoint is saved in the file
lightning.seed_everything(1)
points = torch.randn(256, 8)
data = TensorDataset(points, (points.square().sum(1) > 8).long())
model = Classifier()
strategy = DDPStrategy(process_group_backend=backend)
options = dict(max_epochs=3, gradient_clip_val=1.0, logger=False, enable_checkpointing=False)
trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy=strategy, **options)
trainer.fit(model, DataLoader(data, batch_size=16, shuffle=True))
print(trainer.callback_metrics)
trainer.save_checkpoint(file)
