"""Turns that count, and those that do not."""

import pytest

from experiments.benchmarks.plans.pace import Paces
from experiments.benchmarks.plans.turn import Turn, counting


@pytest.mark.parametrize(
    ("before", "after", "others", "void"),
    [
        (1.0, 1.1, 0.1, False),
        (1.0, 1.4, 0.1, True),
        (1.4, 1.0, 0.1, True),
        (2.0, 2.0, 0.1, False),
        (1.0, 1.0, 0.3, True),
    ],
)
def test_a_turn_does_not_count_if_the_machine_was_another_afterwards(
    *, before: float, after: float, others: float, void: bool
) -> None:
    assert turn_of("any", before=before, after=after, others=others).is_void == void


def turn_of(plan: str, *, before: float, after: float, others: float) -> Turn:
    return Turn(
        plan=plan,
        seconds=1.0,
        cpu_seconds=1.0,
        others=others,
        before=paces(before),
        after=paces(after),
    )


def paces(seconds: float) -> Paces:
    pace = {"layer": (0.4 * seconds, 0.6 * seconds)}
    return Paces(alone=pace, together=pace)


def test_a_plan_of_which_no_turn_counts_is_not_left_out() -> None:
    a, b = (turn_of(plan, before=1.0, after=1.0, others=0.5) for plan in "ab")
    good = turn_of("a", before=1.0, after=1.0, others=0.0)
    assert counting([a, b, good]) == [b, good]
