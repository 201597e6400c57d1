"""This host as a cluster: figures, profile, and the note about the network."""

import math
import os
import socket
from pathlib import Path
from statistics import NormalDist

import pytest
import torch

from distbelief.graph.graph import GraphError
from distbelief.plans.planner.profile import load, this_host
from distbelief.plans.planner.profiling import this_host as this_host_module
from distbelief.plans.planner.profiling.layer_timer import Limits, profiled
from distbelief.plans.planner.profiling.this_host import HERE, Network, here, measured, spread
from tests.distbelief.plans.planner.clocks import Clock
from tests.distbelief.plans.planner.plans import fully_connected


@pytest.fixture(autouse=True)
def _small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short measurements, and a separate cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(this_host_module, "_WIDTH", 8)
    monkeypatch.setattr(this_host_module, "_N_COPIED", 1000)
    monkeypatch.setattr(this_host_module, "_N_SENT", 100)


def test_figures_are_work_over_time() -> None:
    found = measured(clock=Clock(tick=1e-3))
    assert found.flops == pytest.approx(2 * 8**3 / 1e-3)
    assert found.memory_rate == pytest.approx(2 * 4 * 1000 / 1e-3)
    n_processors = min(torch.get_num_threads(), os.cpu_count() or 1)
    assert found.message_rate == pytest.approx(n_processors * 2 * 4 * 100 / 1e-3)
    assert found.overhead == pytest.approx(0.5e-3)
    assert found.jitter == pytest.approx(0.0, abs=1e-6)


def test_flops_alone_are_measured_and_not_kept() -> None:
    assert this_host_module.flops(clock=Clock(tick=1e-3)) == pytest.approx(2 * 8**3 / 1e-3)
    assert load(this_host()) is None
    known = this_host_module.figures(clock=Clock(tick=1e-2)).flops
    assert this_host_module.flops(clock=Clock(tick=1e-3)) == known


def test_machines_are_alike_and_the_network_is_assumed() -> None:
    cluster = here(3, clock=Clock())
    assert (cluster.name, cluster.origin, len(cluster)) == (HERE, "measured", 3)
    assert cluster.is_uniform
    assert cluster.machines[0].bandwidth == 1.25e8
    assert cluster.note == (
        "The network is assumed: 1 Gbit/s, latency 100 us, and 100 us of overhead per message."
    )


def test_messages_are_measured_also_where_there_is_no_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(address: object) -> socket.socket:
        raise PermissionError(1, f"no network: {address}")

    monkeypatch.setattr(socket, "create_server", refuse)
    assert measured(clock=Clock()).message_rate > 0


def test_a_large_message_goes_through_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_host_module, "_N_SENT", 1 << 20)
    assert measured(clock=Clock()).message_rate > 0


def test_a_network_may_be_given() -> None:
    network = Network(bandwidth=1.25e9, latency=2e-5, message_overhead=0.0)
    cluster = here(2, network=network, clock=Clock())
    assert cluster.machines[1].bandwidth == cluster.rate(0, 1) == 1.25e9
    assert (cluster.latency, cluster.message_overhead) == (2e-5, 0.0)
    assert cluster.note.startswith("The network is as given: 10 Gbit/s, latency 20 us")


def test_a_host_is_measured_once_whatever_the_number_of_machines() -> None:
    clock = Clock()
    one = here(1, clock=clock)
    n_looks = clock.n_looks
    assert n_looks
    assert here(4, clock=clock).first(1) == one
    assert clock.n_looks == n_looks


def test_figures_and_layers_are_kept_side_by_side() -> None:
    cluster = here(1, clock=Clock())
    limits = Limits(seconds=1e3, clock=Clock())
    profile = profiled(fully_connected(4, 3, 2), batch=2, limits=limits)
    assert profile.figures is not None
    assert load(this_host()) == profile
    assert here(1, clock=Clock(tick=1.0)) == cluster


def test_other_threads_are_another_machine() -> None:
    before = torch.get_num_threads()
    first, clock = this_host().path, Clock()
    here(1, clock=Clock())
    try:
        torch.set_num_threads(before + 1)
        assert this_host().path != first
        here(1, clock=clock)
    finally:
        torch.set_num_threads(before)
    assert clock.n_looks


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_measuring_works_without_gradients_in_the_caller(
    mode: type[torch.no_grad | torch.inference_mode],
) -> None:
    with mode():
        assert measured(clock=Clock()).overhead > 0


def test_a_slow_machine_is_measured_less_often() -> None:
    slow, usual = Clock(tick=1.0), Clock(tick=1e-3)
    measured(clock=slow)
    measured(clock=usual)
    assert slow.n_looks < usual.n_looks / 2


def test_a_coarse_clock_gives_no_infinite_speed() -> None:
    found = measured(clock=lambda: 1.0)
    assert math.isfinite(found.flops)
    assert found.overhead > 0


def test_the_spread_is_that_of_a_normal_whatever_the_outliers() -> None:
    normal = NormalDist(mu=-3.0, sigma=0.2)
    times = [math.exp(normal.inv_cdf(k / 100)) for k in range(1, 100)]
    assert spread(times) == pytest.approx(0.2, rel=0.05)
    assert spread([*times, 1e3]) == pytest.approx(0.2, rel=0.1)
    assert spread([2.0] * 5) == 0


def test_a_container_has_the_memory_that_it_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(this_host_module, "_CONTAINER", limit)
    without = measured(clock=Clock()).memory
    assert without > 1e8
    limit.write_text("max\n")
    assert measured(clock=Clock()).memory == without
    limit.write_text("1048576\n")
    assert measured(clock=Clock()).memory == 1 << 20


def test_a_profile_of_another_limit_does_not_tell_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers with equal processors share a profile: plans were made for another's memory."""
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(this_host_module, "_CONTAINER", limit)
    clock = Clock()
    assert here(1, clock=clock).first(1).machines[0].memory > 1 << 20
    n_looks = clock.n_looks
    limit.write_text("1048576\n")
    assert here(1, clock=clock).first(1).machines[0].memory == 1 << 20
    assert clock.n_looks == n_looks


@pytest.mark.parametrize("n", [0, 20_001])
def test_as_many_machines_as_a_cluster_may_have(n: int) -> None:
    with pytest.raises(GraphError, match=f"machines = {n} for cluster .here.: use 1 to"):
        here(n, clock=Clock())


def test_what_cannot_be_kept_is_used_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert here(1, clock=Clock()).machines[0].flops > 0


def test_the_probe_is_the_median_of_its_runs() -> None:
    """The minimum hid that a machine was shared: steps were predicted at 0.75 of their time."""
    ticks = iter(range(10_000))
    n = this_host_module._N_PROBE_RUNS
    taken = this_host_module.seconds(clock=lambda: float(next(ticks)) ** 2)
    assert taken == (2 * n - 2) + 1.0  # (2 k + 1)^2 - (2 k)^2 = 4 k + 1, k = 0 ... n - 1
