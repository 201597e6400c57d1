"""Items in the order of their seconds, against sorting all of them."""

from collections.abc import Sequence

import pytest
from hypothesis import given, strategies as st

from sandblaster.coordinator.finish_times import FinishTimes, Line, Slope


SLOPES: Sequence[Slope] = (-1, 0, 1)
EIGHTHS = st.integers(-80, 80).map(lambda n: n / 8)
PUTS = st.tuples(st.integers(1, 300), EIGHTHS, st.sampled_from(SLOPES), st.booleans())


@given(st.lists(PUTS, max_size=40), st.integers(0, 300), EIGHTHS, EIGHTHS)
def test_order_and_sums_are_those_of_sorting_everything(
    puts: list[tuple[int, float, Slope, bool]], n_others: int, now: float, bound: float
) -> None:
    ranked, plain = FinishTimes(), dict[int, tuple[Line, float]]()
    for number in range(1000, 1000 + n_others):  # so that there are many blocks
        line = Line((number * 37 % 101) / 8, SLOPES[number % 3])
        ranked.put(number, line, weight=0.5)
        plain[number] = line, 0.5
    for number, offset, slope, stays in puts:
        if stays:
            ranked.put(number, Line(offset, slope), weight=number / 4)
            plain[number] = Line(offset, slope), number / 4
        else:
            ranked.drop(number)
            plain.pop(number, None)
    for number in range(1000, 1000 + n_others, 2):
        ranked.drop(number)
        del plain[number]
    assert sorted(ranked) == sorted(plain)
    assert len(ranked) == len(plain)
    times = [(line.at(now), number) for number, (line, _) in plain.items()]
    by_time = sorted(times, key=lambda one: (-one[0], one[1]))
    assert list(ranked.longest(now)) == by_time
    few = {number for seconds, number in times if seconds <= bound}
    assert set(ranked.at_most(bound, now)) == few
    less = [pair for pair in plain.values() if pair[0].at(now) < bound]
    n, weight, weighted = ranked.below(bound, now)
    assert n == len(less)
    assert weight == sum(w for _, w in less)
    assert weighted == pytest.approx(sum(line.at(now) * w for line, w in less))


def test_what_takes_longer_is_later_whatever_its_slope() -> None:
    assert Line(1.0, -1).later(2.0) == Line(3.0, -1)
