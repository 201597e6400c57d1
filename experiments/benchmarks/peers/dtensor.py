"""The speech net by torch's own tensor parallelism, over gloo.

    python -m experiments.benchmarks.peers.dtensor WORKLOAD RANK N_RANKS MEETING

As its documentation has it for a stack of Linear layers (Shoeybi et al. 2019,
"Megatron-LM", section 3): cut by outputs, then by inputs, in turn, so that one
all-reduce per pair is all that the forward pass needs, and one all that the backward
pass does; the softmax stays cut by classes (`loss_parallel`). Its processes meet by the
file MEETING and talk over the interface that GLOO_SOCKET_IFNAME names.
"""

import sys
from pathlib import Path

import msgspec
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from distbelief.core.memory import keep_memory
from experiments.benchmarks.measuring.workers import serve_steps
from experiments.benchmarks.measuring.workload import Workload


def main(given: str, rank: int, n_ranks: int, meeting: str) -> None:
    keep_memory()
    torch.set_num_threads(1)
    workload = msgspec.json.decode(given, type=Workload)
    distributed.init_process_group(
        "gloo", init_method=Path(meeting).absolute().as_uri(), rank=rank, world_size=n_ranks
    )
    net = parallel(workload.module(), n_ranks=n_ranks)
    inputs, labels = workload.samples()

    def step() -> None:
        net.zero_grad()
        with loss_parallel():
            workload.mean_loss(net(inputs), labels).backward()

    serve_steps(step)
    distributed.destroy_process_group()


def parallel(net: nn.Module, *, n_ranks: int) -> nn.Module:
    names = [name for name, part in net.named_children() if isinstance(part, nn.Linear)]
    if len(names) % 2 == 0:
        raise ValueError(f"{len(names)} Linear layers: the last must be cut by outputs")
    styles: list[ParallelStyle] = [
        ColwiseParallel() if index % 2 == 0 else RowwiseParallel()
        for index in range(len(names) - 1)
    ]
    styles.append(ColwiseParallel(output_layouts=Shard(-1), use_local_output=False))
    mesh = init_device_mesh("cpu", (n_ranks,))
    return parallelize_module(net, mesh, dict(zip(names, styles, strict=True)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
