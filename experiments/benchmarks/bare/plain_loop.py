"""A plain training loop in a process of its own: alone, or one rank of torch's DDP.

    python -m experiments.benchmarks.bare.plain_loop SETTING RANK

What Downpour is compared with: one thread, forward, backward, and torch's fused Adagrad
in place. `alone` says no word to anybody; `ddp` averages every gradient over gloo.
"""

import sys
from pathlib import Path

import msgspec
import torch
from torch import distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from distbelief.core.memory import keep_memory
from experiments.benchmarks.measuring.track import PacedFrames
from experiments.speech.model import acoustic_net


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    folder: str  # of the track
    contestant: int  # whose turns these are
    n_ranks: int  # processes that train together by DDP; 1: each alone
    hidden: list[int]  # units of each hidden layer of the net
    n_inputs: int  # numbers of a sample
    n_classes: int  # scores that come out
    batch_size: int  # samples of a step of one process
    learning_rate: float  # of Adagrad
    keeps_memory: bool = False  # let the C library keep what is freed, as replicas do


def train(setting: Setting, *, rank: int) -> None:
    if setting.keeps_memory:
        keep_memory()
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    folder = Path(setting.folder)
    net: nn.Module = acoustic_net(setting.hidden, setting.n_classes, inputs=setting.n_inputs)
    if setting.n_ranks > 1:
        distributed.init_process_group(
            "gloo",
            init_method=(folder / f"{setting.contestant}.meeting").as_uri(),
            rank=rank,
            world_size=setting.n_ranks,
        )
        net = DistributedDataParallel(net)
    optimizer = torch.optim.Adagrad(net.parameters(), lr=setting.learning_rate, fused=True)
    frames = PacedFrames(
        folder,
        contestant=setting.contestant,
        n_inputs=setting.n_inputs,
        n_classes=setting.n_classes,
    )
    generator = torch.Generator().manual_seed(rank)
    while True:
        chosen = torch.randint(len(frames), (setting.batch_size,), generator=generator)
        try:
            inputs, targets = frames.__getitems__(chosen.tolist())
        except EOFError:
            return
        optimizer.zero_grad()
        functional.cross_entropy(net(inputs), targets).backward()
        optimizer.step()


if __name__ == "__main__":
    train(msgspec.json.decode(sys.argv[1], type=Setting), rank=int(sys.argv[2]))
