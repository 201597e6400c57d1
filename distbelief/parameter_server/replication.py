"""Replication of a shard: the primary keeps one backup that can take over.

    primary                                        backup
    StartSync ------------------------------------> StateAck        nothing replicated yet
    StateBlock x 16 ------------------------------> StateAck        while no push is applied
    ReplicatePush --------------------------------> PushApplied     every push from here on
    ... more windows of state blocks, one push at most between two of them ...
                                                    BackupInSync -> supervisor

A client gets its acknowledgement when both copies have applied the push. A backup that stays
silent delays it until the supervisor lets the primary continue alone (a new `Promote`).
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
    N_PUSH_BUFFERS,
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


# --- names of the copies: "shard-0", and "shard-0b" for the second one ---

COPIES_MAX: Final = 2

_SUFFIX: Final = "b"  # of the other copy


def copy_names(shard_index: int, n_copies: int) -> tuple[Address, ...]:
    """Return the names of the copies of a shard, or raise ValueError for an invalid number."""
    if not 1 <= n_copies <= COPIES_MAX:
        raise ValueError(f"n_copies is {n_copies}; use 1 to {COPIES_MAX}")
    name = f"shard-{shard_index}"
    return (Address(name), Address(f"{name}{_SUFFIX}"))[:n_copies]


def shard_of(copy: str) -> Address:
    """Return the shard of a copy, which is also the name of its first copy.

    The snapshots of both copies have this name. Names of other roles are returned unchanged.
    """
    if copy.startswith("shard-"):
        return Address(copy.removesuffix(_SUFFIX))
    return Address(copy)


def other_copy(copy: str) -> Address:
    shard = shard_of(copy)
    return Address(f"{shard}{_SUFFIX}") if copy == shard else shard


def all_copy_names(n_shards: int, n_copies: int) -> tuple[tuple[Address, ...], tuple[Address, ...]]:
    """Return the first copies of all shards, and the second copies if there are any."""
    names = [copy_names(index, n_copies) for index in range(n_shards)]
    return tuple(name[0] for name in names), tuple(name for copies in names for name in copies[1:])


# --- backup ---


@final
@dataclass(frozen=True, slots=True, eq=False)
class Replicated:
    message: ReplicatePush
    values: Vector  # (n_elements,) of what its client holds
    shard_slice: ShardSlice


@final
class Backup:
    """A shard copy that follows a primary, or waits for one.

    The highest term seen counts; messages of any other term are dropped, so a demoted primary gets
    nothing acknowledged. Within a term the clock only rises. Invalid messages raise
    RemoteProtocolError.
    """

    def __init__(
        self, values: ShardStore, *, memory: Memory, bounds: Bounds, n_clients_max: int
    ) -> None:
        self._values = values
        self._memory = memory
        self._bounds = bounds
        self._n_waiting_max = N_PUSH_BUFFERS * n_clients_max
        self._primary: Address | None = None  # set when a StartSync is accepted
        self._next: tuple[Address, StartSync] | None = None  # waits for the running work
        self._ready = False
        self._fenced = False  # promoted: accepts nothing more
        self._queue: deque[Replicated] = deque()
        self._applying: Replicated | None = None
        self._regions: dict[str, tuple[str, tuple[Vector, Vector]]] = {}  # by client
        self._push_buffers: tuple[PushBuffer, PushBuffer] | None = None  # for pushes in blocks
        self.term = 0  # the highest term seen; 0 before the first
        # Sessions of the restored snapshot, then those of the primary.
        self.clients: dict[Address, Session] = {}

    @property
    def primary(self) -> Address | None:
        return self._primary

    @property
    def has_primary(self) -> bool:
        return self._primary is not None

    @property
    def in_sync(self) -> bool:
        return self.has_primary and self._values.n_held == self._values.n_state_blocks

    @property
    def in_sync_term(self) -> int:
        return self.term if self.in_sync and self._next is None else 0

    # ----------------------------------------------------------------------- state

    def restored(self, clients: tuple[Session, ...]) -> list[Action]:
        self._ready = True
        self.clients = {client.name: client for client in clients}
        return self._accept_next()

    def promote(self, term: int) -> bool:
        """Accept nothing more, and return whether this copy can become primary.

        It cannot if it gave up its own values for a sync that is not complete.
        """
        can_serve = not self.has_primary or (self.in_sync and self._next is None)
        self.term, self._fenced, self._next = term, True, None
        return can_serve

    @property
    def drained(self) -> bool:
        return self._ready and self._applying is None and not self._queue

    def release(self) -> None:
        self._queue.clear()
        for region, _ in self._regions.values():
            self._memory.release(region)
        self._regions.clear()
        self._push_buffers = None

    # ---------------------------------------------------------------- messages in

    def start_sync(self, sender: Address, message: StartSync) -> list[Action]:
        """Start to sync with this primary, now or when the running work ends."""
        if self._fenced or message.term < self.term:
            return []
        if self._obeys(sender, message.term) and (
            # Never go back to an earlier clock within a term: this copy has acknowledged later
            # pushes, and state blocks of the earlier clock would lack them.
            self._values.n_held or message.clock < self._values.clock
        ):
            return [self._state_ack()]  # a repetition: the sync is under way
        if self._next is not None and _is_before(message, self._next[1]):
            return []
        self._steps(message)  # raises if the counts are invalid
        self.term, self._next = message.term, (sender, message)
        self._queue.clear()
        return self._accept_next()

    def take_state_block(self, sender: Address, message: StateBlock) -> list[Action]:
        """Store the next state block; when it is the last one, report BackupInSync."""
        if not self._obeys(sender, message.term):
            return []
        values = self._values
        if (
            # A block of another clock would make the values a mixture of versions.
            message.index == values.n_held < values.n_state_blocks
            and message.clock == values.clock
            and self._applying is None
        ):
            values.take_state_block(message.values)
            if self.in_sync:
                report = BackupInSync(term=self.term)
                return [self._state_ack(), Send(receiver=SUPERVISOR, message=report)]
        return [self._state_ack()]

    def replicate(self, sender: Address, message: ReplicatePush) -> list[Action]:
        """Queue a replicated push if it is the next one."""
        if not self._obeys(sender, message.term):
            return []
        # Only the push that continues the queue is accepted; the primary resends what is missing.
        n_waiting = len(self._queue) + (self._applying is not None)
        ahead = message.clock - self._values.clock
        if ahead < 0:
            return [self._acknowledge(message.clock)]
        if ahead < n_waiting:
            # Already queued: an empty acknowledgement of blocks proves that this copy is alive.
            n_blocks = len(self._slice_of(message).bounds)
            return [self._block_ack(message.clock + 1, n_blocks)]
        if ahead > n_waiting or n_waiting >= self._n_waiting_max:
            return []
        # Pushes are read in the client's own memory where this copy can attach it. Otherwise the
        # answer with 0 blocks makes the primary send blocks.
        values = self._pushed(message)
        if values is None:
            return [self._block_ack(message.clock + 1, self._received(message))]
        shard_slice = self._slice_of(message)
        reason = self._values.steps.register(shard_slice)
        touches = message.holds if message.touches else None
        reason = reason or self._values.why_not(touches, shard_slice)
        if reason is not None:
            raise RemoteProtocolError(f"{sender} replicates an invalid push: {reason}")
        self._queue.append(Replicated(message, values, shard_slice))
        return []

    def take_block(self, sender: Address, message: PushBlock) -> list[Action]:
        if not self._obeys(sender, message.shard_incarnation):
            return []
        sequence, clock = message.sequence, self._values.clock
        if sequence <= clock:
            return [self._acknowledge(sequence - 1)]
        # There are buffers for two pushes; the push at clock c has sequence c + 1.
        if sequence > clock + N_PUSH_BUFFERS:
            return []
        if message.block_index >= len(self._bounds):
            raise RemoteProtocolError(
                f"{sender} sent block {message.block_index} of a push; a push has "
                f"{len(self._bounds)}"
            )
        push_buffer = self._own_buffers()[sequence % N_PUSH_BUFFERS]
        push_buffer.lend(sequence)
        if message.block_index == push_buffer.received:
            start, stop = self._bounds[push_buffer.received]
            values, dtype = message.values, push_buffer.values.dtype
            if values.dtype != dtype or values.size > stop - start:
                raise RemoteProtocolError(
                    f"{sender} sent {values.size} elements of {values.dtype} as block "
                    f"{push_buffer.received} of a push; it has {stop - start} of {dtype}"
                )
            # The last block is shorter if the client holds a part of the shard.
            push_buffer.values[start : start + values.size] = values
            push_buffer.received += 1
            push_buffer.n_elements += values.size
        return [self._block_ack(sequence, push_buffer.received)]

    # ------------------------------------------------------------------------- work

    def begin_next(self) -> Replicated | None:
        if self._applying is None and self._queue:
            self._applying = self._queue.popleft()
            return self._applying
        return None

    def end(self) -> list[Action]:
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

    def _obeys(self, sender: Address, term: int) -> bool:
        return (
            term == self.term
            and sender == self._primary
            and not self._fenced
            and self._next is None
        )

    def _accept_next(self) -> list[Action]:
        if self._next is None or not self._ready or self._applying is not None:
            return []
        (sender, message), self._next = self._next, None
        self.release()
        self._primary = sender
        self._values.start_sync(clock=message.clock, steps=self._steps(message))
        clients = map(Session.of, message.clients)
        self.clients = {client.name: client for client in clients}
        return [self._state_ack()]

    def _pushed(self, message: ReplicatePush) -> Vector | None:
        if message.push_buffers_region:
            return self._attach(message)
        push_buffers, sequence = self._push_buffers, message.clock + 1
        if push_buffers is None:
            return None
        push_buffer, shard_slice = push_buffers[sequence % N_PUSH_BUFFERS], self._slice_of(message)
        if push_buffer.sequence != sequence or push_buffer.received < len(shard_slice.bounds):
            return None
        if push_buffer.n_elements != shard_slice.n_elements:
            raise RemoteProtocolError(
                f"the blocks of push {sequence} have {push_buffer.n_elements} elements, and "
                f"its client holds {shard_slice.n_elements}"
            )
        return push_buffer.values[: shard_slice.n_elements]

    def _attach(self, message: ReplicatePush) -> Vector | None:
        name, region = message.client.name, message.push_buffers_region
        known = self._regions.get(name)
        if known is None or known[0] != region:
            if known is not None:  # its pushes are applied
                self._memory.release(known[0])
                del self._regions[name]
            shard_slice = self._slice_of(message)
            try:
                memory = self._memory.attach(region)
            except MemoryGoneError:
                return None
            n_elements, dtype = shard_slice.n_elements, shard_slice.dtype
            # If the supervisor has dropped this backup meanwhile, the client may reuse the buffer
            # and the values read here may be garbage. Then the term is over, and no one promotes
            # this copy in it.
            views = push_buffer_views(memory, n_elements=n_elements, dtype=dtype)
            known = self._regions[name] = region, views
        return known[1][message.slot % N_PUSH_BUFFERS]

    def _received(self, message: ReplicatePush) -> int:
        sequence = message.clock + 1
        if message.push_buffers_region or self._push_buffers is None:
            return 0
        push_buffer = self._push_buffers[sequence % N_PUSH_BUFFERS]
        return push_buffer.received if push_buffer.sequence == sequence else 0

    def _slice_of(self, message: ReplicatePush) -> ShardSlice:
        slice_table = self._values.slice_table
        return slice_table.whole if message.touches else slice_table.get(message.holds)

    def _steps(self, message: StartSync) -> StepCounts:
        if message.steps is None:
            return StepCounts(message.clock)
        return StepCounts.read(message.steps, size=len(self._values.vector))

    def _own_buffers(self) -> tuple[PushBuffer, PushBuffer]:
        if self._push_buffers is None:
            values = self._values.vector
            self._push_buffers = (
                PushBuffer(np.zeros_like(values)),
                PushBuffer(np.zeros_like(values)),
            )
        return self._push_buffers

    def _state_ack(self) -> Action:
        values = self._values
        return self._answer(StateAck(term=self.term, clock=values.clock, received=values.n_held))

    def _acknowledge(self, clock: int) -> Action:
        return self._answer(
            PushApplied(
                sequence=clock + 1,
                shard_incarnation=self.term,
                clock=self._values.clock,
                staleness=0,
            )
        )

    def _block_ack(self, sequence: int, received: int) -> Action:
        return self._answer(
            PushBlockAck(sequence=sequence, shard_incarnation=self.term, received=received)
        )

    def _answer(self, message: Message) -> Action:
        assert self._primary is not None
        return Send(receiver=self._primary, message=message)


def _is_before(one: StartSync, other: StartSync) -> bool:
    return one.term == other.term and one.clock < other.clock


TIMER: Final = "backup"

WINDOW_STATE_BLOCKS: Final = 16
WINDOW_BLOCKS: Final = 16  # of one push, beyond those that the backup holds
TICK_SECONDS: Final = 0.125  # also the delay before a resend
SILENCE_SECONDS: Final = 0.5
STALL_SECONDS: Final = 10.0
REPORT_SECONDS: Final = 0.25  # between two BackupUnresponsive


@final
@dataclass(slots=True, eq=False)
class _OutstandingPush:
    message: ReplicatePush
    applying: PushInProgress
    applied: bool = False  # here
    acknowledged: bool = False  # by the backup
    received: int = 0  # blocks that the backup holds
    sent: int = 0  # blocks
    push_sent: bool = False  # the ReplicatePush after the last block


@final
class Primary:
    """Replicates the pushes of one shard incarnation to its backup, if it has one."""

    def __init__(self, values: ShardStore, clients: SessionTable, pushes: PushHandler) -> None:
        self._values = values
        self._clients = clients
        self._pushes = pushes
        self._outstanding: deque[_OutstandingPush] = deque()
        self._timer_at: Seconds | None = None
        self.term = 0  # term of the latest Promote; 0 before the first
        self._begin(None, incarnation=0)

    def _begin(self, backup: Address | None, *, incarnation: int) -> None:
        self._backup = backup
        self._incarnation = incarnation  # of the backup; messages of others are dropped
        self._answered = False
        self._shares_memory = True  # assumed until the backup cannot attach a region
        self._n_received = 0  # state blocks that the backup holds
        self._n_sent = 0
        self._window_clock: int | None = None  # clock of the last window of state blocks
        self._outstanding.clear()
        self._heard_at: Seconds = 0.0  # or start of waiting
        self._progress_at: Seconds = 0.0
        self._reported_at: Seconds | None = None  # last BackupUnresponsive

    # -------------------------------------------------------- from the supervisor

    def promote(self, promote: Promote, now: Seconds) -> list[Action]:
        """Replicate to the backup that `Promote` names, or continue alone if it names none."""
        actions = self._release_all()
        self.term = promote.term
        backup = Address(promote.backup) if promote.backup else None
        self._begin(backup, incarnation=promote.backup_incarnation)
        if backup is not None:
            self._heard_at = self._progress_at = now
            actions += [self._to_backup(self._start_sync()), *self._arm(now)]
        return actions

    def stop(self) -> list[Action]:
        """Continue without the backup: the job ends."""
        actions = self._release_all()
        self._begin(None, incarnation=0)
        return actions

    # ----------------------------------------------------- pushes and state blocks

    @property
    def may_apply(self) -> bool:
        # All state blocks of a window have one clock, so a due window goes before the next push.
        # One push is applied between two windows: neither starves the other.
        return not self._is_syncing or self._window_clock == self._values.clock

    def replicate(self, applying: PushInProgress, *, n_clients: int, now: Seconds) -> list[Action]:
        if not self._answered:
            return []
        clock, push = self._values.clock, applying.push
        shard_slice = applying.client.shard_slice
        message = ReplicatePush(
            term=self.term,
            clock=clock,
            client=applying.record(),
            n_pushing=n_clients,
            push_buffers_region="",
            slot=push.sequence % N_PUSH_BUFFERS,
            holds=shard_slice.stripes if push.touches is None else push.touches,
            touches=push.touches is not None,
        )
        if not self._is_waiting:
            self._heard_at = self._progress_at = now
        self._outstanding.append(_OutstandingPush(message, applying))
        return [*self._send_due(), *self._arm(now)]

    def applied(self, *, clock: int) -> bool:
        """Note that the push of this clock is applied here; return whether its client must wait."""
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
        """Send a window of state blocks if one is due; call while no push is being applied."""
        if not self._is_syncing or self._outstanding:
            return []
        clock = self._values.clock
        if self._window_clock == clock and self._n_received < self._n_sent:
            return []  # the last window is not acknowledged yet
        messages: list[Message] = []
        if not self._n_received:
            messages.append(self._start_sync())
        stop = min(self._n_received + WINDOW_STATE_BLOCKS, self._values.n_state_blocks)
        messages += [
            StateBlock(
                term=self.term, clock=clock, index=index, values=self._values.state_block(index)
            )
            for index in range(self._n_received, stop)
        ]
        self._n_sent, self._window_clock = stop, clock
        return [*map(self._to_backup, messages), *self._arm(now)]

    # ------------------------------------------------------------ from the backup

    def state_acked(self, event: Received, message: StateAck, now: Seconds) -> list[Action]:
        if not self._is_from_backup(event, message.term):
            return []
        self._heard_at = now
        if not self._answered or message.received > self._n_received:
            self._progress_at = now
        self._answered = True
        self._n_received = max(self._n_received, message.received)
        return []

    def acknowledged(self, event: Received, message: PushApplied, now: Seconds) -> list[Action]:
        if not self._is_from_backup(event, message.shard_incarnation):
            return []
        self._heard_at = now
        actions: list[Action] = []
        for outstanding in self._outstanding:
            if outstanding.message.clock < message.sequence:
                outstanding.acknowledged = True
                self._progress_at = now
        while self._outstanding:
            first = self._outstanding[0]
            if not (first.acknowledged and first.applied):
                break
            self._outstanding.popleft()
            actions.append(self._confirm(first))
        return [*actions, *self._send_due()]

    def blocks_acked(self, event: Received, message: PushBlockAck, now: Seconds) -> list[Action]:
        if not self._is_from_backup(event, message.shard_incarnation):
            return []
        self._heard_at = now
        for outstanding in self._outstanding:
            if outstanding.message.clock + 1 != message.sequence:
                continue
            n_blocks = outstanding.applying.client.n_blocks
            if self._shares_memory and outstanding.applying.client.region:
                if message.received < n_blocks:
                    self._shares_memory = False  # the backup cannot attach that memory
                    self._rewind()
            elif outstanding.received < message.received <= n_blocks:
                outstanding.received = message.received
                outstanding.sent = max(outstanding.sent, message.received)
                self._progress_at = now
        return self._send_due()

    # ------------------------------------------------------------------------- time

    def timer(self, now: Seconds) -> list[Action]:
        """Resend unanswered messages; report a backup that stays silent."""
        assert self._timer_at is not None
        # A late timer means that this process was busy, so the backup is not to blame.
        late = max(0.0, now - self._timer_at)
        self._heard_at = min(now, self._heard_at + late)
        self._progress_at = min(now, self._progress_at + late)
        self._timer_at = None
        if not self._is_waiting:
            return []
        actions: list[Action] = []
        if not self._answered:
            actions.append(self._to_backup(self._start_sync()))
        elif self._is_silent(now):
            actions += self._report_silent(now)
        if self._answered and now - self._heard_at >= TICK_SECONDS:
            actions += self._resend()
        return [*actions, *self._arm(now)]

    def _is_silent(self, now: Seconds) -> bool:
        return now - self._heard_at >= SILENCE_SECONDS or now - self._progress_at >= STALL_SECONDS

    def _report_silent(self, now: Seconds) -> list[Action]:
        if self._reported_at is not None and now - self._reported_at < REPORT_SECONDS:
            return []
        self._reported_at = now
        return [Send(receiver=SUPERVISOR, message=BackupUnresponsive(term=self.term))]

    def _resend(self) -> list[Action]:
        self._window_clock = None  # makes `transfer` resend the window
        self._rewind()
        messages: list[Message] = [] if self._n_received else [self._start_sync()]
        return [*map(self._to_backup, messages), *self._send_due()]

    def _arm(self, now: Seconds) -> list[Action]:
        if self._timer_at is not None or not self._is_waiting:
            return []
        self._timer_at = now + TICK_SECONDS
        return [SetTimer(name=TIMER, at=self._timer_at)]

    # ---------------------------------------------------------------------- details

    @property
    def _is_syncing(self) -> bool:
        return self._answered and self._n_received < self._values.n_state_blocks

    @property
    def _is_waiting(self) -> bool:
        if self._backup is None:
            return False
        return not self._answered or self._is_syncing or bool(self._outstanding)

    def _is_from_backup(self, event: Received, term: int) -> bool:
        return (
            event.sender == self._backup
            and event.incarnation == self._incarnation
            and term == self.term
        )

    def _start_sync(self) -> StartSync:
        return StartSync(
            term=self.term,
            receiver_incarnation=self._incarnation,
            clock=self._values.clock,
            clients=tuple(client.record for client in self._clients.all()),
            steps=self._values.steps.to_wire(),
        )

    def _release_all(self) -> list[Action]:
        # Clients must learn of every push that is applied here.
        return [self._confirm(f) for f in self._outstanding if f.applied]

    def _confirm(self, outstanding: _OutstandingPush) -> Action:
        return self._pushes.confirm(
            outstanding.applying,
            staleness=outstanding.message.client.staleness,
            clock=self._values.clock,
        )

    def _rewind(self) -> None:
        for outstanding in self._outstanding:
            outstanding.sent, outstanding.push_sent = outstanding.received, False

    def _send_due(self) -> list[Action]:
        actions: list[Action] = []
        # In order only, because the backup drops a push that has a gap before it.
        waiting = [f for f in self._outstanding if not f.acknowledged]
        for index, outstanding in enumerate(waiting):
            if not outstanding.push_sent:
                by_blocks = not (self._shares_memory and outstanding.applying.client.region)
                if by_blocks and index >= N_PUSH_BUFFERS:
                    break
                actions += map(self._to_backup, self._messages(outstanding))
            if not outstanding.push_sent:
                break
        return actions

    def _messages(self, outstanding: _OutstandingPush) -> Iterator[PushBlock | ReplicatePush]:
        region = outstanding.applying.client.region
        message = outstanding.message
        if self._shares_memory and region:
            outstanding.push_sent = True
            yield msgspec.structs.replace(message, push_buffers_region=region)
            return
        bounds = outstanding.applying.client.shard_slice.bounds
        limit = min(len(bounds), outstanding.received + WINDOW_BLOCKS)
        while outstanding.sent < limit:
            start, stop = bounds[outstanding.sent]
            yield PushBlock(
                sequence=message.clock + 1,
                shard_incarnation=self.term,
                block_index=outstanding.sent,
                values=outstanding.applying.push_buffer.values[start:stop],
            )
            outstanding.sent += 1
        if outstanding.sent == len(bounds):
            outstanding.push_sent = True
            yield message

    def _to_backup(self, message: Message) -> Send:
        assert self._backup is not None
        # Push buffers stay unchanged until the backup has answered; state blocks are copies.
        lent = isinstance(message, PushBlock | StateBlock)
        return Send(receiver=self._backup, message=message, lent=lent)
