"""A loop of Accelerate whose optimizer is a worker of a parameter server.

Start it with the address that it prints, in another terminal, for one more worker.
"""

import sys

import accelerate
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distbelief


def train(net: nn.Module, server: str, data: TensorDataset) -> None:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    ours = distbelief.DownpourSGD(net.named_parameters(), server=server, lr=0.003)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(ours, 192)
    loader = DataLoader(data, batch_size=32, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(net, ours, loader, schedule)
    for _epoch in range(3):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    ours.finish()  # push what is left, and fetch once more


x = torch.randn(4096, 20, generator=torch.Generator().manual_seed(0))
y = x[:, :3].argmax(1)
net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 3))
with distbelief.ParameterServer(net, rule=distbelief.Adam(learning_rate=0.003)) as started:
    print(started.address)
    train(net, sys.argv[1] if len(sys.argv) > 1 else started.address, TensorDataset(x, y))
    print(f"accuracy {(net(x).argmax(1) == y).float().mean():.1%}")
