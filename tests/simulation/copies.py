"""Shards with two copies, an overseer that elects the primary, and an observer.

    overseer    launches both copies, receives heartbeats, promotes a primary
    workers     push marks (`workers`), and know both copies
    Scene       what the observer of `invariants` has seen

The overseer does the part of a job's supervisor that shards need.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

import pytest

from distbelief.core import vectors
from distbelief.core.memory import Memory
from distbelief.parameter_server import replication
from distbelief.parameter_server.layout import Layout
from distbelief.parameter_server.rules import UpdateRule
from distbelief.parameter_server.shard import Shard
from distbelief.parameter_server.shard_config import ClientConfig, ShardConfig, copy_names
from distbelief.protocol import BackupInSync, BackupUnresponsive, Heartbeat, SaveCheckpoint
from distbelief.roles import role as rl
from distbelief.simulation.cluster import SimulatedCluster
from distbelief.simulation.faults import Fault
from distbelief.simulation.machines import ClusterOptions, SimulatedMachine
from distbelief.supervisor.failover import PrimaryElection
from tests.simulation.invariants import ALL, Scene, StalenessIsTrue, WholeVersions, watch
from tests.simulation.workers import PLAIN, STEP, Ledger, Worker, layout_of, shard_of


BEAT_SECONDS: Final = 0.2
TICK_SECONDS: Final = 0.1
BEAT: Final = "beat"


class Beating:
    """A shard copy that sends heartbeats."""

    accepts = Shard.accepts

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
            name: SimulatedMachine(
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
        self.scene = Scene(
            cluster=self.cluster,
            shards={name: index for index, names in enumerate(self.copies) for name in names},
            workers=self.workers,
            ledger=self.ledger,
            host_bytes_max=1 << 30,
            elections=self.overseer.elections,
        )
        # A worker that holds a part cannot tell which version it has of a whole shard.
        of_whole = {WholeVersions, StalenessIsTrue}
        kinds = [kind for kind in ALL if not n_partial or kind not in of_whole]
        self.observer = watch(self.scene, kinds=kinds)

    def _worker(self, memory: Memory, *, n_wanted: int, holds_part: bool) -> Worker:
        return Worker(
            self.layout,
            memory,
            ledger=self.ledger,
            n_wanted=n_wanted,
            config=ClientConfig(pushes=True, retry_seconds=0.1),
            shard_copies=2,
            partial=holds_part,
        )

    # ----------------------------------------------------------------- what happens

    def finish(self, *, within: rl.Seconds = 120.0) -> None:
        """Let all workers end, and look at the totals."""
        self.cluster.run_until(self.done, within=within)
        self.observer.at_end()

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
