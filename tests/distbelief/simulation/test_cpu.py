"""The CPU model: hosts against times computed by hand, executors, event loops."""

import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st

from distbelief.protocol import Heartbeat, Stop, role as rl
from distbelief.simulation.cluster import SimulatedCluster
from distbelief.simulation.cpu import Demand, Host, Processor
from distbelief.simulation.event_queue import EventQueue
from distbelief.simulation.faults import Fault, Kill, Pause, Slow
from distbelief.simulation.machines import ClusterOptions, SimulatedMachine
from tests.distbelief.simulation.toys import (
    STEADY,
    A,
    B,
    Handler,
    Scripted,
    Summer,
    cluster_of,
    counted,
    on_start,
)


def shared(cores: float, rate: float = 1e9) -> tuple[EventQueue, Host]:
    event_queue = EventQueue()
    processor = Processor(cores=cores, bytes_per_second=rate)
    return event_queue, Host(event_queue, processor)


def run(event_queue: EventQueue) -> None:
    while event_queue.next_time < math.inf:
        event_queue.steps(1, until=math.inf)


def ends_of(cores: float, *demands: Demand, rate: float = 1e9) -> list[float]:
    """Return when each ends; all begin at 0."""
    event_queue, host = shared(cores, rate)
    ends = [math.nan] * len(demands)
    for index, demand in enumerate(demands):
        host.add(demand, lambda i=index: ends.__setitem__(i, event_queue.now))  # type: ignore[misc]
    run(event_queue)
    return ends


COPYING = Demand(seconds=1.0, memory_share=1.0, bytes_per_second=1e9)


@pytest.mark.parametrize(
    ("cores", "demands", "ends"),
    [
        (2, (Demand(seconds=1.0), Demand(seconds=3.0)), [1.0, 3.0]),  # a core each
        # Three on two cores: at 2/3 until the first ends, then at full speed.
        (2, (Demand(seconds=2.0), Demand(seconds=4.0), Demand(seconds=4.0)), [3.0, 5.0, 5.0]),
        (2, (Demand(seconds=1.0, threads=2), Demand(seconds=1.0, threads=2)), [2.0, 2.0]),
        # What moves memory waits for memory, and nothing else does.
        (4, (COPYING, COPYING, Demand(seconds=1.0)), [2.0, 2.0, 1.0]),
    ],
)
def test_works_share_cores_and_memory(
    cores: int, demands: tuple[Demand, ...], ends: list[float]
) -> None:
    assert ends_of(cores, *demands) == pytest.approx(ends)


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
    event_queue, host = shared(1)
    ends: list[tuple[str, float]] = []
    held = host.add(Demand(seconds=1.0), lambda: ends.append(("held", event_queue.now)))
    host.add(Demand(seconds=1.0), lambda: ends.append(("other", event_queue.now)))
    host.hold(held, held=True)
    event_queue.at(5.0, lambda: host.hold(held, held=False))
    run(event_queue)
    assert ends == [("other", 1.0), ("held", 6.0)]


def test_what_is_removed_never_ends() -> None:
    event_queue, host = shared(1)
    ends: list[float] = []
    gone = host.add(Demand(seconds=1.0), lambda: ends.append(event_queue.now))
    host.add(Demand(seconds=1.0), lambda: ends.append(event_queue.now))
    event_queue.at(0.5, lambda: host.remove(gone))
    event_queue.at(0.6, lambda: host.remove(gone))  # nothing is left to remove
    run(event_queue)
    assert ends == pytest.approx([1.25])


# ------------------------------------------------------------------- roles of one host


def hosted(*faults: Fault, machine: SimulatedMachine = STEADY) -> dict[rl.Address, list[float]]:
    """Return when the work of A and B, 1 s each, ends on one core that they share."""
    work = rl.Compute(name="work", work=lambda: None, cost=rl.Cost(flops=1.0))
    roles = {name: Scripted(on_start(work)) for name in (A, B)}
    options = ClusterOptions(
        machine=replace(machine, host="h", bytes_per_second=1e9),
        processors={"h": Processor(cores=1, bytes_per_second=1e9)},
        faults=faults,
    )
    cluster_of(roles, options=options).run()
    return {
        name: [now for now, event in role.seen if isinstance(event, rl.Computed)]
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
    times = [machine.seconds_of(rl.Cost(flops=1.0), stream) for _ in range(2000)]
    assert np.std(np.log(times)) == pytest.approx(0.3, rel=0.1)
    assert np.median(times) == pytest.approx(1.0, rel=0.05)


def test_a_job_says_how_long_it_waits_for_memory() -> None:
    machine = replace(STEADY, bytes_per_second=4.0)
    demand = machine.demand(rl.Cost(flops=1.0, n_bytes=12.0), 4.0, 2)
    assert demand.memory_share == pytest.approx(0.75)
    assert demand.threads == 2
    assert machine.demand(rl.Cost(), 0.0, 1).memory_share == 0.0


# ------------------------------------------------------------------- executors


def work(name: str, seconds: float, executor: rl.Executor = rl.Executor.COMPUTE) -> rl.Compute:
    return rl.Compute(name=name, work=lambda: name, cost=rl.Cost(flops=seconds), executor=executor)


def answers(role: Scripted) -> list[tuple[rl.Seconds, str, rl.Seconds]]:
    return [
        (now, event.name, event.seconds)
        for now, event in role.seen
        if isinstance(event, rl.Computed)
    ]


def test_executors_run_side_by_side_and_each_in_order() -> None:
    """Drawn:

    time      0   1   2   3   4
    compute   a-------b---c-c
    data      x-y-----------y
    """
    role = Scripted(
        on_start(
            work("a", 2.0),
            work("b", 1.0),
            work("x", 0.5, rl.Executor.DATA),
            work("c", 0.5),
            work("y", 3.0, rl.Executor.DATA),
        )
    )
    cluster_of({A: role}).run()
    assert answers(role) == [
        (0.5, "x", 0.5),
        (2.0, "a", 2.0),
        (3.0, "b", 1.0),
        (3.5, "y", 3.0),
        (3.5, "c", 0.5),
    ]


def test_work_runs_at_its_end_and_sees_what_happened_meanwhile() -> None:
    box = [0]

    def read() -> int:
        return box[0]

    def write() -> None:
        box[0] = 7

    role = Scripted(on_start(rl.Compute(name="r", work=read, cost=rl.Cost(flops=2.0))))
    other = Scripted(on_start(rl.Compute(name="w", work=write, cost=rl.Cost(flops=1.0))))
    cluster_of({A: role, B: other}).run()
    (answer,) = [event for _, event in role.seen if isinstance(event, rl.Computed)]
    assert answer.result == 7


def test_an_exception_in_work_is_reported_to_the_role() -> None:
    def fail() -> None:
        raise ZeroDivisionError("no samples")

    role = Scripted(on_start(rl.Compute(name="f", work=fail), work("next", 1.0)))
    cluster_of({A: role}).run()
    failed, following = [e for _, e in role.seen if isinstance(e, rl.Computed)]
    assert isinstance(failed.error, ZeroDivisionError)
    assert failed.result is None
    assert following.result == "next"


def test_work_asked_for_in_reply_waits_behind_what_was_asked_before() -> None:
    def answer(event: rl.Event, _: rl.Seconds) -> list[rl.Action]:
        match event:
            case rl.Started():
                return [work("a", 1.0), work("b", 1.0)]
            case rl.Computed(name="a"):
                return [work("c", 1.0)]
            case _:
                return []

    role = Scripted(answer)
    cluster_of({A: role}).run()
    assert [name for _, name, _ in answers(role)] == ["a", "b", "c"]


def test_a_role_that_halts_in_reply_hears_of_no_more_work() -> None:
    def answer(event: rl.Event, _: rl.Seconds) -> list[rl.Action]:
        match event:
            case rl.Started():
                return [work("a", 1.0), work("b", 1.0), work("x", 3.0, rl.Executor.DATA)]
            case _:
                return [rl.Exit()]

    role = Scripted(answer)
    cluster_of({A: role}).run()
    assert [name for _, name, _ in answers(role)] == ["a"]


def test_speeds_of_machines_differ() -> None:
    roles = {A: Scripted(on_start(work("w", 8.0))), B: Scripted(on_start(work("w", 8)))}
    slow = SimulatedMachine(jitter=0.0, overhead_seconds=0.5, flops_per_second=1.0)
    fast = SimulatedMachine(jitter=0.0, overhead_seconds=0.5, flops_per_second=4.0)
    options = ClusterOptions(machine=slow, machines={B: fast})
    cluster_of(roles, options=options).run()
    assert [answers(role)[0][0] for role in roles.values()] == [8.5, 2.5]


def test_bytes_cost_time_as_flops_do() -> None:
    cost = rl.Cost(flops=1.0, n_bytes=10.0)
    role = Scripted(on_start(rl.Compute(name="w", work=lambda: None, cost=cost)))
    machine = SimulatedMachine(
        jitter=0.0, overhead_seconds=0.0, flops_per_second=1.0, bytes_per_second=5.0
    )
    cluster_of({A: role}, options=ClusterOptions(machine=machine)).run()
    assert answers(role)[0][0] == 3.0


@pytest.mark.parametrize(("cores", "seconds"), [(4, 2.0), (2, 4.0), (1, 8.0)])
def test_threads_share_flops_as_far_as_there_are_cores(cores: int, seconds: float) -> None:
    cost = rl.Cost(flops=8.0, threads=4)
    role = Scripted(on_start(rl.Compute(name="w", work=lambda: None, cost=cost)))
    machine = SimulatedMachine(jitter=0.0, overhead_seconds=0.0, flops_per_second=1.0)
    processors = {machine.host: Processor(cores=cores, bytes_per_second=1e9)}
    cluster_of({A: role}, options=ClusterOptions(machine=machine, processors=processors)).run()
    assert answers(role)[0][0] == seconds


def test_jitter_lengthens_work_by_no_more_than_it_says() -> None:
    role = Scripted(on_start(*(work("w", 1.0) for _ in range(50))))
    machine = SimulatedMachine(jitter=0.2, overhead_seconds=0.0, flops_per_second=1.0)
    cluster_of({A: role}, options=ClusterOptions(machine=machine)).run()
    seconds = [taken for _, _, taken in answers(role)]
    assert min(seconds) >= 1.0
    assert max(seconds) <= 1.2
    assert max(seconds) - min(seconds) > 0.1


def test_computing_roles_get_the_same_sums_under_any_seed() -> None:
    def total(seed: int) -> float:
        cluster = SimulatedCluster({A: lambda _: Summer(seed=3, n_wanted=5)}, seed=seed)
        cluster.run()
        role = cluster.role(A)
        assert isinstance(role, Summer)
        assert role.n_done == 5
        return role.total

    assert STEADY.jitter == 0.0
    assert total(1) == total(2)


# ------------------------------------------------------------------- event loops


WORK = rl.Compute(name="work-1", work=lambda: None, cost=rl.Cost(flops=1.0))


def beat(number: int) -> rl.Received:
    message = Heartbeat(state="up", counters={"n": float(number)})
    return rl.Received(sender=B, incarnation=1, message=message)


def handled(
    *events: tuple[rl.Seconds, rl.Event],
    cores: float = 1,
    wake: rl.Seconds = 0.0,
    faults: tuple[Fault, ...] = (),
    answer: Handler = lambda *_: (),
) -> list[tuple[rl.Seconds, rl.Event]]:
    """Return what A has handled, when: each event takes 0.5 s."""
    role = Scripted(answer)
    options = ClusterOptions(
        machine=replace(STEADY, host="h", event_seconds=0.5, wake_seconds=wake),
        processors={"h": Processor(cores=cores, bytes_per_second=1e9)},
        faults=faults,
    )
    cluster = cluster_of({A: role}, options=options)
    cluster.run(until=0.0)
    for at, event in events:
        cluster.run(until=at)
        cluster.post(A, event)
    cluster.run()
    return role.seen


def kind_of(event: rl.Event) -> str:
    match event:
        case rl.Received():
            return type(event.message).__name__
        case rl.Computed():
            return event.name
        case _:
            return type(event).__name__


def times(seen: list[tuple[rl.Seconds, rl.Event]]) -> list[rl.Seconds]:
    return [now for now, _ in seen]


def numbers(seen: list[tuple[rl.Seconds, rl.Event]]) -> list[float]:
    """Of the heartbeats, in order."""
    return [
        event.message.counters["n"]
        for _, event in seen
        if isinstance(event, rl.Received) and isinstance(event.message, Heartbeat)
    ]


def test_events_wait_for_those_before_them_and_take_their_time() -> None:
    """Drawn:

    time       0   1   2   3
    arrive     S      bb
    handled      S      b b
    """
    seen = handled((1.75, beat(1)), (1.75, beat(2)))
    assert times(seen) == [0.5, 2.25, 2.75]
    assert numbers(seen) == [1, 2]


def test_handling_takes_a_core_from_work() -> None:
    """The work, 1 s, is handed out at 0.5 s; the heartbeat comes at once."""
    seen = handled((0.5, beat(1)), answer=on_start(WORK))
    assert [(now, kind_of(event)) for now, event in seen] == [
        (0.5, "Started"),
        (1.5, "Heartbeat"),
        (2.5, "work-1"),
    ]
    two = handled((0.5, beat(1)), answer=on_start(WORK), cores=2)
    assert times(two) == [0.5, 1.0, 2.0]


def test_an_executor_and_its_process_wake_each_other_and_that_takes_a_while() -> None:
    """The work, 1 s, is handed out at 0.5 s, begins at 0.75 s, and its answer waits."""
    seen = handled(answer=on_start(WORK), wake=0.25)
    assert times(seen) == [0.5, 0.75 + 1.0 + 0.25 + 0.5]
    # Who is awake anyway handles the answer when it comes to that.
    busy = handled((1.5, beat(1)), answer=on_start(WORK), wake=0.25, cores=2)
    assert [(now, kind_of(event)) for now, event in busy[1:]] == [
        (2.0, "Heartbeat"),
        (2.5, "work-1"),
    ]


def test_no_answer_of_an_executor_overtakes_the_one_before_it() -> None:
    """Drawn, the process asleep until 2.5 s but for a heartbeat:

    time       1.0      2.0      2.25     2.5      2.6       3.1      3.6
    executor   work-1   done     next-2 done
    handled               [heartbeat              ]  work-1   next-2

    The process of a replica slept when a torn copy was done, and was woken by a message
    when the step after it was: it took the step for done before the copy, copied again
    in the middle of the first copy, and the forecast of the job ended there.
    """
    short = rl.Compute(name="next-2", work=lambda: None, cost=rl.Cost(flops=0.25))
    seen = handled((2.1, beat(1)), answer=on_start(WORK, short), wake=0.5, cores=3)
    assert [(now, kind_of(event)) for now, event in seen[1:]] == [
        (2.6, "Heartbeat"),
        (3.1, "work-1"),
        (3.6, "next-2"),
    ]


def test_that_something_is_saved_is_no_earlier_reported_than_the_work_before_it() -> None:
    """It was told to a process that slept at once, and work when it had woken up."""
    save = rl.Persist(snapshot=counted(1))  # takes less than 0.5 s
    seen = handled(answer=on_start(WORK, save), wake=0.5)
    assert [kind_of(event) for _, event in seen] == ["Started", "work-1", "Persisted"]


def test_an_executor_does_not_wake_up_in_a_pause_nor_after_death() -> None:
    """Handed out at 0.5 s, it would begin at 0.75 s."""
    pause, kill = Pause(at=0.6, role=A, seconds=2.0), Kill(at=0.6, role=A)
    paused = handled(answer=on_start(WORK), wake=0.25, faults=(pause,))
    assert times(paused) == [0.5, 2.6 + 1.0 + 0.25 + 0.5]
    short = (Pause(at=0.6, role=A, seconds=0.05),)  # it is over before the executor wakes up
    assert times(handled(answer=on_start(WORK), wake=0.25, faults=short)) == [0.5, 2.5]
    killed = handled(answer=on_start(WORK), wake=0.25, faults=(kill,))
    assert times(killed) == [0.5]


def test_a_paused_process_handles_nothing_and_forgets_no_order() -> None:
    events = [(0.75, beat(1)), (1.5, beat(2)), (5.0, beat(3))]
    seen = handled(*events, faults=(Pause(at=1.0, role=A, seconds=2.0),))
    assert numbers(seen) == [1, 2, 3]
    assert times(seen) == [0.5, 3.25, 3.75, 5.5]


def test_an_event_that_comes_to_an_idle_paused_process_waits() -> None:
    seen = handled((1.5, beat(1)), faults=(Pause(at=1.0, role=A, seconds=2.0),))
    assert times(seen) == [0.5, 3.5]


def test_who_is_killed_handles_nothing_more() -> None:
    faults = (Kill(at=2.25, role=A),)
    assert times(handled((1.0, beat(1)), (1.9, beat(2)), faults=faults)) == [0.5, 1.5]
    assert times(handled((1.5, beat(1)), (3.0, beat(2)), faults=faults)) == [0.5, 2.0]


def test_who_halts_handles_nothing_more() -> None:
    def answer(event: rl.Event, now: rl.Seconds) -> list[rl.Action]:
        del now
        return [rl.Exit()] if isinstance(event, rl.Received) else []

    stop = rl.Received(sender=B, incarnation=1, message=Stop(reason="over"))
    assert times(handled((1.0, stop), (1.0, beat(2)), answer=answer)) == [0.5, 1.5]


def test_work_in_vain_costs_nothing() -> None:
    """What part of it there is to do is asked when its turn comes."""
    parts = iter([1.0, 0.5, 0.0])
    work = msgspec.structs.replace(WORK, remaining=lambda: next(parts))
    seen = handled(answer=on_start(work, work, work), cores=2)
    computed = [event.seconds for _, event in seen if isinstance(event, rl.Computed)]
    assert computed == pytest.approx([1.0, 0.5, 0.0])
    assert times(seen) == pytest.approx([0.5, 2.0, 2.5, 3.0])


def test_a_slowed_role_leaves_more_of_the_cores_to_others() -> None:
    """A's second of work takes 4 s of a quarter of a core, B's goes on beside it.

    Both handle their start, half a second, on one core and a quarter: until 0.8 s. In
    the end A handles the answer, half a second as well, at its own pace: in 2 s.
    """
    roles = {name: Scripted(on_start(WORK)) for name in (A, B)}
    options = ClusterOptions(
        machine=replace(STEADY, host="h", event_seconds=0.5),
        processors={"h": Processor(cores=1.25, bytes_per_second=1e9)},
        faults=(Slow(at=0.0, role=A, factor=4.0, seconds=9.0),),
    )
    cluster_of(roles, options=options).run()
    assert times(roles[A].seen) == pytest.approx([0.8, 6.8])
    assert times(roles[B].seen) == pytest.approx([0.8, 2.3])
