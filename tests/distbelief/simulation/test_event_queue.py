"""Timers by name: they can be moved and cancelled, and fire once."""

import math

from distbelief.protocol import role as rl
from distbelief.simulation.event_queue import EventQueue
from tests.distbelief.simulation.toys import A, Scripted, cluster_of, from_tester, on_start, push


def fired(*actions: rl.Action) -> list[tuple[rl.Seconds, str]]:
    role = Scripted(on_start(*actions))
    cluster_of({A: role}).run()
    return [(now, e.name) for now, e in role.seen if isinstance(e, rl.TimerFired)]


def test_timers_fire_once_each_in_order_of_time_then_of_setting() -> None:
    assert fired(
        rl.SetTimer(name="c", at=2.0), rl.SetTimer(name="a", at=1.0), rl.SetTimer(name="b", at=1)
    ) == [(1.0, "a"), (1.0, "b"), (2.0, "c")]


def test_a_timer_set_later_fires_later_only() -> None:
    assert fired(rl.SetTimer(name="t", at=1.0), rl.SetTimer(name="t", at=3.0)) == [(3.0, "t")]


def test_a_timer_set_earlier_fires_earlier_only() -> None:
    assert fired(rl.SetTimer(name="t", at=3.0), rl.SetTimer(name="t", at=1.0)) == [(1.0, "t")]


def test_a_timer_moved_to_and_fro_fires_where_it_was_left() -> None:
    times = (5.0, 2.0, 7.0, 1.0, 4.0)
    assert fired(*(rl.SetTimer(name="t", at=at) for at in times)) == [(4.0, "t")]


def test_a_cancelled_timer_does_not_fire_unless_it_is_set_again() -> None:
    assert fired(rl.SetTimer(name="t", at=1.0), rl.CancelTimer(name="t")) == []
    assert fired(
        rl.SetTimer(name="t", at=1.0), rl.CancelTimer(name="t"), rl.SetTimer(name="t", at=2.0)
    ) == [(2.0, "t")]
    assert fired(rl.CancelTimer(name="t")) == []


def test_a_timer_of_the_past_fires_now_and_one_at_infinity_never() -> None:
    assert fired(rl.SetTimer(name="t", at=-1.0)) == [(0.0, "t")]
    assert fired(rl.SetTimer(name="t", at=float("inf"))) == []
    assert fired(rl.SetTimer(name="t", at=1.0), rl.SetTimer(name="t", at=float("inf"))) == []


def test_a_watchdog_reset_a_thousand_times_costs_few_events() -> None:
    def answer(event: rl.Event, now: rl.Seconds) -> list[rl.Action]:
        if isinstance(event, rl.Received):
            return [rl.SetTimer(name="watchdog", at=now + 60)]
        return []

    role = Scripted(answer)
    cluster = cluster_of({A: role})
    cluster.run()
    for n in range(1000):
        cluster.run(until=n * 0.01)
        cluster.post(A, from_tester(push(n)))
    cluster.run(max_events=5)
    assert role.seen[-1] == (9.99 + 60, rl.TimerFired(name="watchdog"))


def test_calls_at_one_time_are_counted_until_the_clock_moves() -> None:
    """The count ends a run in which roles answer each other without end."""
    event_queue = EventQueue()
    for time in (1.0, 1.0, 1.0, 2.0, 2.0):
        event_queue.at(time, lambda: None)
    counts = []
    for _ in range(2):
        event_queue.steps(2, until=math.inf)
        counts.append(event_queue.n_at_once)
    event_queue.steps(1, until=math.inf)
    assert [*counts, event_queue.n_at_once] == [2, 1, 2]
