"""Shards with two copies, an overseer that elects the primary, and an observer.

    overseer    launches both copies, receives heartbeats, promotes a primary
    workers     push marks (`workers`), and know both copies
    Books       records what was acknowledged, what each copy held, what was lost

The overseer does the part of a job's supervisor that shards need.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt
import pytest

from distbelief.core import vectors
from distbelief.core.memory import Memory
from distbelief.parameter_server import replication
from distbelief.parameter_server.client.buffers import n_lost
from distbelief.parameter_server.client.client import ClientConfig
from distbelief.parameter_server.config import ShardConfig
from distbelief.parameter_server.layout import Layout
from distbelief.parameter_server.optimizers import UpdateRule
from distbelief.parameter_server.replication import copy_names
from distbelief.parameter_server.shard import Shard
from distbelief.protocol import (
    BackupInSync,
    BackupUnresponsive,
    Heartbeat,
    PushApplied,
    SaveCheckpoint,
)
from distbelief.roles import role as rl
from distbelief.simulation.cluster import SimulatedCluster
from distbelief.simulation.driver import HandledEvent
from distbelief.simulation.faults import Fault
from distbelief.simulation.machines import ClusterOptions, Machine
from distbelief.supervisor.failover import PrimaryElection
from tests.simulation.workers import (
    N_MARKS,
    PLAIN,
    STEP,
    Ledger,
    Unreadable,
    Worker,
    layout_of,
    marks_of,
    shard_of,
)


BEAT_SECONDS: Final = 0.2
TICK_SECONDS: Final = 0.1
BEAT: Final = "beat"


class Beating:
    """A shard copy that sends heartbeats."""

    accepts = rl.ALL_MESSAGES

    def __init__(self, shard: Shard) -> None:
        self.shard = shard

    def handle(self, event: rl.Event, now: rl.Seconds) -> Sequence[rl.Action]:
        if isinstance(event, rl.TimerFired) and event.name == BEAT:
            return self._beat(now)
        actions = self.shard.handle(event, now)
        if isinstance(event, rl.Started):
            actions = [*actions, *self._beat(now)]
        return actions

    def status(self) -> tuple[str, Mapping[str, float]]:
        return self.shard.status()

    def _beat(self, now: rl.Seconds) -> list[rl.Action]:
        state, counters = self.status()
        beat = Heartbeat(state=state, counters=dict(counters))
        return [
            rl.Send(receiver=rl.SUPERVISOR, message=beat),
            rl.SetTimer(name=BEAT, at=now + BEAT_SECONDS),
        ]


class Overseer:
    """Launches shard copies; `PrimaryElection` decides which one is primary."""

    accepts = rl.ALL_MESSAGES

    def __init__(self, n_shards: int) -> None:
        self.elections: dict[rl.Address, PrimaryElection] = {}
        self.lives: dict[rl.Address, int] = {}
        self.terminates = True  # those that are demoted
        self.n_takeovers = 0
        self.n_alone = 0
        for index in range(n_shards):
            one, other = copy_names(index, 2)
            term = PrimaryElection((one, other), first=1)
            self.elections |= dict.fromkeys((one, other), term)

    def handle(self, event: rl.Event, now: rl.Seconds) -> Sequence[rl.Action]:
        match event:
            case rl.Started():
                self.lives = dict.fromkeys(self.elections, 1)
                launches = [rl.Launch(name=name, incarnation=1) for name in self.lives]
                return [*launches, *self._tick(now)]
            case rl.TimerFired():
                return self._tick(now)
            case rl.PeerJoined() if self._knows(event.peer, event.incarnation):
                return self._joined(event.peer, event.incarnation, now)
            case rl.PeerLost() if self._knows(event.peer, event.incarnation):
                return self._lost(event.peer)
            case rl.Received() if self._knows(event.sender, event.incarnation):
                return self._hear(event, now)
            case _:
                return []

    def status(self) -> tuple[str, Mapping[str, float]]:
        return "overseeing", {}

    def _knows(self, name: rl.Address, incarnation: int) -> bool:
        return self.lives.get(name) == incarnation

    def _tick(self, now: rl.Seconds) -> list[rl.Action]:
        actions: list[rl.Action] = [rl.SetTimer(name="tick", at=now + TICK_SECONDS)]
        for term in dict.fromkeys(self.elections.values()):
            actions += self._follow(term.tick(now))
        return actions

    def _joined(self, name: rl.Address, incarnation: int, now: rl.Seconds) -> list[rl.Action]:
        return self._follow(self.elections[name].joined(name, incarnation, now))

    def _lost(self, name: rl.Address) -> list[rl.Action]:
        term = self.elections[name]
        self.n_takeovers += name == term.primary and term.in_sync
        self.lives[name] += 1
        again = rl.Launch(name=name, incarnation=self.lives[name])
        return [again, *self._follow(term.lost(name))]

    def _hear(self, event: rl.Received, now: rl.Seconds) -> list[rl.Action]:
        sender, term = event.sender, self.elections[event.sender]
        match event.message:
            case Heartbeat(counters=counters):
                return self._follow(term.heard(sender, counters, now))
            case BackupInSync(term=number):
                return self._follow(term.heard(sender, {"in_sync": number}, now))
            case BackupUnresponsive(term=number):
                self.n_alone += 1
                return self._follow(term.backup_unresponsive(sender, number, now))
            case _:
                return []

    def _follow(self, actions: list[rl.Action]) -> list[rl.Action]:
        demoted = [action for action in actions if isinstance(action, rl.Terminate)]
        self.n_takeovers += len(demoted)
        return actions if self.terminates else [a for a in actions if a not in demoted]


@dataclass
class Books:
    """What a global observer of one shard has seen."""

    cluster: SimulatedCluster
    index: int
    copies: Sequence[rl.Address]
    acknowledged: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(N_MARKS, bool))
    n_times_lost: int = 0  # no one had a whole copy
    n_twins: int = 0  # compared
    n_pushes_while_building: int = 0
    _settled: dict[rl.Address, int] = field(default_factory=dict)
    _states: dict[tuple[int, int], bytes] = field(default_factory=dict)
    _leads_as: int = 0  # the highest term with which a copy began to lead
    _leader: Shard | None = None  # that did

    def __call__(self, happening: HandledEvent) -> None:
        role = happening.role
        if isinstance(role, Worker):
            self._worker(role, happening)
        elif isinstance(role, Beating) and happening.name in self.copies:
            self._copy(role.shard, happening)

    def _worker(self, worker: Worker, happening: HandledEvent) -> None:
        settled = worker.client._links[self.index].pushing.settled
        before = self._settled.get(happening.name, 0)
        if settled > before:
            self._settled[happening.name] = settled
            for sequence, mark in worker.marks:
                if before < sequence <= settled:
                    self.acknowledged[mark] = True

    def _copy(self, shard: Shard, happening: HandledEvent) -> None:
        state, counters = shard.status()
        if isinstance(happening.event, rl.Computed) and not self._is_abandoned(shard):
            marks = marks_of(shard)
            wrong = np.flatnonzero((marks != 0.0) & (marks != 1.0))
            assert not wrong.size, f"{happening.name} has push {wrong[:1]} twice"
        leads = bool(counters["primary"])
        if leads and shard._sessions.incarnation > self._leads_as:
            self._leads_as, self._leader = shard._sessions.incarnation, shard
            self._check_kept(shard)
        self._check_fence(happening)
        if state in {"applying", "starting"}:
            return
        key = int(counters["term"]), shard._values.clock
        if leads and shard._sessions.incarnation == self._leads_as:
            self._states[key] = bits_of(shard)
        elif counters["in_sync"] and key in self._states and not self._is_abandoned(shard):
            self.n_twins += 1
            assert bits_of(shard) == self._states[key], f"{happening.name} differs"
        self.n_pushes_while_building += (
            not leads
            and not counters["in_sync"]
            and shard._values.n_held > 0
            and any(
                isinstance(a, rl.Send) and isinstance(a.message, PushApplied)
                for a in happening.actions
            )
        )

    def _is_abandoned(self, shard: Shard) -> bool:
        """Whether its primary goes on without it: what it reads may be anything."""
        if shard._backup is None or self._leader is None:
            return False
        number = shard.status()[1]["term"]
        return number < self._leader._primary.term

    def _check_fence(self, happening: HandledEvent) -> None:
        """Whoever led before acknowledges nothing that its successor lacks."""
        for action in happening.actions:
            if not isinstance(action, rl.Send) or action.receiver in self.copies:
                continue
            message = action.message
            if not isinstance(message, PushApplied):
                continue
            if message.shard_incarnation < self._leads_as:
                worker = self.cluster.role(action.receiver)
                assert isinstance(worker, Worker)
                assert self._leader is not None
                marks = [m for s, m in worker.marks if s <= message.sequence]
                assert (marks_of(self._leader)[marks] == 1.0).all(), (
                    f"{happening.name} acknowledges push {message.sequence} of "
                    f"{action.receiver}, which the leader after it does not have"
                )

    def _check_kept(self, shard: Shard) -> None:
        """Whoever begins to lead has all that was acknowledged, if anybody does."""
        missing = self.acknowledged & (marks_of(shard) != 1.0)
        if missing.any():
            self.n_times_lost += 1
            self.acknowledged &= ~missing


def bits_of(shard: Shard) -> bytes:
    """Return values and state, as bytes."""
    state = shard._values.state
    arrays = [Unreadable.read(shard._values), *(state[name] for name in sorted(state))]
    return b"".join(array.tobytes() for array in arrays)


@contextmanager
def small(*, block_bytes: int = 1024, window_pieces: int = 1) -> Iterator[None]:
    """Use blocks and windows so small that a shard of marks has several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vectors, "BLOCK_BYTES", block_bytes)
        patch.setattr(replication, "WINDOW_STATE_BLOCKS", window_pieces)
        yield


class Run:
    """Workers, and shards with two copies, on one host or on one each."""

    def __init__(
        self,
        seed: int,
        *,
        hosts: Callable[[rl.Address], str],
        faults: Sequence[Fault] = (),
        n_workers: int = 3,
        n_wanted: int = 40,
        n_shards: int = 1,
        rule: UpdateRule = PLAIN,
        shard_bytes_per_second: float = 2e7,
        step_seconds: rl.Seconds = 5e-3,
        n_partial: int = 0,  # of the workers
    ) -> None:
        self.ledger = Ledger()
        self.layout = layout_of(n_shards)
        self.copies = [copy_names(index, 2) for index in range(n_shards)]
        self.workers = [rl.Address(f"worker-{index}") for index in range(n_workers)]
        self.overseer = Overseer(n_shards)
        builders: dict[rl.Address, Callable[[Memory], object]] = {
            rl.SUPERVISOR: lambda _: self.overseer
        }
        for index, names in enumerate(self.copies):
            for name in names:
                builders[name] = partial(copy_of, name, index, layout=self.layout, rule=rule)
        builders |= {
            name: partial(self._worker, n_wanted=n_wanted, holds_part=i < n_partial)
            for i, name in enumerate(self.workers)
        }
        machines = {
            name: Machine(
                host=hosts(name),
                jitter=0.5,
                flops_per_second=STEP.flops / step_seconds,
                bytes_per_second=(shard_bytes_per_second if name.startswith("shard") else 1e10),
            )
            for name in builders
        }
        self.cluster = SimulatedCluster(
            builders,  # type: ignore[arg-type]
            seed=seed,
            options=ClusterOptions(
                introduce=True,
                machines=machines,
                faults=tuple(faults),
                start=(rl.SUPERVISOR, *self.workers),
                launch_seconds=0.2,
            ),
        )
        self.books = [Books(self.cluster, index, names) for index, names in enumerate(self.copies)]
        for books in self.books:
            self.cluster.observe(books)
        for one, other in self.copies:  # both keep their snapshots in one place
            shelves = self.cluster.disk._stored
            shelves[other] = shelves.setdefault(one, {})

    def _worker(self, memory: Memory, *, n_wanted: int, holds_part: bool) -> Worker:
        return Worker(
            [names[0] for names in self.copies],
            self.layout,
            memory,
            ledger=self.ledger,
            n_wanted=n_wanted,
            config=ClientConfig(pushes=True, retry_seconds=0.1),
            backups=[names[1] for names in self.copies],
            partial=holds_part,
        )

    # ----------------------------------------------------------------- what happens

    def finish(self, *, within: rl.Seconds = 120.0) -> None:
        """Let all workers end, and look at the totals."""
        self.cluster.run_until(self.done, within=within)
        for index in range(len(self.copies)):
            leader = self.leader(index)
            marks = marks_of(self.shard(leader))
            if not self.books[index].n_times_lost:
                assert marks[self.ledger.settled].all(), "an acknowledged push is gone"
            missing = self.ledger.n_issued - int(marks.sum())
            lost = sum(
                n_lost([self.worker(name).client._links[index].pushing.lost])
                for name in self.workers
            )
            assert lost == missing, f"{leader} lacks {missing}, {lost} are counted"

    def done(self) -> bool:
        return all(self.worker(name).state == "done" for name in self.workers)

    def until_whole(self, index: int = 0) -> None:
        term = self.term(index)
        self.cluster.run_until(lambda: term.in_sync, within=10.0)

    def save(self, label: str, index: int = 0) -> None:
        message = SaveCheckpoint(label=label)
        event = rl.Received(sender=rl.SUPERVISOR, incarnation=1, message=message)
        self.cluster.post(self.leader(index), event)

    # ---------------------------------------------------------------- who is who

    def term(self, index: int = 0) -> PrimaryElection:
        return self.overseer.elections[self.copies[index][0]]

    def leader(self, index: int = 0) -> rl.Address:
        leader = self.term(index).primary
        assert leader is not None
        return leader

    def second(self, index: int = 0) -> rl.Address:
        one, other = self.copies[index]
        return other if self.leader(index) == one else one

    def shard(self, name: rl.Address) -> Shard:
        role = self.cluster.role(name)
        assert isinstance(role, Beating)
        return role.shard

    def worker(self, name: rl.Address) -> Worker:
        role = self.cluster.role(name)
        assert isinstance(role, Worker)
        return role


def copy_of(
    name: rl.Address, index: int, memory: Memory, *, layout: Layout, rule: UpdateRule
) -> Beating:
    config = ShardConfig(index=index, layout=layout, rule=rule, name=name, is_replicated=True)
    return Beating(shard_of(index, layout, memory, config))


def together(_: rl.Address) -> str:
    """Let all roles share memory."""
    return "one"


def apart(_: rl.Address) -> str:
    """Let no one share memory."""
    return ""


def each_copy_apart(name: rl.Address) -> str:
    """Let the first copies share memory with the workers, the others with no one."""
    return "" if name.endswith("b") else "one"
