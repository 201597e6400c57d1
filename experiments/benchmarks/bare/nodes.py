"""Roles of a benchmark over the real network, without a supervisor.

Each writes its address into a file of its own and waits for the others'. Then it takes a step
whenever its process is asked to.
"""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol

from distbelief.roles.role import Action, Address, Event, Seconds, TimerFired
from distbelief.transport.address import Endpoint
from distbelief.transport.authenticator import Socket, Verdict
from distbelief.transport.node import RoleRunner
from distbelief.transport.zmq_transport import ZmqTransport


STEP: Final = TimerFired(name="step")  # begins one
STEP_SECONDS_MAX: Final = 120.0


class Stepper(Protocol):
    """A role that counts its steps."""

    @property
    def accepts(self) -> frozenset[type]: ...

    @property
    def n_done(self) -> int: ...

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]: ...

    def status(self) -> tuple[str, Mapping[str, float]]: ...


class OpenGuard:
    """Lets in everybody, in the clear: on a network where nobody else is."""

    encrypts: Final = False

    def listen(self, inbox: Socket, endpoint: str) -> str:
        del inbox, endpoint
        return ""

    def address(self, endpoint: str) -> str:
        return endpoint

    def dial(self, outgoing: Socket, peer: str, endpoint: Endpoint) -> None: ...

    def judge(self, request: Sequence[bytes]) -> Verdict:
        del request
        return Verdict()

    def close(self) -> None: ...


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
        guard=OpenGuard(),
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
