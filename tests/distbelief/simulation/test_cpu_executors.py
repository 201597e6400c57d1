"""Executors: each does one piece of work at a time, at virtual times."""

import pytest

from distbelief.roles.role import (
    Action,
    Compute,
    Computed,
    Cost,
    Event,
    Executor,
    Exit,
    Seconds,
    Started,
)
from distbelief.simulation.cluster import SimulatedCluster
from distbelief.simulation.machines import ClusterOptions, Machine
from tests.distbelief.simulation.toys import STEADY, A, B, Scripted, Summer, cluster_of, on_start


def work(name: str, seconds: float, executor: Executor = Executor.COMPUTE) -> Compute:
    return Compute(name=name, work=lambda: name, cost=Cost(flops=seconds), executor=executor)


def answers(role: Scripted) -> list[tuple[Seconds, str, Seconds]]:
    return [
        (now, event.name, event.seconds) for now, event in role.seen if isinstance(event, Computed)
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
            work("x", 0.5, Executor.DATA),
            work("c", 0.5),
            work("y", 3.0, Executor.DATA),
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

    role = Scripted(on_start(Compute(name="r", work=read, cost=Cost(flops=2.0))))
    other = Scripted(on_start(Compute(name="w", work=write, cost=Cost(flops=1.0))))
    cluster_of({A: role, B: other}).run()
    (answer,) = [event for _, event in role.seen if isinstance(event, Computed)]
    assert answer.result == 7


def test_an_exception_in_work_is_reported_to_the_role() -> None:
    def fail() -> None:
        raise ZeroDivisionError("no samples")

    role = Scripted(on_start(Compute(name="f", work=fail), work("next", 1.0)))
    cluster_of({A: role}).run()
    failed, following = [e for _, e in role.seen if isinstance(e, Computed)]
    assert isinstance(failed.error, ZeroDivisionError)
    assert failed.result is None
    assert following.result == "next"


def test_work_asked_for_in_reply_waits_behind_what_was_asked_before() -> None:
    def answer(event: Event, _: Seconds) -> list[Action]:
        match event:
            case Started():
                return [work("a", 1.0), work("b", 1.0)]
            case Computed(name="a"):
                return [work("c", 1.0)]
            case _:
                return []

    role = Scripted(answer)
    cluster_of({A: role}).run()
    assert [name for _, name, _ in answers(role)] == ["a", "b", "c"]


def test_a_role_that_halts_in_reply_hears_of_no_more_work() -> None:
    def answer(event: Event, _: Seconds) -> list[Action]:
        match event:
            case Started():
                return [work("a", 1.0), work("b", 1.0), work("x", 3.0, Executor.DATA)]
            case _:
                return [Exit()]

    role = Scripted(answer)
    cluster_of({A: role}).run()
    assert [name for _, name, _ in answers(role)] == ["a"]


def test_speeds_of_machines_differ() -> None:
    roles = {A: Scripted(on_start(work("w", 8.0))), B: Scripted(on_start(work("w", 8)))}
    slow = Machine(jitter=0.0, overhead_seconds=0.5, flops_per_second=1.0)
    fast = Machine(jitter=0.0, overhead_seconds=0.5, flops_per_second=4.0)
    options = ClusterOptions(machine=slow, machines={B: fast})
    cluster_of(roles, options=options).run()
    assert [answers(role)[0][0] for role in roles.values()] == [8.5, 2.5]


def test_bytes_cost_time_as_flops_do() -> None:
    cost = Cost(flops=1.0, n_bytes=10.0)
    role = Scripted(on_start(Compute(name="w", work=lambda: None, cost=cost)))
    machine = Machine(jitter=0.0, overhead_seconds=0.0, flops_per_second=1.0, bytes_per_second=5.0)
    cluster_of({A: role}, options=ClusterOptions(machine=machine)).run()
    assert answers(role)[0][0] == 3.0


def test_jitter_lengthens_work_by_no_more_than_it_says() -> None:
    role = Scripted(on_start(*(work("w", 1.0) for _ in range(50))))
    machine = Machine(jitter=0.2, overhead_seconds=0.0, flops_per_second=1.0)
    cluster_of({A: role}, options=ClusterOptions(machine=machine)).run()
    seconds = [taken for _, _, taken in answers(role)]
    assert min(seconds) >= 1.0
    assert max(seconds) <= 1.2
    assert max(seconds) - min(seconds) > 0.1


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Machine(flops_per_second=0.0),
        lambda: Machine(jitter=-0.1),
        lambda: Machine(overhead_seconds=-1.0),
    ],
)
def test_an_impossible_machine_is_refused(wrong: object) -> None:
    assert callable(wrong)
    with pytest.raises(ValueError, match=r"Machine\.\w+ is"):
        wrong()


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
