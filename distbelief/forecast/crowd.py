"""How long processes and their lanes wait for each other while cores are taken.

    process 0 --> process 1 --> ... --> process 0      transfers, one for each process

What comes in is work for the lane of a process; when that is done, it goes on to the
next process. There are as many processes as cores, so nearly all cores compute, as in a
job; `exchange` measures the same while they idle.

    begins      from where work is handed to a lane that sleeps to where it begins
    answers     from where that is done to where its process handles the answer
    latency     from where a transfer is sent to where it is handled

By the clock: a thread that wakes waits for a core, and for the interpreter, which the
others of its process have. Sizes are those of a small job: no job is measured.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Final, final

import msgspec
import numpy as np
import torch

from distbelief.messages import Transfer
from distbelief.node import Node
from distbelief.roles import (
    Action,
    Address,
    Compute,
    Computed,
    Event,
    Received,
    Seconds,
    Send,
)
from distbelief.transport.zmq_transport import ZmqTransport


SECONDS: Final = 1.5
WARM_SHARE: Final = 0.25
"""Of what is measured, that is not counted."""

READY_SECONDS_MAX: Final = 60.0
POLL_SECONDS: Final = 0.01
_N_VALUES: Final = 1 << 14
"""Of a transfer: 64 activations of 256 samples, 128 KiB."""

_MATRIX: Final = 256
_N_PRODUCTS: Final = 4
"""Some 1.5 ms in all, as a layer takes: between them the lane needs the interpreter."""


@final
class Crowd(msgspec.Struct, frozen=True, kw_only=True):
    """See above."""

    begins: Seconds
    answers: Seconds
    latency: Seconds

    def less(self, *, work: Seconds, message: Seconds) -> "Crowd":
        """Return what is left beside what hand-overs and messages take of a core."""
        return Crowd(
            begins=max(0.0, self.begins - work),
            answers=max(0.0, self.answers - work),
            latency=max(0.0, self.latency - message),
        )


@final
class Passing:
    """A role that works on what comes, and passes it on.

    Args:
        to: Whom.
    """

    def __init__(self, to: Address) -> None:
        self.begins: list[Seconds] = []
        self.answers: list[Seconds] = []
        self.latencies: list[Seconds] = []
        self._to = to
        self._matrix = torch.zeros(_MATRIX, _MATRIX)
        self._n_asked = 0
        self._asked_at: Seconds | None = None  # None: the lane did not sleep then

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        """Have work done for each transfer, and send another when it is."""
        del now
        clock = time.perf_counter()
        if isinstance(event, Received) and isinstance(event.message, Transfer):
            self.latencies.append(clock - float(event.message.values[0]))
            self._asked_at = None if self._n_asked else time.perf_counter()
            self._n_asked += 1
            return [Compute(name="work", work=self._work)]
        if isinstance(event, Computed):
            if isinstance(event.result, tuple):
                begun, done = event.result
                self.answers.append(clock - done)
                if self._asked_at is not None:
                    self.begins.append(begun - self._asked_at)
                self._n_asked -= 1
                self._asked_at = None
            return [Send(receiver=self._to, message=_transfer())]
        return ()

    def status(self) -> tuple[str, Mapping[str, float]]:
        """Return nothing of interest."""
        return "passing", {}

    def _work(self) -> tuple[Seconds, Seconds]:
        begun = time.perf_counter()
        for _ in range(_N_PRODUCTS):
            torch.mm(self._matrix, self._matrix)
        return begun, time.perf_counter()


def crowd(
    folder: Path,
    index: int,
    *,
    n_processes: int,
    token: str,
    seconds: Seconds = SECONDS,
) -> Crowd:
    """Measure, in each of some processes at once.

    Args:
        folder: In which they find each other.
        index: Of this one.
        n_processes: How many there are.
        token: Known to all of them.
        seconds: For so long.
    """
    name, to = _name(index), _name((index + 1) % n_processes)
    role = Passing(to)
    with ZmqTransport(name=name, incarnation=1, token=token, log=_silent) as transport:
        endpoints = _meet(folder, index, transport.endpoint, n_processes=n_processes)
        if to not in endpoints:
            return Crowd(begins=0.0, answers=0.0, latency=0.0)
        transport.connect(to, 1, endpoints[to])
        with Node(role, transport=transport, log=_silent) as node:
            node.tell(Computed(name="begin"))
            node.pump(lambda: False, timeout_seconds=seconds)
    return Crowd(
        begins=_usual(role.begins),
        answers=_usual(role.answers),
        latency=_usual(role.latencies),
    )


def _usual(seconds: Sequence[Seconds]) -> Seconds:
    warm = seconds[round(WARM_SHARE * len(seconds)) :]
    return fmean(warm) if warm else 0.0


def _transfer() -> Transfer:
    return Transfer(
        life=1,
        sequence=0,
        taken=0,
        step=0,
        micro_batch=0,
        way=0,
        block_index=0,
        values=np.full(_N_VALUES, time.perf_counter()),
    )


def _name(index: int) -> Address:
    return Address(f"crowd-{index}")


def _meet(
    folder: Path, index: int, endpoint: str, *, n_processes: int
) -> dict[Address, str]:
    """Return where all are, once they are there; or who is, after a while."""
    unfinished = folder / f"{index}.endpoint.part"
    unfinished.write_text(endpoint)
    unfinished.rename(folder / f"{index}.endpoint")
    found: dict[Address, str] = {}
    deadline = time.perf_counter() + READY_SECONDS_MAX
    while len(found) < n_processes and time.perf_counter() < deadline:
        time.sleep(POLL_SECONDS)
        found = {
            _name(int(path.stem)): path.read_text()
            for path in folder.glob("*.endpoint")
        }
    return found


def _silent(level: str, text: str) -> None:
    del level, text
