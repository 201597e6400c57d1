"""Processor sharing, against times computed by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from distbelief.roles.role import Address, Compute, Computed, Cost
from distbelief.simulation.cpu import Demand, Processor, ProcessorSharing
from distbelief.simulation.event_queue import EventQueue
from distbelief.simulation.faults import Fault, Kill, Pause
from distbelief.simulation.machines import ClusterOptions, Machine
from tests.distbelief.simulation.toys import STEADY, A, B, Scripted, cluster_of, on_start


def shared(cores: float, rate: float = 1e9) -> tuple[EventQueue, ProcessorSharing]:
    event_queue = EventQueue()
    processor = Processor(cores=cores, bytes_per_second=rate)
    return event_queue, ProcessorSharing(event_queue, processor)


def run(event_queue: EventQueue) -> None:
    while event_queue.next_time < math.inf:
        event_queue.step()


def ends_of(cores: float, *demands: Demand, rate: float = 1e9) -> list[float]:
    """Return when each ends; all begin at 0."""
    event_queue, sharing = shared(cores, rate)
    ends = [math.nan] * len(demands)
    for index, demand in enumerate(demands):
        sharing.add(demand, lambda i=index: ends.__setitem__(i, event_queue.now))  # type: ignore[misc]
    run(event_queue)
    return ends


def test_works_that_have_a_core_each_do_not_feel_each_other() -> None:
    assert ends_of(2, Demand(seconds=1.0), Demand(seconds=3.0)) == [1.0, 3.0]


def test_more_works_than_cores_go_on_slower_alike() -> None:
    """Three on two cores: at 2/3 until the first ends, then at full speed."""
    ends = ends_of(2, Demand(seconds=2.0), Demand(seconds=4.0), Demand(seconds=4.0))
    assert ends == pytest.approx([3.0, 5.0, 5.0])


def test_threads_count() -> None:
    ends = ends_of(2, Demand(seconds=1.0, threads=2), Demand(seconds=1.0, threads=2))
    assert ends == pytest.approx([2.0, 2.0])


def test_what_moves_memory_waits_for_memory_and_nothing_else() -> None:
    copying = Demand(seconds=1.0, memory_share=1.0, bytes_per_second=1e9)
    ends = ends_of(4, copying, copying, Demand(seconds=1.0))
    assert ends == pytest.approx([2.0, 2.0, 1.0])


@given(st.lists(st.floats(0.01, 10.0), min_size=1, max_size=6), st.integers(1, 4))
def test_no_core_is_idle_while_there_is_work(seconds: list[float], cores: int) -> None:
    """All cores together do what there is to do: no sooner, and not later."""
    ends = ends_of(cores, *(Demand(seconds=s) for s in seconds))
    assert max(ends) >= max(*seconds, sum(seconds) / cores) - 1e-9
    assert sorted(range(len(ends)), key=lambda i: (seconds[i], ends[i])) == sorted(
        range(len(ends)), key=lambda i: (ends[i], seconds[i])
    )
    if len(seconds) <= cores:
        assert ends == pytest.approx(seconds)
    else:
        assert max(ends) <= sum(seconds) + 1e-9


def test_what_is_held_stands_still_and_leaves_its_core_to_others() -> None:
    event_queue, sharing = shared(1)
    ends: list[tuple[str, float]] = []
    held = sharing.add(Demand(seconds=1.0), lambda: ends.append(("held", event_queue.now)))
    sharing.add(Demand(seconds=1.0), lambda: ends.append(("other", event_queue.now)))
    sharing.hold(held, held=True)
    event_queue.at(5.0, lambda: sharing.hold(held, held=False))
    run(event_queue)
    assert ends == [("other", 1.0), ("held", 6.0)]


def test_what_is_removed_never_ends() -> None:
    event_queue, sharing = shared(1)
    ends: list[float] = []
    gone = sharing.add(Demand(seconds=1.0), lambda: ends.append(event_queue.now))
    sharing.add(Demand(seconds=1.0), lambda: ends.append(event_queue.now))
    event_queue.at(0.5, lambda: sharing.remove(gone))
    event_queue.at(0.6, lambda: sharing.remove(gone))  # nothing is left to remove
    run(event_queue)
    assert ends == pytest.approx([1.25])


def test_a_processor_without_cores_is_refused() -> None:
    with pytest.raises(ValueError, match="cores"):
        Processor(cores=0, bytes_per_second=1.0)
    with pytest.raises(ValueError, match="wake_seconds must be finite"):
        Processor(cores=1, bytes_per_second=1.0, wake_seconds=-1.0)


def test_what_is_removed_before_it_wakes_never_begins() -> None:
    event_queue = EventQueue()
    crowded = Processor(cores=1, bytes_per_second=1e9, wake_seconds=0.5)
    sharing = ProcessorSharing(event_queue, crowded)
    ends: list[float] = []
    sharing.add(Demand(seconds=1.0), lambda: ends.append(event_queue.now))
    late = sharing.add(Demand(seconds=1.0), lambda: ends.append(-1.0), wakes=True)
    sharing.remove(late)
    run(event_queue)
    assert ends == [1.0]


# ------------------------------------------------------------------- roles of one host


def hosted(*faults: Fault, machine: Machine = STEADY) -> dict[Address, list[float]]:
    """Return when the work of A and B, 1 s each, ends on one core that they share."""
    work = Compute(name="work", work=lambda: None, cost=Cost(flops=1.0))
    roles = {name: Scripted(on_start(work)) for name in (A, B)}
    options = ClusterOptions(
        machine=replace(machine, host="h", bytes_per_second=1e9),
        processors={"h": Processor(cores=1, bytes_per_second=1e9)},
        faults=faults,
    )
    cluster_of(roles, options=options).run()
    return {
        name: [now for now, event in role.seen if isinstance(event, Computed)]
        for name, role in roles.items()
    }


def test_roles_of_one_host_share_its_cores() -> None:
    assert hosted() == {A: [2.0], B: [2.0]}


def test_who_is_paused_leaves_the_core_to_the_others() -> None:
    """A stands still from 1 s to 5 s, B has the core for itself until it ends at 1.5 s.

    A pause within a longer one is of no effect; one that goes on prolongs it.
    """
    pause = Pause(at=1.0, role=A, seconds=3.0)
    later = Pause(at=2.0, role=A, seconds=3.0)
    within = Pause(at=3.0, role=A, seconds=0.5)
    ends = hosted(pause, later, within)
    assert ends[A] == pytest.approx([5.5])
    assert ends[B] == pytest.approx([1.5])


def test_who_is_killed_leaves_the_core_to_the_others() -> None:
    assert hosted(Kill(at=1.0, role=A)) == {A: [], B: [1.5]}


def test_durations_are_spread_around_what_is_modelled() -> None:
    machine = replace(STEADY, spread=0.3)
    stream = np.random.default_rng(0)
    times = [machine.seconds_of(Cost(flops=1.0), stream) for _ in range(2000)]
    assert np.std(np.log(times)) == pytest.approx(0.3, rel=0.1)
    assert np.median(times) == pytest.approx(1.0, rel=0.05)


def test_a_job_says_how_long_it_waits_for_memory() -> None:
    machine = replace(STEADY, bytes_per_second=4.0)
    demand = machine.demand(Cost(flops=1.0, n_bytes=12.0), 4.0, 2)
    assert demand.memory_share == pytest.approx(0.75)
    assert demand.threads == 2
    assert machine.demand(Cost(), 0.0, 1).memory_share == 0.0
