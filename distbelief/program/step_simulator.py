"""A step played through: when each task and each message begins and ends.

Every machine computes one task at a time, the first of the plan's order that can begin;
it sends one message at a time and receives one at a time. A message holds both ends
until it is sent, and is there `latency` later; what is added up, once it is. Messages
take the time of processors too: what a machine computes when one begins, or ends, takes
longer by half of what handling it takes. Who waits has time for it.

Nothing waits on purpose: what can begin does, the most urgent first, then the next
machine. Ties depend on places in the plan, not on machines' numbers.

Sets of machines are bits of an integer: "which receivers that I have something for are
free?" is one `&`, for any number of machines. A fully connected layer on 144 machines
has 20,592 messages, so what is done for each of them is kept short.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

import numpy as np
import numpy.typing as npt

from distbelief.graph.region import IntArray
from distbelief.program.step_graph import Dependencies
from distbelief.program.traffic import Traffic


FloatArray = npt.NDArray[np.float64]

NOTHING: Final = -1

_SUMS: Final = frozenset({"gradient", "parameter_gradient"})
"""Kinds of messages that are added to what their receiver has. Partial outputs are too,
but by a task of their own."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SimulatedStep:
    """When what happened. Events are tasks, then messages in the order of their start.

    Attributes:
        starts: (n_events,) seconds.
        ends: (n_events,) of sending, for messages, which arrive later.
        arrivals: (n_events,) when what came of it can be used.
        causes: (n_events,) the event after which each could begin; -1 for none.
        n_tasks: How many events are tasks.
        ways: (n_messages,) index of the traffic, for messages.
        senders: (n_messages,) machine.
        receivers: (n_messages,) machine.
    """

    starts: FloatArray
    ends: FloatArray
    arrivals: FloatArray
    causes: IntArray
    n_tasks: int
    ways: IntArray
    senders: IntArray
    receivers: IntArray


@final
@dataclass(slots=True)
class _Batch:
    """Messages of one kind and name from one machine that wait for the network."""

    way: int
    receivers: int  # bits
    seconds: dict[int, float]  # by receiver
    sizes: dict[int, int]  # likewise, bytes
    since: float
    cause: int


@final
class StepSimulator:
    """The queues of all machines of a plan, which are numbered from 0 here.

    Args:
        nodes: What waits for what; is used up.
        machines: Of the plan, in its order.
        places: Per task, the index of its machine there.
        seconds: Per task.
        traffic: All messages.
        rates: (n_machines, n_machines) bytes per second, in this order.
        latency: Seconds from the end of sending to arrival.
        overhead: Seconds of each message, beside its bytes.
        handling: Per machine, seconds that a byte keeps its processors.
        each: Per machine, likewise a message, however small.
        adding: Per machine, seconds until a byte is added to a sum.
    """

    def __init__(  # noqa: PLR0913 -- tasks, messages, machines and network
        self,
        nodes: Dependencies,
        *,
        machines: Sequence[int],
        places: Sequence[int],
        seconds: Sequence[float],
        traffic: Sequence[Traffic],
        rates: FloatArray,
        latency: float,
        overhead: float,
        handling: Sequence[float],
        each: Sequence[float],
        adding: Sequence[float],
    ) -> None:
        n = len(machines)
        place = {machine: index for index, machine in enumerate(machines)}
        self._machines = np.array(machines, dtype=np.int64)
        self._place = place
        self._nodes = nodes
        self._places = places
        self._seconds = list(seconds)
        self._traffic = traffic
        self._rates = rates
        self._latency = latency
        self._overhead = overhead
        self._handling = handling
        self._each = each
        self._handles = any(handling) or any(each)
        self._adding = [dict[int, float]() for _ in traffic]
        self._sending = {
            node: (way, place[machine]) for (way, machine), node in nodes.sending.items()
        }
        self._arrival = [dict[int, int]() for _ in traffic]
        self._missing = [[0] * n for _ in traffic]
        for (way, machine), node in nodes.arrival.items():
            self._arrival[way][place[machine]] = node
            received = traffic[way].receiving[machine]
            self._missing[way][place[machine]] = len(received)
            if traffic[way].kind in _SUMS:
                n_bytes = int(traffic[way].n_bytes[received].sum())
                delay = n_bytes * adding[place[machine]]
                self._adding[way][place[machine]] = delay
        self._agenda: list[tuple[float, int]] = []  # time; node, or beyond: message
        # Computing.
        self._ready: list[list[int]] = [[] for _ in range(n)]
        self._last_task = [NOTHING] * n
        self._is_busy = [False] * n
        self._owed = [0.0] * n  # seconds that messages took of what is computed now
        self._woken: set[int] = set()
        n_tasks = nodes.n_tasks
        self._task_starts = [0.0] * n_tasks
        self._causes = [NOTHING] * len(nodes.after)
        self._since = [0.0] * n_tasks
        # The network.
        self._free_senders = self._free_receivers = (1 << n) - 1
        self._touched_senders = self._touched_receivers = 0
        self._batches: list[list[_Batch]] = [[] for _ in range(n)]
        self._incoming = [0] * n  # bits: who has something for this machine
        self._last_sent = [NOTHING] * n
        self._last_received = [NOTHING] * n
        # Messages in the order of their start.
        self._starts: list[float] = []
        self._ends: list[float] = []
        self._arrivals: list[float] = []
        self._sizes: list[int] = []
        self._ways: list[int] = []
        self._senders: list[int] = []
        self._receivers: list[int] = []
        self._message_causes: list[int] = []

    def play(self) -> SimulatedStep:
        """Play the step through."""
        n_nodes = len(self._nodes.after)
        n_tasks = self._nodes.n_tasks
        agenda = self._agenda
        first = [node for node, n in enumerate(self._nodes.n_before) if n == 0]
        for node in first:
            self._happen(node, 0.0, NOTHING)
        self._start_tasks(0.0)
        self._start_messages(0.0)
        while agenda:
            now = agenda[0][0]
            # All that ends now, before anything begins: who is free, is free for all.
            while agenda and agenda[0][0] == now:
                code = heapq.heappop(agenda)[1]
                if code >= n_nodes:
                    self._end_message(code - n_nodes, now)
                elif code < n_tasks:
                    self._end_task(code, now)
                else:
                    self._follow(code, now, self._causes[code])
            self._start_tasks(now)
            self._start_messages(now)
        return self._played()

    def _happen(self, node: int, now: float, cause: int) -> None:
        self._causes[node] = cause
        if node < self._nodes.n_tasks:
            self._since[node] = now
            place = self._places[node]
            heapq.heappush(self._ready[place], node)
            self._woken.add(place)
        elif node in self._sending:
            self._offer(*self._sending[node], now, cause)
        else:
            self._follow(node, now, cause)

    def _follow(self, node: int, now: float, cause: int) -> None:
        n_before = self._nodes.n_before
        for after in self._nodes.after[node]:
            n_before[after] -= 1
            if n_before[after] == 0:
                self._happen(after, now, cause)

    def _start_tasks(self, now: float) -> None:
        for place in sorted(self._woken):
            ready = self._ready[place]
            if ready and not self._is_busy[place]:
                task = heapq.heappop(ready)
                if self._since[task] < now:
                    self._causes[task] = self._last_task[place]
                self._is_busy[place] = True
                self._last_task[place] = task
                self._task_starts[task] = now
                heapq.heappush(self._agenda, (now + self._seconds[task], task))
        self._woken.clear()

    def _end_task(self, task: int, now: float) -> None:
        place = self._places[task]
        owed = self._owed[place]
        if owed:
            self._owed[place] = 0.0
            self._seconds[task] += owed
            heapq.heappush(self._agenda, (now + owed, task))
            return
        self._is_busy[place] = False
        self._woken.add(place)
        self._follow(task, now, task)

    def _offer(self, way: int, sender: int, now: float, cause: int) -> None:
        traffic = self._traffic[way]
        which = traffic.sending[int(self._machines[sender])]
        part = slice(which.start, which.stop)
        receivers = [self._place[q] for q in traffic.receivers[part].tolist()]
        sizes = traffic.n_bytes[part]
        seconds = self._overhead + sizes / self._rates[sender, receivers]
        bits = 0
        for receiver in receivers:
            bits |= 1 << receiver
            self._incoming[receiver] |= 1 << sender
        batch = _Batch(
            way=way,
            receivers=bits,
            seconds=dict(zip(receivers, seconds.tolist(), strict=True)),
            sizes=dict(zip(receivers, sizes.tolist(), strict=True)),
            since=now,
            cause=cause,
        )
        batches = self._batches[sender]
        batches.append(batch)
        batches.sort(key=lambda each: each.way)
        self._touched_senders |= 1 << sender

    def _start_messages(self, now: float) -> None:
        senders = self._touched_senders & self._free_senders
        receivers = self._touched_receivers
        self._touched_senders = self._touched_receivers = 0
        while senders:
            lowest = senders & -senders
            senders ^= lowest
            self._start_message(lowest.bit_length() - 1, now)
        receivers &= self._free_receivers
        while receivers:
            lowest = receivers & -receivers
            receivers ^= lowest
            receiver = lowest.bit_length() - 1
            # Who sends may find something more urgent for somebody else.
            while self._free_receivers & lowest and (
                able := self._incoming[receiver] & self._free_senders
            ):
                self._start_message(_next(able, receiver), now)

    def _start_message(self, sender: int, now: float) -> None:
        batches = self._batches[sender]
        for batch in batches:
            able = batch.receivers & self._free_receivers
            if able:
                break
        else:
            return
        receiver = _next(able, sender)
        bit = 1 << receiver
        batch.receivers ^= bit
        if not batch.receivers:
            batches.remove(batch)
        for each in batches:
            if each.receivers & bit:
                break
        else:
            self._incoming[receiver] ^= 1 << sender
        self._free_senders ^= 1 << sender
        self._free_receivers ^= bit
        index = len(self._starts)
        self._message_causes.append(self._cause(batch, sender, receiver, now))
        self._last_sent[sender] = self._last_received[receiver] = index
        end = now + batch.seconds[receiver]
        self._starts.append(now)
        self._ends.append(end)
        self._arrivals.append(end + self._latency)
        n_bytes = batch.sizes[receiver]
        self._sizes.append(n_bytes)
        if self._handles:
            self._handle(n_bytes, sender, receiver)
        self._ways.append(batch.way)
        self._senders.append(sender)
        self._receivers.append(receiver)
        heapq.heappush(self._agenda, (end, len(self._nodes.after) + index))

    def _handle(self, n_bytes: int, *ends: int) -> None:
        """Let what both ends compute take longer."""
        for place in ends:
            if self._is_busy[place]:
                taken = self._each[place] + n_bytes * self._handling[place]
                self._owed[place] += taken / 2

    def _cause(self, batch: _Batch, sender: int, receiver: int, now: float) -> int:
        if batch.since == now:
            return batch.cause
        last = self._last_sent[sender]
        if last == NOTHING or self._ends[last] < now:
            last = self._last_received[receiver]
        return self._nodes.n_tasks + last

    def _end_message(self, index: int, now: float) -> None:
        sender, receiver = self._senders[index], self._receivers[index]
        if self._handles:
            self._handle(self._sizes[index], sender, receiver)
        self._free_senders |= 1 << sender
        self._free_receivers |= 1 << receiver
        self._touched_senders |= 1 << sender
        self._touched_receivers |= 1 << receiver
        way = self._ways[index]
        missing = self._missing[way]
        missing[receiver] -= 1
        if missing[receiver] == 0:
            node = self._arrival[way][receiver]
            self._nodes.n_before[node] = 0
            self._causes[node] = self._nodes.n_tasks + index
            arrival = now + self._latency + self._adding[way].get(receiver, 0.0)
            self._arrivals[index] = arrival
            heapq.heappush(self._agenda, (arrival, node))

    def _played(self) -> SimulatedStep:
        n_tasks = self._nodes.n_tasks
        starts = np.array([*self._task_starts, *self._starts])
        task_ends = starts[:n_tasks] + np.array(self._seconds)
        causes = [*self._causes[:n_tasks], *self._message_causes]
        expected = sum(map(len, self._traffic))
        assert len(self._starts) == expected, (len(self._starts), expected)
        assert not any(self._nodes.n_before), "a task waits for what never happens"
        return SimulatedStep(
            starts=starts,
            ends=np.append(task_ends, self._ends),
            arrivals=np.append(task_ends, self._arrivals),
            causes=np.array(causes, dtype=np.int64),
            n_tasks=n_tasks,
            ways=np.array(self._ways, dtype=np.int64),
            senders=self._machines[np.array(self._senders, dtype=np.int64)],
            receivers=self._machines[np.array(self._receivers, dtype=np.int64)],
        )


def _next(machines: int, after: int) -> int:
    """Return the first machine of these bits after this one, round the circle."""
    later = machines >> after
    if later:
        return after + (later & -later).bit_length() - 1
    return (machines & -machines).bit_length() - 1
