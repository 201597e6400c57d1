"""[stop] patience: how many evaluations without an improvement end a job."""

import math

import msgspec
import pytest
from hypothesis import given, strategies as st

from distbelief.config.job import StopTable
from distbelief.protocol import EvaluationDone
from distbelief.supervisor.metrics import JobMetrics, PreviousTotals
from distbelief.supervisor.stop_rules import StopRules
from distbelief.supervisor.view import JobView


def metrics(
    before: JobView | None = None, *, higher_is_better: bool = True, min_delta: float = 0.0
) -> JobMetrics:
    return JobMetrics(
        metric_name="accuracy",
        higher_is_better=higher_is_better,
        before=PreviousTotals(view=before or JobView()),
        min_delta=min_delta,
    )


def measured(kept: JobMetrics, *values: float, counts: bool = True) -> JobView:
    for value in values:
        done = EvaluationDone(request=1, loss=1.0, metric=value, n_samples=9, clock=1.0)
        kept.measured(done, 1.0, counts=counts)
    return kept.view(1.0)


def ends_after(values: list[float], *, patience: int, min_delta: float, sign: float) -> int | None:
    """Return the evaluation at which Lightning's EarlyStopping would stop, or None."""
    best, wait = -math.inf, 0
    for number, value in enumerate(values, start=1):
        if sign * value - min_delta > best:
            best, wait = sign * value, 0
        else:
            wait += 1
            if wait >= patience:
                return number
    return None


@given(
    values=st.lists(st.integers(0, 8).map(lambda n: n / 8), max_size=20),
    patience=st.integers(1, 4),
    min_delta=st.sampled_from([0.0, 0.125, 0.25]),
    higher=st.booleans(),
)
def test_patience_ends_a_job_at_the_evaluation_where_lightning_would(
    values: list[float], patience: int, min_delta: float, *, higher: bool
) -> None:
    kept = metrics(higher_is_better=higher, min_delta=min_delta)
    rules = StopRules(StopTable(patience=patience), n_train=9, higher_is_better=higher)
    ended = None
    for number, value in enumerate(values, start=1):
        if rules.reason(measured(kept, value)) is not None:
            ended = number
            break
    sign = 1.0 if higher else -1.0
    assert ended == ends_after(values, patience=patience, min_delta=min_delta, sign=sign)


def test_the_reason_says_what_was_not_beaten() -> None:
    view = measured(metrics(), 0.5, 0.5, 0.25)
    reason = StopRules(StopTable(patience=2), n_train=9).reason(view)
    assert reason == (
        "held-out accuracy has not got better than 50.0 % in 2 evaluations "
        "(a larger patience goes on)"
    )


def test_a_metric_that_is_no_number_is_no_improvement() -> None:
    assert measured(metrics(), math.nan, math.nan).evaluations_without_gain == 2
    view = measured(metrics(), math.nan, 0.5, math.nan)
    assert (view.metric_to_beat, view.evaluations_without_gain) == (0.5, 1)


def test_evaluations_after_the_end_do_not_count() -> None:
    view = measured(metrics(), 0.5, 0.25, counts=False)
    assert (view.best_metric, view.metric_to_beat, view.evaluations_without_gain) == (0.5, None, 0)


def test_a_resumed_run_counts_on() -> None:
    first = measured(metrics(), 0.5, 0.25)
    again = msgspec.json.decode(msgspec.json.encode(first), type=JobView)  # status.json
    assert measured(metrics(again), 0.25).evaluations_without_gain == 2
    assert measured(metrics(again), 0.75).evaluations_without_gain == 0


def test_a_supervisor_that_takes_over_counts_on() -> None:
    successor = metrics()
    successor.adopt(measured(metrics(), 0.5, 0.25), {}, 1.0)
    view = measured(successor, 0.25)
    assert (view.metric_to_beat, view.evaluations_without_gain) == (0.5, 2)


def test_another_metric_is_not_compared_with_the_former_one() -> None:
    """A run resumed with another metric had the best value of the former one under its name."""
    before = JobView(metric_name="mse", metric=9.0, best_metric=9.0, metric_to_beat=9.0)
    view = measured(metrics(before), 0.5)
    assert (view.best_metric, view.metric_to_beat, view.evaluations_without_gain) == (0.5, 0.5, 0)


def test_a_metric_of_other_held_out_data_is_not_to_be_beaten() -> None:
    """An accuracy of 3 samples ended a run that was resumed with 397, after 3 evaluations."""
    before = JobView(metric=1.0, best_metric=1.0, metric_to_beat=1.0, held_out_loss=0.0)
    kept = JobMetrics(
        metric_name="accuracy",
        higher_is_better=True,
        judged_by="397 samples",
        before=PreviousTotals(view=msgspec.structs.replace(before, judged_by="3 samples")),
    )
    assert kept.view(1.0).held_out_loss is None  # [stop] loss would be met at once
    view = measured(kept, 0.5)
    assert (view.best_metric, view.metric_to_beat, view.evaluations_without_gain) == (0.5, 0.5, 0)


def test_a_smallest_improvement_needs_patience() -> None:
    with pytest.raises(Exception, match="add patience = 5, or leave min_delta out"):
        StopTable(min_delta=0.1)


def test_metrics_have_names_and_the_first_decides() -> None:
    kept = JobMetrics(
        metric_name="accuracy",
        others=("f1", "loss"),
        higher_is_better=True,
        before=PreviousTotals(),
    )
    done = EvaluationDone(
        request=1, loss=0.5, metric=0.75, others=(0.25, 0.5), n_samples=9, clock=1.0
    )
    kept.measured(done, 1.0)
    view = kept.view(1.0)
    assert view.metrics == {"accuracy": 0.75, "f1": 0.25, "loss": 0.5}
    assert view.others == {"f1": 0.25}
    assert (view.metric, view.metric_to_beat) == (0.75, 0.75)
