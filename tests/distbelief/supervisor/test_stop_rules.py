import pytest

from distbelief.config.job import StopTable
from distbelief.supervisor.stop_rules import StopRules
from distbelief.supervisor.view import JobView


def rules(table: StopTable, *, has_test: bool = True) -> StopRules:
    return StopRules(table, n_train=1000, has_test=has_test)


@pytest.mark.parametrize(
    ("table", "view", "reason"),
    [
        (StopTable(epochs=1), JobView(samples=1000, training_seconds=1), "1 epoch done"),
        (StopTable(epochs=2.5), JobView(samples=2500, training_seconds=1), "2.5 epochs done"),
        (StopTable(samples=7), JobView(samples=9, training_seconds=1), "7 samples done"),
        (StopTable(steps=7), JobView(samples=7, training_seconds=1), "7 steps done"),
        (StopTable(samples=7, epochs=1), JobView(samples=7, training_seconds=1), "7 samples done"),
        (
            StopTable(seconds=600),
            JobView(samples=0, training_seconds=600),
            "10 m 00 s of training are over",
        ),
        (
            StopTable(accuracy=0.9),
            JobView(samples=0, training_seconds=0, metric=0.905),
            "held-out accuracy 90.5 % reached",
        ),
        (
            StopTable(loss=0.5),
            JobView(samples=0, training_seconds=0, held_out_loss=0.5, loss=9.0),
            "held-out loss 0.50 reached",
        ),
    ],
)
def test_a_rule_that_is_met_ends_the_job(table: StopTable, view: JobView, reason: str) -> None:
    assert rules(table).reason(view) == reason


@pytest.mark.parametrize(
    ("table", "view"),
    [
        (StopTable(epochs=1), JobView(samples=999, training_seconds=1e9)),
        (StopTable(seconds=10), JobView(samples=10**9, training_seconds=9.9)),
        (StopTable(accuracy=0.9), JobView(samples=1, training_seconds=1)),
        (StopTable(accuracy=0.9), JobView(samples=1, training_seconds=1, metric=0.89)),
        (StopTable(loss=0.5), JobView(samples=1, training_seconds=1, loss=0.1)),
        (StopTable(loss=0.5), JobView(samples=1, training_seconds=1, held_out_loss=0.51)),
    ],
)
def test_no_rule_is_met_before_its_time(table: StopTable, view: JobView) -> None:
    assert rules(table).reason(view) is None


def test_a_metric_that_is_better_if_lower_ends_the_job_when_it_has_fallen() -> None:
    """A job with metric "mse" ended at its first evaluation, the worst of all."""
    table = StopTable(accuracy=0.5)
    falling = StopRules(table, n_train=9, higher_is_better=False)
    assert falling.reason(JobView(samples=1, training_seconds=1, metric=3.0)) is None
    assert falling.reason(JobView(samples=1, training_seconds=1, metric=0.4)) is not None


def test_without_held_out_data_loss_means_that_of_training() -> None:
    view = JobView(samples=1, training_seconds=1, loss=0.4)
    reason = rules(StopTable(loss=0.5), has_test=False).reason(view)
    assert reason == "training loss 0.40 reached"


def test_progress_and_the_time_left_are_those_of_the_nearest_rule() -> None:
    both = rules(StopTable(epochs=1, seconds=100))
    early = JobView(samples=100, training_seconds=50, samples_per_second=10.0)
    assert both.progress(early) == 0.5
    assert both.eta_seconds(early) == 50.0
    late = JobView(samples=900, training_seconds=50, samples_per_second=10.0)
    assert both.progress(late) == 0.9
    assert both.eta_seconds(late) == 10.0


def test_rules_that_nobody_can_foresee_promise_nothing() -> None:
    view = JobView(samples=100, training_seconds=50, samples_per_second=10.0)
    assert rules(StopTable(accuracy=0.9)).progress(view) is None
    assert rules(StopTable(accuracy=0.9)).eta_seconds(view) is None
    unknown = JobView(samples=100, training_seconds=50)
    assert rules(StopTable(epochs=1)).eta_seconds(unknown) is None


def test_an_overrun_is_all_done_and_nothing_left() -> None:
    view = JobView(samples=1500, training_seconds=1, samples_per_second=10.0)
    assert rules(StopTable(epochs=1)).progress(view) == 1.0
    assert rules(StopTable(epochs=1)).eta_seconds(view) == 0.0
