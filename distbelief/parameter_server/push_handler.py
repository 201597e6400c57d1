"""Pushes of a shard: received, queued, applied, acknowledged.

    PushBlock, PushBlock, Push -> buffer complete -> queue -> applied -> PushApplied

Complete pushes wait in one first-come, first-served queue with at most one entry per client, so
a client's second push never overtakes another's first. With a backup, a push is acknowledged when
both copies have applied it. A duplicate is acknowledged again and never applied again.
"""

from collections import deque
from dataclasses import dataclass
from typing import Final, final

from distbelief.errors import RemoteProtocolError
from distbelief.parameter_server.session_state import PushBuffer, Session, Staleness
from distbelief.parameter_server.sessions import Replies, SessionTable
from distbelief.parameter_server.slices import ShardSlice
from distbelief.protocol import Push, PushBlock, SessionRecord
from distbelief.roles.role import Action, Address


# --- staleness of partial pushes ---

_N_KEPT: Final = 4096
"""Recent pushes; an older one counts as overlapping."""

_N_KNOWN_MAX: Final = 1 << 14


@final
class PartialStaleness:
    """Staleness of pushes that cover a part of the shard.

    A push is as stale as the number of pushes that its own elements received since the fetch. The
    ranks of a partitioned replica push disjoint parts, so the clock rises once per rank while each
    element receives one push. Counting overlaps gives the same staleness on one rank or several.
    """

    def __init__(self) -> None:
        self._recent: deque[tuple[int, ShardSlice]] = deque(maxlen=_N_KEPT)
        self._in_parts = False  # whether any push was not of everything
        self._known: dict[tuple[bytes, bytes], bool] = {}

    def add(self, shard_slice: ShardSlice, *, clock: int) -> None:
        self._in_parts |= shard_slice.ranges is not None
        self._recent.append((clock, shard_slice))

    def since(self, shard_slice: ShardSlice, *, fetched_clock: int, clock: int) -> int:
        """Return how many pushes these elements received between two clocks."""
        n_pushes = clock - fetched_clock
        # As long as every push covers everything, the clock is exact.
        if not self._in_parts or n_pushes <= 0:
            return n_pushes
        for applied_at, other in reversed(self._recent):
            if applied_at < fetched_clock:
                break
            n_pushes -= not self._overlap(shard_slice, other)
        return n_pushes

    def _overlap(self, one: ShardSlice, other: ShardSlice) -> bool:
        if one.key == other.key or one.ranges is None or other.ranges is None:
            return True
        keys = (one.key, other.key)
        if keys not in self._known:
            if len(self._known) >= _N_KNOWN_MAX:
                self._known.clear()
            self._known[keys] = one.ranges.overlaps(other.ranges)
        return self._known[keys]


@final
@dataclass(frozen=True, slots=True, eq=False)
class PushInProgress:
    """A complete push; its buffer stays unchanged until it is applied."""

    client: Session
    push_buffer: PushBuffer
    push: Push
    staleness: int

    def record(self) -> SessionRecord:
        """Return the session record as it will be after this push."""
        return SessionRecord(
            name=self.client.name,
            incarnation=self.client.incarnation,
            watermark=self.push.sequence,
            applied=self.client.applied + 1,
            samples=self.push.samples,
            staleness=self.staleness,
        )


@final
class PushHandler:
    def __init__(self, clients: SessionTable, replies: Replies) -> None:
        self._clients = clients
        self._replies = replies
        self._queue: deque[Address] = deque()  # clients whose next push is complete
        self._applying: PushInProgress | None = None
        self._staleness = Staleness()
        self._partial_staleness = PartialStaleness()
        self._n_applied = 0
        self._n_refused = 0
        self._refused: dict[Address, int] = {}  # the newest of each client
        self._n_duplicates = 0
        self._bytes_in = 0

    def counters(self) -> dict[str, float]:
        return {
            "pushes_applied": float(self._n_applied),
            "pushes_refused": float(self._n_refused),
            "duplicates": float(self._n_duplicates),
            "bytes_in": float(self._bytes_in),
            "queue": float(len(self._queue) + (self._applying is not None)),
            **self._staleness.counters(),
        }

    def is_applying(self, name: Address) -> bool:
        return self._applying is not None and self._applying.client.name == name

    def refuse(self, name: Address, push: Push) -> None:
        """Count a push of a former incarnation of this client, once."""
        if push.sequence > self._refused.get(name, 0):  # sequences rise over all incarnations
            self._refused[name] = push.sequence
            self._n_refused += 1

    def take_block(self, client: Session, message: PushBlock, *, clock: int) -> list[Action]:
        sequence = message.sequence
        if sequence <= client.watermark:
            again = self._answer_duplicate(client, sequence, clock=clock)
            return [again] if message.answer else []
        received = client.take_block(message)
        self._bytes_in += message.values.nbytes
        if received is None:
            return []
        self._enqueue(client)  # the Push may have overtaken this block
        if not message.answer:
            return []
        return [self._replies.block_ack(client, sequence=sequence, received=received)]

    def take(self, client: Session, message: Push, *, clock: int) -> list[Action]:
        sequence = message.sequence
        if sequence <= client.watermark:
            self._n_duplicates += 1
            return [self._answer_duplicate(client, sequence, clock=clock)]
        if message.fetched_clock > clock:
            raise RemoteProtocolError(
                f"{client.name} sent fetched_clock {message.fetched_clock}; "
                f"the shard's clock is {clock}"
            )
        push_buffer = client.take_push(message)
        self._enqueue(client)
        n_blocks = client.n_blocks
        received = n_blocks if client.region else push_buffer.received
        if push_buffer.push is not message:
            self._n_duplicates += 1
        elif received == n_blocks:
            return []  # the client gets PushApplied later
        return [self._replies.block_ack(client, sequence=sequence, received=received)]

    def begin_next(self, *, clock: int) -> PushInProgress | None:
        while self._queue:
            client = self._clients.get(self._queue.popleft())
            assert client is not None
            client.queued = False
            push_buffer = client.next_complete()
            if push_buffer is not None and push_buffer.push is not None:
                staleness = self._partial_staleness.since(
                    client.shard_slice, fetched_clock=push_buffer.push.fetched_clock, clock=clock
                )
                self._applying = PushInProgress(client, push_buffer, push_buffer.push, staleness)
                return self._applying
        return None

    def end(self, *, clock: int, held: bool, rises: bool = True) -> list[Action]:
        """Finish the push in progress: acknowledge it, unless the backup does not have it yet.

        Args:
            clock: The clock before the push.
            held: Whether the client must not know yet.
            rises: Whether the clock rose; a staged chunk gradient does not raise it.
        """
        assert self._applying is not None
        applying, self._applying = self._applying, None
        client, push_buffer, push = applying.client, applying.push_buffer, applying.push
        client.count_applied(push, staleness=applying.staleness, held=held)
        self._staleness.add(applying.staleness)
        if rises:
            self._partial_staleness.add(client.shard_slice, clock=clock)
        self._n_applied += 1
        if client.region:
            self._bytes_in += push_buffer.values.nbytes
        self._enqueue(client)
        return [] if held else [self._replies.push_applied(client, clock=clock + 1)]

    def confirm(self, applied: PushInProgress, *, staleness: int, clock: int) -> Action:
        applied.client.confirm(staleness=staleness)
        return self._replies.push_applied(applied.client, clock=clock)

    def _answer_duplicate(self, client: Session, sequence: int, *, clock: int) -> Action:
        if sequence <= client.confirmed:
            return self._replies.push_applied(client, clock=clock)
        n_blocks = client.n_blocks
        return self._replies.block_ack(client, sequence=sequence, received=n_blocks)

    def _enqueue(self, client: Session) -> None:
        if client.queued or self.is_applying(client.name):
            return  # `end` queues the next push of a client whose push is being applied
        if client.next_complete() is not None:
            client.queued = True
            self._queue.append(client.name)
