"""A sum over all machines: by our ring, or by gloo's all-reduce.

    python -m experiments.benchmarks.bare.ring KIND N_NUMBERS RANK N_MACHINES ADDRESS FOLDER

KIND is "ring" or "gloo". Each process sums whenever it is asked to, and answers the seconds.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import distributed

from distbelief.core.memory import keep_memory
from distbelief.protocol.ring import RingMember, RingMembers
from distbelief.protocol.role import (
    ALL_MESSAGES,
    Action,
    Address,
    Event,
    Received,
    Seconds,
    Started,
    TimerFired,
)
from distbelief.worker.ring import TIMER, Ring, RingMessage
from experiments.benchmarks.bare.exchange import STEP, attached, take_step
from experiments.benchmarks.measuring.workers import serve_steps


VALUE: Final = 1.0


def names_of(n_machines: int) -> list[Address]:
    return [Address(f"replica-{rank}") for rank in range(n_machines)]


class Summing:
    """Sums its vector with those of the others at each `STEP`."""

    accepts = ALL_MESSAGES

    def __init__(self, rank: int, n_machines: int, n_numbers: int) -> None:
        self.n_done = 0
        self.values = np.full(n_numbers, VALUE, np.float32)
        self._names = names_of(n_machines)
        self._ring = Ring(self._names[rank])
        self._waits = False

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        ring = self._ring
        actions: Sequence[Action] = []
        match event:
            case Started():
                ring.start(event.incarnation)
                members = tuple(RingMember(name=name, incarnation=1) for name in self._names)
                return ring.join(RingMembers(generation=1, members=members))
            case Received(message=message) if isinstance(message, RingMessage):
                actions = ring.receive(event, message, now)
            case TimerFired(name=name) if name == TIMER:
                actions = ring.woke(now)
            case TimerFired(name=STEP.name):
                self._waits = True
                actions = ring.begin(self.values, now)
            case _:
                pass
        if self._waits and ring.is_complete and ring.is_settled:
            self._waits = False
            self.n_done += 1
        return actions

    def status(self) -> tuple[str, Mapping[str, float]]:
        return "summing", {}


def main(kind: str, n_numbers: int, rank: int, n_machines: int, address: str, folder: str) -> None:
    keep_memory()
    torch.set_num_threads(1)
    if kind == "gloo":
        distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/gloo", rank=rank, world_size=n_machines
        )
        values = torch.full((n_numbers,), VALUE)
        serve_steps(lambda: distributed.all_reduce(values))
        return
    role = Summing(rank, n_machines, n_numbers)
    names = names_of(n_machines)
    with attached(role, rank, names, address=address, folder=Path(folder)) as node:
        serve_steps(lambda: take_step(node, role))


if __name__ == "__main__":
    kind_, n_numbers_, rank_, n_machines_, address_, folder_ = sys.argv[1:]
    main(kind_, int(n_numbers_), int(rank_), int(n_machines_), address_, folder_)
