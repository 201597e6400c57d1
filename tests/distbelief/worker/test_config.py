"""The settings of a replica: when it fetches and pushes; invalid values."""

import math

import pytest

from distbelief.parameter_server.optimizers import InverseTime
from distbelief.worker.config import Async, DownpourConfig


def test_fetches_and_pushes_begin_at_step_0() -> None:
    """DB-6."""
    policy = Async(n_fetch=3, n_push=2)
    assert [s for s in range(8) if policy.fetches_before(s)] == [0, 3, 6]
    assert [s for s in range(8) if policy.pushes_after(s)] == [0, 2, 4, 6]


@pytest.mark.parametrize(
    ("policy", "waits", "during_push", "during_other"),
    [
        (Async(), False, True, True),
        (Async(blocking=True), True, False, False),
        (Async(n_push=2), True, False, True),
        (Async(n_fetch=2), True, False, False),
        (Async(n_push=2, overwrite_local_steps=True), False, True, True),
    ],
)
def test_a_fetch_waits_for_pushes_if_it_could_lose_or_repeat_a_step(
    policy: Async, *, waits: bool, during_push: bool, during_other: bool
) -> None:
    """DB-11."""
    assert policy.may_fetch(unacknowledged=0)
    assert policy.may_fetch(unacknowledged=1) is not waits
    assert policy.may_fetch(unacknowledged=0, during=2) is during_push
    assert policy.may_fetch(unacknowledged=0, during=3) is during_other


def test_local_steps_follow_the_schedule() -> None:
    own = DownpourConfig(batch_size=1, learning_rate=0.5, schedule=InverseTime(n_pushes=10))
    assert own.rate(0) == 0.5
    assert own.rate(10) == 0.25
    stated = DownpourConfig(batch_size=1, learning_rate=0.5, local_learning_rate=0.1)
    assert stated.rate(10) == 0.1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batch_size", 0),
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


@pytest.mark.parametrize("field", ["n_fetch", "n_push"])
def test_a_bad_number_of_steps_is_named(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} is 0; use 1 or more"):
        Async(**{field: 0})  # type: ignore[arg-type] # any field
