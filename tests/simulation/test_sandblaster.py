"""Sandblaster under faults: whatever breaks, the same sums and the same end.

`sandblasts` says what a seed stands for and what is checked. A seed that fails is
played alone by SIMULATION_SEEDS=FIRST:STOP; `make soak` plays 10,000.
"""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise

import pytest

from distbelief.protocol import (
    Assignment,
    BeginEvaluation,
    CommandDone,
    FinishEvaluation,
    Message,
    ShardCommand,
    WorkReport,
)
from distbelief.protocol.codec import Codec
from distbelief.protocol.role import Address, Seconds
from distbelief.simulation.driver import HandledEvent
from distbelief.simulation.faults import Kill, Pause, Slow
from distbelief.simulation.trace import SimulationFailed
from sandblaster.chunks import COORDINATOR, ChunkSizes
from tests.simulation.sandblast_variants import VARIANTS
from tests.simulation.sandblasts import (
    BOUNDED,
    DIRECTED,
    METHOD,
    SECONDS_PER_MINI_BATCH,
    Sandblast,
    drawn,
    play,
)
from tests.simulation.scene import sends
from tests.simulation.test_seeds import chunks, name, play_seeds
from tests.simulation.variants import failure_of


FILE = "tests/simulation/test_sandblaster.py"

SELDOM = (
    "backups",
    "coordinators restarted",
    "grants void",
    "replicas restarted",
    "saved",
    "shards restarted",
)
"""What happens in one of 25 seeds at the least, of 100 or more."""


def played(scene: Sandblast) -> Sandblast:
    """Play it; if that fails, once more with a full trace."""
    try:
        return play(replace(scene, trace="order"))
    except SimulationFailed:
        return play(scene)


def play_all(seeds: range) -> None:
    seldom = SELDOM if len(seeds) >= 100 else ()
    play_seeds(seeds, lambda seed: played(drawn(seed)).checker.sights, file=FILE, seldom=seldom)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", chunks(range(20), 20), ids=name)
def test_whatever_breaks_the_sums_and_the_end_are_the_same(seeds: range) -> None:
    play_all(seeds)


@pytest.mark.slow
def test_within_bounds_too_the_end_is_the_same() -> None:
    """Nothing of a bound is lost with a shard or the coordinator."""
    seen = Counter[str]()
    for seed in range(6):
        seen += played(replace(drawn(seed), method=BOUNDED)).checker.sights
    assert seen["shards restarted"]
    assert seen["coordinators restarted"]


@pytest.mark.soak
@pytest.mark.parametrize("seeds", chunks(range(20, 10_020), 100), ids=name)
def test_sums_and_end_are_the_same_for_ten_thousand_seeds(seeds: range) -> None:
    play_all(seeds)


@pytest.mark.parametrize("directed", DIRECTED)
def test_deaths_at_a_named_place_change_no_sum(directed: Callable[[], Sandblast]) -> None:
    scene = directed()
    checker = play(scene).checker
    assert scene.faults
    assert checker.n_sealed
    assert [what for what in checker.sights if "restarted" in what]


N_SEEDS = 60  # in which a variant is to be caught


@pytest.mark.slow
@pytest.mark.timeout(300)  # if a scenario has changed, and the seed is looked for
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_protocol_without_one_of_its_rules_is_caught(variant: str) -> None:
    seeds = (drawn(seed) for seed in range(N_SEEDS))
    scenes = chain([VARIANTS.caught_by[variant]()], seeds)
    caught = (failure_of(VARIANTS[variant], partial(play, scene)) for scene in scenes)
    assert any(caught), "nothing notices"


# --- work and messages ---


def commands_to(shard: Address, happening: HandledEvent) -> list[ShardCommand]:
    """Return the commands just sent to this shard."""
    return [one for receiver, one in sends(happening, ShardCommand) if receiver == shard]


def seconds_of_evaluations(scene: Sandblast) -> tuple[Sandblast, list[Seconds]]:
    """Return how long each evaluation took, from `BeginEvaluation` to `FinishEvaluation`."""
    run = replace(scene)
    times: list[Seconds] = []

    known: set[tuple[int, int]] = set()

    def see(happening: HandledEvent) -> None:
        for command in commands_to(Address("shard-0"), happening):
            key = command.series, command.number
            if isinstance(command.task, BeginEvaluation | FinishEvaluation) and key not in known:
                known.add(key)
                times.append(run.cluster.now)

    run.cluster.observe(see)
    run.play()
    begins, ends = times[::2], times[1::2]
    return run, [end - begin for begin, end in zip(begins, ends, strict=True)]


def ideal_seconds(scene: Sandblast, speeds: Sequence[float]) -> Seconds:
    """Return what the summed speeds allow; work takes 5 % longer than modelled."""
    n_mini_batches = scene.n_samples / scene.chunk_sizes.mini_batch_size
    return 1.05 * n_mini_batches * SECONDS_PER_MINI_BATCH / sum(speeds)


STRAGGLER = Sandblast(
    n_replicas=4,
    speeds=(1.0, 1.0, 1.0, 0.2),
    n_samples=344,
    chunk_sizes=ChunkSizes(mini_batch_size=2, mini_batches_per_chunk=4),
)


def examples_computed(run: Sandblast) -> list[float]:
    return [run.cluster.role(name).status()[1]["samples"] for name in run.replicas]


def test_a_replica_twice_as_fast_computes_twice_as_much() -> None:
    """DB-14."""
    scene = replace(
        STRAGGLER,
        speeds=(2.0, 1.0, 1.0, 1.0),
        chunk_sizes=ChunkSizes(mini_batch_size=2, mini_batches_per_chunk=2),
    )
    run, times = seconds_of_evaluations(scene)
    fast, *others = examples_computed(run)
    mean = sum(others) / len(others)
    assert 1.7 <= fast / mean <= 2.3
    assert max(times) <= 1.1 * ideal_seconds(scene, scene.speeds)


def test_one_replica_five_times_slower_delays_a_batch_by_a_tenth_at_most() -> None:
    """DB-15: backup tasks; and no more than 5 % is computed in vain."""
    run, times = seconds_of_evaluations(STRAGGLER)
    assert max(times) <= 1.1 * ideal_seconds(STRAGGLER, STRAGGLER.speeds)
    figures = run.coordinator.metrics
    assert figures.n_backups
    assert figures.n_wasted <= 0.05 * figures.samples


def test_without_backup_tasks_the_slowest_worker_ends_last() -> None:
    run, times = seconds_of_evaluations(replace(STRAGGLER, backups=False))
    assert not run.coordinator.metrics.n_backups
    assert max(times) > 1.1 * ideal_seconds(STRAGGLER, STRAGGLER.speeds)


def test_a_replica_that_becomes_slow_or_stands_still_is_worked_around() -> None:
    begins = 0.05
    for fault in (
        Slow(at=begins, role=Address("replica-0"), factor=100.0, seconds=60.0),
        Pause(at=begins, role=Address("replica-0"), seconds=60.0),
    ):
        scene = replace(STRAGGLER, speeds=(), faults=(fault,), suspect_seconds=0.1)
        _, times = seconds_of_evaluations(scene)
        assert max(times) <= 2 * ideal_seconds(scene, (1.0, 1.0, 1.0))
        assert times[-1] <= 1.15 * ideal_seconds(scene, (1.0, 1.0, 1.0))


def test_a_replica_that_joins_in_the_midst_of_a_batch_is_given_work() -> None:
    scene = replace(
        STRAGGLER, speeds=(), faults=(Kill(at=0.0, role=Address("replica-0"), restart_after=0.05),)
    )
    run, times = seconds_of_evaluations(scene)
    assert examples_computed(run)[0] > 0
    assert times[0] <= 1.1 * ideal_seconds(scene, (1.0, 1.0, 1.0, 1.0)) + 0.02


def test_a_replica_killed_in_each_evaluation_costs_two_chunks_at_most() -> None:
    role = Address("replica-0")
    kills = tuple(Kill(at=0.05 + 0.1 * k, role=role, restart_after=0.02) for k in range(3))
    scene = replace(STRAGGLER, speeds=(), faults=kills, suspect_seconds=0.05)
    run, _ = seconds_of_evaluations(scene)
    lost = sum(kill.at < run.cluster.now for kill in kills)
    figures, n_chunks = run.coordinator.metrics, 2 * lost + figures_backups(run)
    assert figures.n_wasted <= n_chunks * scene.chunk_sizes.chunk_size


def figures_backups(run: Sandblast) -> int:
    return run.coordinator.metrics.n_backups


# --------------------------------------------------------------------------- traffic


def test_two_commands_per_iteration_and_two_per_evaluation() -> None:
    """Commands to each shard, without Commit, BeginSeries and Restore."""
    run = Sandblast(method=METHOD)
    given: dict[int, str] = {}

    def see(happening: HandledEvent) -> None:
        for command in commands_to(Address("shard-0"), happening):
            given[command.number] = type(command.task).__name__

    run.cluster.observe(see)
    run.play()
    tasks = list(given.values())
    count, last = Counter(tasks), run.coordinator.metrics.iterated
    assert last is not None
    assert count["BeginSeries"] == count["Restore"] == count["Publish"] == 1
    assert count["BeginEvaluation"] == count["FinishEvaluation"] == last.n_evaluations
    assert count["Execute"] <= 2 * (last.iteration + 1)
    assert all(pair != ("Execute", "Execute") for pair in pairwise(tasks)), (
        "two trips where one would do"
    )


def frames_of_coordinator(scene: Sandblast) -> tuple[Sandblast, list[int]]:
    """Return the bytes of each message that it sends or receives."""
    run, wire, sizes = replace(scene), Codec(run="t"), list[int]()

    def see(happening: HandledEvent) -> None:
        for receiver, message in sends(happening, Message):
            if COORDINATOR in {happening.name, receiver}:
                frames = wire.encode(message, sender="s", incarnation=1)
                sizes.append(sum(len(frame) for frame in frames))
                assert len(frames) == 1, "an array"
                known = ShardCommand | CommandDone | Assignment | WorkReport
                assert isinstance(message, known) or receiver == "supervisor"

    run.cluster.observe(see)
    run.play(within=1000.0)
    return run, sizes


def test_the_coordinators_traffic_does_not_depend_on_the_model() -> None:
    """Nothing of the size of a vector comes near it, whatever that is."""
    small, large = (
        sum(frames_of_coordinator(Sandblast(n_inputs=n, n_replicas=1))[1]) for n in (5, 500)
    )
    assert abs(large - small) <= 0.1 * small


PRICED = Sandblast(n_replicas=2, speeds=(0.01, 0.01), bytes_per_second=1e10, leisure=25.0)
"""Time-outs as in jobs; a mini-batch takes 0.2 s, and so a chunk 0.4."""


def test_an_iteration_takes_as_many_bytes_with_a_hundred_million_parameters() -> None:
    """Of float64, 0.8 GB: a chunk is pushed in 0.2 s. `pytest -s` prints a row each."""
    n_bytes: list[float] = []
    for n_priced in (1e3, 1e5, 1e7, 1e8):
        run, sizes = frames_of_coordinator(replace(PRICED, n_priced=n_priced))
        last, now = run.coordinator.metrics.iterated, run.cluster.now
        assert last is not None
        n_bytes.append(sum(sizes) / last.iteration)
        sys.stdout.write(
            f"{n_priced:9,.0e} parameters: {len(sizes)} messages, {n_bytes[-1]:,.0f} "
            f"bytes an iteration, {now / last.iteration:.2f} s each\n"
        )
        assert max(sizes) < 16_384
    assert max(n_bytes) <= 1.1 * n_bytes[0]
