"""The Chrome trace of a simulated step.

chrome://tracing and ui.perfetto.dev show the trace: a process per machine, with one row each for
computing, sending and receiving.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from distbelief.program.step_cost import StepCost


Track = Literal["compute", "send", "receive"]
TraceEvent = dict[str, str | int | float | dict[str, str | int]]

_TRACKS: tuple[Track, ...] = ("compute", "send", "receive")


class Event(NamedTuple):
    """A task, or a message as seen by one of its ends."""

    machine: int
    track: Track  # row in the trace
    what: str  # phase of a task, kind of a message
    name: str  # of the layer or tensor
    start: float  # seconds from the start of the step
    seconds: float  # of a message, without the latency after it
    peer: int | None = None  # the other end of a message
    n_bytes: int = 0  # of a message


def events(step_cost: StepCost) -> Iterator[Event]:
    """Yield all events of a step; messages twice, at the sender and at the receiver."""
    for index in range(len(step_cost.simulated.starts)):
        event = _event(step_cost, index)
        yield event
        if event.peer is not None:
            yield event._replace(machine=event.peer, peer=event.machine, track="receive")


def chrome_trace(step_cost: StepCost) -> list[TraceEvent]:
    """Return a step in the Trace Event Format, ready for JSON."""
    trace: list[TraceEvent] = []
    # "M" events name processes and threads; "X" events have a start and a duration in us.
    for machine in sorted(step_cost.compiled.order):
        names = [("process_name", 0, f"machine {machine}")]
        names += [("thread_name", row, track) for row, track in enumerate(_TRACKS)]
        trace += [
            {"ph": "M", "pid": machine, "tid": row, "name": name, "args": {"name": text}}
            for name, row, text in names
        ]
    for event in events(step_cost):
        details: dict[str, str | int] = {"kind": event.what}
        if event.peer is not None:
            details |= {"peer": event.peer, "bytes": event.n_bytes}
        trace.append(
            {
                "ph": "X",
                "pid": event.machine,
                "tid": _TRACKS.index(event.track),
                "name": f"{event.name} {event.what}",
                "cat": event.what,
                "ts": event.start * 1e6,
                "dur": event.seconds * 1e6,
                "args": details,
            }
        )
    return trace


def _event(step_cost: StepCost, index: int) -> Event:
    simulated = step_cost.simulated
    start = float(simulated.starts[index])
    seconds = float(simulated.ends[index]) - start
    if index < simulated.n_tasks:
        task = step_cost.tasks[index]
        return Event(task.machine, "compute", task.phase, task.layer, start, seconds)
    message = index - simulated.n_tasks
    flow = step_cost.traffic[int(simulated.flows[message])]
    sender, receiver = int(simulated.senders[message]), int(simulated.receivers[message])
    n_bytes = flow.n_bytes_between(sender, receiver)
    return Event(sender, "send", flow.kind, flow.name, start, seconds, receiver, n_bytes)
