"""A parameter server on torch.distributed.rpc: what ours is compared with.

    python -m experiments.benchmarks.bare.rpc_server MEETING_FILE RANK N_SERVERS N_ELEMENTS

Each server holds a slice of one flat vector, applies what is pushed to it by torch's
fused Adagrad on one thread, and returns its values. Rank 0 is the client: asked for n, it
pushes and fetches n times, and answers the seconds of each push and of each fetch.

tensorpipe may use what it would use between hosts, libuv's sockets, several at once for what is
large; not process_vm_readv, by which the kernel copies between processes of one host only. It polls
without a pause: a benchmark that measures something else stops these processes (SIGSTOP).
"""

import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from torch.distributed import rpc

from experiments.benchmarks.measuring.workers import serve, timed_pairs


CLIENT: Final = "client"
LEARNING_RATE: Final = 1e-3
EPSILON: Final = 1e-10


class Slice:
    def __init__(self, n_elements: int) -> None:
        self.values = torch.zeros(n_elements)
        self._sum_of_squares = torch.zeros(n_elements)
        self._clock = torch.zeros(())

    def update(self, gradient: Tensor) -> None:
        self._clock += 1
        torch._fused_adagrad_(
            [self.values],
            [gradient],
            [self._sum_of_squares],
            [self._clock],
            lr=LEARNING_RATE,
            lr_decay=0.0,
            weight_decay=0.0,
            eps=EPSILON,
            maximize=False,
        )


_slices: list[Slice] = []  # of this process: what a remote call can reach


def apply(gradient: Tensor) -> None:
    _slices[0].update(gradient)


def values() -> Tensor:
    return _slices[0].values


def join(name: str, meeting: Path, *, rank: int, n_servers: int) -> None:
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=meeting.as_uri(), _transports=["uv"], _channels=["mpt_uv", "basic"]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of its own use of its own
        rpc.init_rpc(name, rank=rank, world_size=n_servers + 1, rpc_backend_options=options)


def push(gradients: list[Tensor]) -> None:
    """Push one slice to each server; return when all have applied theirs."""
    calls = [rpc.rpc_async(f"server-{k}", apply, args=(each,)) for k, each in enumerate(gradients)]
    for call in calls:
        call.wait()


def fetch(n_servers: int) -> list[Tensor]:
    calls = [rpc.rpc_async(f"server-{k}", values) for k in range(n_servers)]
    return [call.wait() for call in calls]


def main(meeting: str, rank: int, n_servers: int, n_elements: int) -> None:
    torch.set_num_threads(1)
    name = f"server-{rank - 1}" if rank else CLIENT
    if rank:
        _slices.append(Slice(n_elements))
    join(name, Path(meeting), rank=rank, n_servers=n_servers)
    gradients = [torch.randn(n_elements) for _ in range(0 if rank else n_servers)]
    serve(lambda n: timed_pairs(lambda: push(gradients), lambda: fetch(n_servers), n))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rpc.shutdown()


if __name__ == "__main__":
    # Remote calls name this module, which is another one than `__main__`.
    import_module("experiments.benchmarks.bare.rpc_server").main(
        sys.argv[1], *map(int, sys.argv[2:5])
    )
