"""One client of a shard: its session, and a push of it that is complete."""

from dataclasses import dataclass, field
from typing import final

import msgspec

from distbelief.core.errors import RemoteProtocolError
from distbelief.parameter_server.slices import NOTHING, ShardSlice
from distbelief.parameter_server.tensor_copies import N_PUSH_BUFFERS, PushBuffer, Pushed
from distbelief.parameter_server.ticks import Attendance
from distbelief.protocol import SessionRecord, push_fetch as pf, replication as rp
from distbelief.protocol.role import Address


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

    @classmethod
    def of(cls, record: SessionRecord) -> "Session":
        return cls(**msgspec.structs.asdict(record), confirmed_staleness=record.staleness)

    @property
    def record(self) -> SessionRecord:
        return SessionRecord(
            **{name: getattr(self, name) for name in SessionRecord.__struct_fields__}
        )

    @property
    def is_in(self) -> bool:
        """Whether other clients wait for it."""
        return self.opened and self.connected and self.tick is not msgspec.UNSET

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
