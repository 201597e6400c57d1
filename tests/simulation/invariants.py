"""Invariants that must hold under any fault, as a global observer sees them.

    ExactlyOnce          each push is in the values of a shard once, or never
    AcknowledgedIsKept   an acknowledged push stays applied
    MissingIsCounted     pushes missing in the values at the end were counted as lost
    SequencesRise        no acknowledged sequence goes backwards
    ClockRises           no shard clock falls within one incarnation of a primary
    StalenessIsTrue      staleness counts from the version that was really fetched
    Bounded              queues, tables and the memory of a host
    WholeVersions        an installed fetch is one version of each shard, no mixture
    OneLeader            at most one incarnation serves clients in one term
    TwinsAreEqual        two copies of a shard are bit-identical at equal clocks

What a role can check itself it checks in `validate`, after each event. One class per other
invariant. Each checks the incarnation that has just handled an event, because the
event can have changed nothing else. Two more invariants are checked elsewhere: after the last
fault every worker ends (`scenarios`), and equal seeds have equal traces.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from distbelief.core.vectors import Vector
from distbelief.parameter_server.client.client import ShardLink
from distbelief.parameter_server.client.fetches import FetchResult
from distbelief.parameter_server.lost_pushes import n_lost
from distbelief.parameter_server.shard import Shard
from distbelief.parameter_server.tensor_copies import N_PUSH_BUFFERS
from distbelief.protocol import Message, PrimaryChanged, PushApplied, SessionOpened
from distbelief.protocol.role import Address, Computed, Role, Started
from distbelief.simulation.cluster import SimulatedCluster
from distbelief.simulation.driver import HandledEvent
from distbelief.supervisor.failover import PrimaryElection
from tests.simulation.scene import sends
from tests.simulation.workers import N_MARKS, Ledger, Unreadable, Worker, marks_of


Version = tuple[int, int]  # of a shard: incarnation (or term), clock


@dataclass(kw_only=True)
class Seen:
    """The objects under observation, and what was seen so far."""

    cluster: SimulatedCluster
    shards: Mapping[Address, int]  # every copy -> index of its shard
    workers: Sequence[Address]
    ledger: Ledger
    host_bytes_max: int
    # Of two copies: who leads, in the eyes of who decides it.
    elections: Mapping[Address, PrimaryElection] = field(default_factory=dict)
    # Per shard: each version it ever published, by the checksum of its values.
    versions: list[dict[int, set[int]]] = field(default_factory=list)
    acknowledged: list[npt.NDArray[np.bool_]] = field(default_factory=list)  # by mark
    # Per shard, under which incarnations, or terms, somebody began to lead.
    leads_as: list[list[int]] = field(default_factory=list)
    # Per shard, the incarnation that welcomed clients as the newest primary.
    serves: dict[int, tuple[Address, int]] = field(default_factory=dict)
    # Shards of which an incarnation was lost that no one else had a whole copy of.
    forgetful: set[int] = field(default_factory=set)
    broken_lives: set[Address] = field(default_factory=set)  # workers that had several
    n_twins: int = 0  # copies that were compared with an equal clock's

    def __post_init__(self) -> None:
        n_shards = len(set(self.shards.values()))
        self.versions = [{} for _ in range(n_shards)]
        self.leads_as = [[0] for _ in range(n_shards)]
        self.acknowledged = [np.zeros(N_MARKS, bool) for _ in range(n_shards)]

    def shard(self, name: Address) -> Shard:
        shard = shard_in(self.cluster.role(name))
        assert shard is not None
        return shard

    def serving(self, happening: HandledEvent) -> int | None:
        """Return the shard that this incarnation serves, if it does."""
        index = self.shards[happening.name]
        life = happening.name, happening.incarnation
        return index if self.serves.get(index) == life else None

    def counts(self, name: Address, shard: Shard) -> bool:
        """Return whether anyone relies on the values of this copy.

        Nobody relies on a backup that was dropped: it may still receive old messages about push
        buffers that are in use for something else by now.
        """
        backup = shard._backup
        if backup is None or backup.primary is None:
            return True
        election = self.elections[name]
        if election.primary == name:
            return True  # it is to lead, and may not know yet
        return election.backup == name and election.term == backup.term

    def links(self) -> Iterator[ShardLink]:
        """Yield what each worker knows of each shard."""
        for worker in map(self.cluster.role, self.workers):
            assert isinstance(worker, Worker)
            yield from worker.client._links.values()

    def leader_under(self, index: int, term: int) -> int:
        """Return as what the primary of this term began to lead."""
        return max(number for number in self.leads_as[index] if number <= term)

    @property
    def leaders(self) -> dict[int, Address]:
        """Per shard, the copy that serves."""
        return {index: name for index, (name, _) in sorted(self.serves.items())}


class Invariant:
    """One invariant. Hooks that it does not override cost nothing."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen

    def shard(self, shard: Shard, happening: HandledEvent) -> None:
        """Look at a copy of a shard that has handled an event."""

    def computed(self, shard: Shard, happening: HandledEvent) -> None:
        """Look at one whose work has ended, so that its values may be new."""

    def worker(self, worker: Worker, happening: HandledEvent) -> None:
        """Look at a worker that has handled an event."""

    def installed(self, worker: Worker, happening: HandledEvent) -> None:
        """Look at one that has installed a whole fetch."""

    def at_end(self) -> None:
        """Look at everything, when all have ended well."""


class ExactlyOnce(Invariant):
    """Each push is in the values of a shard once or never: never half, never NaN.

    The same holds for the state of the update rule.
    """

    @override
    def computed(self, shard: Shard, happening: HandledEvent) -> None:
        if self.seen.counts(happening.name, shard):
            values = shard.values
            times = -Unreadable.read(values)[
                : values.n_held_elements
            ]  # by element, as it holds a prefix
            check_marks(happening.name, times)

    @override
    def at_end(self) -> None:
        for name in self.seen.leaders.values():
            values, *states = Unreadable.read_all(self.seen.shard(name).values)
            for state in states:
                assert np.array_equal(state, -values), f"{name}'s state"


class AcknowledgedIsKept(Invariant):
    """An acknowledged push is in the values of the copy that serves.

    One copy promises it as long as it lives, two as long as one of them is alive and in sync.
    """

    def __init__(self, seen: Seen) -> None:
        super().__init__(seen)
        self._settled: dict[tuple[Address, int, int], int] = {}

    @override
    def worker(self, worker: Worker, happening: HandledEvent) -> None:
        for link in worker.client._links.values():
            key = happening.name, happening.incarnation, link.index
            before, settled = self._settled.get(key, 0), link.pushing.settled
            if settled > before:
                self._settled[key] = settled
                known = self.seen.acknowledged[link.index]
                for sequence, mark in worker.marks:
                    if before < sequence <= settled:
                        known[mark] = True

    @override
    def computed(self, shard: Shard, happening: HandledEvent) -> None:
        index = self.seen.serving(happening)
        if index is not None:
            self._check(index, happening.name, shard)

    @override
    def at_end(self) -> None:
        for index, name in self.seen.leaders.items():
            self._check(index, name, self.seen.shard(name))

    def _check(self, index: int, name: Address, shard: Shard) -> None:
        if index in self.seen.forgetful:
            return
        missing = self.seen.acknowledged[index] & (marks_of(shard) == 0.0)
        assert not missing.any(), (
            f"{name} acknowledged push {np.flatnonzero(missing)[0]}, which is not in the values"
        )


class MissingIsCounted(Invariant):
    """Pushes missing in the values at the end were counted as lost, shard by shard.

    A worker that died loses its count. Then at least no push is lost on shards that kept all.
    """

    @override
    def at_end(self) -> None:
        seen = self.seen
        for index, name in seen.leaders.items():
            links = [link for link in seen.links() if link.index == index]
            newest = seen.leads_as[index][-1]
            if not all(x.is_open and x.primary.term == newest for x in links):
                continue  # it had ended when this primary began: no one told it
            counted = sum(n_lost([link.pushing.lost]) for link in links)
            if not seen.broken_lives:
                marks = marks_of(seen.shard(name))
                missing = sum(not marks[of_push].all() for of_push in seen.ledger.pushes)
                assert counted == missing, f"{name} lacks {missing}, counted {counted}"
            elif index not in seen.forgetful:
                assert counted == 0, f"{counted} pushes lost by {name}, which kept all"


class SequencesRise(Invariant):
    """No acknowledged sequence goes backwards."""

    def __init__(self, seen: Seen) -> None:
        super().__init__(seen)
        self._told: dict[tuple[Address, int, Address], int] = {}
        self._settled: dict[tuple[Address, int, int], int] = {}

    @override
    def shard(self, shard: Shard, happening: HandledEvent) -> None:
        del shard
        for receiver, applied in sends(happening, PushApplied):
            if receiver in self.seen.workers:
                key = happening.name, happening.incarnation, receiver
                before, told = self._told.get(key, 0), applied.sequence
                assert told >= before, f"{key} went back from {before} to {told}"
                self._told[key] = told

    @override
    def worker(self, worker: Worker, happening: HandledEvent) -> None:
        for link in worker.client._links.values():
            key = happening.name, happening.incarnation, link.index
            settled = link.pushing.settled
            assert settled >= self._settled.get(key, 0), f"{key} went back"
            self._settled[key] = settled


class ClockRises(Invariant):
    """A shard's clock never falls within one incarnation, and counts what it applied."""

    def __init__(self, seen: Seen) -> None:
        super().__init__(seen)
        self._clocks: dict[tuple[Address, int], int] = {}

    @override
    def shard(self, shard: Shard, happening: HandledEvent) -> None:
        if self.seen.serving(happening) is None:
            return
        life, clock = (happening.name, happening.incarnation), shard.values.clock
        assert clock >= self._clocks.get(life, 0), f"{life}'s clock fell to {clock}"
        self._clocks[life] = clock


class StalenessIsTrue(Invariant):
    """Staleness is between 0 and the clock, and counts from what was fetched."""

    @override
    def computed(self, shard: Shard, happening: HandledEvent) -> None:
        del happening
        counters = shard.status()[1]
        assert 0 <= counters["staleness_max"] <= counters["clock"]
        assert counters["pushes_applied"] <= counters["clock"]

    @override
    def installed(self, worker: Worker, happening: HandledEvent) -> None:
        for index, clock in enumerate(worker.client.clocks):
            known = self.seen.versions[index].get(checksum(worker, index), {clock})
            told = f"{happening.name} fetched clock {clock} of shard {index}"
            if len(self.seen.leads_as[index]) > 2:  # counted within one primary's time
                assert clock <= max(known), f"{told}; it was {max(known)}"
            else:
                assert clock in known, f"{told}; it was one of {known}"


class Bounded(Invariant):
    """No queue or table is longer than there are clients, no host's memory grows."""

    @override
    def computed(self, shard: Shard, happening: HandledEvent) -> None:
        n_workers = len(self.seen.workers)
        queue, clients = shard._sessions.queue, shard._sessions._clients.values()
        assert len(queue) <= n_workers, f"{queue} waits at {happening.name}"
        assert len(shard._deferred) <= n_workers, f"{shard._deferred}"
        assert len(clients) <= n_workers, f"{clients}"
        n_forwarded = len(shard._primary._outstanding)
        assert n_forwarded <= N_PUSH_BUFFERS * n_workers, f"{n_forwarded} pushes forwarded"
        if shard._backup is not None:
            assert len(shard._backup._queue) <= N_PUSH_BUFFERS * n_workers
        taken = self.seen.cluster.memory(happening.name).n_bytes
        assert taken <= self.seen.host_bytes_max, f"{taken} bytes on a host"


class WholeVersions(Invariant):
    """An installed fetch is one version of each shard: not torn, no mixture.

    Except for a worker that is replaced: its pin belongs to its successor, and blocks under way
    change with it (seed 970). Its pushes are refused, so none of them counts.
    """

    @override
    def computed(self, shard: Shard, happening: HandledEvent) -> None:
        if is_whole(shard) and self.seen.counts(happening.name, shard):
            versions = self.seen.versions[self.seen.shards[happening.name]]
            vector = Unreadable.read(shard.values)
            for sent in (vector, *self._rounded(shard, vector)):
                versions.setdefault(zlib.crc32(sent.tobytes()), set()).add(shard.values.clock)

    def _rounded(self, shard: Shard, vector: Vector) -> Iterator[Vector]:
        """Yield what a client reads of it if it goes in words, unless that has the same bits."""
        if shard._sessions._config.policy.fetched == "bfloat16":
            yield torch.from_numpy(vector).bfloat16().float().numpy()

    @override
    def installed(self, worker: Worker, happening: HandledEvent) -> None:
        if happening.incarnation < self.seen.cluster.incarnation(happening.name):
            return
        for index, versions in enumerate(self.seen.versions):
            assert checksum(worker, index) in versions, (
                f"{happening.name} installed what shard {index} never was"
            )


class OneLeader(Invariant):
    """At most one incarnation serves clients under one incarnation number or term."""

    def __init__(self, seen: Seen) -> None:
        super().__init__(seen)
        self._leaders: dict[tuple[int, int], tuple[Address, int]] = {}

    @override
    def shard(self, shard: Shard, happening: HandledEvent) -> None:
        del shard
        index = self.seen.shards[happening.name]
        life = happening.name, happening.incarnation
        for receiver, message in sends(happening, Message):
            if receiver in self.seen.workers and isinstance(
                message, PushApplied | PrimaryChanged | SessionOpened
            ):
                key = index, message.term
                leader = self._leaders.setdefault(key, life)
                assert leader == life, f"{life} and {leader} both lead as {key}"


class TwinsAreEqual(Invariant):
    """Two copies of a shard are bit-identical at equal clocks under one primary."""

    def __init__(self, seen: Seen) -> None:
        super().__init__(seen)
        self._bits: dict[tuple[int, int, int], int] = {}

    @override
    def computed(self, shard: Shard, happening: HandledEvent) -> None:
        if not is_whole(shard) or not self.seen.counts(happening.name, shard):
            return
        index, backup = self.seen.shards[happening.name], shard._backup
        if backup is None:
            leads_as = shard._sessions.term
        elif backup.primary is not None:
            leads_as = self.seen.leader_under(index, backup.term)
        else:
            return
        key = index, leads_as, shard.values.clock
        bits = 0
        for array in Unreadable.read_all(shard.values):
            bits = zlib.crc32(array.tobytes(), bits)
        self.seen.n_twins += key in self._bits
        known = self._bits.setdefault(key, bits)
        assert known == bits, f"{happening.name} differs at {key}"


class Observer:
    """Passes every event to every invariant."""

    def __init__(self, seen: Seen, *, kinds: Sequence[type[Invariant]]) -> None:
        self.seen = seen
        self._all = [kind(seen) for kind in kinds]
        # Only those that look at such an event at all.
        self._shard = [i.shard for i in self._all if "shard" in vars(type(i))]
        self._computed = [i.computed for i in self._all if "computed" in vars(type(i))]
        self._worker = [i.worker for i in self._all if "worker" in vars(type(i))]
        self._installed = [i.installed for i in self._all if "installed" in vars(type(i))]

    def __call__(self, happening: HandledEvent) -> None:
        role = happening.role
        if isinstance(role, Worker):
            self._look_at_worker(role, happening)
            return
        shard = shard_in(role)
        if shard is None:
            return
        shard.validate()
        self._note_shard(shard, happening)
        for look in self._shard:
            look(shard, happening)
        if isinstance(happening.event, Computed):
            for look in self._computed:
                look(shard, happening)

    def _look_at_worker(self, worker: Worker, happening: HandledEvent) -> None:
        if happening.incarnation > 1 and isinstance(happening.event, Started):
            self.seen.broken_lives.add(happening.name)
        worker.client.validate()
        for look in self._worker:
            look(worker, happening)
        if installs(happening):
            for look in self._installed:
                look(worker, happening)

    def at_end(self) -> None:
        for invariant in self._all:
            invariant.at_end()

    def _note_shard(self, shard: Shard, happening: HandledEvent) -> None:
        """Note who serves, and whether that one could know what was acknowledged."""
        seen, index = self.seen, self.seen.shards[happening.name]
        number = shard._sessions.term
        if number <= seen.leads_as[index][-1] or shard._backup is not None:
            return
        # The first to lead has nothing to know; a backup has it from its primary.
        if len(seen.leads_as[index]) > 1 and shard._former_primary is None:
            seen.forgetful.add(index)
        seen.leads_as[index].append(number)
        seen.serves[index] = happening.name, happening.incarnation


ALL: tuple[type[Invariant], ...] = (
    WholeVersions,
    ExactlyOnce,
    AcknowledgedIsKept,
    MissingIsCounted,
    SequencesRise,
    ClockRises,
    StalenessIsTrue,
    Bounded,
    OneLeader,
    TwinsAreEqual,
)


def shard_in(role: Role) -> Shard | None:
    """Return the shard that this role is, or that it wraps."""
    shard = getattr(role, "shard", role)
    return shard if isinstance(shard, Shard) else None


def is_whole(shard: Shard) -> bool:
    """Return whether its values are complete, as far as it knows itself."""
    return shard.values._n_held is None


def installs(happening: HandledEvent) -> bool:
    """Return whether a worker has just installed a whole fetch."""
    event = happening.event
    return (
        isinstance(event, Computed)
        and isinstance(event.result, FetchResult)
        and not event.result.torn
    )


def checksum(worker: Worker, index: int) -> int:
    """Return the checksum of what a worker has installed of one shard."""
    part = worker.fetched.numpy()[index * N_MARKS : (index + 1) * N_MARKS]
    return zlib.crc32(part.tobytes())


def check_marks(name: Address, marks: Vector) -> None:
    wrong = (marks != 0.0) & (marks != 1.0)
    if wrong.any():
        first = np.flatnonzero(wrong)[0]
        raise AssertionError(f"{name} applied the push of {first} {marks[first]} times")
