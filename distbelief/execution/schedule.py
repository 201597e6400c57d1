"""What waits for what in a step of several micro-batches, and what can be done now.

Instance j * n + i is operation i of n in micro-batch j; what is there once is in
micro-batch 0. Of what is ready, the smallest instance comes first: the earlier
micro-batch, so that backward passes begin as soon as they can; then the order of the
program.

A *chain* is what can be done without another word from outside. It ends early where
something is ready to be sent and the next operation takes long: sends leave then, and
the machine goes on while they travel. What can wait comes last, and alone: meanwhile
something more urgent may have come. What only enters, and lets nothing be done yet,
begins no chain: it is done with the next one.
"""

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, final

from distbelief.execution.operations import (
    BackwardOp,
    Dataflow,
    ForwardOp,
    InputOp,
    Operation,
    OutputOp,
)


SEND_FIRST_FLOPS: Final = 5e6
"""An operation takes long if it has more: a tenth of a millisecond or so."""

CHAIN_FLOPS: Final = 2e9
"""A chain that has more ends, so that a machine can be told something."""


@final
@dataclass(frozen=True, slots=True)
class MicroBatchSchedule:
    """All instances of one step; the same for every step with as many micro-batches.

    Attributes:
        flow: Of one micro-batch.
        n_micro: How many there are.
        n_before: Per instance, how many others it waits for; -1 if there is none.
        after: Per instance, those that wait for it.
        n_readers: Per slot and micro-batch, how often it is read, or kept for the end.
    """

    flow: Dataflow
    n_micro: int
    n_before: tuple[int, ...]
    after: tuple[tuple[int, ...], ...]
    n_readers: tuple[int, ...]

    @classmethod
    def of(cls, flow: Dataflow, n_micro: int) -> "MicroBatchSchedule":
        """Return the timetable of so many micro-batches."""
        builder = _Builder(flow, n_micro)
        befores = builder.befores()
        after: list[list[int]] = [[] for _ in befores]
        for instance, waits in enumerate(befores):
            for other in waits or ():
                after[other].append(instance)
        return cls(
            flow=flow,
            n_micro=n_micro,
            n_before=tuple(-1 if w is None else len(w) for w in befores),
            after=tuple(map(tuple, after)),
            n_readers=tuple(builder.n_readers),
        )


@final
class _Builder:
    def __init__(self, flow: Dataflow, n_micro: int) -> None:
        self._flow = flow
        self._n_micro = n_micro
        self._writers = _writers(flow)
        self.n_readers = [0] * (len(flow.once) * n_micro)
        for copy in range(n_micro):
            for slot in _kept(flow):
                self.n_readers[self._place(slot, copy)] += 1

    def befores(self) -> list[set[int] | None]:
        """Return what each instance waits for; None if there is no such instance."""
        return [
            None if copy and operation.once else self._before(copy, index, operation)
            for copy in range(self._n_micro)
            for index, operation in enumerate(self._flow.operations)
        ]

    def _before(self, copy: int, index: int, operation: Operation) -> set[int]:
        n = len(self._flow.operations)
        before: set[int] = set()
        for slot in _read(operation):
            self.n_readers[self._place(slot, copy)] += 1
            before.update(self._written(slot, copy))
        if isinstance(operation, BackwardOp):
            before.add(copy * n + operation.task)
            if copy:  # gradients are added in order: same answers, same bits
                before.add((copy - 1) * n + index)
            if operation.can_wait:  # what it goes back through is kept until then
                before.add(copy * n + index - 1)
        return before

    def _written(self, slot: int, copy: int) -> Iterator[int]:
        """Yield the instances that write what an operation reads."""
        flow = self._flow
        copies = [0 if flow.once[slot] else copy]
        if slot in flow.added:
            copies = list(range(self._n_micro))
        for writer in self._writers[slot]:
            once = flow.operations[writer].once
            for each in [0] if once else copies:
                yield each * len(flow.operations) + writer

    def _place(self, slot: int, copy: int) -> int:
        return (0 if self._flow.once[slot] else copy) * len(self._flow.once) + slot


@final
class ReadyQueue:
    """What is left to do of one step.

    Args:
        timetable: Of its micro-batches.
        n_samples: Of each of them.
    """

    def __init__(self, timetable: MicroBatchSchedule, n_samples: Iterable[int]) -> None:
        flow = timetable.flow
        self._table = timetable
        self._n = len(flow.operations)
        self._n_before = list(timetable.n_before)
        self._sizes = list(n_samples)
        self.n_left = sum(count >= 0 for count in timetable.n_before)
        outside = set(flow.received.values())
        self._awaited = {
            instance
            for instance, count in enumerate(timetable.n_before)
            if count == 0 and instance % self._n in outside
        }
        self._ready: list[tuple[bool, int]] = []
        self._entering: list[int] = []  # not done yet, though it counts as done
        for instance, count in enumerate(timetable.n_before):
            if count == 0 and instance not in self._awaited:
                self._can_begin(instance)

    @property
    def awaited(self) -> frozenset[int]:
        """Instances of messages that have not come."""
        return frozenset(self._awaited)

    @property
    def is_ready(self) -> bool:
        """Whether anything can be done."""
        return bool(self._ready)

    def arrive(self, instance: int) -> None:
        """A message has come."""
        self._awaited.remove(instance)
        self._can_begin(instance)

    def chain(self) -> tuple[list[int], float]:
        """Return what to do next, in order, and its floating point operations.

        All of it counts as done from now on.
        """
        chain, self._entering = self._entering, []
        total, sends, computes = 0.0, False, False
        while self._ready:
            can_wait, instance = self._ready[0]
            flops = self._flops(instance)
            leaves = computes and flops > SEND_FIRST_FLOPS and (sends or can_wait)
            if leaves or total > CHAIN_FLOPS:
                break
            heapq.heappop(self._ready)
            chain.append(instance)
            self.n_left -= 1
            total += flops
            operation = self._table.flow.operations[instance % self._n]
            computes |= not isinstance(operation, InputOp)
            sends |= isinstance(operation, OutputOp) and operation.message is not None
            for other in self._table.after[instance]:
                self._n_before[other] -= 1
                if not self._n_before[other]:
                    self._can_begin(other)
        if not computes and self.n_left:
            self._entering, chain = chain, []
        return chain, total

    def _can_begin(self, instance: int) -> None:
        operation = self._table.flow.operations[instance % self._n]
        can_wait = isinstance(operation, BackwardOp) and operation.can_wait
        heapq.heappush(self._ready, (can_wait, instance))

    def _flops(self, instance: int) -> float:
        copy, index = divmod(instance, self._n)
        operation = self._table.flow.operations[index]
        if isinstance(operation, ForwardOp | BackwardOp):
            return operation.flops * self._sizes[copy]
        return 0.0


def _read(operation: Operation) -> list[int]:
    if isinstance(operation, InputOp):
        return []
    return [piece.slot for read in operation.reads for piece in read.pieces]


def _writers(flow: Dataflow) -> list[list[int]]:
    writers: list[list[int]] = [[] for _ in flow.once]
    for index, operation in enumerate(flow.operations):
        if isinstance(operation, OutputOp):
            continue
        if isinstance(operation, InputOp | BackwardOp):
            slots = operation.writes
        else:
            seeds = () if operation.seed is None else (operation.seed,)
            slots = (operation.writes, *seeds)
        for slot in slots:
            writers[slot].append(index)
    return writers


def _kept(flow: Dataflow) -> list[int]:
    """Return the slots that are wanted at the end."""
    outputs = [slot for _, _, slot in flow.outputs]
    return [*flow.losses, *flow.averages.values(), *outputs]
