"""What work takes: timed, kept, and carried over to other machines."""

from pathlib import Path

import msgspec
import pytest

from distbelief.errors import JobError
from distbelief.forecast.adapted import adapted
from distbelief.forecast.constants import constants_of
from distbelief.forecast.exchange import seconds_of_message
from distbelief.forecast.hosting import Hosting
from distbelief.forecast.hosts import Hosts
from distbelief.forecast.measuring import Stopwatch, measure, rate_of
from distbelief.forecast.rates import Rate, Rates, keep, kept, key_of
from distbelief.forecast.staging import Staging
from distbelief.forecast.virtual_run import run_virtually
from distbelief.program.cluster import Cluster, Machine, uniform
from distbelief.program.cluster_file import load_cluster
from distbelief.roles import SUPERVISOR, Compute, Cost
from distbelief.simulation.cluster import SimulatedCluster
from distbelief.simulation.options import ClusterOptions
from tests.distbelief.forecast.jobs import small


MACHINE = Machine(flops=1e9, memory_rate=1e9, bandwidth=1.25e8)
RATES = Rates(
    work={"replica replica:step": Rate(unit="flops", seconds=1e-6, n=10)},
    handling={"replica": 2e-5, "shard": 3e-5},
    messages=5e-5,
)


@pytest.fixture(autouse=True)
def _caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_a_stopwatch_counts_seconds_of_each_operation_or_byte() -> None:
    times = iter([0.0, 3.0, 10.0, 11.0, 20.0, 20.5])
    watch = Stopwatch(lambda: next(times))
    step = Compute(name="replica:step", work=lambda: "done", cost=Cost(flops=2.0))
    assert watch.adapt("replica", step).work() == "done"
    push = Compute(name="shard:3:apply", work=lambda: None, cost=Cost(n_bytes=4.0))
    watch.adapt("shard", push).work()
    assert watch.work == {
        "replica replica:step": ("flops", [(3.0, 2.0)]),
        "shard shard::apply": ("bytes", [(1.0, 4.0)]),
    }
    assert watch.handled("shard", list) == []
    assert watch.handling == {"shard": (0.5, 1)}


def test_what_work_costs_may_become_known_later() -> None:
    times = iter([0.0, 1.0, 2.0, 4.0])
    watch = Stopwatch(lambda: next(times))
    for cost in (Cost(), Cost(n_bytes=4.0)):
        watch.adapt("replica", Compute(name="r", work=lambda: None, cost=cost)).work()
    assert watch.work == {"replica r": ("bytes", [(2.0, 4.0)])}


def test_small_pieces_count_by_their_size_and_those_that_lag_not_at_all() -> None:
    pieces = [(1.0, 1.0), (3.0, 4.0), (3.0, 4.0), (400.0, 4.0)]
    assert rate_of(pieces) == pytest.approx(7 / 9)
    assert rate_of([(2.0, 1.0)]) == 2.0


def test_numbers_in_names_of_work_are_of_no_account() -> None:
    assert key_of("shard", "apply:17") == key_of("shard", "apply:4")


def test_rates_are_kept_for_the_same_work_only() -> None:
    job = small()
    assert kept(job) is None
    keep(job, RATES)
    assert kept(small("stop.samples=7")) == RATES
    assert kept(small("algorithm.batch_size=8")) is None
    old = msgspec.structs.replace(RATES, version=0)
    keep(job, old)
    assert kept(job) is None


def test_a_message_takes_some_time_but_not_long() -> None:
    assert 1e-6 < seconds_of_message() < 0.05


def run_with(rates: Rates | None, cluster: Cluster) -> float:
    hosting = Hosting(cluster=cluster, reference=MACHINE, rates=rates, together=False)
    with Staging() as staging:
        job = small("algorithm.max_steps=15", "stop.samples=1000000")
        outcome = run_virtually(staging.stage(job), hosting, seed=0).outcome
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
        with Staging() as staging:
            staged = staging.stage(small())
            builders = staged.builders()
            if wrapped:
                builders = adapted(
                    builders, staged.kinds, adapt=lambda _kind, asked: asked
                )
            options = ClusterOptions(start=(SUPERVISOR,))
            simulation = SimulatedCluster(builders, seed=0, options=options)
            simulation.run(until=0.52)
            return simulation.trace.digest

    assert digest(wrapped=True) == digest(wrapped=False)


def test_every_constant_of_a_cluster_is_told_with_its_origin() -> None:
    rows = constants_of(load_cluster("rack-1g"))
    values = {name: value for name, value, _ in rows}
    assert values["flops"] == "400 GFLOP/s"
    assert values["bandwidth"] == "0.125 GB/s"
    assert {"machines", "cores", "latency", "jitter"} <= set(values)
    assert all(origin for _, _, origin in rows)


def test_a_cluster_that_is_not_there_is_told_by_its_option() -> None:
    with pytest.raises(JobError, match="--cluster rak-1g: there is no cluster"):
        Hosts("rak-1g", machines=None, measures=False)


@pytest.mark.soak
def test_this_host_is_measured_and_kept() -> None:
    rates = measure(small(), n_processes=2)
    assert rates.n_side_by_side == 2
    assert rates.work["replica replica:step"].n > 10
    assert rates.work["replica replica:step"].unit == "flops"
