"""Membership of a job: one record per role, its incarnation, and which roles need each other.

                launched ----------> present <-----> away       (away: guests only)
                   ^                    |
    new incarnation|                    +----------> finished   `Finished` came
                   +-------- lost <-----+
                               |
                               +-------------------> left out   it died too often

Where hosts may join, an incarnation may wait for a slot before it is launched. Rank 0 of a
model-parallel group is its "replica" or "evaluator"; the other ranks are "rank"s.
"""

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Literal, final, get_args

from distbelief.core.formatting import plain
from distbelief.core.spans import Spans
from distbelief.parameter_server.shard_config import shard_of
from distbelief.protocol import Join, PeerEntry, Peers
from distbelief.protocol.role import Address, Seconds
from distbelief.worker.group import group_rank_of


Kind = Literal["shard", "replica", "evaluator", "rank", "coordinator", "guest"]

N_GUESTS_MAX = 2048  # all guests must fit into the header of one `Peers` message

RATE_SECONDS = 5.0  # rates are means over about this time
RATE_POINTS_MIN: Final = 5  # and over so many values at least

# Counters that begin at 0 in each incarnation, and are shown as sums over all of them.
WAITS = "waits_"  # and a worker's name: seconds waited for it; summed, too
_SUMMED = (
    "pushes_applied",
    "pushes_refused",
    "pushes_lost",
    "bytes_in",
    "bytes_out",
    # Of encoded pushes; what an incarnation held back when it was last heard is lost with it.
    "numbers_pushed",
    "words_pushed",
    "clipped",
    "residual",
    "residual_lost",
    "residual_restored",
)


COUNT_MAX: Final = 2.0**53  # largest float up to which every integer is exact


class Presence(Enum):
    """State of a role's present incarnation."""

    WAITING = "waiting for a host"  # no host has a free slot yet
    LAUNCHED = "starting"  # launched, no message yet
    PRESENT = "present"
    AWAY = "away"  # a silent guest
    FINISHED = "done"
    LEFT_OUT = "lost, left out"


FEW: Final = 256  # roles: up to so many, each message may be followed by a look at all of them
_EACH: Final = 4  # of more, roles that are looked at per message


@final
class Seldom:
    """Whether to go through all roles again: each time while they are few.

    Of more, once in so many calls that a call costs the same however many they are. Heartbeats
    alone are that many calls within a fraction of a second.
    """

    def __init__(self) -> None:
        self._n_calls = 0

    def is_due(self, n_roles: int) -> bool:
        self._n_calls += 1
        if n_roles > FEW and self._n_calls * _EACH < n_roles:
            return False
        self._n_calls = 0
        return True


@final
class Rate:
    """Rate of a counter over the last few seconds.

    Or over the last few steps, if these take longer: some are heard of when they end, others from
    the next heartbeat.
    """

    def __init__(self) -> None:
        self._points: deque[tuple[Seconds, float]] = deque()

    def add(self, now: Seconds, value: float) -> None:
        """Add a value of the counter; a lower one than before starts a new rate."""
        points = self._points
        if points and value < points[-1][1]:
            points.clear()
        points.append((now, value))
        while len(points) > RATE_POINTS_MIN and points[1][0] <= now - RATE_SECONDS:
            points.popleft()

    def lacks(self, now: Seconds, value: float) -> bool:
        """Whether a value is higher than the last one, which was added a while ago."""
        at, last = self._points[-1] if self._points else (now, value)
        return value > last and now - at >= RATE_SECONDS / 4

    @property
    def per_second(self) -> float | None:
        if len(self._points) < 2:
            return None
        (first, low), (last, high) = self._points[0], self._points[-1]
        return (high - low) / (last - first) if last > first else None


@final
@dataclass(slots=True, kw_only=True, eq=False)
class RoleRecord:
    """One role: its present incarnation, and totals over all."""

    name: Address
    kind: Kind
    index: int  # among those of its kind
    place: int  # in the roster, and then among guests
    incarnation: int
    presence: Presence = Presence.LAUNCHED
    launched_at: Seconds = 0.0
    heard_at: Seconds = 0.0  # launched_at before its first message
    state: str = ""  # as it reports it
    counters: dict[str, float] = field(default_factory=dict)
    past: dict[str, float] = field(default_factory=dict)  # sums over earlier incarnations
    restarts: int = 0  # in all
    restarts_in_a_row: int = 0  # restarts since an incarnation that was stable
    begins: bool = False  # its process has begun, or is another host's affair
    silence_reported: bool = False
    failure: str | None = None  # from its `Failed`
    end: str | None = None  # how its process ended, once known
    entry: PeerEntry | None = None  # once it has joined
    pid: int | None = None  # once it has joined
    rate: Rate = field(default_factory=Rate)
    introduced_at: Seconds | None = None  # when the last `Peers` was sent
    stopped: bool = False  # `Stop` was sent
    has_finished: bool = False  # `Finished` came
    begun: bool = False  # `StartTraining` was sent (replica, coordinator)
    progressed: bool = False  # the first `Progress` came
    step: int = 0
    pieces: Spans | None = None  # of the data on its host, by number; None: not known

    ranks: int = 1  # of its group
    in_ring: bool = False  # with the other replicas
    shard: Address = field(init=False)  # of which it is a copy; for other roles its own name
    group: str = field(init=False)  # of which it is a rank; for other roles its own name
    trains: bool = field(init=False)

    def __post_init__(self) -> None:
        self.shard = shard_of(self.name)
        place = group_rank_of(self.name)
        self.group = self.name if place is None else place.group
        of_replica = self.kind == "rank" and self.group.startswith("replica")
        self.trains = of_replica or self.kind in {"replica", "coordinator"}

    def needs(self, other: "RoleRecord") -> bool:
        """Return whether these two roles talk to each other.

        Clients need the shards and shards need all clients. No shard needs another shard (DB-5),
        but the two copies of one do, and so do the ranks of one group, and replicas in a ring. A
        coordinator needs the replicas.
        """
        if self.kind == other.kind == "replica":
            return self.in_ring  # first, as it is asked of every pair of thousands of replicas
        if (self.kind == "shard") != (other.kind == "shard"):
            return True
        if {self.kind, other.kind} == {"coordinator", "replica"}:
            return True
        of_one = self.group == other.group or self.shard == other.shard
        return of_one and self.name != other.name

    @property
    def label(self) -> str:
        return self.name.replace("-", " ")

    @property
    def is_alive(self) -> bool:
        presence = self.presence  # a hot path: no set literal
        return presence is not Presence.FINISHED and presence is not Presence.LEFT_OUT

    @property
    def has_joined(self) -> bool:
        return self.entry is not None and self.presence is Presence.PRESENT

    def total(self, counter: str) -> float:
        return self.past.get(counter, 0.0) + self.counters.get(counter, 0.0)

    def report(self, counters: Mapping[str, float]) -> None:
        """Store what it reports, as far as it can be counted with: no NaN, nothing infinite.

        A coordinator's loss may be as large as a float.
        """
        most = sys.float_info.max if self.kind == "coordinator" else COUNT_MAX
        known = self.counters  # most names come again and again
        self.counters = {
            name if name in known else plain(name): n
            for name, n in counters.items()
            if -most <= n <= most
        }

    def join(self, message: Join) -> bool:
        """Store its endpoint; return whether it changed."""
        name, incarnation = self.name, self.incarnation
        entry = PeerEntry(
            name=name, incarnation=incarnation, endpoint=message.endpoint, host=message.host
        )
        news = entry != self.entry
        self.entry, self.pid = entry, message.pid
        return news

    def was_stable(self, stable_seconds: Seconds) -> bool:
        """Return whether this incarnation got past joining and lasted this long."""
        worked = self.state not in {"", "building", "joining"}
        lasted = self.heard_at - self.launched_at
        return worked and lasted >= stable_seconds

    def begin_incarnation(self, incarnation: int, now: Seconds) -> None:
        """Begin a new incarnation: reset everything that belongs to one."""
        for counter in self.counters:
            if counter in _SUMMED or counter.startswith(WAITS):
                self.past[counter] = self.total(counter)
        self.incarnation = incarnation
        self.presence = Presence.LAUNCHED
        self.launched_at = self.heard_at = now
        self.state, self.counters = "", {}
        self.silence_reported = self.begins = self.begun = self.progressed = False
        self.failure = self.end = self.entry = self.introduced_at = self.pid = None
        self.stopped = self.has_finished = False
        self.step, self.pieces = 0, None
        self.rate = Rate()


@final
class Membership:
    """All roles of a job, in roster order, then guests."""

    def __init__(
        self,
        roster: Iterable[tuple[str, Kind]],
        *,
        incarnation: int = 1,
        admits_guests: bool = False,
        in_ring: bool = False,  # replicas
    ) -> None:
        self._records: dict[Address, RoleRecord] = {}
        self._of_kind: dict[Kind, list[RoleRecord]] = {kind: [] for kind in get_args(Kind)}
        self._of_group: dict[str, list[RoleRecord]] = {}
        self._n_added = 0
        self._no_replicas: dict[Address, RoleRecord] = {}  # these may be thousands
        self._admits_guests = admits_guests
        for name, kind in roster:
            self._add(Address(name), kind, incarnation=incarnation)
        for record in self:
            record.ranks = len(self._of_group[record.group])
            record.in_ring = in_ring and record.kind == "replica"

    def __iter__(self) -> Iterator[RoleRecord]:
        return iter(self._records.values())

    def __len__(self) -> int:
        return len(self._records)

    def get(self, name: Address) -> RoleRecord | None:
        return self._records.get(name)

    def of(self, kind: Kind) -> Sequence[RoleRecord]:
        return self._of_kind[kind]

    @property
    def training(self) -> list[RoleRecord]:
        return [record for record in self if record.trains]

    def near(self, record: RoleRecord) -> Iterable[RoleRecord]:
        """Return, in their order, roles among which all are that this one needs."""
        if record.kind in {"replica", "evaluator", "guest"} and not record.in_ring:
            return self._no_replicas.values()
        return self._records.values()

    def ranks_with(self, record: RoleRecord) -> list[RoleRecord]:
        if record.ranks == 1:
            return []
        return [other for other in self._of_group[record.group] if other is not record]

    def in_order(self, names: Iterable[Address]) -> list[RoleRecord]:
        """Return these roles in roster order, as far as they are members."""
        known = [record for record in map(self.get, names) if record is not None]
        return sorted(known, key=lambda record: record.place)

    def groups(self, names: Iterable[Address]) -> list[Sequence[RoleRecord]]:
        """Return the groups of these roles, all of their ranks, in roster order."""
        found = {record.group: self._of_group[record.group] for record in self.in_order(names)}
        return sorted(found.values(), key=lambda group: group[0].place)

    @property
    def evaluator(self) -> RoleRecord | None:
        return next(iter(self.of("evaluator")), None)

    @property
    def coordinator(self) -> RoleRecord | None:
        return next(iter(self.of("coordinator")), None)

    def admit(self, name: Address, incarnation: int, now: Seconds) -> RoleRecord | None:
        """Return the record of this role, made now for a guest that may join; else None."""
        record = self.get(name)
        if record is None:
            is_name = name.isascii() and name.isprintable()
            if not (self._admits_guests and is_name and self._has_place()):
                return None
            record = self._add(name, "guest", incarnation=incarnation)
            record.begin_incarnation(incarnation, now)
        elif record.kind == "guest" and incarnation > record.incarnation:
            record.begin_incarnation(incarnation, now)
        return record

    def _has_place(self) -> bool:
        guests = self.of("guest")
        if len(guests) < N_GUESTS_MAX:
            return True
        away = [guest for guest in guests if guest.presence is Presence.AWAY]
        if away:  # the one that is silent for longest gives up its place
            self.leave(min(away, key=lambda guest: guest.heard_at))
        return bool(away)

    def leave(self, record: RoleRecord) -> None:
        del self._records[record.name]
        self._no_replicas.pop(record.name, None)
        self._of_kind[record.kind].remove(record)
        group = self._of_group[record.group]
        group.remove(record)
        if not group:
            del self._of_group[record.group]

    def peers_of(self, record: RoleRecord) -> Peers:
        """Return the roles that this one needs, and the ranks of its group that are gone."""
        near = self.near(record)
        needed = [other for other in near if other.has_joined and record.needs(other)]
        gone: list[Address] = []
        if record.kind in {"replica", "evaluator", "rank"}:
            gone = [other.name for other in self.ranks_with(record) if not other.is_alive]
        entries = tuple(other.entry for other in needed if other.entry is not None)
        return Peers(entries=entries, gone=tuple(gone))

    def keep_ranks(self, n_ranks: Sequence[int]) -> None:
        """Leave each replica so many ranks, and the evaluator as many as the largest."""
        for record in list(self):
            place = group_rank_of(record.name)
            if place is not None:
                n = max(n_ranks) if place.replica is None else n_ranks[place.replica]
                record.ranks = n
                if place.index >= n:
                    self.leave(record)

    def add_delay(self, seconds: Seconds) -> None:
        """Shift all clocks by a time in which the supervisor itself was suspended."""
        for record in self:
            record.heard_at += seconds
            record.launched_at += seconds

    def _add(self, name: Address, kind: Kind, *, incarnation: int) -> RoleRecord:
        same = self._of_kind[kind]
        place, self._n_added = self._n_added, self._n_added + 1
        record = RoleRecord(
            name=name, kind=kind, index=len(same), place=place, incarnation=incarnation
        )
        self._records[name] = record
        self._of_group.setdefault(record.group, []).append(record)
        if kind != "replica":
            self._no_replicas[name] = record
        same.append(record)
        return record
