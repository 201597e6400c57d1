"""A client's half of pushing to one shard: two slots, retries, what was lost.

    sequence        7   8   9   10  11
                    [settled]  [sent ]  next         settled = 8, issued = 10
    slot s mod 2                1   0

Rules:

* Push s is staged into slot s mod 2 once push s - 2 is settled: acknowledged, or lost.
  In shared memory the slot is the shard's own; else it is kept here, and goes out in
  blocks, at most `credit_blocks` beyond those that the shard holds. Of these every
  quarter is answered.
* What the shard does not answer is sent again from where the shard holds it.
* A push in flight, or being staged, outlives its shard. Whoever leads next says in
  Welcome up to which push it has them; the others are copied into the room that it
  lends, and pushed anew with the same sequence: so each is applied once, or lost.
* Lost is what was acknowledged and is not in the values of whoever leads next. How many
  those are follows from the count that `SessionOpened` carries.
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
from distbelief.parameter_server.session_state import N_SLOTS, Bounds, Staleness
from distbelief.parameter_server.slices import SliceCopier, TensorExchange
from distbelief.protocol import Push, PushApplied, PushBlock, PushBlockAck, SessionOpened


Room = tuple[Vector, Vector]  # two slots, each (n_elements,) of what is held


@final
@dataclass(slots=True, eq=False)
class _InFlight:
    """A push that is not yet settled."""

    push: Push
    values: Vector  # (n_elements,), in the room of whoever said Welcome last
    received: int = 0  # blocks the shard is known to hold
    sent: int = 0  # blocks sent
    said: bool = False  # was the Push itself sent after them?


@final
@dataclass(frozen=True, slots=True, eq=False)
class StagedSlot:
    """Where a push is staged: in the room that one leader lent."""

    exchange: TensorExchange
    values: Vector  # (n_elements,)
    shard_incarnation: int
    fetched_clock: int
    touches: Vector | None  # stripes of the shard's vector; None: all


@final
class ShardPush:
    """One client's pushes to one shard.

    Attributes:
        issued: The last sequence used.
        settled: No push up to it awaits anything.
        lost: Pushes issued that are not in the shard's values and never will be,
            numbered from 1 in each life of the client.
        clock: Of the present leader, the newest that it told in its answers.
        bytes_out: Of blocks sent and slots filled.
    """

    def __init__(self, part: SliceCopier, index: int, *, credit_blocks: int) -> None:
        self._part = part
        self._index = index
        self._credit_blocks = credit_blocks
        self._answer_blocks = max(1, credit_blocks // 4)
        self._bounds: Bounds = part.holding.bounds
        self._shard_incarnation = 0
        self._first_clock = 0  # of that leader, when it said Welcome
        self._room: Room | None = None
        self._exchanges: tuple[TensorExchange, TensorExchange] | None = None
        self._own_room: Room | None = None  # for blocks, once they are needed
        self._by_blocks = False
        self._in_flight: deque[_InFlight] = deque()
        self._n_issued = 0
        self.issued = 0
        self.settled = 0
        self.lost: Lost = ()
        self.clock = 0
        self.bytes_out = 0

    def start(self, first_sequence: int) -> None:
        """Number pushes from here: beyond those of any former life."""
        self.issued = self.settled = first_sequence - 1

    @property
    def waits(self) -> bool:
        """Does a push await its acknowledgement?"""
        return bool(self._in_flight)

    @property
    def n_lost(self) -> int:
        """How many pushes are lost."""
        return sum(len(part) for part in self.lost)

    @property
    def has_room(self) -> bool:
        """Is the slot of the next push free?"""
        return self.issued + 1 - self.settled <= N_SLOTS

    def agrees(self, welcome: SessionOpened) -> bool:
        """Return whether the shard knows what is settled; if not, say Hello again.

        Raises:
            LocalProtocolError: it knows of pushes that were never made.
        """
        if welcome.watermark > self.issued:
            raise LocalProtocolError(
                f"shard {self._index} knows push {welcome.watermark} of this client, "
                f"which has made none beyond {self.issued}: incarnations must rise, in "
                "a resumed run too"
            )
        return welcome.watermark >= self.settled

    def welcomed(self, welcome: SessionOpened, room: Room | None) -> None:
        """Push from now on; into `room` if it is given, else by blocks.

        What is in flight lies there afterwards; `again` sends it.
        """
        if welcome.shard_incarnation != self._shard_incarnation:
            self._shard_incarnation = welcome.shard_incarnation
            self._first_clock = self.clock = welcome.clock
        self.clock = max(self.clock, welcome.clock)
        self._settle(welcome.watermark)
        n_settled = self._n_issued - len(self._in_flight)
        self.lost = lost_after(self.lost, seen=n_settled, kept=welcome.applied)
        self._by_blocks = room is None
        if room is None:
            room = self._own_room = self._own_room or self._new_room()
        if self._room is None or room[0] is not self._room[0]:
            self._room = room
            self._exchanges = (self._part.exchange(room[0]), self._part.exchange(room[1]))
        for in_flight in self._in_flight:
            self._move(in_flight)
            # A shard may have taken back its slots from one that it took for gone.
            in_flight.received = 0

    def slot(self, *, fetched_clock: int, touched: Sequence[object | None] | None) -> StagedSlot:
        """Return where to stage the next push; call only if there is room.

        Args:
            fetched_clock: Of the oldest of its gradients.
            touched: Per tensor, None if the push is not to change it; None: it changes
                all.
        """
        assert self.has_room
        assert self._room is not None
        assert self._exchanges is not None
        index = (self.issued + 1) % N_SLOTS
        return StagedSlot(
            exchange=self._exchanges[index],
            values=self._room[index],
            shard_incarnation=self._shard_incarnation,
            fetched_clock=fetched_clock,
            touches=None if touched is None else self._part.stripes_of(touched),
        )

    def issue(
        self, staged: StagedSlot, *, n_gradients: int, samples: int, grant: int = 0, welcome: bool
    ) -> list[PushBlock | Push]:
        """Send what was staged; if not `welcome`, that waits until `welcomed`."""
        self.issued += 1
        self._n_issued += 1
        push = Push(
            sequence=self.issued,
            shard_incarnation=staged.shard_incarnation,
            fetched_clock=staged.fetched_clock,
            n_gradients=n_gradients,
            samples=samples,
            grant=grant,
            touches=staged.touches,
        )
        in_flight = _InFlight(push, staged.values)
        self._in_flight.append(in_flight)
        self._move(in_flight)
        if not self._by_blocks:
            self.bytes_out += staged.values.nbytes
        return self._send(in_flight) if welcome else []

    def credited(self, message: PushBlockAck) -> list[PushBlock | Push]:
        """Send more of that push."""
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
        """Settle every push up to that one; return whether there was one.

        Raises:
            RemoteProtocolError: it was never made.
        """
        if message.sequence > self.issued:
            raise RemoteProtocolError(
                f"shard {self._index} acknowledges push {message.sequence}; the last "
                f"one made is {self.issued}"
            )
        if message.sequence <= self.settled:
            return False
        self._settle(message.sequence)
        self.clock = max(self.clock, message.clock)
        staleness.add(message.staleness)
        return True

    def again(self) -> list[PushBlock | Push]:
        """Return what to send if nothing has come for a while."""
        messages: list[PushBlock | Push] = []
        for in_flight in self._in_flight:
            in_flight.sent, in_flight.said = in_flight.received, False
            messages += self._send(in_flight)
        return messages

    def _settle(self, sequence: int) -> None:
        self.settled = max(self.settled, sequence)
        while self._in_flight and self._in_flight[0].push.sequence <= self.settled:
            self._in_flight.popleft()

    def _move(self, in_flight: _InFlight) -> None:
        """Let it lie in the present room, and be meant for the present leader."""
        assert self._room is not None
        push, room = in_flight.push, self._room[in_flight.push.sequence % N_SLOTS]
        if in_flight.values is not room:
            room[:] = in_flight.values
            in_flight.values = room
            in_flight.received = 0
        if push.shard_incarnation != self._shard_incarnation:
            # Staleness is counted within one life of the shard.
            in_flight.push = msgspec.structs.replace(
                push,
                shard_incarnation=self._shard_incarnation,
                fetched_clock=min(push.fetched_clock, self._first_clock),
            )
            in_flight.received = 0

    def _send(self, in_flight: _InFlight) -> list[PushBlock | Push]:
        """Return the blocks that may go, and the push after the last of them."""
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
        if in_flight.sent == n_blocks and not in_flight.said:
            messages.append(in_flight.push)
            in_flight.said = True
        return messages

    def _new_room(self) -> Room:
        n_elements = self._part.holding.n_elements
        whole = np.zeros(N_SLOTS * n_elements, self._part.dtype)
        return whole[:n_elements], whole[n_elements:]
