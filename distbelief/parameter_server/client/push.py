"""Pushes to one shard: two push buffers, retries, lost pushes.

    sequence        7   8   9   10  11
                    [settled]  [sent ]  next         settled = 8, issued = 10
    buffer s mod 2              1   0

Push s is staged into buffer s mod 2 once push s - 2 is settled: acknowledged or lost. A push in
flight outlives its shard. The next primary tells in SessionOpened which pushes it has; the others
are sent again with the same sequence, so each push is applied once or lost. Lost pushes are those
acknowledged but missing in the values of the next primary.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import msgspec
import numpy as np

from distbelief.core.vectors import Vector
from distbelief.errors import LocalProtocolError, RemoteProtocolError
from distbelief.parameter_server.lost_pushes import Lost, lost_after
from distbelief.parameter_server.session_state import N_PUSH_BUFFERS, Bounds, Staleness
from distbelief.parameter_server.slices import Copier, SliceCopier
from distbelief.protocol import Push, PushApplied, PushBlock, PushBlockAck, SessionOpened


PushBuffers = tuple[Vector, Vector]  # each (n_elements,) of the client's part


@final
@dataclass(slots=True, eq=False)
class _InFlight:
    push: Push
    values: Vector  # (n_elements,), in the buffers of the last session
    received: int = 0  # blocks that the shard is known to have
    sent: int = 0  # blocks
    push_sent: bool = False  # the Push message after the last block


@final
@dataclass(frozen=True, slots=True, eq=False)
class StageTarget:
    exchange: Copier
    values: Vector  # (n_elements,)
    shard_incarnation: int
    fetched_clock: int
    touches: Vector | None  # stripes of the shard's vector; None: all


@final
class ShardPush:
    """The pushes of one client to one shard."""

    def __init__(self, part: SliceCopier, index: int, *, credit_blocks: int) -> None:
        self._part = part
        self._index = index
        self._credit_blocks = credit_blocks
        self._answer_blocks = max(1, credit_blocks // 4)
        self._bounds: Bounds = part.shard_slice.bounds
        self._shard_incarnation = 0
        self._first_clock = 0  # of that primary, when it opened the session
        self._push_buffers: PushBuffers | None = None
        self._exchanges: tuple[Copier, Copier] | None = None
        self._own_buffers: PushBuffers | None = None  # for pushes in blocks, created when needed
        self._by_blocks = False
        self._in_flight: deque[_InFlight] = deque()
        self._n_issued = 0
        self.issued = 0  # the last used sequence
        self.settled = 0  # no push up to it awaits anything
        # Issued pushes that are not in the shard's values and never will be, numbered from 1 in
        # each incarnation of the client.
        self.lost: Lost = ()
        self.clock = 0  # the newest known clock of the current primary
        self.bytes_out = 0  # of sent blocks and filled buffers

    def start(self, first_sequence: int) -> None:
        """Number pushes from here: beyond those of any former incarnation."""
        self.issued = self.settled = first_sequence - 1

    @property
    def waits(self) -> bool:
        return bool(self._in_flight)

    @property
    def n_lost(self) -> int:
        return sum(len(part) for part in self.lost)

    @property
    def has_room(self) -> bool:
        return self.issued + 1 - self.settled <= N_PUSH_BUFFERS

    def agrees(self, opened: SessionOpened) -> bool:
        """Return whether the shard knows every settled push; if not, open the session again."""
        # An incarnation that did not rise would reuse sequences that the shard has applied.
        if opened.watermark > self.issued:
            raise LocalProtocolError(
                f"shard {self._index} knows push {opened.watermark} of this client, whose last "
                f"is {self.issued}: incarnations must rise, also in a resumed run"
            )
        return opened.watermark >= self.settled

    def session_opened(self, opened: SessionOpened, push_buffers: PushBuffers | None) -> None:
        """Push into these buffers from now on, or in blocks if there are none.

        Pushes in flight are moved there; `again` sends them.
        """
        if opened.shard_incarnation != self._shard_incarnation:
            self._shard_incarnation = opened.shard_incarnation
            self._first_clock = self.clock = opened.clock
        self.clock = max(self.clock, opened.clock)
        self._confirm(opened.watermark)
        n_settled = self._n_issued - len(self._in_flight)
        self.lost = lost_after(self.lost, seen=n_settled, kept=opened.applied)
        self._by_blocks = push_buffers is None
        if push_buffers is None:
            push_buffers = self._own_buffers = self._own_buffers or self._new_buffers()
        if self._push_buffers is None or push_buffers[0] is not self._push_buffers[0]:
            self._push_buffers = push_buffers
            self._exchanges = (
                self._part.exchange(push_buffers[0]),
                self._part.exchange(push_buffers[1]),
            )
        for in_flight in self._in_flight:
            self._move(in_flight)
            # The shard may have released the old buffers of a client that it believed gone.
            in_flight.received = 0

    def stage_target(
        self, *, fetched_clock: int, touched: Sequence[object | None] | None
    ) -> StageTarget:
        """Return where to stage the next push; call only if `has_room`.

        Args:
            fetched_clock: Shard clock of its oldest gradient.
            touched: Per tensor, None if the push must not change it; None: it changes all.
        """
        assert self.has_room
        assert self._push_buffers is not None
        assert self._exchanges is not None
        index = (self.issued + 1) % N_PUSH_BUFFERS
        return StageTarget(
            exchange=self._exchanges[index],
            values=self._push_buffers[index],
            shard_incarnation=self._shard_incarnation,
            fetched_clock=fetched_clock,
            touches=None if touched is None else self._part.stripes_of(touched),
        )

    def issue(
        self,
        staged: StageTarget,
        *,
        n_gradients: int,
        samples: int,
        commit_token: int = 0,
        is_open: bool,
    ) -> list[PushBlock | Push]:
        """Send what was staged; if the session is not open, that waits for `session_opened`."""
        self.issued += 1
        self._n_issued += 1
        push = Push(
            sequence=self.issued,
            shard_incarnation=staged.shard_incarnation,
            fetched_clock=staged.fetched_clock,
            n_gradients=n_gradients,
            samples=samples,
            commit_token=commit_token,
            touches=staged.touches,
        )
        in_flight = _InFlight(push, staged.values)
        self._in_flight.append(in_flight)
        self._move(in_flight)
        if not self._by_blocks:
            self.bytes_out += staged.values.nbytes
        return self._send(in_flight) if is_open else []

    def blocks_acked(self, message: PushBlockAck) -> list[PushBlock | Push]:
        if message.received > len(self._bounds):
            raise RemoteProtocolError(
                f"shard {self._index} claims {message.received} blocks of a push of "
                f"{len(self._bounds)}"
            )
        for in_flight in self._in_flight:
            if in_flight.push.sequence == message.sequence:
                if message.received <= in_flight.received:
                    return []
                in_flight.received = message.received
                in_flight.sent = max(in_flight.sent, message.received)
                return self._send(in_flight) if self._by_blocks else []
        return []

    def acknowledged(self, message: PushApplied, staleness: Staleness) -> bool:
        """Settle every push up to the acknowledged one; return whether there was one."""
        if message.sequence > self.issued:
            raise RemoteProtocolError(
                f"shard {self._index} acknowledges push {message.sequence}; the last "
                f"one made is {self.issued}"
            )
        if message.sequence <= self.settled:
            return False
        self._confirm(message.sequence)
        self.clock = max(self.clock, message.clock)
        staleness.add(message.staleness)
        return True

    def again(self) -> list[PushBlock | Push]:
        """Return the messages to repeat after a while without an answer."""
        messages: list[PushBlock | Push] = []
        for in_flight in self._in_flight:
            in_flight.sent, in_flight.push_sent = in_flight.received, False
            messages += self._send(in_flight)
        return messages

    def _confirm(self, sequence: int) -> None:
        self.settled = max(self.settled, sequence)
        while self._in_flight and self._in_flight[0].push.sequence <= self.settled:
            self._in_flight.popleft()

    def _move(self, in_flight: _InFlight) -> None:
        assert self._push_buffers is not None
        push = in_flight.push
        buffer = self._push_buffers[push.sequence % N_PUSH_BUFFERS]
        if in_flight.values is not buffer:
            buffer[:] = in_flight.values
            in_flight.values = buffer
            in_flight.received = 0
        if push.shard_incarnation != self._shard_incarnation:
            # Staleness is counted within one incarnation of the shard.
            in_flight.push = msgspec.structs.replace(
                push,
                shard_incarnation=self._shard_incarnation,
                fetched_clock=min(push.fetched_clock, self._first_clock),
            )
            in_flight.received = 0

    def _send(self, in_flight: _InFlight) -> list[PushBlock | Push]:
        if not self._by_blocks:
            return [in_flight.push]
        n_blocks = len(self._bounds)
        messages: list[PushBlock | Push] = []
        limit = min(n_blocks, in_flight.received + self._credit_blocks)
        while in_flight.sent < limit:
            start, stop = self._bounds[in_flight.sent]
            values = in_flight.values[start:stop]
            messages.append(
                PushBlock(
                    sequence=in_flight.push.sequence,
                    shard_incarnation=self._shard_incarnation,
                    block_index=in_flight.sent,
                    answer=(in_flight.sent + 1) % self._answer_blocks == 0,
                    values=values,
                )
            )
            self.bytes_out += values.nbytes
            in_flight.sent += 1
        if in_flight.sent == n_blocks and not in_flight.push_sent:
            messages.append(in_flight.push)
            in_flight.push_sent = True
        return messages

    def _new_buffers(self) -> PushBuffers:
        n_elements = self._part.shard_slice.n_elements
        whole = np.zeros(N_PUSH_BUFFERS * n_elements, self._part.dtype)
        return whole[:n_elements], whole[n_elements:]
