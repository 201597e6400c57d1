"""Downpour first, Sandblaster to finish: on the same shards, whatever breaks."""

from dataclasses import replace
from functools import cache

import pytest

from distbelief.protocol import Push, SaveCheckpoint, ShardCommand
from distbelief.protocol.role import Address
from distbelief.simulation.driver import HandledEvent
from distbelief.simulation.faults import Kill, Slow
from sandblaster.chunks import COORDINATOR
from sandblaster.optimizers.lbfgs import LBFGS
from tests.simulation.jobs import seeds
from tests.simulation.sandblasts import Sandblast, drawn
from tests.simulation.scene import heard, sends


METHOD = LBFGS(tolerance=1e-8, value_tolerance=0.0)
# As slow as a replica, a shard would take 8 ms to apply a push, in which replicas try in vain to
# read its values, every millisecond.
WARM = Sandblast(warm_steps=20, n_shards=2, n_replicas=3, method=METHOD, shard_flops=1e9)


@cache
def optimum() -> float:
    """Return where a run ends that has no warm start."""
    run = replace(WARM, warm_steps=0)
    run.play()
    return run.checker.losses[-1]


class Watch:
    """Notes the pushes of Downpour, and those that a coordinator might have met."""

    def __init__(self, run: Sandblast) -> None:
        self.pushes: set[tuple[Address, Address, int]] = set()
        self.n_after = 0
        self._driven = False
        run.cluster.observe(self._see)

    def _see(self, happening: HandledEvent) -> None:
        self._driven |= heard(happening.event, ShardCommand) is not None
        for shard, push in sends(happening, Push):
            if not push.commit_token:
                self.n_after += self._driven
                self.pushes.add((happening.name, shard, push.sequence))


def finishes(scene: Sandblast) -> Watch:
    """Play it; the end must be that of a run without a warm start."""
    run = replace(scene)
    watch = Watch(run)
    run.play()
    reason, last = run.coordinator.reason, run.coordinator.metrics.iterated
    assert reason is not None
    assert reason.converged, reason
    assert last is not None
    assert last.loss == pytest.approx(optimum(), abs=1e-9)
    return watch


def test_the_second_part_continues_where_the_first_ended() -> None:
    run = replace(WARM)
    watch = Watch(run)
    run.play()
    assert len(watch.pushes) == 2 * 3 * 20
    assert watch.n_after == 0
    assert run.checker.losses[-1] == pytest.approx(optimum(), abs=1e-9)
    first = min(run.checker.points)  # where the coordinator began
    values = run.checker.points[first]
    assert all(abs(vector).max() > 0.0 for vector in values.values())


def start_of(scene: Sandblast) -> tuple[list[float], Watch]:
    """Return where the coordinator began."""
    run = replace(scene)
    watch = Watch(run)
    run.play()
    assert run.checker.losses[-1] == pytest.approx(optimum(), abs=1e-9)
    first = run.checker.points[min(run.checker.points)]
    return [float(value) for name in sorted(first) for value in first[name].reshape(-1)], watch


def test_sgd_of_one_replica_comes_first_whatever_the_others_do() -> None:
    """Dean et al. 2012, section 5: a warm start is SGD of a single replica.

    It was Downpour SGD of all replicas, and so another point each time.
    """
    scene = replace(WARM, warm_replicas=1)
    alone, _ = start_of(replace(scene, n_replicas=1))
    beside, watch = start_of(scene)
    assert beside == alone
    assert {name for name, _, _ in watch.pushes} == {Address("replica-0")}
    assert len(watch.pushes) == 2 * 20
    kill = Kill(at=0.02, role=Address("replica-1"), restart_after=0.01)
    assert start_of(replace(scene, faults=(kill,)))[0] == alone


def test_slow_workers_are_stopped_and_awaited() -> None:
    slow = Slow(at=0.0, role=Address("replica-0"), factor=50.0, seconds=100.0)
    watch = finishes(replace(WARM, faults=(slow,)))
    assert len(watch.pushes) < 2 * 3 * 20
    assert watch.n_after == 0


@pytest.mark.each_value
@pytest.mark.parametrize("role", ["replica-0", COORDINATOR, "shard-0"])
@pytest.mark.parametrize("at", [0.005, 0.06, 0.15])  # the second part begins at 0.075
def test_a_death_in_either_part_changes_no_result(role: str, at: float) -> None:
    kill = Kill(at=at, role=Address(role), restart_after=0.01)
    watch = finishes(replace(WARM, faults=(kill,)))
    assert watch.n_after == 0


def test_a_shard_that_dies_in_the_warm_start_resumes_from_its_snapshot() -> None:
    """After a restart the requested save waited for the first point."""
    shard = Address("shard-0")
    kill = Kill(at=0.06, role=shard, restart_after=0.01)
    run = replace(WARM, warm_steps=60, faults=(kill,))
    run.cluster.run(until=0.05)
    assert not run.checker.points  # it is not over
    run.tell(COORDINATOR, SaveCheckpoint(label="00001"))
    run.cluster.run(until=0.0599)
    assert [saved.label for saved in run.checker.saved] == ["00001"]
    newest = run.newest(shard)
    assert int(newest.facts["clock"]) > 0
    run.cluster.run(until=0.12)
    assert run.status(shard)["clock"] >= int(newest.facts["clock"])
    run.play()
    assert run.checker.losses[-1] == pytest.approx(optimum(), abs=1e-9)


def test_a_warm_start_of_which_all_died_goes_on_from_its_checkpoints() -> None:
    roles = (COORDINATOR, "shard-0", "shard-1", "replica-0", "replica-1", "replica-2")
    kills = tuple(Kill(at=0.15, role=Address(name), restart_after=0.01) for name in roles)
    run = replace(WARM, warm_steps=60, warm_once=True, faults=kills)
    run.cluster.run(until=0.12)
    run.tell(COORDINATOR, SaveCheckpoint(label="00001"))
    run.cluster.run(until=0.1499)
    n_saved = sum(int(run.newest(name).facts["clock"]) for name in run.shards)
    assert n_saved > 60
    watch = Watch(run)
    run.play()
    assert run.checker.losses[-1] == pytest.approx(optimum(), abs=1e-9)
    assert watch.n_after == 0
    whole = finishes(replace(WARM, warm_steps=60))
    assert len(watch.pushes) <= len(whole.pushes) - n_saved


@pytest.mark.parametrize("seed", seeds(3, of=6))
def test_whatever_breaks_it_comes_to_its_end(seed: int) -> None:
    scene = drawn(seed)
    finishes(replace(scene, method=METHOD, warm_steps=5))
