"""Where the seconds of each machine go: computing, sending and receiving, waiting."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from distbelief.program.boxes import IntArray
from distbelief.program.queues import FloatArray, Played
from distbelief.program.tasks import Task
from distbelief.program.traffic import Traffic


class Seconds(NamedTuple):
    """Of one machine; they sum to the step.

    Attributes:
        compute: Of tasks, and of messages meanwhile that keep the processor busy too.
        communication: Sends or receives, and computes nothing.
        sync: Likewise, but only parameters that several use, or gradients of those.
        wait: Does nothing.
    """

    compute: float
    communication: float
    sync: float
    wait: float


def shares(
    played: Played,
    tasks: Sequence[Task],
    traffic: Sequence[Traffic],
    *,
    n_machines: int,
    step_seconds: float,
) -> list[Seconds]:
    """Return the seconds of every machine.

    Args:
        played: A step.
        tasks: Of the plan.
        traffic: All messages.
        n_machines: How many machines to report on.
        step_seconds: Until the last is done.
    """
    n_tasks, n_messages = played.n_tasks, len(played.ways)
    messages = np.arange(n_tasks, n_tasks + n_messages)
    is_sync = np.zeros(n_tasks + n_messages, dtype=np.bool_)
    kinds = [way.kind in {"parameter", "parameter_gradient"} for way in traffic]
    is_sync[n_tasks:] = np.array(kinds, dtype=np.bool_)[played.ways]
    events = np.concatenate([np.arange(n_tasks), messages, messages])
    machines = np.concatenate(
        [
            np.array([task.machine for task in tasks], dtype=np.int64),
            played.senders,
            played.receivers,
        ]
    )
    found = []
    for own in _by_machine(events, machines, n_machines=n_machines):
        compute = _covered(played, own[own < n_tasks])
        busy = _covered(played, own[~is_sync[own]])
        connected = _covered(played, own)
        found.append(
            Seconds(
                compute=compute,
                communication=busy - compute,
                sync=connected - busy,
                wait=step_seconds - connected,
            )
        )
    return found


def _by_machine(events: IntArray, machines: IntArray, *, n_machines: int) -> list[IntArray]:
    order = np.argsort(machines, kind="stable")
    bounds = np.searchsorted(machines[order], np.arange(1, n_machines))
    return np.split(events[order], bounds)


def _covered(played: Played, events: npt.NDArray[np.int64]) -> float:
    """Return the seconds in which at least one of these goes on."""
    starts: FloatArray = played.starts[events]
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], played.ends[events][order]
    so_far = np.maximum.accumulate(np.append(0.0, ends))
    return float(np.maximum(ends - np.maximum(starts, so_far[:-1]), 0.0).sum())
