"""The leader's half of keeping a second copy of a shard: what it sends, what it holds.

    Follow ... StateAck       the second is there; nothing is forwarded yet
    Follow, StateBlock x 16      at a moment when nothing is being applied
    Forward, Acknowledge         every push from here on
    StateBlock x 16              once all of those are acknowledged; and so on
    Forward, Forward, ...        the second is whole

Rules:

* From the first piece on, every push that is applied is forwarded, in that order, when
  its application begins. The client is told of it when it is applied on both sides;
  until then its slot stays as it is, for the second may read it there.
* A window of pieces is sent at one clock, which is the second's as well: when nothing
  is being applied and nothing forwarded is unacknowledged. While pieces are missing,
  one push is applied between two windows: neither waits for the other to end.
* What the second does not answer is sent again. If it has not said a word for
  `SILENCE_SECONDS`, or has come no further for `STALL_SECONDS`, the supervisor is asked
  to let this shard go on alone; only its answer, a later `Promote`, ends the waiting.
* What lies in memory that the second cannot reach goes out in blocks, of two pushes at
  the most, since that is what the second has room for.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, final

import msgspec
import numpy as np

from distbelief.core.memory import Memory
from distbelief.core.vectors import Vector
from distbelief.errors import MemoryGoneError, RemoteProtocolError
from distbelief.parameter_server.optimizers import StepCounts
from distbelief.parameter_server.push_handler import PushHandler, PushInProgress
from distbelief.parameter_server.session_state import (
    N_SLOTS,
    Bounds,
    PushBuffer,
    Session,
    push_buffer_views,
)
from distbelief.parameter_server.sessions import SessionTable
from distbelief.parameter_server.slices import ShardSlice
from distbelief.parameter_server.store import ShardStore
from distbelief.protocol import (
    BackupInSync,
    BackupUnresponsive,
    Message,
    Promote,
    PushApplied,
    PushBlock,
    PushBlockAck,
    ReplicatePush,
    StartSync,
    StateAck,
    StateBlock,
)
from distbelief.roles.role import SUPERVISOR, Action, Address, Received, Seconds, Send, SetTimer


# The names of a shard's copies: "shard-0" alone, or with it "shard-0b".

COPIES_MAX: Final = 2

_SUFFIX: Final = "b"  # of the other copy


def copy_names(shard_index: int, n_copies: int) -> tuple[Address, ...]:
    """Return the names of the copies of a shard.

    Raises:
        ValueError: so many copies cannot be had.
    """
    if not 1 <= n_copies <= COPIES_MAX:
        raise ValueError(f"n_copies is {n_copies}; use 1 to {COPIES_MAX}")
    name = f"shard-{shard_index}"
    return (Address(name), Address(f"{name}{_SUFFIX}"))[:n_copies]


def shard_of(copy: str) -> Address:
    """Return the shard that this is a copy of: its first copy has its name.

    Under that name the snapshots of both lie. Other roles' names are left alone.
    """
    if copy.startswith("shard-"):
        return Address(copy.removesuffix(_SUFFIX))
    return Address(copy)


def other_copy(copy: str) -> Address:
    """Return the name of the other one of two copies."""
    shard = shard_of(copy)
    return Address(f"{shard}{_SUFFIX}") if copy == shard else shard


def copies_of_all(n_shards: int, n_copies: int) -> tuple[tuple[Address, ...], tuple[Address, ...]]:
    """Return the first copies of all shards, and the second ones, if there are any."""
    names = [copy_names(index, n_copies) for index in range(n_shards)]
    return tuple(name[0] for name in names), tuple(name for copies in names for name in copies[1:])


# What a copy of a shard is until it leads: a second that becomes its leader's equal.
#
#     Follow                    hold nothing; know the clients; be at that clock
#     StateBlock i              hold pieces [0, i]                      -> StateAck
#     Forward at this clock     apply it to the elements held; rise     -> Acknowledge
#     all pieces are held       whole                                   -> Whole
#     Lead                      apply what has come in order; lead
#
# Rules:
#
# * The highest pairing heard of counts, from `StartSync` or `Promote`; messages of any other
#   are dropped. So a leader that was deposed can have nothing acknowledged any more.
# * Within a pairing the clock only rises. It has acknowledged what it applied, though it
#   held nothing: back at an earlier clock it would take pieces which lack that.
# * A piece is taken if it is the next one, of this very clock, while nothing is being
#   applied; a push if its clock is the one to which those before it lead. Whatever else
#   comes is dropped, and the leader sends again what it sees missing.
# * A push is read where its client left it, in memory that the leader lent. If that
#   cannot be reached, the answer is a `PushBlockAck` of no blocks, and the leader sends it
#   in blocks, for which there is room for two pushes: the slots of sequence s mod 2, as
#   a client's, where the push at clock c has sequence c + 1.
# * What it reads there after its leader was let go on alone may be anything, for the slot
#   is lent anew; but then it is whole for a pairing that is over, and nobody is to lead
#   with it.
# * A word of a push that waits here is answered by a `PushBlockAck`, a sign of life.


@final
@dataclass(frozen=True, slots=True, eq=False)
class Replicated:
    """A push to be applied."""

    message: ReplicatePush
    values: Vector  # (n_elements,) of what its client holds
    holding: ShardSlice


@final
class Backup:
    """A copy of a shard that does not lead.

    Attributes:
        pairing: The highest that it has heard of; 0 before there is one.
        clients: Those of the snapshot it began from, or those of its leader.
    """

    def __init__(
        self, values: ShardStore, *, memory: Memory, bounds: Bounds, n_clients_max: int
    ) -> None:
        self._values = values
        self._memory = memory
        self._bounds = bounds
        self._n_waiting_max = N_SLOTS * n_clients_max
        self._leader: Address | None = None  # once a Follow was accepted
        self._next: tuple[Address, StartSync] | None = None  # to be accepted
        self._ready = False
        self._fenced = False  # told to lead: takes nothing more
        self._queue: deque[Replicated] = deque()
        self._applying: Replicated | None = None
        self._attached: dict[str, tuple[str, tuple[Vector, Vector]]] = {}  # by client
        self._slots: tuple[PushBuffer, PushBuffer] | None = None  # once blocks come
        self.pairing = 0
        self.clients: dict[Address, Session] = {}

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

    def restored(self, clients: tuple[Session, ...]) -> list[Action]:
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

    def follow(self, sender: Address, message: StartSync) -> list[Action]:
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
                whole = BackupInSync(pairing=self.pairing)
                return [self._credit(), Send(receiver=SUPERVISOR, message=whole)]
        return [self._credit()]

    def forward(self, sender: Address, message: ReplicatePush) -> list[Action]:
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
        self._queue.append(Replicated(message, values, holding))
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

    def begin_next(self) -> Replicated | None:
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
        self.clients[Address(record.name)] = Session.of(record)
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
        clients = map(Session.of, message.clients)
        self.clients = {client.name: client for client in clients}
        return [self._credit()]

    def _pushed(self, message: ReplicatePush) -> Vector | None:
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

    def _attach(self, message: ReplicatePush) -> Vector | None:
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
            views = push_buffer_views(memory, n_elements=n_elements, dtype=dtype)
            known = self._attached[name] = region, views
        return known[1][message.slot % N_SLOTS]

    def _received(self, message: ReplicatePush) -> int:
        """How many blocks of this push are here; none if it does not come in blocks."""
        sequence = message.clock + 1
        if message.slots_region or self._slots is None:
            return 0
        slot = self._slots[sequence % N_SLOTS]
        return slot.received if slot.sequence == sequence else 0

    def _holding(self, message: ReplicatePush) -> ShardSlice:
        """Return what the client holds that pushed this.

        Raises:
            RemoteProtocolError: it cannot be.
        """
        holdings = self._values.holdings
        return holdings.whole if message.touches else holdings.get(message.holds)

    def _steps(self, message: StartSync) -> StepCounts:
        """Return what the elements have met at the clock of this message."""
        if message.steps is None:
            return StepCounts(message.clock)
        return StepCounts.read(message.steps, size=len(self._values.vector))

    def _room(self) -> tuple[PushBuffer, PushBuffer]:
        if self._slots is None:
            values = self._values.vector
            self._slots = PushBuffer(np.zeros_like(values)), PushBuffer(np.zeros_like(values))
        return self._slots

    def _credit(self) -> Action:
        values = self._values
        return self._answer(
            StateAck(pairing=self.pairing, clock=values.clock, received=values.n_held)
        )

    def _acknowledge(self, clock: int) -> Action:
        return self._answer(
            PushApplied(
                sequence=clock + 1,
                shard_incarnation=self.pairing,
                clock=self._values.clock,
                staleness=0,
            )
        )

    def _push_credit(self, sequence: int, received: int) -> Action:
        return self._answer(
            PushBlockAck(sequence=sequence, shard_incarnation=self.pairing, received=received)
        )

    def _answer(self, message: Message) -> Action:
        assert self._leader is not None
        return Send(receiver=self._leader, message=message)


def _is_before(one: StartSync, other: StartSync) -> bool:
    """Return whether `other` is of the same pairing, and was sent later."""
    return one.pairing == other.pairing and one.clock < other.clock


TIMER: Final = "second"

WINDOW_PIECES: Final = 16
WINDOW_BLOCKS: Final = 16  # of one push, beyond those that the second holds
TICK_SECONDS: Final = 0.125  # also before anything is sent again
SILENCE_SECONDS: Final = 0.5
STALL_SECONDS: Final = 10.0
ALONE_SECONDS: Final = 0.25  # between two `BackupUnresponsive`


@final
@dataclass(slots=True, eq=False)
class _Forwarded:
    """A push that the second has not acknowledged, or that is not applied here."""

    message: ReplicatePush
    applying: PushInProgress
    applied: bool = False  # here
    acknowledged: bool = False  # by the second
    received: int = 0  # blocks the second holds
    sent: int = 0  # blocks sent
    said: bool = False  # was the Forward itself sent?


@final
class Primary:
    """What one life of a shard does for its second, as long as it has one.

    Attributes:
        pairing: Of the latest Lead; 0 before there was one.
    """

    def __init__(self, values: ShardStore, clients: SessionTable, pushes: PushHandler) -> None:
        self._values = values
        self._clients = clients
        self._pushes = pushes
        self._outstanding: deque[_Forwarded] = deque()
        self._timer_at: Seconds | None = None
        self.pairing = 0
        self._begin(None, life=0)

    def _begin(self, second: Address | None, *, life: int) -> None:
        self._second = second
        self._life = life  # of the second: no other is heard
        self._is_there = False  # has it answered?
        self._shares = True  # as far as is known: the clients' slots, with the second
        self._n_received = 0  # pieces that the second holds
        self._n_sent = 0
        self._window_clock: int | None = None  # at which the last window was sent
        self._outstanding.clear()
        self._heard_at: Seconds = 0.0  # or when waiting began
        self._progress_at: Seconds = 0.0
        self._alone_at: Seconds | None = None  # when that was said last

    # --------------------------------------------------------------- the supervisor

    def lead(self, lead: Promote, now: Seconds) -> list[Action]:
        """Acknowledge what this second holds as well, or alone from now on."""
        actions = self._release_all()
        self.pairing = lead.pairing
        second = Address(lead.second) if lead.second else None
        self._begin(second, life=lead.second_incarnation)
        if second is not None:
            self._heard_at = self._progress_at = now
            actions += [self._to_second(self._follow()), *self._arm(now)]
        return actions

    def stop(self) -> list[Action]:
        """Go on alone without asking: the job is over."""
        actions = self._release_all()
        self._begin(None, life=0)
        return actions

    # ----------------------------------------------------------- pushes, and pieces

    @property
    def may_apply(self) -> bool:
        """Whether a push may be applied now: not before a window that is due."""
        return not self._builds or self._window_clock == self._values.clock

    def forward(self, applying: PushInProgress, *, n_clients: int, now: Seconds) -> list[Action]:
        """This push is being applied now."""
        if not self._is_there:
            return []
        clock, push = self._values.clock, applying.push
        holding = applying.client.holding
        message = ReplicatePush(
            pairing=self.pairing,
            clock=clock,
            client=applying.record(),
            n_pushing=n_clients,
            slots_region="",
            slot=push.sequence % N_SLOTS,
            holds=holding.stripes if push.touches is None else push.touches,
            touches=push.touches is not None,
        )
        if not self._awaits:
            self._heard_at = self._progress_at = now
        self._outstanding.append(_Forwarded(message, applying))
        return [*self._send_due(), *self._arm(now)]

    def applied(self, *, clock: int) -> bool:
        """The push of that clock is applied here; return whether it is to be held."""
        if not self._outstanding or self._outstanding[-1].message.clock != clock:
            return False
        last = self._outstanding[-1]
        last.applied = True
        if last.acknowledged:
            assert len(self._outstanding) == 1, self._outstanding
            self._outstanding.clear()
            return False
        return True

    def transfer(self, now: Seconds) -> list[Action]:
        """Send a window of pieces if it is due; nothing is being applied."""
        if not self._builds or self._outstanding:
            return []
        clock = self._values.clock
        if self._window_clock == clock and self._n_received < self._n_sent:
            return []  # one is under way
        messages: list[Message] = []
        if not self._n_received:
            messages.append(self._follow())
        stop = min(self._n_received + WINDOW_PIECES, self._values.n_pieces)
        messages += [
            StateBlock(
                pairing=self.pairing, clock=clock, index=index, values=self._values.piece(index)
            )
            for index in range(self._n_received, stop)
        ]
        self._n_sent, self._window_clock = stop, clock
        return [*map(self._to_second, messages), *self._arm(now)]

    # ------------------------------------------------------------------- the second

    def credit_pieces(self, event: Received, message: StateAck, now: Seconds) -> list[Action]:
        """The second is there, and holds so many pieces."""
        if not self._is_second(event, message.pairing):
            return []
        self._heard_at = now
        if not self._is_there or message.received > self._n_received:
            self._progress_at = now
        self._is_there = True
        self._n_received = max(self._n_received, message.received)
        return []

    def acknowledged(self, event: Received, message: PushApplied, now: Seconds) -> list[Action]:
        """The second has applied every push before that sequence."""
        if not self._is_second(event, message.shard_incarnation):
            return []
        self._heard_at = now
        actions: list[Action] = []
        for forwarded in self._outstanding:
            if forwarded.message.clock < message.sequence:
                forwarded.acknowledged = True
                self._progress_at = now
        while self._outstanding:
            first = self._outstanding[0]
            if not (first.acknowledged and first.applied):
                break
            self._outstanding.popleft()
            actions.append(self._settle(first))
        return [*actions, *self._send_due()]

    def credit_blocks(self, event: Received, message: PushBlockAck, now: Seconds) -> list[Action]:
        """The second lives, and holds so many blocks of that push."""
        if not self._is_second(event, message.shard_incarnation):
            return []
        self._heard_at = now
        for forwarded in self._outstanding:
            if forwarded.message.clock + 1 != message.sequence:
                continue
            n_blocks = forwarded.applying.client.n_blocks
            if self._shares and forwarded.applying.client.region:
                if message.received < n_blocks:
                    self._shares = False  # it cannot reach that memory
                    self._send_again()
            elif forwarded.received < message.received <= n_blocks:
                forwarded.received = message.received
                forwarded.sent = max(forwarded.sent, message.received)
                self._progress_at = now
        return self._send_due()

    # ------------------------------------------------------------------------- time

    def timer(self, now: Seconds) -> list[Action]:
        """Send again what is not answered; complain if nothing is."""
        assert self._timer_at is not None
        late = max(0.0, now - self._timer_at)  # then nobody listened here
        self._heard_at = min(now, self._heard_at + late)
        self._progress_at = min(now, self._progress_at + late)
        self._timer_at = None
        if not self._awaits:
            return []
        actions: list[Action] = []
        if not self._is_there:
            actions.append(self._to_second(self._follow()))
        elif self._is_mute(now):
            actions += self._complain(now)
        if self._is_there and now - self._heard_at >= TICK_SECONDS:
            actions += self._again()
        return [*actions, *self._arm(now)]

    def _is_mute(self, now: Seconds) -> bool:
        return now - self._heard_at >= SILENCE_SECONDS or now - self._progress_at >= STALL_SECONDS

    def _complain(self, now: Seconds) -> list[Action]:
        if self._alone_at is not None and now - self._alone_at < ALONE_SECONDS:
            return []
        self._alone_at = now
        return [Send(receiver=SUPERVISOR, message=BackupUnresponsive(pairing=self.pairing))]

    def _again(self) -> list[Action]:
        """Send again what the second does not say it has."""
        self._window_clock = None  # `transfer` sends the window, when it may
        self._send_again()
        messages: list[Message] = [] if self._n_received else [self._follow()]
        return [*map(self._to_second, messages), *self._send_due()]

    def _arm(self, now: Seconds) -> list[Action]:
        if self._timer_at is not None or not self._awaits:
            return []
        self._timer_at = now + TICK_SECONDS
        return [SetTimer(name=TIMER, at=self._timer_at)]

    # ---------------------------------------------------------------------- details

    @property
    def _builds(self) -> bool:
        """Whether the second is there, but lacks pieces."""
        return self._is_there and self._n_received < self._values.n_pieces

    @property
    def _awaits(self) -> bool:
        if self._second is None:
            return False
        return not self._is_there or self._builds or bool(self._outstanding)

    def _is_second(self, event: Received, pairing: int) -> bool:
        """Whether this comes from the second, and from the life that is meant."""
        return (
            event.sender == self._second
            and event.incarnation == self._life
            and pairing == self.pairing
        )

    def _follow(self) -> StartSync:
        return StartSync(
            pairing=self.pairing,
            receiver_incarnation=self._life,
            clock=self._values.clock,
            clients=tuple(client.record for client in self._clients.all()),
            steps=self._values.steps.words(),
        )

    def _release_all(self) -> list[Action]:
        """Tell the clients of all that is applied; what is not, is held no more."""
        return [self._settle(f) for f in self._outstanding if f.applied]

    def _settle(self, forwarded: _Forwarded) -> Action:
        return self._pushes.settle(
            forwarded.applying,
            staleness=forwarded.message.client.staleness,
            clock=self._values.clock,
        )

    def _send_again(self) -> None:
        for forwarded in self._outstanding:
            forwarded.sent, forwarded.said = forwarded.received, False

    def _send_due(self) -> list[Action]:
        """Send what may go now: in order, for else the second could not take it."""
        actions: list[Action] = []
        waiting = [f for f in self._outstanding if not f.acknowledged]
        for index, forwarded in enumerate(waiting):
            if not forwarded.said:
                by_blocks = not (self._shares and forwarded.applying.client.region)
                if by_blocks and index >= N_SLOTS:
                    break
                actions += map(self._to_second, self._messages(forwarded))
            if not forwarded.said:
                break
        return actions

    def _messages(self, forwarded: _Forwarded) -> Iterator[PushBlock | ReplicatePush]:
        region = forwarded.applying.client.region
        message = forwarded.message
        if self._shares and region:
            forwarded.said = True
            yield msgspec.structs.replace(message, slots_region=region)
            return
        bounds = forwarded.applying.client.holding.bounds
        limit = min(len(bounds), forwarded.received + WINDOW_BLOCKS)
        while forwarded.sent < limit:
            start, stop = bounds[forwarded.sent]
            yield PushBlock(
                sequence=message.clock + 1,
                shard_incarnation=self.pairing,
                block_index=forwarded.sent,
                values=forwarded.applying.slot.values[start:stop],
            )
            forwarded.sent += 1
        if forwarded.sent == len(bounds):
            forwarded.said = True
            yield message

    def _to_second(self, message: Message) -> Send:
        assert self._second is not None
        # Slots stay as they are until the second has answered; pieces are copies.
        lent = isinstance(message, PushBlock | StateBlock)
        return Send(receiver=self._second, message=message, lent=lent)
