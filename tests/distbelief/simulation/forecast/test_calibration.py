"""Calibration: what work and messages cost on this host."""

import os
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from distbelief.config.job import Job
from distbelief.plans.cluster import Cluster, Lost, Machine, OutageTrace, uniform
from distbelief.plans.cluster_file import load_cluster
from distbelief.protocol.role import SUPERVISOR, Address, Compute, Cost, Executor
from distbelief.simulation.cluster import SimulatedCluster
from distbelief.simulation.forecast import calibration
from distbelief.simulation.forecast.calibration import (
    EVENT_SECONDS,
    WAKE_SECONDS,
    Rate,
    Rates,
    Stopwatch,
    idle,
    load_rates,
    measure,
    mover,
    rate_of,
    save_rates,
    waiting_of,
    warm,
)
from distbelief.simulation.forecast.placed_cluster import HostCosts, PlacedCluster, constants_of
from distbelief.simulation.forecast.prepare import Preparation, costed
from distbelief.simulation.forecast.run import run_simulated
from distbelief.simulation.machines import ClusterOptions, SimulatedMachine
from experiments.benchmarks.simulated.truth import mean_of
from tests.distbelief.simulation.forecast.jobs import small


MACHINE = Machine(flops=1e9, memory_rate=1e9, bandwidth=1.25e8)
RATES = Rates(work={"replica replica:step by flops": Rate(unit="flops", seconds=1e-6, n=10)})


@pytest.fixture(autouse=True)
def _caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_a_stopwatch_counts_seconds_of_each_operation_or_byte() -> None:
    times = iter([0.0, 3.0, 10.0, 11.0])
    watch = Stopwatch(lambda: next(times))
    step = Compute(name="replica:step", work=lambda: "done", cost=Cost(flops=2.0))
    assert watch.adapt("replica", step).work() == "done"
    push = Compute(name="shard:3:apply", work=lambda: None, cost=Cost(n_bytes=4.0))
    watch.adapt("shard", push).work()
    assert watch.work == {
        "replica replica:step by flops": [(3.0, 2.0)],
        "shard shard::apply by bytes": [(1.0, 4.0)],
    }


def test_work_in_vain_is_not_counted_and_half_of_it_by_half() -> None:
    times = iter([0.0, 3.0, 10.0, 10.1])
    parts = iter([0.5, 0.0])
    watch = Stopwatch(lambda: next(times))
    work = Compute(
        name="install", work=lambda: None, cost=Cost(n_bytes=8.0), remaining=lambda: next(parts)
    )
    for _ in range(2):
        watch.adapt("replica", work).work()
    assert watch.work == {"replica install by bytes": [(3.0, 4.0)]}


def test_a_data_set_that_waits_takes_the_time_that_it_waits() -> None:
    """Samples came from a disk that took a millisecond for each, and cost nothing.

    7,466 samples/s were foretold, and 1,860 came: processor time is all that was timed.
    """
    clock, idle = iter([0.0, 0.1, 1.0, 1.1]), iter([5.0, 7.0])
    watch = Stopwatch(lambda: next(clock), idle=lambda: next(idle))
    cost = Cost(n_bytes=4.0)
    read = Compute(name="r", work=lambda: None, cost=cost, executor=Executor.DATA)
    watch.adapt("replica", read).work()
    watch.adapt("replica", msgspec.structs.replace(read, executor=Executor.COMPUTE)).work()
    assert watch.waits == {"replica r by bytes": [(2.0, 4.0)]}
    waiting = waiting_of(watch.waits["replica r by bytes"], besides=0.025)
    assert waiting == pytest.approx(0.5)
    rate = Rate(unit="bytes", seconds=0.025, n=2, waiting=waiting)
    rates = msgspec.structs.replace(RATES, work={"replica r by bytes": rate})
    assert rates.rate_of("replica", read) == rate
    assert rates.rate_of("shard", read) is None
    assert mean_of([rates, RATES]).work["replica r by bytes"] == rate


def test_what_two_clocks_differ_by_is_no_waiting() -> None:
    assert waiting_of([(0.1, 1.0), (0.0, 1.0)], besides=0.1) == pytest.approx(0.05)
    assert waiting_of([(0.1, 1.0), (0.0, 1.0)], besides=0.3) == 0.0


def test_who_neither_computes_nor_queues_is_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = tmp_path / "schedstat"  # nanoseconds of running, of queueing; slices
    queue.write_text("2000000000 1500000000 7\n")
    clocks = SimpleNamespace(perf_counter=lambda: 5.0, thread_time=lambda: 2.0)
    monkeypatch.setattr(calibration, "QUEUE", queue)
    monkeypatch.setattr(calibration, "time", clocks)
    assert idle() == 1.5
    clocks.perf_counter, clocks.thread_time = lambda: 6.0, lambda: 3.0  # it computed
    assert idle() == 1.5
    clocks.perf_counter = lambda: 7.0  # it slept
    assert idle() == 2.5
    queue.write_text("3000000000 2500000000 8\n")  # no: it stood in the queue
    assert idle() == 1.5
    queue.unlink()
    assert idle() == 0.0


@pytest.mark.skipif(not calibration.QUEUE.exists(), reason="no kernel that tells")
def test_the_kernel_tells_of_queues_and_not_of_sleep() -> None:
    """However crowded the cores are: what was slept is no part of any queue."""
    begun = idle()
    time.sleep(0.05)
    assert idle() - begun >= 0.045


def test_who_waits_leaves_the_core_to_others() -> None:
    """Two works that wait for nine tenths of a second fit onto one core."""
    machine = SimulatedMachine(flops_per_second=1.0, overhead_seconds=0.0, jitter=0.0)
    cost = Cost(flops=0.1, waiting=0.9)
    stream = np.random.default_rng(0)
    assert machine.seconds_of(cost, stream) == pytest.approx(1.0)
    demand = machine.demand(cost, 1.0, threads=1.0)
    assert demand.threads == pytest.approx(0.1)
    assert machine.demand(Cost(flops=0.1), 0.1, threads=1.0).threads == 1.0


def test_the_first_pieces_are_not_counted_if_there_are_others() -> None:
    pieces = [(float(i), 1.0) for i in range(20)]
    assert warm(pieces) == pieces[5:]
    assert warm(pieces[:4]) == pieces[3:4]
    assert warm(pieces[:2]) == pieces[:2]


def test_work_whose_cost_is_unknown_at_first_is_another_kind() -> None:
    times = iter([0.0, 1.0, 2.0, 4.0])
    watch = Stopwatch(lambda: next(times))
    for cost in (Cost(), Cost(n_bytes=4.0)):
        watch.adapt("replica", Compute(name="r", work=lambda: None, cost=cost)).work()
    assert watch.work == {"replica r by times": [(1.0, 1.0)], "replica r by bytes": [(2.0, 4.0)]}


def test_small_pieces_count_by_their_size_and_those_that_lag_not_at_all() -> None:
    pieces = [(1.0, 1.0), (3.0, 4.0), (3.0, 4.0), (400.0, 4.0)]
    assert rate_of(pieces) == pytest.approx(7 / 9)
    assert rate_of([(2.0, 1.0)]) == 2.0


def test_what_nobody_knew_the_cost_of_takes_as_long_as_it_did() -> None:
    rate = Rate(unit="times", seconds=3.0, n=2)
    rates = msgspec.structs.replace(RATES, work={"shard order by times": rate})
    order = Compute(name="order", work=lambda: None, cost=Cost(n_bytes=4.0))
    assert rates.rate_of("shard", order) == rate
    assert rates.rate_of("replica", order) is None


def test_rates_are_kept_for_the_same_work_only() -> None:
    job = small()
    assert load_rates(job) is None
    save_rates(job, RATES)
    assert load_rates(small("stop.samples=7")) == RATES
    assert load_rates(small("algorithm.batch_size=8")) is None
    old = msgspec.structs.replace(RATES, version=0)
    save_rates(job, old)
    assert load_rates(job) is None


def test_what_another_net_of_the_same_name_takes_is_measured_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hidden layer was made 64 times as wide in the source that the job names.

    What the net had taken before, for each operation, was still believed: a step was
    said to take 87 ms, and takes 2.1 ms if it is measured anew.
    """
    source = tmp_path / "net_of_likeness.py"
    source.write_text("WIDTH = 32\n")
    monkeypatch.syspath_prepend(tmp_path)
    job = small("model.factory=net_of_likeness:net")
    save_rates(job, RATES)
    assert load_rates(job) == RATES
    source.write_text("WIDTH = 2048\n")
    assert load_rates(job) is None


def test_variants_whose_work_differs_are_not_priced_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep of [cluster] threads took the first one's times for all of them."""
    asked: list[int] = []

    def kept_for(job: Job) -> Rates:
        asked.append(job.cluster.threads)
        return RATES

    monkeypatch.setattr("distbelief.simulation.forecast.placed_cluster.load_rates", kept_for)
    hosts = HostCosts("rack-1g", machines=None, measures=True)
    for threads in (1, 2, 2):
        hosts.hosting(small(f"cluster.threads={threads}"), tell=lambda _: None)
    assert asked == [1, 2]


def test_what_was_measured_while_others_computed_is_reported_as_such(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside other jobs a step took half as long again, and so it was kept for good."""
    busy = msgspec.structs.replace(RATES, share=0.52)
    for rates, said in ((RATES, None), (busy, "52 %")):
        monkeypatch.setattr(
            "distbelief.simulation.forecast.placed_cluster.load_rates", lambda _, r=rates: r
        )
        hosts = HostCosts(None, machines=None, measures=True)
        hosts.hosting(small(), tell=lambda _: None)
        constants = dict(hosts.constants)
        assert constants["work of the roles"] == "1 kinds, measured on this host"
        assert constants["core time of an event"] == "120 us"
        assert constants.get("free share of each core then") == said


def test_rates_are_found_again_however_many_threads_computed_then() -> None:
    """What was measured before a real run was measured once more after it.

    It was kept by a process that had two threads, and sought by the same one, which had
    one since it had tried the job out.
    """
    job, n_threads = small(), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        save_rates(job, RATES)
        torch.set_num_threads(1)
        assert load_rates(job) == RATES
    finally:
        torch.set_num_threads(n_threads)


def test_two_measurements_are_one_of_all_pieces() -> None:
    step, push = "replica replica:step by flops", "replica replica:push by bytes"
    later = msgspec.structs.replace(
        RATES,
        work={
            step: Rate(unit="flops", seconds=4e-6, n=20),
            push: Rate(unit="bytes", seconds=1e-9, n=5),
        },
    )
    both = mean_of([RATES, later])
    assert both.work[step].seconds == pytest.approx(3e-6)
    assert both.work[step].n == 30
    assert both.work[push] == Rate(unit="bytes", seconds=1e-9, n=5)


def test_messages_between_processes_of_this_host_take_core_time_only() -> None:
    job = small()
    save_rates(job, RATES)
    hosts = HostCosts(None, machines=None, measures=True)
    with Preparation() as preparation:
        prepared = preparation.stage(job)
        options = hosts.hosting(job, tell=lambda _: None).options(prepared)
    a, b = (Address(entry.name) for entry in prepared.roster[:2])
    link = options.link_of(a, b)
    assert (link.latency_seconds, link.jitter) == (0.0, 0.0)
    assert options.machines[a].event_seconds == EVENT_SECONDS
    assert options.machines[a].wake_seconds == WAKE_SECONDS


def test_a_shard_is_measured_on_another_core_than_a_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moves: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 5, 6})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: moves.append(cores))
    watch = Stopwatch(move=mover(2))
    for kind in ("replica", "shard"):
        work = Compute(name="work", work=lambda: None)
        watch.adapt(kind, work).work()
    assert moves == [{6}, {4}]


def run_with(rates: Rates | None, cluster: Cluster) -> float:
    placed = PlacedCluster(cluster=cluster, reference=MACHINE, rates=rates, together=False)
    with Preparation() as preparation:
        job = small("algorithm.max_steps=15", "stop.samples=1000000")
        outcome = run_simulated(preparation.stage(job), placed, seed=0).outcome
    assert outcome.step_seconds is not None
    return outcome.step_seconds


def test_measured_work_takes_as_long_as_measured_and_less_on_a_faster_machine() -> None:
    """86 parameters, 4 samples: 2,064 operations of a microsecond each."""
    here = uniform("here", MACHINE, 5)
    step = run_with(RATES, here)
    assert step == pytest.approx(6 * 86 * 4 * 1e-6, rel=0.2) or step > 2e-3
    faster = msgspec.structs.replace(MACHINE, flops=2e9)
    assert run_with(RATES, uniform("faster", faster, 5)) < 0.7 * step
    assert run_with(None, here) < 0.5 * step


def test_roles_that_nobody_looks_at_do_as_they_always_did() -> None:
    def digest(*, wrapped: bool) -> str:
        with Preparation() as preparation:
            prepared = preparation.stage(small())
            builders = prepared.builders()
            if wrapped:
                builders = costed(builders, prepared.kinds, adapt=lambda _kind, asked: asked)
            options = ClusterOptions(start=(SUPERVISOR,))
            simulation = SimulatedCluster(builders, seed=0, options=options)
            simulation.run(until=0.52)
            return simulation.trace.digest

    assert digest(wrapped=True) == digest(wrapped=False)


def test_every_constant_of_a_cluster_is_reported() -> None:
    values = dict(constants_of(load_cluster("rack-1g")))
    assert values["flops"] == "400 GFLOP/s"
    assert values["bandwidth"] == "1 Gbit/s"
    assert values["memory rate"] == "30 GB/s"  # as in the file: it said 240 Gbit/s
    assert values["memory"] == "64 GiB"  # and 68.7 GB
    assert {"machines", "cores", "latency", "jitter"} <= set(values)


def test_a_trace_of_outages_is_among_the_constants() -> None:
    """A forecast rested on a file of outages, and did not say so."""
    lost = Lost(at=1.0, machine=0, away=5.0)
    trace = OutageTrace(outages=(lost, lost), covers=86400.0)
    cluster = Cluster(name="lab", machines=(MACHINE,), trace=trace)
    assert constants_of(cluster)[-1] == ("trace", "2 outages within 86400 s")


@pytest.mark.soak
def test_this_host_is_measured_and_kept() -> None:
    rates = measure(small(), n_processes=2)
    assert 0.0 < rates.share <= 1.0
    assert rates.work["replica replica:step by flops"].n > 10
    assert rates.work["replica replica:step by flops"].unit == "flops"
