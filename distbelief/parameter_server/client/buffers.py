"""The pushes and fetches of one client at one shard, and the copies between them and tensors.

    sequence        7   8   9   10  11
                    [settled]  [sent ]  next         settled = 8, issued = 10
    buffer s mod 2              1   0

Push s is staged into buffer s mod 2 once push s - 2 is settled: acknowledged or lost. A push in
flight outlives its shard. The next primary tells in SessionOpened which pushes it has; the others
are sent again with the same sequence, so each push is applied once or lost. Lost pushes are those
acknowledged but missing in the values of the next primary.

    begin --> (shared memory: at once)  -----------------------> complete --> installed
          --> Fetch, blocks in order, FetchAck, ..., FetchAck -->

All blocks of a fetch have one clock, because the shard pins one version for it.

Each number is copied once: from the published values or received blocks into the model's tensors,
and from the gradients into the push buffer, which in shared memory is the shard's own.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Generic, TypeVar, final

import msgspec
import numpy as np
import torch

from distbelief.core.memory import Memory
from distbelief.core.reliable import Window
from distbelief.core.vectors import Vector
from distbelief.errors import LocalProtocolError, MemoryGoneError, RemoteProtocolError
from distbelief.parameter_server import slices as sl
from distbelief.parameter_server.config import ClientConfig
from distbelief.parameter_server.layout import PartialView, TensorSpec
from distbelief.parameter_server.ticks import ShardTicks
from distbelief.protocol import push_fetch as pf, replication as rp
from distbelief.roles.role import Seconds


# --- lost pushes ---
#
#     number   1  2  3  4  5  6  7  8       seen = 8
#     kept     x  x  x        x  x  x       4 and 5 were lost by a shard that restarted
#
# A shard that restarts from a snapshot loses its newest pushes. A lost push is known by its number
# in the order of its client's pushes; lost by several shards, it counts once.

Lost = tuple[range, ...]  # of numbers, rising, without overlaps


def lost_after(lost: Lost, *, seen: int, kept: int) -> Lost:
    """Return the lost pushes if `kept` of the pushes up to `seen` are in the values now."""
    if kept + n_lost([lost]) > seen:  # another copy of the shard had them after all
        lost = ()
    first, before = kept + 1, list[range]()
    for part in lost:
        if part.start > first:
            break
        first += len(part)
        before.append(part)
    return (*before, *([range(first, seen + 1)] if first <= seen else []))


def n_lost(of_shards: Iterable[Lost]) -> int:
    """Return how many pushes at least one of these shards has lost."""
    parts = sorted((part.start, part.stop) for lost in of_shards for part in lost)
    n, end = 0, 0
    for start, stop in parts:
        n += max(0, stop - max(start, end))
        end = max(end, stop)
    return n


# --- shared memory ---

N_ATTACH_MAX: Final = 3
"""Failures in a row after which the client uses messages instead of shared memory."""

PushBuffers = tuple[Vector, Vector]  # each of what the client holds: (n_elements,), or words


@final
class ShardMemory:
    def __init__(self, memory: Memory, view: PartialView, index: int) -> None:
        self._memory = memory
        self._slice, self._size = view.slices[index], view.layout.shard_size(index)
        self.published: sl.SeqlockVector | None = None  # the values; None: they come in blocks
        self.push_buffers: PushBuffers | None = None  # None: pushes go in blocks
        self._push_region = ""
        self._held: set[str] = set()  # names of regions to release
        self.has_changed = False  # regions were attached since the last `release`
        self.n_failures = 0

    @property
    def host(self) -> str:
        return self._memory.host if self.n_failures < N_ATTACH_MAX else ""

    def attach(self, opened: pf.SessionOpened) -> bool:
        """Attach the regions that SessionOpened names; return whether all of them exist.

        On failure nothing changes: the old push buffers hold pushes in flight, which are copied
        to the new ones later.
        """
        published, push_buffers = self.published, self.push_buffers
        values_region, push_region = opened.parameters_region, opened.push_buffers_region
        n_elements, dtype = self._slice.n_elements, self._slice.dtype
        self.has_changed = True
        try:
            if published is None or published.name != values_region:
                published = None
                if values_region:
                    self._held.add(values_region)
                    published = sl.SeqlockVector.attach(
                        self._memory, values_region, n_elements=self._size, dtype=dtype
                    )
            if push_region != self._push_region:
                push_buffers = None
                if push_region:
                    self._held.add(push_region)
                    region = self._memory.attach(push_region)
                    push_buffers = sl.push_buffer_views(region, n_elements=n_elements, dtype=dtype)
        except MemoryGoneError:
            self.n_failures += 1
            return False
        self.published, self.push_buffers, self._push_region = published, push_buffers, push_region
        return True

    def release(self) -> None:
        """Release memory of former primaries; call when no work touches it."""
        self.has_changed = False
        used = {self._push_region, self.published.name if self.published else ""}
        for name in self._held - used:
            self._memory.release(name)
        self._held &= used


# --- pushes ---


PushMessage = TypeVar("PushMessage", pf.Push, rp.ReplicatePush)


def payload_of(values: Vector) -> pf.Payload:
    return "bfloat16" if values.dtype == sl.WORD else msgspec.UNSET


@final
@dataclass(slots=True, eq=False)
class OutgoingPush(Generic[PushMessage]):
    """A push on its way in blocks, and the message that follows the last of them."""

    message: PushMessage
    values: Vector  # (n_elements,) of what the client holds, or their words
    blocks: Window
    is_sent: bool = False  # the message

    def again(self) -> None:
        self.blocks.again()
        self.is_sent = False

    def due(
        self,
        held: sl.ShardSlice,
        *,
        sequence: int,
        shard_incarnation: int,
        credit: int,
        per_answer: int,
    ) -> list[pf.PushBlock | PushMessage]:
        """Return what to send now, at most `credit` blocks beyond those that the peer has."""
        messages: list[pf.PushBlock | PushMessage] = [
            pf.PushBlock(
                sequence=sequence,
                shard_incarnation=shard_incarnation,
                block_index=index,
                answer=(index + 1) % per_answer == 0,
                values=self.values[slice(*held.sent_bounds(index, self.values.dtype))],
                payload=payload_of(self.values),
            )
            for index in self.blocks.due(credit)
        ]
        if self.blocks.sent == self.blocks.n and not self.is_sent:
            self.is_sent = True
            messages.append(self.message)
        return messages


@final
@dataclass(frozen=True, slots=True, eq=False)
class StageTarget:
    copier: sl.TensorCopier
    values: Vector  # (n_elements,), or words
    push: pf.Push  # without its counts


@final
class ShardPush:
    def __init__(
        self,
        config: ClientConfig,
        view: PartialView,
        index: int,
        memory: ShardMemory,
        ticks: ShardTicks,
    ) -> None:
        self._config, self._memory, self._ticks = config, memory, ticks
        self._blocks_per_answer = config.blocks_per_answer
        self._view, self._index, self._slice = view, index, view.slices[index]
        self._shard_incarnation = 0
        self._first_clock = 0  # of that primary, when it opened the session
        self._push_buffers: PushBuffers | None = None
        self._copier = view.copier(index, compact=True)
        self._own_buffers: PushBuffers | None = None  # for pushes in blocks, created when needed
        self._by_blocks = False
        self._in_flight: deque[OutgoingPush[pf.Push]] = deque()
        self._n_issued = 0
        self.issued = 0  # the last used sequence
        self.settled = 0  # no push up to it awaits anything
        self.has_room = True  # for another push
        # Issued pushes that are not in the shard's values and never will be, numbered from 1 in
        # each incarnation of the client.
        self.lost: Lost = ()
        self.clock = 0  # the newest known clock of the current primary
        self.bytes_out = 0  # of sent blocks and filled buffers

    def start(self, first_sequence: int) -> None:
        self.issued = self.settled = first_sequence - 1
        self._look_for_room()

    def _look_for_room(self) -> None:
        self.has_room = self.issued + 1 - self.settled <= sl.N_PUSH_BUFFERS

    def agrees(self, opened: pf.SessionOpened) -> bool:
        """Return whether the shard knows every settled push; if not, open the session again."""
        # An incarnation that did not rise would reuse sequences that the shard has applied.
        if opened.watermark > self.issued:
            raise LocalProtocolError(
                f"shard {self._index} knows push {opened.watermark} of this client, whose last "
                f"is {self.issued}: incarnations must rise, also in a resumed run"
            )
        return opened.watermark >= self.settled

    def session_opened(self, opened: pf.SessionOpened) -> None:
        """Push into the attached buffers from now on, or in blocks if there are none.

        Pushes in flight are moved there; `again` sends them.
        """
        if opened.shard_incarnation != self._shard_incarnation:
            self._shard_incarnation = opened.shard_incarnation
            self._first_clock = self.clock = opened.clock
        self.clock = max(self.clock, opened.clock)
        self._settle(opened.watermark)
        n_settled = self._n_issued - len(self._in_flight)
        self.lost = lost_after(self.lost, seen=n_settled, kept=opened.applied)
        self._push_buffers = self._memory.push_buffers
        self._by_blocks = self._push_buffers is None
        if self._push_buffers is None:
            if self._own_buffers is None:
                memory = np.zeros((sl.N_PUSH_BUFFERS, self._slice.n_elements), self._slice.dtype)
                words = self._config.numbers == "bfloat16"
                one, other = (self._slice.room(part, words=words) for part in memory)
                self._own_buffers = one, other
            self._push_buffers = self._own_buffers
        for in_flight in self._in_flight:
            self._move(in_flight)
            # The shard may have released the old buffers of a client that it believed gone.
            in_flight.blocks = Window(len(self._slice.bounds))

    def stage_target(
        self, *, fetched_clock: int, touched: Sequence[object | None] | None
    ) -> StageTarget:
        """Return where to stage the next push; it changes `touched` tensors, or None for all."""
        assert self.has_room
        assert self._push_buffers is not None
        values = self._push_buffers[(self.issued + 1) % sl.N_PUSH_BUFFERS]
        return StageTarget(
            copier=self._copier,
            values=values,
            push=pf.Push(
                sequence=self.issued + 1,
                shard_incarnation=self._shard_incarnation,
                fetched_clock=fetched_clock,
                n_gradients=0,
                samples=0,
                touches=None if touched is None else self._view.stripes_of(self._index, touched),
                payload=payload_of(values),
            ),
        )

    def issue(
        self, staged: StageTarget, *, is_open: bool, **counts: pf.Ticks | pf.Dealt
    ) -> list[pf.PushBlock | pf.Push]:
        """Send what was staged; if the session is not open, that waits for `session_opened`."""
        self.issued += 1
        self._n_issued += 1
        self._look_for_room()
        push = msgspec.structs.replace(staged.push, **counts)
        in_flight = OutgoingPush(push, staged.values, Window(len(self._slice.bounds)))
        self._in_flight.append(in_flight)
        self._move(in_flight)
        if not self._by_blocks:
            self.bytes_out += staged.values.nbytes
        return self._send(in_flight) if is_open else []

    def blocks_acked(self, message: pf.PushBlockAck) -> list[pf.PushBlock | pf.Push]:
        for in_flight in self._in_flight:
            if in_flight.message.sequence == message.sequence:
                is_news = in_flight.blocks.acked(message.received)
                return self._send(in_flight) if is_news and self._by_blocks else []
        return []

    def acknowledged(self, message: pf.PushApplied) -> bool:
        """Settle every push up to the acknowledged one; return whether there was one."""
        if message.sequence > self.issued:
            raise RemoteProtocolError(
                f"shard {self._index} acknowledges push {message.sequence} of {self.issued}"
            )
        if message.sequence <= self.settled:
            return False
        self._settle(message.sequence)
        self.clock = max(self.clock, message.clock)
        return True

    def again(self) -> list[pf.PushBlock | pf.Push]:
        """Return the messages to repeat after a while without an answer."""
        messages: list[pf.PushBlock | pf.Push] = []
        for in_flight in self._in_flight:
            in_flight.again()
            messages += self._send(in_flight)
        return messages

    def _settle(self, sequence: int) -> None:
        self.settled = max(self.settled, sequence)
        self._look_for_room()
        while self._in_flight and self._in_flight[0].message.sequence <= self.settled:
            tick = self._in_flight.popleft().message.tick
            if tick is not msgspec.UNSET:
                self._ticks.settled(tick)

    def _move(self, in_flight: OutgoingPush[pf.Push]) -> None:
        assert self._push_buffers is not None
        push = in_flight.message
        buffer = self._push_buffers[push.sequence % sl.N_PUSH_BUFFERS]
        if in_flight.values is not buffer:
            sl.convert(in_flight.values, buffer, n_parameters=self._slice.n_parameters)
            in_flight.values = buffer
            push = in_flight.message = msgspec.structs.replace(push, payload=payload_of(buffer))
        if push.shard_incarnation != self._shard_incarnation:
            # Staleness is counted within one incarnation of the shard.
            in_flight.message = msgspec.structs.replace(
                push,
                shard_incarnation=self._shard_incarnation,
                fetched_clock=min(push.fetched_clock, self._first_clock),
            )

    def _send(self, in_flight: OutgoingPush[pf.Push]) -> list[pf.PushBlock | pf.Push]:
        if not self._by_blocks:
            return [in_flight.message]
        messages = in_flight.due(
            self._slice,
            sequence=in_flight.message.sequence,
            shard_incarnation=self._shard_incarnation,
            credit=self._config.credit_blocks,
            per_answer=self._blocks_per_answer,
        )
        self.bytes_out += sum(
            one.values.nbytes for one in messages if isinstance(one, pf.PushBlock)
        )
        return messages


# --- fetches ---

INSTALL_BLOCKS: Final = 8
"""Blocks worth an install while others are still to come."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class ShardReader:
    """What one install reads from one shard: a new session meanwhile changes nothing for it."""

    copy: Callable[[Sequence[torch.Tensor]], None]
    published: sl.SeqlockVector | None  # where it reads; None: blocks
    clock: int | None  # of the blocks; None if there are more to come
    shard_incarnation: int  # that the values come from
    blocks: Sequence[Vector] = ()

    @property
    def readable(self) -> bool:
        return self.published is None or self.published.version % 2 == 0

    def read(self, tensors: Sequence[torch.Tensor]) -> int | None:
        """Copy into `tensors`; return the clock, or None if it was torn or more is to come."""
        if self.published is None:
            self.copy(tensors)
            return self.clock
        return self.published.read(partial(self.copy, tensors))


@final
class ShardFetch:
    """The fetches of one client from one shard. Invalid blocks raise RemoteProtocolError."""

    def __init__(
        self, config: ClientConfig, view: PartialView, index: int, memory: ShardMemory
    ) -> None:
        self._config, self._memory = config, memory
        self._blocks_per_answer = config.blocks_per_answer
        self._later, self._index = view, index  # once frozen tensors are here
        self._view, self._slice = view.first, view.first.slices[index]
        self._payload: pf.Payload = msgspec.UNSET  # of this request
        self._shard_incarnation = 0
        self._first_clock = 0  # of that incarnation, as far as known
        self._copier: sl.TensorCopier | None = None  # of the published values, once there are some
        self._request = 0
        self._block_clock = 0
        self._block_incarnation = 0
        self._acked = 0  # blocks of this request the shard was told of
        self._by_blocks = True
        self._torn_since: Seconds | None = None
        self.received = 0  # blocks [0, received) of this request have come
        # Those of them that are not installed. They stay in the transport's memory.
        self._blocks: list[Vector] = []
        self.wanted = False  # a fetch has begun and is not installed
        self.complete = True  # no block is to come
        self.clock = 0  # of the installed values; lowered when the shard restarts
        self.version = 0, 0  # shard incarnation and clock of the installed values
        self.bytes_in = 0  # of received blocks and of installs from shared memory

    def start(self, first_request: int) -> None:
        self._request = first_request

    @property
    def installable(self) -> bool:
        """Whether it is worth while to copy what has come into the tensors."""
        has_part = self._view.is_whole and len(self._blocks) >= INSTALL_BLOCKS
        return self.wanted and (self.complete or has_part)

    def session_opened(self, opened: pf.SessionOpened) -> list[pf.Fetch]:
        """Read from this shard incarnation; restart an incomplete fetch."""
        if opened.shard_incarnation != self._shard_incarnation:
            # Staleness is counted within one incarnation of the shard.
            self.clock = min(self.clock, opened.clock)
            self._first_clock = opened.clock
        self._shard_incarnation = opened.shard_incarnation
        if self._memory.published is not None and self._copier is None:
            self._copier = self._view.copier(self._index)
        if self.wanted and not (self._by_blocks and self.complete):
            return self._begin(by_blocks=self._memory.published is None)
        return []

    def lost(self) -> None:
        """Drop an incomplete fetch: the shard is gone until the session opens."""
        if not (self._by_blocks and self.complete):
            self._restart(by_blocks=True)

    def begin(self, *, is_open: bool, exact: bool = False) -> list[pf.Fetch]:
        self.wanted = True
        exact |= self._view is not self._later  # frozen ones come once
        rounds = self._config.numbers == "bfloat16" and not exact
        self._payload = "bfloat16" if rounds else msgspec.UNSET
        self._torn_since = None
        if is_open:
            return self._begin(by_blocks=self._memory.published is None)
        self._restart(by_blocks=True)
        return []

    def take(self, block: pf.ParameterBlock) -> list[pf.FetchAck]:
        """Keep a block if it is the next one; return the acknowledgement, if one is due."""
        if block.request != self._request or self.complete:
            return []
        sender = f"shard {self._index}"
        words = self._payload == "bfloat16"
        self._slice.check_block(block.block_index, block.values, words=words, sender=sender)
        # Blocks are kept in order; the shard resends from the first missing one.
        if block.block_index != self.received:
            return []
        if self.received and block.clock != self._block_clock:
            raise RemoteProtocolError(
                f"{sender} mixes blocks of clocks {self._block_clock} and {block.clock}"
            )
        self._block_clock = block.clock
        self._block_incarnation = self._shard_incarnation
        self._blocks.append(block.values)
        self.received += 1
        self.complete = self.received == len(self._slice.bounds)
        self.bytes_in += block.values.nbytes
        if not self.complete and self.received - self._acked < self._blocks_per_answer:
            return []
        return [self._ack(again=False)]

    def again(self) -> list[pf.Fetch | pf.FetchAck]:
        """Return the message to repeat after a while without progress."""
        if self.complete:
            return []
        return [self._ack(again=True) if self.received else self._fetch()]

    def reader(self) -> ShardReader:
        """Return what the install reads; call only if `installable`."""
        view, k, published = self._view, self._index, self._memory.published
        if self._by_blocks:
            blocks = tuple(self._blocks)
            first = self.received - len(blocks)

            def copy(tensors: Sequence[torch.Tensor]) -> None:
                for index, block in enumerate(blocks, first):
                    view.block_copier(k, index).scatter(block, tensors)

            clock = self._block_clock if self.complete else None
            return ShardReader(copy, None, clock, self._block_incarnation, blocks)
        assert published is not None
        assert self._copier is not None
        copy_all = partial(self._copier.scatter, published.values)
        return ShardReader(copy_all, published, 0, self._shard_incarnation)

    def part_installed(self, reader: ShardReader) -> None:
        """Let go of installed blocks, unless the fetch has begun anew."""
        n = len(reader.blocks)
        if n and len(self._blocks) >= n and self._blocks[0] is reader.blocks[0]:
            del self._blocks[:n]

    def installed(self, clock: int, reader: ShardReader) -> None:
        self.wanted, self.complete = False, True
        self._blocks.clear()
        self.version = reader.shard_incarnation, clock
        if reader.shard_incarnation != self._shard_incarnation:
            clock = min(clock, self._first_clock)
        self.clock = clock
        if reader.published is not None:
            self.bytes_in += self._slice.n_elements * self._slice.dtype.itemsize
        if self._view is not self._later:
            self._view, self._slice = self._later, self._later.slices[self._index]
            self._copier = self._copier and self._view.copier(self._index)

    def torn(self, now: Seconds, *, seconds_max: Seconds) -> list[pf.Fetch]:
        """Note a torn read; after `seconds_max`, fetch by blocks: writes starve no reader."""
        if self._by_blocks:
            return []  # the shard was lost in the meantime
        if self._torn_since is None:
            self._torn_since = now
        if now - self._torn_since < seconds_max:
            return []
        return self._begin(by_blocks=True)

    def _begin(self, *, by_blocks: bool) -> list[pf.Fetch]:
        self._request += 1
        self._restart(by_blocks=by_blocks)
        return [self._fetch()] if by_blocks else []

    def _restart(self, *, by_blocks: bool) -> None:
        self._by_blocks = by_blocks
        self.complete = not (self.wanted and by_blocks)
        self.received = self._acked = 0
        self._blocks.clear()

    def _fetch(self) -> pf.Fetch:
        return pf.Fetch(
            request=self._request,
            shard_incarnation=self._shard_incarnation,
            credit=self._config.credit_blocks,
            payload=self._payload,
            holds=msgspec.UNSET if self._view is self._later else self._slice.all_stripes,
        )

    def _ack(self, *, again: bool) -> pf.FetchAck:
        self._acked = self.received
        return pf.FetchAck(
            request=self._request,
            shard_incarnation=self._shard_incarnation,
            received=self._acked,
            limit=self._acked + self._config.credit_blocks,
            again=again,
        )


# --- work for the executor ---


@final
@dataclass(frozen=True, slots=True)
class FetchResult:
    # Shards with torn or missing values. Until an install leaves none, the tensors are a mixture
    # of versions: do not use them.
    torn: tuple[int, ...]
    clocks: tuple[int, ...]  # per shard, the clock of what was copied; -1 for those in `torn`


@final
@dataclass(frozen=True, slots=True)
class PushResult:
    finite: bool  # whether all numbers are finite; if not, nothing is pushed
    culprits: tuple[str, ...] = ()  # names of the tensors with NaN or infinity


def install(
    readers: Mapping[int, ShardReader], tensors: Sequence[torch.Tensor], *, known: Mapping[int, int]
) -> FetchResult:
    """Copy the values of shards into `tensors`, in the order of the layout or the selection.

    `known` has, per index, the clock of what was copied before; -1 for the others.
    """
    clocks = dict(known)
    for index, reader in readers.items():
        clock = reader.read(tensors)
        if clock is not None:
            clocks[index] = clock
    torn = tuple(index for index, clock in clocks.items() if clock < 0)
    return FetchResult(torn=torn, clocks=tuple(clocks.values()))


@final
@dataclass(slots=True, eq=False)
class PushDraft:
    """A push that is filled tensor by tensor, in one executor, while backward continues.

    All tensors are copied and checked before any message goes out, so a push with NaN reaches no
    shard.
    """

    _targets: Sequence[StageTarget]  # one per shard
    _specs: Sequence[TensorSpec]  # all tensors of the push
    _put: set[int] = field(default_factory=set)
    _culprits: list[str] = field(default_factory=list)

    def put(self, index: int, tensor: torch.Tensor) -> None:
        """Copy a gradient, a buffer's value or a counter's change into every shard's push buffer.

        The tensor, (n_elements,), may be overwritten as soon as this returns.
        """
        self.put_all({index: tensor})

    def put_all(self, tensors: Mapping[int, torch.Tensor]) -> None:
        """Do so with several."""
        for index in tensors:
            if index in self._put or not 0 <= index < len(self._specs):
                raise LocalProtocolError(
                    f"tensor {index} of {len(self._specs)} is put twice: sum gradients first"
                )
        sums = [one.copier.put_all(tensors, one.values) for one in self._targets]
        self._put.update(tensors)
        for place, (index, tensor) in enumerate(tensors.items()):
            # A sum of finite numbers may overflow, so look at each element then.
            is_finite = math.isfinite(sum(one[place] for one in sums))
            if not (is_finite or bool(torch.isfinite(tensor).all())):
                self._culprits.append(self._specs[index].name)

    def finish(self) -> PushResult:
        """Fill the rest with zeros; return whether all that was put is finite.

        LocalProtocolError if a buffer is missing: zeros would spoil its average.
        """
        for index, spec in enumerate(self._specs):
            if index in self._put:
                continue
            if spec.kind != "parameter" and spec.n_elements:
                raise LocalProtocolError(
                    f"buffer {spec.name!r} was not put into the draft of a push: put its value"
                )
            for target in self._targets:
                target.copier.put(index, None, target.values)
        for target in self._targets:
            target.copier.zero_padding(target.values)
        self._put.update(range(len(self._specs)))
        return PushResult(finite=not self._culprits, culprits=tuple(self._culprits))
