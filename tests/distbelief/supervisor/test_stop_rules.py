import pytest

from distbelief.config.job import StopTable
from distbelief.supervisor.stop_rules import Reached, StopRules


def rules(table: StopTable, *, has_test: bool = True) -> StopRules:
    return StopRules(table, n_train=1000, has_test=has_test)


@pytest.mark.parametrize(
    ("table", "reached", "reason"),
    [
        (StopTable(epochs=1), Reached(samples=1000, seconds=1), "1 epoch done"),
        (StopTable(epochs=2.5), Reached(samples=2500, seconds=1), "2.5 epochs done"),
        (StopTable(samples=7), Reached(samples=9, seconds=1), "7 samples done"),
        (StopTable(samples=7, epochs=1), Reached(samples=7, seconds=1), "7 samples done"),
        (StopTable(seconds=600), Reached(samples=0, seconds=600), "10 m 00 s of training are over"),
        (
            StopTable(accuracy=0.9),
            Reached(samples=0, seconds=0, metric=0.905),
            "held-out accuracy 90.5 % reached",
        ),
        (
            StopTable(loss=0.5),
            Reached(samples=0, seconds=0, held_out_loss=0.5, loss=9.0),
            "held-out loss 0.50 reached",
        ),
    ],
)
def test_a_rule_that_is_met_ends_the_job(table: StopTable, reached: Reached, reason: str) -> None:
    assert rules(table).reason(reached) == reason


@pytest.mark.parametrize(
    ("table", "reached"),
    [
        (StopTable(epochs=1), Reached(samples=999, seconds=1e9)),
        (StopTable(seconds=10), Reached(samples=10**9, seconds=9.9)),
        (StopTable(accuracy=0.9), Reached(samples=1, seconds=1)),
        (StopTable(accuracy=0.9), Reached(samples=1, seconds=1, metric=0.89)),
        (StopTable(loss=0.5), Reached(samples=1, seconds=1, loss=0.1)),
        (StopTable(loss=0.5), Reached(samples=1, seconds=1, held_out_loss=0.51)),
    ],
)
def test_no_rule_is_met_before_its_time(table: StopTable, reached: Reached) -> None:
    assert rules(table).reason(reached) is None


def test_a_metric_that_is_better_if_lower_ends_the_job_when_it_has_fallen() -> None:
    """A job with metric "mse" ended at its first evaluation, the worst of all."""
    table = StopTable(accuracy=0.5)
    falling = StopRules(table, n_train=9, metric_name="mse", higher_is_better=False)
    assert falling.reason(Reached(samples=1, seconds=1, metric=3.0)) is None
    assert falling.reason(Reached(samples=1, seconds=1, metric=0.4)) is not None


def test_without_held_out_data_loss_means_that_of_training() -> None:
    reached = Reached(samples=1, seconds=1, loss=0.4)
    reason = rules(StopTable(loss=0.5), has_test=False).reason(reached)
    assert reason == "training loss 0.40 reached"


def test_progress_and_the_time_left_are_those_of_the_nearest_rule() -> None:
    both = rules(StopTable(epochs=1, seconds=100))
    early = Reached(samples=100, seconds=50, samples_per_second=10.0)
    assert both.progress(early) == 0.5
    assert both.eta_seconds(early) == 50.0
    late = Reached(samples=900, seconds=50, samples_per_second=10.0)
    assert both.progress(late) == 0.9
    assert both.eta_seconds(late) == 10.0


def test_rules_that_nobody_can_foresee_promise_nothing() -> None:
    reached = Reached(samples=100, seconds=50, samples_per_second=10.0)
    assert rules(StopTable(accuracy=0.9)).progress(reached) is None
    assert rules(StopTable(accuracy=0.9)).eta_seconds(reached) is None
    unknown = Reached(samples=100, seconds=50)
    assert rules(StopTable(epochs=1)).eta_seconds(unknown) is None


def test_an_overrun_is_all_done_and_nothing_left() -> None:
    reached = Reached(samples=1500, seconds=1, samples_per_second=10.0)
    assert rules(StopTable(epochs=1)).progress(reached) == 1.0
    assert rules(StopTable(epochs=1)).eta_seconds(reached) == 0.0
