"""Trains with PyTorch's wrapper and DistributedSampler, and measures with torchmetrics.

python -m gradsync.run --nproc-per-node 2 train_with_torchmetrics.py gradsync FILE
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics import MeanMetric
from torchmetrics.classification import BinaryAUROC

backend, file = sys.argv[1:]  # "gradsync" or "gloo"; the parameters are saved in the file
torch.distributed.init_process_group(backend)
torch.manual_seed(1)
points = torch.randn(256, 8)
data = TensorDataset(points, (points.square().sum(1) > 8).long())
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=16, sampler=sampler)
model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
mean_loss, area = MeanMetric(), BinaryAUROC()

for epoch in range(4):
    sampler.set_epoch(epoch)
    for batch, target in loader:
        output = model(batch)
        loss = nn.functional.cross_entropy(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean_loss.update(loss.detach())
        area.update(output.softmax(1)[:, 1].detach(), target)
    metrics = {"loss": mean_loss.compute(), "area": area.compute()}  # over all ranks
    print(f"epoch {epoch}: {metrics}")
if torch.distributed.get_rank() == 0:
    torch.save([model.module.state_dict(), metrics], file)
torch.distributed.destroy_process_group()
