"""Roles over the real network without a supervisor, and what a message between them takes.

    python -m experiments.benchmarks.bare.exchange N_NUMBERS MACHINE ADDRESS FOLDER

Each role writes its address into a file of its own and waits for the others'. Then it takes a step
whenever its process is asked to. Here numbers go to another machine, through its compute lane, and
back. As in a step they leave when work is done, and work begins when they have come.
"""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Final, Protocol, cast

import numpy as np

from distbelief.core.memory import keep_memory
from distbelief.core.vectors import Vector
from distbelief.protocol import TransferBlock
from distbelief.protocol.role import (
    ALL_MESSAGES,
    Action,
    Address,
    Compute,
    Computed,
    Event,
    Received,
    Role,
    Seconds,
    Send,
    TimerFired,
)
from distbelief.transport.authenticator import Authenticator, Verdict
from distbelief.transport.node import RoleRunner
from distbelief.transport.zmq_transport import ZmqTransport
from distbelief.worker.steps import Reassembly, StreamKey, blocks_of
from experiments.benchmarks.measuring.workers import serve_steps


STEP: Final = TimerFired(name="step")  # begins one
STEP_SECONDS_MAX: Final = 120.0


class Stepper(Role, Protocol):
    """A role that counts its steps."""

    @property
    def n_done(self) -> int: ...


# Lets in everybody, in the clear: on a network where nobody else is.
OPEN_GUARD: Final = SimpleNamespace(
    encrypts=False,
    listen=lambda _inbox, _endpoint: "",
    address=lambda endpoint: endpoint,
    dial=lambda _outgoing, _peer, _endpoint: None,
    judge=lambda _request: Verdict(),
    close=lambda: None,
)


@contextmanager
def attached(
    role: Stepper, machine: int, names: Sequence[Address], *, address: str, folder: Path
) -> Iterator[RoleRunner]:
    """Connect a role with the other machines; they find each other in `folder`."""
    transport = ZmqTransport(
        name=names[machine],
        incarnation=1,
        run="benchmark",
        bind=f"tcp://{address}:*",
        guard=cast("Authenticator", OPEN_GUARD),
        log=_log,
    )
    with transport, RoleRunner(role, transport=transport, log=_log) as node:
        _exchange_addresses(transport, machine, folder, names)
        yield node


def take_step(node: RoleRunner, role: Stepper) -> None:
    wanted = role.n_done + 1
    node.tell(STEP)
    node.pump(lambda: role.n_done >= wanted, timeout_seconds=STEP_SECONDS_MAX)
    if role.n_done < wanted:
        raise RuntimeError(f"a step does not end: {node.error}")


def _exchange_addresses(
    transport: ZmqTransport, machine: int, folder: Path, names: Sequence[Address]
) -> None:
    draft = folder / f".{machine}.address"
    draft.write_text(transport.endpoint)
    draft.rename(folder / f"{machine}.address")
    deadline = time.monotonic() + STEP_SECONDS_MAX
    for peer, name in enumerate(names):
        path = folder / f"{peer}.address"
        while not path.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name} does not come")
            time.sleep(0.01)
        if peer != machine:
            transport.connect(name, 1, path.read_text())


def _log(level: str, text: str) -> None:
    print(f"{level}: {text}", file=sys.stderr, flush=True)


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
        assert block.values is not None
        if not self._inbox.take(
            label, block.block_index, block.values, n_elements=n_numbers, dtype=dtype
        ):
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
