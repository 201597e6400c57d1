"""pytorch-distbelief, as its README and example use it, with its n_push = n_pull = 5.

Its package is called `distbelief` as ours is, so it needs a Python of its own. Its
server never ends by itself. One thing is mended here: it drops the handles of its sends
at once, which today's torch takes for cancelling them, so that nothing ever arrives
(torch 2.13: the server waits in `recv` for ever). We keep the last handles.
"""

import importlib
import logging
import sys
from collections import deque
from pathlib import Path

import torch
from torch import distributed

from experiments.benchmarks.peers.course import Course, Entrant, run_together


N_STEPS = 5  # between pushes, and between pulls
N_SENDS_KEPT = 32


def keep_sends() -> None:
    kept: deque[distributed.Work | None] = deque(maxlen=N_SENDS_KEPT)
    send = distributed.isend

    def isend(tensor: torch.Tensor, dst: int) -> None:
        kept.append(send(tensor, dst))

    setattr(distributed, "isend", isend)  # noqa: B010 -- of another type


def work(path: str, rank: int) -> None:
    logging.disable()
    keep_sends()
    torch.set_num_threads(1)
    course = Course.read(path)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{Path(course.run_folder, 'rendezvous').absolute()}",
        rank=rank,
        world_size=course.n_workers + 1,
    )
    if rank == 0:
        sys.stdout = None  # it prints a line for every message
        peer = importlib.import_module("distbelief.server")
        peer.ParameterServer(model=course.net()).run()
        return
    peer = importlib.import_module("distbelief.optim")
    entrant = Entrant(course, rank - 1)
    net = entrant.net
    optimizer = peer.DownpourSGD(
        net.parameters(), lr=course.learning_rate, n_push=N_STEPS, n_pull=N_STEPS, model=net
    )
    entrant.train(optimizer.step)


def main(path: str) -> None:
    n_processes = Course.read(path).n_workers + 1
    run_together(work, [(path, rank) for rank in range(n_processes)], forever=1)
