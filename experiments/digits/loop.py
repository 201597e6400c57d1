"""An ordinary training loop as a Downpour worker; start it as often as you like.

python loop.py              # starts a parameter server, and trains
python loop.py ADDRESS      # helps the one that printed this address
"""

import sys
from contextlib import nullcontext

import torch
from digits import images, net
from torch.utils.data import DataLoader

import distbelief


def train(model: torch.nn.Module, address: str, *, epochs: int = 12) -> None:
    optimizer = distbelief.DownpourSGD(model.parameters(), server=address)
    loader = DataLoader(images("train"), batch_size=32, shuffle=True)
    for _ in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step(samples=len(targets))
    optimizer.finish()


def main() -> None:
    torch.set_num_threads(1)
    model = net()
    rule = distbelief.Adagrad(learning_rate=0.03)
    parameters = list(model.parameters())
    with (
        nullcontext(None)
        if sys.argv[1:]
        else distbelief.ParameterServer(parameters, rule=rule, shards=2)
    ) as server:
        address = sys.argv[1] if server is None else server.address
        print(f"python loop.py '{address}'", flush=True)
        try:
            train(model, address)
        except distbelief.PeerLostError as error:  # whoever started the server is done
            print(error)
    inputs, targets = images("test").tensors
    accuracy = (model(inputs).argmax(1) == targets).float().mean().item()
    print(f"held-out accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
