"""The plain thing: one process computes the whole net, forward and backward.

python -m experiments.benchmarks.bare.whole_net WORKLOAD.json N_THREADS
"""

import sys
from pathlib import Path

import msgspec
import torch

from distbelief.core.memory import keep_memory
from experiments.benchmarks.measuring import paced
from experiments.benchmarks.measuring.workload import Workload


def main(path: str, n_threads: int) -> None:
    keep_memory()
    torch.set_num_threads(n_threads)
    workload = msgspec.json.decode(Path(path).read_bytes(), type=Workload)
    net = workload.module()
    inputs, labels = workload.samples()

    def step() -> None:
        net.zero_grad()
        workload.mean_loss(net(inputs), labels).backward()

    paced.obey(step)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
