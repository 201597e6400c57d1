"""The plain thing: one process computes the whole net, forward and backward.

    python -m experiments.benchmarks.bare.whole_net WORKLOAD N_THREADS [sum]

With `sum` each gradient is added to those before it, as a replica of Sandblaster does.
"""

import sys

import msgspec
import torch

from distbelief.core.memory import keep_memory
from experiments.benchmarks.measuring.workers import serve_steps
from experiments.benchmarks.measuring.workload import Workload


def main(given: str, n_threads: int, *, sums: bool) -> None:
    keep_memory()
    torch.set_num_threads(n_threads)
    workload = msgspec.json.decode(given, type=Workload)
    net = workload.module()
    inputs, labels = workload.samples()

    def step() -> None:
        if not sums:
            net.zero_grad()
        loss = workload.mean_loss(net(inputs), labels)
        (loss * len(inputs) if sums else loss).backward()

    serve_steps(step)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sums=sys.argv[3:] == ["sum"])
