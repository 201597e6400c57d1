"""A Lightning module whose optimizer is a worker of a parameter server.

Start it with the address that it prints, in another terminal, for one more worker.
"""

import sys

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distbelief


class Planes(lightning.LightningModule):  # type: ignore[misc]  # untyped
    def __init__(self, server: str) -> None:
        super().__init__()
        self.server = server
        self.net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 3))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return distbelief.DownpourSGD(self.net.named_parameters(), server=self.server)

    def on_train_end(self) -> None:
        self.optimizers().finish()  # push what is left, and fetch once more


x = torch.randn(4096, 20, generator=torch.Generator().manual_seed(0))
y = x[:, :3].argmax(1)
trainer = lightning.Trainer(max_epochs=3, accelerator="cpu", logger=False)
rule = distbelief.Adam(learning_rate=0.003)
with distbelief.ParameterServer(Planes("").net, rule=rule) as started:
    module = Planes(sys.argv[1] if len(sys.argv) > 1 else started.address)
    print(module.server)
    trainer.fit(module, DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True))
    print(f"accuracy {(module.net(x).argmax(1) == y).float().mean():.1%}")
