"""What each layer of a net takes just now: measured once for every line that is read.

    python -m experiments.benchmarks.plans.layers_now WORKLOAD.json

As `paced`, but of a line's answer each figure is that of a layer: seconds of the
forward and of the backward pass, by its key in a profile.
"""

import json
import sys
from pathlib import Path

import msgspec
import torch

from distbelief.allocator import keep_memory
from distbelief.partition.profiling.measuring import present
from experiments.benchmarks.measuring import paced
from experiments.benchmarks.measuring.workload import Workload


def main(path: str) -> None:
    keep_memory()
    torch.set_num_threads(1)
    workload = msgspec.json.decode(Path(path).read_bytes(), type=Workload)
    graph, batch = workload.graph(), workload.batch_size
    present(graph, batch=batch)  # warms up
    print(paced.READY, flush=True)
    for _ in sys.stdin:
        print(json.dumps(present(graph, batch=batch)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
