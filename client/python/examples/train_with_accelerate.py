"""Trains with Hugging Face's Accelerate: accumulated gradients, clipped, and gathered results.

python -m gradsync.run --nproc-per-node 2 train_with_accelerate.py gradsync FILE
"""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

backend, file = sys.argv[1:]  # "gradsync" or "gloo"; the parameters are saved in the file
torch.distributed.init_process_group(backend)  # before Accelerator, which takes a few names only
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
set_seed(1)

points = torch.randn(256, 8)
labels = (points.square().sum(1) > 8).long()
loader = DataLoader(TensorDataset(points, labels), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 20)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

for epoch in range(4):
    right = 0
    for batch, target in loader:
        with accelerator.accumulate(model):
            output = model(batch)
            accelerator.backward(nn.functional.cross_entropy(output, target))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        right += accelerator.gather_for_metrics(output.argmax(1) == target).sum().item()
    accelerator.print(f"epoch {epoch}: {right} of {len(points)} right")
accelerator.save(accelerator.get_state_dict(model), file)
accelerator.end_training()
