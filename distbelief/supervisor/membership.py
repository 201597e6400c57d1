"""The members of a job as the supervisor knows them: a row each, and who needs whom.

                launched ----------> present <-----> away       (away: guests only)
                   ^                    |
    a new life     |                    +----------> finished   it said so, and is gone
                   +-------- lost <-----+
                               |
                               +-------------------> left out   it died too often

Where machines may join (`hosts`), a life may wait for one before it is launched.

Clients (replicas, the evaluator, guests) need the shards, and the shards need all
clients; no shard needs another (DB-5), but the two copies of one shard do, and so do
the machines of one model replica, or those that evaluate together. Machine 0 of these
leads: it is the "replica" or "evaluator" here, the others are its "machine"s. Where
there is a coordinator, it and the replicas need each other.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, final

from distbelief.parameter_server.replication import shard_of
from distbelief.protocol import Join, PeerEntry
from distbelief.roles.role import Address, Seconds
from distbelief.worker.group import group_rank_of


Kind = Literal["shard", "replica", "evaluator", "machine", "coordinator", "guest"]

N_GUESTS_MAX = 2048
"""At once: what shards are told of them is one message, whose header is bounded."""

RATE_SECONDS = 5.0
"""Rates are means over about so long."""

_SUMMED = ("pushes_applied", "pushes_refused", "pushes_lost", "bytes_in", "bytes_out")
"""Counters that begin at 0 in each life, and are shown for all lives together."""


class Presence(Enum):
    """What the supervisor knows of a role's present life."""

    WAITING = "waiting for a machine"  # its process cannot be anywhere yet
    LAUNCHED = "starting"  # its process was asked for; it has not said a word
    PRESENT = "present"
    AWAY = "away"  # a guest that has been silent for long
    FINISHED = "done"
    LEFT_OUT = "lost, left out"


@final
class Rate:
    """How fast a counter rises, over the last few seconds."""

    def __init__(self) -> None:
        self._points: deque[tuple[Seconds, float]] = deque()

    def add(self, now: Seconds, value: float) -> None:
        """Note the counter's value; one that has fallen begins anew."""
        points = self._points
        if points and value < points[-1][1]:
            points.clear()
        points.append((now, value))
        while len(points) > 2 and points[1][0] <= now - RATE_SECONDS:
            points.popleft()

    @property
    def per_second(self) -> float | None:
        """The mean; None before there are two values."""
        if len(self._points) < 2:
            return None
        (first, low), (last, high) = self._points[0], self._points[-1]
        return (high - low) / (last - first) if last > first else None


@final
@dataclass(slots=True, kw_only=True, eq=False)
class RoleRecord:
    """One role, in its present life unless it says otherwise."""

    name: Address
    kind: Kind
    index: int  # among those of its kind
    incarnation: int
    presence: Presence = Presence.LAUNCHED
    launched_at: Seconds = 0.0
    heard_at: Seconds = 0.0  # launched_at, before its first word
    state: str = ""  # its own word
    counters: dict[str, float] = field(default_factory=dict)
    past: dict[str, float] = field(default_factory=dict)  # of former lives, summed
    restarts: int = 0  # in all
    in_a_row: int = 0  # since a life that settled
    silence_named: bool = False
    failure: str | None = None  # its own last words
    end: str | None = None  # how its process ended, as soon as that is known
    entry: PeerEntry | None = None  # once it has joined
    pid: int | None = None  # likewise
    rate: Rate = field(default_factory=Rate)
    introduced_at: Seconds | None = None  # when it was last told of its peers
    stopped: bool = False  # it was told to end
    farewell: bool = False  # it said itself that it has ended
    begun: bool = False  # a replica, or a coordinator: it was told to begin
    progressed: bool = False  # and has
    step: int = 0

    @property
    def shard(self) -> Address:
        """The shard that this is a copy of."""
        return shard_of(self.name)

    @property
    def group(self) -> str:
        """What compute one model together: "replica-3" of all its machines."""
        place = group_rank_of(self.name)
        return self.name if place is None else place.group

    @property
    def trains(self) -> bool:
        """Whether it is a model replica, a machine of one, or drives them."""
        of_replica = self.kind == "machine" and self.group.startswith("replica")
        return of_replica or self.kind in {"replica", "coordinator"}

    def needs(self, other: "RoleRecord") -> bool:
        """Whether these two have to be able to speak to each other."""
        if self.kind == other.kind == "replica":
            return False  # of thousands of replicas that is asked of every pair
        if (self.kind == "shard") != (other.kind == "shard"):
            return True
        if {self.kind, other.kind} == {"coordinator", "replica"}:
            return True
        of_one = self.group == other.group or self.shard == other.shard
        return of_one and self.name != other.name

    @property
    def label(self) -> str:
        """How messages name it: "shard 1"."""
        return self.name.replace("-", " ")

    @property
    def is_alive(self) -> bool:
        """Whether it may still do something."""
        presence = self.presence  # asked of everybody all the time: no set of them
        return presence is not Presence.FINISHED and presence is not Presence.LEFT_OUT

    @property
    def is_at_work(self) -> bool:
        """Whether this life trains: it was told to begin, and has."""
        works = self.begun and (self.progressed or self.state == "computing")
        return works and self.presence is Presence.PRESENT

    @property
    def has_joined(self) -> bool:
        """Whether it can be spoken to."""
        return self.entry is not None and self.presence is Presence.PRESENT

    def total(self, counter: str) -> float:
        """Return a counter over all lives."""
        return self.past.get(counter, 0.0) + self.counters.get(counter, 0.0)

    def hear(self, now: Seconds) -> Seconds:
        """Note a sign of life; return how long there was none."""
        silence = now - self.heard_at
        self.heard_at = now
        self.presence = Presence.PRESENT
        return silence

    def join(self, message: Join) -> bool:
        """Note where it is; return whether that is news."""
        entry = PeerEntry(
            name=self.name,
            incarnation=self.incarnation,
            endpoint=message.endpoint,
            host=message.host,
        )
        news = entry != self.entry
        self.entry, self.pid = entry, message.pid
        return news

    def has_settled(self, settled_seconds: Seconds) -> bool:
        """Whether this life has lasted, and has been of use."""
        worked = self.state not in {"", "building", "joining"}
        lasted = self.heard_at - self.launched_at
        return worked and lasted >= settled_seconds

    def begin_life(self, incarnation: int, now: Seconds) -> None:
        """Forget all that ended with the life before."""
        for counter in _SUMMED:
            if counter in self.counters:
                self.past[counter] = self.total(counter)
        self.incarnation = incarnation
        self.presence = Presence.LAUNCHED
        self.launched_at = self.heard_at = now
        self.state, self.counters = "", {}
        self.silence_named = self.begun = self.progressed = False
        self.failure = self.end = self.entry = self.introduced_at = self.pid = None
        self.stopped = self.farewell = False
        self.step = 0
        self.rate = Rate()


@final
class Membership:
    """All roles of a job, in roster order, then guests.

    Args:
        roster: Name and kind of each role.
        incarnation: Of their first lives; a resumed run goes on where it ended.
        admits_guests: Whether names that are not in the roster may join.
    """

    def __init__(
        self,
        roster: Iterable[tuple[str, Kind]],
        *,
        incarnation: int = 1,
        admits_guests: bool = False,
    ) -> None:
        self._records: dict[Address, RoleRecord] = {}
        self._admits_guests = admits_guests
        for name, kind in roster:
            self._add(Address(name), kind, incarnation=incarnation)

    def __iter__(self) -> Iterator[RoleRecord]:
        return iter(self._records.values())

    def get(self, name: Address) -> RoleRecord | None:
        """Return the role of this name."""
        return self._records.get(name)

    def of(self, kind: Kind) -> list[RoleRecord]:
        """Return the roles of this kind."""
        return [record for record in self if record.kind == kind]

    @property
    def training(self) -> list[RoleRecord]:
        """All model replicas, each of their machines."""
        return [record for record in self if record.trains]

    def machines_with(self, record: RoleRecord) -> list[RoleRecord]:
        """Return the other machines of its group."""
        return [other for other in self if other is not record and other.group == record.group]

    @property
    def evaluator(self) -> RoleRecord | None:
        """The evaluator, if the job has one."""
        return next(iter(self.of("evaluator")), None)

    @property
    def coordinator(self) -> RoleRecord | None:
        """The coordinator, if the job has one."""
        return next(iter(self.of("coordinator")), None)

    def admit(self, name: Address, incarnation: int, now: Seconds) -> RoleRecord | None:
        """Return the record of a guest, made now if it may come; else None."""
        record = self.get(name)
        if record is None:
            if not (self._admits_guests and name.isascii() and self._has_room()):
                return None
            record = self._add(name, "guest", incarnation=incarnation)
            record.begin_life(incarnation, now)
        elif record.kind == "guest" and incarnation > record.incarnation:
            record.begin_life(incarnation, now)
        return record

    def _has_room(self) -> bool:
        """Whether one more guest may come: who is away for longest makes room."""
        guests = self.of("guest")
        if len(guests) < N_GUESTS_MAX:
            return True
        away = [guest for guest in guests if guest.presence is Presence.AWAY]
        if away:
            self.leave(min(away, key=lambda guest: guest.heard_at))
        return bool(away)

    def leave(self, record: RoleRecord) -> None:
        """Forget a guest that is gone."""
        del self._records[record.name]

    def entries_for(self, record: RoleRecord) -> tuple[PeerEntry, ...]:
        """Return those whom this role needs, as far as they are there."""
        return tuple(
            other.entry
            for other in self
            if record.needs(other)
            and other.entry is not None
            and other.presence is Presence.PRESENT
        )

    def gone_for(self, record: RoleRecord) -> tuple[Address, ...]:
        """Return those of this role's group that will not come back."""
        if record.kind not in {"replica", "evaluator", "machine"}:
            return ()
        ended = (other for other in self if not other.is_alive)
        return tuple(
            other.name for other in ended if other is not record and other.group == record.group
        )

    def excuse(self, seconds: Seconds) -> None:
        """The supervisor itself stood still: nobody is to blame for this silence."""
        for record in self:
            record.heard_at += seconds
            record.launched_at += seconds

    def _add(self, name: Address, kind: Kind, *, incarnation: int) -> RoleRecord:
        record = RoleRecord(name=name, kind=kind, index=len(self.of(kind)), incarnation=incarnation)
        self._records[name] = record
        return record
