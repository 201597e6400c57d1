"""Ticks: how far each worker is, which are in, which may go on, and when a round ends.

    tick      of a worker that is in: exchanges that it has ended, as the shard has acknowledged
    floor     the least tick of all that are in and connected; it never falls
    gate      a worker begins tick t once the floor is t - staleness (Ho et al. 2013)

A worker that enters, or was gone, begins at the floor, or with the next round, if all would wait
for it in this one. After a restart the floor stays until all clients had time to come back, each
with its tick. Only the beginning of a tick is gated, never a push, and the worker with the least
tick is not gated: so the floor rises as long as one works.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, final

import msgspec

from distbelief.core.errors import FalseClaimError
from distbelief.parameter_server.members import Least
from distbelief.parameter_server.policy import ExchangePolicy, Round
from distbelief.protocol import push_fetch as pf
from distbelief.protocol.role import Action, Address, Seconds, Send


TICKS_AHEAD_MAX: Final = 1 << 32
"""More than a shard that restarts can lack. Far below the largest tick of a message, at which a
worker alone could set the floor for all that come later."""


@final
@dataclass(slots=True)
class Attendance:
    """Whether a client is in: each change has a number, so that a late message is known."""

    changes: int = 0

    @property
    def is_in(self) -> bool:
        return self.changes % 2 == 1

    def enter(self) -> None:
        self.changes += not self.is_in

    def leave(self) -> None:
        self.changes += self.is_in


# --- of a client ---


@final
class ShardTicks:
    """A worker's ticks and the floor, as it knows them of one shard."""

    def __init__(self) -> None:
        self.attendance = Attendance()
        self.ended: int | None = None  # by settled pushes; None: none known
        self.floor: int | None = None  # that the shard has told; None: it counts no ticks
        self.behind: Address | None = None  # who keeps it down
        self.late = ""  # whose push the last round waited for
        self.closes = 0  # the tick of this worker that a round waits for; 0: none
        self.known: int | None = None  # this worker's tick, as the shard knows it; None: not in
        self._needed = 0  # the floor that the worker waits for
        self._known_changes = 0  # of the attendance, to the shard

    @property
    def waits_for_floor(self) -> bool:
        return self.floor is None or self.floor < self._needed

    @property
    def agrees(self) -> bool:
        """Whether the shard knows that the worker is in or not, and its tick."""
        is_known = self.known is not None and (self.ended is None or self.known >= self.ended)
        is_told = self.attendance.changes == self._known_changes
        return is_told and (is_known or not self.attendance.is_in)

    def enter(self, tick: int | None, *, needed: int) -> bool:
        """The worker has ended this many ticks; None: it begins at the floor.

        Return whether that is news, which the shard must be told until it `agrees`, and until the
        floor is `needed`.
        """
        before = self.attendance.changes, self.ended
        self.attendance.enter()
        self._needed = needed
        if tick is not None:
            self.ended = max(tick, self.ended or 0)
        return before != (self.attendance.changes, self.ended)

    def leave(self) -> bool:
        """Nobody needs to wait for this worker; return whether that is news."""
        if not self.attendance.is_in:
            return False
        self.attendance.leave()
        self._needed, self.known, self.ended = 0, None, None
        return True

    def opened(self) -> None:
        """A session was opened, perhaps with another incarnation of the shard."""
        self.floor = self.known = None
        self._known_changes = 0

    def note(self, message: pf.SessionOpened) -> None:
        self.note_floor(message)
        if self.floor is None or message.entries != self.attendance.changes:
            return  # it answers an older OpenSession
        self._known_changes = self.attendance.changes
        if message.tick is not msgspec.UNSET:
            self.known = message.tick
            self.ended = max(message.tick, self.ended or 0)

    def note_floor(self, message: pf.SessionOpened | pf.PushApplied | pf.Floor) -> None:
        if message.floor is not msgspec.UNSET and message.floor >= (self.floor or 0):
            self.floor, self.behind = message.floor, Address(message.behind or "") or None
        if isinstance(message, pf.Floor):
            self.closes = max(self.closes, message.closes or 0)

    def settled(self, tick: pf.Ticks) -> None:
        """A push that ended this tick is applied, or lost."""
        if self.ended is not None and tick is not msgspec.UNSET:
            self.ended = max(self.ended, tick)

    def acknowledged(self, message: pf.PushApplied, *, is_news: bool) -> None:
        self.note_floor(message)
        if is_news:
            self.late = message.late or ""
            if self.known is not None:
                self.known = max(self.known, self.ended or 0)


@final
class WorkerTicks:
    """The ticks of one worker, over all shards."""

    def __init__(self, shards: Sequence[ShardTicks]) -> None:
        self._shards = shards
        self.ended: int | None = None  # of those in; None: not in, or not placed yet
        # The worker that is waited for, and since when.
        self.waits_since: tuple[Address, Seconds] | None = None
        self._staleness: int | None = None  # of the next tick
        self._n_samples = 0  # of the last push with gradients
        self._samples: int | None = None  # up to the last push, or in the first session
        self._gap_max = 0  # ticks ahead of the slowest
        self._waits: dict[Address, Seconds] = {}  # by the worker it waited for

    @property
    def _counting(self) -> list[ShardTicks]:
        return [one for one in self._shards if one.floor is not None]

    @property
    def _gap(self) -> int:
        return (self.ended or 0) - min((one.floor or 0 for one in self._counting), default=0)

    def enter(
        self, now: Seconds, *, staleness: int | None, samples: int, unacknowledged: int
    ) -> list[bool]:
        """Want to begin a tick; return for each shard that counts ticks whether this is news to it.

        Empty while pushes are under way, which carry the tick.
        """
        counting, self._staleness = self._counting, staleness
        if self._samples is None:
            # A later session may also count a push that a former incarnation had under way.
            self._samples = samples
        if staleness is not None:
            self._count_wait(now, staleness, unacknowledged=unacknowledged)
        if unacknowledged:
            return []
        if self.ended is None and all(one.known is not None for one in counting):
            self.ended = 0
        if self.ended is not None:
            # Workers that were taken for gone are ahead by now: nobody waits for the past.
            known = [max(one.known or 0, one.floor or 0) for one in counting]
            self.ended = max(self.ended, *known)
        needed = 0 if staleness is None or self.ended is None else self.ended - staleness
        news = [one.enter(self.ended, needed=needed) for one in counting]
        if self.may_begin:
            self.waits_since = None
        return news

    @property
    def may_begin(self) -> bool:
        """Whether the floor is high enough, and all shards know it; no push may be under way."""
        agree = all(one.agrees and not one.waits_for_floor for one in self._counting)
        return self.ended is not None and agree

    @property
    def is_awaited(self) -> bool:
        """Whether a round waits for the push that ends the present tick."""
        return self.ended is not None and any(one.closes > self.ended for one in self._counting)

    def may_read(self, shard: ShardTicks) -> bool:
        """Whether the values of a shard that has applied all pushes are new enough."""
        if shard.floor is None or self._staleness is None:
            return True
        is_placed = self.ended is not None and shard.agrees
        return is_placed and shard.floor >= (self.ended or 0) - self._staleness

    def _count_wait(self, now: Seconds, staleness: int, *, unacknowledged: int) -> None:
        if self.waits_since is not None:
            culprit, since = self.waits_since
            self._waits[culprit] = self._waits.get(culprit, 0.0) + now - since
        if not unacknowledged:  # now it is known whom the own push has waited for
            late = Address(next((one.late for one in self._counting if one.late), ""))
            seconds = self._waits.pop(Address(""), 0.0)
            if late:
                self._waits[late] = self._waits.get(late, 0.0) + seconds
        slowest = min(self._counting, key=lambda one: one.floor or 0)
        # Not for another worker, if it is its own push that is not applied yet.
        is_own = staleness == 0 and unacknowledged
        is_gated = (slowest.floor or 0) < (self.ended or 0) - staleness and not is_own
        self.waits_since = (is_gated and slowest.behind) or Address(""), now

    def pushed(self, samples: int, *, in_session: int, is_rest: bool = False) -> dict[str, int]:
        """Return the ticks ended with a push, and the samples in it.

        One of the rest that earlier ones held back counts as the last of them.
        """
        before, self._samples = self._samples, samples
        if not is_rest:
            self._n_samples = max(samples - (in_session if before is None else before), 0)
        n_samples = {"n_samples": self._n_samples}
        if self.ended is None:
            return n_samples
        self.ended += 1
        self._gap_max = max(self._gap_max, self._gap)
        return n_samples | {"tick": self.ended}

    def skip(self) -> None:
        if self.ended is not None:
            self.ended += 1

    def leave(self) -> None:
        self.ended = self.waits_since = None

    def counters(self) -> dict[str, float]:
        waits = {f"waits_{name}": seconds for name, seconds in self._waits.items() if name}
        gap = {"clock_gap_max": float(self._gap_max)} if self._gap_max or waits else {}
        if self.ended is not None:
            gap["clock_gap"] = float(self._gap)
        return gap | waits


# --- of a shard ---


class Member(Protocol):
    """A client, as the floor sees it."""

    tick: pf.Ticks  # that it has ended; Unset: it is not in
    told: int  # the newest floor sent to it

    @property
    def name(self) -> Address: ...
    @property
    def order(self) -> int: ...  # in which clients came
    @property
    def is_in(self) -> bool: ...
    @property
    def queued(self) -> bool: ...  # whether its next push is here


def _order(member: Member) -> int:
    return member.order


def replica_of(name: Address) -> str:
    return name.partition(".")[0]  # "replica-2" of its rank "replica-2.1"


@final
class Floor:
    """The least tick of the clients that are in. It must be told of each that changes (`note`)."""

    def __init__(self, staleness: int | None) -> None:
        self.value = 0
        self.awaits_clients = False  # after a restart: the floor stays
        self._staleness = staleness
        self.is_strict = staleness == 0  # nobody may be ahead
        self.behind = ""  # who keeps it down
        self.inside: dict[Address, Member] = {}
        self._entered: dict[Address, Member] = {}  # since it rose last
        self._ranks: dict[str, dict[Address, Member]] = {}  # that are in, by their split replica
        # By tick: those whose next push is not here yet, and those whose push is.
        self.idle, self.queued = Least[int](), Least[int]()
        # Of the idle ones: those that may begin a tick in the order in which they came, the others
        # by tick. Some of these may begin by now.
        self._free, self._ahead = Least[int](), Least[int]()
        # Those that could not begin a tick at the floor that they were told; of these, new ones.
        self._gated: dict[Address, Member] = {}
        self._untold: dict[Address, Member] = {}
        self._looked_at = 0  # the floor at the last news

    def check(self, name: Address, member: Member | None, tick: pf.Ticks) -> None:
        """Raise FalseClaimError for a tick far ahead of what is known here."""
        known = self.value if member is None else max(member.tick or 0, self.value)
        if (tick or 0) > known + TICKS_AHEAD_MAX:
            raise FalseClaimError(f"{name} has ended {tick} ticks: {known} are known here")

    def is_gated(self, member: Member) -> bool:
        return self._staleness is not None and (member.tick or 0) - self._staleness > self.value

    def place(self, member: Member, tick: pf.Ticks, *, ahead: int = 0) -> None:
        """Let a member in that has ended this many ticks; Unset: it begins `ahead` of the floor.

        A rank of a split replica begins where its other ranks are. They compute each step together:
        with another tick it would wait for them, and they for it.
        """
        is_known = not (member.tick is msgspec.UNSET and tick is msgspec.UNSET)
        if is_known:
            member.tick = max(member.tick or 0, tick or 0, self.value)
        elif not self.awaits_clients:  # a new one waits until there is a floor
            ticks = [one.tick or 0 for one in self._other_ranks(member)]
            member.tick = max(self.value, *ticks) if ticks else self.value + ahead

    def _other_ranks(self, member: Member) -> list[Member]:
        ranks = self._ranks.get(replica_of(member.name), {})
        return [one for name, one in ranks.items() if name != member.name]

    @property
    def is_left(self) -> bool:
        """Whether some have ended the tick at which the others are."""
        # `missing` moves those that may begin by now out of `_ahead`.
        return self.missing is None or len(self.queued) > 0 or len(self._ahead) > 0

    def note(self, member: Member) -> None:
        """Take over what has changed."""
        name = member.name
        if not member.is_in:
            if name in self.inside:
                self._note_rank(member)
                for table in (self.inside, self._entered, self._gated, self._untold):
                    table.pop(name, None)
                for least in (self.idle, self.queued, self._free, self._ahead):
                    least.drop(name)
            return
        tick = member.tick or 0
        if self.inside.get(name) is not member:
            self.inside[name] = self._entered[name] = member
            self._note_rank(member)
        if member.queued:
            self.queued.put(name, tick)
            for least in (self.idle, self._free, self._ahead):
                least.drop(name)
        else:
            self.queued.drop(name)
            self.idle.put(name, tick)
            if self.is_gated(member):
                self._ahead.put(name, tick)
                self._free.drop(name)
            else:
                self._free.put(name, member.order)
                self._ahead.drop(name)
        self._note_told(member)

    def _note_rank(self, member: Member) -> None:
        name, replica = member.name, replica_of(member.name)
        if name == replica:
            return
        ranks = self._ranks.setdefault(replica, {})
        if member.is_in:
            ranks[name] = member
        else:
            ranks.pop(name, None)

    def _note_told(self, member: Member) -> None:
        staleness, name = self._staleness, member.name
        if staleness is None:
            return
        if (member.tick or 0) - staleness > member.told:
            self._gated[name] = self._untold[name] = member
        elif name in self._gated:
            del self._gated[name]
            self._untold.pop(name, None)

    def rise(self) -> None:
        if self.awaits_clients:
            return
        entered, self._entered = self._entered, {}
        for member in entered.values():  # others went on without a client that was gone
            if (member.tick or 0) < self.value:
                member.tick = self.value
                self.note(member)
        # Of equal ticks, a client whose next push is not here yet.
        slowest, queued = self.idle.first(), self.queued.first()
        if slowest is None or (queued is not None and queued[0] < slowest[0]):
            slowest = queued
        if slowest is None:
            self.behind = ""
        else:
            self.value, self.behind = slowest

    @property
    def missing(self) -> Member | None:
        """The first that is idle, and may begin a tick."""
        # A client that is too far ahead begins no tick: it may wait for a push of this very round.
        while self._staleness is not None and (first := self._ahead.first()) is not None:
            tick, name = first
            if tick - self._staleness > self.value:
                break
            self._ahead.drop(name)
            self._free.put(name, self.inside[name].order)
        found = self._free.first()
        return None if found is None else self.inside[found[1]]

    def tell(self, member: Member) -> tuple[int, str]:
        """Return the floor, and who keeps it down, for a message to a member."""
        member.told = self.value
        if member.is_in:
            self._note_told(member)
        return self.value, "" if self.behind == member.name else self.behind

    def news(self, *, term: int) -> list[Action]:
        """Tell a new floor to the clients that could not begin a tick at the old one."""
        gated = self._untold if self.value == self._looked_at else self._gated
        late = [member for member in gated.values() if member.told < self.value]
        self._looked_at, self._untold = self.value, {}
        late.sort(key=_order)
        actions: list[Action] = []
        for member in late:
            member.told = self.value
            self._note_told(member)
            floor = pf.Floor(term=term, floor=self.value, behind=self.behind)
            actions.append(Send(receiver=member.name, message=floor))
        return actions

    def counters(self) -> Mapping[str, float]:
        ticks = [member.tick or 0 for member in self.inside.values()]
        gap = float(max(ticks, default=0) - min(ticks, default=0))
        return {"workers_in": float(len(ticks)), "floor": float(self.value), "clock_gap": gap}

    def validate(self, members: Iterable[Member]) -> None:
        """Check against all clients; only simulations call it."""
        inside = {one.name: one for one in members if one.is_in}
        assert inside == self.inside, f"{sorted(inside)} are in, not {sorted(self.inside)}"
        for least, queued in ((self.idle, False), (self.queued, True)):
            some = [(one.tick, one.name) for one in inside.values() if one.queued is queued]
            assert least.first() == min(some, default=None), (least.first(), some)


@final
class Rounds:
    """When the complete pushes of a shard make a round. It must be told as `Floor` is."""

    def __init__(self, policy: Round, floor: Floor) -> None:
        self._policy, self._floor = policy, floor
        # When the next round ends without those that are late; None: not by time.
        self.due: Seconds | None = None
        self.late = ""  # whose push the last round waited for at its end
        self._missing = ""  # whose push the next one waits for
        self._opened: Seconds | None = None  # when the others began the tick of this round
        self._took: Seconds = 0.0  # the last one, since then
        self._begun: set[Address] = set()  # who came since, and began it
        self._told: set[Address] = set()  # that this round waits for them
        self._untold: dict[Address, Member] = {}  # idle ones that are not
        self._began: Seconds | None = None
        self._seconds: Seconds = 0.0  # that the last round took
        self._left: set[Address] = set()  # whose last push is here, and who are not in
        # Ticks of the pushes that are here; 0 if it is not said.
        self._pushes = Least[int]()
        self._unsaid: set[Address] = set()

    @classmethod
    def of(cls, policy: ExchangePolicy, floor: Floor) -> "Rounds | None":
        return None if policy.round is None else cls(policy.round, floor)

    def note(self, member: Member, push: pf.Push | None) -> None:
        """Take over what has changed; `push` is the next one of this member, if it is queued."""
        name, tick = member.name, 0 if push is None else push.tick or 0
        is_in, queued = member.is_in, member.queued
        if queued and not is_in:
            self._left.add(name)
        else:
            self._left.discard(name)
        if push is not None and not tick:
            self._unsaid.add(name)
        else:
            self._unsaid.discard(name)
        if tick:
            self._pushes.put(name, tick)
        else:
            self._pushes.drop(name)
        if self._policy.early:
            if is_in and not queued and name not in self._told:
                self._untold[name] = member
            else:
                self._untold.pop(name, None)

    def may_end(self, now: Seconds) -> bool:
        """Return whether the pushes that are here make a round, or wait for others until `due`.

        Members are in, or their last push is here and they have left.
        """
        floor = self._floor
        if floor.awaits_clients:
            return False
        missing = floor.missing
        if missing is None:
            return True
        self._missing = missing.name
        due = now + self._policy.grace_seconds
        n_members = len(floor.inside) + len(self._left)
        n_queued = n_members - len(floor.idle)
        n_needed = math.ceil(self._policy.quorum * n_members - 1e-9)
        if self._policy.early:  # of two or three, too, the others can be asked
            n_needed = min(n_needed, max(n_members - 1, 1))
        if n_queued < n_needed:
            # A client that has ended the tick of a push waiting here may wait too: for a push at
            # another shard, whose last round was of others. So nobody could make the quorum. Late
            # pushes wait for the others' next ones first. The idle client with the least tick is
            # missing, as one is.
            slowest = floor.idle.first()
            assert slowest is not None
            if slowest[0] < self._first_tick:
                self.due = None
                return False
            due += 2 * self._seconds
        self.due = due if self.due is None else min(self.due, due)
        return now >= self.due

    def n_ahead(self, name: Address, now: Seconds, *, ends: bool) -> int:
        """Return how far ahead of the floor a client begins that comes now.

        `ends`: the pushes of this round are being added up. All would wait for a client that begins
        late. If one always came before another ended, the floor would never rise.
        """
        floor = self._floor
        if not floor.is_strict or self._policy.quorum < 1.0:
            return 0
        if name != replica_of(name):
            return 0  # ranks of a split replica begin where the first of them did
        if not floor.inside:
            self._opened = now
        since = now if self._opened is None else self._opened
        # The others would wait so long; it would wait for the rest of the round.
        is_late = 0.0 < self._took < (len(floor.inside) + 1) * (now - since)
        if floor.inside and (ends or is_late or floor.is_left or name in self._begun):
            return 1
        self._begun.add(name)
        return 0

    @property
    def _first_tick(self) -> int:
        """The tick of the first push that is here."""
        least, next_one = self._pushes.first(), self._floor.value + 1
        if least is None:
            return next_one
        return min(least[0], next_one) if self._unsaid else least[0]

    def calls(self, *, term: int) -> list[Action]:
        """Ask those whose pushes are awaited, once, to push what they have."""
        if self.due is None or not self._untold:
            return []
        late = sorted(self._untold.values(), key=_order)
        self._told |= {one.name for one in late}
        self._untold.clear()
        floor = pf.Floor(term=term, floor=self._floor.value, behind=self._floor.behind)
        return [
            Send(
                receiver=one.name,
                message=msgspec.structs.replace(floor, closes=(one.tick or 0) + 1),
            )
            for one in late
        ]

    def end(self, now: Seconds) -> None:
        began = now if self._began is None else self._began
        self.due, self._began, self._seconds = None, now, now - began
        self._took, self._opened = now - (now if self._opened is None else self._opened), now
        self._begun.clear()
        self.late, self._missing = self._missing, ""
        for name in self._told:
            member = self._floor.inside.get(name)
            if member is not None and not member.queued:
                self._untold[name] = member
        self._told.clear()
