"""When the supervisor asks for an evaluation."""

from distbelief.protocol import EvaluationDone
from distbelief.supervisor.periodic_requests import Evaluations


def asked_at(evaluations: Evaluations, until: float) -> list[float]:
    """Return when it asks, with answers at once."""
    times = []
    evaluations.begin(0.0, 0)
    for tick in range(int(10 * until) + 1):
        asked = evaluations.due(tick / 10, 0)
        if asked is not None:
            times.append(tick / 10)
            done = EvaluationDone(
                request=asked.request, loss=1.0, metric=0.5, n_samples=1, clock=0.0
            )
            assert evaluations.answered(done)
    return times


def test_the_first_comes_early_and_the_time_between_two_doubles() -> None:
    """The curve of a run of half a minute was one stroke between two points."""
    assert asked_at(Evaluations(every=10.0, first=1.0), 45.0) == [
        1.0,
        3.0,
        7.0,
        15.0,
        25.0,
        35.0,
        45.0,
    ]


def test_short_or_given_times_stay_as_they_are() -> None:
    assert asked_at(Evaluations(every=1.0, first=1.0), 4.0) == [1.0, 2.0, 3.0, 4.0]
    assert asked_at(Evaluations(every=4.0), 12.0) == [4.0, 8.0, 12.0]
    assert asked_at(Evaluations(every=10.0, first=1.0, n_samples=50), 45.0) == []
