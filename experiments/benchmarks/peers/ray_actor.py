"""A parameter server as a Ray actor, as in Ray's guide.

Workers are actors too. A worker's gradients go as NumPy arrays through Ray's object
store, which both sides map, and the call's result is the parameters they led to. An
actor does one call at a time, so an update is whole.
"""

import warnings
from pathlib import Path

import numpy as np
import ray
import torch
from numpy.typing import NDArray

from experiments.benchmarks.peers.course import Course, Entrant


Arrays = list[NDArray[np.float32]]


class Server:
    """The parameters, and plain SGD."""

    def __init__(self, path: str) -> None:
        torch.set_num_threads(1)
        course = Course.read(path)
        self._parameters = [p.detach() for p in course.net().parameters()]
        self._learning_rate = course.learning_rate

    def update(self, gradients: Arrays) -> Arrays:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.add_(torch.from_numpy(gradient), alpha=-self._learning_rate)
        return [parameter.numpy() for parameter in self._parameters]


class Worker:
    """One training loop."""

    def train(self, path: str, worker: int, server: ray.actor.ActorHandle) -> None:
        # Arrays in the object store are read-only, and are only read.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writ")
        entrant = Entrant(Course.read(path), worker)
        parameters = list(entrant.net.parameters())
        for inputs, targets in entrant.batches():
            entrant.gradient(inputs, targets)
            gradients = [p.grad.numpy() for p in parameters if p.grad is not None]
            fresh = ray.get(server.update.remote(gradients))
            with torch.no_grad():
                for parameter, values in zip(parameters, fresh, strict=True):
                    parameter.copy_(torch.from_numpy(values))
        entrant.leave()


def main(path: str) -> None:
    n_workers = Course.read(path).n_workers
    ray.init(
        num_cpus=n_workers + 1,
        include_dashboard=False,
        object_store_memory=256 << 20,
        log_to_driver=False,
        _temp_dir=str(Path(Course.read(path).run_folder, "ray").absolute()),
    )
    try:
        server = ray.remote(Server).remote(path)
        workers = [ray.remote(Worker).remote() for _ in range(n_workers)]
        ray.get([w.train.remote(path, k, server) for k, w in enumerate(workers)])
    finally:
        ray.shutdown()
