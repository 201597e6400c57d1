"""Scenarios drawn from a seed: roles, settings and faults.

    build it up -> (faults, snapshots) -> horizon: everything is healthy -> every worker ends

`play(seed)` runs one under every invariant and returns how often rare things happened. The seed
decides everything: block sizes, timeouts too short for the network, one pinned version or two, full
disks, processes wrongly believed dead.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import numpy as np
from typing_extensions import override

from distbelief.parameter_server import replication
from distbelief.parameter_server.client.fetches import FetchResult
from distbelief.parameter_server.policy import DOWNPOUR
from distbelief.parameter_server.shard_config import ClientConfig, copy_names, other_copy
from distbelief.protocol import PushApplied, SessionRefused, role as rl
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
from distbelief.simulation.machines import SimulatedMachine, TraceKind
from distbelief.simulation.network import Link
from distbelief.supervisor import failover
from tests.simulation import overseer
from tests.simulation.invariants import shard_in
from tests.simulation.marks import Marks, small
from tests.simulation.scene import Check, sends
from tests.simulation.workers import PLAIN, WITH_STATE


T = TypeVar("T")

HORIZON: rl.Seconds = 0.4  # by then everything has healed; twice as long with two copies
HEAL_SECONDS: rl.Seconds = 10.0  # then everybody has ended


@dataclass(kw_only=True, eq=False)
class Scenario(Marks):
    """The settings that one seed stands for, and how often rare things happened."""

    haste: float  # by which all times of `replication` and `failover` are multiplied
    block_bytes: int
    saves: tuple[rl.Seconds, ...]
    port_reuse: float = 0.5
    sights: Counter[str] = field(default_factory=Counter, init=False)

    @property
    def horizon(self) -> rl.Seconds:
        return HORIZON * self.n_twins

    @override
    def checks(self, cluster: SimulatedCluster) -> Sequence[Check]:
        return (*super().checks(cluster), self._see)

    def run(self) -> None:
        """Run it to its end.

        Raises:
            SimulationFailed: An invariant is broken, or the run does not end.
        """
        for n, at in enumerate(sorted(self.saves)):
            self.cluster.run(until=at)
            for index in range(self.n_shards):
                self.save(f"{n:05}", index)
        self.cluster.run(until=self.horizon, max_events=100_000)
        # Workers that wait for each other add up their delays.
        patience = 1 if self.policy == DOWNPOUR else 4
        self.finish(within=patience * HEAL_SECONDS, max_events=patience * 50_000)
        self._see_end()

    # --- rare branches ---

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
        for _ in sends(happening, PushApplied):
            self.sights["duplicates acknowledged again"] += 1
        for _, refused in sends(happening, SessionRefused):
            self.sights["leases expired"] += "without progress" in refused.reason
            self.sights["strangers refused"] += "OpenSession" in refused.reason
            self.sights["kept waiting"] += "busy" in refused.reason

    def _see_end(self) -> None:
        sights, cluster = self.sights, self.cluster
        sights["takeovers"] += self.overseer.n_takeovers
        sights["seconds that are mute"] += self.overseer.n_alone
        sights["shards that forgot"] += len(self.seen.forgetful)
        for name in self.workers:
            sights["pushes lost"] += int(self.status(name)["pushes_lost"])
        sights["messages lost"] += cluster.counts.lost
        sights["events refused"] += cluster.counts.refused
        sights["torn snapshots"] += sum(
            not stored.whole for name in self.shards for stored in cluster.disk.snapshots(name)
        )


def host_of(kind: str, name: rl.Address) -> str:
    if name == rl.SUPERVISOR:
        return "host-0"
    match kind:
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
    haste = draw.pick(0.05, 0.1, 0.2)
    return Scenario(
        seed=seed,
        n_workers=n_workers,
        n_shards=n_shards,
        n_twins=n_twins,
        haste=haste,
        launch_seconds=0.2 * haste,
        takeover_seconds=max(0.08, haste),
        late_seconds=draw.pick(0.0, 0.02, 0.2),
        n_wanted=draw.integer(4, 12) * n_twins,
        hosts=partial(host_of, draw.pick("one", "one", "own", "own", "mixed")),
        rule=WITH_STATE if draw.coin() else PLAIN,
        block_bytes=draw.pick(768, 1024, 1536, 1 << 20),
        link=Link(latency_seconds=draw.pick(50e-6, 5e-4, 3e-3), jitter=1.0),
        shard_bytes_per_second=(rate := draw.pick(1e10, 2e6, 1e6)),
        machine=SimulatedMachine(disk_bytes_per_second=rate, jitter=1.0),
        shard_settings={
            "return_seconds": 0.5 * haste,
            "pin_seconds_max": draw.pick(0.01, 0.03, 2.0),
            "n_copies": draw.integer(1, 3),  # of the values, lent to readers
        },
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


# --- the play ---


@contextmanager
def set_for(scenario: Scenario) -> Iterator[None]:
    """Use blocks smaller than a megabyte, and shorter delays for replication."""
    haste = scenario.haste
    with small(block_bytes=scenario.block_bytes) as patch:
        patch.setattr(replication, "WINDOW_BLOCKS", 1 + scenario.seed % 3)
        patch.setattr(overseer, "BEAT_SECONDS", max(0.03, overseer.BEAT_SECONDS * haste))
        patch.setattr(overseer, "TICK_SECONDS", max(0.02, overseer.TICK_SECONDS * haste))
        for name in ("TICK", "SILENCE", "STALL", "REPORT"):
            seconds = getattr(replication, f"{name}_SECONDS")
            patch.setattr(replication, f"{name}_SECONDS", seconds * haste)
        patch.setattr(failover, "REST_SECONDS", failover.REST_SECONDS * haste)
        yield


def play(scenario: Scenario | int, *, trace: TraceKind = "content") -> Scenario:
    """Run a scenario, or that of a seed, to its end.

    Args:
        scenario: A seed decides everything that is drawn.
        trace: What a failure reports: the content of each event, or only the order, which
            takes less time.

    Raises:
        SimulationFailed: An invariant is broken, or the run does not end.
    """
    run = scenario_of(scenario) if isinstance(scenario, int) else scenario
    run = replace(run, trace=trace)
    with set_for(run):
        run.run()
    return run
