"""The order of operations in a step of several micro-batches.

Instance j * n + i is operation i of n in micro-batch j; operations that run once belong to
micro-batch 0. Of the ready ones the smallest instance runs first: earlier micro-batches, so
that backward passes begin early, then the order of operations.

A *chain* is what can run without further input. It ends before a long operation if something
is ready to send, so that messages travel while the rank computes. What can wait runs last,
and alone, because something more urgent may arrive.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, final

from distbelief.worker.execution import operations as ops


# An operation with more takes long: about a tenth of a millisecond.
SEND_FIRST_FLOPS: Final = 5e6

# A chain ends beyond this, so that the rank can handle messages.
CHAIN_FLOPS: Final = 2e9


@final
@dataclass(frozen=True, slots=True)
class MicroBatchSchedule:
    """The dependencies of all instances of a step; equal for steps with as many micro-batches."""

    flow: ops.Dataflow
    # Per instance, how many others it waits for; -1: no such instance.
    n_predecessors: tuple[int, ...]
    successors: tuple[tuple[int, ...], ...]  # per instance, those that wait for it
    # Per slot and micro-batch, how often it is read, or kept for the end.
    n_readers: tuple[int, ...]

    @classmethod
    def of(cls, flow: ops.Dataflow, n_micro: int) -> "MicroBatchSchedule":
        n, n_slots, writers = len(flow.operations), len(flow.once), _writers(flow)
        n_readers = [0] * (n_slots * n_micro)
        n_predecessors: list[int] = []
        successors: list[list[int]] = [[] for _ in range(n * n_micro)]

        def read(slot: int, micro_batch: int) -> set[int]:
            # Counts a reader; returns the instances that write the slot.
            here = 0 if flow.once[slot] else micro_batch
            n_readers[here * n_slots + slot] += 1
            # A sum is complete only when every micro-batch has added to it.
            every = range(n_micro) if slot in flow.added else [here]
            return {
                (0 if flow.operations[writer].once else each) * n + writer
                for writer in writers[slot]
                for each in every
            }

        last: dict[int, int] = {}  # the instance that added to a slot before
        outputs = [slot for _, _, slot in flow.outputs]
        for micro_batch in range(n_micro):
            for slot in (*flow.losses, *flow.averages.values(), *outputs):
                read(slot, micro_batch)
            for index, operation in enumerate(flow.operations):
                if micro_batch and operation.once:
                    n_predecessors.append(-1)
                    continue
                instance = micro_batch * n + index
                waits: set[int] = set()
                for slot in _read(operation):
                    waits |= read(slot, micro_batch)
                if isinstance(operation, ops.BackwardOp):
                    waits.add(micro_batch * n + operation.forward)
                    if micro_batch:  # gradients are summed in a fixed order, for the same bits
                        waits.add(instance - n)
                    for slot in flow.added.intersection(operation.writes):
                        waits |= {last[slot]} if slot in last else set()
                        last[slot] = instance
                    if operation.can_wait:  # after the one that writes its input gradients
                        waits.add(instance - 1)
                n_predecessors.append(len(waits))
                for other in waits:
                    successors[other].append(instance)
        return cls(
            flow=flow,
            n_predecessors=tuple(n_predecessors),
            successors=tuple(map(tuple, successors)),
            n_readers=tuple(n_readers),
        )


@final
class ReadyQueue:
    """The remaining work of one step."""

    def __init__(self, schedule: MicroBatchSchedule, n_samples: Iterable[int]) -> None:
        flow = schedule.flow
        self._schedule = schedule
        self._n = len(flow.operations)
        self._n_predecessors = list(schedule.n_predecessors)
        self._sizes = list(n_samples)
        self.n_left = sum(count >= 0 for count in schedule.n_predecessors)
        outside = set(flow.received.values())
        self._awaited = {
            instance
            for instance, count in enumerate(schedule.n_predecessors)
            if count == 0 and instance % self._n in outside
        }
        self._ready: list[tuple[bool, int]] = []
        self._deferred: list[int] = []  # counted as done, to run with the next chain
        for instance, count in enumerate(schedule.n_predecessors):
            if count == 0 and instance not in self._awaited:
                self._can_begin(instance)

    @property
    def awaited(self) -> frozenset[int]:
        return frozenset(self._awaited)

    def arrive(self, instance: int) -> None:
        self._awaited.remove(instance)
        self._can_begin(instance)

    def chain(self) -> tuple[list[int], float]:
        """Return the next operations, in order, and their FLOPs; they count as done from now on."""
        chain, self._deferred = self._deferred, []
        total, sends, computes = 0.0, False, False
        while self._ready:
            can_wait, instance = self._ready[0]
            flops = self._flops(instance)
            stops = computes and flops > SEND_FIRST_FLOPS and (sends or can_wait)
            if stops or total > CHAIN_FLOPS:
                break
            heapq.heappop(self._ready)
            chain.append(instance)
            self.n_left -= 1
            total += flops
            operation = self._schedule.flow.operations[instance % self._n]
            computes |= not isinstance(operation, ops.InputOp)
            sends |= isinstance(operation, ops.OutputOp) and operation.message is not None
            for other in self._schedule.successors[instance]:
                self._n_predecessors[other] -= 1
                if not self._n_predecessors[other]:
                    self._can_begin(other)
        # Inputs alone enable nothing yet; they run with the next chain.
        if not computes and self.n_left:
            self._deferred, chain = chain, []
        return chain, total

    def _can_begin(self, instance: int) -> None:
        operation = self._schedule.flow.operations[instance % self._n]
        can_wait = isinstance(operation, ops.BackwardOp) and operation.can_wait
        # Sorts by (can_wait, instance): deferred gradients of tensors come last.
        heapq.heappush(self._ready, (can_wait, instance))

    def _flops(self, instance: int) -> float:
        micro_batch, index = divmod(instance, self._n)
        operation = self._schedule.flow.operations[index]
        if isinstance(operation, ops.ForwardOp | ops.BackwardOp):
            return operation.flops * self._sizes[micro_batch]
        return 0.0


def _read(operation: ops.Operation) -> list[int]:
    if isinstance(operation, ops.InputOp):
        return []
    return [piece.slot for read in operation.reads for piece in read.pieces]


def _writers(flow: ops.Dataflow) -> list[list[int]]:
    writers: list[list[int]] = [[] for _ in flow.once]
    for index, operation in enumerate(flow.operations):
        if isinstance(operation, ops.OutputOp):
            continue
        if isinstance(operation, ops.InputOp | ops.BackwardOp):
            slots = operation.writes
        else:
            seeds = () if operation.seed is None else (operation.seed,)
            slots = (operation.writes, *seeds)
        for slot in slots:
            writers[slot].append(index)
    return writers
