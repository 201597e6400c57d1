"""Simulates one step of a plan: when each task and each message begins and ends.

Each machine computes one task, sends one message and receives one message at a time. A message
occupies both ends while it is sent, and arrives `latency` later. Messages also use the processor:
a task that runs when one begins or ends takes longer by half of its handling time.

Everything starts as early as it can: the most urgent first, then the next machine. Ties depend on
places in the plan, not on machine numbers.

Sets of machines are bits of an integer, so "which of my receivers are free?" is one `&`: a fully
connected layer on 144 machines has 20,592 messages.
"""

import heapq
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

import numpy as np

from distbelief.graph.region import IntArray
from distbelief.plans.cluster import Cluster, FloatArray
from distbelief.plans.step_graph import Schedule


# Kinds that the receiver adds to what it has. Partial outputs are added by tasks (`combine`).
_SUMS: Final = frozenset({"gradient", "parameter_gradient"})
_ADDING: Final = 3  # bytes moved per byte added to a sum: read it, read the sum, write the sum


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SimulatedStep:
    """When each event of a step happened: tasks, then messages in the order of their starts."""

    starts: FloatArray  # (n_events,) seconds
    ends: FloatArray  # (n_events,); of a message, the end of sending
    arrivals: FloatArray  # (n_events,): when the result can be used
    n_tasks: int  # number of events that are tasks
    flows: IntArray  # (n_messages,) index of the traffic
    senders: IntArray  # (n_messages,) machine
    receivers: IntArray  # (n_messages,) machine
    n_bytes: IntArray  # (n_messages,)


@final
class StepSimulator:
    """Simulates one step; machines are numbered by their place in `order`, that of the plan.

    The simulation changes the dependencies of `step`; `seconds` is per task.
    """

    def __init__(
        self, step: Schedule, seconds: Sequence[float], *, order: Sequence[int], cluster: Cluster
    ) -> None:
        n, nodes, traffic = len(order), step.nodes, step.traffic
        machines = [cluster.machines[machine] for machine in order]
        place = {machine: index for index, machine in enumerate(order)}
        self._order = order
        self._place = place
        self._nodes = nodes
        self._places = [place[task.machine] for task in step.tasks]
        self._seconds = list(seconds)
        self._traffic = traffic
        rates = np.broadcast_to(cluster.rates, (len(cluster),) * 2)[np.ix_(order, order)]
        self._rates: list[list[float]] = rates.tolist()
        self._latency = cluster.latency
        self._overhead = cluster.message_overhead
        # Per machine, half of the processor seconds per byte of a message, and per message.
        self._handling = [0.5 / machine.message_rate for machine in machines]
        self._each = [0.5 * machine.handling / machine.cores for machine in machines]
        self._handles = any(self._handling) or any(self._each)
        self._adding = [dict[int, float]() for _ in traffic]
        self._sending = {
            node: (flow, place[machine]) for node, (flow, machine) in nodes.sending.items()
        }
        self._arrival = [dict[int, int]() for _ in traffic]
        self._missing = [[0] * n for _ in traffic]
        for node, (flow, machine) in nodes.arrival.items():
            self._arrival[flow][place[machine]] = node
            self._missing[flow][place[machine]] = len(traffic[flow].receiving[machine])
            if traffic[flow].kind in _SUMS:
                n_bytes = traffic[flow].received_bytes[machine]
                per_byte = _ADDING / cluster.machines[machine].memory_rate
                self._adding[flow][place[machine]] = n_bytes * per_byte
        # Heap of (time, code): a code below the number of nodes is a node, else a message.
        self._queue: list[tuple[float, int]] = []
        # --- computing ---
        self._ready: list[list[int]] = [[] for _ in range(n)]
        self._is_busy = [False] * n
        self._owed = [0.0] * n  # seconds that messages have added to the running task
        self._woken: set[int] = set()
        n_tasks = nodes.n_tasks
        self._task_starts = [0.0] * n_tasks
        # --- network ---
        self._free_senders = self._free_receivers = (1 << n) - 1
        self._touched_senders = self._touched_receivers = 0
        # Waiting messages by sender and receiver: (-flow, seconds, bytes), the most urgent last.
        self._waiting = [[list[tuple[int, float, int]]() for _ in range(n)] for _ in range(n)]
        self._outgoing = [0] * n  # bits: receivers of a waiting message of this machine
        self._incoming = [0] * n  # bits: its senders
        # Per sender, the number of waiting messages by flow, and a heap of these flows.
        self._n_left = [dict[int, int]() for _ in range(n)]
        self._urgent: list[list[int]] = [[] for _ in range(n)]
        # --- messages, in the order in which they start ---
        self._starts: list[float] = []
        self._ends: list[float] = []
        self._arrivals: list[float] = []
        self._sizes: list[int] = []
        self._flows: list[int] = []
        self._senders: list[int] = []
        self._receivers: list[int] = []

    def play(self) -> SimulatedStep:
        n_nodes = len(self._nodes.after)
        n_tasks = self._nodes.n_tasks
        queue = self._queue
        first = [node for node, n in enumerate(self._nodes.n_before) if n == 0]
        for node in first:
            self._happen(node)
        self._start_tasks(0.0)
        self._start_messages(0.0)
        while queue:
            now = queue[0][0]
            # Handle all ends at this time before any start: a free machine is free for all.
            while queue and queue[0][0] == now:
                code = heapq.heappop(queue)[1]
                if code >= n_nodes:
                    self._end_message(code - n_nodes, now)
                elif code < n_tasks:
                    self._end_task(code, now)
                else:
                    self._follow(code)
            if self._woken:
                self._start_tasks(now)
            if self._touched_senders | self._touched_receivers:
                self._start_messages(now)
        return self._played()

    def _happen(self, node: int) -> None:
        if node < self._nodes.n_tasks:
            place = self._places[node]
            heapq.heappush(self._ready[place], node)
            self._woken.add(place)
        elif node in self._sending:
            self._offer(*self._sending[node])
        else:
            self._follow(node)

    def _follow(self, node: int) -> None:
        n_before = self._nodes.n_before
        for after in self._nodes.after[node]:
            n_before[after] -= 1
            if n_before[after] == 0:
                self._happen(after)

    def _start_tasks(self, now: float) -> None:
        for place in sorted(self._woken):
            ready = self._ready[place]
            if ready and not self._is_busy[place]:
                task = heapq.heappop(ready)
                self._is_busy[place] = True
                self._task_starts[task] = now
                heapq.heappush(self._queue, (now + self._seconds[task], task))
        self._woken.clear()

    def _end_task(self, task: int, now: float) -> None:
        place = self._places[task]
        owed = self._owed[place]
        # Messages have delayed this task: it ends later.
        if owed:
            self._owed[place] = 0.0
            self._seconds[task] += owed
            heapq.heappush(self._queue, (now + owed, task))
            return
        self._is_busy[place] = False
        self._woken.add(place)
        self._follow(task)

    def _offer(self, flow: int, sender: int) -> None:
        traffic = self._traffic[flow]
        sent = traffic.sent[self._order[sender]]
        rates, waiting, overhead = self._rates[sender], self._waiting[sender], self._overhead
        for machine, n_bytes in sent:
            receiver = self._place[machine]
            insort(waiting[receiver], (-flow, overhead + n_bytes / rates[receiver], n_bytes))
            self._outgoing[sender] |= 1 << receiver
            self._incoming[receiver] |= 1 << sender
        self._n_left[sender][flow] = len(sent)
        heapq.heappush(self._urgent[sender], flow)
        self._touched_senders |= 1 << sender

    def _start_messages(self, now: float) -> None:
        # Only machines for which something has changed since the last call.
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
            # The sender may have something more urgent for another receiver.
            while self._free_receivers & lowest and (
                able := self._incoming[receiver] & self._free_senders
            ):
                self._start_message(_next(able, receiver), now)

    def _start_message(self, sender: int, now: float) -> None:
        able = self._outgoing[sender] & self._free_receivers
        if not able:
            return
        n_left = self._n_left[sender]
        receiver = able.bit_length() - 1
        if able != 1 << receiver:
            urgent = self._urgent[sender]
            while not n_left[urgent[0]]:
                heapq.heappop(urgent)
            receiver = self._receiver_of(sender, able, -urgent[0])
        bit, waiting = 1 << receiver, self._waiting[sender][receiver]
        code, seconds, n_bytes = waiting.pop()
        n_left[-code] -= 1
        if not waiting:
            self._outgoing[sender] ^= bit
            self._incoming[receiver] ^= 1 << sender
        self._free_senders ^= 1 << sender
        self._free_receivers ^= bit
        index = len(self._starts)
        end = now + seconds
        self._starts.append(now)
        self._ends.append(end)
        self._arrivals.append(end + self._latency)
        self._sizes.append(n_bytes)
        if self._handles:
            self._handle(n_bytes, sender, receiver)
        self._flows.append(-code)
        self._senders.append(sender)
        self._receivers.append(receiver)
        heapq.heappush(self._queue, (end, len(self._nodes.after) + index))

    def _receiver_of(self, sender: int, able: int, most: int) -> int:
        # The one with the most urgent message; of equals the first from the sender on, wrapping
        # around. None has one more urgent than `most`.
        waiting = self._waiting[sender]
        later = able >> sender << sender
        best, found = None, 0
        for part in (later, able ^ later):
            left = part
            while left:
                lowest = left & -left
                left ^= lowest
                receiver = lowest.bit_length() - 1
                code = waiting[receiver][-1][0]
                if best is None or code > best:
                    best, found = code, receiver
                    if code == most:
                        return found
        return found

    def _handle(self, n_bytes: int, sender: int, receiver: int) -> None:
        # The tasks at both ends take longer.
        busy, owed, each, per_byte = self._is_busy, self._owed, self._each, self._handling
        if busy[sender]:
            owed[sender] += each[sender] + n_bytes * per_byte[sender]
        if busy[receiver]:
            owed[receiver] += each[receiver] + n_bytes * per_byte[receiver]

    def _end_message(self, index: int, now: float) -> None:
        sender, receiver = self._senders[index], self._receivers[index]
        if self._handles:
            self._handle(self._sizes[index], sender, receiver)
        self._free_senders |= 1 << sender
        self._free_receivers |= 1 << receiver
        self._touched_senders |= 1 << sender
        self._touched_receivers |= 1 << receiver
        flow = self._flows[index]
        missing = self._missing[flow]
        missing[receiver] -= 1
        # The arrival node happens once the last message is there.
        if missing[receiver] == 0:
            node = self._arrival[flow][receiver]
            self._nodes.n_before[node] = 0
            arrival = now + self._latency + self._adding[flow].get(receiver, 0.0)
            self._arrivals[index] = arrival
            heapq.heappush(self._queue, (arrival, node))

    def _played(self) -> SimulatedStep:
        n_tasks, machines = self._nodes.n_tasks, np.array(self._order, dtype=np.int64)
        starts = np.array([*self._task_starts, *self._starts])
        task_ends = starts[:n_tasks] + np.array(self._seconds)
        expected = sum(map(len, self._traffic))
        assert len(self._starts) == expected, (len(self._starts), expected)
        assert not any(self._nodes.n_before), "a task waits for something that never happens"
        return SimulatedStep(
            starts=starts,
            ends=np.append(task_ends, self._ends),
            arrivals=np.append(task_ends, self._arrivals),
            n_tasks=n_tasks,
            flows=np.array(self._flows, dtype=np.int64),
            senders=machines[np.array(self._senders, dtype=np.int64)],
            receivers=machines[np.array(self._receivers, dtype=np.int64)],
            n_bytes=np.array(self._sizes, dtype=np.int64),
        )


def _next(machines: int, after: int) -> int:
    # The first machine among these bits from `after` on, wrapping around.
    later = machines >> after
    if later:
        return after + (later & -later).bit_length() - 1
    return (machines & -machines).bit_length() - 1
