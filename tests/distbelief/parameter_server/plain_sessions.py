"""The bookkeeping of a shard's clients as it would be written down: every answer goes through all.

`PlainSessions` takes the place of `Sessions` in a shard, and must answer every event alike.
"""

import math

import msgspec
import numpy as np
from typing_extensions import override

from distbelief.core.memory import Memory
from distbelief.parameter_server.policy import Round
from distbelief.parameter_server.ranges import IndexRanges
from distbelief.parameter_server.sessions import Session, Sessions
from distbelief.parameter_server.shard_config import ShardConfig
from distbelief.parameter_server.slices import ShardSlice
from distbelief.parameter_server.store import ShardStore
from distbelief.parameter_server.ticks import Floor, replica_of
from distbelief.protocol import push_fetch as pf
from distbelief.protocol.role import Action, Address, Seconds, Send


def n_holding(shard_slice: ShardSlice, others: list[ShardSlice], part: tuple[int, int]) -> int:
    """Return how many of these slices hold one and the same element of a slice, at most."""
    if all(other.key == shard_slice.key for other in others):
        return max(1, len(others))
    inner = shard_slice.within(*part)
    if not inner.n_elements:
        return max(1, len(others))
    all_ranges = [inner, *(other.within(*part) for other in others)]
    bounds = IndexRanges.ends(all_ranges)
    counts = sum(ranges.mask(bounds).astype(np.int64) for ranges in all_ranges[1:])
    return max(1, int(np.max(counts, where=inner.mask(bounds), initial=0)))


class PlainFloor:
    """As `Floor`; it looks at all clients each time."""

    def __init__(self, sessions: "PlainSessions", staleness: int | None) -> None:
        self.value, self.behind, self.awaits_clients = 0, "", False
        self._sessions, self._staleness = sessions, staleness
        self.is_strict = staleness == 0

    @property
    def members(self) -> list[Session]:
        return list(self._sessions._clients.values())

    check = Floor.check
    place = Floor.place

    def _other_ranks(self, member: Session) -> list[Session]:
        replica = replica_of(member.name)
        known = [one for one in self.members if one.is_in and one.name != member.name]
        return [one for one in known if one.name != replica and replica_of(one.name) == replica]

    def note(self, _: Session) -> None:
        pass

    def validate(self, _: object) -> None:
        pass

    def is_gated(self, member: Session) -> bool:
        return self._staleness is not None and (member.tick or 0) - self._staleness > self.value

    def rise(self) -> None:
        if self.awaits_clients:
            return
        inside = [member for member in self.members if member.is_in]
        for member in inside:
            member.tick = max(member.tick or 0, self.value)
        slowest = min(inside, key=lambda one: (one.tick, one.queued, one.name), default=None)
        self.behind = "" if slowest is None else slowest.name
        if slowest is not None:
            self.value = slowest.tick or 0

    def tell(self, member: Session) -> tuple[int, str]:
        member.told = self.value
        return self.value, "" if self.behind == member.name else self.behind

    def news(self, *, term: int) -> list[Action]:
        actions: list[Action] = []
        for member in self.members:
            if not member.is_in or self._staleness is None or member.told >= self.value:
                continue
            assert member.tick is not msgspec.UNSET
            if member.tick - self._staleness > member.told:
                member.told = self.value
                floor = pf.Floor(term=term, floor=self.value, behind=self.behind)
                actions.append(Send(receiver=member.name, message=floor))
        return actions

    def counters(self) -> dict[str, float]:
        ticks = [member.tick or 0 for member in self.members if member.is_in]
        gap = float(max(ticks, default=0) - min(ticks, default=0))
        return {"workers_in": float(len(ticks)), "floor": float(self.value), "clock_gap": gap}


class PlainRounds:
    """As `Rounds`."""

    def __init__(self, sessions: "PlainSessions", policy: Round, floor: PlainFloor) -> None:
        self._sessions, self._policy, self._floor = sessions, policy, floor
        self.due: Seconds | None = None
        self.late = self._missing = ""
        self._told: set[Address] = set()
        self._opened: Seconds | None = None
        self._took: Seconds = 0.0
        self._begun: set[Address] = set()
        self._began: Seconds | None = None
        self._seconds: Seconds = 0.0

    def note(self, *_: object) -> None:
        pass

    def may_end(self, now: Seconds) -> bool:
        if self._floor.awaits_clients:
            return False
        members = [one for one in self._floor.members if one.is_in or one.queued]
        missing = [one for one in members if not (one.queued or self._floor.is_gated(one))]
        if not missing:
            return True
        self._missing = missing[0].name
        first, due = self._floor.value + 1, now + self._policy.grace_seconds
        n_queued = sum(one.queued for one in members)
        n_needed = math.ceil(self._policy.quorum * len(members) - 1e-9)
        if self._policy.early:
            n_needed = min(n_needed, max(len(members) - 1, 1))
        if n_queued < n_needed:
            pushes = self._sessions.queued_pushes
            first_tick = min([push.tick or first for push in pushes], default=first)
            if not all((one.tick or 0) >= first_tick for one in missing):
                self.due = None
                return False
            due += 2 * self._seconds
        self.due = due if self.due is None else min(self.due, due)
        return now >= self.due

    def n_ahead(self, name: Address, now: Seconds, *, ends: bool) -> int:
        if name != replica_of(name):
            return 0
        if not self._floor.is_strict or self._policy.quorum < 1.0:
            return 0
        inside = [one for one in self._floor.members if one.is_in]
        if not inside:
            self._opened = now
        waits = now - (now if self._opened is None else self._opened)
        is_late = self._took > 0.0 and (len(inside) + 1) * waits > self._took
        is_left = any(one.queued or self._floor.is_gated(one) for one in inside)
        if inside and (ends or is_late or is_left or name in self._begun):
            return 1
        self._begun.add(name)
        return 0

    def calls(self, *, term: int) -> list[Action]:
        if self.due is None or not self._policy.early:
            return []
        late = [one for one in self._floor.members if one.is_in and not one.queued]
        late = [one for one in late if one.name not in self._told]
        self._told |= {one.name for one in late}
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
        self.late, self._missing = self._missing, ""
        self._told.clear()
        self._begun.clear()


class PlainWorkers:
    """As `WorkersIn`."""

    def __init__(self, sessions: "PlainSessions", part: tuple[int, int]) -> None:
        self._sessions, self._part = sessions, part

    def note(self, _: Session) -> None:
        pass

    @property
    def _inside(self) -> list[Session]:
        return [one for one in self._sessions._clients.values() if one.is_in]

    def _n_with(self, client: Session) -> int:
        slices = [one.shard_slice for one in self._inside if one is not client]
        return n_holding(client.shard_slice, [client.shard_slice, *slices], self._part)

    def leave(self) -> None:
        for one in self._inside:
            one.n_beside = max(one.n_beside, self._n_with(one))

    def divisor(self, client: Session) -> int:
        n_clients = max(self._n_with(client), client.n_beside)
        client.n_beside = 0
        return n_clients

    def others_samples(self, client: Session) -> tuple[int, int, int]:
        found = [one.n_samples for one in self._inside if one is not client]
        return len(found), found.count(None), sum(n or 0 for n in found)


class PlainPushers:
    """As `Pushers`."""

    def __init__(self, sessions: "PlainSessions", part: tuple[int, int]) -> None:
        self._sessions, self._part = sessions, part

    def note(self, _: Session) -> None:
        pass

    def drop(self, _: Address) -> None:
        pass

    @property
    def next_turn(self) -> int:
        clients = self._sessions._clients.values()
        here = [client.turn for client in clients if client.is_pushing]
        return min(here, default=max((one.turn for one in clients), default=0))

    def n_averaged(self, client: Session, *, since: int) -> int:
        def is_beside(other: Session) -> bool:
            was_beside = other.turn > client.turn or other.last_clock > since
            return other is client or other.is_pushing or was_beside

        clients = self._sessions._clients.values()
        beside = [one.shard_slice for one in clients if is_beside(one)]
        return n_holding(client.shard_slice, beside, self._part)


class PlainSessions(Sessions):  # type: ignore[misc]  # final, but for this test
    """All that `Sessions` keeps of its clients is found anew whenever it is asked for."""

    def __init__(self, config: ShardConfig, values: ShardStore, *, memory: Memory) -> None:
        super().__init__(config, values, memory=memory)
        floor = PlainFloor(self, config.policy.staleness)
        part = 0, self._buffers[0]
        plain = {"floor": floor, "_pushers": PlainPushers(self, self._buffers)}
        if self._workers is not None:
            plain["_workers"] = PlainWorkers(self, part)
        if config.policy.round is not None:
            plain["rounds"] = PlainRounds(self, config.policy.round, floor)
        for name, one in plain.items():
            setattr(self, name, one)

    @property
    def queued_pushes(self) -> list[pf.Push]:
        found = [self._clients[name].next_complete() for name in self.queue]
        return [one.push for one in found if one is not None and one.push is not None]

    @override
    def is_applying(self, name: Address) -> bool:
        busy = [*self._round, *self._folded, *([self.applying] if self.applying else [])]
        return any(one.client.name == name for one in busy)
