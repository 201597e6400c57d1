"""Timers by name."""

import math

from hypothesis import given, strategies as st

from distbelief.transport.node import Timers


def due(timers: Timers, now: float) -> list[str]:
    names = []
    while (name := timers.pop_due(now)) is not None:
        names.append(name)
    return names


def test_timers_come_due_soonest_first_and_once() -> None:
    timers = Timers()
    timers.set("late", 3.0)
    timers.set("soon", 1.0)
    timers.set("also soon", 1.0)
    assert timers.next_at == 1.0
    assert due(timers, 0.9) == []
    assert due(timers, 2.0) == ["soon", "also soon"]
    assert due(timers, 3.0) == ["late"]
    assert due(timers, 9.0) == []
    assert timers.next_at == math.inf


def test_a_watchdog_set_forever_takes_no_memory() -> None:
    timers = Timers()
    timers.set("first", 0.5)
    for moment in range(10_000):
        timers.set("watchdog", 10.0 + moment)
    assert len(timers) == 2
    assert len(timers._heap) < 100
    assert due(timers, 20_000.0) == ["first", "watchdog"]


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"), st.sampled_from(["set", "cancel", "look"]), st.integers(0, 9)
        ),
        max_size=200,
    )
)
def test_timers_do_what_a_dictionary_of_times_would(steps: list[tuple[str, str, int]]) -> None:
    timers, plain = Timers(), dict[str, int]()
    for name, step, at in steps:
        if step == "set":
            timers.set(name, at)
            plain[name] = at
        elif step == "cancel":
            timers.cancel(name)
            plain.pop(name, None)
        else:
            expected = {name for name, time in plain.items() if time <= at}
            assert set(due(timers, at)) == expected
            for name_due in expected:
                del plain[name_due]
        assert timers.next_at == min(plain.values(), default=math.inf)
        assert len(timers) == len(plain)
