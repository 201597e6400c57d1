"""Scenarios drawn from a seed: roles, settings and faults.

    build it up -> (faults, snapshots) -> horizon: everything is healthy -> every worker ends

`play(seed)` runs one under every invariant and returns how often rare things happened. The seed
decides everything: block sizes, timeouts too short for the network, one pinned version or two, full
disks, processes wrongly believed dead.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
import pytest
from typing_extensions import override

from distbelief.core import vectors
from distbelief.core.memory import Memory
from distbelief.parameter_server import replication
from distbelief.parameter_server.client.fetches import FetchResult
from distbelief.parameter_server.config import ClientConfig, copy_names, other_copy
from distbelief.parameter_server.layout import ElementType
from distbelief.parameter_server.optimizers import UpdateRule
from distbelief.parameter_server.policy import DOWNPOUR, ExchangePolicy
from distbelief.protocol import PushApplied, SaveCheckpoint, SessionRefused
from distbelief.roles import role as rl
from distbelief.simulation.cluster import SimulatedCluster
from distbelief.simulation.driver import HandledEvent
from distbelief.simulation.faults import (
    CutOff,
    Delay,
    DiskFull,
    Drop,
    Duplicate,
    Fault,
    Kill,
    Pause,
    Slow,
    Supersede,
    TornSnapshot,
)
from distbelief.simulation.machines import ClusterOptions, Machine, TraceKind
from distbelief.simulation.network import Link
from distbelief.supervisor import failover
from tests.simulation import copies
from tests.simulation.copies import Beating, Overseer
from tests.simulation.invariants import ALL, Invariant, Scene, shard_in, watch
from tests.simulation.workers import (
    N_MARKS,
    PLAIN,
    WITH_STATE,
    Ledger,
    Worker,
    config_of,
    layout_of,
    shard_of,
)


T = TypeVar("T")

HORIZON: rl.Seconds = 0.4  # by then everything has healed; twice as long with two copies
HEAL_SECONDS: rl.Seconds = 10.0  # then everybody has ended
SHARD_BYTES = 8 * N_MARKS


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """The settings that one seed stands for."""

    seed: int
    n_workers: int
    n_shards: int
    n_twins: int  # copies of each shard
    haste: float  # by which all times of `forwarding` and `term` are multiplied
    late_seconds: rl.Seconds  # from the fall of a primary to its end
    n_wanted: int  # pushes of each worker
    hosts: str  # "one", "own" (block messages), "mixed"
    rule: UpdateRule
    block_bytes: int
    latency_seconds: rl.Seconds
    shard_bytes_per_second: float  # how long applying takes
    pin_seconds_max: rl.Seconds
    n_copies: int  # of the values, lent to readers
    client: ClientConfig
    saves: tuple[rl.Seconds, ...]
    faults: tuple[Fault, ...]
    policy: ExchangePolicy = DOWNPOUR

    @property
    def horizon(self) -> rl.Seconds:
        return HORIZON * self.n_twins

    @property
    def twins(self) -> list[tuple[rl.Address, ...]]:
        """The copies of each shard."""
        return [copy_names(index, self.n_twins) for index in range(self.n_shards)]

    @property
    def shards(self) -> list[rl.Address]:
        return [name for names in self.twins for name in names]

    @property
    def workers(self) -> list[rl.Address]:
        return [rl.Address(f"worker-{k}") for k in range(self.n_workers)]

    @property
    def host_bytes_max(self) -> int:
        """Return memory for values and two push buffers per worker, in several incarnations.

        Two incarnations, because clients release the memory of a dead shard as soon as they know
        the next one. A replaced worker never releases any, and each client keeps the memory of
        its last session. Clients that never heard of the next incarnation keep values of
        different ones.
        """
        n_superseded = sum(isinstance(fault, Supersede) for fault in self.faults)
        n_generations = (2 + n_superseded) * len(self.shards)
        n_vectors = n_generations * (1 + 2 * self.n_workers)
        n_vectors += self.n_shards * (self.n_workers - 1)
        return n_vectors * (SHARD_BYTES + 64)

    def host(self, name: rl.Address) -> str:
        match self.hosts:
            case "one":
                return "one"
            case "own":
                return ""
            case _:
                near = name.startswith("shard") and not name.endswith("b")
                return "one" if near or name == "worker-0" else "two"


def scenario_of(seed: int) -> Scenario:
    """Draw the scenario of a seed."""
    n_twins = 1 + seed % 2
    draw = Draw(seed, horizon=HORIZON * n_twins)
    n_workers, n_shards = draw.integer(1, 4), draw.integer(1, 3)
    shards = [name for k in range(n_shards) for name in copy_names(k, n_twins)]
    workers = [rl.Address(f"worker-{k}") for k in range(n_workers)]
    # A third of all seeds spares the shards, so that nothing acknowledged may be lost;
    # a third spares the workers, so that what is lost can be counted.
    spared = draw.pick(shards, workers, [])
    # Of two copies a third of all seeds spares one, so that the other can take over.
    if n_twins == 2 and draw.coin(0.6):
        spared = [*spared, *draw.pick(shards[::2], shards[1::2])]
    victims = [name for name in (*shards, *workers) if name not in spared]
    return Scenario(
        seed=seed,
        n_workers=n_workers,
        n_shards=n_shards,
        n_twins=n_twins,
        haste=draw.pick(0.05, 0.1, 0.2),
        late_seconds=draw.pick(0.0, 0.02, 0.2),
        n_wanted=draw.integer(4, 12) * n_twins,
        hosts=draw.pick("one", "one", "own", "own", "mixed"),
        rule=WITH_STATE if draw.coin() else PLAIN,
        block_bytes=draw.pick(768, 1024, 1536, 1 << 20),
        latency_seconds=draw.pick(50e-6, 5e-4, 3e-3),
        shard_bytes_per_second=draw.pick(1e10, 2e6, 1e6),
        pin_seconds_max=draw.pick(0.01, 0.03, 2.0),
        n_copies=draw.integer(1, 3),
        client=ClientConfig(
            pushes=True,
            retry_seconds=draw.pick(0.01, 0.05, 0.5),
            retry_seconds_max=1.0,
            torn_seconds_max=draw.pick(0.0, 0.005, 0.1),
            credit_blocks=draw.pick(1, 2, 16),
        ),
        saves=tuple(draw.moment() for _ in range(draw.integer(0, 8))),
        faults=tuple(faults_of(draw, victims, shards, workers)),
    )


class Draw:
    """Random choices of one scenario."""

    def __init__(self, seed: int, *, horizon: rl.Seconds) -> None:
        self._stream = np.random.default_rng([seed, 0x5EED])
        self.horizon = horizon

    def integer(self, low: int, high: int) -> int:
        """Return one of low, …, high - 1."""
        return int(self._stream.integers(low, high))

    def pick(self, *values: T) -> T:
        return values[self.integer(0, len(values))]

    def coin(self, probability: float = 0.5) -> bool:
        return bool(self._stream.random() < probability)

    def moment(self) -> rl.Seconds:
        return float(self._stream.uniform(0.0, 0.9 * self.horizon))

    def window(self) -> tuple[rl.Seconds, rl.Seconds]:
        """Return a beginning and a length, mostly short, that end by the horizon."""
        at = self.moment()
        seconds = float(self._stream.exponential(0.15 * self.horizon))
        return at, min(seconds, 0.95 * self.horizon - at)

    def probability(self) -> float:
        return float(self._stream.uniform(0.02, 0.3))


def faults_of(
    draw: Draw,
    victims: Sequence[rl.Address],
    shards: Sequence[rl.Address],
    workers: Sequence[rl.Address],
) -> Iterator[Fault]:
    """Draw what breaks: processes that may die, anybody's pauses, messages, disks."""
    has_twins = any(name.endswith("b") for name in shards)
    everybody = [*shards, *workers, *([rl.SUPERVISOR] if has_twins else [])]
    for name in victims:
        launched = has_twins and name in shards
        for _ in range(draw.integer(0, 3)):
            yield from _deaths(draw, name, launched=launched)
        if name in shards and draw.coin(0.4):
            yield TornSnapshot(at=draw.moment(), role=name)
    if has_twins:
        for name in shards:
            yield from _between_twins(draw, name, workers)
    for name in everybody:
        yield from _disturbances(draw, name, everybody)
    if draw.coin(0.4):
        at, seconds = draw.window()
        yield DiskFull(at=at, seconds=seconds)
    yield from _troubles(draw)
    yield from _heard_by_the_next_life(
        draw, [name for name in victims if has_twins and name in shards[::2]]
    )


def _deaths(draw: Draw, name: rl.Address, *, launched: bool) -> Iterator[Fault]:
    """Draw a death; whoever was launched is launched again, the others restart."""
    at, seconds = draw.window()
    if not launched and draw.coin(0.3):  # taken for dead: it stood still, and goes on afterwards
        yield Pause(at=at, role=name, seconds=seconds)
        yield Supersede(at=at + seconds / 2, role=name)
        return
    yield Kill(
        at=at,
        role=name,
        restart_after=None if launched else seconds / 2,
        after_actions=draw.integer(0, 4) if draw.coin(0.7) else None,
        tears=draw.coin(),
    )


def _between_twins(draw: Draw, name: rl.Address, workers: Sequence[rl.Address]) -> Iterator[Fault]:
    """Draw what is bad for a copy if it leads, or follows."""
    if draw.coin(0.15):  # its successor is told, and one worker hears nothing of it
        at, seconds = 0.5 * draw.moment(), 0.3
        worker, loses = draw.pick(*workers), draw.coin()
        yield CutOff(at=at, a=name, b=rl.SUPERVISOR, seconds=seconds)
        yield CutOff(at=at, a=other_copy(name), b=worker, seconds=seconds, loses=loses)
    if draw.coin(0.4):  # what it says to the other one comes in any order
        yield Delay(
            probability=0.5,
            seconds_max=draw.pick(0.002, 0.01),
            overtaken=True,
            between=(name, other_copy(name)),
            at=draw.coin() * draw.moment(),
            seconds=0.3 * draw.horizon,
        )


def _heard_by_the_next_life(draw: Draw, copies: Sequence[rl.Address]) -> Iterator[Fault]:
    """Draw a death of one of them, with words of the supervisor on their way to it."""
    if not copies or draw.coin(0.6):
        return
    name = draw.pick(*copies)
    at, seconds = draw.pick(0.06, 0.8) * draw.moment(), draw.pick(0.05, 0.1)
    told = (rl.SUPERVISOR, name)
    yield Duplicate(probability=0.5, seconds_max=seconds, between=told, seconds=at)
    yield CutOff(at=at, a=rl.SUPERVISOR, b=name, seconds=seconds, one_way=True)
    yield Kill(at=at + draw.pick(0.0, 0.3) * seconds, role=name)


def _disturbances(draw: Draw, name: rl.Address, everybody: Sequence[rl.Address]) -> Iterator[Fault]:
    """Draw what anybody lives through."""
    if draw.coin(0.4):
        at, seconds = draw.window()
        yield Pause(at=at, role=name, seconds=seconds)
    if draw.coin(0.2):
        at, seconds = draw.window()
        yield Slow(at=at, role=name, factor=8.0, seconds=seconds)
    if draw.coin(0.2):
        at, seconds = draw.window()
        other = draw.pick(None, *(peer for peer in everybody if peer != name))
        yield CutOff(
            at=at, a=name, b=other, seconds=seconds, loses=draw.coin(), one_way=draw.coin()
        )


def _troubles(draw: Draw) -> Iterator[Fault]:
    """Draw what happens to messages."""
    late = draw.pick(0.002, 0.02, 0.1)
    if draw.coin(0.6):
        at, seconds = draw.window()
        yield Drop(probability=draw.probability(), at=at, seconds=3 * seconds)
    if draw.coin(0.6):
        at, seconds = draw.window()
        yield Duplicate(
            probability=draw.probability(), seconds_max=late, at=at, seconds=3 * seconds
        )
    if draw.coin(0.6):
        at, seconds = draw.window()
        yield Delay(
            probability=draw.probability(),
            seconds_max=late,
            overtaken=draw.coin(0.7),
            at=at,
            seconds=3 * seconds,
        )


# ----------------------------------------------------------------------- the play


class LateOverseer(Overseer):
    """Decides early, and ends demoted copies late: meanwhile there are two primaries."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario.n_shards)
        self._late_seconds = scenario.late_seconds
        self._now: rl.Seconds = 0.0
        for of_shard in self.elections.values():
            of_shard._takeover_seconds = max(0.08, scenario.haste)

    def leader(self, names: Sequence[rl.Address]) -> rl.Address | None:
        """Return who leads, of these copies."""
        return names[0] if len(names) == 1 else self.elections[names[0]].primary

    @override
    def handle(self, event: rl.Event, now: rl.Seconds) -> Sequence[rl.Action]:
        self._now = now
        if isinstance(event, rl.TimerFired) and event.name.startswith("deposed "):
            _, name, life = event.name.split()
            there = self.lives[rl.Address(name)] == int(life)
            return [rl.Terminate(name=rl.Address(name))] if there else []
        return super().handle(event, now)

    @override
    def _follow(self, actions: list[rl.Action]) -> list[rl.Action]:
        actions = super()._follow(actions)
        return [self._late(action) for action in actions] if self._late_seconds else actions

    def _late(self, action: rl.Action) -> rl.Action:
        if not isinstance(action, rl.Terminate):
            return action
        timer = f"deposed {action.name} {self.lives[action.name]}"
        return rl.SetTimer(name=timer, at=self._now + self._late_seconds)


class Play:
    """A running scenario."""

    def __init__(
        self,
        scenario: Scenario,
        *,
        trace: TraceKind = "content",
        kinds: Sequence[type[Invariant]] = ALL,
    ) -> None:
        self.scenario = scenario
        self.ledger = Ledger()
        self.sights: Counter[str] = Counter()
        self.overseer = LateOverseer(scenario)
        # Words of bfloat16 are of float32.
        numbers = scenario.policy.numbers
        dtype: ElementType = "float64" if numbers == "float32" else "float32"
        layout = layout_of(scenario.n_shards, dtype=dtype)

        def build_worker(memory: Memory) -> Worker:
            return Worker(
                layout,
                memory,
                ledger=self.ledger,
                n_wanted=scenario.n_wanted,
                config=replace(scenario.client, numbers=numbers),
                shard_copies=scenario.n_twins,
                policy=scenario.policy,
            )

        def build_shard(index: int, name: rl.Address, memory: Memory) -> rl.Role:
            config = config_of(
                index,
                layout,
                rule=scenario.rule,
                policy=scenario.policy,
                return_seconds=0.5 * scenario.haste,
                pin_seconds_max=scenario.pin_seconds_max,
                n_copies=scenario.n_copies,
                name=name,
                is_replicated=scenario.n_twins > 1,
            )
            shard = shard_of(index, layout, memory, config)
            return Beating(shard) if scenario.n_twins > 1 else shard

        builders: dict[rl.Address, Callable[[Memory], rl.Role]] = {
            name: partial(build_shard, index, name)
            for index, names in enumerate(scenario.twins)
            for name in names
        }
        if scenario.n_twins > 1:
            builders[rl.SUPERVISOR] = lambda _: self.overseer
        builders |= dict.fromkeys(scenario.workers, build_worker)
        self.cluster = SimulatedCluster(builders, seed=scenario.seed, options=self._options(trace))
        scene = Scene(
            cluster=self.cluster,
            shards={name: index for index, names in enumerate(scenario.twins) for name in names},
            workers=scenario.workers,
            ledger=self.ledger,
            host_bytes_max=scenario.host_bytes_max,
            elections=self.overseer.elections,
        )
        self._observer = watch(scene, kinds=kinds)
        self.cluster.observe(self._see)

    def _options(self, trace: TraceKind) -> ClusterOptions:
        scenario = self.scenario

        def machine(name: rl.Address) -> Machine:
            slow = name in scenario.shards
            return Machine(
                host=scenario.host(name),
                bytes_per_second=scenario.shard_bytes_per_second if slow else 1e10,
                disk_bytes_per_second=scenario.shard_bytes_per_second,
                jitter=1.0,
            )

        launched = scenario.n_twins > 1
        return ClusterOptions(
            introduce=True,
            start=(rl.SUPERVISOR, *scenario.workers) if launched else None,
            launch_seconds=0.2 * scenario.haste,
            machines={name: machine(name) for name in (*scenario.shards, *scenario.workers)},
            link=Link(latency_seconds=scenario.latency_seconds, jitter=1.0),
            faults=scenario.faults,
            port_reuse=0.5,
            trace=trace,
        )

    def run(self) -> None:
        """Run it to its end.

        Raises:
            SimulationFailed: An invariant is broken, or the run does not end.
        """
        for n, at in enumerate(sorted(self.scenario.saves)):
            self.cluster.run(until=at)
            for names in self.scenario.twins:
                leader = self.overseer.leader(names)
                if leader is not None:
                    self.cluster.post(leader, save(f"{n:05}"))
        self.cluster.run(until=self.scenario.horizon, max_events=100_000)
        # Workers that wait for each other add up their delays.
        patience = 1 if self.scenario.policy == DOWNPOUR else 4
        self.cluster.run_until(
            self._done, within=patience * HEAL_SECONDS, max_events=patience * 50_000
        )
        self._observer.at_end()
        self._see_end()

    def _done(self) -> bool:
        """Return whether all workers have ended, and every shard has its primary.

        One that has just fallen is no longer there to be asked what it kept, and the
        next incarnation of its name has begun with a snapshot at best.
        """
        cluster = self.cluster
        return all(
            getattr(cluster.role(name), "state", "") == "done" and cluster.is_alive(name)
            for name in self.scenario.workers
        ) and all(
            cluster.is_alive(name) and cluster.incarnation(name) == life
            for name, life in self._observer.scene.serves.values()
        )

    # ------------------------------------------------------------- rare branches

    def _see(self, happening: HandledEvent) -> None:
        event, sights = happening.event, self.sights
        of_shard = shard_in(happening.role) is not None
        match event:
            case rl.Started(incarnation=number, restored=restored):
                kind = "shard" if of_shard else "worker"
                sights[f"{kind}s restarted"] += number > 1
                sights["restored from a snapshot"] += restored is not None
            case rl.Persisted(error=error):
                sights["snapshots"] += error is None
                sights["snapshots without room"] += error is not None
            case rl.Computed(result=FetchResult() as installed):
                sights["torn reads"] += bool(installed.torn)
            case rl.Received() if of_shard:
                self._see_answers(happening)
            case _:
                pass
        newest = self.cluster.incarnation(happening.name)
        sights["words of the superseded"] += happening.incarnation < newest

    def _see_answers(self, happening: HandledEvent) -> None:
        for action in happening.actions:
            match action:
                case rl.Send(message=PushApplied()):
                    self.sights["duplicates acknowledged again"] += 1
                case rl.Send(message=SessionRefused(reason=reason)):
                    self.sights["leases expired"] += "without progress" in reason
                    self.sights["strangers refused"] += "OpenSession" in reason
                    self.sights["kept waiting"] += "busy" in reason
                case _:
                    pass

    def _see_end(self) -> None:
        sights, cluster = self.sights, self.cluster
        sights["takeovers"] += self.overseer.n_takeovers
        sights["seconds that are mute"] += self.overseer.n_alone
        sights["shards that forgot"] += len(self._observer.scene.forgetful)
        for name in self.scenario.workers:
            counters = cluster.role(name).status()[1]
            sights["pushes lost"] += int(counters["pushes_lost"])
        sights["messages lost"] += cluster.counts.lost
        sights["events refused"] += cluster.counts.refused
        sights["torn snapshots"] += sum(
            not stored.whole
            for name in self.scenario.shards
            for stored in cluster.disk.snapshots(name)
        )


def save(label: str) -> rl.Received:
    return rl.Received(
        sender=rl.Address("supervisor"), incarnation=1, message=SaveCheckpoint(label=label)
    )


@contextmanager
def set_for(scenario: Scenario) -> Iterator[None]:
    """Use blocks smaller than a megabyte, and shorter delays for replication."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vectors, "BLOCK_BYTES", scenario.block_bytes)
        patch.setattr(replication, "WINDOW_STATE_BLOCKS", 1)
        patch.setattr(replication, "WINDOW_BLOCKS", 1 + scenario.seed % 3)
        patch.setattr(copies, "BEAT_SECONDS", max(0.03, copies.BEAT_SECONDS * scenario.haste))
        patch.setattr(copies, "TICK_SECONDS", max(0.02, copies.TICK_SECONDS * scenario.haste))
        for name in ("TICK", "SILENCE", "STALL", "REPORT"):
            seconds = getattr(replication, f"{name}_SECONDS")
            patch.setattr(replication, f"{name}_SECONDS", seconds * scenario.haste)
        patch.setattr(failover, "REST_SECONDS", failover.REST_SECONDS * scenario.haste)
        yield


def play(seed: int, *, trace: TraceKind = "content") -> Play:
    """Run the scenario of a seed to its end.

    Args:
        seed: Decides everything that is drawn.
        trace: What a failure reports: the content of each event, or only the order, which
            takes less time.

    Raises:
        SimulationFailed: An invariant is broken, or the run does not end.
    """
    scenario = scenario_of(seed)
    with set_for(scenario):
        drama = Play(scenario, trace=trace)
        drama.run()
    return drama
