"""Trains with Ray Train, which starts the ranks itself; GRADSYNC_SOCKET is a daemon's socket.

python train_with_ray.py gradsync FILE
"""

import sys

import ray
import torch
from ray.train import ScalingConfig, get_context, report
from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train_model(config):
    torch.manual_seed(1)
    points = torch.randn(256, 8)
    data = TensorDataset(points, (points.square().sum(1) > 8).long())
    loader = prepare_data_loader(DataLoader(data, batch_size=16, shuffle=True))
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
    model = prepare_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        for batch, target in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch), target)
            loss.backward()
            optimizer.step()
        report({"loss": loss.item()})
    if get_context().get_world_rank() == 0:
        torch.save(model.module.state_dict(), config["file"])


backend, file = sys.argv[1:]  # "gradsync" or "gloo"; the parameters are saved in the file
ray.init(num_cpus=2, include_dashboard=False)
ranks = {"scaling_config": ScalingConfig(num_workers=2), "torch_config": TorchConfig(backend)}
TorchTrainer(train_model, train_loop_config={"file": file}, **ranks).fit()
