"""The settings of a replica: when it fetches and pushes; invalid values."""

import math

import pytest

from distbelief.parameter_server.optimizers import InverseTime
from distbelief.worker.config import DownpourConfig


def test_fetches_and_pushes_begin_at_step_0() -> None:
    """DB-6."""
    config = DownpourConfig(batch_size=1, n_fetch=3, n_push=2, max_steps=7)
    assert [s for s in range(8) if config.fetches_at(s)] == [0, 3, 6]
    assert [s for s in range(8) if config.pushes_at(s)] == [0, 2, 4, 6]
    assert [s for s in range(8) if config.is_over_at(s)] == [7]


def test_a_local_step_that_a_fetch_overwrites_is_left_out() -> None:
    """DB-9."""
    config = DownpourConfig(batch_size=1, n_fetch=3, learning_rate=0.5)
    rates = [config.local_rate(step, clock=0) for step in range(6)]
    assert rates == [0.5, 0.5, None, 0.5, 0.5, None]


def test_local_steps_follow_the_schedule() -> None:
    own = DownpourConfig(
        batch_size=1, n_fetch=5, learning_rate=0.5, schedule=InverseTime(n_pushes=10)
    )
    assert own.local_rate(0, clock=0) == 0.5
    assert own.local_rate(0, clock=10) == 0.25
    stated = DownpourConfig(batch_size=1, n_fetch=5, learning_rate=0.5, local_learning_rate=0.1)
    assert stated.local_rate(0, clock=10) == 0.1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batch_size", 0),
        ("n_fetch", 0),
        ("n_push", -1),
        ("max_steps", 0),
        ("max_samples", 0),
        ("clip_norm", 0.0),
        ("clip_norm", math.inf),
        ("progress_seconds", -1.0),
        ("non_finite_limit", 0),
    ],
)
def test_a_bad_value_is_named(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{field} is {value}; use"):
        DownpourConfig(**{"batch_size": 1, field: value})  # type: ignore[arg-type]
