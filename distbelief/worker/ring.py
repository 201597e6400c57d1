"""All-reduce over a ring: one vector of each member in, their sum out, the same bits everywhere.

Gibiansky 2017 ("Bringing HPC techniques to deep learning"); Sergeev & Del Balso 2018 (Horovod).
A vector of K bytes is cut into N near-equal chunks. Member j always sends to j + 1:

    step s    0      1     ...   N - 2  |  N - 1   ...   2N - 3
    sends     j     j - 1        j+2    |  j + 1          j + 3      the chunk (j - s) mod N
    receives  j-1   j - 2        j + 1  |  j              j + 2      the chunk (j - 1 - s) mod N
              and adds its own          |  and keeps it

So chunk c is summed once, in the order c, c + 1, ..., and then copied: all members end with the
same bits. Each sends and receives 2 K (N - 1) / N bytes, whatever N is. With two members every
element is the sum of the first's and the second's. Gradients of a step are one vector: small
tensors need no fusion of their own.

A chunk travels in blocks, and a member sends its own chunk and then each block that it has just
received: steps overlap block by block, and the card is busy in both directions. Blocks are numbered
within a round and acknowledged as a count. A member that has not begun holds those that come early,
as many as it takes under way.

Rounds are numbered within a generation, which has one list of members. When that changes, the round
under way ends without a sum, and late messages of it are dropped. A member may have had that sum
already when another has not: so all return to what they last had in common.

The supervisor decides on the members: a neighbour that is silent may compute.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, assert_never, final

import numpy as np

from distbelief.core.errors import LocalProtocolError, RemoteProtocolError
from distbelief.core.reliable import AnswerTimer, Window
from distbelief.core.vectors import Vector, block_bounds
from distbelief.protocol.ring import RingAck, RingBlock, RingFailed, RingMembers
from distbelief.protocol.role import (
    Action,
    Address,
    CancelTimer,
    Received,
    Seconds,
    Send,
    SetTimer,
    message_types,
)


TIMER: Final = "ring"
CREDIT_BLOCKS: Final = 16  # under way to one neighbour
ACK_EVERY: Final = CREDIT_BLOCKS // 4
RETRY_SECONDS: Final = 0.5
RETRY_SECONDS_MAX: Final = 4.0
PAUSE_SECONDS_MAX: Final = 10.0  # before a repetition, over a slow link

RingMessage = RingBlock | RingAck | RingFailed


class Piece(NamedTuple):
    """A block of a step: elements [start, stop) of the vector."""

    step: int
    start: int
    stop: int


def chunk_of(n_elements: int, n_members: int, index: int) -> tuple[int, int]:
    """Return (start, stop) of a chunk; the first ones are an element longer if need be."""
    size, n_longer = divmod(n_elements, n_members)
    start = index * size + min(index, n_longer)
    return start, start + size + (index < n_longer)


def pieces_of(rank: int, n_members: int, values: Vector) -> Iterator[Piece]:
    """Yield the blocks of a round in order: its own chunk (step -1), then what it receives.

    It sends all but those of the last step.
    """
    for step in range(-1, 2 * (n_members - 1)):
        chunk = (rank - 1 - step) % n_members
        first, end = chunk_of(len(values), n_members, chunk)
        # An empty chunk has one empty block, so that every step has a message.
        for start, stop in block_bounds(end - first, itemsize=values.itemsize):
            yield Piece(step, first + start, first + stop)


@final
@dataclass(slots=True, eq=False)
class _Round:
    """A round that has begun."""

    values: Vector  # become the sum
    vector: str
    n_members: int
    received: Sequence[Piece]  # all that will be
    sent: Sequence[Piece]
    n_taken: int = 0  # blocks that are in `values`
    n_sent: int = 0  # blocks, each counted once
    limit: int = CREDIT_BLOCKS  # that the right neighbour takes
    window: Window = field(init=False)  # of what can be sent so far

    def __post_init__(self) -> None:
        self.window = Window(sum(piece.step < 0 for piece in self.sent))  # its own chunk

    @classmethod
    def of(cls, values: Vector, vector: str, *, rank: int, n_members: int) -> "_Round":
        pieces = list(pieces_of(rank, n_members, values))
        last = 2 * (n_members - 1) - 1
        received = [piece for piece in pieces if piece.step >= 0]
        sent = [piece for piece in pieces if piece.step < last]
        return cls(values, vector, n_members, received, sent)

    @property
    def is_complete(self) -> bool:
        return self.n_taken == len(self.received)

    @property
    def is_settled(self) -> bool:
        return self.is_complete and self.window.received == len(self.sent)

    def take(self, message: RingBlock) -> bool:
        """Add the next block, or keep it; return whether it is of such a vector as here."""
        piece, values = self.received[self.n_taken], message.values
        room = self.values[piece.start : piece.stop]
        if message.vector != self.vector or (values.dtype, len(values)) != (room.dtype, len(room)):
            return False
        if piece.step < self.n_members - 1:
            with np.errstate(all="ignore"):  # the user of the sum checks it
                np.add(values, room, out=room)
        else:
            room[:] = values
        self.n_taken += 1
        self.window.n = min(self.window.n + 1, len(self.sent))  # it may be passed on
        return True


@final
class Ring:
    """One member of a ring. Its owner passes on events, and performs the returned actions.

        join       a generation begins           begin    a round, with this member's vector
        complete   the vector is the sum     settled  nobody reads it any more: it may change

    Attributes:
        generation: Of the newest list of members; 0: none has come.
        members: In order; none if this one is not among them.
        round: The last that has begun here, in this generation.
        failure: Why there will be no sum in this generation, as for vectors of different lengths.
        n_bytes: Of values sent, each block counted once.
        n_again: Blocks sent again.
    """

    accepts = message_types(RingMessage | RingMembers)

    def __init__(self, name: Address) -> None:
        self._name = name
        self._incarnation = 0
        self.generation = self.round = 0
        self.members: Sequence[Address] = ()
        self.failure: str | None = None
        self.n_bytes = self.n_again = 0
        self._rank = 0
        self._left = self._right = name
        self._run: _Round | None = None
        self._early: deque[RingBlock] = deque()  # of the next round
        self._untold: set[Address] = set()  # neighbours that may not know of a failure
        self._dropped: Vector | None = None  # of the generation before: messages may still be read
        self._answer = _answer_timer()

    def start(self, incarnation: int) -> None:
        self._incarnation = incarnation

    # --- generations

    def join(self, message: RingMembers) -> list[Action]:
        """Begin a generation, if it is a newer one: drop the round that is under way.

        Messages with the vector of that round may not have left yet: begin with another vector.
        """
        if message.generation <= self.generation:
            return []
        if not self.is_settled and self._run is not None:
            self._dropped = self._run.values
        self.generation, self.round, self.failure = message.generation, 0, None
        self._run = None
        self._early.clear()
        self._untold.clear()
        self._answer = _answer_timer()
        places = [(one.name, one.incarnation) for one in message.members]
        own = self._name, self._incarnation
        self.members = [Address(name) for name, _ in places] if own in places else []
        if self.members:
            self._rank, n = places.index(own), len(places)
            self._left = self.members[(self._rank - 1) % n]
            self._right = self.members[(self._rank + 1) % n]
        return [CancelTimer(name=TIMER)]

    # --- rounds

    @property
    def is_complete(self) -> bool:
        """Whether the vector of the round that has begun is the sum."""
        return self._run is not None and self._run.is_complete

    @property
    def is_settled(self) -> bool:
        """Whether that vector may be changed, and another round begin."""
        return self._run is None or self._run.is_settled

    @property
    def is_wanted(self) -> bool:
        """Whether another member has begun a round that has not begun here."""
        return bool(self._early)

    def begin(self, values: Vector, now: Seconds, *, layout: str = "") -> list[Action]:
        """Begin a round: `values` become the sum. Members with another `layout` are an error."""
        if not (self.members and self.is_settled and self.failure is None):
            raise LocalProtocolError(f"{self._name} begins a round before it can")
        if values.dtype.kind != "f" or values.ndim != 1 or not values.flags.c_contiguous:
            raise LocalProtocolError(f"{self._name} sums {values.dtype}: use a flat float vector")
        if self._dropped is not None and np.may_share_memory(values, self._dropped):
            raise LocalProtocolError(f"{self._name} sums in memory that may still be read")
        self.round, self._dropped = self.round + 1, None
        vector = f"{len(values)} {values.dtype} {layout}".strip()
        self._run = run = _Round.of(values, vector, rank=self._rank, n_members=len(self.members))
        actions: list[Action] = []
        while self._early:
            actions += self._take(run, self._early.popleft(), now)
        if run.n_taken and not run.is_complete:
            actions.append(self._ack())
        return [*actions, *self._send(now), *self._wait(now)]

    # --- events

    def receive(self, event: Received, message: RingMessage, now: Seconds) -> list[Action]:
        """Handle a message, or raise RemoteProtocolError."""
        if message.generation != self.generation or not self.members:
            return []
        self._check(event.sender, message)
        match message:
            case RingFailed():
                actions = self._hear_failure(event.sender, message, now)
            case _ if self.failure is not None:
                actions = []  # its sender hears of the failure
            case RingAck():
                actions = self._acked(message, now)
            case RingBlock():
                actions = self._arrived(message, now)
            case _:
                assert_never(message)
        return [*actions, *self._wait(now)]

    def _check(self, sender: Address, message: RingMessage) -> None:
        match message:
            case RingBlock():
                is_due = sender == self._left and message.round <= self._incoming
            case RingAck():
                is_due = sender == self._right and message.round <= self.round + 1
            case RingFailed():
                is_due = sender in {self._left, self._right}
        if not is_due:
            raise RemoteProtocolError(
                f"{sender} sent {self._name} a {type(message).__name__} that cannot be, in round "
                f"{self.round} of {', '.join(self.members)}"
            )

    def woke(self, now: Seconds) -> list[Action]:
        """The timer has fired: repeat what may have been lost."""
        answer, run, under_way = self._answer, self._run, dict[object, int]()
        answer.woke(now)
        if not self._awaits:
            return []
        at = answer.not_yet(now)
        if at is not None:
            return [SetTimer(name=TIMER, at=at)]
        if self.failure is not None:
            actions = self._tell(self.failure)
        else:
            assert run is not None
            n = run.window.sent - run.window.received
            self.n_again += n
            under_way[RingAck] = n
            run.window.again()
            actions = [self._ack(), *self._blocks(run)]
        return [*actions, SetTimer(name=TIMER, at=answer.repeated(now, under_way=under_way))]

    # --- from the left

    @property
    def _incoming(self) -> int:
        """The round whose blocks come next."""
        return self.round + (self._run is None or self._run.is_complete)

    def _arrived(self, message: RingBlock, now: Seconds) -> list[Action]:
        run, is_early = self._run, self._incoming > self.round
        n_held = len(self._early) if is_early or run is None else run.n_taken
        if message.round < self._incoming or message.index < n_held:
            return [self._ack()]  # the former one was lost
        if message.index > n_held:
            return []  # one before it was lost
        if not is_early:
            assert run is not None
            taken = self._take(run, message, now)
            return [*taken, *self._send(now)]
        if message.index >= CREDIT_BLOCKS:
            raise RemoteProtocolError(f"{self._name} holds {n_held} blocks, and allowed no more")
        self._early.append(message)
        return [self._ack()] if len(self._early) % ACK_EVERY == 0 else []

    def _take(self, run: _Round, message: RingBlock, now: Seconds) -> list[Action]:
        if not run.take(message):
            text = f"{self._left} sums {message.vector}, {self._name} {run.vector}"
            return self._fail(f"received different lengths: {text}", now)
        is_due = run.is_complete or run.n_taken % ACK_EVERY == 0
        return [self._ack()] if is_due else []

    def _ack(self) -> Send:
        received = len(self._early)
        limit = CREDIT_BLOCKS
        if self._run is not None and not self._run.is_complete:
            received = self._run.n_taken
            limit += received
        number = self._incoming
        ack = RingAck(generation=self.generation, round=number, received=received, limit=limit)
        return Send(receiver=self._left, message=ack)

    # --- to the right

    def _acked(self, message: RingAck, now: Seconds) -> list[Action]:
        run = self._run
        if run is None or message.round < self.round:
            return []
        before, is_over = run.window.received, message.round > self.round
        if not is_over:
            run.limit = max(run.limit, message.limit)
        if run.window.acked(len(run.sent) if is_over else message.received):
            n = run.window.received - before
            self._answer.blocks_came(now, RingAck, n, CREDIT_BLOCKS)
        return self._send(now)

    def _send(self, now: Seconds) -> list[Action]:
        run = self._run
        if run is None or self.failure is not None:
            return []
        blocks = self._blocks(run)
        if blocks:
            self._answer.sent_at = self._answer.asked_at[RingAck] = now
            self._answer.is_moving &= run.window.received > 0
        return blocks

    def _blocks(self, run: _Round) -> list[Action]:
        due = run.window.due(run.limit - run.window.received)
        return [self._block(run, index) for index in due]

    def _block(self, run: _Round, index: int) -> Send:
        _, start, stop = run.sent[index]
        values = run.values[start:stop]
        if index >= run.n_sent:  # not a repetition
            run.n_sent = index + 1
            self.n_bytes += values.nbytes
        block = RingBlock(
            generation=self.generation,
            round=self.round,
            index=index,
            vector=run.vector,
            values=values,
        )
        # A part of a sum changes once the whole sum comes here. That contains it, so the right
        # neighbour has it by then, and ignores a repetition.
        return Send(receiver=self._right, message=block, lent=True)

    # --- failures

    def _fail(self, reason: str, now: Seconds) -> list[Action]:
        self.failure = reason
        self._early.clear()
        self._untold = {self._left, self._right}
        self._answer.begin_anew()
        self._answer.sent_at = now
        return self._tell(reason)

    def _tell(self, reason: str) -> list[Action]:
        failed = RingFailed(generation=self.generation, reason=reason, answer=True)
        return [Send(receiver=one, message=failed) for one in sorted(self._untold)]

    def _hear_failure(self, sender: Address, message: RingFailed, now: Seconds) -> list[Action]:
        actions = [] if self.failure is not None else self._fail(message.reason, now)
        self._untold.discard(sender)
        if message.answer:
            failed = RingFailed(generation=self.generation, reason=message.reason, answer=False)
            actions.append(Send(receiver=sender, message=failed))
        return actions

    # --- waiting

    @property
    def _awaits(self) -> bool:
        return bool(self._untold) if self.failure is not None else not self.is_settled

    def _wait(self, now: Seconds) -> list[Action]:
        answer = self._answer
        if not self._awaits:
            answer.is_awaited = False
        elif not answer.is_awaited or answer.silence.timer_at is None:
            at = answer.awaits(now)
            return [] if at is None else [SetTimer(name=TIMER, at=at)]
        return []


def _answer_timer() -> AnswerTimer:
    # Nobody is given up here; the pause over a slow link is a quarter of that silence.
    most = 4 * PAUSE_SECONDS_MAX
    return AnswerTimer(
        RETRY_SECONDS, RETRY_SECONDS_MAX, silence_seconds_max=most, stall_seconds_max=most
    )
