"""A process that computes gradients of portions, and does nothing else, as told.

It keeps its memory as the processes of a job do. Of each portion the gradient is added
to those before it, as a replica does within a set.
"""

import sys

import torch

from distbelief.core.memory import keep_memory
from experiments.benchmarks.measuring import paced
from experiments.benchmarks.measuring.workload import Workload


def main(portion: int, *, small: bool) -> None:
    keep_memory()
    torch.set_num_threads(1)
    load = Workload(net="speech", batch_size=portion, small=small)
    net, (inputs, targets) = load.module(), load.samples()

    def step() -> None:
        (load.mean_loss(net(inputs), targets) * len(inputs)).backward()

    paced.obey(step)


if __name__ == "__main__":
    main(int(sys.argv[1]), small=sys.argv[2] == "small")
