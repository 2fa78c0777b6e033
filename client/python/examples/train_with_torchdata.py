"""Trains with torchdata's stateful loader. Started again, it goes on where it has stopped.

python -m gradsync.run --nproc-per-node 2 train_with_torchdata.py gradsync FILE [STOP_AFTER]
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

backend, file = sys.argv[1:3]  # "gradsync" or "gloo"; state is saved in FILE.0, FILE.1
stop_after = int(sys.argv[3]) if len(sys.argv) > 3 else 24
dist.init_process_group(backend)
file += f".{dist.get_rank()}"  # because each rank's loader has a state of its own
torch.manual_seed(1)
points = torch.randn(256, 8)
data = list(zip(points, (points.square().sum(1) > 8).long()))
sampler = StatefulDistributedSampler(data)
loader = StatefulDataLoader(data, batch_size=16, sampler=sampler, num_workers=1)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 2)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
parts, step = (model, optimizer, loader), 0
if os.path.exists(file):
    *states, step = torch.load(file)
    for part, state in zip(parts, states):
        part.load_state_dict(state)
while step < stop_after:
    sampler.set_epoch(step // len(loader))
    for batch, target in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch), target).backward()
        optimizer.step()
        if (step := step + 1) == stop_after:
            break
torch.save([*(part.state_dict() for part in parts), step], file)
dist.destroy_process_group()
