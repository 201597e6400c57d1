"""Synchronous training by DistributedDataParallel over gloo: the control.

DDP averages gradients, a parameter server applies each. So its learning rate is that of
the others times the number of workers (Goyal et al. 2017, the linear scaling rule):
each sample then moves the parameters as far as with the others.
"""

from pathlib import Path

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from experiments.benchmarks.peers.course import Course, Entrant, run_together


def work(path: str, rank: int) -> None:
    course = Course.read(path)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{Path(course.run_folder, 'rendezvous').absolute()}",
        rank=rank,
        world_size=course.n_workers,
    )
    entrant = Entrant(course, rank, in_step=True)
    net = DistributedDataParallel(entrant.net)
    rate = course.learning_rate * course.n_workers
    optimizer = torch.optim.SGD(entrant.net.parameters(), lr=rate)
    entrant.train(optimizer.step, net)
    distributed.destroy_process_group()


def main(path: str) -> None:
    n_workers = Course.read(path).n_workers
    run_together(work, [(path, rank) for rank in range(n_workers)])
