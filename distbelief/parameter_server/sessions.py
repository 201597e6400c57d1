"""The clients of a shard: their sessions, and their pushes until they are acknowledged.

    PushBlock, PushBlock, Push -> buffer complete -> queue -> applied -> PushApplied

    sequence           1   2   3   4   5   6
                       [ applied  ]  |   |       watermark = 3
    buffer s mod 2                   0   1       room for watermark + 1 and + 2 only

A push is applied when its buffer is complete and its sequence is watermark + 1. So the pushes of
a client are applied in order, each at most once; a duplicate is only acknowledged again. Complete
pushes wait in one queue, first come, first served, with at most one entry per client. With a
backup, a push is acknowledged when both copies have applied it.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import final

import msgspec

from distbelief.core.errors import FalseClaimError, RemoteProtocolError, StorageError
from distbelief.core.memory import Memory
from distbelief.core.spans import dealt_of
from distbelief.parameter_server.members import Least, Pushers, WorkersIn
from distbelief.parameter_server.shard_config import ShardConfig
from distbelief.parameter_server.slices import NOTHING, ShardSlice
from distbelief.parameter_server.staleness import PartialPushes, Staleness
from distbelief.parameter_server.store import ShardStore
from distbelief.parameter_server.tensor_copies import (
    N_PUSH_BUFFERS,
    PushBuffer,
    Pushed,
    push_buffer_bytes,
    push_buffer_views,
)
from distbelief.parameter_server.ticks import Attendance, Floor, Rounds
from distbelief.protocol import SessionRecord, push_fetch as pf, replication as rp
from distbelief.protocol.role import Action, Address, Received, Seconds, Send


# --- one client ---


@final
@dataclass(slots=True, kw_only=True, eq=False)
class Session:
    """One client, as a shard sees it. Invalid messages raise RemoteProtocolError."""

    name: Address
    incarnation: int  # the client's current incarnation
    watermark: int = 0  # no push up to it is applied from now on. It only rises
    applied: int = 0  # pushes of this incarnation in the values
    samples: int = 0  # the client's total in the last applied push, of any incarnation
    staleness: int = 0  # of the last applied push
    n_unconfirmed: int = 0  # last pushes that are applied here but not yet on the backup
    confirmed_staleness: int = 0  # staleness of the last push that both copies have
    # Whether this incarnation has opened a session with this shard incarnation.
    opened: bool = False
    connected: bool = True  # whether the client is there, as far as the shard knows
    shard_slice: ShardSlice = NOTHING  # what it fetches and pushes of the shard's vector
    push_buffers: tuple[PushBuffer, ...] = ()  # two if it pushes, none if it only fetches
    region: str = ""  # where they lie; "" for memory of the shard that blocks fill
    parameters_region: str = ""  # where it can read the values; "" for blocks only
    queued: bool = False  # whether it is in the queue of complete pushes
    request: int = 0  # its latest fetch
    expired: int = 0  # the latest fetch whose pin expired
    n_samples: int | None = None  # of its last push
    attendance: Attendance = field(default_factory=Attendance)  # of this incarnation
    told: int = 0  # the newest floor sent to it
    tick: pf.Ticks = msgspec.UNSET  # ticks that it has ended; Unset: it is not in
    # Clients that were in with it, itself included, when one of them left; see `WorkersIn`.
    n_beside: int = 0
    # Pushes, counted on from those of the clients that it found here. Not kept over restarts.
    turn: int = 0
    dropped: int = 0  # the last push that was dropped, as its positions were applied before
    last_clock: int = 0  # of the values after its last push
    order: int = 0  # in which the shard came to know its name
    standing: tuple[bool, bool] | None = None  # whether it is gone, and pushes, as was noted

    @classmethod
    def of(cls, record: SessionRecord) -> "Session":
        return cls(**msgspec.structs.asdict(record), confirmed_staleness=record.staleness)

    @property
    def record(self) -> SessionRecord:
        return SessionRecord(
            **{name: getattr(self, name) for name in SessionRecord.__struct_fields__}
        )

    @property
    def is_placed(self) -> bool:
        return self.tick is not msgspec.UNSET

    @property
    def is_in(self) -> bool:
        """Whether other clients wait for it."""
        return self.opened and self.connected and self.is_placed

    @property
    def is_pushing(self) -> bool:
        return self.opened and self.connected and bool(self.push_buffers)

    @property
    def confirmed(self) -> int:
        return self.watermark - self.n_unconfirmed

    @property
    def push_buffer_nbytes(self) -> int:
        return sum(push_buffer.nbytes for push_buffer in self.push_buffers)

    def next_complete(self) -> PushBuffer | None:
        if not self.push_buffers:
            return None
        push_buffer = self.push_buffers[(self.watermark + 1) % N_PUSH_BUFFERS]
        is_next = push_buffer.sequence == self.watermark + 1
        return push_buffer if is_next and push_buffer.pushed is not None else None

    def count_applied(self, push: pf.Push, *, clock: int, staleness: int, held: bool) -> None:
        """Note that `push` is in the values; `held` if the backup does not have it yet."""
        self.watermark = max(self.watermark, push.sequence)
        self.applied += 1
        if not push.sets:
            self.turn += 1
            self.last_clock = clock
        self.n_samples = None if push.n_samples is msgspec.UNSET else push.n_samples
        self.samples = push.samples
        self.staleness = staleness
        if held:
            self.n_unconfirmed += 1
        else:
            self.count_confirmed(push, staleness=staleness)

    def count_confirmed(self, push: pf.Push, *, staleness: int) -> None:
        self.confirmed_staleness = staleness
        if self.tick is not msgspec.UNSET and push.tick is not msgspec.UNSET:
            self.tick = max(self.tick, push.tick)

    def push_buffer_of(self, sequence: int) -> PushBuffer:
        if not self.push_buffers:
            raise RemoteProtocolError(f"{self.name} pushes, but its OpenSession has pushes = false")
        # An unconfirmed push keeps its buffer, because the backup may still read it there.
        if not self.watermark < sequence <= self.confirmed + N_PUSH_BUFFERS:
            raise RemoteProtocolError(
                f"{self.name} sent push {sequence}; its buffers have room for pushes "
                f"{self.watermark + 1} to {self.confirmed + N_PUSH_BUFFERS}"
            )
        return self.push_buffers[sequence % N_PUSH_BUFFERS]


# --- all clients ---


@final
@dataclass(frozen=True, slots=True, eq=False)
class PushInProgress:
    """A complete push; its buffer stays unchanged until it is applied."""

    client: Session
    push_buffer: PushBuffer
    push: pf.Push
    staleness: int
    share: rp.Share = rp.WHOLE

    @property
    def pushed(self) -> Pushed:
        assert self.push_buffer.pushed is not None
        return self.push_buffer.pushed

    def record(self) -> SessionRecord:
        """Return the session record as it will be after this push."""
        is_in = self.client.tick is not msgspec.UNSET
        return msgspec.structs.replace(
            self.client.record,
            tick=self.push.tick if is_in else msgspec.UNSET,
            watermark=self.push.sequence,
            applied=self.client.applied + 1,
            samples=self.push.samples,
            staleness=self.staleness,
        )


@final
class Sessions:
    """All clients that one shard incarnation knows, at most `n_clients_max`, and their pushes.

    OpenSession may come repeatedly and late. It only raises the watermark and never takes away push
    buffers in use. A new incarnation of a client drops the buffers of the old one; only `samples`
    stays. A client that is gone keeps its buffers for a while, because it may only be cut off.
    """

    def __init__(self, config: ShardConfig, values: ShardStore, *, memory: Memory) -> None:
        self._config = config
        self._values = values
        self._memory = memory
        self.counts_ticks = config.policy.counts_ticks
        index, layout = config.index, config.layout
        self._buffers = layout.n_gradient(index), layout.shard_size(index)  # the elements
        self.term = 0  # 0 before it serves
        # In the order in which they came. All of the following know a client by `_note`.
        self._clients: dict[Address, Session] = {}
        self._n_known = 0
        self._gone = Least[int]()  # with neither a session nor a push here, by their order
        self._pushers = Pushers(self._buffers)
        self._workers: WorkersIn | None = None
        if config.policy.round is None and config.policy.divides:
            self._workers = WorkersIn((0, self._buffers[0]))
        self._n_regions = 0
        self.queue: deque[Address] = deque()  # clients whose next push is complete
        self._set_values: dict[Address, None] = {}  # clients with a push that sets values
        self.applying: PushInProgress | None = None
        self._round: deque[PushInProgress] = deque()  # still to add to the round in progress
        self._folded: list[PushInProgress] = []  # added to it
        self._busy: set[Address] = set()  # clients of all these
        self._staleness = Staleness()
        self._partial_pushes = PartialPushes()
        self._n_applied = self._n_duplicates = self._bytes_in = 0
        self._n_refused = 0
        self._refused: dict[Address, int] = {}  # the newest of each client
        self.floor = Floor(config.policy.staleness)
        self.rounds = Rounds.of(config.policy, self.floor)

    def restore(self, clients: Iterable[SessionRecord]) -> None:
        for client in map(Session.of, clients):
            self._add(client)

    def _add(self, client: Session) -> None:
        before = self._clients.get(client.name)
        client.order = self._n_known if before is None else before.order
        self._n_known += before is None
        self._clients[client.name] = client
        self._note(client)

    def _note(self, client: Session) -> None:
        """Tell all that count clients of one that has changed."""
        is_gone = not (client.opened or client.queued or client.n_unconfirmed)
        standing = is_gone, client.is_pushing
        if client.standing != standing or not client.is_pushing:  # else it has only pushed again
            client.standing = standing
            if is_gone:
                self._gone.put(client.name, client.order)
            else:
                self._gone.drop(client.name)
            self._pushers.note(client)
        if not self.counts_ticks:
            return
        self.floor.note(client)
        if self._workers is not None:
            self._workers.note(client)
        if self.rounds is not None:
            complete = client.next_complete() if client.queued else None
            self.rounds.note(client, None if complete is None else complete.push)

    def records(self) -> tuple[SessionRecord, ...]:
        return tuple(client.record for client in self._clients.values())

    def get(self, name: Address) -> Session | None:
        return self._clients.get(name)

    def counters(self) -> dict[str, float]:
        clients = self._clients.values()
        return {
            "clients": float(sum(one.opened and one.connected for one in clients)),
            "push_buffer_bytes": float(
                sum(one.push_buffer_nbytes for one in clients if one.push_buffers)
            ),
            "pushes_applied": float(self._n_applied),
            "pushes_refused": float(self._n_refused),
            "duplicates": float(self._n_duplicates),
            "bytes_in": float(self._bytes_in),
            "queue": float(len(self.queue) + len(self._round) + (self.applying is not None)),
            **self._staleness.counters(),
            **(self.floor.counters() if self.counts_ticks else {}),
        }

    def is_older(self, name: Address, incarnation: int) -> bool:
        client = self._clients.get(name)
        return client is not None and incarnation < client.incarnation

    def why_not(self, event: Received, request: pf.OpenSession) -> str | None:
        """Return why this session can never be opened, or None."""
        self.floor.check(event.sender, self._clients.get(event.sender), request.tick)
        if request.layout != self._config.layout.fingerprint:
            return "your layout is another: use one model and number of shards on both sides"
        try:
            shard_slice = self._values.slice_table.get(request.holds)
        except RemoteProtocolError as error:
            return f"the elements that you hold are invalid: {error}"
        client = self._clients.get(event.sender)
        is_open = client is not None and client.opened and client.incarnation == event.incarnation
        if client is not None and is_open and client.shard_slice.key != shard_slice.key:
            return (
                f"you held {client.shard_slice.n_elements} elements and now hold "
                f"{shard_slice.n_elements} others: restart the client to change what it holds"
            )
        if client is None and self._is_full and self._gone.first() is None:
            return f"it serves {len(self._clients)} clients: use fewer, or raise n_clients_max"
        return self._values.steps.register(shard_slice) if request.pushes else None

    def must_wait(self, event: Received, request: pf.OpenSession) -> bool:
        """Return whether OpenSession would replace a push buffer that is still being read."""
        client = self._clients.get(event.sender)
        is_unconfirmed = client is not None and client.n_unconfirmed > 0
        if not (is_unconfirmed or self.is_applying(event.sender)):
            return False
        return (
            client is None
            or event.incarnation > client.incarnation
            or request.next_sequence - 1 > client.watermark
            or self._needs_push_buffers(client, request)
        )

    def admit(
        self, name: Address, incarnation: int, request: pf.OpenSession, *, region: str, now: Seconds
    ) -> tuple[Session, str | None]:
        """Open a session; return it, and a warning if shared memory could not be created."""
        client = self._clients.get(name)
        oldest_gone = self._gone.first()
        if client is None and self._is_full and oldest_gone is not None:
            self._forget(oldest_gone[1])
        if client is None or incarnation > client.incarnation:
            samples, queued = 0, False
            if client is not None:
                # `samples` tells the new incarnation where to resume; the queue holds the name.
                samples, queued = client.samples, client.queued
                self._release(client)
                self._note(client)
            turn = self._pushers.next_turn if request.pushes else 0
            client = Session(
                name=name, incarnation=incarnation, samples=samples, queued=queued, turn=turn
            )
            self._add(client)
        client.shard_slice = self._values.slice_table.get(request.holds)
        warning = None
        if self._needs_push_buffers(client, request):
            self._release(client)
            warning = self._lend_push_buffers(client, region, shared=self._shares_pushes(request))
        client.opened = client.connected = True
        client.parameters_region = self._values.region if self._shares(request) else ""
        # A late OpenSession must not lower the watermark.
        client.watermark = max(client.watermark, request.next_sequence - 1)
        self._note(client)
        if self.counts_ticks:
            self._enter(client, request, now)
        return client, warning

    def _forget(self, name: Address) -> None:
        """Make room: a client that is gone becomes unknown."""
        del self._clients[name]
        self._refused.pop(name, None)
        self._set_values.pop(name, None)
        self._gone.drop(name)
        self._pushers.drop(name)

    def lost(self, client: Session) -> None:
        """A client is gone, as far as the shard knows."""
        client.connected = False
        self._note(client)

    def heard(self, client: Session) -> None:
        """A message came from a client."""
        if not client.connected:
            client.connected = True
            self._note(client)

    def take_back(self, client: Session) -> None:
        """Release the push buffers and the pushes in them; the client must open a new session."""
        if client.region:
            self._memory.disown(client.region)  # the client may be alive and still use it
        client.push_buffers, client.region = (), ""
        client.opened = False
        self._note(client)

    def release(self) -> None:
        for client in self._clients.values():
            self._release(client)

    @property
    def _is_full(self) -> bool:
        return len(self._clients) >= self._config.n_clients_max

    def _shares(self, request: pf.OpenSession) -> bool:
        return bool(request.host) and request.host == self._memory.host

    def _shares_pushes(self, request: pf.OpenSession) -> bool:
        return self._shares(request) and not request.encodes

    def _needs_push_buffers(self, client: Session, request: pf.OpenSession) -> bool:
        if not request.pushes:
            return False
        # A client without the memory it was lent repeats OpenSession without a host.
        return not client.push_buffers or (bool(client.region) and not self._shares_pushes(request))

    def _lend_push_buffers(self, client: Session, region: str, *, shared: bool) -> str | None:
        n_elements, dtype = client.shard_slice.n_elements, client.shard_slice.dtype
        client.push_buffers = PushBuffer(n_elements, dtype), PushBuffer(n_elements, dtype)
        if not shared:
            return None
        name = f"{region}-{self._n_regions}"
        self._n_regions += 1
        n_bytes = push_buffer_bytes(n_elements, itemsize=dtype.itemsize)
        try:
            memory = self._memory.create(name, n_bytes=n_bytes)
        except StorageError as error:
            return f"{client.name} pushes by messages, not shared memory: {error}"
        client.region = name
        views = push_buffer_views(memory, n_elements=n_elements, dtype=dtype)
        one, other = (PushBuffer(n_elements, dtype, shared=view) for view in views)
        client.push_buffers = one, other
        return None

    def _release(self, client: Session) -> None:
        if client.region:
            self._memory.release(client.region)
        client.push_buffers, client.region = (), ""

    def is_applying(self, name: Address) -> bool:
        return name in self._busy

    def n_averaged(self, client: Session, push: pf.Push) -> int:
        """Return over how many clients the buffers of this push, if any, are averaged."""
        start, stop = self._buffers
        if start == stop:
            return 1
        return self._pushers.n_averaged(client, since=push.fetched_clock)

    def count_refused(self, name: Address, push: pf.Push) -> None:
        """Count a push of a former incarnation of this client, once."""
        if push.sequence > self._refused.get(name, 0):  # sequences rise over all incarnations
            self._refused[name] = push.sequence
            self._n_refused += 1

    def take_block(self, client: Session, message: pf.PushBlock) -> list[Action]:
        sequence = message.sequence
        if sequence <= client.watermark:
            return [self._answer_duplicate(client, sequence)] if message.answer else []
        push_buffer = client.push_buffer_of(sequence)
        if client.region:
            raise RemoteProtocolError(
                f"{client.name} sent a block of push {sequence}, with buffers in shared memory"
            )
        is_in = push_buffer.take(message, sender=client.name)
        self._bytes_in += message.values.nbytes
        if not is_in:
            return []  # an earlier one is missing, or its attempt was given up
        is_whole = self._complete(client, push_buffer)  # the Push may have overtaken this block
        return [self._block_ack(client, push_buffer)] if message.answer or is_whole else []

    def take_push(self, client: Session, message: pf.Push) -> list[Action]:
        sequence = message.sequence
        if sequence <= client.watermark:
            self._n_duplicates += 1
            return [self._answer_duplicate(client, sequence)]
        if message.fetched_clock > self._values.clock:
            raise RemoteProtocolError(
                f"{client.name} sent fetched_clock {message.fetched_clock} at {self._values.clock}"
            )
        self._check_claims(client, message)
        reason = self._values.why_not(message.touches, client.shard_slice)
        reason = reason or self._values.why_not_at(message.rates)
        if reason is not None:
            return [self.refuse(client.name, reason, for_good=True)]
        push_buffer = client.push_buffer_of(sequence)
        is_encoded = message.n_words is not msgspec.UNSET
        if is_encoded and (client.region or message.commit_token or message.sets):
            raise RemoteProtocolError(
                f"{client.name} sent push {sequence} in words: use numbers in shared memory, for "
                "values, and for sums of a batch"
            )
        if not push_buffer.lend(sequence, message.n_words, message.attempt):
            raise RemoteProtocolError(f"{client.name} closed push {sequence}, which it took back")
        is_news = push_buffer.push is None
        push_buffer.push = push_buffer.push or message
        is_whole = self._complete(client, push_buffer)
        if not is_news:
            self._n_duplicates += 1
        elif push_buffer.pushed is not None and not is_whole:
            return []  # the client gets PushApplied later
        return [self._block_ack(client, push_buffer)]

    def _complete(self, client: Session, push_buffer: PushBuffer) -> bool:
        """Queue a push, if all of it is here; RemoteProtocolError if it is invalid.

        Return whether it has come to wait for those of others. The client must be told so, or it
        sends it again.
        """
        push, is_new = push_buffer.push, False
        if push is not None and push_buffer.pushed is None:
            is_new = push_buffer.complete(client.shard_slice)
            if is_new and push.sets:
                self._set_values[client.name] = None
        self._enqueue(client)
        return is_new and self.rounds is not None

    def _check_claims(self, client: Session, message: pf.Push) -> None:
        """Raise FalseClaimError for a push of what nobody dealt, or of a tick far ahead."""
        if message.tick is not msgspec.UNSET:
            self.floor.check(client.name, client, message.tick)
        if message.dealt is msgspec.UNSET:
            return
        (start, stop), n = dealt_of(message.dealt), self._config.n_samples
        is_of_one_epoch = not n or start // n == (stop - 1) // n
        if not (self._config.deals and start < stop and is_of_one_epoch):
            raise FalseClaimError(
                f"{client.name} sent a push of positions {start} to {stop}, which nobody dealt"
            )

    def begin_push(self, now: Seconds, *, is_last: bool = False) -> PushInProgress | None:
        """Return the next push to apply, or to add to a round; `is_last`: no more come."""
        setting = None if self._round else self._setting
        if setting is not None:  # by itself, also where there are rounds
            self.queue.remove(setting.client.name)
            self._set_values.pop(setting.client.name)
            setting.client.queued = False
            self._note(setting.client)
            self._busy.add(setting.client.name)
            self._round.append(setting)
        elif not self._round and self._may_take(now, is_last=is_last):
            self._take_queued(now)
        if not self._round:
            return None
        self.applying = self._round.popleft()
        return self.applying

    @property
    def _setting(self) -> PushInProgress | None:
        """A complete push that sets values."""
        for client in map(self._clients.__getitem__, self._set_values):
            complete = client.next_complete() if client.queued else None
            if complete is not None and complete.push is not None and complete.push.sets:
                return PushInProgress(client, complete, complete.push, 0, rp.Share(sets=True))
        return None

    def _take_queued(self, now: Seconds) -> None:
        """Take the oldest complete push, or those of a round in the order of their names."""
        rounds = self.rounds
        taken: list[PushInProgress] = []
        while self.queue and (rounds is not None or not taken):
            client = self._clients[self.queue.popleft()]
            client.queued = False
            self._note(client)
            push_buffer = client.next_complete()
            if push_buffer is not None and push_buffer.push is not None:
                self._busy.add(client.name)
                push = push_buffer.push
                since, partial = push.fetched_clock, self._partial_pushes
                staleness = self._values.clock - since
                if partial.are_some:
                    staleness -= partial.n_elsewhere(client.shard_slice, since=since)
                share = rp.WHOLE if push.commit_token else self._share_of(client, push, staleness)
                taken.append(PushInProgress(client, push_buffer, push, staleness, share))
        if rounds is not None:
            rounds.end(now)
            taken.sort(key=lambda one: one.client.name)
            taken = [
                replace(one, share=msgspec.structs.replace(one.share, n_to_follow=len(taken) - n))
                for n, one in enumerate(taken, 1)
            ]
        self._round += taken

    def end_push(self, *, held: bool, staged: bool = False) -> list[Action]:
        """Finish the push in progress: acknowledge it, unless it is `held` for the backup.

        A push of a round is finished with the last one. A `staged` push is a chunk gradient, which
        does not raise the clock.
        """
        assert self.applying is not None
        self._folded.append(self.applying)
        self.applying = None
        if self._round:
            return []
        finished, self._folded = self._folded, []
        self._busy.clear()
        first_clock = self._values.clock - len(finished)
        for index, applied in enumerate(finished):
            client = applied.client
            clock = first_clock + index + 1
            client.count_applied(applied.push, clock=clock, staleness=applied.staleness, held=held)
            self._staleness.add(applied.staleness)
            if client.shard_slice.ranges is not None and not staged:
                self._partial_pushes.add(client.shard_slice, clock=first_clock + index)
            self._n_applied += 1
            if applied.push_buffer.shared is not None:
                self._bytes_in += applied.push_buffer.shared.nbytes
            if not held and applied.push.n_words is not msgspec.UNSET:
                applied.push_buffer.settled()
            self._note(client)
            self._enqueue(client)
        return [] if held else [self._push_applied(applied.client) for applied in finished]

    def confirm(self, push: PushInProgress) -> Action:
        """Acknowledge the oldest push that waited for the backup."""
        client = push.client
        assert client.n_unconfirmed > 0, client
        client.n_unconfirmed -= 1
        client.count_confirmed(push.push, staleness=push.staleness)
        if push.push.n_words is not msgspec.UNSET:
            push.push_buffer.settled()
        self._note(client)
        return self._push_applied(client)

    def _answer_duplicate(self, client: Session, sequence: int) -> Action:
        if sequence <= client.confirmed:
            return self._push_applied(client)
        # Applied here alone, so it is in its buffer still.
        return self._block_ack(client, client.push_buffers[sequence % N_PUSH_BUFFERS])

    def _enqueue(self, client: Session) -> None:
        if client.queued or self.is_applying(client.name):
            return  # `end_push` queues the next push of a client whose push is being applied
        if client.next_complete() is not None:
            client.queued = True
            self.queue.append(client.name)
            self._note(client)

    # --------------------------------------------------------------------- rounds

    @property
    def is_in_round(self) -> bool:
        """Whether some pushes of a round are added, and others are not."""
        return bool(self._folded)

    def _may_take(self, now: Seconds, *, is_last: bool) -> bool:
        """Return whether the complete pushes make a round, if there are rounds."""
        if self.rounds is None or is_last:
            return True
        return bool(self.queue) and self.rounds.may_end(now)

    def round_calls(self, rounds: Rounds) -> list[Action]:
        """Ask those whose pushes a round waits for to push what they have, where these may."""
        return rounds.calls(term=self.term)

    def _share_of(self, client: Session, push: pf.Push, staleness: int) -> rp.Share:
        policy = self._config.policy
        n_samples = 1 if push.n_samples is msgspec.UNSET else push.n_samples
        if policy.round is not None:
            return rp.Share(weight=float(n_samples) if policy.weight == "samples" else 1.0)
        if self._workers is None:
            return rp.Share(rates=push.rates)
        n_clients = self._workers.divisor(client)
        others = self._workers.others_samples(client)
        scale = policy.scale(staleness, n_clients, n_samples, others)
        return rp.Share(scale=scale, rates=push.rates)

    # ---------------------------------------------------------------------- ticks

    def _enter(self, client: Session, request: pf.OpenSession, now: Seconds) -> None:
        attendance = Attendance(request.entries or 0)
        if attendance.changes < client.attendance.changes:
            return  # a late message
        client.attendance = attendance
        if attendance.is_in:
            ahead = 0
            if self.rounds is not None and not client.is_in:
                ahead = self.rounds.n_ahead(client.name, now, ends=bool(self._busy))
            self.floor.place(client, request.tick, ahead=ahead)
            self._note(client)
            return
        if self._workers is not None and client.is_in:
            self._workers.leave()
        client.tick = msgspec.UNSET
        self._note(client)

    def place_new(self) -> list[Action]:
        """Let clients in that have come before there was a floor, and tell them."""
        self.floor.awaits_clients = False
        self.floor.rise()
        new = [one for one in self._clients.values() if one.attendance.is_in and not one.is_placed]
        for client in new:
            self.floor.place(client, msgspec.UNSET)
            self._note(client)
        return [self.session_opened(client) for client in new if client.opened]

    def tell_floor(self) -> list[Action]:
        """Tell a new floor to the clients that could not begin a tick at the old one."""
        self.floor.rise()
        return self.floor.news(term=self.term)

    def _told_floor(self, client: Session) -> tuple[pf.Ticks, str | msgspec.UnsetType]:
        if not self.counts_ticks:
            return msgspec.UNSET, msgspec.UNSET
        self.floor.rise()
        return self.floor.tell(client)

    # ------------------------------------------------------------------- messages

    def session_opened(self, client: Session) -> Send:
        floor, behind = self._told_floor(client)
        opened = pf.SessionOpened(
            term=self.term,
            clock=self._values.clock,
            samples=client.samples,
            watermark=client.confirmed,
            applied=client.applied - client.n_unconfirmed,
            parameters_region=client.parameters_region,
            push_buffers_region=client.region,
            entries=client.attendance.changes or msgspec.UNSET,
            tick=client.tick,
            floor=floor,
            behind=behind,
        )
        return Send(receiver=client.name, message=opened)

    def refuse(
        self, receiver: Address, reason: str, *, for_good: bool = False, layout: str | None = None
    ) -> Send:
        """Refuse with a reason; unless `for_good`, the client opens a session and tries again.

        To a client with another `layout` than this shard's, show its tensors.
        """
        text = f"shard {self._config.index}, term {self.term}: {reason}"
        own = self._config.layout
        differs = layout is not None and layout != own.fingerprint
        refused = pf.SessionRefused(
            reason=text, for_good=for_good, tensors=own.shown() if differs else msgspec.UNSET
        )
        return Send(receiver=receiver, message=refused)

    def _push_applied(self, client: Session) -> Send:
        floor, behind = self._told_floor(client)
        applied = pf.PushApplied(
            sequence=client.confirmed,
            term=self.term,
            clock=self._values.clock,
            staleness=client.confirmed_staleness,
            floor=floor,
            behind=behind,
        )
        if client.dropped and client.dropped == client.confirmed:
            applied = msgspec.structs.replace(applied, dropped=True)
        if self.rounds is not None:
            late = "" if self.rounds.late == client.name else self.rounds.late
            applied = msgspec.structs.replace(applied, late=late)
        return Send(receiver=client.name, message=applied)

    def _block_ack(self, client: Session, push_buffer: PushBuffer) -> Send:
        waits = self.rounds is not None and push_buffer.pushed is not None
        ack = pf.PushBlockAck(
            sequence=push_buffer.sequence,
            term=self.term,
            received=push_buffer.n_received,
            attempt=push_buffer.attempt,
            waits=waits or msgspec.UNSET,
        )
        return Send(receiver=client.name, message=ack)

    def validate(self) -> None:
        """Check what holds after every event; only simulations call it."""
        assert len(set(self.queue)) == len(self.queue), f"waits twice: {self.queue}"
        assert self._clients.keys() >= set(self.queue), f"unknown clients wait: {self.queue}"
        self.floor.validate(self._clients.values() if self.counts_ticks else ())
        applying = [] if self.applying is None else [self.applying]
        names = [push.client.name for push in (*self._folded, *applying, *self._round)]
        if self._config.policy.round is not None and applying:
            assert names == sorted(set(names)), f"a round has the pushes of {names}"
