"""A parameter server over torch's RPC (tensorpipe), in its tutorial's form.

A worker sends its gradients and is answered with the parameters they led to: one call
per step. The lock makes an update whole; the copies that are returned keep a parameter
that is being sent from being changed by the other worker's update.
"""

from pathlib import Path
from threading import Lock

import torch
from torch.distributed import rpc

from experiments.benchmarks.peers.course import Course, Entrant, run_together


class Server:
    """The parameters, and plain SGD."""

    def __init__(self, course: Course) -> None:
        self._parameters = list(course.net().parameters())
        self._learning_rate = course.learning_rate
        self._lock = Lock()

    def update(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        with self._lock, torch.no_grad():
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.add_(gradient, alpha=-self._learning_rate)
            return [parameter.detach().clone() for parameter in self._parameters]


def train(course: Course, worker: int, server: "rpc.RRef[Server]") -> None:
    entrant = Entrant(course, worker)
    parameters = list(entrant.net.parameters())
    call = server.rpc_sync()

    def step() -> None:
        fresh = call.update([parameter.grad for parameter in parameters])
        with torch.no_grad():
            for parameter, values in zip(parameters, fresh, strict=True):
                parameter.copy_(values)

    entrant.train(step)


def work(path: str, rank: int) -> None:
    torch.set_num_threads(1)
    course = Course.read(path)
    n_workers = course.n_workers
    name = "server" if rank == n_workers else f"worker-{rank}"
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{Path(course.run_folder, 'rendezvous').absolute()}"
    )
    rpc.init_rpc(name, rank=rank, world_size=n_workers + 1, rpc_backend_options=options)
    if rank == n_workers:
        server = rpc.RRef(Server(course))
        calls = [
            rpc.rpc_async(f"worker-{k}", train, args=(course, k, server), timeout=0)
            for k in range(n_workers)
        ]
        torch.futures.wait_all(calls)
    rpc.shutdown()


def main(path: str) -> None:
    n_workers = Course.read(path).n_workers
    run_together(work, [(path, rank) for rank in range(n_workers + 1)])
