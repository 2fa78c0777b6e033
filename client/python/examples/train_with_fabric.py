"""Trains with Lightning Fabric.

python -m gradsync.run --nproc-per-node 2 train_with_fabric.py gradsync FILE
"""

import sys

import lightning
import torch
from lightning.fabric.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

backend, file = sys.argv[1:]  # "gradsync" or "gloo"; the parameters are saved in the file
strategy = DDPStrategy(process_group_backend=backend)
fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=strategy)
fabric.launch()
fabric.seed_everything(1)

points = torch.randn(256, 8)
data = TensorDataset(points, (points.square().sum(1) > 8).long())
loader = fabric.setup_dataloaders(DataLoader(data, batch_size=8, shuffle=True))
model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

for epoch in range(4):
    for number, (batch, target) in enumerate(loader):
        accumulates = number % 2 == 0
        with fabric.no_backward_sync(model, enabled=accumulates):
            loss = nn.functional.cross_entropy(model(batch), target)
            fabric.backward(loss)
        if not accumulates:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    mean = fabric.all_reduce(loss.detach(), reduce_op="mean")
    fabric.print(f"epoch {epoch}: loss {mean:.3f}")
fabric.save(file, model.state_dict())
