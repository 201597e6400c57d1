"""Images in a loop of one's own: augmentation, BatchNorm, a progress bar with counters.

Start it with the address that it prints, in another terminal, for one more worker.
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import distbelief


def shifted(pixels: torch.Tensor) -> torch.Tensor:
    down, right = torch.randint(-1, 2, (2,)).tolist()
    return pixels.roll((down, right), (2, 3))


digits = load_digits()
pixels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
images = TensorDataset(pixels, torch.tensor(digits.target))
train, test = random_split(images, [0.8, 0.2], generator=torch.Generator().manual_seed(0))
features = nn.Sequential(nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten())
net = nn.Sequential(features, nn.Linear(16 * 36, 10))
with distbelief.ParameterServer(net, rule=distbelief.Adam(learning_rate=0.003)) as started:
    server = sys.argv[1] if len(sys.argv) > 1 else started.address
    print(server)
    with distbelief.DownpourSGD(net.named_parameters(), server=server, buffers=net) as optimizer:
        for epoch in range(6):
            for inputs, targets in DataLoader(train, batch_size=32, shuffle=True):
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(shifted(inputs)), targets).backward()
                optimizer.step(samples=len(targets))
            print(epoch, optimizer.counters("steps", "pushes_acknowledged", "staleness_mean"))
net.eval()
inputs, targets = next(iter(DataLoader(test, batch_size=len(test))))
print(f"held out {(net(inputs).argmax(1) == targets).float().mean():.1%}")
