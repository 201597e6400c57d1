import math

import msgspec
import pytest
from hypothesis import given, strategies as st

from distbelief.parameter_server.schedules import (
    Constant,
    Cosine,
    Exponential,
    InverseTime,
    Linear,
    Schedule,
    Step,
)


def factors(schedule: Schedule, n_pushes: int) -> list[float]:
    return [schedule.factor(clock) for clock in range(n_pushes)]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        # clock                               0     1     2     3     4     5
        (Constant(),                        [1,    1,    1,    1,    1,    1   ]),
        (Constant(n_warm_up=4),             [0.25, 0.5,  0.75, 1,    1,    1   ]),
        (Step(n_pushes=2, decay=0.5),       [1,    1,    0.5,  0.5,  0.25, 0.25]),
        (Step(n_pushes=2, decay=0.5,
              n_warm_up=2),                 [0.5,  1,    1,    1,    0.5,  0.5 ]),
        (Exponential(n_pushes=1, decay=.5), [1,    0.5, .25,  .125, .0625, .03125]),
        (Exponential(n_pushes=2, decay=.25,
                     n_warm_up=2),          [0.5,  1,    1,    0.5, .25,   .125]),
        (InverseTime(n_pushes=1),           [1,    1/2,  1/3,  1/4,  1/5,  1/6 ]),
        (InverseTime(n_pushes=2,
                     n_warm_up=1),          [1,    1,    2/3,  1/2,  2/5,  1/3 ]),
        (Cosine(n_pushes=4),                [1, .5 + math.sqrt(.125), 0.5,
                                                .5 - math.sqrt(.125), 0,   0   ]),
        (Cosine(n_pushes=2, floor=0.5,
                n_warm_up=2),               [0.5,  1,    1,    0.75, 0.5,  0.5 ]),
        (Linear(n_pushes=4),                [1,    0.75, 0.5,  0.25, 0,    0   ]),
        (Linear(n_pushes=2, floor=0.5,
                n_warm_up=2),               [0.5,  1,    1,    0.75, 0.5,  0.5 ]),
    ],
)  # fmt: skip
def test_factors_are_those_of_the_table(schedule: Schedule, expected: list[float]) -> None:
    assert factors(schedule, 6) == pytest.approx(expected, abs=1e-15)


def schedules() -> st.SearchStrategy[Schedule]:
    warm_up = st.integers(0, 50)
    n_pushes = st.integers(1, 1000)
    decay = st.floats(0.01, 1.0)
    return st.one_of(
        st.builds(Constant, n_warm_up=warm_up),
        st.builds(Step, n_warm_up=warm_up, n_pushes=n_pushes, decay=decay),
        st.builds(Exponential, n_warm_up=warm_up, n_pushes=n_pushes, decay=decay),
        st.builds(InverseTime, n_warm_up=warm_up, n_pushes=n_pushes),
        st.builds(Cosine, n_warm_up=warm_up, n_pushes=n_pushes, floor=st.floats(0.0, 1.0)),
        st.builds(Linear, n_warm_up=warm_up, n_pushes=n_pushes, floor=st.floats(0.0, 1.0)),
    )


@given(schedule=schedules())
def test_a_factor_rises_to_1_in_the_warm_up_and_never_after(schedule: Schedule) -> None:
    n_warm_up = schedule.n_warm_up
    assert isinstance(n_warm_up, int)  # it is text only in a job
    seen = factors(schedule, n_warm_up + 200)
    assert all(0.0 <= factor <= 1.0 for factor in seen)
    assert seen[: n_warm_up + 1] == sorted(seen[: n_warm_up + 1])
    assert seen[n_warm_up] == 1.0
    assert seen[n_warm_up:] == sorted(seen[n_warm_up:], reverse=True)
    assert seen[0] > 0.0


@given(schedule=schedules())
def test_a_schedule_survives_the_job_file(schedule: Schedule) -> None:
    table = msgspec.to_builtins(schedule)
    assert table["name"] == schedule.__struct_config__.tag
    assert msgspec.convert(table, Schedule) == schedule


@pytest.mark.parametrize("clock", [10**9, 10**12])
def test_a_factor_is_finite_at_any_clock(clock: int) -> None:
    for schedule in (
        Step(n_pushes=1, decay=0.5),
        Exponential(n_pushes=1, decay=0.5),
        InverseTime(n_pushes=1),
        Cosine(n_pushes=1, floor=0.25),
    ):
        assert 0.0 <= schedule.factor(clock) <= 0.25


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"name": "cosin", "n_pushes": 1}, r"'cosin' - at `\$.name`"),
        ({"name": "step", "n_pushes": 1}, "missing required field `decay`"),
        ({"name": "cosine", "n_pushes": 1, "flor": 0}, "unknown field `flor`"),
        ({"name": "constant", "n_warm_up": -1}, "n_warm_up is -1; .* 0 or more"),
        ({"name": "inverse_time", "n_pushes": 0}, "n_pushes is 0; .* 1 or more"),
        ({"name": "step", "n_pushes": 1, "decay": 0}, "'step': decay is 0.0; use"),
        ({"name": "step", "n_pushes": 1, "decay": 2}, "'step': decay is 2.0; use"),
        ({"name": "exponential", "n_pushes": 1, "decay": -1}, "decay is -1.0; use"),
        ({"name": "cosine", "n_pushes": 1, "floor": 1.5}, "floor is 1.5; .* 0 to 1"),
        ({"name": "step", "n_pushes": 1, "decay": math.nan}, "decay is nan; use"),
        ({"name": "cosine", "n_pushes": 1, "floor": math.nan}, "floor is nan; use"),
    ],
)
def test_a_wrong_schedule_is_refused_by_name_and_value(
    table: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        msgspec.convert(table, Schedule)
