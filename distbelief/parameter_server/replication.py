"""Replication of a shard: the primary keeps one backup that can take over.

    primary                                        backup
    StartSync ------------------------------------> StateAck        nothing replicated yet
    StateBlock x 16 ------------------------------> StateAck        while no push is applied
    ReplicatePush --------------------------------> PushApplied     every push from here on
    ... more windows of state blocks, one push at most between two of them ...
                                                    BackupInSync -> supervisor
    ReplicateCommand -----------------------------> PushApplied     after it was executed here
    ReplicateRows --------------------------------> PushApplied     after they were staged here

A client gets its acknowledgement when both copies have applied the push, a coordinator its answer
when both have executed the command, a worker its own when both have staged the rows. A backup that
stays silent delays it until the supervisor lets the primary continue alone (a new `Promote`). While
a backup syncs no command begins and no rows are staged, and once a coordinator has sent one no push
either: a command needs whole vectors.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, assert_never, final

import msgspec
import numpy as np

from distbelief.core.errors import MemoryGoneError, RemoteProtocolError
from distbelief.core.memory import Memory
from distbelief.core.reliable import Silence, Transfer, Window
from distbelief.core.spans import Spans
from distbelief.core.vectors import Vector, n_blocks
from distbelief.parameter_server.command_log import CommandExecutor
from distbelief.parameter_server.sessions import PushInProgress, Sessions
from distbelief.parameter_server.slices import ShardSlice
from distbelief.parameter_server.step_counts import StepCounts
from distbelief.parameter_server.store import ShardStore
from distbelief.parameter_server.tensor_copies import (
    N_PUSH_BUFFERS,
    PUSH_WORD,
    PushBuffer,
    Pushed,
    push_block,
    push_buffer_views,
)
from distbelief.protocol import AddRows, Message, SessionRecord, push_fetch as pf, replication as rp
from distbelief.protocol.role import (
    SUPERVISOR,
    Action,
    Address,
    Computed,
    Received,
    Seconds,
    Send,
    SetTimer,
)


Repeated = rp.ReplicateCommand | rp.ReplicateRows  # besides pushes
FromPrimary = rp.StartSync | rp.StateBlock | rp.ReplicatePush | Repeated | pf.PushBlock
FromBackup = rp.StateAck | pf.PushBlockAck | pf.PushApplied


# --- backup ---


@final
@dataclass(frozen=True, slots=True, eq=False)
class Replicated:
    message: rp.ReplicatePush
    pushed: Pushed
    shard_slice: ShardSlice
    touches: Vector | None  # stripes, as in the client's push


@final
class Backup:
    """A shard copy that follows a primary, or waits for one.

    The highest term seen counts; messages of any other term are dropped, so a demoted primary gets
    nothing acknowledged. Within a term the clock only rises. Invalid messages raise
    RemoteProtocolError.
    """

    def __init__(
        self, values: ShardStore, commands: CommandExecutor, *, memory: Memory, n_clients_max: int
    ) -> None:
        self._values = values
        self._commands = commands
        self._arrays: list[Vector] = []  # of the primary's commands, while it syncs
        self._memory = memory
        self._n_waiting_max = N_PUSH_BUFFERS * n_clients_max
        self._next: tuple[Address, rp.StartSync] | None = None  # waits for the running work
        self._ready = False
        self._fenced = False  # promoted: accepts nothing more
        self._queue: deque[Replicated | Repeated] = deque()
        self._applying: Replicated | rp.ReplicateCommand | None = None
        self._in_round: list[SessionRecord] = []  # of clients whose pushes are not all applied
        # By client: name and push buffers of its region.
        self._regions: dict[str, tuple[str, tuple[Vector, Vector]]] = {}
        self._push_buffers: tuple[PushBuffer, ...] = ()  # for pushes in blocks
        self.primary: Address | None = None  # set when a StartSync is accepted
        self.term = 0  # the highest term seen; 0 before the first
        # Sessions of the restored snapshot, then those of the primary.
        self.clients: dict[str, SessionRecord] = {}

    @property
    def in_sync(self) -> bool:
        return self.primary is not None and self._values.n_held == self._values.n_state_blocks

    @property
    def in_sync_term(self) -> int:
        return self.term if self.in_sync and self._next is None else 0

    @property
    def is_drained(self) -> bool:
        return self._ready and self._applying is None and not self._queue

    # ----------------------------------------------------------------------- state

    def restored(self, clients: Sequence[SessionRecord]) -> list[Action]:
        self._ready = True
        self.clients = {client.name: client for client in clients}
        return self._accept_next()

    def promote(self, term: int) -> bool:
        """Accept nothing more; return whether this copy can be primary: its values are complete."""
        can_serve = self.primary is None or (self.in_sync and self._next is None)
        self.term, self._fenced, self._next = term, True, None
        return can_serve

    def release(self) -> None:
        self._queue.clear()
        self._in_round.clear()
        self._values.drop_round()
        for region, _ in self._regions.values():
            self._memory.release(region)
        self._regions.clear()
        self._push_buffers = ()

    # ---------------------------------------------------------------- messages in

    def handle(self, sender: Address, message: FromPrimary) -> list[Action]:
        if isinstance(message, rp.StartSync):
            return self._start_sync(sender, message)
        if not self._obeys(sender, message.term):
            return []
        match message:
            case rp.StateBlock():
                return self._take_state_block(message)
            case rp.ReplicatePush() | rp.ReplicateCommand() | rp.ReplicateRows():
                return self._replicate(sender, message)
            case pf.PushBlock():
                return self._take_block(sender, message)
            case _:
                assert_never(message)

    def _start_sync(self, sender: Address, message: rp.StartSync) -> list[Action]:
        if self._fenced or message.term < self.term:
            return []
        if self._obeys(sender, message.term) and (
            # Never go back to an earlier position within a term: this copy has acknowledged later
            # pushes, and state blocks of the earlier position would lack them.
            self._values.n_held or _position(message) < self._values.position
        ):
            return [self._state_ack()]  # a repetition: the sync is under way
        if self._next is not None:
            waiting = self._next[1]
            if message.term == waiting.term and _position(message) < _position(waiting):
                return []
        self._steps(message)  # raises if the counts are invalid
        self.term, self._next = message.term, (sender, message)
        self._queue.clear()
        return self._accept_next()

    def _take_state_block(self, message: rp.StateBlock) -> list[Action]:
        values = self._values
        if (
            # A block of another position would make the values a mixture of versions.
            message.index == values.n_held < values.n_state_blocks
            and message.position == values.position
            and (message.n_more or 0) == values.n_more_blocks  # of the newest StartSync
            and self._applying is None
        ):
            values.take_state_block(message.values)
            if self.in_sync:
                if self._arrays:
                    self._commands.adopt(self._arrays)
                    self._arrays = []
                report = rp.BackupInSync(term=self.term)
                return [self._state_ack(), Send(receiver=SUPERVISOR, message=report)]
        return [self._state_ack()]

    def _replicate(self, sender: Address, message: rp.ReplicatePush | Repeated) -> list[Action]:
        # Only the push that continues the queue is accepted; the primary resends what is missing.
        n_waiting = len(self._queue) + (self._applying is not None)
        ahead = message.position - self._values.position
        if ahead < 0:
            return [self._push_applied(message.position + 1)]
        if ahead > n_waiting or (ahead == n_waiting and n_waiting >= self._n_waiting_max):
            return []
        if isinstance(message, Repeated):
            return self._queue_repeated(sender, message, is_next=ahead == n_waiting)
        table, sequence = self._values.slice_table, message.position + 1
        shard_slice = table.get(message.holds)
        if ahead < n_waiting:
            # Already queued: an empty acknowledgement of blocks proves that this copy is alive.
            return [self._block_ack(sequence, _n_blocks(message, shard_slice))]
        # Pushes are read in the client's own memory where this copy can attach it. Otherwise the
        # answer with 0 blocks makes the primary send blocks.
        if message.push_buffers_region:
            pushed, received = self._attach(message, shard_slice), 0
        else:
            pushed, received = self._from_blocks(message, shard_slice)
        if pushed is None:
            return [self._block_ack(sequence, received)]
        reason = self._values.steps.register(shard_slice)
        touches = None if message.touches is None else np.array(message.touches, np.int64)
        reason = reason or self._values.why_not(touches, shard_slice)
        if reason is not None:
            raise RemoteProtocolError(f"{sender} replicates an invalid push: {reason}")
        self._queue.append(Replicated(message, pushed, shard_slice, touches))
        return []

    def _queue_repeated(self, sender: Address, message: Repeated, *, is_next: bool) -> list[Action]:
        if not self.in_sync:
            raise RemoteProtocolError(f"{sender} sent {type(message).__name__} before its vectors")
        if not is_next:  # it is queued already: see above
            return [self._block_ack(message.position + 1, 0)]
        self._queue.append(message)
        return []

    def _take_block(self, sender: Address, message: pf.PushBlock) -> list[Action]:
        sequence, position = message.sequence, self._values.position
        if sequence <= position:
            return [self._push_applied(sequence)]
        # There are buffers for two pushes; the push at position p has sequence p + 1.
        if sequence > position + N_PUSH_BUFFERS:
            return []
        if not self._push_buffers:
            n, dtype = len(self._values.vector), self._values.vector.dtype
            self._push_buffers = PushBuffer(n, dtype), PushBuffer(n, dtype)
        push_buffer = self._push_buffers[sequence % N_PUSH_BUFFERS]
        # The client may hold a part of the shard.
        push_buffer.take(message, sender=sender, of_part=True)
        return [self._block_ack(sequence, push_buffer.received)]

    # ------------------------------------------------------------------------- work

    def stage_rows(self) -> list[Action]:
        """Stage the rows that are next in the queue, which is no work."""
        actions: list[Action] = []
        while not self._applying and self._queue and isinstance(self._queue[0], rp.ReplicateRows):
            message = self._queue.popleft()
            assert isinstance(message, rp.ReplicateRows)
            self._commands.stage(message.rows)
            actions += self._end(message.position)
        return actions

    def begin_next(self) -> Replicated | rp.ReplicateCommand | None:
        """Begin the next push or command; call `stage_rows` first."""
        if self._applying is None and self._queue:
            one = self._queue.popleft()
            assert not isinstance(one, rp.ReplicateRows)
            self._applying = one
            return one
        return None

    def end_push(self) -> list[Action]:
        assert isinstance(self._applying, Replicated)
        message = self._applying.message
        self._in_round.append(message.client)
        if not message.share.n_to_follow:
            self.clients.update((record.name, record) for record in self._in_round)
            self._in_round.clear()
        return self._end(message.position)

    def end_command(self, event: Computed) -> list[Action]:
        """Finish a command; DistBeliefError if its result is not that of the primary."""
        assert isinstance(self._applying, rp.ReplicateCommand)
        self._commands.repeated(event, self._applying)
        return self._end(self._applying.position)

    def _end(self, position: int) -> list[Action]:
        self._applying = None
        if self._next is not None:
            return self._accept_next()
        return [] if self._fenced else [self._push_applied(position + 1)]

    # ---------------------------------------------------------------------- details

    def _obeys(self, sender: Address, term: int) -> bool:
        is_current = term == self.term and sender == self.primary
        return is_current and not self._fenced and self._next is None

    def _accept_next(self) -> list[Action]:
        if self._next is None or not self._ready or self._applying is not None:
            return []
        (sender, message), self._next = self._next, None
        self.release()
        self.primary = sender
        applied = Spans.from_wire(message.applied)
        self._values.start_sync(
            clock=message.clock,
            position=_position(message),
            steps=self._steps(message),
            applied=applied,
        )
        self._commands.drop()
        self._arrays = [np.empty(n, self._values.vector.dtype) for n in message.arrays or ()]
        self._values.replicate_too(self._arrays)
        self.clients = {client.name: client for client in message.clients}
        return [self._state_ack()]

    def _from_blocks(
        self, message: rp.ReplicatePush, shard_slice: ShardSlice
    ) -> tuple[Pushed | None, int]:
        """Return what came in blocks, if it is complete, and how many blocks came."""
        sequence = message.position + 1
        if not self._push_buffers:
            return None, 0
        push_buffer = self._push_buffers[sequence % N_PUSH_BUFFERS]
        if push_buffer.sequence != sequence:
            return None, 0
        received = push_buffer.received
        if received < _n_blocks(message, shard_slice):
            return None, received
        return push_buffer.read(shard_slice, message.form), received

    def _attach(self, message: rp.ReplicatePush, shard_slice: ShardSlice) -> Pushed | None:
        name, region = message.client.name, message.push_buffers_region
        known = self._regions.get(name)
        if known is None or known[0] != region:
            if known is not None:  # its pushes are applied
                self._memory.release(known[0])
                del self._regions[name]
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
        return Pushed.of(known[1][message.slot % N_PUSH_BUFFERS], shard_slice)

    def _steps(self, message: rp.StartSync) -> StepCounts:
        if message.steps is None:
            return StepCounts(message.clock)
        return StepCounts.read(message.steps, size=len(self._values.vector))

    def _state_ack(self) -> Action:
        values = self._values
        ack = rp.StateAck(term=self.term, position=values.position, received=values.n_held)
        return self._answer(ack)

    def _push_applied(self, sequence: int) -> Action:
        clock = self._values.clock
        return self._answer(
            pf.PushApplied(sequence=sequence, term=self.term, clock=clock, staleness=0)
        )

    def _block_ack(self, sequence: int, received: int) -> Action:
        return self._answer(pf.PushBlockAck(sequence=sequence, term=self.term, received=received))

    def _answer(self, message: Message) -> Action:
        assert self.primary is not None
        return Send(receiver=self.primary, message=message)


def _position(message: rp.StartSync) -> int:
    return message.clock if message.position is msgspec.UNSET else message.position


def _n_blocks(message: rp.ReplicatePush, shard_slice: ShardSlice) -> int:
    if message.n_words is msgspec.UNSET:
        return len(shard_slice.bounds)
    return n_blocks(message.n_words, itemsize=PUSH_WORD.itemsize)


# --- primary ---

TIMER: Final = "backup"

WINDOW_STATE_BLOCKS: Final = 16
WINDOW_BLOCKS: Final = 16  # of one push, beyond those that the backup holds
TICK_SECONDS: Final = 0.125  # also the delay before a resend
SILENCE_SECONDS: Final = 0.5
STALL_SECONDS: Final = 10.0
REPORT_SECONDS: Final = 0.25  # between two BackupUnresponsive

_NOTHING: Final[Vector] = np.empty(0)


@final
@dataclass(slots=True, eq=False)
class _Outstanding:
    out: Transfer[rp.ReplicatePush] | Transfer[rp.ReplicateCommand] | Transfer[rp.ReplicateRows]
    push: PushInProgress | None  # None: a command, or rows
    answer: Send | None = None  # for a worker that adds rows
    applied: bool = False  # here
    acknowledged: bool = False  # by the backup; in a round, the last one counts

    @property
    def is_last(self) -> bool:
        message = self.out.message
        return isinstance(message, Repeated) or not message.share.n_to_follow

    @property
    def region(self) -> str:
        return "" if self.push is None else self.push.client.region


@final
class Primary:
    """Replicates pushes and commands of one shard incarnation to its backup, if it has one."""

    def __init__(self, values: ShardStore, sessions: Sessions, commands: CommandExecutor) -> None:
        self._values = values
        self._sessions = sessions
        self._commands = commands
        self._outstanding: deque[_Outstanding] = deque()
        self._silence = Silence()
        self.term = 0  # term of the latest Promote; 0 before the first
        self._begin(None, incarnation=0)

    def _begin(self, backup: Address | None, *, incarnation: int) -> None:
        self.backup = backup
        self._incarnation = incarnation  # of the backup; messages of others are dropped
        self._answered = False
        self._shares_memory = True  # assumed until the backup cannot attach a region
        self._share([])
        self._window_position: int | None = None  # of the last window of state blocks
        self._outstanding.clear()
        self._replicates_round = False  # the one in progress, from its first push on
        self._report_at: Seconds = 0.0  # no BackupUnresponsive before

    # -------------------------------------------------------- from the supervisor

    def promote(self, promote: rp.Promote, now: Seconds) -> list[Action]:
        """Replicate to the backup that `Promote` names, or continue alone if it names none."""
        actions = self.stop()
        self.term = promote.term
        if promote.backup:
            self._begin(Address(promote.backup), incarnation=promote.backup_incarnation)
            self._silence.start(now)
            actions += [self._to_backup(self._start_sync()), *self._arm(now)]
        return actions

    def stop(self) -> list[Action]:
        """Continue without the backup; clients learn of every push that is applied here."""
        actions = self._confirm_finished(here=True)
        self._begin(None, incarnation=0)
        return actions

    # ----------------------------------------------------- pushes and state blocks

    @property
    def may_apply(self) -> bool:
        # All state blocks of a window have one position, so a due window goes before the next push.
        # One push is applied between two windows: neither starves the other.
        is_sent = self._window_position == self._values.position
        return not self._is_syncing or (is_sent and not self._commands.was_driven)

    @property
    def may_command(self) -> bool:
        return not self._is_syncing

    def replicate(self, push: PushInProgress, *, n_clients: int, now: Seconds) -> list[Action]:
        # A backup that has missed the first push of a round gets none of it.
        if not self._answered or (self._sessions.is_in_round and not self._replicates_round):
            return []
        self._replicates_round = push.share.n_to_follow > 0
        shard_slice, touches = push.client.shard_slice, push.push.touches
        message = rp.ReplicatePush(
            term=self.term,
            position=self._values.position,
            client=push.record(),
            n_pushing=n_clients,
            push_buffers_region="",
            slot=push.push.sequence % N_PUSH_BUFFERS,
            holds=shard_slice.stripes,
            touches=None if touches is None else tuple(touches.tolist()),
            share=push.share,
            dealt=push.push.dealt,
            form=push.push.form,
            n_words=push.push.n_words,
            commit_token=push.push.commit_token or msgspec.UNSET,
        )
        out = Transfer(message, push.pushed.values, Window(_n_blocks(message, shard_slice)))
        return self._replicate(_Outstanding(out, push), now)

    def executed(self, now: Seconds) -> list[Action]:
        """Replicate the command that was executed here; answer it at once if there is no backup."""
        if not self._answered or self._is_syncing:  # it gets the result with the vectors
            return self._commands.answer()
        out = Transfer(self._commands.replication(term=self.term), _NOTHING, Window(0))
        return self._replicate(_Outstanding(out, None, applied=True), now)

    def staged(self, rows: AddRows, answer: Send, *, is_new: bool, now: Seconds) -> list[Action]:
        """Replicate rows that were staged here; answer at once if there is no backup."""
        if is_new and self._answered:
            position = self._values.position - 1
            message = rp.ReplicateRows(term=self.term, position=position, rows=rows)
            out = Transfer(message, _NOTHING, Window(0))
            return self._replicate(_Outstanding(out, None, answer, applied=True), now)
        waiting = [one.answer.message for one in self._outstanding if one.answer is not None]
        is_waiting = msgspec.structs.astuple(answer.message) in map(
            msgspec.structs.astuple, waiting
        )
        return [] if is_waiting else [answer]

    def _replicate(self, one: _Outstanding, now: Seconds) -> list[Action]:
        if not self._is_waiting:
            self._silence.start(now)
        self._outstanding.append(one)
        return [*self._send_due(), *self._arm(now)]

    def applied(self, *, position: int) -> bool:
        """Note that the push of this position is applied; return whether its client must wait."""
        if not self._outstanding or self._outstanding[-1].out.message.position != position:
            return False
        last = self._outstanding[-1]
        last.applied = True
        if last.is_last and last.acknowledged:
            self._outstanding.clear()
            return False
        return True

    def transfer(self, now: Seconds) -> list[Action]:
        """Send a window of state blocks if one is due; call while no push is being applied."""
        if not self._is_syncing or self._outstanding:
            return []
        values, position = self._values, self._values.position
        if self._window_position == position and self._state.received < self._state.sent:
            return []  # the last window is not acknowledged yet
        messages: list[Message] = []
        if not self._state.received:
            self._share(self._commands.state() if self._commands.has_state else [])
            messages = [self._start_sync()]
        self._state.again()
        for index in self._state.due(WINDOW_STATE_BLOCKS):
            block = rp.StateBlock(
                term=self.term,
                position=position,
                index=index,
                values=values.state_block(index),
                n_more=values.n_more_blocks or msgspec.UNSET,
            )
            messages.append(block)
        self._window_position = position
        return [*map(self._to_backup, messages), *self._arm(now)]

    def _share(self, arrays: Sequence[Vector]) -> None:
        """Append these arrays to the state that a backup gets."""
        self._arrays = tuple(map(len, arrays)) or msgspec.UNSET
        self._values.replicate_too(arrays)
        self._state = Window(self._values.n_state_blocks)

    # ------------------------------------------------------------ from the backup

    def handle(self, event: Received, message: FromBackup, now: Seconds) -> list[Action]:
        is_current = event.incarnation == self._incarnation and message.term == self.term
        if event.sender != self.backup or not is_current:
            return []
        match message:
            case rp.StateAck():
                is_news = self._state.acked(message.received)
                self._silence.heard(now, progress=is_news or not self._answered)
                self._answered = True
                if not self._is_syncing:
                    self._values.replicate_too([])  # frees them
                return []  # `transfer` sends the next window
            case pf.PushBlockAck():
                return self._blocks_acked(message, now)
            case pf.PushApplied():
                return self._push_acked(message, now)
            case _:
                assert_never(message)

    def _push_acked(self, message: pf.PushApplied, now: Seconds) -> list[Action]:
        acked = [one for one in self._outstanding if one.out.message.position < message.sequence]
        self._silence.heard(now, progress=bool(acked))
        for one in acked:
            one.acknowledged = True
        return [*self._confirm_finished(), *self._send_due()]

    def _blocks_acked(self, message: pf.PushBlockAck, now: Seconds) -> list[Action]:
        is_news = False
        for one in self._outstanding:
            if one.out.message.position + 1 != message.sequence:
                continue
            if self._shares_memory and one.region:
                if message.received < one.out.blocks.n:
                    self._shares_memory = False  # the backup cannot attach that memory
                    self._rewind()
            else:
                is_news = one.out.blocks.acked(message.received)
        self._silence.heard(now, progress=is_news)
        return self._send_due()

    # ------------------------------------------------------------------------- time

    def timer(self, now: Seconds) -> list[Action]:
        """Resend unanswered messages; report a backup that stays silent."""
        self._silence.woke(now)
        if not self._is_waiting:
            return []
        actions: list[Action] = []
        if not self._answered:
            actions.append(self._to_backup(self._start_sync()))
        else:
            silent, stalled = self._silence.silent(now), self._silence.stalled(now)
            is_silent = silent >= SILENCE_SECONDS or stalled >= STALL_SECONDS
            if is_silent and now >= self._report_at:
                self._report_at = now + REPORT_SECONDS
                report = rp.BackupUnresponsive(term=self.term)
                actions.append(Send(receiver=SUPERVISOR, message=report))
            if silent >= TICK_SECONDS:
                actions += self._resend()
        return [*actions, *self._arm(now)]

    def _resend(self) -> list[Action]:
        self._window_position = None  # makes `transfer` resend the window
        self._rewind()
        actions: list[Action] = []
        if not self._state.received:
            actions.append(self._to_backup(self._start_sync()))
        return [*actions, *self._send_due()]

    def _arm(self, now: Seconds) -> list[Action]:
        if self._silence.timer_at is not None or not self._is_waiting:
            return []
        return [SetTimer(name=TIMER, at=self._silence.expect(now + TICK_SECONDS))]

    # ---------------------------------------------------------------------- details

    @property
    def _is_syncing(self) -> bool:
        return self._answered and self._state.received < self._state.n

    @property
    def _is_waiting(self) -> bool:
        if self.backup is None:
            return False
        return not self._answered or self._is_syncing or bool(self._outstanding)

    def _start_sync(self) -> rp.StartSync:
        values = self._values
        return rp.StartSync(
            term=self.term,
            receiver_incarnation=self._incarnation,
            clock=values.clock,
            clients=self._sessions.records(),
            steps=values.steps.to_wire(),
            applied=values.applied.to_wire(),
            position=msgspec.UNSET if values.position == values.clock else values.position,
            arrays=self._arrays,
        )

    def _confirm_finished(self, *, here: bool = False) -> list[Action]:
        """Acknowledge what is applied on both copies, or just `here`; of a round all or nothing."""
        n_finished = 0
        for n, one in enumerate(self._outstanding, 1):
            if one.is_last and not (one.applied and (here or one.acknowledged)):
                break
            n_finished = n if one.is_last else n_finished
        finished = [self._outstanding.popleft() for _ in range(n_finished)]
        actions: list[Action] = []
        for one in finished:
            if one.answer is not None:
                actions.append(one.answer)
            elif one.push is None:
                actions += self._commands.answer()
            else:
                actions.append(self._sessions.confirm(one.push))
        return actions

    def _rewind(self) -> None:
        for one in self._outstanding:
            one.out.again()

    def _send_due(self) -> list[Action]:
        actions: list[Action] = []
        # In order only, because the backup drops a push that has a gap before it.
        waiting = [one for one in self._outstanding if not one.acknowledged]
        for index, one in enumerate(waiting):
            out = one.out
            if out.is_sent:
                continue
            if one.region and self._shares_memory:
                out.is_sent = True
                message = msgspec.structs.replace(out.message, push_buffers_region=one.region)
                actions.append(self._to_backup(message))
                continue
            if index >= (N_PUSH_BUFFERS if one.answer is None else WINDOW_BLOCKS):
                break
            sequence = out.message.position + 1
            block = partial(push_block, out.values, sequence=sequence, term=self.term)
            messages = out.due(block, credit=WINDOW_BLOCKS)
            actions += map(self._to_backup, messages)
            if not out.is_sent:
                break
        return actions

    def _to_backup(self, message: Message) -> Send:
        assert self.backup is not None
        # Push buffers and staged rows stay unchanged; state blocks are copies.
        lent = isinstance(message, pf.PushBlock | rp.StateBlock | rp.ReplicateRows)
        return Send(receiver=self.backup, message=message, lent=lent)
