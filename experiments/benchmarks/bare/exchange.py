"""What a message takes: to another machine, through its compute lane, and back.

    python -m experiments.benchmarks.bare.exchange N_NUMBERS MACHINE ADDRESS FOLDER

As in a step: numbers leave when work is done, and work begins when numbers have come.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from distbelief.core.memory import keep_memory
from distbelief.core.vectors import Vector
from distbelief.protocol import TransferBlock
from distbelief.roles.role import (
    ALL_MESSAGES,
    Action,
    Address,
    Compute,
    Computed,
    Event,
    Received,
    Seconds,
    Send,
    TimerFired,
)
from distbelief.worker.transfers import Reassembly, StreamKey, blocks_of
from experiments.benchmarks.bare.nodes import attached, take_step
from experiments.benchmarks.measuring.workers import serve_steps


NAMES: Final = (Address("machine-0"), Address("machine-1"))


class Echo:
    """Machine 0 sends numbers at each `STEP`; machine 1 sends them back."""

    accepts = ALL_MESSAGES

    def __init__(self, machine: int, n_numbers: int) -> None:
        self.n_done = 0  # round trips
        self._machine = machine
        self._values = np.zeros(n_numbers, np.float32)
        self._inbox = Reassembly()

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        del now
        match event:
            case TimerFired() if not self._machine:
                return [self._work()]
            case Received(message=TransferBlock() as block):
                return self._receive(block)
            case Computed(result=np.ndarray() as values):
                return self._send(values)
            case _:
                return []

    def status(self) -> tuple[str, Mapping[str, float]]:
        return "echoing", {}

    def _work(self) -> Compute:
        return Compute(name="work", work=self._values.copy)

    def _receive(self, block: TransferBlock) -> list[Action]:
        label = StreamKey(block.step, 0, 0, 1 - self._machine)
        n_numbers, dtype = len(self._values), self._values.dtype
        if not self._inbox.take(label, block, n_elements=n_numbers, dtype=dtype):
            return []
        for _, values in self._inbox.pop_step(block.step):
            self._values = np.asarray(values)
        if self._machine:
            return [self._work()]
        self.n_done += 1
        return []

    def _send(self, values: Vector) -> list[Action]:
        step = self.n_done
        if self._machine:
            self.n_done += 1  # not before its answer is on its way
        return [
            Send(
                receiver=NAMES[1 - self._machine],
                message=TransferBlock(
                    generation=1,
                    sequence=0,
                    taken=0,
                    step=step,
                    micro_batch=0,
                    way=0,
                    block_index=index,
                    values=block,
                ),
            )
            for index, block in blocks_of(values)
        ]


def main(n_numbers: int, machine: int, address: str, folder: str) -> None:
    keep_memory()
    role = Echo(machine, n_numbers)
    with attached(role, machine, NAMES, address=address, folder=Path(folder)) as node:
        serve_steps(lambda: take_step(node, role))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
