"""Runs the steps of one rank of a partition: which operations can run, and what must be sent.

Ranks send each other messages in blocks, numbered and acknowledged (`RankLink`, `Reassembly`); on
one host a message is one block without values, which lie in shared memory (`worker.outboxes`). The
size of each message is known from the dataflow and checked before memory is allocated.

take      a transfer from another rank: kept for its step, rejected if unexpected
open      the step begins
chain     all operations that can run now, as one piece of work for the compute executor
ran       the work is done: send its messages
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple, final

import msgspec
import numpy as np
import torch

from distbelief.core.errors import LocalProtocolError, MemoryGoneError, RemoteProtocolError
from distbelief.core.memory import Memory
from distbelief.core.reliable import Arrivals, Backoff, ReliableStream
from distbelief.core.vectors import Element, Vector
from distbelief.protocol import TransferAck, TransferBlock
from distbelief.protocol.codec import FRAME_BYTES_MAX
from distbelief.protocol.role import Action, Address, Compute, Cost, Report, Seconds, Send
from distbelief.worker.batches import BatchPlan, BatchSlice, micro_sizes, step_seed
from distbelief.worker.execution.executor import PartitionExecutor, Put, StepInputs, StepResult
from distbelief.worker.execution.operations import Dataflow, InputOp
from distbelief.worker.execution.schedule import MicroBatchSchedule, ReadyQueue
from distbelief.worker.group import AHEAD
from distbelief.worker.outboxes import Places, SharedLink, places_of


STEP: Final = "replica:step"  # the work of a step

Close = Callable[[StepResult], object]  # uses the result of a step, as work


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LocalNorm:
    """One rank's part of a decision that all ranks of a step take together."""

    square: float  # sum of squares of the local gradient; NaN if it is not finite
    # Work that finishes the step, given the sum over all ranks and the index of a bad sample if a
    # rank has found one.
    settle: Callable[[float, int | None], object]
    cost: Cost  # of that work
    sample: int | None = None  # index in the data set of a sample with NaN or infinity found here


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    generation: int  # in which the work was started
    sends: Sequence[tuple[int, Vector]]  # operation instances, and the values that they send
    found: StepResult | None = None  # after the last piece of a step
    closed: object = None  # what `close` returned for it


# Transfers after which to send a `TransferAck`, if no transfer carries it earlier.
ACK_EVERY: Final = 8
AGAIN_SECONDS: Final = 2.0
AGAIN_SECONDS_MAX: Final = 30.0


class StreamKey(NamedTuple):
    """Identifies a message, the same in every generation and process."""

    step: int
    micro_batch: int
    way: int
    sender: int


class Block(NamedTuple):
    step: int
    micro_batch: int
    way: int
    block_index: int
    values: Vector
    is_shared: bool = False  # all of a message, in the outbox


@final
class RankLink:
    """The stream to one peer, and the acknowledgements of what it sends."""

    def __init__(self, peer: Address, shared: SharedLink) -> None:
        self._peer = peer
        self.shared = shared
        self.n_bytes = 0  # sent in all generations, each block counted once
        self.n_out = 0  # blocks sent
        self.n_shared = 0  # of them, messages in shared memory
        self._n_again = 0  # in earlier generations
        self._stream = self._new_stream()
        self.begin(0)

    def begin(self, generation: int) -> None:
        """Begin a generation; drop what was under way in the one before."""
        self._generation = generation
        self._n_again += self._stream.n_again
        self._stream = self._new_stream()
        self._arrivals = Arrivals()
        self._n_untold = 0

    @property
    def n_again(self) -> int:
        return self._n_again + self._stream.n_again

    def post(self, blocks: Sequence[Block], now: Seconds) -> list[Action]:
        self.n_out += len(blocks)
        self.n_shared += sum(block.is_shared for block in blocks)
        self.n_bytes += sum(block.values.nbytes for block in blocks)
        return [*self._stream.put(blocks, now)]

    def acked(self, count: int, now: Seconds) -> list[Action]:
        """The peer has all transfers before `count`."""
        return [*self._stream.acked(count, now)]

    def join(self, host: str, incarnation: int, now: Seconds) -> list[Action]:
        """The peer has joined, or has restarted, perhaps on this host."""
        was_shared, warning = self.shared.is_used, self.shared.join(host, incarnation)
        if warning is not None:
            return [Report(text=warning, level="warning")]
        return self._in_blocks(now) if was_shared and not self.shared.is_used else []

    def unshare(self, now: Seconds) -> list[Action]:
        """The peer cannot read what is shared."""
        was_shared, self.shared.is_used = self.shared.is_used, False
        return self._in_blocks(now) if was_shared else []

    def _in_blocks(self, now: Seconds) -> list[Action]:
        # When it is sent again, what was shared is the first block of its message.
        rest = [
            one._replace(block_index=index, values=values, is_shared=False)
            for one in self._stream.items
            if one.is_shared
            for index, values in blocks_of(one.values)
            if index
        ]
        return [*self._stream.put(rest, now)]

    def remind(self, now: Seconds) -> list[Action]:
        """Send again what has been under way for too long, or acknowledge what arrived."""
        again = self._stream.again(now)
        return [*again] if again or not self._n_untold else [self.ack()]

    def is_new(self, sequence: int) -> bool:
        return self._arrivals.is_new(sequence)

    def arrived(self, sequence: int) -> list[Action]:
        """Note that a transfer arrived, perhaps again; acknowledge every few."""
        self._n_untold += 1
        self._arrivals.add(sequence)
        return [self.ack()] if self._n_untold >= ACK_EVERY else []

    def _new_stream(self) -> ReliableStream[Block, Send]:
        backoff = Backoff(first=AGAIN_SECONDS, longest=AGAIN_SECONDS_MAX)
        return ReliableStream(self._transfer, backoff=backoff)

    def _transfer(self, sequence: int, block: Block) -> Send:
        self._n_untold = 0
        values: Vector | None = block.values
        if block.is_shared:
            values = None if self.shared.is_used else next(blocks_of(block.values))[1]
        message = TransferBlock(
            generation=self._generation,
            sequence=sequence,
            taken=self._arrivals.count,
            step=block.step,
            micro_batch=block.micro_batch,
            way=block.way,
            block_index=block.block_index,
            values=values,
        )
        # The stream keeps the values for a repetition, so nobody changes them meanwhile.
        return Send(receiver=self._peer, message=message, lent=True)

    def ack(self, *, by_blocks: bool = False) -> Send:
        self._n_untold = 0
        ack = TransferAck(
            generation=self._generation,
            taken=self._arrivals.count,
            by_blocks=by_blocks or msgspec.UNSET,
        )
        return Send(receiver=self._peer, message=ack)


@final
class Reassembly:
    """Messages that arrived, complete or in part."""

    def __init__(self) -> None:
        # And which of their blocks are missing.
        self._messages: dict[StreamKey, tuple[Vector, set[int]]] = {}

    def clear(self) -> None:
        self._messages.clear()

    def put(self, key: StreamKey, values: Vector) -> bool:
        """Keep a message that came as a whole; return whether it is new."""
        is_new = key not in self._messages
        self._messages.setdefault(key, (values, set()))
        return is_new

    def take(
        self,
        key: StreamKey,
        index: int,
        values: Vector,
        *,
        n_elements: int,
        dtype: "np.dtype[Element]",
    ) -> bool:
        """Keep a block that fits its message; return whether it completes the message."""
        size = FRAME_BYTES_MAX // dtype.itemsize
        count = max(1, -(-n_elements // size))
        # Meaningless for a block that does not exist: hence the check of the index.
        start, stop = index * size, min((index + 1) * size, n_elements)
        if index >= count or values.dtype != dtype or len(values) != stop - start:
            raise RemoteProtocolError(
                f"block {index} of message {key.way} of step {key.step} has {len(values)} numbers "
                f"of {values.dtype}: the message has {n_elements} of {dtype} in {count} blocks"
            )
        if key not in self._messages:
            room = values if count == 1 else np.empty(n_elements, dtype=dtype)
            self._messages[key] = room, set(range(count))
        whole, missing = self._messages[key]
        if index not in missing:
            return False
        if whole is not values:
            whole[start:stop] = values
        missing.remove(index)
        return not missing

    def pop_step(self, step: int) -> Iterator[tuple[StreamKey, Vector]]:
        """Yield the complete messages of a step, and drop them here."""
        there = [key for key, (_, missing) in self._messages.items() if not missing]
        for key in there:
            if key.step == step:
                yield key, self._messages.pop(key)[0]


def blocks_of(values: Vector) -> Iterator[tuple[int, Vector]]:
    """Yield the blocks that `take` puts together; an empty message has one, too."""
    size = FRAME_BYTES_MAX // values.itemsize
    for start in range(0, max(len(values), 1), size):
        yield start // size, values[start : start + size]


def links_of(
    execution: PartitionExecutor,
    names: Sequence[Address],  # of all ranks
    own: int,
    *,
    memory: Memory,
    batch: int,  # samples of a step, at most
    micro_batches: int,
) -> dict[int, RankLink]:
    """Return the links of a rank to those that it exchanges messages with."""
    flow, most = execution.flow, -(-batch // micro_batches)

    def places(messages: Mapping[tuple[int, int], int], peer: int) -> Places:
        sizes = [
            (way, *execution.size_of(operation, most))
            for (way, other), operation in sorted(messages.items())
            if other == peer
        ]
        return places_of(
            ((way, micro_batch), n * dtype.itemsize)
            for way, n, dtype in sizes
            for micro_batch in range(micro_batches)
        )

    links: dict[int, RankLink] = {}
    for peer in sorted({peer for _, peer in (*flow.sent, *flow.received)}):
        sent, received = places(flow.sent, peer), places(flow.received, peer)
        shared = SharedLink(memory, names[own], names[peer], sent=sent, received=received)
        links[peer] = RankLink(names[peer], shared)
    return links


@final
@dataclass(slots=True, kw_only=True)
class _Open:
    number: int
    sizes: Sequence[int]  # samples of each micro-batch
    ready: ReadyQueue
    put: Put
    close: Close
    arrived: dict[int, Vector]
    rooms: dict[int, Vector] = field(default_factory=dict)  # of messages to be sent
    is_closing: bool = False


@final
class StepRunner:
    """Runs the steps of one rank; `LocalExecutor` runs those of a whole model."""

    def __init__(
        self,
        execution: PartitionExecutor,
        *,
        links: Mapping[int, RankLink],
        batch_plan: BatchPlan,
        micro_batches: int,  # parts of a batch
        training: bool,  # with the backward pass
        seed: Sequence[int],  # of the steps' random numbers, equal on all ranks
    ) -> None:
        self.is_open = False  # a step has begun
        self.generation = 0
        self.step = 0  # the current step, or the next one
        self._execution = execution
        self.links = links
        self._batch_plan = batch_plan
        self._micro_batches = micro_batches
        self._training = training
        self._seed = tuple(seed)
        self._inbox = Reassembly()
        self._early: list[tuple[int, int, TransferBlock]] = []  # sender, its incarnation
        self._has_position = False  # the data position of this generation is known
        self._open: _Open | None = None
        self._schedules: dict[int, MicroBatchSchedule] = {}
        self._sent = {place: link for link, place in execution.flow.sent.items()}

    @property
    def awaited(self) -> int | None:
        """The rank whose message the current step waits for."""
        if self._open is None or not self._open.ready.awaited:
            return None
        instance = min(self._open.ready.awaited)
        operation = self._flow.operations[instance % len(self._flow.operations)]
        assert isinstance(operation, InputOp)
        assert operation.message is not None
        return operation.message.sender

    @property
    def _flow(self) -> Dataflow:
        return self._execution.flow

    # --------------------------------------------------------------------------- generation

    def begin(self, generation: int) -> None:
        """Drop the current step; begin a generation."""
        self.generation, self.step = generation, 0
        self._open, self.is_open = None, False
        self._has_position = False
        self._inbox.clear()
        self._early.clear()
        for stream in self.links.values():
            stream.begin(generation)

    def place(self, now: Seconds) -> list[Action]:
        """It is known what the next steps are of: handle the transfers that came before."""
        self._has_position = True
        early, self._early = self._early, []
        actions: list[Action] = []
        for sender, incarnation, message in early:
            actions += self.take(sender, incarnation, message, now)
        return actions

    # ----------------------------------------------------------------------- transfers

    def receive(
        self, sender: int, incarnation: int, message: TransferBlock | TransferAck, now: Seconds
    ) -> list[Action]:
        if isinstance(message, TransferBlock):
            return self.take(sender, incarnation, message, now)
        if message.generation != self.generation:
            return []
        link = self.links[sender]
        actions = link.acked(message.taken, now)
        return [*actions, *(link.unshare(now) if message.by_blocks is True else [])]

    def take(
        self, sender: int, incarnation: int, message: TransferBlock, now: Seconds
    ) -> list[Action]:
        """Handle a transfer from another rank.

        RemoteProtocolError if its generation, key or size is not what the dataflow expects.
        """
        if message.generation != self.generation:
            raise RemoteProtocolError(
                f"rank {sender} sent a transfer of generation {message.generation}; the current "
                f"one is {self.generation}"
            )
        stream = self.links[sender]
        is_new = stream.is_new(message.sequence)
        actions = stream.acked(message.taken, now)
        if not self._has_position or self._is_unknown(message.step):
            if is_new:  # not acknowledged: if dropped here it will be resent
                self._early.append((sender, incarnation, message))
                del self._early[: -AHEAD * 32 * max(len(self.links), 1)]
            return actions
        if is_new and message.step >= self.step:
            key = StreamKey(message.step, message.micro_batch, message.way, sender)
            try:
                if self._keep(key, incarnation, message):
                    self._arrive(message.step)
            except MemoryGoneError:
                return [*actions, stream.ack(by_blocks=True)]
        return [*actions, *stream.arrived(message.sequence)]

    def _is_unknown(self, step: int) -> bool:
        # Its samples were dealt to the leader, which has not told this rank yet.
        return self.step <= step < self.step + AHEAD and not self._sizes(step)

    def _keep(self, key: StreamKey, incarnation: int, message: TransferBlock) -> bool:
        # The size is checked before any memory is reserved for the message.
        n, dtype = self._expected(key)
        if message.values is None:
            place, shared = (key.way, key.micro_batch), self.links[key.sender].shared
            return self._inbox.put(key, shared.read(incarnation, key.step, place, n, dtype))
        index, values = message.block_index, message.values
        return self._inbox.take(key, index, values, n_elements=n, dtype=dtype)

    def _expected(self, key: StreamKey) -> tuple[int, "np.dtype[Element]"]:
        flow = self._flow
        place = flow.received.get((key.way, key.sender))
        if place is None or key.step >= self.step + AHEAD:
            raise RemoteProtocolError(
                f"rank {key.sender} sent message {key.way} of step {key.step}:"
                f" {'step is too far ahead' if place is not None else 'no such message'}"
            )
        sizes = self._sizes(key.step)
        operation = flow.operations[place]
        if key.micro_batch >= (1 if operation.once else len(sizes)):
            raise RemoteProtocolError(
                f"rank {key.sender} sent micro-batch {key.micro_batch} of a step of {len(sizes)}"
            )
        return self._execution.size_of(place, sizes[key.micro_batch])

    def _arrive(self, step: int) -> None:
        opened = self._open
        if opened is None or opened.number != step:
            return
        n = len(self._flow.operations)
        for key, values in self._inbox.pop_step(step):
            place = self._flow.received[key.way, key.sender]
            instance = key.micro_batch * n + place
            opened.arrived[instance] = values
            opened.ready.arrive(instance)

    # --------------------------------------------------------------------------- steps

    def open(
        self,
        batch_slice: BatchSlice,
        parameters: Sequence[torch.Tensor],
        *,
        put: Put,
        close: Close,
        n_bytes: float = 0.0,
    ) -> list[Compute]:
        """Begin the step `self.step`, of which `close` gets the result; return its first work."""
        del n_bytes  # beside what is computed
        sizes = self._sizes(self.step)
        if len(sizes) not in self._schedules:
            self._schedules[len(sizes)] = MicroBatchSchedule.of(self._flow, len(sizes))
        schedule = self._schedules[len(sizes)]
        batch = self._batch_plan.batch(self.step)
        step_inputs = StepInputs(
            parameters=parameters,
            inputs=batch_slice.inputs,
            sizes=sizes,
            training=self._training,
            seed=step_seed(self._seed, batch.position),
        )
        self._execution.begin(schedule, step_inputs)
        for link in self.links.values():
            link.shared.begin(self.generation, self.step)
        self._open = _Open(
            number=self.step,
            sizes=sizes,
            ready=ReadyQueue(schedule, sizes),
            put=put,
            close=close,
            arrived={},
        )
        self.is_open = True
        self._arrive(self.step)
        return self.chain()

    def cancel(self) -> None:
        raise LocalProtocolError("a step of a partition cannot be taken back")

    def chain(self) -> list[Compute]:
        """Return the work that can run now, at most one piece."""
        opened = self._open
        if opened is None or opened.is_closing:
            return []
        chain, flops = opened.ready.chain()
        arrived = {i: opened.arrived.pop(i) for i in chain if i in opened.arrived}
        n = len(self._flow.operations)
        sends = any(instance % n in self._sent for instance in chain)
        # The last chain also closes the step, but not if it sends: messages leave first.
        if not opened.ready.n_left and not (chain and sends):
            opened.is_closing = True
        elif not chain:
            return []
        rooms = dict(self._rooms(opened, chain))
        opened.rooms |= rooms
        work = partial(self._run, opened, self.generation, chain, arrived, rooms, opened.is_closing)
        return [Compute(name=STEP, work=work, cost=Cost(flops=flops))]

    def _rooms(self, opened: _Open, chain: Sequence[int]) -> Iterator[tuple[int, Vector]]:
        """Yield where messages are to be put, if that is shared memory."""
        for instance in chain:
            micro_batch, operation = divmod(instance, len(self._flow.operations))
            if operation in self._sent:
                way, receiver = self._sent[operation]
                n, dtype = self._execution.size_of(operation, opened.sizes[micro_batch])
                shared = self.links[receiver].shared
                room = shared.room(opened.number, (way, micro_batch), n, dtype)
                if room is not None:
                    yield instance, room

    def _run(
        self,
        opened: _Open,
        generation: int,
        chain: Sequence[int],
        arrived: Mapping[int, Vector],
        rooms: Mapping[int, Vector],
        closes: bool,  # noqa: FBT001 -- bound by partial
    ) -> StepOutcome:
        # Runs in the compute executor; the arguments hold all that it may touch.
        sends = self._execution.run(chain, arrived, opened.put, rooms)
        if not closes:
            return StepOutcome(generation=generation, sends=sends)
        step_result = self._execution.finish()
        for link in self.links.values():
            link.shared.check(generation)
        return StepOutcome(
            generation=generation, sends=sends, found=step_result, closed=opened.close(step_result)
        )

    def ran(self, result: StepOutcome, now: Seconds) -> list[Action]:
        opened = self._open
        if opened is None or result.generation != self.generation:
            return []
        n = len(self._flow.operations)
        actions: list[Action] = []
        for instance, values in result.sends:
            micro_batch, operation = divmod(instance, n)
            way, receiver = self._sent[operation]
            link, whole = self.links[receiver], Block(opened.number, micro_batch, way, 0, values)
            if values is opened.rooms.pop(instance, None) and link.shared.is_used:
                blocks = [whole._replace(is_shared=True)]
            else:
                blocks = [
                    whole._replace(block_index=index, values=block)
                    for index, block in blocks_of(values)
                ]
            actions += link.post(blocks, now)
        if result.found is not None:
            self._open, self.is_open = None, False
            self.step += 1
        return actions

    def _sizes(self, step: int) -> list[int]:
        n_samples = len(self._batch_plan.batch(step).indices)
        return micro_sizes(n_samples, self._micro_batches)
