"""A shard's half of the push protocol: what its clients push, until it is applied.

    PushBlock, PushBlock, Push -> slot complete -> queue -> applied -> Acknowledge

Rules:

* If the shard has a second copy, what is applied here is held until it is applied there
  as well (`forwarding`): until then it is neither acknowledged nor told of.
* Complete pushes wait in one queue, first come, first served, at most one of each
  client, so that nobody's second push is before another's first.
* What was applied before is acknowledged again. What is here but not yet applied is
  answered by `PushBlockAck`: what is missing, or just a sign of life.
* Staleness is the clock at application minus the clock at fetch; pushes between them
  that have no element in common with this one do not count (`meetings`).
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


# Which elements the recent pushes of a shard were of: how stale a push of a part is.
#
# A push is as stale as the pushes are many that its elements have met since they were
# fetched. As long as every push is of the whole vector these are all there were, which
# the shard's clock counts. Of four machines of a replica each pushes its part: the clock
# rises by four and no element meets more than one. So pushes of elements that this one
# has none of are left out, and a replica counts alike on one machine and on several.

_N_KEPT: Final = 4096
"""Pushes; what is older counts as if its elements were the same."""

_N_KNOWN_MAX: Final = 1 << 14


@final
class PartialStaleness:
    """The recent pushes of one life of a shard."""

    def __init__(self) -> None:
        self._recent: deque[tuple[int, ShardSlice]] = deque(maxlen=_N_KEPT)
        self._in_parts = False  # whether any push was not of everything
        self._known: dict[tuple[bytes, bytes], bool] = {}

    def add(self, holding: ShardSlice, *, clock: int) -> None:
        """A push of what this client holds was applied at that clock, which rose."""
        self._in_parts |= holding.ranges is not None
        self._recent.append((clock, holding))

    def since(self, holding: ShardSlice, *, fetched_clock: int, clock: int) -> int:
        """Return how many pushes these elements have met between two clocks."""
        n_met = clock - fetched_clock
        if not self._in_parts or n_met <= 0:
            return n_met
        for met, other in reversed(self._recent):
            if met < fetched_clock:
                break
            n_met -= not self._share(holding, other)
        return n_met

    def _share(self, one: ShardSlice, other: ShardSlice) -> bool:
        """Return whether they have an element in common."""
        if one.key == other.key or one.ranges is None or other.ranges is None:
            return True
        keys = (one.key, other.key)
        if keys not in self._known:
            if len(self._known) >= _N_KNOWN_MAX:
                self._known.clear()
            self._known[keys] = one.ranges.meets(other.ranges)
        return self._known[keys]


@final
@dataclass(frozen=True, slots=True, eq=False)
class PushInProgress:
    """A complete push; until it is applied nobody else touches its slot."""

    client: Session
    slot: PushBuffer
    push: Push
    staleness: int

    def record(self) -> SessionRecord:
        """Return the client as it will be once this is applied."""
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
    """All pushes of one life of a shard."""

    def __init__(self, clients: SessionTable, replies: Replies) -> None:
        self._clients = clients
        self._replies = replies
        self._queue: deque[Address] = deque()  # clients whose next push is complete
        self._applying: PushInProgress | None = None
        self._staleness = Staleness()
        self._meetings = PartialStaleness()
        self._n_applied = 0
        self._n_refused = 0
        self._refused: dict[Address, int] = {}  # the newest of each client
        self._n_duplicates = 0
        self._bytes_in = 0

    def counters(self) -> dict[str, float]:
        """Return figures for the role's status."""
        return {
            "pushes_applied": float(self._n_applied),
            "pushes_refused": float(self._n_refused),
            "duplicates": float(self._n_duplicates),
            "bytes_in": float(self._bytes_in),
            "queue": float(len(self._queue) + (self._applying is not None)),
            **self._staleness.counters(),
        }

    def is_applying(self, name: Address) -> bool:
        """Return whether a push of this client is being applied."""
        return self._applying is not None and self._applying.client.name == name

    def refuse(self, name: Address, push: Push) -> None:
        """Count a push of a former life of this client, once: it came too late."""
        if push.sequence > self._refused.get(name, 0):  # sequences rise over all lives
            self._refused[name] = push.sequence
            self._n_refused += 1

    def take_block(self, client: Session, message: PushBlock, *, clock: int) -> list[Action]:
        """Put a block into its slot, and say how far that is filled."""
        sequence = message.sequence
        if sequence <= client.watermark:
            again = self._again(client, sequence, clock=clock)
            return [again] if message.answer else []
        received = client.take_block(message)
        self._bytes_in += message.values.nbytes
        if received is None:
            return []
        self._enqueue(client)  # its Push may have come before
        if not message.answer:
            return []
        return [self._replies.push_credit(client, sequence=sequence, received=received)]

    def take(self, client: Session, message: Push, *, clock: int) -> list[Action]:
        """Note that a push is made; it is applied in its turn."""
        sequence = message.sequence
        if sequence <= client.watermark:
            self._n_duplicates += 1
            return [self._again(client, sequence, clock=clock)]
        if message.fetched_clock > clock:
            raise RemoteProtocolError(
                f"{client.name} says that it fetched at clock {message.fetched_clock}; "
                f"the shard has come to {clock}"
            )
        slot = client.take_push(message)
        self._enqueue(client)
        n_blocks = client.n_blocks
        received = n_blocks if client.region else slot.received
        if slot.push is not message:
            self._n_duplicates += 1
        elif received == n_blocks:
            return []  # the answer is its acknowledgement
        return [self._replies.push_credit(client, sequence=sequence, received=received)]

    def begin_next(self, *, clock: int) -> PushInProgress | None:
        """Take the oldest complete push from the queue, to apply it at this clock."""
        while self._queue:
            client = self._clients.get(self._queue.popleft())
            assert client is not None
            client.queued = False
            slot = client.next_complete()
            if slot is not None and slot.push is not None:
                staleness = self._meetings.since(
                    client.holding, fetched_clock=slot.push.fetched_clock, clock=clock
                )
                self._applying = PushInProgress(client, slot, slot.push, staleness)
                return self._applying
        return None

    def end(self, *, clock: int, held: bool, rises: bool = True) -> list[Action]:
        """The push is in the values, whose clock was `clock` before.

        Unless it is `held` it is acknowledged, and its slot is free again.

        Args:
            clock: Before it was applied.
            held: Whether nobody is to know of it yet.
            rises: Whether it made the clock rise: what is collected does not.
        """
        assert self._applying is not None
        applying, self._applying = self._applying, None
        client, slot, push = applying.client, applying.slot, applying.push
        client.count_applied(push, staleness=applying.staleness, held=held)
        self._staleness.add(applying.staleness)
        if rises:
            self._meetings.add(client.holding, clock=clock)
        self._n_applied += 1
        if client.region:
            self._bytes_in += slot.values.nbytes
        self._enqueue(client)
        return [] if held else [self._replies.acknowledge(client, clock=clock + 1)]

    def settle(self, applied: PushInProgress, *, staleness: int, clock: int) -> Action:
        """This push, the oldest of its client that is held, is held no longer."""
        applied.client.settle(staleness=staleness)
        return self._replies.acknowledge(applied.client, clock=clock)

    def _again(self, client: Session, sequence: int, *, clock: int) -> Action:
        """Answer word of a push that was applied before."""
        if sequence <= client.told:
            return self._replies.acknowledge(client, clock=clock)
        n_blocks = client.n_blocks
        return self._replies.push_credit(client, sequence=sequence, received=n_blocks)

    def _enqueue(self, client: Session) -> None:
        """Let the client's next push stand in the queue, if it is complete."""
        if client.queued or self.is_applying(client.name):
            return  # in the second case it will stand there once that one is applied
        if client.next_complete() is not None:
            client.queued = True
            self._queue.append(client.name)
