"""What a copy of a shard is until it leads: a second that becomes its leader's equal.

    Follow                    hold nothing; know the clients; be at that clock
    StateBlock i              hold pieces [0, i]                      -> StateCredit
    Forward at this clock     apply it to the elements held; rise     -> Acknowledge
    all pieces are held       whole                                   -> Whole
    Lead                      apply what has come in order; lead

Rules:

* The highest pairing heard of counts, from `Follow` or `Lead`; messages of any other
  are dropped. So a leader that was deposed can have nothing acknowledged any more.
* Within a pairing the clock only rises. It has acknowledged what it applied, though it
  held nothing: back at an earlier clock it would take pieces which lack that.
* A piece is taken if it is the next one, of this very clock, while nothing is being
  applied; a push if its clock is the one to which those before it lead. Whatever else
  comes is dropped, and the leader sends again what it sees missing.
* A push is read where its client left it, in memory that the leader lent. If that
  cannot be reached, the answer is a `PushCredit` of no blocks, and the leader sends it
  in blocks, for which there is room for two pushes: the slots of sequence s mod 2, as
  a client's, where the push at clock c has sequence c + 1.
* What it reads there after its leader was let go on alone may be anything, for the slot
  is lent anew; but then it is whole for a pairing that is over, and nobody is to lead
  with it.
* A word of a push that waits here is answered by a `PushCredit`, a sign of life.
"""

from collections import deque
from dataclasses import dataclass
from typing import final

import numpy as np

from distbelief.errors import MemoryGoneError, RemoteProtocolError
from distbelief.memory import Memory
from distbelief.messages import (
    Acknowledge,
    Follow,
    Forward,
    Message,
    PushBlock,
    PushCredit,
    StateBlock,
    StateCredit,
    Whole,
)
from distbelief.parameter_server.layout.holding import Holding
from distbelief.parameter_server.rules.steps import Steps
from distbelief.parameter_server.state.slots import N_SLOTS, Bounds, Client, Slot, slot_views
from distbelief.parameter_server.state.values import ShardValues
from distbelief.roles import SUPERVISOR, Action, Address, Send
from distbelief.vectors import Vector


@final
@dataclass(frozen=True, slots=True, eq=False)
class Forwarded:
    """A push to be applied."""

    message: Forward
    values: Vector  # (n_elements,) of what its client holds
    holding: Holding


@final
class Following:
    """A copy of a shard that does not lead.

    Attributes:
        pairing: The highest that it has heard of; 0 before there is one.
        clients: Those of the snapshot it began from, or those of its leader.
    """

    def __init__(
        self, values: ShardValues, *, memory: Memory, bounds: Bounds, n_clients_max: int
    ) -> None:
        self._values = values
        self._memory = memory
        self._bounds = bounds
        self._n_waiting_max = N_SLOTS * n_clients_max
        self._leader: Address | None = None  # once a Follow was accepted
        self._next: tuple[Address, Follow] | None = None  # to be accepted
        self._ready = False
        self._fenced = False  # told to lead: takes nothing more
        self._queue: deque[Forwarded] = deque()
        self._applying: Forwarded | None = None
        self._attached: dict[str, tuple[str, tuple[Vector, Vector]]] = {}  # by client
        self._slots: tuple[Slot, Slot] | None = None  # once blocks come
        self.pairing = 0
        self.clients: dict[Address, Client] = {}

    @property
    def leader(self) -> Address | None:
        """Whom it follows; None as long as it has the values it began with."""
        return self._leader

    @property
    def follows(self) -> bool:
        """Has it given up those?"""
        return self._leader is not None

    @property
    def is_whole(self) -> bool:
        """Does it hold all that its leader of this pairing has acknowledged?"""
        return self.follows and self._values.n_held == self._values.n_pieces

    @property
    def whole_for(self) -> int:
        """The pairing for which it is whole, else 0."""
        return self.pairing if self.is_whole and self._next is None else 0

    # ------------------------------------------------------------------------- life

    def restored(self, clients: tuple[Client, ...]) -> list[Action]:
        """The values are there, from a snapshot or the initial ones."""
        self._ready = True
        self.clients = {client.name: client for client in clients}
        return self._accept_next()

    def lead(self, pairing: int) -> bool:
        """Take nothing more from anybody; return whether this copy can lead.

        It cannot if it has given up the values it began with, and has no others.
        """
        can_lead = not self.follows or (self.is_whole and self._next is None)
        self.pairing, self._fenced, self._next = pairing, True, None
        return can_lead

    @property
    def drained(self) -> bool:
        """Is everything applied that was taken?"""
        return self._ready and self._applying is None and not self._queue

    def release(self) -> None:
        """Let go of all memory that is not the shard's own."""
        self._queue.clear()
        for region, _ in self._attached.values():
            self._memory.release(region)
        self._attached.clear()
        self._slots = None

    # ------------------------------------------------------------------- the leader

    def follow(self, sender: Address, message: Follow) -> list[Action]:
        """Become the copy of this leader, now or when the work under way has ended."""
        if self._fenced or message.pairing < self.pairing:
            return []
        if self._obeys(sender, message.pairing) and (
            self._values.n_held or message.clock < self._values.clock
        ):
            return [self._credit()]  # it is this one's copy already, or beyond that
        if self._next is not None and _is_before(message, self._next[1]):
            return []
        self._steps(message)  # or it is refused
        self.pairing, self._next = message.pairing, (sender, message)
        self._queue.clear()
        return self._accept_next()

    def take_piece(self, sender: Address, message: StateBlock) -> list[Action]:
        """Hold one piece more.

        Raises:
            RemoteProtocolError: it cannot be that piece.
        """
        if not self._obeys(sender, message.pairing):
            return []
        values = self._values
        if (
            message.index == values.n_held < values.n_pieces
            and message.clock == values.clock
            and self._applying is None
        ):
            values.take_piece(message.values)
            if self.is_whole:
                whole = Whole(pairing=self.pairing)
                return [self._credit(), Send(receiver=SUPERVISOR, message=whole)]
        return [self._credit()]

    def forward(self, sender: Address, message: Forward) -> list[Action]:
        """Let this push stand in the queue, if it is the next one.

        Raises:
            RemoteProtocolError: it lies in memory of another size.
        """
        if not self._obeys(sender, message.pairing):
            return []
        n_waiting = len(self._queue) + (self._applying is not None)
        ahead = message.clock - self._values.clock
        if ahead < 0:
            return [self._acknowledge(message.clock)]
        if ahead < n_waiting:
            n_blocks = len(self._holding(message).bounds)
            return [self._push_credit(message.clock + 1, n_blocks)]
        if ahead > n_waiting or n_waiting >= self._n_waiting_max:
            return []
        values = self._pushed(message)
        if values is None:
            return [self._push_credit(message.clock + 1, self._received(message))]
        holding = self._holding(message)
        reason = self._values.steps.know(holding)
        touches = message.holds if message.touches else None
        reason = reason or self._values.why_not(touches, holding)
        if reason is not None:
            raise RemoteProtocolError(f"{sender} forwards a push, but {reason}")
        self._queue.append(Forwarded(message, values, holding))
        return []

    def take_block(self, sender: Address, message: PushBlock) -> list[Action]:
        """Put a block of a push where it belongs.

        Raises:
            RemoteProtocolError: no such block can be.
        """
        if not self._obeys(sender, message.shard_incarnation):
            return []
        sequence, clock = message.sequence, self._values.clock
        if sequence <= clock:
            return [self._acknowledge(sequence - 1)]
        if sequence > clock + N_SLOTS:
            return []
        if message.block_index >= len(self._bounds):
            raise RemoteProtocolError(
                f"{sender} sent block {message.block_index} of a push; a push has "
                f"{len(self._bounds)}"
            )
        slot = self._room()[sequence % N_SLOTS]
        slot.lend(sequence)
        if message.block_index == slot.received:
            start, stop = self._bounds[slot.received]
            values, dtype = message.values, slot.values.dtype
            if values.dtype != dtype or values.size > stop - start:
                raise RemoteProtocolError(
                    f"{sender} sent {values.size} elements of {values.dtype} as block "
                    f"{slot.received} of a push; it has {stop - start} of {dtype}"
                )
            # Fewer, if it is the last one of a client that holds a part.
            slot.values[start : start + values.size] = values
            slot.received += 1
            slot.n_elements += values.size
        return [self._push_credit(sequence, slot.received)]

    # ------------------------------------------------------------------------- work

    def begin_next(self) -> Forwarded | None:
        """Take the next push from the queue, to apply it to what is held."""
        if self._applying is None and self._queue:
            self._applying = self._queue.popleft()
            return self._applying
        return None

    def end(self) -> list[Action]:
        """It is applied."""
        assert self._applying is not None
        applied, self._applying = self._applying, None
        self._values.end_push()
        record = applied.message.client
        self.clients[Address(record.name)] = Client.of(record)
        if self._next is not None:
            return self._accept_next()
        if self._fenced:
            return []
        return [self._acknowledge(applied.message.clock)]

    # ---------------------------------------------------------------------- details

    def _obeys(self, sender: Address, pairing: int) -> bool:
        return (
            pairing == self.pairing
            and sender == self._leader
            and not self._fenced
            and self._next is None
        )

    def _accept_next(self) -> list[Action]:
        if self._next is None or not self._ready or self._applying is not None:
            return []
        (sender, message), self._next = self._next, None
        self.release()
        self._leader = sender
        self._values.follow(clock=message.clock, steps=self._steps(message))
        clients = map(Client.of, message.clients)
        self.clients = {client.name: client for client in clients}
        return [self._credit()]

    def _pushed(self, message: Forward) -> Vector | None:
        """Return what was pushed, or None if it is not all here."""
        if message.slots_region:
            return self._attach(message)
        slots, sequence = self._slots, message.clock + 1
        if slots is None:
            return None
        slot, holding = slots[sequence % N_SLOTS], self._holding(message)
        if slot.sequence != sequence or slot.received < len(holding.bounds):
            return None
        if slot.n_elements != holding.n_elements:
            raise RemoteProtocolError(
                f"the blocks of push {sequence} have {slot.n_elements} elements, and "
                f"its client holds {holding.n_elements}"
            )
        return slot.values[: holding.n_elements]

    def _attach(self, message: Forward) -> Vector | None:
        name, region = message.client.name, message.slots_region
        known = self._attached.get(name)
        if known is None or known[0] != region:
            if known is not None:  # what lay there was applied before
                self._memory.release(known[0])
                del self._attached[name]
            holding = self._holding(message)
            try:
                memory = self._memory.attach(region)
            except MemoryGoneError:
                return None
            n_elements, dtype = holding.n_elements, holding.dtype
            views = slot_views(memory, n_elements=n_elements, dtype=dtype)
            known = self._attached[name] = region, views
        return known[1][message.slot % N_SLOTS]

    def _received(self, message: Forward) -> int:
        """How many blocks of this push are here; none if it does not come in blocks."""
        sequence = message.clock + 1
        if message.slots_region or self._slots is None:
            return 0
        slot = self._slots[sequence % N_SLOTS]
        return slot.received if slot.sequence == sequence else 0

    def _holding(self, message: Forward) -> Holding:
        """Return what the client holds that pushed this.

        Raises:
            RemoteProtocolError: it cannot be.
        """
        holdings = self._values.holdings
        return holdings.whole if message.touches else holdings.get(message.holds)

    def _steps(self, message: Follow) -> Steps:
        """Return what the elements have met at the clock of this message."""
        if message.steps is None:
            return Steps(message.clock)
        return Steps.read(message.steps, size=len(self._values.vector))

    def _room(self) -> tuple[Slot, Slot]:
        if self._slots is None:
            values = self._values.vector
            self._slots = Slot(np.zeros_like(values)), Slot(np.zeros_like(values))
        return self._slots

    def _credit(self) -> Action:
        values = self._values
        return self._answer(
            StateCredit(pairing=self.pairing, clock=values.clock, received=values.n_held)
        )

    def _acknowledge(self, clock: int) -> Action:
        return self._answer(
            Acknowledge(
                sequence=clock + 1,
                shard_incarnation=self.pairing,
                clock=self._values.clock,
                staleness=0,
            )
        )

    def _push_credit(self, sequence: int, received: int) -> Action:
        return self._answer(
            PushCredit(sequence=sequence, shard_incarnation=self.pairing, received=received)
        )

    def _answer(self, message: Message) -> Action:
        assert self._leader is not None
        return Send(receiver=self._leader, message=message)


def _is_before(one: Follow, other: Follow) -> bool:
    """Return whether `other` is of the same pairing, and was sent later."""
    return one.pairing == other.pairing and one.clock < other.clock
