"""The warm start that all methods of one seed begin from: plain SGD on one machine.

In Dean et al. 2012 all runs of Figure 4 begin from one, of some ten hours. Kept are its
weights, and how large gradients were while it learnt: Adagrad counts those as seen
(`initial_accumulator`), since the first pushes of 200 replicas, all from one point,
would otherwise all be taken at the full rate, and undo it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from experiments.cache import find_cache
from experiments.figures import task
from experiments.figures.results import fingerprint


STEPS: Final = 5_000
RATE: Final = 0.01
BATCH: Final = 8
SETTINGS: Final = {"steps": STEPS, "rate": RATE, "batch": BATCH}


@dataclass(frozen=True, slots=True)
class WarmStart:
    """What was learnt before the methods part."""

    path: str  # file of its weights
    of: str  # fingerprint of the net, its first weights, the data, steps, rate and seed
    squares: float  # sum of squared gradients over its steps: mean of all parameters


def warm_start(
    seed: int, *, data: task.Held | None = None, folder: Path | None = None
) -> WarmStart:
    """Return the warm start of a seed; it is made unless one of just this is kept."""
    torch.manual_seed(seed)
    net, data = task.net(), task.train() if data is None else data
    initial = torch.nn.utils.parameters_to_vector(net.parameters())
    of = fingerprint(task.identity(), initial.tolist(), data.digest, SETTINGS, {"seed": seed})
    path = find_cache("figures", folder) / f"warm-{of}.safetensors"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        squares = _learn(net, data, seed=seed)
        facts = {"of": of, "squares": repr(squares)}
        save_file(dict(net.state_dict()), path, metadata=facts)
    with safe_open(path, framework="pt") as file:
        facts = file.metadata()
    if facts["of"] != of:
        raise ValueError(f"{path} is of {facts['of']}, not of {of}: remove it")
    return WarmStart(str(path), of, float(facts["squares"]))


def _learn(net: torch.nn.Module, data: task.Held, *, seed: int) -> float:
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
    squares = 0.0
    for step in range(STEPS):
        rows = order[step * BATCH % len(data) :][:BATCH]
        optimizer.zero_grad()
        task.loss(net(data.inputs[rows]), data.targets[rows]).backward()
        for parameter in net.parameters():
            assert parameter.grad is not None
            squares += float(parameter.grad.square().sum())
        optimizer.step()
    return squares / sum(p.numel() for p in net.parameters())
