"""The speech net of the paper as a job has it: model, and random frames in memory."""

import torch
from torch import nn

from experiments.benchmarks.measuring.workload import Workload
from sandblaster.problem_files import TensorPairs


def net(*, small: bool = False) -> nn.Module:
    """Return the net."""
    return Workload(net="speech", batch_size=1, small=small).module()


def frames(n: int, *, small: bool = False) -> TensorPairs:
    """Return so many frames."""
    inputs, targets = Workload(net="speech", batch_size=n, small=small).samples()
    return TensorPairs(inputs, targets.to(torch.int64))
